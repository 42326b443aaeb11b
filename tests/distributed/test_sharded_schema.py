"""One schema for all shards, shards that are emptied, reset and loaded alone, and checkpoints that fail."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage, RateLimiter, ShardedReplayBuffer
from ostinato.distributed.checkpoints import begin_saving
from ostinato.errors import CheckpointError, KeyMissingError, LostBufferError, OptionError, SchemaError

from .handles import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def rows(**fields: Any) -> TensorDict:
    return TensorDict(fields, [20])


FLOATS, DOUBLES = rows(obs=torch.rand(20)), rows(obs=torch.rand(20, dtype=torch.float64))
OTHER = rows(other=torch.rand(20))

pytestmark = pytest.mark.filterwarnings("ignore:shard . of:RuntimeWarning")


def make(shards: int, **options: Any) -> ShardedReplayBuffer:
    storage = partial(LazyTensorStorage, 1000)
    return ShardedReplayBuffer(shards, storage=storage, batch_size=16, remote_config={"num_cpus": 0}, **options)


def rows_of(rb: ShardedReplayBuffer) -> list[int]:
    return [one.rows for one in rb.report()]


def test_a_worker_with_other_rows_does_not_spoil_the_fleet(shards):
    shards.pinned(0).extend(FLOATS)
    with pytest.raises(SchemaError, match="were removed"):
        shards.apply(lambda buffer: None if len(buffer) else buffer.extend(rows(obs=torch.zeros(20, 3))))
    shards.pinned(1).extend(DOUBLES)
    with pytest.raises(SchemaError, match=r"'obs' must be float32.*the shards hold rows of the fields 'obs': float32"):
        shards.pinned(2).extend(rows(obs=torch.rand(20, 3)))
    with pytest.raises(KeyMissingError, match=r"other.*the shards hold rows of the fields 'obs': float32"):
        shards.pinned(2).extend(OTHER)
    assert rows_of(shards) == [20, 20, 0]
    assert {shards.sample(50)["obs"].dtype for _ in range(5)} == {torch.float32}
    shards.empty()
    with pytest.raises(SchemaError):
        shards.extend(OTHER)
    shards.reset()
    shards.extend(OTHER)
    assert "obs" not in shards.sample(4)


def test_single_shards(shards, tmp_path):
    for i in range(3):
        shards.pinned(i).extend(FLOATS)
    shards.dumps(tmp_path)
    shards.empty(1)
    assert rows_of(shards) == [20, 0, 20]
    shards.reset(0)
    assert rows_of(shards) == [0, 0, 20]
    for i in (0, 1):
        shards.pinned(i).extend(DOUBLES)
        with pytest.raises(SchemaError):
            shards.pinned(i).extend(OTHER)
    assert shards.sample(100)["obs"].dtype is torch.float32
    shards.empty()
    shards.loads(tmp_path, shard=2)
    assert rows_of(shards) == [0, 0, 20]
    for call in (shards.empty, shards.reset, partial(shards.loads, tmp_path)):
        with pytest.raises(OptionError, match="shard must be"):
            call(3)


def test_restarted_actors_keep_the_schema(shards, cluster):
    shards.checkpoint()  # of no rows
    shards.pinned(0).extend(FLOATS)
    shards.pinned(1).extend(FLOATS)
    cluster.kill(shards._fleet.actor, no_restart=False)
    with pytest.raises(SchemaError):
        shards.pinned(2).extend(OTHER)
    cluster.kill(shards.actors[1], no_restart=False)
    until(lambda: rows_of(shards) == [20, 0, 0] and not shards.missing)
    writer = shards.pinned(1)
    with pytest.raises(SchemaError):
        writer.extend(OTHER)
    writer.extend(DOUBLES)
    assert shards.sample(50)["obs"].dtype is torch.float32


def test_checkpoints_that_contradict_each_other_change_nothing(shards, tmp_path):
    for name, first in {"one": FLOATS, "two": DOUBLES}.items():
        shards.reset()
        for i in range(3):
            shards.pinned(i).extend(first)
        shards.dumps(tmp_path / name)
    part = "shard-0001-of-0003"
    shutil.copytree(tmp_path / "two" / part, tmp_path / "one" / part, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="obs"):
        shards.loads(tmp_path / "one")
    assert rows_of(shards) == [20, 20, 20]
    shards.reset()
    with pytest.raises(CheckpointError, match=r"shards 0 and 1 .*'obs': float32\[\].*'obs': float64"):
        shards.loads(tmp_path / "one")
    assert rows_of(shards) == [0, 0, 0]
    (tmp_path / "two" / "fleet.json").unlink()
    shards.loads(tmp_path / "two")
    with pytest.raises(SchemaError):
        shards.extend(OTHER)


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found if "periodic checkpoints" in str(one.message)]


def replaced(part: Path) -> bool:
    """Replace a checkpoint by a file, unless it is being saved."""
    with contextlib.suppress(OSError):
        shutil.rmtree(part)
        part.write_text("no directory")
    return part.is_file()


def test_checkpoints_that_fail(cluster, tmp_path):
    directory = tmp_path / "saved"
    part = directory / "shard-0001-of-0002"
    limiter = RateLimiter(samples_per_insert=2.0, min_size_to_sample=5, error_buffer=1000.0)
    saving: dict[str, Any] = {"checkpoint_dir": directory, "rate_limiter": limiter}
    with make(2, **saving, checkpoint_every_s=0.2, max_save_failures=2) as rb:
        first, second = rb.pinned(0), rb.pinned(1)
        first.extend(FLOATS)
        second.extend(FLOATS)
        rb.sample()
        until(part.exists)
        until(lambda: replaced(part))
        second.extend(FLOATS[:2])
        until(lambda: rb.clients(1)[0].report()[1].save_failures >= 2)
        with pytest.raises(CheckpointError, match="shard 1 failed"):
            second.extend(FLOATS[:2])
        until(lambda: bool(warnings_of(lambda: first.extend(FLOATS[:1]))))
        reader = rb.clients(1)[0]
        assert len(warnings_of(lambda: [reader.sample() for _ in range(3)])) == 1
        assert len(rb.clients(1)[0]) == rb.write_count  # what was refused is not stored
        assert "not a directory" in str(rb.report()[1].save_error).lower()  # by whoever finds it first
        part.unlink()
        until(lambda: rb.report()[1].save_failures == 0)
        second.extend(FLOATS[:2])
        rb.checkpoint()
        counts, stored = rb.limiter_counts, len(rb)
        begin_saving(part)  # as an actor does that has replaced this one, because its machine could not be reached
        with pytest.raises(CheckpointError):
            rb.checkpoint()
    with make(2, **saving, resume=True) as rb:
        assert len(rb) == stored
        assert rb.limiter_counts == counts
        rb.sample()
        rb.loads(directory)
        assert rb.limiter_counts == counts
    with pytest.raises(LostBufferError):
        rb.reset()
