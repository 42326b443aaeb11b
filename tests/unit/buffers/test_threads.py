"""Writers and samplers in threads: no torn row, no lost count, no deadlock; writes between draw and gather."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, RandomSampler, ReplayBuffer, ReplayBufferEnsemble, SamplerWithoutReplacement
from ostinato.errors import EmptyBufferError

from ...tags import TENSORS, buffer, fill, poison, read_ids, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.usefixtures("backend")


CAPACITY = 64


@contextmanager
def busy_switching() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_all(jobs: Sequence[Callable[[], object]], seconds: float) -> None:
    """Run jobs over and over in a thread each, all of them at least once; their first error is raised here."""
    errors: list[BaseException] = []
    rounds = [0] * len(jobs)
    start = threading.Barrier(len(jobs))
    limit = time.monotonic() + 30

    def work(number: int) -> None:
        try:
            start.wait(30)
            stop = time.monotonic() + seconds
            while not errors and (time.monotonic() < stop or (not all(rounds) and time.monotonic() < limit)):
                jobs[number]()
                rounds[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    with busy_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    assert not any(thread.is_alive() for thread in threads), f"deadlock: {rounds} rounds were made"
    if errors:
        raise errors[0]
    assert all(rounds), f"some thread never got through a round: {rounds}"


def checksummed(ids: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Small and wide fields that all repeat their row's id: a row written by two writers shows at once."""
    return {
        "small": ids.clone(),
        "float": ids.to(torch.float64),
        "wide": ids[:, None].expand(-1, size).contiguous(),
    }


def is_whole(batch: dict[str, torch.Tensor]) -> bool:
    ids = batch["small"]
    return torch.equal(batch["float"], ids.to(torch.float64)) and bool((batch["wide"] == ids[:, None]).all())


@pytest.mark.parametrize("storage", list(TENSORS))
@pytest.mark.parametrize("prefetch", [None, 2])
def test_four_writers_and_two_samplers_never_meet_a_torn_row(storage: str, prefetch: int | None) -> None:
    rb = buffer(storage, CAPACITY, batch_size=64, prefetch=prefetch)
    rb.extend(checksummed(torch.arange(CAPACITY), 600))

    def write(writer: int) -> Callable[[], None]:
        number = [writer * 1_000_000]

        def job() -> None:
            number[0] += 1
            count = 1 + number[0] % (2 * CAPACITY)
            rb.extend(checksummed(torch.full((count,), number[0]), 600))

        return job

    def sample() -> None:
        assert is_whole(rb.sample()), "a torn row was sampled"

    run_all([*(write(i) for i in range(4)), sample, sample], 0.3)


def test_edits_and_reads_never_meet_a_torn_row() -> None:
    rb = buffer("packed", CAPACITY, batch_size=32)
    rb.extend(checksummed(torch.arange(CAPACITY), 40))
    number = [0]

    def edit() -> None:
        number[0] += 1
        rb[torch.arange(0, CAPACITY, 3)] = checksummed(torch.full((22,), number[0]), 40)

    def sample() -> None:
        assert is_whole(rb.sample())

    run_all([edit, sample, sample], 0.3)


def test_sampling_while_a_checkpoint_is_loaded_gives_whole_rows() -> None:
    rb = buffer("columns", CAPACITY, batch_size=64)
    rb.extend(checksummed(torch.full((CAPACITY,), 1), 4000))
    other = buffer("columns", CAPACITY, batch_size=64)
    other.extend(checksummed(torch.full((CAPACITY,), 2), 4000))
    states = [rb.state_dict(), other.state_dict()]
    states[0]["storage"]["state"]["columns"] = {
        name: column.clone() for name, column in states[0]["storage"]["state"]["columns"].items()
    }
    turn = [0]

    def load() -> None:
        turn[0] += 1
        rb.load_state_dict(states[turn[0] % 2])

    def sample() -> None:
        assert is_whole(rb.sample())

    run_all([load, sample, sample], 0.3)


