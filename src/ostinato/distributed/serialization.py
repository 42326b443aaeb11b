"""Serialization of nested tensors for Ray.

A tensor that Ray pickles by itself is copied into the pickle and out of it. `Serialized` sends its memory out of band
(pickle protocol 5): one copy into the object store, none out of it. On the receiving side a large tensor is a view of
the stored object, to which nothing else refers: it may be written to, and keeps the object alive.

Small data is encoded as one string of bytes instead, which Ray sends within a call or a result without pickling it. A
pickle of a few small tensors takes longer than their draw, because each tensor has a class, a dtype and a buffer. Here
the structure of the data is one flat pickle of plain tuples, and the bytes of all tensors follow it.
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
from ostinato.errors import OptionError

_MAX_SMALL_BYTES = 90_000
"""Ray sends objects of up to 100 KiB within the result; larger ones are faster as views of its object store."""
_MAX_STRUCTURE_BYTES = 10_000
_MAX_CHILDREN = 1000
_ALIGNMENT = 16
"""Tensors begin at multiples of so many bytes."""
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]
_CPU = torch.device("cpu")
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
        "complex128",
    )
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NODES = frozenset({dict, tuple, list})
_PLAIN = frozenset({str, int, float, bool, type(None)})


class _NotSmallError(Exception):
    """The data is too large for the small encoding, or has types that it does not support."""


# -- small data -------------------------------------------------------------------------------------------------------


def encode_small(data: Any) -> bytes | None:
    """Encode small data as bytes; return None if it is too large or has other types.

    Supported are trees of dicts, tuples, lists and TensorDicts of tensors, text and numbers, without repeated objects.
    Tensors on other devices arrive on the CPU. Cost: about 20 us for five tensors, one copy.
    """
    encoder = _SmallEncoder()
    try:
        structure = pickle.dumps(encoder.structure(data), 5)
    except _NotSmallError:
        return None
    size = len(structure)
    if size > _MAX_STRUCTURE_BYTES:
        return None
    return b"".join((size.to_bytes(_ALIGNMENT, "little"), structure, _PADDING[-size % _ALIGNMENT], *encoder.parts))


def decode_small(encoded: bytes) -> Any:
    """Decode what `encode_small` returned: new tensors that share one block of memory. One copy."""
    end = _ALIGNMENT + int.from_bytes(encoded[:_ALIGNMENT], "little")
    structure = pickle.loads(memoryview(encoded)[_ALIGNMENT:end])  # noqa: S301 (Ray's channel executes code anyway)
    return _rebuild(structure, bytearray(encoded), end + -end % _ALIGNMENT)


class _SmallEncoder:
    """Describes the structure of data and collects the bytes of its tensors."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._size = 0
        self._seen: set[int] = set()

    def structure(self, data: Any) -> Any:
        """Return a tuple for containers and tensors; text and numbers as they are."""
        cls = type(data)
        if cls in _PLAIN:
            return data
        if id(data) in self._seen:
            raise _NotSmallError
        self._seen.add(id(data))
        if cls is Tensor:
            return self._tensor(data)
        if cls in _NODES and len(data) > _MAX_CHILDREN:
            raise _NotSmallError  # pickle is faster for long lists
        if cls is dict:
            if not _PLAIN.issuperset(map(type, data)):
                raise _NotSmallError
            return "dict", tuple(data), [self.structure(value) for value in data.values()]
        if cls is tuple or cls is list:
            return cls.__name__, None, [self.structure(value) for value in data]
        return self._fields(data)

    def _tensor(self, data: Tensor) -> Any:
        if data.layout is not torch.strided or data.is_nested or data.is_meta or data.requires_grad:
            raise _NotSmallError
        name, size = _DTYPE_NAMES.get(data.dtype), data.nbytes
        offset, self._size = self._size, self._size + size + -size % _ALIGNMENT
        if name is None or self._size > _MAX_SMALL_BYTES or data.is_conj() or data.is_neg():
            raise _NotSmallError
        if size:
            dense = data.cpu().contiguous()
            dense = dense.view(torch.int16) if dense.dtype is torch.bfloat16 else dense  # NumPy has no bfloat16
            self.parts += (dense.numpy(), _PADDING[-size % _ALIGNMENT])
        return name, tuple(data.shape), offset

    def _fields(self, data: Any) -> Any:
        opened = _open_tensordict(data)
        if opened is None:
            raise _NotSmallError
        node, children = opened
        device = None if data.device is None else "cpu"
        return "tensordict", node.keys, [self.structure(child) for child in children], tuple(data.batch_size), device


