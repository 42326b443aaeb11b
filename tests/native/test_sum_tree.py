"""The compiled sum tree against a plain list: leaves, sums, draws, bad arguments, the interpreter lock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, slots_of

if TYPE_CHECKING:
    from types import ModuleType

Values: TypeAlias = npt.NDArray[np.float64]

CAPACITIES = [1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513, 5000]
leaf = st.one_of(st.just(0.0), st.floats(0, 1e6), st.sampled_from([5e-324, 1e-300, 1e300, -0.0, 1.0]))


def values_of(numbers: list[float]) -> Values:
    return np.array(numbers, dtype=np.float64)


def write(tree: object, slots: list[int], values: list[float]) -> None:
    """`set` with lists."""
    at, numbers = slots_of(slots), values_of(values)
    tree.set(address(at), address(numbers), len(at))  # type: ignore[attr-defined]


def leaves_of(tree: object, n: int) -> Values:
    out = np.full(n, np.nan)
    tree.leaves(address(out), n)  # type: ignore[attr-defined]
    return out


def draw(tree: object, uniforms: list[float] | Values) -> tuple[list[int], Values]:
    numbers = np.ascontiguousarray(uniforms, dtype=np.float64)
    slots, values = np.full(len(numbers), -1, dtype=np.int64), np.full(len(numbers), np.nan)
    tree.draw(address(numbers), len(numbers), address(slots), address(values))  # type: ignore[attr-defined]
    return slots.tolist(), values


def total_of(leaves: list[float]) -> float:
    """The sum in the tree's order: eights from left to right, then their sums."""
    while True:
        sums = []
        for first in range(0, len(leaves), 8):
            total = 0.0
            for value in leaves[first : first + 8]:
                total += value
            sums.append(total)
        if len(sums) == 1:
            return sums[0]
        leaves = sums


@given(capacity=st.sampled_from(CAPACITIES), data=st.data())
def test_any_updates_leave_what_a_list_holds(native: ModuleType, capacity: int, data: st.DataObject) -> None:
    tree, model = native.SumTree(capacity), [0.0] * capacity
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            slots = data.draw(st.lists(st.integers(0, capacity - 1), max_size=80))
            values = data.draw(st.lists(leaf, min_size=len(slots), max_size=len(slots)))
            write(tree, slots, values)
            for slot, value in zip(slots, values, strict=True):
                model[slot] = value
        else:
            start, count = data.draw(st.integers(0, capacity - 1)), data.draw(st.integers(0, capacity))
            value = data.draw(leaf)
            tree.set_run(start, count, value)
            for i in range(count):
                model[(start + i) % capacity] = value
        positive = [value for value in model if value > 0]
        assert leaves_of(tree, capacity).tolist() == model
        assert tree.total == total_of(model)
        assert tree.minimum == min(positive, default=math.inf)
        assert tree.maximum == max(model)


@given(leaves=st.lists(leaf, min_size=1, max_size=90).filter(lambda leaves: 0 < sum(leaves) < math.inf))
def test_a_leaf_of_zero_is_never_drawn(native: ModuleType, leaves: list[float]) -> None:
    tree = native.SumTree(len(leaves))
    tree.load(address(values_of(leaves)), len(leaves))
    bounds = np.cumsum(leaves) / sum(leaves)
    edges = [0.0, -0.0, 5e-324, math.nextafter(1, 0), 1.0, 0.5]
    beyond = [-1.0, 2.0, math.inf, -math.inf, 1e300, math.nan]  # a broken promise must not read foreign memory
    near = [math.nextafter(b, side) for b in bounds.tolist() for side in (0.0, 2.0)]
    uniforms = [min(max(u, 0.0), 1.0) for u in [*edges, *bounds.tolist(), *near]]
    slots, values = draw(tree, [*uniforms, *beyond])
    assert all(leaves[slot] > 0 for slot in slots)
    np.testing.assert_array_equal(values, [leaves[slot] for slot in slots])


@pytest.mark.parametrize("n", [100, 40_000])
def test_of_equal_slots_the_last_wins(native: ModuleType, n: int) -> None:
    random = np.random.default_rng(n)
    tree = native.SumTree(2000)
    slots, values = random.integers(0, 2000, n), random.random(n)
    tree.set(address(slots), address(values), n)
    model = np.zeros(2000)
    for slot, value in zip(slots, values, strict=True):
        model[slot] = value
    np.testing.assert_array_equal(leaves_of(tree, 2000), model)
    assert tree.total == total_of(model.tolist())


def test_the_maximum_is_kept_up_from_the_first_question_on(native: ModuleType) -> None:
    tree, before = native.SumTree(1000), native.SumTree(1000).nbytes
    write(tree, [999, 5], [2.0, 1.0])
    assert tree.nbytes == before
    assert tree.maximum == 2.0
    assert tree.nbytes > before
    write(tree, [999, 7], [0.5, 1.5])
    assert tree.maximum == 1.5
    tree.clear()
    assert tree.maximum == 0.0
