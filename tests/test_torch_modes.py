"""Modes of torch that programs switch on for themselves: the public API gives the same results in all of them.

A scenario is a generator of what it got; between two steps the caller may change the mode. The data come from numpy, so
that no mode of torch has a part in them, and every generator is seeded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    RewardScale,
    Trajectory,
    TrajectoryReplayBuffer,
    VectorEnvRecorder,
)
from ostinato.testing.views import bits
from ostinato.transforms import Cast, Compose, Exclude, Rename, Select
from tests.registry import BUFFERS, registered, ring, seeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.house

META = torch.device("meta")


@contextmanager
def default_device() -> Iterator[None]:
    """What `torch.set_default_device` does, undone at the end."""
    torch.set_default_device(META)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Any] = {
    "with a device": lambda: META,
    "default device": default_device,
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def of_the_registry(name: str) -> Callable[[Path], Iterator[Any]]:
    """Writes, draws, priorities and checkpoints of a buffer."""

    def scenario(directory: Path) -> Iterator[Any]:
        contract = registered(name)
        rb, other = (contract.make(contract.capacity) for _ in range(2))
        for start in range(0, contract.capacity + 6, 6):
            contract.extend(rb, 6, start)
            yield contract.use(rb)
        rb.dumps(directory / "saved", incremental=True)
        yield contract.use(rb)
        other.loads(directory / "saved", mmap=name == "PrioritizedSampler")
        yield contract.use(other)
        yield contract.go_on(other)

    return scenario


def edits(directory: Path) -> Iterator[Any]:
    """Numbers of Python and NumPy, views, edits, late fields, transforms."""
    rb = ring(8, batch_size=4, generator=seeded())
    for reward in (1.5, 0.1):
        yield rb.add({"reward": reward, "count": 3, "done": False, "half": np.float16(reward)})
    rb[0] = {"reward": 7.25, "count": 9, "done": True, "half": np.float16(2.0)}
    rb[0:2]["reward"].mul_(2)
    rb.write_all({**rb[:], "late": np.arange(2.0)})
    rb.set_at_("reward", 0.3, 1)
    yield rb[:]
    yield rb[torch.from_numpy(np.array([True, False]))]
    cast = Compose(Select("obs", "t", "next"), Exclude("t"), Rename({"obs": "state"}), Cast(torch.float16, "state"))
    changed = registered("NStep, PrioritizedSampler").fill()
    changed.append_transform(cast)
    changed.append_transform(RewardScale(0.1, key=("next", "reward")))
    yield changed.sample()
    del directory


def environments(directory: Path) -> Iterator[Any]:
    envs, rng = 3, np.random.default_rng(0)
    storage = LazyTensorStorage(30, ndim=2)
    rb = ReplayBuffer(storage=storage, sample_unit=NStep(2, 0.5), batch_size=6, generator=seeded())
    steps = VectorEnvRecorder(rb, envs, "SAME_STEP")
    steps.reset(rng.normal(size=(envs, 2)).astype(np.float32))
    for _ in range(8):
        after, over = rng.normal(size=(envs, 2)).astype(np.float32), rng.random(envs) < 0.3
        info = {"final_obs": after + 1, "_final_obs": over} if over.any() else {}
        yield steps.add_step(np.arange(envs), after, rng.normal(size=envs), over, np.zeros(envs, bool), info)
    yield rb.sample()
    yield rb[:]
    del directory


def trajectories(directory: Path) -> Iterator[Any]:
    """Rollouts in memory and on disk."""
    buffer = TrajectoryReplayBuffer(seed=3, auto_save=True, auto_save_path=directory / "store", cache_size=1)
    for number in range(4):
        serial = torch.from_numpy((np.arange(8).reshape(4, 2, 1) + 100 * number).astype(np.float32))
        buffer.add_trajectories([Trajectory(max_episode_length=4, actions=serial.repeat(1, 1, 3), rewards=serial)])
    buffer.flush()
    yield buffer.sample(6)
    yield buffer.load_trajectory(buffer.trajectory_ids[0]).rewards
    buffer.save_checkpoint(directory / "saved")
    buffer.close()
    other = TrajectoryReplayBuffer(seed=4)
    other.load_checkpoint(str(directory / "saved"))
    yield other.sample(6)
    other.close()


# Nested tensors have no bytes to compare, and the transform of the registry makes its state as the mode says.
SCENARIOS: dict[str, Any] = {
    **{name: of_the_registry(name) for name in BUFFERS if "Ragged" not in name and name != "transform"},
    "edits": edits,
    "environments": environments,
    "trajectories": trajectories,
}


def tour(scenario: str, directory: Path, mode: Callable[[int], AbstractContextManager[Any]]) -> list[Any]:
    """Everything that a scenario gives, its step number i taken within `mode(i)`."""
    directory.mkdir()
    found: list[Any] = []
    steps = SCENARIOS[scenario](directory)
    for number in range(10_000):
        with mode(number):
            step = next(steps, None)
        if step is None:
            return found
        found.append(bits(step))
    raise AssertionError(scenario)


def alternating(first: int) -> Callable[[int], AbstractContextManager[Any]]:
    """What was written, loaded or drawn in inference mode is changed outside of it, and the other way round."""
    return lambda number: torch.inference_mode() if number % 2 == first else nullcontext()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_are_the_same_in_every_mode(scenario, tmp_path):
    wanted = tour(scenario, tmp_path / "plain", lambda _: nullcontext())
    assert wanted
    modes = {name: lambda _, make=make: make() for name, make in MODES.items()}
    for name, mode in (modes | {"in turns": alternating(0), "in turns, first": alternating(1)}).items():
        assert tour(scenario, tmp_path / name, mode) == wanted, name
