"""Parcels: nested data on its way through Ray, its tensors beside the pickle, in memory that can be shared.

A tensor that Ray pickles by itself is copied into the pickle and out of it. In a parcel its memory travels out of band
(pickle protocol 5): one copy into the object store, none out of it. On the way back a large tensor is a view of the
object, which no one else has a reference to: it may be written to like any other, and the object lives as long as it
does. Small data travels as a packet, in one piece.
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ostinato._optional import require
from ostinato.core import kinds
from ostinato.distributed.packet import open_plain, pack, unpack

__all__ = ["Parcel", "seal", "unseal"]

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
