"""Conversion of Python state to JSON values and back; decoding makes plain data only and executes nothing."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato.durable.dtypes import DTYPES, check_plain, check_shape, dtype_name, raw_view, shape_nbytes
from ostinato.durable.files import damaged
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Store: TypeAlias = Callable[[Tensor, str], str]
    Load: TypeAlias = Callable[[str], Tensor]

INLINE_BYTES = 64 * 2**10
_MAX_DEPTH = 64
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_NUMPY_DTYPE = re.compile(r"\|b1|[|<>]([iu][1248]|f[248]|c(8|16)|[SU][1-9]\d{0,6})", re.ASCII)
_HEX_INT = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
_HEX_FLOAT = re.compile(r"nan|-?inf|-?0x[01]\.[0-9a-f]{1,13}p[+-]\d{1,4}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,4})?", re.ASCII)


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
    """Converts one value; holds the path to the current position for error messages."""

    def __init__(self, where: str, store: Store | None, inline_bytes: int) -> None:
        self._path = [where]
        self._store = store
        self._inline_bytes = inline_bytes

    def encode(self, value: Any) -> Any:
        """Convert a value. Plain values inside of lists and dicts are copied without a call for each."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        pairs: Iterable[tuple[object, Any]]
        if kind is list:
            pairs = enumerate(value)
        elif kind is dict and _has_text_keys(value):
            pairs = value.items()
        else:
            return self._encode_tagged(value)
        if len(self._path) > _MAX_DEPTH:
            msg = f"{self._where()[:300]} is nested more than {_MAX_DEPTH} deep (does it contain itself?)"
            raise CheckpointError(msg)
        nodes: dict[object, Any] = {}
        for key, item in pairs:
            of = type(item)
            if (
                item is None
                or of is bool
                or (of is int and _MIN_INT <= item <= _MAX_INT)
                or (of is str and item.isascii())
            ):
                nodes[key] = item
            else:
                nodes[key] = self._encode_at(f"[{key!r}]", item)
        return nodes if kind is dict else list(nodes.values())

    def _encode_at(self, step: str, value: object) -> Any:
        self._path.append(step)
        node = self.encode(value)
        self._path.pop()
        return node

    def _encode_tagged(self, value: Any) -> Any:
        kind = type(value)
        if (kind is int and _MIN_INT <= value <= _MAX_INT) or (kind is str and _is_text(value)):
            return value
        tag = _TAG_OF.get(next((base for base in (Tensor, np.generic) if isinstance(value, base)), kind))
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
        return [[self._encode_at("{key}", key), self._encode_at(f"[{key!r}]", item)] for key, item in value.items()]

    def of_tensor(self, value: Tensor) -> dict[str, Any]:
        plain = check_plain(value, self._where())
        fields = {"dtype": dtype_name(plain.dtype), "shape": list(plain.shape)}
        if self._store is not None and plain.nbytes > self._inline_bytes:
            return {**fields, "array": self._store(plain, self._where())}
        raw = plain.cpu().resolve_conj().resolve_neg().contiguous()
        return {**fields, "data": _base64(raw_view(raw))}

    def of_numpy(self, value: np.ndarray[Any, Any] | np.generic) -> dict[str, Any]:
        value = np.asarray(value)
        dtype = value.dtype.str
        if value.dtype.hasobject or value.dtype.fields or not _NUMPY_DTYPE.fullmatch(dtype):
            msg = f"{self._where()} is a numpy {value.dtype} array: only numbers and fixed-size strings can be saved"
            raise CheckpointError(msg)
        flat = np.ascontiguousarray(value).reshape(-1)
        return {"dtype": dtype, "shape": list(value.shape), **self.of_bytes(flat.view(np.uint8).data)}

    def of_bytes(self, raw: memoryview) -> dict[str, str]:
        if self._store is None or len(raw) <= self._inline_bytes:
            return {"data": _base64(raw)}
        # NumPy arrays and bytes may be read-only; torch warns about such memory.
        writable = bytearray(raw) if raw.readonly else raw
        return {"array": self._store(torch.frombuffer(writable, dtype=torch.uint8), self._where())}


def _has_text_keys(value: dict[Any, object]) -> bool:
    """Whether all keys are text that JSON can hold and that does not look like a tag."""
    if not {str}.issuperset(map(type, value)):
        return False
    joined = "".join(value)
    if joined.isascii() and "$" not in joined:
        return True
    return all(key[:1] != "$" and _is_text(key) for key in value)


