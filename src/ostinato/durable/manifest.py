"""JSON files with checksums: the manifest of a checkpoint, journals, to which lines are appended, and Python values.

A manifest names the contents of a directory and is replaced atomically. Lines that were appended to a journal and
synced survive a crash; an incomplete last line was never reported as written and is ignored; any other damage raises.
Python state is converted to JSON values and back; decoding makes plain data only and executes nothing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from ostinato.durable.arrays import DTYPES, check_plain, check_shape, dtype_name, host_view, raw_view, shape_nbytes
from ostinato.durable.files import atomic_write, damaged, disk_errors, open_file, read_small, sync_fd, write_all
from ostinato.errors import CheckpointError, CheckpointNotFoundError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Store: TypeAlias = Callable[[Tensor, str], str]
    Load: TypeAlias = Callable[[str], Tensor]

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = (1, 4)
MAX_MANIFEST_BYTES = 64 * 2**20
_HEAD_KEYS = {"checksum", "format", "version"}
_BODY = b',"body":'
_DATA_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}\.bin", re.ASCII)
INLINE_BYTES = 64 * 2**10
_MAX_DEPTH = 64
_MAX_NUMPY_DIMS = 32
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_NUMPY_DTYPE = re.compile(r"\|b1|[|<>]([iu][1248]|f[248]|c(8|16)|[SU][1-9]\d{0,6})", re.ASCII)
_HEX_INT = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
_HEX_FLOAT = re.compile(r"nan|-?inf|-?0x[01]\.[0-9a-f]{1,13}p[+-]\d{1,4}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,4})?", re.ASCII)
_FORMAT_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}", re.ASCII)


@final
class Manifest(NamedTuple):
    """The content of a manifest that was read and verified.

    Attributes:
        format_name: Kind of checkpoint.
        version: Major and minor version of the format.
        body: The content.
    """

    format_name: str
    version: tuple[int, int]
    body: dict[str, Any]


def write_manifest(directory: str | Path, body: dict[str, Any], *, format_name: str) -> None:
    """Write or replace the manifest of a directory. After a crash, either the old or the new manifest is there.

    Args:
        directory: Existing directory.
        body: JSON objects, lists, strings, booleans, integers, finite floats and None.
        format_name: Kind of checkpoint: lower-case letters, digits, `_`, `.` and `-`.

    Raises:
        CheckpointError: The body is not JSON, contains NaN or an infinity, or takes more than 64 MiB.
        StorageMemoryError: The disk is full; the old manifest is unchanged.
    """
    if not _FORMAT_NAME.fullmatch(format_name):
        msg = f"format_name must be 1 to 64 lower-case letters, digits, '_', '.' or '-', got {format_name!r}"
        raise CheckpointError(msg)
    try:
        content = canonical(body)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"{directory}: the manifest cannot be written as JSON: {error}"
        raise CheckpointError(msg) from error
    version = list(FORMAT_VERSION)
    head = {"format": format_name, "version": version, "checksum": _checksum(format_name, version, content)}
    text = b"%s%s%s}\n" % (canonical(head)[:-1], _BODY, content)
    if len(text) > MAX_MANIFEST_BYTES:
        msg = (
            f"{directory}: the manifest would take {len(text)} bytes, {MAX_MANIFEST_BYTES} are allowed: "
            "keep large state in tensors, which are saved as files"
        )
        raise CheckpointError(msg)
    atomic_write(Path(directory) / MANIFEST_NAME, text)


def read_manifest(directory: str | Path, *, format_name: str) -> Manifest:
    """Read and verify the manifest of a directory.

    Args:
        directory: Directory of the checkpoint.
        format_name: Kind of checkpoint that the caller can read.

    Raises:
        CheckpointNotFoundError: The path does not exist, or the directory has no manifest.
        CheckpointError: The path is a file, or the checkpoint is of another kind or of a major version that this
            release cannot read.
        DamagedFileError: The file is not JSON, contains NaN, has other keys or another checksum, or is larger than
            64 MiB.
    """
    path = Path(directory) / MANIFEST_NAME
    _check_exists(path)
    text = read_small(path, MAX_MANIFEST_BYTES).removesuffix(b"\n")
    head, found, content = text.partition(_BODY)
    node = parse_json(head + b"}" if found else text, path)
    if not isinstance(node, dict) or not {"format", "version"} <= node.keys():
        damaged(path, "it is not a manifest of Ostinato: no format and version")
    version = _check_version(node, path, format_name)
    if not found or node.keys() != _HEAD_KEYS or content[:1] != b"{" or content[-1:] != b"}":
        keys = ", ".join([*sorted(_HEAD_KEYS), "body"])
        damaged(
            path, f"it must have exactly the keys {keys} in this order, the body an object without spaces before it"
        )
    checksum = _checksum(format_name, node["version"], content[:-1])
    if checksum != node["checksum"]:
        damaged(path, f"checksum {checksum}, {str(node['checksum'])[:40]!r} expected")
    return Manifest(format_name, version, parse_json(content[:-1], path))


def format_of(directory: str | Path) -> str | None:
    """Return the kind of checkpoint in a directory; None if there is no readable manifest."""
    try:
        node = parse_json(read_small(Path(directory) / MANIFEST_NAME, MAX_MANIFEST_BYTES), directory)
    except (CheckpointError, OSError):
        return None
    name = node.get("format") if isinstance(node, dict) else None
    return name if isinstance(name, str) else None


def data_files(directory: str | Path) -> tuple[str, ...]:
    """Return the names of the files in a directory that are named as those that a manifest describes."""
    try:
        names = [path.name for path in Path(directory).iterdir()]
    except OSError:
        return ()
    return tuple(sorted(name for name in names if _DATA_FILE.fullmatch(name)))


def holds_checkpoint(directory: str | Path) -> bool:
    """Return whether a directory has a manifest, or at least data files of a checkpoint whose manifest is missing."""
    return os.path.lexists(Path(directory) / MANIFEST_NAME) or bool(data_files(directory))


def canonical(node: object) -> bytes:
    """Return JSON without spaces, in ASCII, with keys in their order: the bytes that checksums cover."""
    return _ENCODER.encode(node).encode("ascii")


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def parse_json(text: bytes, where: Path | str) -> Any:
    """Parse JSON from a file, strictly: NaN and infinities are errors.

    Raises:
        DamagedFileError: The text is not JSON.
    """
    try:
        return _DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        damaged(where, f"not JSON: {str(error)[:200]}")


def parse_first(text: bytes, where: Path | str) -> Any:
    """Parse the JSON value with which a text begins; raises as `parse_json`."""
    try:
        return _DECODER.raw_decode(text.decode("utf-8"))[0]
    except (ValueError, RecursionError) as error:
        damaged(where, f"not JSON: {str(error)[:200]}")


def _reject_constant(name: str) -> NoReturn:
    msg = f"{name} is not allowed"
    raise ValueError(msg)


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _checksum(format_name: object, version: object, body: bytes) -> str:
    """Return the checksum of the JSON list `[format, version, body]`, whose last item is given as JSON."""
    return xxhash.xxh3_64_hexdigest(b"%s,%s]" % (canonical([format_name, version])[:-1], body))


def _check_exists(path: Path) -> None:
    """Raise if there is no manifest at `path`; the message says what is there instead."""
    if os.path.lexists(path):
        return
    root = path.parent
    if os.path.lexists(root) and not root.is_dir():
        msg = f"no checkpoint at {root}: it is a file, give the directory that dumps() wrote"
        raise CheckpointError(msg)
    msg = f"no checkpoint at {root}: {f'the directory has no {path.name}' if root.is_dir() else 'it does not exist'}"
    if data_files(root):
        msg += ", only data files: restore it from a copy, or save again if the first save was interrupted"
    raise CheckpointNotFoundError(msg)


def _check_version(node: dict[str, Any], path: Path, format_name: str) -> tuple[int, int]:
    if node["format"] != format_name:
        msg = f"{path} is of the format {str(node['format'])[:80]!r}, {format_name!r} expected"
        raise CheckpointError(msg)
    version = node["version"]
    if not isinstance(version, list) or list(map(type, version)) != [int, int] or min(version) < 0:
        damaged(path, f"version must be [major, minor], got {str(version)[:40]}")
    if version[0] != FORMAT_VERSION[0] or version[1] < FORMAT_VERSION[1]:
        msg = (
            f"{path} has format version {str(version[0])[:20]}.{str(version[1])[:20]}; "
            f"this release reads version {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}: "
            "use the release of Ostinato that wrote it, or a later one"
        )
        raise CheckpointError(msg)
    return version[0], version[1]


# -- files of lines: 16 hexadecimal digits (the XXH3-64 of the JSON), a space, the JSON and a line feed ----------------

_DIGITS = 16


def write_lines(path: Path, nodes: Iterable[dict[str, Any]]) -> None:
    """Replace the file `path` by lines. After a crash, it contains either the old or the new lines."""
    atomic_write(path, b"".join(map(_line, nodes)))


def read_lines(path: Path, *, whole: bool) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, to which other processes may append meanwhile.

    Args:
        path: The file.
        whole: Whether the file was written at once, so that an incomplete last line is damage.

    Raises:
        DamagedFileError: The file is missing, or a line is damaged.
    """
    with os.fdopen(open_file(path), "rb") as stream:
        size, end = os.fstat(stream.fileno()).st_size, 0
        for number, line in enumerate(stream, 1):
            end += len(line)
            torn = not line.endswith(b"\n")
            text = line[_DIGITS + 1 : -1]
            if torn or line[:_DIGITS] != xxhash.xxh3_64_hexdigest(text).encode() or line[_DIGITS : _DIGITS + 1] != b" ":
                if not whole and end >= size:  # the last line, or a line that is being written
                    return
                damaged(path, "its checksum does not match: restore it from a copy", f"in line {number}")
            node = parse_json(text, f"{path}: line {number}")
            if not isinstance(node, dict):
                damaged(path, "not a JSON object", f"in line {number}")
            yield node


