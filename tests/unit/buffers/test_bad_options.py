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
    KindError,
    OptionError,
    StorageMemoryError,
    UsageError,
)

from ...tags import buffer, fill, read_ids
from .refusals import raises
from .test_bad_input import five


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_capacities_are_positive_integers(storage: Any) -> None:
    wrong: list[Any] = [0, -1, 2.5, "3", True, *([] if storage is ListStorage else [None])]
    for capacity in wrong:
        with pytest.raises(CapacityError, match=r"integer of at least 1 .*got"):
            storage(capacity)
    assert storage(np.int64(5)).capacity == 5


def test_memory_and_disk_that_are_not_there_are_refused_with_the_numbers() -> None:
    for storage, words in ((LazyTensorStorage, r"\(4000.0 TB\).*are free"), (LazyMemmapStorage, "on the disk")):
        rb = ReplayBuffer(storage=storage(10**15))
        with pytest.raises(StorageMemoryError, match=f"needs 4000000000000000 bytes.*{words}"):
            rb.extend(torch.zeros(2))
        assert len(rb) == 0


def test_batch_sizes_are_positive_integers() -> None:
    rb = five()
    for size in (0, -1, True, 2**63):
        for call in (rb.sample, lambda size: ReplayBuffer(batch_size=size)):
            with pytest.raises((OptionError, KindError), match="batch_size"):
                call(size)
    assert len(read_ids(rb.sample(np.int64(3)))) == len(read_ids(rb.sample(torch.tensor(3)))) == 3  # type: ignore[arg-type]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to copy to")
def test_pinned_memory_without_an_accelerator_is_refused() -> None:
    with pytest.raises(OptionError, match="pin_memory=True needs"):
        buffer("packed", 5, pin_memory=True)


def test_other_options_are_refused_by_name() -> None:
    rb = five()
    short = buffer("packed", 5, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4)
    fill(short, range(3))
    parts = ("storage", "sampler", "writer")
    base = "must be an instance of ostinato"
    raises(
        *((lambda name=name: ReplayBuffer(**{name: 5}), KindError, f"{name} {base}") for name in parts),  # type: ignore[arg-type]
        *((lambda name=name: getattr(rb, f"set_{name}")(5), KindError, f"{name} {base}") for name in parts),
        (lambda: ReplayBuffer(transform=5), KindError, "callable"),
        (lambda: rb.append_transform(5), KindError, "callable"),
        (lambda: rb.insert_transform(1, lambda x: x), OptionError, r"\[0, 0\]"),
        (lambda: ReplayBuffer(generator=5), KindError, "torch.Generator"),  # type: ignore[arg-type]
        (lambda: ReplayBuffer(bacth_size=3), TypeError, "bacth_size"),  # type: ignore[call-arg]
        (lambda: SamplerWithoutReplacement(replacement=True), OptionError, "replacement=True"),
        *((lambda ndim=ndim: LazyTensorStorage(5, ndim=ndim), OptionError, "ndim must be 1") for ndim in (0, 3, True)),
        *((lambda dim=dim: ReplayBuffer(dim_extend=dim), OptionError, "0 or 1") for dim in (2, -1, True)),
        (lambda: TensorStorage(torch.zeros(4), max_size=10), CapacityError, "max_size=10 for 4 rows"),
        (rb.sample, UsageError, "batch_size not specified"),
        (lambda: next(iter(rb)), UsageError, r"Cannot iterate.*atch_size was not specified"),
        (
            lambda: ReplayBuffer(sampler=SamplerWithoutReplacement(drop_last=True)),
            OptionError,
            "predictable batch-size",
        ),
        (short.sample, OptionError, r"batch size \(4\) is greater than the storage capacity \(3\)"),
    )
