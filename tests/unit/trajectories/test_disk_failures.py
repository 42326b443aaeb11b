"""Full disks, failed writes and limits on files: errors name the file, and saved trajectories are not lost."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.unit.trajectories.kills import run_and_kill
from tests.unit.trajectories.rollouts import (
    add,
    check_batch,
    ids_on_disk,
    loaded,
    needs_fork,
    rollout,
    saving,
    small,
)

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    StorageMemoryError,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@needs_fork
def test_after_a_failed_checkpoint_saved_trajectories_survive_a_kill(tmp_path):
    def work(report: Callable[[bytes], None]) -> None:
        buffer = saving(tmp_path / "a", save_queue_size=60)
        add(buffer, *(small() for _ in range(60)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (15000, resource.RLIM_INFINITY))
        with pytest.raises(MemoryError):
            buffer.save_checkpoint(tmp_path / "a")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        report(b"%d" % add(buffer, small())[0])
        os.kill(os.getpid(), signal.SIGKILL)

    killed, said = run_and_kill(work, 10**9)
    assert (killed, said) == (True, b"60")
    assert ids_on_disk(tmp_path / "a") == list(range(61))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_low_limit_of_open_files_is_named(tmp_path):
    with saving(tmp_path / "a", form="safetensors") as buffer:
        add(buffer, *(small() for _ in range(60)))
    gc.collect()

    def work(report: Callable[[bytes], None]) -> None:
        loaded = TrajectoryReplayBuffer()
        loaded.load_checkpoint(tmp_path / "a")
        resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 10, 4096))
        with pytest.raises(CapacityError, match="lower max_open_files"):
            loaded.sample(400)
        careful = TrajectoryReplayBuffer(max_open_files=4)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        careful.load_checkpoint(tmp_path / "a")
        resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 10, 4096))
        careful.sample(400)
        report(b"done")

    assert run_and_kill(work, 10**9) == (False, b"done")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_full_disk_is_reported_once_while_sampling_continues(tmp_path, form):
    big = Trajectory(**(rollout(1).to_dict() | {"extra": {"big": torch.zeros(200000)}}))

    def work(report: Callable[[bytes], None]) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        mine = saving(tmp_path / "b", 1, form=form)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, resource.RLIM_INFINITY))
        future = mine.add_trajectories([big])
        assert future is not None
        with pytest.raises(StorageMemoryError, match=r"cannot write .* bytes needed, .*: free disk space"):
            future.result(20)
        with pytest.raises(CheckpointError, match=r"\(ids 1\): cannot write .* next add_trajectories, flush or close"):
            mine.sample(5)
        for _ in range(5):
            check_batch(mine.sample(20))  # the trajectories are still in memory
            time.sleep(0.01)
        assert mine.get_stats()["pending_saves"] == 1
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"\(ids 1\): cannot write"):
                mine.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        mine.close()
        report(b"done")

    assert run_and_kill(work, 10**9) == (False, b"done")
    assert loaded(tmp_path / "b").trajectory_ids == [0, 1]
