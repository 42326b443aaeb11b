"""Observers of the rows of a buffer: the events that a store reports, and rows that are about to be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ostinato.core.options import check_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.rate_limit import Ask
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.store import Store
    from ostinato.core.records import Draw, Placement
    from ostinato.core.ring import Ring


class Incoming(NamedTuple):
    """Rows that are about to be written."""

    data: Any
    """As they were given, nested."""
    payload: Any
    """As the storage takes them; see `Storage.admit`."""
    rows: int
    ranked: bool
    """Whether priorities in the rows are used; else the rows get the default priority."""


class Observer:
    """Base of what follows the rows of a buffer; each method does nothing unless it is overridden.

    The store calls every method under its lock, and passes itself: an observer holds no reference to it. All checks
    (`check`, `place`, `check_placement`, `before_change`, `check_removal`, `plan_move`) come before the first change;
    these methods alone may raise. An observer of your own is given to `ReplayBuffer.observe`; its state is saved and
    loaded with the buffer.
    """

    row_values: tuple[str, ...] = ()
    """Entries of the state with one value for each row, which follow the rows when a load moves them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and plain values. Nothing is copied."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, in a copy that takes the place of this observer if the load succeeds."""

    def saved(self, store: Store, queued: Sequence[Draw]) -> dict[str, Any]:  # noqa: ARG002
        """Return what a reader saves of a part of its own, with draws that are queued. Nothing is copied."""
        return {}

    def direct(self, store: Store) -> bool:  # noqa: ARG002
        """Whether native calls may write rows, which report their slots alone (`reported`)."""
        return False

    def turns(self, store: Store) -> Tensor | None:
        """The slots that rows of native calls take in turn, int64 `[n]`, each once; None for those of the ring.

        They go on at the position `store.ring.counts.turn`, and take the place of `place`.
        """

    def reported(self, store: Store, placement: Placement) -> None:
        """Native calls wrote rows, after `direct` returned True; instead of `check` and `written`."""

    def follow(self, store: Store) -> None:
        """A write, draw or update begins: follow what happened without a call of this buffer."""

    def wait(self, store: Store, rows: int, timeout_s: float | None) -> float | None:
        """Wait until so many rows may be written: return the seconds that are left, None if no wait was needed."""

    def check(self, store: Store, incoming: Incoming) -> Any:
        """Check rows before they are written, and return what `written` gets."""

    def place(self, store: Store, incoming: Incoming) -> Placement | None:
        """Return the slots of new rows; None leaves them to the next observer, and in the end to the writer."""

    def check_placement(self, store: Store, placement: Placement) -> None:
        """Check the slots of new rows."""

    def before_write(self, store: Store, placement: Placement) -> None:
        """The ring and the storage are about to be written."""

    def written(self, store: Store, placement: Placement, found: Any) -> None:
        """Rows were written; `found` is what `check` returned."""

    def before_change(self, store: Store, slots: Tensor, data: Any) -> Any:
        """Rows present, int64 `[n]`, are about to be edited: all of them by `data`, or some fields if it is None.

        Returns:
            What `changed` gets.
        """

    def changed(self, store: Store, slots: Tensor, paths: tuple[Any, ...] | None, found: Any) -> None:
        """Fields of rows were edited; `paths` is None for whole rows."""

    def ranked(self, slots: Tensor) -> None:
        """Rows, int64 `[n]`, got other priorities; -1 stands for no row."""

    def check_removal(self, store: Store) -> None:
        """Raise if single rows cannot be removed."""

    def before_removal(self, store: Store, slots: Tensor | None) -> None:
        """Rows are about to be removed, int64 `[n]`, each once; None stands for all rows."""

    def before_move(self, store: Store) -> None:
        """Rows are about to be moved to other slots."""

    def removed(self, store: Store, slots: Tensor) -> None:
        """Rows were removed; the ring has the generation 0 in their slots."""

    def plan_move(self, store: Store, slots: Tensor) -> Callable[[], None]:
        """Return what follows rows to other slots: that of `slots[i]` is about to be moved to `i`, others leave."""
        del store, slots
        return nothing

    def cleared(self, store: Store) -> None:
        """All rows were removed."""

    def replaced(self, store: Store) -> None:
        """The buffer has another storage, with other rows or none."""

    def reread(self, store: Store) -> None:
        """Values of any rows may have changed: read again what was read from them."""


