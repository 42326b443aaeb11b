"""Endless passes: whole batches across the ends of passes, and the twin whose state lives on a device.

The twin is pure torch, so it runs here on the CPU; on a device: tests/device and tests/gpu.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import SamplerWithoutReplacement
from ostinato.core.eligible import scale
from ostinato.errors import OptionError
from ostinato.samplers.uniform import DevicePasses
from ostinato.testing import make_view
from tests.registry import seeded
from tests.stats.chi_square import p_value

CPU = torch.device("cpu")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shuffle", [True, False])
@given(rows=st.integers(1, 12), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_draws_put_end_to_end_are_whole_passes(shuffle, rows, sizes):
    sampler = SamplerWithoutReplacement(shuffle=shuffle, endless=True)
    drawn: list[int] = []
    for size in sizes:
        slots = sampler.draw(make_view(rows, 12), size, seeded(len(drawn))).slots.tolist()
        assert len(slots) == size
        assert not sampler.ran_out
        drawn += slots
    for start in range(0, len(drawn), rows):
        one = drawn[start : start + rows]
        assert len(set(one)) == len(one)
        assert shuffle or one == list(range(len(one)))


def test_rows_written_in_a_pass_join_it_and_after_its_end_the_next():
    sampler, generator = SamplerWithoutReplacement(endless=True), seeded()
    first = sampler.draw(make_view(4, 9), 3, generator).slots.tolist()
    rest = sampler.draw(make_view(6, 9), 3, generator).slots.tolist()  # ends the pass of six
    assert sorted(first + rest) == [0, 1, 2, 3, 4, 5]
    passes = sampler.draw(make_view(9, 9), 90, generator).slots.view(10, 9)
    assert len({tuple(one.tolist()) for one in passes}) == 10, "each pass is shuffled anew"
    assert "endless=True, drawn=0 of 9" in repr(sampler)
    with pytest.raises(OptionError):
        SamplerWithoutReplacement(drop_last=True, endless=True)
    with pytest.raises(OptionError):
        DevicePasses(2**31, CPU)


# -- on a device ---------------------------------------------------------------------------------------------


@given(random=st.integers(0, 2**63 - 1) | st.just(2**63 - 1), span=st.integers(1, 2**31 - 1) | st.just(2**31 - 1))
def test_scaling_is_exact(random, span):
    assert int(scale(torch.tensor([random]), torch.tensor([span]))) == random * span >> 63


@given(
    script=st.lists(st.tuples(st.sampled_from(["rows", "draw", "unseen", "clear"]), st.integers(1, 15)), max_size=14),
    seed=st.integers(0, 2**32),
)
def test_a_device_draws_whole_passes_whoever_knows_the_place(script, seed):
    """Rows drawn in the pass so far, as a plain set: joined by new rows, begun anew at its end and by `clear`."""
    passes, generator = DevicePasses(15, CPU), seeded(seed)
    rows, drawn = 0, set[int]()
    for verb, number in [("rows", 3), *script, ("draw", 15)]:
        if verb == "rows":
            rows = max(rows, number)
            passes.record(rows)
        elif verb == "clear":
            passes.clear()
            rows, drawn = 1, set()
            passes.record(1)
        else:
            if verb == "unseen":
                passes.leave_host()
            for slot in passes.draw(number, generator).tolist():
                assert slot < rows
                assert slot not in drawn
                drawn = drawn | {slot} if len(drawn) + 1 < rows else set()
            assert passes.position == len(drawn)
        if verb == "unseen":
            other = DevicePasses(15, CPU)
            other.load(passes.order[: passes.rows].clone(), passes.position)
            passes = other
    assert sorted(passes.order[:15].tolist()) == list(range(15))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_all_orders_of_a_pass_on_a_device_are_equally_likely(size):
    """Swaps side by side are as good as swaps one by one, also where a draw takes the ends of passes."""
    passes, generator = DevicePasses(4, CPU), seeded(1)
    passes.record(4)
    drawn = [slot for _ in range(12_000 // size) for slot in passes.draw(size, generator).tolist()]
    counts = Counter(tuple(drawn[at : at + 4]) for at in range(0, len(drawn), 4))
    assert len(counts) == 24
    assert 1e-4 < p_value(list(counts.values())) < 1 - 1e-4
