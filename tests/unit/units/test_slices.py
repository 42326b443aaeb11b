"""Slice samplers: episodes, flags, options, passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.errors import EmptyBufferError, OptionError

from ...episodes import Log, batch_of
from ...windows import check_slices
from .rings import ENDS, buffer, slices, written

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("seed", range(3))
def test_a_slice_has_one_episode_and_consecutive_steps(seed: int) -> None:
    log = Log(40, longest=9, seed=seed)
    rb = written(log, buffer(40, sampler=slices()), 35, 30, 17)
    for _ in range(20):
        batch, info = rb.sample(return_info=True)
        check_slices(log, batch, info, length=3)
        assert (batch["episode"].view(-1, 3) == batch["episode"].view(-1, 3)[:, :1]).all()
        assert (batch["t"].view(-1, 3).diff() == 1).all()


def test_the_last_step_of_every_episode_is_drawn() -> None:
    log = Log(60, longest=8, seed=1)
    rb = written(log, buffer(60, 60, sampler=slices(2)), 60)
    seen = {slot for _ in range(60) for slot in rb.sample(return_info=True)[1]["index"].tolist()}
    assert seen == {slot for slots, _ in log.episodes() if len(slots) > 1 for slot in slots}


def test_flags_in_slices_are_those_stored() -> None:
    log = Log(50, longest=5, seed=2)
    rb = written(log, buffer(50, sampler=slices(2)), 50)
    present = log.present()
    for _ in range(10):
        batch, info = rb.sample(return_info=True)
        rows = [present[slot] for slot in info["index"].tolist()]
        for flag in ("terminated", "truncated", "done"):
            assert batch["next"][flag].tolist() == [getattr(row, flag) for row in rows]
        assert info["next", "terminated"].tolist() == [row.terminated for row in rows]


def test_every_option_of_a_slice_changes_something_or_raises() -> None:
    log = Log(40, longest=4, seed=9)
    rows = batch_of([*log.play(40)])
    rows["is_init"] = rows["t"] == 0

    def sample(**options: Any) -> tuple[Any, ...]:
        rb = buffer(40, sampler=SliceSampler(**{"slice_len": 3, "end_keys": ENDS, **options}))
        rb.extend(rows)
        batch, info = rb.sample(return_info=True)
        return batch["id"].tolist(), sorted(map(str, info)), [value.tolist() for value in info.values()]

    plain = sample()
    changes: list[dict[str, Any]] = [
        {"slice_len": 2},
        {"slice_len": None, "num_slices": 3},
        {"end_keys": None, "end_key": ("next", "terminated")},
        {"end_keys": None, "traj_key": "id", "strict_length": False},
        {"truncated_key": None},
        {"truncated_key": "truncated"},
        {"init_key": None},
        {"strict_length": False},
        {"strict_length": False, "pad_output": True},
        {"span": True},
        {"span": (False, 1)},
        {"replacement": False},
    ]
    for change in changes:
        assert sample(**change) != plain, change
    for without_effect in ({"compile": True}, {"compile": {"mode": "default"}}, {"use_gpu": True}):
        assert sample(**without_effect) == plain, without_effect
    for refused in ({"end_key": "done"}, {"ends": torch.zeros(40)}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            SliceSampler(slice_len=3, end_keys=ENDS, **refused)


def test_passes_over_episodes_stay_whole_with_prefetch() -> None:
    log = Log(60, longest=6, seed=4)
    log.play(60)
    for prefetch in range(5):
        sampler = SliceSamplerWithoutReplacement(slice_len=2, end_keys=ENDS)
        rb = buffer(60, 6, sampler=sampler, prefetch=prefetch)
        rb.extend(batch_of(log.rows))
        want = sorted(log.rows[slots[0]].episode for slots, _ in log.episodes() if len(slots) > 1)
        for _ in range(2):
            drawn = [number for batch in rb for number in batch["episode"].view(-1, 2)[:, 0].tolist()]
            assert sorted(drawn) == want


def test_another_slice_length_begins_another_pass() -> None:
    log = Log(60, longest=6, seed=2)
    rb = written(log, buffer(60, 4, sampler=SliceSamplerWithoutReplacement(num_slices=2, end_keys=ENDS)), 60)
    check_slices(log, *rb.sample(4, return_info=True), length=2)
    check_slices(log, *rb.sample(10, return_info=True), length=5)
    with pytest.raises(EmptyBufferError, match="has the 9 rows of a slice"):
        rb.sample(18)


def test_end_keys_of_a_slice_sampler_are_binding() -> None:
    sampler = SliceSampler(slice_len=4, end_keys=["lap"])
    with pytest.raises(OptionError, match="one kind of episodes"):
        ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, episodes=Episodes("done"))
