"""Saving and loading: everything that was there is there again, sampling goes on, what does not fit is refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from ostinato.errors import CheckpointError, OptionError

from ...tags import STORAGES, TENSORS, buffer, fill, read_ids, rows, same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato import Sampler, Storage, Writer

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "drop last": lambda: SamplerWithoutReplacement(drop_last=True),
}
WRITERS: dict[str, Callable[[], Writer]] = {
    "ring": RoundRobinWriter,
    "tensordict ring": TensorDictRoundRobinWriter,
    "max value": lambda: TensorDictMaxValueWriter("id"),
}


def whole(storage: str, sampler: str = "random", writer: str = "ring", prefetch: int = 0) -> ReplayBuffer:
    return buffer(
        storage,
        7,
        sampler=SAMPLERS[sampler](),
        writer=WRITERS[writer](),
        batch_size=3,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("writer", list(WRITERS))
@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("storage", ["packed", "mapped", "list"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_combination_of_parts_continues_bit_for_bit(
    storage: str, sampler: str, writer: str, prefetch: int, tmp_path: Path
) -> None:
    """Save, load, then write and sample on: the copy does what the original does."""
    rb = whole(storage, sampler, writer, prefetch)
    for first in (0, 5):
        rb.extend(rows(range(first, first + 5), "tensordict"))
    for _ in range(2):
        rb.sample()
    rb.dumps(tmp_path / "save")
    other = whole(storage, sampler, writer, prefetch)
    other.loads(tmp_path / "save")
    same_state(snapshot(other), snapshot(rb))
    for step in range(6):
        (one, first_info), (two, second_info) = (x.sample(return_info=True) for x in (rb, other))
        assert first_info["index"].tolist() == second_info["index"].tolist()
        # with prefetch, whether a batch was made before or after a write is a matter of time; its slots are not
        assert prefetch or read_ids(one) == read_ids(two)
        new = rows([100 + step, 200 - step], "tensordict")
        assert rb.extend(new).tolist() == other.extend(new).tolist()
    same_state(snapshot(other), snapshot(rb))


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("count", [1, 6, 7, 8, 14, 15])
def test_a_save_holds_every_row_whatever_the_cursor(storage: str, count: int, tmp_path: Path) -> None:
    """At one row less than the capacity, exactly full (the cursor is 0 again), and one more."""
    rb = whole(storage)
    fill(rb, range(count))
    rb.dumps(tmp_path / "save")
    other = whole(storage)
    other.loads(tmp_path / "save")
    assert len(other) == min(count, 7)
    assert read_ids(other[:]) == read_ids(rb[:])
    assert fill(other, [99]).tolist() == [count % 7]


@pytest.mark.parametrize("storage", list(STORAGES))
def test_five_restarts_duplicate_nothing(storage: str, tmp_path: Path) -> None:
    """Each run loads, writes two rows and saves over the same path: the rows are those of one long run."""
    expected: list[int] = []
    for run in range(5):
        rb = whole(storage)
        if run:
            rb.loads(tmp_path / "save")
        fill(rb, [2 * run, 2 * run + 1])
        expected = [*expected, 2 * run, 2 * run + 1][-7:]
        assert sorted(read_ids(rb[:])) == expected
        rb.dumps(tmp_path / "save")


@pytest.mark.parametrize("storage", list(STORAGES))
def test_a_second_save_does_not_need_the_first(storage: str, tmp_path: Path) -> None:
    """Save A, load A, delete A, save B, load B."""
    rb = whole(storage)
    fill(rb, range(5))
    rb.dumps(tmp_path / "a")
    second = whole(storage)
    second.loads(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert read_ids(second[:]) == list(range(5))
    fill(second, [5])
    second.dumps(tmp_path / "b")
    third = whole(storage)
    third.loads(tmp_path / "b")
    assert read_ids(third[:]) == list(range(6))


def test_saving_twice_over_one_path_keeps_the_second(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(3))
    rb.dumps(tmp_path / "save")
    before = sum(1 for _ in (tmp_path / "save").iterdir())
    fill(rb, range(3, 6))
    rb.dumps(str(tmp_path / "save"))
    assert sum(1 for _ in (tmp_path / "save").iterdir()) == before, "files of the first save stay behind"
    other = whole("packed")
    other.loads(str(tmp_path / "save"))
    assert read_ids(other[:]) == list(range(6))


@pytest.mark.parametrize("storage", list(STORAGES))
def test_a_buffer_without_rows_is_saved_and_loaded(storage: str, tmp_path: Path) -> None:
    rb = whole(storage)
    rb.dumps(tmp_path / "save")
    other = whole(storage)
    fill(other, range(3))
    other.loads(tmp_path / "save")
    assert len(other) == 0
    assert fill(other, [7, 8]).tolist() == [0, 1]
    emptied = whole(storage)
    fill(emptied, range(5))
    emptied.empty()
    emptied.dumps(tmp_path / "emptied")
    other.loads(tmp_path / "emptied")
    assert len(other) == 0


@pytest.mark.parametrize("kind", ["dict", "tuple", "tensordict", "tensor"])
@pytest.mark.parametrize("storage", list(TENSORS))
def test_storages_without_memory_yet_take_the_form_of_the_save(kind: str, storage: str, tmp_path: Path) -> None:
    rb = whole(storage)
    fill(rb, range(5), kind)
    rb.dumps(tmp_path / "save")
    other = whole(storage)
    other.loads(tmp_path / "save")
    assert type(other[:]) is type(rb[:])
    assert read_ids(other[:]) == list(range(5))
    assert fill(other, [5], kind).tolist() == [5]


@pytest.mark.parametrize("source", list(TENSORS))
@pytest.mark.parametrize("target", list(TENSORS))
def test_tensor_storages_read_each_others_saves(source: str, target: str, tmp_path: Path) -> None:
    rb = whole(source)
    fill(rb, range(9))
    rb.dumps(tmp_path / "save")
    other = whole(target)
    other.loads(tmp_path / "save")
    assert read_ids(other[:]) == read_ids(rb[:])


def test_a_dataset_in_tensors_is_saved_and_loaded(tmp_path: Path) -> None:
    def make(ids: range) -> ReplayBuffer:
        return ReplayBuffer(
            storage=TensorStorage(rows(ids)), writer=ImmutableDatasetWriter(), sampler=SamplerWithoutReplacement()
        )

    rb = make(range(5))
    rb.dumps(tmp_path / "save")
    other = make(range(50, 55))
    other.loads(tmp_path / "save")
    assert read_ids(other[:]) == list(range(5))


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("count", [3, 7, 9])
def test_a_larger_buffer_takes_a_save_and_fills_its_room_first(storage: str, count: int, tmp_path: Path) -> None:
    rb = whole(storage)
    fill(rb, range(count))
    rb.dumps(tmp_path / "save")
    other = buffer(storage, 10, generator=torch.Generator())
    other.loads(tmp_path / "save")
    present = min(count, 7)
    assert read_ids(other[:]) == list(range(count - present, count))  # by age: the ring has its seam elsewhere now
    assert fill(other, [50, 51]).tolist() == [present, present + 1]
    assert len(other) == present + 2
    assert other.stats().row_age_max == count + 2 - max(0, count - 7) - 1
    assert set(read_ids(other.sample(50))) <= {*read_ids(rb[:]), 50, 51}


class Counter(torch.nn.Module):
    """A transform with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Any:
        assert isinstance(self.seen, torch.Tensor)
        self.seen += 1
        return batch


