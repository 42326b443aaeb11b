"""Base classes of samplers: what a buffer calls to draw slots, and to keep a sampler's state up to date."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ostinato.errors import CheckpointError, SlotError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.episodes.keys import Episodes
    from ostinato.core.records import Draw, Placement, Plan, View
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Path

__all__ = ["CountingSampler", "PrioritySampler", "Sampler", "check_rows"]


class StorageShape(Protocol):
    """What `Sampler.check_parts` sees of a storage."""

    ndim: int
    ring_only: bool


class WriterOrder(Protocol):
    """What `Sampler.check_parts` sees of a writer."""

    in_order: bool
    mutable: bool


class Sampler(ABC):
    """Base of all samplers; a sampler of your own subclasses it and implements `draw`.

    The buffer calls every method under its lock, so a sampler needs none.
    """

    prioritized: bool = False
    """Whether the sampler keeps priorities, and so is a `PrioritySampler`."""
    counting: bool = False
    """Whether draws use rows up, so that the sampler is a `CountingSampler`."""
    ran_out: bool = False
    """Whether the last draw ended an epoch; always False for endless samplers."""
    episodes: Episodes | None = None
    """Where episodes begin and end, for a sampler that needs them; its view then has `episodes`."""
    slices: bool = False
    """Whether it draws slices (`Draw.length`, `Draw.lengths`), not single rows."""
    span: int = 1
    """Rows of one environment that a slice covers."""
    reads: bool = False
    """Whether it reads stored fields; its view then has `stored`."""
    by_age: bool = False
    """Whether it heeds `View.young`, so that `sample(max_age=)` is available."""
    leaves: bool = False
    """Whether rows that are used up leave the buffer, so that `len` counts only the others (`rows_left`)."""
    drop_last: bool = False
    """Whether an epoch leaves out its last, smaller batch; the buffer then needs a batch size from the start."""

    @abstractmethod
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw up to `batch_size` slots.

        Args:
            view: the buffer now; `view.rows` is at least 1. If it has `starts`, all slots must be among those.
            batch_size: at least 1.
            generator: the only source of random numbers; None stands for torch's global one.

        Returns:
            Slots int64 `[B]` on `view.device`, in `[0, view.rows)`; `B` is `batch_size`, or less where an epoch ends.
        """

    def check_parts(self, storage: StorageShape, writer: WriterOrder) -> None:  # noqa: B027
        """Check that the sampler works with a storage and a writer.

        Raises:
            OptionError: naming what it does not work with.
        """

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: B027
        """Raise what `draw` would raise, and change nothing: for several samplers that draw one batch together.

        Args:
            view: as of `draw`.
            batch_size: as of `draw`.

        Raises:
            EmptyBufferError: if there is nothing to draw before more rows are written.
        """

    @property
    def epochal(self) -> bool:
        """Whether the sampler goes through the rows in epochs; iteration over the buffer then ends with the epoch."""
        return False

    def spent(self, view: View) -> bool:  # noqa: ARG002
        """Return whether an epoch that has begun ended after its last draw, since the rows left cannot be drawn now."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes used for each row of the buffer; 0 for samplers without such state."""
        return 0

    def mass(self, view: View) -> tuple[float, float, float] | None:  # noqa: ARG002
        """Return the sum of the values of rows, where each draw takes row `i` with probability `v_i / sum v`.

        Several buffers with such samplers can be drawn from as one buffer, whatever machine each is on.

        Args:
            view: the buffer.

        Returns:
            The sum of the values of all rows that can be drawn, the smallest above zero, and the exponent of weights;
            None if draws depend on each other, or are not of single rows.
        """
        return None

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:  # noqa: ARG002
        """Return the fields that slices add to their batch, `[R]` by path; may run in another thread.

        Args:
            plan: the slices.
            data: the batch, nested.
        """
        return {}

    def restart(self) -> None:  # noqa: B027
        """Begin a new epoch with the next draw."""

    def recheck(self) -> None:  # noqa: B027
        """Update the state after an edit that has changed which rows may be drawn."""

    def record(self, placement: Placement) -> None:  # noqa: B027
        """Record rows just written."""

    def clear(self) -> None:  # noqa: B027
        """Forget all rows: the buffer was emptied."""

    def move(self) -> None:
        """Forget all rows: the sampler now belongs to another buffer, or the buffer has another storage."""
        self.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors are not copied."""
        return {}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: B027
        """Raise what `load_state_dict` would raise: buffers call this before they load, and before they save.

        Args:
            state: what `state_dict` returned.
            rows: rows of the buffer.

        Raises:
            CheckpointError: if the state is damaged, of other options, or of another number of rows.
        """

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the state after rows were moved: the row of slot `i` of `rows` is in slot `(i - seam) % rows` now.

        A full ring is moved so when it is loaded into a buffer of another capacity. A sampler of your own whose state
        contains slots, or a number for each slot, overrides this.

        Raises:
            CheckpointError: if the sampler has a state and does not override this method.
        """
        if state:
            msg = (
                f"{type(self).__name__} does not say how its state follows rows to other slots (turn_state): load into "
                "a buffer of the same max_size"
            )
            raise CheckpointError(msg)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned."""


class PrioritySampler(Sampler):
    """Base of samplers that keep a priority for each row; the buffer passes priorities on as rows are written.

    Rows without a priority have the default priority.
    """

    prioritized = True
    max_capacity: int
    """Most rows that it can keep priorities for."""

    @abstractmethod
    def reduce(self, items: Tensor) -> Tensor:
        """Reduce the values of each item to one priority.

        Args:
            items: `[n, *shape]`, any real dtype.

        Returns:
            float64 `[n]`.
        """

    @abstractmethod
    def check(self, priorities: Tensor) -> None:
        """Check priorities before anything changes.

        Raises:
            PriorityError: for invalid priorities; names their positions in `priorities`, float64 `[n]`.
        """

    @abstractmethod
    def begin(self, view: View) -> None:
        """Initialize the state from the rows of the buffer that the sampler now belongs to."""

    @abstractmethod
    def record_rows(self, placement: Placement, priorities: Tensor | None, view: View) -> None:
        """Record rows just written, with their first priorities.

        Args:
            placement: their slots.
            priorities: float64 `[placement.total]`, checked; None gives them the default priority.
            view: the buffer, the new rows included.
        """

    @abstractmethod
    def set_priorities(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Set the priorities of rows; of equal slots the last one wins.

        Args:
            slots: int64 `[n]` on the view's device, in `[0, view.rows)`.
            priorities: float64 `[n]` on the view's device; None gives the rows the default priority.
            view: the buffer.
            keep: bool `[n]`, False where nothing is to change; on devices where filtering would be a host sync.
        """

    def update(self, slots: Tensor, priorities: Tensor, generations: Tensor | None, view: View) -> int | Tensor:
        """Set the priorities that a learner computed, except those of rows replaced since they were drawn.

        Args:
            slots: int64 `[n]` on the view's device, contiguous; without generations, -1 marks a row that was not kept.
            priorities: float32 or float64 `[n]` on the view's device, contiguous.
            generations: generations of the rows when they were drawn, int64 `[n]`; None sets the priority of whatever
                row is in the slot.
            view: the buffer.

        Returns:
            Number of rows that had been replaced; 0-dim on devices other than the CPU.

        Raises:
            PriorityError: for invalid priorities; nothing is changed.
            SlotError: without generations, on the CPU: if a slot is beyond the rows; nothing is changed.
        """
        if generations is None:
            keep = slots >= 0 if slots.is_cpu else slots != -1
            check_rows(slots, view.rows)
        else:
            keep = view.ring.matches(slots, generations)
        priorities = priorities.to(torch.float64)
        if not slots.is_cpu:
            self.set_priorities(slots, priorities, view, keep)
            return (~keep).sum() if generations is not None else 0
        if bool(keep.all()):
            self.set_priorities(slots, priorities, view)
            return 0
        self.check(torch.where(keep, priorities, 0.0))  # all of them, so that positions are those in `priorities`
        self.set_priorities(slots[keep], priorities[keep], view)
        return int((~keep).sum()) if generations is not None else 0

    @abstractmethod
    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """

    def raise_deferred(self) -> None:
        """Raise errors found on a device since the last call: to raise them at once would have been a host sync."""


class CountingSampler(Sampler):
    """Base of samplers whose draws use rows up: each row can be drawn a limited number of times.

    The buffer reports which draws reached a reader. Draws carry the generations of their rows. A draw with a row that
    was replaced before it was read is undone and made again, since the row that replaced it was not counted.
    """

    counting = True
    in_order: bool = False
    """Whether rows must be in the order of writing."""
    bounded: bool = False
    """Whether writers wait for room (`room`)."""

    def place(self, rows: int, ring: Ring) -> Placement | None:  # noqa: ARG002
        """Return the slots of `rows` new rows; None leaves them to the writer. Nothing changes before `record`."""
        return None

    @property
    @abstractmethod
    def rows_left(self) -> int:
        """Rows that can be drawn."""

    @property
    @abstractmethod
    def draws_left(self) -> int:
        """Draws that these rows allow."""

    @abstractmethod
    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer allows."""

    @abstractmethod
    def begin(self, view: View) -> None:
        """Initialize the state from rows that a storage held before."""

    def room(self, view: View) -> int | None:  # noqa: ARG002
        """Return how many rows may be written now; None for any number."""
        return None

    def deliver(self, draw: Draw) -> None:
        """Record that the batch of a draw has reached its reader."""

    @abstractmethod
    def undo(self, draw: Draw, view: View) -> None:
        """Undo a draw whose batch reached no reader."""

    def resume(self, draws: Sequence[Draw], view: View) -> None:
        """Undo, after a load, all draws under way except those given, which are still to be delivered."""

    @abstractmethod
    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """


def check_rows(slots: Tensor, rows: int) -> None:
    """Check that slots on the CPU are below `rows`; -1 marks a row that was not kept.

    Raises:
        SlotError: naming a slot out of range.
    """
    if not (slots.is_cpu and slots.numel()):
        return
    low, high = int(slots.min()), int(slots.max())
    if low < -1 or high >= rows:
        msg = f"index {high if high >= rows else low} is out of range for {rows} rows: use an index in [0, {rows})"
        raise SlotError(msg)