def _line(node: dict[str, Any]) -> bytes:
    text = canonical(node)
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


@final
class Journal:
    """A file open for appending, closed by `close()`. Not thread-safe."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Create the file, or replace it, with the line `head`."""
        self._path = path
        self._broken = False
        write_lines(path, [head])
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        self._nbytes = os.fstat(self._fd).st_size

    def is_sound(self) -> bool:
        """Whether appended lines will be read: the file is intact, and its path still refers to it."""
        try:
            return not self._broken and os.path.samestat(os.fstat(self._fd), self._path.stat())
        except OSError:
            return False

    def append(self, nodes: Iterable[dict[str, Any]]) -> None:
        """Append lines: all of them are on the disk when this returns, and none of them after an error.

        Raises:
            StorageMemoryError: The disk is full.
            CheckpointError: An earlier failed append could not be undone.
        """
        if self._broken:
            msg = f"{self._path} could not be repaired after a failed write: close the buffer, which writes a new file"
            raise CheckpointError(msg)
        data = b"".join(map(_line, nodes))
        try:
            with disk_errors(self._path, len(data)):
                write_all(self._fd, data)
                sync_fd(self._fd)
        except BaseException:
            self._broken = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._nbytes)
                self._broken = False
            raise
        self._nbytes += len(data)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# -- Python values as JSON ---------------------------------------------------------------------------------------------

