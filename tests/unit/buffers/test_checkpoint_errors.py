"""Checkpoints that do not fit or are damaged: the load raises and the buffer stays as it was."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    QueueSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from ostinato.buffers.checkpoint import load as checkpoint
from ostinato.buffers.checkpoint import load as mixing_state
from ostinato.buffers.engine import LocalEngine
from ostinato.core.records import Run
from ostinato.durable import CheckpointReader
from ostinato.durable.blocks import BlockReader
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, StorageMemoryError
from ostinato.transforms import Compose

from ...sharing import AVAILABLE
from ...tags import STORAGES, buffer, fill, same_state, snapshot
from ...tags import rows as tagged
from .test_checkpoint import Counter, whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("storage", list(STORAGES))
def test_a_smaller_buffer_refuses_a_save_and_stays_as_it_was(storage: str, prefetch: int, tmp_path: Path) -> None:
    transform = None if prefetch else Counter()  # a prefetch thread would go on counting
    rb = whole(storage, sampler="epochs", prefetch=prefetch)
    if transform is not None:
        rb.append_transform(Counter())
    fill(rb, range(7))
    rb.sample()
    rb.dumps(tmp_path / "save")
    small = buffer(
        storage,
        5,
        sampler=SamplerWithoutReplacement(),
        batch_size=3,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(1),
        transform=transform,
    )
    fill(small, range(20, 24))
    small.sample()
    before = snapshot(small)
    with pytest.raises(CheckpointError, match=r"7 rows.*room for 5"):
        small.loads(tmp_path / "save")
    same_state(snapshot(small), before)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_save_of_another_form_is_refused(fresh: bool, tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5), "tuple")
    rb.dumps(tmp_path / "save")
    other = whole("packed")
    if fresh:
        other.loads(tmp_path / "save")
        return
    fill(other, range(3), "dict")
    before = snapshot(other)
    with pytest.raises(CheckpointError, match=r"holds.*the storage"):
        other.loads(tmp_path / "save")
    same_state(snapshot(other), before)


def test_saves_of_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5), "tensordict")
    rb.dumps(tmp_path / "save")
    for other, message in (
        (whole("packed", sampler="epochs"), "sampler is a RandomSampler, this buffer's a SamplerWithoutReplacement"),
        (whole("packed", writer="max value"), "writer is a RoundRobinWriter"),
        (whole("list"), r"storage is a LazyTensorStorage \(tensors\).*ListStorage"),
        (buffer(LazyTensorStorage(10, ndim=2)), "ndim=1.*ndim=2"),
    ):
        before = snapshot(other)
        with pytest.raises(CheckpointError, match=message):
            other.loads(tmp_path / "save")
        same_state(snapshot(other), before)


def test_samplers_of_other_options_are_refused(tmp_path: Path) -> None:
    rb = whole("packed", sampler="epochs")
    fill(rb, range(5))
    rb.dumps(tmp_path / "save")
    with pytest.raises(CheckpointError, match="shuffle=True"):
        whole("packed", sampler="in order").loads(tmp_path / "save")


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


def test_a_damaged_file_is_refused_and_the_buffer_stays_as_it_was(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5))
    rb.dumps(tmp_path / "save")
    for path in [p for p in (tmp_path / "save").iterdir() if p.suffix == ".bin" and p.stat().st_size]:
        good = path.read_bytes()
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        other = whole("packed")
        fill(other, range(20, 23))
        before = snapshot(other)
        with pytest.raises(DamagedFileError, match=path.name.split(".")[0]):
            other.loads(tmp_path / "save")
        same_state(snapshot(other), before)
        fresh = whole("packed")
        with pytest.raises(DamagedFileError):
            fresh.loads(tmp_path / "save")
        assert len(fresh) == 0
        assert fresh.extend(torch.zeros(2)).tolist() == [0, 1], "half-read rows fixed the form"
        path.write_bytes(good)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5))
    rb.dumps(tmp_path / "save")
    path = max((tmp_path / "save").glob("*.bin"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError):
        whole("packed").loads(tmp_path / "save")


CONFIGURATIONS: dict[str, Callable[[], ReplayBuffer]] = {
    "plain": lambda: ReplayBuffer(storage=LazyTensorStorage(32), batch_size=4),
    "not packed": lambda: ReplayBuffer(storage=LazyTensorStorage(32, packed=False), batch_size=4),
    "single copies": lambda: ReplayBuffer(storage=LazyTensorStorage(32, single_copy=True), batch_size=4),
    "another unit": lambda: ReplayBuffer(storage=LazyTensorStorage(32), sample_unit=NStep(2, 0.9), batch_size=4),
    "too small": lambda: ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4),
    "two dimensions": lambda: ReplayBuffer(storage=LazyTensorStorage(32, ndim=2), batch_size=4),
    "a list": lambda: ReplayBuffer(storage=ListStorage(32), batch_size=4),
    "priorities": lambda: PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(32), batch_size=4),
    "a queue": lambda: ReplayBuffer(storage=LazyTensorStorage(32), sampler=QueueSampler(), batch_size=4),
    "a reservoir": lambda: ReplayBuffer(storage=LazyTensorStorage(32), writer=ReservoirWriter(), batch_size=4),
    "other rows": lambda: ReplayBuffer(storage=TensorStorage({"x": torch.zeros(20)}), batch_size=4),
}


@pytest.mark.parametrize("fields", [("obs", "next_obs", "done"), ("obs",)])
@pytest.mark.parametrize("source", ["plain", "not packed", "single copies"])
def test_a_whole_checkpoint_is_never_called_damaged(source: str, fields: tuple[str, ...], tmp_path: Path) -> None:
    place = torch.arange(20.0).view(20, 1)
    rows = {"obs": place, "next_obs": place + 1, "done": torch.zeros(20).bool()}
    saved = CONFIGURATIONS[source if len(fields) > 1 else "plain"]()
    saved.extend({name: rows[name] for name in fields})
    saved.dumps(tmp_path / "c")
    errors: list[Exception | None] = []
    for configuration, mmap in product(CONFIGURATIONS, (False, True)):
        target = CONFIGURATIONS[configuration]()
        try:
            target.loads(tmp_path / "c", mmap=mmap)
            errors.append(None)
        except (CheckpointError, OptionError) as error:
            errors.append(error)
    raised = [error for error in errors if error is not None]
    assert 0 < len(raised) < len(errors)
    assert not [error for error in raised if isinstance(error, DamagedFileError) or "damaged" in str(error)]


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
@pytest.mark.parametrize("storage", ["packed", "single", "list", "mapped"])
@pytest.mark.parametrize("step", ["transforms", "parts", "end", "queued draws", "counts"])
@pytest.mark.parametrize("late", [False, True])
def test_every_step(step: str, storage: str, parts: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step fails before it does its work, or after."""
    if storage == "list" and parts == "windows":
        return
    rb, other = used(storage, parts), used(storage, parts, first=100, count=9)
    state = other.state_dict()
    where, name = STEPS[step]
    real = getattr(where, name)

    def breaks(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        if late:
            real(*args, **options)
        raise MemoryError

    monkeypatch.setattr(where, name, breaks)
    stays(rb, lambda: rb.load_state_dict(state), MemoryError)
    fill_two(rb, 200, 1)
    rb.sample()


@pytest.mark.parametrize("storage", list(LOADED))
@pytest.mark.parametrize("incremental", [False, True])
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
        for number in range(1, calls[0] + 1, 1 if calls[0] < 60 else 3):
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


@pytest.mark.parametrize("storage", list(LOADED))
@pytest.mark.parametrize("verify", [True, False])
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


@pytest.mark.parametrize("mode", [{}, {"verify": False}, {"mmap": True}])
def test_a_damaged_table_and_a_missing_file(mode: dict[str, Any], tmp_path: Path) -> None:
    other = used(first=100)
    other.dumps(tmp_path / "save", incremental=True)
    fill_two(other, 130, 2)
    other.dumps(tmp_path / "save", incremental=True)
    arrays = json.loads((tmp_path / "save" / "manifest.json").read_text())["body"]["arrays"]
    chained = [node for node in arrays.values() if node.get("patches")]
    file = tmp_path / "save" / chained[-1]["patches"][0]["file"]
    good = file.read_bytes()
    file.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    rb = used()
    stays(rb, lambda: rb.loads(tmp_path / "save", **mode), DamagedFileError)
    file.unlink()
    stays(rb, lambda: rb.loads(tmp_path / "save", **mode), DamagedFileError)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("step", ["_revive_mix", "member"])
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


@pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")
def test_transforms_that_do_not_fit_a_shared_buffer() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, shared=True)
    rb.extend(tagged(range(5)))
    other = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, transform=torch.nn.Identity())
    other.extend(tagged(range(7)))
    before = rb[:]["id"].clone()
    with pytest.raises(CheckpointError):
        rb.load_state_dict(other.state_dict())
    assert torch.equal(rb[:]["id"], before)


