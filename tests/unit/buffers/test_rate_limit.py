"""Rate limits and queues: their arithmetic, readers and writers that wait for each other, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    Episodes,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    TensorDictReplayBuffer,
)
from ostinato.buffers.rate_limit import Flow, Stock
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


SOON = 0.05


LONG = 20.0
"""Longer than any of these tests should wait; a failure, not a hang, when something is lost."""


def queue(capacity: int = 8, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=QueueSampler(), **options)


def limited(most: int, capacity: int = 8, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=LimitedSampler(most), **options)


def together(*work: Callable[[], Any]) -> list[Any]:
    """Run in threads; raise what they raise."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(6 * LONG) for future in [pool.submit(w) for w in work]]


@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_queue_hands_every_row_over_once(prefetch: int | None) -> None:
    rb = queue(16, batch_size=5, prefetch=prefetch)
    rows = 400

    def write(first: int) -> None:
        for i in range(first, first + rows // 2, 4):
            rb.extend(torch.arange(i, i + 4), timeout_s=LONG)

    def read() -> list[int]:
        return [row for _ in range(rows // 10) for row in rb.sample(timeout_s=LONG).tolist()]

    _, _, first, second = together(lambda: write(0), lambda: write(rows // 2), read, read)
    assert sorted(first + second) == list(range(rows))
    for mine in (first, second):  # each writer's rows come in its order
        for half in ([r for r in mine if r < rows // 2], [r for r in mine if r >= rows // 2]):
            assert half == sorted(half) or prefetch
    assert rb.sampler.rows_left == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_the_ratio_holds_while_threads_race(prefetch: int | None) -> None:
    limiter = RateLimiter(3.0, 40.0, 20)
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=prefetch, rate_limiter=limiter)
    low, high = limiter.band
    balances: list[float] = []
    flow = rb._engine.gate.flow  # type: ignore[union-attr]

    def write() -> None:
        for i in range(60):
            rb.extend(torch.full((5,), i), timeout_s=LONG)
            with rb._engine.lock:
                balances.append(3.0 * flow.written - flow.drawn)

    def read() -> None:
        for _ in range(50):
            rb.sample(timeout_s=LONG)
            with rb._engine.lock:
                balances.append(3.0 * flow.written - flow.drawn)

    together(write, read, read)
    assert flow.written == 300
    assert 800 <= flow.drawn <= 800 + 8 * (prefetch or 0)
    steady = [b for b in balances if b > low + 1]
    assert max(balances) <= high
    assert min(steady) >= low


@pytest.mark.parametrize("prefetch", [None, 3])
def test_rows_retire_after_exactly_so_many_draws(prefetch: int | None) -> None:
    rb = limited(3, 64, batch_size=4, prefetch=prefetch, rate_limiter=RateLimiter())

    def write() -> None:
        for i in range(0, 64, 8):
            rb.extend(torch.arange(i, i + 8), timeout_s=LONG)

    def read() -> list[int]:
        return [row for _ in range(24) for row in rb.sample(timeout_s=LONG).tolist()]

    _, first, second = together(write, read, read)
    assert Counter(first + second) == dict.fromkeys(range(64), 3)
    with pytest.raises(WaitTimeoutError, match="0 row"):
        rb.sample(timeout_s=SOON)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_rows_replaced_while_they_race_are_not_drawn_too_often(prefetch: int | None) -> None:
    rb = limited(2, 12, batch_size=6, prefetch=prefetch, rate_limiter=RateLimiter())
    done = threading.Event()

    def write() -> None:
        i = 0
        while not done.is_set():
            rb.extend(torch.arange(i, i + 3), timeout_s=LONG)
            i += 3

    def read() -> list[int]:
        try:
            return [row for _ in range(150) for row in rb.sample(timeout_s=LONG).tolist()]
        finally:
            done.set()

    _, rows = together(write, read)
    assert max(Counter(rows).values()) <= 2


class Interrupted(LazyTensorStorage):
    """Lets something happen just before rows are read."""

    before_get: Callable[[], Any] | None = None

    def gather(self, slots: torch.Tensor, *, pin: bool = False) -> Any:
        happen, self.before_get = self.before_get, None
        if happen is not None:
            happen()
        return super().gather(slots, pin=pin)


def test_a_draw_whose_rows_were_replaced_is_void() -> None:
    storage = Interrupted(4)
    rb = ReplayBuffer(storage=storage, sampler=LimitedSampler(1), batch_size=4)
    rb.extend(torch.arange(4))
    storage.before_get = lambda: rb.extend(torch.arange(4, 6))  # rows 0 and 1 are replaced in between
    assert sorted(rb.sample().tolist()) == [2, 3, 4, 5]  # each once: those drawn first were given back
    with pytest.raises(EmptyBufferError, match=r"0 row\(s\) left can be drawn 0 more time"):
        rb.sample()


def test_a_queue_that_is_emptied_during_a_draw_counts_from_zero() -> None:
    storage = Interrupted(4)
    rb = ReplayBuffer(storage=storage, sampler=QueueSampler(), batch_size=2)
    rb.extend(torch.arange(4))

    def start_over() -> None:
        rb.empty()
        rb.extend(torch.arange(10, 14))

    storage.before_get = start_over
    assert rb.sample().tolist() == [10, 11]
    assert rb.sample().tolist() == [12, 13]
    rb.extend(torch.arange(4), timeout_s=SOON)


def test_a_batch_drawn_before_the_buffer_was_emptied_does_not_count() -> None:
    storage = Interrupted(8)
    rb = ReplayBuffer(storage=storage, batch_size=4, rate_limiter=RateLimiter(1.0, 8.0, 4))
    rb.extend(torch.arange(8))

    def start_over() -> None:
        rb.empty()
        rb.extend(torch.arange(8, 12))

    storage.before_get = start_over
    assert set(rb.sample().tolist()) <= set(range(8, 12))
    assert rb.state_dict()["flow"]["drawn"] == rb._engine.gate.flow.drawn <= 4  # type: ignore[union-attr]


def test_batches_that_cannot_be_made_go_back() -> None:
    angry = True

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if angry:
            msg = "not now"
            raise ValueError(msg)
        return batch

    for prefetch in (None, 2):
        angry = True
        rb = queue(8, batch_size=3, prefetch=prefetch, transform=transform)
        rb.extend(torch.arange(8))
        for _ in range(5):
            with pytest.raises(ValueError, match="not now"):
                rb.sample(timeout_s=SOON)
        angry = False
        rows = []
        for _ in range(2 if prefetch is None else 6):  # batches that failed ahead are still in the queue
            try:
                rows += rb.sample(timeout_s=SOON).tolist()
            except (ValueError, WaitTimeoutError):
                continue
        assert sorted(rows) == list(range(6))


def test_a_lone_reader_is_told_what_it_waits_for() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50), batch_size=8, rate_limiter=RateLimiter(2.0, 20.0, 10, timeout_s=SOON)
    )
    rb.extend(torch.arange(6))
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError) as caught:
        rb.sample()
    assert SOON <= time.monotonic() - began < 5
    assert str(caught.value) == (
        "a draw of 8 row(s) waited 0.05 s for writers: 6 row(s) can be drawn, min_size_to_sample is 10; 6 row(s) "
        "written, 0 drawn; 2 x 6 - 0 = 12 must stay in [0, 40] (samples_per_insert=2, error_buffer=20); 6 row(s) can "
        "be drawn (min_size_to_sample=10); waiting now: 0 writer(s), 1 reader(s): raise timeout_s, or see what became "
        "of the other side"
    )
    assert isinstance(caught.value, TimeoutError)
    rb.extend(torch.arange(4))
    rb.sample()
    rb.sample()
    with pytest.raises(WaitTimeoutError, match=r"2 more row\(s\) must be written before 8 can be drawn"):
        rb.sample(timeout_s=0)


def test_a_lone_writer_is_told_what_it_waits_for() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, rate_limiter=RateLimiter(2.0, 20.0, 10))
    rb.extend(torch.arange(20))
    before = rb.state_dict()
    with pytest.raises(WaitTimeoutError, match=r"2 more row\(s\) must be drawn before 1 can be written"):
        rb.add(torch.tensor(1), timeout_s=SOON)
    assert str(rb.state_dict()) == str(before)  # nothing changed
    rb.sample()
    rb.extend(torch.arange(4), timeout_s=0)
    full = queue(4, batch_size=2)
    full.extend(torch.arange(3))
    with pytest.raises(WaitTimeoutError, match="room for 1 of 2 rows until queued ones have been delivered"):
        full.extend(torch.arange(2), timeout_s=SOON)


def test_both_sides_hear_that_the_band_is_too_narrow() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(99), batch_size=12, rate_limiter=RateLimiter(1.0, 8.0, 10))
    rb.extend(torch.arange(10))
    rb.extend(torch.arange(6))
    said: list[str] = []

    def wait(call: Callable[[], Any]) -> None:
        with pytest.raises(WaitTimeoutError) as caught:
            call()
        said.append(str(caught.value))

    rb.sample(8)  # balance 8, band [2, 18]
    together(
        lambda: wait(lambda: rb.extend(torch.arange(12), timeout_s=0.4)),
        lambda: wait(lambda: rb.sample(timeout_s=0.5)),
    )
    assert any(
        "both sides wait: if the band is too narrow for these calls, make error_buffer 12 or more" in s for s in said
    )


def test_a_writer_that_dies_leaves_its_reader_to_the_timeout() -> None:
    rb = queue(8, batch_size=4)

    def die() -> None:
        rb.extend(torch.arange(2))
        msg = "killed"
        raise RuntimeError(msg)

    with ThreadPoolExecutor(2) as pool:
        writer = pool.submit(die)
        reader = pool.submit(lambda: rb.sample(timeout_s=0.3))
        assert isinstance(writer.exception(LONG), RuntimeError)
        with pytest.raises(WaitTimeoutError, match="4 rows were asked for, and the rows present can be drawn 2 more"):
            reader.result(LONG)
    assert rb._engine.waiters.readers == []
    rb.extend(torch.arange(2, 4))
    assert rb.sample().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("change", ["empty", "sampler", "storage", "load"])
def test_who_waits_looks_again_when_the_buffer_changes(change: str) -> None:
    rb = queue(4, batch_size=2)
    rb.extend(torch.arange(4))
    saved = queue(4, batch_size=2)
    saved.extend(torch.arange(1))
    state = saved.state_dict()

    def alter() -> None:
        time.sleep(SOON)
        if change == "empty":
            rb.empty()
        elif change == "sampler":
            rb.set_sampler(RandomSampler())
        elif change == "storage":
            rb.set_storage(LazyTensorStorage(4))
        else:
            rb.load_state_dict(state)

    together(lambda: rb.extend(torch.arange(4, 7), timeout_s=LONG), alter)
    assert len(rb) == {"empty": 3, "sampler": 4, "storage": 3, "load": 4}[change]


def test_rows_of_an_iterator_survive_the_wait() -> None:
    rb = ReplayBuffer(storage=ListStorage(4), sampler=QueueSampler(), batch_size=2, collate_fn=list)
    rb.extend(["a", "b", "c"])
    rows = (letter for letter in "de")

    def read_later() -> None:
        time.sleep(SOON)
        rb.sample(timeout_s=LONG)

    together(lambda: rb.extend(rows, timeout_s=LONG), read_later)
    assert rb.sample(3, timeout_s=LONG) == ["c", "d", "e"]


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("way", ["state_dict", "directory", "pickle"])
def test_a_queue_goes_on_without_loss_or_repetition(prefetch: int | None, way: str, tmp_path: Path) -> None:
    rb = queue(10, batch_size=2, prefetch=prefetch, generator=torch.Generator())
    rb.extend(torch.arange(9))
    rows = rb.sample().tolist() + rb.sample().tolist()
    rb.extend(torch.arange(9, 12))
    other = queue(10, batch_size=2, prefetch=prefetch, generator=torch.Generator())
    other.extend(torch.arange(50, 53))
    if way == "state_dict":
        state = rb.state_dict()
        rows_here = [*rows, *rb.sample(timeout_s=SOON).tolist()]  # what the first one does later is its own affair
        assert rows_here == list(range(6))
        other.load_state_dict(state)
    elif way == "directory":
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other = pickle.loads(pickle.dumps(rb))
    for _ in range(4):
        rows += other.sample(timeout_s=SOON).tolist()
    assert rows == list(range(12))
    other.extend(torch.arange(10), timeout_s=SOON)  # all slots are free again
    with pytest.raises(WaitTimeoutError):
        other.extend(torch.arange(1), timeout_s=SOON)


def test_a_batch_on_its_way_is_in_the_checkpoint() -> None:
    storage = Interrupted(8)
    rb = ReplayBuffer(storage=storage, sampler=QueueSampler(), batch_size=4)
    rb.extend(torch.arange(6))
    states: list[dict[str, Any]] = []
    storage.before_get = lambda: states.append(rb.state_dict())  # the rows drawn have not arrived
    assert rb.sample().tolist() == [0, 1, 2, 3]
    other = queue(8, batch_size=6)
    other.load_state_dict(states[0])
    assert other.sample(timeout_s=SOON).tolist() == [0, 1, 2, 3, 4, 5]
    assert states[0]["flow"]["drawn"] == 0


@pytest.mark.parametrize("prefetch", [None, 2])
def test_limited_rows_go_on_where_they_were(prefetch: int | None, tmp_path: Path) -> None:
    def make() -> ReplayBuffer:
        return limited(2, 6, batch_size=3, prefetch=prefetch, generator=torch.Generator().manual_seed(1))

    rb = make()
    rb.extend(torch.arange(6))
    before = rb.sample().tolist()
    rb.dumps(tmp_path / "saved")
    other = make()
    other.loads(tmp_path / "saved")
    after = [other.sample().tolist() for _ in range(1 if prefetch else 3)]
    assert after == [rb.sample().tolist() for _ in after]
    assert max(Counter(sum(after, before)).values()) <= 2


def test_queued_draws_of_rows_that_are_gone_are_dropped_at_a_load() -> None:
    rb = limited(1, 4, batch_size=2, prefetch=1, rate_limiter=RateLimiter())
    rb.extend(torch.arange(4))
    first = rb.sample().tolist()  # the other two are drawn ahead
    rb.extend(torch.arange(4, 6))  # rows 0 and 1 are replaced
    other = limited(1, 4, batch_size=2, prefetch=1, rate_limiter=RateLimiter())
    other.load_state_dict(rb.state_dict())
    rest: list[int] = []
    with contextlib.suppress(WaitTimeoutError):
        while True:
            rest += other.sample(timeout_s=SOON).tolist()
    assert max(Counter(first + rest).values()) == 1


def test_the_counts_of_a_limiter_are_restored() -> None:
    def make(ratio: float = 2.0, prefetch: int | None = None) -> ReplayBuffer:
        limiter = RateLimiter(ratio, 20.0, 10)
        return ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=prefetch, rate_limiter=limiter)

    for prefetch in (None, 2):
        rb = make(prefetch=prefetch)
        rb.extend(torch.arange(20))
        for _ in range(3):
            rb.sample()
        state = copy.deepcopy(rb.state_dict())
        other = make(prefetch=prefetch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(state)
        for either in (rb, other):  # 40 - 24 = 16; two more batches, and no third one
            either.sample(timeout_s=SOON)
            either.sample(timeout_s=SOON)
            with pytest.raises(WaitTimeoutError, match=r"20 row\(s\) written, 40 drawn"):
                either.sample(timeout_s=SOON)


def test_another_limiter_holds_after_a_load_and_never_hangs(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, rate_limiter=RateLimiter(8.0, 100.0, 10))
    rb.extend(torch.arange(20))
    rb.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, rate_limiter=RateLimiter(0.5, 20.0, 10))
    with pytest.warns(UserWarning, match=r"error_buffer=100.0 \(now 20.0\), samples_per_insert=8.0 \(now 0.5\)"):
        other.loads(tmp_path / "saved")
    other.extend(torch.arange(4), timeout_s=0)  # the balance begins in the middle: both sides may go on
    other.sample(timeout_s=0)
    without = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8)
    without.loads(tmp_path / "saved")
    without.extend(torch.arange(50))
    without.dumps(tmp_path / "without")
    other.loads(tmp_path / "without")
    other.sample(timeout_s=0)