def _open_tensordict(data: Any) -> tuple[kinds.Node, list[Any]] | None:
    """Return the fields of a plain TensorDict; None for subclasses and for memory-mapped or named ones."""
    plain = getattr(sys.modules.get("tensordict"), "TensorDict", None)
    if type(data) is not plain or data.is_memmap() or any(name is not None for name in data.names or ()):
        return None
    opened = kinds.open_node(data, 0)
    return opened if opened is not None and all(type(child) in {Tensor, plain} for child in opened[1]) else None


def _rebuild(structure: Any, memory: bytearray, begin: int) -> Any:
    if type(structure) is not tuple:
        return structure
    kind = structure[0]
    dtype = _DTYPES.get(kind)
    if dtype is not None:
        shape, count = structure[1], prod(structure[1])
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin + structure[2])
        return flat if len(shape) == 1 else flat.view(shape)
    children = [_rebuild(child, memory, begin) for child in structure[2]]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "dict":
        return dict(zip(structure[1], children, strict=True))
    return kinds.make(kinds.Node(kind, structure[1]), children, structure[3], structure[4] and _CPU)


# -- data of any size -------------------------------------------------------------------------------------------------

_IN_BAND_BYTES = 1 << 12
"""Smaller tensors stay in the pickle: each out-of-band buffer has a fixed cost."""
_VIEW_BYTES = 1 << 16
"""Smaller tensors are copied on arrival: a view would keep the whole object alive to save a few microseconds."""


@final
class Serialized:
    """Wraps an argument or result of a remote call; the receiver gets the content without the wrapper.

    Tensors on other devices are copied to the CPU, and arrive there.

    Args:
        data: Anything that cloudpickle supports; tensors, arrays and TensorDicts are fast.
    """

    __slots__ = ("_data",)

    def __init__(self, data: Any) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the content, its large tensors out of band if the outer pickler supports that."""
        small = encode_small(self._data)
        if small is not None:
            return decode_small, (small,)
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _pickler()(file, 5, buffers.append).dump(self._data)
        return _unpickle, (file.getbuffer().tobytes(), buffers)


def encode(data: Any) -> bytes | Serialized:
    """Return what to send, to be decoded by `decode`: bytes for small data, which Ray does not pickle."""
    small = encode_small(data)
    return Serialized((data,)) if small is None else small


def decode(received: Any) -> Any:
    """Return the data that `encode` encoded."""
    return decode_small(received) if type(received) is bytes else received[0]


_ARGUMENT_BYTES = 64_000
"""Ray keeps arguments of an actor that are shorter than 100 KiB with the actor."""
_MAX_KEPT_BYTES = 8_000_000
"""Of all arguments of one actor: Ray keeps 10 MB with it."""


def to_arguments(data: Any, *, kept: bool) -> list[Any]:
    """Return the arguments by which an actor's constructor gets `data`; see `from_arguments`.

    They are short pieces of its pickle, which Ray keeps with the actor. One large argument would be an object of the
    process that starts the actor: if that process is dead, Ray could not restart the actor.

    Args:
        data: Anything that cloudpickle supports, and handles of actors.
        kept: Whether the actor may outlive the process.

    Raises:
        OptionError: `data` is too large to be kept.
    """
    pickled: bytes = require("ray.cloudpickle", "ray").dumps(Serialized(data))
    if len(pickled) <= _MAX_KEPT_BYTES:
        return [pickled[begin : begin + _ARGUMENT_BYTES] for begin in range(0, len(pickled), _ARGUMENT_BYTES)]
    if kept:
        msg = (
            f"with lifetime='detached' the parts and options of a buffer may take {_MAX_KEPT_BYTES:,} bytes, so that "
            f"Ray can restart its actors, and take {len(pickled):,}: give callables that make them in the actors, such "
            "as storage=partial(LazyTensorStorage, 1000), and load data from files"
        )
        raise OptionError(msg)
    return [Serialized(data)]


def from_arguments(arguments: tuple[Any, ...]) -> Any:
    """Return the data that `to_arguments` made arguments of."""
    if len(arguments) == 1 and not isinstance(arguments[0], bytes):
        return arguments[0]
    return pickle.loads(b"".join(arguments))  # noqa: S301 (Ray's channel executes code anyway)


def _unpickle(pickled: bytes, buffers: list[Any]) -> Any:
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 (Ray's channel executes code anyway)


@cache
def _pickler() -> Any:
    """Return a subclass of cloudpickle's pickler; a function because Ray is imported lazily."""
    base: Any = require("ray.cloudpickle", "ray").CloudPickler

    def reducer_override(self: Any, obj: Any) -> Any:
        reduced = _reduce(obj)
        return base.reducer_override(self, obj) if reduced is None else reduced

    return type("Pickler", (base,), {"reducer_override": reducer_override})


