"""What runs inside an actor: a buffer, and the few calls that reach it from other processes."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato._optional import require
from ostinato.buffers import ReplayBuffer, TensorDictReplayBuffer
from ostinato.buffers.pipeline import END, Pass
from ostinato.buffers.portion import Portion, begin_era, read_own, reseed, save_counted, written
from ostinato.distributed.ray_client import AGAIN, GONE, TURN_S, Again, Gone, take_turn
from ostinato.distributed.serialization import Parcel, pack, seal, unseal
from ostinato.durable.manifest import MANIFEST_NAME
from ostinato.errors import LostBufferError, OptionError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["END", "IDLE_S", "MANY_LINES", "Host", "Line", "Lines", "Recipe", "ShardHost", "ShardRecipe", "maker"]

MANY_LINES = 64
"""Lines that are kept, however long nobody asks for their batches."""
IDLE_S = 600.0
"""Beyond these, a line is closed that nobody has asked for a batch for so long: its reader may be dead."""


@final
class Line:
    """Gives batches to one reader in the order of its calls, though these come in many threads.

    A batch that cannot be made ends the line: those asked for after it are not drawn for nobody.

    Args:
        make: makes the next batch, `END` after the last one. It is given how long its reader has waited for it, in
            seconds, or None where it must not wait, as the call has a batch already; `AGAIN` says that it would.
    """

    def __init__(self, make: Callable[[float | None], Any]) -> None:
        self._make = make
        self._turn = 0
        self._over = False
        self._error: Exception | None = None
        self._gate = threading.Condition()

    def take(self, number: int, count: int, waited_s: float = 0.0) -> list[Any] | Again:
        """Answer call `number`, once those before it are answered; `AGAIN` where it should be made once more.

        Args:
            number: of the call, from 0 on.
            count: batches.
            waited_s: how long the reader has waited for this answer, having those before it; below 0 for calls made
                ahead, whose time has not begun.

        Returns:
            `count` batches; fewer before an error, which the next call raises, where the next one would have to wait,
            and at the end; none after it.

        Raises:
            UsageError: if the call was answered before, or its turn never comes; the line ends then.
        """
        with self._gate:
            while not self._over and self._turn != number:
                seen = self._turn
                self._check(number, waited_s)
                if not self._gate.wait_for(lambda: self._over or self._turn != seen, TURN_S):  # noqa: B023
                    return AGAIN
            if self._over:
                error, self._error = (self._error, None) if number == self._turn else (None, self._error)
                if error is not None:
                    raise error
                return []
            found = self._some(count, waited_s)
            if found is None:
                return AGAIN
            self._turn += 1
            self._gate.notify_all()
            return found

    def _check(self, number: int, waited_s: float) -> None:
        """Refuse a call whose turn never comes: a reader waits for one when it has the answers to those before it."""
        if number > self._turn and waited_s <= TURN_S:
            return
        turn = self._turn
        self._end()
        msg = (
            f"call {number} for batches does not follow the {turn} that were answered: each call of a reader is "
            "answered once, in order; ask anew"
        )
        raise UsageError(msg)

    def _some(self, count: int, waited_s: float) -> list[Any] | None:
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
            if batch is AGAIN and not batches:
                return None
            if batch is AGAIN:
                break
            if batch is END:
                self._end()
                break
            batches.append(batch)
        return batches

    def _end(self) -> None:
        self._over = True
        self._gate.notify_all()

    def close(self) -> None:
        """Give no further batches. When it returns, none is being made."""
        with self._gate:
            self._end()


class _Place:
    """A line among others: whether somebody asks for its batches."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.calls = 0
        self.asked = time.monotonic()


@final
class Lines:
    """The lines of all readers of an actor. Thread-safe.

    A reader ends its line; those of the dead are closed when others begin: beyond `MANY_LINES`, the ones that nobody
    has asked for a batch for `IDLE_S`. Batches that were made for them are lost, as are those on their way to the dead.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Lines that are open."""
        return len(self._places)

    def begin(self, name: str, line: Line) -> None:
        """Begin a line."""
        with self._lock:
            self._places[name] = _Place(line)
            idle = self._idle() if len(self._places) > MANY_LINES else []
        for one in idle:
            self.end(one)

    def _idle(self) -> list[str]:
        """Return the lines to close: the longest unasked first, no more than there are too many."""
        before = time.monotonic() - IDLE_S
        found = sorted((place.asked, name) for name, place in self._places.items() if not place.calls)
        return [name for asked, name in found[: len(self._places) - MANY_LINES] if asked < before]

    def take(self, name: str, number: int, count: int, waited_s: float) -> list[Any] | Again | Gone:
        """Answer a call; see `Line.take`. `GONE` if there is no such line, or no more."""
        with self._lock:
            place = self._places.get(name)
            if place is None:
                return GONE
            place.calls += 1
        try:
            return place.line.take(number, count, waited_s)
        finally:
            with self._lock:
                place.calls -= 1
                place.asked = time.monotonic()

    def end(self, name: str) -> None:
        """Close a line, if it is there. When this returns, no batch is being made for it."""
        with self._lock:
            place = self._places.pop(name, None)
        if place is not None:
            place.line.close()


