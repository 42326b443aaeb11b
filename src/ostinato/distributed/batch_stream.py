"""Batches requested before they are needed: streams of an actor, and prefetch of sharded buffers."""

from __future__ import annotations

import contextlib
import queue
import threading
import uuid
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

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

__all__ = ["BatchStream", "ShardPrefetcher", "StreamHolder"]

_AHEAD_S = -2 * POLL_S
"""Seconds waited for a batch requested ahead: negative, so that its first poll never times out."""


@contextlib.contextmanager
def locked(lock: threading.Lock, deadline: Deadline, client: BufferClient) -> Iterator[None]:
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


# -- streams of a RayReplayBuffer -------------------------------------------------------------------------------------


@final
class BatchStream:
    """Requests batches of an actor before they are needed, and returns them in the order of their draws.

    Each request has a cost, so one request is for several batches: half of those that may be ahead, so that one request
    is answered while the batches of another are consumed. Thread-safe: threads get batches in turn.

    A stream that is garbage collected is closed in the actor, too; batches that were drawn ahead are lost.

    Args:
        client: Calls a `BufferActor`.
        depth: Batches that may be ahead while the last one is consumed.
        deadline: When the actor must have opened it.
        epoch: Whether to stream one iteration over the buffer, which may end; else `sample(return_info=True)`.
    """

    def __init__(self, client: BufferClient, depth: int, deadline: Deadline, *, epoch: bool) -> None:
        actor = client.actor
        self._client = client
        self._depth = depth
        self._count = batches_per_round(depth)
        self._methods = {
            count: actor.next_batches.options(concurrency_group="read", num_returns=count) for count in {1, self._count}
        }
        self._epoch = epoch
        self._id = uuid.uuid4().hex
        self._requests: deque[tuple[int, list[Any]]] = deque()
        self._ready: deque[Any] = deque()
        self._num_requests = self._ahead = 0
        self._lock = threading.Lock()
        self._ended = False
        client.result(actor.open_stream.remote(self._id, epoch=epoch), "sample", deadline)
        self._closing = weakref.finalize(self, _close_stream, actor, self._id)
        self._closing.atexit = False  # the actor, and Ray, may be gone by then

    def __iter__(self) -> Self:
        """Iterate over the remaining batches."""
        return self

    def __next__(self) -> Any:
        """Return the next batch; see `take`."""
        return self.take(self._client.waiting())

    def take(self, deadline: Deadline) -> Any:
        """Return the next batch; request those that follow first.

        Args:
            deadline: How long to wait for other threads that take batches; then the time of the batch begins.

        Raises:
            StopIteration: After the last batch, and after `close`.
            UsageError: The actor has closed the stream of an epoch.
            LostBufferError: The actor is dead, or does not answer.
        """
        with locked(self._lock, deadline, self._client):
            deadline = self._client.waiting()
            if self._ended:
                raise StopIteration
            if not self._num_requests:
                self._request(1)
            while self._ahead + self._count <= self._depth + 1:
                self._request(self._count)
            while not self._ready:
                number, references = self._requests.popleft()
                for found in self._receive(number, references, deadline):
                    if found is not None:
                        self._ready.extend([decode_small(found)] if type(found) is bytes else found)
                if not self._ready:
                    raise StopIteration
                self._ahead -= len(references) - len(self._ready)
            self._ahead -= 1
            return self._ready.popleft()

    def _request(self, count: int) -> None:
        self._requests.append((self._num_requests, self._send(self._num_requests, count, _AHEAD_S)))
        self._num_requests += 1
        self._ahead += count

    def _send(self, number: int, count: int, waited_s: float) -> list[Any]:
        references = self._methods[count].remote(self._id, number, count, waited_s)
        return references if count > 1 else [references]

    def _receive(self, number: int, references: list[Any], deadline: Deadline) -> list[Any]:
        """Return the results of a request; one that must be made again begins to wait now."""
        found: list[Any] = self._client.result(references, "sample", deadline)
        while found[0] is RETRY:
            again = self._send(number, len(references), deadline.elapsed_s)
            found = self._client.result(again, "sample", deadline)
        if found[0] is not CLOSED:
            return found
        if self._epoch and not self._ended:
            msg = (
                f"{self._client.callee} has closed this iteration, because many others were begun since its last "
                "batch was requested: begin a new one"
            )
            raise UsageError(msg)
        return []

    def close(self) -> Any:
        """Discard batches that are ahead.

        Does not wait: a thread that waits for a batch may still get it.

        Returns:
            A reference to the call that ends when nothing more is drawn; None if there is none.
        """
        self._ended = True
        arguments = self._closing.detach()
        return None if arguments is None else _close_stream(*arguments[2])


def _close_stream(actor: Any, stream_id: str) -> Any:
    """Close a stream in its actor; return the call, None without Ray. Raises nothing, because finalizers call it."""
    with contextlib.suppress(Exception):
        return actor.close_stream.remote(stream_id) if ray().is_initialized() else None
    return None