_PLAIN = frozenset({bool, int, str, type(None)})


def encode(value: object, *, where: str = "state", store: Store | None = None, inline_bytes: int = INLINE_BYTES) -> Any:
    """Convert Python state to JSON values from which `decode` makes equal state.

    Supported are None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, torch.Size, dtypes, devices,
    tensors (decoded as plain tensors on the CPU), and NumPy arrays and scalars of numbers and fixed-size strings. JSON
    holds None, bool, integers of 64 bits, text, lists and dicts with text keys as they are; everything else is an
    object with a single key that names its type, such as `{"$tuple": [1, 2]}`.

    Args:
        value: The state.
        where: Name of the value in error messages.
        store: Called with a tensor of more than `inline_bytes` bytes and its path in the state; returns the name under
            which `decode` can load it. Without it, all data becomes part of the JSON.
        inline_bytes: Largest size of a tensor, array or bytes object that becomes part of the JSON.

    Raises:
        CheckpointError: The state contains another type, or is nested more than 64 deep; the message names the path.
    """
    return _Encoder(where, store, inline_bytes).encode(value)


def decode(node: object, *, where: str = "state", load: Load | None = None) -> Any:
    """Convert JSON values made by `encode` back to Python state. Tensors are on the CPU.

    Args:
        node: Parsed JSON.
        where: Name of the value in error messages.
        load: Returns the tensor that `store` named; required if tensors were stored apart.

    Raises:
        DamagedFileError: A tag is unknown, a value does not fit its tag, sizes do not match, or the values are nested
            more than 64 deep. The size of a tensor is compared with its data before memory is allocated.
    """
    return _Decoder(where, load).decode(node)


