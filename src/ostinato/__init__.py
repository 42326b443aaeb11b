"""Ostinato: replay buffers that are fast and exact."""

from ostinato.buffers import (
    BufferStats,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.samplers import PrioritizedSampler, RandomSampler, Sampler, SamplerWithoutReplacement
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, TensorStorage
from ostinato.trajectories import Trajectory, TrajectoryReplayBuffer
from ostinato.transforms import Cast, Compose, Exclude, Rename, RewardScale, Select, ToDevice
from ostinato.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "BufferStats",
    "Cast",
    "Compose",
    "Exclude",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RandomSampler",
    "Rename",
    "ReplayBuffer",
    "RewardScale",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "Select",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "ToDevice",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "Writer",
]
