"""Checkpoint directories: saving over, giving up, garbage, locks, foreign files, readers beside savers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from ostinato.durable import CheckpointReader, CheckpointWriter, arrays, files, write_manifest
from ostinato.durable import checkpoint as directory
from ostinato.errors import CheckpointError, DamagedFileError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def save(path: Path, number: int, **more: torch.Tensor) -> None:
    with CheckpointWriter(path, format_name="example") as writer:
        writer.add_array("obs", torch.full((5, 3), number))
        for name, tensor in more.items():
            writer.add_array(name, tensor)
        writer.commit({"number": number})


def load(path: Path) -> int:
    """The number of the checkpoint, after looking that all of it has that number."""
    reader = CheckpointReader(path, format_name="example")
    number = int(reader.state()["number"])
    assert torch.equal(reader.read("obs"), torch.full((5, 3), number))
    return number


def listing(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.is_file()}


def test_everything_comes_back(tmp_path):
    state: dict[str, Any] = {
        "cursor": 3,
        "big": torch.arange(100_000),
        "array": np.arange(50_000.0),
        "raw": bytes(70_000),
        "t": (1,),
    }
    items: list[Any] = [{"i": i, "obs": torch.full((2,), i)} for i in range(300)]
    long: list[Any] = ["text\n", torch.zeros(600_000), "x" * 3_000_000, "y" * 3_000_000, 1, "z" * 100_000]
    with CheckpointWriter(tmp_path / "a" / "b", format_name="example") as writer:
        record = writer.add_array("('obs', 'ü/..')", torch.eye(4)[:, :3])
        writer.add_values("items", iter(items + long))
        writer.add_values("none", [])
        writer.commit(state)
    reader = CheckpointReader(tmp_path / "a" / "b", format_name="example")
    assert reader.version == (1, 4)
    assert reader.names[0] == "('obs', 'ü/..')"
    assert reader.record("('obs', 'ü/..')") == record
    assert record.files[0].file.startswith("_obs_")
    dest = torch.zeros(4, 7)
    reader.read_into([("('obs', 'ü/..')", dest[:, 1:4])])
    assert torch.equal(dest[:, 1:4], torch.eye(4)[:, :3])
    assert torch.equal(reader.open_mapped("('obs', 'ü/..')"), torch.eye(4)[:, :3])
    found = reader.state()
    assert torch.equal(found.pop("big"), state.pop("big"))
    assert np.array_equal(found.pop("array"), state.pop("array"))
    assert found == state
    back = list(reader.values("items"))
    assert [(one["i"], one["obs"].tolist()) for one in back[:300]] == [(i, [i, i]) for i in range(300)]
    assert torch.equal(back.pop(301), long.pop(1))
    assert back[300:] == long, "they span several blocks"
    assert list(reader.values("none")) == []
    assert reader.verify() > 2_400_000
    with pytest.raises(CheckpointError, match="holds no array 'x'"):
        reader.read("x")


def test_foreign_files_beside_a_checkpoint_stay(tmp_path):
    path = tmp_path / "a"
    save(path, 1)
    mine = ["notes.txt", "weights.bin", "obs.0123.bin", "obs.0123456789abcdeF.bin"]
    for name in mine:
        (path / name).write_bytes(b"mine")
    (path / "sub.0123456789abcdef.bin").mkdir()
    (path / "link.0123456789abcdef.bin").symlink_to(path / "notes.txt")
    save(path, 2)
    assert load(path) == 2
    assert all((path / name).read_bytes() == b"mine" for name in mine)
    assert (path / "sub.0123456789abcdef.bin").is_dir()
    assert (path / "link.0123456789abcdef.bin").is_symlink()


def test_a_save_that_is_given_up_leaves_the_old_state_byte_for_byte(tmp_path, monkeypatch):
    path = tmp_path / "a"
    with CheckpointWriter(path / "b", format_name="example") as writer:  # without commit
        writer.add_array("obs", torch.zeros(100))
        assert (path / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    save(path, 1)
    before = listing(path)
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), CheckpointWriter(path, format_name="example") as writer:  # noqa: PT012
            writer.add_array("obs", torch.zeros(100))
            raise error
    with (
        pytest.raises(CheckpointError, match=r"^state\['a'\] is a object"),
        CheckpointWriter(path, format_name="example") as writer,
    ):
        writer.commit({"big": torch.zeros(100_000), "a": object()})
    monkeypatch.setattr(directory, "MAX_LINE_BYTES", 100)
    with (
        pytest.raises(CheckpointError, match=r"items\[1\] takes 203 bytes as JSON, at most 100"),
        CheckpointWriter(path, format_name="example") as writer,
    ):
        writer.add_values("items", [1, "x" * 200])
    assert listing(path) == before


def test_an_error_after_the_manifest_was_replaced_keeps_the_new_state(tmp_path, monkeypatch):
    path = tmp_path / "a"
    save(path, 1)
    calls = []

    def fail(folder: Path) -> None:
        calls.append(folder)
        raise OSError("no directory")

    monkeypatch.setattr(files, "fsync_dir", fail)
    with pytest.raises(OSError, match="no directory"):
        save(path, 2)
    assert calls
    assert load(path) == 2
    assert len(listing(path)) == 2


def test_all_files_are_on_the_disk_when_a_save_returns(tmp_path, monkeypatch):
    synced, fsync = set[int](), os.fsync

    def note(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    for first in range(0, 1600, 400):
        rb.extend({"x": torch.arange(first, first + 400), "wide": torch.ones(400, 300)})
        rb.dumps(tmp_path / "a", incremental=True)
        assert {path.stat().st_ino for path in (tmp_path / "a").iterdir()} <= synced


def test_writers_are_used_inside_their_block_with_names_that_are_allowed(tmp_path):
    writer, zeros = CheckpointWriter(tmp_path / "a", format_name="example"), torch.zeros(1)
    with pytest.raises(UsageError):
        writer.add_array("obs", zeros)
    with writer:
        for name in ("", "state:0", "x" * 1025):
            with pytest.raises(CheckpointError):
                writer.add_array(name, zeros)
        writer.add_array("x" * 1024, zeros)
        with pytest.raises(CheckpointError):
            writer.add_array("x" * 1024, zeros)
        writer.commit(1)
        for call in (lambda: writer.commit(1), lambda: writer.add_values("x", [])):
            with pytest.raises(UsageError):
                call()


def test_targets_that_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_bytes(b"x")
    (tmp_path / "other").mkdir()
    write_manifest(tmp_path / "other", {}, format_name="other")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "manifest.json").write_text('{"name": "web app"}')
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for name, message in [
        ("file", "is not a directory"),
        ("dangling", "is not a directory"),
        ("foreign", r"no checkpoint but other files \(thesis.tex\)"),
        ("other", "of the format 'other', 'example' expected"),
        ("program", "not a manifest of Ostinato"),
    ]:
        with (
            pytest.raises(CheckpointError, match=message),
            CheckpointWriter(tmp_path / name, format_name="example"),
        ):
            pytest.fail("was opened")
    assert {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_one_saver_at_a_time(tmp_path):
    path = tmp_path / "a"
    with CheckpointWriter(path, format_name="example") as first:
        with (
            pytest.raises(CheckpointError),
            CheckpointWriter(path, format_name="example"),
        ):
            pytest.fail("was opened")
        first.add_array("obs", torch.full((5, 3), 7))
        first.commit({"number": 7})
        save(path, 8)  # after commit the path is free
    assert load(path) == 8


def test_opening_while_somebody_saves_opens_the_newer_one(tmp_path, monkeypatch):
    path = tmp_path / "a"
    save(path, 1)
    check = arrays.check_sizes
    numbers = iter([2])

    def save_in_between(*args: Any) -> None:
        for number in numbers:
            save(path, number)
        check(*args)

    monkeypatch.setattr(directory, "check_sizes", save_in_between)
    assert load(path) == 2


def test_lines_without_an_end(tmp_path):
    path = tmp_path / "a"
    with CheckpointWriter(path, format_name="example") as writer:
        writer.add_values("good", [1, 2])
        writer.add_array("cut", torch.frombuffer(bytearray(b"1\n2"), dtype=torch.uint8))
        writer.add_array("noise", torch.frombuffer(bytearray(b"1\n{\n"), dtype=torch.uint8))
        writer.add_array("wrong", torch.zeros(3))
        writer.commit(None)
    reader = CheckpointReader(path, format_name="example")
    assert list(reader.values("good")) == [1, 2]
    for name, message in [("cut", "has no end"), ("noise", "not JSON"), ("wrong", "must be uint8")]:
        with pytest.raises(DamagedFileError, match=message):
            list(reader.values(name))
