"""Threads and forks: readers beside a saver, adding beside sampling and clearing, callbacks."""

from __future__ import annotations

import shutil
import threading
from itertools import count
from typing import TYPE_CHECKING

import pytest
import torch
from tests.unit.background import in_background
from tests.unit.trajectories.kills import run_and_kill
from tests.unit.trajectories.rollouts import (
    add,
    check_batch,
    ids_on_disk,
    needs_fork,
    rollout,
    saving,
    small,
)

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.errors import (
    EmptyBufferError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def tiny() -> Trajectory:
    return Trajectory(rewards=torch.zeros(2, 2), model_weights_id="w")


@pytest.mark.parametrize("fold", ["save_checkpoint", "close"])
def test_a_reader_finds_all_saved_trajectories_while_the_index_is_written(tmp_path, fold):
    buffer = saving(tmp_path / "a", save_queue_size=100)
    saved = len(add(buffer, *[tiny()] * 60))  # so that reading the index takes long

    def save() -> None:
        nonlocal saved
        saved = add(buffer, tiny())[0] + 1
        buffer.save_checkpoint(tmp_path / "a") if fold == "save_checkpoint" else buffer.close()

    with in_background(save):
        for _ in range(40):
            least = saved
            reader = TrajectoryReplayBuffer()
            reader.load_checkpoint(tmp_path / "a")
            assert len(reader) >= least
    buffer.close()


@pytest.mark.parametrize("again", ["clear", "load_checkpoint"])
def test_sampling_continues_while_another_thread_clears_or_loads(tmp_path, again):
    """Spilled files are removed while rows of them are read: the rows are drawn again."""
    for form in ("pt", "safetensors"):
        with saving(tmp_path / form, form=form) as saver:
            saver.add_trajectories([rollout(number) for number in range(20)])
    buffer = TrajectoryReplayBuffer(cache_size=1, max_open_files=2)
    buffer.add_trajectories([rollout(0)])

    def draw() -> None:
        try:
            check_batch(buffer.sample(30))
        except EmptyBufferError:
            assert again == "clear"

    with in_background(draw):
        for turn in range(6):
            buffer.add_trajectories([rollout(number) for number in range(8)])
            buffer.clear() if again == "clear" else buffer.load_checkpoint(tmp_path / ("pt", "safetensors")[turn % 2])


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Python versions warn about such forks
def test_a_fork_can_sample_whatever_locks_other_threads_held(tmp_path):
    """As the workers of a data loader do, while the parent adds and samples."""
    buffer = saving(tmp_path / "a", cache_size=1, max_open_files=1, form="safetensors")
    buffer.add_trajectories([rollout(number) for number in range(4)])

    def work(report: Callable[[bytes], None]) -> None:
        for _ in range(3):
            check_batch(buffer.sample(20))
        buffer.get_stats()
        report(b"done")

    numbers = count(4)
    with in_background(
        lambda: check_batch(buffer.sample(20)), lambda: buffer.add_trajectories([rollout(next(numbers))])
    ):
        for _ in range(6):
            assert run_and_kill(work, 10**9) == (False, b"done")
    buffer.close()


def test_a_callback_of_a_future_may_add_but_not_wait_for_the_saver(tmp_path):
    buffer = saving(tmp_path / "a", save_queue_size=1)
    heard: list[str] = []
    done = threading.Event()

    def callback(_: object) -> None:
        try:
            for call in (buffer.flush, buffer.clear):
                with pytest.raises(UsageError):
                    call()
            buffer.add_trajectories([rollout(number) for number in range(2, 5)])
            buffer.save_checkpoint(tmp_path / "b")
            heard.append(threading.current_thread().name)
        finally:
            done.set()

    with buffer._store._directory_lock:  # blocks the saver until the callback is registered
        future = buffer.add_trajectories([rollout(0)])
        assert future is not None
        future.add_done_callback(callback)
    assert done.wait(20)
    assert heard == ["ostinato-saver"]
    buffer.close()
    check_batch(buffer.sample(10))
    assert buffer.trajectory_ids == [0, 1, 2, 3]


@needs_fork
def test_a_fork_neither_saves_nor_removes_trajectories_of_its_parent(tmp_path):
    buffer = saving(tmp_path / "a")
    add(buffer, small())
    spilling = TrajectoryReplayBuffer(cache_size=1, auto_save_path=tmp_path / "spill")
    spilling.add_trajectories([rollout(0), rollout(1)])
    spilling.flush()

    def work(report: Callable[[bytes], None]) -> None:
        calls: list[Callable[[], object]] = [lambda: buffer.add_trajectories([small()]), buffer.flush, buffer.clear]
        for call in calls:
            with pytest.raises(UsageError):
                call()
        check_batch(spilling.sample(50))
        buffer.close()
        spilling._finalizer()
        buffer._finalizer()
        assert spilling.get_stats()["cached_trajectories"] == 0
        report(b"done")

    assert run_and_kill(work, 10**9) == (False, b"done")
    check_batch(spilling.sample(50))
    add(buffer, small())
    shutil.copytree(tmp_path / "a", tmp_path / "crashed")
    assert ids_on_disk(tmp_path / "crashed") == [0, 1]
    buffer.close()
