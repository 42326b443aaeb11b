"""Shards have the sampling distribution of one big buffer, and survive the death of their actors."""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage, ReplayBuffer, ShardedReplayBuffer
from ostinato.distributed.routing import split_index
from ostinato.errors import (
    CheckpointError,
    LostBufferError,
    OptionError,
    UsageError,
)

from ..stats.chi_square import p_value
from ..unit.buffers.refusals import raises
from .handles import LONG_S, until
from .rows import Calls, Writer, stored, writing

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

SHARDS, CAPACITY, BATCH = 3, 4000, 256
SIZES = [5, 40, 20]
"""Rows of each shard, for tests with unequal shards."""


def rows(first: int, n: int) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + n), "y": torch.rand(n, 3)}, [n])


def fill(rb: ShardedReplayBuffer) -> torch.Tensor:
    """Write rows 0 to 64 to shards of unequal sizes; return their indices."""
    starts = [sum(SIZES[:i]) for i in range(SHARDS)]
    pairs = enumerate(zip(starts, SIZES, strict=True))
    return torch.cat([rb.pinned(i).extend(rows(start, size)) for i, (start, size) in pairs])


def priorities(rb: ShardedReplayBuffer) -> list[torch.Tensor]:
    return rb.apply(lambda buffer: buffer.sampler.priorities)


# -- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"snapshot_age_s": 1e6}])
def test_prioritized_draws_and_weights_are_those_of_one_buffer(shards, cluster, options):
    """With a snapshot those of its time, while another process gives rows another priority."""
    index = fill(shards)
    given = 10 ** (3 * torch.rand(sum(SIZES), dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2)
    given[7] = 0.0
    shards.update_priority(index, given)
    handle = shards._handle(**options)
    batches = []
    for _ in range(30):
        batches.append(handle.sample())
        if "snapshot_age_s" in options:
            cluster.get(shards.actors[1].call.remote("update_priority", torch.arange(40), torch.rand(40)))
    drawn = torch.cat([batch["x"] for batch in batches])
    value = given**0.7
    likely = value * len(drawn) / value.sum() > 5
    counts = torch.bincount(drawn, minlength=sum(SIZES))
    assert counts[7] == 0
    assert p_value(counts[likely].tolist(), value[likely].tolist()) > 1e-4
    expected = (value[drawn] / value[value > 0].min()) ** -0.6
    weights = torch.cat([batch["priority_weight"] for batch in batches])
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0)


def test_a_snapshot_serves_many_batches_until_this_process_changes_rows(shards, cluster):
    index = fill(shards)
    rb = shards._handle(snapshot_age_s=1e6)
    rb.sample()
    rb.sample(17)  # sizes may change within a snapshot
    other = rows(5000, 1000)
    cluster.get(shards.actors[0].call.remote("extend", other))  # as another process does
    assert max(int(rb.sample()["x"].max()) for _ in range(3)) < 65
    pickle.loads(pickle.dumps(rb)).update_priority(index[:64], torch.zeros(64))
    assert set(rb.sample()["x"].tolist()) <= {64, *other["x"].tolist()}
    batches = iter(shards._handle(prefetch=3))
    assert [len(next(batches)) for _ in range(5)] == [BATCH] * 5
    with pytest.raises(OptionError, match="for which batches are prefetched"):
        shards._handle(prefetch=3).sample(7)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_read_deleted_and_written_by_shard(shards):
    """Pickled handles begin at different shards and stay there; a pinned one stays at its shard."""
    index = fill(shards)
    batch, info = shards.sample(return_info=True)
    assert torch.equal(batch["index"], info["index"])
    at = dict(zip(index.tolist(), range(65), strict=True))
    assert [at[i] for i in batch["index"].tolist()] == batch["x"].tolist()
    assert shards[index[5:45]]["x"].tolist() == list(range(5, 45))
    single = shards.pinned(2).add(rows(900, 1)[0])
    assert int(shards[single]["x"]) == 900
    names = {"index": info["index"], "generation": info["index_generation"]}
    future = shards.submit_update_if_present(**names, patch={"y": torch.full((BATCH, 3), 2.0)})
    shards.synchronize()
    assert future.result().updated.all()
    assert set(shards[info["index"][:1]]["y"].flatten().tolist()) == {2.0}
    assert bool(shards.delete(info).all())
    assert not bool(shards.delete(info).any())
    left = {900, *range(65)} - set(batch["x"].tolist())
    assert len(shards) == len(left)
    assert {x for _ in range(3) for x in shards.sample()["x"].tolist()} == left
    homes = []
    for _ in range(SHARDS):
        handle = pickle.loads(pickle.dumps(shards._handle(home=None)))
        owners = [int(split_index(handle.extend(rows(0, 2)))[0][0]) for _ in range(2)]
        assert owners[0] == owners[1]
        homes.append(owners[0])
    assert sorted(homes) == list(range(SHARDS))
    around = shards.pinned(1)._handle(sticky=False)
    assert [int(split_index(around.extend(rows(0, 2)))[0][0]) for _ in range(4)] == [1, 2, 0, 1]
    assert "missing=[]" in repr(around)


