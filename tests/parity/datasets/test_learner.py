"""The learner of LeRobot 0.6.1 with the import of its replay buffer changed, in the environment of LeRobot."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from ..originals import FOLDER
from .conftest import ROOT, lerobot_python

PROGRAM = Path(__file__).with_name("_learner.py")


def test_the_learner_updates_its_policy_from_our_buffers(tmp_path):
    """Online and offline buffer, 200 updates of SAC, and the datasets that it saves at the end."""
    python = lerobot_python()
    if python is None or not (FOLDER / "lerobot").exists():
        pytest.skip("no environment with lerobot: run `make build/lerobot/.installed build/originals/.installed`")
    home = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [python, PROGRAM, FOLDER, ROOT / "src", tmp_path, "ostinato.compat.lerobot", "200"],
        env=os.environ | home | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"lerobot does not load in its environment: {done.stderr.splitlines()[-1]}")
    assert not done.returncode, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["module"] == "ostinato.compat.lerobot"
    assert len(found["losses"]) == 200
    assert all(map(math.isfinite, found["losses"]))
    assert found["sizes"] == [300, 100]
    assert found["saved"] == ["checkpoints", "dataset", "dataset_offline"]
