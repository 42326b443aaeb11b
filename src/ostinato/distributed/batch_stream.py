"""Batches requested ahead of an actor, and of shards: what the prefetch queue of their handles asks them for."""

from __future__ import annotations

import contextlib
import queue
import threading
import uuid
import weakref
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from ostinato.buffers.prefetch import Order, Prefetcher, Requested
from ostinato.distributed.deadlines import POLL_S
from ostinato.distributed.ray_client import CLOSED, RETRY, ray
from ostinato.distributed.sampling import split_batch
from ostinato.distributed.serialization import decode_small
from ostinato.distributed.snapshot import Snapshot, batches_per_round
from ostinato.errors import EmptyBufferError, OptionError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ostinato.distributed.buffer_client import BufferClient
    from ostinato.distributed.deadlines import Deadline
    from ostinato.distributed.sampling import BatchAndInfo, ShardSampler


_AHEAD_S = -2 * POLL_S
"""Seconds waited for a batch requested ahead: negative, so that its first poll never times out."""


# -- batches of a RayReplayBuffer -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(lock: threading.Lock, deadline: Deadline, client: BufferClient) -> Iterator[None]:
    """Hold a lock that other threads hold while they wait for the actor.

    Raises:
        NoAnswerError: They wait for too long.
    """
    if not lock.acquire(timeout=min(deadline.left_s, threading.TIMEOUT_MAX)):
        raise deadline.error(client.callee, "sample")
    try:
        yield
    finally:
        lock.release()


class _EndedError(Exception):
    """A stream has no more batches, or was closed.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self.stream = stream


@final
class _Stream:
    """A stream that is open in an actor. If it is garbage collected, it is closed there, too.

    Args:
        client: Calls a `BufferActor`.
        counts: Numbers of batches that a request may have.
        deadline: When the actor must have opened it.
        epoch: Whether to stream one iteration over the buffer, which may end; else `sample(return_info=True)`.
    """

    def __init__(self, client: BufferClient, counts: set[int], deadline: Deadline, *, epoch: bool) -> None:
        actor = client.actor
        self.name = uuid.uuid4().hex
        self.requests = 0
        """Requests so far."""
        self._methods = {n: actor.next_batches.options(concurrency_group="read", num_returns=n) for n in counts}
        client.result(actor.open_stream.remote(self.name, epoch=epoch), "sample", deadline)
        self._closing = weakref.finalize(self, _close_stream, actor, self.name)
        self._closing.atexit = False  # the actor, and Ray, may be gone by then

    def send(self, number: int, count: int, waited_s: float) -> list[Any]:
        """Send a request; return references to its results."""
        references = self._methods[count].remote(self.name, number, count, waited_s)
        return references if count > 1 else [references]

    def close(self) -> Any:
        """Close it in the actor; return a reference to the call, which ends when nothing more is drawn."""
        arguments = self._closing.detach()
        return None if arguments is None else _close_stream(*arguments[2])


def _close_stream(actor: Any, name: str) -> Any:
    """Close a stream in its actor; return the call, None without Ray. Raises nothing, because finalizers call it."""
    with contextlib.suppress(Exception):
        return actor.close_stream.remote(name) if ray().is_initialized() else None
    return None


@final
class ActorBatches:
    """Batches of an actor, requested before they are needed, in the order of their draws.

    Each request has a cost, so one request is for several batches: half of those that may be ahead, so that one request
    is answered while the batches of another are consumed. Thread-safe: threads get batches in turn.

    The stream is opened for the first batch, and again after it was dropped or has failed; that of an epoch is opened
    once. Does not refer to the handle, so that a dropped handle is freed at once. Batches that were drawn ahead are
    lost then.

    Args:
        client: Calls a `BufferActor`.
        depth: Batches that may be ahead while the last one is consumed.
        epoch: Whether to iterate once over the buffer; else the batches are those of `sample(return_info=True)`.
    """

    def __init__(self, client: BufferClient, depth: int, *, epoch: bool = False) -> None:
        count = batches_per_round(depth)
        self.client = client
        self.epoch = epoch
        self.queue = Prefetcher(depth, threading.RLock(), count)
        self._counts = {1, count}
        self._turn = threading.Lock()
        self.stream = self._open(client.deadline()) if epoch else None

    def _open(self, deadline: Deadline) -> _Stream:
        return _Stream(self.client, self._counts, deadline, epoch=self.epoch)

    def __iter__(self) -> Self:
        """Iterate over the remaining batches."""
        return self

    def __next__(self) -> Any:
        """Return the next batch; request those that follow first. An error closes the stream.

        Raises:
            StopIteration: After the last batch of an epoch, and after `drop`.
            UsageError: The actor has closed the stream of an epoch.
            LostBufferError: The actor is dead, or does not answer.
        """
        deadline = self.client.waiting()
        while True:
            with _locked(self._turn, deadline, self.client):
                if self.stream is None and self.epoch:
                    raise StopIteration
                if self.stream is None:
                    self.stream = self._open(deadline)
                order = _StreamOrder(self, self.stream, self.client.waiting())
                try:
                    return self.queue.next(order)
                except _EndedError as end:
                    if self.epoch:
                        raise StopIteration from None
                    self._close(end.stream)  # dropped by another thread, or closed by the actor
                except Exception:
                    self._close(order.stream)  # so that the actor draws nothing more for it
                    raise

    def _close(self, stream: _Stream) -> None:
        with self.queue.lock:
            if self.stream is stream:
                self.drop()

    def drop(self) -> Any:
        """Discard batches that are ahead.

        Does not wait: a thread that waits for a batch may still get it.

        Returns:
            A reference to the call that ends when nothing more is drawn; None if there is none.
        """
        with self.queue.lock:
            stream, self.stream = self.stream, None
            self.queue.drop()
        return None if stream is None else stream.close()


@final
class _StreamOrder(Order):
    """A batch of a stream.

    Args:
        batches: Whose batch it is.
        stream: The stream that is open.
        deadline: When it is due.
    """

    def __init__(self, batches: ActorBatches, stream: _Stream, deadline: Deadline) -> None:
        self.stream = stream
        self._batches, self._deadline = batches, deadline

    def request(self, queue: Prefetcher, count: int) -> Requested:  # noqa: ARG002
        """Send a request, without waiting."""
        number = self.stream.requests
        self.stream.requests += 1
        return Requested((self.stream, number), self.stream.send(number, count, _AHEAD_S), count)

    def receive(self, queue: Prefetcher, requested: Requested) -> list[Any]:  # noqa: ARG002
        """Return the batches of a request; one that must be made again begins to wait now."""
        (stream, number), references, count = requested
        client, deadline = self._batches.client, self._deadline
        found: list[Any] = client.result(references, "sample", deadline)
        while found[0] is RETRY:
            found = client.result(stream.send(number, count, deadline.elapsed_s), "sample", deadline)
        if found[0] is CLOSED and self._batches.epoch and self._batches.stream is stream:
            msg = (
                f"{client.callee} has closed this iteration, because many others were begun since its last batch was "
                "requested: begin a new one"
            )
            raise UsageError(msg)
        batches: list[Any] = []
        for one in found:
            if one is not None and one is not CLOSED:
                batches.extend([decode_small(one)] if type(one) is bytes else one)
        if not batches:
            raise _EndedError(stream)
        return batches


# -- batches of a ShardedReplayBuffer ---------------------------------------------------------------------------------


@final
class _DaemonThread(Executor):
    """A thread that runs work in its order, and does not keep the program from ending. Ends when it is dropped."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="ostinato-shards", daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function after those submitted before."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(work, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """End the thread after the functions submitted so far. Does not wait."""
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        future, work = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where the batch is consumed)
            future.set_exception(error)
        del call, future, work  # else the last batch, and the worker, would live until the next request


