"""The batch pipeline: draws become batches, at once or ahead in a prefetch thread; passes over a buffer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, final

import torch
from torch.compiler import is_dynamo_compiling

from ostinato.buffers.prefetch import Order, Prefetcher, Requested
from ostinato.buffers.rate_limit import Ask
from ostinato.buffers.updates import UpdateQueue
from ostinato.core import kinds
from ostinato.core.episodes.tracker import as_path
from ostinato.core.kinds import is_tensor_collection, require_eager
from ostinato.core.rows import map_leaves
from ostinato.errors import EmptyBufferError, EpochEndError, UsageError
from ostinato.storages.columns import owned

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from torch import Tensor

    from ostinato.buffers.reader import Reader
    from ostinato.buffers.records import Rows
    from ostinato.buffers.sampling import Sampling
    from ostinato.buffers.updates import ConditionalUpdateResult
    from ostinato.core.records import Draw, Plan
    from ostinato.samplers import Sampler
    from ostinato.units import SampleUnit

T = TypeVar("T")
Made: TypeAlias = "tuple[Any, Rows, dict[Any, Tensor]]"
Finish: TypeAlias = "Callable[[Any, Draw, dict[Any, Tensor]], Any]"
_NO_NOTES: dict[Any, Any] = {}
_PLAIN = Ask()
_FREE_TRIES = 2
"""Batches that writers may spoil before the next one is made with the writers waiting."""


def on_stream_of_caller(work: Callable[[T], Any]) -> Callable[[T], Any]:
    """Return `work` for another thread, to be queued on the CUDA stream that is current here.

    Streams are current in one thread only. Elsewhere the work would be queued on the default stream, and could read
    rows and slots before the caller's stream has written them.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    return partial(_on_stream, torch.cuda.current_stream(), work)


def _on_stream(stream: torch.cuda.Stream, work: Callable[[T], Any], task: T) -> Any:
    with torch.cuda.stream(stream):
        return work(task)