# -- checkpoints and killed shards ------------------------------------------------------------------------------------


def test_all_shards_are_saved_and_loaded(shards, tmp_path):
    fill(shards)
    calls: list[Any] = []

    def told(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        calls.append((done, total))

    saves: list[Any] = [
        (shards.checkpoint, 3),
        (partial(shards.dumps, tmp_path), 3),
        (partial(shards.loads, tmp_path), 6),
    ]
    for save, total in saves:
        calls.clear()
        if save is saves[-1][0]:
            shards.empty()
        save(progress=told)
        assert (calls[0], calls[-1]) == ((0, total), (total, total))
        assert calls == sorted(set(calls))
    assert [part.rows for part in shards.report()] == SIZES
    assert sorted(x for part in shards.apply(lambda buffer: buffer[:]["x"].tolist()) for x in part) == list(range(65))
    with pytest.raises(CheckpointError):
        shards.loads(tmp_path / "elsewhere")


def test_a_killed_shard_is_left_out_and_returns_with_its_checkpoint(shards, cluster, tmp_path):
    """Under load, and soon after all shards have loaded a checkpoint."""
    shards.dumps(tmp_path)
    shards.loads(tmp_path)
    calls, end = Calls(LONG_S), time.monotonic() + 100
    writers = [Writer(shards.pinned(i), 10_000 * (i + 1), calls, count=2, pause_s=0.1) for i in range(SHARDS)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with writing(writers):
            until(lambda: min(len(writer.acknowledged) for writer in writers) > 4)
            safe = {number for writer in writers for number in list(writer.acknowledged)}
            assert min(shards.checkpoint()) > 0
            stale = shards.sample()
            for shard in (1, 2):
                cluster.kill(shards.actors[shard], no_restart=False)
            texts: list[str] = []
            while time.monotonic() < end and not (texts and not shards.missing):
                shards.sample()
                texts = [str(one.message) for one in said if "shard 1 of 3" in str(one.message)]
    assert not shards.missing, "they are back"
    assert any("rows are missing" in text or "was restarted" in text for text in texts)
    assert safe <= stored(shards).keys(), "what was acknowledged before the checkpoint is there"
    before = priorities(shards)
    shards.update_priority(stale, torch.full((BATCH,), 123.0))
    after = priorities(shards)
    assert all(torch.equal(before[shard], after[shard]) for shard in (1, 2)), "of an actor that is dead"
    fresh = shards.sample()
    shards.update_priority(fresh, torch.full((BATCH,), 123.0))
    owners, slots = split_index(fresh["index"])
    kept = priorities(shards)
    assert all(float(kept[int(o)][int(s)]) == 123.0 for o, s in zip(owners, slots, strict=True))


def test_one_shard_resumes_without_waiting(cluster, tmp_path):
    """Rows that replaced as many others are saved, too."""
    storage = partial(LazyTensorStorage, 10)
    make = partial(ShardedReplayBuffer, 1, storage=storage, checkpoint_dir=tmp_path)
    options: dict[str, Any] = {"placement": "STRICT_SPREAD", "remote_config": {"num_cpus": 1}, "shard_timeout_s": 5.0}
    with pytest.warns(UserWarning, match="finds 0 of 1 checkpoints"):
        first = make(checkpoint_every_s=0.1, resume=True, **options)

    def saved(value: int) -> bool:
        local = ReplayBuffer(storage=storage())
        with suppress(CheckpointError, FileNotFoundError):  # it is being replaced
            local.loads(tmp_path / "shard-0000-of-0001")
        return len(local) == 4 and int(local[0]["x"]) == value

    for value in (0, 7):
        first.empty()
        first.extend({"x": torch.full((4,), value)})
        until(partial(saved, value))
    assert first.report()[0].saved_write_count == 4
    raises(
        (first.sample, UsageError, "batch_size not specified"),
        (lambda: next(iter(first)), UsageError, "Cannot iterate"),
    )
    first.close()
    raises(
        (lambda: first.sample(3), LostBufferError, r"closed, by close\(\) of this handle"),
        (make, OptionError, "resume=True begins with them"),
    )
    for resume in (True, False):
        with pytest.raises(OptionError, match="another number of shards, such as shard-0000-of-0001"):
            ShardedReplayBuffer(3, storage=storage, checkpoint_dir=tmp_path, resume=resume)
    with make(resume=True) as second:
        assert len(second) == 4
        assert second.sample(8)["x"].tolist() == [7] * 8
