"""The renderer of the commands: any report as lines and tables on a terminal, or as JSON; error messages."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import textwrap
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

from ostinato._optional import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich import box, console, measure, table, text
else:
    box, console, measure, table, text = (
        require(f"rich.{name}", "cli") for name in ("box", "console", "measure", "table", "text")
    )

__all__ = ["Part", "Styled", "Table", "answer", "rendered", "show", "show_error", "with_options", "write_page"]

_FLAGS = re.compile(r"\b(allow_pickle|overwrite|copy|move)=True")
_VALUES = re.compile(r"\b(fps|fields|task|images|codec|layout|episodes|ndim|max_size)=(?:'([\w.-]*)')?(?!\w)")
_NUMBER = re.compile(r"(?!.*;)(?:-$|-?[\d.]+|-?inf$|nan$)")
_PAGE_WIDTH = 130
"""Characters in a line of a page."""
_INDENT = "  "
"""Of the further lines of a name in a table."""


class Styled(NamedTuple):
    """A line with a style."""

    text: str
    style: str
    """Of rich, such as `bold red`."""
    indent: int = 0
    """Spaces before its further lines, where it is wrapped."""


class Table(NamedTuple):
    """Rows of cells; columns without any value are left out, and those of numbers are right-aligned."""

    names: tuple[str, ...]
    """Names of the columns."""
    rows: list[tuple[str | None, ...]]
    """The cells of each row, of which the first is a name; None without a value."""


Part: TypeAlias = str | Styled | Table
"""A part of a report: a line, or a table."""


def answer(report: Any, *, as_json: bool) -> None:
    """Print a report: as JSON, or in words as `ostinato.cli.reports` describes it."""
    from ostinato.cli.reports import parts_of

    if as_json:
        sys.stdout.write(json.dumps(_json_value(report), indent=2, allow_nan=False) + "\n")
    else:
        show(parts_of(report))


def write_page(report: Any, path: Path) -> None:
    """Write what `answer` prints as an HTML page."""
    from ostinato.cli.reports import parts_of

    out = console.Console(file=io.StringIO(), record=True, width=_PAGE_WIDTH, highlight=False)
    for shown in rendered(parts_of(report), _PAGE_WIDTH):
        out.print(shown)
    path.write_text(out.export_html(), encoding="utf-8")


def _json_value(value: Any) -> Any:
    """Return what JSON has; infinities and NaN, which it lacks, become strings."""
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _json_value(value.as_dict() if hasattr(value, "as_dict") else asdict(value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show_error(message: str) -> None:
    """Print a message on stderr in red, with the names of command-line options; as one line if that is no terminal."""
    out = console.Console(stderr=True, highlight=False)
    line = Styled(f"error: {' '.join(with_options(message).split())}", "bold red")
    out.print(_line(line, out.width if sys.stderr.isatty() else None), soft_wrap=True)


def with_options(message: str) -> str:
    """Return a message of the library with the options of the command line in place of arguments."""
    message = _FLAGS.sub(lambda found: f"--{found[1].replace('_', '-')}", message)
    return _VALUES.sub(lambda found: f"--{found[1].replace('_', '-')}{' ' * bool(found[2])}{found[2] or ''}", message)


def show(parts: Iterable[Part]) -> None:
    """Print lines, and tables between empty lines.

    On a terminal, and where COLUMNS is set, lines are wrapped at words: files get whole lines.
    """
    out = console.Console(highlight=False)
    width = out.width if out.is_terminal or "COLUMNS" in os.environ else None
    for shown in rendered(parts, width):
        out.print(shown, soft_wrap=isinstance(shown, text.Text))


def rendered(parts: Iterable[Part], width: int | None = None) -> Iterator[console.RenderableType]:
    """Yield what rich prints for each part; lines are wrapped to a width, if there is one."""
    after_table = False
    for part in parts:
        is_table = isinstance(part, Table)
        if is_table or after_table:
            yield ""
        yield (
            _grid(part)
            if isinstance(part, Table)
            else _line(Styled(part, "") if isinstance(part, str) else part, width)
        )
        after_table = is_table


def _line(line: Styled, width: int | None) -> text.Text:
    """Return text with lines of at most `width` characters, unless a word is longer."""
    shown = _escaped(line.text)
    if width is not None and len(shown) > width:
        indent = " " * line.indent
        shown = textwrap.fill(shown, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return text.Text(shown, style=line.style)


def _grid(given: Table) -> table.Table:
    grid = table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    kept = [place for place in range(len(given.names)) if any(row[place] is not None for row in given.rows)]
    for place in kept:
        numbers = all(_NUMBER.match(row[place] or "-") for row in given.rows)
        grid.add_column(given.names[place], justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    for row in given.rows:
        name, *cells = (row[place] or "-" for place in kept)
        grid.add_row(_Name(name), *(text.Text(_escaped(cell)) for cell in cells))
    return grid


def _escaped(words: str) -> str:
    """Return text with its control characters escaped, for example those in names of files."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)


@final
class _Name:
    """A cell with a name such as `observation.joint_position`: broken after dots and underscores where it is too long.

    A part that is still too long ends with an ellipsis.
    """

    def __init__(self, name: str) -> None:
        self._name = _escaped(name)
        self._parts = re.findall(r"[^._ ]*[._ ]|[^._ ]+", self._name)

    def __rich_measure__(self, out: console.Console, options: console.ConsoleOptions) -> measure.Measurement:
        """Return the widths of the longest part in a further line, and of the name."""
        del out, options
        return measure.Measurement(max(map(len, self._parts), default=0) + len(_INDENT), len(self._name))

    def __rich_console__(self, out: console.Console, options: console.ConsoleOptions) -> Iterator[text.Text]:
        """Yield the lines of the cell."""
        del out
        width, lines = options.max_width, [""]
        for part in self._parts:
            if len(lines[-1]) + len(part) > width and lines[-1].strip():
                lines.append(_INDENT)
            room = width - len(lines[-1])
            lines[-1] += part if len(part) <= room else f"{part[: room - 1]}\N{HORIZONTAL ELLIPSIS}"
        yield text.Text("\n".join(lines))
