"""Options out of range, or that exclude each other, are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from ostinato.errors import (
    CapacityError,
    EmptyBufferError,
    KindError,
    OptionError,
    StorageMemoryError,
    UsageError,
)

from ...tags import buffer, fill, read_ids
from .test_bad_input import five


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "3", True, None])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_capacities_are_positive_integers(storage: type[LazyTensorStorage], wrong: Any) -> None:
    with pytest.raises(CapacityError, match=r"integer of at least 1 .*got"):
        storage(wrong)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "3", True])
def test_list_capacities_are_positive_integers(wrong: Any) -> None:
    with pytest.raises(CapacityError, match="integer of at least 1"):
        ListStorage(wrong)


def test_a_capacity_may_be_an_integer_of_numpy() -> None:
    assert LazyTensorStorage(np.int64(5)).capacity == 5  # type: ignore[arg-type]


def test_a_tensor_storage_has_the_capacity_of_its_data() -> None:
    with pytest.raises(CapacityError, match=r"max-size and the storage shape mismatch: got max_size=10 for 4 rows"):
        TensorStorage(torch.zeros(4), max_size=10)


@pytest.mark.parametrize("wrong", [0, 3, -1, True, "2"])
def test_ndim_is_one_or_two(wrong: Any) -> None:
    with pytest.raises(OptionError, match="ndim must be 1"):
        LazyTensorStorage(5, ndim=wrong)


def test_memory_that_is_not_there_is_refused_with_the_numbers() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10**15))
    with pytest.raises(StorageMemoryError, match=r"needs 4000000000000000 bytes \(4000.0 TB\).*are free"):
        rb.extend(torch.zeros(2))
    assert len(rb) == 0


def test_disk_that_is_not_there_is_refused_with_the_numbers() -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(10**15))
    with pytest.raises(StorageMemoryError, match=r"needs 4000000000000000 bytes.*on the disk"):
        rb.extend(torch.zeros(2))
    assert len(rb) == 0


@pytest.mark.parametrize("name", ["storage", "sampler", "writer"])
def test_parts_must_be_of_their_base_class(name: str) -> None:
    with pytest.raises(KindError, match=f"{name} must be an instance of ostinato"):
        ReplayBuffer(**{name: 5})  # type: ignore[arg-type]
    with pytest.raises(KindError, match=f"{name} must be an instance of ostinato"):
        getattr(ReplayBuffer(), f"set_{name}")(5)


def test_transforms_must_be_callable() -> None:
    with pytest.raises(KindError, match="callable"):
        ReplayBuffer(transform=5)
    with pytest.raises(KindError, match="callable"):
        ReplayBuffer().append_transform(5)
    with pytest.raises(OptionError, match=r"\[0, 0\]"):
        ReplayBuffer().insert_transform(1, lambda x: x)


def test_a_generator_must_be_one() -> None:
    with pytest.raises(KindError, match=r"torch.Generator"):
        ReplayBuffer(generator=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "2", True])
def test_batch_sizes_are_positive_integers(wrong: Any) -> None:
    with pytest.raises((OptionError, KindError), match="batch_size"):
        ReplayBuffer(batch_size=wrong)
    rb = five()
    with pytest.raises((OptionError, KindError), match="batch_size"):
        rb.sample(wrong)


def test_batch_sizes_may_be_integers_of_numpy_and_torch() -> None:
    rb = five()
    assert len(read_ids(rb.sample(np.int64(3)))) == 3  # type: ignore[call-overload]
    assert len(read_ids(rb.sample(torch.tensor(3)))) == 3  # type: ignore[call-overload]


def test_a_missing_batch_size_is_named() -> None:
    rb = five()
    with pytest.raises(UsageError, match="batch_size not specified"):
        rb.sample()
    with pytest.raises(UsageError, match=r"Cannot iterate over the replay buffer.*atch_size was not specified"):
        iter(rb).__next__()


def test_an_empty_buffer_cannot_be_sampled() -> None:
    rb = buffer("packed", 5, batch_size=2)
    with pytest.raises(EmptyBufferError, match="Cannot sample from an empty storage"):
        rb.sample()
    with pytest.raises(EmptyBufferError):
        next(iter(rb))
    fill(rb, range(3))
    rb.empty()
    with pytest.raises(EmptyBufferError):
        rb.sample()
    fill(rb, [7])
    assert set(read_ids(rb.sample())) == {7}


def test_drop_last_needs_a_batch_size_and_enough_rows() -> None:
    with pytest.raises(OptionError, match="drop_last=True must work with a predictable batch-size"):
        buffer("packed", 5, sampler=SamplerWithoutReplacement(drop_last=True))
    rb = buffer("packed", 5, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4)
    fill(rb, range(3))
    with pytest.raises(OptionError, match=r"The batch size \(4\) is greater than the storage capacity \(3\)"):
        rb.sample()


def test_replacement_cannot_be_both() -> None:
    with pytest.raises(OptionError, match="replacement=True"):
        SamplerWithoutReplacement(replacement=True)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="bacth_size"):
        ReplayBuffer(bacth_size=3)  # type: ignore[call-arg]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to copy to")
def test_pinned_memory_without_an_accelerator_is_refused() -> None:
    with pytest.raises(OptionError, match="pin_memory=True needs"):
        buffer("packed", 5, pin_memory=True)


@pytest.mark.parametrize("wrong", [2, -1, True, "0"])
def test_dim_extend_is_zero_or_one(wrong: Any) -> None:
    with pytest.raises(OptionError, match="dim_extend must be a positive value or 0: 0 or 1"):
        buffer("packed", 5, dim_extend=wrong)
