"""Ostinato: replay buffers that are fast and exact.

A name of this page imports its module when it is first used: a program pays for the parts it uses, and `import
ostinato` alone imports neither torch nor NumPy.
"""

import importlib
from typing import TYPE_CHECKING

from ostinato import _backend as _backend  # reads OSTINATO_NATIVE: its errors and warnings belong to this import

if TYPE_CHECKING:  # for editors and type checkers; `_MODULES` says the same at run time
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
    from ostinato.buffers.datasets import export
    from ostinato.buffers.observer import Observer, RowValues
    from ostinato.collect import VectorEnvRecorder
    from ostinato.core.episodes.continuity import DEFAULT_DONE_KEYS, find_start_stop_traj
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.datasets import DatasetStorage, open_dataset
    from ostinato.distributed.groups import GroupClient, GroupServer, RayGroupBuffer
    from ostinato.distributed.ray_buffer import RayReplayBuffer
    from ostinato.distributed.rpc import RemoteTensorDictReplayBuffer
    from ostinato.distributed.sharded import ShardedReplayBuffer
    from ostinato.durable.codecs import Codec, ZlibCodec, ZstdCodec
    from ostinato.durable.progress import ProgressOption
    from ostinato.durable.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
    from ostinato.groups import GroupBuffer, GroupLogger, TokenBudget
    from ostinato.samplers import (
        ConsumingSampler,
        HeapSampler,
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
        StackSampler,
        StalenessAwareSampler,
        StreamingSliceSampler,
    )
    from ostinato.storages import (
        CompressedListStorage,
        LazyMemmapStorage,
        LazyStackStorage,
        LazyTensorStorage,
        ListStorage,
        RaggedTensorStorage,
        Storage,
        StorageColumn,
        StorageEnsemble,
        TensorStorage,
    )
    from ostinato.storages.checkpointers import (
        CompressedListStorageCheckpointer,
        FlatStorageCheckpointer,
        H5StorageCheckpointer,
        ListStorageCheckpointer,
        NestedStorageCheckpointer,
        StorageCheckpointerBase,
        StorageEnsembleCheckpointer,
        TensorStorageCheckpointer,
    )
    from ostinato.trajectories import Trajectory, TrajectoryReplayBuffer
    from ostinato.transforms import Cast as CastFields
    from ostinato.transforms import Compose as ComposeTransforms
    from ostinato.transforms import Exclude as ExcludeFields
    from ostinato.transforms import Rename as RenameFields
    from ostinato.transforms import RewardScale, ToDevice
    from ostinato.transforms import Select as SelectFields
    from ostinato.units import (
        DeltaTimestamps,
        FrameStack,
        Hindsight,
        HindsightStrategy,
        NStep,
        SampleUnit,
        SequenceUnit,
        Transition,
    )
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
    "CompressedListStorageCheckpointer",
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "DEFAULT_DONE_KEYS",
    "DatasetStorage",
    "DeltaTimestamps",
    "Episodes",
    "ExcludeFields",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "FrameStack",
    "GroupBuffer",
    "GroupClient",
    "GroupLogger",
    "GroupServer",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "HERReplayBuffer",
    "HeapSampler",
    "Hindsight",
    "HindsightStrategy",
    "ImmutableDatasetWriter",
    "LambdaScheduler",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LimitedSampler",
    "LinearScheduler",
    "ListStorage",
    "ListStorageCheckpointer",
    "NStep",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "Observer",
    "OfflineToOnlineReplayBuffer",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "ProgressOption",
    "PromptGroupSampler",
    "QueueSampler",
    "RaggedTensorStorage",
    "RandomSampler",
    "RateLimiter",
    "RayGroupBuffer",
    "RayReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "RenameFields",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "ReservoirWriter",
    "RewardScale",
    "RoundRobinWriter",
    "RowValues",
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
    "StackSampler",
    "StalenessAwareSampler",
    "StepScheduler",
    "Storage",
    "StorageCheckpointerBase",
    "StorageColumn",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "StreamingSliceSampler",
    "TED2Flat",
    "TED2Nested",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "ToDevice",
    "TokenBudget",
    "Trajectory",
    "TrajectoryPredicate",
    "TrajectoryReplayBuffer",
    "Transition",
    "VectorEnvRecorder",
    "Writer",
    "WriterEnsemble",
    "ZlibCodec",
    "ZstdCodec",
    "export",
    "filter_trajectories",
    "find_start_stop_traj",
    "iter_trajectories",
    "open_dataset",
    "prefill_replay_buffer",
    "traj",
]

