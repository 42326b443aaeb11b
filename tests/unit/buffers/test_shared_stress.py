"""Four writers and two samplers on one shared buffer, writers killed all the time: no row torn, lost or there twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ...sharing import AVAILABLE, check_ring, check_rows, end, ids_of, make, rows, start
from ...stats.chi_square import p_value

if TYPE_CHECKING:
    from ostinato import ReplayBuffer

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the compiled part, on Linux")

CAPACITY = 2000
WIDTH = 600  # 4.8 kB a row: copies take long enough to be cut short
WRITERS = 4


def write(rb: ReplayBuffer, number: int) -> None:
    torch.set_num_threads(1)
    dice, first = random.Random(number), number * 10_000_000
    while True:
        size = dice.choice([1, 5, 32, 150])
        rb.extend(rows(range(first, first + size), WIDTH))
        first += size


def sample(rb: ReplayBuffer, seconds: float, ranked: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    known: dict[int, int] = {}
    batches, until = 0, time.monotonic() + seconds
    longest = 0.0
    while time.monotonic() < until:
        began = time.monotonic()
        batch, info = rb.sample(return_info=True)
        longest = max(longest, time.monotonic() - began)
        check_rows(batch)
        if ranked:  # a stamp is that of one row for ever
            for stamp, row in zip(info["index_generation"].tolist(), batch["id"].tolist(), strict=True):
                assert known.setdefault(stamp, row) == row
            rb.update_priority(info["index"], torch.rand(32) + 0.1, info["index_generation"])
        batches += 1
    pipe.send((batches, longest))


def stress(seconds: float, *, ranked: bool) -> tuple[list[tuple[int, float]], int, Any]:
    """Run; return what the samplers say (batches, longest wait in s), how many writers were killed, and counts."""
    rb = make(CAPACITY, ranked=ranked, fill=CAPACITY, width=WIDTH)
    pipes = [multiprocessing.get_context("fork").Pipe() for _ in range(2)]
    samplers = [start(sample, rb, seconds, ranked, other) for _, other in pipes]
    writers = [start(write, rb, 1 + i) for i in range(WRITERS)]
    dice, kills = random.Random(1), 0
    while any(child.is_alive() for child in samplers):
        time.sleep(0.05 * dice.random())
        child = dice.randrange(WRITERS)
        os.kill(writers[child].pid, signal.SIGKILL)
        end(writers[child], -signal.SIGKILL)
        kills += 1
        writers[child] = start(write, rb, 10 + kills)
    found = [mine.recv() for mine, _ in pipes if mine.poll(1)]
    for child in samplers:
        end(child)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        end(writer, -signal.SIGKILL)
    check_ring(rb)
    check_rows(rb.storage[_present(rb)])
    ids = ids_of(rb)
    assert len(set(ids)) == len(ids)
    counts = torch.zeros(len(ids), dtype=torch.int64)
    places = {row: i for i, row in enumerate(ids)}
    if ranked:
        rb.update_priority(_present(rb), 1.0)
    for _ in range(1500):
        drawn = [places[row] for row in rb.sample()["id"].tolist()]
        counts += torch.bincount(torch.tensor(drawn), minlength=len(ids))
    assert p_value(counts.tolist()) > 1e-4
    rb.extend(rows(range(CAPACITY), WIDTH))
    assert sorted(ids_of(rb)) == list(range(CAPACITY))  # no slot is out of use
    return found, kills, rb.stats()


def _present(rb: ReplayBuffer) -> Any:
    return rb.storage.ring.present()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "ranked"), [(2.5, False), (2.5, True)])
def test_writers_are_killed_while_others_sample(seconds: float, ranked: bool) -> None:
    found, kills, stats = stress(seconds, ranked=ranked)
    assert len(found) == 2
    assert min(batches for batches, _ in found) > 20
    assert kills > 3
    assert stats.rows_written > 2 * CAPACITY


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranked", [False, True])
def test_writers_are_killed_for_a_minute(ranked: bool) -> None:
    found, kills, stats = stress(60, ranked=ranked)
    assert len(found) == 2
    print(f"batches and longest wait {found}, kills {kills}, {stats}")  # noqa: T201
