"""How a moment looks: a matplotlib figure with two observations side by side, facts, and a strip over all steps."""

from __future__ import annotations

import io
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato._optional import require
from ostinato.durable.files import atomic_write
from ostinato.errors import OptionError
from ostinato.viz.screen import FAINT, GRID, INK, LINES, STYLE

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ostinato.viz.moment import Moment, Side, Strip, Traces

__all__ = ["DPI", "Board", "png_path", "save"]

DPI = 150
_SIZE = (9.6, 6.6)
_END, _HERE = "#D55E00", "#1F2933"
_WIDTH = 130
_TOP, _STRIP = 0.81, 0.13
_MOST_VECTORS = 5
_CAPTION = 0.03


@final
class Board:
    """Draws moments onto one figure, again and again."""

    def __init__(self, figure: Any, *, foot: float = 0.0) -> None:
        """Take a figure; it is drawn on by `show`.

        Args:
            figure: A figure of matplotlib.
            foot: The part of its height at the bottom that stays free, such as for a text box.
        """
        self.figure = figure
        self._floor = foot + 0.075
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
            facts = "" if moment.problem else "\n".join(_packed(moment.facts))
            self._text(0.02, 0.935, facts, fontsize=8.5, color=FAINT, va="top", linespacing=1.35)
            strip = moment.strip
            rows = 0 if strip is None else (strip.reward is not None) + (strip.action is not None)
            bottom = self._floor + _STRIP * rows + 0.035
            self._side(moment.current, moment, (0.02, bottom, 0.46, _TOP - bottom))
            self._side(moment.following, moment, (0.515, bottom, 0.46, _TOP - bottom))
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
        left, bottom, _, height = box
        self._text(left, bottom + height + 0.02, side.title, fontsize=10, fontweight="bold", va="bottom")
        if side.pictures:
            self._pictures(side, box)
        elif side.traces:
            self._vectors(side.traces, moment, box)
        else:
            axes = self._axes(box)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_facecolor("#F5F7FA")
            colour = _END if moment.problem else FAINT
            note = "\n".join(textwrap.wrap(side.note, 48))
            axes.text(0.5, 0.5, note, ha="center", va="center", color=colour, fontsize=9, parse_math=False)

    def _vectors(self, traces: Sequence[Traces], moment: Moment, box: tuple[float, float, float, float]) -> None:
        """Draw one vector below the other; their steps stand under the last."""
        left, bottom, width, height = box
        kept = traces[:_MOST_VECTORS]
        if len(traces) > len(kept):
            more = f"{len(traces) - len(kept)} more: --camera NAME shows one alone"
            self._text(left + width, bottom + height + 0.02, more, fontsize=8, color=FAINT, ha="right", va="bottom")
        share = (height - 0.03) / len(kept)
        for number, each in enumerate(kept):
            low = bottom + 0.03 + share * (len(kept) - 1 - number)
            axes = self._axes((left + 0.045, low, width - 0.05, share - 0.035))
            self._lines(axes, each)
            self._frame(axes, each, moment)
            axes.set_title(_title(each), fontsize=8, fontweight="normal", pad=3)
            self._steps(axes, last=number == len(kept) - 1)

    def _pictures(self, side: Side, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        count = len(side.pictures)
        across = _across([shown.pixels.shape for shown in side.pictures], width * _SIZE[0], height * _SIZE[1])
        wide, high = width / across, height / math.ceil(count / across)
        for number, shown in enumerate(side.pictures):
            row, column = divmod(number, across)
            place = (left + column * wide, bottom + height - (row + 1) * high)
            axes = self._axes((*place, wide - 0.01, high - _CAPTION))
            axes.imshow(shown.pixels, interpolation="nearest", vmin=0, vmax=255)
            axes.set_title(shown.camera, fontsize=8, fontweight="normal", pad=3)
            axes.set_anchor("NW")
            axes.set_axis_off()
            self.pictures.append(axes)

    def _strip(self, strip: Strip, moment: Moment) -> None:
        bottom = self._floor
        for name, values in (("action", strip.action), ("reward", strip.reward)):
            if values is None:
                continue
            axes = self._axes((0.065, bottom, 0.91, _STRIP - 0.035))
            if values is strip.reward:
                self._reward(axes, values, strip.ends)
            else:
                self._lines(axes, values)
            self._frame(axes, values, moment)
            axes.set_ylabel(name, fontsize=8)
            self._steps(axes, last=bottom == self._floor)
            bottom += _STRIP

    def _reward(self, axes: Any, reward: Traces, ends: np.ndarray) -> None:
        steps, values = reward.steps, reward.values[:, 0]
        axes.step(steps, values, where="mid", lw=1.4, color=LINES[0], marker=_marker(steps))
        axes.fill_between(steps, values, step="mid", alpha=0.15, color=LINES[0], lw=0)
        if len(ends):
            axes.vlines(ends, 0, 1, color=_END, lw=1.6, zorder=1, transform=axes.get_xaxis_transform())
            axes.text(1.0, 1.04, "| done", color=_END, fontsize=8, ha="right", transform=axes.transAxes)

    def _lines(self, axes: Any, traces: Traces) -> None:
        """Draw one line a component; over them, at the right, which colour is which."""
        count = traces.values.shape[1]
        for number, line in enumerate(traces.values.T):
            axes.plot(traces.steps, line, lw=1.1, color=LINES[number], marker=_marker(traces.steps))
            if count > 1:
                place = {"xytext": (-11 * (count - 1 - number), 3), "textcoords": "offset points"}
                axes.annotate(
                    str(number), (1, 1), xycoords="axes fraction", ha="right", fontsize=7, color=LINES[number], **place
                )

    def _frame(self, axes: Any, traces: Traces, moment: Moment) -> None:
        if not np.isfinite(traces.values).any():
            axes.text(0.5, 0.5, "no finite number", ha="center", va="center", fontsize=8, transform=axes.transAxes)
            axes.set_yticks([])
        axes.axvline(moment.step, color=_HERE, lw=1.0, ls=(0, (4, 3)), zorder=5)
        axes.set_xlim(-0.5, moment.steps - 0.5)
        axes.tick_params(length=0, labelsize=7, colors=INK)
        axes.grid(color=GRID, lw=0.6)
        if len(axes.get_yticks()):
            axes.locator_params(axis="y", nbins=4)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if moment.steps == 1:
            axes.set_xticks([0])

    def _steps(self, axes: Any, *, last: bool) -> None:
        """Name the axis of the steps under the last of several; they share it."""
        axes.tick_params(labelbottom=last)
        if last:
            axes.set_xlabel("step", fontsize=8, labelpad=2)


def _across(shapes: Sequence[tuple[int, ...]], width: float, height: float) -> int:
    """Return how many pictures side by side show the smallest of them largest."""

    def scale(across: int) -> float:
        wide, high = width / across, height / math.ceil(len(shapes) / across) - _CAPTION * _SIZE[1]
        return min(min(wide / shape[1], high / shape[0]) for shape in shapes)

    return max(range(1, len(shapes) + 1), key=scale)


def _marker(steps: np.ndarray) -> str:
    """A line of one point would not be seen."""
    return "o" if len(steps) == 1 else ""


def _packed(facts: tuple[tuple[str, str], ...]) -> list[str]:
    """Set facts in at most three lines, breaking between them; dots stand for those that have no room."""
    lines = [""]
    for word, value in facts:
        fact = f"{word}: {textwrap.shorten(value, _WIDTH - len(word) - 2)}"
        if lines[-1] and len(lines[-1]) + len(fact) > _WIDTH:
            lines.append("")
        lines[-1] += ("     " if lines[-1] else "") + fact
    return lines if len(lines) <= 3 else [*lines[:2], f"{lines[2]}     ..."]


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
