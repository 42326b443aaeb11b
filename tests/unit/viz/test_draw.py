"""Figures are written as PNG files of the requested size, without a display or the global state of pyplot."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ostinato.errors import OptionError
from ostinato.viz import Bars, Curves, FigureSpec, Level, Line, Mark, Points, Stack, draw

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("matplotlib")


def scene() -> FigureSpec:
    """One panel of each kind."""
    x = tuple(float(i) for i in range(10))
    curves = Curves(
        "return",
        "step",
        "return",
        (Line("a", x, x), Line("b", x, x, "second", "beads"), Line("c", x, x, "quiet", "dots")),
        (Level(5.0, "half"),),
        (Mark(9.0, 9.0, "end"),),
        (0.0, 10.0),
    )
    points = Points("where", "x", "y", "age", x, x, x, (Level(3.0, "end", "x"), Level(4.0)))
    bars = Bars("ages", "age", "rows", (*x, 10.0), (Stack("low", x), Stack("high", x, "third")))
    return FigureSpec("A title", "and a subtitle", ((curves,), (points, bars)))


def size_of(png: Path) -> tuple[int, int]:
    """Width and height in the header of a PNG file."""
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


@pytest.mark.parametrize("size", [(1600, 1000), (800, 600)])
def test_the_file_is_a_png_of_that_size(size: tuple[int, int], tmp_path: Path) -> None:
    path = draw(scene(), tmp_path / "out.png", size=size)
    assert path == tmp_path / "out.png"
    assert size_of(path) == size
    assert path.stat().st_size > 10_000


def test_drawing_is_deterministic_and_replaces(tmp_path: Path) -> None:
    first = draw(scene(), tmp_path / "out.png").read_bytes()
    assert draw(scene(), str(tmp_path / "out.png")).read_bytes() == first


def test_data_change_the_picture(tmp_path: Path) -> None:
    other = FigureSpec("A title", "and a subtitle", scene().rows[:1])
    assert draw(scene(), tmp_path / "a.png").read_bytes() != draw(other, tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(("name", "size"), [("out.pdf", (800, 600)), ("out", (800, 600)), ("out.png", (100, 600))])
def test_wrong_paths_and_sizes_raise(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"end in \.png and size must be at least 200 x 200"):
        draw(scene(), tmp_path / name, size=size)


def test_pyplot_and_its_state_are_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys, ostinato, ostinato.viz as viz\n"
        "assert 'matplotlib' not in sys.modules\n"
        "line = viz.Line('a', (0.0, 1.0), (0.0, 1.0))\n"
        "scene = viz.FigureSpec('t', 's', ((viz.Curves('c', 'x', 'y', (line,)),),))\n"
        "viz.draw(scene, sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import matplotlib; assert matplotlib.rcParams['font.size'] == matplotlib.rcParamsDefault['font.size']\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "out.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
