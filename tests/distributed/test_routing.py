"""The two-level draw against the distribution of one big buffer, without Ray."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.distributed.routing import allot, allot_consuming, write_order


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 3.0, 1e12]), min_size=1, max_size=8).filter(any),
    st.lists(st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53), max_size=50),
)
def test_no_shard_without_mass_is_chosen(masses, uniforms):
    chosen = allot(masses, torch.tensor(uniforms, dtype=torch.float64))
    assert all(masses[i] > 0 for i in chosen.tolist())


SUPPLY = st.lists(
    st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 3 * n))), min_size=1, max_size=6
)


@given(SUPPLY.filter(lambda supply: any(draws for _, draws in supply)), st.data())
def test_no_shard_exceeds_the_draws_of_its_rows(supply, data):
    rows, draws = [n for n, _ in supply], [m for _, m in supply]
    size = data.draw(st.integers(1, sum(draws)))
    uniforms = data.draw(
        st.lists(st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53), min_size=size, max_size=size)
    )
    chosen = allot_consuming(rows, draws, torch.tensor(uniforms, dtype=torch.float64))
    assert chosen.shape == (size,)
    counts = torch.bincount(chosen, minlength=len(rows)).tolist()
    assert all(count <= most for count, most in zip(counts, draws, strict=True))


def test_a_sticky_writer_goes_home_when_its_shard_is_back():
    assert [write_order(3, 4, missing) for missing in ((), {1}, ())] == [[1, 2, 0], [2, 0, 1], [1, 2, 0]]
