"""The schema of a fleet: which first rows fix it, and what becomes of the others; without Ray."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import TYPE_CHECKING, Any, final

import pytest
import torch

from ostinato import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from ostinato.distributed import fleet_schema
from ostinato.distributed.fleet_schema import FleetSchema, ShardSchema
from ostinato.distributed.ray_client import RETRY
from ostinato.errors import LostBufferError, SchemaError, StorageMemoryError, UsageError
from ostinato.writers import ImmutableDatasetWriter

from .coroutines import in_loop

if TYPE_CHECKING:
    from ostinato.core.rows import Schema

FLOATS, DOUBLES = {"obs": torch.rand(4)}, {"obs": torch.rand(4, dtype=torch.float64)}


@final
class Register:
    """What the actor of a fleet does, in this process."""

    def __init__(self) -> None:
        self.fixed: Schema | None = None
        self.fails = False
        self.asked = self.freed = self.claims = 0
        self._lock = threading.Lock()

    def current(self) -> Schema | None:
        self.asked += 1
        return self.fixed

    def claim(self, schema: Schema) -> Schema:
        with self._lock:
            self.asked += 1
            self.claims += 1
            if self.fails:
                msg = "no answer"
                raise LostBufferError(msg)
            self.fixed = self.fixed or schema
            return self.fixed

    def free(self) -> None:
        self.freed += 1

    def free_unless(self, claims: int) -> None:
        """Let the schema go, unless there were more claims meanwhile."""
        with self._lock:
            if self.claims == claims:
                self.fixed = None


@final
class Shard:
    """A buffer and its schema."""

    def __init__(self, register: Register, storage: Any = None, **options: Any) -> None:
        made = LazyTensorStorage(100) if storage is None else storage
        self.buffer = ReplayBuffer(storage=made, batch_size=4, **options)
        self.schema = ShardSchema(self.buffer, register)  # type: ignore[arg-type]

    def write(self, data: Any) -> Any:
        return self.schema.write(lambda: self.buffer.extend(data))


@pytest.fixture
def register() -> Register:
    return Register()


def test_the_first_rows_fix_the_schema_and_other_shards_cast_to_it(register):
    first, second = Shard(register), Shard(register)
    first.write({"obs": torch.rand(0)})
    assert register.fixed is None, "no rows fix nothing"
    assert not first.schema.settled
    first.write(FLOATS)
    second.write(DOUBLES)
    assert torch.equal(second.buffer[:]["obs"], DOUBLES["obs"].float())
    asked = register.asked
    for _ in range(5):
        second.write(FLOATS)
    assert register.asked == asked, "once a shard has the schema, it asks no more"
    any_rows = Shard(register, ListStorage(100))
    assert any_rows.schema.settled
    any_rows.write(["a", torch.zeros(2)])
    assert register.asked == asked


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_the_loser_of_a_race_stores_its_rows_again_with_the_schema_of_the_fleet(register, storage):
    other, shard = Shard(register), Shard(register, storage(100))

    def write() -> Any:
        if register.fixed is None:
            other.write(FLOATS)  # after the shard has asked, before it claims
        return shard.buffer.extend(DOUBLES)

    found: Any = shard.schema.write(write)
    assert found.tolist() == [0, 1, 2, 3]
    assert shard.buffer[:]["obs"].dtype is torch.float32
    assert len(shard.buffer) == shard.buffer.write_count == 4


def test_first_rows_that_cannot_be_stored_leave_the_schema_free(register):
    with pytest.raises(StorageMemoryError):
        Shard(register, LazyTensorStorage(10**14)).write({"obs": torch.rand(4, 1000)})
    with pytest.raises(UsageError):
        Shard(register, writer=ImmutableDatasetWriter()).write(FLOATS)
    assert register.fixed is None
    shard = Shard(register)
    shard.write(DOUBLES)
    assert shard.buffer[:]["obs"].dtype is torch.float64


def test_rows_of_which_the_fleet_does_not_hear_are_not_stored(register):
    shard = Shard(register)
    register.fails = True
    with pytest.raises(LostBufferError):
        shard.write(FLOATS)
    assert len(shard.buffer) == 0
    assert register.freed == 1  # the claim may have arrived
    register.fails = False
    shard.write(DOUBLES)
    assert shard.buffer[:]["obs"].dtype is torch.float64


def test_a_write_that_a_reset_meets_is_compared_again(register):
    shard = Shard(register)
    shard.write(FLOATS)

    def write() -> Any:
        shard.schema.reset()
        shard.schema.release()
        return shard.buffer.extend({"other": torch.rand(4)})

    assert shard.schema.write(write) is RETRY
    assert len(shard.buffer) == 0
    with pytest.raises(SchemaError):
        shard.write({"other": torch.rand(4)})


# -- the part of the actor --------------------------------------------------------------------------------------------


@final
class Remote:
    """A shard as the actor of the fleet calls it."""

    def __init__(self, schema: str | None = None, *, settled: bool = True, delay_s: float = 0.0) -> None:
        self.schema, self.settled, self.delay_s = schema, settled, delay_s
        self.dead = False
        self.held_schema = self

    async def remote(self) -> tuple[bool, bytes]:
        await asyncio.sleep(self.delay_s)
        if self.dead:
            raise RuntimeError
        return self.settled, b"" if self.schema is None else pickle.dumps(self.schema)


S, T = pickle.dumps("S"), pickle.dumps("T")


@in_loop
async def test_one_claim_wins_over_those_of_other_shards():
    fleet = FleetSchema([Remote(), Remote()])
    assert list(await asyncio.gather(fleet.claim_schema(0, S), fleet.claim_schema(1, T))) == [S, S]
    assert await fleet.schema() == S
    restarted = FleetSchema([Remote(), Remote("T", settled=False), Remote("S")])
    assert await restarted.schema() == S  # that of rows that were compared
    assert await restarted.claim_schema(0, T) == S


@in_loop
async def test_silent_shards_delay_the_first_answer_only_for_a_while():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_schema, "_ASK_S", 60.0)
        fleet = FleetSchema([Remote(delay_s=1000.0), Remote()])
        assert await asyncio.wait_for(fleet.claim_schema(0, S), 30.0) == S  # the shard that claims is not waited for
        patch.setattr(fleet_schema, "_ASK_S", 0.2)
        fleet = FleetSchema([Remote(delay_s=1000.0), Remote("S")])
        assert await asyncio.wait_for(fleet.schema(), 30.0) == S


@in_loop
async def test_the_schema_is_free_only_if_no_shard_holds_it():
    shards = [Remote("S"), Remote()]
    fleet = FleetSchema(shards)
    assert not await fleet.free_schema()
    shards[0].schema = None
    shards[1].dead = True  # it may hold rows
    assert await fleet.schema() == S
    assert not await fleet.free_schema()
    shards[1].dead = False
    shards[0].delay_s = 0.1
    freed, claimed = await asyncio.gather(fleet.free_schema(), fleet.claim_schema(1, T))
    assert not freed  # a write came in between
    assert claimed == S
    assert await fleet.free_schema()
    assert await fleet.schema() is None
    assert await fleet.claim_schema(1, T) == T
