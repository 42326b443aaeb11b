"""What a type checker sees in a user's file: options that are misspelt, and results that depend on a flag."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("mypy")

GOOD = """
from typing import Any, assert_type
import torch
from ostinato import (
    LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferEnsemble, TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, prefetch=1, priority_key=("agent", "error"))
ranked = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(10), batch_size=2, dim_extend=0)
both = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(10), pin_memory=False)
plain = ReplayBuffer(batch_size=4)
batch, info = plain.sample(return_info=True)
assert_type(info, dict[Any, Any])
batch, info = rb.sample(2, True)
assert_type(info, dict[Any, Any])
with ReplayBufferEnsemble(plain, plain) as ensemble:
    whole, names = ensemble.sample(4, return_info=True)
"""

BAD = """
from ostinato import PrioritizedReplayBuffer, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

TensorDictReplayBuffer(batchsize=2)
PrioritizedReplayBuffer(alpha=0.6, beta=0.4, pre_fetch=2)
TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storages=None)
ReplayBuffer(batch_size="four")
TensorDictReplayBuffer(prefetch="many")
"""


def check(path: Path, text: str) -> list[str]:
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(path.parent / "cache"), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    return re.findall(r"user\.py:(\d+): error", done.stdout)


def test_a_type_checker_knows_every_option(tmp_path: Path) -> None:
    assert check(tmp_path / "user.py", GOOD) == []
    assert check(tmp_path / "user.py", BAD) == [str(line) for line in range(4, 9)]