def test_transforms_keep_their_state(tmp_path: Path) -> None:
    counter = Counter()
    rb = buffer("packed", 5, transform=counter, batch_size=2)
    fill(rb, range(5))
    for _ in range(3):
        rb.sample()
    rb.dumps(tmp_path / "save")
    restored = Counter()
    other = buffer("packed", 5, transform=restored, batch_size=2)
    other.loads(tmp_path / "save")
    assert int(restored.seen) == 3  # type: ignore[arg-type]
    with pytest.raises((CheckpointError, OptionError), match="transforms"):
        buffer("packed", 5, batch_size=2).loads(tmp_path / "save")


def test_the_generator_is_restored_and_the_global_one_left_alone(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(7))
    rb.sample()
    rb.dumps(tmp_path / "save")
    expected = [read_ids(rb.sample()) for _ in range(4)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        for generator in (torch.Generator().manual_seed(9), None):
            other = buffer("packed", 7, batch_size=3, generator=generator)
            other.loads(tmp_path / "save")
            assert [read_ids(other.sample()) for _ in range(4)] == expected
        assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_one_goes_on(tmp_path: Path) -> None:
    rb = buffer("packed", 7, batch_size=3)
    fill(rb, range(7))
    rb.dumps(tmp_path / "save")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        other = buffer("packed", 7, batch_size=3)
        other.loads(tmp_path / "save")
        assert (
            read_ids(other.sample()) == torch.randint(0, 7, (3,), generator=torch.Generator().manual_seed(5)).tolist()
        )


def test_counters_are_restored(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(9))
    rb.sample()
    rb.dumps(tmp_path / "save")
    other = whole("packed")
    other.loads(tmp_path / "save")
    assert other.stats() == rb.stats()
    assert (other.stats().rows_written, other.stats().rows_drawn) == (9, 3)


def test_ages_survive_edits_and_saves(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5))
    rb[torch.tensor([0])] = rows([50])
    rb.dumps(tmp_path / "save")
    other = whole("packed")
    other.loads(tmp_path / "save")
    assert other.stats().row_age_max == rb.stats().row_age_max == 4
    assert other.stats().row_age_mean == rb.stats().row_age_mean


