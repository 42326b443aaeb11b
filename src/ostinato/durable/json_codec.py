"""Strict reader of the JSON that `values.py` writes: it makes plain data only and executes nothing."""

from __future__ import annotations

import base64
import binascii
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato.durable.dtypes import DTYPES, check_plain, check_shape, dtype_name, raw_view, shape_nbytes
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Store: TypeAlias = Callable[[Tensor, str], str]
    Load: TypeAlias = Callable[[str], Tensor]

__all__ = ["INLINE_BYTES", "MAX_DEPTH", "NUMPY_DTYPE", "decode", "encode"]

INLINE_BYTES = 64 * 2**10


def encode(value: object, *, where: str = "state", store: Store | None = None, inline_bytes: int = INLINE_BYTES) -> Any:
    """Turn Python state into JSON values from which `decode` makes an equal one.

    Understood are None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, torch.Size, dtypes,
    devices, tensors (they come back as plain tensors on the CPU), numpy arrays and scalars of numbers and
    fixed-size strings.

    Args:
        value: What to encode.
        where: Name of the value, for messages.
        store: Takes a tensor of more than `inline_bytes` bytes and its place, and returns the name under which
            `decode` can load it; without it everything becomes part of the JSON.
        inline_bytes: Largest tensor, array or bytes object that becomes part of the JSON.

    Raises:
        CheckpointError: Something else is in it, or it is nested more than 64 deep; the message names the
            place.
    """
    return _Encoder(where, store, inline_bytes).encode(value)


@final
class _Encoder:
    """One walk through a value; remembers the way down for messages."""

    def __init__(self, where: str, store: Store | None, inline_bytes: int) -> None:
        self._path = [where]
        self._store = store
        self._inline_bytes = inline_bytes

    def encode(self, value: object) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is str and _is_text(value)):
            return value
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return handler(self, value)
        if isinstance(value, Tensor):
            return self.put_tensor(value)
        if isinstance(value, np.generic):
            return {"$npscalar": self._numpy_fields(np.asarray(value))}
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        msg = (
            f"{self._where()} is a {module}{kind.__qualname__}, which cannot be saved: use numbers, strings, "
            "bytes, lists, tuples, dicts, tensors or numpy arrays"
        )
        raise CheckpointError(msg)

    def _where(self) -> str:
        return "".join(self._path)

    def _step(self, step: str, value: object) -> Any:
        if len(self._path) > MAX_DEPTH:
            msg = f"{self._where()[:300]} is nested more than {MAX_DEPTH} deep (does it hold itself?)"
            raise CheckpointError(msg)
        self._path.append(step)
        node = self.encode(value)
        self._path.pop()
        return node

    def put_items(self, values: Iterable[object]) -> list[Any]:
        return [self._step(f"[{i}]", value) for i, value in enumerate(values)]

    def put_int(self, value: int) -> Any:
        # Longer ones are slow as decimals, and json refuses 4300 digits.
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}

    def put_str(self, value: str) -> Any:
        # JSON joins two surrogates to one character, so text that is not UTF-8 goes as bytes.
        return {"$str": _base64(memoryview(value.encode("utf-8", "surrogatepass")))}

    def put_float(self, value: float) -> Any:
        return {"$float": value.hex()}

    def put_bytes(self, value: bytes) -> Any:
        return {"$bytes": self._blob(memoryview(value))}

    def put_tuple(self, value: tuple[object, ...]) -> Any:
        return {"$tuple": self.put_items(value)}

    def put_dict(self, value: dict[Any, object]) -> Any:
        if all(type(key) is str and _is_text(key) and not key.startswith("$") for key in value):
            return {key: self._step(f"[{key!r}]", item) for key, item in value.items()}
        return {"$dict": self.put_pairs(value)}

    def put_pairs(self, value: dict[Any, object]) -> list[Any]:
        return [[self._step("{key}", key), self._step(f"[{key!r}]", item)] for key, item in value.items()]

    def put_tensor(self, value: Tensor) -> Any:
        plain = check_plain(value, self._where())
        fields = {"dtype": dtype_name(plain.dtype), "shape": list(plain.shape)}
        if self._store is not None and plain.nbytes > self._inline_bytes:
            return {"$tensor": {**fields, "array": self._store(plain, self._where())}}
        raw = plain.cpu().resolve_conj().resolve_neg().contiguous()
        return {"$tensor": {**fields, "data": _base64(raw_view(raw))}}

    def put_numpy(self, value: np.ndarray[Any, Any]) -> Any:
        return {"$numpy": self._numpy_fields(value)}

    def _numpy_fields(self, value: np.ndarray[Any, Any]) -> dict[str, Any]:
        dtype = value.dtype.str
        if value.dtype.hasobject or value.dtype.fields or not NUMPY_DTYPE.fullmatch(dtype):
            msg = f"{self._where()} is a numpy {value.dtype} array: only numbers and fixed-size strings"
            raise CheckpointError(msg)
        flat = np.ascontiguousarray(value).reshape(-1)
        return {"dtype": dtype, "shape": list(value.shape), **self._blob(flat.view(np.uint8).data)}

    def _blob(self, raw: memoryview) -> dict[str, str]:
        if self._store is None or len(raw) <= self._inline_bytes:
            return {"data": _base64(raw)}
        # torch warns of read-only memory, which numpy arrays and bytes may be
        writable = bytearray(raw) if raw.readonly else raw
        return {"array": self._store(torch.frombuffer(writable, dtype=torch.uint8), self._where())}


