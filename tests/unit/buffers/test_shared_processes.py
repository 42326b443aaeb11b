"""Buffers shared by processes: no torn row, none lost but those of a killed writer, the same distribution."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import RowValues
from ostinato.errors import UsageError

from ...sharing import (
    AVAILABLE,
    LIMIT_S,
    check_ring,
    check_rows,
    die,
    end,
    ids_of,
    make,
    pipe,
    reserve,
    ring_of,
    rows,
    start,
)
from ...stats.chi_square import p_value

if TYPE_CHECKING:
    from ostinato import ReplayBuffer
    from ostinato.buffers.observer import Incoming


pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")


LEAST_P = 1e-4


def die_writing(rb: ReplayBuffer, size: int) -> None:
    """Die between reserve and commit, half of the bytes written."""
    run = reserve(rb, size)
    payload, _ = rb.storage.admit(rows(range(-size, 0)), 1)
    rb.storage.write(run._replace(rows=size // 2), payload)
    die()


class Ids(RowValues):
    def __init__(self) -> None:
        super().__init__("ids")

    def first(self, store: Any, incoming: Incoming) -> Any:
        return incoming.data["id"]


def test_observers_follow_what_other_processes_write():
    rb, ids = make(40, fill=40), Ids()
    rb.observe(ids)
    for first in (100, 110):
        end(start(rb.extend, rows(range(first, first + 10))))
        rb.extend(rows(range(first + 50, first + 60)))
    end(start(die_writing, rb, 7), -signal.SIGKILL)
    rb.sample()
    there = ring_of(rb).present()
    assert there.tolist() == list(range(7, 40))
    assert ids.values.tolist() == [0] * 7 + rb.storage[there]["id"].tolist()
    other = make(40)
    other.observe(Ids())
    other.load_state_dict(rb.state_dict())
    assert other._engine.store.added[0].values[:33].tolist() == other[:]["id"].tolist()  # type: ignore[attr-defined]
    assert not other._engine.store.counts.before, "counts that were loaded are those of all processes"  # type: ignore[attr-defined]
    rb.empty()
    rb.extend(rows([3]))
    assert (ids.values[:2].tolist(), len(rb)) == ([3, 0], 1)


def draws(rb: ReplayBuffer) -> torch.Tensor:
    """How often each of 40 rows is drawn; all are whole."""
    batches = [rb.sample() for _ in range(300)]
    for batch in batches:
        check_rows(batch)
    return torch.bincount(torch.cat([batch["id"] for batch in batches]), minlength=40)


def test_a_writer_that_dies_between_reserve_and_commit_costs_its_own_rows():
    rb = make(40, ranked=True, fill=40)
    end(start(die_writing, rb, 10), -signal.SIGKILL)
    assert len(rb) == 30
    counts = draws(rb)
    assert counts[:10].tolist() == [0] * 10
    assert p_value(counts[10:].tolist()) > LEAST_P
    check_ring(rb)
    with pytest.raises(IndexError, match="do not hold a complete row"):
        rb.storage[3]
    for i in range(5):
        rb.extend(rows(range(100 + 8 * i, 108 + 8 * i)))  # the ring comes round
    assert sorted(ids_of(rb)) == list(range(100, 140))
    assert rb.stats().rows_lost == ring_of(rb).lost == 10
    assert rb.stats().repairs == 0
    check_ring(rb)


def die_in_the_lock(rb: ReplayBuffer, at: str) -> None:
    ring: Any = ring_of(rb)
    with ring.lock:
        if at == "leaves":  # priorities and leaves are new, the nodes above them are not
            ring.priorities[:20] = 100.0
            ring._memory.view(torch.float64)[_leaves(rb) : _leaves(rb) + 20] = 100.0**0.7
        elif at == "nodes":
            ring._memory.view(torch.float64)[_leaves(rb) + 40 :] = 7.0
        elif at == "commit":
            run = reserve(rb, 10)
            rb.sampler.record_rows(run, None, rb._engine.view())  # type: ignore[attr-defined]
            ring.commit()
            ring._generations[:5] = -ring._generations[:5]  # five of ten are committed
        elif at == "reserve":
            reserve(rb, 10)
        die()


def _leaves(rb: ReplayBuffer) -> int:
    ring = ring_of(rb)
    return (int(ring.lock.priorities) - ring._memory.data_ptr()) // 8 + 40


@pytest.mark.parametrize("at", ["nothing", "leaves", "nodes", "commit", "reserve"])
def test_whoever_comes_after_a_death_in_the_lock_brings_all_in_order(at):
    rb = make(40, ranked=True, fill=40)
    rb.update_priority(torch.arange(40), torch.linspace(0.1, 4.0, 40))
    end(start(die_in_the_lock, rb, at), -signal.SIGKILL)
    counts = draws(rb)
    stats = rb.stats()
    assert stats.repairs == ring_of(rb).repairs == 1
    check_ring(rb)
    ring = ring_of(rb)
    whole = ring.generations(torch.arange(40)) > 0
    assert int(whole.sum()) == {"commit": 35, "reserve": 30}.get(at, 40)
    leaves = torch.empty(40, dtype=torch.float64)
    ring.tree.leaves(leaves.data_ptr(), 40)
    # the law is that of the leaves
    assert counts[~whole].sum() == 0
    assert p_value(counts[whole].tolist(), leaves[whole].tolist()) > LEAST_P
    assert rb.sampler.default_priority == (100.0 if at == "leaves" else 4.0)


def churn(rb: ReplayBuffer, seed: int, width: int = 8) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    number = 1_000_000 * seed
    while True:
        rb.extend(rows(range(number, number + 24), width))
        number += 24
        _, info = rb.sample(return_info=True)
        if rb.sampler.prioritized:
            rb.update_priority(info["index"], torch.rand(32) + 0.1, info["index_generation"])


@pytest.mark.parametrize(("ranked", "mapped"), [(True, False), (False, True)])
@pytest.mark.parametrize("rounds", [8, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_kills_at_any_moment_leave_all_in_order(rounds, ranked, mapped):
    rb = make(300, ranked=ranked, mapped=mapped, fill=300, width=600)  # copies take long enough to be cut short
    dice, known = random.Random(0), dict[int, int]()
    for seed in range(1, 1 + rounds):
        children = [start(churn, rb, 2 * seed + i, 600) for i in range(2)]
        until = time.monotonic() + 0.03 + 0.05 * dice.random()
        while time.monotonic() < until:
            batch, info = rb.sample(return_info=True)
            check_rows(batch)
            generations = info["index_generation"].tolist() if ranked else []
            for generation, row in zip(generations, batch["id"].tolist(), strict=False):
                assert known.setdefault(generation, row) == row  # that of one row for ever
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        for child in children:
            end(child, -signal.SIGKILL)
        check_rows(rb.sample())
        check_ring(rb)
    assert rb.stats().rows_written > 300
    for i in range(20):
        rb.extend(rows(range(i * 24, i * 24 + 24), 600))
    assert sorted(ids_of(rb)) == list(range(180, 480))  # no slot is out of use


def hold(rb: ReplayBuffer, size: int, pipe: Any) -> None:
    """Write slowly: reserve, wait for a word, copy, commit."""
    run = reserve(rb, size)
    pipe.send(run.start)
    pipe.recv()
    payload, _ = rb.storage.admit(rows(range(-size, 0)), 1)
    rb.storage.write(run, payload)
    ring_of(rb).commit()


def test_a_writer_that_is_slow_is_passed_over_while_there_is_room():
    rb = make(40, fill=40, ranked=True)
    mine, other = pipe()
    child = start(hold, rb, 10, other)
    assert mine.recv() == 0
    os.kill(child.pid, signal.SIGSTOP)
    for i in range(6):  # 60 rows: more than one round of the ring
        rb.extend(rows(range(100 + 10 * i, 110 + 10 * i)))
        assert set(rb.sample()["id"].tolist()).isdisjoint(range(10))
    assert sorted(ids_of(rb)) == list(range(130, 160))
    ring_of(rb).lock.timeout_ms = 100
    with pytest.raises(UsageError, match="no room for 35 of 40 rows"):
        rb.extend(rows(range(35)))
    os.kill(child.pid, signal.SIGCONT)
    mine.send("go on")
    end(child)
    assert sorted(ids_of(rb)) == [*range(-10, 0), *range(130, 160)]
    child = start(hold, rb, 10, other)
    mine.recv()
    rb.empty()
    rb.extend(rows(range(4)))
    mine.send("go on")
    end(child)
    assert ids_of(rb) == list(range(4))  # rows written while the buffer is emptied go with it
    check_ring(rb)


def keep_the_lock(rb: ReplayBuffer, pipe: Any) -> None:
    with ring_of(rb).lock:
        pipe.send(os.getpid())
        pipe.recv()


def test_a_lock_that_is_not_given_back_is_named():
    rb, state = make(16, fill=16, ranked=True), make(16, fill=4, ranked=True).state_dict()
    mine, other = pipe()
    child = start(keep_the_lock, rb, other)
    pid = mine.recv()
    ring_of(rb).lock.timeout_ms = 100
    for call in (rb.sample, lambda: rb.load_state_dict(state)):
        with pytest.raises(UsageError, match=f"by process {pid}: let that process go on"):
            call()
    mine.send("go on")
    end(child)
    assert ids_of(rb) == list(range(16))
    check_rows(rb.sample())


def sample_and_die(rb: ReplayBuffer) -> None:
    rb.sample(return_info=True)
    die()


def test_a_reader_that_dies_changes_nothing():
    rb = make(40, ranked=True, fill=40)
    sampler: Any = rb.sampler
    before = sampler.priorities
    end(start(sample_and_die, rb), -signal.SIGKILL)
    assert torch.equal(sampler.priorities, before)
    rb.extend(rows(range(40, 50)))
    check_rows(rb.sample())
    assert sorted(ids_of(rb)) == list(range(10, 50))
    assert rb.stats().rows_lost == 0
    check_ring(rb)


def use_after_the_creator(rb: ReplayBuffer, pipe: Any, creator: int) -> None:
    pipe.send(os.getpid())
    while os.getppid() == creator:
        time.sleep(0.01)
    rb.extend(rows(range(40, 60)))
    check_rows(rb.sample())
    check_ring(rb)
    pipe.send(sorted(ids_of(rb)))


def create_and_die(pipe: Any) -> None:
    rb = make(40, ranked=True, fill=40)
    context: Any = multiprocessing.get_context("fork")
    context.Process(target=use_after_the_creator, args=(rb, pipe, os.getpid())).start()
    time.sleep(0.1)
    die()


def test_others_go_on_when_the_process_that_made_the_buffer_is_killed():
    mine, other = pipe()
    context: Any = multiprocessing.get_context("fork")
    creator = context.Process(target=create_and_die, args=(other,))
    creator.start()
    end(creator, -signal.SIGKILL)
    mine.recv()
    assert mine.poll(LIMIT_S)
    assert mine.recv() == list(range(20, 60))


def create_and_wait(pipe: Any) -> None:
    rb = make(100, ranked=True, fill=100)
    child = start(churn, rb, 1)
    pipe.send(child.pid)
    time.sleep(LIMIT_S)


def test_nothing_is_left_when_all_are_killed():
    before = set(Path("/dev/shm").iterdir())
    mine, other = pipe()
    context: Any = multiprocessing.get_context("fork")
    creator = context.Process(target=create_and_wait, args=(other,))
    creator.start()
    child = mine.recv()
    holders = [pid for pid in (creator.pid, child) if _holds_memory(pid)]
    assert holders == [creator.pid, child]
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
    end(creator, -signal.SIGKILL)
    until = time.monotonic() + LIMIT_S
    while _holds_memory(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _holds_memory(child)
    assert {path for path in Path("/dev/shm").iterdir() if "ostinato" in path.name} <= before


def _holds_memory(pid: int) -> bool:
    try:
        return "memfd:ostinato" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
