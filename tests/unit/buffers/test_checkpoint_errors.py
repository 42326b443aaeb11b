"""Checkpoints that do not fit or are damaged: the load raises and the buffer stays as it was."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from ostinato.buffers.checkpoint import state as checkpoint
from ostinato.buffers.reader import Reader
from ostinato.core.records import Run
from ostinato.errors import CheckpointError, StorageMemoryError
from ostinato.transforms import Compose

from ...registry import CAPACITY, registered, ring, seeded
from ...tags import buffer, fill, same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable


def used(kind: str, start: int = 0) -> ReplayBuffer:
    """Return a buffer of the registry that was filled beyond its capacity and learned from."""
    contract = registered(kind)
    rb: ReplayBuffer = contract.make(CAPACITY)
    for first in range(start, start + CAPACITY + 6, 6):
        contract.extend(rb, 6, first)
        contract.use(rb)
    return rb


def test_saves_of_other_parts_are_refused_by_name(tmp_path):
    def whole(storage: str, sampler: Any = None, writer: Any = None) -> ReplayBuffer:
        return buffer(storage, 7, sampler=sampler, writer=writer)

    rb, passes, other_rows = whole("packed"), whole("packed", SamplerWithoutReplacement()), whole("packed")
    fill(rb, range(5), "tensordict")
    rb.dumps(tmp_path / "save")
    fill(passes, range(5))
    passes.dumps(tmp_path / "passes")
    fill(other_rows, range(3), "tuple")
    for path, other, message in (
        ("save", passes, "is a RandomSampler, this buffer's a SamplerWithoutReplacement"),
        ("save", whole("packed", writer=TensorDictMaxValueWriter("id")), "writer is a RoundRobinWriter"),
        ("save", whole("list"), r"ListStorage loads states of the form 'objects', got 'tensors'"),
        ("save", buffer(LazyTensorStorage(10, ndim=2)), "ndim=1.*ndim=2"),
        ("save", other_rows, "holds.*the storage"),
        ("passes", whole("packed", SamplerWithoutReplacement(shuffle=False)), "shuffle=True"),
    ):
        before = snapshot(other)
        with pytest.raises(CheckpointError, match=message):
            other.loads(tmp_path / path)
        same_state(snapshot(other), before)


def stays(rb: ReplayBuffer, load: Callable[[], object], error: type[BaseException]) -> None:
    """Let a load fail, and compare everything before and after it."""
    before = snapshot(rb)
    with pytest.raises(error):
        load()
    same_state(snapshot(rb), before)


STEPS: list[Any] = [
    (Compose, "load_state_dict"),
    (checkpoint._Load, "parts"),
    (checkpoint._Load, "_ring"),
    (Reader, "resumed"),
    (checkpoint._Load, "draws"),
]


KINDS: tuple[str, ...] = ("PrioritizedSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler")
KINDS += (
    "storage ListStorage",
    "storage LazyTensorStorage, single_copy",
    "SliceSampler, mapped",
    "SequenceUnit, ndim=2",
    "writer TensorDictMaxValueWriter",
)
KINDS += ("ReservoirWriter, PrioritizedSampler", "prefetch", "prefetch, Hindsight", "max_bytes", "remover")


@pytest.mark.parametrize("kind", KINDS)
def test_every_step(kind, monkeypatch):
    """Each step fails before it does its work, or after."""
    rb, state = used(kind), used(kind, 120).state_dict()
    for number, (where, name) in enumerate(STEPS):
        late, real = number % 2 == KINDS.index(kind) % 2, getattr(where, name)

        def breaks(*args: Any, late: bool = late, real: Any = real, **options: Any) -> Any:
            monkeypatch.undo()
            if late:
                real(*args, **options)
            raise MemoryError

        monkeypatch.setattr(where, name, breaks)
        stays(rb, functools.partial(rb.load_state_dict, state), MemoryError)
        registered(kind).extend(rb, 2, 200)
        rb.sample()


@pytest.mark.parametrize("mmap", [True, False])
def test_members_of_ensembles_all_or_none(mmap, tmp_path):
    """The last step fails, when all members are loaded."""

    def both(first: int) -> ReplayBufferEnsemble:
        members = [used(kind, first) for kind in ("PrioritizedSampler", "prefetch")]
        made = ReplayBufferEnsemble(*members, batch_size=4, generator=seeded(1), prefetch=2)
        made.sample()
        return made

    rb, other = both(0), both(120)
    other.dumps(tmp_path / "save")
    before = rb.state_dict()
    with mock.patch.object(checkpoint, "revive", side_effect=MemoryError), pytest.raises(MemoryError):
        rb.loads(tmp_path / "save", mmap=mmap)
    same_state(rb.state_dict(), before)
    rb.loads(tmp_path / "save", mmap=mmap)
    same_state(rb.state_dict(), other.state_dict())


def test_too_little_memory_for_a_copy_is_said_before_anything_changes(monkeypatch):
    rb, other = (used("PrioritizedSampler", start) for start in (0, 120))
    state = other.state_dict()

    class Full:
        available = 10

    monkeypatch.setattr(psutil, "virtual_memory", Full)
    stays(rb, lambda: rb.load_state_dict(state), StorageMemoryError)
    rb.empty()
    rb.load_state_dict(state)
    assert torch.equal(rb[:]["t"], other[:]["t"])


def _of_plans(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Damage the window of each queued draw."""
    return lambda state: [change(draw["plan"]) for draw in state["pending"]]


