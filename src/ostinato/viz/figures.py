"""Figures as plain data, and `draw`, which renders them as PNG files with matplotlib."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ostinato._optional import require
from ostinato.durable.files import atomic_write
from ostinato.errors import OptionError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy as np

__all__ = [
    "FAINT",
    "GRID",
    "INK",
    "LINES",
    "STYLE",
    "Bars",
    "Curves",
    "FigureSpec",
    "Film",
    "Layer",
    "Level",
    "Line",
    "Mark",
    "Note",
    "Panel",
    "Points",
    "Shares",
    "Stack",
    "draw",
    "format_number",
    "new_figure",
    "output_path",
    "save",
    "size_of",
    "thin",
]

Layer: TypeAlias = Literal["first", "second", "third", "quiet", "error", "warning", "note"] | int
"""Colour of a series: three that are easy to distinguish, a muted one for the background, those of findings; or, for
the components of a vector, a number: its position in `LINES`, modulo their number."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a line chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    layer: Layer = "first"
    style: Literal["line", "dots", "beads", "wide"] = "line"
    """A line; dots without a line; a line with a marker at each value; or a wide line. NaN interrupts a line."""

    def __post_init__(self) -> None:
        """Check the lengths."""
        _same_length(self.label, self.x, self.y)


@dataclass(frozen=True, slots=True)
class Level:
    """A thin line across the panel at one value."""

    value: float
    label: str = ""
    axis: Literal["x", "y"] = "y"
    """The axis of the value."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One highlighted point."""

    x: float
    y: float
    label: str
    symbol: str = "*"
    """Marker of matplotlib."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over a common axis."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    marks: tuple[Mark, ...] = ()
    y_range: tuple[float, float] | None = None
    log_above: float | None = None
    """The value above which the axis of y is logarithmic: 0 for all values, None for a linear axis."""


@dataclass(frozen=True, slots=True)
class Points:
    """A scatter plot, coloured by a third value."""

    title: str
    x_label: str
    y_label: str
    value_label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    value: tuple[float, ...]
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        """Check the lengths."""
        _same_length(self.title, self.x, self.y)
        _same_length(self.title, self.x, self.value)


@dataclass(frozen=True, slots=True)
class Stack:
    """One layer of stacked bars: a count for each bar."""

    label: str
    counts: tuple[float, ...]
    layer: Layer = "first"


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram of stacked layers."""

    title: str
    x_label: str
    y_label: str
    edges: tuple[float, ...]
    """Edges of the bars: one more than there are counts."""
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        """Check the lengths."""
        for stack in self.stacks:
            _same_length(stack.label, self.edges[1:], stack.counts)


@dataclass(frozen=True, slots=True)
class Shares:
    """Horizontal bars, one for each name, from top to bottom."""

    title: str
    x_label: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    notes: tuple[str, ...]
    """Text at the end of each bar."""
    y_label: str = ""
    """Empty: the names label the axis."""

    def __post_init__(self) -> None:
        """Check the lengths."""
        _same_length(self.title, self.names, self.values)
        _same_length(self.title, self.names, self.notes)


@dataclass(frozen=True, slots=True)
class Film:
    """Pictures side by side."""

    title: str
    pictures: tuple[np.ndarray, ...]
    """uint8 `[H, W, 3]` each."""
    notes: tuple[str, ...]
    """Text above each picture."""
    x_label: str = ""
    y_label: str = ""

    def __post_init__(self) -> None:
        """Check the lengths."""
        _same_length(self.title, self.pictures, self.notes)


