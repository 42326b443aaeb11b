"""The laws of the samplers, by chi-square on fixed seeds: a wrong law fails, a right one never flickers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from ostinato import SamplerWithoutReplacement
from ostinato.testing import make_view

from ..registry import seeded
from ..tags import STORAGES, buffer, fill, read_ids
from .chi_square import p_value

LOW, HIGH = 1e-4, 1 - 1e-4


def counts_of(draws: list[int], outcomes: int) -> list[int]:
    counted = Counter(draws)
    return [counted[i] for i in range(outcomes)]


def test_the_chi_square_tells_even_from_uneven():
    assert p_value([1000, 1000, 1000, 1000, 1000, 1250]) < 1e-5
    assert p_value([1000, 2000], [1, 2]) > 0.5
    assert p_value([10, 12, 9, 11]) == pytest.approx(0.9142, abs=0.01)  # chi-square 0.476 with three degrees


# -- random sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", list(STORAGES))
def test_random_draws_are_randint_digit_for_digit(storage):
    rb, same = buffer(storage, 10, generator=seeded(3)), seeded(3)
    for rows, total in ((range(7), 7), (range(7, 10), 10), (range(10, 23), 10)):
        fill(rb, rows)
        for size in (5, 3, 5, 1):
            _, info = rb.sample(size, return_info=True)
            assert info["index"].tolist() == torch.randint(0, total, (size,), generator=same).tolist()


# -- without replacement -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [1, 4])
def test_all_orders_of_four_rows_are_equally_likely(size):
    """Pass after pass on one sampler: the order that one pass leaves behind must not colour the next."""
    rb = buffer("packed", 4, sampler=SamplerWithoutReplacement(), batch_size=size, generator=seeded())
    fill(rb, range(4), "tensor")
    orders = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    passes = [orders[tuple(i for batch in rb for i in read_ids(batch))] for _ in range(1200)]
    assert LOW < p_value(counts_of(passes, 24)) < HIGH
    follow = [passes[i] // 6 * 4 + passes[i + 1] // 6 for i in range(0, len(passes), 2)]
    assert LOW < p_value(counts_of(follow, 16)) < HIGH


@pytest.mark.usefixtures("backend")
def test_orders_are_uniform_when_rows_join_in_mid_pass():
    """Two of four rows are drawn, two more are written: the rest comes in any of the 24 orders of four rows."""
    seen: Counter[tuple[int, ...]] = Counter()
    generator = seeded()
    for _ in range(1500):
        sampler = SamplerWithoutReplacement()
        first = sampler.draw(make_view(4, 8), 2, generator).slots.tolist()
        rest = sampler.draw(make_view(6, 8), 4, generator).slots.tolist()
        assert sorted(first + rest) == list(range(6))
        left = sorted(set(range(6)) - set(first))
        seen[tuple(left.index(i) for i in rest)] += 1
    assert LOW < p_value([seen[order] for order in itertools.permutations(range(4))]) < HIGH
