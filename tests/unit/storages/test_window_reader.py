"""The native reading of a plan gives what its requests and `fold` give, and leaves other plans to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage
from ostinato.core.records import Column, Plan, Request, Run
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from ostinato.core.rows import Schema

ROWS, COUNT, WIDTH = 30, 12, 3


def filled(dtype: torch.dtype = torch.float32) -> LazyTensorStorage:
    storage = LazyTensorStorage(ROWS)
    rows = {
        "frame": torch.randint(0, 256, (ROWS, 2, 200), dtype=torch.uint8),
        "next_frame": torch.randint(0, 256, (ROWS, 2, 200), dtype=torch.uint8),
        "number": torch.randn(ROWS).to(dtype),
        "small": torch.randn(ROWS, 3).to(dtype),
    }
    storage.write(Run(0, ROWS, ROWS), storage.admit(rows, 1)[0])
    return storage


def columns(weights: Any = None, **options: Any) -> dict[int, Column]:
    slots, pick = torch.randint(0, ROWS, (COUNT * WIDTH,)), torch.rand(COUNT * WIDTH) < 0.5
    return {
        0: Column(Request(0, slots), (WIDTH,), None, **options),
        1: Column(Request(0, slots, 1, pick), (WIDTH,), None, **options),
        2: Column(Request(2, slots), (WIDTH,) if weights is not None else (), weights)
        if weights is not None
        else Column(Request(2, slots[:COUNT])),
    }


def check(storage: LazyTensorStorage, changed: dict[int, Column]) -> None:
    schema: Schema = storage.schema  # type: ignore[assignment]
    records = torch.randint(0, ROWS, (COUNT,))
    plan = Plan(schema, records, records, changed)
    expected = plan.fold(storage.fetch(plan.requests()))
    found = storage.read_plan(plan)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert one.is_contiguous()
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.usefixtures("backend")
def test_windows_and_sums_are_those_of_the_requests(dtype: torch.dtype) -> None:
    storage = filled(dtype)
    weights = torch.rand(COUNT, WIDTH).to(torch.float64 if dtype is torch.float64 else torch.float32)
    weights[torch.rand(COUNT, WIDTH) < 0.3] = 0
    check(storage, columns())
    check(storage, columns(merge=True))
    check(storage, columns(weights))
    check(storage, columns(weights.t().contiguous().t()))
    check(storage, columns(blank=torch.rand(COUNT, WIDTH) < 0.5))


@pytest.mark.usefixtures("backend")
def test_slots_of_other_forms_are_converted() -> None:
    storage = filled()
    slots = torch.randint(0, ROWS, (COUNT, 2))[:, 0]
    check(storage, {2: Column(Request(2, slots))})
    check(storage, {2: Column(Request(2, slots.to(torch.int32)))})


@pytest.mark.usefixtures("backend")
def test_wrong_plans_raise() -> None:
    storage = filled()
    records = torch.arange(COUNT)
    for change, error in (
        (Request(2, torch.full((COUNT,), ROWS)), IndexError),
        (Request(2, records, 0, torch.ones(COUNT, dtype=torch.bool)), OptionError),
        (Request(2, records, 3), OptionError),
    ):
        with pytest.raises(error):
            storage.read_plan(Plan(storage.schema, records, records, {2: Column(change)}))  # type: ignore[arg-type]
    short = Column(Request(2, records[:-1].contiguous()), (2,))
    with pytest.raises(RuntimeError, match="shape"):
        storage.read_plan(Plan(storage.schema, records, records, {2: short}))  # type: ignore[arg-type]
