"""Threads that gather, write and draw at the same time, each as the buffer does it; also run under ThreadSanitizer.

Writers hold a lock and store the generations of rows before the rows. A reader draws under the lock, copies without it,
and compares generations afterwards: `native/intended_races.hpp` declares the data races of that copy, and no other.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.threads import together

from .tables import LAYOUTS, address, in_columns, make, runs_beside

if TYPE_CHECKING:
    from .tables import Bytes, Slots, Table

SIZES = (68, 24, 4, 1, 400)
CAPACITY = 512
RUNS = 60


class Ring:
    """A table whose rows repeat their generation, with the lock and the counters of a buffer."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.lock = threading.Lock()
        self.generations = np.zeros(CAPACITY, np.int64)
        self.written = 0
        self.redone = 0

    def batches(self, generations: Slots) -> list[Bytes]:
        column = generations.astype(np.uint8)[:, None]
        return [np.ascontiguousarray(np.broadcast_to(column, (len(generations), size))) for size in SIZES]

    def extend(self, rows: int) -> None:
        with self.lock:
            generations = np.arange(self.written + 1, self.written + 1 + rows)
            start = self.written % CAPACITY
            self.written += rows
            self.generations[(start + np.arange(rows)) % CAPACITY] = generations
            srcs = self.batches(generations)
            assert self.table.fields.write_run(start, rows, 0, [address(src) for src in srcs])

    def edit(self, slots: Slots) -> None:
        with self.lock:
            generations = np.arange(self.written + 1, self.written + 1 + len(slots))
            self.written += len(slots)
            self.generations[slots] = generations
            srcs = self.batches(self.generations[slots])
            assert self.table.fields.scatter(address(slots), 0, len(slots), [address(src) for src in srcs])

    def gather(self, slots: Slots) -> list[Bytes]:
        outs = [np.empty((len(slots), size), np.uint8) for size in SIZES]
        self.table.fields.gather([address(slots)], len(slots), [address(out) for out in outs])
        return outs

    def sample(self, random: np.random.Generator, rows: int) -> None:
        with self.lock:
            slots = random.integers(0, min(self.written, CAPACITY), rows)
            drawn, written = self.generations[slots], self.written
        outs = self.gather(slots)
        with self.lock:
            if self.written != written and (self.generations[slots] != drawn).any():
                self.redone += 1
                drawn = self.generations[slots]
                outs = self.gather(slots)
        for out in outs:
            np.testing.assert_array_equal(out, np.broadcast_to(drawn.astype(np.uint8)[:, None], out.shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_whose_generations_are_unchanged_is_not_torn(native, layout):
    ring = Ring(make(native, layout, SIZES, [CAPACITY // 2, CAPACITY // 2]))
    ring.extend(CAPACITY)

    def write() -> None:
        random = np.random.default_rng(0)
        for _ in range(RUNS):
            ring.extend(int(random.integers(1, CAPACITY)))
            ring.edit(random.permutation(CAPACITY)[:100])

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(RUNS):
            ring.sample(random, 256)

    together(write, lambda: read(1), lambda: read(2))


def test_next_observations_are_read_while_others_are_written(native):
    """Rows of slots that are not written stay the same, wherever their next observations are meanwhile."""
    size, half = 64, CAPACITY // 2
    memory = np.repeat(np.arange(CAPACITY, dtype=np.uint8)[:, None], size, axis=1)
    side_rows = np.empty(CAPACITY, np.int32)
    table = native.SingleCopy(CAPACITY, 1, CAPACITY, address(side_rows))
    table.add_field(table.add_group(address(memory), size, size), 0, size)
    chunk = np.zeros((CAPACITY, size), np.uint8)
    table.add_chunk([address(chunk)])
    table.clear()
    slots, expected = np.arange(CAPACITY), np.roll(memory, -1, axis=0)
    second_half = np.ascontiguousarray(expected[half:])
    table.link_rows(address(slots), CAPACITY)

    def write() -> None:
        random = np.random.default_rng(0)
        for _ in range(5 * RUNS):
            # rows of the first half: aside, linked again, and rewritten; their next observations do not change
            picked = random.permutation(half)[:100]
            nexts = np.ascontiguousarray(expected[picked])
            table.set_rows(address(picked), 100, [address(nexts)])
            assert table.detach_run(half, half, 0) == 0  # the row before gets a side row
            flags = np.zeros(half, np.uint8)
            table.link_run(half, half, 0, [address(second_half)], address(flags), 0)
            table.link_rows(address(picked), 100)

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(5 * RUNS):
            asked = random.integers(0, half, 256)
            out = np.zeros((256, size), np.uint8)
            table.gather([0], address(asked), 0, 256, [address(out)])
            np.testing.assert_array_equal(out, expected[asked])

    together(write, lambda: read(1), lambda: read(2))


def test_draws_run_side_by_side_and_updates_under_the_lock(native):
    tree, capacity = native.SumTree(50_000), 50_000
    tree.set_run(0, capacity, 1.0)
    priorities, lock = np.ones(capacity), threading.Lock()
    ring = (0, 0, 0, 1, 1, 0)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(RUNS):
            uniforms, slots, weights = random.random(2048), np.zeros(2048, np.int64), np.zeros(2048)
            generations = np.zeros(2048, np.int64)
            at = address(slots), address(weights), False, address(generations)
            with lock:
                tree.sample(address(uniforms), 2048, 0.4, ring, *at)
                values = random.random(2048)
                update = address(slots), address(values), False, 2048, address(generations), ring
                tree.update(*update, address(priorities), 0, capacity, 1e-6, 0.6, False)

    def draw(tree: Any, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(RUNS):
            uniforms, slots, values = random.random(2048), np.zeros(2048, np.int64), np.zeros(2048)
            tree.draw(address(uniforms), 2048, address(slots), address(values))
            assert (values > 0).all()

    together(lambda: work(1), lambda: work(2))
    together(lambda: draw(tree, 3), lambda: draw(tree, 4))


def test_large_calls_let_other_threads_run(native):
    random, rows, n = np.random.default_rng(0), 100_000, 300_000
    table, out = in_columns(native, [4096], [2000]), np.zeros((10_000, 4096), np.uint8)
    some = random.integers(0, 2000, 10_000)
    slots, values, numbers = random.integers(0, rows, n), random.random(n), random.integers(0, 2**63 - 1, n)
    drawn, generations = np.zeros(n, np.int64), np.zeros(n, np.int64)
    weights, priorities = np.zeros(n), np.zeros(rows)
    tree, episodes, ring = native.SumTree(rows), native.Episodes(rows, 1), (0, 0, 0, 1, 1, 0)
    tree.set_run(0, rows, 1.0)
    ends = np.arange(rows) % 10 == 9
    episodes.record_write(0, rows, 0, address(ends), 0, 0)
    handle = episodes.add_need(3)
    update = address(slots), address(values), False, n, 0, ring, address(priorities), 0, rows, 0.0, 0.6, False
    sample = address(values), n, 0.5, ring, address(drawn), address(weights), False, address(generations)
    calls: dict[str, Any] = {
        "gather": lambda: table.fields.gather([address(some)], len(some), [address(out)]),
        "draw": lambda: tree.draw(address(values), n, address(drawn), address(weights)),
        "update": lambda: tree.update(*update),
        "sample": lambda: tree.sample(*sample),
        "draw rows of episodes": lambda: episodes.draw(handle, address(numbers), n, address(drawn)),
    }
    for name, call in calls.items():
        assert runs_beside(call), name


def test_episodes_are_read_side_by_side_and_recorded_under_the_lock(native):
    table, lock, rows = native.Episodes(20_000, 1), threading.Lock(), 5_000
    handle = table.add_need(4)
    ends = np.arange(rows) % 50 == 49

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        randoms, slots = random.integers(0, 2**63 - 1, 5_000), np.zeros(5_000, np.int64)
        out, valid = np.zeros((5_000, 4), np.int64), np.zeros((5_000, 4), np.bool_)
        table.draw(handle, address(randoms), 5_000, address(slots))
        table.window(address(slots), 5_000, 0, 3, 1, address(out), address(valid))
        assert valid.all()

    def write() -> None:
        for _ in range(RUNS):
            with lock:
                table.record_write(table.cursor, rows, 0, address(ends), 0, 0)

    def read_locked() -> None:
        for seed in range(RUNS):
            with lock:
                read(seed)

    table.record_write(0, rows, 0, address(ends), 0, 0)
    together(write, read_locked)
    together(lambda: read(1), lambda: read(2))


def test_a_ring_of_several_processes_in_one(native):
    """Objects over one memory exclude each other as processes do: two writers, one that clears, two readers."""
    if not hasattr(native, "SharedRing"):
        pytest.skip("processes share no buffers here")
    capacity, size = 256, 64
    memory = mmap.mmap(-1, native.SharedRing.bytes_for(capacity, True))
    start = np.frombuffer(memory, np.uint8)
    rings = [native.SharedRing(address(start), capacity, True, n == 0) for n in range(5)]
    rows = np.zeros((capacity, size), np.uint8)
    fields = native.Fields()
    fields.add([(address(rows), capacity)], size, size)

    def write(ring: Any, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(RUNS):
            count = int(random.integers(1, 65))
            serial, first = ring.reserve(count, count)
            numbers = np.arange(serial, serial + count).astype(np.uint8)[:, None]
            src = np.ascontiguousarray(np.broadcast_to(numbers, (count, size)))
            assert fields.write_run(first, count, 0, [address(src)])
            with ring:
                if ring.is_current(serial):
                    slots, ones = (first + np.arange(count)) % capacity, np.ones(count)
                    ring.tree.set(address(slots), address(ones), count)
            if random.random() < 0.1:
                ring.abandon(serial)
            else:
                ring.commit(serial)

    def clear(ring: Any) -> None:
        for _ in range(5):
            with ring:
                ring.clear(0)
                assert ring.writers() <= 2

    def read(ring: Any) -> None:
        out, present = np.zeros((capacity, size), np.uint8), np.zeros(capacity, np.int64)
        for _ in range(RUNS):
            written, _, filled, _ = ring.state()
            slots = present[: ring.committed_slots(address(present), filled)].copy()
            before, after = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
            ring.generations_of(address(slots), len(slots), address(before))
            fields.gather([address(slots)], len(slots), [address(out)])
            ring.generations_of(address(slots), len(slots), address(after))
            same = (before == after) & (before > 0)
            wanted = np.broadcast_to(before.astype(np.uint8)[:, None], (len(slots), size))
            np.testing.assert_array_equal(out[: len(slots)][same], wanted[same])
            assert ring.written >= written

    together(
        lambda: write(rings[0], 0),
        lambda: write(rings[1], 1),
        lambda: clear(rings[2]),
        lambda: read(rings[3]),
        lambda: read(rings[4]),
    )
    assert rings[0].count(4) == 0, "no writer was taken for dead"


UNORDERED = """
import sys, threading
import numpy as np
sys.path.insert(0, {tests!r})
from native.conftest import load_file
from native.tables import address
native = load_file({module!r})
table, slots, out = np.zeros((1000, 40), np.uint8), np.arange(1000), np.zeros((1000, 40), np.uint8)
fields = native.Fields()
fields.add([(address(table), 1000)], 40, 40)
together = threading.Barrier(2)
def write():
    rows = np.ones((1000, 40), np.uint8)
    together.wait()
    for _ in range(300):
        fields.scatter(address(slots), 0, 1000, [address(rows)])
def read():
    together.wait()
    for _ in range(300):
        fields.gather([address(slots)], 1000, [address(out)])
threads = [threading.Thread(target=work) for work in {works}]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
REPORTED = 66  # exit code of ThreadSanitizer


@pytest.mark.skipif(os.environ.get("OSTINATO_TEST_SANITIZER") != "thread", reason="needs ThreadSanitizer")
@pytest.mark.parametrize(
    ("works", "code"),
    [("(write, read)", 0), ("(write, write)", REPORTED), ("(read, read)", REPORTED)],
    ids=["a reader beside a writer", "two writers of one row", "two readers into one batch"],
)
def test_only_reads_of_rows_may_race(works, code):
    tests = str(Path(__file__).parents[1])
    script = UNORDERED.format(tests=tests, module=os.environ["OSTINATO_TEST_NATIVE"], works=works)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("data race" in done.stderr) == bool(code)
