"""A type checker knows every option of a distributed buffer, and what `sample` returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")

ROOT = Path(__file__).parents[2]

RIGHT = """
from functools import partial

import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, RayReplayBuffer, ShardedReplayBuffer
from ostinato import TensorDictPrioritizedReplayBuffer

storage = partial(LazyTensorStorage, 100)
rb = RayReplayBuffer(storage=storage, batch_size=4, prefetch=2, remote_config={"num_cpus": 1})
index: torch.Tensor = rb.sample(return_info=True)[1]["index"]
index = rb.sample(4, True)[1]["index"]
prioritized = RayReplayBuffer(replay_buffer_cls=TensorDictPrioritizedReplayBuffer, alpha=0.6, beta=0.4)
with ShardedReplayBuffer(2, storage=storage, sampler=partial(PrioritizedSampler, 100, 0.6, 0.4), batch_size=4) as rb2:
    index = rb2.sample(return_info=True)[1]["index"]
    batch = rb2.sample()
"""

WRONG = {
    "RayReplayBuffer(batch_sise=4)": 'Unexpected keyword argument "batch_sise"',
    "ShardedReplayBuffer(2, rate_limitter=None)": 'Unexpected keyword argument "rate_limitter"',
    'ShardedReplayBuffer(2, batch_size="4")': 'Argument "batch_size" to "ShardedReplayBuffer" has incompatible type',
    "RayReplayBuffer().sample(return_info=True).keys()": '"tuple[Any, dict[str, Any]]" has no attribute "keys"',
}


def test_options_and_results_are_typed(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(RIGHT + "\n".join(WRONG))
    command = [sys.executable, "-m", "mypy", "--strict", str(file)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), found.stdout + found.stderr
    for error, expected in zip(errors, WRONG.values(), strict=True):
        assert expected in error
