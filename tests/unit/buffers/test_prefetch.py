"""Prefetch: k batches really ready, the sequence unchanged, nothing lost, nothing stale without a mark."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, LimitedSampler, RandomSampler, ReplayBuffer, SamplerWithoutReplacement
from ostinato.errors import EmptyBufferError, OptionError

from ...tags import STORAGES, buffer, fill, read_ids

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato import Sampler

DEPTHS = [0, 1, 2, 3, 4]


def make(
    prefetch: int, sampler: Sampler | None = None, *, seed: int | None = 0, size: int = 4, **more: Any
) -> ReplayBuffer:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rb = buffer("packed", 10, sampler=sampler, prefetch=prefetch, batch_size=size, generator=generator, **more)
    fill(rb, range(10))
    return rb


def until_ready(rb: ReplayBuffer, count: int) -> int:
    """Wait until `count` batches are ready; return how many are."""
    for _ in range(400):
        if rb.stats().prefetch_ready >= count:
            break
        time.sleep(0.005)
    return rb.stats().prefetch_ready


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_depth_batches_are_ready_after_each_sample(depth: int) -> None:
    rb = make(depth)
    assert rb.stats().prefetch_ready == 0
    for _ in range(3):
        rb.sample()
        assert until_ready(rb, depth) == depth


def test_a_ready_batch_is_not_waited_for() -> None:
    rb = make(2)
    rb.sample()
    waits = rb.stats().prefetch_waits
    until_ready(rb, 2)
    rb.sample()
    assert rb.stats().prefetch_waits == waits


def test_a_slow_transform_is_waited_for_and_counted() -> None:
    def slow(batch: Any) -> Any:
        time.sleep(0.05)
        return batch

    rb = make(1, transform=slow)
    rb.sample()
    rb.sample()
    assert rb.stats().prefetch_waits >= 1


def test_transforms_run_in_the_background() -> None:
    threads = []

    def note(batch: Any) -> Any:
        threads.append(threading.current_thread().name)
        return batch

    rb = make(1, transform=note)
    rb.sample()
    assert threads
    assert all("MainThread" not in name for name in threads)


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("seed", [0, None])
def test_the_sequence_is_the_same_for_every_depth(sampler: type[Sampler], seed: int | None) -> None:
    sequences = []
    for depth in DEPTHS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            rb = make(depth, sampler(), seed=seed)
            sequences.append([read_ids(rb.sample()) for _ in range(9)])
    assert all(sequence == sequences[0] for sequence in sequences)


def test_the_sequence_is_the_same_where_samples_and_epochs_take_turns() -> None:
    sequences = []
    for depth in DEPTHS:
        rb = make(depth, SamplerWithoutReplacement())
        sequence = [read_ids(rb.sample())]
        sequence += [read_ids(batch) for batch in rb]
        sequence += [read_ids(rb.sample()) for _ in range(2)]
        sequence += [read_ids(next(iter(rb)))]
        sequence += [read_ids(batch) for batch in rb]
        sequences.append(sequence)
    for depth, sequence in zip(DEPTHS, sequences, strict=True):
        assert sequence == sequences[0], f"prefetch={depth}"


def test_loops_draw_no_further_than_their_epoch() -> None:
    """Without a generator of its own a draw made too early cannot be taken back: the next epoch would differ."""
    sequences = []
    for depth in DEPTHS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            rb = make(depth, SamplerWithoutReplacement(), seed=None)
            sequences.append([[read_ids(batch) for batch in rb] for _ in range(3)])
    assert all(sequence == sequences[0] for sequence in sequences)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loop_is_exactly_one_epoch(depth: int, drop_last: bool, shuffle: bool) -> None:
    rb = make(depth, SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle))
    for _ in range(3):
        batches = [read_ids(batch) for batch in rb]
        assert [len(batch) for batch in batches] == ([4, 4] if drop_last else [4, 4, 2])
        drawn = [i for batch in batches for i in batch]
        assert len(set(drawn)) == len(drawn)
        assert shuffle or drawn == list(range(len(drawn)))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_by_sample_hold_each_row_once(depth: int, drop_last: bool) -> None:
    """No batch is lost where one epoch ends and the next begins."""
    rb = make(depth, SamplerWithoutReplacement(drop_last=drop_last))
    sizes = []
    for _ in range(4):
        epoch = [read_ids(rb.sample()) for _ in range(2 if drop_last else 3)]
        sizes.append([len(batch) for batch in epoch])
        drawn = [i for batch in epoch for i in batch]
        assert len(set(drawn)) == len(drawn)
    assert sizes == [[4, 4] if drop_last else [4, 4, 2]] * 4


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loop_that_was_left_begins_anew(depth: int) -> None:
    rb = make(depth, SamplerWithoutReplacement())
    for _ in rb:
        break
    assert sorted(i for batch in rb for i in read_ids(batch)) == list(range(10))


def test_rows_overwritten_after_they_were_made_ready_are_marked_stale() -> None:
    rb = make(1)
    rb.sample()
    assert until_ready(rb, 1) == 1
    fill(rb, range(100, 105))  # slots 0 to 4
    batch, info = rb.sample(return_info=True)
    assert info["stale"].dtype is torch.bool
    assert info["stale"].tolist() == [slot < 5 for slot in info["index"].tolist()]
    assert read_ids(batch) == info["index"].tolist(), "a batch made ready before the write shows the old rows"
    assert rb.stats().stale_rows == int(info["stale"].sum()) > 0
    _, info = rb.sample(return_info=True)
    assert not info["stale"].any()


def test_nothing_is_stale_without_writes() -> None:
    rb = make(2)
    for _ in range(5):
        _, info = rb.sample(return_info=True)
        assert info["stale"].tolist() == [False] * 4
    assert rb.stats().stale_rows == 0


def test_every_row_is_either_current_or_marked() -> None:
    """Whatever is written between: a row not marked stale is the row that its slot holds now."""
    rb = make(3)
    for step in range(30):
        fill(rb, [1000 + step])
        batch, info = rb.sample(return_info=True)
        now = read_ids(rb[info["index"]])
        for got, present, stale in zip(read_ids(batch), now, info["stale"].tolist(), strict=True):
            assert stale or got == present


def test_errors_of_transforms_reach_the_caller_one_by_one() -> None:
    calls = []

    def fail_on_third(batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("third")
        return batch

    rb = make(2, transform=fail_on_third)
    expected = make(0)
    for i in range(6):
        if i == 2:
            with pytest.raises(ZeroDivisionError, match="third"):
                rb.sample()
            expected.sample()
        else:
            assert read_ids(rb.sample()) == read_ids(expected.sample())


def test_a_failing_transform_does_not_end_prefetching() -> None:
    def fail(batch: Any) -> Any:
        raise ZeroDivisionError

    rb = make(2, transform=fail)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            rb.sample()


def test_emptying_drops_queued_batches() -> None:
    rb = make(3)
    rb.sample()
    rb.empty()
    assert rb.stats().prefetch_ready == 0
    with pytest.raises(EmptyBufferError):
        rb.sample()
    fill(rb, [70, 71])
    for _ in range(5):
        assert set(read_ids(rb.sample())) <= {70, 71}


def test_a_transform_appended_while_batches_wait_applies_to_the_next() -> None:
    rb, plain = make(3), make(0)
    assert read_ids(rb.sample()) == read_ids(plain.sample())
    rb.append_transform(lambda batch: {**batch, "id": batch["id"] + 1000})
    for _ in range(4):
        assert rb.sample()["id"].tolist() == [i + 1000 for i in read_ids(plain.sample())]


def test_another_sampler_takes_over_at_once() -> None:
    rb = make(3)
    rb.sample()
    rb.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert read_ids(rb.sample()) == [0, 1, 2, 3]


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("way", ["pickle", "state_dict", "dumps"])
@pytest.mark.parametrize("seed", [0, None])
def test_queued_draws_travel_with_the_buffer(
    sampler: type[Sampler], way: str, seed: int | None, tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        rb = make(3, sampler(), seed=seed)
        rb.sample()
        if way == "pickle":
            other = pickle.loads(pickle.dumps(rb))
        else:
            other = make(3, sampler(), seed=seed)
            if way == "dumps":
                rb.dumps(tmp_path / "save")
                other.loads(tmp_path / "save")
            else:
                other.load_state_dict(rb.state_dict())
        # the three queued draws, and without a generator of its own only these, are the same in both
        count = 3 if seed is None else 9
        assert [read_ids(rb.sample()) for _ in range(count)] == [read_ids(other.sample()) for _ in range(count)]


def test_a_refused_load_keeps_queued_draws() -> None:
    rb, expected = make(3), make(0)
    assert read_ids(rb.sample()) == read_ids(expected.sample())
    other = make(0, SamplerWithoutReplacement())
    with pytest.raises(ValueError, match="sampler"):
        rb.load_state_dict(other.state_dict())
    for _ in range(5):
        assert read_ids(rb.sample()) == read_ids(expected.sample())


def test_queued_draws_of_another_batch_size_are_refused() -> None:
    rb = make(2, size=4)
    rb.sample()
    for size in (8, None):
        other = buffer("packed", 10, batch_size=size)
        fill(other, range(10))
        with pytest.raises(ValueError, match="batch_size"):
            other.load_state_dict(rb.state_dict())
        assert len(read_ids(other.sample(9))) == 9


def test_prefetch_needs_a_batch_size() -> None:
    with pytest.raises(OptionError, match="batch-size must be specified in advance"):
        buffer("packed", 10, prefetch=2)
    assert buffer("packed", 10, prefetch=0).sample is not None


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2"])
def test_prefetch_must_be_a_count(wrong: Any) -> None:
    with pytest.raises((OptionError, TypeError), match="prefetch"):
        buffer("packed", 10, prefetch=wrong, batch_size=4)


def test_another_batch_size_than_the_prefetched_one_is_refused() -> None:
    rb = make(2)
    with pytest.raises(OptionError, match="must be 4"):
        rb.sample(5)
    assert len(read_ids(rb.sample(4))) == 4


@pytest.mark.parametrize("storage", list(STORAGES))
def test_every_storage_prefetches(storage: str) -> None:
    kind = "dict"
    rb = buffer(storage, 10, batch_size=4, prefetch=2)
    fill(rb, range(10), kind)
    for _ in range(5):
        assert len(read_ids(rb.sample())) == 4


def test_threads_go_with_their_buffers() -> None:
    gc.collect()
    before = threading.active_count()
    for _ in range(10):
        make(2).sample()
    for _ in range(50):
        gc.collect()
        if threading.active_count() <= before:
            break
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_the_interpreter_ends_with_a_live_prefetch_thread() -> None:
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
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "done"
    assert "Traceback" not in out.stderr
    assert "leaked" not in out.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_goes_on_with_the_queued_draws() -> None:
    rb = make(3)
    rb.sample()
    until_ready(rb, 3)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (another process)
        status = 1
        try:
            os.write(send, repr([read_ids(rb.sample()) for _ in range(5)]).encode())
            status = 0
        finally:
            os._exit(status)
    expected = [read_ids(rb.sample()) for _ in range(5)]
    deadline = time.monotonic() + 20
    done, status = 0, 1
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    os.close(send)
    assert status == 0
    assert os.read(receive, 10000).decode() == repr(expected)
    os.close(receive)


def test_the_last_rows_are_delivered_although_no_more_can_be_drawn_ahead() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=LimitedSampler(3), batch_size=3, prefetch=2)
    rb.extend(torch.arange(1))
    assert rb.sample().tolist() == [0, 0, 0]
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(torch.arange(1, 2))
    assert rb.sample().tolist() == [1, 1, 1]
