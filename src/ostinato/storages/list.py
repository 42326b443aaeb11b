"""ListStorage: rows of any Python objects, one list item for each row; LazyStackStorage: TensorDicts of any shapes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.index import select
from ostinato.core.options import check_choice, check_integer
from ostinato.core.rows import Schema, describe, map_leaves
from ostinato.durable.arrays import DTYPES, check_shape, dtype_name, host_view, raw_view, shape_nbytes
from ostinato.durable.codecs import ZlibCodec, find_codec, map_in_threads
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, SchemaError, SlotError
from ostinato.storages.base import Storage, check_capacity, check_device
from ostinato.storages.checkpoint import readable, require_form, seam_of
from ostinato.storages.columns import (
    counts_after,
    join_blobs,
    owned,
    owned_rows,
    pack,
    pack_objects,
    split_blobs,
    targets,
    unpack,
    unpack_objects,
)
from ostinato.storages.table import read_column

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Hashable, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Path
    from ostinato.durable.codecs import AnyCodec

__all__ = ["CompressedListStorage", "LazyStackStorage", "ListStorage"]


class ListStorage(Storage):
    """A list of Python objects: text, trees, tensors of any size.

    Rows are stacked into batches, unless the buffer has a `collate_fn`. TensorDicts of different shapes or fields
    become a `LazyStackedTensorDict`; other objects that cannot be stacked need a `collate_fn`, for example `list`.
    Tensors and arrays of a row are copied when it is written. Small rows that are written as one tensor or TensorDict
    share memory, up to 4 KB.

    Args:
        max_size: capacity in rows; None for no limit.
        device: where the tensors of rows are moved when they are written; None leaves each where it is.
        allow_pickle: let `dumps` and `loads` pickle objects that are not tensors, arrays or plain values. Unpickling
            executes code: set it only for checkpoints that you trust.
        compilable: no effect: Python objects are opaque to `torch.compile` in any case.

    Raises:
        CapacityError: if `max_size` is not a positive integer.

    Examples:
        >>> from ostinato import ListStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=ListStorage(100), collate_fn=lambda rows: rows)
        >>> rb.extend(["a", 1, None])
        tensor([0, 1, 2])
        >>> rb[:2]
        ['a', 1]
    """

    form = "objects"
    rotates = True
    capacity: int = 0
    """Maximum number of rows."""
    cursor: int = 0
    """Slot after the newest row."""

    def __init__(
        self,
        max_size: int | None = None,
        *,
        device: torch.device | str | int | None = None,
        allow_pickle: bool = False,
        compilable: bool = False,  # noqa: ARG002
    ) -> None:
        self.capacity = sys.maxsize if max_size is None else check_capacity(max_size)
        self._target = None if device is None else check_device(device)
        if self._target is not None:
            self.device = self._target
        self.allow_pickle = allow_pickle
        self._items: list[Any] = []
        self.cursor = 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the tensors and arrays; the size of other objects is not known."""
        return sum(int(getattr(item, "nbytes", 0)) for item in self._items)

    @staticmethod
    def default_collate(rows: list[Any]) -> Any:
        """Stack rows into a batch: TensorDicts, tensors, arrays, numbers, and trees of these.

        TensorDicts of different fields or shapes become a `LazyStackedTensorDict`. Copy.

        Raises:
            KindError: if rows cannot be stacked; the message says what to do.
        """
        try:
            return kinds.stack_rows(rows)
        except (KindError, SchemaError) as error:
            msg = (
                f"rows of type {type(rows[0]).__name__} cannot be stacked into a batch ({error}): give the buffer a "
                "collate_fn, such as collate_fn=list, which returns the list of rows; rows of different lengths that "
                "are TensorDicts need none"
            )
            raise KindError(msg) from error

    def __len__(self) -> int:
        """Number of rows present."""
        return len(self._items)

    def __repr__(self) -> str:
        """Class and number of rows."""
        return f"ListStorage(rows={len(self)}, capacity={self.capacity}, bytes of tensors={self.nbytes})"

    def admit(self, data: Any, lead: int) -> tuple[list[Any], int]:
        """Check one object, or a list, tuple, range, iterator, array, tensor or TensorDict of rows.

        Raises:
            KindError: if `extend` is given a dict or text, which could be one row or many.
        """
        if lead == 0:
            return self._stored([owned(data)]), 1
        if isinstance(data, (dict, str, bytes)):
            msg = (
                "extend() of a ListStorage takes rows (list, tuple, range, tensor, TensorDict), got one "
                f"{type(data).__name__}: use add(), or pass a list"
            )
            raise KindError(msg)
        try:
            rows = owned_rows(data)
        except TypeError as error:
            msg = (
                "extend() of a ListStorage takes rows (list, tuple, range, tensor, TensorDict), got "
                f"{type(data).__name__} ({error}): use add() for one row"
            )
            raise KindError(msg) from None
        return self._stored(rows), len(rows)

    def _stored(self, rows: list[Any]) -> list[Any]:
        """Return copies of rows as the list holds them: on the device of the storage."""
        return rows if self._target is None else list(map(self._moved, rows))

    def _shown(self, rows: list[Any]) -> list[Any]:
        """Return rows of the list as they were given."""
        return rows

    def _moved(self, row: Any) -> Any:
        target = self._target
        if target is None:
            return row
        return map_leaves(row, lambda x: x.to(target) if isinstance(x, Tensor) or kinds.is_tensor_collection(x) else x)

    def write(self, placement: Placement, payload: list[Any]) -> None:
        """Write rows to the list."""
        _, self.cursor = counts_after(placement, len(self._items), self.cursor, self.capacity)
        slots, rows = (part.tolist() for part in targets(placement))
        for slot, row in sorted(zip(slots, rows, strict=True), key=itemgetter(0)):  # a list grows at its end
            if slot > len(self._items):
                msg = f"slot {slot} is beyond the next free one, {len(self._items)}: a list grows row by row"
                raise SlotError(msg)
            self._items[slot : slot + 1] = [payload[row]]

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Any]:  # noqa: ARG002
        """Return the objects at `slots`, not copied."""
        items = self._items
        return self._shown([items[slot] for slot in slots.tolist()])

    def present(self, payload: list[Any], batch: tuple[int, ...]) -> Any:
        """Return the list of rows, or the single row if `batch` is empty."""
        return payload if batch else payload[0]

    def show_payload(self, payload: list[Any]) -> list[Any]:
        """Return objects as a checkpoint holds them; see `allow_pickle`."""
        return [pack(row, allow_pickle=self.allow_pickle) for row in payload]

    def read_payload(self, saved: Any, schema: Schema | None, rows: int) -> list[Any]:  # noqa: ARG002
        """Return what `show_payload` returned, by copy.

        Raises:
            CheckpointError: if it has not one object for each row.
        """
        if not isinstance(saved, list) or len(saved) != rows:
            msg = f"the checkpoint holds a queued draw of {rows} rows without an object for each: it is damaged"
            raise CheckpointError(msg)
        return [self._moved(owned(unpack(row, allow_pickle=self.allow_pickle))) for row in saved]

    def read(self, index: Any, *, swap: bool = False) -> Any:  # noqa: ARG002
        """Return one object, or the list of objects at a slice, tensor or mask."""
        picked = select(index, (len(self),), self.device)
        items = self._items
        rows = [items[slot] for slot in picked.slots.tolist()] if picked.span is None else items[picked.span]
        return self.present(self._shown(rows), picked.batch)

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check that there is one object for each slot; return a function that writes them.

        Raises:
            SchemaError: if the number of rows differs from that of the slots.
        """
        rows = self._stored(owned_rows(data) if batch else [owned(data)])
        if len(rows) != slots.shape[0]:
            msg = f"{slots.shape[0]} rows are chosen, {len(rows)} were given: give one for each"
            raise SchemaError(msg)

        def change() -> None:
            for slot, row in zip(slots.tolist(), rows, strict=True):
                self._items[slot] = row

        return change

    def clear(self) -> None:
        """Remove all objects."""
        self._items = []  # a new list, since a reader may iterate over the old one
        self.cursor = 0

    def scores(self, payload: list[Any], path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of rows that have keys, `[rows, *shape]`."""
        try:
            values = []
            for row in self._shown(payload):
                value = row
                for key in path:
                    value = value[key]
                values.append(kinds.as_tensor(value, path))
        except (KeyError, IndexError, TypeError):
            return None
        return torch.stack(values)

    def state_dict(self) -> dict[str, Any]:
        """Return a new list of the objects (not copied) and the cursor."""
        return {
            "form": self.form,
            "items": list(self._items),
            "cursor": self.cursor,
            "capacity": self.capacity,
            "allow_pickle": self.allow_pickle,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that the rows fit.

        Raises:
            CheckpointError: naming the number of rows and the capacity.
        """
        if len(state["items"]) > self.capacity:
            msg = f"the checkpoint holds {len(state['items'])} rows, the storage has room for {self.capacity}"
            raise CheckpointError(msg)
        if not all(isinstance(state.get(name), int) for name in ("cursor", "capacity")):
            msg = "the checkpoint's list of rows has no cursor or no capacity: it is damaged"
            raise CheckpointError(msg)

    def blank(self) -> ListStorage:
        """Return a list without rows; see `Storage.blank`."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.clear()
        return other

    def take(self, filled: Storage) -> None:
        """Take over another list. No copy."""
        vars(self).update(vars(filled))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the objects into a new list; those of a full ring of another capacity in the order of writing.

        Raises:
            CheckpointError: if there are more rows than fit.
        """
        require_form(state, self)
        self.check_state(state)
        items, seam = list(map(self._moved, state["items"])), seam_of(state, self)
        self._items = items[seam:] + items[:seam]
        grown = self.capacity != state["capacity"]
        self.cursor = (len(self._items) if grown else int(state["cursor"])) % self.capacity


@final
class LazyStackStorage(ListStorage):
    """A list of TensorDicts or tensorclasses of different shapes, such as token sequences, read as one batch.

    Each row is a copy in memory of its own; a batch copies its rows.

    Args:
        max_size: capacity in rows; None for no limit.
        stack_dim: dimension of the batch among the batch dimensions of the rows; negative ones count from the end.
            Rows without batch dimensions have only 0 (or -1).
        layout: of batches, and of `storage[index]` for several rows. "lazy": a `LazyStackedTensorDict`, whose fields
            are stacked when they are read; those of different shapes are read row by row. "nested": fields of
            different lengths are jagged nested tensors (values and offsets). "padded": fields are padded at the end of
            their first dimension with 0, and the batch, a TensorDict, has a bool mask of the same name under "masks".
        device: where the tensors of rows are moved when they are written; None leaves each where it is.
        allow_pickle: see `ListStorage`.
        compilable: no effect, see `ListStorage`.

    Raises:
        CapacityError: if `max_size` is not a positive integer.
        OptionError: for another layout, a `stack_dim` that is no integer, or one with "nested" or "padded".
        MissingExtraError: tensordict is not installed (`pip install 'ostinato[tensordict]'`).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(100), batch_size=8)
        >>> _ = rb.add(TensorDict({"tokens": torch.arange(3), "reward": torch.tensor(1.0)}))
        >>> _ = rb.add(TensorDict({"tokens": torch.arange(5), "reward": torch.tensor(0.0)}))
        >>> batch = rb.sample()
        >>> batch["reward"].shape, sorted({len(row["tokens"]) for row in batch.unbind(0)})
        (torch.Size([8]), [3, 5])
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        layout: Literal["lazy", "nested", "padded"] = "lazy",
        device: torch.device | str | int | None = None,
        allow_pickle: bool = False,
        compilable: bool = False,
    ) -> None:
        kinds.require_tensordict("LazyStackStorage", "use RaggedTensorStorage, which also stores dicts")
        super().__init__(max_size, device=device, allow_pickle=allow_pickle, compilable=compilable)
        if layout != "lazy" and stack_dim not in {0, -1}:
            msg = f"layout={layout!r} makes batches along dimension 0, got stack_dim={stack_dim}: use layout='lazy'"
            raise OptionError(msg)
        self.stack_dim = check_integer("stack_dim", stack_dim, kind=OptionError)
        self.layout = check_choice("layout", layout, ("lazy", "nested", "padded"))

    def __repr__(self) -> str:
        """Class, number of rows and layout."""
        return f"LazyStackStorage(rows={len(self)}, capacity={self.capacity}, layout={self.layout!r})"

    def stack(self, rows: Any) -> Any:
        """Return a list of rows as one batch of the layout; a batch is returned as it is. Copy.

        Raises:
            SchemaError: if "nested" or "padded" rows differ in more than the length of their fields.
        """
        if not isinstance(rows, list) or not rows:
            return rows
        copies = [row.clone() for row in rows]
        if self.layout == "lazy":
            dims = rows[0].batch_dims + 1
            if not -dims <= self.stack_dim < dims:
                msg = f"stack_dim={self.stack_dim} is out of range for rows with {dims - 1} batch dimensions"
                raise SchemaError(msg)
            return kinds.lazy_stack(copies, self.stack_dim % dims)
        try:
            return kinds.stack_lengths(copies, padded=self.layout == "padded")
        except (RuntimeError, ValueError) as error:
            msg = (
                f"rows cannot be a {self.layout} batch ({error}): fields may differ in their first dimension alone; "
                "layout='lazy' takes any rows"
            )
            raise SchemaError(msg) from error

    default_collate = stack

    def field_at(self, slots: Tensor, path: Path) -> Tensor | list[Any]:
        """Return one field of the rows at `slots`: a tensor if their shapes are equal, else a list.

        Raises:
            KeyMissingError: if a row lacks the field.
        """
        values = [kinds.find_field(row, path) for row in self.gather(slots)]
        missing = sum(value is None for value in values)
        if missing:
            msg = (
                f"Could not find key {kinds.show_path(path)} in the replay buffer: {missing} of {len(values)} rows "
                "lack it; write the field, or name another"
            )
            raise KeyMissingError(msg)
        if all(isinstance(value, Tensor) for value in values):
            same = len({(value.shape, value.dtype) for value in values}) == 1
            return torch.stack(values) if same else [value.tolist() for value in values]
        return [value.tolist() if hasattr(value, "tolist") else value for value in values]

    def _stored(self, rows: list[Any]) -> list[Any]:
        """Return rows as the list holds them.

        Raises:
            KindError: for rows that are no TensorDicts or tensorclasses.
        """
        for row in rows:
            if not kinds.is_tensor_collection(row):
                msg = f"LazyStackStorage holds TensorDicts and tensorclasses, got {type(row).__name__}: use ListStorage"
                raise KindError(msg)
        return super()._stored(rows)

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return one row, or a batch of the rows at a slice, tensor or mask. Copy of several rows."""
        return self.stack(super().read(index, swap=swap))


# -- compressed -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Packed:
    """A compressed leaf of a row: a tensor, an array, a TensorDict or a tensorclass."""

    parts: list[tuple[Any, torch.dtype, tuple[int, ...]]]
    """Compressed bytes, dtype and shape of each tensor."""
    array: bool = False
    schema: Schema | None = None
    """Of a TensorDict or tensorclass."""
    objects: Sequence[np.ndarray[Any, Any]] = ()

    @property
    def size(self) -> int:
        """Compressed bytes, as far as known."""
        blobs = [blob for blob, _, _ in self.parts]
        return sum(len(x) if isinstance(x, bytes) else int(getattr(x, "nbytes", 0)) for x in blobs)


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
    def nbytes(self) -> int:  # type: ignore[override]
        """Compressed bytes; the size of objects that are not tensors or arrays is not known."""
        sizes: list[int] = []
        for item in self._items:
            map_leaves(item, lambda leaf: sizes.append(leaf.size if isinstance(leaf, _Packed) else 0))
        return sum(sizes)

    def to_bytestream(self, data: Any) -> builtins.bytes:
        """Return the memory of a tensor or array as bytes, which is what is compressed.

        Raises:
            KindError: for other objects, which are not compressed.
        """
        if isinstance(data, np.ndarray):
            data = torch.from_numpy(np.ascontiguousarray(data))
        if isinstance(data, Tensor):
            return bytes(host_view(data))
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

    def _stored(self, rows: list[Any]) -> list[Any]:
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
            return _Packed([self._packed(tensor)], array=True)
        if isinstance(leaf, Tensor):
            return _Packed([self._packed(leaf)])
        if not kinds.is_tensor_collection(leaf):
            return leaf
        schema = describe(leaf, 0, bare=True)
        if self._schema == schema:
            schema = self._schema
        self._schema = schema
        flat = schema.flatten(leaf, (), 0)
        return _Packed(list(map(self._packed, flat.leaves)), schema=schema, objects=flat.objects)

    def _packed(self, tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
            msg = f"only dense tensors with data can be compressed, got {tensor.layout} on {tensor.device}: convert it"
            raise KindError(msg)
        tensor = tensor.detach()
        blob = self.compression_fn(tensor) if self._own else self.codec.encode(host_view(tensor))
        return blob, tensor.dtype, tuple(tensor.shape)

    def _unpack(self, leaf: Any) -> Any:
        """Return a leaf as it was given."""
        if not isinstance(leaf, _Packed):
            return leaf
        decompress, found = self.decompression_fn if self._own else self._decompress, []
        for blob, dtype, shape in leaf.parts:
            given = {"type": "tensor", "shape": torch.Size(shape), "dtype": dtype, "device": self.device}
            tensor = decompress(blob, given)
            found.append(tensor if leaf.array else tensor.to(self.device))
        if leaf.schema is not None:
            return leaf.schema.build(found, (), self.device, leaf.objects)
        return found[0].numpy() if leaf.array else found[0]

    def _compress(self, tensor: Tensor) -> Tensor:
        return join_blobs([self.codec.encode(host_view(tensor))])[0]

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
            if not isinstance(leaf, _Packed):
                notes.append(None)
                return leaf
            blobs.extend(blob for blob, _, _ in leaf.parts)
            notes.append({"leaves": [[dtype_name(dtype), list(shape), leaf.array] for _, dtype, shape in leaf.parts]})
            if leaf.schema is not None:
                objects = pack_objects(leaf.objects, allow_pickle=self.allow_pickle)
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
            for dtype, size, _ in note["leaves"]:
                shape = check_shape(size)
                if shape is None:
                    msg = f"the shape {size!r}"
                    raise ValueError(msg)
                parts.append((blobs.pop(), DTYPES[dtype], shape))
            if "schema" not in note:
                return _Packed(parts, bool(note["leaves"][0][2]))
            schema = Schema.from_json(note["schema"])
            objects = unpack_objects(note["objects"], schema, allow_pickle=self.allow_pickle)
            return _Packed(parts, schema=schema, objects=objects)

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


def _plain_bytes(leaf: Any) -> int:
    """Return the bytes of a leaf before compression, roughly."""
    if isinstance(leaf, _Packed):
        return sum(shape_nbytes(shape, dtype) for _, dtype, shape in leaf.parts)
    if kinds.is_tensor_collection(leaf):
        return describe(leaf, 0, bare=True).nbytes
    return int(getattr(leaf, "nbytes", 0))
