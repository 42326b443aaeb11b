"""Figures are plain data; invalid ones raise."""

from __future__ import annotations

import pytest

from ostinato.errors import OptionError
from ostinato.viz import Bars, FigureSpec, Line, Points, Stack
from ostinato.viz.figures import thin


def test_a_line_has_as_many_x_as_y() -> None:
    with pytest.raises(OptionError, match="'return' must have series of equal length, got 2 and 1"):
        Line("return", (1.0, 2.0), (1.0,))


def test_points_have_a_value_each() -> None:
    with pytest.raises(OptionError, match="got 1 and 2"):
        Points("where", "x", "y", "age", (0.0,), (0.0,), (1.0, 2.0))


def test_bars_have_one_edge_more_than_counts() -> None:
    Bars("ages", "age", "rows", (0.0, 1.0, 2.0), (Stack("rows", (3.0, 4.0)),))
    with pytest.raises(OptionError, match="got 2 and 3"):
        Bars("ages", "age", "rows", (0.0, 1.0, 2.0), (Stack("rows", (3.0, 4.0, 5.0)),))


@pytest.mark.parametrize("rows", [(), ((),)])
def test_an_empty_figure_raises(rows: tuple[()]) -> None:
    with pytest.raises(OptionError, match="each must have a panel"):
        FigureSpec("nothing", "", rows)


@pytest.mark.parametrize(("count", "most"), [(0, 5), (3, 5), (5, 5), (6, 5), (1000, 7)])
def test_thin_keeps_at_most_so_many(count: int, most: int) -> None:
    kept = list(thin(count, most))
    assert len(kept) == (count if count <= most else min(len(kept), most))
    assert kept[:1] == ([0] if count else [])
    assert all(0 <= i < count for i in kept)
