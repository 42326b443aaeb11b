"""Packets: small nested data as one string of bytes, which Ray sends within a call or an answer, without pickling it.

A pickle of a batch of a few small tensors takes longer than its draw: each tensor has a class, a dtype and a buffer. In
a packet the form of the data is one flat pickle of plain tuples, and all tensors lie behind it, one after the other.
"""

from __future__ import annotations

import pickle
import sys
from math import prod
from typing import Any

import torch
from torch import Tensor

from ostinato.core import kinds

__all__ = ["open_plain", "pack", "unpack"]

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