@final
class _Ahead:
    """Draws made ahead, in order: after one that would have to wait, none is made.

    Args:
        offers: The offers that they are made from.
    """

    def __init__(self, offers: Snapshot) -> None:
        self.offers = offers
        self.stalled = False


class _ShardDraw(NamedTuple):
    """A draw of several batches at once, from all shards."""

    sizes: list[int]
    """Rows of each batch."""
    uniforms: Tensor
    """See `ShardSampler.draw`."""
    ahead: _Ahead


def _draw_ahead(sampler: ShardSampler, draw: _ShardDraw) -> BatchAndInfo | None:
    """Draw batches; None if they, or batches before them, cannot be drawn without waiting."""
    ahead = draw.ahead
    if not ahead.stalled:
        try:
            with sampler.within(sampler.deadline(None)):
                return sampler.draw(sum(draw.sizes), draw.uniforms, 0.0, offers=ahead.offers)
        except (EmptyBufferError, WaitTimeoutError):
            ahead.stalled = True
    return None


@final
class ShardBatches:
    """Returns batches of a sharded buffer, some of which were drawn ahead. Thread-safe.

    One request draws half of the batches that may be ahead, as one large batch: draws are independent. If rows are
    consumed, or a rate limiter decides, a request draws a single batch. What the limiter does not allow at once is not
    drawn ahead, but when it is needed, in the thread of the reader that needs it.

    Args:
        sampler: Draws the batches.
        depth: Batches to keep ready; 0 for no prefetch.
    """

    def __init__(self, sampler: ShardSampler, depth: int) -> None:
        self.sampler = sampler
        self.queue = Prefetcher(depth, threading.RLock(), sampler.batches_per_round(depth), _DaemonThread)
        self.ahead = _Ahead(Snapshot())

    def can_draw(self, size: int, batch_size: int | None) -> bool:
        """Return whether a batch of `size` rows can be had at once; `batch_size` is that of batches drawn ahead."""
        if self.queue.depth and (size != batch_size or self.queue.ready):
            return size == batch_size
        return self.sampler.can_draw(size)

    def next(
        self, size: int, timeout_s: float | None, max_age: int | None, min_rows: int | None = None
    ) -> BatchAndInfo:
        """Return the next batch of `size` rows, at least `min_rows` when the time is up, and its info.

        Raises:
            OptionError: `max_age` was given although rows are consumed, or batches prefetched.
            EmptyBufferError: There are no rows.
            PriorityError: No row has a positive priority.
            WaitTimeoutError: Not enough rows were written in time; `timeout_s=None` is the limiter's.
            NoAnswerError: A shard did not answer in time.
        """
        sampler, depth = self.sampler, self.queue.depth
        deadline = sampler.deadline(timeout_s)
        if max_age is not None and (depth or sampler.consumer is not None):
            reason = "batches are prefetched, and max_age is of the moment" if depth else "rows are used up"
            msg = f"max_age={max_age} is not available where {reason}: leave one of them out"
            raise OptionError(msg)
        if not depth:
            with sampler.within(deadline):
                return sampler.draw(size, sampler.uniforms(size), timeout_s, max_age, min_rows=min_rows)
        found: BatchAndInfo = self.queue.next(_ShardOrder(self, size, deadline))
        return found

    def request(self, draw: _ShardDraw) -> Requested:
        """Let the worker make a draw."""
        return Requested(draw, self.queue.submit(partial(_draw_ahead, self.sampler, draw)), len(draw.sizes))

    def draw_again(self) -> None:
        """Request draws again that were not made because one before them had to wait."""
        with self.queue.lock:
            ahead = self.ahead = _Ahead(self.ahead.offers)
            self.queue.renew(lambda one: self.request(one.draw._replace(ahead=ahead)) if _is_not_drawn(one) else one)

    def put_back(self, requested: Requested) -> None:
        """Leave a draw to the next reader, or discard it if the batches of its time were dropped meanwhile."""
        with self.queue.lock:
            if requested.draw.ahead.offers is self.ahead.offers:
                self.queue.put_back(requested)
                return
        self._discard(requested)

    def drop(self) -> None:
        """Discard batches and offers drawn ahead. Does not wait."""
        with self.queue.lock:
            dropped, self.ahead = self.queue.drop(), _Ahead(Snapshot())
            self.queue.close()
        for one in dropped:
            self._discard(one)
        self.sampler.forget()

    def _discard(self, requested: Requested) -> None:
        """Report a draw that is not used to the rate limiter, once it is made."""
        sampler, rows = self.sampler, sum(requested.draw.sizes)

        def give_back(future: Future[BatchAndInfo | None]) -> None:
            if future.exception() is None and future.result() is not None:
                sampler.give_back(rows)

        if not requested.made.cancel():
            requested.made.add_done_callback(give_back)