def maker(buffer: ReplayBuffer, *, epoch: bool) -> Callable[[float | None], Any]:
    """Return what makes the batches of a line: those of one pass, or of `sample(return_info=True)`."""
    draw = Pass(buffer).next if epoch else partial(buffer.sample, return_info=True)

    def make(waited_s: float | None) -> Any:
        if waited_s is not None:
            return take_turn(buffer, draw, None, waited_s)
        try:
            return draw() if buffer.rate_limiter is None else draw(timeout_s=0.0)
        except WaitTimeoutError:
            return AGAIN

    return make


class Recipe(NamedTuple):
    """How to make a buffer."""

    cls: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int | None
    """Of the generator that the buffer gets; None leaves it the one in `kwargs`."""

    def make(self) -> ReplayBuffer:
        """Make it.

        Raises:
            OptionError: if it is no `ReplayBuffer`.
        """
        buffer = self.cls(*self.args, **self.kwargs)
        if not isinstance(buffer, ReplayBuffer):
            msg = (
                f"replay_buffer_cls must make a ReplayBuffer, or a subclass of it, got {type(buffer).__name__}: an "
                "actor holds one buffer; to mix several, make a handle for each, and draw a part of the batch from each"
            )
            raise OptionError(msg)
        if self.seed is not None:
            reseed(buffer, self.seed)
        return buffer


class ShardRecipe(NamedTuple):
    """How to make a shard, and where its checkpoints are."""

    recipe: Recipe
    path: str | None
    every_s: float | None
    resume: bool


