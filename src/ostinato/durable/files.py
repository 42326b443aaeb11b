"""Files and directories: atomic replacement, fsync, safe names, disk space, positioned reads, locks, new paths."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import os
import re
import shutil
import stat
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ostinato._backend import backend
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    DamagedFileError,
    MissingFileError,
    StorageMemoryError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from pathlib import Path

# The system has one of the two; typed as Any, since it depends on the system.
fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
msvcrt: Any = importlib.import_module("msvcrt") if importlib.util.find_spec("msvcrt") else None
# Windows has no limit of open files.
_resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None
LOCK_NAME = ".ostinato.lock"
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_SUFFIX = ".ostinato-tmp"
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}", re.ASCII)
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_COPY_BYTES = 2**20
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS}
_NO_MORE = {errno.EMFILE, errno.ENFILE}
GAP_BYTES = 4096
"""Pieces with smaller gaps are read in one call: the gap adds no page."""
_SEEKING = threading.Lock()
_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
# Opening a FIFO must not wait for a writer.
_READ = os.O_RDONLY | _COMMON | getattr(os, "O_NONBLOCK", 0)


def damaged(path: object, problem: str, where: str = "") -> NoReturn:
    """Raise for a damaged file.

    Args:
        path: The file, or what else is damaged.
        problem: What is wrong with it.
        where: Where in the file: `in line 2`.

    Raises:
        DamagedFileError: Always.
    """
    msg = f"{path} is damaged{where and ' '}{where}: {problem}"
    raise DamagedFileError(msg)


def new_token() -> str:
    """Return 16 random hexadecimal digits that make a file name unique."""
    return os.urandom(8).hex()


def sync_fd(fd: int) -> None:
    """Wait until the bytes of an open file are on the disk, not only in its cache."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)  # on macOS, fsync leaves the bytes in the cache of the drive
    if full_sync is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, full_sync)
            return
    os.fsync(fd)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _find_sync_file_range()


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Start writing bytes to the disk, so that a later sync takes less time. This is a hint."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, 2)  # SYNC_FILE_RANGE_WRITE: does not wait


