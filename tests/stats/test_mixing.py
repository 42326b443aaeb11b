"""The law of mixing several buffers: shares of every batch, and who meets whom in it."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import RandomSampler, SamplerEnsemble

from ..effort import examples
from ..registry import seeded
from .chi_square import p_value

LOW, HIGH = 1e-4, 1 - 1e-4


def law(p: object, parts: int, members: int) -> SamplerEnsemble:
    return SamplerEnsemble(*(RandomSampler() for _ in range(members)), p=p, num_buffer_sampled=parts)  # type: ignore[arg-type]


@examples(2)
@given(
    weights=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any),
    parts=st.integers(1, 40),
    seed=st.integers(0, 999),
    single=st.booleans(),
)
def test_every_batch_has_the_floor_or_the_ceiling_of_its_share(weights, parts, seed, single):
    """Exactly the share where that is a whole number; weights may come in single precision."""
    p = torch.tensor(weights, dtype=torch.float32 if single else torch.float64)
    p = p / p.sum()
    chosen = Counter(law(p, parts, len(weights)).choose([1] * len(weights), seeded(seed)))
    assert sum(chosen.values()) == parts
    for member, weight in enumerate(weights):
        share = parts * weight / sum(weights)
        assert math.floor(share + 1e-9) <= chosen[member] <= math.ceil(share - 1e-9)


@pytest.mark.parametrize(("p", "parts"), [([0.2, 0.3, 0.5], 2), ([0.01, 0.01, 0.98], 4), (None, 1)])
def test_shares_are_exact_in_expectation_at_every_position(p, parts):
    mix, generator = law(p, parts, 3), seeded(5)
    seen: list[Counter[int]] = [Counter() for _ in range(parts)]
    for _ in range(4000):
        for position, member in enumerate(mix.choose([1, 1, 1], generator)):
            seen[position][member] += 1
    for counts in seen:
        assert LOW < p_value([counts[i] for i in range(3)], p or [1, 1, 1]) < HIGH


def test_all_pairs_of_members_meet_equally_often_or_by_the_rows_present():
    mix, generator = law(None, 2, 5), seeded(2)
    pairs = Counter(tuple(sorted(mix.choose([1] * 5, generator))) for _ in range(5000))
    expected = list(itertools.combinations(range(5), 2))
    assert set(pairs) == set(expected)
    assert LOW < p_value([pairs[pair] for pair in expected]) < HIGH
    mix = law("sampleable", 1, 3)
    drawn = Counter(mix.choose([10, 0, 30], generator)[0] for _ in range(4000))
    assert drawn[1] == 0
    assert LOW < p_value([drawn[0], drawn[2]], [10, 30]) < HIGH
