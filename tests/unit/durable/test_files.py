"""Files: replacement is atomic, names stay inside, a full disk is told in numbers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ostinato.durable import atomic_write, files, fsync_dir, reserve, safe_join
from ostinato.durable.files import new_directory
from ostinato.errors import DamagedFileError, StorageMemoryError


@pytest.mark.parametrize("step", ["sync_fd", "write_all"])
def test_atomic_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "a.json"
    atomic_write(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(files, step, fail)
    with pytest.raises(OSError, match="broken"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_order_of_syncs(tmp_path, monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(files, "sync_fd", lambda _: events.append("sync file"))
    monkeypatch.setattr(files, "fsync_dir", lambda _: events.append("sync directory"))
    replace = Path.replace

    def note(self: Path, target: Path) -> Path:
        events.append("replace")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", note)
    atomic_write(tmp_path / "a", b"x")
    assert events == ["sync file", "replace", "sync directory"]


def test_names_stay_inside(tmp_path):
    for name in ("obs.0123456789abcdef.bin", "a/b.bin", "x+y-z_1"):
        assert safe_join(tmp_path, name) == tmp_path / name
    wrong = ["", "/etc/passwd", "..", "../a", "a/../b", "a//b", "a/", ".", ".a", "a\\b", "C:a", "a\0b", "a\n", "\u00e4"]
    for name in (*wrong, "\ud800"):
        with pytest.raises(DamagedFileError) as caught:
            safe_join(tmp_path, name)
        str(caught.value).encode()  # a message can be printed whatever the name was


def test_reserve_takes_the_space(tmp_path):
    path = tmp_path / "a"
    reserve(path, 1_000_000)
    assert path.stat().st_size == 1_000_000
    if hasattr(os, "posix_fallocate"):
        assert path.stat().st_blocks * 512 >= 1_000_000
    reserve(path, 10)  # never shortens
    assert path.stat().st_size == 1_000_000
    reserve(path, 2_000_000)
    assert path.stat().st_size == 2_000_000
    reserve(tmp_path / "empty", 0)
    assert (tmp_path / "empty").stat().st_size == 0


def test_reserve_on_a_full_disk_gives_back_what_it_took(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 10)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):

        def full(fd: int, nbytes: int, code: int = code) -> bool:
            os.ftruncate(fd, nbytes // 2)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(files, "_allocate", full)
        for name in ("a", "new"):
            with pytest.raises(StorageMemoryError, match=r"1000 bytes needed, \d+ bytes free"):
                reserve(tmp_path / name, 1000)
        assert path.read_bytes() == b"x" * 10
        assert not (tmp_path / "new").exists()


def test_fsync_dir_passes_real_errors_on(tmp_path, monkeypatch):
    fsync_dir(tmp_path)

    def fail(code: int) -> None:
        def raise_it(_: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("os.fsync", raise_it)

    fail(errno.EINVAL)
    fsync_dir(tmp_path)  # some file systems cannot
    fail(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        fsync_dir(tmp_path)


def test_a_new_directory_takes_the_place_of_whatever_is_there(tmp_path):
    for name in ("empty", "target", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "old").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("empty", "full", "file", "link", "none"):
        with new_directory(tmp_path / name, overwrite=True) as place:
            (place / "new").touch()
        assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]
        assert not (tmp_path / name).is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "link", "none", "target"]
