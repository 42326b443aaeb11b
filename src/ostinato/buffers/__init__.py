"""Replay buffers: a storage, a sampler and a writer behind one lock."""

from ostinato.buffers.ensemble import OfflineToOnlineReplayBuffer, ReplayBufferEnsemble, prefill_replay_buffer
from ostinato.buffers.queries import TrajectoryPredicate, filter_trajectories, iter_trajectories, traj
from ostinato.buffers.rate_limit import RateLimiter
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.schedulers import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from ostinato.buffers.stats import BufferStats
from ostinato.buffers.updates import ConditionalUpdateResult
from ostinato.buffers.variants import (
    HERReplayBuffer,
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.core.processes import send_as_copies

__all__ = [
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
]

send_as_copies(
    ReplayBuffer,
    TensorDictReplayBuffer,
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    HERReplayBuffer,
    ReplayBufferEnsemble,
)
