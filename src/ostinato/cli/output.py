"""The output of the commands: JSON, tables, progress bars and error messages."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from ostinato._optional import require
from ostinato.core.options import number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich import box, console, measure, table, text

    from ostinato.cli.commands import SampleReport
    from ostinato.cli.fleets import FleetReport
    from ostinato.compat.torchrl import ImportReport
    from ostinato.datasets.export import ExportReport
    from ostinato.tools import (
        ChainReport,
        CheckpointReport,
        CompactReport,
        ConvertReport,
        Damage,
        FieldReport,
        MoveReport,
        PriorityReport,
        StoreReport,
        VerifyReport,
    )
    from ostinato.tools import Report as Examination
    from ostinato.tools.datasets import DatasetReport, DatasetSample
else:
    box, console, measure, table, text = (
        require(f"rich.{name}", "cli") for name in ("box", "console", "measure", "table", "text")
    )

__all__ = [
    "answer",
    "batch",
    "checkpoint",
    "compacted",
    "converted",
    "dataset",
    "dataset_batch",
    "error",
    "examined",
    "exported",
    "fleet",
    "fleet_view",
    "imported",
    "moved",
    "store",
    "to_json",
    "verified",
    "written",
]

_T = TypeVar("_T")
_FLAGS = re.compile(r"\b(allow_pickle|overwrite|copy|move)=True")
_VALUES = re.compile(r"\b(fps|fields|task|images|codec|layout|episodes|ndim|max_size)=(?:'([\w.-]*)')?(?!\w)")
_MAX_TEXTS = 10
_MAX_NAMES = 3
_INDENT = "  "
"""Of the further lines of a name in a table."""
_UNVERIFIED = "checksums are not compared, as ostinato verify does"
_SHARD_COUNTS = ("rows", "write_count", "rows_drawn", "saved_write_count", "save_failures")


def answer(report: _T, table: Callable[[_T], None], *, as_json: bool) -> None:
    """Print a report: as JSON, or with the function `table`."""
    if as_json:
        sys.stdout.write(to_json(report) + "\n")
    else:
        table(report)


def to_json(value: Any) -> str:
    """Return JSON; infinities and NaN, which JSON lacks, are written as strings."""
    return json.dumps(_json_value(value), indent=2, allow_nan=False)


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _json_value(asdict(value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def written(path: Path) -> None:
    """Print the path of a file that was written."""
    _line(_console(), f"written: {path}")


def error(message: str) -> None:
    """Print a message on stderr in red, with the names of command-line options; as one line if that is no terminal."""
    out = console.Console(stderr=True, highlight=False)
    width = out.width if sys.stderr.isatty() else None
    out.print(_wrapped(f"error: {' '.join(_with_options(message).split())}", "bold red", width), soft_wrap=True)


def _with_options(message: str) -> str:
    """Return a message of the library with the options of the command line in place of arguments."""
    message = _FLAGS.sub(lambda found: f"--{found[1].replace('_', '-')}", message)
    return _VALUES.sub(lambda found: f"--{found[1].replace('_', '-')}{' ' * bool(found[2])}{found[2] or ''}", message)


# -- sharded buffers ----------------------------------------------------------------------------------------------


def fleet(report: FleetReport) -> None:
    """Print the report on a sharded buffer, with a table of shards."""
    _console().print(fleet_view(report))


def fleet_view(report: FleetReport) -> console.Group:
    """Return the report on a sharded buffer, to be printed."""
    lines = [f"{report.name}: {number_of(report.rows, 'row')} in {number_of(len(report.shards), 'shard')}"]
    if report.rate_limiter is not None:
        counts = f"{number_of(report.limiter_written or 0, 'row')} written, {report.limiter_drawn:,} drawn"
        lines.append(f"{report.rate_limiter}: {counts}")
    grid = _grid(("shard",), ("rows", "written", "drawn", "saved", "failures"))
    grid.add_column("state", overflow="fold")
    for shard in report.shards:
        numbers = (shard[name] for name in _SHARD_COUNTS)
        reason, error = shard["missing"], shard["save_error"]
        state = f"missing: {reason}" if reason else f"not saved: {error}" if error else ""
        grid.add_row(str(shard["shard"]), *(f"{number:,}" for number in numbers), _plain(state, "red"))
    return console.Group(*(_plain(line, "" if number else "bold") for number, line in enumerate(lines)), grid)


# -- checkpoints --------------------------------------------------------------------------------------------------


def checkpoint(report: CheckpointReport) -> None:
    """Print the report on a checkpoint, with a table of fields."""
    out = _console()
    episodes = "" if report.episodes is None else f", {number_of(report.episodes, 'episode')}"
    _line(out, report.path, "bold")
    _line(
        out,
        f"{report.rows:,} of {number_of(report.capacity, 'row')}{episodes}, {_size(report.nbytes)}; "
        f"{number_of(report.rows_written, 'row')} written and {report.rows_drawn:,} drawn so far",
    )
    _line(out, f"{report.storage}, {report.sampler}, {report.writer}; {report.format} {report.version}")
    resume = "exactly where it stopped" if report.exact_resume else "with new random numbers (no generator was saved)"
    checks = "all checksums match" if report.verified else "checksums not verified"
    _line(out, f"{checks}; sampling resumes {resume}")
    if report.priorities is not None:
        _line(out, _priorities(report.priorities))
    for chain in report.chains:
        _line(out, f"{chain.name}: {_chain(chain)}")
    _table(out, _fields(report))
    if report.rows != report.stored_rows:
        left_out = number_of(report.stored_rows - report.rows, "stored row")
        _line(out, f"{left_out} cannot be sampled: {report.left_out_because}", "yellow")
    for text_ in report.assumptions:
        _line(out, f"assumed: {text_}", "yellow")


def _chain(chain: ChainReport) -> str:
    base, *patches = chain.links
    parts = ", ".join(
        f"{number_of(link.rows, 'row')} in {number_of(link.runs, 'run')} ({_size(link.nbytes)})" for link in patches
    )
    count = number_of(len(patches), "patch")
    return f"base of {number_of(base.rows, 'row')} ({_size(base.nbytes)}), then {count}: {parts}"


def _priorities(report: PriorityReport) -> str:
    if report.minimum is None:
        return f"priorities of {number_of(report.rows, 'row')} (alpha {report.alpha:g}, beta {report.beta:g})"
    numbers = f"min {_number(report.minimum)}, mean {_number(report.mean)}, max {_number(report.maximum)}"
    share = f"{report.zero_share or 0:.0%} zero"
    exponents = f"alpha {report.alpha:g}, beta {report.beta:g}"
    return f"priorities of {number_of(report.rows, 'row')}: {numbers}, {share} ({exponents})"


def _fields(report: CheckpointReport) -> table.Table:
    """Return the table of fields; with a column for rows only if some rows lack a field."""
    ragged = any(field.rows != report.rows for field in report.fields)
    grid = _grid(("field", "type"), (*(["rows"] if ragged else []), "size", "min", "mean", "max", "NaN"))
    for field in report.fields:
        rows = [f"{field.rows:,}"] if ragged else []
        numbers = (_number(n) for n in (field.minimum, field.mean, field.maximum, field.nan_count))
        cells = (field.name, field.dtype + _shape(field.shape), *rows, _size(field.nbytes), *numbers)
        _add_row(grid, *cells)
    return grid


def compacted(report: CompactReport) -> None:
    """Print the report on merged patches."""
    out = _console()
    if not report.patches:
        _line(out, f"{report.path} has no patches: nothing to do")
        return
    sizes = f"{_size(report.bytes_before)} before, {_size(report.bytes_after)} now"
    _line(out, f"{number_of(report.patches, 'patch')} merged in {report.path}: {sizes}")


def imported(report: ImportReport) -> None:
    """Print the report on an imported checkpoint; in yellow, what could not be imported."""
    out = _console()
    _line(out, f"{report.rows:,} of {number_of(report.capacity, 'row')} in {report.path}")
    _line(
        out, f"{report.storage} (ndim={report.ndim}), {report.sampler}, {report.writer}, batch_size={report.batch_size}"
    )
    for note in report.notes:
        _line(out, note, "yellow")


# -- directories of trajectories ----------------------------------------------------------------------------------


def _contents(report: StoreReport | SampleReport | MoveReport) -> str:
    counts = (report.trajectories, "trajectory"), (report.total_samples, "transition")
    return ", ".join(number_of(count, noun) for count, noun in counts)


def store(report: StoreReport) -> None:
    """Print the report on a directory of trajectories, with a table of keys."""
    out = _console()
    _line(out, report.path, "bold")
    shapes = ", ".join(f"{steps} x {envs}" for steps, envs in report.shapes[:4])
    more = " and others" if len(report.shapes) > 4 else ""
    episodes = "" if report.episodes is None else f", {number_of(report.episodes, 'episode')}"
    _line(
        out,
        f"{_contents(report)} ({shapes or 'none'} steps x environments{more}){episodes}, "
        f"{number_of(report.models, 'model')}",
    )
    nbytes = "" if report.nbytes is None else f", {_size(report.nbytes)}"
    resume = "exactly where it stopped" if report.exact_resume else f"from its seed {report.seed}"
    _line(
        out,
        f"{report.trajectory_format}{nbytes}; the next id is {report.trajectory_counter}; sampling resumes {resume}",
    )
    if report.journal:
        _line(out, "there is a journal: the directory is in use, or its process was killed")
    _unlisted(out, report.unlisted)
    if report.keys:
        _table(out, _keys(report))


def _keys(report: StoreReport) -> table.Table:
    ragged = any(key.trajectories != report.trajectories for key in report.keys)
    grid = _grid(("key", "type"), (*(["trajectories"] if ragged else []), "size"))
    for key in report.keys:
        counts = [f"{key.trajectories:,}"] if ragged else []
        _add_row(grid, key.name, key.dtype + _shape(key.shape), *counts, _size(key.nbytes))
    return grid


def batch(report: SampleReport) -> None:
    """Print the keys of one batch."""
    out = _console()
    _line(out, f"{_contents(report)} in {report.path}")
    _line(
        out, f"one batch of {number_of(report.num_samples, 'transition')} in {report.sample_ms:.3g} ms; {_UNVERIFIED}"
    )
    grid = _grid(("key", "dtype", "shape"), ())
    for name, dtype, shape in report.keys:
        _add_row(grid, name, dtype, _shape(shape))
    _table(out, grid)


def moved(report: MoveReport) -> None:
    """Print the report on a merge or a split."""
    out = _console()
    resumed = ", resuming an earlier run" if report.resumed else ""
    _line(out, f"{_contents(report)} {report.how} to {report.path}{resumed}")
    for source in report.sources:
        _line(out, f"from {source}")
    for source in report.left:
        _line(out, f"{source} has trajectories that were added during the move: they stay there")


def converted(report: ConvertReport) -> None:
    """Print the report on a conversion."""
    sizes = f"{_size(report.source_bytes)} read, {_size(report.nbytes)} written"
    count = number_of(report.trajectories, "trajectory")
    _line(_console(), f"{count} as {report.trajectory_format} in {report.path} ({sizes})")


def verified(report: VerifyReport) -> None:
    """Print the result of a verification: damaged files in red, those that could not be checked in yellow."""
    out = _console()
    read = f" ({_size(report.nbytes)} read, {number_of(report.checksums, 'checksum')} verified)" if report.files else ""
    counts = [f"{number_of(report.files, 'file')} intact{read}"]
    counts += [f"{len(report.damage):,} damaged"] if report.damage else []
    counts += [f"{len(report.unchecked):,} not checked"] if report.unchecked else []
    _line(out, f"{report.path}: {', '.join(counts)}")
    _unlisted(out, report.unlisted)
    for damage in report.damage:
        number = "" if damage.trajectory_id is None else f" (id {damage.trajectory_id})"
        _line(out, f"damaged: {damage.file}{number}{_problem(report.path, damage)}", "bold red")
    if report.unchecked:
        more = ", ..." if len(report.unchecked) > _MAX_NAMES else ""
        names = ", ".join(report.unchecked[:_MAX_NAMES])
        _line(out, f"not checked: {names}{more}: {_with_options(report.unchecked_because)}", "yellow")
    if report.ok:
        _line(out, "no damage found")


def _problem(path: str, damage: Damage) -> str:
    """Return the description of a damage without the path of the file, which is named before it."""
    for root in (Path(path), Path(path).absolute()):
        if damage.problem.startswith(f"{root / damage.file} "):
            return damage.problem.removeprefix(str(root / damage.file))
    return f": {damage.problem}"


def examined(report: Examination) -> None:
    """Print what the doctor found: errors in red, warnings in yellow, each with what to do."""
    out = _console()
    _line(out, f"{report.path}: {report.format}, {report.extent}")
    if report.decoded:
        _line(out, report.decoded)
    styles = {"error": "bold red", "warning": "yellow", "note": "cyan"}
    for finding in report.findings:
        out.print()
        place = f" in {finding.place}" if finding.place else ""
        _line(out, f"{finding.severity}: {finding.check}{place}", styles[finding.severity])
        _line(out, f"  {finding.message}")
        _line(out, f"  {finding.advice}", "dim")
    if report.findings:
        out.print()
    for check, count in report.omitted.items():
        _line(out, f"{number_of(count, 'more finding')} of {check}")
    _line(out, report.verdict, "bold" if report.findings else "bold green")


def _unlisted(out: console.Console, names: tuple[str, ...]) -> None:
    if names:
        shown = ", ".join(names[:3])
        count = number_of(len(names), "trajectory file")
        _line(out, f"{count} not in the index (removed or incomplete): {shown}")


# -- datasets -----------------------------------------------------------------------------------------------------


def dataset(report: DatasetReport) -> None:
    """Print the report on a dataset: a table of fields, the texts, and what was assumed."""
    out = _console()
    _line(out, report.path, "bold")
    _line(out, f"{report.format}: {report.extent}")
    rate = "" if report.fps is None else f"; {report.fps:g} rows per second"
    _line(out, f"{_lengths(report)}{rate}")
    _line(out, f"{_size(report.nbytes)} decoded, {_size(report.file_bytes)} in files")
    if report.cameras:
        _line(out, f"cameras: {', '.join(report.cameras)}")
    _table(out, _statistics(report.fields))
    _texts(out, report)
    for text_ in report.assumptions:
        _line(out, f"assumed: {text_}", "yellow")


def _lengths(report: DatasetReport) -> str:
    what = "episode" if report.episodes == 1 else "episodes"
    if report.shortest == report.longest:
        return f"{what} of {number_of(report.longest, 'row')}"
    return f"{what} of {report.shortest:,} to {report.longest:,} rows, median {report.median:,g}"


def exported(report: ExportReport) -> None:
    """Print the report on a dataset that was written."""
    counts = f"{number_of(report.rows, 'row')}, {number_of(report.episodes, 'episode')}"
    _line(_console(), f"{counts} as {report.format} in {report.path} ({_size(report.nbytes)} written)")


def _statistics(reports: tuple[FieldReport, ...]) -> table.Table:
    grid = _grid(("field", "type"), ("size", "min", "mean", "max", "NaN"))
    for field in reports:
        numbers = (_number(n) for n in (field.minimum, field.mean, field.maximum, field.nan_count))
        _add_row(grid, field.name, field.dtype + _shape(field.shape), _size(field.nbytes), *numbers)
    return grid


def _texts(out: console.Console, report: DatasetReport) -> None:
    """Print the texts of each field, the most frequent first."""
    for name in dict.fromkeys(each.field for each in report.texts):
        found = [each for each in report.texts if each.field == name]
        for each in found[:_MAX_TEXTS]:
            _line(out, f"{name}: {each.text} ({number_of(each.rows, 'row')})")
        if len(found) > _MAX_TEXTS:
            _line(out, f"{name}: {len(found) - _MAX_TEXTS} more, see --json")


def dataset_batch(report: DatasetSample) -> None:
    """Print the fields of one batch of a dataset, with statistics and its first rows."""
    out = _console()
    counts = f"{number_of(report.rows, 'row')}, {number_of(report.episodes, 'episode')}"
    _line(out, f"{report.format}: {counts} in {report.path}")
    unverified = f"; {_UNVERIFIED}" if report.format in {"checkpoint", "rlinf"} else ""
    count = number_of(report.num_samples, "row")
    _line(out, f"one batch of {count} in {report.sample_ms:.3g} ms, files opened included{unverified}")
    _table(out, _statistics(report.fields))
    grid = _grid(("field", *(f"episode {row.episode}, step {row.step}" for row in report.shown)), ())
    for place, field in enumerate(report.fields):
        _add_row(grid, field.name, *(row.values[place] for row in report.shown))
    _table(out, grid)


# -- formatting ---------------------------------------------------------------------------------------------------


def _console() -> console.Console:
    return console.Console(highlight=False)


def _escaped(words: str) -> str:
    """Return text with its control characters escaped, for example those in names of files."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)