@pytest.mark.parametrize("size", [5, 9])
def test_a_queue_goes_on_in_a_ring_of_another_size(size: int) -> None:
    rb = queue(8)
    rb.extend(torch.arange(5))
    other = queue(size)
    other.load_state_dict(rb.state_dict())
    assert isinstance(other.sampler, QueueSampler)
    assert other.sampler.room(other._engine.view()) == size - 5
    rows = other.sample(5).tolist()
    assert rows == list(range(5))


def test_a_refused_load_leaves_a_queue_as_it_was() -> None:
    rb = queue(8, batch_size=2, prefetch=2)
    rb.extend(torch.arange(8))
    rows = rb.sample().tolist()
    other = queue(8)
    other.extend({"x": torch.arange(3)})
    with pytest.raises(CheckpointError):
        rb.load_state_dict(other.state_dict())
    rows += [row for _ in range(3) for row in rb.sample(timeout_s=SOON).tolist()]
    assert rows == list(range(8))
    rb.extend(torch.arange(8), timeout_s=SOON)


def test_prioritized_and_tensordict_buffers_wait_as_well() -> None:
    limiter = RateLimiter(1.0, 8.0, 4, timeout_s=SOON)
    ranked = PrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(20), batch_size=8, rate_limiter=limiter
    )
    dicts = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, rate_limiter=limiter)
    for rb, rows in ((ranked, torch.arange(6)), (dicts, TensorDict({"x": torch.arange(6)}, [6]))):
        rb.extend(rows)
        rb.sample(timeout_s=0)
        with pytest.raises(WaitTimeoutError):
            rb.sample()


