"""Figures are plain data, written as PNG files of the requested size, without a display or the state of pyplot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ostinato.errors import OptionError
from ostinato.viz import Bars, Curves, FigureSpec, Level, Line, Mark, Points, Stack, draw

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("matplotlib")


X = tuple(float(i) for i in range(10))


def scene() -> FigureSpec:
    """One panel of each kind."""
    lines = (Line("a", X, X), Line("b", X, X, "second", "beads"), Line("c", X, X, "quiet", "dots"))
    curves = Curves("return", "step", "return", lines, (Level(5.0, "half"),), (Mark(9.0, 9.0, "end"),), (0.0, 10.0))
    points = Points("where", "x", "y", "age", X, X, X, (Level(3.0, "end", "x"), Level(4.0)))
    bars = Bars("ages", "age", "rows", (*X, 10.0), (Stack("low", X), Stack("high", X, "third")))
    return FigureSpec("A title", "and a subtitle", ((curves,), (points, bars)))


def size_of(png: Path) -> tuple[int, int]:
    """Width and height in the header of a PNG file."""
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_the_file_is_a_png_of_the_size_that_is_asked_for(tmp_path):
    path = draw(scene(), tmp_path / "out.png", size=(800, 600))
    assert path == tmp_path / "out.png"
    assert size_of(path) == (800, 600)
    first = path.read_bytes()
    assert draw(scene(), str(path), size=(800, 600)).read_bytes() == first, "drawing is deterministic, and replaces"
    other = FigureSpec("A title", "and a subtitle", scene().rows[:1])
    assert draw(other, path).read_bytes() != first
    assert size_of(path) == (1600, 1000)
    for name, size in (("out.pdf", (800, 600)), ("out", (800, 600)), ("out.png", (100, 600))):
        with pytest.raises(OptionError, match=r"end in \.png|at least 200 x 200"):
            draw(scene(), tmp_path / name, size=size)
    with pytest.raises(OptionError, match="'a' must have series of equal length, got 2 and 1"):
        Line("a", (1.0, 2.0), (1.0,))
    with pytest.raises(OptionError, match="each row must have a panel"):
        FigureSpec("nothing", "", ((),))