def test_loading_moves_the_stamps_before_the_first_row_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that ran into a load must not pass for whole, although no row was written by a writer."""
    rb = buffer("packed", 8, batch_size=8)
    fill(rb, range(8))
    state = rb.state_dict()
    seen = []
    load = type(rb.storage).load_state_dict

    def loading(self: Any, saved: Any) -> None:
        seen.append(engine.ring)
        load(self, saved)

    engine = rb._engine
    before = engine.ring
    monkeypatch.setattr(type(rb.storage), "load_state_dict", loading)
    rb.load_state_dict(state)
    assert seen[0] is not before
    assert engine.ring is not before


def test_emptying_while_sampling_ends_in_an_error_or_whole_rows() -> None:
    rb = buffer("packed", CAPACITY, batch_size=16)
    number = [0]

    def refill() -> None:
        number[0] += 1
        rb.extend(checksummed(torch.full((CAPACITY,), number[0]), 40))
        rb.empty()

    def sample() -> None:
        with suppress(EmptyBufferError):
            assert is_whole(rb.sample())

    run_all([refill, sample, sample], 0.3)


def test_saving_while_sampling_with_prefetch_does_not_deadlock(tmp_path: Path) -> None:
    rb = buffer("packed", CAPACITY, batch_size=8, prefetch=3)
    fill(rb, range(CAPACITY))
    state = rb.state_dict()

    def sample() -> None:
        read_ids(rb.sample())

    run_all([sample, lambda: rb.dumps(tmp_path / "save"), lambda: rb.load_state_dict(state)], 0.6)


def test_exchanging_the_storage_while_sampling_gives_whole_batches() -> None:
    rb = buffer("packed", CAPACITY, batch_size=8)
    storages = []
    for name, first in (("packed", 0), ("list", 1000), ("columns", 2000)):
        filled = buffer(name, CAPACITY)
        fill(filled, range(first, first + CAPACITY), "tensor")
        storages.append(filled.storage)
    rb.set_storage(storages[0])
    turn = [0]

    def exchange() -> None:
        turn[0] += 1
        rb.set_storage(storages[turn[0] % 3])

    def sample() -> None:
        ids = read_ids(rb.sample())
        assert len(ids) == 8
        assert max(ids) - min(ids) < CAPACITY, "rows of two storages in one batch"

    run_all([exchange, sample, sample], 0.3)


def test_exchanging_the_sampler_while_sampling_gives_whole_batches() -> None:
    rb = buffer("packed", CAPACITY, batch_size=8, prefetch=2)
    fill(rb, range(CAPACITY))
    samplers = [SamplerWithoutReplacement(), RandomSampler()]
    turn = [0]

    def exchange() -> None:
        turn[0] += 1
        rb.set_sampler(samplers[turn[0] % 2])

    def sample() -> None:
        assert len(read_ids(rb.sample())) == 8

    run_all([exchange, sample, sample], 0.3)


def test_counts_are_exact_under_threads() -> None:
    rb = buffer("packed", CAPACITY, batch_size=8)
    fill(rb, range(CAPACITY))
    rounds = [0, 0, 0]

    def sample(i: int) -> Callable[[], None]:
        def job() -> None:
            rb.sample()
            rounds[i] += 1

        return job

    run_all([sample(0), sample(1), sample(2)], 0.3)
    assert rb.stats().rows_drawn == 8 * sum(rounds)


def test_stats_may_be_asked_at_any_time() -> None:
    rb = buffer("packed", CAPACITY, batch_size=8, prefetch=3)
    fill(rb, range(CAPACITY))
    run_all([rb.sample, rb.stats], 0.3)


def test_an_epoch_shared_by_threads_holds_each_row_once() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SamplerWithoutReplacement(), batch_size=10)
    rb.extend(rows(range(1000), "tensor"))
    seen: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        for _ in range(25):
            ids = read_ids(rb.sample())
            with lock:
                seen.extend(ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with busy_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen) == list(range(1000))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_samples_whatever_locks_other_threads_hold_when_it_is_made() -> None:
    """As the workers of a data loader do, while actors write."""
    rb, other = (ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4) for _ in range(2))
    both = ReplayBufferEnsemble(rb, other, batch_size=4, sample_from_all=True)
    for one in (rb, other):
        one.extend(torch.arange(8))
    for lock in (rb._engine.lock, both._mixer.lock):
        taken = threading.Event()

        def hold(lock: Any = lock, taken: threading.Event = taken) -> None:
            with lock:
                taken.set()
                time.sleep(0.2)

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait(10)
        child = os.fork()
        if child == 0:  # pragma: no cover (another process)
            status = 1
            try:
                both.sample()
                rb.sample()
                rb.extend(torch.arange(2))
                status = 0
            finally:
                os._exit(status)
        thread.join()
        assert ended_well(child)


def ended_well(child: int) -> bool:
    """Wait for a process for up to 20 s, then kill it; whether it ended by itself, and well."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


