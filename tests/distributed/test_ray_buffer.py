"""A buffer in an actor does what the same local buffer does."""

from __future__ import annotations

import inspect
import pickle
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    RayReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.buffers.portion import reseed
from ostinato.errors import (
    EmptyBufferError,
    KindError,
    LostBufferError,
    OptionError,
    PriorityError,
    SchemaError,
    UsageError,
)
from ostinato.transforms import Cast, Compose

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

STORAGE = partial(LazyTensorStorage, 100)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(n: int, first: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n), "y": torch.rand(n, 3)}


@pytest.fixture(scope="module")
def rb(cluster: Any) -> Any:
    """A prioritized buffer of TensorDicts; tests empty it."""
    made = RayReplayBuffer(
        alpha=1.0,
        beta=0.5,
        storage=STORAGE,
        batch_size=8,
        replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
        remote_config={"num_cpus": 0},
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def actor(cluster: Any) -> Any:
    """One actor for many tests, because starting one takes seconds."""
    made = RayReplayBuffer(storage=STORAGE, batch_size=16, generator=seeded())
    yield made
    made.close()


@pytest.fixture
def local_and_ray(actor: Any) -> Any:
    """Return a local buffer and a handle of an equal one in the actor, empty and with the same seed."""

    def make(
        storage: Any = STORAGE, sampler: Any = RandomSampler, transform: Any = None, prefetch: int = 0
    ) -> tuple[ReplayBuffer, RayReplayBuffer]:
        actor.set_storage(storage())
        actor.set_sampler(sampler())
        actor.set_writer(RoundRobinWriter())
        actor.empty()
        actor.apply(_begin_anew, transform)
        handle = object.__new__(RayReplayBuffer)
        handle.__setstate__({**actor.__getstate__(), "prefetch": prefetch})
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=16, generator=seeded()), handle

    return make


def _begin_anew(buffer: Any, transform: Any) -> None:
    reseed(buffer, 3)
    buffer._transform = Compose.of(transform)


def members(cls: type) -> set[str]:
    own = {"__len__", "__bool__", "__iter__", "__getitem__", "__setitem__", "__repr__", "__getstate__", "__setstate__"}
    return {name for name in dir(cls) if not name.startswith("_")} | (own & set(dir(cls)))


def test_a_handle_has_every_public_name_of_a_buffer() -> None:
    words = members(ReplayBuffer) | {"update_tensordict_priority", "priority_key"}
    assert words - members(RayReplayBuffer) == set()
    assert members(RayReplayBuffer) - words == {"actor", "apply", "attach", "clients", "transport_kind"}
    for name in words:
        local = getattr(TensorDictReplayBuffer, name)
        if inspect.isfunction(local):
            remote = list(inspect.signature(getattr(RayReplayBuffer, name)).parameters)
            names = list(inspect.signature(local).parameters)
            if "timeout_s" not in names and "timeout_s" in remote:
                remote.remove("timeout_s")  # calls of an actor have a deadline
            assert remote == names, name


def test_sharded_buffers_have_the_names_of_writing_and_sampling() -> None:
    words = {
        "add", "extend", "sample", "update_priority", "update_tensordict_priority", "empty", "stats", "dumps", "loads",
        "batch_size", "write_count", "__len__", "__bool__", "__iter__", "__getitem__", "__repr__",
    }  # fmt: skip
    assert words <= members(ShardedReplayBuffer)


