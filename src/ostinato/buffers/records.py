"""What passes between engine, pipeline and checkpoints: draws, sources, gathered rows; and the `Engine` protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence
    from fractions import Fraction
    from pathlib import Path

    import torch
    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.checkpoint.save import Saves
    from ostinato.buffers.conditional_updates import ConditionalUpdate, ConditionalUpdateResult
    from ostinato.buffers.drawn_ahead import HeldRows
    from ostinato.buffers.pipeline import Prefetcher
    from ostinato.buffers.policy_versions import Versions
    from ostinato.buffers.priority_updates import PriorityUpdate
    from ostinato.buffers.rate_limit import Ask, Gate, Stock, Waiters
    from ostinato.buffers.remover import Remover
    from ostinato.core.episodes.tracker import EpisodeTracker
    from ostinato.core.records import Draw, Placement, Plan, View
    from ostinato.core.ring import Ring
    from ostinato.core.rows_left import RowsLeft
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.transforms import Compose
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

__all__ = ["Engine", "Mix", "Rows", "Source", "Ticket"]


class Ticket(NamedTuple):
    """A draw that was made but not gathered: what prefetch queues and checkpoints hold."""

    draw: Draw
    serial: int
    """Number of the last write before the draw."""
    last: bool
    """Whether the draw ended an epoch."""
    ring: Ring | SharedRing
    """The ring that `serial` counts in; a load or another storage brings a new one."""
    sampler: Sampler
    """The sampler that drew; it adds fields to slices."""
    rng: Tensor | None = None
    """State of the buffer's generator before the draw, if it was asked for: where to go back to if it is dropped."""
    plan: Plan | None = None
    """What slices and units make of the rows drawn; None where each is a record of the batch."""
    dice: Tensor | None = None
    """The random numbers of the unit: with them a draw can be expanded again."""
    held: HeldRows | None = None
    """The rows at the draw, if it was made ahead."""

    @property
    def records(self) -> Tensor:
        """Slots of the batch's records, int64 `[R]`."""
        return self.draw.slots if self.plan is None else self.plan.records

    @property
    def slots_read(self) -> Tensor:
        """Slots of all rows that the batch is made of, int64 `[n]`."""
        return self.draw.slots if self.plan is None else self.plan.slots_read()

    @property
    def info(self) -> dict[str, Any]:
        """Entries of the info that the sampler adds; tensors with one value for each row drawn are repeated."""
        found, rows = self.draw.info or {}, self.draw.slots.shape[0]
        if self.plan is None:
            return found
        alike = {key: getattr(value, "shape", ())[:1] == (rows,) for key, value in found.items()}
        return {key: self.plan.per_record(value) if alike[key] else value for key, value in found.items()}

    def per_record(self, values: Tensor) -> Tensor:
        """Repeat values of the rows drawn for the records that they became."""
        return values if self.plan is None else self.plan.per_record(values)


class Mix(NamedTuple):
    """A draw of an ensemble: which member each part of the batch comes from, and the draw of each part."""

    members: list[int]
    tickets: list[Any]
    """The `Ticket` of each part; of members that draw by themselves the number of its rows."""
    rng: Tensor | None = None
    """As in `Ticket`."""
    owed: tuple[Fraction, ...] | None = None
    """What the batch left of the exact share of each member; see `Split`."""
    last: bool = False
    """Ensembles have no epochs."""


class Source(NamedTuple):
    """A storage and its collate function, which are exchanged together."""

    storage: Storage
    collate: Callable[[Any], Any] | None


class Rows(NamedTuple):
    """Rows gathered for a ticket, whole as of the write number `serial`."""

    source: Source
    payload: Any
    serial: int
    ring: Ring | SharedRing
    ticket: Ticket
    """The draw; its generations and plan are those of the rows gathered."""
    stale: Tensor | None = None
    """bool `[R]`: which rows had been replaced when they were loaded from a checkpoint; None if none was."""