@final
class _Encoder:
    """Converts values. Plain values inside of lists and dicts are copied without a call for each."""

    def __init__(self, where: str, store: Store | None, inline_bytes: int) -> None:
        self._path: tuple[str, ...] = (where,)
        """Steps to the current position, for messages."""
        self._store = store
        self._inline_bytes = inline_bytes

    def encode(self, value: Any, *step: str) -> Any:
        """Convert a value that is one step from the current position, or there."""
        base, out = self._path, [None]
        waiting: deque[tuple[Any, tuple[str, ...], Any, Any]] = deque([(value, (*base, *step), out, 0)])
        while waiting:
            value, self._path, parent, place = waiting.popleft()
            kind = type(value)
            text = kind is dict and {str}.issuperset(map(type, value)) and (keys := "".join(value)).isascii()
            if not (kind is list or (text and "$" not in keys) or (kind is dict and _has_text_keys(value))):
                parent[place] = self._encode_other(value)
                continue
            if len(self._path) > _MAX_DEPTH:
                msg = f"{self._where()[:300]} is nested more than {_MAX_DEPTH} deep (does it contain itself?)"
                raise CheckpointError(msg)
            node = parent[place] = value.copy()
            for key, item in enumerate(value) if kind is list else value.items():
                of = type(item)
                plain = item is None or of is bool or (of is str and item.isascii())
                if not plain and not (of is int and _MIN_INT <= item <= _MAX_INT):
                    waiting.append((item, (*self._path, f"[{key!r}]"), node, key))
        self._path = base
        return out[0]

    def _encode_other(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and _MIN_INT <= value <= _MAX_INT):
            return value
        if kind is str and _is_text(value):
            return value
        tag = _TAG_OF.get(kind) or _TAG_OF.get(
            next((base for base in (Tensor, np.generic) if isinstance(value, base)), kind)
        )
        if tag is not None:
            return {tag: _TAGS[tag][1](self, value)}
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        msg = (
            f"{self._where()} is a {module}{kind.__qualname__}, which cannot be saved: use numbers, strings, "
            "bytes, lists, tuples, dicts, tensors or numpy arrays"
        )
        raise CheckpointError(msg)

    def _where(self) -> str:
        return "".join(self._path)

    def of_pairs(self, value: dict[Any, object]) -> list[Any]:
        return [[self.encode(key, "{key}"), self.encode(item, f"[{key!r}]")] for key, item in value.items()]

    def of_tensor(self, value: Tensor) -> dict[str, Any]:
        plain = check_plain(value, self._where())
        fields = {"dtype": dtype_name(plain.dtype), "shape": list(plain.shape)}
        if self._store is not None and plain.nbytes > self._inline_bytes:
            return {**fields, "array": self._store(plain, self._where())}
        return {**fields, "data": _base64(host_view(plain))}

    def of_numpy(self, value: np.ndarray[Any, Any] | np.generic) -> dict[str, Any]:
        value = np.asarray(value)
        dtype = value.dtype.str
        if value.dtype.hasobject or value.dtype.fields or not _NUMPY_DTYPE.fullmatch(dtype):
            msg = f"{self._where()} is a numpy {value.dtype} array: only numbers and fixed-size strings can be saved"
            raise CheckpointError(msg)
        flat = np.ascontiguousarray(value).reshape(-1)
        return {"dtype": dtype, "shape": list(value.shape), **self.of_bytes(flat.view(np.uint8).data)}

    def of_bytes(self, raw: bytes | memoryview) -> dict[str, str]:
        if self._store is None or len(raw) <= self._inline_bytes:
            return {"data": _base64(raw)}
        # NumPy arrays and bytes may be read-only; torch warns about such memory.
        return {"array": self._store(torch.frombuffer(bytearray(raw), dtype=torch.uint8), self._where())}