def test_two_dimensional_queues_count_cells() -> None:
    store = LazyTensorStorage(8, ndim=2)
    rb = ReplayBuffer(storage=store, sampler=QueueSampler(), batch_size=4, dim_extend=0)
    rb.extend(torch.arange(6).reshape(3, 2))
    with pytest.raises(WaitTimeoutError, match="room for 2 of 4 rows"):
        rb.extend(torch.arange(6, 10).reshape(2, 2), timeout_s=SOON)
    assert rb.sample().tolist() == [0, 1, 2, 3]
    rb.extend(torch.arange(6, 10).reshape(2, 2), timeout_s=SOON)
    assert rb.sample(6).tolist() == [4, 5, 6, 7, 8, 9]


def test_a_queue_over_rows_that_were_there_gives_those_first() -> None:
    storage = LazyTensorStorage(6)
    ReplayBuffer(storage=storage).extend(torch.arange(8))
    rb = ReplayBuffer(storage=storage, sampler=QueueSampler(), batch_size=6)
    assert rb.sample().tolist() == [2, 3, 4, 5, 6, 7]


def test_edited_rows_stay_in_the_queue_where_they_are() -> None:
    rb = queue(4, batch_size=2)
    rb.extend(torch.arange(4))
    rb[0] = torch.tensor(10)
    assert rb.sample().tolist() == [10, 1]
    with pytest.raises(WaitTimeoutError, match="room for 2 of 3"):
        rb.extend(torch.arange(3), timeout_s=SOON)


