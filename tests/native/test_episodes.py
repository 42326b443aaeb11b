"""The compiled episode table by itself: bad arguments, the lock, threads. What it answers: tests/unit/core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, slots_of

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

STATE = (np.int32, np.int64, np.int64, np.uint8, np.uint8, np.int64)


def record(table: Any, rows: int, *, ends: list[bool] | None = None, ids: list[int] | None = None) -> None:
    """Note rows that go on at the cursor."""
    flags = None if ends is None else np.array(ends, dtype=np.bool_)
    streams = None if ids is None else slots_of(ids)
    table.record_write(table.cursor, rows, 0, *(0 if x is None else address(x) for x in (flags, streams)), 0)


def ask(table: Any, name: str, slots: NDArray[np.int64], *arguments: int) -> list[int]:
    out = np.full(len(slots), -7, dtype=np.int64)
    getattr(table, name)(*arguments, address(slots), len(slots), address(out))
    return [int(x) for x in out]


def windows(table: Any, slots: NDArray[np.int64], before: int, after: int) -> tuple[Any, Any]:
    shape = (len(slots), before + 1 + after)
    out, valid = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    table.window(address(slots), len(slots), before, after, 1, address(out), address(valid))
    return out, valid


def filled(native: ModuleType, capacity: int, length: int) -> Any:
    """A full ring, all episodes of one length."""
    table = native.Episodes(capacity, 1)
    ends = np.arange(capacity) % length == length - 1
    table.record_write(0, capacity, 0, address(ends), 0, 0)
    return table


def test_any_number_draws_a_row(native):
    """Callers promise 63 bits; a broken promise must not read foreign memory."""
    table = filled(native, 100, 7)
    handle = table.add_need(4)
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 2000)
    for drawn in (draws(table, "draw", handle, numbers), draws(table, "draw_episodes", handle, numbers)):
        assert set(drawn) == {slot for slot in range(98) if slot % 7 < 4}


def draws(table: Any, name: str, handle: int, numbers: NDArray[np.int64]) -> list[int]:
    n = len(numbers) if name == "draw" else len(numbers) // 2
    out = np.full(n, -7, dtype=np.int64)
    getattr(table, name)(handle, address(numbers), n, address(out))
    return [int(x) for x in out]


def arrays_of(table: Any) -> list[NDArray[Any]]:
    sizes = (table.present, *[table.records] * 4, table.free_count)
    arrays = [np.zeros(size, dtype=dtype) for size, dtype in zip(sizes, STATE, strict=True)]
    table.save(*(address(x) for x in arrays))
    return arrays


@pytest.mark.parametrize(
    ("which", "value"), [(0, -2), (0, 4), (2, 2), (2, -1), (3, 2), (5, -1), (5, 4), ("cursor", 8), ("present", 9)]
)
def test_a_state_that_points_outside_changes_nothing(native, which, value):
    table = native.Episodes(8, 2)
    record(table, 2, ends=[True, False])
    record(table, 6, ends=[False, False, True, False, False, False])
    record(table, 4)
    arrays = arrays_of(table)
    before = [x.tolist() for x in arrays]
    numbers = {"cursor": table.cursor, "serial": table.serial, "present": table.present, "records": table.records}
    free = table.free_count
    if isinstance(which, str):
        numbers[which] = value
    else:
        arrays[which][0] = value
    with pytest.raises(ValueError, match=r"^the state does not fit a table of this capacity and num_envs$"):
        table.load(*numbers.values(), free, *(address(x) for x in arrays))
    assert [x.tolist() for x in arrays_of(table)] == before


def random_write(table: Any, random: np.random.Generator) -> None:
    """A ring write of up to two rings, by environment or by id, with ends and masked rows."""
    rows = int(random.integers(0, 2 * table.capacity + 1))
    skip = max(0, rows - table.capacity)
    ends, mask = random.random(rows) < random.choice([0.02, 0.3]), random.random(rows) < random.choice([0.9, 1.0])
    ids = random.integers(0, 5, rows) if random.random() < 0.7 else None
    start = (table.cursor + skip) % table.capacity
    table.record_write(start, rows - skip, skip, address(ends), 0 if ids is None else address(ids), address(mask))


@given(capacity=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_any_history_can_be_asked_and_saved(native, capacity, seed):
    """For the sanitizers: what the answers are is tested in `unit/core/test_episodes.py`."""
    random = np.random.default_rng(seed)
    table, loaded, every = native.Episodes(capacity, 1), native.Episodes(capacity, 1), np.arange(capacity)
    handle = table.add_need(2)
    for _ in range(12):
        random_write(table, random)
        ahead, behind = ask(table, "ahead", every), ask(table, "behind", every)
        assert sum(x >= 0 for x in ahead) == table.rows
        assert table.start_rows(handle) == sum(x >= 1 for x in ahead)
        shape = (capacity, 2 * capacity + 1)
        out, valid = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
        table.window(address(every), capacity, capacity, capacity, 1, address(out), address(valid))
        assert (valid.sum(1) == np.maximum(1, np.add(ahead, behind) + 1)).all()
        arrays = arrays_of(table)
        sizes = (table.cursor, table.serial, table.present, table.records, table.free_count)
        loaded.load(*sizes, *(address(x) for x in arrays))
        assert (ask(loaded, "ahead", every), ask(loaded, "behind", every)) == (ahead, behind)
