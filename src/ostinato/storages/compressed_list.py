"""CompressedListStorage: rows of any Python objects, whose tensors are kept compressed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.index import select
from ostinato.core.rows import Schema, describe, map_leaves
from ostinato.durable.codecs import ZlibCodec, find_codec, map_in_threads
from ostinato.durable.dtypes import DTYPES, check_shape, dtype_name, raw_view, shape_nbytes
from ostinato.errors import CheckpointError, KindError, OstinatoError
from ostinato.storages.base import check_device
from ostinato.storages.blobs import join_blobs, split_blobs
from ostinato.storages.list import ListStorage
from ostinato.storages.object_columns import pack, unpack
from ostinato.storages.table import read_column

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from ostinato.durable.codecs import AnyCodec

__all__ = ["CompressedListStorage"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A compressed tensor or array."""

    blob: Any
    """Bytes, or what `compression_fn` returned."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    array: bool = False
    """Whether it was a NumPy array."""

    @property
    def nbytes(self) -> int:
        """Bytes before compression."""
        return shape_nbytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class _PackedTree:
    """A TensorDict or tensorclass with compressed leaves."""

    schema: Schema
    leaves: list[_Packed]
    objects: Sequence[Any]


@final
class CompressedListStorage(ListStorage):
    """A list of Python objects whose tensors are compressed when they are written, and decompressed when they are read.

    Tensors, NumPy arrays, TensorDicts, tensorclasses, and dicts, lists and tuples of these come back bit for bit; other
    objects are kept as they are. Checkpoints hold the compressed bytes. For rows of one schema, such as images with
    actions and rewards, `LazyTensorStorage(codec=...)` is faster.

    With the codecs of the library, rows of a batch are compressed and decompressed in several threads without the GIL.

    Args:
        max_size: capacity in rows; None for no limit.
        compression_fn: takes a tensor and returns a tensor of compressed bytes; None for `codec`.
        decompression_fn: takes what `compression_fn` returned and a dict with "type" ("tensor"), "dtype", "shape" and
            "device" of the original; returns the original. None for `codec`.
        compression_level: of the codec, 1 to 22 with zstd, 0 to 9 with zlib. Without effect for functions and codecs
            of your own.
        codec: "zstd" (`pip install 'ostinato[zstd]'`), "zlib", a `Codec` of your own, or "auto": zstd
            if it is installed, else zlib; the attribute `codec` tells which.
        device: where rows are returned; they are stored in memory of the host.
        allow_pickle: let `dumps` and `loads` pickle objects that are not tensors, arrays or plain values. Unpickling
            executes code: set it only for checkpoints that you trust.
        compilable: no effect: Python objects are opaque to `torch.compile` in any case.

    Raises:
        CapacityError: if `max_size` is not a positive integer.
        OptionError: for an unknown codec, or a level that it does not have.
        KindError: if a function cannot be called.
        MissingExtraError: for "zstd" if it is not installed.

    Examples:
        >>> import torch
        >>> from ostinato import CompressedListStorage, ReplayBuffer
        >>> storage = CompressedListStorage(1000, codec="zlib", compression_level=1)
        >>> rb = ReplayBuffer(storage=storage, batch_size=2)
        >>> rb.extend(torch.zeros(8, 3, 84, 84)).shape
        torch.Size([8])
        >>> rb.sample().shape, storage.bytes() < 10_000
        (torch.Size([2, 3, 84, 84]), True)
    """

    form = "compressed objects"

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compression_fn: Callable[[Tensor], Any] | None = None,
        decompression_fn: Callable[[Any, dict[str, Any]], Tensor] | None = None,
        compression_level: int = 3,
        codec: str | AnyCodec = "auto",
        device: torch.device | str | int = "cpu",
        allow_pickle: bool = False,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, allow_pickle=allow_pickle, compilable=compilable)
        functions: dict[str, Any] = {"compression_fn": compression_fn, "decompression_fn": decompression_fn}
        for name, function in functions.items():
            if function is not None and not callable(function):
                msg = f"{name} must be a function or None, got {type(function).__name__}"
                raise KindError(msg)
        self._own = compression_fn is not None or decompression_fn is not None
        self.compression_fn = self._compress if compression_fn is None else compression_fn
        """Takes a tensor and returns a tensor of compressed bytes."""
        self.decompression_fn = self._decompress if decompression_fn is None else decompression_fn
        """Takes what `compression_fn` returned and the metadata of the original, and returns the original."""
        self.compression_level = compression_level
        both = compression_fn is not None and decompression_fn is not None
        self.codec: AnyCodec = ZlibCodec() if both else find_codec(codec, compression_level)
        """The codec in use, unless both functions were given."""
        self.device = check_device("cpu" if device == "auto" else device)
        self._schema: Schema | None = None  # of the last TensorDict: equal ones share it

    @property
    def nbytes(self) -> int:
        """Compressed bytes; the size of objects that are not tensors or arrays is not known."""
        return sum(_size(leaf.blob) for item in self._items for leaf in _leaves(item, _Packed))

    def to_bytestream(self, data: Any) -> builtins.bytes:
        """Return the memory of a tensor or array as bytes, which is what is compressed.

        Raises:
            KindError: for other objects, which are not compressed.
        """
        if isinstance(data, (Tensor, np.ndarray)):
            return bytes(raw_view(_as_host_tensor(data)))
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        msg = f"to_bytestream takes a tensor, an array or bytes, got {type(data).__name__}"
        raise KindError(msg)

    def bytes(self) -> int:
        """Return the compressed bytes of all rows: `nbytes`. Cost: O(rows)."""
        return self.nbytes

    def __repr__(self) -> str:
        """Class, number of rows, codec and bytes."""
        how = "functions" if self._own else repr(self.codec)
        return f"CompressedListStorage(rows={len(self)}, capacity={self.capacity}, codec={how}, bytes={self.nbytes})"

    # -- rows ----------------------------------------------------------------------------------------------------------

    def admit(self, data: Any, lead: int) -> tuple[list[Any], int]:
        """Check and compress rows; see `ListStorage.admit`.

        Raises:
            KindError: for rows that `extend` cannot separate, and tensors that have no plain memory.
        """
        rows, count = super().admit(data, lead)
        return self._pack_rows(rows), count

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Any]:
        """Return the objects at `slots` with their tensors decompressed."""
        return self._unpack_rows(super().gather(slots, pin=pin))

    def read(self, index: Any, *, swap: bool = False) -> Any:  # noqa: ARG002
        """Return one object, or the list of objects at a slice, tensor or mask. Copy."""
        picked = select(index, (len(self),), self.device)
        span = picked.span
        rows = [self._items[slot] for slot in picked.slots.tolist()] if span is None else self._items[span]
        rows = self._unpack_rows(rows)
        return rows if picked.batch else rows[0]

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check and compress one object for each slot; return a function that writes them.

        Raises:
            SchemaError: if the number of rows differs from that of the slots.
        """
        rows = kinds.unstack(data) if batch else [data]
        packed = self._pack_rows(list(rows))
        return super().prepare_edit(slots, packed if batch else packed[0], batch)

    def scores(self, payload: list[Any], path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of rows that have keys, `[rows, *shape]`."""
        return super().scores(self._unpack_rows(payload), path)

    def _pack_rows(self, rows: list[Any]) -> list[Any]:
        known = [self._schema]
        opened = [map_leaves(row, lambda leaf: _open(leaf, known)) for row in rows]
        self._schema = known[0]
        return self._over_leaves(opened, _Waiting, self._pack)

    def _unpack_rows(self, rows: list[Any]) -> list[Any]:
        flat = self._over_leaves(rows, _Packed, self._unpack)
        return [map_leaves(row, self._close) for row in flat]

    def _over_leaves(self, rows: list[Any], kind: type, change: Callable[[Any], Any]) -> list[Any]:
        """Return rows with all leaves of a kind changed, in several threads if the codec is the library's."""
        leaves = [leaf for row in rows for leaf in _leaves(row, kind)]
        nbytes = 0 if self._own else sum(map(attrgetter("nbytes"), leaves))
        changed = iter(map_in_threads(lambda part: map(change, part), leaves, nbytes))
        return [_replace(row, kind, changed) for row in rows]

    def _pack(self, leaf: _Waiting) -> _Packed:
        tensor = leaf.tensor
        blob = self.compression_fn(tensor) if self._own else self.codec.encode(raw_view(_as_host_tensor(tensor)))
        return _Packed(blob, tensor.dtype, tuple(tensor.shape), leaf.array)

    def _unpack(self, leaf: _Packed) -> Tensor | np.ndarray[Any, Any]:
        given = {"type": "tensor", "shape": torch.Size(leaf.shape), "dtype": leaf.dtype, "device": self.device}
        tensor = (self.decompression_fn if self._own else self._decompress)(leaf.blob, given)
        return tensor.numpy() if leaf.array else tensor.to(self.device)

    def _compress(self, tensor: Tensor) -> Tensor:
        return join_blobs([self.codec.encode(raw_view(_as_host_tensor(tensor)))])[0]

    def _decompress(self, blob: Any, metadata: dict[str, Any]) -> Tensor:
        tensor = torch.empty(metadata["shape"], dtype=metadata["dtype"], device="cpu")
        raw_view(tensor)[:] = self.codec.decode(self.to_bytestream(blob), tensor.nbytes)
        return tensor

    def _close(self, leaf: Any) -> Any:
        if not isinstance(leaf, _PackedTree):
            return leaf
        return leaf.schema.build(cast("Any", leaf.leaves), (), self.device, leaf.objects)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rows with their compressed bytes: values that checkpoints hold without pickling.

        Raises:
            CheckpointError: if a row has an object that can only be pickled, and that is not allowed.
        """
        state, blobs = super().state_dict(), list[Any]()
        items = [_to_node(item, blobs, allow_pickle=self.allow_pickle) for item in self._items]
        values, ends = join_blobs([blob if isinstance(blob, bytes) else b"" for blob in blobs])
        own = {str(i): blob for i, blob in enumerate(blobs) if not isinstance(blob, bytes)}
        name = "functions" if self._own else self.codec.name
        return {**state, "items": items, "codec": name, "columns": {"values": values, "ends": ends}, "own": own}

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that the rows fit, and that this storage can decompress them.

        Raises:
            CheckpointError: naming the difference.
        """
        super().check_state(state)
        mine = "functions" if self._own else self.codec.name
        saved = state.get("codec")
        if saved == mine or (not self._own and saved in {"zlib", "zstd"}):
            return
        how = "its functions" if saved == "functions" else f"codec={saved!r}"
        msg = f"the checkpoint's rows are compressed with {how}, the storage has {mine!r}: load into such a one"
        raise CheckpointError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load compressed rows; those of another codec of the library are compressed again.

        Raises:
            CheckpointError: if there are more rows than fit, or the state is damaged.
        """
        self.check_state(state)
        columns = state["columns"]
        blobs: list[Any] = list(split_blobs(read_column(columns["values"]), read_column(columns["ends"])))
        for i, blob in (state.get("own") or {}).items():
            blobs[int(i)] = blob
        items = [_from_node(item, blobs, allow_pickle=self.allow_pickle) for item in state["items"]]
        if not self._own and state["codec"] != self.codec.name:
            other = CompressedListStorage(codec=state["codec"])
            items = self._pack_rows(other._unpack_rows(items))
        super().load_state_dict({**state, "items": items})


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A tensor, or an array as a tensor, that is to be compressed."""

    tensor: Tensor
    array: bool

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def _open(leaf: Any, known: list[Schema | None]) -> Any:
    """Return a leaf of a row with what is to be compressed marked; `known` holds the schema of the last TensorDict."""
    if isinstance(leaf, Tensor):
        return _Waiting(_plain(leaf), array=False)
    if isinstance(leaf, np.ndarray):
        try:
            return _Waiting(torch.from_numpy(np.ascontiguousarray(leaf).reshape(leaf.shape)), array=True)
        except (TypeError, ValueError):
            return leaf  # of objects, text or another byte order
    if not kinds.is_tensor_collection(leaf):
        return leaf
    schema = describe(leaf, 0, bare=True)
    if known[0] is not None and known[0] == schema:
        schema = known[0]
    known[0] = schema
    flat = schema.flatten(leaf, (), 0)
    return _PackedTree(schema, [cast("Any", _Waiting(_plain(x), array=False)) for x in flat.leaves], flat.objects)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        msg = f"only dense tensors with data can be compressed, got {tensor.layout} on {tensor.device}: convert it"
        raise KindError(msg)
    return tensor.detach()


def _as_host_tensor(data: Tensor | np.ndarray[Any, Any]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(data)) if isinstance(data, np.ndarray) else data.detach()
    return tensor.as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous()


def _leaves(row: Any, kind: type) -> Iterator[Any]:
    """Yield the leaves of a kind in the order in which `_replace` replaces them."""
    if isinstance(row, kind):
        yield row
    elif isinstance(row, _PackedTree):
        yield from (leaf for leaf in row.leaves if isinstance(leaf, kind))
    elif isinstance(row, dict):
        for value in row.values():
            yield from _leaves(value, kind)
    elif isinstance(row, (list, tuple)):
        for value in row:
            yield from _leaves(value, kind)


def _replace(row: Any, kind: type, values: Iterator[Any]) -> Any:
    if isinstance(row, kind):
        return next(values)
    if isinstance(row, _PackedTree):
        return replace(row, leaves=[next(values) if isinstance(leaf, kind) else leaf for leaf in row.leaves])
    if type(row) is dict:
        return {key: _replace(value, kind, values) for key, value in row.items()}
    if isinstance(row, (list, tuple)):
        made = [_replace(value, kind, values) for value in row]
        return type(row)(*made) if hasattr(row, "_fields") else type(row)(made)
    return row


def _size(blob: Any) -> int:
    return len(blob) if isinstance(blob, bytes) else int(getattr(blob, "nbytes", 0))


# -- rows in checkpoints -----------------------------------------------------------------------------------------------


def _to_node(row: Any, blobs: list[Any], *, allow_pickle: bool) -> list[Any]:
    """Return a row as plain values, with the positions of compressed leaves in `blobs`."""
    if isinstance(row, _Packed):
        blobs.append(row.blob)
        return ["leaf", len(blobs) - 1, dtype_name(row.dtype), list(row.shape), row.array]
    if isinstance(row, _PackedTree):
        leaves = [_to_node(leaf, blobs, allow_pickle=allow_pickle) for leaf in row.leaves]
        columns = [np.asarray(values, dtype=object).reshape(-1).tolist() for values in row.objects]
        objects = [[pack(value, allow_pickle=allow_pickle) for value in values] for values in columns]
        return ["tree", row.schema.to_json(), leaves, objects]
    if type(row) is dict:
        return ["dict", [[key, _to_node(row[key], blobs, allow_pickle=allow_pickle)] for key in row]]
    if type(row) in {list, tuple}:
        return [type(row).__name__, [_to_node(value, blobs, allow_pickle=allow_pickle) for value in row]]
    return ["object", pack(row, allow_pickle=allow_pickle)]


def _from_node(node: Any, blobs: list[Any], *, allow_pickle: bool) -> Any:
    """Return the row that `_to_node` wrote.

    Raises:
        CheckpointError: if it is damaged, or pickled and that is not allowed.
    """
    try:
        kind, *rest = node
        if kind == "leaf":
            return _read_leaf(rest, blobs)
        if kind == "tree":
            return _read_tree(rest, blobs, allow_pickle=allow_pickle)
        (body,) = rest
        if kind == "dict":
            return {key: _from_node(value, blobs, allow_pickle=allow_pickle) for key, value in body}
        if kind in {"list", "tuple"}:
            made = [_from_node(value, blobs, allow_pickle=allow_pickle) for value in body]
            return made if kind == "list" else tuple(made)
        if kind == "object":
            return unpack(body, allow_pickle=allow_pickle)
    except OstinatoError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError) as error:
        msg = f"a compressed row of the checkpoint cannot be read ({type(error).__name__}: {error}): it is damaged"
        raise CheckpointError(msg) from error
    msg = f"a compressed row of the checkpoint has the unknown kind {str(kind)[:80]!r}: it is damaged"
    raise CheckpointError(msg)


def _read_leaf(node: list[Any], blobs: list[Any]) -> _Packed:
    position, dtype, size, array = node
    shape = check_shape(size)
    if shape is None or type(position) is not int or not 0 <= position < len(blobs):
        msg = f"shape {size!r} at position {position!r} of {len(blobs)}"
        raise ValueError(msg)
    return _Packed(blobs[position], DTYPES[dtype], shape, bool(array))


def _read_tree(node: list[Any], blobs: list[Any], *, allow_pickle: bool) -> _PackedTree:
    body, saved, columns = node
    schema = Schema.from_json(body)
    leaves = [_from_node(leaf, blobs, allow_pickle=allow_pickle) for leaf in saved]
    forms = [(leaf.dtype, leaf.shape) for leaf in leaves]
    if forms != [(leaf.dtype, leaf.shape) for leaf in schema.leaves] or len(columns) != len(schema.objects):
        msg = f"leaves {forms} of {schema}"
        raise ValueError(msg)
    objects = []
    for leaf, values in zip(schema.objects, columns, strict=True):
        found = [unpack(value, allow_pickle=allow_pickle) for value in values]
        objects.append(np.fromiter(found, dtype=object, count=len(found)).reshape(leaf.shape))
    return _PackedTree(schema, leaves, objects)
