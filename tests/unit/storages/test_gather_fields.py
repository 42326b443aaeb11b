"""Reading other rows for each field: equal to plain indexing, for every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import LazyTensorStorage, ListStorage
from ostinato.core.records import Request, Run
from ostinato.errors import OptionError, UsageError
from ostinato.testing.views import bits

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
ROWS = 13


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    return (
        torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype).squeeze(-1)
    )


def fields(dtype: torch.dtype) -> dict[str, Tensor]:
    """Pairs of fields of one form: small, a scalar, wide, of size zero."""
    shapes = {"small": (3,), "scalar": (), "wide": (70, 5), "none": (0,)}
    return {
        f"{name}{k}": noise((ROWS, *shape), dtype, 10 * k + i)
        for i, (name, shape) in enumerate(shapes.items())
        for k in range(2)
    }


def stored(data: Any, *, packed: bool) -> LazyTensorStorage:
    storage = LazyTensorStorage(ROWS, packed=packed)
    payload, _ = storage.admit(data, 1)
    storage.write(Run(0, ROWS, ROWS), payload)
    return storage


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("packed", [True, False])
def test_requests_equal_plain_indexing(packed: bool) -> None:
    slots, pick = [12, 0, 5, 5], [True, False, True, False]
    for dtype in DTYPES:
        columns, storage = list(fields(dtype).values()), stored(fields(dtype), packed=packed)
        for one in range(0, len(columns), 2):
            alone = Request(one, torch.tensor(slots, dtype=torch.int32))
            picked = Request(one + 1, torch.tensor(slots), one, torch.tensor(pick))
            found = storage.fetch([alone, picked])
            either = [columns[one if second else one + 1][slot] for slot, second in zip(slots, pick, strict=True)]
            assert bits(list(found[0])) == bits([columns[one][slot] for slot in slots])
            assert bits(list(found[1])) == bits(either)


@pytest.mark.usefixtures("backend")
def test_slots_out_of_range_are_refused() -> None:
    storage = stored(fields(torch.float32), packed=True)
    for slot in (-1, ROWS, 2 * ROWS - 1, 2**62):
        for other, pick in ((None, None), (1, torch.tensor([True, False]))):
            with pytest.raises(IndexError):
                storage.fetch([Request(0, torch.tensor([0, slot]), other, pick)])


WRONG = [
    (Request(0, torch.tensor([1]), 2, torch.tensor([True])), "one dtype and shape"),
    (Request(0, torch.tensor([1]), 1), "no pick"),
    (Request(0, torch.tensor([1]), None, torch.tensor([True])), "together"),
    (Request(0, torch.tensor([1]), 1, torch.tensor([True, False])), r"bool\[1\]"),
    (Request(0, torch.tensor([1]), 1, torch.tensor([1])), r"int64\[1\]"),
]


def test_requests_that_fit_nothing_are_refused() -> None:
    for request, message in WRONG:
        with pytest.raises(OptionError, match=message):
            stored(fields(torch.float32), packed=True).fetch([request])


def test_storages_without_fields_say_so() -> None:
    with pytest.raises(OptionError, match="ListStorage cannot read single fields"):
        ListStorage(4).fetch([Request(0, torch.tensor([0]))])
    with pytest.raises(UsageError, match="holds no rows"):
        LazyTensorStorage(4).fetch([Request(0, torch.tensor([0]))])
