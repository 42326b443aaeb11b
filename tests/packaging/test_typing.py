"""What a type checker sees in a user's file: every option of a buffer, and results without a type of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")

ROOT = Path(__file__).parents[2]

RIGHT = """
from functools import partial
from typing import Any, assert_type

import torch

from ostinato import LazyTensorStorage, PrioritizedReplayBuffer, PrioritizedSampler, RayReplayBuffer, ReplayBuffer
from ostinato import ReplayBufferEnsemble, ShardedReplayBuffer, TensorDictPrioritizedReplayBuffer
from ostinato import TensorDictReplayBuffer

storage = partial(LazyTensorStorage, 100)
plain = ReplayBuffer(batch_size=4)
batch, info = plain.sample(return_info=True)
assert_type(info, Any)
dicts = TensorDictReplayBuffer(storage=storage, batch_size=2, prefetch=1, priority_key=("agent", "error"))
batch, info = dicts.sample(2, True)
prioritized = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=2, dim_extend=0)
both = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, pin_memory=False)
with ReplayBufferEnsemble(plain, plain) as ensemble:
    whole, names = ensemble.sample(4, return_info=True)
ray = RayReplayBuffer(storage=storage, batch_size=4, prefetch=2, remote_config={"num_cpus": 1})
index: torch.Tensor = ray.sample(4, True)[1]["index"]
assert_type(ray.delete(index, timeout_s=1.0), torch.Tensor)
assert_type((ray.write_count, ray.stats().rows), tuple[int, int])
actor = RayReplayBuffer(replay_buffer_cls=TensorDictPrioritizedReplayBuffer, alpha=0.6, beta=0.4)
with ShardedReplayBuffer(2, storage=storage, sampler=partial(PrioritizedSampler, 100, 0.6, 0.4), batch_size=4) as rb:
    index = rb.sample(return_info=True)[1]["index"]
    batch = rb.sample()
"""

WRONG = {
    "TensorDictReplayBuffer(batchsize=2)": 'Unexpected keyword argument "batchsize"',
    "PrioritizedReplayBuffer(alpha=0.6, beta=0.4, pre_fetch=2)": 'Unexpected keyword argument "pre_fetch"',
    "TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storages=None)": 'Unexpected keyword argument "storages"',
    'ReplayBuffer(batch_size="four")': 'Argument "batch_size" to "ReplayBuffer" has incompatible type',
    'TensorDictReplayBuffer(prefetch="many")': 'Argument "prefetch" to "TensorDictReplayBuffer" has incompatible type',
    "RayReplayBuffer(batch_sise=4)": 'Unexpected keyword argument "batch_sise"',
    "ray.delete(index, timeout=1.0)": "No overload variant",
    "ShardedReplayBuffer(2, rate_limitter=None)": 'Unexpected keyword argument "rate_limitter"',
    'ShardedReplayBuffer(2, batch_size="4")': 'Argument "batch_size" to "ShardedReplayBuffer" has incompatible type',
}


@pytest.mark.slow
def test_a_type_checker_knows_options_and_results(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(RIGHT + "\n".join(WRONG))
    command = [sys.executable, "-m", "mypy", "--strict", str(file)]  # in ROOT, where `make check` leaves its cache
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in found.stdout.splitlines() if re.search(r": error: ", line)]
    assert len(errors) == len(WRONG), found.stdout + found.stderr
    first = RIGHT.count("\n") + 1
    for number, (error, expected) in enumerate(zip(errors, WRONG.values(), strict=True)):
        assert f":{first + number}: " in error
        assert expected in error
