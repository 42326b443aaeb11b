"""A tour of the public API: scenarios that say what they got, step by step, to be compared between modes of torch.

A scenario is a generator of pairs `(name, value)`; between two steps the caller may change the mode. The data come from
numpy, so that no mode of torch has a part in them, and every generator is seeded.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ostinato import (
    Episodes,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    RewardScale,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    ToDevice,
    Trajectory,
    TrajectoryReplayBuffer,
    VectorEnvRecorder,
)
from ostinato.compat import objectrl
from ostinato.core.kinds import is_tensordict
from ostinato.tools import compact, convert, inspect_checkpoint, verify
from ostinato.transforms import Cast, Compose, Exclude, Rename, Select
from tests.registry import STATEFUL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["SCENARIOS", "flat", "walk"]

Steps: TypeAlias = "Iterator[tuple[str, Any]]"

CAPACITY = 24
LENGTH = 6
"""Steps of an episode."""


# -- what was got, as values that compare ------------------------------------------------------------------------------


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of a value by name: dtype, device, shape and bytes of tensors; other values as text."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return {name: (type(value).__name__, str(value.dtype), str(value.device), tuple(value.shape), raw)}
    if isinstance(value, np.ndarray):
        return {name: ("array", str(value.dtype), value.shape, value.tobytes())}
    if is_tensordict(value):
        value = {"batch_size": list(value.batch_size), **{str(k): v for k, v in value.items(include_nested=False)}}
    if isinstance(value, dict):
        return {path: leaf for key, part in value.items() for path, leaf in flat(part, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {path: leaf for key, part in enumerate(value) for path, leaf in flat(part, f"{name}.{key}").items()}
    return {name: repr(value)}


def walk(scenario: str, directory: Path) -> Steps:
    """Return the steps of a scenario, which may write to an empty directory."""
    return SCENARIOS[scenario](directory)


# -- data --------------------------------------------------------------------------------------------------------------


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ints(*values: int) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))


def rows(count: int, start: int = 0, lanes: int = 1) -> TensorDict:
    """Steps of episodes of `LENGTH` rows, `[count]` or `[count, lanes]`."""
    step = np.arange(start, start + count)
    t = step if lanes == 1 else step[:, None] * lanes + np.arange(lanes)
    step = np.broadcast_to(step if lanes == 1 else step[:, None], t.shape).copy()
    place, after = t.astype(np.float32)[..., None], (t + lanes).astype(np.float32)[..., None]
    goal = np.full_like(place, -1.0)
    tokens = np.stack((t, t), -1)
    now = {
        "t": t,
        "tokens": tokens,
        "obs": place,
        "achieved_goal": place,
        "desired_goal": goal,
        "half": place.astype(np.float16),
    }
    following = {
        "obs": after,
        "achieved_goal": after,
        "desired_goal": goal,
        "reward": np.ones(t.shape, np.float32),
        "done": step % LENGTH == LENGTH - 1,
    }
    batch = list(t.shape)
    below = TensorDict({key: torch.from_numpy(value.copy()) for key, value in following.items()}, batch)
    return TensorDict({**{key: torch.from_numpy(value.copy()) for key, value in now.items()}, "next": below}, batch)


def filled(storage: Any, lanes: int = 1, **options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(
        storage=storage, **{"batch_size": 12, "generator": seeded(), "dim_extend": 0, **options}
    )
    for start in range(0, 40, 8):
        rb.extend(rows(8, start, lanes))
    return rb


# -- buffers -----------------------------------------------------------------------------------------------------------


COPIED = {"codec", "single copy"}
"""Storages whose reads are copies."""


def stateful(name: str) -> Callable[[Path], Steps]:
    """Writes, draws, priorities, reads, edits and state of a buffer of the registry."""
    make, lanes = STATEFUL[name]

    def scenario(directory: Path) -> Steps:
        rb, other = make(CAPACITY), make(CAPACITY)
        for start in range(0, CAPACITY, 8):
            yield f"slots {start}", rb.extend(rows(8, start, lanes))
        for number in range(3):
            batch, info = rb.sample(return_info=True)
            yield f"batch {number}", (batch, info)
            if rb.sampler.prioritized and not name.startswith("prefetch"):
                rb.update_priority(batch["index"], np.linspace(0.5, 2.0, batch["index"].shape[0]))
                rb.update_priority(5, 1.5)
        rb.extend(rows(6, 40, lanes))
        if (
            lanes == 1 and rb.storage.form == "tensors" and name not in {"codec", "single copy"}
        ):  # whose reads are copies
            view = rb[0:2]
            yield "view", view
            view["obs"].mul_(2)
            rb[ints(3, 4)] = rows(2, 90)
            yield "changed", rb[torch.from_numpy(np.arange(len(rb)) % 3 < 2)]
        rb.dumps(directory / "saved")
        yield "after", rb.sample()
        other.loads(directory / "saved")
        yield "resumed", other.sample()
        yield "copied", pickle.loads(pickle.dumps(rb)).sample()

    return scenario


def numbers(directory: Path) -> Steps:
    """Rows of Python numbers, NumPy scalars and arrays; priorities and late fields of numbers."""
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, generator=seeded())
    for reward in (1.5, 0.1):
        row = {"reward": reward, "count": 3, "done": False, "wide": np.float64(reward), "half": np.float16(reward)}
        yield f"slot {reward}", rb.add(row)
    rb[0] = {"reward": 7.25, "count": 9, "done": True, "wide": np.float64(1.0), "half": np.float16(2.0)}
    rb.write_all({**rb[:], "late": np.arange(2.0)})
    rb.set_at_("reward", 0.3, 1)
    yield "rows", rb[:]
    listed = ReplayBuffer(storage=ListStorage(8), batch_size=4, generator=seeded())
    listed.extend([0.1, 0.2, 0.3])
    yield "listed", listed.sample()
    ranked = PrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(8), batch_size=4, generator=seeded()
    )
    ranked.extend({"x": np.arange(5.0)})
    ranked.update_priority([0, 1], [0.5, 4])
    yield "ranked", ranked.sample(return_info=True)
    del directory


def checkpoints(directory: Path) -> Steps:
    """Whole, incremental and mapped checkpoints, hooks, and the tools that read them."""
    path = directory / "chain"
    rb = filled(LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
    rb.dumps(path, incremental=True)
    for start in (50, 60):
        rb.extend(rows(4, start))
        rb.update_priority(ints(1, 2), [0.5, start])
        rb.dumps(path, incremental=True)
        yield f"inspected {start}", inspect_checkpoint(path).rows
    yield "drawn", rb.sample()
    for mmap in (False, True):
        other = filled(LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
        if mmap:
            other = TensorDictReplayBuffer(
                storage=LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5), batch_size=12
            )
        other.loads(path, mmap=mmap)
        yield f"loaded {mmap}", other[:]
        yield f"resumed {mmap}", other.sample()
        other[0:2]["obs"].mul_(2)
        other.update_priority(ints(3), 2.5)
        other.extend(rows(3, 70))
        yield f"changed {mmap}", other.sample(6)
    compact(path)
    yield "compacted", inspect_checkpoint(path).rows
    flushed = LazyMemmapStorage(CAPACITY, scratch_dir=directory / "rows")
    filled(flushed)
    flushed.flush()
    again = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(CAPACITY, scratch_dir=directory / "rows", existsok=True),
        batch_size=3,
        generator=seeded(),
    )
    again[0:2]["obs"].mul_(2)
    yield "reopened", again.sample()


def ensembles(directory: Path) -> Steps:
    """Mixed batches, their priorities and state."""

    def make() -> ReplayBufferEnsemble:
        first = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), generator=seeded(1))
        second = TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=LazyTensorStorage(CAPACITY), generator=seeded(2)
        )
        first.extend(rows(10))
        second.extend(rows(10, 20))
        return ReplayBufferEnsemble(first, second, p=[0.3, 0.7], batch_size=6, generator=seeded())

    rb = make()
    for number in range(2):
        batch = rb.sample()
        yield f"batch {number}", batch
        part = batch[-1]
        rb[1].update_priority(part["index"] if "index" in part.keys() else ints(1), 2.0)  # noqa: SIM118
    yield "read", rb[1][0:2]
    rb.dumps(directory / "saved")
    yield "after", rb.sample()
    other = make()
    other.loads(directory / "saved")
    yield "resumed", other.sample()


def unseeded(directory: Path) -> Steps:
    """Draws of torch's own generator."""
    torch.manual_seed(0)
    one = filled(LazyTensorStorage(CAPACITY), generator=None)
    two = filled(LazyTensorStorage(CAPACITY), generator=None, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
    three = filled(LazyTensorStorage(CAPACITY), generator=None, sampler=SamplerWithoutReplacement())
    mixed = ReplayBufferEnsemble(one, two, three, p=[0.1, 0.2, 0.7], num_buffer_sampled=2, batch_size=6)
    every = ReplayBufferEnsemble(one, two, three, batch_size=6)
    buffers: list[Any] = [one, two, three, mixed, every]
    for number, rb in enumerate(buffers):
        yield f"batch {number}", rb.sample()
        yield f"info {number}", rb.sample(return_info=True)[1]
    reservoir = filled(LazyTensorStorage(CAPACITY), generator=None, writer=ReservoirWriter())
    yield "reservoir", reservoir[:]
    del directory


def flows(directory: Path) -> Steps:
    """Rate limits, transforms and iteration."""
    limiter = RateLimiter(samples_per_insert=2, error_buffer=32, min_size_to_sample=8)
    rb = filled(LazyTensorStorage(CAPACITY), rate_limiter=None, batch_size=4)
    yield "plain", rb.sample()
    limited = ReplayBuffer(
        storage=LazyTensorStorage(100), batch_size=4, rate_limiter=limiter, generator=seeded(), transform=None
    )
    limited.extend({"x": np.arange(16.0)}, timeout_s=1.0)
    yield "limited", limited.sample(timeout_s=1.0)
    changed = filled(
        LazyTensorStorage(CAPACITY),
        transform=Compose(
            Select("obs", "half", "t", "next"),
            Exclude("t"),
            Rename({"obs": "state"}),
            Cast(torch.float32, "half"),
            RewardScale(0.1, key=("next", "reward")),
            ToDevice("cpu"),
        ),
    )
    yield "changed", changed.sample()
    stored = ReplayBuffer(
        storage=LazyTensorStorage(8),
        batch_size=4,
        transform=Cast(torch.float32, "x", stored=torch.float16),
        generator=seeded(),
    )
    stored.extend({"x": np.linspace(0, 1, 8)})
    yield "cast", stored.sample()
    del directory


def environments(mode: str, ndim: int) -> Callable[[Path], Steps]:
    """Steps of vector environments."""

    def scenario(directory: Path) -> Steps:
        envs, rng = 3, np.random.default_rng(0)
        episodes = Episodes(traj_key="env", end_key=["terminated", "truncated"])
        if ndim == 2:
            episodes = Episodes(["terminated", "truncated"], mask_key="mask" if mode == "NEXT_STEP" else None)
        rb = ReplayBuffer(
            storage=LazyTensorStorage(30, ndim=ndim),
            episodes=episodes,
            sample_unit=NStep(2, 0.5),
            batch_size=6,
            generator=seeded(),
        )
        steps = VectorEnvRecorder(rb, envs, mode)
        obs = rng.normal(size=(envs, 2)).astype(np.float32)
        steps.reset(obs)
        ended = np.zeros(envs, bool)
        for number in range(8):
            after = rng.normal(size=(envs, 2)).astype(np.float32)
            over = (rng.random(envs) < 0.3) & ~(ended if mode == "NEXT_STEP" else np.zeros(envs, bool))
            info = {"final_obs": after + 1, "_final_obs": over} if mode == "SAME_STEP" and over.any() else {}
            reward = rng.normal(size=envs)
            yield f"step {number}", steps.add_step(np.arange(envs), after, reward, over, np.zeros(envs, bool), info)
            ended = over
            if mode == "DISABLED" and over.any():
                steps.reset(after, over)
        yield "batch", rb.sample()
        yield "rows", rb[:]
        again = VectorEnvRecorder(rb, envs, mode)
        again.reset(obs)
        yield "again", again.add_step(np.arange(envs), obs, np.ones(envs), np.zeros(envs, bool), np.zeros(envs, bool))
        del directory

    return scenario


# -- doors, trajectories, distribution ---------------------------------------------------------------------------------


def object_rl(directory: Path) -> Steps:
    cpu = torch.device("cpu")
    buffer = objectrl.ReplayBuffer(cpu, cpu, 12)
    buffer.add_batch(rows(9))
    buffer.add(rows(1, 20)[0])
    torch.manual_seed(0)
    yield "batch", buffer.sample_batch(4)
    yield "random", buffer.sample_random(4)
    yield "by index", buffer.sample_by_index([0, 2])
    yield "fields", buffer.sample_by_index_fields([0, 2], ["obs"])
    yield "epoch", list(buffer.create_epoch_iterator(4))
    buffer.save(directory / "saved")
    other = objectrl.ReplayBuffer(cpu, cpu, 12)
    other.load(directory / "saved")
    other.buffer_size = 6
    other.add_batch(rows(9, 30))
    yield "loaded", other.sample_all()
    other.data_size = 3
    yield "fewer", other.sample_all()


def rollout(number: int) -> Trajectory:
    serial = (np.arange(8).reshape(4, 2, 1) + 100 * number).astype(np.float32)
    tensor = torch.from_numpy(serial)
    return Trajectory(
        max_episode_length=4,
        actions=torch.from_numpy(serial.repeat(3, 2)),
        rewards=tensor,
        dones=torch.from_numpy(serial % 2 == 1),
        terminations=torch.from_numpy(serial % 3 == 0),
        truncations=torch.from_numpy(serial % 5 == 0),
        prev_logprobs=tensor.clone(),
        prev_values=tensor.clone(),
        forward_inputs={"action": torch.from_numpy(serial.astype(np.float64))},
        curr_obs={"states": torch.from_numpy(serial.repeat(2, 2))},
        next_obs={"states": torch.from_numpy(serial.repeat(2, 2) + np.float32(0.5))},
    )


def trajectories(trajectory_format: str) -> Callable[[Path], Steps]:
    """Rollouts in memory and on disk."""

    def scenario(directory: Path) -> Steps:
        options: dict[str, Any] = {"auto_save": True, "trajectory_format": trajectory_format, "cache_size": 1}
        buffer = TrajectoryReplayBuffer(seed=3, auto_save_path=directory / "store", **options)
        buffer.add_trajectories([rollout(number) for number in range(4)])
        buffer.flush()
        yield "sample", buffer.sample(6)
        yield "chunks", buffer.sample_chunks(6)
        yield "without", buffer.sample(6, replace=False)
        yield "one", buffer.load_trajectory(buffer.trajectory_ids[0]).rewards
        yield "verified", verify(directory / "store").damage
        buffer.save_checkpoint(directory / "saved")
        buffer.close()
        other = TrajectoryReplayBuffer(seed=4, trajectory_format=trajectory_format)
        other.load_checkpoint(str(directory / "saved"))
        yield "loaded", other.sample(6)
        other.close()
        if trajectory_format == "pt":
            convert(directory / "store", directory / "converted", "safetensors")
            yield "converted", verify(directory / "converted").damage

    return scenario


# Nested tensors have no bytes to compare, and the transform of the registry makes its state as the mode says.
SCENARIOS: dict[str, Callable[[Path], Steps]] = {
    **{name: stateful(name) for name in STATEFUL if name not in {"ragged", "a transform with a state"}},
    "numbers": numbers,
    "checkpoints": checkpoints,
    "ensembles": ensembles,
    "torch's generator": unseeded,
    "flows": flows,
    "environments": environments("SAME_STEP", 1),
    "environments, next step": environments("NEXT_STEP", 1),
    "environments, disabled": environments("DISABLED", 2),
    "objectrl": object_rl,
    "trajectories, pt": trajectories("pt"),
    "trajectories, safetensors": trajectories("safetensors"),
}
