"""A buffer as one shard of several: draws are offered with their total priority, and gathered on request."""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.buffers.checkpoint.save import save_buffer
from ostinato.buffers.checkpoint.state import check_loadable
from ostinato.buffers.mixing import reader_of
from ostinato.buffers.pipeline import Batch
from ostinato.buffers.policy_versions import check_age
from ostinato.buffers.rate_limit import RateLimiter
from ostinato.buffers.updates import ConditionalUpdateResult, parse_conditional, steps_of
from ostinato.errors import EmptyBufferError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.records import Draw, View
    from ostinato.core.rows import Schema

_MOST_OFFERS = 256
"""Offers that are kept for a later `take`; older ones are dropped, since the client may have died."""
_MOST_DRAWS = 1 << 20
"""Draws of all kept offers together, in the same way; 20 bytes each."""
_ERAS = 1 << 18
_LOADS = 16
"""Eras for each one that begins here: every load of a used buffer begins one, too, and none of them may come again."""


class Offer(NamedTuple):
    """A draw that was made but not gathered, and what the buffer weighed when it was made."""

    number: int
    """Its name; -1 where there is nothing to draw."""
    rows: int
    """Rows present."""
    mass: float
    """Sum of the values of the rows that can be drawn."""
    least: float
    """Smallest value above zero."""
    beta: float
    """Exponent of the importance weights."""
    draws: int | None = None
    """Draws that the rows are good for, where draws use rows up: these are made when they are asked for."""
    newest: int | None = None
    """Newest version, where versions were asked for and there are rows."""
    era: int = 0
    """Which of the buffers that follow each other in one place has made it."""


