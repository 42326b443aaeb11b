"""Checked updates of priorities against plain Python, and powers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, slots_of

if TYPE_CHECKING:
    from types import ModuleType

Values: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

RING = (0, 0, 0, 1, 1, 0)  # nothing overwritten: slot i has generation i + 1


def leaves_of(tree: Any, n: int) -> Values:
    out = np.full(n, np.nan)
    tree.leaves(address(out), n)
    return out


class Table:
    """A tree with the priorities of its rows."""

    def __init__(self, native: ModuleType, rows: int, *, eps: float = 0.0, alpha: float = 1.0) -> None:
        self.tree, self.rows, self.eps, self.alpha = native.SumTree(rows), rows, eps, alpha
        self.priorities = np.zeros(rows)
        self.hidden: npt.NDArray[np.bool_] | None = None

    def update(
        self,
        slots: Integers,
        values: npt.NDArray[Any],
        generations: Integers | None = None,
        source: tuple[int, ...] = RING,
        *,
        rows: int | None = None,
        want_largest: bool = True,
    ) -> tuple[int, float, float, float]:
        answer: tuple[int, float, float, float] = self.tree.update(
            address(slots),
            address(values),
            values.dtype == np.float32,
            len(slots),
            0 if generations is None else address(generations),
            source,
            address(self.priorities),
            0 if self.hidden is None else address(self.hidden),
            self.rows if rows is None else rows,
            self.eps,
            self.alpha,
            want_largest,
        )
        return answer


def sources(capacity: int, written: int) -> tuple[tuple[int, ...], Integers, Integers]:
    """The generations in ring order, the same as an array, and that array."""
    cursor, newest = written % capacity, written - written % capacity + 1
    ring = (0, 0, cursor, newest, newest - capacity, 0)
    last = [max((s for s in range(1, written + 1) if (s - 1) % capacity == i), default=0) for i in range(capacity)]
    array = slots_of(last)
    return ring, slots_of([address(array), capacity, 0, 0, 0, 0]), array


@given(
    capacity=st.sampled_from([1, 5, 64, 300]),
    seed=st.integers(0, 2**32),
    laps=st.sampled_from([0.5, 1.0, 2.3]),
    checked=st.booleans(),
    in_ring=st.booleans(),
    single=st.booleans(),
    hide=st.booleans(),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    eps=st.sampled_from([0.0, 1e-3]),
)
def test_an_update_leaves_what_plain_python_leaves(
    native,
    capacity,
    seed,
    laps,
    checked,
    in_ring,
    single,
    hide,
    alpha,
    eps,
):
    random, written = np.random.default_rng(seed), max(1, int(capacity * laps))
    rows = min(written, capacity)
    table = Table(native, capacity, eps=eps, alpha=alpha)
    table.hidden = random.random(capacity) < 0.3 if hide else None
    ring, array_numbers, array = sources(capacity, written)
    model, leaves = np.zeros(capacity), np.zeros(capacity)
    for _ in range(4):
        n = int(random.integers(1, 400))
        low, high = (0, capacity + 3) if checked else (0, rows)
        slots = random.integers(low, high, n)
        given_values = (random.random(n) * random.integers(0, 2, n)).astype(np.float32 if single else np.float64)
        known = array[np.clip(slots, 0, capacity - 1)]
        generations = np.where(random.random(n) < 0.7, known, random.integers(-2, written + 2, n))
        fresh = (slots < rows) & (not checked or ((generations == known) & (generations > 0)))
        before = max((model[s] for s in slots[fresh]), default=0.0)
        for slot, value in zip(slots[fresh].tolist(), given_values[fresh].tolist(), strict=True):
            model[slot] = value
            shown = table.hidden is None or not table.hidden[slot]
            leaves[slot] = (value + eps) ** alpha if shown and value + eps > 0 else 0.0
        source = ring if in_ring else tuple(array_numbers.tolist())
        stale, most, gone, left = table.update(slots, given_values, generations if checked else None, source, rows=rows)
        assert stale == (int((~fresh).sum()) if checked else 0)
        assert most == max(given_values[fresh].tolist(), default=0.0)
        assert gone == before
        assert left == max((model[s] for s in slots[fresh]), default=0.0)
        np.testing.assert_array_equal(table.priorities, model)
        np.testing.assert_allclose(leaves_of(table.tree, capacity), leaves, rtol=1e-15)


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 0.6, 0.999, 1.0, 2.0, 3.7, 2000.0])
def test_powers_are_right_to_the_last_digits(native, alpha):
    """Over all magnitudes, and near 1, where errors of a logarithm show most."""
    random = np.random.default_rng(int(alpha * 1000))
    span = min(306.0, 280 / alpha)
    numbers = np.concatenate(
        [
            10 ** random.uniform(-span, span, 3000),
            1 + random.uniform(-1, 1, 3000) * 2.0 ** -random.integers(1, 53, 3000),
        ]
    )
    numbers = np.concatenate([numbers, [1.0, 0.0, 5e-324, 1e-310, 2.0, 0.5, math.sqrt(0.5), math.nextafter(1, 0)]])
    numbers = numbers[alpha * np.log2(np.maximum(numbers, 1.0)) < 960]
    table = Table(native, len(numbers), alpha=alpha)
    table.update(np.arange(len(numbers)), numbers)
    exact = np.array([x**alpha for x in numbers.tolist()])
    np.testing.assert_allclose(leaves_of(table.tree, len(numbers)), exact, rtol=1e-15, atol=0)
    assert (leaves_of(table.tree, len(numbers))[numbers == 1] == 1).all()
    alone = Table(native, len(numbers), alpha=alpha)  # equal priorities get equal values, wherever they stand
    for i in range(300):
        alone.update(slots_of([i]), numbers[i : i + 1])
    np.testing.assert_array_equal(leaves_of(alone.tree, 300), leaves_of(table.tree, 300))
