"""The schema of a fleet: fixed once, by the first rows that are stored in any shard; the others compare with it.

A shard asks the actor of the fleet when it stores its first rows, and never again. It stores them under the lock of its
buffer, *claims* their schema, and gives the lock back when it knows the answer: the actor returns the schema that is
fixed, which is the claimed one if there was none. If it is another one, the shard removes the rows, sets its storage up
with the schema of the fleet, and stores them again, where they are cast or raise as in a single buffer. No reader meets
rows of another schema, a write that fails claims nothing, and a shard that dies in between blocks no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar, final

from ostinato._optional import require
from ostinato.buffers.portion import has_fields, lay_out, lock_of, remove_schema
from ostinato.distributed.deadlines import POLL_S
from ostinato.distributed.ray_client import RETRY, Retry, ray, short_message
from ostinato.errors import LostBufferError, NoAnswerError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers import ReplayBuffer
    from ostinato.core.rows import Schema


_ASK_S = 10.0
"""How long the actor of the fleet waits for the schemas of the shards, after it was restarted."""
_CHECK_S = 0.05
_CLAIM_TIMEOUT_S = 20.0
"""How long a shard waits for the actor of the fleet with its first rows; more than `_ASK_S`."""
_MAX_ATTEMPTS = 16
"""Attempts to store first rows that may fail because the schema of the fleet changes in between."""

_T = TypeVar("_T")


def show_schema(schema: Schema) -> str:
    """Return the fields of a schema, sorted, for messages."""
    return ", ".join(sorted(map(str, (*schema.leaves, *schema.objects))))


def _alike(one: Schema, other: Schema) -> bool:
    """Return whether rows of two schemas can be in one batch: dicts and TensorDicts of the same fields can."""
    return one == other or (
        {one.kind, other.kind} == {"dict", "tensordict"}
        and set(one.leaves) == set(other.leaves)
        and set(one.objects) == set(other.objects)
    )


# -- in the actor of the fleet ----------------------------------------------------------------------------------------


class FleetSchema:
    """The schema that is fixed, if any. Its methods are coroutines of one thread.

    Schemas are pickled: the actor compares none of them, and imports no class of the user. It asks the shards when it
    is needed first, so that a restarted actor knows what they hold.

    Args:
        shards: The actors of the shards.
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = list(shards)
        self._fixed: bytes | None = None
        self._asked = False
        self._asking = asyncio.Lock()
        self._claims = 0
        self._claiming: set[int] = set()

    async def schema(self) -> bytes | None:
        """Return the schema of the fleet; None if none is fixed."""
        await self._ask_once()
        return self._fixed

    async def claim_schema(self, shard: int, schema: bytes) -> bytes:
        """Fix the schema of rows that a shard has stored, unless one is fixed; return the one that is fixed."""
        self._claiming.add(shard)
        try:
            await self._ask_once()
        finally:
            self._claiming.discard(shard)
        self._claims += 1
        if self._fixed is None:
            self._fixed = schema
        return self._fixed

    async def free_schema(self) -> bool:
        """Forget the schema if no shard holds it; return whether none is fixed now.

        It stays if a shard does not answer, since this may hold rows.
        """
        await self._ask_once()
        async with self._asking:
            claims = self._claims
            found, silent = await self._held()
            if not found and not silent and self._claims == claims:
                self._fixed = None
            return self._fixed is None

    async def _ask_once(self) -> None:
        if self._asked:
            return
        async with self._asking:
            if not self._asked:
                found, _ = await self._held()
                self._fixed = found[0] if found and self._fixed is None else self._fixed
                self._asked = True

    async def _held(self) -> tuple[list[bytes], list[int]]:
        """Return the schemas that shards hold, those that were compared before first, and the shards without answer.

        A shard that claims a schema meanwhile says so itself: it may be starting, and answer nothing until it is done.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + _ASK_S
        calls = {i: asyncio.ensure_future(_held_by(shard)) for i, shard in enumerate(self._shards)}
        waiting = set(calls)
        while waiting and clock() < end:
            await asyncio.wait([calls[i] for i in waiting], timeout=_CHECK_S)
            waiting = {i for i in waiting if not calls[i].done() and i not in self._claiming}
        answers = {i: call.result() for i, call in calls.items() if call.done()}
        silent = [i for i in calls if i not in self._claiming and answers.get(i) is None]
        held = [answer for answer in answers.values() if answer is not None]
        return [schema for _, schema in sorted(held, reverse=True) if schema], silent


async def _held_by(shard: Any) -> tuple[bool, bytes] | None:
    """Return whether the schema of a shard was compared, and the schema; None if it does not answer."""
    try:
        settled, schema = await shard.held_schema.remote()
    except Exception:  # noqa: BLE001 (its rows are lost, or it says so when it returns)
        return None
    return settled, schema


# -- in the shards ----------------------------------------------------------------------------------------------------


@final
class FleetSchemaClient:
    """Asks the actor of the fleet.

    Args:
        shard: Number of the shard.
        find: Returns the handle of the actor.
    """

    def __init__(self, shard: int, find: Callable[[], Any]) -> None:
        self._shard = shard
        self._find = find

    def current(self) -> Schema | None:
        """Return the schema of the fleet; None if none is fixed.

        Raises:
            LostBufferError: The actor is gone, or does not answer.
        """
        found = self._get(lambda fleet: fleet.schema.remote())
        return None if found is None else _load(found)

    def claim(self, schema: Schema) -> Schema:
        """Fix the schema of rows that are stored, unless one is fixed; return the one that is fixed.

        Raises:
            LostBufferError: The actor is gone, or does not answer.
        """
        mine = dump_schema(schema)
        found = self._get(lambda fleet: fleet.claim_schema.remote(self._shard, mine))
        return schema if found == mine else _load(found)

    def free(self) -> None:
        """Let the schema go if no shard holds it. Does not wait."""
        with contextlib.suppress(ValueError):  # there is no actor that could know a schema
            self._find().free_schema.remote()

    def _get(self, call: Callable[[Any], Any]) -> Any:
        known = ray().exceptions
        try:
            return ray().get(call(self._find()), timeout=_CLAIM_TIMEOUT_S)
        except (known.RayError, ValueError) as error:
            late = isinstance(error, known.GetTimeoutError)
            reason = f"has not answered for {_CLAIM_TIMEOUT_S:g} s" if late else f"is gone ({short_message(error)})"
            msg = (
                f"the actor of the fleet {reason}, so that shard {self._shard} cannot compare its first rows with "
                "those of the others: nothing is stored"
            )
            raise (NoAnswerError if late else LostBufferError)(msg) from error


def dump_schema(schema: Schema) -> bytes:
    """Return a schema as bytes, with classes of the user's main module by value."""
    dumped: bytes = require("ray.cloudpickle", "ray").dumps(schema)
    return dumped