def _is_not_drawn(requested: Requested) -> bool:
    """Return whether a draw is not made because one before it had to wait."""
    made = requested.made
    return requested.draw.ahead.stalled and not (made.done() and (made.exception() or made.result() is not None))


@final
class _ShardOrder(Order):
    """A batch of all shards.

    Args:
        batches: Whose batch it is.
        size: Rows.
        deadline: When it is due.
    """

    def __init__(self, batches: ShardBatches, size: int, deadline: Deadline) -> None:
        self._batches, self._size, self._deadline = batches, size, deadline

    def request(self, queue: Prefetcher, count: int) -> Requested:  # noqa: ARG002
        """Draw the random numbers of batches, in the thread of the caller, and let the worker draw the batches."""
        uniforms = self._batches.sampler.uniforms(count * self._size)
        return self._batches.request(_ShardDraw([self._size] * count, uniforms, self._batches.ahead))

    def receive(self, queue: Prefetcher, requested: Requested) -> list[BatchAndInfo]:
        """Return batches; those that could not be drawn ahead are drawn now.

        A reader waits no longer than its own time, and then leaves the batches to the next reader.
        """
        batches, deadline, draw = self._batches, self._deadline, requested.draw
        queue.count_wait(requested.made)
        try:
            requested.made.exception(min(deadline.answer_left_s, threading.TIMEOUT_MAX))
        except BaseException as error:  # late, or interrupted: the batches are drawn all the same
            batches.put_back(requested)
            if isinstance(error, TimeoutError):
                raise deadline.error(batches.sampler.name_silent(), "sample") from None
            raise
        try:
            found = requested.made.result()
            if found is None:
                found = self._draw_now(draw)
                batches.draw_again()
        except WaitTimeoutError:
            raise  # nothing was drawn after it
        except Exception:
            if batches.sampler.consumer is None:
                batches.drop()  # later batches may be wrong for the same reason; but consumed rows must not be lost
            raise
        batch, info = found
        return [found] if len(draw.sizes) == 1 else split_batch(batch, info, draw.sizes)

    def _draw_now(self, draw: _ShardDraw) -> BatchAndInfo:
        sampler, deadline = self._batches.sampler, self._deadline
        left_s = round(deadline.wait_left_s, 3)  # rounded because error messages show it
        with sampler.within(deadline):
            return sampler.draw(sum(draw.sizes), draw.uniforms, left_s)