def _reduce(obj: Any) -> Any:
    """Return how to rebuild a tensor, an array or a plain TensorDict; None leaves other objects to cloudpickle."""
    if type(obj) is Tensor:
        return _reduce_tensor(obj)
    if type(obj) is np.ndarray:
        return _reduce_array(obj)
    return _reduce_tensordict(obj) if kinds.is_tensordict(obj) else None


def _reduce_tensor(tensor: Tensor) -> Any:
    """Return how to rebuild a dense tensor from its bytes; None for other tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.requires_grad:
        return None
    flat: Any = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _make_tensor, (_buffer(flat), tensor.dtype, tuple(tensor.shape))


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    """Return how to rebuild an array that is writable, unlike those that Ray rebuilds; None for arrays of objects."""
    if array.dtype.hasobject:
        return None
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _make_array, (_buffer(flat), array.dtype, array.shape)


def _reduce_tensordict(data: Any) -> Any:
    """Return how to rebuild a TensorDict from its fields; None for other kinds of TensorDict."""
    opened = _open_tensordict(data)
    if opened is None:
        return None
    node, children = opened
    return _make_tensordict, (tuple(node.keys), tuple(children), tuple(data.batch_size), data.device and _CPU)


def _buffer(flat: Any) -> Any:
    return pickle.PickleBuffer(flat) if flat.nbytes >= _IN_BAND_BYTES else flat.tobytes()


def _make_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(_writable(data)).view(dtype).reshape(shape)


def _make_array(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return _writable(data).view(dtype).reshape(shape) if len(data) else np.empty(shape, dtype)


def _make_tensordict(keys: tuple[str, ...], children: tuple[Any, ...], batch: tuple[int, ...], device: Any) -> Any:
    return kinds.make(kinds.Node("tensordict", keys), children, batch, device)


def _writable(data: Any) -> np.ndarray[Any, Any]:
    """Return received bytes as a writable array: a copy of few, a view of many."""
    flat = np.frombuffer(data, dtype=np.uint8)
    return flat.copy() if flat.nbytes < _VIEW_BYTES else np.asarray(_WritableView(flat))


@final
class _WritableView:
    """The memory of a read-only array, declared writable.

    Ray marks stored objects read-only because they can be shared; one that was sent to a single receiver is not.
    Without this, torch would warn about each tensor.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # keeps the object alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
