"""How a moment looks: a matplotlib figure with two observations side by side, facts, and a strip over all steps."""

from __future__ import annotations

import io
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ostinato._optional import require
from ostinato.durable.files import atomic_write
from ostinato.errors import OptionError
from ostinato.viz.screen import FAINT, GRID, INK, STYLE

if TYPE_CHECKING:
    import os

    from ostinato.viz.moment import Moment, Side, Strip, Traces

__all__ = ["DPI", "Board", "png_path", "save"]

DPI = 150
_SIZE = (9.6, 6.6)
_REWARD, _END, _HERE = "#0072B2", "#D55E00", "#1F2933"
_TRACE_MAP = "tab10"
_WIDTH = 130


@final
class Board:
    """Draws moments onto one figure, again and again. The bottom strip of the figure stays free for a text box."""

    def __init__(self, figure: Any) -> None:
        """Take a figure; it is drawn on by `show`."""
        self.figure = figure
        self._drawn: list[Any] = []
        self.pictures: list[Any] = []
        """Axes of the pictures drawn last, left ones first."""

    @classmethod
    def headless(cls) -> Board:
        """Return a board that needs no display."""
        figures = require("matplotlib.figure", "viz")
        agg = require("matplotlib.backends.backend_agg", "viz")
        figure = figures.Figure(figsize=_SIZE, dpi=DPI)
        agg.FigureCanvasAgg(figure)
        return cls(figure)

    def show(self, moment: Moment) -> None:
        """Draw a moment in the place of the one before; the canvas is not refreshed."""
        with require("matplotlib", "viz").rc_context(STYLE):
            for artist in self._drawn:
                artist.remove()
            self._drawn, self.pictures = [], []
            self._text(0.02, 0.965, moment.title, fontsize=14, fontweight="bold", va="center")
            self._text(
                0.02, 0.935, "\n".join(_packed(moment.facts)), fontsize=8.5, color=FAINT, va="top", linespacing=1.35
            )
            strip = moment.strip
            rows = 0 if strip is None else (strip.reward is not None) + (strip.action is not None)
            floor = 0.09 + 0.13 * rows
            self._side(moment.current, moment, (0.03, floor + 0.05, 0.455, 0.76 - floor))
            self._side(moment.following, moment, (0.515, floor + 0.05, 0.455, 0.76 - floor))
            if strip is not None:
                self._strip(strip, moment)

    def _text(self, x: float, y: float, text: str, **more: Any) -> None:
        self._drawn.append(self.figure.text(x, y, text, parse_math=False, **more))

    def _axes(self, box: tuple[float, float, float, float]) -> Any:
        axes = self.figure.add_axes(box)
        axes.set_navigate(False)
        self._drawn.append(axes)
        return axes

    def _side(self, side: Side, moment: Moment, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        self._text(left, bottom + height + 0.02, side.title, fontsize=10, fontweight="bold", va="bottom")
        if side.pictures:
            self._pictures(side, box)
        elif side.traces:
            share = height / len(side.traces)
            for number, traces in enumerate(side.traces):
                axes = self._axes((left + 0.035, bottom + height - share * (number + 1), width - 0.04, share * 0.84))
                self._lines(axes, traces, moment)
                axes.set_title(_title(traces), fontsize=8, fontweight="normal", pad=3)
        else:
            axes = self._axes(box)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_facecolor("#F5F7FA")
            note = "\n".join(textwrap.wrap(moment.problem or side.note, 48))
            colour = _END if moment.problem else FAINT
            axes.text(0.5, 0.5, note, ha="center", va="center", color=colour, fontsize=9, parse_math=False)

    def _pictures(self, side: Side, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        count = len(side.pictures)
        across = math.ceil(math.sqrt(count))
        down = math.ceil(count / across)
        for number, shown in enumerate(side.pictures):
            row, column = divmod(number, across)
            cell = (left + column * width / across, bottom + (down - 1 - row) * height / down)
            axes = self._axes((*cell, 0.97 * width / across, 0.9 * height / down))
            axes.imshow(shown.pixels, interpolation="nearest", vmin=0, vmax=255)
            axes.set_title(shown.camera, fontsize=8, fontweight="normal", pad=3)
            axes.set_axis_off()
            self.pictures.append(axes)

    def _strip(self, strip: Strip, moment: Moment) -> None:
        bottom = 0.115
        if strip.action is not None:
            axes = self._axes((0.065, bottom, 0.905, 0.095))
            self._lines(axes, strip.action, moment)
            axes.set_ylabel("action", fontsize=8)
            bottom += 0.13
        if strip.reward is not None:
            axes = self._axes((0.065, bottom, 0.905, 0.095))
            axes.step(range(moment.steps), strip.reward, where="mid", lw=1.4, color=_REWARD)
            axes.fill_between(range(moment.steps), strip.reward, step="mid", alpha=0.15, color=_REWARD, lw=0)
            axes.set_ylabel("reward", fontsize=8)
            self._frame(axes, moment)
            for end in strip.ends[:500]:
                axes.axvline(end, color=_END, lw=1.6, zorder=1)
            if len(strip.ends):
                axes.text(1.0, 1.04, "| done", color=_END, fontsize=8, ha="right", transform=axes.transAxes)

    def _lines(self, axes: Any, traces: Traces, moment: Moment) -> None:
        colours = require("matplotlib", "viz").colormaps[_TRACE_MAP].colors
        for number, values in enumerate(traces.values.T):
            axes.plot(values, lw=1.1, color=colours[number % len(colours)])
        self._frame(axes, moment)

    def _frame(self, axes: Any, moment: Moment) -> None:
        axes.axvline(moment.step, color=_HERE, lw=1.0, ls=(0, (4, 3)), zorder=5)
        axes.set_xlim(-0.5, moment.steps - 0.5)
        axes.tick_params(length=0, labelsize=7, colors=INK)
        axes.grid(color=GRID, lw=0.6)
        axes.locator_params(axis="y", nbins=4)
        axes.xaxis.get_major_locator().set_params(integer=True)


def _packed(facts: tuple[tuple[str, str], ...]) -> list[str]:
    """Set facts in at most three lines, breaking between them."""
    lines = [""]
    for word, value in facts:
        fact = f"{word}: {textwrap.shorten(value, _WIDTH - len(word) - 2)}"
        if lines[-1] and len(lines[-1]) + len(fact) > _WIDTH:
            lines.append("")
        lines[-1] += ("     " if lines[-1] else "") + fact
    return lines[:3]


def _title(traces: Traces) -> str:
    count = traces.values.shape[1]
    return traces.name if count == traces.components else f"{traces.name}, {count} of {traces.components} components"


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG file of 150 DPI; the file is replaced whole, so that an editor never sees half of it.

    Raises:
        OptionError: The path does not end in `.png`.
    """
    target = png_path(path)
    memory = io.BytesIO()
    figure.savefig(memory, dpi=DPI, format="png")
    atomic_write(target, memory.getvalue())
    return target


def png_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture to write.

    Raises:
        OptionError: It does not end in `.png`, or its directory is missing.
    """
    target = Path(path)
    if target.suffix.lower() != ".png" or not target.absolute().parent.is_dir():
        msg = f"a picture needs a path that ends in .png, in a directory that exists, got {target}"
        raise OptionError(msg)
    return target
