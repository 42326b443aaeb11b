"""Ostinato: replay buffers that are fast and exact."""

from ostinato.buffers import (
    BufferStats,
    ConditionalUpdateResult,
    HERReplayBuffer,
    LambdaScheduler,
    LinearScheduler,
    OfflineToOnlineReplayBuffer,
    ParameterScheduler,
    PrioritizedReplayBuffer,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SchedulerList,
    StepScheduler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TrajectoryPredicate,
    filter_trajectories,
    iter_trajectories,
    prefill_replay_buffer,
    traj,
)
from ostinato.collect import VectorEnvRecorder
from ostinato.core.episodes.boundaries import DEFAULT_DONE_KEYS, find_start_stop_traj
from ostinato.core.episodes.keys import Episodes
from ostinato.distributed.ray_buffer import RayReplayBuffer
from ostinato.distributed.rpc import RemoteTensorDictReplayBuffer
from ostinato.distributed.sharded import ShardedReplayBuffer
from ostinato.durable.codecs import Codec, ZlibCodec, ZstdCodec
from ostinato.durable.ted import Flat2TED, TED2Flat
from ostinato.samplers import (
    ConsumingSampler,
    LimitedSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    QueueSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from ostinato.storages import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from ostinato.trajectories import Trajectory, TrajectoryReplayBuffer
from ostinato.transforms import Cast as CastFields
from ostinato.transforms import Compose as ComposeTransforms
from ostinato.transforms import Exclude as ExcludeFields
from ostinato.transforms import Rename as RenameFields
from ostinato.transforms import RewardScale, ToDevice
from ostinato.transforms import Select as SelectFields
from ostinato.units import FrameStack, Hindsight, HindsightStrategy, NStep, SampleUnit, SequenceUnit, Transition
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

__all__ = [  # noqa: RUF022 (plain order: ruff would put the constant first)
    "BufferStats",
    "CastFields",
    "Codec",
    "ComposeTransforms",
    "CompressedListStorage",
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "DEFAULT_DONE_KEYS",
    "Episodes",
    "ExcludeFields",
    "Flat2TED",
    "FrameStack",
    "HERReplayBuffer",
    "Hindsight",
    "HindsightStrategy",
    "ImmutableDatasetWriter",
    "LambdaScheduler",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "LimitedSampler",
    "LinearScheduler",
    "ListStorage",
    "NStep",
    "OfflineToOnlineReplayBuffer",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
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
    "StalenessAwareSampler",
    "StepScheduler",
    "Storage",
    "StorageEnsemble",
    "StreamingSliceSampler",
    "TED2Flat",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "ToDevice",
    "Trajectory",
    "TrajectoryPredicate",
    "TrajectoryReplayBuffer",
    "Transition",
    "VectorEnvRecorder",
    "Writer",
    "WriterEnsemble",
    "ZlibCodec",
    "ZstdCodec",
    "filter_trajectories",
    "find_start_stop_traj",
    "iter_trajectories",
    "prefill_replay_buffer",
    "traj",
]
