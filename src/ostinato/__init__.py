"""Ostinato: replay buffers that are fast and exact."""

from ostinato.buffers import (
    BufferStats,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.collect import VectorSteps
from ostinato.core.boundaries import Episodes
from ostinato.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, TensorStorage
from ostinato.transforms import Cast, Compose, Exclude, Rename, RewardScale, Select, ToDevice
from ostinato.units import FrameStack, Hindsight, NStep, SampleUnit, Sequence, Transition
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
    "Episodes",
    "Exclude",
    "FrameStack",
    "Hindsight",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "NStep",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Rename",
    "ReplayBuffer",
    "RewardScale",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerWithoutReplacement",
    "Select",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "ToDevice",
    "Transition",
    "VectorSteps",
    "Writer",
]
