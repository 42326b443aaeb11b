"""Statistics of pieces equal the statistics of all values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.tools.inspect import RunningStatistics


def tally(*pieces: torch.Tensor) -> RunningStatistics:
    """Show all pieces to a new tally."""
    made = RunningStatistics()
    for piece in pieces:
        made.update(piece)
    return made


@given(
    st.lists(st.floats(width=32, allow_infinity=False, min_value=-1e6, max_value=1e6) | st.just(math.nan), max_size=40),
    st.integers(1, 40),
)
def test_pieces_equal_the_whole(values, size):
    numbers = torch.tensor(values, dtype=torch.float32)
    seen = tally(*torch.split(numbers, size)) if values else tally()
    real = [v for v in values if not math.isnan(v)]
    assert seen.nan_count == len(values) - len(real)
    assert seen.count == len(real)
    assert (seen.minimum, seen.maximum) == ((min(real), max(real)) if real else (None, None))
    assert seen.mean == (pytest.approx(math.fsum(real) / len(real), abs=1e-6) if real else None)


def test_values_at_the_bounds():
    seen = tally(torch.tensor([2**62 + 1, -(2**62) - 1]))
    assert (seen.minimum, seen.maximum) == (-(2**62) - 1, 2**62 + 1), "exact"
    assert tally(torch.tensor([0, 2**63], dtype=torch.uint64)).maximum == 2.0**63
    both = tally(torch.tensor([-math.inf, math.inf]))
    assert (both.minimum, both.maximum, both.mean) == (-math.inf, math.inf, None)
