"""Every public class raises for numbers and choices that it cannot use, with the name of the option."""

from __future__ import annotations

import inspect
from typing import Any

import ostinato
from ostinato import PrioritizedSampler, RandomSampler
from ostinato.testing import OptionContract
from tests.registry import reached, ring, rows

LEFT_OUT = {
    *("BufferStats", "ParameterScheduler", "Storage", "Trajectory"),  # records and abstract classes
    *("RayGroupBuffer", "RayReplayBuffer", "ShardedReplayBuffer"),  # would begin a cluster
    "GroupServer",  # has no such options
}
BUFFER = ring(4, batch_size=2)
SCHEDULE: dict[str, Any] = {"obj": PrioritizedSampler(4, 0.7, 0.5), "param_name": "beta"}
ARGUMENTS = {"ReplayBufferEnsemble": (BUFFER,), "SamplerEnsemble": (RandomSampler(),)}
NEEDED: dict[str, Any] = {
    "DeltaTimestamps": {"delta_timestamps": {"obs": [0.0]}, "fps": 10},
    "FrameStack": {"k": 2, "keys": ["obs"]},
    "GroupClient": {"address": "socket"},
    "GroupLogger": {"buffer": None, "writer": None},
    "HERReplayBuffer": {"reward_fn": reached},
    "HeapSampler": {"max_capacity": 4},
    "Hindsight": {"reward_fn": reached},
    "LambdaScheduler": {**SCHEDULE, "lambda_fn": float},
    "LazyMemmapStorage": {"max_size": 4},
    "LazyTensorStorage": {"max_size": 4},
    "LimitedSampler": {"max_times_sampled": 2},
    "LinearScheduler": {**SCHEDULE, "final_value": 1.0, "num_steps": 2},
    "NStep": {"n": 3, "gamma": 0.9},
    "OfflineToOnlineReplayBuffer": {
        "offline_dataset": BUFFER,
        "online_capacity": 4,
    },
    "PrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.5},
    "PrioritizedSampler": {"max_capacity": 4, "alpha": 0.7, "beta": 0.5},
    "PrioritizedSliceSampler": {"max_capacity": 4, "alpha": 0.7, "beta": 0.5, "slice_len": 2},
    "PromptGroupSampler": {"num_groups": 2},
    "RaggedTensorStorage": {"max_size": 4, "ragged": "tokens"},
    "RateLimiter": {"samples_per_insert": 1.0, "min_size_to_sample": 1, "error_buffer": 10},
    "RewardScale": {"scale": 2.0},
    "RowValues": {"name": "weight"},
    "SequenceUnit": {"length": 3},
    "SliceSampler": {"slice_len": 2},
    "SliceSamplerWithoutReplacement": {"slice_len": 2},
    "StepScheduler": SCHEDULE,
    "StreamingSliceSampler": {"slice_len": 3},
    "TensorDictPrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.5},
    "TensorStorage": {"storage": rows(4)},
    "TokenBudget": {"max_tokens": 8},
    "VectorEnvRecorder": {"rb": BUFFER, "num_envs": 2, "autoreset_mode": "next_step"},
}


def suites() -> dict[str, type[OptionContract]]:
    """Return a contract for each class that declares options of these kinds."""
    found = {}
    for name in set(ostinato.__all__) - LEFT_OUT:
        kind = getattr(ostinato, name)
        members = {"kind": kind, "arguments": ARGUMENTS.get(name, ()), "needed": NEEDED.get(name, {})}
        suite = type(f"Test{name}", (OptionContract,), {**members, "__module__": __name__})
        if inspect.isclass(kind) and any(suite().wrong_options()):
            found[suite.__name__] = suite
    return dict(sorted(found.items()))


globals().update(suites())
