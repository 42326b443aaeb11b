"""Samplers and writers that keep a state of rows serve one buffer at a time, and begin anew in the next one."""

from __future__ import annotations

import copy
import gc
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    HeapSampler,
    LazyTensorStorage,
    LimitedSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackSampler,
    StalenessAwareSampler,
    StorageEnsemble,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from ostinato.buffers import part_owners
from ostinato.core.records import Draw
from ostinato.errors import KindError, OptionError
from ostinato.samplers import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.core.records import View

ROWS = 20

BOUND: dict[str, Callable[[], Sampler]] = {
    "prioritized": lambda: PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0),
    "prioritized slices": lambda: PrioritizedSliceSampler(ROWS, 1.0, 1.0, eps=0.0, slice_len=2),
    "without replacement": SamplerWithoutReplacement,
    "endless": lambda: SamplerWithoutReplacement(endless=True),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "streaming slices": lambda: StreamingSliceSampler(slice_len=2),
    "consuming": lambda: ConsumingSampler(1),
    "limited": lambda: LimitedSampler(1),
    "queue": QueueSampler,
    "stack": StackSampler,
    "heap": lambda: HeapSampler(ROWS),
    "prompt groups": lambda: PromptGroupSampler(samples_per_group=2, group_key="done", strategy="recency"),
    "staleness": lambda: StalenessAwareSampler(version_key="x"),
}
FREE: dict[str, Callable[[], Sampler]] = {"random": RandomSampler, "slices": lambda: SliceSampler(slice_len=2)}
pytestmark = pytest.mark.filterwarnings("ignore:a batch has 1 groups")
bound = pytest.mark.parametrize("make", BOUND.values(), ids=BOUND)


