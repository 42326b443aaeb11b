"""What a picture shows: plain data without colours, fonts or a plotting library, so that tests can read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Bars",
    "Curves",
    "Layer",
    "Level",
    "Line",
    "Mark",
    "Panel",
    "Points",
    "Scene",
    "Shares",
    "Stack",
    "number",
    "thin",
]

Layer: TypeAlias = Literal["first", "second", "third", "quiet"]
"""The part that something plays: three that must be told apart, and one that stays behind them."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a curve."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    layer: Layer = "first"
    style: Literal["line", "dots", "beads"] = "line"
    """A line, dots without a line, or a line with a bead at each value."""

    def __post_init__(self) -> None:
        """Check the lengths."""
        _same_length(self.label, self.x, self.y)


@dataclass(frozen=True, slots=True)
class Level:
    """A thin line across the panel at one value."""

    value: float
    label: str = ""
    axis: Literal["x", "y"] = "y"
    """The axis on which the value lies."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One point that matters."""

    x: float
    y: float
    label: str


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


@dataclass(frozen=True, slots=True)
class Points:
    """A cloud of points, coloured by a third number."""

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
    """A histogram; each stack stands on the one before."""

    title: str
    x_label: str
    y_label: str
    edges: tuple[float, ...]
    """Bounds of the bars, one more than there are counts."""
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        """Check the lengths."""
        for stack in self.stacks:
            _same_length(stack.label, self.edges[1:], stack.counts)


@dataclass(frozen=True, slots=True)
class Shares:
    """Horizontal bars, one for each name, the first on top."""

    title: str
    x_label: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    notes: tuple[str, ...]
    """What stands at the end of each bar."""

    def __post_init__(self) -> None:
        """Check the lengths."""
        _same_length(self.title, self.names, self.values)
        _same_length(self.title, self.names, self.notes)

    @property
    def y_label(self) -> str:
        """Nothing: the names say it."""
        return ""


Panel: TypeAlias = Curves | Points | Bars | Shares


@dataclass(frozen=True, slots=True)
class Scene:
    """A whole picture: rows of panels, the panels of a row side by side."""

    title: str
    subtitle: str
    rows: tuple[tuple[Panel, ...], ...]

    def __post_init__(self) -> None:
        """Check that there is something to show."""
        if not self.rows or not all(self.rows):
            msg = f"a scene needs at least one row and every row a panel, got {[len(row) for row in self.rows]}"
            raise OptionError(msg)


def number(value: float) -> str:
    """Write a number for a person: four digits, and from a thousand on all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thin(count: int, most: int) -> range:
    """Return at most `most` of the positions `[0, count)`, evenly spaced, the first among them."""
    return range(0, count, max(1, math.ceil(count / most)))


def _same_length(name: str, first: Sequence[object], second: Sequence[object]) -> None:
    if len(first) != len(second):
        msg = f"{name!r} must have as many values on both sides, got {len(first)} and {len(second)}"
        raise OptionError(msg)
