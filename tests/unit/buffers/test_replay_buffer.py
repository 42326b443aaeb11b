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
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Writer,
)
from ostinato.buffers.stats import combine
from ostinato.core.records import Picks
from ostinato.errors import OptionError, SlotError, UsageError

from ...tags import buffer, fill, read_ids, rows, table

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.ring import Ring


def test_default_parts_exchange_and_classes() -> None:
    rb = ReplayBuffer()
    storage, sampler, writer = rb.storage, rb.sampler, rb.writer
    assert isinstance(storage, ListStorage)
    assert (storage.capacity, rb.batch_size, bool(rb)) == (1000, None, False)
    assert (type(sampler), type(writer)) == (RandomSampler, RoundRobinWriter)
    assert type(TensorDictReplayBuffer().writer) is TensorDictRoundRobinWriter
    assert rb.set_storage(LazyTensorStorage(5)) is storage
    assert rb.set_writer(RoundRobinWriter()) is writer
    with pytest.raises(OptionError, match="drop_last"):
        rb.set_sampler(SamplerWithoutReplacement(drop_last=True))
    assert rb.sampler is sampler
    made: Any = RandomSampler(replacement=False)
    assert isinstance(made, SamplerWithoutReplacement)
    assert isinstance(made, RandomSampler)
    assert rb.set_sampler(made) is sampler
    assert rb.sampler.epochal
    for name in ("storage", "sampler", "writer", "batch_size", "transform"):
        with pytest.raises(AttributeError):
            setattr(rb, name, None)
    parts = ReplayBuffer(storage=lambda: LazyTensorStorage(3), sampler=SamplerWithoutReplacement)
    assert (parts.storage.capacity, parts.sampler.epochal) == (3, True)


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


def test_writing_goes_on_after_the_rows_of_another_storage_and_with_another_writer() -> None:
    rb = buffer("packed", 5, sampler=SamplerWithoutReplacement(), batch_size=2)
    fill(rb, range(4))
    rb.sample()
    other = LazyTensorStorage(5)
    fill(buffer(other), range(10, 12))
    rb.set_storage(other)
    assert sorted(read_ids(rb.sample())) == read_ids(rb[:]) == [10, 11]
    assert fill(rb, [12]).tolist() == [2]
    fill(rb, range(13, 17))
    rb.set_writer(RoundRobinWriter())
    assert fill(rb, [17]).tolist() == [2]
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(UsageError):
        fill(rb, [3])
    assert sorted(read_ids(rb[:])) == [13, 14, 15, 16, 17]


@pytest.mark.parametrize("given", [None, 0])
def test_the_dimension_to_extend_follows_the_storage(given: int | None) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), dim_extend=given)
    rb.set_storage(LazyTensorStorage(20, ndim=2))
    rb.extend(torch.arange(6).view(2, 3))
    assert rb.storage.num_envs == (2 if given is None else 3)
    rb.set_storage(LazyTensorStorage(20))
    rb.extend(torch.arange(6).view(2, 3))
    assert len(rb) == 2


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
    storage = rb.storage
    with pytest.raises(UsageError, match="cannot rank"):
        rb.set_storage(TensorStorage(TensorDict({"r": torch.tensor([9.0, 8.0])}, [2])))
    assert rb.storage is storage
    assert rb.extend(TensorDict({"r": torch.tensor([2.0])}, [1])).tolist() == [1]
    assert rb[:]["r"].tolist() == [1.0, 2.0]


class _Backwards(Writer):
    """A user's writer: newest first, in any dtype and layout."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Picks:
        slots = torch.arange(2 * rows, dtype=torch.int32)[::2] // 2 + self.first
        order = torch.arange(rows - 1, -1, -1, dtype=torch.int32)
        return Picks(slots, order, order.to(torch.int64) + self.first)


@pytest.mark.parametrize("chosen", [[0, 1, 5], [-1, 0, 1], [0, 1]])
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


def test_stats_cannot_be_changed() -> None:
    stats = ReplayBuffer().stats()
    assert (stats.rows_lost, stats.repairs, stats.redone_gathers, stats.prefetch_waits) == (0, 0, 0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.rows = 5  # type: ignore[misc]


def test_counts_of_several_buffers_add_up() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(1))
    parts = [dataclasses.replace(rb.stats(), rows_lost=lost, repairs=1) for lost in (3, 4)]
    total = combine(parts, None)
    assert (total.rows, total.rows_lost, total.repairs) == (2, 7, 2)


def test_counts_and_ages() -> None:
    rb = buffer("packed", 5)
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


def test_with_a_generator_draws_do_not_touch_the_global_one() -> None:
    draws = []
    before = torch.get_rng_state()
    for _ in range(2):
        rb = buffer("packed", 10, batch_size=4, generator=torch.Generator().manual_seed(0))
        fill(rb, range(10))
        draws.append([read_ids(batch) for batch in itertools.islice(rb, 9)])
    assert torch.equal(torch.get_rng_state(), before)
    assert draws[0] == draws[1]


def test_without_a_generator_manual_seed_governs() -> None:
    rb = buffer("packed", 10, batch_size=4)
    fill(rb, range(10))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        rb[:]
        first = [read_ids(rb.sample()) for _ in range(3)]
        torch.manual_seed(3)
        assert first == [torch.randint(0, 10, (4,)).tolist() for _ in range(3)]


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
    rb.update_({"obs": torch.full((4, 3), 5.0), "id": torch.arange(4) + 50})
    with pytest.raises(ValueError):
        rb.update_({"id": torch.zeros(4, dtype=torch.int64), "obs": torch.zeros(4)})
    assert rb[:]["id"].tolist() == [50, 51, 52, 53], "all fields are checked before the first is written"
    assert bool((rb[:]["obs"] == 5.0).all())
