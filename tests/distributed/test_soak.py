"""A fleet in use for long: writers, learners, priorities, checkpoints, handles that come and go, and random kills.

`OSTINATO_SOAK_MINUTES` sets the time: 30 minutes by default, hours if wanted. Every row that is read is checked. After
a warm-up, memory, threads, open files and Ray's references of this process and of every actor stay what they are.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, ShardedReplayBuffer
from ostinato.errors import LostBufferError, WaitTimeoutError

from .nodes import run_story
from .rows import Calls, check_rows, make_rows, stored

if TYPE_CHECKING:
    from collections.abc import Callable

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")
MINUTES = float(os.environ.get("OSTINATO_SOAK_MINUTES", "30"))
SHARDS, CAPACITY, BATCH = 3, 5_000, 32
LIMIT_S = 120.0
"""Longest time of a call: several restarts of actors on a busy machine."""


class Use(NamedTuple):
    """What a process uses."""

    megabytes: float
    threads: int
    files: int
    references: int
    """Ray objects that it refers to; 0 for actors."""


def _use(pid: int, references: int = 0) -> Use:
    process = psutil.Process(pid)
    return Use(process.memory_info().rss / 1e6, process.num_threads(), process.num_fds(), references)


def _pid(_: Any) -> int:
    return os.getpid()


class Soak:
    """The threads that use one fleet, and what they found.

    Args:
        directory: Where checkpoints go.
        seconds: How long.
    """

    def __init__(self, directory: Path, seconds: float) -> None:
        self.rb = ShardedReplayBuffer(
            SHARDS,
            storage=partial(LazyTensorStorage, CAPACITY),
            sampler=partial(PrioritizedSampler, CAPACITY, 0.7, 0.5),
            batch_size=BATCH,
            checkpoint_dir=directory,
            checkpoint_every_s=2.0,
            shard_timeout_s=10.0,
            remote_config={"num_cpus": 0},
        )
        self.until = time.monotonic() + seconds
        self.calls = Calls(LIMIT_S)
        self.counts = dict.fromkeys(("written", "read", "updated", "handles", "kills", "checkpoints"), 0)
        self.errors: deque[BaseException] = deque()
        self.summary = ""
        self._random = random.Random(7)
        self._quiet = threading.Event()  # nothing is killed while it is set

    def run(self) -> None:
        """Do everything at once until the time is up; raise the first error."""
        steps = [self._writer(), self._writer(), self._learner(0), self._learner(3), self._visitor()]
        threads = [threading.Thread(target=self._repeat, args=(step,)) for step in (*steps, self._saver, self._killer)]
        for thread in threads:
            thread.start()
        self._watch()
        for thread in threads:
            thread.join(2 * LIMIT_S)
            assert not thread.is_alive(), "a call does not end"
        if self.errors:
            raise self.errors[0]

    def _repeat(self, step: Callable[[], None]) -> None:
        try:
            while time.monotonic() < self.until and not self.errors:
                with contextlib.suppress(LostBufferError, WaitTimeoutError):  # all shards may be dead for a moment
                    step()
        except BaseException as error:
            self.errors.append(error)

    # -- what is done -------------------------------------------------------------------------------------------------

    def _writer(self) -> Callable[[], None]:
        rb, numbers = self.rb._handle(), iter(range(0, 1 << 23, 64))

        def step() -> None:
            self.calls(rb.extend, make_rows(next(numbers), 64))
            self.counts["written"] += 64
            time.sleep(0.01)

        return step

    def _learner(self, prefetch: int) -> Callable[[], None]:
        rb = self.rb._handle(prefetch=prefetch)

        def step() -> None:
            if self.counts["written"] < 1000:
                time.sleep(0.1)
                return
            batch, info = self.calls(rb.sample, return_info=True)
            self.counts["read"] += len(check_rows(batch))
            self.calls(rb.update_priority, info["index"], torch.rand(BATCH) + 0.1, info["index_generation"])
            self.counts["updated"] += BATCH

        return step

    def _visitor(self) -> Callable[[], None]:
        def step() -> None:
            handle = pickle.loads(pickle.dumps(self.rb))
            self.calls(len, handle)
            if self.counts["written"] >= 1000:
                check_rows(self.calls(handle.clients(1)[0].sample))
            self.counts["handles"] += 2
            time.sleep(0.2)

        return step

    def _saver(self) -> None:
        time.sleep(3.0)
        self.calls(self.rb.checkpoint)
        self.counts["checkpoints"] += 1

    def _killer(self) -> None:
        time.sleep(self._random.uniform(5.0, 15.0))
        if self._quiet.is_set():
            return
        if self._random.random() < 0.25:
            ray.kill(self.rb._connection.fleet.actor, no_restart=False)
        else:
            pids = self.rb.apply(_pid)
            os.kill(self._random.choice(pids), signal.SIGKILL)
        self.counts["kills"] += 1

    # -- what is used -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Measure after a third of the time and at the end, while nothing is killed."""
        begin, seconds = time.monotonic(), self.until - time.monotonic()
        while time.monotonic() < begin + seconds / 3 and not self.errors:
            time.sleep(0.5)
        first = self._measure()
        while time.monotonic() < self.until - min(30.0, seconds / 4) and not self.errors:
            time.sleep(0.5)
        last = self._measure()
        self.summary = f"{self.counts}, longest call {self.calls.longest_s:.1f} s\n{first}\n{last}\n"
        for name, before in first.items():
            after = last[name]
            assert after.megabytes < 1.1 * before.megabytes + 30, (name, before, after)
            assert after.threads <= before.threads + 8, (name, before, after)
            assert after.files <= before.files + 16, (name, before, after)
            assert after.references <= before.references + 50, (name, before, after)

    def _measure(self) -> dict[str, Use]:
        """Return the median of several moments for this process, and the largest of the shards."""
        self._quiet.set()
        own, shards = [], []
        for _ in range(9):
            gc.collect()
            references = len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
            own.append(_use(os.getpid(), references))
            with contextlib.suppress(psutil.Error, LostBufferError):
                shards += [_use(pid) for pid in self.rb.apply(_pid)]
            time.sleep(1.0)
        self._quiet.clear()
        middle = Use(*(sorted(values)[len(values) // 2] for values in zip(*own, strict=True)))
        return {"driver": middle, "shard": Use(*map(max, zip(*shards, strict=True)))}


def soak(directory: Path, minutes: float) -> None:
    warnings.simplefilter("ignore", RuntimeWarning)
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=150_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=40,
    )
    made = Soak(directory, 60 * minutes)
    made.run()
    end = time.monotonic() + LIMIT_S
    while len(made.rb.apply(_pid)) < SHARDS:
        assert time.monotonic() < end, made.rb.missing
        time.sleep(0.5)
    assert sum(stored(made.rb).values()) == len(made.rb), "every row is whole"
    assert all(part.save_error is None for part in made.rb.report())
    assert min(made.counts.values()) > 0, made.counts
    made.rb.close()
    Path(directory, "summary.txt").write_text(made.summary)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(60 * MINUTES + 900)
@pytest.mark.xdist_group("machines")
def test_memory_threads_and_files_stay_flat_under_kills(tmp_path: Path) -> None:
    run_story(soak, tmp_path / "saved", MINUTES, limit_s=60 * MINUTES + 600)
