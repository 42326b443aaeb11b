"""ListStorage: rows of any Python objects, one list item for each row; LazyStackStorage: TensorDicts of any shapes."""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.index import select
from ostinato.core.records import Run
from ostinato.core.rows import map_leaves
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, SchemaError, SlotError
from ostinato.storages.base import Storage, check_capacity, check_device, find_seam
from ostinato.storages.checkpoint import require_form
from ostinato.storages.objects import owned, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Path, Schema

__all__ = ["LazyStackStorage", "ListStorage"]

_LAYOUTS = ("lazy", "nested", "padded")


class ListStorage(Storage):
    """A list of Python objects: text, trees, tensors of any size.

    Rows are stacked into batches, unless the buffer has a `collate_fn`. TensorDicts of different shapes or fields
    become a `LazyStackedTensorDict`; other objects that cannot be stacked need a `collate_fn`, for example `list`.
    Tensors and arrays of a row are copied when it is written.

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
    def nbytes(self) -> int:
        """Bytes of the tensors and arrays; the size of other objects is not known."""
        return sum(int(getattr(item, "nbytes", 0)) for item in self._items)

    @property
    def default_collate(self) -> Callable[[Any], Any]:
        """Stack rows into a batch."""
        return collate_rows

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
            return self._stored([data]), 1
        if isinstance(data, (dict, str, bytes)):
            msg = (
                "extend() of a ListStorage takes rows (list, tuple, range, tensor, TensorDict), got one "
                f"{type(data).__name__}: use add(), or pass a list"
            )
            raise KindError(msg)
        try:
            rows = kinds.unstack(data)
        except TypeError as error:
            msg = (
                "extend() of a ListStorage takes rows (list, tuple, range, tensor, TensorDict), got "
                f"{type(data).__name__} ({error}): use add() for one row"
            )
            raise KindError(msg) from None
        return self._stored(rows), len(rows)

    def _stored(self, rows: Sequence[Any]) -> list[Any]:
        """Return rows as the list holds them: copies on the device of the storage."""
        return [self._moved(owned(row)) for row in rows]

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
        if isinstance(placement, Run):
            slots = [(placement.start + i) % placement.capacity for i in range(placement.rows)]
            rows = payload[placement.skip :]
            self.cursor = (placement.start + placement.rows) % placement.capacity
        else:
            slots = placement.slots.tolist()
            rows = [payload[i] for i in placement.rows.tolist()]
            end = max(len(self._items), *(slot + 1 for slot in slots), 0) % self.capacity
            self.cursor = end if placement.cursor is None else placement.cursor
        for slot, row in sorted(zip(slots, rows, strict=True), key=itemgetter(0)):  # a list grows at its end
            if slot == len(self._items):
                self._items.append(row)
            elif slot < len(self._items):
                self._items[slot] = row
            else:
                msg = f"slot {slot} is beyond the next free one, {len(self._items)}: a list grows row by row"
                raise SlotError(msg)

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
        rows = self._stored(kinds.unstack(data) if batch else [data])
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

    def seam(self, state: dict[str, Any]) -> int:
        """Return the slot of the oldest row of a saved ring that `load_state_dict` rotates to slot 0, else 0."""
        return find_seam(state, len(state["items"]), self.capacity)

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
        items, seam = list(map(self._moved, state["items"])), self.seam(state)
        self._items = items[seam:] + items[:seam]
        grown = self.capacity != state["capacity"]
        self.cursor = (len(self._items) if grown else int(state["cursor"])) % self.capacity


def collate_rows(rows: list[Any]) -> Any:
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
            "collate_fn, such as collate_fn=list, which returns the list of rows; rows of different lengths that are "
            "TensorDicts need none"
        )
        raise KindError(msg) from error


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
        if layout not in _LAYOUTS:
            msg = f"layout must be one of {_LAYOUTS}, got {layout!r}"
            raise OptionError(msg)
        if layout != "lazy" and stack_dim not in {0, -1}:
            msg = f"layout={layout!r} makes batches along dimension 0, got stack_dim={stack_dim}: use layout='lazy'"
            raise OptionError(msg)
        if isinstance(stack_dim, bool) or not isinstance(stack_dim, int):
            msg = f"stack_dim must be an integer, got {stack_dim!r}"
            raise OptionError(msg)
        self.stack_dim = stack_dim
        self.layout = layout

    def __repr__(self) -> str:
        """Class, number of rows and layout."""
        return f"LazyStackStorage(rows={len(self)}, capacity={self.capacity}, layout={self.layout!r})"

    @property
    def default_collate(self) -> Callable[[Any], Any]:
        """Stack rows into a batch."""
        return self.stack

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

    def _stored(self, rows: Sequence[Any]) -> list[Any]:
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
