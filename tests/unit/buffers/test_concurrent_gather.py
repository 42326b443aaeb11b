"""A write between draw and gather, forced: the batch is read again, whole, and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from ostinato.errors import EmptyBufferError

from ...tags import buffer, fill, poison, read_ids, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Interrupted(LazyTensorStorage):
    """A storage in whose reads something happens: before the copy, or in the middle of it."""

    def __init__(self, capacity: int, *, packed: bool = True) -> None:
        super().__init__(capacity, packed=packed)
        self.before: Callable[[], Any] | None = None
        self.after: Callable[[], Any] | None = None
        self.gets = 0

    def get(self, slots: Tensor, *, pin: bool = False) -> Any:
        self.gets += 1
        before, self.before = self.before, None
        if before is not None:
            before()
        payload = super().get(slots, pin=pin)
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
        return LazyTensorStorage.get(storage, slots + 100, pin=pin)

    storage.get = out_of_range  # type: ignore[method-assign]
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
        engine.stamps.touch(torch.arange(count))
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
    write = storage.set

    def writing(placement: Any, payload: Any) -> None:
        seen.append(engine._untouched(ticket))
        write(placement, payload)

    storage.set = writing  # type: ignore[method-assign]
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
