"""Reading other rows for each field: equal to plain indexing, for every dtype and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato import LazyTensorStorage, ListStorage
from ostinato.core.records import Request, Run
from ostinato.errors import OptionError, UsageError

from ...effort import examples

if TYPE_CHECKING:
    from collections.abc import Callable

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


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, since torch cannot index or compare every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


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


def expect(columns: list[Tensor], request: Request) -> Tensor:
    """Plain indexing, row by row."""
    choices = [False] * request.slots.shape[0] if request.pick is None else request.pick.tolist()
    out = [
        columns[request.other if second and request.other is not None else request.leaf][slot]
        for slot, second in zip(request.slots.tolist(), choices, strict=True)
    ]
    return torch.stack(out) if out else columns[request.leaf][:0].clone()


FORMS: list[Callable[[Tensor], Tensor]] = [
    lambda slots: slots,
    lambda slots: slots.flip(0),
    lambda slots: slots.to(torch.int32),
    lambda slots: slots.repeat_interleave(2)[::2],
]
"""Slots are brought to the form that is read."""


@pytest.mark.usefixtures("backend")
@given(dtype=st.sampled_from(DTYPES), packed=st.booleans(), data=st.data())
@examples(1)
def test_any_requests_equal_plain_indexing(dtype: torch.dtype, packed: bool, data: st.DataObject) -> None:
    columns = list(fields(dtype).values())
    storage = stored(fields(dtype), packed=packed)
    lengths = (0, 1, 3, 20)
    draws = {n: data.draw(st.lists(st.integers(0, ROWS - 1), min_size=n, max_size=n)) for n in lengths}
    arrays = {n: torch.tensor(slots, dtype=torch.int64) for n, slots in draws.items()}
    requests = []
    for _ in range(data.draw(st.integers(1, 8))):
        n = data.draw(st.sampled_from(lengths))
        slots = data.draw(st.sampled_from(FORMS))(arrays[n])
        pair = data.draw(st.integers(0, len(columns) // 2 - 1))
        if data.draw(st.booleans()):
            pick = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
            requests.append(Request(2 * pair + 1, slots, 2 * pair, pick))
        else:
            requests.append(Request(2 * pair, slots))
    for request, tensor in zip(requests, storage.fetch(requests), strict=True):
        expected = expect(columns, request)
        assert (tensor.dtype, tensor.shape) == (dtype, expected.shape)
        assert tensor.is_contiguous()
        assert torch.equal(bits(tensor), bits(expected)), request


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
