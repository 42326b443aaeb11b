"""The two-level draw against the distribution of one big buffer, without Ray."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.distributed.routing import (
    MAX_SHARDS,
    ShardWeight,
    WriteOrder,
    allot,
    allot_consuming,
    weight_factors,
)
from ostinato.errors import OptionError


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 3.0, 1e12]), min_size=1, max_size=8).filter(any),
    st.lists(st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53), max_size=50),
)
def test_no_shard_without_mass_is_chosen(masses: list[float], uniforms: list[float]) -> None:
    chosen = allot(masses, torch.tensor(uniforms, dtype=torch.float64))
    assert all(masses[i] > 0 for i in chosen.tolist())


def test_weights_are_relative_to_the_least_value_that_can_be_drawn() -> None:
    weights = {0: ShardWeight(1, 0.0, 0.1, 0.5), 2: ShardWeight(3, 5.0, 4.0, 0.5), 3: ShardWeight(2, 1.0, 1.0, 0.5)}
    assert weight_factors(weights) == {2: 0.5, 3: 1.0}


SUPPLY = st.lists(
    st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 3 * n))), min_size=1, max_size=6
)


@given(SUPPLY.filter(lambda supply: any(draws for _, draws in supply)), st.data())
def test_no_shard_exceeds_the_draws_of_its_rows(supply: list[tuple[int, int]], data: st.DataObject) -> None:
    rows, draws = [n for n, _ in supply], [m for _, m in supply]
    size = data.draw(st.integers(1, sum(draws)))
    uniforms = data.draw(
        st.lists(st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53), min_size=size, max_size=size)
    )
    chosen = allot_consuming(rows, draws, torch.tensor(uniforms, dtype=torch.float64))
    assert chosen.shape == (size,)
    counts = torch.bincount(chosen, minlength=len(rows)).tolist()
    assert all(count <= most for count, most in zip(counts, draws, strict=True))


def test_writers_are_round_robin_or_sticky() -> None:
    around, home = WriteOrder(3, 4, sticky=False), WriteOrder(3, 4, sticky=True)
    assert [around.next(())[0] for _ in range(5)] == [1, 2, 0, 1, 2]
    assert [home.next(())[0] for _ in range(3)] == [1, 1, 1]
    assert home.next({1}) == [2, 0, 1]
    assert home.next(()) == [1, 2, 0], "it goes home when its shard is back"
    for shards in (0, MAX_SHARDS + 1):
        with pytest.raises(OptionError, match=r"num_shards must be in \[1, 1048576\], got"):
            WriteOrder(shards, 0, sticky=True)