Panel: TypeAlias = Curves | Points | Bars | Shares | Film


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text under the title, with a square in the colour of its layer."""

    text: str
    layer: Layer = "note"


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """The content of a figure: rows of panels; the panels of a row are side by side."""

    title: str
    subtitle: str
    rows: tuple[tuple[Panel, ...], ...]
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        """Check that there is at least one panel in each row."""
        if not all(self.rows):
            msg = f"each row must have a panel, got {[len(row) for row in self.rows]} panels"
            raise OptionError(msg)


def size_of(spec: FigureSpec) -> tuple[int, int]:
    """Return the width and height in pixels for rows of equal height."""
    return 1600, max(200, 150 + 30 * len(spec.notes) + 300 * len(spec.rows))


def format_number(value: float) -> str:
    """Format a number with four significant digits; from 1,000 on, without a fraction."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thin(count: int, most: int) -> range:
    """Return at most `most` of the positions `[0, count)`, evenly spaced, with the first."""
    return range(0, count, max(1, math.ceil(count / most)))


def _same_length(name: str, first: Sequence[object], second: Sequence[object]) -> None:
    if len(first) != len(second):
        msg = f"{name!r} must have series of equal length, got {len(first)} and {len(second)}"
        raise OptionError(msg)


_COLOURS: dict[str | int, str] = {
    "first": "#0072B2",
    "second": "#E69F00",
    "third": "#56B4E9",
    "quiet": "#8A97A6",
    "error": "#C62828",
    "warning": "#D98E00",
    "note": "#52606D",
}
"""The first ones are of the palette of Okabe and Ito, which is safe for colour-blind readers."""
INK = "#1F2933"
FAINT = "#52606D"
GRID = "#E4E7EB"
_DPI = 130.0
_MAP = "viridis"
_LEGEND_ROWS = 7
"""Entries of a legend below each other."""
_FEW = 100
"""Points up to which dots are larger."""
_FINE = 400
"""Points from which the lines of the components of a vector are thinner."""
_FILM_HEIGHT = 0.75
"""Height of a row of pictures; other rows have 1."""
LINES = (
    "#0072B2", "#D98E00", "#009E73", "#C2649A", "#3C9FD6", "#D55E00",
    "#8A97A6", "#6A5ACD", "#A397C9", "#2E8B57", "#A6761D", "#777777",
)  # fmt: skip
"""Colours for the components of a vector, readable on white and on black."""
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": "#CBD2D9",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#CBD2D9",
    "ytick.color": "#CBD2D9",
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def _colour(layer: Layer) -> str:
    return LINES[layer % len(LINES)] if isinstance(layer, int) else _COLOURS[layer]


def output_path(path: str | os.PathLike[str], suffix: str = ".png") -> Path:
    """Return the path of a file to write.

    Raises:
        OptionError: The path does not end in `suffix`, or its directory does not exist.
    """
    target = Path(path)
    if target.suffix.lower() != suffix or not target.absolute().parent.is_dir():
        msg = f"the path must end in {suffix}, in an existing directory, got {target}"
        raise OptionError(msg)
    return target


def draw(spec: FigureSpec, path: str | os.PathLike[str], *, size: tuple[int, int] = (1600, 1000)) -> Path:
    """Render a figure as a PNG file with the Agg backend; needs no display and leaves pyplot alone.

    Args:
        spec: The figure.
        path: The file to write, which is replaced if it exists; must end in `.png`.
        size: Width and height in pixels.

    Returns:
        The path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: The path is not one of a PNG file in an existing directory, or the size is below 200 pixels.
    """
    target = output_path(path)
    if min(size) < 200:
        msg = f"size must be at least 200 x 200 pixels, got {size}"
        raise OptionError(msg)
    with require("matplotlib", "viz").rc_context(STYLE):
        figure = new_figure((size[0] / _DPI, size[1] / _DPI), _DPI, layout="constrained")
        _compose(figure, spec)
        return save(figure, target, _DPI)


def new_figure(size: tuple[float, float], dpi: float, **options: Any) -> Any:
    """Return a figure of matplotlib that needs no display; the size is in inches."""
    figure = require("matplotlib.figure", "viz").Figure(figsize=size, dpi=dpi, **options)
    require("matplotlib.backends.backend_agg", "viz").FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | os.PathLike[str], dpi: float) -> Path:
    """Write a figure as a PNG file. The file is replaced atomically, so viewers never read a partial file.

    Raises:
        OptionError: The path does not end in `.png`.
    """
    target = output_path(path)
    memory = io.BytesIO()
    figure.savefig(memory, dpi=dpi, format="png")
    atomic_write(target, memory.getvalue())
    return target