def _of_the_sampler(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["sampler"]["state"].update(changes)


DAMAGES: dict[str, Any] = {
    "prefetch, NStep + FrameStack": [
        _of_plans(lambda p: p["records"].add_(1000)),
        _of_plans(lambda p: p["columns"][0]["slots"].sub_(1000)),
        _of_plans(lambda p: p["columns"][0].update(leaf=99)),
        _of_plans(lambda p: [c.update(weights=c["weights"][:2]) for c in p["columns"] if c["weights"] is not None]),
        _of_plans(lambda p: p.update(repeat=3)),
        _of_plans(lambda p: p["columns"][0].update(pick=torch.ones(6, dtype=torch.bool))),
        lambda state: state["pending"][0]["slots"].add_(1000),
    ],
    "ensemble, ratio": [
        lambda state: state["pending"][0]["parts"][0].__setitem__(0, 3),
        lambda state: state["pending"][0]["parts"][0][1]["slots"].__setitem__(0, CAPACITY),
        lambda state: state["mixing"].update(shares=[[0, [1.0, -1.0, 1.0]]]),
        lambda state: state.update(batch_size=12),
    ],
    "SliceSamplerWithoutReplacement": [
        _of_the_sampler(firsts=torch.zeros(3)),
        _of_the_sampler(firsts=torch.zeros(2, 2, dtype=torch.int64)),
        _of_the_sampler(firsts=torch.zeros(1, dtype=torch.int64)),
        _of_the_sampler(rows=-1),
        _of_the_sampler(order=torch.zeros(4, dtype=torch.int64)),
        _of_the_sampler(shuffle=False),
    ],
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_states_are_refused(kind):
    rb, saved = (used(kind, start) for start in (0, 120))
    for damage in DAMAGES[kind]:
        state = saved.state_dict()
        damage(state)
        stays(rb, functools.partial(rb.load_state_dict, state), CheckpointError)


CASES: dict[str, Any] = {
    "priorities": (
        lambda: {"sampler": PrioritizedSampler(16, 0.6, 0.4)},
        lambda rb: rb.sampler.column.raw.__setitem__(3, -1.0),
    ),
    "cursor": (dict, lambda rb: setattr(rb._engine.ring.counts, "cursor", 99)),
    "reservoir": (lambda: {"writer": ReservoirWriter()}, lambda rb: setattr(rb.writer, "_offered", -5)),
    "episodes": (
        lambda: {"sampler": SliceSampler(slice_len=4)},
        lambda rb: rb._engine.tracker._table.record(Run(0, 1, 16), None),
    ),
}
"""Options of a buffer, and what spoils its state."""


@pytest.mark.parametrize("case", list(CASES))
def test_a_state_that_no_load_takes_is_not_committed(case, tmp_path):
    options, spoil = CASES[case]
    rb, other = (ring(16, batch_size=4, **options()) for _ in range(2))
    saved: list[Any] = [(rb, "one"), (ReplayBufferEnsemble(rb, batch_size=4), "both")]
    rb.extend({"x": torch.arange(16), "done": torch.arange(16) % 4 == 3})
    rb.sample()
    for each, name in saved:
        each.dumps(tmp_path / name)
    good = snapshot(rb)
    before = {file: file.read_bytes() for file in tmp_path.glob("*/*")}
    spoil(rb)
    for incremental in (False, True):
        for each, name in saved:
            with pytest.raises(CheckpointError):
                each.dumps(tmp_path / name, incremental=incremental)
    assert {file: file.read_bytes() for file in tmp_path.glob("*/*")} == before
    other.loads(tmp_path / "one")
    same_state(snapshot(other), good)


def test_counts_and_deleted_rows_that_contradict_each_other_are_refused():
    rb, other = (ring(8) for _ in range(2))
    rb.extend(torch.arange(4))
    rb.empty()
    rb.extend(torch.arange(3))
    state = rb.state_dict()
    other.load_state_dict(state)
    state["stamps"]["base"] += 1
    with pytest.raises(CheckpointError, match="3 rows, of which 2 were written"):
        other.load_state_dict(state)
    rb.delete([1])
    rb.extend(torch.arange(3, 5))  # room for more generations than there are rows
    rb.delete([0])
    other.load_state_dict(rb.state_dict())
    assert sorted(other.sample(64).unique().tolist()) == [2, 3, 4]