def test_draws_are_those_of_a_local_buffer(local_and_ray: Any) -> None:
    local, remote = local_and_ray()
    data = rows(60)
    drawn = remote.stats().rows_drawn
    written = remote.write_count
    assert torch.equal(local.extend(data), remote.extend(data))
    assert local.add({"x": torch.tensor(7), "y": torch.zeros(3)}) == remote.add(
        {"x": torch.tensor(7), "y": torch.zeros(3)}
    )
    for _ in range(3):
        batch, info = remote.sample(return_info=True)
        expected, named = local.sample(return_info=True)
        assert type(batch) is dict
        assert all(torch.equal(batch[key], expected[key]) for key in expected)
        assert torch.equal(info["index"], named["index"])
    assert len(remote) == len(local) == 61
    assert remote.write_count - written == 61
    assert remote.stats().rows_drawn - drawn == 48
    assert remote.batch_size == 16
    assert remote.dim_extend == 0
    assert "LazyTensorStorage" in repr(remote)


@pytest.mark.parametrize("prefetch", [0, 6])
def test_a_batch_may_be_modified(local_and_ray: Any, prefetch: int) -> None:
    _, remote = local_and_ray(storage=partial(LazyTensorStorage, 4), prefetch=prefetch)
    images = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8)
    remote.extend({"image": images})
    for _ in range(8):
        batch, info = remote.sample(return_info=True)
        assert torch.equal(batch["image"], images[info["index"]])
        batch["image"].zero_()
    again, info = remote.sample(return_info=True, out=batch)
    assert again is batch
    assert torch.equal(batch["image"], images[info["index"]])
    assert torch.equal(remote[:]["image"], images)


@pytest.mark.parametrize("prefetch", [0, 1, 3, 8])
def test_an_epoch_has_each_row_once_and_ends(local_and_ray: Any, prefetch: int) -> None:
    local, remote = local_and_ray(sampler=SamplerWithoutReplacement, prefetch=prefetch)
    data = rows(30)
    local.extend(data)
    remote.extend(data)
    for _ in range(2):
        batches = [batch["x"].tolist() for batch in remote]
        assert [len(batch) for batch in batches] == [16, 14]
        assert sorted(x for batch in batches for x in batch) == list(range(30))
    assert len(next(iter(remote))["x"]) == 16, "an iteration may be left early"
    assert sum(len(batch["x"]) for batch in remote) == 30


@pytest.mark.parametrize("prefetch", [1, 4, 9])
def test_prefetch_does_not_change_the_draws(local_and_ray: Any, prefetch: int) -> None:
    local, remote = local_and_ray(prefetch=prefetch)
    data = rows(60)
    local.extend(data)
    remote.extend(data)
    for _ in range(12):
        assert torch.equal(remote.sample()["x"], local.sample()["x"])


def test_prefetch_continues_after_an_error(local_and_ray: Any) -> None:
    _, remote = local_and_ray(prefetch=2)
    with pytest.raises(EmptyBufferError, match="add rows first"):
        remote.sample()
    remote.extend(rows(10))
    assert len(remote.sample()["x"]) == 16
    remote.empty()
    remote.extend(rows(10, first=50))
    assert int(remote.sample()["x"].min()) >= 50, "batches made ahead go with the rows"


@pytest.mark.parametrize("width", [1, 10_000])
@pytest.mark.parametrize("iterate", [False, True])
def test_batches_before_an_error_come_first(local_and_ray: Any, width: int, iterate: bool) -> None:
    """The fourth batch fails; with a prefetch of 8 it is in the middle of a call."""
    local, remote = local_and_ray(storage=partial(LazyTensorStorage, 20), prefetch=8, transform=_Fails(at=4))
    data = {"x": torch.arange(20), "wide": torch.arange(20.0)[:, None].repeat(1, width)}
    local.extend(data)
    remote.extend(data)
    batches = iter(remote)
    draw = partial(next, batches) if iterate else remote.sample
    for _ in range(3):
        batch, expected = draw(), local.sample()
        assert all(torch.equal(batch[key], expected[key]) for key in expected)
    with pytest.raises(ValueError, match="batch 4 fails"):
        draw()
    assert len(remote.sample()["x"]) == 16, "the next call asks anew"


