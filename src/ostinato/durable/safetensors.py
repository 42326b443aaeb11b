"""Files in the safetensors format: eight bytes of length, a JSON header, then the bytes of the tensors without gaps.

Tensors with small rows are written first and those with wide rows last, so that the small values of a row are close to
each other; the header is padded so that the first wide tensor begins on a page boundary.
"""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from ostinato.durable.dtypes import check_shape, dtype_name, raw_view
from ostinato.durable.headers import Header, Placed
from ostinato.durable.manifest import parse_json
from ostinato.durable.positioned_reads import pread
from ostinato.durable.trees import flatten, nest
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.headers import Sink
    from ostinato.durable.trees import TreePath

__all__ = ["check", "read_header", "write"]

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
_PAGE = 4096
_META = "__metadata__"
_OWN = "ostinato"


def write(sink: Sink, tensors: dict[TreePath, Tensor], plain: dict[TreePath, Any]) -> None:
    """Write contiguous CPU tensors and plain values.

    Names are paths joined by `.`; the metadata contains, under `ostinato`, the paths in their order and the plain
    values as JSON.

    Raises:
        CheckpointError: The format has no such dtype, or two paths have the same name.
    """
    check(tensors)
    order = sorted(tensors, key=lambda path: _rank(tensors[path]))
    names = {path: ".".join(path) for path in tensors}
    own = {"paths": [list(path) for path in tensors], "plain": nest(plain)}
    node: dict[str, Any] = {_META: {"format": "pt", _OWN: json.dumps(own, allow_nan=True)}}
    end, wide = 0, -1
    for path in order:
        tensor = tensors[path]
        start, end = end, end + tensor.nbytes
        wide = start if wide < 0 and _row_bytes(tensor) >= _PAGE else wide
        tag = _TAGS[dtype_name(tensor.dtype)]
        node[names[path]] = {"dtype": tag, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(node, separators=(",", ":")).encode()
    step = 8 if wide < 0 else _PAGE
    text += b" " * (-(8 + len(text) + max(wide, 0)) % step)
    sink.write(len(text).to_bytes(8, "little") + text)
    for path in order:
        sink.write(raw_view(tensors[path]))


def check(tensors: dict[TreePath, Tensor]) -> None:
    """Check that the format can hold tensors.

    Raises:
        CheckpointError: The format has no such dtype, or two paths have the same name.
    """
    names = [".".join(path) for path in tensors]
    if len(set(names)) < len(names) or _META in names:
        msg = f"keys must differ when they are joined by dots, and none may be {_META}, got {sorted(names)[:20]}"
        raise CheckpointError(msg)
    for name, tensor in zip(names, tensors.values(), strict=True):
        if dtype_name(tensor.dtype) not in _TAGS:
            msg = f"{name} is {tensor.dtype}, which safetensors cannot hold: use trajectory_format='pt'"
            raise CheckpointError(msg)


def _rank(tensor: Tensor) -> tuple[int, int]:
    return (-tensor.element_size(), _row_bytes(tensor))


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[2:]) * tensor.element_size() if tensor.ndim > 1 else tensor.nbytes


def read_header(fd: int, path: Path) -> Header:
    """Read and verify the header of a safetensors file, also of other libraries.

    Raises:
        DamagedFileError: It is not a safetensors file, or its parts do not match.
    """
    size = os.fstat(fd).st_size
    length = int.from_bytes(pread(fd, 8, 0), "little")
    if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
        _damaged(path, f"a header of {length} bytes in a file of {size}")
    node = parse_json(pread(fd, length, 8), path)
    if not isinstance(node, dict):
        _damaged(path, "the header is not a JSON object")
    own = _own(node.pop(_META, {}), path)
    found = {name: _placed(name, entry, 8 + length, path) for name, entry in node.items()}
    end = 8 + length
    for placed in sorted(found.values(), key=lambda p: (p.offset, p.end())):
        if placed.offset != end:
            _damaged(path, f"a gap or an overlap at byte {end}")
        end = placed.end()
    if end != size:
        _damaged(path, f"{size} bytes, {end} according to its header")
    paths = own["paths"] or [[name] for name in found]
    if sorted(".".join(keys) for keys in paths) != sorted(found):
        _damaged(path, "its metadata names other tensors than it contains")
    tensors = tuple(found[".".join(keys)]._replace(path=tuple(keys)) for keys in paths)
    plain = flatten(own["plain"], where=path)
    keys = sorted([placed.path for placed in tensors] + list(plain))
    for short, long in pairwise(keys):  # in sorted order, a path is followed by the paths that begin with it
        if long[: len(short)] == short:
            _damaged(path, f"{'.'.join(short)[:80]!r} is both a value and a dict, or occurs twice")
    return Header(size, tensors, plain)


def _placed(name: str, entry: Any, start: int, path: Path) -> Placed:
    try:
        dtype, shape = _NAMES[entry["dtype"]], check_shape(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        _damaged(path, f"the entry of {name[:80]!r} ({error!r})")
    if shape is None or type(begin) is not int or type(end) is not int or begin < 0:
        _damaged(path, f"the entry of {name[:80]!r}")
    placed = Placed((name,), dtype, shape, start + begin)
    if placed.nbytes != end - begin:
        _damaged(path, f"{name[:80]!r} has {end - begin} bytes, {placed.nbytes} expected")
    return placed


def _own(metadata: Any, path: Path) -> dict[str, Any]:
    text = metadata.get(_OWN) if isinstance(metadata, dict) else None
    if text is None:
        return {"paths": None, "plain": {}}
    try:
        own = json.loads(text)
        good = all(isinstance(key, str) for keys in own["paths"] for key in keys) and isinstance(own["plain"], dict)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _damaged(path, f"its metadata ({str(error)[:80]})")
    if not good or not all(isinstance(keys, list) and keys for keys in own["paths"]):
        _damaged(path, "its metadata has no paths")
    return dict(own)


def _damaged(path: Path, problem: str) -> NoReturn:
    msg = f"{path} is damaged: not a valid safetensors file: {problem}"
    raise DamagedFileError(msg)
