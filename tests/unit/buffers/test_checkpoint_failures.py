"""A load that fails, wherever it does, leaves the buffer exactly as it was."""

from __future__ import annotations

import json
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
    SamplerWithoutReplacement,
    Storage,
)
from ostinato.buffers import mixing as mixing_state
from ostinato.buffers.checkpoint import state as checkpoint
from ostinato.durable import CheckpointReader
from ostinato.durable.blocks import BlockReader
from ostinato.errors import CheckpointError, DamagedFileError, StorageMemoryError
from ostinato.transforms import Compose

from ...sharing import AVAILABLE
from ...tags import rows as tagged
from ...tags import same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STORAGES: dict[str, Callable[[int], Storage]] = {
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
    return ReplayBuffer(storage=STORAGES[storage](20), **{"batch_size": 4, "generator": generator, **PARTS[parts]()})


def fill(rb: ReplayBuffer, first: int, count: int) -> None:
    data = rows(first, count)
    if isinstance(rb.storage, ListStorage):
        rb.extend([{key: value[i] for key, value in data.items()} for i in range(count)])
    else:
        rb.extend(data)


def used(storage: str = "packed", parts: str = "uniform", *, first: int = 0, count: int = 17) -> ReplayBuffer:
    rb = make(storage, parts)
    fill(rb, first, count)
    rb.sample()
    return rb


def stays(rb: ReplayBuffer, load: Callable[[], object], error: type[BaseException]) -> None:
    """Let a load fail, and compare everything before and after it."""
    before, held = snapshot(rb), [ticket.draw.slots.clone() for ticket in rb._feed.tickets]
    with pytest.raises(error):
        load()
    same_state(snapshot(rb), before)
    now = [ticket.draw.slots for ticket in rb._feed.tickets]
    assert all(torch.equal(one, other) for one, other in zip(now, held, strict=True))


STEPS = {
    "transforms": (Compose, "load_state_dict"),
    "parts": (checkpoint, "_load_parts"),
    "end": (checkpoint, "end_load"),
    "queued draws": (checkpoint, "retake"),
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
    fill(rb, 200, 1)
    rb.sample()


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("incremental", [False, True])
def test_every_read(storage: str, incremental: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = used(storage, "prioritized", first=100)
    other.dumps(tmp_path / "save")
    fill(other, 130, 2)
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


@pytest.mark.parametrize("storage", list(STORAGES))
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
                fill(other, 300 + at, 3)
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
    fill(other, 130, 2)
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
@pytest.mark.parametrize("step", ["_revive", "member"])
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


@pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the compiled part, on Linux")
def test_transforms_that_do_not_fit_a_shared_buffer() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, shared=True)
    rb.extend(tagged(range(5)))
    other = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, transform=torch.nn.Identity())
    other.extend(tagged(range(7)))
    before = rb[:]["id"].clone()
    with pytest.raises(CheckpointError):
        rb.load_state_dict(other.state_dict())
    assert torch.equal(rb[:]["id"], before)
