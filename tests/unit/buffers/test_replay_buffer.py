"""Exchanging parts, defaults, generators, iteration, counters, and writing back."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    BufferStats,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Writer,
)
from ostinato.buffers.stats import combine
from ostinato.core.records import Draw, Picks
from ostinato.errors import OptionError, SlotError, UsageError

from ...tags import buffer, fill, read_ids, rows, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ostinato.core.records import View
    from ostinato.core.ring import Ring


def test_default_parts() -> None:
    rb = ReplayBuffer()
    assert isinstance(rb.storage, ListStorage)
    assert rb.storage.capacity == 1000
    assert type(rb.sampler) is RandomSampler
    assert type(rb.writer) is RoundRobinWriter
    assert rb.batch_size is None
    assert type(TensorDictReplayBuffer().writer) is TensorDictRoundRobinWriter


def test_parts_may_be_made_by_a_callable() -> None:
    rb = ReplayBuffer(storage=lambda: LazyTensorStorage(3), sampler=SamplerWithoutReplacement, writer=RoundRobinWriter)
    assert rb.storage.capacity == 3
    assert rb.sampler.epochal


def test_exchanges_return_the_previous_part() -> None:
    storage, sampler, writer = LazyTensorStorage(5), RandomSampler(), RoundRobinWriter()
    rb = ReplayBuffer(storage=storage, sampler=sampler, writer=writer)
    assert rb.set_storage(ListStorage(5)) is storage
    assert rb.set_sampler(SamplerWithoutReplacement()) is sampler
    assert rb.set_writer(RoundRobinWriter()) is writer
    assert isinstance(rb.storage, ListStorage)
    assert rb.sampler.epochal
    assert rb.writer is not writer


def test_parts_cannot_be_assigned() -> None:
    rb = ReplayBuffer()
    for name in ("storage", "sampler", "writer", "batch_size", "transform"):
        with pytest.raises(AttributeError):
            setattr(rb, name, None)


def test_another_storage_brings_its_collate_function() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(torch.arange(3))
    rb.set_storage(ListStorage(5))
    rb.extend([torch.zeros(2), torch.ones(2)])
    assert rb[:].shape == (2, 2)
    rb.set_storage(ListStorage(5), collate_fn=lambda items: items)
    rb.extend(["a", "b"])
    assert rb[:] == ["a", "b"]
    rb.set_storage(LazyTensorStorage(5))
    rb.extend(torch.arange(3))
    assert rb[:].tolist() == [0, 1, 2]


def test_writing_goes_on_after_the_rows_of_another_storage() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(4))
    other = LazyTensorStorage(5)
    filled = buffer(other)
    fill(filled, range(10, 12))
    rb.set_storage(other)
    assert read_ids(rb[:]) == [10, 11]
    assert fill(rb, [12]).tolist() == [2]
    assert read_ids(rb.sample(3)).count(0) == 0


def test_an_emptier_storage_takes_over_cursor_and_sampler() -> None:
    rb = buffer("packed", 5, sampler=SamplerWithoutReplacement(), batch_size=2)
    fill(rb, range(4))
    rb.sample()
    rb.set_storage(LazyTensorStorage(3))
    assert len(rb) == 0
    assert fill(rb, range(20, 22)).tolist() == [0, 1]
    assert sorted(read_ids(rb.sample())) == [20, 21]


@pytest.mark.parametrize("given", [None, 0])
def test_the_dimension_to_extend_follows_the_storage(given: int | None) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), dim_extend=given)
    rb.set_storage(LazyTensorStorage(20, ndim=2))
    rb.extend(torch.arange(6).view(2, 3))
    assert rb.storage.num_envs == (2 if given is None else 3)
    rb.set_storage(LazyTensorStorage(20))
    rb.extend(torch.arange(6).view(2, 3))
    assert len(rb) == 2


def test_another_writer_goes_on_after_the_newest_row() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(7))
    rb.set_writer(RoundRobinWriter())
    assert fill(rb, [7]).tolist() == [2]
    assert sorted(read_ids(rb[:])) == [3, 4, 5, 6, 7]


def test_a_dataset_is_closed_by_its_writer() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(3))
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(UsageError):
        fill(rb, [3])
    assert len(read_ids(rb.sample(4))) == 4


def test_a_ranking_writer_cannot_take_over_rows_without_ranks() -> None:
    data = TensorDict({"r": torch.tensor([5.0, 6.0, 7.0])}, [3])
    with pytest.raises(UsageError, match="cannot rank the 3 rows"):
        ReplayBuffer(storage=TensorStorage(data), writer=TensorDictMaxValueWriter("r"))
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(data)
    with pytest.raises(UsageError, match="cannot rank the 3 rows"):
        rb.set_writer(TensorDictMaxValueWriter("r"))
    assert type(rb.writer) is RoundRobinWriter


def test_an_emptied_dataset_takes_a_ranking_writer_and_survives_its_refusals() -> None:
    rb = ReplayBuffer(storage=TensorStorage(TensorDict({"r": torch.arange(4.0)}, [4])))
    rb.empty()
    rb.set_writer(TensorDictMaxValueWriter("r"))
    with pytest.raises(ValueError, match="NaN"):
        rb.extend(TensorDict({"r": torch.tensor([float("nan")])}, [1]))
    assert rb.extend(TensorDict({"r": torch.tensor([1.0])}, [1])).tolist() == [0]


@pytest.mark.parametrize("count", [4, 20, 25])
def test_a_used_sampler_forgets_the_buffer_it_came_from(count: int) -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    first = buffer("packed", 20, sampler=sampler, batch_size=3)
    fill(first, range(20))
    first.sample()
    del first
    second = buffer("packed", 25, batch_size=3)
    fill(second, range(count))
    second.set_sampler(sampler)
    assert [i for batch in itertools.islice(_samples(second), -(-count // 3)) for i in batch] == list(range(count))


def test_drop_last_is_checked_when_samplers_are_exchanged() -> None:
    rb = buffer("packed", 20)
    with pytest.raises(OptionError, match="drop_last"):
        rb.set_sampler(SamplerWithoutReplacement(drop_last=True))
    assert type(rb.sampler) is RandomSampler


def _samples(rb: ReplayBuffer) -> Iterator[list[int]]:
    while True:
        yield read_ids(rb.sample())


class _Loose(RandomSampler):
    """A user's sampler that cares neither for dtype nor for contiguity."""

    form = "strided"

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        slots = torch.arange(2 * batch_size) % view.rows
        return Draw(slots[::2] if self.form == "strided" else slots[:batch_size].to(torch.int32))