def test_a_queue_leaves_nobody_waiting_once_it_is_gone() -> None:
    rb = queue(4, batch_size=2)
    rb.extend(torch.arange(4))
    rb.set_sampler(RandomSampler())
    assert rb.rate_limiter is None
    rb.extend(torch.arange(4))
    rb.set_sampler(QueueSampler())
    assert rb.sample(4).tolist() == [0, 1, 2, 3]
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=SOON)


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(KindError, match=r"must be an ostinato.RateLimiter or None, got float"):
        ReplayBuffer(rate_limiter=2.0)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="min_size_to_sample=9 rows are never there: the storage has max_size=8"):
        ReplayBuffer(storage=LazyTensorStorage(8), rate_limiter=RateLimiter(min_size_to_sample=9))
    with pytest.raises(OptionError, match="leave out sample_unit"):
        ReplayBuffer(storage=LazyTensorStorage(8), sampler=QueueSampler(), sample_unit=NStep(2, 0.5))
    with pytest.raises(OptionError, match="leave out episodes"):
        ReplayBuffer(storage=LazyTensorStorage(8), sampler=LimitedSampler(2), episodes=Episodes(end_key="done"))
    with pytest.raises(OptionError, match="use RoundRobinWriter, not ReservoirWriter"):
        ReplayBuffer(storage=LazyTensorStorage(8), sampler=QueueSampler(), writer=ReservoirWriter())
    plain = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    with pytest.raises(OptionError, match="no call waits in a buffer without rate_limiter"):
        plain.extend(torch.arange(2), timeout_s=1.0)
    plain.extend(torch.arange(2))
    with pytest.raises(OptionError, match="no call waits"):
        plain.sample(timeout_s=1.0)
    rb = queue(8, batch_size=2)
    with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
        rb.sample(timeout_s=-1.0)
    with pytest.raises(OptionError, match="never fits into a queue of 8"):
        rb.extend(torch.arange(9))
    with pytest.raises(OptionError, match="a full buffer is good for 8 draws"):
        rb.sample(9)
    for bad in (rb, ReplayBuffer(storage=LazyTensorStorage(8), rate_limiter=RateLimiter()), limited(2)):
        with pytest.raises(OptionError, match="an ensemble does not know of"):
            ReplayBufferEnsemble(bad, plain)


