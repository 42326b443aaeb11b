"""CompressedListStorage: rows of any Python objects, whose tensors are kept compressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.rows import Schema, describe, map_leaves
from ostinato.durable.codecs import ZlibCodec, find_codec, map_in_threads
from ostinato.durable.dtypes import DTYPES, check_shape, dtype_name, raw_view, shape_nbytes
from ostinato.errors import CheckpointError, KindError
from ostinato.storages.base import check_device
from ostinato.storages.checkpoint import readable
from ostinato.storages.columns import join_blobs, split_blobs
from ostinato.storages.list import ListStorage
from ostinato.storages.objects import object_array, pack, unpack
from ostinato.storages.table import read_column

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Sequence

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
    def size(self) -> int:
        """Compressed bytes."""
        return len(self.blob) if isinstance(self.blob, bytes) else int(getattr(self.blob, "nbytes", 0))


@dataclass(frozen=True, slots=True)
class _PackedTree:
    """A TensorDict or tensorclass with compressed leaves."""

    schema: Schema
    leaves: list[_Packed]
    objects: Sequence[np.ndarray[Any, Any]]

    @property
    def size(self) -> int:
        """Compressed bytes."""
        return sum(leaf.size for leaf in self.leaves)


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
        sizes: list[int] = []
        for item in self._items:
            map_leaves(item, lambda leaf: sizes.append(leaf.size if _is_packed(leaf) else 0))
        return sum(sizes)

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

    def _stored(self, rows: Sequence[Any]) -> list[Any]:
        """Return rows compressed.

        Raises:
            KindError: for tensors that have no plain memory.
        """
        return self._over_leaves(super()._stored(rows), self._pack)

    def _shown(self, rows: list[Any]) -> list[Any]:
        """Return rows with their tensors decompressed."""
        return self._over_leaves(rows, self._unpack)

    def _over_leaves(self, rows: list[Any], change: Callable[[Any], Any]) -> list[Any]:
        """Return rows with all leaves changed, in several threads if the codec is the library's."""
        sizes: list[int] = []
        for row in () if self._own else rows[:1]:  # the first one stands for all
            map_leaves(row, lambda leaf: sizes.append(_plain_bytes(leaf)))
        return map_in_threads(lambda part: [map_leaves(row, change) for row in part], rows, sum(sizes) * len(rows))

    def _pack(self, leaf: Any) -> Any:
        """Return a leaf of a row compressed; objects that are not tensors or arrays unchanged."""
        if isinstance(leaf, np.ndarray):
            try:
                tensor = torch.from_numpy(np.ascontiguousarray(leaf).reshape(leaf.shape))
            except (TypeError, ValueError):
                return leaf  # of objects, text or another byte order
            return self._pack_tensor(tensor, array=True)
        if isinstance(leaf, Tensor):
            return self._pack_tensor(leaf)
        if not kinds.is_tensor_collection(leaf):
            return leaf
        schema = describe(leaf, 0, bare=True)
        if self._schema == schema:
            schema = self._schema
        self._schema = schema
        flat = schema.flatten(leaf, (), 0)
        return _PackedTree(schema, [self._pack_tensor(x) for x in flat.leaves], flat.objects)

    def _pack_tensor(self, tensor: Tensor, *, array: bool = False) -> _Packed:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
            msg = f"only dense tensors with data can be compressed, got {tensor.layout} on {tensor.device}: convert it"
            raise KindError(msg)
        tensor = tensor.detach()
        blob = self.compression_fn(tensor) if self._own else self.codec.encode(raw_view(_as_host_tensor(tensor)))
        return _Packed(blob, tensor.dtype, tuple(tensor.shape), array)

    def _unpack(self, leaf: Any) -> Any:
        """Return a leaf as it was given."""
        if isinstance(leaf, _PackedTree):
            return leaf.schema.build(list(map(self._unpack, leaf.leaves)), (), self.device, leaf.objects)
        if not isinstance(leaf, _Packed):
            return leaf
        given = {"type": "tensor", "shape": torch.Size(leaf.shape), "dtype": leaf.dtype, "device": self.device}
        tensor = (self.decompression_fn if self._own else self._decompress)(leaf.blob, given)
        return tensor.numpy() if leaf.array else tensor.to(self.device)

    def _compress(self, tensor: Tensor) -> Tensor:
        return join_blobs([self.codec.encode(raw_view(_as_host_tensor(tensor)))])[0]

    def _decompress(self, blob: Any, metadata: dict[str, Any]) -> Tensor:
        tensor = torch.empty(metadata["shape"], dtype=metadata["dtype"], device="cpu")
        raw_view(tensor)[:] = self.codec.decode(self.to_bytestream(blob), tensor.nbytes)
        return tensor

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rows with their compressed bytes: values that checkpoints hold without pickling.

        Raises:
            CheckpointError: if a row has an object that can only be pickled, and that is not allowed.
        """
        blobs: list[Any] = []
        items = [self._show(item, blobs) for item in self._items]
        values, ends = join_blobs([blob if isinstance(blob, bytes) else b"" for blob in blobs])
        own = {str(i): blob for i, blob in enumerate(blobs) if not isinstance(blob, bytes)}
        return {
            **super().state_dict(),
            "items": items,
            "codec": self._codec_name,
            "columns": {"values": values, "ends": ends},
            "own": own,
        }

    @property
    def _codec_name(self) -> str:
        return "functions" if self._own else self.codec.name

    def _show(self, row: Any, blobs: list[Any]) -> dict[str, Any]:
        """Return a row as plain values: without its compressed leaves, and what describes these in their order."""
        notes: list[Any] = []

        def show(leaf: Any) -> Any:
            if not _is_packed(leaf):
                notes.append(None)
                return leaf
            parts = leaf.leaves if isinstance(leaf, _PackedTree) else [leaf]
            blobs.extend(part.blob for part in parts)
            described = [[dtype_name(part.dtype), list(part.shape), part.array] for part in parts]
            notes.append({"leaves": described})
            if isinstance(leaf, _PackedTree):
                columns = [values.reshape(-1).tolist() for values in leaf.objects]
                objects = [[pack(value, allow_pickle=self.allow_pickle) for value in values] for values in columns]
                notes[-1] |= {"schema": leaf.schema.to_json(), "objects": objects}
            return None

        return {"row": pack(map_leaves(row, show), allow_pickle=self.allow_pickle), "leaves": notes}

    def _read(self, saved: dict[str, Any], blobs: list[Any]) -> Any:
        """Return the row that `_show` showed; takes its compressed bytes from the end of `blobs`."""
        notes = list(reversed(saved["leaves"]))

        def read(leaf: Any) -> Any:
            note = notes.pop()
            if note is None:
                return leaf
            parts = []
            for dtype, size, array in note["leaves"]:
                shape = check_shape(size)
                if shape is None:
                    msg = f"the shape {size!r}"
                    raise ValueError(msg)
                parts.append(_Packed(blobs.pop(), DTYPES[dtype], shape, bool(array)))
            if "schema" not in note:
                return parts[0]
            schema = Schema.from_json(note["schema"])
            columns = zip(note["objects"], schema.objects, strict=True)
            objects = [object_array(x, leaf.shape, allow_pickle=self.allow_pickle) for x, leaf in columns]
            return _PackedTree(schema, parts, objects)

        return map_leaves(unpack(saved["row"], allow_pickle=self.allow_pickle), read)

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that the rows fit, and that this storage can decompress them.

        Raises:
            CheckpointError: naming the difference.
        """
        super().check_state(state)
        saved = state.get("codec")
        if saved == self._codec_name or (not self._own and saved in {"zlib", "zstd"}):
            return
        how = "its functions" if saved == "functions" else f"codec={saved!r}"
        msg = (
            f"the checkpoint's rows are compressed with {how}, the storage has {self._codec_name!r}: load into such a "
            "one"
        )
        raise CheckpointError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load compressed rows; those of another codec of the library are compressed again.

        Raises:
            CheckpointError: if there are more rows than fit, or the state is damaged.
        """
        self.check_state(state)
        columns = state["columns"]
        with readable("a CompressedListStorage"):
            blobs: list[Any] = list(split_blobs(read_column(columns["values"]), read_column(columns["ends"])))
            for i, blob in (state.get("own") or {}).items():
                blobs[int(i)] = blob
            blobs.reverse()
            items = [self._read(item, blobs) for item in state["items"]]
        if not self._own and state["codec"] != self.codec.name:
            other = CompressedListStorage(codec=state["codec"])
            items = self._over_leaves(other._shown(items), self._pack)
        super().load_state_dict({**state, "items": items})


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, (_Packed, _PackedTree))


def _plain_bytes(leaf: Any) -> int:
    """Return the bytes of a leaf before compression, roughly."""
    if isinstance(leaf, _PackedTree):
        return leaf.schema.nbytes
    if isinstance(leaf, _Packed):
        return shape_nbytes(leaf.shape, leaf.dtype)
    if kinds.is_tensor_collection(leaf):
        return describe(leaf, 0, bare=True).nbytes
    return int(getattr(leaf, "nbytes", 0))


def _as_host_tensor(data: Tensor | np.ndarray[Any, Any]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(data)) if isinstance(data, np.ndarray) else data.detach()
    return tensor.as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous()
