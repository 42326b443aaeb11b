"""The arithmetic of rate limiters, against the definition in fractions, one row at a time."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import RateLimiter
from ostinato.buffers.rate_limit import Flow, Stock
from ostinato.errors import OptionError

RATIOS = st.one_of(st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 3.7, 8.0]), st.floats(0.01, 50.0))


@st.composite
def limiters(draw: st.DrawFn) -> RateLimiter:
    ratio = draw(RATIOS)
    error = max(1.0, ratio) * draw(st.floats(1.0, 20.0))
    return RateLimiter(ratio, error, draw(st.integers(1, 30)))


def model_may_write(limiter: RateLimiter, written: int, drawn: int, size: int, rows: int) -> bool:
    ratio, error = Fraction(limiter.samples_per_insert or 0), Fraction(limiter.error_buffer or 0)
    if size < limiter.min_size_to_sample:
        return True
    return (written + rows) * ratio - drawn <= ratio * limiter.min_size_to_sample + error


def model_may_draw(limiter: RateLimiter, written: int, drawn: int, size: int, rows: int) -> bool:
    ratio, error = Fraction(limiter.samples_per_insert or 0), Fraction(limiter.error_buffer or 0)
    if size < limiter.min_size_to_sample:
        return False
    return written * ratio - (drawn + rows) >= ratio * limiter.min_size_to_sample - error


@given(limiters(), st.integers(0, 500), st.integers(0, 5000), st.integers(0, 60), st.integers(1, 40))
def test_verdicts_are_those_of_the_definition(
    limiter: RateLimiter, written: int, drawn: int, size: int, rows: int
) -> None:
    flow, stock = Flow(limiter), Stock(size)
    flow.wrote(written)
    flow.drew(drawn)
    assert flow.may_write(rows, stock) == model_may_write(limiter, written, drawn, size, rows)
    assert flow.may_draw(rows, stock) == model_may_draw(limiter, written, drawn, size, rows)


@given(limiters(), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=80))
def test_admitted_calls_keep_the_balance_in_its_band(limiter: RateLimiter, calls: list[tuple[bool, int]]) -> None:
    flow, (low, high) = Flow(limiter), limiter.band
    slack = 1e-6 * (1 + abs(low) + abs(high))
    for writes, rows in calls:
        stock = Stock(flow.written)
        filling = stock.rows < limiter.min_size_to_sample
        if writes and flow.may_write(rows, stock):
            flow.wrote(rows)
            assert filling or (limiter.samples_per_insert or 0) * flow.written - flow.drawn <= high + slack
        elif not writes and flow.may_draw(rows, stock):
            flow.drew(rows)
            assert not filling
            assert (limiter.samples_per_insert or 0) * flow.written - flow.drawn >= low - slack


@given(RATIOS, st.integers(1, 20), st.integers(1, 20), st.integers(1, 30), st.randoms(use_true_random=False))
def test_wide_enough_bands_never_stop_both_sides(ratio: float, write: int, draw: int, least: int, dice: object) -> None:
    error = max((write * ratio + draw) / 2, 1.0, ratio) * (1 + 1e-9)
    flow = Flow(RateLimiter(ratio, error, least))
    for _ in range(60):
        stock = Stock(flow.written)
        may = [flow.may_write(write, stock), flow.may_draw(draw, stock)]
        assert any(may)
        if may[0] and (not may[1] or dice.random() < 0.5):  # type: ignore[attr-defined]
            flow.wrote(write)
        else:
            flow.drew(draw)


@given(limiters(), st.integers(30, 500), st.integers(0, 5000), st.integers(1, 40))
def test_what_is_said_to_be_missing_is_just_enough(limiter: RateLimiter, written: int, drawn: int, rows: int) -> None:
    flow, stock = Flow(limiter), Stock(60)
    flow.wrote(written)
    flow.drew(drawn)
    if not flow.may_draw(rows, stock):
        more = int(flow.why_no_draw(rows, stock).split()[0])
        flow.wrote(more - 1)
        assert not flow.may_draw(rows, stock)
        flow.wrote(1)
        assert flow.may_draw(rows, stock)
    elif not flow.may_write(rows, stock):
        more = int(flow.why_no_write(rows, stock).split()[0])
        flow.drew(more - 1)
        assert not flow.may_write(rows, stock)
        flow.drew(1)
        assert flow.may_write(rows, stock)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_without_a_ratio_only_stock_counts(rows: int, other: int, least: int) -> None:
    flow = Flow(RateLimiter(min_size_to_sample=least))
    assert flow.may_write(5, Stock(rows))
    assert flow.may_write(5, Stock(rows, None, other)) == (other >= 5)
    assert flow.may_draw(5, Stock(rows)) == (rows >= least)
    assert flow.may_draw(5, Stock(rows, other)) == (rows >= least and other >= 5)


def test_calls_that_could_never_go_ahead_are_refused() -> None:
    flow = Flow(RateLimiter(2.0, 10.0, 5))
    flow.check_write(10, None)
    flow.check_draw(20, None)
    with pytest.raises(OptionError, match=r"a write of 11 rows .* by 2 each, more than the band \[0, 20\] is wide"):
        flow.check_write(11, None)
    with pytest.raises(OptionError, match="a batch of 21 rows moves the balance by 1 each"):
        flow.check_draw(21, None)
    with pytest.raises(OptionError, match="never fits into a queue of 8"):
        flow.check_write(9, 8)
    with pytest.raises(OptionError, match="a full buffer is good for 16 draws"):
        flow.check_draw(17, 16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples_per_insert": 1.0}, "go together"),
        ({"error_buffer": 1.0}, "go together"),
        ({"samples_per_insert": 0.0, "error_buffer": 1.0}, "samples_per_insert must be a finite number above 0"),
        ({"samples_per_insert": 1.0, "error_buffer": math.inf}, "error_buffer must be a finite number"),
        ({"samples_per_insert": 8.0, "error_buffer": 7.0}, r"at least max\(1, samples_per_insert\) = 8"),
        ({"samples_per_insert": True, "error_buffer": 7.0}, "got True"),
        ({"min_size_to_sample": 0}, "min_size_to_sample must be an integer of at least 1"),
        ({"min_size_to_sample": 2.5}, "got 2.5"),
        ({"timeout_s": -1}, "timeout_s must be a number of seconds"),
        ({"timeout_s": math.nan}, "timeout_s must be a number of seconds"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        RateLimiter(**options)  # type: ignore[arg-type]


def test_counts_come_back_under_the_same_rules_only() -> None:
    flow = Flow(RateLimiter(2.0, 10.0, 5, timeout_s=1.0))
    flow.wrote(9)
    flow.drew(7)
    state = flow.state_dict()
    same = Flow(RateLimiter(2.0, 10.0, 5, timeout_s=9.0))
    assert same.load_state_dict(state, 9) is None
    assert (same.written, same.drawn) == (9, 7)
    other = Flow(RateLimiter(4.0, 10.0, 5))
    assert other.load_state_dict(state, 9) == "samples_per_insert=2.0 (now 4.0)"
    low, high = other.limiter.band
    assert 4.0 * other.written - other.drawn == (low + high) / 2
    assert other.load_state_dict(None, 3) is None
    assert (other.written, other.drawn) == (3, 0)