def make_spoiled(**options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=LazyTensorStorage(16), **{"batch_size": 4, "generator": generator, **options})


def numbered(count: int = 16) -> dict[str, torch.Tensor]:
    x = torch.arange(count)
    return {"x": x, "done": x % 4 == 3}


def spoil_order(rb: ReplayBuffer) -> None:
    rb.sampler._order[:2] = 0  # type: ignore[attr-defined]


def spoil_episodes(rb: ReplayBuffer) -> None:
    rb.sampler._firsts = torch.zeros(0, dtype=torch.int64)  # type: ignore[attr-defined]


def spoil_priorities(rb: ReplayBuffer) -> None:
    rb.sampler._raw[3] = -1.0  # type: ignore[attr-defined]


def spoil_queue(rb: ReplayBuffer) -> None:
    rb.sampler._waiting = 40  # type: ignore[attr-defined]


def spoil_cursor(rb: ReplayBuffer) -> None:
    rb._engine.ring.counts.cursor = 99  # type: ignore[union-attr]


def spoil_counts(rb: ReplayBuffer) -> None:
    rb._engine.counts.drawn = -1  # type: ignore[attr-defined]


def spoil_reservoir(rb: ReplayBuffer) -> None:
    rb.writer._offered = -5  # type: ignore[attr-defined]