class Interrupted(LazyTensorStorage):
    """A storage in whose reads something happens: before the copy, or in the middle of it."""

    def __init__(self, capacity: int, *, packed: bool = True) -> None:
        super().__init__(capacity, packed=packed)
        self.before: Callable[[], Any] | None = None
        self.after: Callable[[], Any] | None = None
        self.gets = 0

    def gather(self, slots: Tensor, *, pin: bool = False) -> Any:
        self.gets += 1
        before, self.before = self.before, None
        if before is not None:
            before()
        payload = super().gather(slots, pin=pin)
        after, self.after = self.after, None
        if after is not None:
            after()
        return payload


def interrupted(packed: bool = True) -> tuple[ReplayBuffer, Interrupted]:
    storage = Interrupted(8, packed=packed)
    rb = buffer(storage, batch_size=6, generator=torch.Generator().manual_seed(0))
    fill(rb, range(8))
    return rb, storage


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_replaced_after_the_copy_is_read_again(packed: bool) -> None:
    """The copy may have been torn, so the batch must show the rows that the write left."""
    rb, storage = interrupted(packed)
    storage.after = lambda: fill(rb, range(100, 108))
    assert min(read_ids(rb.sample())) >= 100
    assert storage.gets == 2
    assert rb.stats().redone_gathers == 1


def test_a_row_replaced_before_the_copy_is_read_again() -> None:
    rb, storage = interrupted()
    storage.before = lambda: fill(rb, range(100, 108))
    assert min(read_ids(rb.sample())) >= 100
    assert rb.stats().redone_gathers == 1


def test_a_torn_copy_is_never_delivered() -> None:
    """The first copy is made of two halves of different rows: what a reader in the middle of a write sees."""
    rb, storage = interrupted()

    def tear() -> None:
        fill(rb, range(100, 108))
        storage.columns[("obs",)].fill_(-1.0)  # the write has reached only some of the fields ...
        storage.after = mend

    def mend() -> None:
        fill(rb, range(200, 208))  # ... and is completed after the copy

    storage.before = tear
    assert min(read_ids(rb.sample())) >= 200


def test_writes_to_other_rows_cost_nothing() -> None:
    """A write that does not touch the rows drawn is no reason to read again."""
    rb, storage = interrupted()
    rb.empty()
    fill(rb, range(4))
    storage.after = lambda: fill(rb, [4, 5])
    assert set(read_ids(rb.sample())) <= {0, 1, 2, 3}
    assert storage.gets == 1
    assert rb.stats().redone_gathers == 0


def test_an_edit_between_draw_and_copy_is_noticed() -> None:
    rb, storage = interrupted()
    storage.after = lambda: rb.__setitem__(slice(0, 8), rows(range(100, 108)))
    assert min(read_ids(rb.sample())) >= 100
    assert rb.stats().redone_gathers == 1