@final
class CopyStream:
    """Runs work on a stream of its own, and hands the result over to the stream of the caller that takes it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], Any]) -> tuple[Any, torch.cuda.Event]:
        """Return what `work` makes, and the event after its last copy."""
        with torch.cuda.stream(self._stream):
            made = work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return made, event

    def take(self, batch: Any, event: torch.cuda.Event) -> None:
        """Let the caller's stream wait for the copies; keep the batch's memory until that stream is done."""
        current = torch.cuda.current_stream()
        current.wait_event(event)

        def keep(leaf: Any) -> Any:
            tensors = leaf.values(True, True) if is_tensor_collection(leaf) else [leaf]  # noqa: FBT003
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(current)
            return leaf

        map_leaves(batch, keep)


def with_fields_of(plan: Plan, data: Any, unit: SampleUnit | None, sampler: Sampler) -> tuple[Any, dict[Any, Tensor]]:
    """Return a batch with the fields that slices and units add, and these fields: by name, or by path."""
    if unit is not None:
        data = unit.finish(data, plan)
    if plan.fields and kinds.is_mapping(data):
        data = kinds.with_fields(data, {as_path(key): value for key, value in plan.fields.items()})
    notes = {**plan.notes, **plan.fields}
    for path, flags in sampler.marks(plan, data).items():
        notes[path if len(path) > 1 else path[0]] = flags
    return data, notes


def make_batch(engine: Reader, draw: Draw, finish: Finish, collate: Callable[[Any], Any] | None = None) -> Made | None:
    """Make the batch of a draw, with another `collate` if one is given; None if it cannot be made any more."""
    rows = engine.gather(draw)
    if rows is None:
        return None
    source, notes, held = rows.source, _NO_NOTES, draw.held
    draw = rows.draw
    plan = draw.plan
    records = draw.slots if plan is None else plan.records
    data = source.storage.present(rows.payload, (records.shape[0],))
    if held is not None and rows is held.rows:
        data = owned(data)  # they may be asked for again, and transforms may change a batch in place
    if plan is not None:
        data, notes = with_fields_of(plan, data, engine.unit, draw.sampler)
    collate = collate or source.collate
    return finish(data if collate is None else collate(data), draw, notes), rows, notes


@final
class DrawOrder(Order):
    """A batch of a buffer in this process.

    Draws are made in the caller's thread, in order, and keep their rows (see `ostinato.buffers.drawn_ahead`), so that
    a batch depends on the order of the calls alone; the worker copies, collates and transforms.

    A reader waits for two things, one after the other, and neither can be withheld from it:

    - for a place in the queue: a queued draw, of whichever reader, or the permission to draw. Both are looked at under
      the lock of the queue, which is that of the buffer, and every draw that is queued wakes the readers that wait. So
      no reader waits while a draw is queued, and no draw stays queued while a reader waits.
    - for the batch of the draw that it took: the worker makes the batches of all draws in order, without waiting, and
      a failure is the result of the draw that it belongs to.

    Args:
        engine: where draws come from.
        size: rows.
        ask: how long to wait.
        make: makes the batch of a draw; runs in the worker.
        within_epoch: whether no draw may be made beyond the end of the epoch.
    """

    def __init__(self, engine: Reader, size: int, ask: Ask, make: Callable[[Draw], Any], *, within_epoch: bool) -> None:
        self._engine, self._size, self._ask, self._make, self._within_epoch = engine, size, ask, make, within_epoch

    def request(self, queue: Prefetcher, count: int) -> Requested | None:  # noqa: ARG002 (each draw is one batch)
        """Make a draw and queue its batch, as far as no draw has to wait while another one is queued.

        That there are too few rows is an error only if no draw is queued.
        """
        engine, size = self._engine, self._size
        while not engine.may_draw(size):
            if queue.filled:
                return None
            engine.wait_to_draw(size, self._ask, lambda: queue.filled)
        if self._within_epoch and queue.filled and (queue.draws[-1].last or is_spent(engine)):
            return None  # the next draw begins another epoch
        try:
            draw = engine.draw(size, ahead=True, ask=self._ask)
        except EmptyBufferError:
            if queue.filled:
                return None  # the draws that are queued took the last rows: they are delivered first
            raise
        try:
            requested = self.again(queue, draw)
        except BaseException:
            engine.give_back(draw)
            raise
        engine.waiters.wake()
        return requested

    def again(self, queue: Prefetcher, draw: Draw) -> Requested:
        """Let the worker make the batch of a draw."""
        return Requested(draw, queue.submit(partial(on_stream_of_caller(self._make), draw)))

    def receive(self, queue: Prefetcher, requested: Requested) -> list[tuple[Draw, Any]]:
        """Return a draw and its batch; if this cannot be made, the draw is taken back before the error is raised."""
        draw, future, _ = requested
        queue.count_wait(future)
        try:
            return [(draw, future.result())]
        except BaseException:
            del requested, future  # it keeps the error, whose traceback keeps this frame
            self._engine.give_back(draw)
            raise


def is_spent(engine: Reader) -> bool:
    """Whether the epoch holds no further draw; the caller holds the lock."""
    return not engine.pending and engine.sampler.spent(engine.view())


class Batch(NamedTuple):
    """A finished batch, the draw that it came from, and the fields added to its records."""

    data: Any
    draw: Draw
    notes: dict[Any, Any]


class Pipeline:
    """Makes batches of draws, at once or ahead in a prefetch thread.

    Holds no reference to the buffer, which passes its `finish` with each call.

    Args:
        engine: where draws and rows come from.
        depth: batches to keep ready; 0 is no prefetch.
    """

    def __init__(self, engine: Reader, depth: int) -> None:
        self._engine = engine
        # page-locked batches are on their way to a GPU: prefetched ones are copied beside the learner's work
        self._stream = CopyStream() if depth and engine.store.pin and torch.cuda.is_available() else None
        self.prefetch = Prefetcher(depth, engine.waiters.lock)
        engine.queue = self.prefetch
        self.ended = False
        """Whether the buffer was shut down."""
        self._updates: UpdateQueue | None = None

    def next(self, size: int, finish: Finish, *, within_epoch: bool = False, ask: Ask = _PLAIN) -> Batch:
        """Return the next batch of `size` rows.

        Args:
            size: rows.
            finish: finishes a batch (transforms, keys that subclasses add); runs in the prefetch thread if there is
                one. It gets the batch, the draw, and the fields that slices and units add to each record.
            within_epoch: keep prefetch from drawing beyond the epoch's end.
            ask: how long to wait, where there is a rate limiter, and how old rows may be.

        Raises:
            EpochEndError: with `within_epoch`, if no batch is left since rows were replaced.
        """
        if is_dynamo_compiling():  # a graph break: locks and addresses are not for a graph
            eager = torch.compiler.disable(Pipeline.next)  # type: ignore[no-untyped-call]
            return eager(self, size, finish, within_epoch=within_epoch, ask=ask)  # type: ignore[no-any-return]
        require_eager("sampling")
        engine, tries = self._engine, 0
        if self.ended or self._updates is not None:
            self._check_open()
        for limit in engine.limits:
            ask = ask.begun(limit)  # all tries share one time
        while True:
            if self.prefetch.depth:
                made = self._make_ahead(size, finish, ask, within_epoch=within_epoch)
            elif tries < _FREE_TRIES:
                made = self._make_now(size, finish, ask)
            else:
                with engine.lock:
                    made = self._make_now(size, finish, ask)
            if made is not None:
                break
            tries += 1  # emptied, or windows cut short, in between: draw again, or learn that there is nothing
            if within_epoch and self.over:
                msg = "the rows left in the epoch were replaced: no batch of it is left"
                raise EpochEndError(msg)
        data, rows, notes = made
        engine.deliver(rows.draw)
        if self.prefetch.depth:
            notes = {**notes, "stale": engine.stale(rows.draw, rows)}
        return Batch(data, rows.draw, notes)

    @property
    def plain(self) -> bool:
        """Whether batches are made when they are asked for, and no update is pending."""
        return not self.prefetch.depth and self._updates is None and not self.ended

    def _check_open(self) -> None:
        """Raise after `shutdown`; let pending updates be done before the next draw."""
        if self.ended:
            msg = "A shut down replay buffer cannot be sampled: make another one, or use close() to end its threads"
            raise UsageError(msg)
        if self._updates is not None:
            self._updates.settle()

    def _make_ahead(self, size: int, finish: Finish, ask: Ask, *, within_epoch: bool) -> Made | None:
        engine, prefetch = self._engine, self.prefetch
        order = DrawOrder(engine, size, ask, partial(self._make_in_worker, finish), within_epoch=within_epoch)
        if prefetch.forked:  # the queue was copied, but not the worker
            prefetch.renew(lambda requested: order.again(prefetch, requested.draw))
        draw, made = prefetch.next(order)
        if self._stream is not None:
            made, event = made
            if made is not None:
                self._stream.take(made[0], event)
        if made is None:
            engine.give_back(draw)
        return made  # type: ignore[no-any-return]

    def _make_now(self, size: int, finish: Finish, ask: Ask) -> Made | None:
        draw, made = self._engine.draw(size, ask=ask), None
        try:
            made = self._engine.make(draw, finish)
        finally:
            if made is None:
                self._engine.give_back(draw)
        return made

    def _make_in_worker(self, finish: Finish, draw: Draw) -> Any:
        make = partial(self._engine.make, draw, finish)
        return make() if self._stream is None else self._stream.run(make)

    @property
    def draws(self) -> list[Draw]:
        """Draws that are queued, oldest first."""
        return self.prefetch.draws

    @property
    def over(self) -> bool:
        """Whether no batch of the epoch is left: the last one was drawn, or the rows left cannot be drawn any more."""
        with self._engine.lock:
            return not self.draws and (self._engine.sampler.ran_out or is_spent(self._engine))

    def drop(self) -> None:
        """Forget queued batches and their draws; a generator of the buffer's own goes back to before them."""
        with self._engine.lock:
            self._engine.undraw(self.prefetch.clear())

    def close(self) -> None:
        """End the threads. Batches made ahead are dropped, their draws are kept and delivered first."""
        self.redo()
        self.prefetch.close()
        if self._updates is not None:
            self._updates.close()

    def submit(self, update: Callable[[], ConditionalUpdateResult]) -> Future[ConditionalUpdateResult]:
        """Run an update in a thread: after the batches that are queued now, before those that are queued later."""
        if self.ended:
            msg = "A shut down replay buffer cannot accept updates: make another one"
            raise UsageError(msg)
        with self._engine.lock:
            if self._updates is None:
                self._engine.parts_changed()
                self._updates = UpdateQueue()
        return self._updates.submit(update, self.prefetch.worker())

    def settle(self) -> None:
        """Wait for pending updates, and raise the first error of one; the caller does not hold the lock."""
        if self._updates is not None:
            self._updates.settle()

    def synchronize(self) -> None:
        """Wait for pending updates and queued batches, and raise the first error of one."""
        self.settle()
        self.prefetch.synchronize()

    def forget(self) -> None:
        """Forget queued batches; what they were drawn from has been replaced."""
        self.prefetch.clear()

    def redo(self) -> None:
        """Forget queued batches but keep their draws, to be made again (after the chain of transforms has changed)."""
        with self._engine.lock:
            self._engine.pending.extendleft(reversed(self.prefetch.clear()))
            self._engine.waiters.wake()

    def restart(self) -> None:
        """Forget all queued draws and begin a new epoch."""
        with self._engine.lock:
            self.drop()
            self._engine.sampler.restart()


