"""Views: further samplers over the rows of a buffer, each with a handle of its own; see `ReplayBuffer.view`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

from ostinato.buffers.engine import LocalEngine
from ostinato.buffers.options import (
    check_drop_last,
    check_episodes,
    check_generator,
    check_prefetch,
    check_same_device,
    check_view_parts,
    part,
    positive,
)
from ostinato.buffers.part_owners import check_free, record_owner
from ostinato.buffers.pipeline import Pipeline
from ostinato.buffers.priority_updates import check_sampler
from ostinato.buffers.rate_limit import Ask
from ostinato.buffers.remover import check_deletable, make_remover
from ostinato.buffers.view_list import ViewList
from ostinato.core.counts import BufferCounts, make_counts
from ostinato.errors import OptionError, UsageError
from ostinato.samplers import RandomSampler, Sampler
from ostinato.transforms import Compose
from ostinato.units import chain_units

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from ostinato.buffers.checkpoint.save import Saves
    from ostinato.buffers.drawn_ahead import DrawnAhead
    from ostinato.buffers.pipeline import Prefetcher
    from ostinato.buffers.policy_versions import Versions
    from ostinato.buffers.rate_limit import RateLimiter, Waiters
    from ostinato.buffers.records import Engine, Source, Ticket
    from ostinato.buffers.remover import Remover
    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.eligible import Eligible
    from ostinato.core.episodes.keys import Episodes
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

_PLAIN = Ask()


class ViewOptions(NamedTuple):
    """The arguments of `ReplayBuffer.view`."""

    sampler: Sampler | Callable[[], Sampler] | None
    batch_size: int | None
    sample_unit: SampleUnit | Sequence[SampleUnit] | None
    episodes: Episodes | None
    transform: Any
    prefetch: int | None
    generator: torch.Generator | None


@final
class ViewEngine(LocalEngine):
    """The engine of a view: sampler, unit, episodes, generator and queue of its own over the rows of another engine.

    Draws are those of `LocalEngine`. Storage, ring, writer and lock are read from the engine of the buffer in each
    call, since it exchanges them; writes and edits are made there. The buffer's engine has a weak reference to this
    one, by which it reports them (see `ViewList`): a view that is dropped costs nothing more.

    Args:
        owner: the engine of the buffer, which is no view.
        sampler: which rows come next; a counting sampler raises.
        generator: source of the view's draws; None is torch's global generator.
        unit: what a drawn row becomes.
        episodes: where episodes end; None is what the buffer was given.
        transform: the view's chain of transforms.
        batch_size: rows of a batch, if it is known.

    Raises:
        OptionError: if parts do not go together.
    """

    owner: LocalEngine

    def __init__(
        self,
        owner: LocalEngine,
        sampler: Sampler,
        generator: torch.Generator | None,
        unit: SampleUnit | None,
        episodes: Episodes | None,
        transform: Compose,
        batch_size: int | None,
    ) -> None:
        self.owner = owner
        self.transform, self.batch_size = transform, batch_size
        self.views = ViewList()
        self.sampler, self.generator, self.unit = sampler, generator, unit
        self.episodes = owner.episodes if episodes is None else episodes
        self.counts: BufferCounts = make_counts(BufferCounts)
        self.pending: deque[Ticket] = deque()
        self.queue: Prefetcher | None = None
        self.priority_path = owner.priority_path
        self.rows_stale = 0
        self.stale_updates: int | Tensor = 0
        self._limiter: RateLimiter | None = None
        self.gate = None
        with owner.lock:
            self.check_new(sampler)
            if generator is not None:
                self._check_generator(generator)
            self.tracker = self._make_tracker(sampler)
            if self.tracker is not None:
                self.tracker.check_span(owner.storage)
            self._check_remover(sampler, owner.writer)
            self._check_unit(owner.storage)
            self.begin_continuity()
            owner.parts_changed()
            sampler.move()
            if owner.ring.rows:
                self.begin_sampler()
            owner.views.add(self)
            record_owner(self, sampler)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but threads and direct calls; the engine of the buffer goes along. The caller holds the lock."""
        return {**self.__dict__, "queue": None, "direct": None, "direct_tried": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Join the copy of the buffer's engine."""
        self.__dict__.update(state)
        self.owner.views.add(self)
        record_owner(self, self.sampler)

    def check_new(self, sampler: Sampler) -> None:
        """Check a sampler that this view is to have; the caller holds the lock.

        Raises:
            OptionError: if it cannot be the sampler of a view, or belongs to another buffer or view.
            SlotError: if it keeps priorities for fewer rows.
        """
        owner = self.owner
        check_view_parts(owner.sampler, sampler)
        check_free(sampler, self)
        check_sampler(owner.storage, sampler)
        sampler.check_parts(owner.storage, owner.writer)

    def _check_generator(self, generator: torch.Generator) -> None:
        """Check that draws of others do not come out of the same generator: it goes back when queued draws are dropped.

        Raises:
            OptionError: if another reader has it, or it is on another device than the rows.
        """
        owner = self.owner
        if any(reader.generator is generator for reader in owner.readers):
            msg = "the generator belongs to the buffer, or to another view of it: give each view one of its own"
            raise OptionError(msg)
        if owner.storage.laid_out:
            check_same_device(generator, owner.storage)

    # -- what belongs to the buffer -----------------------------------------------------------------------------------

    @property
    def lock(self) -> Any:  # type: ignore[override]
        """The lock of the buffer."""
        return self.owner.lock

    @property
    def waiters(self) -> Waiters:  # type: ignore[override]
        """The calls that wait under the lock."""
        return self.owner.waiters

    @property
    def source(self) -> Source:  # type: ignore[override]
        """The storage of the buffer, and its collate function."""
        return self.owner.source

    @property
    def ring(self) -> Ring:  # type: ignore[override]
        """Rows, cursor and generations."""
        return self.owner.ring

    @property
    def writer(self) -> Writer:  # type: ignore[override]
        """The writer of the buffer."""
        return self.owner.writer

    @property
    def versions(self) -> Versions | None:  # type: ignore[override]
        """The versions of the policy in the rows."""
        return self.owner.versions

    @property
    def left(self) -> Eligible | None:  # type: ignore[override]
        """Rows present and free slots, once rows of the buffer were deleted."""
        return self.owner.left

    @property
    def remover(self) -> Remover | None:  # type: ignore[override]
        """What chooses the rows of the buffer that new ones replace."""
        return self.owner.remover

    @property
    def saves(self) -> Saves:  # type: ignore[override]
        """The checkpoints of the buffer."""
        return self.owner.saves

    @property
    def ahead(self) -> DrawnAhead:  # type: ignore[override]
        """The draws of the buffer and its views whose batches are not delivered yet."""
        return self.owner.ahead

    @property
    def settled(self) -> bool:  # type: ignore[override]
        """Whether capacity and device are those of rows that are laid out."""
        return self.owner.settled

    @property
    def era(self) -> int:
        """Loads into the buffer when it had rows."""
        return self.owner.era

    @era.setter
    def era(self, era: int) -> None:
        self.owner.era = era

    @property
    def pin(self) -> bool:  # type: ignore[override]
        """Whether batches are gathered into page-locked memory."""
        return self.owner.pin

    @property
    def rows_written(self) -> int:
        """Rows ever written to the buffer."""
        return self.owner.rows_written

    @property
    def rows_since_empty(self) -> int:
        """Rows written since the buffer was made or emptied."""
        return self.owner.rows_since_empty

    # -- reports of the buffer's engine, under the lock ---------------------------------------------------------------

    def admit(self, data: Any, payload: Any, rows: int, *, ranked: bool) -> Callable[[Placement], None]:
        """Check rows that are about to be written, and return what records their placement.

        Raises:
            PriorityError: for invalid priorities in the rows.
            SchemaError, KeyMissingError: if fields do not tell where episodes end.
        """
        given = self._first_priorities(data, rows) if self.sampler.prioritized and ranked else None
        marks = None if self.tracker is None else self.tracker.read(self.storage, payload, rows)
        return lambda placement: self._report_written(placement, given, marks, None)

    def drop_queue(self) -> None:
        """Forget draws made ahead, as if they were never made."""
        self.undraw([] if self.queue is None else self.queue.clear())

    def forget_rows(self, *, moved: bool) -> None:
        """Forget all rows: the buffer was emptied, or with `moved` has another storage, whose rows are taken over."""
        self.drop_queue()
        if not moved:
            if self.tracker is not None:
                self.tracker.clear()
            self.sampler.clear()
            return
        self.sampler.move()
        if self.tracker is not None:
            self.tracker.forget()
        if self.ring.rows:
            self.begin_sampler()

    # -- draws --------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Let the buffer take over rows of a storage, if something else than the buffer has written them."""
        self.owner.follow_storage()
        self.counts.writes_seen = self.storage.writes

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler of the view; queued draws of the old one are dropped."""
        with self.lock:
            self.check_new(sampler)
            self.owner.parts_changed()  # what writes report depends on the samplers of views
            return super().set_sampler(sampler)

    def can_write(self, rows: int) -> bool:
        """Whether a write of so many rows to the buffer goes ahead at once."""
        return self.owner.can_write(rows)

    # -- writes and edits, which are the buffer's ---------------------------------------------------------------------

    def write(self, data: Any, lead: int, *, ranked: bool = True, timeout_s: float | None = None) -> Placement:
        """Write rows to the buffer."""
        return self.owner.write(data, lead, ranked=ranked, timeout_s=timeout_s)

    def check_rows(self, data: Any, *, ranked: bool = True) -> Callable[[], None]:
        """Check rows as a write to the buffer does."""
        return self.owner.check_rows(data, ranked=ranked)

    def edit_rows(self, index: Any, data: Any, *, swap: bool) -> None:
        """Replace rows of the buffer."""
        self.owner.edit_rows(index, data, swap=swap)

    def delete(self, index: Any, generation: Any) -> Tensor:
        """Delete rows of the buffer."""
        return self.owner.delete(index, generation)

    def begin_left(self, state: dict[str, Tensor] | None = None) -> None:
        """Do nothing: the buffer follows the rows that were deleted."""

    def _check_remover(self, sampler: Sampler, writer: Writer) -> None:  # noqa: ARG002
        """Check that a sampler goes with rows that were deleted, and with the remover of the buffer."""
        owner = self.owner
        if self.unit is not None or self._make_tracker(sampler) is not None:
            if owner.left is not None:
                check_deletable(owner.storage, owner.writer, tracked=True)
            if owner.remover is not None:
                make_remover(
                    owner.remover.name, owner.storage, owner.sampler, owner.writer, owner.versions, tracked=True
                )
        self._check_left(sampler)

    def _edit(self, slots: Tensor, changes: Sequence[Callable[[], None]], *, same: bool = False) -> None:
        self.owner._edit(slots, changes, same=same)  # noqa: SLF001 (the same class)

    def read_episodes(self) -> None:
        """Read where episodes end for all samplers of the buffer."""
        self.owner.read_episodes()

    def clear(self, *, keep_count: bool = False) -> None:
        """Empty the buffer."""
        self.owner.clear(keep_count=keep_count)

    def move_cursor(self, slot: int) -> None:
        """Write the next rows of the buffer to `slot`."""
        self.owner.move_cursor(slot)

    def set_writer(self, writer: Writer) -> NoReturn:
        """Raise `UsageError`."""
        _raise_for_view(f"exchange the writer for {type(writer).__name__}")

    def set_source(self, source: Source) -> NoReturn:
        """Raise `UsageError`."""
        _raise_for_view(f"exchange the storage for {type(source.storage).__name__}")

    def state(self, queued: Sequence[Ticket], transform: Compose, batch_size: int | None) -> NoReturn:  # noqa: ARG002
        """Raise `UsageError`: the state of a view is part of the buffer's."""
        _raise_for_view("save or copy the state")

    def load_state(self, state: dict[str, Any], transform: Compose, batch_size: int | None) -> NoReturn:  # noqa: ARG002
        """Raise `UsageError`: the state of a view is part of the buffer's."""
        _raise_for_view("load a state")

    def save(self, path: str | Path, *_: Any, **__: Any) -> NoReturn:
        """Raise `UsageError`: a view is saved with its buffer."""
        _raise_for_view(f"save a checkpoint to {path}")

    def load(self, path: str | Path, *_: Any, **__: Any) -> NoReturn:
        """Raise `UsageError`: a view is loaded with its buffer."""
        _raise_for_view(f"load the checkpoint {path}")


def _raise_for_view(what: str) -> NoReturn:
    msg = f"a view cannot {what}, which concerns all samplers of the buffer: do it with the buffer that it is a view of"
    raise UsageError(msg)


def check_no_views(engine: Engine) -> None:
    """Check that one sampler alone draws from rows that are to be shared between processes.

    Raises:
        OptionError: if there are views.
    """
    if isinstance(engine, LocalEngine) and len(engine.readers) > (not isinstance(engine, ViewEngine)):
        msg = (
            "a buffer with views cannot be shared between processes, since writes of other processes are not reported "
            "to the samplers of views: drop the views first, or share a buffer of its own"
        )
        raise OptionError(msg)


def make_view(buffer: ReplayBuffer, options: ViewOptions) -> dict[str, Any]:
    """Return the attributes of a handle for a view, which replace those of its buffer; see `ReplayBuffer.view`.

    Raises:
        OptionError: if parts do not go together, or the buffer is shared between processes.
    """
    owner = buffer._engine  # noqa: SLF001 (one package)
    if not isinstance(owner, LocalEngine):
        msg = (
            "a buffer that processes share has one sampler, since writes of other processes are not reported to "
            "others: make the view in a buffer without shared=True"
        )
        raise OptionError(msg)
    size = buffer.batch_size if options.batch_size is None else positive("batch_size", options.batch_size)
    depth = check_prefetch(options.prefetch, size)
    sampler = part("sampler", options.sampler, Sampler, RandomSampler)
    check_drop_last(sampler, size)
    transform = Compose.of(options.transform)
    engine = ViewEngine(
        owner,
        sampler,
        check_generator(options.generator),
        chain_units(options.sample_unit),
        check_episodes(options.episodes),
        transform,
        size,
    )
    return {
        "_viewed": buffer,
        "_engine": engine,
        "_pipeline": Pipeline(engine, depth),
        "_transform": transform,
        "_batch_size": size,
        "_pass": None,
    }
