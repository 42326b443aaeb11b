"""Writers and samplers in threads: no torn row, no lost count, no deadlock; writes between draw and gather."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SamplerWithoutReplacement
from ostinato.errors import EmptyBufferError

from ... import sharing
from ...sharing import LIMIT_S, end, start
from ...tags import buffer, fill, poison, read_ids, rows
from ..background import busy_switching, in_background

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


CAPACITY = 64


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("storage", "prefetch"), [("packed", None), ("columns", 2), ("mapped", None)])
def test_writers_and_samplers_never_meet_a_torn_row(storage, prefetch):
    rb = buffer(storage, CAPACITY, batch_size=64, prefetch=prefetch)
    rb.extend(sharing.rows(torch.arange(CAPACITY), 600))
    numbers = itertools.count(1000)

    def write() -> None:
        number = next(numbers)
        rb.extend(sharing.rows([number] * (1 + number % (2 * CAPACITY)), 600))

    def edit() -> None:
        rb[torch.arange(0, CAPACITY, 3)] = sharing.rows([next(numbers)] * 22, 600)

    def sample() -> None:
        sharing.check_rows(rb.sample())
        rb.stats()

    with in_background(write, write, edit, sample):
        for _ in range(40):
            sample()


def test_counts_and_passes_are_exact_under_threads():
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SamplerWithoutReplacement(), batch_size=10)
    rb.extend(torch.arange(1000))
    with busy_switching(), ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: torch.cat([rb.sample() for _ in range(25)]), range(4)))
    assert sorted(torch.cat(parts).tolist()) == list(range(1000))
    assert rb.stats().rows_drawn == 1000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_samples_whatever_locks_other_threads_hold_when_it_is_made():
    """As the workers of a data loader do, while actors write."""
    rb, other = (ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4) for _ in range(2))
    both = ReplayBufferEnsemble(rb, other, batch_size=4, sample_from_all=True)
    for one in (rb, other):
        one.extend(torch.arange(8))

    def use() -> None:
        both.sample()
        rb.sample()
        rb.extend(torch.arange(2))

    def hold(lock: Any, taken: threading.Event) -> None:
        with lock:  # the fork waits for it
            taken.set()
            time.sleep(0.05)

    for lock in (rb._engine.lock, both._engine.waiters.lock):
        taken = threading.Event()
        thread = threading.Thread(target=hold, args=(lock, taken))
        thread.start()
        taken.wait(LIMIT_S)
        child = start(use)
        thread.join()
        end(child)


class Interrupted(LazyTensorStorage):
    """A storage in whose reads something happens: before the copy, or in the middle of it."""

    before: Callable[[], Any] | None = None
    after: Callable[[], Any] | None = None
    gets = 0

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


def interrupted(packed: bool = True, first: int = 0) -> tuple[ReplayBuffer, Interrupted]:
    storage = Interrupted(8, packed=packed)
    rb = buffer(storage, batch_size=6, generator=torch.Generator().manual_seed(0))
    fill(rb, range(first, first + 8))
    return rb, storage


CHANGES: dict[str, Any] = {
    "rows": lambda rb: fill(rb, range(100, 108)),
    "edit": lambda rb: rb.__setitem__(slice(0, 8), rows(range(100, 108))),
    "field": lambda rb: rb.set_("id", torch.arange(100, 108)),
    "load": lambda rb: rb.load_state_dict(interrupted(first=100)[0].state_dict()),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_change_around_the_copy_are_read_again(change, packed):
    """The copy may have been torn, so the batch must show the rows that the change left."""
    for moment in ("before", "after"):
        rb, storage = interrupted(packed)
        setattr(storage, moment, lambda rb=rb: CHANGES[change](rb))
        assert int(rb.sample()["id"].min()) >= 100
        assert storage.gets == 2
        assert rb.stats().redone_gathers == 1


def test_a_torn_copy_is_never_delivered_and_writes_to_other_rows_cost_nothing():
    """The first copy is made of two halves of different rows: what a reader in the middle of a write sees."""
    rb, storage = interrupted()

    def tear() -> None:
        fill(rb, range(100, 108))
        storage.columns[("obs",)].fill_(-1.0)  # the write has reached only some of the fields ...
        storage.after = lambda: fill(rb, range(200, 208))  # ... and is completed after the copy

    storage.before = tear
    assert min(read_ids(rb.sample())) >= 200
    rb.empty()
    fill(rb, range(4))
    gets, redone = storage.gets, rb.stats().redone_gathers
    storage.after = lambda: fill(rb, [4, 5])
    assert set(read_ids(rb.sample())) <= {0, 1, 2, 3}
    assert (storage.gets, rb.stats().redone_gathers) == (gets + 1, redone)


def test_a_buffer_emptied_and_refilled_delivers_its_new_rows():
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
        setattr(storage, moment, rb.empty)
        with pytest.raises(EmptyBufferError):
            rb.sample()


@pytest.mark.parametrize("count", [7, 8])
def test_a_late_field_in_the_middle_of_a_write_is_waited_for(count):
    """A writer marks rows as lacking late fields before it brings them: a sample that meets this must not raise."""
    rb, storage = interrupted()
    rb.write_all({**rows(range(8)), "late": torch.arange(8) * 10})
    engine: Any = rb._engine
    _, has = storage._require().late.fields[("late",)].columns

    def begin_write() -> None:
        engine.ring.record_edit(torch.arange(count))
        has[:count] = False
        storage.before = lambda: has.fill_(1)  # the engine reads again when the writer is done

    storage.before = begin_write
    batch = rb.sample()
    assert torch.equal(batch["late"], batch["id"] * 10)


def test_rows_are_stamped_before_the_first_byte_of_them_changes():
    """A reader compares stamps after its copy: a stamp that came later would let half-written rows pass."""
    rb, storage = interrupted()
    engine: Any = rb._engine
    draw = engine.draw(6)
    seen: list[bool] = []
    write = storage.write

    def writing(placement: Any, payload: Any) -> None:
        seen.append(engine._untouched(draw))
        write(placement, payload)

    storage.write = writing  # type: ignore[method-assign]
    fill(rb, [100])
    assert seen == [False]