def _is_text(value: Any) -> bool:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return False
    return True


def _base64(raw: memoryview) -> str:
    return base64.b64encode(raw).decode("ascii")


_HANDLERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    int: _Encoder.put_int,
    float: _Encoder.put_float,
    str: _Encoder.put_str,
    bytes: _Encoder.put_bytes,
    list: _Encoder.put_items,
    tuple: _Encoder.put_tuple,
    dict: _Encoder.put_dict,
    OrderedDict: lambda encoder, value: {"$ordereddict": encoder.put_pairs(value)},
    torch.Size: lambda _, value: {"$size": list(value)},
    torch.dtype: lambda _, value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value: {"$device": str(value)},
    np.ndarray: _Encoder.put_numpy,
    np.memmap: _Encoder.put_numpy,
}


MAX_DEPTH = 64
NUMPY_DTYPE = re.compile(r"\|b1|[|<>]([iu][1248]|f[248]|c(8|16)|[SU][1-9]\d{0,6})", re.ASCII)
_HEX_INT = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
_HEX_FLOAT = re.compile(r"nan|-?inf|-?0x[01]\.[0-9a-f]{1,13}p[+-]\d{1,4}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,4})?", re.ASCII)


def decode(node: object, *, where: str = "state", load: Load | None = None) -> Any:
    """Turn JSON values that `encode` made back into Python state; tensors come on the CPU.

    Args:
        node: Parsed JSON.
        where: Name of the value, for messages.
        load: Returns the tensor that `store` named; needed when larger tensors were stored apart.

    Raises:
        DamagedFileError: A tag is unknown, a value does not fit its tag, sizes do not fit, or it is nested
            more than 64 deep. What a tensor takes is compared with the data there is before memory is taken.
    """
    return _Decoder(where, load).decode(node)


