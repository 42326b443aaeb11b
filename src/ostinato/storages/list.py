"""ListStorage: rows of any Python objects, one list item for each row."""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.index import select
from ostinato.core.records import Run
from ostinato.core.rows import map_leaves
from ostinato.errors import CheckpointError, KindError, SchemaError, SlotError
from ostinato.storages.base import Storage, check_capacity, check_device, find_seam
from ostinato.storages.checkpoint import require_form
from ostinato.storages.object_columns import owned, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ostinato.core.records import Placement
    from ostinato.core.rows import Schema

__all__ = ["ListStorage"]


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

    def __init__(
        self,
        max_size: int | None = None,
        *,
        device: torch.device | str | int | None = None,
        allow_pickle: bool = False,
        compilable: bool = False,  # noqa: ARG002
    ) -> None:
        self._max_size = sys.maxsize if max_size is None else check_capacity(max_size)
        self._target = None if device is None else check_device(device)
        if self._target is not None:
            self.device = self._target
        self.allow_pickle = allow_pickle
        self._items: list[Any] = []
        self._cursor = 0

    @property
    def capacity(self) -> int:
        """Maximum number of rows."""
        return self._max_size

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and arrays; the size of other objects is not known."""
        return sum(int(getattr(item, "nbytes", 0)) for item in self._items)

    @property
    def cursor(self) -> int:
        """Slot after the newest row."""
        return self._cursor

    @property
    def default_collate(self) -> Callable[[Any], Any]:
        """Stack rows into a batch."""
        return collate_rows

    def __len__(self) -> int:
        """Number of rows present."""
        return len(self._items)

    def __repr__(self) -> str:
        """Class and number of rows."""
        return f"ListStorage(rows={len(self)}, capacity={self._max_size}, bytes of tensors={self.nbytes})"

    def admit(self, data: Any, lead: int) -> tuple[list[Any], int]:
        """Check one object, or a list, tuple, range, iterator, array, tensor or TensorDict of rows.

        Raises:
            KindError: if `extend` is given a dict or text, which could be one row or many.
        """
        if lead == 0:
            return [self._copied(data)], 1
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
        return [self._copied(row) for row in rows], len(rows)

    def _copied(self, row: Any) -> Any:
        """Return a copy of a row on the device of the storage."""
        return self._moved(owned(row))

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
            self._cursor = (placement.start + placement.rows) % placement.capacity
        else:
            slots = placement.slots.tolist()
            rows = [payload[i] for i in placement.rows.tolist()]
            end = max(len(self._items), *(slot + 1 for slot in slots), 0) % self._max_size
            self._cursor = end if placement.cursor is None else placement.cursor
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
        return [items[slot] for slot in slots.tolist()]

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
        return [self._copied(unpack(row, allow_pickle=self.allow_pickle)) for row in saved]

    def read(self, index: Any, *, swap: bool = False) -> Any:  # noqa: ARG002
        """Return one object, or the list of objects at a slice, tensor or mask."""
        picked = select(index, (len(self),), self.device)
        if picked.span is not None:
            return self._items[picked.span] if picked.batch else self._items[picked.span.start]
        rows = [self._items[slot] for slot in picked.slots.tolist()]
        return rows if picked.batch else rows[0]

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check that there is one object for each slot; return a function that writes them.

        Raises:
            SchemaError: if the number of rows differs from that of the slots.
        """
        rows = [self._copied(row) for row in kinds.unstack(data)] if batch else [self._copied(data)]
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
        self._cursor = 0

    def scores(self, payload: list[Any], path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of rows that have keys, `[rows, *shape]`."""
        try:
            values = []
            for row in payload:
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
            "cursor": self._cursor,
            "capacity": self._max_size,
            "allow_pickle": self.allow_pickle,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that the rows fit.

        Raises:
            CheckpointError: naming the number of rows and the capacity.
        """
        if len(state["items"]) > self._max_size:
            msg = f"the checkpoint holds {len(state['items'])} rows, the storage has room for {self._max_size}"
            raise CheckpointError(msg)
        if not all(isinstance(state.get(name), int) for name in ("cursor", "capacity")):
            msg = "the checkpoint's list of rows has no cursor or no capacity: it is damaged"
            raise CheckpointError(msg)

    def seam(self, state: dict[str, Any]) -> int:
        """Return the slot of the oldest row of a saved ring that `load_state_dict` rotates to slot 0, else 0."""
        return find_seam(state, len(state["items"]), self._max_size)

    def hold(self, *, replaced: bool) -> Callable[[], None]:  # noqa: ARG002
        """Return a function that restores the present list, which a load replaces."""
        kept = self._items, self._cursor

        def restore() -> None:
            self._items, self._cursor = kept

        return restore

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the objects into a new list; those of a full ring of another capacity in the order of writing.

        Raises:
            CheckpointError: if there are more rows than fit.
        """
        require_form(state, self)
        self.check_state(state)
        items, seam = list(map(self._moved, state["items"])), self.seam(state)
        self._items = items[seam:] + items[:seam]
        grown = self._max_size != state["capacity"]
        self._cursor = (len(self._items) if grown else int(state["cursor"])) % self._max_size


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
