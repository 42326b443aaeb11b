"""Ratios and bands of a rate limiter: exact verdicts, Reverb's forms, saved counts."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import RateLimiter
from ostinato.buffers.rate_limit import Flow, Stock
from ostinato.errors import OptionError

from .refusals import refuses

INF = math.inf


# -- the forms of Reverb ----------------------------------------------------------------------------------------------


MOST = sys.float_info.max
EDGES: list[Any] = [
    # Queue and Stack
    (1, 1, 0.0, 5),
    (1, 1, 0, 1),
    # the base class
    (2.0, 2, -INF, 7),
    (0.3, 3, -2, INF),
    (2.0, 2, -MOST, MOST),
]
FORMS: list[Any] = [
    (RateLimiter(1 / 3, 1, 3), (Fraction(1, 3), 3, 0, 2)),
    # the class MinSize
    (RateLimiter(min_size_to_sample=4), (1, 4, -INF, INF)),
    # SampleToInsertRatio with a number, and with a pair
    (RateLimiter(1.5, 5, 6), (1.5, 6, 4, 14)),
    (RateLimiter(0.5, (-3.5, 8), 6), (0.5, 6, -3.5, 8)),
    *((RateLimiter(edge[0], min_diff=edge[2], max_diff=edge[3], min_size_to_sample=edge[1]), edge) for edge in EDGES),
]
"""Limiters, and ratio, least rows and band of the limiter of Reverb's tables."""


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_forms_of_reverb_give_its_verdicts(form):
    """As its paper states them, for rows that are written one by one."""
    limiter, (ratio, least, low, high) = FORMS[form]
    for written, drawn in product(range(12), range(30)):
        flow, stock = Flow(limiter), Stock(written)
        flow.wrote(written)
        flow.drew(drawn)
        balance = written * Fraction(str(ratio)) - drawn
        assert flow.may_write(1, stock) == (written < least or balance + Fraction(str(ratio)) <= high)
        assert (flow.write_room() >= 1) == (balance + Fraction(str(ratio)) <= high)
        able = [size for size in (1, 2, 3, 4) if written >= least and balance - size >= low]
        assert [size for size in (1, 2, 3, 4) if flow.may_draw(size, stock)] == able
        assert flow.most_draws(4, stock) == max(able, default=0)


def test_edges_and_error_buffer_are_one_limiter_in_two_spellings():
    one, other = RateLimiter(2, 10, 5), RateLimiter(2.0, min_diff=0, max_diff=20, min_size_to_sample=5)
    assert one.band == other.band == (0.0, 20.0)
    assert one.rules() == other.rules()
    assert RateLimiter(2, (0, 20), 5).rules() == one.rules()
    sevenths = RateLimiter(0.7, min_diff=-INF, max_diff=22 / 7, min_size_to_sample=2)
    assert Flow(sevenths).load_state_dict(Flow(sevenths).state_dict(), 0) is None
    flow = Flow(one)
    flow.wrote(9)
    flow.drew(3)
    again = Flow(other)
    assert again.load_state_dict(flow.state_dict(), 9) is None
    assert (again.written, again.drawn) == (9, 3)


def test_bands_that_are_none_are_refused():
    refuses(
        {
            OptionError: {
                "goes together": (
                    lambda: RateLimiter(min_diff=0, max_diff=4),
                    lambda: RateLimiter(1, error_buffer=3, min_diff=0, max_diff=4),
                    lambda: RateLimiter(1),
                ),
                r"goes together .* got 1, None and \(0, None\)": lambda: RateLimiter(1, min_diff=0),
                "min_diff must be below max_diff, got 4 and 4": lambda: RateLimiter(1, min_diff=4, max_diff=4),
                "min_diff must be a number, finite or -inf": lambda: RateLimiter(1, min_diff=INF, max_diff=INF),
                "max_diff must be a number, finite or inf": lambda: RateLimiter(1, min_diff=0, max_diff=-INF),
                r"must be at least 2 \* max\(1, samples_per_insert\) = 4": lambda: RateLimiter(2, (0, 3)),
                "is above samples_per_insert": lambda: RateLimiter(1, (2, 9)),
                "error_buffer must be a number or a pair": lambda: RateLimiter(1, (2, 9, 4)),  # type: ignore[arg-type]
                "samples_per_insert must be a finite number above 0": (
                    lambda: RateLimiter(torch.tensor(0.3), 3),  # type: ignore[arg-type]
                    lambda: RateLimiter(True, 3),
                    lambda: RateLimiter(0.0, 3),
                ),
                "error_buffer must be a finite number": lambda: RateLimiter(1, INF),
                r"at least max\(1, samples_per_insert\) = 8": lambda: RateLimiter(8, 7),
                "min_size_to_sample must be a positive integer": lambda: RateLimiter(min_size_to_sample=0),
                "timeout_s must be a number of seconds": lambda: RateLimiter(timeout_s=-1),
            },
        }
    )


@given(
    st.fractions(Fraction(1, 8), 6, max_denominator=8),
    st.fractions(-4, 4, max_denominator=4),
    st.fractions(0, 6, max_denominator=4),
)
def test_refused_bands_are_those_that_stop_both_sides(ratio, low, wide):
    high = low + wide
    stuck = any(
        balance + ratio > high and balance - 1 < low
        for balance in (Fraction(i, ratio.denominator) for i in range(-200 * ratio.denominator, 200))
    )
    try:
        RateLimiter(float(ratio), min_diff=float(low), max_diff=float(high))
    except OptionError:
        assert stuck or low >= high
    else:
        assert not stuck
