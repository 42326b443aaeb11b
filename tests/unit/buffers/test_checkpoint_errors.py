"""Checkpoints that do not fit or are damaged: the load raises and the buffer stays as it was."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    NStep,
    PrioritizedSampler,
    QueueSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
)
from ostinato.buffers.checkpoint import load as checkpoint
from ostinato.buffers.checkpoint import load as mixing_state
from ostinato.buffers.engine import LocalEngine
from ostinato.core.records import Run
from ostinato.durable import CheckpointReader
from ostinato.durable.blocks import BlockReader
from ostinato.errors import CheckpointError, StorageMemoryError
from ostinato.transforms import Compose

from ...tags import buffer, fill, same_state, snapshot
from .test_checkpoint import whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_saves_of_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    rb, passes, used = whole("packed"), whole("packed", sampler="epochs"), whole("packed")
    fill(rb, range(5), "tensordict")
    rb.dumps(tmp_path / "save")
    fill(passes, range(5))
    passes.dumps(tmp_path / "passes")
    fill(used, range(3), "tuple")
    for path, other, message in (
        ("save", whole("packed", sampler="epochs"), "is a RandomSampler, this buffer's a SamplerWithoutReplacement"),
        ("save", whole("packed", writer="max value"), "writer is a RoundRobinWriter"),
        ("save", whole("list"), r"storage is a LazyTensorStorage \(tensors\).*ListStorage"),
        ("save", buffer(LazyTensorStorage(10, ndim=2)), "ndim=1.*ndim=2"),
        ("save", used, "holds.*the storage"),
        ("passes", whole("packed", sampler="in order"), "shuffle=True"),
    ):
        before = snapshot(other)
        with pytest.raises(CheckpointError, match=message):
            other.loads(tmp_path / path)
        same_state(snapshot(other), before)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    rb = whole("packed")
    for wrong in (tmp_path / "missing", tmp_path):
        with pytest.raises((CheckpointError, FileNotFoundError), match=r"missing|checkpoint|manifest"):
            rb.loads(wrong)
    (tmp_path / "notes.txt").write_text("mine")
    fill(rb, range(3))
    with pytest.raises(CheckpointError, match="other files"):
        rb.dumps(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


LOADED: dict[str, Callable[[int], Storage]] = {
    "packed": LazyTensorStorage,
    "columns": lambda size: LazyTensorStorage(size, packed=False),
    "single": lambda size: LazyTensorStorage(size, single_copy={"next_obs": "obs"}),
    "mapped": LazyMemmapStorage,
    "list": ListStorage,
}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": dict,
    "passes": lambda: {"sampler": SamplerWithoutReplacement(), "prefetch": 2},
    "prioritized": lambda: {"sampler": PrioritizedSampler(20, 0.6, 0.4)},
    "queue": lambda: {"sampler": QueueSampler(), "prefetch": 1},
    "limited": lambda: {"sampler": LimitedSampler(3)},
    "windows": lambda: {"sample_unit": NStep(3, 0.9), "prefetch": 2},
}


def rows(first: int, count: int) -> Any:
    t = torch.arange(float(first), float(first + count))
    return {"obs": t, "next_obs": t + 1, "reward": t * 2, "done": t % 5 == 4, "wide": t[:, None].expand(-1, 90).clone()}


def make(storage: str = "packed", parts: str = "uniform") -> ReplayBuffer:
    generator = torch.Generator().manual_seed(4)
    return ReplayBuffer(storage=LOADED[storage](20), **{"batch_size": 4, "generator": generator, **PARTS[parts]()})


def fill_two(rb: ReplayBuffer, first: int, count: int) -> None:
    data = rows(first, count)
    if isinstance(rb.storage, ListStorage):
        rb.extend([{key: value[i] for key, value in data.items()} for i in range(count)])
    else:
        rb.extend(data)


def used(storage: str = "packed", parts: str = "uniform", *, first: int = 0, count: int = 17) -> ReplayBuffer:
    rb = make(storage, parts)
    fill_two(rb, first, count)
    rb.sample()
    return rb


def stays(rb: ReplayBuffer, load: Callable[[], object], error: type[BaseException]) -> None:
    """Let a load fail, and compare everything before and after it."""
    before, held = snapshot(rb), [ticket.draw.slots.clone() for ticket in rb._pipeline.tickets]
    with pytest.raises(error):
        load()
    same_state(snapshot(rb), before)
    now = [ticket.draw.slots for ticket in rb._pipeline.tickets]
    assert all(torch.equal(one, other) for one, other in zip(now, held, strict=True))


STEPS = {
    "transforms": (Compose, "load_state_dict"),
    "parts": (checkpoint, "_load_parts"),
    "end": (checkpoint, "end_load"),
    "queued draws": (LocalEngine, "retake"),
    "counts": (checkpoint, "_end_load"),
}


@pytest.mark.parametrize("parts", list(PARTS))
@pytest.mark.parametrize("step", list(STEPS))
def test_every_step(step: str, parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step fails before it does its work, or after."""
    turn = list(STEPS).index(step) + list(PARTS).index(parts)
    for late in (False, True):
        storage = ("packed", "single", "mapped", "list")[(turn + late) % (3 if parts == "windows" else 4)]
        rb, other = used(storage, parts), used(storage, parts, first=100, count=9)
        state = other.state_dict()
        where, name = STEPS[step]
        real = getattr(where, name)

        def breaks(*args: Any, late: bool = late, real: Any = real, **options: Any) -> Any:
            monkeypatch.undo()
            if late:
                real(*args, **options)
            raise MemoryError

        monkeypatch.setattr(where, name, breaks)
        stays(rb, functools.partial(rb.load_state_dict, state), MemoryError)
        fill_two(rb, 200, 1)
        rb.sample()


