"""Threads, processes and callbacks that meet: readers beside a saver, forks, clearing while others sample."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.trajectories._kills import run_and_kill
from tests.unit.trajectories._rollouts import check_batch, rollout

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.durable.journal import read_lines, write_lines
from ostinato.errors import EmptyBufferError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def saving(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options)


def small() -> Trajectory:
    return Trajectory(rewards=torch.zeros(2, 2), model_weights_id="w")


class Background:
    """Runs a function again and again in a thread until the block ends; what it raised is raised there."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._work()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("fold", ["save_checkpoint", "close"])
def test_a_reader_finds_all_that_was_saved_before_it_began_while_the_journal_is_folded(
    tmp_path: Path, fold: str
) -> None:
    buffer = saving(tmp_path / "a", save_queue_size=200)
    future = buffer.add_trajectories([small()] * 150)  # reading the index takes a while
    assert future is not None
    saved = len(future.result(60))

    def save() -> None:
        nonlocal saved
        more = buffer.add_trajectories([small()])
        assert more is not None
        saved = more.result(20)[0] + 1
        buffer.save_checkpoint(tmp_path / "a") if fold == "save_checkpoint" else buffer.close()

    with Background(save):
        end = time.monotonic() + 1
        while time.monotonic() < end:
            least = saved
            reader = TrajectoryReplayBuffer()
            reader.load_checkpoint(tmp_path / "a")
            assert len(reader) >= least
    buffer.close()


def test_a_journal_that_grows_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    """A reader sees the last line half written, and the rest of it a moment later."""
    write_lines(tmp_path / "line", [{"n": 1}])
    line = (tmp_path / "line").read_bytes()
    fd = os.open(tmp_path / "j", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append() -> None:
        for half in (line[:9], line[9:]):
            os.write(fd, half)
            time.sleep(0.00002)

    with Background(append):
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            assert all(found == {"n": 1} for found in read_lines(tmp_path / "j", whole=False))
    os.close(fd)


def test_the_own_directory_can_be_folded_while_another_thread_adds(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a", save_queue_size=4)
    numbers: Iterator[int] = iter(range(10**6))
    with Background(lambda: buffer.add_trajectories([rollout(next(numbers), 2)])):
        for _ in range(8):  # each waits for what was added before it, not for ever
            buffer.save_checkpoint(tmp_path / "a")
    buffer.close()
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(tmp_path / "a")
    assert again.trajectory_ids == buffer.trajectory_ids


@pytest.mark.parametrize("again", ["clear", "load_checkpoint"])
def test_sampling_goes_on_while_another_thread_clears_or_loads(tmp_path: Path, again: str) -> None:
    """Spilled files vanish while rows of them are read: the rows are drawn anew."""
    for form in ("pt", "safetensors"):
        with saving(tmp_path / form, trajectory_format=form) as saver:
            saver.add_trajectories([rollout(number) for number in range(20)])
    forms = iter(["pt", "safetensors"] * 1000)
    buffer = TrajectoryReplayBuffer(cache_size=1, max_open_files=2)
    buffer.add_trajectories([rollout(0)])

    def draw() -> None:
        try:
            check_batch(buffer.sample(30))
        except EmptyBufferError:
            assert again == "clear"

    with Background(draw):
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            buffer.add_trajectories([rollout(number) for number in range(8)])
            buffer.clear() if again == "clear" else buffer.load_checkpoint(tmp_path / next(forms))


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer versions of Python warn of every such fork
def test_a_fork_samples_whatever_other_threads_held_when_it_was_made(tmp_path: Path) -> None:
    """As the workers of a data loader do, while the parent adds and samples."""
    buffer = saving(tmp_path / "a", cache_size=1, max_open_files=1, trajectory_format="safetensors")
    buffer.add_trajectories([rollout(number) for number in range(4)])

    def work(report: Callable[[bytes], None]) -> None:
        for _ in range(3):
            check_batch(buffer.sample(20))
        buffer.get_stats()
        report(b"done")

    numbers: Iterator[int] = iter(range(4, 10**6))
    with (
        Background(lambda: check_batch(buffer.sample(20))),
        Background(lambda: buffer.add_trajectories([rollout(next(numbers))])),
    ):
        for _ in range(25):
            assert run_and_kill(work, 10**9) == (False, b"done")
    buffer.close()


@needs_fork
def test_a_failure_of_the_parent_is_not_reported_to_its_forks(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a")
    buffer.add_trajectories([rollout(0)])
    buffer.flush()
    (tmp_path / "a").rename(tmp_path / "away")
    future = buffer.add_trajectories([rollout(1)])
    assert future is not None
    with pytest.raises(FileNotFoundError):
        future.result(20)

    def work(report: Callable[[bytes], None]) -> None:
        check_batch(buffer.sample(20))
        report(b"done")

    (tmp_path / "away").rename(tmp_path / "a")
    assert run_and_kill(work, 10**9) == (False, b"done")
    buffer.close()


def test_a_callback_of_a_future_may_add_and_is_told_where_it_would_wait_for_itself(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a", save_queue_size=1)
    heard: list[str] = []
    done = threading.Event()

    def callback(_: object) -> None:
        try:
            for call in (buffer.flush, buffer.clear):
                with pytest.raises(UsageError, match="it would wait for itself"):
                    call()
            buffer.add_trajectories([rollout(number) for number in range(2, 5)])
            buffer.save_checkpoint(tmp_path / "b")
            heard.append(threading.current_thread().name)
        finally:
            done.set()

    with buffer._store._directory_lock:  # the saver waits for it, so that the callback comes in time
        future = buffer.add_trajectories([rollout(0)])
        assert future is not None
        future.add_done_callback(callback)
    assert done.wait(20)
    assert heard == ["ostinato-saver"]
    buffer.close()
    check_batch(buffer.sample(10))
    assert buffer.trajectory_ids == [0, 1, 2, 3]
