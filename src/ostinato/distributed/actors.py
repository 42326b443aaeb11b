"""The classes that run in Ray actors: one buffer each, and the streams of batches that they serve."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import threading
import time
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato._optional import require
from ostinato.buffers import ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer
from ostinato.buffers.options import own
from ostinato.buffers.pipeline import END, Pass
from ostinato.buffers.portion import (
    Portion,
    begin_era,
    check_checkpoint,
    check_update,
    describe_updates,
    drawn,
    lock_of,
    reseed,
    save_counted,
    update_stored,
    written,
)
from ostinato.distributed.checkpoints import CheckedCheckpoint, begin_saving, check_era, read_fleet, write_fleet
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, POLL_S
from ostinato.distributed.fleet_schema import FleetSchemaClient, ShardSchema, dump_schema, show_schema
from ostinato.distributed.ray_client import CLOSED, ITSELF, RETRY, Closed, Retry, ray, where
from ostinato.distributed.save_failures import SaveLog
from ostinato.distributed.serialization import Serialized, decode, encode, encode_small, from_arguments
from ostinato.durable.manifest import MANIFEST_NAME
from ostinato.errors import (
    CheckpointError,
    KindError,
    LostBufferError,
    OptionError,
    SchemaError,
    UsageError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


MOST_STREAMS = 1024
"""Streams of one actor; more are of readers that have died."""
_LIMITS_TIMEOUT_S = 5.0
"""How long a checkpoint waits for the counts of the rate limiter."""


# -- how to make a buffer ---------------------------------------------------------------------------------------------


class BufferSpec(NamedTuple):
    """How to make a buffer."""

    cls: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int | None
    """Seed of the generator that the buffer gets; None keeps the one in `kwargs`."""
    prefetch: int = 0
    """Batches that each handle has requested ahead; the buffer itself has none."""
    call_timeout_s: float = CALL_TIMEOUT_S
    """Time of the calls of each handle."""

    def check_names(self, owner: str) -> None:
        """Check the names of the options, before an actor is started.

        Functions, and classes of others, that take any option (`**kwargs`) are not checked.

        Args:
            owner: The class that got the options, for error messages.

        Raises:
            KindError: There is no option of a name.
        """
        made = self.cls
        while isinstance(made, partial):
            made = made.func
        known = _option_names(made)
        unknown = [] if known is None else [name for name in self.kwargs if name not in known]
        if unknown:
            close = difflib.get_close_matches(unknown[0], sorted(known or ()), 1)
            hint = f"did you mean {close[0]!r}?" if close else f"its options are {sorted(known or ())}"
            name = getattr(made, "__name__", made)
            msg = f"{owner} got an unexpected option {unknown[0]!r}, which {name} does not have: {hint}"
            raise KindError(msg)

    def make(self) -> ReplayBuffer:
        """Make the buffer.

        Raises:
            OptionError: `cls` does not return a `ReplayBuffer`.
        """
        buffer = self.cls(*self.args, **self.kwargs)
        if not isinstance(buffer, ReplayBuffer) or isinstance(buffer, ReplayBufferEnsemble):
            msg = (
                f"replay_buffer_cls must make a ReplayBuffer, or a subclass of it, got {type(buffer).__name__}: an "
                "actor holds one buffer; to mix several, make a handle for each, and draw a part of the batch from each"
            )
            raise OptionError(msg)
        if self.seed is not None:
            reseed(buffer, self.seed)
        return buffer


class ShardSpec(NamedTuple):
    """How to make a shard, and where its checkpoints are."""

    buffer: BufferSpec
    path: str | None
    every_s: float | None
    resume: bool
    shard: int
    """Its number."""
    shards: int
    """Number of shards of the fleet."""
    fleet: tuple[str, str]
    """Name and namespace of the `FleetActor`, by which a restarted shard finds it."""
    max_save_failures: int
    """Periodic checkpoints that may fail in a row before writes raise."""
    limited: bool
    """Whether the fleet has a rate limiter, whose counts are saved."""


def _option_names(make: Any) -> set[str] | None:
    """Return the names of the keyword arguments of a class or function; None if it takes any."""
    names: set[str] = set()
    made_by = [make]
    if isinstance(make, type):
        made_by = [vars(one)["__init__"] for one in make.__mro__ if "__init__" in vars(one)]
    for function in made_by:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return None
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            return names
        if not str(getattr(function, "__module__", "")).startswith("ostinato."):
            return None  # it may use some of them itself
    return names


def _attempt(make: Callable[[], Any]) -> Any:
    """Return the object made, or the exception."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (raised by the next call)
        return error