def test_mapped_files_cannot_be_mistaken_for_a_checkpoint(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(7, scratch_dir=tmp_path / "scratch")
    rb = buffer(storage)
    fill(rb, range(5))
    with pytest.raises(CheckpointError):
        rb.dumps(tmp_path / "scratch")
    storage.flush()
    with pytest.raises(CheckpointError):
        rb.dumps(tmp_path / "scratch")
    with pytest.raises(CheckpointError):
        whole("mapped").loads(tmp_path / "scratch")
    assert read_ids(rb[:]) == list(range(5))


def test_tensordict_buffers_are_saved(tmp_path: Path) -> None:
    def make() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(storage=LazyTensorStorage(7), batch_size=4, generator=torch.Generator())

    rb = make()
    fill(rb, range(9), "tensordict")
    rb.dumps(tmp_path / "save")
    other = make()
    other.loads(tmp_path / "save")
    batch, expected = other.sample(), rb.sample()
    assert batch["index"].tolist() == expected["index"].tolist()
    assert read_ids(batch) == read_ids(expected)


def _make_storages(capacity: int) -> list[Storage]:
    return [LazyTensorStorage(capacity, ndim=2), LazyMemmapStorage(capacity, ndim=2)]


def test_lanes_are_saved(tmp_path: Path) -> None:
    for number, (storage, target) in enumerate(zip(_make_storages(12), reversed(_make_storages(12)), strict=True)):
        rb = buffer(storage)
        rb.extend(torch.arange(30).view(3, 10))
        rb.dumps(tmp_path / str(number))
        other = buffer(target)
        other.loads(tmp_path / str(number))
        assert torch.equal(other[:], rb[:])
        more = torch.arange(100, 103).view(3, 1)
        assert torch.equal(other.extend(more), rb.extend(more))
        assert torch.equal(other[:], rb[:])


def test_late_fields_are_saved_with_the_rows_that_have_them(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5))
    rb.write_all({**rows(range(3)), "late": torch.tensor([10, 11, 12])}, end=3)
    rb.dumps(tmp_path / "save")
    other = whole("mapped")
    other.loads(tmp_path / "save")
    assert other[:3]["late"].tolist() == [10, 11, 12]
    assert "late" not in other[3:]
    with pytest.raises(KeyError, match="late"):
        other[:]


def test_an_empty_save_leaves_lanes_and_device_open() -> None:
    """Rows that come after it lay the memory out: capacity, stamps and ages follow them."""
    rb = buffer(LazyTensorStorage(10, ndim=2, device="auto"))
    rb.load_state_dict(buffer(LazyTensorStorage(10, ndim=2)).state_dict())
    rb.extend(torch.arange(12).view(4, 3))
    rb.extend(torch.arange(4).view(4, 1))
    assert rb.storage.capacity == 12
    assert (rb.stats().row_age_max, rb.stats().row_age_mean) == (11, 5.5)
    rb[:] = rb[:].clone()
    assert rb[:].shape == (4, 3)
