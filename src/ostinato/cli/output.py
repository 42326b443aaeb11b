"""The output of the commands: JSON, tables, progress bars and error messages."""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ostinato._optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich import box, console, progress, table, text

    from ostinato.cli.commands import SampleReport
    from ostinato.cli.fleets import FleetReport
    from ostinato.compat.torchrl import ImportReport
    from ostinato.datasets.export import ExportReport
    from ostinato.demo import DqnConfig, Reopened, Report, TrainingState
    from ostinato.tools import (
        ChainReport,
        CheckpointReport,
        CompactReport,
        ConvertReport,
        FieldReport,
        MoveReport,
        PriorityReport,
        StoreReport,
        VerifyReport,
    )
    from ostinato.tools import Report as Examination
    from ostinato.tools.datasets import DatasetReport, DatasetSample
else:
    box, console, progress, table, text = (
        require(f"rich.{name}", "cli") for name in ("box", "console", "progress", "table", "text")
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
    "files",
    "fleet",
    "fleet_view",
    "imported",
    "moved",
    "result",
    "store",
    "to_json",
    "training",
    "verified",
]

_T = TypeVar("_T")
_MAX_TEXTS = 10
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


def error(message: str) -> None:
    """Print a message as one red line on stderr, with the names of command-line options."""
    line = " ".join(message.split()).replace("allow_pickle=True", "--allow-pickle").replace("give fps=", "give --fps")
    console.Console(stderr=True).print(_plain(f"error: {line}", "bold red"), soft_wrap=True)


# -- sharded buffers ----------------------------------------------------------------------------------------------


def fleet(report: FleetReport) -> None:
    """Print the report on a sharded buffer, with a table of shards."""
    _console().print(fleet_view(report))


def fleet_view(report: FleetReport) -> console.Group:
    """Return the report on a sharded buffer, to be printed."""
    lines = [f"{report.name}: {report.rows:,} rows in {len(report.shards):,} shards"]
    if report.rate_limiter is not None:
        counts = f"{report.limiter_written:,} rows written, {report.limiter_drawn:,} drawn"
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
    _line(out, report.path, "bold")
    _line(
        out,
        f"{report.rows:,} of {report.capacity:,} rows, {_size(report.nbytes)}; "
        f"{report.rows_written:,} rows written and {report.rows_drawn:,} drawn so far",
    )
    _line(out, f"{report.storage}, {report.sampler}, {report.writer}; {report.format} {report.version}")
    resume = "exactly where it stopped" if report.exact_resume else "with new random numbers (no generator was saved)"
    checks = "all checksums match" if report.verified else "checksums not verified"
    _line(out, f"{checks}; sampling resumes {resume}")
    if report.priorities is not None:
        _line(out, _priorities(report.priorities))
    for chain in report.chains:
        _line(out, f"{chain.name}: {_chain(chain)}")
    out.print(_fields(report))


def _chain(chain: ChainReport) -> str:
    base, *patches = chain.links
    parts = ", ".join(
        f"{link.rows:,} rows in {link.runs:,} run{'s' * (link.runs > 1)} {_size(link.nbytes)}" for link in patches
    )
    return f"base of {base.rows:,} rows {_size(base.nbytes)}, then {len(patches)} patches: {parts}"


def _priorities(report: PriorityReport) -> str:
    if report.minimum is None:
        return f"priorities of {report.rows:,} rows (alpha {report.alpha:g}, beta {report.beta:g})"
    numbers = f"min {_number(report.minimum)}, mean {_number(report.mean)}, max {_number(report.maximum)}"
    share = f"{report.zero_share or 0:.0%} zero"
    return f"priorities of {report.rows:,} rows: {numbers}, {share} (alpha {report.alpha:g}, beta {report.beta:g})"


def _fields(report: CheckpointReport) -> table.Table:
    """Return the table of fields; with a column for rows only if some rows lack a field."""
    ragged = any(field.rows != report.rows for field in report.fields)
    grid = _grid(("field", "type"), (*(["rows"] if ragged else []), "size", "min", "mean", "max", "NaN"))
    for field in report.fields:
        rows = [f"{field.rows:,}"] if ragged else []
        numbers = (_number(n) for n in (field.minimum, field.mean, field.maximum, field.nan_count))
        cells = (field.name, field.dtype + _shape(field.shape), *rows, _size(field.nbytes), *numbers)
        grid.add_row(*map(_plain, cells))
    return grid


def compacted(report: CompactReport) -> None:
    """Print the report on merged patches."""
    out = _console()
    if not report.patches:
        _line(out, f"{report.path} has no patches: nothing to do")
        return
    sizes = f"{_size(report.bytes_before)} before, {_size(report.bytes_after)} now"
    _line(out, f"{report.patches:,} patch{'es' * (report.patches > 1)} merged in {report.path}: {sizes}")