def _has_text_keys(value: dict[Any, object]) -> bool:
    """Whether all keys are text that JSON can hold and that does not look like a tag."""
    return {str}.issuperset(map(type, value)) and all(key[:1] != "$" and _is_text(key) for key in value)


def _is_text(value: str) -> bool:
    """Whether a string is valid UTF-8: one with unpaired surrogates is not."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _base64(raw: bytes | memoryview) -> str:
    return base64.b64encode(raw).decode("ascii")


@final
class _Decoder:
    """Converts parsed JSON. Plain values inside of lists and objects are copied without a call for each."""

    def __init__(self, where: str, load: Load | None) -> None:
        self._path: tuple[str, ...] = (where,)
        """Steps to the current position, for messages."""
        self._load = load

    def decode(self, node: Any) -> Any:
        """Convert the node at the current position.

        Raises:
            DamagedFileError: naming the position of what is wrong.
        """
        base, out = self._path, [None]
        waiting: deque[tuple[Any, tuple[str, ...], Any, Any]] = deque([(node, base, out, 0)])
        while waiting:
            node, self._path, parent, place = waiting.popleft()
            kind = type(node)
            tagged = kind is dict and "$" in "".join(node) and any(key[:1] == "$" for key in node)
            if tagged or (kind is not list and kind is not dict):
                parent[place] = self._decode_other(node)
                continue
            if len(self._path) > _MAX_DEPTH:
                damaged("".join(self._path)[:500], f"nested more than {_MAX_DEPTH} deep")
            values = parent[place] = node.copy()
            for key, item in enumerate(node) if kind is list else node.items():
                if type(item) not in _PLAIN:
                    waiting.append((item, (*self._path, f"[{key!r}]"), values, key))
        self._path = base
        return out[0]

    def _decode_other(self, node: Any) -> Any:
        if type(node) in _PLAIN:
            return node
        try:
            _require(type(node) is dict, "a bare float is not allowed")
            tag = " ".join(node)
            if tag not in _TAGS:
                msg = f"unknown tag {tag!r}, which a later version may have written"
                raise ValueError(msg)
            return _TAGS[tag][2](self, node[tag])
        except DamagedFileError:
            raise
        except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
            damaged("".join(self._path)[:500], str(error)[:300])

    def as_list(self, node: object) -> list[Any]:
        _require(isinstance(node, list), "a list is needed")
        values: list[Any] = self.decode(node)
        return values

    def as_dict(self, node: object) -> dict[Any, Any]:
        pairs = self.as_list(node)
        found = dict(pairs)
        _require(len(found) == len(pairs), "a key occurs twice")
        return found

    def as_tensor(self, node: object) -> Tensor:
        fields = _fields(node, "dtype", "shape")
        dtype, shape = DTYPES.get(str(fields["dtype"])), _shape(fields["shape"])
        if dtype is None:
            msg = f"unknown dtype {str(fields['dtype'])[:50]!r}"
            raise ValueError(msg)
        if "array" in fields:
            found = self._stored(fields["array"], dtype)
            _require(tuple(found.shape) == shape, "the array stored apart has another dtype or shape")
            return found
        raw = self._bytes(fields, shape_nbytes(shape, dtype), flags=dtype == torch.bool)
        with torch.inference_mode(mode=False):
            result = torch.empty(shape, dtype=dtype, device="cpu")
        raw_view(result)[:] = raw
        return result

    def as_numpy(self, node: object) -> np.ndarray[Any, Any]:
        fields = _fields(node, "dtype", "shape")
        dtype, shape = np.dtype(_matching(fields["dtype"], _NUMPY_DTYPE)), _shape(fields["shape"])
        raw = self._bytes(fields, math.prod(shape) * dtype.itemsize, flags=dtype.kind == "b")
        _require(len(shape) <= _MAX_NUMPY_DIMS, "implausible shape")
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=raw)
        if dtype.kind == "U" and array.size:
            codes = np.ndarray((len(raw) // 4,), np.dtype(np.uint32).newbyteorder(dtype.byteorder), buffer=raw)
            _require(int(codes.max()) <= sys.maxunicode, "not text")
        return array

    def as_bytes(self, node: object) -> bytes:
        return bytes(self._bytes(_fields(node), None))

    def _bytes(self, fields: dict[str, Any], nbytes: int | None, *, flags: bool = False) -> bytearray:
        """Return bytes given inline, or those of a `uint8` array stored apart."""
        if "data" in fields:
            raw = _inline(fields["data"])
        else:
            raw = bytearray(raw_view(self._stored(fields["array"], torch.uint8)))
        if nbytes not in (None, len(raw)):
            msg = f"{len(raw)} bytes of data, {nbytes} expected"
            raise ValueError(msg)
        _require(not (flags and raw.strip(b"\0\1")), "booleans must be 0 or 1")
        return raw

    def _stored(self, name: object, dtype: torch.dtype) -> Tensor:
        if self._load is None or not isinstance(name, str):
            msg = "it refers to an array that is not in the checkpoint"
            raise ValueError(msg)
        found = self._load(name)
        _require(found.dtype == dtype, "the array stored apart has another dtype or shape")
        return found


def _require(good: object, problem: str) -> None:
    """Raise if a node is not `good`; the decoder adds its position."""
    if not good:
        raise ValueError(problem)


def _matching(node: object, pattern: re.Pattern[str]) -> str:
    text = str(node)
    _require(type(node) is str and pattern.fullmatch(text), f"{text[:50]!r} does not match {pattern.pattern}")
    return text


def _fields(node: object, *keys: str) -> dict[str, Any]:
    if not isinstance(node, dict) or node.keys() not in ({*keys, "data"}, {*keys, "array"}):
        msg = f"{' '.join(keys)} and data or array are needed"
        raise ValueError(msg)
    return node


def _shape(node: object) -> tuple[int, ...]:
    shape = check_shape(node)
    if shape is None:
        msg = "implausible shape"
        raise ValueError(msg)
    return shape


def _inline(text: Any) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None)  # also a dtype that arrays in files cannot have, such as a quantized one
    if not isinstance(found, torch.dtype):
        msg = f"unknown dtype {name[:50]!r}"
        raise ValueError(msg)  # noqa: TRY004 (as for other nodes)
    return found


_TAGS: dict[str, tuple[type, Callable[[_Encoder, Any], Any], Callable[[_Decoder, Any], Any]]] = {
    # Larger integers are slow to convert to decimal digits, and json raises beyond 4300 of them.
    "$int": (int, lambda _, value: hex(value), lambda _, node: int(_matching(node, _HEX_INT), 16)),
    "$float": (float, lambda _, value: value.hex(), lambda _, node: float.fromhex(_matching(node, _HEX_FLOAT))),
    # JSON joins two surrogates into one character, so text that is not valid UTF-8 is written as bytes.
    "$str": (
        str,
        lambda _, value: _base64(value.encode("utf-8", "surrogatepass")),
        lambda _, node: _inline(node).decode("utf-8", "surrogatepass"),
    ),
    "$bytes": (bytes, _Encoder.of_bytes, _Decoder.as_bytes),
    "$tuple": (tuple, lambda encoder, value: encoder.encode(list(value)), lambda d, node: tuple(d.as_list(node))),
    "$dict": (dict, _Encoder.of_pairs, _Decoder.as_dict),
    "$ordereddict": (OrderedDict, _Encoder.of_pairs, lambda decoder, node: OrderedDict(decoder.as_dict(node))),
    "$size": (torch.Size, lambda _, value: list(value), lambda _, node: torch.Size(_shape(node))),
    "$dtype": (torch.dtype, lambda _, value: str(value).removeprefix("torch."), lambda _, node: _dtype(node)),
    "$device": (torch.device, lambda _, value: str(value), lambda _, node: torch.device(_matching(node, _DEVICE))),
    "$tensor": (Tensor, _Encoder.of_tensor, _Decoder.as_tensor),
    "$numpy": (np.ndarray, _Encoder.of_numpy, _Decoder.as_numpy),
    "$npscalar": (np.generic, _Encoder.of_numpy, lambda decoder, node: decoder.as_numpy(node)[()]),
}
"""The type of a value of each tag, and how it is encoded and decoded."""
_TAG_OF = {kind: tag for tag, (kind, _, _) in _TAGS.items()} | {np.memmap: "$numpy"}