@final
class StreamHolder:
    """The stream of one handle: opened for the first batch, and again after it was dropped or has failed.

    Thread-safe: threads share one stream. Does not refer to the handle, so that a dropped handle is freed at once.

    Args:
        client: Calls the actor.
        depth: See `BatchStream`.
    """

    def __init__(self, client: BufferClient, depth: int) -> None:
        self.stream: BatchStream | None = None
        self._client = client
        self._depth = depth
        self._lock = threading.Lock()

    def epoch(self) -> BatchStream:
        """Open a stream of one iteration over the buffer."""
        return BatchStream(self._client, self._depth, self._client.deadline(), epoch=True)

    def next(self) -> Any:
        """Return the next batch. An error closes the stream and is raised in one of the threads that wait."""
        deadline = self._client.waiting()
        while True:
            with locked(self._lock, deadline, self._client):
                if self.stream is None:
                    self.stream = BatchStream(self._client, self._depth, deadline, epoch=False)
                stream = self.stream
            try:
                return stream.take(deadline)
            except StopIteration:  # dropped by another thread, or closed by the actor
                self._close(stream)
            except Exception:
                self._close(stream)  # so that the actor draws nothing more for it
                raise

    def _close(self, stream: BatchStream) -> None:
        with self._lock:
            if self.stream is stream:
                self.stream = None
        stream.close()

    def drop(self) -> Any:
        """Close the stream; see `BatchStream.close`."""
        with self._lock:
            stream, self.stream = self.stream, None
        return None if stream is None else stream.close()


# -- prefetch of a ShardedReplayBuffer --------------------------------------------------------------------------------


class _LateError(Exception):
    """A batch is being drawn when the time of its reader ends."""


class _Job(NamedTuple):
    """Batches that are drawn together."""

    sizes: list[int]
    uniforms: Tensor
    future: Future[BatchAndInfo | None]
    ahead: bool
    """Whether it was requested before a reader waited for it."""


@final
class _Worker:
    """A daemon thread that draws batches in the order of requests.

    Args:
        sampler: Draws them.
    """

    def __init__(self, sampler: ShardSampler) -> None:
        self._sampler = sampler
        self._offers = Snapshot()
        self._stalled = False  # a batch could not be drawn ahead; until it was drawn, neither are those behind it
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="ostinato-shards", daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def request(self, sizes: list[int], uniforms: Tensor, deadline: Deadline | None = None) -> _Job:
        """Request batches.

        Args:
            sizes: Rows of each.
            uniforms: See `ShardSampler.draw`.
            deadline: That of their reader. None requests ahead: the result is None if the batches, or batches before
                them, cannot be drawn without waiting.
        """
        future: Future[BatchAndInfo | None] = Future()
        sampler, offers, size = self._sampler, self._offers, sum(sizes)

        def draw() -> BatchAndInfo | None:
            if deadline is not None:
                self._stalled = False
                left_s = round(deadline.wait_left_s, 3)  # rounded because error messages show it
                with sampler.within(deadline):
                    return sampler.draw(size, uniforms, left_s, offers=offers)
            if not self._stalled:
                try:
                    with sampler.within(sampler.deadline(None)):
                        return sampler.draw(size, uniforms, 0.0, offers=offers)
                except (EmptyBufferError, WaitTimeoutError):
                    self._stalled = True
            return None

        self._calls.put((future, draw))
        return _Job(sizes, uniforms, future, deadline is None)

    def stop(self) -> None:
        """End the thread after the requests so far."""
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        future, draw = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(draw())
        except BaseException as error:  # noqa: BLE001 (raised where the batch is consumed)
            future.set_exception(error)
        del call, future, draw  # else the last batch, and the worker, would live until the next request


