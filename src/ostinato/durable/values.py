"""Small Python state as JSON, exactly: numbers, strings, containers, dtypes, tensors, arrays. No pickle.

JSON objects with one key that begins with `$` are tags; `docs/format.md` lists them. `unvalues.py` reads
them.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato.durable.dtypes import check_plain, dtype_name, raw_view
from ostinato.durable.unvalues import MAX_DEPTH, NUMPY_DTYPE, decode
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Store: TypeAlias = Callable[[Tensor, str], str]

__all__ = ["INLINE_BYTES", "MAX_DEPTH", "decode", "encode"]

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