@final
class Portion:
    """Draws rows of a buffer in two steps. Thread-safe.

    `offer` draws as many rows as a whole batch has and says what the buffer weighs, under one lock. Once it is known
    how many rows of the batch are this buffer's, `take` makes these of the first ones drawn: draws are independent, so
    the first `n` of them are `n` draws from the buffer's distribution at the moment of the offer, whatever was
    written since. An offer may serve several batches: each `take` returns the next draws, and no draw is taken twice.

    Where draws use rows up, an offer is no draw, which others would miss, but only says what there is; `take` draws.

    Args:
        buffer: the buffer.
        era: which of the buffers that follow each other in its place this is; offers say it.

    Raises:
        OptionError: if its draws are not independent draws of single rows, or its index is not one number.
    """

    def __init__(self, buffer: ReplayBuffer, era: int = 0) -> None:
        self._buffer = buffer
        self._era = era
        self._engine = reader_of(buffer)
        self._offers: OrderedDict[int, Draw] = OrderedDict()
        """What is left of each offer."""
        self._num_kept = 0
        self._numbers = itertools.count(secrets.randbits(60))  # so that no other portion's are the same
        self._check()

    def _check(self) -> None:
        engine = self._engine
        if engine.storage.ndim > 1:
            msg = f"a shard's storage must have ndim=1, got ndim={engine.storage.ndim}: write environments one by one"
            raise OptionError(msg)
        if any(limit.flow.limiter != RateLimiter() for limit in engine.limits):
            msg = "a rate limiter holds for all shards together: give rate_limiter to the ShardedReplayBuffer itself"
            raise OptionError(msg)
        with engine.lock:
            if engine.sampler.leaves or not (engine.sampler.counting or engine.sampler.mass(engine.view())):
                msg = (
                    "shards are drawn from as one buffer by RandomSampler(), PrioritizedSampler(...), QueueSampler() "
                    f"or LimitedSampler(n), got {engine.sampler!r}: its draws depend on each other, or are not of "
                    "single rows"
                )
                raise OptionError(msg)

    @property
    def drawable(self) -> int:
        """Rows that can be drawn."""
        engine = self._engine
        with engine.lock:
            return engine.stock().rows

    def offer(self, rows: int, max_age: int | None = None, newest: int | None = None, drop: int | None = None) -> Offer:
        """Draw up to `rows` rows, to be asked for later. Cost: that of a draw, without the copy.

        With `max_age` these are of the versions from `newest - max_age` on, where `newest` is that of the whole; None
        is the portion's own. `drop` is the number of an offer that is not asked for any more.
        """
        engine, age = self._engine, None
        if max_age is not None:
            age = check_age(engine.store.versions, engine.sampler, max_age, prefetch=False)
        with engine.lock:
            if drop is not None:
                self._drop(drop)
            weighed, view = Offer(-1, engine.rows_present, 0.0, 1.0, 0.0, era=self._era), engine.view()
            if age is not None:
                weighed, age = self._weigh_recent(weighed, view, age, newest)
            elif engine.sampler.counting:
                left = engine.stock()
                return weighed._replace(number=0 if left.draws else -1, mass=float(left.rows), draws=left.draws)
            else:
                mass = engine.sampler.mass(view)
                if mass is None:
                    self._check()
                else:
                    weighed = weighed._replace(mass=mass[0], least=mass[1] if mass[0] > 0 else 1.0, beta=mass[2])
            if not weighed.mass > 0:
                return weighed._replace(mass=0.0)
            return weighed._replace(number=self._keep(engine.fresh(rows, engine.generator, age)))

    def _weigh_recent(self, weighed: Offer, view: View, age: int, newest: int | None) -> tuple[Offer, int]:
        """Return an offer of the rows of the newest versions, and the age of the oldest of these."""
        store, versions = self._engine.store, self._engine.store.versions
        if versions is None or not view.rows:
            return weighed, age
        mine = versions.newest(store)
        age -= max(0, (mine if newest is None else newest) - mine)
        young = versions.recent(store, view, age).rows if age >= 0 else 0
        return weighed._replace(mass=float(young), newest=mine), age

    def _keep(self, draw: Draw) -> int:
        """Keep a draw for a later `take`; return its number."""
        number = next(self._numbers)
        self._offers[number] = draw
        self._num_kept += draw.slots.shape[0]
        while len(self._offers) > _MOST_OFFERS or (self._num_kept > _MOST_DRAWS and len(self._offers) > 1):
            self._drop(next(iter(self._offers)))
        return number

    def _drop(self, number: int) -> None:
        kept = self._offers.pop(number, None)
        self._num_kept -= 0 if kept is None else kept.slots.shape[0]

    def take(self, number: int, rows: int, *, keep: bool = False) -> tuple[Any, dict[str, Any]] | None:
        """Return the next `rows` rows of an offer and the info of them; None if they are not to be had any more.

        Rows that were replaced since are read as they are now, with their generations; weights are those of the draw.
        `keep` leaves the rest of the offer for later calls.
        """
        engine = self._engine
        if engine.sampler.counting:
            return self._use(rows)
        with engine.lock:
            kept = self._offers.get(number)
            left = 0 if kept is None else kept.slots.shape[0] - rows
            if kept is None or left < 0 or not keep or not left:
                self._drop(number)
            else:
                self._offers[number] = kept.part(rows, rows + left)
                self._num_kept -= rows
            if kept is None or left < 0:
                return None
            cut = engine.expand_again(kept.part(0, rows), engine.generator)
        buffer = self._buffer
        made = None if cut is None else engine.make(cut, buffer._finish)  # noqa: SLF001 (same package)
        if made is None:
            return None  # emptied, or windows cut short, in between
        data, source, notes = made
        engine.deliver(source.draw)
        return data, buffer._info(Batch(data, source.draw, notes))  # noqa: SLF001 (same package)

    def _use(self, rows: int) -> tuple[Any, dict[str, Any]] | None:
        """Draw rows that are used up by it; None if another reader was quicker."""
        now = 0.0 if self._engine.limits else None
        try:
            found: tuple[Any, dict[str, Any]] = self._buffer.sample(rows, return_info=True, timeout_s=now)
        except (EmptyBufferError, WaitTimeoutError):
            return None
        return found


def reseed(buffer: ReplayBuffer, seed: int) -> None:
    """Give a buffer a generator of its own: torch begins every process with the same seed."""
    engine = buffer._engine  # noqa: SLF001 (same package)
    with engine.lock:
        engine.parts_changed()
        engine.generator = torch.Generator(engine.storage.device).manual_seed(seed)


def written(buffer: ReplayBuffer) -> tuple[int, int, int]:
    """Return what is not the same after any write, load or emptying."""
    engine = buffer._engine  # noqa: SLF001 (same package)
    with engine.lock:
        return engine.ring.written, len(buffer), buffer.write_count