_MODULES = {
    "buffers": (
        "BufferStats",
        "ConditionalUpdateResult",
        "HERReplayBuffer",
        "LambdaScheduler",
        "LinearScheduler",
        "OfflineToOnlineReplayBuffer",
        "ParameterScheduler",
        "PrioritizedReplayBuffer",
        "RateLimiter",
        "ReplayBuffer",
        "ReplayBufferEnsemble",
        "SchedulerList",
        "StepScheduler",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
        "TrajectoryPredicate",
        "filter_trajectories",
        "iter_trajectories",
        "prefill_replay_buffer",
        "traj",
    ),
    "buffers.datasets": ("export",),
    "buffers.observer": ("Observer", "RowValues"),
    "collect": ("VectorEnvRecorder",),
    "core.episodes.continuity": ("DEFAULT_DONE_KEYS", "find_start_stop_traj"),
    "core.episodes.tracker": ("Episodes",),
    "datasets": ("DatasetStorage", "open_dataset"),
    "distributed.groups": ("GroupClient", "GroupServer", "RayGroupBuffer"),
    "distributed.ray_buffer": ("RayReplayBuffer",),
    "distributed.rpc": ("RemoteTensorDictReplayBuffer",),
    "distributed.sharded": ("ShardedReplayBuffer",),
    "durable.codecs": ("Codec", "ZlibCodec", "ZstdCodec"),
    "durable.progress": ("ProgressOption",),
    "durable.ted": ("Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested"),
    "groups": ("GroupBuffer", "GroupLogger", "TokenBudget"),
    "samplers": (
        "ConsumingSampler",
        "HeapSampler",
        "LimitedSampler",
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "PromptGroupSampler",
        "QueueSampler",
        "RandomSampler",
        "Sampler",
        "SamplerEnsemble",
        "SamplerWithoutReplacement",
        "SliceSampler",
        "SliceSamplerWithoutReplacement",
        "StackSampler",
        "StalenessAwareSampler",
        "StreamingSliceSampler",
    ),
    "storages": (
        "CompressedListStorage",
        "LazyMemmapStorage",
        "LazyStackStorage",
        "LazyTensorStorage",
        "ListStorage",
        "RaggedTensorStorage",
        "Storage",
        "StorageColumn",
        "StorageEnsemble",
        "TensorStorage",
    ),
    "storages.checkpointers": (
        "CompressedListStorageCheckpointer",
        "FlatStorageCheckpointer",
        "H5StorageCheckpointer",
        "ListStorageCheckpointer",
        "NestedStorageCheckpointer",
        "StorageCheckpointerBase",
        "StorageEnsembleCheckpointer",
        "TensorStorageCheckpointer",
    ),
    "trajectories": ("Trajectory", "TrajectoryReplayBuffer"),
    "transforms": (
        "CastFields",
        "ComposeTransforms",
        "ExcludeFields",
        "RenameFields",
        "RewardScale",
        "SelectFields",
        "ToDevice",
    ),
    "units": (
        "DeltaTimestamps",
        "FrameStack",
        "Hindsight",
        "HindsightStrategy",
        "NStep",
        "SampleUnit",
        "Sequence",
        "SequenceUnit",
        "Transition",
    ),
    "writers": (
        "ImmutableDatasetWriter",
        "ReservoirWriter",
        "RoundRobinWriter",
        "TensorDictMaxValueWriter",
        "TensorDictRoundRobinWriter",
        "Writer",
        "WriterEnsemble",
    ),
}
"""The module of each public name."""

_RENAMED = {
    "CastFields": "Cast",
    "ComposeTransforms": "Compose",
    "ExcludeFields": "Exclude",
    "RenameFields": "Rename",
    "SelectFields": "Select",
}
"""Public names that differ from those in their modules."""

if not TYPE_CHECKING:  # a type checker would take every name for a public one

    def __getattr__(name: str) -> object:
        """Import a public name, or a package of the library, when it is first used."""
        for module, names in _MODULES.items():
            if name in names:
                value = getattr(importlib.import_module(f"ostinato.{module}"), _RENAMED.get(name, name))
                globals()[name] = value
                return value
        if any(module.partition(".")[0] == name for module in _MODULES):
            return importlib.import_module(f"ostinato.{name}")
        msg = f"module 'ostinato' has no attribute {name!r}"
        raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "importlib"})