def _compose(figure: Any, spec: FigureSpec) -> None:
    """Place titles and panels."""
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.04, hspace=0.02)
    height = 0.7 + 0.23 * (len(spec.notes) + bool(spec.notes))  # of the head, in inches
    head, body = figure.subfigures(2, 1, height_ratios=(height, max(figure.get_figheight() - height, 0.1)))
    room = figure.get_figwidth() * 72 * 0.97

    def write(text: str, x: float, y: float, size: float, **more: Any) -> None:
        head.text(x, 1 - y / height, text, fontsize=size, va="center", parse_math=False, **more)

    for y, text, size, more in (
        (0.27, spec.title, 16, {"fontweight": "bold"}),
        (0.64, spec.subtitle, 10.5, {"color": FAINT}),
    ):
        write(text, 0.012, y, min(size, room / (0.68 * max(len(text), 1))), **more)  # a character is 0.68 sizes wide
    for place, note in enumerate(spec.notes):
        write("\N{BLACK SQUARE}", 0.012, 0.88 + 0.23 * place, 10, color=_colour(note.layer))
        write(note.text, 0.026, 0.88 + 0.23 * place, 8.6, color=INK)
    if not spec.rows:
        return
    heights = [_FILM_HEIGHT if all(isinstance(panel, Film) for panel in panels) else 1.0 for panels in spec.rows]
    strips = body.subfigures(len(spec.rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for strip, panels in zip(strips, spec.rows, strict=True):
        for axes, panel in zip(strip.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _panel(axes, panel)


def _panel(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_tick_params(length=0)
    if isinstance(panel, Curves):
        _curves(axes, panel)
    elif isinstance(panel, Points):
        _points(axes, panel)
    elif isinstance(panel, Shares):
        _shares(axes, panel)
    elif isinstance(panel, Film):
        _film(axes, panel)
    else:
        _bars(axes, panel)


def _curves(axes: Any, panel: Curves) -> None:
    for level in panel.levels:
        _level(axes, level)
    for line in panel.lines:
        _line(axes, line)
    for mark in panel.marks:
        style = {"ms": 17 if mark.symbol == "*" else 11, "color": INK, "mec": "white", "mew": 1.2, "zorder": 6}
        axes.plot([mark.x], [mark.y], mark.symbol, label=mark.label, clip_on=False, **style)
    axes.margins(x=0.01)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    whole = all(math.isnan(x) or float(x).is_integer() for line in panel.lines for x in line.x)
    low, high = axes.get_xlim()
    if whole and high - low < 2:  # for example a single point: leave room for a tick on each side
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    _ticks(axes.xaxis, 10, whole=whole)
    if panel.log_above is None:
        _ticks(axes.yaxis, 6)
    elif panel.log_above:
        axes.set_yscale("symlog", linthresh=panel.log_above)
    else:
        axes.set_yscale("log")
    entries = len(panel.lines) + len(panel.marks) + sum(bool(level.label) for level in panel.levels)
    if entries > 1:
        columns = {"ncols": -(-entries // _LEGEND_ROWS), "handlelength": 1.6, "columnspacing": 0.8}
        if entries > _LEGEND_ROWS:
            columns["handlelength"] = 0.9
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), borderaxespad=0.0, **columns)


def _line(axes: Any, line: Line) -> None:
    colour = _colour(line.layer)
    if line.style == "dots":
        size = 5 if len(line.x) > _FEW else 9
        axes.plot(line.x, line.y, ".", ms=size, alpha=0.7, color=colour, mew=0, label=line.label, zorder=2)
    elif line.style == "beads":
        axes.plot(line.x, line.y, "-o", lw=1.6, ms=5, mec="white", mew=0.8, color=colour, label=line.label, zorder=4)
    elif line.style == "wide":
        axes.plot(line.x, line.y, "-", lw=6, solid_capstyle="butt", color=colour, label=line.label, zorder=2)
    else:
        width = (0.7 if len(line.x) > _FINE else 1.3) if isinstance(line.layer, int) else 2.2  # components are many
        axes.plot(line.x, line.y, "-", lw=width, color=colour, label=line.label, zorder=3)


def _level(axes: Any, level: Level) -> None:
    across = axes.axhline if level.axis == "y" else axes.axvline
    across(level.value, color=FAINT, lw=1.0, ls=(0, (4, 3)), zorder=1.5, label=level.label or "_")


def _points(axes: Any, panel: Points) -> None:
    for level in panel.levels:
        _level(axes, level)
    cloud = axes.scatter(panel.x, panel.y, c=panel.value, s=5, cmap=_MAP, alpha=0.75, linewidths=0, rasterized=True)
    bar = axes.figure.colorbar(cloud, ax=axes, pad=0.02, aspect=28)
    bar.set_label(panel.value_label)
    bar.outline.set_visible(False)
    bar.solids.set_alpha(1.0)
    bar.ax.tick_params(length=0)
    for axis in (axes.xaxis, axes.yaxis, bar.ax.yaxis):
        _ticks(axis)
    if any(level.label for level in panel.levels):
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.12 * (high - low))
        axes.legend(loc="upper center", borderaxespad=0.2)


def _bars(axes: Any, panel: Bars) -> None:
    left = panel.edges[:-1]
    widths = [b - a for a, b in zip(panel.edges, panel.edges[1:], strict=False)]
    floor = [0.0] * len(left)
    for stack in panel.stacks:
        colour = _colour(stack.layer)
        axes.bar(
            left, stack.counts, widths, bottom=floor, align="edge", color=colour, label=stack.label, ec="white", lw=0.6
        )
        floor = [low + count for low, count in zip(floor, stack.counts, strict=True)]
    axes.grid(visible=False, axis="x")
    axes.set_xlim(panel.edges[0], panel.edges[-1])
    axes.set_ylim(0, max([*floor, 1.0]) * 1.2)  # room for the legend
    _ticks(axes.xaxis)
    _ticks(axes.yaxis, whole=True)
    axes.legend(loc="upper left", ncols=len(panel.stacks), columnspacing=1.2, handlelength=1.0, borderaxespad=0.2)


def _film(axes: Any, panel: Film) -> None:
    axes.set_axis_off()
    share = 1.0 / max(len(panel.pictures), 1)
    for place, (pixels, note) in enumerate(zip(panel.pictures, panel.notes, strict=True)):
        cell = axes.inset_axes((place * share, 0.0, share * 0.97, 0.94))
        cell.imshow(pixels, interpolation="nearest", vmin=0, vmax=255)
        cell.set_anchor("NW")
        cell.set_axis_off()
        cell.set_title(note, fontsize=8.5, fontweight="normal", color=FAINT, pad=3, parse_math=False)


def _shares(axes: Any, panel: Shares) -> None:
    axes.barh(panel.names, panel.values, height=0.7, color=_COLOURS["first"])
    axes.set_ylim(max(len(panel.names), 5) - 0.5, -0.5)  # first name on top; a few bars stay narrow
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, (max(panel.values, default=0.0) or 1.0) * 1.25)  # room for the notes
    for place, (value, note) in enumerate(zip(panel.values, panel.notes, strict=True)):
        axes.annotate(note, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    _ticks(axes.xaxis)


def _ticks(axis: Any, most: int = 6, *, whole: bool = False) -> None:
    """Put at most `most` intervals on an axis, at integers if `whole`; format 12000 as 12,000."""
    ticker = require("matplotlib.ticker", "viz")
    axis.set_major_locator(ticker.MaxNLocator(most, steps=(1, 2, 2.5, 5, 10), integer=whole))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}".replace("-", "\N{MINUS SIGN}")))