def fsync_dir(path: Path) -> None:
    """Wait until the names in a directory are on the disk; does nothing if the system does not support it."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Wait until the bytes of a closed file are on the disk."""
    fd = os.open(path, (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | _COMMON)
    try:
        sync_fd(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> list[Path]:
    """Create a directory and its missing parents durably; return those that were missing, parents first."""
    missing = [place for place in (path, *path.parents) if not place.exists()][::-1]
    for place in missing:
        place.mkdir(exist_ok=True)
        fsync_dir(place.parent)
    return missing


def create_file(path: Path, *, read: bool = False) -> int:
    """Create a file that does not exist yet; return its descriptor, open for writing, with `read` also for reading."""
    return os.open(path, (os.O_RDWR if read else os.O_WRONLY) | os.O_CREAT | os.O_EXCL | _COMMON, 0o666)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a single system call may write less."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def new_contents(path: Path, temporary: Path, needed_bytes: int) -> Iterator[int]:
    """Yield the descriptor of the new file `temporary`, which becomes `path` at the end.

    After an error the new file is removed, and `path` is unchanged.

    Raises:
        StorageMemoryError: The disk is full.
    """
    with disk_errors(path, needed_bytes):
        fd = create_file(temporary, read=True)
        try:
            try:
                yield fd
            finally:
                os.close(fd)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Replace the file `path` by `data`. After a crash, it contains either the old or the new bytes.

    Args:
        path: File to create or replace; its directory must exist.
        data: Bytes to write.

    Raises:
        StorageMemoryError: The disk is full; the old file is unchanged.
    """
    with new_contents(path, path.with_name(f"{path.name}.{new_token()}.tmp"), memoryview(data).nbytes) as fd:
        write_all(fd, data)
        sync_fd(fd)
    fsync_dir(path.parent)


def safe_join(root: Path, name: str) -> Path:
    """Return `root / name` for a name from a file, which cannot lead out of `root`.

    Args:
        root: Directory that must contain the path.
        name: Parts of letters, digits, `_`, `.`, `+` and `-`, not beginning with a dot, separated by `/`.

    Raises:
        DamagedFileError: The name is absolute, has `..` or other characters, or a part of it is a symbolic
            link.
    """
    return join_parts(root, name.split("/"), _COMPONENT)


def join_parts(root: Path, parts: Sequence[str], allowed: re.Pattern[str]) -> Path:
    """Return the path of names below `root`; each must match `allowed`, and none may be a symbolic link.

    Raises:
        DamagedFileError: A name is not allowed, or the path leads through a link.
    """
    if not all(map(allowed.fullmatch, parts)):
        name = "/".join(parts)[:200]
        msg = f"{root}: the file name {name!r} is not allowed: names must not leave the directory"
        raise DamagedFileError(msg)
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            msg = f"{path} is a symbolic link, and links are not followed here: replace it by the file"
            raise DamagedFileError(msg)
    return path


def open_file(path: Path) -> int:
    """Open a regular file for reading, but no symbolic link, directory or FIFO.

    Raises:
        MissingFileError: There is nothing at the path.
        DamagedFileError: There is something else at the path.
    """
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        _raise_unreadable(path, error)
    try:
        _check_regular(path, os.fstat(fd))
    except DamagedFileError:
        os.close(fd)
        raise
    return fd


def file_size(path: Path) -> int:
    """Return the bytes of a regular file, which is not opened; raises what `open_file` raises."""
    try:
        status = path.lstat()
    except OSError as error:
        _raise_unreadable(path, error)
    _check_regular(path, status)
    return status.st_size


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        msg = f"{path} is not a regular file"
        raise DamagedFileError(msg)


def _raise_unreadable(path: Path, error: OSError) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        msg = f"{path} is missing: the checkpoint is not complete"
        raise MissingFileError(msg) from error
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
        msg = f"{path} is not a regular file: {error.strerror}"
        raise DamagedFileError(msg) from error
    raise error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield the descriptor of a regular file that is open for reading; see `open_file`."""
    fd = open_file(path)
    try:
        yield fd
    finally:
        os.close(fd)


def read_small(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        MissingFileError: There is nothing at the path.
        DamagedFileError: It is larger than `most_bytes`, or no regular file.
    """
    with os.fdopen(open_file(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most_bytes:
            damaged(path, f"{size} bytes, at most {most_bytes} are allowed")
        return stream.read(most_bytes)


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file to a new file, and wait until its bytes are on the disk.

    Raises:
        DamagedFileError: `source` is not a regular file.
        StorageMemoryError: The disk is full; the new file is removed.
    """
    with opened(source) as fd, new_contents(target, target, os.fstat(fd).st_size) as new:
        while data := os.read(fd, _COPY_BYTES):
            write_all(new, data)
        sync_fd(new)


def link_file(source: Path, target: Path) -> bool:
    """Create a hard link to a regular file in another directory; its bytes are on the disk afterwards.

    A change in place is visible under both names; a replacement by renaming changes one of them.

    Returns:
        False if the file system has no hard links, `target` is on another file system, or the user may not link this
        file; nothing has changed then.

    Raises:
        DamagedFileError: `source` is not a regular file.
        StorageMemoryError: The disk is full.
    """
    with opened(source) as fd:
        with disk_errors(target, 0):
            try:
                os.link(source, target, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                return False
        sync_fd(fd)
        return True


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to a file, or copy it if that is not possible; its bytes are on the disk afterwards.

    Raises:
        DamagedFileError: `source` is not a regular file.
        StorageMemoryError: The disk is full; the new file is removed.
    """
    if not link_file(source, target):
        copy_file(source, target)


def free_bytes(path: Path) -> int:
    """Return the bytes free for this user on the disk of `path`, which need not exist yet."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def check_free(path: Path, needed_bytes: int) -> None:
    """Check that the disk of `path` has enough free space.

    Raises:
        StorageMemoryError: It has not; names the bytes needed and the bytes free.
    """
    free = free_bytes(path)
    if needed_bytes > free:
        raise StorageMemoryError(_no_room(path, needed_bytes, free, "disk too small"))


@contextlib.contextmanager
def disk_errors(path: Path, needed_bytes: int) -> Iterator[None]:
    """Convert "no space", "over quota" and "file too large" to `StorageMemoryError` with the numbers of bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = _no_room(path, needed_bytes, free_bytes(path), str(error.strerror))
        raise StorageMemoryError(message) from error


def _no_room(path: Path, needed_bytes: int, free: int, reason: str) -> str:
    return (
        f"cannot write {path}: {needed_bytes} bytes needed, {free} bytes free ({reason}): "
        "free disk space, raise the quota or file-size limit, or choose another path"
    )


def reserve(path: Path, nbytes: int) -> None:
    """Extend a file to at least `nbytes` bytes and reserve the disk space for them.

    A write to a mapped file without reserved space kills the process with SIGBUS when the disk is full. If the system
    cannot reserve space (Windows, macOS), the free space is checked, and the file is only extended.

    Args:
        path: The file, which is created if it is missing.
        nbytes: Length in bytes; a longer file is unchanged.

    Raises:
        StorageMemoryError: Too little space; the file is as before.
    """
    existed = path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | _COMMON, 0o666)
    size = os.fstat(fd).st_size
    try:
        with disk_errors(path, nbytes):
            if nbytes and not _allocate(fd, nbytes):
                check_free(path, nbytes - size)
                os.ftruncate(fd, max(nbytes, size))
    except BaseException:
        if existed:
            os.ftruncate(fd, size)  # releases what was reserved before the disk was full
        else:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _allocate(fd: int, nbytes: int) -> bool:
    """Reserve space in the file system; False if it does not support that."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


# -- positioned reads, and open files that are closed when they have not been used for long ----------------------------


def read_into(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with the bytes at `offset`.

    Raises:
        DamagedFileError: The file is too short.
    """
    done = _fill(fd, view, offset)
    if done < len(view):
        damaged(path, f"it ends at byte {offset + done}, {len(view) - done} more expected: it was cut")


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` with the bytes at `offset`; return their number, which is smaller at the end of the file."""
    done = 0
    while done < len(view):
        if hasattr(os, "preadv"):
            count = os.preadv(fd, [view[done:]], offset + done)
        else:
            data = pread(fd, len(view) - done, offset + done)
            count = len(data)
            view[done : done + count] = data
        if count == 0:
            break
        done += count
    return done


def read_pieces(fds: np.ndarray, offsets: np.ndarray, widths: np.ndarray, targets: np.ndarray) -> int:
    """Read pieces of open files, each to its address; the extension reads adjacent pieces of a file in one call.

    Args:
        fds: The file of each piece, int64 `[N]`.
        offsets: Offset of each piece, int64 `[N]`, ascending within a file.
        widths: Bytes of each piece, int64 `[N]`.
        targets: Address of the memory for each piece, int64 `[N]`.

    Returns:
        The first piece for which its file is too short, or N. Memory from this piece on is undefined.

    Raises:
        OSError: A read failed.
    """
    read_ranges = getattr(backend.native, "read_ranges", None)
    if read_ranges is not None:
        columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (fds, offsets, widths, targets)]
        reached, error = read_ranges(*(column.ctypes.data for column in columns), len(fds), GAP_BYTES)
        if error:
            raise OSError(error, os.strerror(error))
        return int(reached)
    pieces = zip(fds.tolist(), offsets.tolist(), widths.tolist(), targets.tolist(), strict=True)
    for number, (fd, offset, width, target) in enumerate(pieces):
        view = memoryview((ctypes.c_char * width).from_address(target)).cast("B")
        if _fill(fd, view, offset) < width:
            return number
    return len(fds)


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """Return up to `nbytes` bytes at `offset`."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _SEEKING:  # Windows
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def _share() -> int:
    """Return half of the number of files that the process may open."""
    if _resource is None:
        return sys.maxsize
    most, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return sys.maxsize if most == _resource.RLIM_INFINITY else max(1, most // 2)


@final
class OpenFile:
    """A file descriptor that is closed with the last reference to this object."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        """Open a regular file.

        Raises:
            DamagedFileError: It is missing, or not a regular file.
        """
        self.fd = -1
        self.fd = open_file(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the system reads 128 KiB ahead for each row

    def __del__(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)


@final
class OpenFiles:
    """Open files by key, closed by `close()`. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` files open besides those in use, and at most half of what the process may open."""
        self.limit = min(limit, _share())
        self._files: OrderedDict[Hashable, OpenFile] = OrderedDict()
        self.lock = threading.Lock()
        """Held during a lookup and while a file is opened."""

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def get(self, key: Hashable, path: Callable[[], Path]) -> OpenFile:
        """Return an open file, which stays open as long as the caller has a reference to it.

        Args:
            key: Identifies the file; faster to create and to compare than a path.
            path: Called if the file is not open.

        Raises:
            DamagedFileError: It is missing, or not a regular file.
        """
        with self.lock:
            file = self._files.get(key)
            if file is None:
                file = self._open(path())
                self._files[key] = file
                if len(self._files) > self.limit:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(key)
            return file

    def _open(self, path: Path) -> OpenFile:
        try:
            return OpenFile(path)
        except OSError as error:
            if error.errno not in _NO_MORE:
                raise
            if not self._files:
                msg = (
                    f"no more files can be opened ({error.strerror}): give a lower max_open_files (it is "
                    f"{self.limit}), or raise the limit of the process (ulimit -n)"
                )
                raise CapacityError(msg) from error
        self._files.clear()  # closes the files that are not in use
        return self._open(path)

    def clear(self) -> None:
        """Close all files that are not in use."""
        with self.lock:
            self._files.clear()

    close = clear


# -- locked and new directories ---------------------------------------------------------------------------------------


@final
class DirectoryLock:
    """Exclusive right of a thread or process to save into a directory.

    File systems without locks are saved to without one.
    """

    def __init__(self, root: Path) -> None:
        """Name the directory; `acquire` locks it."""
        self._path = root / LOCK_NAME
        self._fd = -1

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            CheckpointError: Another thread or process is saving into this directory.
        """
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | _COMMON, 0o666)
            try:
                _lock(fd, self._path)
                current = self._is_current(fd)
            except BaseException:
                os.close(fd)
                raise
            if current:
                self._fd = fd
                return
            os.close(fd)  # its last owner removed this file: lock the one that others will open

    def release(self, root: Path | None = None) -> None:
        """Release the lock and remove its file; does nothing if it is not held.

        Args:
            root: New path of the directory, if it was renamed.
        """
        if root is not None:
            self._path = root / LOCK_NAME
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):  # Windows cannot remove an open file; the next save uses it
            self._path.unlink()
        os.close(self._fd)
        self._fd = -1

    def _is_current(self, fd: int) -> bool:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(fd))


def _lock(fd: int, path: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt is not None:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno in _BUSY:
            msg = f"{path.parent} is being saved to by another thread or process: save elsewhere, or later"
            raise CheckpointError(msg) from error


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