class Engine(Protocol):
    """What stands behind a `ReplayBuffer`: `LocalEngine` in one process, `SharedEngine` in several.

    Thread-safe. Hold `lock` to read several attributes that must fit together.
    """

    sampler: Sampler
    generator: torch.Generator | None
    queue: Prefetcher | None
    """Draws whose batches are made ahead; None without prefetch. The pipeline of the buffer sets it."""
    pending: deque[Ticket]
    """Draws to be delivered first: those of a checkpoint, and those whose batches were dropped."""
    unit: SampleUnit | None
    tracker: EpisodeTracker | None
    gate: Gate | None
    era: int
    """Loads into a buffer that had rows: part of `index_generation`."""
    priority_path: tuple[str, ...] | None
    rows_stale: int
    direct: Direct | None
    """Native calls that write and draw in place of the methods here; see `ostinato.buffers.direct`."""
    direct_tried: bool
    """Whether `direct` was looked for since the parts changed."""
    pickles_queue: bool
    """Whether draws made ahead go along with a pickled buffer."""

    @property
    def lock(self) -> Any:
        """The lock that guards everything."""

    @property
    def waiters(self) -> Waiters:
        """The calls that wait under the lock."""

    @property
    def saves(self) -> Saves:
        """The checkpoints that were made or loaded."""

    @property
    def source(self) -> Source:
        """The storage and its collate function."""

    @property
    def pin(self) -> bool:
        """Whether batches are gathered into page-locked memory."""

    @property
    def versions(self) -> Versions | None:
        """The versions of the policy in the rows."""

    @property
    def ring(self) -> Ring | SharedRing:
        """Rows, cursor and generations."""

    @property
    def storage(self) -> Storage:
        """The storage."""

    @property
    def writer(self) -> Writer:
        """The writer."""

    @property
    def left(self) -> RowsLeft | None:
        """Rows present and free slots, once rows were deleted."""

    @property
    def remover(self) -> Remover | None:
        """What chooses the rows that new ones replace; None leaves that to the writer."""

    @property
    def rows_present(self) -> int:
        """Rows present, without those that have left."""

    @property
    def rows_written(self) -> int:
        """Rows ever written."""

    @property
    def rows_since_empty(self) -> int:
        """Rows written since the buffer was made or emptied."""

    @property
    def rows_drawn(self) -> int:
        """Rows delivered."""

    @property
    def redone(self) -> int:
        """Batches copied again because a writer replaced some of their rows."""

    @property
    def stale_updates(self) -> int | Tensor:
        """Priorities dropped because their rows had been replaced."""

    def parts_changed(self) -> None:
        """End direct calls: parts of the buffer are about to change."""

    def view(self) -> View:
        """Return what samplers may see, now."""

    def stock(self) -> Stock:
        """Return what there is for readers and writers now."""

    def write(self, data: Any, lead: int, *, ranked: bool = True, timeout_s: float | None = None) -> Placement:
        """Check rows, choose their slots, record and copy them."""

    def edit_rows(self, index: Any, data: Any, *, swap: bool) -> None:
        """Replace rows at a user's index."""

    def edit_fields(self, values: dict[tuple[str, ...], Any], index: Any, *, swap: bool, same: bool = False) -> None:
        """Replace stored fields of rows at a user's index."""

    @property
    def least_index(self) -> int:
        """Smallest slot in an index of rows to update: 0, or -1 where that marks a row that was not kept."""

    def count_stale(self, count: int) -> None:
        """Count priorities that were dropped because their rows had been replaced."""

    def update_priorities(self, update: PriorityUpdate) -> None:
        """Set the priorities of rows, except those replaced since they were drawn, which are counted."""

    def delete(self, index: Any, generation: Any) -> Tensor:
        """Delete rows at a user's index that are still those of the generations."""

    def update_present(self, update: ConditionalUpdate) -> ConditionalUpdateResult:
        """Change fields and priorities of the rows of an update that are still there."""

    def reset_priorities(self, index: Any) -> None:
        """Give rows at an index the default priority."""

    def generations_of(self, index: Any) -> Tensor:
        """Return the generations of the rows at an index, as samples have them; -1 where there is no row."""

    def can_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows returns at once, and does not raise."""

    def can_write(self, rows: int) -> bool:
        """Whether a write of so many rows goes ahead at once."""

    def clear(self, *, keep_count: bool = False) -> None:
        """Remove all rows and queued draws."""

    def move_cursor(self, slot: int) -> None:
        """Write the next rows to `slot`."""

    def draw(self, batch_size: int, *, ahead: bool = False, ask: Ask = ...) -> Ticket:
        """Draw slots."""

    def hold(self, ticket: Ticket) -> Ticket:
        """Return a draw made ahead, which keeps its rows as they are now."""

    def undraw(self, queued: list[Ticket]) -> None:
        """Drop draws that were made ahead, as if they were never made."""

    def give_back(self, ticket: Ticket) -> None:
        """Undo the counts of a draw whose batch was not delivered."""

    def may_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows need not wait."""

    def wait_to_draw(self, rows: int, ask: Ask, queued: Callable[[], bool] = ...) -> int:
        """Return the rows to draw, once such a draw need not wait, or one is queued."""

    def gather(self, ticket: Ticket) -> Rows | None:
        """Copy the rows of a draw."""

    def deliver(self, ticket: Ticket) -> None:
        """Count the rows of a batch that reached the caller."""

    def stale(self, ticket: Ticket, rows: Rows) -> Tensor:
        """Return which rows were replaced since they were gathered."""

    def begin_sampler(self) -> None:
        """Initialize the sampler's bookkeeping from the rows already stored."""

    def read_episodes(self) -> None:
        """Read where episodes end off the stored rows before the next draw."""

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler and return the old one."""

    def set_writer(self, writer: Writer) -> Writer:
        """Exchange the writer and return the old one."""

    def set_source(self, source: Source) -> Storage:
        """Exchange the storage and return the old one."""

    def state(self, queued: Sequence[Ticket], transform: Compose, batch_size: int | None) -> dict[str, Any]:
        """Return the whole state."""

    def load_state(self, state: dict[str, Any], transform: Compose, batch_size: int | None) -> None:
        """Restore a state."""

    def save(self, path: str | Path, state: Callable[[], dict[str, Any]], *, incremental: bool) -> None:
        """Save `state()` to a directory."""

    def load(self, path: str | Path, restore: Callable[[dict[str, Any]], None], *, verify: bool, mmap: bool) -> None:
        """Read a directory and hand its state to `restore`."""
