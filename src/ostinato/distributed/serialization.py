"""Parcels: nested data on its way through Ray, its tensors beside the pickle, in memory that can be shared.

A tensor that Ray pickles by itself is copied into the pickle and out of it. In a parcel its memory travels out of band
(pickle protocol 5): one copy into the object store, none out of it. On the way back a large tensor is a view of the
object, which no one else has a reference to: it may be written to like any other, and the object lives as long as it
does. Small data travels as a packet, in one piece.
"""

from __future__ import annotations

import io
import pickle
import sys
from functools import cache
from math import prod
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ostinato._optional import require
from ostinato.core import kinds

__all__ = ["Parcel", "open_plain", "pack", "seal", "unpack", "unseal"]

_MOST_BYTES = 90_000
"""Ray sends objects of up to 100 KiB within the answer; larger ones are better off as views of its object store."""
_MOST_FORM_BYTES = 10_000
_MOST_CHILDREN = 1000
_STEP = 16
"""Bytes that tensors begin at multiples of."""
_PADDING = [bytes(count) for count in range(_STEP)]
_CPU = torch.device("cpu")
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
        "complex128",
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NODES = frozenset({dict, tuple, list})
_PLAIN = frozenset({str, int, float, bool, type(None)})


class _NoPacketError(Exception):
    """The data is too large for a packet, or holds what packets do not."""


def pack(data: Any) -> bytes | None:
    """Return the bytes of small data; None for what must travel otherwise.

    Packets hold trees of dicts, tuples, lists and TensorDicts, of tensors, text and numbers, in which nothing is there
    twice. Tensors on other devices arrive on the CPU. Cost: about 20 us for five tensors, one copy.
    """
    packer = _Packer()
    try:
        form = pickle.dumps(packer.form(data), 5)
    except _NoPacketError:
        return None
    if len(form) > _MOST_FORM_BYTES:
        return None
    return b"".join((len(form).to_bytes(_STEP, "little"), form, _PADDING[-len(form) % _STEP], *packer.parts))


def unpack(packet: bytes) -> Any:
    """Return the data of a packet: new tensors in one piece of memory, which they keep alive. One copy."""
    end = _STEP + int.from_bytes(packet[:_STEP], "little")
    form = pickle.loads(memoryview(packet)[_STEP:end])  # noqa: S301 (Ray's own channel, as in parcels)
    return _build(form, bytearray(packet), end + -end % _STEP)


class _Packer:
    """Reads the form of data, and collects the bytes of its tensors."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._size = 0
        self._seen: set[int] = set()

    def form(self, data: Any) -> Any:
        """Return the form: a tuple for nodes and tensors, text and numbers as they are."""
        cls = type(data)
        if cls in _PLAIN:
            return data
        if id(data) in self._seen:
            raise _NoPacketError
        self._seen.add(id(data))
        if cls is Tensor:
            return self._tensor(data)
        if cls in _NODES and len(data) > _MOST_CHILDREN:
            raise _NoPacketError  # C is faster at these
        if cls is dict:
            if not _PLAIN.issuperset(map(type, data)):
                raise _NoPacketError
            return "dict", tuple(data), [self.form(value) for value in data.values()]
        if cls is tuple or cls is list:
            return cls.__name__, None, [self.form(value) for value in data]
        return self._fields(data)

    def _tensor(self, data: Tensor) -> Any:
        if data.layout is not torch.strided or data.is_nested or data.is_meta or data.requires_grad:
            raise _NoPacketError
        name, size = _NAMES.get(data.dtype), data.nbytes
        at, self._size = self._size, self._size + size + -size % _STEP
        if name is None or self._size > _MOST_BYTES or data.is_conj() or data.is_neg():
            raise _NoPacketError
        if size:
            whole = data.cpu().contiguous()
            whole = whole.view(torch.int16) if whole.dtype is torch.bfloat16 else whole  # which numpy does not know
            self.parts += (whole.numpy(), _PADDING[-size % _STEP])
        return name, tuple(data.shape), at

    def _fields(self, data: Any) -> Any:
        opened = open_plain(data)
        if opened is None:
            raise _NoPacketError
        node, children = opened
        device = None if data.device is None else "cpu"
        return "tensordict", node.keys, [self.form(child) for child in children], tuple(data.batch_size), device


def open_plain(data: Any) -> tuple[kinds.Node, list[Any]] | None:
    """Return the fields of a TensorDict that is nothing but these; None for all else."""
    plain = getattr(sys.modules.get("tensordict"), "TensorDict", None)
    if type(data) is not plain or data.is_memmap() or any(name is not None for name in data.names or ()):
        return None
    opened = kinds.open_node(data, 0)
    return opened if opened is not None and all(type(child) in {Tensor, plain} for child in opened[1]) else None


def _build(form: Any, memory: bytearray, begin: int) -> Any:
    if type(form) is not tuple:
        return form
    kind = form[0]
    dtype = _DTYPES.get(kind)
    if dtype is not None:
        shape, count = form[1], prod(form[1])
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin + form[2])
        return flat if len(shape) == 1 else flat.view(shape)
    children = [_build(child, memory, begin) for child in form[2]]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "dict":
        return dict(zip(form[1], children, strict=True))
    return kinds.make(kinds.Node(kind, form[1]), children, form[3], form[4] and _CPU)


_SMALL_BYTES = 1 << 12
"""Smaller tensors stay in the pickle: each buffer beside it has a price."""
_VIEW_BYTES = 1 << 16
"""Smaller tensors are copied out: a view would keep the whole object alive, to save a few microseconds."""


@final
class Parcel:
    """Wraps an argument or result of a remote call; on the other side its content arrives, without the wrapper.

    Tensors on other devices than the CPU travel through its memory, and arrive there.

    Args:
        data: anything that cloudpickle takes; tensors, arrays and TensorDicts travel fast.
    """

    __slots__ = ("_data",)

    def __init__(self, data: Any) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the content, its large tensors out of band where the outer pickler takes buffers."""
        packet = pack(self._data)
        if packet is not None:
            return unpack, (packet,)
        beside: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _packer()(file, 5, beside.append).dump(self._data)
        return _open, (file.getbuffer().tobytes(), beside)


