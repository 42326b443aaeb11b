"""Files that hold nested dicts of tensors and plain values: the formats `pt`, `pkl` and `safetensors`."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any, final

import xxhash
from torch import Tensor

from ostinato.durable import safetensors, torchfile
from ostinato.durable.dtypes import dtype_name
from ostinato.durable.files import create_file, disk_errors, new_token, open_file, sync_fd, write_all
from ostinato.durable.headers import Header, Placed
from ostinato.durable.positioned_reads import pread, read_tensor
from ostinato.durable.trees import flatten, nest
from ostinato.errors import CheckpointError, DamagedFileError, KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ostinato.durable.trees import TreePath

__all__ = ["FORMATS", "check_format", "check_tree", "file_checksum", "read_header", "read_tree", "write_tree"]

FORMATS = ("pt", "pkl", "safetensors")
_STEP_BYTES = 2**20


def check_format(name: object, *, allow_pickle: bool) -> str:
    """Return the name of a format.

    Raises:
        OptionError: There is no such format, or it requires `allow_pickle`.
    """
    if name not in FORMATS:
        msg = f"trajectory_format must be one of {', '.join(FORMATS)}, got {name!r}"
        raise OptionError(msg)
    if name == "pkl" and not allow_pickle:
        msg = (
            "trajectory_format 'pkl' is read by unpickling, which executes code in the file: give "
            "allow_pickle=True if you trust every file, or use 'safetensors' or 'pt'"
        )
        raise OptionError(msg)
    return str(name)


def check_tree(tree: Mapping[str, Any], format_name: str, where: object) -> None:
    """Check that `write_tree` can write a tree in this format.

    Raises:
        KindError: naming the values.
    """
    if format_name == "safetensors":
        values = flatten(tree, where=where)
        try:
            safetensors.check({key: value for key, value in values.items() if isinstance(value, Tensor)})
        except CheckpointError as error:
            msg = f"{where}: {error}"
            raise KindError(msg) from error


@final
class _Sink:
    """Writes to a descriptor and computes a checksum."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._hash = xxhash.xxh3_64()
        self.error: OSError | None = None
        """The error of a failed write, which torch does not report."""

    def write(self, data: bytes | memoryview) -> int:
        """Write all bytes and return their number."""
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        for start in range(0, len(view), _STEP_BYTES):
            step = view[start : start + _STEP_BYTES]
            self._hash.update(step)
            try:
                write_all(self._fd, step)
            except OSError as error:
                self.error = error
                raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: bytes are not buffered."""

    def checksum(self) -> str:
        """Return the checksum of all bytes."""
        return self._hash.hexdigest()


def write_tree(path: Path, tree: Mapping[str, Any], format_name: str, *, sync: bool) -> tuple[Header, str]:
    """Write a new file under another name, then rename it. The caller syncs the directory.

    Args:
        path: The file.
        tree: Nested dicts; tensors are contiguous and on the CPU.
        format_name: `pt`, `pkl` or `safetensors`.
        sync: Wait until the bytes are on the disk before the file is renamed.

    Returns:
        The header of the file, and its XXH3-64.

    Raises:
        StorageMemoryError: The disk is full; the file is removed.
    """
    values = flatten(tree, where=path)
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    plain = {key: value for key, value in values.items() if key not in tensors}
    temporary = path.with_name(f".{new_token()}.tmp")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with disk_errors(path, nbytes):
            fd = create_file(temporary)
            try:
                sink = _Sink(fd)
                _write(sink, tensors, plain, format_name)
                if sync:
                    sync_fd(fd)
            finally:
                os.close(fd)
        header = _written_header(temporary, tensors, plain, format_name)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return header, sink.checksum()


def _write(sink: _Sink, tensors: dict[TreePath, Tensor], plain: dict[TreePath, Any], format_name: str) -> None:
    if format_name == "safetensors":
        safetensors.write(sink, tensors, plain)
    elif format_name == "pt":
        try:
            torchfile.write(sink, tensors, plain)
        except RuntimeError as error:
            raise sink.error or error from None
    else:
        pickle.dump(nest({**tensors, **plain}), sink, protocol=4)


def _written_header(
    path: Path, tensors: dict[TreePath, Tensor], plain: dict[TreePath, Any], format_name: str
) -> Header:
    if format_name == "pkl":  # the values are known: nothing is unpickled
        return _pickled_header(path.stat().st_size, {**tensors, **plain})
    return read_header(path, format_name, allow_pickle=False)


def read_header(path: Path, format_name: str, *, allow_pickle: bool) -> Header:
    """Read the header of a file; the bytes of tensors are read for `pkl` only.

    Raises:
        DamagedFileError: The file is missing or damaged.
        OptionError: It is a pickle, and `allow_pickle` is False.
    """
    check_format(format_name, allow_pickle=allow_pickle)
    if format_name == "pkl":
        values = _unpickle(path)
        return _pickled_header(path.stat().st_size, values)
    fd = open_file(path)
    try:
        return safetensors.read_header(fd, path) if format_name == "safetensors" else torchfile.read_header(fd, path)
    finally:
        os.close(fd)


def read_tree(path: Path, format_name: str, *, allow_pickle: bool) -> dict[str, Any]:
    """Read a whole file into new tensors.

    Raises:
        DamagedFileError: The file is missing or damaged.
        OptionError: It is a pickle, and `allow_pickle` is False.
    """
    check_format(format_name, allow_pickle=allow_pickle)
    if format_name == "pkl":
        return nest(_unpickle(path))
    header = read_header(path, format_name, allow_pickle=False)
    fd = open_file(path)
    try:
        tensors = {placed.path: read_tensor(fd, placed, path) for placed in header.tensors}
    finally:
        os.close(fd)
    return nest({**tensors, **header.plain})


def file_checksum(path: Path, format_name: str, *, deep: bool) -> str:
    """Read a file and return its XXH3-64; with `deep`, also verify the checksums inside of `pt` archives.

    Raises:
        DamagedFileError: The file is missing, or a checksum inside of it does not match.
    """
    fd = open_file(path)
    try:
        if deep and format_name == "pt":
            torchfile.check_crc(fd, path)
        checksum, offset = xxhash.xxh3_64(), 0
        while data := pread(fd, _STEP_BYTES, offset):
            checksum.update(data)
            offset += len(data)
        return checksum.hexdigest()
    finally:
        os.close(fd)


def _unpickle(path: Path) -> dict[TreePath, Any]:
    """Unpickle a file, which executes code in it; called only if the user allows it."""
    fd = open_file(path)
    with os.fdopen(fd, "rb") as stream:
        try:
            tree = pickle.load(stream)  # noqa: S301 - the user has allowed it
        except Exception as error:  # a damaged pickle may raise any exception
            msg = f"{path} is damaged: {str(error)[:200]}"
            raise DamagedFileError(msg) from error
    if not isinstance(tree, dict):
        msg = f"{path} is damaged: it contains a {type(tree).__name__}, a dict expected"
        raise DamagedFileError(msg)
    values = flatten(tree, where=path)
    return {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in values.items()}


def _pickled_header(nbytes: int, values: dict[TreePath, Any]) -> Header:
    """Return the header of a pickle, whose tensors have no offsets (-1)."""
    placed = tuple(
        Placed(key, dtype_name(value.dtype), tuple(value.shape), -1)
        for key, value in values.items()
        if isinstance(value, Tensor)
    )
    return Header(nbytes, placed, {key: value for key, value in values.items() if not isinstance(value, Tensor)})
