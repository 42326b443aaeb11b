"""shuffle_draw is the Fisher-Yates shuffle of a plain Python model, in steps of any length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, slots_of

if TYPE_CHECKING:
    from types import ModuleType

    from .tables import Slots

randoms_63 = st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 2**62, 2**63 - 1])


def model(perm: list[int], first: int, randoms: list[int]) -> list[int]:
    """What shuffle_draw gives out; changes `perm`."""
    out = []
    for step, random in enumerate(randoms, start=first):
        i = step % len(perm)
        j = i + (random * (len(perm) - i) >> 63)
        perm[i], perm[j] = perm[j], perm[i]
        out.append(perm[i])
    return out


def draw(native: ModuleType, perm: Slots, first: int, randoms: Slots) -> Slots:
    out = np.full(len(randoms), -1, dtype=np.int64)
    native.shuffle_draw(address(perm), first, len(perm), len(randoms), address(randoms), address(out))
    return out


@given(total=st.integers(0, 120), data=st.data())
def test_draws_follow_the_model(native: ModuleType, total: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, total))
    randoms = data.draw(st.lists(randoms_63, max_size=3 * total))
    perm, expected = np.arange(total, dtype=np.int64), list(range(total))
    got = draw(native, perm, first, slots_of(randoms))
    assert got.tolist() == model(expected, first, randoms)
    assert perm.tolist() == expected


@given(total=st.integers(1, 300), cuts=st.lists(st.integers(1, 60), min_size=1), seed=st.integers(0, 2**32))
def test_an_epoch_in_any_steps_gives_every_row_once(native: ModuleType, total: int, cuts: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    perm = np.arange(total, dtype=np.int64)
    given_out: list[int] = []
    step = 0
    while len(given_out) < total:
        k = min(cuts[step % len(cuts)], total - len(given_out))
        given_out += draw(native, perm, len(given_out), random.integers(0, 2**63, k, dtype=np.int64)).tolist()
        step += 1
    assert sorted(given_out) == list(range(total))
    assert perm.tolist() == given_out


def test_large_permutations_follow_the_model(native: ModuleType) -> None:
    random = np.random.default_rng(3)
    randoms = random.integers(0, 2**63, 5000, dtype=np.int64)
    perm, expected = np.arange(1_000_000, dtype=np.int64), list(range(1_000_000))
    assert draw(native, perm, 123, randoms).tolist() == model(expected, 123, randoms.tolist())


def test_rows_are_equally_likely_at_every_position(native: ModuleType) -> None:
    random, counts = np.random.default_rng(0), np.zeros((6, 6), dtype=np.int64)
    for _ in range(6000):
        got = draw(native, np.arange(6, dtype=np.int64), 0, random.integers(0, 2**63, 6, dtype=np.int64))
        counts[np.arange(6), got] += 1
    # Chi-square with 25 degrees of freedom: 60 has a probability of 1e-4.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 60.0


def test_the_top_bit_of_a_random_number_cannot_point_outside(native: ModuleType) -> None:
    perm = np.arange(50, dtype=np.int64)
    got = draw(native, perm, 0, slots_of([-1, -(2**63), -5] * 10))
    assert len(set(got.tolist())) == 30
    assert sorted(perm.tolist()) == list(range(50))


@pytest.mark.parametrize(("first", "total", "k"), [(-1, 5, 1), (0, 5, -1), (6, 5, 0), (6, 5, 1), (0, 0, 1)])
def test_steps_that_do_not_fit_are_refused(native: ModuleType, first: int, total: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"first must be in \[0, total\], k at least 0"):
        native.shuffle_draw(0, first, total, k, 0, 0)
