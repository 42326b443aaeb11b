"""Shards have the sampling distribution of one big buffer, and survive the death of their actors."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.distributed.routing import split_index
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    LostBufferError,
    OptionError,
    PriorityError,
    SlotError,
    UsageError,
)

from ..stats.chi_square import p_value

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

SHARDS, CAPACITY, BATCH = 3, 4000, 256
SIZES = [5, 40, 20]
"""Rows of each shard, for tests with unequal shards."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def shards(cluster: Any, directory: Path) -> Iterator[ShardedReplayBuffer]:
    made = ShardedReplayBuffer(
        SHARDS,
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(LazyTensorStorage, CAPACITY),
        sampler=partial(PrioritizedSampler, CAPACITY, 0.7, 0.6, 0.0),
        batch_size=BATCH,
        checkpoint_dir=directory,
        generator=torch.Generator().manual_seed(5),
        shard_timeout_s=120.0,
    )
    yield made
    made.close()


@pytest.fixture
def rb(shards: ShardedReplayBuffer) -> ShardedReplayBuffer:
    """The shards, empty and prioritized."""
    shards.empty()
    shards.apply(_set_sampler, partial(PrioritizedSampler, CAPACITY, 0.7, 0.6, 0.0))
    return shards


def _set_sampler(buffer: Any, make: Any) -> None:
    buffer.set_sampler(make())


def with_depth(rb: ShardedReplayBuffer, depth: int) -> ShardedReplayBuffer:
    """Another handle, with prefetch."""
    return rb._handle(prefetch=depth)


def rows(first: int, n: int, **more: Any) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + n), "y": torch.rand(n, 3), **more}, [n])


def fill(rb: ShardedReplayBuffer) -> torch.Tensor:
    """Write rows 0 to 64 to shards of unequal sizes; return their indices."""
    starts = [sum(SIZES[:i]) for i in range(SHARDS)]
    pairs = enumerate(zip(starts, SIZES, strict=True))
    return torch.cat([rb.pinned(i).extend(rows(start, size)) for i, (start, size) in pairs])


@pytest.mark.parametrize("depth", [0, 2])
def test_uniform_draws_are_those_of_one_buffer(rb: ShardedReplayBuffer, depth: int) -> None:
    rb.apply(_set_sampler, RandomSampler)
    fill(rb)
    handle = with_depth(rb, depth)
    drawn = torch.cat([handle.sample()["x"] for _ in range(60)])
    assert p_value(torch.bincount(drawn, minlength=sum(SIZES)).tolist()) > 1e-4
    assert len(rb) == sum(SIZES)
    same = (drawn.view(60, BATCH)[:, ::2] < SIZES[0]).float().mean()
    assert abs(float(same) - SIZES[0] / sum(SIZES)) < 0.02, "shards are mixed over the positions of a batch"


@pytest.mark.parametrize("depth", [0, 2])
def test_prioritized_draws_and_weights_are_those_of_one_buffer(rb: ShardedReplayBuffer, depth: int) -> None:
    index = fill(rb)
    given = 10 ** (3 * torch.rand(sum(SIZES), dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2)
    given[7] = 0.0
    rb.update_priority(index, given)
    one = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=PrioritizedSampler(100, 0.7, 0.6, 0.0),
        generator=torch.Generator().manual_seed(2),
    )
    one.update_priority(one.extend({"x": torch.arange(sum(SIZES))}), given)
    handle = with_depth(rb, depth)
    batches = [handle.sample() for _ in range(80)]
    drawn = torch.cat([batch["x"] for batch in batches])
    value = given**0.7
    likely = value * len(drawn) / value.sum() > 5
    counts = torch.bincount(drawn, minlength=sum(SIZES))
    assert counts[7] == 0
    assert p_value(counts[likely].tolist(), value[likely].tolist()) > 1e-4
    expected, info = one.sample(4096, return_info=True)
    weights = dict(zip(expected["x"].tolist(), info["priority_weight"].tolist(), strict=True))
    for batch in batches:
        for x, weight in zip(batch["x"].tolist(), batch["priority_weight"].tolist(), strict=True):
            assert weight == pytest.approx(weights.get(x, weight), rel=1e-5)
    least = value[value > 0].min()
    assert torch.allclose(batch["priority_weight"].double(), (value[batch["x"]] / least) ** -0.6, rtol=1e-5)


