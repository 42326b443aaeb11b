"""What a report says on a terminal: its facts, one in a line, and tables, which `ostinato.cli.output` prints."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.cli.output import Part, Styled, Table, with_options
from ostinato.core.options import number_of
from ostinato.storages.memory import show_bytes
from ostinato.tools import DatasetSample, Report, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["parts_of"]

_LABELS = {
    "bytes_after": "size now",
    "bytes_before": "size before",
    "cuts": "not whole",
    "exact_resume": "resumes exactly",
    "file_bytes": "size of files",
    "fps": "rows per second",
    "how": "files were",
    "journal": "in use, or was killed",
    "left": "received more meanwhile",
    "maximum": "max",
    "minimum": "min",
    "nan_count": "NaN",
    "nbytes": "size",
    "needed_bytes": "needed by groups",
    "num_samples": "rows of the batch",
    "resumed": "resumed an earlier run",
    "rows_drawn": "drawn",
    "rows_written": "written",
    "sample_ms": "milliseconds",
    "save_error": "error",
    "save_failures": "failures",
    "saved_write_count": "saved",
    "shapes": "steps x environments",
    "source_bytes": "size of source",
    "total_samples": "transitions",
    "trajectory_counter": "next id",
    "unlisted": "not in the index",
    "verified": "checksums verified",
    "write_count": "written",
}
"""Names of facts and columns; others are those of the fields of the report."""
_STYLES = dict.fromkeys(("assumptions", "cuts", "left", "left_out_because", "notes", "unchecked", "unlisted"), "yellow")
_SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_JSON_ALONE = {"schema"}
"""Columns that are too wide for a terminal."""
_MAX_LINES = 10
_MAX_ROWS = 40


@singledispatch
def parts_of(report: Any) -> Iterator[Part]:
    """Yield everything that a report has, under its name; what is None or empty is left out.

    Args:
        report: A dataclass. The first field is the title. Fields that are records, or lists of texts, are facts, and
            lists of records are tables.
    """
    title, *names = (field.name for field in fields(report))
    found = {name: getattr(report, name) for name in names}
    yield from _described(getattr(report, title), found)


def _described(title: str, found: dict[str, Any]) -> Iterator[Part]:
    yield Styled(title, "bold")
    tables = {name: _table(value) for name, value in found.items() if _is_table(value)}
    facts = {name: value for name, value in found.items() if name not in tables and value not in (None, "", (), [], {})}
    width = max((len(_label(name)) for name in facts), default=0)
    for name, value in facts.items():
        lines = [_cell("", one) for one in value] if isinstance(value, (list, tuple)) else [_cell(name, value)]
        more = [f"{len(lines) - _MAX_LINES:,} more, see --json"] if len(lines) > _MAX_LINES else []
        for place, line in enumerate([*lines[:_MAX_LINES], *more]):
            yield Styled(f"  {'' if place else _label(name):<{width}}  {line}", _STYLES.get(name, ""), width + 4)
    for each in tables.values():
        yield each._replace(rows=each.rows[:_MAX_ROWS])
        if len(each.rows) > _MAX_ROWS:
            yield f"{len(each.rows) - _MAX_ROWS:,} more, see --json"


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " "))


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and bool(_items(value[0]))


def _items(record: Any) -> dict[str, Any]:
    """Return the fields of a record; none for another value."""
    if is_dataclass(record):
        return {field.name: getattr(record, field.name) for field in fields(record)}
    return record if isinstance(record, dict) else getattr(record, "_asdict", dict)()


def _table(records: Any) -> Table:
    rows = [_items(record) for record in records]
    names = [name for name in rows[0] if name not in _JSON_ALONE]
    return Table(tuple(map(_label, names)), [tuple(_cell(name, row[name]) for name in names) for row in rows])


def _cell(name: str, value: Any) -> str | None:
    """Return a value in words; None stays None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) and abs(value) < 10**9
        return show_bytes(value) if "bytes" in name else f"{value:,}" if whole else f"{value:.4g}"
    if not value:
        return None
    if name == "shape":
        return str(list(value))
    if _items(value):
        return ", ".join(f"{_label(key)} {_cell(key, one)}" for key, one in _items(value).items() if one is not None)
    return (" x " if isinstance(value[0], int) else "; ").join(str(_cell(name, one)) for one in value)


@parts_of.register(DatasetSample)
def _batch(report: DatasetSample) -> Iterator[Part]:
    """Yield also the first rows, with a column for each."""
    found = _items(report)
    shown = found.pop("shown")
    yield from _described(found.pop("path"), found)
    names = (f"episode {row.episode}, step {row.step}" for row in shown)
    rows = [(field.name, *(row.values[place] for row in shown)) for place, field in enumerate(report.fields)]
    yield Table(("name", *names), rows)


@parts_of.register(VerifyReport)
def _verified(report: VerifyReport) -> Iterator[Part]:
    """Yield damaged files in red, after the facts."""
    found = {**_items(report), "unchecked_because": with_options(report.unchecked_because)}
    damage = found.pop("damage")
    yield from _described(found.pop("path"), found)
    for one in damage:
        identity = "" if one.trajectory_id is None else f" (id {one.trajectory_id})"
        problem = one.problem.replace(f"{Path(report.path, one.file)} ", "", 1)  # named before it
        yield Styled(f"damaged: {one.file}{identity}: {problem}", "bold red")
    if report.ok:
        yield "no damage found"


@parts_of.register(Report)
def _examined(report: Report) -> Iterator[Part]:
    """Yield what the doctor found: errors in red, warnings in yellow, each with what to do."""
    yield f"{report.path}: {report.format}, {report.extent}"
    if report.decoded:
        yield report.decoded
    for finding in report.findings:
        place = f" in {finding.place}" if finding.place else ""
        yield from ("", Styled(f"{finding.severity}: {finding.check}{place}", _SEVERITIES[finding.severity]))
        yield from (Styled(f"  {finding.message}", "", 2), Styled(f"  {finding.advice}", "dim", 2))
    if report.findings:
        yield ""
    for check, count in report.omitted.items():
        yield f"{number_of(count, 'more finding')} of {check}"
    yield Styled(report.verdict, "bold" if report.findings else "bold green")