def drawn(buffer: ReplayBuffer) -> int:
    """Return how many rows were ever drawn."""
    return int(buffer._engine.rows_drawn)  # noqa: SLF001 (same package)


def begin_era(buffer: ReplayBuffer, era: int) -> None:
    """Begin another era: generations given before match no row.

    For a buffer that takes the place of one that is lost: generations are serial numbers, and those of the lost rows
    are given again.

    Args:
        buffer: the buffer.
        era: any integer; buffers that follow each other in one place must not share it.
    """
    engine = buffer._engine  # noqa: SLF001 (same package)
    with engine.lock:
        engine.parts_changed()
        engine.store.era = 1 + era * _LOADS % _ERAS


def describe_updates(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return what the arguments of updates are checked by; see `Reader.least_index` and `steps_of`."""
    engine = buffer._engine  # noqa: SLF001 (same package)
    return {"least_index": engine.least_index, "steps": steps_of(engine)}


def check_update(buffer: ReplayBuffer, given: dict[str, Any]) -> None:
    """Check the arguments of `update_if_present`; nothing is changed. It describes the errors."""
    engine = reader_of(buffer)
    with engine.lock:
        parse_conditional(engine, **given)


def update_stored(buffer: ReplayBuffer, given: dict[str, Any]) -> ConditionalUpdateResult:
    """Do `update_if_present(**given)`; a buffer that never had rows has none of those that are named."""
    with lock_of(buffer):
        if buffer.storage.schema is not None or not has_fields(buffer):
            return buffer.update_if_present(**given)
    none = torch.zeros(given["index"].shape, dtype=torch.bool, device="cpu")
    return ConditionalUpdateResult(none, None if given.get("version") is None else none.clone())


# -- schema -----------------------------------------------------------------------------------------------------------


def has_fields(buffer: ReplayBuffer) -> bool:
    """Whether rows have a schema, or the first rows will fix one."""
    storage = buffer._engine.storage  # noqa: SLF001 (same package)
    return storage.schema is not None or not storage.laid_out


def lay_out(buffer: ReplayBuffer, schema: Schema) -> None:
    """Fix the schema of a buffer without rows, as if such rows had been written and removed.

    Raises:
        StorageMemoryError: There is too little memory; nothing has changed.
        OptionError: The parts of the buffer do not take such rows; nothing has changed.
    """
    engine = reader_of(buffer)
    with engine.lock:
        engine.parts_changed()
        engine.storage.lay_out(schema)
        try:
            engine.store.settle()
        except Exception:
            engine.storage.forget_form()
            raise


def remove_schema(buffer: ReplayBuffer) -> None:
    """Remove all rows and their schema, so that the next rows may have another; `TensorStorage` keeps its schema."""
    engine = reader_of(buffer)
    with engine.lock:
        buffer.empty()
        engine.storage.forget_form()
        engine.store.settled = False


def lock_of(buffer: ReplayBuffer) -> AbstractContextManager[Any]:
    """Return the lock of a buffer, which a thread may take several times: meanwhile no other thread reads or writes."""
    lock: AbstractContextManager[Any] = reader_of(buffer).lock
    return lock


def check_checkpoint(buffer: ReplayBuffer, path: str) -> Schema | None:
    """Check that a buffer can load a checkpoint, as far as this can be known without reading its rows.

    Returns:
        The schema of its rows; None if they have none.

    Raises:
        CheckpointError: It does not exist, or does not fit.
    """
    engine = reader_of(buffer)
    with engine.lock:
        return check_loadable(path, engine, buffer.batch_size)


def save_counted(buffer: ReplayBuffer, path: str) -> tuple[int, int]:
    """Save what has changed of a buffer; return the rows in the checkpoint, and the rows written before it.

    Others go on reading and writing meanwhile, as with `dumps`.
    """
    counts = []
    engine = reader_of(buffer)

    def state() -> dict[str, Any]:
        counts.append((len(buffer), buffer.write_count))  # under the lock: of the moment that is saved
        return buffer._state()  # noqa: SLF001 (same package)

    save_buffer(engine, path, state, incremental=True)
    return counts[-1]
