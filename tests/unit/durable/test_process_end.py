"""What a program leaves when it ends without closing anything: all files, and no thread that it waits for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.unit.trajectories.rollouts import ids_on_disk

PROGRAM = """
import os, pathlib, sys, torch
from ostinato import LazyMemmapStorage, Trajectory, TrajectoryReplayBuffer
from ostinato.durable import codecs

root = pathlib.Path(sys.argv[1])
paths = [root / "kept", root / "removed"]
storages = [LazyMemmapStorage(7, scratch_dir=path, auto_cleanup=path.name == "removed") for path in paths]
for storage in storages:
    storage.set(range(3), torch.arange(3))
assert (root / "removed").exists()

buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=root / "rollouts")
buffer.add_trajectories([Trajectory(rewards=torch.ones(4, 2, 1))] * 3)

codecs._MOST_THREADS = 2
work = lambda: codecs.map_in_threads(lambda part: [2 * i for i in part], range(9), 2 << 20)
assert work() == list(range(0, 18, 2))
child = os.fork()
if not child:  # has no threads, and makes its own
    os._exit(0 if work() == list(range(0, 18, 2)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_program_may_just_end(tmp_path):
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], timeout=240, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "rollouts"]
    assert ids_on_disk(tmp_path / "rollouts") == [0, 1, 2]