def test_priorities_reach_their_shard_and_stale_ones_are_dropped(rb: ShardedReplayBuffer) -> None:
    index = fill(rb)
    owners, _ = split_index(index)
    assert owners.bincount().tolist() == SIZES
    rb.update_priority(index, torch.arange(65.0))
    kept = torch.cat(rb.apply(lambda buffer: buffer.sampler.priorities))
    assert torch.equal(kept, torch.arange(65.0, dtype=torch.float64))
    batch = rb.sample()
    batch["td_error"] = torch.full((BATCH,), 70.0)
    rb.pinned(1).extend(rows(1000, CAPACITY))  # every row of shard 1 is replaced
    rb.update_tensordict_priority(batch)
    kept_now = rb.apply(lambda buffer: buffer.sampler.priorities)
    drawn_owner, drawn_slot = split_index(batch["index"])
    assert bool((kept_now[0][drawn_slot[drawn_owner == 0]] == 70.0).all())
    assert not bool((kept_now[1] == 70.0).any())
    assert rb.stats().stale_updates >= int((drawn_owner == 1).sum()) > 0
    with pytest.raises(PriorityError, match="at the positions"):
        rb.update_priority(index, -1.0)
    with pytest.raises(SlotError, match="of no shard"):
        rb.update_priority(torch.tensor([7 << 40]), 1.0)


def test_rows_are_read_by_index(rb: ShardedReplayBuffer) -> None:
    index = fill(rb)
    batch, info = rb.sample(return_info=True)
    assert torch.equal(batch["index"], info["index"])
    at = dict(zip(index.tolist(), range(65), strict=True))
    assert [at[i] for i in batch["index"].tolist()] == batch["x"].tolist()
    assert int(rb[int(index[9])]["x"]) == 9
    assert rb[index[5:45]]["x"].tolist() == list(range(5, 45))
    single = rb.pinned(2).add(rows(900, 1)[0])
    assert single is not None
    assert int(rb[single]["x"]) == 900


def test_writers_share_the_shards(rb: ShardedReplayBuffer) -> None:
    """Pickled handles begin at different shards and stay there; a pinned one stays at its shard."""
    homes = []
    for _ in range(SHARDS):
        handle = rb.pinned(0)._handle(home=None)
        owners = {int(split_index(handle.extend(rows(0, 2)))[0][0]) for _ in range(3)}
        assert len(owners) == 1
        homes.append(owners.pop())
    assert sorted(homes) == list(range(SHARDS))
    around = rb.pinned(1)._handle(sticky=False)
    assert [int(split_index(around.extend(rows(0, 2)))[0][0]) for _ in range(4)] == [1, 2, 0, 1]


def test_empty_shards_and_iteration(rb: ShardedReplayBuffer) -> None:
    assert not rb
    with pytest.raises(EmptyBufferError, match="add rows first"):
        rb.sample()
    index = rb.pinned(1).extend(rows(0, 3))
    assert {int(x) for x in rb.sample()["x"]} == {0, 1, 2}
    rb.update_priority(index, 0.0)
    with pytest.raises(PriorityError, match="none of the 3 rows"):
        rb.sample()
    rb.update_priority(index, 1.0)
    handle = with_depth(rb, 3)
    for number, batch in enumerate(handle):
        assert len(batch["x"]) == BATCH
        if number == 5:
            break
    with pytest.raises(OptionError, match="for which batches are prefetched"):
        handle.sample(7)
    assert len(rb.sample(7)["x"]) == 7


def test_all_shards_are_saved_and_loaded(rb: ShardedReplayBuffer, tmp_path: Path) -> None:
    fill(rb)
    rb.dumps(tmp_path)
    rb.empty()
    rb.loads(tmp_path)
    assert [part.rows for part in rb.report()] == SIZES
    assert sorted(x for part in rb.apply(lambda buffer: buffer[:]["x"].tolist()) for x in part) == list(range(65))
    with pytest.raises(CheckpointError):
        rb.loads(tmp_path / "elsewhere")