@final
class Host:
    """The actor behind a `RayReplayBuffer`. Its methods run in several threads at once, as those of the buffer may.

    What goes wrong while it is made is raised by every call: Ray shows errors of constructors as text alone.

    Args:
        recipe: how to make the buffer.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._lines = Lines()
        self._made = _attempt(recipe.make)

    @property
    def _buffer(self) -> ReplayBuffer:
        found: ReplayBuffer = _held(self._made)
        return found

    def about(self) -> dict[str, Any]:
        """Return what handles remember."""
        buffer = self._buffer
        limiter = buffer.rate_limiter
        return {
            **_describe(buffer),
            "kind": type(buffer).__name__,
            "tensordicts": isinstance(buffer, TensorDictReplayBuffer),
            "limit_s": None if limiter is None else float(limiter.timeout_s),
        }

    def call(self, request: Any) -> bytes | Parcel:
        """Call a method of the buffer, or read a property.

        Args:
            request: name, positional and named arguments, sealed, as is the result.
        """
        name, args, kwargs = unseal(request)
        return seal(_call(self._buffer, name, args, kwargs))

    def wait(self, waited_s: float, request: Any) -> bytes | Parcel | Again:
        """Do the same for a method that may wait, for one turn; `AGAIN` asks to be called again."""
        name, args, kwargs = unseal(request)
        buffer, timeout_s = self._buffer, kwargs.pop("timeout_s", None)
        found = take_turn(buffer, lambda **late: _call(buffer, name, args, {**kwargs, **late}), timeout_s, waited_s)
        return AGAIN if found is AGAIN else seal(found)

    def apply(self, function: Callable[..., Any], *args: Any) -> Parcel:
        """Call a function with the buffer."""
        return Parcel(function(self._buffer, *args))

    def enter(self, line: str, *, epoch: bool) -> None:
        """Begin a line of batches: those of one pass, or of `sample(return_info=True)`."""
        self._lines.begin(line, Line(maker(self._buffer, epoch=epoch)))

    def advance(self, line: str, number: int, count: int, waited_s: float = 0.0) -> Any:
        """Return up to `count` batches of a line as `count` objects: a packet each, or one parcel with all of them.

        Packets travel within the answer. An object of Ray's store takes longer to make than to fill, so large batches
        share one. Objects that are left over are None: all of them after the end. The first one is `AGAIN` where the
        call should be made once more, and `GONE` where the actor has no such line.
        """
        batches = self._lines.take(line, number, count, waited_s)
        if isinstance(batches, list):
            packets: list[Any] = [pack(batch) for batch in batches]
            objects = [Parcel(batches)] if None in packets else packets
        else:
            objects = [batches]
        objects += [None] * (count - len(objects))
        return objects if count > 1 else objects[0]

    def leave(self, line: str) -> None:
        """End a line."""
        self._lines.end(line)

    def end(self) -> None:
        """Answer every further call with what has happened: the buffer was closed."""
        self._made = LostBufferError(
            "the replay buffer was closed, by close() of one of its handles, and its rows are gone: make a new one"
        )


@final
class ShardHost:
    """The actor behind one shard of a `ShardedReplayBuffer`.

    An actor that Ray restarts finds its last checkpoint where the first one left it. Its draws then come from another
    seed, and its stamps are of another era: none fits a row that is lost.

    Args:
        plan: how to make it.
    """

    def __init__(self, plan: ShardRecipe) -> None:
        self._plan = plan
        self._saving = threading.Lock()
        self._seats = itertools.count()
        self._era = 0
        self._saved: dict[str, Any] = {"saved_rows": 0, "saved_write_count": 0, "save_error": None}
        self._made = _attempt(self._build)
        if plan.path is not None and plan.every_s is not None and not isinstance(self._made, Exception):
            threading.Thread(target=self._keep_saving, args=(plan.every_s,), daemon=True).start()

    def _build(self) -> tuple[ReplayBuffer, Portion]:
        plan, era = self._plan, int(time.time())
        buffer = plan.recipe.make()
        again = _restarted()
        there = plan.path is not None and (Path(plan.path) / MANIFEST_NAME).exists()
        if there and not (again or plan.resume):
            msg = (
                f"{plan.path} holds a checkpoint already: resume=True begins with it; else take another checkpoint_dir"
            )
            raise OptionError(msg)
        if there:
            buffer.loads(str(plan.path))
            self._saved |= {"saved_rows": len(buffer), "saved_write_count": buffer.write_count}
        begin_era(buffer, era)
        self._era = era
        if again:
            reseed(buffer, (plan.recipe.seed or 0) ^ era)
        return buffer, Portion(buffer, era)

    @property
    def _parts(self) -> tuple[ReplayBuffer, Portion]:
        found: tuple[ReplayBuffer, Portion] = _held(self._made)
        return found

    def about(self) -> dict[str, Any]:
        """Return what handles remember, and what the last checkpoint holds."""
        buffer, _ = self._parts
        counts = {"rows": len(buffer), "write_count": buffer.write_count, "era": self._era}
        return {**_describe(buffer), **self._saved, **counts}

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer, or read a property; what it returns travels as a parcel."""
        return Parcel(_call(self._parts[0], name, args, kwargs))

    def apply(self, function: Callable[..., Any], *args: Any) -> Parcel:
        """Call a function with the buffer."""
        return Parcel(function(self._parts[0], *args))

    def write(
        self, waited_s: float, timeout_s: float | None, name: str, data: Any, kwargs: dict[str, Any]
    ) -> Parcel | Again:
        """Call a method of the buffer that writes rows, and may wait for room, for one turn.

        Args:
            waited_s: how long it has waited before.
            timeout_s: longest wait of all turns together; None where the buffer waits for nobody.
            name: the method.
            data: the rows.
            kwargs: its other arguments.

        Returns:
            What it returned, as a parcel; `AGAIN` asks to be called again.
        """
        buffer = self._parts[0]
        found = take_turn(buffer, lambda **late: _call(buffer, name, (data,), {**kwargs, **late}), timeout_s, waited_s)
        return AGAIN if found is AGAIN else Parcel(found)

    def seat(self) -> int:
        """Return how many were asked for a seat before: handles begin to write at shards one after the other."""
        return next(self._seats)

    def drawable(self) -> int:
        """Return how many rows can be drawn."""
        return self._parts[1].drawable

    def offer(self, rows: int, max_age: int | None = None, newest: int | None = None) -> tuple[Any, ...]:
        """Draw rows, and say what the shard weighs; see `Portion`."""
        return tuple(self._parts[1].offer(rows, max_age, newest))

    def take(self, number: int, rows: int) -> Parcel | None:
        """Return rows of an offer; see `Portion`."""
        found = self._parts[1].take(number, rows)
        return None if found is None else Parcel(found)

    def take_and_offer(self, number: int, rows: int, again: int) -> Parcel:
        """Return rows of an offer (None for none of them), and the next offer, of `again` rows."""
        portion = self._parts[1]
        return Parcel((portion.take(number, rows) if rows else None, tuple(portion.offer(again))))

    def save(self, path: str) -> dict[str, Any]:
        """Save the buffer; return how many rows the checkpoint holds, and how many were written before it."""
        with self._saving:
            rows, written = save_counted(self._parts[0], path)
            if path == self._plan.path:
                self._saved = {"saved_rows": rows, "saved_write_count": written, "save_error": None}
            return {"rows": rows, "write_count": written}

    def load(self, path: str) -> None:
        """Restore what `save` saved."""
        self._parts[0].loads(path)

    def _keep_saving(self, every_s: float) -> None:
        buffer, path = self._parts[0], str(self._plan.path)
        saved = written(buffer)
        while True:
            time.sleep(every_s)
            now = written(buffer)
            if now == saved and self._saved["save_error"] is None:
                continue
            try:
                self.save(path)
                saved = now
            except Exception as error:  # noqa: BLE001 (the next attempt may succeed; `report` tells)
                self._saved = {**self._saved, "save_error": f"{type(error).__name__}: {error}"}


def _restarted() -> bool:
    """Whether Ray has restarted this actor."""
    context = require("ray", "ray").get_runtime_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own answer asks an older name of Ray, which warns
        return bool(context.was_current_actor_reconstructed)


def _attempt(make: Callable[[], Any]) -> Any:
    """Return what is made, or why it could not be."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (raised by the next call)
        return error


def _held(made: Any) -> Any:
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
    }


def _call(buffer: ReplayBuffer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "__getitem__":
        return read_own(buffer, *args)
    found = getattr(buffer, name)
    result = found(*args, **kwargs) if callable(found) else found
    return None if result is buffer else result
