"""Prefetch: k batches really ready, the sequence unchanged, nothing lost, nothing stale without a mark."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, LimitedSampler, RandomSampler, ReplayBuffer, SamplerWithoutReplacement
from ostinato.buffers.prefetch import Order, Prefetcher, Requested
from ostinato.errors import EmptyBufferError, OptionError

from ...sharing import LIMIT_S, end, pipe, start
from ...tags import buffer, fill, read_ids
from .refusals import raises

if TYPE_CHECKING:
    from ostinato import Sampler

DEPTHS = [0, 1, 3]


def make(
    prefetch: int, sampler: Sampler | None = None, *, seed: int | None = 0, size: int = 4, **more: Any
) -> ReplayBuffer:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rb = buffer("packed", 10, sampler=sampler, prefetch=prefetch, batch_size=size, generator=generator, **more)
    fill(rb, range(10))
    return rb


def until_ready(rb: ReplayBuffer, count: int) -> int:
    """Wait until `count` batches are ready; return how many are."""
    until = time.monotonic() + LIMIT_S
    while rb.stats().prefetch_ready < count and time.monotonic() < until:
        time.sleep(0.001)
    return rb.stats().prefetch_ready


@pytest.mark.parametrize("depth", [1, 3])
def test_depth_batches_are_ready_after_each_sample(depth):
    threads = set()

    def note(batch: Any) -> Any:
        threads.add(threading.current_thread())
        return batch

    rb = make(depth, transform=note)
    assert rb.stats().prefetch_ready == 0
    rb.sample()
    waits = rb.stats().prefetch_waits
    for _ in range(3):
        assert until_ready(rb, depth) == depth
        rb.sample()
    assert rb.stats().prefetch_waits == waits, "a ready batch is not waited for"
    assert len(threads - {threading.main_thread()}) == len(threads) == 1


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("seed", [0, None])
def test_the_sequence_is_the_same_for_every_depth(sampler, seed):
    """Samples and epochs take turns, and an epoch that was left begins anew.

    Without a generator of its own a draw made too early cannot be taken back: loops draw no further than their epoch.
    """
    sequences = []
    for depth in DEPTHS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            rb = make(depth, sampler(), seed=seed)
            if seed is None and sampler is SamplerWithoutReplacement:
                sequence = [read_ids(batch) for _ in range(3) for batch in rb]
            else:
                sequence = [read_ids(rb.sample()) for _ in range(5)]
            if seed is not None:
                sequence += [read_ids(batch) for batch in itertools.islice(rb, 5)]
                sequence += [read_ids(rb.sample()), read_ids(next(iter(rb)))]
                sequence += [read_ids(batch) for batch in itertools.islice(rb, 5)]
            sequences.append(sequence)
    assert sequences == sequences[:1] * len(DEPTHS)


def test_rows_overwritten_after_they_were_made_ready_are_marked_stale():
    rb = make(1)
    rb.sample()
    assert until_ready(rb, 1) == 1
    fill(rb, range(100, 105))  # slots 0 to 4
    batch, info = rb.sample(return_info=True)
    assert info["stale"].dtype is torch.bool
    assert info["stale"].tolist() == [slot < 5 for slot in info["index"].tolist()]
    assert read_ids(batch) == info["index"].tolist(), "a batch made ready before the write shows the old rows"
    assert rb.stats().stale_rows == int(info["stale"].sum()) > 0
    for _ in range(3):
        assert not rb.sample(return_info=True)[1]["stale"].any()


def test_what_is_changed_while_batches_wait_applies_to_the_next():
    rb, plain = make(3), make(0)
    assert read_ids(rb.sample()) == read_ids(plain.sample())
    rb.append_transform(lambda batch: {**batch, "id": batch["id"] + 1000})
    for _ in range(4):
        assert rb.sample()["id"].tolist() == [i + 1000 for i in read_ids(plain.sample())]
    rb.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert rb.sample()["id"].tolist() == [1000, 1001, 1002, 1003]
    rb.empty()
    assert rb.stats().prefetch_ready == 0
    with pytest.raises(EmptyBufferError):
        rb.sample()
    fill(rb, [70, 71])
    assert {i for _ in range(3) for i in rb.sample()["id"].tolist()} == {1070, 1071}


def test_batches_are_prefetched_of_one_size_alone():
    rb = make(2)
    rb.sample()
    raises(
        (lambda: buffer("packed", 10, prefetch=2), OptionError, "batch-size must be specified in advance"),
        (lambda: make(-1), OptionError, "prefetch"),
        (lambda: rb.sample(5), OptionError, "must be 4"),
    )
    assert len(read_ids(rb.sample(4))) == 4
    for size in (8, None):
        other = buffer("packed", 10, batch_size=size)
        fill(other, range(10))
        with pytest.raises(ValueError, match="batch_size"):
            other.load_state_dict(rb.state_dict())  # which holds queued draws
        assert len(read_ids(other.sample(9))) == 9


def test_the_interpreter_ends_with_a_live_prefetch_thread():
    """A program of its own: how the interpreter shuts down is its last step."""
    code = (
        "import time, torch\n"
        "from ostinato import LazyTensorStorage, ReplayBuffer\n"
        "rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=4,\n"
        "                  transform=lambda b: time.sleep(0.05) or b)\n"
        "rb.extend(torch.arange(10))\n"
        "rb.sample()\n"
        "print('done', flush=True)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (out.returncode, out.stdout.strip()) == (0, "done"), out.stderr
    assert "Traceback" not in out.stderr
    assert "leaked" not in out.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_goes_on_with_the_queued_draws():
    rb = make(3)
    rb.sample()
    until_ready(rb, 3)
    mine, other = pipe()
    child = start(lambda: other.send([read_ids(rb.sample()) for _ in range(5)]))
    assert mine.poll(LIMIT_S), "the forked child hangs"
    assert mine.recv() == [read_ids(rb.sample()) for _ in range(5)]
    end(child)


def test_the_last_rows_are_delivered_although_no_more_can_be_drawn_ahead():
    rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=LimitedSampler(3), batch_size=3, prefetch=2)
    rb.extend(torch.arange(1))
    assert rb.sample().tolist() == [0, 0, 0]
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(torch.arange(1, 2))
    assert rb.sample().tolist() == [1, 1, 1]


# -- the queue of every kind of buffer ---------------------------------------------------------------------------------


class Numbers(Order):
    """Batches 0, 1, ...; the receiver of the ones in `late` leaves them to the next reader."""

    def __init__(self, depth: int, count: int) -> None:
        self.queue = Prefetcher(depth, threading.RLock(), count)
        self.made, self.most, self.counts, self.late = itertools.count(), 0, list[int](), set[int]()

    def request(self, queue: Prefetcher, count: int) -> Requested:
        self.most = max(self.most, queue.queued + count)
        self.counts.append(count)
        return Requested(None, [next(self.made) for _ in range(count)], count)

    def receive(self, queue: Prefetcher, requested: Requested) -> list[int]:
        if requested.made[0] in self.late:
            self.late.discard(requested.made[0])
            queue.put_back(requested)
            raise TimeoutError
        found: list[int] = requested.made
        return found


@pytest.mark.parametrize(("depth", "count"), [(0, 1), (1, 1), (5, 2), (8, 4)])
def test_requests_of_several_batches_keep_depth_and_order(depth, count):
    order = Numbers(depth, count)
    order.late = {0, 1 + count * 2}
    found: list[int] = []
    while len(found) < 40:
        try:
            found.append(order.queue.next(order))
        except TimeoutError:
            continue
    assert found == list(range(40))
    assert order.most <= depth + 1
    assert (order.counts[0], set(order.counts[1:])) == (1, {count})
    order.queue.drop()
    assert order.queue.next(order) >= 40