def _load(schema: bytes) -> Schema:
    loaded: Schema = require("ray.cloudpickle", "ray").loads(schema)
    return loaded


@final
class ShardSchema:
    """Compares the first rows of a shard with the schema of the fleet. Thread-safe.

    A storage without fields (`ListStorage`) takes any rows, as it does in a single buffer: nothing is compared.

    Args:
        buffer: The shard.
        register: Where to ask.
    """

    def __init__(self, buffer: ReplayBuffer, register: FleetSchemaClient) -> None:
        self._buffer = buffer
        self._register = register
        self._first = threading.Lock()
        self.settled = not has_fields(buffer)
        """Whether the rows are known to have the schema of the fleet: nothing is asked then."""
        self._loaded = buffer.storage.schema is not None
        """Whether the storage has a schema of its own, even without rows: that of a checkpoint, or of its tensors."""

    def held(self) -> Schema | None:
        """Return the schema of the rows; None if there never were any since the schema was free.

        Waits while first rows are compared, which may have to go again.
        """
        with lock_of(self._buffer):
            return self._buffer.storage.schema if self.settled or self._has_schema else None

    @property
    def _has_schema(self) -> bool:
        return self._loaded or len(self._buffer) > 0

    def write(self, write: Callable[[], _T]) -> _T | Retry:
        """Call `write`, which stores rows, so that they have the schema of the fleet; return its result.

        Raises:
            SchemaError: The rows do not have it; nothing is stored.
            LostBufferError: The actor of the fleet is gone, or does not answer; nothing is stored.
        """
        try:
            return self._write(write) if self.settled else self._write_first(write)
        except SchemaError as error:
            schema = self._buffer.storage.schema
            if schema is None:
                raise
            msg = f"{error}; the shards hold rows of the fields {show_schema(schema)}"
            raise type(error)(msg) from error

    def _write(self, write: Callable[[], _T]) -> _T | Retry:
        """Store rows of a schema that was compared; `RETRY` if the shard was reset meanwhile, and they differ now."""
        found = write()
        return found if self._confirm() else RETRY

    def _write_first(self, write: Callable[[], _T]) -> _T | Retry:
        if not self._first.acquire(timeout=POLL_S):
            return RETRY
        try:
            for _ in range(_MAX_ATTEMPTS):
                if self.settled or self._compare_loaded():
                    return self._write(write)
                self._adopt(self._register.current())
                with lock_of(self._buffer):
                    found = write()
                    if not len(self._buffer) or self._claim_first():
                        return found
            msg = f"the schema of the fleet changed {_MAX_ATTEMPTS} times while these rows were written: write again"
            raise SchemaError(msg)
        finally:
            self._first.release()

    def _compare_loaded(self) -> bool:
        """Compare rows that were loaded when the actor of the fleet did not answer, or when the shard was made.

        Returns:
            Whether there are such rows.

        Raises:
            SchemaError: They differ.
        """
        with lock_of(self._buffer):
            if not self._has_schema:
                return False
            mine, fixed = self._compare()
        if mine is not None and fixed is not None and not self.settled:
            _raise_other(mine, fixed, "this shard was loaded with")
        return self.settled

    def _adopt(self, fixed: Schema | None) -> None:
        """Set an empty storage up with the schema of the fleet, or with none."""
        mine = self._buffer.storage.schema
        if mine == fixed:
            return
        if mine is not None:
            remove_schema(self._buffer)
        if fixed is None:
            return
        lay_out(self._buffer, fixed)
        mine = self._buffer.storage.schema
        if mine is not None and not _alike(mine, fixed):
            _raise_other(mine, fixed, "the storage of this shard was made with")

    def prepare(self) -> None:
        """Set an empty storage up with the schema of the fleet, if there is one, before rows are loaded."""
        if not self.settled and not self._has_schema:
            self._adopt(self._register.current())

    def confirm(self, source: str) -> None:
        """Compare rows that are stored already; they are removed if they differ.

        Args:
            source: Where they come from, for the message.

        Raises:
            SchemaError: They differ.
            LostBufferError: The actor of the fleet does not answer; the rows stay, and are compared again later.
        """
        with lock_of(self._buffer):
            self._loaded = self._buffer.storage.schema is not None
            if self.settled or not self._loaded:
                return
            mine, fixed = self._compare()
            if not self.settled:
                remove_schema(self._buffer)
                self._loaded = False
        if mine is not None and fixed is not None and not self.settled:
            _raise_other(mine, fixed, f"the rows {source} were removed: they have")

    def _confirm(self) -> bool:
        """Compare rows that were stored while the shard was reset; return whether they stay."""
        if not self.settled:
            with lock_of(self._buffer):
                return not len(self._buffer) or self._claim()
        return True

    def _claim_first(self) -> bool:
        """Do `_claim`; rows that cannot be compared are removed, too."""
        try:
            return self._claim()
        except BaseException:
            remove_schema(self._buffer)
            self._register.free()  # the claim may arrive later
            raise

    def _claim(self) -> bool:
        """Compare rows just stored; remove them, and return False, if they differ. Under the lock of the buffer."""
        self._compare()
        if not self.settled:
            remove_schema(self._buffer)
        return self.settled

    def _compare(self) -> tuple[Schema | None, Schema | None]:
        """Compare the rows stored, and return their schema and that of the fleet. Under the lock of the buffer."""
        mine = self._buffer.storage.schema
        if mine is None:
            self.settled = not has_fields(self._buffer)
            return None, None
        fixed = self._register.claim(mine)
        self.settled = _alike(mine, fixed)
        return mine, fixed

    def reset(self) -> None:
        """Remove all rows; the next ones are compared again. The memory stays until the schema is known."""
        with lock_of(self._buffer):
            self._buffer.empty()
            self.settled, self._loaded = not has_fields(self._buffer), False

    def release(self) -> None:
        """Drop the schema of an empty storage whose schema is not confirmed, and its memory."""
        with self._first, lock_of(self._buffer):
            if not self.settled and not self._has_schema:
                remove_schema(self._buffer)


def _raise_other(mine: Schema, fixed: Schema, what: str) -> None:
    msg = f"{what} the fields {show_schema(mine)}, and the shards hold rows of the fields {show_schema(fixed)}"
    raise SchemaError(msg)
