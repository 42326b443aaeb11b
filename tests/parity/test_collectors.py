"""Collectors of TorchRL write to buffers of Ostinato: every frame arrives once, whichever process collected it."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import Bounded, Categorical, Composite
from torchrl.envs import EnvBase
from torchrl.modules import RandomPolicy

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from ostinato.compat.torchrl import for_collector

from ..sharing import AVAILABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EPISODE = 7
"""Steps of an episode."""


class Numbered(EnvBase):  # type: ignore[misc]
    """An environment whose observations are its number, and how many steps it has made in all episodes."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number, self.steps = number, 0
        self.observation_spec = Composite(
            where=Bounded(-1, 2**40, (2,), dtype=torch.int64), pixel=Bounded(-1, 2**40, (3,), dtype=torch.float32)
        )
        self.action_spec = Categorical(3)
        self.reward_spec = Bounded(-1, 2**40, (1,), dtype=torch.float32)

    def _now(self) -> dict[str, torch.Tensor]:
        return {"where": torch.tensor([self.number, self.steps]), "pixel": torch.full((3,), float(self.steps))}

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        return TensorDict({**self._now(), "done": torch.zeros(1, dtype=torch.bool)}, [])

    def _step(self, tensordict: Any) -> TensorDict:
        self.steps += 1
        done = torch.tensor([self.steps % EPISODE == 0])
        return TensorDict({**self._now(), "reward": torch.ones(1), "done": done, "terminated": done}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


POLICY = partial(RandomPolicy, Categorical(3))


@pytest.fixture(autouse=True)
def spawning() -> Iterator[None]:
    """Workers of collectors are spawned."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def check_each_once(rb: Any) -> None:
    """No frame is torn, missing or there twice; those of an environment are in order."""
    now, after = (rb[:][key].reshape(-1, 2) for key in ("where", ("next", "where")))
    assert torch.equal(after, now + torch.tensor([0, 1]))
    assert torch.equal(rb[:]["next", "pixel"].reshape(-1, 3)[:, 0].long(), after[:, 1])
    assert set(now[:, 0].tolist()) <= {0, 1}
    for number in now[:, 0].unique():
        steps = now[now[:, 0] == number, 1]
        assert torch.equal(steps, torch.arange(len(steps)))


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "storage", "extend_buffer"),
    [
        (ReplayBuffer, ListStorage, True),
        (TensorDictReplayBuffer, LazyTensorStorage, False),
        (ReplayBuffer, LazyMemmapStorage, False),
        (TensorDictReplayBuffer, LazyMemmapStorage, True),
    ],
)
def test_a_collector_writes_each_frame_once(kind, storage, extend_buffer):
    rb = kind(storage=storage(256), batch_size=5)
    collector = Collector(
        Numbered(), POLICY(), replay_buffer=rb, total_frames=192, frames_per_batch=32, extend_buffer=extend_buffer
    )
    for count, batch in enumerate(collector):
        assert batch is None
        assert len(rb) == rb.write_count == 32 * (count + 1)
        assert rb.sample()["where"].shape == (5, 2)
    collector.shutdown()
    assert len(rb) == 192
    if storage is ListStorage:
        assert [row["where"].tolist() for row in rb[:]] == [[0, i] for i in range(192)]
    else:
        check_each_once(rb)


def test_whole_trajectories_arrive_one_after_the_other():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(256), sampler=SliceSampler(slice_len=EPISODE, end_key=("next", "done")), batch_size=14
    )
    collector = Collector(
        Numbered(), POLICY(), replay_buffer=rb, total_frames=64, frames_per_batch=16, trajs_per_batch=1
    )
    for batch in collector:
        assert batch is None
    collector.shutdown()
    assert len(rb) == 63
    check_each_once(rb)
    assert (rb.sample()["where"][:, 1].view(2, EPISODE) % EPISODE == torch.arange(EPISODE)).all()


# -- several processes -------------------------------------------------------------------------------------------------


def collect_in_workers(rb: Any, collector: Any, given: Any, each: Callable[[], None], **options: Any) -> None:
    """Collect 192 frames from two environments; every frame arrives once."""
    envs = [partial(Numbered, i) for i in range(2)]
    collecting = collector(envs, POLICY(), replay_buffer=given, total_frames=192, frames_per_batch=32, **options)
    expected = 0
    try:
        for batch in collecting:
            assert batch is None
            expected += 32 if collector is MultiSyncCollector else 16
            assert len(rb) == expected or collector is MultiAsyncCollector
            assert len(rb) >= min(expected, 192)
            each()
    finally:
        collecting.shutdown()
    assert 192 <= len(rb) <= 192 + 2 * 32
    check_each_once(rb)


SHARED: dict[str, tuple[Any, Callable[[], ReplayBuffer]]] = {
    "sync": (MultiSyncCollector, lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(400), batch_size=5)),
    "async": (
        MultiAsyncCollector,
        lambda: TensorDictReplayBuffer(
            storage=LazyMemmapStorage(400), sampler=PrioritizedSampler(400, 0.7, 0.5), shared=True, batch_size=5
        ),
    ),
}


@pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")
@pytest.mark.parametrize("name", SHARED)
def test_workers_write_to_a_shared_buffer(name):
    collector, make = SHARED[name]
    rb = make()
    collect_in_workers(rb, collector, rb, lambda: rb.sample(), extend_buffer=False)
    assert rb.shared


def test_workers_write_to_a_private_buffer_through_the_adapter():
    sampler = SliceSampler(slice_len=2, traj_key=("collector", "traj_ids"), end_key=("next", "done"))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(400), sampler=sampler, batch_size=6)

    def follow() -> None:
        slices = rb.sample()["where"].view(-1, 2, 2)
        assert torch.equal(slices[:, 1] - slices[:, 0], torch.tensor([[0, 1]]).expand(3, 2))

    with for_collector(rb) as handle:
        collect_in_workers(rb, MultiSyncCollector, handle, follow)
    assert not rb.shared