def seal(data: Any) -> bytes | Parcel:
    """Return what to send, for `unseal` on the other side: bytes for small data, which Ray does not pickle."""
    packet = pack(data)
    return Parcel((data,)) if packet is None else packet


def unseal(sealed: Any) -> Any:
    """Return the data of what came of `seal`."""
    return unpack(sealed) if type(sealed) is bytes else sealed[0]


def _open(pickled: bytes, beside: list[Any]) -> Any:
    return pickle.loads(pickled, buffers=beside)  # noqa: S301 (Ray's own channel: whoever writes to it runs code anyway)


@cache
def _packer() -> Any:
    """Return the pickler's class, which needs Ray's cloudpickle."""
    base: Any = require("ray.cloudpickle", "ray").CloudPickler

    def reducer_override(self: Any, obj: Any) -> Any:
        laid = _lay(obj)
        return base.reducer_override(self, obj) if laid is None else laid

    return type("Packer", (base,), {"reducer_override": reducer_override})


def _lay(obj: Any) -> Any:
    """Return how to make a tensor, an array or a plain TensorDict again; None for all else, which pickles itself."""
    if type(obj) is Tensor:
        return _lay_tensor(obj)
    if type(obj) is np.ndarray:
        return _lay_array(obj)
    return _lay_tensordict(obj) if kinds.is_tensordict(obj) else None


def _lay_tensor(tensor: Tensor) -> Any:
    """Return how to make a tensor again from its bytes; None for those without plain memory."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.requires_grad:
        return None
    flat: Any = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (_data(flat), tensor.dtype, tuple(tensor.shape))


def _lay_array(array: np.ndarray[Any, Any]) -> Any:
    """Return how to make an array again that may be written to, as those that Ray makes may not; None for objects."""
    if array.dtype.hasobject:
        return None
    return _array, (_data(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), array.dtype, array.shape)


def _data(flat: Any) -> Any:
    return pickle.PickleBuffer(flat) if flat.nbytes >= _SMALL_BYTES else flat.tobytes()


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(_memory(data)).view(dtype).reshape(shape)


def _array(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return _memory(data).view(dtype).reshape(shape) if len(data) else np.empty(shape, dtype)


def _memory(data: Any) -> np.ndarray[Any, Any]:
    """Make memory of bytes: a copy of few, a view of many."""
    flat = np.frombuffer(data, dtype=np.uint8)
    return flat.copy() if flat.nbytes < _VIEW_BYTES else np.asarray(_Memory(flat))


@final
class _Memory:
    """The memory of an array that says it must not be written to, where it may be: nobody else has the object.

    Ray marks what it hands out as read-only, since objects can be shared; one that was made for one reader is not.
    Without this torch would warn of each tensor, and write to it all the same.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # keeps the object alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _lay_tensordict(data: Any) -> Any:
    """Return how to make a TensorDict again of its fields; None for kinds that pickle themselves."""
    opened = open_plain(data)
    if opened is None:
        return None
    node, children = opened
    return _tensordict, (tuple(node.keys), tuple(children), tuple(data.batch_size), data.device and torch.device("cpu"))


def _tensordict(keys: tuple[str, ...], children: tuple[Any, ...], batch: tuple[int, ...], device: Any) -> Any:
    return kinds.make(kinds.Node("tensordict", keys), children, batch, device)
