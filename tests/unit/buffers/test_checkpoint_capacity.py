"""Checkpoints of full rings loaded into buffers of another capacity: rows come by age, and nothing crosses the seam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    LimitedSampler,
    NStep,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    Sampler,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    Storage,
)
from ostinato.core.records import Draw, View
from ostinato.core.rows import turn_rows
from ostinato.errors import CheckpointError, OptionError

from ...effort import examples
from ...sharing import AVAILABLE
from ...tags import STORAGES, fill, read_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def moved(rb: ReplayBuffer, other: ReplayBuffer, way: str, path: Path) -> ReplayBuffer:
    """Load one buffer's checkpoint into another."""
    if way == "state":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(path)
        other.loads(path, verify=way == "disk")
    return other


def transitions(first: int, count: int) -> dict[str, torch.Tensor]:
    t = torch.arange(float(first), float(first + count))
    return {"obs": t, "next_obs": t + 1, "reward": torch.ones(count), "done": torch.zeros(count, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("unit", "single_copy", "way"),
    [
        ("nstep", False, "state"),
        ("nstep", True, "disk"),
        ("sequence", True, "unverified"),
        ("frames", False, "disk"),
        ("slices", True, "state"),
        ("slices", False, "unverified"),
    ],
)
def test_no_window_leads_from_the_newest_row_to_the_oldest(
    unit: str, single_copy: bool, way: str, tmp_path: Path
) -> None:
    units: dict[str, Any] = {
        "nstep": NStep(3, 1.0),
        "sequence": SequenceUnit(3, "strict", "done"),
        "frames": FrameStack(3, ["obs"]),
        "slices": None,
    }

    def make(size: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(size, single_copy=single_copy and {"next_obs": "obs"}),
            sampler=SliceSampler(slice_len=3, end_key="done") if unit == "slices" else None,
            sample_unit=units[unit],
            batch_size=60,
        )

    rb = make(5)
    rb.extend(transitions(0, 7))
    other = moved(rb, make(8), way, tmp_path / "save")
    for _ in range(3):
        x = other.sample()
        if unit == "nstep":
            assert torch.equal(x["next_obs"], x["obs"] + x["steps_to_next_obs"])
        elif unit == "frames":
            assert bool((x["obs"].diff(dim=-1) <= 1).all() & (x["obs"].diff(dim=-1) >= 0).all())
        else:
            assert bool((x["obs"].reshape(-1, 3).diff() == 1).all())
        other.extend(transitions(int(other[:]["obs"].max()) + 1, 2))


@pytest.mark.parametrize("storage", list(STORAGES))
def test_rows_come_by_age_and_writers_replace_the_oldest(storage: str, tmp_path: Path) -> None:
    for count, then, way in ((7, 10, "state"), (9, 8, "disk"), (13, 30, "unverified"), (9, 10, "state")):
        rb = ReplayBuffer(storage=STORAGES[storage](7), batch_size=3)
        fill(rb, range(count))
        other = moved(rb, ReplayBuffer(storage=STORAGES[storage](then), batch_size=3), way, tmp_path / "save")
        assert read_ids(other[:]) == list(range(count - 7, count))
        assert other.stats().row_age_max == 6
        for new in range(count, count + then):
            fill(other, [new])
            expected = list(range(count - 7, new + 1))[-then:]
            assert sorted(read_ids(other[:])) == expected
            assert other.stats().row_age_max == len(expected) - 1


@examples(0.5)
@given(
    lanes=st.integers(1, 3),
    old=st.integers(2, 6),
    written=st.integers(1, 15),
    new=st.integers(2, 12),
    packed=st.booleans(),
    way=st.sampled_from(["state", "own state"]),
)
def test_lanes_keep_their_steps(lanes: int, old: int, written: int, new: int, packed: bool, way: str) -> None:
    def make(steps: int) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(steps * lanes, ndim=2, packed=packed), batch_size=4)

    def steps(first: int, count: int) -> dict[str, torch.Tensor]:
        t = torch.arange(first, first + count)
        return {"t": t[None].expand(lanes, count).clone(), "lane": torch.arange(lanes)[:, None].expand(lanes, count)}

    rb = make(old)
    for t in range(written):
        rb.extend(steps(t, 1))
    present = min(old, written)
    other = make(new)
    if present > new:
        with pytest.raises(CheckpointError, match="room"):
            other.load_state_dict(rb.state_dict())
        return
    if way == "state":
        other.load_state_dict(rb.state_dict())
    else:
        other.storage.load_state_dict(rb.storage.state_dict())
        other = ReplayBuffer(storage=other.storage, batch_size=4)
    for t in range(written, written + 2 * new):
        other.extend(steps(t, 1))
        held = other[:]["t"]
        expected = list(range(written - present, t + 1))[-new:]
        for lane in range(lanes):
            assert sorted(held[lane].tolist()) == expected


SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "random": lambda _: RandomSampler(),
    "passes": lambda _: SamplerWithoutReplacement(),
    "slots": lambda _: SamplerWithoutReplacement(shuffle=False),
    "endless": lambda _: SamplerWithoutReplacement(endless=True),
    "queue": lambda _: QueueSampler(),
    "limited": lambda _: LimitedSampler(2),
    "prioritized": lambda size: PrioritizedSampler(size, 1.0, 0.4),
}


def pair(sampler: str, count: int, path: Path) -> tuple[ReplayBuffer, ReplayBuffer, list[int], list[int]]:
    """Return a buffer of 7, one of 9 that loaded its checkpoint, the rows drawn before, and the rows present by age."""

    def make(size: int) -> ReplayBuffer:
        generator = torch.Generator().manual_seed(5)
        return ReplayBuffer(
            storage=LazyTensorStorage(size), sampler=SAMPLERS[sampler](size), batch_size=2, generator=generator
        )

    rb, drawn = make(7), []
    for row in range(count):
        rb.extend({"id": torch.tensor([row])})
        if sampler == "queue" and len(rb) >= 2 and row % 2:
            rb.sample()
    if sampler == "prioritized":
        rb.update_priority(torch.arange(len(rb)), (rb[:]["id"] + 1).float())
    if sampler != "queue":
        drawn = rb.sample()["id"].tolist()
    other = moved(rb, make(9), "disk", path)
    assert other.stats().row_age_max == len(rb) - 1
    return rb, other, drawn, list(range(count - len(rb), count))


COUNTS = pytest.mark.parametrize("count", [7, 12])


@pytest.mark.parametrize(
    ("sampler", "count"), [("random", 9), ("passes", 6), ("passes", 9), ("slots", 9), ("endless", 12)]
)
def test_uniform_samplers_draw_every_row(sampler: str, count: int, tmp_path: Path) -> None:
    _, other, drawn, present = pair(sampler, count, tmp_path / "save")
    seen = [i for _ in range(60) for i in other.sample()["id"].tolist()]
    assert set(seen) == set(present)
    if sampler in {"passes", "endless"}:
        assert sorted([*drawn, *seen[: len(present) - 2]]) == present


@COUNTS
def test_a_queue_hands_every_row_over_once(count: int, tmp_path: Path) -> None:
    rb, other, *_ = pair("queue", count, tmp_path / "save")
    for new in range(count, count + 12):
        left = [mine.sampler.rows_left for mine in (rb, other)]  # type: ignore[attr-defined]
        assert left[0] == left[1]
        if left[0] >= 2:
            assert rb.sample()["id"].tolist() == other.sample()["id"].tolist()
        for mine in (rb, other):
            mine.extend({"id": torch.tensor([new])})


@COUNTS
def test_rows_that_retire_are_drawn_as_often_as_they_are_good_for(count: int, tmp_path: Path) -> None:
    _, other, drawn, present = pair("limited", count, tmp_path / "save")
    left = [i for _ in range(len(present) - 1) for i in other.sample()["id"].tolist()]
    assert sorted(left + drawn) == sorted(2 * present)


@COUNTS
def test_priorities_stay_with_their_rows(count: int, tmp_path: Path) -> None:
    _, other, *_ = pair("prioritized", count, tmp_path / "save")
    state = other.state_dict()["sampler"]["state"]
    assert torch.equal(state["priorities"], (other[:]["id"] + 1).double())
    other.extend({"id": torch.arange(100, 120)})
    assert set(other.sample()["id"].tolist()) <= set(range(100, 120))


def test_queued_draws_keep_their_rows() -> None:
    def make(size: int) -> ReplayBuffer:
        generator = torch.Generator().manual_seed(1)
        return ReplayBuffer(storage=LazyTensorStorage(size), batch_size=4, generator=generator, prefetch=3)

    rb = make(7)
    fill(rb, range(11))
    rb.sample()
    other = make(16)
    other.load_state_dict(rb.state_dict())
    for _ in range(3):
        assert read_ids(other.sample()) == read_ids(rb.sample())


