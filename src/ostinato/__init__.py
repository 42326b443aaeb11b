"""Ostinato: replay buffers that are fast and exact."""

from ostinato.buffers import BufferStats, ReplayBuffer, TensorDictReplayBuffer
from ostinato.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, TensorStorage
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
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "ToDevice",
    "Writer",
]