def test_slots_of_own_samplers_are_brought_into_form() -> None:
    sampler = _Loose()
    rb = buffer("packed", 20, sampler=sampler)
    fill(rb, range(20))
    assert read_ids(rb.sample(5)) == [0, 2, 4, 6, 8]
    sampler.form = "int32"
    assert read_ids(rb.sample(5)) == [0, 1, 2, 3, 4]


class _Backwards(Writer):
    """A user's writer: newest first, in any dtype and layout."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Picks:
        slots = torch.arange(2 * rows, dtype=torch.int32)[::2] // 2 + self.first
        order = torch.arange(rows - 1, -1, -1, dtype=torch.int32)
        return Picks(slots, order, order.to(torch.int64) + self.first)


def test_picks_of_own_writers_are_brought_into_form() -> None:
    for storage in ("packed", "columns", "list"):
        rb = buffer(storage, 20, writer=_Backwards())
        fill(rb, range(5))
        assert read_ids(rb[:]) == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("chosen", [[0, 1, 5], [-1, 0, 1], [0, 1], [0, 1, 2, 2]])
def test_a_writer_names_a_row_of_the_batch_for_each_slot(chosen: list[int]) -> None:
    class Names(_Backwards):
        def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Picks:
            picks = super().place(rows, ring, scores)
            return picks._replace(rows=torch.tensor(chosen))

    rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=Names())
    with pytest.raises(SlotError, match=r"must choose one of the 3 rows given, in \[0, 3\)"):
        rb.extend(torch.arange(3))
    assert len(rb) == 0


def test_a_writer_that_leaves_gaps_is_refused() -> None:
    rb = buffer("packed", 20, writer=_Backwards(first=3))
    with pytest.raises(SlotError, match="without leaving gaps"):
        fill(rb, range(5))
    assert len(rb) == 0
    rb.set_writer(RoundRobinWriter())
    assert fill(rb, range(2)).tolist() == [0, 1]


def test_the_schema_of_stats() -> None:
    """Later issues may add fields; none of these goes."""
    names = {field.name for field in dataclasses.fields(BufferStats)}
    assert names >= {
        "rows",
        "capacity",
        "nbytes",
        "rows_written",
        "rows_drawn",
        "row_age_mean",
        "row_age_max",
        "draws_per_insert",
        "stale_rows",
        "stale_updates",
        "redone_gathers",
        "prefetch_ready",
        "prefetch_waits",
        "rows_lost",
        "repairs",
    }
    assert (ReplayBuffer().stats().rows_lost, ReplayBuffer().stats().repairs) == (0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReplayBuffer().stats().rows = 5  # type: ignore[misc]


def test_counts_of_several_buffers_add_up() -> None:
    parts = [dataclasses.replace(fill_one().stats(), rows_lost=lost, repairs=1) for lost in (3, 4)]
    total = combine(parts, None)
    assert (total.rows, total.rows_lost, total.repairs) == (2, 7, 2)


def fill_one() -> ReplayBuffer:
    rb = buffer("packed", 5)
    fill(rb, range(1))
    return rb


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_counts_and_ages(storage: str) -> None:
    rb = buffer(storage, 5)
    stats = rb.stats()
    assert (stats.rows, stats.capacity, stats.rows_written, stats.row_age_max) == (0, 5, 0, 0)
    assert math.isnan(stats.row_age_mean)
    fill(rb, range(4))
    rb.sample(8)
    stats = rb.stats()
    assert (stats.rows, stats.rows_written, stats.rows_drawn, stats.draws_per_insert) == (4, 4, 8, 2.0)
    assert (stats.row_age_mean, stats.row_age_max) == (1.5, 3)
    fill(rb, range(12))
    stats = rb.stats()
    assert (stats.rows, stats.rows_written) == (5, 16)
    assert (stats.row_age_mean, stats.row_age_max) == (2.0, 4)
    rb[2] = rows(torch.tensor(5))
    assert rb.stats().row_age_max == 5
    assert rb.stats().rows_written == 16
    rb.empty()
    stats = rb.stats()
    assert (stats.rows, stats.rows_written, stats.row_age_max) == (0, 16, 0)


def test_a_buffer_is_true_when_it_holds_rows() -> None:
    rb = buffer("packed", 5)
    assert not rb
    fill(rb, range(1))
    assert rb


def test_reprs_name_parts_rows_and_bytes() -> None:
    rb = buffer("packed", 5, batch_size=3, transform=torch.nn.Identity(), prefetch=2)
    fill(rb, range(4))
    text = repr(rb)
    for part in (
        "rows=4",
        "capacity=5",
        "bytes=",
        "RandomSampler()",
        "RoundRobinWriter()",
        "Identity()",
        "batch_size=3",
        "prefetch=2",
        "'obs': float32[3]",
    ):
        assert part in text


def test_every_sampler_is_a_sampler_and_every_writer_a_writer() -> None:
    made: Any = RandomSampler(replacement=False)
    assert isinstance(made, SamplerWithoutReplacement)
    assert isinstance(made, RandomSampler)
    assert issubclass(RandomSampler, Sampler)
    assert issubclass(TensorDictRoundRobinWriter, RoundRobinWriter)
    assert issubclass(RoundRobinWriter, Writer)


def test_a_refused_exchange_of_the_storage_changes_nothing() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("r"))
    rb.extend(TensorDict({"r": torch.tensor([5.0, 6.0])}, [2]))
    storage = rb.storage
    with pytest.raises(UsageError, match="cannot rank"):
        rb.set_storage(TensorStorage(TensorDict({"r": torch.tensor([9.0, 8.0])}, [2])))
    assert rb.storage is storage
    assert rb.extend(TensorDict({"r": torch.tensor([1.0])}, [1])).tolist() == [2]
    assert rb[:]["r"].tolist() == [5.0, 6.0, 1.0]


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_a_ring_after_a_ranking_writer_fills_the_room_first(storage: str) -> None:
    rb = buffer(storage, 5, writer=TensorDictMaxValueWriter("r"))
    rb.extend(TensorDict({"r": torch.tensor([5.0, 6.0, 7.0])}, [3]))
    rb.set_writer(RoundRobinWriter())
    assert rb.extend(TensorDict({"r": torch.zeros(3)}, [3])).tolist() == [3, 4, 0]


def test_fields_of_rows_present_are_updated_together() -> None:
    rb = buffer("packed", 8)
    fill(rb, range(4))
    rb.update_({"obs": torch.full((4, 3), 7.0), "id": torch.arange(4) + 50})
    assert rb[:]["id"].tolist() == [50, 51, 52, 53]
    assert bool((rb[:]["obs"] == 7.0).all())
    with pytest.raises(ValueError):
        rb.update_({"id": torch.zeros(4, dtype=torch.int64), "obs": torch.zeros(4)})
    assert rb[:]["id"].tolist() == [50, 51, 52, 53], "all fields are checked before the first is written"


def test_with_a_generator_draws_do_not_touch_the_global_one() -> None:
    rb = buffer("packed", 10, batch_size=4, generator=torch.Generator().manual_seed(0))
    fill(rb, range(10))
    before = torch.get_rng_state()
    first = [read_ids(rb.sample()) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    again = buffer("packed", 10, batch_size=4, generator=torch.Generator().manual_seed(0))
    fill(again, range(10))
    torch.rand(3)
    assert [read_ids(again.sample()) for _ in range(3)] == first


def test_without_a_generator_manual_seed_governs() -> None:
    rb = buffer("packed", 10, batch_size=4)
    fill(rb, range(10))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = [read_ids(rb.sample()) for _ in range(3)]
        torch.manual_seed(3)
        assert [read_ids(rb.sample()) for _ in range(3)] == first
        torch.manual_seed(3)
        assert first == [torch.randint(0, 10, (4,)).tolist() for _ in range(3)]


def test_writing_and_reading_use_no_randomness() -> None:
    before = torch.get_rng_state()
    rb = buffer("packed", 10, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4)
    fill(rb, range(10))
    rb[:]
    rb.sample()
    rb.stats()
    assert torch.equal(torch.get_rng_state(), before)


def test_random_sampling_iterates_without_end() -> None:
    rb = buffer("packed", 10, batch_size=4)
    fill(rb, range(10))
    assert [len(read_ids(batch)) for batch in itertools.islice(rb, 50)] == [4] * 50


def test_rows_written_while_iterating_join_the_epoch() -> None:
    rb = buffer("packed", 20, sampler=SamplerWithoutReplacement(), batch_size=4)
    fill(rb, range(10))
    seen = []
    for number, batch in enumerate(rb):
        seen += read_ids(batch)
        if number == 0:
            fill(rb, range(10, 14))
    assert sorted(seen) == list(range(14))


def test_a_batch_larger_than_the_buffer_is_the_whole_buffer() -> None:
    rb = buffer("packed", 20, sampler=SamplerWithoutReplacement(), batch_size=50)
    fill(rb, range(10))
    assert [sorted(read_ids(batch)) for batch in rb] == [list(range(10))]


def test_iterating_a_storage_gives_its_rows() -> None:
    for storage in ("packed", "list"):
        rb = buffer(storage, 20)
        fill(rb, range(4))
        assert [read_ids(row) for row in rb.storage] == [[0], [1], [2], [3]]


def test_read_all_and_write_all_follow_the_order_of_slots() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(7))
    assert read_ids(rb.read_all_in_order()) == [5, 6, 2, 3, 4]
    assert read_ids(rb.read_all_in_order(end=2)) == [5, 6]
    rb.write_all(table(torch.arange(10, 15)))
    rb.write_all(table(torch.arange(20, 22)), end=2)
    assert read_ids(rb[:]) == [20, 21, 12, 13, 14]
    rb[:] = rb[:]
    assert read_ids(rb[:]) == [20, 21, 12, 13, 14]


def test_fields_are_written_in_place() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(4))
    assert rb.set_("obs", torch.full((4, 3), 7.0)) is rb
    assert rb.set_at_(("next", "done"), torch.tensor([True]), [2]) is rb
    rb["id"] = torch.tensor([9, 8, 7, 6])
    got = rb[:]
    assert bool((got["obs"] == 7.0).all())
    assert got["next"]["done"].tolist() == [True, False, True, True]
    assert got["id"].tolist() == [9, 8, 7, 6]