class DrawRule(Observer):
    """Base of what permits and counts the draws of one reader.

    The reader calls every method under the lock of the store.
    """

    _since = 0  # serial number of the first row that a draw under these counts may have met

    def begin(self, ring: Ring) -> None:
        """Start from the rows present: draws that were made before are not counted."""
        # of an empty buffer nothing can be drawn before the next write: earlier draws are not of these counts
        self._since = ring.written + (ring.rows == 0)

    def knows(self, draw: Draw, ring: Ring) -> bool:
        """Whether a draw was made since the start."""
        return draw.ring is ring and draw.serial >= self._since

    def cleared(self, store: Store) -> None:
        """Start anew."""
        self.begin(store.ring)

    replaced = cleared

    def can_draw(self, reader: Reader, rows: int) -> bool:  # noqa: ARG002
        """Whether a draw of so many rows returns at once, and does not raise."""
        return True

    def most_draws(self, reader: Reader, rows: int) -> int:  # noqa: ARG002
        """Return the rows of the largest draw of at most `rows` rows that may be made now; 0 if none may."""
        return rows

    def wait_to_draw(self, reader: Reader, rows: int, ask: Ask, queued: Callable[[], bool]) -> int:  # noqa: ARG002
        """Return the rows to draw, once they may be drawn; see `Reader.wait_to_draw`."""
        return rows

    def drew(self, draw: Draw) -> None:
        """Rows were drawn."""

    def canceled(self, reader: Reader, draw: Draw) -> None:
        """The batch of a draw was not delivered."""

    def delivered(self, reader: Reader, draw: Draw) -> None:
        """The batch of a draw reached the caller."""

    def resumed(self, reader: Reader, draws: list[Draw]) -> list[Draw]:  # noqa: ARG002
        """Return those draws of a checkpoint that are still to be delivered; the counts of the others are undone."""
        return draws


def nothing() -> None:
    """Do nothing: what follows no move, or has nothing to undo."""


class Observers(NamedTuple):
    """The observers of a store, and those of them that frequent calls report to: the ones that override an event."""

    all: tuple[Observer, ...]
    waiting: tuple[Observer, ...]
    """These override `wait`."""
    writing: tuple[Observer, ...]
    """These override `check` or `written`."""
    placing: tuple[Observer, ...]
    """These override `place` or `check_placement`."""
    copying: tuple[Observer, ...]
    """These override `before_write`."""
    ranking: tuple[Observer, ...]
    """These override `ranked`."""
    following: tuple[Observer, ...]
    """These override `follow`."""

    @classmethod
    def of(cls, *observers: Observer) -> Observers:
        """Return observers, sorted by the events that they override."""

        def overriding(*events: str) -> tuple[Observer, ...]:
            return tuple(o for o in observers if any(getattr(type(o), e) is not getattr(Observer, e) for e in events))

        writing, placing = overriding("check", "written"), overriding("place", "check_placement")
        names = ("before_write", "ranked", "follow")
        return cls(observers, overriding("wait"), writing, placing, *map(overriding, names))


class RowValues(Observer):
    """One number for each row, in step with the rows: a column of your own. Give it to `ReplayBuffer.observe`.

    Samplers find it as `view.values[name]`, `[n]` for at least the rows present, on their device; the number of a
    deleted row is 0. Override `first`, and any event that changes the numbers.

    Args:
        name: of the column.
        default: the number of a new row.
        dtype: of the numbers.
    """

    row_values = ("values",)

    def __init__(self, name: str, default: float = 0, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.default = name, check_number("default", default)
        self.values = torch.zeros(0, dtype=dtype, device="cpu")

    def direct(self, store: Store) -> bool:  # noqa: ARG002
        """Whether new rows get the default number, and nothing else is done with them."""
        own = type(self)
        return own.first is RowValues.first and own.check is RowValues.check and own.written is RowValues.written

    def reported(self, store: Store, placement: Placement) -> None:
        """Give new rows the default number."""
        self._fit(store, 0)
        self.values[placement.slots_written(self.values.device)] = self.default

    def first(self, store: Store, incoming: Incoming) -> Tensor | float:  # noqa: ARG002
        """Return the numbers of new rows, `[rows]`, or one for all of them. May raise: nothing is written then."""
        return self.default

    def _fit(self, store: Store, rows: int) -> None:
        """Have a number for each slot that so many more rows may take; the size doubles."""
        held = self.values.shape[0]
        more = min(store.ring.capacity, max(store.ring.rows + rows, 2 * held)) - held
        if store.ring.rows + rows > held and more > 0:
            values = self.values.to(store.ring.device)
            self.values = torch.cat((values, torch.zeros(more, dtype=values.dtype, device=values.device)))

    def check(self, store: Store, incoming: Incoming) -> Tensor:
        """Return the numbers of new rows."""
        self._fit(store, incoming.rows)
        return torch.as_tensor(self.first(store, incoming), dtype=self.values.dtype, device=self.values.device).expand(
            incoming.rows
        )

    def written(self, store: Store, placement: Placement, found: Tensor) -> None:
        """Set the numbers of new rows."""
        self._fit(store, 0)  # another process may have taken the slots after which `check` has looked
        self.values[placement.slots_written(self.values.device)] = placement.of_rows_written(found)

    def removed(self, store: Store, slots: Tensor) -> None:  # noqa: ARG002
        """Forget the numbers of deleted rows."""
        self.values[slots] = 0

    def plan_move(self, store: Store, slots: Tensor) -> Callable[[], None]:  # noqa: ARG002
        """Return what moves the numbers with their rows."""

        def follow() -> None:
            self.values = self.values[slots]

        return follow

    def cleared(self, store: Store) -> None:  # noqa: ARG002
        """Forget all numbers."""
        self.values.zero_()

    def replaced(self, store: Store) -> None:
        """Give the rows that are there the default number."""
        self.values = self.values[:0]
        self._fit(store, 0)
        self.values[: store.ring.rows] = self.default

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore numbers."""
        self.values = state["values"].to(self.values.dtype).clone()