RATIOS = st.one_of(st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 3.7, 8.0]), st.floats(0.01, 50.0))


@st.composite
def limiters(draw: st.DrawFn) -> RateLimiter:
    ratio = draw(RATIOS)
    error = max(1.0, ratio) * draw(st.floats(1.0, 20.0))
    return RateLimiter(ratio, error, draw(st.integers(1, 30)))


def model_may_write(limiter: RateLimiter, written: int, drawn: int, size: int, rows: int) -> bool:
    ratio, error = Fraction(str(limiter.samples_per_insert)), Fraction(str(limiter.error_buffer))
    if size < limiter.min_size_to_sample:
        return True
    return (written + rows) * ratio - drawn <= ratio * limiter.min_size_to_sample + error


def model_may_draw(limiter: RateLimiter, written: int, drawn: int, size: int, rows: int) -> bool:
    ratio, error = Fraction(str(limiter.samples_per_insert)), Fraction(str(limiter.error_buffer))
    if size < limiter.min_size_to_sample:
        return False
    return written * ratio - (drawn + rows) >= ratio * limiter.min_size_to_sample - error


@given(limiters(), st.integers(0, 500), st.integers(0, 5000), st.integers(0, 60), st.integers(1, 40))
def test_verdicts_are_those_of_the_definition(
    limiter: RateLimiter, written: int, drawn: int, size: int, rows: int
) -> None:
    flow, stock = Flow(limiter), Stock(size)
    flow.wrote(written)
    flow.drew(drawn)
    assert flow.may_write(rows, stock) == model_may_write(limiter, written, drawn, size, rows)
    assert flow.may_draw(rows, stock) == model_may_draw(limiter, written, drawn, size, rows)