def _is_text(value: str) -> bool:
    """Whether a string is valid UTF-8: one with unpaired surrogates is not."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _base64(raw: memoryview) -> str:
    return base64.b64encode(raw).decode("ascii")


@final
class _Decoder:
    """Converts one tree of parsed JSON; holds the path to the current position for error messages."""

    def __init__(self, where: str, load: Load | None) -> None:
        self._path = [where]
        self._load = load

    def decode(self, node: Any) -> Any:
        """Convert a node. Plain values inside of lists and objects are copied without a call for each."""
        kind = type(node)
        pairs: Iterable[tuple[object, Any]]
        if kind is list:
            pairs = enumerate(node)
        elif kind is dict:
            for key in node:
                if key[:1] == "$":
                    return self._decode_tagged(key, node)
            pairs = node.items()
        elif node is None or kind in (bool, int, str):
            return node
        else:
            self.fail(f"a bare {kind.__name__} is not allowed")
        if len(self._path) > _MAX_DEPTH:
            self.fail(f"nested more than {_MAX_DEPTH} deep")
        values: dict[object, Any] = {}
        for key, item in pairs:
            of = type(item)
            if of is str or of is int or of is bool or item is None:
                values[key] = item
            else:
                values[key] = self._decode_at(f"[{key!r}]", item)
        return values if kind is dict else list(values.values())

    def _decode_at(self, step: str, node: object) -> Any:
        self._path.append(step)
        value = self.decode(node)
        self._path.pop()
        return value

    def _decode_tagged(self, tag: str, node: dict[str, Any]) -> Any:
        if len(node) != 1 or tag not in _TAGS:
            self.fail(f"unknown tag {tag!r}, which a later version may have written")
        return _TAGS[tag][2](self, node[tag])

    def fail(self, problem: str) -> NoReturn:
        damaged("".join(self._path)[:500], problem[:300])

    def as_list(self, node: object) -> list[Any]:
        if not isinstance(node, list):
            self.fail("a list is needed")
        values: list[Any] = self.decode(node)
        return values

    def as_matching(self, node: object, pattern: re.Pattern[str]) -> str:
        if not isinstance(node, str) or not pattern.fullmatch(node):
            self.fail(f"{str(node)[:50]!r} does not match {pattern.pattern}")
        return node

    def as_str(self, node: object) -> str:
        try:
            return self._inline(node).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            return self.fail(str(error))

    def as_float(self, node: object) -> float:
        try:
            return float.fromhex(self.as_matching(node, _HEX_FLOAT))
        except OverflowError:
            return self.fail(f"{node!r} is not a float")

    def as_dict(self, node: object) -> dict[Any, Any]:
        if not isinstance(node, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in node):
            self.fail("a list of pairs is needed")
        result: dict[Any, Any] = {}
        for pair in node:
            key = self._decode_at("{key}", pair[0])
            try:
                known = key in result
            except TypeError:
                self.fail(f"a {type(key).__name__} cannot be a key")
            if known:
                self.fail("a key occurs twice")
            result[key] = self._decode_at(f"[{key!r}]", pair[1])
        return result

    def as_size(self, node: object) -> torch.Size:
        shape = check_shape(node)
        if shape is None:
            self.fail("implausible sizes")
        return torch.Size(shape)

    def as_dtype(self, node: object) -> torch.dtype:
        # A value may be a dtype that arrays in files cannot have, such as a quantized one.
        found = getattr(torch, node, None) if isinstance(node, str) else None
        if not isinstance(found, torch.dtype):
            self.fail(f"unknown dtype {str(node)[:50]!r}")
        return found

    def as_device(self, node: object) -> torch.device:
        try:
            return torch.device(self.as_matching(node, _DEVICE))
        except RuntimeError:
            return self.fail(f"unknown device {node!r}")

    def as_tensor(self, node: object) -> Tensor:
        fields = self._fields(node, "dtype", "shape")
        dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        shape = check_shape(fields["shape"])
        if dtype is None or shape is None:
            self.fail(f"unknown dtype {str(fields['dtype'])[:50]!r} or implausible shape")
        if "array" in fields:
            found = self._stored(fields["array"])
            if found.dtype != dtype or tuple(found.shape) != shape:
                self.fail("the array stored apart has another dtype or shape")
            return found
        raw = self._bytes(fields, shape_nbytes(shape, dtype), flags=dtype == torch.bool)
        with torch.inference_mode(mode=False):
            result = torch.empty(shape, dtype=dtype, device="cpu")
        raw_view(result)[:] = raw
        return result

    def as_numpy(self, node: object) -> np.ndarray[Any, Any]:
        fields = self._fields(node, "dtype", "shape")
        dtype = np.dtype(self.as_matching(fields["dtype"], _NUMPY_DTYPE))
        shape = check_shape(fields["shape"])
        if shape is None or len(shape) > 32:
            self.fail("implausible shape")
        raw = self._bytes(fields, math.prod(shape) * dtype.itemsize, flags=dtype.kind == "b")
        try:
            array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=raw)
        except ValueError as error:  # the product of the sizes overflows although one of them is zero
            self.fail(str(error))
        if dtype.kind == "U" and array.size:
            codes = np.ndarray((len(raw) // 4,), np.dtype(np.uint32).newbyteorder(dtype.byteorder), buffer=raw)
            if int(codes.max()) > 0x10FFFF:
                self.fail("not text")
        return array

    def as_bytes(self, node: object) -> bytes:
        return bytes(self._bytes(self._fields(node), None))

    def _fields(self, node: object, *keys: str) -> dict[str, Any]:
        if not isinstance(node, dict) or set(node) not in ({*keys, "data"}, {*keys, "array"}):
            self.fail(f"{' '.join(keys)} and data or array are needed")
        return node

    def _bytes(self, fields: dict[str, Any], nbytes: int | None, *, flags: bool = False) -> bytearray:
        """Return bytes given inline, or those of a `uint8` array stored apart."""
        if "data" in fields:
            raw = self._inline(fields["data"])
        else:
            found = self._stored(fields["array"])
            if found.dtype != torch.uint8:
                self.fail("the array stored apart has another dtype or size")
            raw = bytearray(raw_view(found))
        if nbytes is not None and len(raw) != nbytes:
            self.fail(f"{len(raw)} bytes of data, {nbytes} expected")
        if flags and raw.strip(b"\0\1"):
            self.fail("booleans must be 0 or 1")
        return raw

    def _inline(self, text: object) -> bytearray:
        try:
            return bytearray(base64.b64decode(text, validate=True) if isinstance(text, str) else self.fail("no text"))
        except (binascii.Error, ValueError):
            self.fail("data is not base64")

    def _stored(self, name: object) -> Tensor:
        if self._load is None or not isinstance(name, str):
            self.fail("it refers to an array that is not in the checkpoint")
        try:
            return self._load(name)
        except DamagedFileError:
            raise
        except CheckpointError as error:
            return self.fail(str(error))


_TAGS: dict[str, tuple[type, Callable[[_Encoder, Any], Any], Callable[[_Decoder, Any], Any]]] = {
    # Larger integers are slow to convert to decimal digits, and json raises beyond 4300 of them.
    "$int": (int, lambda _, value: hex(value), lambda decoder, node: int(decoder.as_matching(node, _HEX_INT), 16)),
    "$float": (float, lambda _, value: value.hex(), _Decoder.as_float),
    # JSON joins two surrogates into one character, so text that is not valid UTF-8 is written as bytes.
    "$str": (str, lambda _, value: _base64(memoryview(value.encode("utf-8", "surrogatepass"))), _Decoder.as_str),
    "$bytes": (bytes, lambda encoder, value: encoder.of_bytes(memoryview(value)), _Decoder.as_bytes),
    "$tuple": (
        tuple,
        lambda encoder, value: encoder.encode(list(value)),
        lambda decoder, node: tuple(decoder.as_list(node)),
    ),
    "$dict": (dict, _Encoder.of_pairs, _Decoder.as_dict),
    "$ordereddict": (OrderedDict, _Encoder.of_pairs, lambda decoder, node: OrderedDict(decoder.as_dict(node))),
    "$size": (torch.Size, lambda _, value: list(value), _Decoder.as_size),
    "$dtype": (torch.dtype, lambda _, value: str(value).removeprefix("torch."), _Decoder.as_dtype),
    "$device": (torch.device, lambda _, value: str(value), _Decoder.as_device),
    "$tensor": (Tensor, _Encoder.of_tensor, _Decoder.as_tensor),
    "$numpy": (np.ndarray, _Encoder.of_numpy, _Decoder.as_numpy),
    "$npscalar": (np.generic, _Encoder.of_numpy, lambda decoder, node: decoder.as_numpy(node)[()]),
}
"""The type of a value of each tag, and how it is encoded and decoded."""
_TAG_OF = {kind: tag for tag, (kind, _, _) in _TAGS.items()} | {np.memmap: "$numpy"}
