"""What every sampler can do: draw slots from a view, hear of writes, give and take its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ostinato.errors import CheckpointError, SlotError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.episodes.keys import Episodes
    from ostinato.core.records import Draw, Placement, Plan, View
    from ostinato.core.rows import Path

__all__ = ["CountingSampler", "PrioritySampler", "Sampler", "check_rows"]


class Sampler(ABC):
    """Base of all samplers; a sampler of your own subclasses it and implements `draw`.

    The buffer calls every method under its lock, so a sampler needs none.
    """

    prioritized: bool = False
    """Whether it keeps priorities; only a `PrioritySampler` does, which the buffer tells more."""
    counting: bool = False
    """Whether rows are used up by draws; only a `CountingSampler` counts, which the buffer tells more."""
    episodes: Episodes | None = None
    """Where episodes begin and end, for a sampler that wants to know them; its view then has `episodes`."""
    slices: bool = False
    """Whether it draws slices (`Draw.length`, `Draw.lengths`), not single rows."""
    span: int = 1
    """Rows of one lane that one of its slices takes."""
    drop_last: bool = False
    """Whether an epoch leaves out its last, smaller batch; the buffer then needs its batch size early."""

    @abstractmethod
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw up to `batch_size` slots.

        Args:
            view: the buffer now; `view.rows` is at least 1. Where it has `starts`, all slots must be among those.
            batch_size: at least 1.
            generator: the only source of chance; None stands for torch's global one.

        Returns:
            Slots int64 `[B]` on `view.device`, in `[0, view.rows)`; `B` is `batch_size`, fewer where an epoch ends.
        """

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: B027
        """Raise what `draw` would raise, without any change: for several samplers that draw one batch together.

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

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch; always False for endless samplers."""
        return False

    def spent(self, view: View) -> bool:  # noqa: ARG002
        """Return whether an epoch that has begun ended after its last draw, since the rows left cannot be drawn now."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes held for the rows of the buffer; 0 where nothing is kept for each."""
        return 0

    def mass(self, view: View) -> tuple[float, float, float] | None:  # noqa: ARG002
        """Return what the rows weigh together, where each draw takes row `i` with probability `v_i / sum v`.

        Buffers of such samplers can be drawn from as one, whatever machine each is on.

        Args:
            view: the buffer.

        Returns:
            The sum of the values of all rows that can be drawn, the smallest above zero, and the exponent of weights;
            None where draws depend on each other, or are not of single rows.
        """
        return None

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:  # noqa: ARG002
        """Return fields that the slices drawn add to their batch, `[R]` by path; may run in another thread.

        Args:
            plan: the slices.
            data: the batch, nested.
        """
        return {}

    def restart(self) -> None:  # noqa: B027
        """Begin a new epoch with the next draw."""

    def recheck(self) -> None:  # noqa: B027
        """Take note that an edit has changed which rows may be drawn."""

    def hear(self, placement: Placement) -> None:  # noqa: B027
        """Take note of rows just written."""

    def clear(self) -> None:  # noqa: B027
        """Take note that the buffer was emptied."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors are not copied."""
        return {}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: B027
        """Raise if `load_state_dict` would: buffers ask before they load, and before they save.

        Args:
            state: what `state_dict` returned.
            rows: rows of the buffer.

        Raises:
            CheckpointError: if the state is damaged, of other options, or of another number of rows.
        """

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:  # noqa: ARG002
        """Return a state for rows that have moved: what was in slot `i` of `rows` is in slot `(i - seam) % rows` now.

        A full ring is turned so when it is loaded into a buffer of another capacity. A sampler of your own whose state
        names slots, or has a number for each, overrides this.

        Raises:
            CheckpointError: if the sampler has a state and does not say how it follows.
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
    """Base of samplers that keep a priority for each row; the buffer hands priorities over as it writes and learns.

    Rows that the sampler was told nothing of have the default priority.
    """

    prioritized = True
    max_capacity: int
    """Most rows that it can keep priorities for."""

    @abstractmethod
    def reduce(self, items: Tensor) -> Tensor:
        """Make one priority of the several values of each item.

        Args:
            items: `[n, *shape]`, any real dtype.

        Returns:
            float64 `[n]`.
        """

    @abstractmethod
    def check(self, priorities: Tensor) -> None:
        """Refuse priorities that cannot be kept, before anything changes.

        Raises:
            PriorityError: naming the positions in `priorities`, float64 `[n]`.
        """

    @abstractmethod
    def begin(self, view: View) -> None:
        """Take note of the rows of a buffer that it now belongs to."""

    @abstractmethod
    def receive(self, placement: Placement, priorities: Tensor | None, view: View) -> None:
        """Take note of rows just written.

        Args:
            placement: their slots.
            priorities: float64 `[placement.total]`, checked; None gives them the default priority.
            view: the buffer, the new rows included.
        """

    @abstractmethod
    def assign(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Give rows new priorities; of equal slots the last one wins.

        Args:
            slots: int64 `[n]` on the view's device, in `[0, view.rows)`.
            priorities: float64 `[n]` on the view's device; None gives the rows the default priority.
            view: the buffer.
            keep: bool `[n]`, False where nothing is to change; on devices where filtering would wait for the host.
        """

    def learn(self, slots: Tensor, priorities: Tensor, stamps: Tensor | None, view: View) -> int | Tensor:
        """Give rows the priorities that a learner has for them, but not those replaced since it drew them.

        Args:
            slots: int64 `[n]` on the view's device, contiguous; without stamps -1 stands for a row that was not kept.
            priorities: float32 or float64 `[n]` beside them, contiguous.
            stamps: the stamps of the rows when they were drawn, int64 `[n]`; None lets priorities fall on any row.
            view: the buffer.

        Returns:
            How many rows were left alone because they had been replaced; 0-dim on devices other than the CPU.

        Raises:
            PriorityError: for priorities that cannot be kept; nothing is changed.
            SlotError: without stamps, on the CPU: if a slot is beyond the rows; nothing is changed.
        """
        if stamps is None:
            keep = slots >= 0 if slots.is_cpu else slots != -1
            check_rows(slots, view.rows)
        else:
            keep = view.ring.matches(slots, stamps)
        priorities = priorities.to(torch.float64)
        if not slots.is_cpu:
            self.assign(slots, priorities, view, keep)
            return (~keep).sum() if stamps is not None else 0
        if bool(keep.all()):
            self.assign(slots, priorities, view)
            return 0
        self.check(torch.where(keep, priorities, 0.0))  # all of them, so that positions are those given
        self.assign(slots[keep], priorities[keep], view)
        return int((~keep).sum()) if stamps is not None else 0

    @abstractmethod
    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Refuse a state that is damaged, of other options, or of another number of rows.

        Raises:
            CheckpointError: naming what differs.
        """

    def settle(self) -> None:
        """Raise what a device has found wrong since the last call, where asking it earlier would have meant to wait."""


class CountingSampler(Sampler):
    """Base of samplers that use rows up: a row is good for so many draws; the buffer says which draws reached a reader.

    Draws carry the `stamps` of their rows. A row that was replaced before it was read makes the draw void: it is undone
    and made again, since what replaced it was not counted.
    """

    counting = True
    in_order: bool = False
    """Whether it needs rows in the order of writing."""
    bounded: bool = False
    """Whether writers wait for it (`room`)."""

    @property
    @abstractmethod
    def rows_left(self) -> int:
        """Rows that can be drawn."""

    @property
    @abstractmethod
    def draws_left(self) -> int:
        """Draws that these are good for."""

    @abstractmethod
    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer is good for."""

    @abstractmethod
    def begin(self, view: View) -> None:
        """Take note of rows that a storage brought along."""

    def room(self, view: View) -> int | None:  # noqa: ARG002
        """Return how many rows may be written now; None for any number."""
        return None

    def deliver(self, draw: Draw) -> None:
        """Take note that the batch of a draw has reached its reader."""

    @abstractmethod
    def undo(self, draw: Draw, view: View) -> None:
        """Take a draw back whose batch reached nobody."""

    def resume(self, draws: Sequence[Draw], view: View) -> None:
        """After a load: take all draws back that were under way, but those given, which are still to be delivered."""

    @abstractmethod
    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Refuse a state that is damaged, of other options, or of another number of rows.

        Raises:
            CheckpointError: naming what differs.
        """


def check_rows(slots: Tensor, rows: int) -> None:
    """Refuse slots on the CPU beyond the rows; -1 stands for a row that was not kept.

    Raises:
        SlotError: naming one.
    """
    if not (slots.is_cpu and slots.numel()):
        return
    low, high = int(slots.min()), int(slots.max())
    if low < -1 or high >= rows:
        msg = f"index {high if high >= rows else low} is out of range for {rows} rows: use an index in [0, {rows})"
        raise SlotError(msg)
