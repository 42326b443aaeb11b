"""Ostinato: replay buffers that are fast and exact."""

from ostinato.buffers import (
    BufferStats,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.samplers import PrioritizedSampler, RandomSampler, Sampler, SamplerEnsemble, SamplerWithoutReplacement
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, StorageEnsemble, TensorStorage
from ostinato.transforms import Cast, Compose, Exclude, Rename, RewardScale, Select, ToDevice
from ostinato.writers import (
    ImmutableDatasetWriter,
    ReservoirWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
    WriterEnsemble,
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
    "ReplayBufferEnsemble",
    "ReservoirWriter",
    "RewardScale",
    "RoundRobinWriter",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "Select",
    "Storage",
    "StorageEnsemble",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "ToDevice",
    "Writer",
    "WriterEnsemble",
]
