"""A drawing area in units of a sixteenth of the width, with text that is readable on a phone."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

INK, FAINT, LINE, GRID = "#1F2933", "#52606D", "#9AA5B1", "#E4E7EB"
BLUE, LIGHT_BLUE = "#0072B2", "#DCEBF5"
ORANGE, LIGHT_ORANGE = "#B36B00", "#FBEBD0"
GREEN, LIGHT_GREEN = "#00795C", "#D6EFE6"
WIDTH = 16
INCHES, DPI = 5.8, 165
"""Width and resolution of every picture: a letter of 10 points has 9 pixels on a phone of 390."""


class Card:
    """A white card; y points downwards, as lines of text do.

    Args:
        height: Height in units.
        width: Width in units.
    """

    def __init__(self, height: float, width: float = WIDTH) -> None:
        self.figure = Figure(figsize=(INCHES, INCHES * height / width), dpi=DPI, facecolor="white")
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, width)
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


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG with a palette of 64 colours, a fifth of the size of one without."""
    drawn = BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    return path