@final
class _Decoder:
    """One walk through parsed JSON; remembers the way down for messages."""

    def __init__(self, where: str, load: Load | None) -> None:
        self._path = [where]
        self._load = load

    def decode(self, node: object) -> Any:
        if isinstance(node, list):
            return self.as_items(node)
        if isinstance(node, dict):
            return self._object(node)
        if node is None or type(node) in (bool, int, str):
            return node
        return self.fail(f"a bare {type(node).__name__} is not allowed")

    def fail(self, problem: str) -> NoReturn:
        msg = f"{''.join(self._path)[:500]} is damaged: {problem[:300]}"
        raise DamagedFileError(msg)

    def _step(self, step: str, node: object) -> Any:
        if len(self._path) > MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} deep")
        self._path.append(step)
        value = self.decode(node)
        self._path.pop()
        return value

    def as_items(self, node: object) -> list[Any]:
        if not isinstance(node, list):
            self.fail("a list is needed")
        return [self._step(f"[{i}]", item) for i, item in enumerate(node)]

    def _object(self, node: dict[str, Any]) -> Any:
        tags = [key for key in node if key.startswith("$")]
        if not tags:
            return {key: self._step(f"[{key!r}]", item) for key, item in node.items()}
        handler = _HANDLERS_unvalues.get(tags[0])
        if len(node) != 1 or handler is None:
            self.fail(f"unknown tag {tags[0]!r}, perhaps of a later version")
        return handler(self, node[tags[0]])

    def as_text(self, node: object, pattern: re.Pattern[str]) -> str:
        if not isinstance(node, str) or not pattern.fullmatch(node):
            self.fail(f"{str(node)[:50]!r} is not of the form {pattern.pattern}")
        return node

    def as_str(self, node: object) -> str:
        try:
            return self._data(node, None).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            return self.fail(str(error))

    def as_float(self, node: object) -> float:
        try:
            return float.fromhex(self.as_text(node, _HEX_FLOAT))
        except OverflowError:
            return self.fail(f"{node!r} is no float")

    def as_dict(self, node: object) -> dict[Any, Any]:
        if not isinstance(node, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in node):
            self.fail("a list of pairs is needed")
        result: dict[Any, Any] = {}
        for pair in node:
            key = self._step("{key}", pair[0])
            try:
                known = key in result
            except TypeError:
                self.fail(f"a {type(key).__name__} cannot be a key")
            if known:
                self.fail("the same key twice")
            result[key] = self._step(f"[{key!r}]", pair[1])
        return result

    def as_size(self, node: object) -> torch.Size:
        shape = check_shape(node)
        if shape is None:
            self.fail("implausible sizes")
        return torch.Size(shape)

    def as_dtype(self, node: object) -> torch.dtype:
        # A dtype as a value may be one that arrays cannot have, as a quantized one.
        found = getattr(torch, node, None) if isinstance(node, str) else None
        if not isinstance(found, torch.dtype):
            self.fail(f"unknown dtype {str(node)[:50]!r}")
        return found

    def as_device(self, node: object) -> torch.device:
        try:
            return torch.device(self.as_text(node, _DEVICE))
        except RuntimeError:
            return self.fail(f"unknown device {node!r}")

    def as_tensor(self, node: object) -> Tensor:
        fields = self._fields(node)
        dtype = DTYPES.get(fields["dtype"])
        shape = check_shape(fields["shape"])
        if dtype is None or shape is None:
            self.fail(f"unknown dtype {fields['dtype'][:50]!r} or implausible shape")
        if "array" in fields:
            found = self._fetch(fields["array"])
            if found.dtype != dtype or tuple(found.shape) != shape:
                self.fail("the array stored apart has another dtype or shape")
            return found
        raw = self._data(fields["data"], shape_nbytes(shape, dtype))
        if dtype == torch.bool and raw.strip(b"\0\1"):
            self.fail("booleans must be 0 or 1")
        with torch.inference_mode(mode=False):
            result = torch.empty(shape, dtype=dtype, device="cpu")
        raw_view(result)[:] = raw
        return result

    def as_numpy(self, node: object) -> np.ndarray[Any, Any]:
        fields = self._fields(node)
        dtype = np.dtype(self.as_text(fields["dtype"], NUMPY_DTYPE))
        shape = check_shape(fields["shape"])
        if shape is None or len(shape) > 32:
            self.fail("implausible shape")
        nbytes = int(dtype.itemsize)
        for size in shape:
            nbytes *= size
        raw = self._raw(fields, nbytes)
        if dtype.kind == "b" and raw.strip(b"\0\1"):
            self.fail("booleans must be 0 or 1")
        try:
            array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=raw)
        except ValueError as error:  # sizes that overflow in spite of a zero among them
            self.fail(str(error))
        if dtype.kind == "U" and array.size:
            codes = np.ndarray((len(raw) // 4,), np.dtype(np.uint32).newbyteorder(dtype.byteorder), buffer=raw)
            if int(codes.max()) > 0x10FFFF:
                self.fail("not text")
        return array

    def as_bytes(self, node: object) -> bytes:
        if not isinstance(node, dict) or set(node) not in ({"data"}, {"array"}):
            self.fail("bytes need data or array")
        return bytes(self._raw(node, None))

    def _fields(self, node: object) -> dict[str, Any]:
        if not isinstance(node, dict) or set(node) not in (
            {"dtype", "shape", "data"},
            {"dtype", "shape", "array"},
        ):
            self.fail("a tensor needs dtype, shape, and data or array")
        if not isinstance(node["dtype"], str):
            self.fail("dtype must be a string")
        return node

    def _raw(self, fields: dict[str, Any], nbytes: int | None) -> bytearray:
        """Bytes given inline or as a `uint8` array stored apart."""
        if "data" in fields:
            return self._data(fields["data"], nbytes)
        found = self._fetch(fields["array"])
        if found.dtype != torch.uint8 or (nbytes is not None and found.nbytes != nbytes):
            self.fail("the array stored apart has another dtype or size")
        return bytearray(raw_view(found))

    def _data(self, text: object, nbytes: int | None) -> bytearray:
        try:
            raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        except (binascii.Error, ValueError):
            self.fail("data is not base64")
        if not isinstance(text, str) or (nbytes is not None and len(raw) != nbytes):
            self.fail(f"{len(raw)} bytes of data, {nbytes} expected")
        return bytearray(raw)

    def _fetch(self, name: object) -> Tensor:
        if self._load is None or not isinstance(name, str):
            self.fail("it refers to an array that is not here")
        try:
            return self._load(name)
        except DamagedFileError:
            raise
        except CheckpointError as error:
            return self.fail(str(error))


_HANDLERS_unvalues: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$int": lambda decoder, node: int(decoder.as_text(node, _HEX_INT), 16),
    "$float": _Decoder.as_float,
    "$str": _Decoder.as_str,
    "$bytes": _Decoder.as_bytes,
    "$tuple": lambda decoder, node: tuple(decoder.as_items(node)),
    "$dict": _Decoder.as_dict,
    "$ordereddict": lambda decoder, node: OrderedDict(decoder.as_dict(node)),
    "$size": _Decoder.as_size,
    "$dtype": _Decoder.as_dtype,
    "$device": _Decoder.as_device,
    "$tensor": _Decoder.as_tensor,
    "$numpy": _Decoder.as_numpy,
    "$npscalar": lambda decoder, node: decoder.as_numpy(node)[()],
}