def _plain(words: str, style: str = "") -> text.Text:
    """Return text that is printed literally."""
    return text.Text(_escaped(words), style=style)


def _line(out: console.Console, line: str, style: str = "") -> None:
    """Print a text; on a terminal, and where COLUMNS is set, it is wrapped at words: files get whole lines."""
    width = out.width if out.is_terminal or "COLUMNS" in os.environ else None
    out.print(_wrapped(line, style, width), soft_wrap=True)


def _wrapped(line: str, style: str, width: int | None) -> text.Text:
    """Return text with lines of at most `width` characters, unless a word is longer; the indent is that of the line."""
    shown = _escaped(line)
    if width is not None and len(shown) > width:
        indent = " " * (len(shown) - len(shown.lstrip()))
        shown = textwrap.fill(shown, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return text.Text(shown, style=style)


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


def _add_row(grid: table.Table, name: str, *cells: str) -> None:
    grid.add_row(_Name(name), *map(_plain, cells))


def _table(out: console.Console, grid: table.Table) -> None:
    """Print a table between empty lines."""
    out.print()
    out.print(grid)
    out.print()


def _grid(left: tuple[str, ...], right: tuple[str, ...]) -> table.Table:
    """Return an empty table with left-aligned and right-aligned columns."""
    grid = table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in left:
        grid.add_column(name, overflow="fold")
    for name in right:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(str(n) for n in shape)}]" if shape else ""


def _size(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}"
    return f"{value:.4g}"
