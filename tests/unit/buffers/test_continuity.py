"""Buffers with windows look at their first rows: what users get wrong is told once, and right usage says nothing."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import (
    Episodes,
    FrameStack,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    TensorStorage,
)
from ostinato.errors import EpisodesWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 25
"""Steps after which an episode is truncated."""


def program(steps: int, envs: int, *, limits: bool = True, noise: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield what a vector environment gives in each step, with the final observations: rows `[envs]`."""
    rng = np.random.default_rng(0)
    obs, no = rng.random((envs, 3), dtype=np.float32), np.zeros(envs, bool)
    for step in range(1, steps + 1):
        after = obs + rng.random((envs, 3), dtype=np.float32)
        cut = step % LIMIT == 0
        shown = obs + noise * rng.random((envs, 3), dtype=np.float32)
        row = {"obs": shown, "next_obs": after, "reward": np.ones(envs, np.float32), "terminated": no}
        yield {**row, "truncated": no | cut} if limits else row
        obs = rng.random((envs, 3), dtype=np.float32) if cut else after


def grid(steps: int, envs: int, **options: Any) -> dict[str, torch.Tensor]:
    """Return the rows of a program `[envs, steps]`."""
    rows = list(program(steps, envs, **options))
    return {key: torch.from_numpy(np.stack([row[key] for row in rows], 1)) for key in rows[0]}


def buffer(capacity: int = 5000, ndim: int = 1, **options: Any) -> ReplayBuffer:
    options = {"sample_unit": NStep(3, 0.9), "batch_size": 8, **options}
    return ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim, **options.pop("storage", {})), **options)


def told(rb: ReplayBuffer, rows: Any, *, add: bool = False, sample: bool = True) -> list[str]:
    """Write rows and sample; return what was said about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row in rows:
            (rb.add if add else rb.extend)(row)
        for _ in range(2 * sample):
            rb.sample()
    found = [one for one in caught if "single_copy saves little" not in str(one.message)]
    assert all((one.filename, one.category) == (__file__, EpisodesWarning) for one in found)
    return [str(one.message) for one in found]


PARTS: dict[str, Any] = {
    "n-step": {},
    "slices": {"sample_unit": None, "sampler": SliceSampler(slice_len=4)},
    "sequences": {"sample_unit": SequenceUnit(4)},
    "frames": {"sample_unit": FrameStack(2, ["obs"])},
    "single copy": {"storage": {"single_copy": True}},
}


@pytest.mark.parametrize("parts", PARTS)
def test_faults_are_told_once_and_right_usage_says_nothing(parts):
    options = PARTS[parts]
    (said,) = told(buffer(**options), program(50, 4))
    for words in ("in 63 of 63 pairs", "several environments", "ndim=2", "VectorEnvRecorder", "traj_key", "silences"):
        assert words in said
    (said,) = told(buffer(**options), program(100, 1, limits=False))
    for words in ("in 2 of 63 pairs", "end at 'terminated'", "(rows 24 and 25", "'truncated'", "VectorEnvRecorder"):
        assert words in said
    assert told(buffer(130, **options), program(600, 1)) == []  # the ring wraps
    assert told(buffer(ndim=2, **options), program(100, 4), add=True) == []
    assert told(buffer(ndim=2, **options), [grid(100, 4)]) == []


def test_what_is_no_fault_of_windows_says_nothing():
    assert told(buffer(sample_unit=None), program(100, 4)) == [], "single rows"
    assert told(buffer(sample_unit=SequenceUnit(4, done_key=None)), program(100, 1, limits=False)) == [], "on purpose"
    assert told(buffer(), program(200, 1, noise=0.02)) == [], "normalized or noisy"
    numbered = [{**row, "env": np.arange(4)} for row in program(100, 4)]
    assert told(buffer(episodes=Episodes(traj_key="env", end_key=["terminated", "truncated"])), numbered) == []
    for unit in (NStep(1, 0.9), FrameStack(1, ["obs"]), SequenceUnit(1)):
        assert told(buffer(sample_unit=unit), program(100, 4)) == [], "windows of one row"
    rb = buffer(1000)
    rb.extend({key: value[0] for key, value in grid(50, 1).items()})
    rb[10:20] = {key: value.flip(0) for key, value in rb[10:20].items()}
    assert told(rb, program(100, 4)) == [], "edited"


def test_rows_present_are_looked_at_before_the_first_draw():
    in_turn = {key: value.transpose(0, 1).flatten(0, 1) for key, value in grid(100, 4).items()}
    rb = ReplayBuffer(storage=TensorStorage(in_turn), sample_unit=NStep(3, 0.9), batch_size=8)
    assert len(told(rb, [])) == 1
    whole = buffer(sample_unit=None)
    whole.extend(in_turn)
    assert len(told(whole.view(sampler=SliceSampler(slice_len=4), batch_size=8), [])) == 1


def test_as_an_error_it_comes_before_anything_is_written():
    rb, rows = buffer(), list(program(17, 4))
    for row in rows[:-1]:
        rb.extend(row)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(EpisodesWarning):
            rb.extend(rows[-1])
    assert len(rb) == 64
    rb.extend(rows[-1])
    assert len(rb) == 68


# -- the order of dimensions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sample_unit": None}, {"storage": {"single_copy": True}}], ids=str)
def test_a_rollout_with_time_first_is_told_once(options):
    rows = grid(100, 4)
    turned = {key: value.transpose(0, 1) for key, value in rows.items()}
    (said,) = told(buffer(ndim=2, **options), [turned])
    for words in ("stored as 100 environment(s)", "[environments, time]", "dim_extend=0"):
        assert words in said
    assert told(buffer(ndim=2, dim_extend=0, **options), [turned]) == []
    assert len(told(buffer(ndim=2, dim_extend=0, **options), [rows])) == 1


def test_numbers_and_flags_tell_the_order():
    time = torch.arange(30).expand(4, 30)
    rows = {"reward": torch.rand(4, 30), "truncated": time % 10 == 9}
    for more in ({"step": time}, {"env": torch.arange(4)[:, None].expand(4, 30)}, {}):
        given = {**rows, **more}
        turned = {key: value.t() for key, value in given.items()}
        assert [len(told(buffer(sample_unit=None, ndim=2), [each])) for each in (given, turned)] == [0, 1]