def test_a_field_edit_between_draw_and_copy_is_noticed() -> None:
    rb, storage = interrupted()
    storage.after = lambda: rb.set_("obs", torch.zeros(8, 3))
    assert bool((rb.sample()["obs"] == 0).all())
    assert rb.stats().redone_gathers == 1


def test_a_buffer_emptied_between_draw_and_copy_is_empty() -> None:
    rb, storage = interrupted()
    storage.before = rb.empty
    with pytest.raises(EmptyBufferError):
        rb.sample()


def test_a_buffer_emptied_after_the_copy_delivers_nothing() -> None:
    rb, storage = interrupted()
    storage.after = rb.empty
    with pytest.raises(EmptyBufferError):
        rb.sample()


def test_a_buffer_emptied_and_refilled_delivers_its_new_rows() -> None:
    """Draws of slots that hold no row now are drawn again; no slot that was not written shows."""
    rb, storage = interrupted()

    def refill() -> None:
        rb.empty()
        poison(storage)
        fill(rb, [50, 51])

    for moment in ("before", "after"):
        fill(rb, range(8))
        setattr(storage, moment, refill)
        assert set(read_ids(rb.sample())) <= {50, 51}


def test_a_load_between_draw_and_copy_is_noticed() -> None:
    rb, storage = interrupted()
    other = buffer("packed", 8)
    fill(other, range(100, 108))
    storage.after = lambda: rb.load_state_dict(other.state_dict())
    assert min(read_ids(rb.sample())) >= 100


def test_slots_of_a_broken_sampler_are_refused() -> None:
    rb, storage = interrupted()

    def out_of_range(slots: Tensor, *, pin: bool = False) -> Any:
        return LazyTensorStorage.gather(storage, slots + 100, pin=pin)

    storage.gather = out_of_range  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        rb.sample()


@pytest.mark.parametrize("count", [7, 8])
def test_a_late_field_in_the_middle_of_a_write_is_waited_for(count: int) -> None:
    """A writer marks rows as lacking late fields before it brings them: a sample that meets this must not raise."""
    rb, storage = interrupted()
    rb.write_all({**rows(range(8)), "late": torch.arange(8) * 10})
    engine: Any = rb._engine
    has = storage._late.has[("late",)]

    def begin_write() -> None:
        engine.ring.record_edit(torch.arange(count))
        has[:count] = False
        storage.before = end_write  # the engine reads again, under the lock, when the writer is done

    def end_write() -> None:
        has.fill_(value=True)

    storage.before = begin_write
    batch = rb.sample()
    assert torch.equal(batch["late"], batch["id"] * 10)


def test_rows_are_stamped_before_the_first_byte_of_them_changes() -> None:
    """A reader compares stamps after its copy: a stamp that came later would let half-written rows pass."""
    rb, storage = interrupted()
    engine: Any = rb._engine
    ticket = engine.draw(6)
    seen: list[bool] = []
    write = storage.write

    def writing(placement: Any, payload: Any) -> None:
        seen.append(engine._untouched(ticket))
        write(placement, payload)

    storage.write = writing  # type: ignore[method-assign]
    fill(rb, [100])
    assert seen == [False]


def test_a_storage_exchanged_after_the_copy_does_not_present_it() -> None:
    """Rows are presented and collated by the storage that they came from."""
    rb, _ = interrupted()
    other = buffer("list", 8)
    fill(other, range(100, 108))
    gather = rb._engine.gather

    def exchange(ticket: Any) -> Any:
        gathered = gather(ticket)
        rb._engine.gather = gather  # type: ignore[method-assign]
        rb.set_storage(other.storage)
        return gathered

    rb._engine.gather = exchange  # type: ignore[method-assign]
    ids = read_ids(rb.sample())
    assert max(ids) < 100 or min(ids) >= 100