def imported(report: ImportReport) -> None:
    """Print the report on an imported checkpoint; in yellow, what could not be imported."""
    out = _console()
    _line(out, f"{report.rows:,} rows of {report.capacity:,} in {report.path}")
    _line(
        out, f"{report.storage} (ndim={report.ndim}), {report.sampler}, {report.writer}, batch_size={report.batch_size}"
    )
    for note in report.notes:
        _line(out, note, "yellow")


# -- directories of trajectories ----------------------------------------------------------------------------------


def store(report: StoreReport) -> None:
    """Print the report on a directory of trajectories, with a table of keys."""
    out = _console()
    _line(out, report.path, "bold")
    shapes = ", ".join(f"{steps} x {envs}" for steps, envs in report.shapes[:4])
    more = " and others" if len(report.shapes) > 4 else ""
    _line(
        out,
        f"{report.trajectories:,} trajectories, {report.total_samples:,} transitions ({shapes or 'none'} steps x "
        f"environments{more}), {report.models:,} models",
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
        out.print(_keys(report))


def _keys(report: StoreReport) -> table.Table:
    ragged = any(key.trajectories != report.trajectories for key in report.keys)
    grid = _grid(("key", "type"), (*(["trajectories"] if ragged else []), "size"))
    for key in report.keys:
        counts = [f"{key.trajectories:,}"] if ragged else []
        grid.add_row(*map(_plain, (key.name, key.dtype + _shape(key.shape), *counts, _size(key.nbytes))))
    return grid


def batch(report: SampleReport) -> None:
    """Print the keys of one batch."""
    out = _console()
    _line(out, f"{report.trajectories:,} trajectories, {report.total_samples:,} transitions in {report.path}")
    _line(out, f"one batch of {report.num_chunks:,} in {report.sample_ms:.3g} ms")
    grid = _grid(("key", "dtype", "shape"), ())
    for name, dtype, shape in report.keys:
        grid.add_row(*map(_plain, (name, dtype, _shape(shape))))
    out.print(grid)


def moved(report: MoveReport) -> None:
    """Print the report on a merge or a split."""
    out = _console()
    resumed = ", resuming an earlier run" if report.resumed else ""
    counts = f"{report.trajectories:,} trajectories, {report.total_samples:,} transitions"
    _line(out, f"{counts} {report.how} to {report.path}{resumed}")
    for source in report.sources:
        _line(out, f"from {source}")
    for source in report.left:
        _line(out, f"{source} has trajectories that were added during the move: they stay there")


def converted(report: ConvertReport) -> None:
    """Print the report on a conversion."""
    sizes = f"{_size(report.source_bytes)} read, {_size(report.nbytes)} written"
    _line(_console(), f"{report.trajectories:,} trajectories as {report.trajectory_format} in {report.path} ({sizes})")


def verified(report: VerifyReport) -> None:
    """Print the result of a verification; damaged files in red."""
    out = _console()
    _line(
        out,
        f"{report.files:,} files, {_size(report.nbytes)} read, {report.checksums:,} checksums verified "
        f"in {report.path}",
    )
    _unlisted(out, report.unlisted)
    for damage in report.damage:
        number = "" if damage.trajectory_id is None else f" (id {damage.trajectory_id})"
        _line(out, f"damaged: {damage.file}{number}: {damage.problem}", "bold red")
    if not report.damage:
        _line(out, "no damage found")


def examined(report: Examination) -> None:
    """Print what the doctor found: errors in red, warnings in yellow, each with what to do."""
    out = _console()
    _line(out, f"{report.path}: {report.format}, {report.episodes:,} episodes, {report.rows:,} rows")
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
        _line(out, f"{count:,} more findings of {check}")
    _line(out, report.verdict, "bold" if report.findings else "bold green")


def _unlisted(out: console.Console, names: tuple[str, ...]) -> None:
    if names:
        shown = ", ".join(names[:3])
        _line(out, f"{len(names):,} trajectory files not in the index (removed or incomplete): {shown}")


# -- datasets -----------------------------------------------------------------------------------------------------


def dataset(report: DatasetReport) -> None:
    """Print the report on a dataset: a table of fields, the texts, and what was assumed."""
    out = _console()
    _line(out, report.path, "bold")
    _line(out, f"{report.format}: {report.rows:,} rows, {report.episodes:,} episode{'s' * (report.episodes != 1)}")
    lengths = f"{report.shortest:,} to {report.longest:,} rows, median {report.median:,g}"
    rate = "" if report.fps is None else f"; {report.fps:g} rows per second"
    _line(out, f"episodes of {lengths}{rate}")
    _line(out, f"{_size(report.nbytes)} decoded, {_size(report.file_bytes)} in files")
    if report.cameras:
        _line(out, f"cameras: {', '.join(report.cameras)}")
    out.print(_statistics(report.fields))
    _texts(out, report)
    for text_ in report.assumptions:
        _line(out, f"assumed: {text_}", "yellow")


def exported(report: ExportReport) -> None:
    """Print the report on a dataset that was written."""
    counts = f"{report.rows:,} rows, {report.episodes:,} episode{'s' * (report.episodes != 1)}"
    _line(_console(), f"{counts} as {report.format} in {report.path} ({_size(report.nbytes)} written)")


def _statistics(reports: tuple[FieldReport, ...]) -> table.Table:
    grid = _grid(("field", "type"), ("size", "min", "mean", "max", "NaN"))
    for field in reports:
        numbers = (_number(n) for n in (field.minimum, field.mean, field.maximum, field.nan_count))
        grid.add_row(*map(_plain, (field.name, field.dtype + _shape(field.shape), _size(field.nbytes), *numbers)))
    return grid


def _texts(out: console.Console, report: DatasetReport) -> None:
    """Print the texts of each field, the most frequent first."""
    for name in dict.fromkeys(each.field for each in report.texts):
        found = [each for each in report.texts if each.field == name]
        for each in found[:_MAX_TEXTS]:
            _line(out, f"{name}: {each.text} ({each.rows:,} rows)")
        if len(found) > _MAX_TEXTS:
            _line(out, f"{name}: {len(found) - _MAX_TEXTS} more, see --json")


def dataset_batch(report: DatasetSample) -> None:
    """Print the fields of one batch of a dataset, with statistics and its first rows."""
    out = _console()
    _line(out, f"{report.format}: {report.rows:,} rows, {report.episodes:,} episodes in {report.path}")
    _line(out, f"one batch of {report.num_chunks:,} rows in {report.sample_ms:.3g} ms, files opened included")
    out.print(_statistics(report.fields))
    grid = _grid(("field", *(f"episode {row.episode}, step {row.step}" for row in report.shown)), ())
    for place, field in enumerate(report.fields):
        grid.add_row(*map(_plain, (field.name, *(row.values[place] for row in report.shown))))
    out.print(grid)


# -- the demo -----------------------------------------------------------------------------------------------------


@contextmanager
def training(config: DqnConfig) -> Iterator[Callable[[TrainingState], None]]:
    """Show the state of the training in a line while the block runs; yields the function to call with each.

    Unlike `ostinato.durable.progress` it appears at once, tells returns and speed, and stays.
    """
    out = console.Console()
    out.print(f"[bold]Double DQN on CartPole-v1[/] with ostinato.ReplayBuffer, at most {config.steps:,} steps")
    bar = progress.Progress(
        progress.BarColumn(bar_width=16),
        progress.TextColumn("{task.completed:>6,.0f} steps  {task.fields[facts]}"),
        progress.TimeElapsedColumn(),
        console=out,
    )
    with bar:
        task = bar.add_task("train", total=config.steps, facts="")

        def show(now: TrainingState) -> None:
            bar.update(task, completed=now.step, facts=_facts(now))

        yield show
        bar.update(task, total=bar.tasks[task].completed)  # a run that stopped early is complete as well


def _facts(now: TrainingState) -> str:
    returned = "   -" if math.isnan(now.mean_return) else f"{now.mean_return:4.0f}"
    return f"return {returned}  buffer {now.rows / now.capacity:4.0%}  {now.samples_per_s / 1000:4.0f}k samples/s"


def result(report: Report) -> None:
    """Print the result of the training."""
    out = _console()
    episodes = len(report.evaluation_returns)
    out.print(
        f"Mean evaluation return over {episodes} new episodes: [bold green]{report.mean_return:.1f}[/] of 500 "
        f"(minimum {min(report.evaluation_returns):.0f})",
        soft_wrap=True,
    )
    why = "the best validation, the latest if several" if report.updates else "the start: no updates were made"
    _line(out, f"Weights: moving average at step {report.snapshot_step:,}, {why}")
    calls = max(report.updates, 1)
    _line(
        out,
        f"{report.steps:,} steps, {report.updates:,} updates in {report.seconds:.1f} s, of which "
        f"{report.buffer_s:.1f} s in the buffer ({report.buffer_s / calls * 1e6:.0f} us per update, extend included)",
    )


def files(reopened: Reopened, image: Path) -> None:
    """Print the files that were written and the result of reading them back."""
    out = _console()
    _line(
        out,
        f"Checkpoint: {reopened.rows:,} rows, {_size(reopened.nbytes)}, saved in {reopened.save_s * 1000:.0f} ms, "
        f"reloaded in {reopened.load_s * 1000:.0f} ms; the next {reopened.batches} batches of both buffers are equal",
    )
    _line(out, f"Figure:     {image}")
    _line(out, f"Contents:   ostinato inspect {reopened.path}")


# -- formatting ---------------------------------------------------------------------------------------------------


def _console() -> console.Console:
    return console.Console(highlight=False)


def _plain(words: str, style: str = "") -> text.Text:
    """Return text that is printed literally; control characters, for example in names of files, are escaped."""
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return text.Text("".join(shown), style=style)


def _line(out: console.Console, line: str, style: str = "") -> None:
    out.print(_plain(line, style), soft_wrap=True)


def _grid(left: tuple[str, ...], right: tuple[str, ...]) -> table.Table:
    """Return an empty table with left-aligned and right-aligned columns."""
    grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
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
