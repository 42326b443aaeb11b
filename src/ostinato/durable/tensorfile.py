"""Files that hold nested dicts of tensors and plain values: the formats `pt`, `pkl` and `safetensors`.

The position of each tensor in a file of `pt` or `safetensors` is known from its header, so that rows can be read at
offsets. Only `pkl` executes code when it is read.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import zipfile
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, cast, final

import torch
import xxhash
from torch import Tensor

from ostinato.durable.arrays import DTYPES, check_shape, dtype_name, raw_view, shape_nbytes
from ostinato.durable.files import (
    damaged,
    new_contents,
    new_token,
    opened,
    pread,
    read_into,
    sync_fd,
    write_all,
)
from ostinato.durable.manifest import parse_json
from ostinato.errors import CheckpointError, DamagedFileError, KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


FORMATS = ("pt", "pkl", "safetensors")
_STEP_BYTES = 2**20
_PAGE = 4096


TreePath: TypeAlias = "tuple[str, ...]"
MAX_DEPTH = 32


def show(path: TreePath) -> str:
    """Return a path for messages: `curr_obs.main_images`."""
    return ".".join(path)


def flatten(tree: Mapping[str, Any], *, where: object) -> dict[TreePath, Any]:
    """Return the values of nested dicts by their paths in order, including empty dicts.

    Raises:
        KindError: A key is not text, or dicts are nested more than 32 deep.
    """
    found: dict[TreePath, Any] = {}
    waiting: list[tuple[TreePath, Any]] = [((), tree)]
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, dict) or (path and not value):
            found[path] = value
            continue
        if len(path) >= MAX_DEPTH:
            msg = f"{where}: {show(path)[:80]} is nested more than {MAX_DEPTH} deep"
            raise KindError(msg)
        for key in value:
            if not isinstance(key, str):
                msg = (
                    f"{where}: the key {key!r:.80} in {show(path) or 'the root'} must be text, got {type(key).__name__}"
                )
                raise KindError(msg)
        waiting += [((*path, key), value[key]) for key in reversed(value)]
    return found


def nest(values: Mapping[TreePath, Any]) -> dict[str, Any]:
    """Return nested dicts: the inverse of `flatten`."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return root