@given(limiters(), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=80))
def test_admitted_calls_keep_the_balance_in_its_band(limiter: RateLimiter, calls: list[tuple[bool, int]]) -> None:
    flow, (low, high) = Flow(limiter), limiter.band
    slack = 1e-6 * (1 + abs(low) + abs(high))
    for writes, rows in calls:
        stock = Stock(flow.written)
        filling = stock.rows < limiter.min_size_to_sample
        if writes and flow.may_write(rows, stock):
            flow.wrote(rows)
            assert filling or (limiter.samples_per_insert or 0) * flow.written - flow.drawn <= high + slack
        elif not writes and flow.may_draw(rows, stock):
            flow.drew(rows)
            assert not filling
            assert (limiter.samples_per_insert or 0) * flow.written - flow.drawn >= low - slack


@given(RATIOS, st.integers(1, 20), st.integers(1, 20), st.integers(1, 30), st.randoms(use_true_random=False))
def test_wide_enough_bands_never_stop_both_sides(ratio: float, write: int, draw: int, least: int, dice: object) -> None:
    error = max((write * ratio + draw) / 2, 1.0, ratio) * (1 + 1e-9)
    flow = Flow(RateLimiter(ratio, error, least))
    for _ in range(60):
        stock = Stock(flow.written)
        may = [flow.may_write(write, stock), flow.may_draw(draw, stock)]
        assert any(may)
        if may[0] and (not may[1] or dice.random() < 0.5):  # type: ignore[attr-defined]
            flow.wrote(write)
        else:
            flow.drew(draw)


