"""What single storages do beyond the contract: adoption, layout in memory, devices, lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage
from ostinato.core.records import Column, Plan, Request
from ostinato.errors import KindError, OptionError, SchemaError, StorageMemoryError, UsageError

from ...command import run_process
from ...tags import read_ids, rows


def test_the_column_of_the_guide_passes_the_contracts_as_it_stands(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    program = page.split("### Write a kind of column")[1].split("```python\n")[1].split("```")[0]
    assert program.count("\n") <= 60
    (tmp_path / "test_column.py").write_text(program)
    done = run_process("-qp", "no:cacheprovider", str(tmp_path), start="import pytest; raise SystemExit(pytest.main())")
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is limited as on Linux")
def test_memory_that_cannot_be_allocated_raises_and_changes_nothing():
    import resource

    rb = ReplayBuffer(storage=LazyTensorStorage(1_000_000))
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20), before[1]))
    try:
        with pytest.raises(StorageMemoryError):
            rb.extend({"x": torch.zeros(2, 250)})
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert len(rb) == 0
    rb.extend({"y": torch.arange(3)})
    assert rb[:]["y"].tolist() == [0, 1, 2]


def test_datasets_of_any_kind_and_layout_are_adopted():
    for kind in ("dict", "tuple", "tensor", "tensordict"):
        rb = ReplayBuffer(storage=TensorStorage(rows(range(6), kind)))
        assert (len(rb), rb.storage.capacity, rb.cursor) == (6, 6, 0)
        assert read_ids(rb[:]) == list(range(6))
    values = torch.arange(24.0).view(6, 4)
    layouts: list[Any] = [
        values.t().contiguous().t(),
        torch.stack((values, values), 1).view(12, 4)[::2],
        torch.stack((values, values), 2).view(6, 8)[:, ::2],
        values.clone().numpy(),
    ]
    for data in layouts:
        rb = ReplayBuffer(storage=TensorStorage(data))
        assert torch.equal(rb[torch.arange(6)], values)
        rb.extend(values[:2] + 100)
        assert torch.equal(rb[torch.arange(6)], torch.cat([values[:2] + 100, values[2:]]))
        assert float(data[0][0]) == 100.0, "the rows are not copied"
    rb = ReplayBuffer(storage=TensorStorage(torch.arange(12).view(4, 3), ndim=2), dim_extend=0)
    assert (len(rb), rb.storage.shape, int(rb[1, 2])) == (12, (4, 3), 5)


def test_a_device_that_is_not_that_of_the_data_is_refused():
    with pytest.raises(OptionError, match="device='meta'"):
        TensorStorage(torch.zeros(3), device="meta")
    with pytest.raises(RuntimeError):
        LazyTensorStorage(5, device="nope")
    rb = ReplayBuffer(storage=LazyTensorStorage(5, device="auto"))
    rb.extend(torch.arange(3))
    assert rb[:].device == rb.storage.device == TensorStorage(torch.zeros(3), device="cpu").device


# -- lists ---------------------------------------------------------------------------------------------------


def test_a_list_without_bound_keeps_everything():
    rb = ReplayBuffer(storage=ListStorage(), batch_size=3)
    rb.extend(range(2500))
    assert len(rb) == 2500
    assert rb.stats().row_age_max == 2499
    rb[5] = -1
    assert rb.stats().row_age_max == 2500
    rb.extend(range(10))
    assert rb[2509] == 9


def test_lists_take_rows_of_any_iterable():
    kinds: list[Any] = [
        tuple,
        set,
        iter,
        torch.tensor,
        lambda rows: range(rows[0], rows[-1] + 1),
    ]
    for kind in kinds:
        rb = ReplayBuffer(storage=ListStorage(10))
        assert rb.extend(kind([1, 2, 3])).tolist() == [0, 1, 2]
        assert [int(x) for x in rb[:]] == [1, 2, 3]
    for wrong in (5, None, 2.5, {"a": 1}, "text", b"bytes"):
        with pytest.raises(KindError, match=r"use add\(\)"):
            rb.extend(wrong)
    assert len(rb) == 3
    rb.extend([torch.zeros(10), torch.zeros(5)])
    assert rb.storage.nbytes >= 60


# -- reading other rows for each field: what is refused; what is read: `test_single_copy_log.py` ------------------

ROWS = 13


def stored() -> LazyTensorStorage:
    """Two fields of one form and a third of another."""
    storage = LazyTensorStorage(ROWS)
    storage.set(range(ROWS), {"a": torch.zeros(ROWS, 3), "b": torch.ones(ROWS, 3), "c": torch.zeros(ROWS)})
    return storage


@pytest.mark.usefixtures("backend")
def test_slots_out_of_range_are_refused():
    storage = stored()
    for slot in (-1, ROWS, 2 * ROWS - 1, 2**62):
        with pytest.raises(IndexError):
            storage.fetch([Request(0, torch.tensor([0, slot]))])


@pytest.mark.usefixtures("backend")
def test_rows_of_two_fields_must_be_alike():
    storage, slots = stored(), torch.tensor([1, 2])
    plan = Plan(storage.schema, slots, slots)  # type: ignore[arg-type]
    chosen = Column(Request(0, slots), other=1, pick=torch.tensor([True, False]))
    assert storage.read_plan(plan.with_columns({0: chosen})).leaves[0].tolist() == [[1.0] * 3, [0.0] * 3]
    with pytest.raises(SchemaError):
        storage.read_plan(plan.with_columns({0: chosen._replace(other=2)}))


def test_storages_without_fields_say_so():
    with pytest.raises(OptionError):
        ListStorage(4).fetch([Request(0, torch.tensor([0]))])
    with pytest.raises(UsageError):
        LazyTensorStorage(4).fetch([Request(0, torch.tensor([0]))])