END = object()
"""What comes after the last batch."""


@final
class Pass:
    """The batches of one iteration over a buffer: one new epoch, without end for sampling with replacement.

    A generator is over once it has raised; here a call that waited in vain can be made again. Not thread-safe.
    """

    def __init__(self) -> None:
        self._begun = self._over = False

    def next(self, buffer: Sampling, timeout_s: float | None = None) -> Any:
        """Return the next batch, `END` after the last one.

        Args:
            buffer: the same in each call; it needs a batch size, and may own this object.
            timeout_s: longest wait for writers, in seconds.

        Raises:
            WaitTimeoutError: if writers did not come in time; nothing is drawn.
        """
        if self._over:
            return END
        if not buffer._engine.sampler.epochal:  # noqa: SLF001 (one package)
            return buffer.sample(timeout_s=timeout_s)
        pipeline, size = buffer._pipeline, buffer._batch_size  # noqa: SLF001
        if not self._begun:
            pipeline.restart()
            self._begun = True
        elif pipeline.over:
            self._over = True
            return END
        finish = buffer._finish  # noqa: SLF001
        try:
            batch = pipeline.next(size or 0, finish, within_epoch=True, ask=Ask(timeout_s))
        except EpochEndError:
            self._over = True
            return END
        self._over = batch.draw.last
        return batch.data
