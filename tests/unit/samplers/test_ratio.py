"""Exact ratios: rows of each batch against plain arithmetic of fractions, schedules, and states."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import RandomSampler, SamplerEnsemble
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, UsageError

from ...effort import examples
from ..buffers.refusals import refuses

HALF = Fraction(1, 2)


def mix(ratio: Any, members: int = 2, **options: Any) -> SamplerEnsemble:
    return SamplerEnsemble(*(RandomSampler() for _ in range(members)), ratio=ratio, **options)


def after(sampler: SamplerEnsemble) -> Any:
    """What a checkpoint holds of it, as its file does."""
    return json.loads(json.dumps(sampler.state_dict()))


def counts(sampler: SamplerEnsemble, size: int, rows: list[int] | None = None) -> list[int]:
    """Draw a batch and return the rows of each member."""
    split = sampler.plan(size, rows or [100] * len(sampler), None)
    sampler.drew(split.carry)
    found = [0] * len(sampler)
    for member, count in zip(split.members, split.sizes, strict=True):
        assert count > 0
        found[member] = count
    assert sum(found) == size
    return found


@examples(3)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any),
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
)
def test_no_batch_is_a_row_off_and_the_sums_stay_close(weights, sizes):
    members = len(weights)
    sampler, drawn, due = mix(weights, members), [0] * members, [Fraction(0)] * members
    for size in sizes:
        for i, count in enumerate(counts(sampler, size)):
            share = Fraction(size * weights[i], sum(weights))
            assert count in (math.floor(share), math.ceil(share))
            drawn[i], due[i] = drawn[i] + count, due[i] + share
            assert abs(drawn[i] - due[i]) <= (HALF if members == 2 else 2)


def test_shares_are_numbers_of_any_kind():
    for share in (0.1, np.float32(0.1), Fraction(1, 10)):
        sampler = mix(share)
        assert sampler.ratio == pytest.approx([0.1, 0.9])
        assert all(counts(sampler, 10) == [1, 9] for _ in range(100))
    weights: list[Any] = [[1, 3], (0.25, 0.75), torch.tensor([0.5, 1.5]), np.array([2, 6])]
    assert [mix(given_).ratio for given_ in weights] == [[0.25, 0.75]] * 4


def test_a_mapping_is_a_line_between_its_steps():
    points = {3: Fraction(1), 7: Fraction(1, 5), 9: Fraction(1, 2)}
    line = [Fraction(twentieths, 20) for twentieths in (20, 20, 20, 20, 16, 12, 8, 4, 7, 10, 10)]
    sampler, drawn, due = mix(points), 0, Fraction(0)
    for share in line:
        assert sampler.ratio == pytest.approx([float(share), float(1 - share)])
        drawn, due = drawn + counts(sampler, 33)[0], due + 33 * share
        assert abs(drawn - due) <= HALF
    assert sampler.ratio_step == len(line)


def halves(step: int) -> list[Fraction]:
    return [Fraction(1, 2 + step), 1 - Fraction(1, 2 + step)]


def test_a_function_is_called_with_the_number_of_batches_drawn_before_or_of_calls_of_step():
    sampler = mix(halves)
    assert [counts(sampler, 12)[0] for _ in range(3)] == [6, 4, 3]
    for wrong, error in (([0.5], OptionError), (None, KindError), (1.5, OptionError)):
        with pytest.raises(error, match="at step 0"):
            mix(lambda _, wrong=wrong: wrong).plan(4, [1, 1], None)
    sampler = mix({0: 1.0, 10: 0.0}, ratio_steps="calls")
    assert counts(sampler, 10) == counts(sampler, 10) == [10, 0]
    sampler.step()
    assert counts(sampler, 10) == [9, 1]
    sampler.step(4)
    assert sampler.ratio_step == 5
    assert counts(sampler, 10) == [5, 5]
    with pytest.raises(OptionError):
        sampler.step(-1)
    with pytest.raises(UsageError, match="ratio_steps"):
        mix(0.5).step()


def test_nearest_rounds_each_batch_on_its_own():
    sampler = mix(0.3, rounding="nearest")
    assert [counts(sampler, 5)[0] for _ in range(4)] == [2, 2, 2, 2]
    assert "rounding='nearest'" in repr(sampler)


def test_small_members_wait_for_min_rows_and_fill_takes_any_member():
    sampler = mix(0.5, min_rows=[1, 8], when_empty="fill")
    assert counts(sampler, 10, [3, 7]) == [10, 0]
    assert counts(sampler, 10, [3, 8]) == [5, 5]
    assert "min_rows=[1, 8]" in repr(sampler)
    with pytest.raises(EmptyBufferError, match=r"members \[1\]"):
        mix(0.5, min_rows=8, when_empty="raise").plan(10, [8, 7], None)
    assert counts(mix(0.0, when_empty="fill"), 4, [3, 0]) == [4, 0]
    with pytest.raises(EmptyBufferError):
        mix(0.0).plan(4, [3, 0], None)
    with pytest.raises(EmptyBufferError):
        mix(0.0, when_empty="fill").plan(4, [0, 0], None)


def test_a_schedule_of_ever_new_shares_keeps_the_carry_small():
    sampler, drawn, due = mix(lambda step: [step + 1, 7919]), 0, 0.0
    for step in range(1000):
        drawn += counts(sampler, 33)[0]
        due += 33 * (step + 1) / (step + 7920)
    assert abs(drawn - due) < 0.51
    assert max(map(abs, after(sampler)["carry"])) < 0.51


def test_the_ratio_may_be_set_at_any_time():
    sampler, plain = mix(0.5), SamplerEnsemble(RandomSampler())
    sampler.share = 0.25
    assert counts(sampler, 8) == [2, 6]
    sampler.ratio = [3, 1]
    assert sampler.share == 0.75
    assert plain.share is None
    with pytest.raises(OptionError):
        sampler.p = [1, 1]
    with pytest.raises(UsageError, match="ratio="):
        plain.ratio = 0.5


def test_refused_options():
    refuses(
        {
            OptionError: {
                r"in \[0, 1\]": lambda: mix(1.5),
                "not all 0": lambda: mix([0, 0]),
                "at least 0": lambda: mix([1, -1]),
                "each of the 2 members": lambda: mix([1, 1, 1]),
                "empty mapping": lambda: mix({}),
                "steps": lambda: mix({-1: 0.5}),
                "rounding": lambda: mix(0.5, rounding="up"),
                "ratio_steps": lambda: mix(0.5, ratio_steps="days"),
                "min_rows": lambda: mix(0.5, min_rows=0),
                "give ratio=": lambda: mix(None, rounding="nearest"),
            },
            KindError: {
                "'half'": lambda: mix("half"),
                "True": lambda: mix(True),
                "got <object": lambda: mix(object()),
                "min_rows": lambda: mix(0.5, min_rows=1.5),
            },
            UsageError: {
                "one or the other": lambda: mix(0.5, num_buffer_sampled=4),
            },
        }
    )


DAMAGED: list[Any] = [
    ({"rounding": "nearest"}, "rounding"),
    ({"ratio_steps": "calls"}, "ratio_steps"),
    ({"shares": "function"}, "functions are not saved"),
    ({"shares": [[0, [0.5, 0.25]]]}, "damaged"),
    ({"step": -1}, "steps"),
    ({"carry": [0.5, 0.0]}, "damaged"),
    ({"shares": [[0, ["x", 0.5]]]}, "do not fit"),
]


def test_states_of_others_are_refused_and_change_nothing():
    sampler = mix(0.3)
    counts(sampler, 5)
    before = after(sampler)
    for change, words in DAMAGED:
        with pytest.raises(CheckpointError, match=words):
            sampler.load_state_dict({**before, **change})
        assert after(sampler) == before
    with pytest.raises(CheckpointError):
        sampler.load_state_dict(SamplerEnsemble(RandomSampler(), RandomSampler()).state_dict())
