"""Options of slices, and slices of trajectories whose rows have step numbers: `SliceSampler(fragmented=True)`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ostinato import Episodes, LazyTensorStorage, ReplayBuffer, SliceSampler
from ostinato.errors import KeyMissingError, OptionError

from ...episodes import Log, batch_of
from .rings import ENDS, buffer


def make(capacity: int, **options: Any) -> ReplayBuffer:
    """A buffer of slices of 3 rows."""
    settings: dict[str, Any] = {"slice_len": 3, "traj_key": "traj", "step_key": "step", "fragmented": True, **options}
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=SliceSampler(**settings),
        batch_size=6,
        generator=torch.Generator().manual_seed(0),
    )


def play(seed: int, rows: int) -> list[tuple[int, int]]:
    """Trajectory and step of rows that several workers write in turns; some steps are lost, some ids begin again."""
    rng = random.Random(seed)
    steps = dict.fromkeys(range(4), 0)
    out = []
    for _ in range(rows):
        traj = rng.randrange(4)
        chance = rng.random()
        steps[traj] = 0 if chance < 0.05 else steps[traj] + (2 if chance < 0.15 else 1)
        out.append((traj, steps[traj]))
    return out


def runs(rows: list[tuple[int, int]]) -> list[list[int]]:
    """Positions of the rows of each run of consecutive steps, by a plain scan."""
    found: list[list[int]] = []
    last: dict[int, tuple[int, list[int]]] = {}
    for position, (traj, step) in enumerate(rows):
        before = last.get(traj)
        if before is None or before[0] + 1 != step:
            before = (0, [])
            found.append(before[1])
        before[1].append(position)
        last[traj] = (step, before[1])
    return found


def batch(rows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    traj, step = (torch.tensor(values) for values in zip(*rows, strict=True))
    return {"traj": traj, "step": step}


@pytest.mark.parametrize(("seed", "one_by_one"), [(0, False), (1, True), (2, False)])
def test_slices_are_those_of_a_plain_scan(seed, one_by_one):
    rb, rows = make(40), play(seed, 100)
    for start in range(0, 100, 10):
        part = rows[start : start + 10]
        if one_by_one:
            for row in part:
                rb.add({name: value[0] for name, value in batch([row]).items()})
        else:
            rb.extend(batch(part))
        if start == 50:
            state, rb = rb.state_dict(), make(40)
            rb.load_state_dict(state)
        present = range(max(0, start + 10 - 40), start + 10)
        pieces = [[i for i in run if i in present] for run in runs(rows[: start + 10])]
        allowed = {tuple(run[k : k + 3]) for run in pieces for k in range(len(run) - 2)}
        if not allowed:
            continue
        age = (rb.cursor - 1 - rb.sample(12_000, return_info=True)[1]["index"]) % 40
        assert {tuple(piece) for piece in (start + 9 - age).view(-1, 3).tolist()} == allowed


def drawn(rb: ReplayBuffer, length: int = 2) -> set[tuple[int, ...]]:
    return {*map(tuple, rb.sample(300)["step"].view(-1, length).tolist())}


def test_a_missing_step_divides_if_asked_for_and_so_does_an_edit():
    rows = batch([(0, 0), (0, 1), (0, 5), (0, 6)])
    plain, divided = make(4, fragmented=False), make(4, slice_len=2)
    plain.extend(rows)
    divided.extend(rows)
    assert drawn(plain, 3) == {(0, 1, 5), (1, 5, 6)}
    assert drawn(divided) == {(0, 1), (5, 6)}
    divided[1:2] = {"traj": torch.tensor([0]), "step": torch.tensor([9])}
    assert drawn(divided) == {(5, 6)}
    divided.empty()
    divided.extend(batch([(0, 4), (0, 5)]))
    assert drawn(divided) == {(4, 5)}


def test_options_without_steps_are_refused():
    bad: list[Any] = [
        ({"step_key": None}, "step_key must be provided when fragmented=True"),
        ({"ends": torch.ones(3), "cache_values": True}, "not supported with it"),
        ({"trajectories": torch.ones(3)}, "not supported with it"),
    ]
    for options, match in bad:
        with pytest.raises(OptionError, match=match):
            SliceSampler(slice_len=2, fragmented=True, **options)
    with pytest.raises(OptionError, match="step_key='step' divides trajectories: give traj_key"):
        Episodes(step_key="step")
    with pytest.raises(KeyMissingError, match="no field 'step' "):
        make(4).extend({"traj": torch.zeros(2, dtype=torch.int64)})


def test_every_option_of_a_slice_changes_something_or_raises():
    log = Log(40, longest=4, seed=9)
    rows = batch_of([*log.play(40)])
    rows["is_init"] = rows["t"] == 0

    def sample(**options: Any) -> tuple[Any, ...]:
        rb = buffer(40, sampler=SliceSampler(**{"slice_len": 3, "end_keys": ENDS, **options}))
        rb.extend(rows)
        batch, info = rb.sample(return_info=True)
        return batch["id"].tolist(), sorted(map(str, info)), [value.tolist() for value in info.values()]

    plain = sample()
    changes: list[Any] = [
        {"end_keys": None, "end_key": ("next", "terminated")},
        {"end_keys": None, "traj_key": "id", "strict_length": False},
        {"truncated_key": None},
        {"truncated_key": "truncated"},
        {"init_key": None},
        {"replacement": False},
    ]
    for change in changes:
        assert sample(**change) != plain, change
    for without_effect in ({"compile": True}, {"use_gpu": True}):
        assert sample(**without_effect) == plain, without_effect
    for refused in ({"end_key": "done"}, {"ends": torch.zeros(40)}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            SliceSampler(slice_len=3, end_keys=ENDS, **refused)
