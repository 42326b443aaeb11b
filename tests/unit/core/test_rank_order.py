"""Rows in the order of a key, against a sorted list."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core import rank_order
from ostinato.core.rank_order import RankOrder

SLOTS = 24
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "first", "delete"]),
        st.lists(st.integers(0, SLOTS - 1), max_size=8),
        st.integers(0, 3),
    ),
    max_size=40,
)


class Rows:
    """Keys and ages by slot, and the order that is tested."""

    def __init__(self) -> None:
        self.order = RankOrder()
        self.keys: dict[int, float] = {}
        self.ages: dict[int, int] = {}
        self.serial = 0

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = slots.tolist()
        keys = np.array([self.keys.get(slot, 0.0) for slot in found], np.float64)
        return keys, np.array([self.ages.get(slot, 0) for slot in found], np.int64)

    def ranked(self) -> list[int]:
        return sorted(self.keys, key=lambda slot: (self.keys[slot], self.ages[slot]))

    def call(self, name: str, slots: list[int], key: int) -> None:
        given = np.array(slots, np.int64)
        if name == "add":
            for slot in slots:
                self.serial += 1
                self.keys[slot], self.ages[slot] = float(key), self.serial
            self.order.add(given)
        elif name == "first":
            found = self.order.first(len(slots), self.read).tolist()
            assert found == self.ranked()[: len(slots)]
        else:
            for slot in slots:
                self.keys.pop(slot, None)
                self.ages.pop(slot, None)
            if name == "remove":
                self.order.remove(given)
            else:  # it is told when the row is read
                self.order.add(given[self.order.has(given)])


@pytest.mark.parametrize("few", [0, 5, 1024])
@given(calls=CALLS)
def test_the_first_rows_are_those_of_a_sorted_list(few: int, calls: list[tuple[str, list[int], int]]) -> None:
    with mock.patch.object(rank_order, "_FEW", few):
        rows = Rows()
        for name, slots, key in calls:
            rows.call(name, slots, key)
        assert rows.order.first(SLOTS, rows.read).tolist() == rows.ranked()
        assert rows.order.count == len(rows.keys)
