"""One schema for all shards, shards that are emptied, reset and loaded alone, and checkpoints that fail."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, RateLimiter, ShardedReplayBuffer
from ostinato.distributed.checkpoints import begin_saving
from ostinato.errors import CheckpointError, KeyMissingError, LostBufferError, OptionError, SchemaError
from ostinato.writers import RoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FLOATS, DOUBLES = {"obs": torch.rand(20)}, {"obs": torch.rand(20, dtype=torch.float64)}
LIMITER = RateLimiter(samples_per_insert=2.0, min_size_to_sample=5, error_buffer=1000.0)

pytestmark = pytest.mark.filterwarnings("ignore:shard . of:RuntimeWarning")


def make(shards: int = 2, **options: Any) -> ShardedReplayBuffer:
    storage = partial(LazyTensorStorage, 1000)
    return ShardedReplayBuffer(shards, storage=storage, batch_size=16, remote_config={"num_cpus": 0.1}, **options)


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    del cluster
    with make(3, writer=partial(RoundRobinWriter, track_generations=True)) as rb:
        yield rb


@pytest.fixture
def rb(fleet: ShardedReplayBuffer) -> ShardedReplayBuffer:
    fleet.reset()
    return fleet


def rows_of(rb: ShardedReplayBuffer) -> list[int]:
    return [one.rows for one in rb.report()]


def totals_of(rb: ShardedReplayBuffer) -> tuple[int, int]:
    """Return the rows that the rate limiter has counted: written and drawn."""
    import ray

    found: tuple[int, int] = ray.get(rb._connection.fleet.actor.totals.remote())
    return found


def eventually(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60.0
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_a_worker_with_other_rows_does_not_spoil_the_fleet(rb: ShardedReplayBuffer) -> None:
    rb.pinned(0).extend(FLOATS)
    rb.pinned(1).extend(DOUBLES)
    with pytest.raises(SchemaError, match=r"'obs' must be float32.*the shards hold rows of the fields 'obs': float32"):
        rb.pinned(2).extend({"obs": torch.rand(20, 3)})
    with pytest.raises(KeyMissingError, match=r"other.*the shards hold rows of the fields 'obs': float32"):
        rb.pinned(2).extend({"other": torch.rand(20)})
    assert rows_of(rb) == [20, 20, 0]
    assert {rb.sample(50)["obs"].dtype for _ in range(5)} == {torch.float32}
    rb.empty()
    with pytest.raises(SchemaError):
        rb.extend({"other": torch.rand(20)})
    rb.reset()
    rb.extend({"other": torch.rand(20)})
    assert list(rb.sample(4)) == ["other"]


def test_first_rows_that_race(rb: ShardedReplayBuffer) -> None:
    rows = [FLOATS, DOUBLES, {"obs": torch.rand(20, 2)}]
    results: list[Any] = [None] * 6
    start = threading.Barrier(len(results))

    def write(i: int) -> None:
        writer = rb.pinned(i % 3)
        start.wait()
        try:
            results[i] = writer.extend(rows[(i + i // 3) % 3])
        except SchemaError as error:
            results[i] = error

    threads = [threading.Thread(target=write, args=(i,)) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = [one for one in results if not isinstance(one, SchemaError)]
    assert 0 < len(stored) < len(results)
    assert sum(rows_of(rb)) == 20 * len(stored)
    assert len({one.schema for one in rb.report()} - {None}) == 1
    rb.sample(100)


def test_single_shards(rb: ShardedReplayBuffer, tmp_path: Path) -> None:
    for i in range(3):
        rb.pinned(i).extend(FLOATS)
    rb.dumps(tmp_path)
    rb.empty(1)
    assert rows_of(rb) == [20, 0, 20]
    rb.reset(0)
    assert rows_of(rb) == [0, 0, 20]
    for i in (0, 1):
        rb.pinned(i).extend(DOUBLES)
        with pytest.raises(SchemaError):
            rb.pinned(i).extend({"other": torch.rand(20)})
    assert rb.sample(100)["obs"].dtype is torch.float32
    rb.empty()
    rb.loads(tmp_path, shard=2)
    assert rows_of(rb) == [0, 0, 20]
    for call in (rb.empty, rb.reset, partial(rb.loads, tmp_path)):
        with pytest.raises(OptionError, match="shard must be"):
            call(3)


def test_a_function_that_stores_other_rows_raises(rb: ShardedReplayBuffer) -> None:
    rb.pinned(0).extend(FLOATS)
    with pytest.raises(SchemaError, match="were removed"):
        rb.apply(lambda buffer: None if len(buffer) else buffer.extend({"obs": torch.zeros(3, 3)}))
    assert rows_of(rb) == [20, 0, 0]


def test_restarted_actors_keep_the_schema(rb: ShardedReplayBuffer, cluster: Any) -> None:
    rb.pinned(0).extend(FLOATS)
    rb.pinned(1).extend(FLOATS)
    cluster.kill(rb._connection.fleet.actor, no_restart=False)
    with pytest.raises(SchemaError):
        rb.pinned(2).extend({"other": torch.rand(20)})
    cluster.kill(rb.actors[1], no_restart=False)
    eventually(lambda: rows_of(rb) == [20, 0, 0] and not rb.missing, "the shard is not back")
    writer = rb.pinned(1)
    with pytest.raises(SchemaError):
        writer.extend({"other": torch.rand(20)})
    writer.extend(DOUBLES)
    assert rb.sample(50)["obs"].dtype is torch.float32


def test_checkpoints_that_contradict_each_other_change_nothing(rb: ShardedReplayBuffer, tmp_path: Path) -> None:
    for name, rows in {"one": FLOATS, "two": DOUBLES}.items():
        rb.reset()
        for i in range(3):
            rb.pinned(i).extend(rows)
        rb.dumps(tmp_path / name)
    part = "shard-0001-of-0003"
    shutil.copytree(tmp_path / "two" / part, tmp_path / "one" / part, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="obs"):
        rb.loads(tmp_path / "one")
    assert rows_of(rb) == [20, 20, 20]
    rb.reset()
    with pytest.raises(CheckpointError, match=r"shards 0 and 1 .*'obs': float32\[\].*'obs': float64"):
        rb.loads(tmp_path / "one")
    assert rows_of(rb) == [0, 0, 0]
    with pytest.raises(CheckpointError, match="shards 0 and 1"):
        make(3, checkpoint_dir=tmp_path / "one", resume=True)
    (tmp_path / "two" / "fleet.json").unlink()  # as in checkpoints of earlier versions
    rb.loads(tmp_path / "two")
    with pytest.raises(SchemaError):
        rb.extend({"other": torch.rand(20)})


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found if "periodic checkpoints" in str(one.message)]


def test_checkpoints_that_fail(cluster: Any, tmp_path: Path) -> None:
    del cluster
    directory = tmp_path / "saved"
    part = directory / "shard-0001-of-0002"
    saving: dict[str, Any] = {"checkpoint_dir": directory, "rate_limiter": LIMITER}
    with make(**saving, checkpoint_every_s=0.2, max_save_failures=2) as rb:
        first, second = rb.pinned(0), rb.pinned(1)
        first.extend(FLOATS)
        second.extend(FLOATS)
        rb.sample()
        eventually(part.exists, "nothing is saved")
        shutil.rmtree(part)
        part.write_text("no directory")
        second.extend({"obs": torch.rand(2)})
        eventually(lambda: rb.clients(1)[0].report()[1].save_failures >= 2, "no failure is counted")
        with pytest.raises(CheckpointError, match="shard 1 failed"):
            second.extend({"obs": torch.rand(2)})
        eventually(lambda: bool(warnings_of(lambda: first.extend({"obs": torch.rand(1)}))), "a writer does not warn")
        reader = rb.clients(1)[0]
        assert len(warnings_of(lambda: [reader.sample() for _ in range(3)])) == 1
        assert len(rb.clients(1)[0]) == rb.write_count  # what was refused is not stored
        assert "not a directory" in str(rb.report()[1].save_error)
        part.unlink()
        eventually(lambda: rb.report()[1].save_failures == 0, "saves do not succeed again")
        second.extend({"obs": torch.rand(2)})
        rb.checkpoint()
        counts, rows = totals_of(rb), len(rb)
        begin_saving(part)  # as an actor does that has replaced this one, because its machine could not be reached
        with pytest.raises(CheckpointError, match="another actor of this shard"):
            rb.checkpoint()
    with make(**saving, resume=True) as rb:
        assert len(rb) == rows
        assert totals_of(rb) == counts
        rb.sample()
        rb.loads(directory)
        assert totals_of(rb) == counts
    with pytest.raises(LostBufferError):
        rb.reset()


def test_options() -> None:
    with pytest.raises(OptionError, match="checkpoint_every_s"):
        make(max_save_failures=3)
    with pytest.raises(OptionError, match="max_save_failures"):
        make(max_save_failures=0, checkpoint_dir="x", checkpoint_every_s=1.0)


def test_rows_that_are_still_there_are_changed_in_their_shards(rb: ShardedReplayBuffer) -> None:
    for i in range(3):
        rb.pinned(i).extend({"id": torch.arange(20) + 100 * i, "value": torch.zeros(20)})
    batch, info = rb.sample(64, return_info=True)
    rb.empty(1)
    present = batch["id"] // 100 != 1
    future = rb.submit_update_if_present(
        index=info["index"], generation=info["index_generation"], patch={"value": batch["id"].float()}
    )
    rb.synchronize()
    assert torch.equal(future.result().updated, present)
    rows = rb.apply(lambda buffer: (buffer[:]["id"], buffer[:]["value"]) if len(buffer) else None)
    for ids, values in filter(None, rows):
        drawn = torch.isin(ids, batch["id"])
        assert torch.equal(values, torch.where(drawn, ids.float(), 0.0))
    rb.submit_update_if_present(index=info["index"], generation=info["index_generation"], patch={"other": batch["id"]})
    with pytest.raises(KeyMissingError, match="other"):
        rb.synchronize()
