"""Mapped storage: files that are reserved, flushed, reopened, and gone when nobody needs them."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LazyMemmapStorage, ReplayBuffer
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    DirectoryInUseError,
    OptionError,
    StorageMemoryError,
    UsageError,
)

from ...tags import buffer, fill, read_ids, table


def flushed(path: Path, count: int = 9, *, packed: bool = True) -> ReplayBuffer:
    storage = LazyMemmapStorage(7, scratch_dir=path, packed=packed)
    rb = buffer(storage)
    fill(rb, range(count))
    storage.flush()
    return rb


def reopened(path: Path, capacity: int = 7) -> LazyMemmapStorage:
    return LazyMemmapStorage(capacity, scratch_dir=path, existsok=True)


@pytest.mark.parametrize("packed", [True, False])
def test_a_flushed_storage_opens_again_with_its_rows(packed, tmp_path):
    for count in (3, 7, 20):
        path = tmp_path / str(count)
        rb = flushed(path, count, packed=packed)
        expected, cursor = read_ids(rb[:]), rb.cursor
        del rb
        gc.collect()
        again = buffer(reopened(path))
        assert read_ids(again[:]) == expected
        assert fill(again, [99]).tolist() == [cursor]
        assert len(read_ids(again.sample(5))) == 5
    rb = buffer(LazyMemmapStorage(10, scratch_dir=tmp_path / "envs", ndim=2, packed=packed))
    rb.extend({"a": torch.arange(24).view(4, 6)})
    rb.storage.flush()  # type: ignore[attr-defined]
    envs = LazyMemmapStorage(10, scratch_dir=tmp_path / "envs", ndim=2, existsok=True)
    assert (envs.capacity, envs.shape) == (12, (3, 4))
    assert torch.equal(envs["a"], rb.storage["a"])


def test_an_existing_directory_needs_existsok(tmp_path):
    old = flushed(tmp_path / "s")
    rb = ReplayBuffer(storage=LazyMemmapStorage(7, scratch_dir=tmp_path / "s"))
    assert len(rb) == 0, "rows of another storage"
    with pytest.raises(DirectoryInUseError):
        rb.extend(torch.arange(3))
    assert len(rb) == 0
    assert rb.storage.schema is None
    assert len(reopened(tmp_path / "s")) == len(old)
    (tmp_path / "empty").mkdir()
    rb = ReplayBuffer(storage=LazyMemmapStorage(7, scratch_dir=tmp_path / "empty"))
    assert rb.extend(torch.arange(3)).tolist() == [0, 1, 2]


def test_files_of_a_run_that_never_flushed_are_not_taken_for_rows(tmp_path):
    rb = buffer(LazyMemmapStorage(7, scratch_dir=tmp_path / "s"))
    fill(rb, range(5))
    again = buffer(reopened(tmp_path / "s"))
    assert len(again) == 0
    fill(again, range(50, 52))
    assert read_ids(again[:]) == [50, 51]
    assert read_ids(rb[:]) == list(range(5)), "files that another buffer still maps were written over"


WRITES: dict[str, Any] = {
    "add": lambda rb: rb.add(table(torch.tensor(50))),
    "extend": lambda rb: fill(rb, range(50, 52)),
    "assignment": lambda rb: rb.__setitem__(0, table(torch.tensor(50))),
    "one field": lambda rb: rb.set_at_("id", torch.tensor([50]), [0]),
    "load": lambda rb: rb.load_state_dict(_other_rows()),
    "emptying": lambda rb: (rb.empty(), fill(rb, range(50, 52))),
}


def _other_rows() -> Any:
    rb = buffer("packed", 7)
    fill(rb, range(50, 53))
    return rb.state_dict()


@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_takes_back_what_was_flushed(write, tmp_path):
    """Else a process that ends without another flush would leave old and new rows mixed."""
    flushed(tmp_path / "s", 5)
    rb = buffer(reopened(tmp_path / "s"))
    for _ in range(2):
        WRITES[write](rb)
        assert len(reopened(tmp_path / "s")) == 0
        rb.storage.flush()  # type: ignore[attr-defined]
        assert reopened(tmp_path / "s")["id"].tolist() == rb["id"].tolist()


def cut(block: Path) -> None:
    block.write_bytes(b"x")


def linked(block: Path) -> None:
    block.rename(block.with_suffix(".elsewhere"))
    block.symlink_to(block.with_suffix(".elsewhere"))


def misspelt(block: Path) -> None:
    manifest = block.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace('"rows"', '"sorw"', 1))


def test_damaged_files_are_refused(tmp_path):
    flushed(tmp_path / "s")
    for capacity, ndim in ((8, 1), (7, 2)):
        with pytest.raises(CheckpointError, match=r"max_size=7, ndim=1.*got"):
            LazyMemmapStorage(capacity, ndim=ndim, scratch_dir=tmp_path / "s", existsok=True)
    for damage in (cut, Path.unlink, linked, misspelt):
        copy = tmp_path / damage.__name__
        shutil.copytree(tmp_path / "s", copy)
        damage(min(copy.glob("block*.bin")))
        with pytest.raises(DamagedFileError):
            reopened(copy)


def test_flush_needs_rows_and_a_directory(tmp_path):
    temporary = LazyMemmapStorage(7)
    fill(buffer(temporary), range(3))
    empty = LazyMemmapStorage(7, scratch_dir=tmp_path / "s")
    for storage, message in ((empty, "empty"), (temporary, "scratch_dir")):
        with pytest.raises(UsageError, match=message):
            storage.flush()
    with pytest.raises(OptionError):
        LazyMemmapStorage(7, device="meta")
    assert LazyMemmapStorage(7, device="auto").device.type == "cpu"


def test_files_hold_the_rows_themselves_and_their_space_is_reserved_at_once(tmp_path):
    """Writing to a mapped file on a full disk would end the process."""
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "s", packed=False)
    storage.set(range(4), torch.arange(40_000).view(4, -1))
    storage.flush()
    (block,) = (tmp_path / "s").glob("block*.bin")
    assert block.stat().st_size == 8_000_000
    assert block.stat().st_blocks * 512 >= 8_000_000
    assert torch.from_file(str(block), size=40_000, dtype=torch.int64).tolist() == list(range(40_000))


def test_a_full_disk_is_refused_before_files_are_made(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "s"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(StorageMemoryError, match=r"needs 400000 bytes.*1000 bytes"):
            rb.add(torch.zeros(1000))
    assert not list(tmp_path.rglob("*.bin"))
    assert rb.add(torch.zeros(1000)) == 0


def test_close_removes_temporary_files_and_keeps_others(tmp_path):
    with LazyMemmapStorage(8) as storage, LazyMemmapStorage(8, scratch_dir=tmp_path / "kept") as kept:
        for each in (storage, kept):
            each.set(range(4), torch.arange(4))
        kept.flush()
        place, view = storage.scratch_dir, storage[:]
        assert place is not None
        assert list(place.iterdir())
    assert not place.exists()
    assert view.tolist() == reopened(tmp_path / "kept", 8)[:].tolist() == [0, 1, 2, 3]
    for call in (lambda: storage.read(0), lambda: ReplayBuffer(storage=storage).extend(torch.arange(4))):
        with pytest.raises(UsageError):
            call()
    storage.close()


def test_cleanup_keeps_the_rows_in_memory(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path)
    assert storage.cleanup() is False, "there are no files yet"
    storage.set(range(3), torch.arange(3))
    storage.flush()
    assert storage.cleanup() is True
    assert storage.cleanup() is False
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    storage.set(range(3, 5), torch.arange(3, 5))
    assert storage[:].tolist() == list(range(5))


def test_cleanup_leaves_the_files_that_replaced_its_own(tmp_path):
    old = LazyMemmapStorage(5, scratch_dir=tmp_path / "s", auto_cleanup=True)
    old.set(range(3), torch.arange(3))
    new = reopened(tmp_path / "s", 5)
    new.set(range(3), torch.arange(3) + 10)
    new.flush()
    del old
    gc.collect()
    assert reopened(tmp_path / "s", 5)[:].tolist() == [10, 11, 12]


def test_saving_to_its_own_directory_copies_nothing(tmp_path):
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "s")
    storage.set(range(3), torch.arange(3))
    storage.dumps(tmp_path / "s")
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert names == {"block0.bin", "manifest.json"}
    again = LazyMemmapStorage(5, scratch_dir=tmp_path / "s")
    again.loads(tmp_path / "s")
    assert again[:].tolist() == [0, 1, 2]
    again.loads(tmp_path / "s")
    again[0] = torch.tensor(7)
    with pytest.raises(UsageError):
        again.loads(tmp_path / "s")


def test_a_checkpoint_directory_may_contain_the_mapped_files(tmp_path):
    rb, again = (ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / name / "storage")) for name in "ab")
    rb.extend(torch.arange(3))
    for _ in range(2):
        rb.dumps(tmp_path / "a")
    again.loads(tmp_path / "a")
    assert again[:].tolist() == [0, 1, 2]
    rb.storage[0] = torch.tensor(7)
    block = str(tmp_path / "a" / "storage" / "block0.bin")
    assert torch.from_file(block, size=3, dtype=torch.int64).tolist() == [7, 1, 2]
    (tmp_path / "a" / "storage" / "notes.txt").write_text("mine")
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(CheckpointError):
        rb.dumps(tmp_path / "a")
