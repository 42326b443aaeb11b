"""The law of the reservoir: of everything ever written, each row is present with the same probability."""

from __future__ import annotations

import itertools
from collections import Counter

import torch

from ostinato import ReservoirWriter
from ostinato.core.ring import Ring

from .chi_square import p_value

LOW, HIGH = 1e-4, 1 - 1e-4


def kept(sizes: list[int], capacity: int, generator: torch.Generator) -> list[int]:
    """Return which row is in each slot after batches of these sizes."""
    writer, ring, slots, first = ReservoirWriter(generator=generator), Ring(capacity), [-1] * capacity, 0
    for size in sizes:
        picks = writer.place(size, ring, None)
        ring.record(picks)
        for slot, row in zip(picks.slots.tolist(), picks.rows.tolist(), strict=True):
            slots[slot] = first + row
        first += size
    return slots


def test_every_set_of_rows_is_equally_likely():
    generator = torch.Generator().manual_seed(7)
    sets = Counter(tuple(sorted(kept([2, 4], 3, generator))) for _ in range(2000))
    assert LOW < p_value([sets[chosen] for chosen in itertools.combinations(range(6), 3)]) < HIGH


def test_batches_make_the_same_choices_as_single_rows():
    for capacity in (1, 3, 10):
        for sizes in ([50], [7, 43], [10, 1, 39], [20, 20, 10]):
            one, many = (torch.Generator().manual_seed(capacity) for _ in range(2))
            assert kept(sizes, capacity, many) == kept([1] * 50, capacity, one)