@final
class ShardPrefetcher:
    """Returns batches of a sharded buffer, some of which were drawn ahead. Thread-safe.

    One request draws half of the batches that may be ahead, as one large batch: draws are independent. If rows are
    consumed, or a rate limiter decides, a request draws a single batch. What the limiter does not allow at once is not
    drawn ahead, but when it is needed.

    Batches are drawn one after the other, so a reader may have to wait for the batches of other threads. It waits no
    longer than its own timeout, and then leaves its batch to the next reader.

    Args:
        sampler: Draws the batches.
        depth: Batches to keep ready; 0 for no prefetch.
    """

    def __init__(self, sampler: ShardSampler, depth: int) -> None:
        self.sampler = sampler
        self.depth = depth
        self._count = sampler.batches_per_round(depth) if sampler.unlimited else 1
        self._jobs: deque[_Job] = deque()
        self._batches: deque[BatchAndInfo] = deque()
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        with self._lock:
            return len(self._batches) + sum(len(job.sizes) for job in self._jobs if job.future.done())

    def can_draw(self, size: int, batch_size: int | None) -> bool:
        """Return whether a batch of `size` rows can be had at once; `batch_size` is that of batches drawn ahead."""
        if self.depth and (size != batch_size or self.ready):
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
        sampler = self.sampler
        deadline = sampler.deadline(timeout_s)
        if max_age is not None and (self.depth or sampler.consumer is not None):
            reason = "batches are prefetched, and max_age is of the moment" if self.depth else "rows are used up"
            msg = f"max_age={max_age} is not available where {reason}: leave one of them out"
            raise OptionError(msg)
        if not self.depth:
            with sampler.within(deadline):
                return sampler.draw(size, sampler.uniforms(size), timeout_s, max_age, min_rows=min_rows)
        with self._lock:
            self._request(size)
            if self._batches:
                return self._batches.popleft()
            job, worker = self._jobs.popleft(), self._worker
        batch, info = self._result(job, worker, deadline)
        if len(job.sizes) == 1:
            return batch, info
        first, *others = split_batch(batch, info, job.sizes)
        with self._lock:
            self._batches.extend(others)
        return first

    def _request(self, size: int) -> None:
        """Request as many batches as may be ahead; the very first one alone, because a reader waits for it."""
        worker = self._worker = self._worker or _Worker(self.sampler)
        ahead = len(self._batches) + sum(len(job.sizes) for job in self._jobs)
        count = self._count if ahead else 1
        while ahead + count <= self.depth + 1:
            self._jobs.append(worker.request([size] * count, self.sampler.uniforms(count * size)))
            ahead, count = ahead + count, self._count

    def _result(self, job: _Job, worker: _Worker | None, deadline: Deadline) -> BatchAndInfo:
        """Wait for batches; those that could not be drawn ahead are drawn now."""
        current = job
        try:
            if self._wait(current, deadline) and current.future.result() is None:
                current = self._draw_now(job, deadline)
            if self._wait(current, deadline):
                found = current.future.result()
                if found is not None:
                    return found
        except WaitTimeoutError:
            raise  # nothing was drawn after it
        except _LateError:
            self._put_back(current, worker)  # the next reader may get it
            raise deadline.error(self.sampler.name_silent(), "sample") from None
        except Exception:
            if self.sampler.consumer is None:
                self.drop()  # later batches may be wrong for the same reason; but consumed rows must not be lost
            raise
        except BaseException:
            self._put_back(current, worker)  # interrupted: the batch is drawn all the same
            raise
        if current.future.done() and not current.future.cancelled():
            msg = "a batch was discarded while it was waited for, because empty(), loads() or close() was called"
            raise UsageError(msg)
        self._put_back(job, worker)
        msg = (
            f"a draw of {sum(job.sizes)} row(s) waited {deadline.elapsed_s:.3g} s behind draws of other threads, which "
            "wait for writers or shards: raise timeout_s, or see what became of these"
        )
        raise WaitTimeoutError(msg)

    def _wait(self, job: _Job, deadline: Deadline) -> bool:
        """Wait for a job; False if the worker has not begun it when the reader's time ends.

        A job with a reader's own time is cancelled when that reader gives up; jobs requested ahead are kept for the
        next reader.

        Raises:
            _LateError: It has begun, but shards do not answer.
        """
        left_s = deadline.answer_left_s if job.ahead else deadline.answer_left_s + 1.0  # it ends by its own deadline
        try:
            job.future.exception(min(left_s, threading.TIMEOUT_MAX))
        except TimeoutError:
            if job.future.running():
                raise _LateError from None
            return not (job.ahead or job.future.cancel())
        return True

    def _put_back(self, job: _Job, worker: _Worker | None) -> None:
        """Leave a job to the next reader, or discard it if the batches of its time were dropped meanwhile."""
        with self._lock:
            if self._worker is worker:
                self._jobs.appendleft(job)
                return
        self._discard(job)

    def _draw_now(self, first: _Job, deadline: Deadline) -> _Job:
        """Draw a batch that could not be drawn ahead, and request those behind it that were not drawn again."""
        with self._lock:
            worker = self._worker = self._worker or _Worker(self.sampler)
            now = worker.request(first.sizes, first.uniforms, deadline)
            self._jobs = deque(
                worker.request(job.sizes, job.uniforms) if _not_drawn(job.future) else job for job in self._jobs
            )
        return now

    def drop(self) -> None:
        """Discard batches and offers drawn ahead. Does not wait."""
        with self._lock:
            jobs, self._jobs, worker, self._worker = self._jobs, deque(), self._worker, None
            self._batches.clear()
        if worker is not None:
            worker.stop()
        for job in jobs:
            self._discard(job)
        self.sampler.forget()

    def _discard(self, job: _Job) -> None:
        if not job.future.cancel():
            job.future.add_done_callback(_give_back_to(self.sampler, sum(job.sizes)))


def _not_drawn(future: Future[BatchAndInfo | None]) -> bool:
    """Return whether a batch requested ahead was not drawn, and will not be."""
    return future.cancel() or (future.done() and future.exception() is None and future.result() is None)


def _give_back_to(sampler: ShardSampler, rows: int) -> Callable[[Future[BatchAndInfo | None]], None]:
    """Return a callback that reports a discarded batch to the rate limiter."""

    def give_back(future: Future[BatchAndInfo | None]) -> None:
        if future.exception() is None and future.result() is not None:
            sampler.give_back(rows)

    return give_back
