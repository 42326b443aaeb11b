"""shuffle_draw is the Fisher-Yates shuffle of a plain Python model, in steps of any length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, slots_of

if TYPE_CHECKING:
    from types import ModuleType

    from .tables import Slots

randoms_63 = st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 2**62, 2**63 - 1])
randoms_64 = st.integers(-(2**63), 2**63 - 1)


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
    outside = slots_of(data.draw(st.lists(randoms_64, max_size=total)))  # a broken promise stays inside, too
    got = draw(native, perm, 0, outside)
    assert len(set(got.tolist())) == len(outside)
    assert sorted(perm.tolist()) == list(range(total))


def test_large_permutations_follow_the_model(native: ModuleType) -> None:
    random = np.random.default_rng(3)
    randoms = random.integers(0, 2**63, 5000, dtype=np.int64)
    perm, expected = np.arange(1_000_000, dtype=np.int64), list(range(1_000_000))
    assert draw(native, perm, 123, randoms).tolist() == model(expected, 123, randoms.tolist())
