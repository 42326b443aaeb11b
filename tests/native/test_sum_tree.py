"""Updates of the compiled sum tree, few and many at once. Any calls against a plain list: unit/samplers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from .tables import address

if TYPE_CHECKING:
    from types import ModuleType


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


@pytest.mark.parametrize("n", [100, 40_000])
def test_of_equal_slots_the_last_wins(native: ModuleType, n: int) -> None:
    random = np.random.default_rng(n)
    tree = native.SumTree(2000)
    slots, values = random.integers(0, 2000, n), random.random(n)
    tree.set(address(slots), address(values), n)
    model = np.zeros(2000)
    for slot, value in zip(slots, values, strict=True):
        model[slot] = value
    leaves = np.full(2000, np.nan)
    tree.leaves(address(leaves), 2000)
    np.testing.assert_array_equal(leaves, model)
    assert tree.total == total_of(model.tolist())