@pytest.mark.parametrize(
    ("storage", "incremental"),
    [("packed", True), ("columns", False), ("single", True), ("mapped", False), ("list", False)],
)
def test_every_read(storage: str, incremental: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = used(storage, "prioritized", first=100)
    other.dumps(tmp_path / "save")
    fill_two(other, 130, 2)
    other.dumps(tmp_path / "save", incremental=incremental)
    real, calls = BlockReader.read_into, [0, 0]

    def counted(self: BlockReader, view: memoryview) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            msg = "the disk is gone"
            raise OSError(5, msg)
        real(self, view)

    monkeypatch.setattr(BlockReader, "read_into", counted)
    for laid_out in (True, False):
        calls[:] = [0, 0]
        make(storage, "prioritized").loads(tmp_path / "save")
        for number in range(1, calls[0] + 1, 1 if calls[0] < 20 else 5):
            calls[:] = [0, number]
            rb = used(storage, "prioritized") if laid_out else make(storage, "prioritized")
            calls[0] = 0
            if laid_out:
                try:
                    before = snapshot(rb)
                    rb.loads(tmp_path / "save")
                except OSError:
                    same_state(snapshot(rb), before)
            else:
                with pytest.raises(OSError, match="gone"):
                    rb.loads(tmp_path / "save")
                assert len(rb) == 0
                assert not rb.storage.laid_out or storage == "list"


@pytest.mark.parametrize(("storage", "verify"), [("packed", True), ("mapped", False), ("list", True)])
def test_another_save_in_the_middle_of_a_load(
    storage: str, verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the checkpoint that was opened is loaded, or nothing."""
    other = used(storage, first=100)
    for at in range(6):
        other.dumps(tmp_path / "save")
        rb, calls = used(storage), [0]
        before = rb[:]["obs"].clone()
        expected = other[:]["obs"].clone()
        real = CheckpointReader.record

        def saves_over(
            self: CheckpointReader, name: str, at: int = at, calls: list[int] = calls, real: Any = real
        ) -> Any:
            calls[0] += 1
            if calls[0] == at + 1:
                fill_two(other, 300 + at, 3)
                other.dumps(tmp_path / "save")
            return real(self, name)

        monkeypatch.setattr(CheckpointReader, "record", saves_over)
        try:
            rb.loads(tmp_path / "save", verify=verify)
        except CheckpointError:
            assert torch.equal(rb[:]["obs"], before)
        else:
            assert torch.equal(rb[:]["obs"], expected)
        monkeypatch.undo()


@pytest.mark.parametrize(("step", "mmap"), [("_revive_mix", True), ("member", False)])
def test_members_of_ensembles_all_or_none(
    step: str, mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(first: int, count: int) -> ReplayBufferEnsemble:
        members = [used(parts="prioritized", first=first), used(parts="uniform", first=first + 50, count=count)]
        generator = torch.Generator().manual_seed(1)
        made = ReplayBufferEnsemble(*members, batch_size=4, generator=generator, prefetch=2)
        made.sample()
        return made

    rb, other = both(0, 11), both(100, 13)
    other.dumps(tmp_path / "save")
    before, real = rb.state_dict(), LazyTensorStorage.load_state_dict

    def second(self: LazyTensorStorage, state: dict[str, Any]) -> None:
        if self is rb.members[1].storage:
            monkeypatch.undo()
            raise MemoryError
        real(self, state)

    def breaks(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError

    if step == "member":
        monkeypatch.setattr(LazyTensorStorage, "load_state_dict", second)
    else:
        monkeypatch.setattr(mixing_state, step, breaks)
    with pytest.raises(MemoryError):
        rb.loads(tmp_path / "save", mmap=mmap)
    same_state(rb.state_dict(), before)
    rb.loads(tmp_path / "save", mmap=mmap)
    same_state(rb.state_dict(), other.state_dict())


def test_too_little_memory_for_a_copy_is_said_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rb, other = used(), used(first=100)
    state = other.state_dict()

    class Full:
        available = 10

    monkeypatch.setattr(psutil, "virtual_memory", Full)
    stays(rb, lambda: rb.load_state_dict(state), StorageMemoryError)
    rb.empty()
    rb.load_state_dict(state)
    assert torch.equal(rb[:]["obs"], other[:]["obs"])


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], object]]] = {
    "order": (
        lambda: {"sampler": SamplerWithoutReplacement()},
        lambda rb: rb.sampler._order.__setitem__(slice(2), 0),
    ),
    "episodes of the pass": (
        lambda: {"sampler": SliceSamplerWithoutReplacement(slice_len=4)},
        lambda rb: setattr(rb.sampler, "_firsts", torch.zeros(0, dtype=torch.int64)),
    ),
    "priorities": (
        lambda: {"sampler": PrioritizedSampler(16, 0.6, 0.4)},
        lambda rb: rb.sampler._raw.__setitem__(3, -1.0),
    ),
    "queue": (lambda: {"sampler": QueueSampler()}, lambda rb: setattr(rb.sampler, "_waiting", 40)),
    "cursor": (dict, lambda rb: setattr(rb._engine.ring.counts, "cursor", 99)),
    "counts": (dict, lambda rb: setattr(rb._engine.counts, "drawn", -1)),
    "reservoir": (lambda: {"writer": ReservoirWriter()}, lambda rb: setattr(rb.writer, "_offered", -5)),
    "episodes": (
        lambda: {"sampler": SliceSampler(slice_len=4)},
        lambda rb: rb._engine.tracker._table.record(Run(0, 1, 16), None),
    ),
}
"""Options of a buffer, and what spoils its state."""


@pytest.mark.parametrize("case", list(CASES))
def test_a_state_that_no_load_takes_is_not_committed(case: str, tmp_path: Path) -> None:
    options, spoil = CASES[case]

    def make_one() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(16), batch_size=4, **options())

    rb = make_one()
    saved: list[tuple[Any, str]] = [(rb, "one")]
    if case != "queue":
        saved.append((ReplayBufferEnsemble(rb, batch_size=4), "both"))
    rb.extend({"x": torch.arange(16), "done": torch.arange(16) % 4 == 3})
    rb.sample()
    for each, name in saved:
        each.dumps(tmp_path / name)
    good = snapshot(rb)
    before = {file: file.read_bytes() for file in tmp_path.glob("*/*")}
    spoil(rb)
    for incremental in (False, True):
        for each, name in saved:
            with pytest.raises(CheckpointError, match="cannot be saved"):
                each.dumps(tmp_path / name, incremental=incremental)
    assert {file: file.read_bytes() for file in tmp_path.glob("*/*")} == before
    other = make_one()
    other.loads(tmp_path / "one")
    same_state(snapshot(other), good)
