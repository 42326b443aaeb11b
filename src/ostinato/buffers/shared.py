"""The engine of a buffer that several processes write and sample at once, without a server; its checkpoints."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import torch

from ostinato.buffers.checkpoint.save import Saves, save_state
from ostinato.buffers.checkpoint.state import (
    FORMAT,
    check_counts,
    load_buffer,
    own_tensors,
    read_generator,
    saved_rows,
    with_state,
)
from ostinato.buffers.drawn_ahead import HeldRows
from ostinato.buffers.part_owners import record_owner
from ostinato.buffers.pipeline import make_batch
from ostinato.buffers.rate_limit import Ask, Stock, Waiters
from ostinato.buffers.records import Draws, Rows, Source
from ostinato.buffers.updates import as_sampler, check_sampler, generations_at, parse_conditional, priorities_of_rows
from ostinato.core.kinds import require_eager
from ostinato.core.records import Draw, Run, View
from ostinato.core.ring import Ring
from ostinato.durable import progress
from ostinato.errors import CheckpointError, EmptyBufferError, OptionError, UsageError
from ostinato.samplers import PrioritizedSampler, RandomSampler, Sampler
from ostinato.samplers.base import check_not_negative, check_rows
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage
from ostinato.storages.checkpoint import readable
from ostinato.storages.shared import SharedStorage, check_shareable, raise_edit
from ostinato.writers import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.buffers.pipeline import Prefetcher
    from ostinato.buffers.policy_versions import Versions
    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.buffers.records import Engine
    from ostinato.buffers.remover import Remover, RemoverName
    from ostinato.buffers.updates import ConditionalUpdate, ConditionalUpdateResult, PriorityUpdate
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.shared_ring import SharedRing
    from ostinato.storages import Storage
    from ostinato.transforms import Compose
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

_PLAIN = Ask()
_WRITERS = {RoundRobinWriter, TensorDictRoundRobinWriter}
_ROWS_AT_ONCE = 1 << 16
"""Rows that are copied together when a buffer begins to be shared."""

_FREE_TRIES = 3
"""Copies that writers may spoil before the next one makes them wait."""
_MOST_REDRAWS = 24
"""Rounds of drawing again where slots were empty; with half of them empty, one draw in 2**24 needs more."""


class _Present(NamedTuple):
    """Rows that are there before processes share them."""

    rows: int
    cursor: int


@final
class SharedEngine(Draws):
    """Owner of the parts of a buffer in one of the processes that share it; what `Reader` is in one process.

    A writer reserves slots, copies its rows, and commits them; only the first and the last step take the lock between
    processes, for microseconds. A draw takes it only where there are priorities. What was drawn is copied without it;
    then generations are compared, and the batch is copied again if a row was replaced. So no batch holds a torn or
    unfinished row, and a process that dies loses only the rows that it was writing.

    Raises:
        OptionError: for parts that do not go together with sharing.
    """

    versions: Versions | None = None
    remover: Remover | None = None
    era = 0
    pickles_queue = False  # a process that is started makes its own draws

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        writer: Writer,
        generator: torch.Generator | None,
        unit: SampleUnit | None = None,
        episodes: Episodes | None = None,
        limiter: RateLimiter | None = None,
        version_key: str | tuple[str, ...] | None = None,
        remover: RemoverName | None = None,
        *,
        counted: bool = True,
    ) -> None:
        _check_followed(limiter, version_key, unit, episodes, remover)
        _check_parts(sampler, writer)
        _check_room(source.storage, sampler)
        present = _Present(len(source.storage), source.storage.cursor)
        self._storage = SharedStorage(source.storage, ranked=sampler.prioritized)
        self.source = Source(self._storage, source.collate)
        self.sampler = sampler
        self._writer = writer
        self.queue: Prefetcher | None = None
        self.generator = generator
        self.pin = False
        self.priority_path: tuple[str, ...] | None = None
        self.rows_stale = 0
        self._begin()
        if present.rows and counted:
            self._begin_rows(present, None)

    @classmethod
    def of(cls, old: Engine, drop: Callable[[], None]) -> SharedEngine:
        """Return an engine with the parts, rows and counts of one that serves a single process, which then ends.

        Rows in files stay there, others are copied to shared memory. The caller holds the lock of `old`.

        Args:
            old: a `Reader`.
            drop: drops the draws that were made ahead; called once nothing stands in the way.

        Raises:
            OptionError: if the parts do not go together with sharing; nothing has changed.
            UsageError: if the cursor was moved.
        """
        storage, sampler, source = old.storage, old.sampler, old.source
        _check_parts(sampler, old.writer)
        _check_room(storage, sampler)
        present, schema = _Present(len(storage), old.ring.cursor), storage.schema
        check_shareable(storage)
        if present.cursor != present.rows % storage.capacity and present.rows != storage.capacity:
            msg = (
                f"the cursor was moved to {present.cursor} of {present.rows} rows: fill the buffer before it is shared"
            )
            raise UsageError(msg)
        priorities = sampler.state_dict() if isinstance(sampler, PrioritizedSampler) and present.rows else None
        mapped = isinstance(storage, LazyMemmapStorage)
        if not mapped and isinstance(storage, LazyTensorStorage):
            source = Source(storage.in_memory(), source.collate)
        _check_followed(old.gate, old.store.versions, old.unit, old.tracker, old.store.remover)
        drop()
        made = cls(source, sampler, old.writer, old.generator, counted=False)
        made.pin, made.priority_path, made.rows_stale = old.store.pin, old.priority_path, old.rows_stale
        if schema is not None and present.rows:
            made._storage.lay_out(schema)
            made._begin_rows(present, priorities, None if mapped else storage)
            with made._ring.lock:
                made._ring.set_counts(old.rows_written, old.rows_since_empty, old.rows_drawn)
        return made

    def _begin_rows(self, present: _Present, priorities: dict[str, Any] | None, source: Storage | None = None) -> None:
        """Let the ring know of rows that are in place, or of those of `source`, which are copied."""
        self.begin_sharing()
        ring, sampler, storage = self._ring, self.sampler, self._storage
        with ring.lock:
            ring.clear(present.cursor if present.rows == ring.capacity else 0)
            if not present.rows:
                return
            serial, run = ring.reserve(present.rows)
            slots = run.slots(torch.device("cpu"))
            for first in range(0, present.rows if source is not None else 0, _ROWS_AT_ONCE):
                part = slots[first : first + _ROWS_AT_ONCE]
                target = Run(int(part[0]), part.shape[0], ring.capacity)
                storage.write(target, source.gather(part))  # type: ignore[union-attr]
            if sampler.prioritized:
                given = None if priorities is None else priorities["priorities"][slots]
                as_sampler(sampler).record_rows(run, given, self.view())
                if priorities is not None:
                    ring.max_priority = float(priorities["largest"])
            ring.commit(serial)

    def _begin(self) -> None:
        self.waiters = Waiters()
        self.lock = self.waiters.lock
        self.saves = Saves()
        self.pending: deque[Draw] = deque()
        self._process = os.getpid()
        self._writer.follow(self.generations_of)
        self._begun = False
        self._laid_out()

    def _laid_out(self) -> bool:
        """Whether the schema is known, by now; then the sampler keeps priorities in the memory of all."""
        if not self._begun and self._storage.laid_out:
            self.begin_sharing()
        return self._begun

    def begin_sharing(self) -> None:
        """Let the sampler keep priorities in the memory of all, which is there now."""
        with self.lock:
            if not self._begun and isinstance(self.sampler, PrioritizedSampler):
                self.sampler.share(self._ring)
            self._begun = True

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a process that is being started; rows and priorities stay where they are, in the memory of all."""
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in {"lock", "waiters", "saves", "pending", "queue", "_process", "_begun"}
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a part in the memory; draws are this process's own."""
        self.__dict__.update(state)
        record_owner(self, self.sampler, self.writer)
        self._begin()
        self._draw_apart()

    def _draw_apart(self) -> None:
        """Give this process a generator of its own seed: two processes must not draw the same batches."""
        self._process = os.getpid()
        if self.generator is not None:
            number = self._storage.number_process()
            self.generator = torch.Generator().manual_seed(self.generator.initial_seed() + number)

    @property
    def _ring(self) -> SharedRing:
        return self._storage.ring

    @property
    def storage(self) -> Storage:
        """The storage."""
        return self._storage

    @property
    def writer(self) -> Writer:
        """The writer."""
        return self._writer

    @property
    def ring(self) -> SharedRing | Ring:
        """Which write filled each slot."""
        return self._ring if self._laid_out() else Ring(self._storage.capacity)

    @property
    def store(self) -> SharedEngine:
        """The engine itself, which stands for the rows as well."""
        return self

    def own_store(self, what: str) -> SharedEngine:  # noqa: ARG002
        """Return the engine itself: there are no views."""
        return self

    def set_priority_path(self, path: tuple[str, ...] | None) -> None:
        """Take first priorities from another field of new rows."""
        self.priority_path = path

    def parts_changed(self) -> None:
        """Do nothing: there are no direct calls."""

    def count_stale(self, count: int) -> None:
        """Do nothing: the ring counts them."""

    @property
    def rows_written(self) -> int:
        """Rows written, by all processes."""
        return self._ring.rows_written if self._laid_out() else 0

    @property
    def rows_since_empty(self) -> int:
        """Rows written since the buffer was emptied, by all processes."""
        return self._ring.rows_since_empty if self._laid_out() else 0

    @property
    def rows_drawn(self) -> int:
        """Rows delivered, to all processes."""
        return self._ring.drawn if self._laid_out() else 0

    @property
    def redone(self) -> int:
        """Batches copied once more, in all processes."""
        return self._ring.redone if self._laid_out() else 0

    @property
    def stale_updates(self) -> int:
        """Priorities that came too late, from all processes."""
        return self._ring.stale_updates if self._laid_out() else 0

    def view(self) -> View:
        """Return what samplers may see, now: some of the slots may hold no whole row."""
        storage = self._storage
        return View(storage.shape[0], storage.capacity, storage.cursor, self.ring, storage.device)

    def stock(self) -> Stock:
        """Return what there is for readers: rows that are whole."""
        return Stock(self._ring.committed if self._laid_out() else 0)

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, data: Any, lead: int, *, ranked: bool = True, timeout_s: float | None = None) -> Run:  # noqa: ARG002
        """Check rows, reserve slots, copy, commit; see `Reader.write`. Writers do not wait for readers."""
        require_eager("writing rows")
        storage, sampler = self._storage, self.sampler
        with self.lock:  # threads of this process share the form of the last batch, and the first layout
            payload, rows = storage.admit(data, lead)
            if rows == 0:
                return Run(0, 0, storage.capacity)
            self._laid_out()
        given = self._first_priorities(data, rows) if sampler.prioritized and ranked else None
        ring = self._ring
        serial, run = ring.reserve(rows)
        try:
            storage.write(run, payload)
            if sampler.prioritized:
                with ring.lock:
                    if ring.is_current(serial):
                        as_sampler(sampler).record_rows(run, given, self.view())
                    ring.commit(serial)
            else:
                ring.commit(serial)
        except BaseException:
            ring.abandon(serial)
            raise
        return run

    def _first_priorities(self, data: Any, rows: int) -> Tensor | None:
        """Return the priorities in rows about to be written, checked; None if the rows have none."""
        return priorities_of_rows(data, self.priority_path, rows, as_sampler(self.sampler), self._storage.device)

    least_index = 0
    """Smallest slot in an index of rows to update: every row is kept."""

    def update_priorities(self, update: PriorityUpdate) -> None:
        """Set the priorities of rows, except those replaced or incomplete, which are counted."""
        self._laid_out()
        ring, sampler, (slots, priorities, generations) = self._ring, as_sampler(self.sampler), update
        check_not_negative(slots)
        with ring.lock:
            view = self.view()
            if generations is None:  # those of the rows there are now: a slot without a row gets no priority
                check_rows(slots, view.rows)
                generations = ring.generations(slots)
            stale = int(sampler.update(slots, priorities, generations, view)) if slots.numel() else 0
        ring.count_stale(stale)

    @property
    def rows_present(self) -> int:
        """Rows present."""
        return len(self._storage)

    def delete(self, index: Any, generation: Any) -> Tensor:  # noqa: ARG002
        """Raise: processes write in ring order.

        Raises:
            UsageError: always.
        """
        msg = (
            "delete() is not available with shared=True, where processes write in ring order: give rows the priority 0 "
            "(PrioritizedSampler with eps=0), or use a private buffer"
        )
        raise UsageError(msg)

    def update_present(self, update: ConditionalUpdate) -> ConditionalUpdateResult:
        """Set the priorities of the rows of an update that are still there.

        Raises:
            UsageError: for fields: another process could read a row while it is changed.
        """
        if update.fields:
            msg = (
                "Conditional updates of fields are not supported with shared=True: another process could read half of "
                "a change. Update priorities alone (priority=), or use a private buffer"
            )
            raise UsageError(msg)
        if not self._storage.laid_out:
            nothing = torch.zeros_like(update.slots, dtype=torch.bool)
            return update.result(nothing, nothing)
        ring = self._ring
        with self.lock, ring.lock:
            present = update.present(ring, self.era)
            at = update.chosen(present)
            if update.priorities is not None and at.numel():
                slots, generations = update.slots[at], update.generations[at]
                as_sampler(self.sampler).update(slots, update.priorities[at], generations, self.view())
        return update.result(present, present)

    parse_conditional = parse_conditional
    make = make_batch

    def reset_priorities(self, index: Any) -> None:  # noqa: ARG002
        """Raise, where there are priorities: the largest one is not known to one process alone."""
        if self.sampler.prioritized:
            msg = "mark_update() is not available with shared=True: use update_priority(index, priority)"
            raise UsageError(msg)

    def generations_of(self, index: Any) -> Tensor:
        """Return the generations of the rows at an index, as samples have them; -1 where there is no row."""
        return generations_at(self.ring, self.era, index, self._storage)

    def clear(self, *, keep_count: bool = False) -> None:
        """Forget all rows, for all processes, and the draws queued in this one.

        Raises:
            UsageError: with `keep_count`: the processes share one count.
        """
        if keep_count:
            msg = "empty(empty_write_count=False) is not available with shared=True: its processes share one count"
            raise UsageError(msg)
        with self.lock:
            self._storage.clear()
            self.pending.clear()

    # -- reading -------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, *, ahead: bool = False, ask: Ask = _PLAIN) -> Draw:  # noqa: ARG002
        """Draw slots that hold whole rows; see `Reader.draw`. Nothing can be asked for besides."""
        with self.lock:
            if self._process != os.getpid():
                self._draw_apart()
            if self.pending:
                return self.pending.popleft()
            rng = self.generator.get_state() if ahead and self.generator is not None else None
            draw, written = self._fresh(batch_size)
            if draw.generations is None and self._writer.tracks_generations:
                draw = draw._replace(generations=self._ring.generations(draw.slots))
            draw = draw._replace(serial=written, ring=self._ring, sampler=self.sampler, rng=rng)
            return self.hold(draw) if ahead else draw

    def hold(self, draw: Draw) -> Draw:
        """Return a draw made ahead with its rows, copied now: other processes may replace them at any time."""
        rows = self.gather(draw)
        return rows.draw._replace(held=HeldRows(rows.draw, rows))

    def can_draw(self, rows: int) -> bool:  # noqa: ARG002
        """Whether there is a whole row."""
        return self._storage.laid_out and self._ring.committed > 0

    def can_write(self, rows: int) -> bool:  # noqa: ARG002
        """Return True: writers wait for nothing."""
        return True

    def _fresh(self, batch_size: int) -> tuple[Draw, int]:
        """Return a draw, and the number of a write before which all its rows were whole."""
        if not self._laid_out() or self._ring.committed <= 0:
            msg = "Cannot sample from an empty storage: add rows first"
            raise EmptyBufferError(msg)
        ring = self._ring
        if self.sampler.prioritized:
            with ring.lock:
                return self.sampler.draw(self.view(), batch_size, self.generator), ring.written
        written, holes, rows, _ = ring.state()
        view = View(rows, ring.capacity, 0, ring, ring.device)
        draw = self.sampler.draw(view, batch_size, self.generator)
        return (self._fill(draw, rows) if holes else draw), written

    def _fill(self, draw: Draw, rows: int) -> Draw:
        """Draw again where there is no whole row, until there is one: each whole row keeps the same probability."""
        ring, slots = self._ring, draw.slots
        for _ in range(_MOST_REDRAWS):
            empty = ring.generations(slots) <= 0
            count = int(empty.sum())
            if not count:
                return draw
            if 2 * ring.committed < rows:
                break
            slots[empty] = torch.randint(0, rows, (count,), generator=self.generator, device="cpu")
        present = ring.present()
        if not present.numel():
            msg = "no row is whole: those there were are being replaced at this moment; add rows, or sample later"
            raise EmptyBufferError(msg)
        slots[empty] = present[torch.randint(0, present.shape[0], (count,), generator=self.generator, device="cpu")]
        return draw

    def gather(self, draw: Draw) -> Rows:
        """Copy the rows of a draw; where some were replaced since the draw, copy again what is there now."""
        held: HeldRows | None = draw.held
        if held is not None and held.rows is not None:
            return held.rows
        for _ in range(_FREE_TRIES):
            payload = self._storage.gather(draw.slots, pin=self.pin)
            again = self._again(draw)
            if again is None:
                return Rows(self.source, payload, draw.serial, draw.ring, draw)
            draw = again
        with self.lock, self._ring.lock:  # no process can reserve slots now
            draw = self._again(draw) or draw
            payload = self._storage.gather(draw.slots, pin=self.pin)
        return Rows(self.source, payload, draw.serial, draw.ring, draw)

    def _again(self, draw: Draw) -> Draw | None:
        """Return what to copy instead, None if nothing was replaced; slots that hold no whole row are drawn again."""
        ring = self._ring
        if ring.unchanged_since(draw.serial):
            return None
        written = ring.written
        changed = ring.changed(draw.slots, draw.serial)
        if changed is None:
            return None
        ring.count_redone()
        empty = ring.generations(draw.slots) <= 0
        count = int(empty.sum())
        if count:
            with self.lock:
                other, _ = self._fresh(count)
            draw = draw._replace(slots=draw.slots.masked_scatter(empty, other.slots))
            if draw.weights is not None and other.weights is not None:
                draw = draw._replace(weights=draw.weights.masked_scatter(empty, other.weights))
        if draw.generations is not None:
            draw = draw._replace(generations=ring.generations(draw.slots))
        return draw._replace(serial=written)

    def deliver(self, draw: Draw) -> None:
        """Count the rows of a batch that reached the caller."""
        self._ring.count_drawn(draw.records.shape[0])

    def stale(self, draw: Draw, rows: Rows) -> Tensor:
        """Return bool `[R]`: which rows were replaced since they were gathered."""
        changed = self._ring.changed(draw.records, rows.serial)
        if changed is None:
            return torch.zeros_like(draw.records, dtype=torch.bool)
        self.rows_stale += int(changed.sum())
        return changed

    # -- what other processes could not follow -------------------------------------------------------------------------

    def reread(self) -> None:
        """Do nothing: shared buffers track no episodes."""

    def begin_sampler(self) -> None:
        """Do nothing: priorities are there with their rows."""

    def edit_rows(self, index: Any, data: Any, *, swap: bool) -> None:  # noqa: ARG002
        """Raise: other processes could read a row while it is edited."""
        raise_edit()

    def edit_fields(self, values: dict[tuple[str, ...], Any], index: Any, *, swap: bool, same: bool = False) -> None:  # noqa: ARG002
        """Raise: other processes could read a row while it is edited."""
        raise_edit()

    def move_cursor(self, slot: int) -> None:
        """Raise: other processes are writing at the cursor."""
        msg = (
            f"processes that share a buffer write at one cursor, which cannot be moved to {slot}: use a private buffer"
        )
        raise UsageError(msg)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Raise: the sampler cannot be exchanged."""
        _refuse_exchange(sampler)

    def set_writer(self, writer: Writer) -> Writer:
        """Raise: the writer cannot be exchanged."""
        _refuse_exchange(writer)

    def set_source(self, source: Source) -> Storage:
        """Raise: the storage cannot be exchanged."""
        _refuse_exchange(source.storage)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self, queued: Sequence[Draw], transform: Compose, batch_size: int | None) -> dict[str, Any]:
        """Return the whole state, copied at one moment, while no process reserves or commits.

        Rows that are being written are not part of it. Where there are such, or a writer has died, rows are saved from
        the oldest to the newest; else slot by slot. Queued draws are dropped: the generator is saved as before them.
        """
        generator = None if self.generator is None else self.generator.get_state()
        drawn = [*queued, *self.pending]
        state: dict[str, Any] = {
            "generator": generator if not drawn or drawn[0].rng is None else drawn[0].rng,
            "transforms": transform.state_dict(),
            "batch_size": batch_size,
            "unit": None,
            "pending": [],
        }
        storage = self._storage
        if not self._laid_out():
            slots = torch.empty(0, dtype=torch.int64, device="cpu")
            return {**state, **self._saved_rows(slots, 0, slots, 0)}
        ring = storage.ring
        with ring.lock:
            written, holes, rows, _ = ring.state()
            slots, cursor = torch.arange(rows, device="cpu"), ring.cursor
            if holes:
                slots = ring.present()
                slots = slots[ring.generations(slots).argsort()]
                cursor = slots.shape[0] % ring.capacity
            return {**state, **self._saved_rows(slots, cursor, ring.generations(slots), written)}

    def _saved_rows(self, slots: Tensor, cursor: int, generations: Tensor, written: int) -> dict[str, Any]:
        """Return rows, generations and counts as a state has them."""
        sampler = self.sampler.state_dict()
        if self.sampler.prioritized:
            sampler |= {name: sampler[name][slots] for name in ("priorities", "values")}
        storage = self._storage.snapshot(slots, cursor)
        return {
            "storage": {"class": "LazyTensorStorage", "state": storage},
            "sampler": {"class": type(self.sampler).__name__, "state": sampler},
            "writer": {"class": type(self.writer).__name__, "state": {}},
            "stamps": {"written": written, "base": 0, "cursor": cursor, "array": generations},
            "rows_written": self.rows_written,
            "rows_since_empty": self.rows_since_empty,
            "rows_drawn": self.rows_drawn,
        }

    def load_state(self, state: dict[str, Any], transform: Compose, batch_size: int | None) -> None:  # noqa: ARG002
        """Replace the rows of all processes by those of a state; if it does not fit, nothing has changed.

        Raises:
            CheckpointError: naming what differs.
            UsageError: while another process is writing.
        """
        with readable("a replay buffer"):
            data, ranks = self._checked(state)
            generator = read_generator(state["generator"], torch.device("cpu"))
            counts = [int(state[name]) for name in ("rows_written", "rows_since_empty", "rows_drawn")]
        before = own_tensors(transform.state_dict())
        try:
            with readable("these transforms"):
                transform.load_state_dict(state["transforms"])
            progress.finish()
            self._replace_rows(state, data, ranks, counts)
        except BaseException:
            transform.load_state_dict(before)
            raise
        self.pending.clear()
        if generator is not None:
            self.generator = with_state(self.generator, generator)

    def _replace_rows(self, state: dict[str, Any], data: Any, ranks: Tensor | None, counts: list[int]) -> None:
        """Replace the rows of all processes."""
        storage = self._storage
        if data is None:
            storage.clear()
        else:
            payload, rows = storage.admit(data, 1)
            self.begin_sharing()
            ring = storage.ring
            with ring.lock:
                if ring.writers:
                    msg = f"{ring.writers} writers are at work: load into a shared buffer while no process writes to it"
                    raise UsageError(msg)
                saved = state["storage"]["state"]
                full = rows == ring.capacity == saved["capacity"]
                ring.clear(int(saved["cursor"]) % ring.capacity if full else 0)
                serial, run = ring.reserve(rows)
                try:
                    storage.write(run, payload)
                    if ranks is not None:
                        as_sampler(self.sampler).record_rows(run, ranks, self.view())
                        ring.max_priority = float(state["sampler"]["state"]["largest"])
                    ring.commit(serial)
                except BaseException:
                    ring.abandon(serial)
                    raise
                ring.set_counts(*counts)
        if isinstance(self.sampler, PrioritizedSampler):
            self.sampler.beta = state["sampler"]["state"]["beta"]

    def _checked(self, state: dict[str, Any]) -> tuple[Any, Tensor | None]:
        """Return the rows of a state, nested, in the order in which they are to be written, and their priorities."""
        saved, storage = state["storage"]["state"], self._storage
        for name in ("sampler", "writer"):
            theirs, mine = state[name]["class"], type(getattr(self, name)).__name__
            if theirs != mine:
                msg = f"the checkpoint's {name} is a {theirs}, this buffer's a {mine}: make it with matching parts"
                raise CheckpointError(msg)
        if state["pending"]:
            msg = "the checkpoint holds queued draws, which a shared buffer cannot take: save it without prefetch"
            raise CheckpointError(msg)
        rows = int(saved["rows"]) if "rows" in saved else 0
        own = state["sampler"]["state"]
        if isinstance(self.sampler, PrioritizedSampler):
            self.sampler.check_state(own, rows)
            if (own["alpha"], own["eps"]) != (self.sampler.alpha, self.sampler.eps):
                msg = (
                    f"the checkpoint has alpha={own['alpha']} and eps={own['eps']}, this shared buffer has "
                    f"alpha={self.sampler.alpha} and eps={self.sampler.eps}, which all its processes keep: make it "
                    "with those of the checkpoint"
                )
                raise CheckpointError(msg)
        full = rows == saved["capacity"]  # else rows lie by age from slot 0 on
        order = (torch.arange(rows, device="cpu") + (int(saved["cursor"]) if full else 0)) % max(rows, 1)
        data = storage.rows_of(saved, order)
        return data, own["priorities"][order] if self.sampler.prioritized and rows else None

    def save(self, path: str | Path, state: Callable[[], dict[str, Any]], *, incremental: bool) -> None:
        """Save `state()` to a directory; see `ReplayBuffer.dumps`.

        Raises:
            CheckpointError: if no load would take the state; an older checkpoint stays.
            OptionError: if only changes are to be written: no process knows all of them.
        """
        if incremental:
            msg = "incremental=True is not for shared buffers: save the whole, or save a private buffer"
            raise OptionError(msg)
        whole = state()
        rows = saved_rows(whole)
        with readable("a shared replay buffer"):
            check_counts(whole, rows)
            self.sampler.check_state(whole["sampler"]["state"], rows)
        save_state(path, whole, FORMAT)

    def load(self, path: str | Path, restore: Callable[[dict[str, Any]], None], *, verify: bool, mmap: bool) -> None:
        """Read a directory and hand its state to `restore`; see `ReplayBuffer.loads`."""
        load_buffer(path, restore, [self._storage], verify=verify, mmap=mmap)


def _refuse_exchange(part: Any) -> NoReturn:
    msg = (
        f"the parts of a shared buffer are those that it was made with, since other processes have them too; got a "
        f"{type(part).__name__}: make another buffer"
    )
    raise UsageError(msg)


def _check_followed(limiter: Any, versions: Any, unit: Any, episodes: Any, remover: Any) -> None:
    """Check that nothing is counted or tracked that one process alone would know.

    Raises:
        OptionError: naming what.
    """
    if limiter is not None or versions is not None:
        msg = "shared=True does not count reads and versions: leave out rate_limiter and version_key"
        raise OptionError(msg)
    if unit is not None or episodes is not None:
        msg = "shared=True does not track episodes: leave out sample_unit and episodes"
        raise OptionError(msg)
    if remover is not None:
        msg = f"shared=True writes in ring order, got {remover!r} (a remover, or rows that were deleted): leave it out"
        raise OptionError(msg)


def goes_shared(engine: Engine) -> bool:
    """Return whether a private buffer begins to be shared when it is passed to a process: if its rows are in files.

    Raises:
        UsageError: if the rows are in a list, or in files and cannot be shared.
    """
    storage, sampler, writer = engine.storage, engine.sampler, engine.writer
    if storage.form == "objects":
        msg = (
            f"Cannot share a storage of type {type(storage).__name__} between processes: its objects are in the memory "
            "of one. Use LazyMemmapStorage, or LazyTensorStorage with shared=True; or pass rb.state_dict()"
        )
        raise UsageError(msg)
    if not isinstance(storage, LazyMemmapStorage):
        return False
    if type(writer) not in _WRITERS:
        msg = (
            f"Writers of type {type(writer).__name__} cannot be shared between processes: each would choose slots from "
            "what it has written alone. Use RoundRobinWriter()"
        )
        raise UsageError(msg)
    if type(sampler) is not RandomSampler:
        msg = (
            f"Samplers of type {type(sampler).__name__} cannot be shared between processes without being asked for: "
            "use RandomSampler(), or PrioritizedSampler with shared=True, whose priorities all processes keep"
        )
        raise UsageError(msg)
    if not storage.laid_out and not storage.shared_init:
        msg = (
            f"Cannot share a storage of type {type(storage).__name__} between processes while it has not been "
            "initialized yet: write a row first, or make it with shared_init=True, or call rb.share()"
        )
        raise UsageError(msg)
    try:
        check_shareable(storage)
        _check_followed(engine.gate, engine.store.versions, engine.unit, engine.tracker, engine.store.remover)
    except OptionError as error:
        msg = f"this buffer cannot be shared between processes ({error}): pass a copy, pickle.loads(pickle.dumps(rb))"
        raise UsageError(msg) from error
    return True


def _check_room(storage: Storage, sampler: Sampler) -> None:
    """Check that a sampler keeps priorities for every slot: processes reserve slots before rows are checked.

    Raises:
        OptionError: if the storage has more slots, or the sampler was made for another device.
    """
    if sampler.prioritized and as_sampler(sampler).max_capacity < storage.capacity:
        msg = (
            f"{type(sampler).__name__} keeps priorities for max_capacity={as_sampler(sampler).max_capacity} rows, the "
            f"shared storage has room for {storage.capacity}: give the sampler the storage's max_size"
        )
        raise OptionError(msg)
    check_sampler(storage, sampler)


def _check_parts(sampler: Sampler, writer: Writer) -> None:
    """Check that no part keeps in one process what all processes would need.

    Raises:
        OptionError: naming the part.
    """
    if type(sampler) not in {RandomSampler, PrioritizedSampler}:
        msg = (
            f"shared=True takes the samplers RandomSampler and PrioritizedSampler, got {type(sampler).__name__}: other "
            "processes write to such a buffer through its own one, as ostinato.compat.torchrl.for_collector lets them"
        )
        raise OptionError(msg)
    if isinstance(sampler, PrioritizedSampler) and sampler.max_priority_within_buffer:
        msg = "shared=True does not go with max_priority_within_buffer=True: leave it out"
        raise OptionError(msg)
    if type(writer) not in _WRITERS:
        msg = f"shared=True takes the writer RoundRobinWriter, got {type(writer).__name__}"
        raise OptionError(msg)