def spoil_form(rb: ReplayBuffer) -> None:
    table = rb._engine.tracker._table  # type: ignore[union-attr]
    assert table is not None
    table.record(Run(0, 1, 16), None)


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[ReplayBuffer], None]]] = {
    "order": (lambda: {"sampler": SamplerWithoutReplacement()}, spoil_order),
    "episodes of the pass": (lambda: {"sampler": SliceSamplerWithoutReplacement(slice_len=4)}, spoil_episodes),
    "priorities": (lambda: {"sampler": PrioritizedSampler(16, 0.6, 0.4)}, spoil_priorities),
    "queue": (lambda: {"sampler": QueueSampler()}, spoil_queue),
    "cursor": (dict, spoil_cursor),
    "counts": (dict, spoil_counts),
    "reservoir": (lambda: {"writer": ReservoirWriter()}, spoil_reservoir),
    "episodes": (lambda: {"sampler": SliceSampler(slice_len=4)}, spoil_form),
}


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_a_state_that_no_load_takes_is_not_committed(case: str, incremental: bool, tmp_path: Path) -> None:
    (options, spoil), path = CASES[case], tmp_path / "save"
    rb = make_spoiled(**options())
    rb.extend(numbered())
    rb.sample()
    rb.dumps(path, incremental=incremental)
    good = snapshot(rb)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    spoil(rb)
    with pytest.raises(CheckpointError, match="cannot be saved"):
        rb.dumps(path, incremental=incremental)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    other = make_spoiled(**options())
    other.loads(path)
    same_state(snapshot(other), good)


def test_members_of_ensembles_are_checked(tmp_path: Path) -> None:
    both = ReplayBufferEnsemble(make_spoiled(), make_spoiled(sampler=SamplerWithoutReplacement()), batch_size=4)
    for rb in both.members:
        rb.extend(numbered())
    both.sample()
    both.dumps(tmp_path / "save")
    spoil_order(both.members[1])
    with pytest.raises(CheckpointError, match="cannot be saved"):
        both.dumps(tmp_path / "save")
    other = ReplayBufferEnsemble(make_spoiled(), make_spoiled(sampler=SamplerWithoutReplacement()), batch_size=4)
    other.loads(tmp_path / "save")
    assert [len(rb) for rb in other.members] == [16, 16]


@pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")
def test_shared_buffers_are_checked(tmp_path: Path) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(16), sampler=PrioritizedSampler(16, 0.6, 0.4), batch_size=4, shared=True
    )
    rb.extend(numbered())
    rb.dumps(tmp_path / "save")
    rb.sampler._raw[3] = -1.0  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError):
        rb.dumps(tmp_path / "save")
    other = ReplayBuffer(storage=LazyTensorStorage(16), sampler=PrioritizedSampler(16, 0.6, 0.4), batch_size=4)
    other.loads(tmp_path / "save")
    assert len(other) == 16


def test_objects_and_ranks_are_saved_as_before(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    rb.extend(["a", 1, None, 2.5, "b"])
    rb.dumps(tmp_path / "objects")
    other = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    other.loads(tmp_path / "objects")
    assert other[:] == rb[:]
    ranked = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("x"), batch_size=2)
    ranked.extend(TensorDict({"x": torch.arange(9.0)}, [9]))
    ranked.dumps(tmp_path / "ranked")
    again = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("x"), batch_size=2)
    again.loads(tmp_path / "ranked")
    assert torch.equal(again[:]["x"].sort().values, torch.arange(5.0, 9.0))