@given(limiters(), st.integers(30, 500), st.integers(0, 5000), st.integers(1, 40))
def test_what_is_said_to_be_missing_is_just_enough(limiter: RateLimiter, written: int, drawn: int, rows: int) -> None:
    flow, stock = Flow(limiter), Stock(60)
    flow.wrote(written)
    flow.drew(drawn)
    if not flow.may_draw(rows, stock):
        more = int(flow.why_no_draw(rows, stock).split()[0])
        flow.wrote(more - 1)
        assert not flow.may_draw(rows, stock)
        flow.wrote(1)
        assert flow.may_draw(rows, stock)
    elif not flow.may_write(rows, stock):
        more = int(flow.why_no_write(rows, stock).split()[0])
        flow.drew(more - 1)
        assert not flow.may_write(rows, stock)
        flow.drew(1)
        assert flow.may_write(rows, stock)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_without_a_ratio_only_stock_counts(rows: int, other: int, least: int) -> None:
    flow = Flow(RateLimiter(min_size_to_sample=least))
    assert flow.may_write(5, Stock(rows))
    assert flow.may_write(5, Stock(rows, None, other)) == (other >= 5)
    assert flow.may_draw(5, Stock(rows)) == (rows >= least)
    assert flow.may_draw(5, Stock(rows, other)) == (rows >= least and other >= 5)


def test_calls_that_could_never_go_ahead_are_refused() -> None:
    flow = Flow(RateLimiter(2.0, 10.0, 5))
    flow.check_write(10, None)
    flow.check_draw(20, None)
    with pytest.raises(OptionError, match=r"a write of 11 rows .* by 2 each, more than the band \[0, 20\] is wide"):
        flow.check_write(11, None)
    with pytest.raises(OptionError, match="a batch of 21 rows moves the balance by 1 each"):
        flow.check_draw(21, None)
    with pytest.raises(OptionError, match="never fits into a queue of 8"):
        flow.check_write(9, 8)
    with pytest.raises(OptionError, match="a full buffer is good for 16 draws"):
        flow.check_draw(17, 16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples_per_insert": 1.0}, "go together"),
        ({"error_buffer": 1.0}, "go together"),
        ({"samples_per_insert": 0.0, "error_buffer": 1.0}, "samples_per_insert must be a finite number above 0"),
        ({"samples_per_insert": 1.0, "error_buffer": math.inf}, "error_buffer must be a finite number"),
        ({"samples_per_insert": 8.0, "error_buffer": 7.0}, r"at least max\(1, samples_per_insert\) = 8"),
        ({"samples_per_insert": True, "error_buffer": 7.0}, "got True"),
        ({"min_size_to_sample": 0}, "min_size_to_sample must be an integer of at least 1"),
        ({"min_size_to_sample": 2.5}, "got 2.5"),
        ({"timeout_s": -1}, "timeout_s must be a number of seconds"),
        ({"timeout_s": math.nan}, "timeout_s must be a number of seconds"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        RateLimiter(**options)  # type: ignore[arg-type]


def test_counts_come_back_under_the_same_rules_only() -> None:
    flow = Flow(RateLimiter(2.0, 10.0, 5, timeout_s=1.0))
    flow.wrote(9)
    flow.drew(7)
    state = flow.state_dict()
    same = Flow(RateLimiter(2.0, 10.0, 5, timeout_s=9.0))
    assert same.load_state_dict(state, 9) is None
    assert (same.written, same.drawn) == (9, 7)
    other = Flow(RateLimiter(4.0, 10.0, 5))
    assert other.load_state_dict(state, 9) == "samples_per_insert=2.0 (now 4.0)"
    low, high = other.limiter.band
    assert 4.0 * other.written - other.drawn == (low + high) / 2
    assert other.load_state_dict(None, 3) is None
    assert (other.written, other.drawn) == (3, 0)