class Placed(NamedTuple):
    """One tensor in a file.

    Attributes:
        path: Keys from the root.
        dtype: Name of the dtype.
        shape: Sizes.
        offset: Byte of its first element.
        strides: Bytes from one index to the next in each dimension; None if the elements are contiguous.
    """

    path: TreePath
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return shape_nbytes(self.shape, self.torch_dtype)

    def end(self) -> int:
        """Return the offset after its last byte."""
        if self.strides is None or 0 in self.shape:
            return self.offset + self.nbytes
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + reach + self.torch_dtype.itemsize

    def check(self, file_bytes: int, where: Path) -> None:
        """Check that it lies inside a file of `file_bytes` bytes.

        Raises:
            DamagedFileError: naming the tensor.
        """
        if not 0 <= self.offset <= self.end() <= file_bytes or any(s < 0 for s in self.strides or ()):
            damaged(where, f"{show(self.path)[:80]} ends at byte {self.end()} of {file_bytes}")

    def read(self, fd: int, path: Path) -> Tensor:
        """Read all bytes from the first to the last element into new memory; strides are those of the file.

        Raises:
            DamagedFileError: The file is too short.
        """
        with torch.inference_mode(mode=False):
            raw = torch.empty(self.end() - self.offset, dtype=torch.uint8, device="cpu")
        read_into(fd, raw_view(raw), self.offset, path)
        flat = raw.view(self.torch_dtype)
        if self.strides is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, [step // flat.itemsize for step in self.strides])


class Header(NamedTuple):
    """What a file holds: `tensors` in order, and other values by their paths."""

    nbytes: int
    tensors: tuple[Placed, ...]
    plain: dict[TreePath, Any]


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
        try:
            _check_safetensors(_tensors(flatten(tree, where=where)))
        except CheckpointError as error:
            msg = f"{where}: {error}"
            raise KindError(msg) from error


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
    temporary = path.with_name(f".{new_token()}.tmp")
    with new_contents(path, temporary, sum(tensor.nbytes for tensor in _tensors(values).values())) as fd:
        sink = _Sink(fd)
        _WRITERS[format_name](sink, values)
        if sync:
            sync_fd(fd)
        if format_name == "pkl":  # the values are known: nothing is unpickled
            return _pickled_header(fd, values), sink.checksum()
        return _READERS[format_name](fd, temporary), sink.checksum()


def read_header(path: Path, format_name: str, *, allow_pickle: bool) -> Header:
    """Read the header of a file; the bytes of tensors are read for `pkl` only.

    Raises:
        DamagedFileError: The file is missing or damaged.
        OptionError: It is a pickle, and `allow_pickle` is False.
    """
    check_format(format_name, allow_pickle=allow_pickle)
    with opened(path) as fd:
        return _READERS[format_name](fd, path)


def read_tree(path: Path, format_name: str, *, allow_pickle: bool) -> dict[str, Any]:
    """Read a whole file into new tensors.

    Raises:
        DamagedFileError: The file is missing or damaged.
        OptionError: It is a pickle, and `allow_pickle` is False.
    """
    check_format(format_name, allow_pickle=allow_pickle)
    with opened(path) as fd:
        if format_name == "pkl":
            return nest(_unpickle(fd, path))
        header = _READERS[format_name](fd, path)
        tensors = {placed.path: placed.read(fd, path).contiguous() for placed in header.tensors}
    return nest({**tensors, **header.plain})


def file_checksum(path: Path, format_name: str, *, deep: bool) -> str:
    """Read a file and return its XXH3-64; with `deep`, also verify the checksums inside of `pt` archives.

    Raises:
        DamagedFileError: The file is missing, or a checksum inside of it does not match.
    """
    with opened(path) as fd:
        if deep and format_name == "pt":
            _check_crc(fd, path)
        checksum, offset = xxhash.xxh3_64(), 0
        while data := pread(fd, _STEP_BYTES, offset):
            checksum.update(data)
            offset += len(data)
        return checksum.hexdigest()


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
        view = memoryview(data).cast("B")
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


def _tensors(values: Mapping[TreePath, Any]) -> dict[TreePath, Tensor]:
    return {path: value for path, value in values.items() if isinstance(value, Tensor)}


def _others(values: Mapping[TreePath, Any]) -> dict[TreePath, Any]:
    return {path: value for path, value in values.items() if not isinstance(value, Tensor)}


# -- pickles -----------------------------------------------------------------------------------------------------------


def _write_pickle(sink: _Sink, values: dict[TreePath, Any]) -> None:
    pickle.dump(nest(values), sink, protocol=4)


def _unpickle(fd: int, path: Path) -> dict[TreePath, Any]:
    """Unpickle a file, which executes code in it; called only if the user allows it."""
    with os.fdopen(fd, "rb", closefd=False) as stream:
        try:
            tree = pickle.load(stream)  # noqa: S301 - the user has allowed it
        except Exception as error:  # a damaged pickle may raise any exception
            msg = f"{path} is damaged: {str(error)[:200]}"
            raise DamagedFileError(msg) from error
    values = flatten(_as_dict(tree, path), where=path)
    return {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in values.items()}


def _as_dict(tree: object, path: Path) -> dict[str, Any]:
    if not isinstance(tree, dict):
        damaged(path, f"it contains a {type(tree).__name__}, a dict expected")
    return tree


def _pickled_header(fd: int, values: dict[TreePath, Any]) -> Header:
    """Return the header of a pickle, whose tensors have no offsets (-1)."""
    placed = (Placed(key, dtype_name(value.dtype), tuple(value.shape), -1) for key, value in _tensors(values).items())
    return Header(os.fstat(fd).st_size, tuple(placed), _others(values))


# -- safetensors: eight bytes of length, a JSON header, then the bytes of the tensors without gaps ---------------------

_TAGS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
_NAMES = {tag: name for name, tag in _TAGS.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_META = "__metadata__"
_OWN = "ostinato"


def _write_safetensors(sink: _Sink, values: dict[TreePath, Any]) -> None:
    """Write contiguous CPU tensors and plain values.

    Names are paths joined by `.`; the metadata contains, under `ostinato`, the paths in their order and the plain
    values as JSON. Tensors with small rows are written first and those with wide rows last, so that the small values of
    a row are close to each other; the header is padded so that the first wide tensor begins on a page boundary.

    Raises:
        CheckpointError: The format has no such dtype, or two paths have the same name.
    """
    tensors = _tensors(values)
    _check_safetensors(tensors)
    order = sorted(tensors, key=lambda path: (-tensors[path].element_size(), _row_bytes(tensors[path])))
    own = {"paths": [list(path) for path in tensors], "plain": nest(_others(values))}
    node: dict[str, Any] = {_META: {"format": "pt", _OWN: json.dumps(own, allow_nan=True)}}
    end, wide = 0, -1
    for path in order:
        tensor = tensors[path]
        start, end = end, end + tensor.nbytes
        wide = start if wide < 0 and _row_bytes(tensor) >= _PAGE else wide
        tag = _TAGS[dtype_name(tensor.dtype)]
        node[show(path)] = {"dtype": tag, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(node, separators=(",", ":")).encode()
    step = 8 if wide < 0 else _PAGE
    text += b" " * (-(8 + len(text) + max(wide, 0)) % step)
    sink.write(len(text).to_bytes(8, "little") + text)
    for path in order:
        sink.write(raw_view(tensors[path]))


def _check_safetensors(tensors: dict[TreePath, Tensor]) -> None:
    """Check that the format can hold tensors.

    Raises:
        CheckpointError: The format has no such dtype, or two paths have the same name.
    """
    names = [show(path) for path in tensors]
    if len(set(names)) < len(names) or _META in names:
        msg = f"keys must differ when they are joined by dots, and none may be {_META}, got {sorted(names)[:20]}"
        raise CheckpointError(msg)
    for name, tensor in zip(names, tensors.values(), strict=True):
        if dtype_name(tensor.dtype) not in _TAGS:
            msg = f"{name} is {tensor.dtype}, which safetensors cannot hold: use trajectory_format='pt'"
            raise CheckpointError(msg)


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[2:]) * tensor.element_size() if tensor.ndim > 1 else tensor.nbytes


def _read_safetensors(fd: int, path: Path) -> Header:
    """Read and verify the header of a safetensors file, also of other libraries.

    Raises:
        DamagedFileError: It is not a safetensors file, or its parts do not match.
    """
    size = os.fstat(fd).st_size
    length = int.from_bytes(pread(fd, 8, 0), "little")
    if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
        _invalid(path, f"a header of {length} bytes in a file of {size}")
    node = parse_json(pread(fd, length, 8), path)
    if not isinstance(node, dict):
        _invalid(path, "the header is not a JSON object")
    own_paths, plain = _own(node.pop(_META, {}), path)
    found = {name: _placed(name, entry, 8 + length, path) for name, entry in node.items()}
    end = 8 + length
    for placed in sorted(found.values(), key=lambda p: (p.offset, p.end())):
        if placed.offset != end:
            _invalid(path, f"a gap or an overlap at byte {end}")
        end = placed.end()
    if end != size:
        _invalid(path, f"{size} bytes, {end} according to its header")
    paths = own_paths or [(name,) for name in found]
    if sorted(map(show, paths)) != sorted(found):
        _invalid(path, "its metadata names other tensors than it contains")
    keys = sorted([*paths, *plain])
    for short, long in pairwise(keys):  # in sorted order, a path is followed by the paths that begin with it
        if long[: len(short)] == short:
            _invalid(path, f"{show(short)[:80]!r} is both a value and a dict, or occurs twice")
    return Header(size, tuple(found[show(keys)]._replace(path=keys) for keys in paths), plain)


def _placed(name: str, entry: Any, start: int, path: Path) -> Placed:
    try:
        dtype, shape = _NAMES[entry["dtype"]], check_shape(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        _invalid(path, f"the entry of {name[:80]!r} ({error!r})")
    if shape is None or type(begin) is not int or type(end) is not int or begin < 0:
        _invalid(path, f"the entry of {name[:80]!r}")
    placed = Placed((name,), dtype, shape, start + begin)
    if placed.nbytes != end - begin:
        _invalid(path, f"{name[:80]!r} has {end - begin} bytes, {placed.nbytes} expected")
    return placed


def _own(metadata: Any, path: Path) -> tuple[list[TreePath] | None, dict[TreePath, Any]]:
    """Return the paths and plain values that `_write_safetensors` noted; None and nothing in files of others."""
    text = metadata.get(_OWN) if isinstance(metadata, dict) else None
    if text is None:
        return None, {}
    try:
        own = json.loads(text)
        paths, plain = own["paths"], own["plain"]
        good = all(isinstance(keys, list) and keys and {str}.issuperset(map(type, keys)) for keys in paths)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _invalid(path, f"its metadata ({str(error)[:80]})")
    if not good or not isinstance(plain, dict):
        _invalid(path, "its metadata has no paths")
    return [tuple(keys) for keys in paths], flatten(plain, where=path)


def _invalid(path: Path, problem: str) -> NoReturn:
    damaged(path, f"not a valid safetensors file: {problem}")


# -- torch.save: a zip archive with uncompressed tensors; nothing is executed (`weights_only=True`) --------------------

_LOCAL_HEADER_BYTES = 30
_LOAD_ERRORS = (RuntimeError, OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, IndexError)
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError)


def _write_archive(sink: _Sink, values: dict[TreePath, Any]) -> None:
    try:
        torch.save(nest(values), cast("IO[bytes]", sink))  # it calls write and flush only
    except RuntimeError as error:
        raise sink.error or error from None


def _read_archive(fd: int, path: Path) -> Header:
    """Read the header of a file of `torch.save`; the bytes of its tensors are not read.

    `torch.load(mmap=True)` returns the position of each tensor in its storage, the directory of the archive the
    position of each storage in the file; both must agree.

    Raises:
        DamagedFileError: It is not an archive of `torch.save`, contains more than `weights_only=True` allows, or its
            parts do not match.
    """
    size = os.fstat(fd).st_size
    records = _records(fd, size, path)
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        msg = f"{path} contains more than tensors and plain values; nothing was executed: {str(error)[:300]}"
        raise DamagedFileError(msg) from error
    except _LOAD_ERRORS as error:
        damaged(path, str(error)[:300])
    values = flatten(_as_dict(tree, path), where=path)
    tensors = _tensors(values)
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            damaged(path, f"{show(key)[:80]} is not a dense plain tensor")
    base = _base(tensors.values(), records, path)
    placed = tuple(_place(key, tensor, base, path) for key, tensor in tensors.items())
    for piece in placed:
        piece.check(size, path)
    return Header(size, placed, _others(values))


def _check_crc(fd: int, path: Path) -> None:
    """Read a whole archive and verify the checksums of its records.

    Raises:
        DamagedFileError: naming the first record that differs.
    """
    try:
        with os.fdopen(fd, "rb", closefd=False) as stream, zipfile.ZipFile(stream) as archive:
            bad = archive.testzip()
    except _ZIP_ERRORS as error:
        damaged(path, str(error))
    if bad is not None:
        damaged(path, f"the checksum of its record {bad[:80]!r} differs")


def _records(fd: int, size: int, path: Path) -> list[tuple[int, int]]:
    """Return offset and size of each record with a storage in the order of the file."""
    found = []
    try:
        with os.fdopen(os.dup(fd), "rb") as stream, zipfile.ZipFile(stream) as archive:
            names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED or info.file_size > size for info in names.values()):
                damaged(path, "its records are compressed, which torch.save never does")
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                damaged(path, "its numbers are not little-endian")
            infos = [info for name, info in names.items() if name.startswith("data/") and info.file_size]
    except DamagedFileError:
        raise
    except _ZIP_ERRORS as error:
        damaged(path, f"not a file of torch.save in its format since 1.6: {error}")
    for info in infos:
        head = pread(fd, _LOCAL_HEADER_BYTES, info.header_offset)
        if len(head) < _LOCAL_HEADER_BYTES or head[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
            damaged(path, f"its record {info.filename[:80]!r} cannot be read in place")
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER_BYTES + lengths
        if start + info.file_size > size:
            damaged(path, f"its record {info.filename[:80]!r} ends after the file")
        found.append((start, info.file_size))
    return sorted(found)


def _base(tensors: Any, records: list[tuple[int, int]], path: Path) -> int:
    """Return the address to which byte 0 of the file is mapped, to convert addresses to offsets."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    mapped = sorted((address, nbytes) for address, nbytes in storages.items() if nbytes)
    if not mapped:
        return 0
    base = mapped[0][0] - records[0][0] if records else 0
    if [(address - base, nbytes) for address, nbytes in mapped] != records or base % mmap.PAGESIZE:
        damaged(path, "its storages are not at the offsets in its directory")
    return base


def _place(key: TreePath, tensor: Tensor, base: int, path: Path) -> Placed:
    try:
        dtype = dtype_name(tensor.dtype)
    except CheckpointError as error:
        msg = f"{path}: {show(key)[:80]}: {error}"
        raise DamagedFileError(msg) from error
    strides = None if tensor.is_contiguous() else tuple(step * tensor.element_size() for step in tensor.stride())
    offset = tensor.data_ptr() - base if tensor.numel() else 0
    return Placed(key, dtype, tuple(tensor.shape), offset, strides)


_WRITERS: dict[str, Callable[[_Sink, dict[TreePath, Any]], None]] = {
    "pt": _write_archive,
    "pkl": _write_pickle,
    "safetensors": _write_safetensors,
}
_READERS: dict[str, Callable[[int, Path], Header]] = {
    "pt": _read_archive,
    "pkl": lambda fd, path: _pickled_header(fd, _unpickle(fd, path)),
    "safetensors": _read_safetensors,
}