class NewestRows(Sampler):
    """A sampler of a user, with `==` and a state of rows."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.count = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NewestRows)

    def record(self, placement: Any) -> None:
        self.count += placement.total

    def clear(self) -> None:
        self.count = 0

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.full((batch_size,), self.count - 1))


def rows(count: int = 6, first: int = 0) -> TensorDict:
    x = torch.arange(first, first + count)
    return TensorDict({"x": x, "done": (x % 6 == 5)[:, None]}, [count])


def buffer(sampler: Any = None, count: int = 6, storage: Any = None, **given: Any) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(ROWS) if storage is None else storage
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=2, **given)
    if count:
        rb.extend(rows(count))
    return rb


def draws(rb: ReplayBuffer, count: int = 3) -> list[Any]:
    torch.manual_seed(0)
    return [{k: v.tolist() for k, v in rb.sample().flatten_keys(".").items()} for _ in range(count)]


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match=r"serves another replay buffer.*make a (sampler|writer) for each"):
        call()


def use(rb: ReplayBuffer) -> None:
    """Leave a state that differs from that of a new sampler."""
    if rb.sampler.prioritized:
        rb.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 90.0, 0.0, 0.0, 0.0]) + 1e-3)
    if len(rb) > 3 and type(rb.sampler) is not StreamingSliceSampler:
        rb.sample()


# -- while the first buffer is in use ----------------------------------------------------------------------------------


@bound
@pytest.mark.parametrize("count", [0, 6])
def test_a_sampler_of_another_buffer_raises(make: Callable[[], Sampler], count: int) -> None:
    first, same = buffer(make(), count), buffer(make(), count)
    refused(lambda: buffer(first.sampler, 0))
    other = buffer()
    refused(lambda: other.set_sampler(first.sampler))
    assert type(other.sampler) is RandomSampler
    if not first.sampler.counting:
        refused(lambda: other.view(sampler=first.sampler))
        refused(lambda: first.view(sampler=first.sampler))
    if count:
        assert draws(first) == draws(same)


@pytest.mark.parametrize("make", FREE.values(), ids=FREE)
def test_samplers_without_a_state_of_rows_are_shared(make: Callable[[], Sampler]) -> None:
    sampler = make()
    first, second = buffer(sampler), buffer(sampler, 18)
    view = second.view(sampler=sampler)
    first.set_sampler(sampler)
    for rb, count in ((first, 6), (second, 18), (view, 18)):
        drawn = torch.cat([rb.sample(100)["x"] for _ in range(3)])
        assert sorted(set(drawn.tolist())) == list(range(count))


def test_own_samplers_are_compared_by_identity() -> None:
    sampler, equal = NewestRows(), NewestRows()
    rb, other = buffer(sampler), buffer(equal, 3)
    refused(lambda: buffer(sampler))
    assert (rb.sample()["x"][0], other.sample()["x"][0]) == (5, 2)


def test_the_sampler_of_a_view_raises_elsewhere() -> None:
    rb, sampler = buffer(), PrioritizedSampler(ROWS, 1.0, 1.0)
    view = rb.view(sampler=sampler)
    refused(lambda: buffer(sampler))
    refused(lambda: rb.set_sampler(sampler))
    refused(lambda: rb.view(sampler=sampler))
    view.set_sampler(sampler)
    del view
    assert rb.set_sampler(sampler) is not sampler


@pytest.mark.parametrize(
    "make", [ReservoirWriter, TensorDictMaxValueWriter, lambda: RoundRobinWriter(track_generations=True)]
)
def test_a_writer_of_another_buffer_raises(make: Callable[[], Any]) -> None:
    writer = make() if make is not TensorDictMaxValueWriter else TensorDictMaxValueWriter(rank_key="x")
    rb, other = buffer(writer=writer), buffer(count=0)
    refused(lambda: buffer(writer=writer))
    refused(lambda: other.set_writer(writer))
    other.extend(rows())
    assert len(rb) == len(other) == 6


def test_writers_without_a_state_are_shared() -> None:
    writer = RoundRobinWriter()
    first, second = buffer(writer=writer), buffer(writer=writer, count=3)
    assert (len(first), len(second)) == (6, 3)


def test_members_of_an_ensemble_have_samplers_of_their_own() -> None:
    sampler = PrioritizedSampler(ROWS, 1.0, 1.0)
    storages = StorageEnsemble(LazyTensorStorage(ROWS), LazyTensorStorage(ROWS))
    writers = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())
    refused(
        lambda: ReplayBufferEnsemble(
            storages=storages, samplers=SamplerEnsemble(sampler, sampler), writers=writers, batch_size=4
        )
    )
    members = buffer(sampler), buffer(PrioritizedSampler(ROWS, 1.0, 1.0))
    for _ in range(2):
        ensemble = ReplayBufferEnsemble(*members, batch_size=4)
        assert ensemble.sample()["x"].shape == (2, 2)


def test_a_callable_makes_a_sampler_for_each() -> None:
    make = partial(PrioritizedSampler, ROWS, 1.0, 1.0)
    assert buffer(make).sampler is not buffer(make).sampler


def test_a_delayed_buffer_raises_at_its_first_use() -> None:
    first = buffer(SamplerWithoutReplacement())
    rb = buffer(first.sampler, 0, delayed_init=True)
    refused(lambda: rb.extend(rows()))
    del first
    rb.extend(rows())
    assert len(rb) == 6


# -- when the first buffer is gone -------------------------------------------------------------------------------------


@bound
@pytest.mark.parametrize("before", [0, 6])
def test_a_sampler_begins_anew_when_its_buffer_is_gone(make: Callable[[], Sampler], before: int) -> None:
    """It draws what a new one draws, in a buffer that is empty or over a storage with rows."""
    sampler = make()
    rb = buffer(sampler, 12)
    use(rb)
    del rb

    def filled() -> LazyTensorStorage:
        storage = LazyTensorStorage(ROWS)
        if before:
            storage.set(range(before), rows(before))
        return storage

    again, new = buffer(sampler, 6, filled()), buffer(make(), 6, filled())
    assert again.sampler is sampler
    assert len(again) == len(new) == before + 6
    assert draws(again) == draws(new)


def test_no_priority_of_an_earlier_buffer_is_left() -> None:
    sampler = PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0)
    rb = buffer(sampler)
    rb.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 70.0]))
    old = rb.set_sampler(RandomSampler())
    assert old is sampler
    again = buffer(sampler)
    assert sampler.default_priority == 1.0
    assert sorted(set(again.sample(500)["x"].tolist())) == list(range(6))
    assert (again.sample(50)["priority_weight"] == 1).all()
    refused(lambda: rb.set_sampler(sampler))


def test_garbage_in_a_cycle_is_not_in_use() -> None:
    sampler = SamplerWithoutReplacement()
    gc.disable()
    try:
        rb: Any = buffer(sampler)
        rb.cycle = rb
        del rb
        assert len(buffer(sampler, 3)) == 3
    finally:
        gc.enable()


@pytest.mark.parametrize("loaded", [True, False])
def test_a_state_that_was_loaded_before_the_first_buffer_stays(loaded: bool, tmp_path: Any) -> None:
    rb = buffer(PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0))
    rb.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 70.0]))
    rb.sampler.dumps(tmp_path / "sampler")
    sampler = PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0)
    if loaded:
        sampler.loads(tmp_path / "sampler")
    again = TensorDictReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=200)
    assert set(again.sample()["x"].tolist()) == ({5} if loaded else set(range(6)))


def test_a_writer_begins_anew_when_its_buffer_is_gone() -> None:
    writer = TensorDictMaxValueWriter(rank_key="x")
    rb = buffer(writer=writer, count=12)
    del rb
    again = buffer(writer=writer, storage=LazyTensorStorage(4), count=0)
    again.extend(rows(6))
    assert sorted(again[:]["x"].tolist()) == [2, 3, 4, 5]
    again.set_writer(RoundRobinWriter())
    again.empty()
    again.set_writer(writer)
    again.extend(rows(5))
    assert sorted(again[:]["x"].tolist()) == [1, 2, 3, 4]


def test_a_buffer_that_could_not_be_made_has_no_sampler() -> None:
    sampler = SamplerWithoutReplacement(drop_last=True)
    with pytest.raises(ValueError, match="batch") as failed:
        ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler)
    assert buffer(sampler).sampler is sampler
    assert failed.value is not None  # its traceback refers to the buffer


# -- copies, shared buffers and checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies_have_samplers_of_their_own(copied: Callable[[Any], Any]) -> None:
    rb = buffer(PrioritizedSampler(ROWS, 1.0, 1.0))
    view = rb.view(sampler=SamplerWithoutReplacement())
    other, other_view = copied([rb, view])
    for one, sampler in ((other, rb.sampler), (other_view, view.sampler)):
        assert one.sampler is not sampler
        refused(partial(buffer, one.sampler))
        refused(partial(buffer, sampler))
    old = other.sampler
    del other, other_view, one
    buffer(old).sample()


@pytest.mark.parametrize("loaded", [True, False])
def test_a_sampler_with_a_state_keeps_it_in_an_empty_buffer(loaded: bool, tmp_path: Any) -> None:
    """A copy, or one that was loaded before: new rows get its largest priority. So it is if the buffer was not made."""
    rb = buffer(PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0))
    rb.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 70.0]))
    rb.sampler.dumps(tmp_path / "sampler")
    sampler: Any = PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0) if loaded else copy.deepcopy(rb.sampler)
    if loaded:
        sampler.loads(tmp_path / "sampler")
    with pytest.raises(KindError, match="generator"):
        ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=2, generator="seed")  # type: ignore[arg-type]
    assert sampler.default_priority == 70.0
    again = buffer(sampler, 8)
    assert sampler.default_priority == 70.0
    assert set(again.sample(500)["x"].tolist()) == set(range(8))


@pytest.mark.usefixtures("needs_native")
def test_a_buffer_that_is_shared_keeps_its_sampler() -> None:
    sampler = PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0)
    rb = buffer(sampler).share()
    refused(lambda: buffer(sampler))
    rb.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 70.0]))
    copied = pickle.dumps(sampler)
    del rb
    again = buffer(sampler)
    sampler.alpha = 0.5  # which raises while priorities are shared
    assert set(again.sample(500)["x"].tolist()) == set(range(6))
    assert type(pickle.loads(copied)) is PrioritizedSampler


def test_a_load_keeps_the_owner(tmp_path: Any) -> None:
    rb = buffer(PrioritizedSampler(ROWS, 1.0, 1.0))
    rb.dumps(tmp_path / "a")
    other = buffer(PrioritizedSampler(ROWS, 1.0, 1.0), 0)
    other.loads(tmp_path / "a")
    refused(lambda: buffer(other.sampler))
    assert len(other) == 6


def test_nothing_is_left_of_parts_that_are_gone() -> None:
    gc.collect()
    before = len(part_owners._owners)
    rb = buffer(PrioritizedSampler(ROWS, 1.0, 1.0))
    assert len(part_owners._owners) == before + 1
    del rb
    gc.collect()
    assert len(part_owners._owners) <= before
