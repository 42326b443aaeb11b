"""A program of its own that makes buffers in a cluster, writes rows, and waits to be killed.

Arguments: the address of the cluster, and a directory for checkpoints.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import ray
import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, RateLimiter, RayReplayBuffer, ShardedReplayBuffer

ROWS = 24


def main() -> None:
    ray.init(address=sys.argv[1], namespace="another", log_to_driver=False, logging_level=40)
    common: dict[str, Any] = {
        "storage": partial(LazyTensorStorage, 1000),
        "sampler": partial(PrioritizedSampler, 1000, 0.7, 0.5),
        "batch_size": 8,
    }
    kept = ShardedReplayBuffer(
        2,
        **common,
        name="kept fleet",
        lifetime="detached",
        rate_limiter=RateLimiter(samples_per_insert=1, error_buffer=64, min_size_to_sample=8, timeout_s=1.0),
        placement="PACK",
        checkpoint_dir=f"{sys.argv[2]}/kept",
        remote_config={"num_cpus": 0.1},
    )
    kept.pinned(0).extend({"x": torch.arange(ROWS)})
    none = {"num_cpus": 0}
    tied = ShardedReplayBuffer(1, **common, name="tied fleet", checkpoint_dir=f"{sys.argv[2]}/tied", remote_config=none)
    tied.extend({"x": torch.arange(ROWS)})
    actors = [
        RayReplayBuffer(**common, remote_config={**none, "name": "kept actor", "lifetime": "detached"}),
        RayReplayBuffer(**common, name="tied actor", remote_config=none),
    ]
    for one in actors:
        one.extend({"x": torch.arange(ROWS)})
    sys.stdout.write("made\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