class Load:
    """Threads that write to the shards and remember what was acknowledged."""

    def __init__(self, rb: ShardedReplayBuffer) -> None:
        self.known: list[list[int]] = [[] for _ in range(SHARDS)]
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(rb.pinned(i), i)) for i in range(SHARDS)]

    def _write(self, handle: ShardedReplayBuffer, shard: int) -> None:
        try:
            for number in range(CAPACITY // 12 - 1):  # no row is replaced, even if one shard gets them all
                x = 10_000 * shard + 4 * number
                owner = int(split_index(handle.extend(rows(x, 4)))[0][0])
                self.known[owner] += range(x, x + 4)
                if self._stop.wait(0.05):
                    return
        except BaseException as error:
            self.errors.append(error)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def sample_until_back(rb: ShardedReplayBuffer) -> int:
    """Sample until shard 1 was missing and is back; return how many batches had none of its rows."""
    lonely, end = 0, time.monotonic() + 100
    while time.monotonic() < end and not (lonely and not rb.missing):
        lonely += 1 not in set(split_index(rb.sample()["index"])[0].tolist())
    return lonely


def test_a_killed_shard_is_left_out_and_returns_with_its_checkpoint(rb: ShardedReplayBuffer, cluster: Any) -> None:
    """Under load: one actor is killed with kill -9, another one by Ray."""
    for shard in range(SHARDS):
        rb.pinned(shard).extend(rows(90_000 + shard, 1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with closing(Load(rb)) as load:
            load.start()
            time.sleep(0.5)
            safe = [list(known) for known in load.known]
            counts = rb.checkpoint()
            stale = rb.sample()
            os.kill(rb.apply(_pid)[1], signal.SIGKILL)
            cluster.kill(rb.actors[2], no_restart=False)
            lonely = sample_until_back(rb)
    assert load.errors == []
    assert lonely > 0, "sampling went on without shard 1"
    assert not rb.missing, "they are back"
    texts = [str(one.message) for one in said if issubclass(one.category, RuntimeWarning)]
    assert any("shard 1 of 3 does not answer" in text and "rows are missing" in text for text in texts)
    assert any("shard 1 of 3 is back with" in text for text in texts)
    held = [set(part) for part in rb.apply(lambda buffer: buffer[:]["x"].tolist())]
    for shard in range(SHARDS):
        assert counts[shard] > 0
        assert set(safe[shard]) <= held[shard], "what was acknowledged before the checkpoint is there"
    check_eras(rb, stale)


def check_eras(rb: ShardedReplayBuffer, stale: TensorDict) -> None:
    """A batch of a dead actor changes no priority of its successor; a new batch does."""
    before = rb.apply(lambda buffer: buffer.sampler.priorities)
    rb.update_priority(stale, torch.full((BATCH,), 123.0))
    after = rb.apply(lambda buffer: buffer.sampler.priorities)
    assert all(torch.equal(before[shard], after[shard]) for shard in (1, 2))
    fresh = rb.sample()
    rb.update_priority(fresh, torch.full((BATCH,), 123.0))
    owners, slots = split_index(fresh["index"])
    kept = rb.apply(lambda buffer: buffer.sampler.priorities)
    assert all(float(kept[int(o)][int(s)]) == 123.0 for o, s in zip(owners, slots, strict=True))


def _pid(buffer: Any) -> int:
    return os.getpid()


def test_handles_can_be_pickled(rb: ShardedReplayBuffer, cluster: Any) -> None:
    fill(rb)

    def learn(handle: ShardedReplayBuffer) -> int:
        return len(handle.sample()["x"])

    assert cluster.get(cluster.remote(num_cpus=0)(learn).remote(rb)) == BATCH
    assert "missing=[]" in repr(rb)


def test_invalid_options_and_calls_raise(cluster: Any, directory: Path, rb: ShardedReplayBuffer) -> None:
    storage = partial(LazyTensorStorage, 10)
    with pytest.raises(OptionError, match="route must be one of"):
        ShardedReplayBuffer(1, route="nearest")
    with pytest.raises(OptionError, match="need checkpoint_dir"):
        ShardedReplayBuffer(1, storage=storage, resume=True)
    with pytest.raises(OptionError, match=r"placement must be None or one of"):
        ShardedReplayBuffer(1, storage=storage, placement="NEAR")
    with pytest.raises(OptionError, match="needs a node for each of 2 shards, the cluster has 1"):
        ShardedReplayBuffer(2, storage=storage, placement="STRICT_SPREAD")
    with pytest.raises(OptionError, match="num_shards must be at least 1"):
        ShardedReplayBuffer(0)
    with pytest.raises(OptionError, match="drawn from as one buffer"):
        ShardedReplayBuffer(1, storage=storage, sampler=SamplerWithoutReplacement)
    with pytest.raises(OptionError, match=r"shard must be an integer in \[0, 3\)"):
        rb.pinned(3)


def test_one_shard_resumes_without_waiting(cluster: Any, tmp_path: Path) -> None:
    make = partial(ShardedReplayBuffer, 1, storage=partial(LazyTensorStorage, 10), checkpoint_dir=tmp_path)
    first = make(checkpoint_every_s=0.1, placement="STRICT_SPREAD", remote_config={"num_cpus": 1}, shard_timeout_s=5.0)
    first.extend({"x": torch.arange(4)})
    end = time.monotonic() + 100
    while first.report()[0].saved_write_count < 4:
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(UsageError, match="batch_size not specified"):
        first.sample()
    first.close()
    with pytest.raises(LostBufferError, match=r"closed, by close\(\) of this handle"):
        first.sample(3)
    with pytest.raises(OptionError, match="resume=True begins with them"):
        make()
    second = make(resume=True)
    assert len(second) == 4
    assert int(second.sample(8)["x"].max()) <= 3
    second.close()