def test_members_of_ensembles() -> None:
    def make(size: int) -> ReplayBufferEnsemble:
        members = [ReplayBuffer(storage=LazyTensorStorage(n), sample_unit=NStep(3, 1.0)) for n in (size, 6)]
        generator = torch.Generator().manual_seed(1)
        return ReplayBufferEnsemble(*members, batch_size=20, generator=generator, prefetch=2)

    both = make(5)
    for rb in both.members:
        rb.extend(transitions(0, 8))
    both.sample()
    other = make(9)
    other.load_state_dict(both.state_dict())
    for _ in range(2):
        one, two = both.sample(), other.sample()
        assert torch.equal(one["obs"], two["obs"])
    for _ in range(4):
        x = other.sample()
        assert torch.equal(x["next_obs"], x["obs"] + x["steps_to_next_obs"])


@pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")
def test_shared_buffers_take_rows_by_age() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=4)
    rb.extend({"x": torch.arange(7)})
    other = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4, shared=True)
    other.load_state_dict(rb.state_dict())
    assert other[:]["x"].tolist() == [2, 3, 4, 5, 6]
    other.extend({"x": torch.arange(7, 13)})
    assert sorted(other[:]["x"].tolist()) == list(range(4, 13))


def test_a_ring_that_would_have_to_be_moved_is_not_mapped(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=4)
    rb.extend({"x": torch.arange(7)})
    rb.dumps(tmp_path / "save")
    other = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    other.extend({"x": torch.arange(2)})
    with pytest.raises(OptionError, match="max_size=5"):
        other.loads(tmp_path / "save", mmap=True)
    assert other[:]["x"].tolist() == [0, 1]
    for size in (5, 9):
        other = ReplayBuffer(storage=LazyTensorStorage(size), batch_size=4)
        other.loads(tmp_path / "save", mmap=size == 5)
        assert sorted(other[:]["x"].tolist()) == [2, 3, 4, 5, 6]


def test_writers_without_an_order_keep_their_slots() -> None:
    writer = ReservoirWriter(generator=torch.Generator().manual_seed(0))
    rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=writer, batch_size=4)
    for i in range(40):
        rb.extend({"x": torch.tensor([i])})
    other = ReplayBuffer(storage=LazyTensorStorage(9), writer=ReservoirWriter(), batch_size=4)
    other.load_state_dict(rb.state_dict())
    assert torch.equal(other[:]["x"], rb[:]["x"])


class Own(Sampler):
    """A sampler with a state that names slots."""

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size,), generator=generator))

    def state_dict(self) -> dict[str, Any]:
        return {"slots": torch.arange(3)}


def test_a_sampler_that_cannot_follow_raises_and_nothing_changes() -> None:
    rb, same, other = (ReplayBuffer(storage=LazyTensorStorage(size), sampler=Own(), batch_size=4) for size in (5, 5, 9))
    rb.extend({"x": torch.arange(7)})
    same.load_state_dict(rb.state_dict())
    with pytest.raises(CheckpointError, match="turn_state"):
        other.load_state_dict(rb.state_dict())
    assert len(other) == 0


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_late_fields_and_edits_move_with_their_rows(kind: Callable[[int], Storage], tmp_path: Path) -> None:
    rb, other = (ReplayBuffer(storage=kind(size), batch_size=4) for size in (6, 10))
    rb.extend({"x": torch.arange(8)})
    rb[:] = {"x": rb[:]["x"].clone(), "late": rb[:]["x"] * 10}
    rb[2] = {"x": torch.tensor(2), "late": torch.tensor(20)}
    moved(rb, other, "disk", tmp_path / "save")
    assert other[:]["x"].tolist() == [2, 3, 4, 5, 6, 7]
    assert other[:]["late"].tolist() == [20, 30, 40, 50, 60, 70]
    assert other.stats().row_age_max == rb.stats().row_age_max


@examples(0.5)
@given(n=st.integers(1, 40), data=st.data())
def test_rows_turn_in_place(n: int, data: st.DataObject) -> None:
    seam = data.draw(st.integers(0, n - 1))
    rows = torch.arange(n * 3).view(n, 3).to(torch.uint16)
    expected = torch.cat((rows.view(torch.int16)[seam:], rows.view(torch.int16)[:seam]))
    turn_rows(rows, seam)
    assert torch.equal(rows.view(torch.int16), expected)
