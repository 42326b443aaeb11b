"""Saves killed at random moments: the directory holds the old state or the new one, and takes the next save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.crash.modes import WAYS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def _kill(kills: int, seed: int, way: tuple[str, str], folder: Path, report: Callable[[str, object], None]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash.killer", str(folder), str(kills), str(seed), *way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    said = "{inside} of {kills} kills fell inside a save; {old} left the old state, {new} the new one".format(**found)
    report("kills", said)
    assert not found["wrong"], found["wrong"]
    assert found["old"] + found["new"] == found["kills"] == kills
    assert found["inside"] >= 0.8 * kills, said


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_killed_save_leaves_the_old_state_or_the_new(
    way: tuple[str, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    _kill(8, 1, way, tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_two_hundred_killed_saves(
    way: tuple[str, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    _kill(200, 2, way, tmp_path, record_property)
