"""Saves killed at random moments: the directory holds the old state or the new one, and takes the next save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(
    ("kills", "seed"), [(8, 1), pytest.param(200, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_killed_save_leaves_the_old_state_or_the_new(
    kills: int, seed: int, incremental: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash.killer", tmp_path, kills, seed, incremental]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not found["wrong"], found["wrong"]
    assert found["old"] + found["new"] == found["turns"], found
    assert found["inside"] == kills, found