class _Fails:
    """A transform that fails once."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            msg = f"batch {self.at} fails"
            raise ValueError(msg)
        return batch


@pytest.mark.parametrize("prefetch", [1, 2, 5, 8])
def test_no_more_than_prefetch_are_drawn_ahead(cluster: Any, local_and_ray: Any, prefetch: int) -> None:
    _, remote = local_and_ray(prefetch=prefetch)
    remote.extend(rows(10))
    before = remote.stats().rows_drawn
    fewest = prefetch - max(1, prefetch // 2) + 1
    for taken in range(1, 12):
        remote.sample()
        coming = [reference for _, call in remote._stream.stream._requests for reference in call]
        cluster.wait(coming, num_returns=len(coming), timeout=60)
        ahead = (remote.stats().rows_drawn - before) // 16 - taken
        assert fewest <= ahead <= prefetch


def test_prefetch_overlaps_with_learning(cluster: Any, local_and_ray: Any) -> None:
    """The next batches are made and sent while the learner is busy."""
    _, remote = local_and_ray(prefetch=4)
    remote.extend(rows(10))
    remote.sample()
    coming = [reference for _, call in remote._stream.stream._requests for reference in call]
    ready, _ = cluster.wait(coming, num_returns=4, timeout=60)
    assert len(ready) == 4


def test_tensordicts_and_priorities(rb: Any) -> None:
    rb.empty()
    index = rb.extend(TensorDict(rows(10), [10]))
    rb.update_priority(index, torch.arange(10.0))
    batch = rb.sample()
    assert isinstance(batch, TensorDict)
    assert int(batch["x"].min()) >= 1, "a priority of 0 with a tiny eps"
    assert {"index", "index_generation", "priority_weight"} <= set(batch.keys())
    batch["td_error"] = torch.full((8,), 50.0)
    rb.update_tensordict_priority(batch)
    kept = rb.apply(lambda buffer: buffer.sampler.priorities)
    assert bool((kept[batch["index"]] == 50.0).all())


def test_the_priority_key_can_be_changed(rb: Any) -> None:
    rb.empty()
    rb.extend(TensorDict(rows(10), [10]))
    assert rb.priority_key == "td_error"
    rb.priority_key = ("agent", "loss")
    batch = rb.sample(None, False, True)
    batch["agent", "loss"] = torch.full((8,), 30.0)
    rb.update_tensordict_priority(batch)
    assert rb.priority_key == ("agent", "loss")
    rb.priority_key = "td_error"
    assert bool((rb.apply(lambda buffer: buffer.sampler.priorities)[batch["index"]] == 30.0).all())


def test_rows_may_come_from_an_iterator(local_and_ray: Any) -> None:
    _, remote = local_and_ray()
    assert remote.extend({"x": torch.tensor(i)} for i in range(3)).tolist() == [0, 1, 2]
    assert remote[:]["x"].tolist() == [0, 1, 2]


def test_priorities_of_replaced_rows_are_dropped(rb: Any) -> None:
    rb.empty()
    rb.extend(TensorDict(rows(100), [100]))
    batch = rb.sample()
    rb.extend(TensorDict(rows(100), [100]))
    before = rb.stats().stale_updates
    rb.update_priority(batch, torch.ones(8))
    assert rb.stats().stale_updates == before + 8


def test_errors_are_those_of_the_buffer(rb: Any) -> None:
    rb.empty()
    rb.extend(TensorDict(rows(10), [10]))
    with pytest.raises(SchemaError, match="rows must have the keys"):
        rb.extend(TensorDict({"z": torch.zeros(3)}, [3]))
    with pytest.raises(PriorityError, match=r"at the positions \[1\] of 2"):
        rb.update_priority([0, 1], [1.0, -1.0])
    with pytest.raises(IndexError):
        rb[99]
    assert len(rb) == 10


def test_reading_and_editing(rb: Any) -> None:
    rb.empty()
    data = rows(10)
    rb.extend(TensorDict(data, [10]))
    assert torch.equal(rb[torch.tensor([3, 1])]["x"], torch.tensor([3, 1]))
    assert torch.equal(rb["y"], data["y"])
    rb[0:2] = TensorDict({"x": torch.tensor([70, 71]), "y": torch.ones(2, 3)}, [2])
    assert rb.set_at_("x", torch.tensor([72]), [2]) is rb
    assert rb.read_all_in_order(4)["x"].tolist() == [70, 71, 72, 3]
    rb.set_("x", torch.arange(10) * 2)
    rb.update_({"y": torch.zeros(10, 3)})
    rb.write_all(TensorDict({"x": torch.tensor([5]), "y": torch.ones(1, 3)}, [1]), 1)
    found = rb[:]
    assert found["x"].tolist() == [5, *range(2, 20, 2)]
    assert float(found["y"].sum()) == 3.0


def test_parts_stay_in_the_actor(rb: Any) -> None:
    for name in ("storage", "sampler", "writer", "transform", "sample_unit"):
        with pytest.raises(UsageError, match=rf"rb\.apply\(lambda rb: \.\.\. rb\.{name}"):
            getattr(rb, name)
    rb.apply(lambda buffer, beta: setattr(buffer.sampler, "beta", beta), 0.75)
    assert rb.apply(lambda buffer: buffer.sampler.beta) == 0.75
    rb.check()
    assert rb.episodes is None
    with pytest.raises(UsageError, match="does not track episodes"):
        rb.read_episodes()


def test_parts_can_be_replaced(local_and_ray: Any) -> None:
    _, remote = local_and_ray()
    remote.extend(rows(10))
    old = remote.set_sampler(PrioritizedSampler(100, 1.0, 1.0))
    assert isinstance(old, RandomSampler)
    assert "priority_weight" in remote.sample(return_info=True)[1]
    assert remote.append_transform(Cast(torch.float32, "x")) is remote
    assert remote.sample()["x"].dtype is torch.float32
    remote.insert_transform(0, lambda batch: {**batch, "x": batch["x"] + 1000})
    assert float(remote.sample()["x"].min()) >= 1000
    before = remote.set_storage(LazyTensorStorage(50))
    assert len(before) == 10
    assert len(remote) == 0
    assert isinstance(remote.set_writer(RoundRobinWriter()), RoundRobinWriter)


def test_checkpoints_are_those_of_local_buffers(local_and_ray: Any, tmp_path: Path) -> None:
    local, remote = local_and_ray()
    remote.extend(rows(60))
    remote.sample()
    remote.dumps(tmp_path / "saved")
    local.loads(tmp_path / "saved")
    expected = [local.sample()["x"] for _ in range(3)]
    state = remote.state_dict()
    assert all(torch.equal(remote.sample()["x"], one) for one in expected)
    remote.empty()
    remote.loads(tmp_path / "saved")
    assert all(torch.equal(remote.sample()["x"], one) for one in expected)
    remote.load_state_dict(state)
    assert all(torch.equal(remote.sample()["x"], one) for one in expected)


def test_workers_write_while_a_learner_samples(cluster: Any, local_and_ray: Any) -> None:
    """Rows hold checksums: none is torn or lost with several writers."""
    _, rb = local_and_ray(storage=partial(LazyTensorStorage, 4000), prefetch=2)

    def write(buffer: Any, worker: int) -> int:
        for i in range(20):
            x = torch.arange(50) + 1000 * worker + 50 * i
            buffer.extend({"x": x, "twice": 2 * x, "image": (x % 251).to(torch.uint8)[:, None].repeat(1, 2000)})
        return 20 * 50

    running = [cluster.remote(num_cpus=0)(write).remote(rb, worker) for worker in range(2)]
    seen = 0
    while cluster.wait(running, num_returns=2, timeout=0)[1]:
        try:
            batch = rb.sample()
        except EmptyBufferError:
            continue
        assert torch.equal(batch["twice"], 2 * batch["x"])
        assert bool((batch["image"] == (batch["x"] % 251).to(torch.uint8)[:, None]).all())
        seen += 1
    assert sum(cluster.get(running)) == len(rb) == 2000
    assert sorted(rb[:]["x"].tolist()) == sorted(1000 * w + i for w in range(2) for i in range(1000))
    assert seen > 0


def test_waiting_readers_do_not_block_writers(local_and_ray: Any, tmp_path: Path) -> None:
    flag = tmp_path / "go on"
    _, remote = local_and_ray(transform=partial(_wait_for, flag))
    remote.extend(rows(10))
    readers = [threading.Thread(target=remote.sample) for _ in range(12)]
    for reader in readers:
        reader.start()
    time.sleep(0.3)
    remote.extend(rows(10, first=1000))
    assert len(remote) == 20
    assert all(reader.is_alive() for reader in readers)
    flag.touch()
    for reader in readers:
        reader.join()


def _wait_for(flag: Path, batch: Any) -> Any:
    end = time.monotonic() + 100
    while not flag.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return batch


def test_invalid_options_and_calls_raise(cluster: Any) -> None:
    with pytest.raises(OptionError, match="max_restarts"):
        RayReplayBuffer(storage=STORAGE, remote_config={"max_restarts": 2})
    with pytest.raises(OptionError, match="concurrency_groups"):
        RayReplayBuffer(storage=STORAGE, remote_config={"concurrency_groups": {}})
    with pytest.raises(OptionError, match="batch-size must be specified in advance"):
        RayReplayBuffer(prefetch=2)
    with pytest.raises(KindError, match="storage must be an instance of"):
        RayReplayBuffer(storage=7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="must make a ReplayBuffer, or a subclass of it, got ReplayBufferEnsemble"):
        RayReplayBuffer(ReplayBuffer(storage=STORAGE()), replay_buffer_cls=ReplayBufferEnsemble)
    with pytest.warns(UserWarning, match="ray_init_config"):
        handle = RayReplayBuffer(storage=STORAGE, ray_init_config={"num_cpus": 1})
    with pytest.raises(UsageError, match="batch_size not specified"):
        handle.sample()
    with pytest.raises(UsageError, match="Cannot iterate"):
        next(iter(handle))
    other = pickle.loads(pickle.dumps(handle))
    with pytest.raises(UsageError, match=r"priority_key is of a TensorDictReplayBuffer, and the actor holds a Replay"):
        _ = handle.priority_key
    with pytest.raises(UsageError, match=r"sample\(include_info=...\) is of a TensorDictReplayBuffer"):
        handle.sample(4, include_info=True)
    with pytest.raises(UsageError, match=r"update_tensordict_priority\(\) is of a TensorDictReplayBuffer"):
        handle.update_tensordict_priority({})
    with handle as same:
        assert same is handle
    with pytest.raises(LostBufferError, match=r"was closed, by close\(\)|is gone, and its rows with it"):
        len(other)
    with pytest.raises(LostBufferError, match=r"was closed, by close\(\)|is gone, and its rows with it"):
        handle.extend({"x": torch.arange(3)})
    handle.close()


def test_the_seed_comes_from_the_callers_process(cluster: Any) -> None:
    """Torch seeds every process alike; the seed of a buffer in an actor comes from the process that makes it."""
    state = torch.get_rng_state()
    torch.manual_seed(1)
    handle = RayReplayBuffer(replay_buffer_cls=PrioritizedReplayBuffer, alpha=1.0, beta=1.0, storage=STORAGE)
    torch.manual_seed(1)
    seed = int(torch.randint(2**62, ()))
    torch.set_rng_state(state)
    local = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=STORAGE, generator=seeded(seed))
    for buffer in (handle, local):
        buffer.extend({"x": torch.arange(100)})
    assert torch.equal(handle.sample(32)["x"], local.sample(32)["x"])
    handle.close()
