"""New directories and files that appear completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from ostinato.durable.files import fsync_dir, make_directories, new_token
from ostinato.durable.locks import DirectoryLock
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["check_new_path", "new_directory", "new_file"]

_SUFFIX = ".ostinato-tmp"


def check_new_path(path: Path) -> None:
    """Raise if a path exists and is not an empty directory.

    Raises:
        CheckpointError: The message names the path.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        msg = f"{path} exists and is no directory: choose a new path"
        raise CheckpointError(msg)
    if path.is_dir() and any(path.iterdir()):
        msg = f"{path} exists and is not empty: choose a new path, or remove it first"
        raise CheckpointError(msg)


@contextlib.contextmanager
def new_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside `path` that is renamed to `path` at the end, or removed after an error.

    Temporary directories that killed processes left are removed.

    Args:
        path: The new directory.
        overwrite: Replace what is at the path. It is renamed to a name that ends with `.old` first, and removed last:
            after a kill between both renames it is there under that name.

    Raises:
        CheckpointError: The path exists and is not an empty directory.
    """
    if not overwrite:
        check_new_path(path)
    with _locked(path) as (temporary, lock):
        yield temporary
        fsync_dir(temporary)
        if os.name == "nt":  # a directory with an open file cannot be renamed on Windows
            lock.release()
        old = _set_aside(path)
        try:
            temporary.rename(path)
        except OSError:
            if old is not None:
                old.rename(path)
            raise
        lock.release(path)  # not before: an unlocked temporary directory counts as abandoned
    fsync_dir(path.parent)
    if old is not None:
        _remove(old)


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of a file in a temporary directory; at the end it becomes `path`, after an error it is removed.

    Raises:
        CheckpointError: The path exists and `overwrite` is False, or it is a directory.
    """
    if os.path.lexists(path) and (not overwrite or path.is_dir()):
        msg = f"{path} exists: choose a new path"
        raise CheckpointError(msg)
    with _locked(path) as (temporary, lock):
        yield temporary / path.name
        (temporary / path.name).replace(path)
        lock.release()
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_dir(path.parent)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[Path, DirectoryLock]]:
    """Yield a temporary directory beside a path, and its lock; it is removed after an error."""
    make_directories(path.parent)
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{new_token()}{_SUFFIX}")
    temporary.mkdir()
    lock = DirectoryLock(temporary)
    try:
        lock.acquire()
        yield temporary, lock
    except BaseException:
        lock.release()
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _set_aside(path: Path) -> Path | None:
    """Rename what is at a path; return its new path. None if nothing is there that a rename would not replace."""
    if not os.path.lexists(path):
        return None
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        if os.name == "nt":
            path.rmdir()
        return None
    old = path.with_name(f"{path.name}.{new_token()}.old")
    path.rename(old)
    return old


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_abandoned(path: Path) -> None:
    """Remove temporary directories of this path that no process has locked."""
    for left in path.parent.iterdir():
        name = left.name
        token = name.removeprefix(f".{path.name}.").removesuffix(_SUFFIX)
        if name != f".{path.name}.{token}{_SUFFIX}" or len(token) != len(new_token()) or "." in token:
            continue  # of another path whose name begins with this one
        lock = DirectoryLock(left)
        with contextlib.suppress(CheckpointError, OSError):
            lock.acquire()
            shutil.rmtree(left, ignore_errors=True)
            lock.release()
