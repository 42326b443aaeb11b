"""Ostinato: replay buffers that are fast and exact."""

from ostinato.buffers import (
    BufferStats,
    ConditionalUpdateResult,
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    PrioritizedReplayBuffer,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SchedulerList,
    StepScheduler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.collect import VectorEnvRecorder
from ostinato.core.episodes.keys import Episodes
from ostinato.distributed.ray_buffer import RayReplayBuffer
from ostinato.distributed.rpc import RemoteTensorDictReplayBuffer
from ostinato.distributed.sharded import ShardedReplayBuffer
from ostinato.durable.ted import Flat2TED, TED2Flat
from ostinato.samplers import (
    LimitedSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, StorageEnsemble, TensorStorage
from ostinato.trajectories import Trajectory, TrajectoryReplayBuffer
from ostinato.transforms import Cast as CastFields
from ostinato.transforms import Compose as ComposeTransforms
from ostinato.transforms import Exclude as ExcludeFields
from ostinato.transforms import Rename as RenameFields
from ostinato.transforms import RewardScale, ToDevice
from ostinato.transforms import Select as SelectFields
from ostinato.units import FrameStack, Hindsight, NStep, SampleUnit, SequenceUnit, Transition
from ostinato.units import Sequence as Sequence  # TorchRL's name; not in __all__, which would hide typing.Sequence
from ostinato.writers import (
    ImmutableDatasetWriter,
    ReservoirWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
    WriterEnsemble,
)

__version__ = "0.1.0"

__all__ = [
    "BufferStats",
    "CastFields",
    "ComposeTransforms",
    "ConditionalUpdateResult",
    "Episodes",
    "ExcludeFields",
    "Flat2TED",
    "FrameStack",
    "Hindsight",
    "ImmutableDatasetWriter",
    "LambdaScheduler",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "LimitedSampler",
    "LinearScheduler",
    "ListStorage",
    "NStep",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "QueueSampler",
    "RandomSampler",
    "RateLimiter",
    "RayReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "RenameFields",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "ReservoirWriter",
    "RewardScale",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "SelectFields",
    "SequenceUnit",
    "ShardedReplayBuffer",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StepScheduler",
    "Storage",
    "StorageEnsemble",
    "TED2Flat",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "ToDevice",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "Transition",
    "VectorEnvRecorder",
    "Writer",
    "WriterEnsemble",
]
