"""A drawing area in units of a sixteenth of the width, with text that is readable on a phone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from paint import EPISODES, FAINT, INK, save

if TYPE_CHECKING:
    from pathlib import Path

BLUE, LIGHT_BLUE = EPISODES[1]
ORANGE, LIGHT_ORANGE = EPISODES[2]
GREEN, LIGHT_GREEN = EPISODES[3]
LINE = "#9AA5B1"
WIDTH = 16


class Card:
    """A white card, `WIDTH` units wide; y points downwards, as lines of text do.

    Args:
        height: Height in units.
    """

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(5.8, 5.8 * height / WIDTH), dpi=165, facecolor="white")
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(height, 0)

    def text(self, x: float, y: float, words: str, color: str = INK, size: float = 11, **options: Any) -> None:
        """Write centred text; `ha="left"` begins it at x."""
        options = {"ha": "center", "va": "center"} | options
        self.axes.text(x, y, words, color=color, fontsize=size, zorder=5, **options)

    def box(
        self, x: float, y: float, width: float, height: float, face: str = "white", edge: str = LINE,
        words: str = "", ink: str = INK, *, dashed: bool = False, size: float = 11, bold: bool = False, lw: float = 1.2,
    ) -> None:  # fmt: skip
        """Draw a rounded box with its upper left corner at (x, y), and text in its middle."""
        self.axes.add_patch(
            FancyBboxPatch(
                (x + 0.05, y + 0.05), width - 0.1, height - 0.1, boxstyle="round,pad=0,rounding_size=0.14",
                facecolor=face, edgecolor=edge, lw=lw, linestyle=(0, (3, 2)) if dashed else "-", zorder=2,
            )
        )  # fmt: skip
        if words:
            weight = "bold" if bold else "normal"
            self.text(x + width / 2, y + height / 2, words, ink, size, fontweight=weight, linespacing=1.35)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], color: str = INK, bend: float = 0, lw: float = 1.6
    ) -> None:
        """Draw an arrow; `bend` is the curvature."""
        style = {"arrowstyle": "-|>", "color": color, "lw": lw, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 13}
        style["connectionstyle"] = f"arc3,rad={bend}"
        self.axes.annotate("", end, start, arrowprops=style, zorder=4)

    def line(self, xs: list[float], ys: list[float], color: str = LINE, lw: float = 1.2, zorder: int = 1) -> None:
        """Draw a polyline; boxes have the zorder 2."""
        self.axes.plot(xs, ys, color=color, lw=lw, zorder=zorder, solid_capstyle="round")

    def save(self, path: Path) -> Path:
        """Write the card as a PNG."""
        with mpl.rc_context({"font.family": "DejaVu Sans"}):
            return save(self.figure, path)


__all__ = [
    "BLUE",
    "FAINT",
    "GREEN",
    "INK",
    "LIGHT_BLUE",
    "LIGHT_GREEN",
    "LIGHT_ORANGE",
    "LINE",
    "ORANGE",
    "WIDTH",
    "Card",
]
