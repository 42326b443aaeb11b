"""The example of actors that collect and one learner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("gymnasium")

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed_dqn.py"


def test_actors_collect_while_a_learner_learns(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "return" in done.stdout
    assert "rows/s" in done.stdout