def _checked(made: Any) -> Any:
    if isinstance(made, Exception):
        raise made
    return made


def _describe(buffer: ReplayBuffer) -> dict[str, Any]:
    sampler = buffer.sampler
    return {
        "capacity": buffer.storage.max_size,
        "counting": sampler.counting,
        "waits": buffer.rate_limiter is not None,
        "batch_size": buffer.batch_size,
        "prioritized": sampler.prioritized,
        "priority_key": getattr(buffer, "priority_key", "td_error"),
        "reduction": getattr(sampler, "reduction", "max"),
        "epochal": sampler.epochal,
        **describe_updates(buffer),
        "rows_drawn": drawn(buffer),
    }


# -- calls ------------------------------------------------------------------------------------------------------------

_READS = frozenset({"__getitem__", "read_all_in_order"})
"""Methods of buffers that may return views of rows."""


def _call(buffer: ReplayBuffer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the buffer, or read a property; `ITSELF` if the result is the buffer. Rows are copied."""
    with lock_of(buffer) if name in _READS else contextlib.nullcontext():  # no row changes while it is copied
        found = getattr(buffer, name)
        result = found(*args, **kwargs) if callable(found) else found
        if name in _READS:
            result = own(result)
    return ITSELF if result is buffer else result


def poll_once(
    buffer: ReplayBuffer,
    call: Callable[..., Any],
    timeout_s: float | None = None,
    waited_s: float = 0.0,
    last: Mapping[str, Any] | None = None,
) -> Any:
    """Make a call that may wait, for at most `POLL_S`.

    Args:
        buffer: The buffer whose method it is.
        call: Makes the call; accepts `timeout_s` if there is a limiter.
        timeout_s: Longest wait of all polls together; None is the limiter's. No effect without a limiter.
        waited_s: Seconds waited in earlier polls; negative for batches requested ahead.
        last: More arguments of the last poll, when the time is up; of every call of a buffer without a limiter.

    Returns:
        The result, or `RETRY` if the call must be made again.

    Raises:
        WaitTimeoutError: The time is up; nothing has changed.
    """
    limiter, last = buffer.rate_limiter, last or {}
    if limiter is None:
        return call(**last)
    limit = float(limiter.timeout_s if timeout_s is None else timeout_s)
    left = max(0.0, limit - waited_s)
    wait = min(left, POLL_S)
    try:
        return call(timeout_s=wait, **(last if left <= wait else {}))
    except WaitTimeoutError as error:
        if left > wait:
            return RETRY
        message = str(error).replace(f"waited {wait:g} s", f"waited {limit:g} s", 1)
        raise WaitTimeoutError(message) from None


# -- streams of batches -----------------------------------------------------------------------------------------------


def batch_maker(buffer: ReplayBuffer, *, epoch: bool) -> Callable[[float | None], Any]:
    """Return a function that makes the batches of a stream: of one epoch, or of `sample(return_info=True)`."""
    draw = partial(Pass().next, buffer) if epoch else partial(buffer.sample, return_info=True)

    def make(waited_s: float | None) -> Any:
        if waited_s is not None:
            return poll_once(buffer, draw, None, waited_s)
        try:
            return draw() if buffer.rate_limiter is None else draw(timeout_s=0.0)
        except WaitTimeoutError:
            return RETRY

    return make


@final
class ServedStream:
    """Serves batches to one reader in the order of its requests, which arrive in several threads.

    After a batch that raises, the stream has ended: no batch is drawn for later requests.

    Args:
        make: Makes the next batch; returns `END` after the last one, and `RETRY` if it would have to wait. Its argument
            is how long the reader has waited, in seconds, or None if it must not wait because the request has a batch
            already.
    """

    def __init__(self, make: Callable[[float | None], Any]) -> None:
        self._make = make
        self._next = 0
        self._ended = self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def take(self, number: int, count: int, waited_s: float = 0.0) -> list[Any] | Retry | Closed:
        """Answer request `number` after those before it; `RETRY` if it must be made again.

        Args:
            number: Number of the request, from 0.
            count: Number of batches.
            waited_s: How long the reader has waited for this request after it got the results of those before it;
                negative for batches requested ahead.

        Returns:
            `count` batches. Fewer if the next one would have to wait, raises (the next request raises the error), or if
            the stream ends; none after the end. `CLOSED` after `close`.

        Raises:
            UsageError: The request was answered before, or one before it never arrives; the stream ends.
        """
        with self._changed:
            while not self._ended and self._next != number:
                seen = self._next
                self._check(number, waited_s)
                if not self._changed.wait_for(lambda: self._ended or self._next != seen, POLL_S):  # noqa: B023
                    return RETRY
            if self._ended:
                error, self._error = (self._error, None) if number == self._next else (None, self._error)
                if error is not None:
                    raise error
                return CLOSED if self._closed else []
            found = self._make_several(count, waited_s)
            if found is None:
                return RETRY
            self._next += 1
            self._changed.notify_all()
            return found

    def _check(self, number: int, waited_s: float) -> None:
        """Raise for a request that never gets its turn: a reader only waits once it has all earlier results."""
        if number > self._next and waited_s <= POLL_S:
            return
        answered = self._next
        self._end()
        msg = (
            f"request {number} for batches does not follow the {answered} that were answered: each request of a reader "
            "is answered once, in order; begin a new stream"
        )
        raise UsageError(msg)

    def _make_several(self, count: int, waited_s: float) -> list[Any] | None:
        batches: list[Any] = []
        while len(batches) < count:
            try:
                batch = self._make(None if batches else waited_s)
            except Exception as error:
                self._end()
                if not batches:
                    raise
                self._error = error
                break
            if batch is RETRY and not batches:
                return None
            if batch is RETRY:
                break
            if batch is END:
                self._end()
                break
            batches.append(batch)
        return batches

    def _end(self) -> None:
        self._ended = True
        self._changed.notify_all()

    def close(self) -> None:
        """End the stream. When this returns, no batch is being made."""
        with self._changed:
            self._closed = True
            self._end()


@final
class ServedStreams:
    """The streams of all readers of an actor. Thread-safe.

    A reader closes its stream. If there are more than `MOST_STREAMS`, the one that is idle for the longest time is
    closed, and batches that were made for it are lost.
    """

    def __init__(self) -> None:
        self._streams: OrderedDict[str, ServedStream] = OrderedDict()  # the one that is idle for the longest time first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    def open(self, name: str, stream: ServedStream) -> None:
        """Add a stream."""
        with self._lock:
            self._streams[name] = stream
            idle = next(iter(self._streams)) if len(self._streams) > MOST_STREAMS else None
        if idle is not None:
            self.close(idle)

    def take(self, name: str, number: int, count: int, waited_s: float) -> list[Any] | Retry | Closed:
        """Answer a request; see `ServedStream.take`. `CLOSED` if there is no such stream."""
        with self._lock:
            stream = self._streams.get(name)
            if stream is None:
                return CLOSED
            self._streams.move_to_end(name)
        return stream.take(number, count, waited_s)

    def close(self, name: str) -> None:
        """Close a stream if it exists. When this returns, no batch is being made for it."""
        stream = self._streams.get(name)
        if stream is not None:
            stream.close()
            with self._lock:
                self._streams.pop(name, None)


# -- the actors -------------------------------------------------------------------------------------------------------


@final
class BufferActor:
    """The actor of a `RayReplayBuffer`. Its methods run in several threads, as those of the buffer may.

    An error of the constructor is raised by every call, because Ray passes errors of an actor's constructor as text.

    Args:
        *spec: How to make the buffer: a `BufferSpec`, as `to_arguments` returns it.
    """

    def __init__(self, *spec: Any) -> None:
        self._streams = ServedStreams()
        given: BufferSpec = from_arguments(spec)
        self._prefetch, self._call_timeout_s = given.prefetch, given.call_timeout_s
        self._made = _attempt(given.make)

    @property
    def _buffer(self) -> ReplayBuffer:
        found: ReplayBuffer = _checked(self._made)
        return found

    def describe(self) -> dict[str, Any]:
        """Return the properties of the buffer that handles need."""
        buffer = self._buffer
        limiter = buffer.rate_limiter
        return {
            **_describe(buffer),
            "kind": type(buffer).__name__,
            "prefetch": self._prefetch,
            "call_timeout_s": self._call_timeout_s,
            "tensordicts": isinstance(buffer, TensorDictReplayBuffer),
            "limit_s": None if limiter is None else float(limiter.timeout_s),
            **where(),
        }

    def ping(self) -> None:
        """Do nothing: an actor that answers is alive, whatever else it works on."""

    def call(self, request: Any) -> bytes | Serialized:
        """Call a method of the buffer, or read a property.

        Args:
            request: Name, arguments and keyword arguments, encoded, as is the result.
        """
        name, args, kwargs = decode(request)
        return encode(_call(self._buffer, name, args, kwargs))

    def call_polling(self, waited_s: float, request: Any) -> bytes | Serialized | Retry:
        """Call a method that may wait, for at most `POLL_S`; see `call` and `poll_once`."""
        name, args, kwargs = decode(request)
        buffer, timeout_s = self._buffer, kwargs.pop("timeout_s", None)
        last = {"min_batch": kwargs.pop("min_batch")} if "min_batch" in kwargs else {}
        call = lambda **wait: _call(buffer, name, args, {**kwargs, **wait})  # noqa: E731
        found = poll_once(buffer, call, timeout_s, waited_s, last)
        return RETRY if found is RETRY else encode(found)

    def apply(self, function: Callable[..., Any], *args: Any) -> Serialized:
        """Call a function with the buffer."""
        return Serialized(function(self._buffer, *args))

    def open_stream(self, name: str, *, epoch: bool) -> None:
        """Open a stream of batches: of one epoch, or of `sample(return_info=True)`."""
        self._streams.open(name, ServedStream(batch_maker(self._buffer, epoch=epoch)))

    def next_batches(self, name: str, number: int, count: int, waited_s: float = 0.0) -> Any:
        """Return up to `count` batches of a stream as `count` objects.

        These are either one object of bytes for each batch, sent within the result, or one `Serialized` with all
        batches: an object of Ray's store costs more to make than to fill, so large batches share one. Further objects
        are None. The first one is `RETRY` if the request must be made again, and `CLOSED` if there is no such stream.
        """
        batches = self._streams.take(name, number, count, waited_s)
        if isinstance(batches, list):
            small: list[Any] = [encode_small(batch) for batch in batches]
            objects = [Serialized(batches)] if None in small else small
        else:
            objects = [batches]
        objects += [None] * (count - len(objects))
        return objects if count > 1 else objects[0]

    def close_stream(self, name: str) -> None:
        """Close a stream."""
        self._streams.close(name)

    def close(self) -> None:
        """Make every further call raise `LostBufferError`."""
        self._made = LostBufferError(
            "the replay buffer was closed, by close() of one of its handles, and its rows are gone: make a new one"
        )


@final
class ShardActor:
    """The actor of one shard of a `ShardedReplayBuffer`.

    An actor that Ray restarts loads its last checkpoint. It then draws with another seed, and its generations belong to
    another era, so that none of them matches a row that was lost.

    Args:
        *spec: How to make the shard: a `ShardSpec`, as `to_arguments` returns it.
    """

    def __init__(self, *spec: Any) -> None:
        self._spec: ShardSpec = from_arguments(spec)
        self._saving = threading.Lock()
        self._homes = itertools.count()
        self._era = 0
        path, every_s = self._spec.path, self._spec.every_s
        self._saves = SaveLog(self._spec.shard, path, self._spec.max_save_failures, every_s)
        self._made = _attempt(self._build)
        if path is not None and every_s is not None and not isinstance(self._made, Exception):
            threading.Thread(target=self._keep_saving, args=(every_s,), daemon=True).start()

    def _build(self) -> _Shard:
        spec = self._spec
        buffer = spec.buffer.make()
        restarted = _was_restarted()
        found = spec.path is not None and (Path(spec.path) / MANIFEST_NAME).exists()
        if found and not (restarted or spec.resume):
            msg = (
                f"{spec.path} holds a checkpoint already: resume=True begins with it; else take another checkpoint_dir"
            )
            raise OptionError(msg)
        if found:
            buffer.loads(str(spec.path))
            self._saves.saved(len(buffer), buffer.write_count)
        era = self._era = int(time.time()) if spec.path is None else begin_saving(Path(spec.path))
        begin_era(buffer, era)
        if restarted:
            reseed(buffer, (spec.buffer.seed or 0) ^ era)
        schema = ShardSchema(buffer, FleetSchemaClient(spec.shard, self._fleet))
        if restarted:
            # The fleet may have been reset since the checkpoint: the rows are gone for all then. An actor of the fleet
            # that does not answer is asked again before the next rows are stored.
            with contextlib.suppress(SchemaError, LostBufferError):
                schema.confirm(f"of the checkpoint {spec.path}")
        return _Shard(buffer, Portion(buffer, era), schema)

    def _fleet(self) -> Any:
        """Return the handle of the `FleetActor`.

        Raises:
            ValueError: It is gone for good.
        """
        name, namespace = self._spec.fleet
        return require("ray", "ray").get_actor(name, namespace=namespace)

    @property
    def _parts(self) -> _Shard:
        found: _Shard = _checked(self._made)
        return found

    def describe(self) -> dict[str, Any]:
        """Return the properties of the buffer that handles need, its row counts, and those of its last checkpoint."""
        buffer, schema = self._parts.buffer, self._parts.schema.held()
        counts = {"rows": len(buffer), "write_count": buffer.write_count, "era": self._era}
        shown = {"schema": None if schema is None else show_schema(schema)}
        return {**_describe(buffer), **self._saves.describe(), **counts, **shown, **where()}

    def ping(self) -> None:
        """Do nothing: an actor that answers is alive, whatever else it works on."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer, or read a property."""
        return self._answer(_call(self._parts.buffer, name, args, kwargs))

    def _answer(self, result: Any) -> Serialized:
        """Return a result with the failed checkpoints that handles have to know; see `SaveLog.attach`."""
        return Serialized(self._saves.attach(result))

    def apply(self, function: Callable[..., Any], *args: Any) -> Serialized:
        """Call a function with the buffer.

        Raises:
            SchemaError: It has stored rows of another schema than that of the fleet, which are removed.
        """
        buffer, _, schema = self._parts
        result = function(buffer, *args)
        if not schema.settled:
            schema.confirm("that the function has stored")
        return self._answer(result)

    def write(
        self, waited_s: float, timeout_s: float | None, name: str, data: Any, kwargs: dict[str, Any]
    ) -> Serialized | Retry:
        """Call a method of the buffer that writes rows, which may wait for room, for at most `POLL_S`.

        Args:
            waited_s: Seconds waited in earlier polls.
            timeout_s: Longest wait of all polls together; None if the buffer never waits.
            name: The method.
            data: The rows.
            kwargs: Its other arguments.

        Returns:
            The result, or `RETRY` if the call must be made again.

        Raises:
            CheckpointError: Too many checkpoints failed; nothing is stored.
            SchemaError: The rows do not have the schema of the fleet; nothing is stored.
        """
        buffer, _, schema = self._parts
        self._saves.check()
        found = schema.write(
            lambda: poll_once(
                buffer, lambda **wait: _call(buffer, name, (data,), {**kwargs, **wait}), timeout_s, waited_s
            )
        )
        return RETRY if found is RETRY else self._answer(found)

    def check_update(self, given: dict[str, Any]) -> bool:
        """Check the arguments of `update_if_present`, if there were ever rows."""
        buffer = self._parts.buffer
        if self._parts.schema.held() is not None:
            check_update(buffer, given)
        return True

    def update_if_present(self, given: dict[str, Any]) -> Serialized:
        """Change rows that are still there; see `ReplayBuffer.update_if_present`."""
        return self._answer(update_stored(self._parts.buffer, given))

    def held_schema(self) -> tuple[bool, bytes]:
        """Return whether the schema was compared with that of the fleet, and the schema, pickled; no bytes for none."""
        schema = self._parts.schema.held()
        return self._parts.schema.settled, b"" if schema is None else dump_schema(schema)

    def reset(self) -> None:
        """Remove all rows; the next ones have the schema of the fleet, whatever it is then."""
        self._parts.schema.reset()

    def release(self) -> None:
        """Drop the schema, and the memory, of a shard that was reset and has no rows yet."""
        self._parts.schema.release()

    def next_home(self) -> int:
        """Return the number of earlier calls, so that handles begin to write at different shards."""
        return next(self._homes)

    def drawable(self) -> tuple[int, bool]:
        """Return how many rows can be drawn, and whether draws consume them."""
        return self._parts.portion.drawable, self._parts.buffer.sampler.counting

    def offer(self, rows: int, max_age: int | None = None, newest: int | None = None, drop: int | None = None) -> Any:
        """Draw rows, and return the shard's weight; see `Portion.offer`."""
        return self._saves.attach(tuple(self._parts.portion.offer(rows, max_age, newest, drop)))

    def take(self, number: int, rows: int, keep: bool = False) -> Serialized | None:  # noqa: FBT001, FBT002
        """Return rows of an offer; see `Portion.take`."""
        found = self._parts.portion.take(number, rows, keep=keep)
        return None if found is None else self._answer(found)

    def take_and_offer(self, number: int, rows: int, next_rows: int) -> Serialized:
        """Return the last rows of an offer (None for 0 rows), and the next offer, of `next_rows` rows."""
        portion = self._parts.portion
        taken = portion.take(number, rows) if rows else None
        return self._answer((taken, tuple(portion.offer(next_rows, drop=number))))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, path: str) -> dict[str, Any]:
        """Save the buffer; return how many rows the checkpoint holds, and how many were written before it."""
        own = path == self._spec.path
        with self._saving:
            try:
                if own:
                    check_era(Path(path), self._era)
                rows, write_count = save_counted(self._parts.buffer, path)
                self._save_fleet(Path(path).parent)
            except Exception as error:
                if own and self._spec.every_s is not None:
                    self._saves.failed(error, self._era)
                    self._report_saves()
                raise
            if own:
                failing = self._saves.own is not None
                self._saves.saved(rows, write_count)
                if failing:
                    self._report_saves()
            return {"rows": rows, "write_count": write_count}

    def _save_fleet(self, directory: Path) -> None:
        """Write what a checkpoint says about the whole fleet."""
        spec, limits = self._spec, None
        if spec.limited:
            # Without an answer the checkpoint has no counts: they begin with its rows when it is loaded.
            with contextlib.suppress(ValueError, ray().exceptions.RayError):
                limits = ray().get(self._fleet().limits.remote(), timeout=_LIMITS_TIMEOUT_S)
        write_fleet(directory, spec.shards, self._parts.schema.held(), limits)

    def check_load(self, path: str) -> CheckedCheckpoint:
        """Check that `load` can load a checkpoint, as far as this can be known without reading its rows.

        Raises:
            CheckpointError: It does not exist, or does not fit.
        """
        buffer, _, schema = self._parts
        schema.prepare()
        saved = check_checkpoint(buffer, path)
        return CheckedCheckpoint(None if saved is None else show_schema(saved), read_fleet(Path(path).parent))

    def load(self, path: str) -> None:
        """Restore what `save` saved.

        Raises:
            CheckpointError: It does not exist, or does not fit; nothing has changed. Or rows of another schema were
                written to the fleet while this call ran; the shard is empty then.
        """
        buffer, _, schema = self._parts
        buffer.loads(path)
        if not schema.settled:
            try:
                schema.confirm(f"of {path}")
            except SchemaError as error:
                raise CheckpointError(str(error)) from error

    def learn_failures(self, failures: tuple[Any, ...]) -> None:
        """Learn which shards cannot be saved; answers to handles say so."""
        self._saves.learn(failures)

    def _report_saves(self) -> None:
        """Let the other shards know of failures, or of their end."""
        with contextlib.suppress(ValueError):  # the fleet has ended
            self._fleet().report_save.remote(self._spec.shard, self._saves.own)

    def _keep_saving(self, every_s: float) -> None:
        buffer, path = self._parts.buffer, str(self._spec.path)
        saved = written(buffer)
        while True:
            time.sleep(every_s)
            if isinstance(self._made, Exception):  # it was closed
                return
            now = written(buffer)
            if now == saved and self._saves.error is None:
                continue
            with contextlib.suppress(Exception):  # `save` has recorded it, and the next attempt may succeed
                self.save(path)
                saved = now


class _Shard(NamedTuple):
    """The parts of a shard."""

    buffer: ReplayBuffer
    portion: Portion
    schema: ShardSchema


def _was_restarted() -> bool:
    """Return whether Ray has restarted this actor."""
    context = require("ray", "ray").get_runtime_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray calls a deprecated function of its own
        return bool(context.was_current_actor_reconstructed)
