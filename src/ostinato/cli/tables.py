"""What the commands for trajectories print: tables, sums and a progress bar. All layout, no decision."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato._optional import require
from ostinato.cli.show import plain, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich import box, console, progress, table

    from ostinato.cli.trajectories import Sampled
    from ostinato.compat.torchrl import ImportReport
    from ostinato.tools import CompactReport, ConvertReport, MoveReport, StoreReport, VerifyReport
else:
    box, console, progress, table = (require(f"rich.{name}", "cli") for name in ("box", "console", "progress", "table"))

__all__ = ["batch", "compacted", "converted", "imported", "moved", "progress_bar", "store", "verified"]


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, if that is a terminal, while the block runs.

    Yields:
        The function to call with what is done, and of how many.
    """
    out = console.Console(stderr=True)
    columns = (
        progress.TextColumn(title),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def store(report: StoreReport) -> None:
    """Print what a directory of trajectories holds."""
    out = console.Console(highlight=False)
    out.print(plain(report.path, "bold"), soft_wrap=True)
    shapes = ", ".join(f"{steps} x {envs}" for steps, envs in report.shapes[:4])
    more = " and others" if len(report.shapes) > 4 else ""
    _line(
        out,
        f"{report.trajectories:,} trajectories, {report.total_samples:,} transitions ({shapes or 'none'} steps x "
        f"environments{more}), {report.models:,} models",
    )
    nbytes = "" if report.nbytes is None else f", {size(report.nbytes)}"
    resume = "exactly where it stopped" if report.exact_resume else f"from its seed {report.seed}"
    _line(
        out,
        f"{report.trajectory_format}{nbytes}; the next id is {report.trajectory_counter}; sampling goes on {resume}",
    )
    if report.journal:
        _line(out, "a journal waits to be folded in: the directory is in use, or its process was killed")
    _unlisted(out, report.unlisted)
    if report.keys:
        out.print(_keys(report))


def _keys(report: StoreReport) -> table.Table:
    ragged = any(key.trajectories != report.trajectories for key in report.keys)
    grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("key", "type"):
        grid.add_column(name, overflow="fold")
    for name in (*(["trajectories"] if ragged else []), "size"):
        grid.add_column(name, justify="right", no_wrap=True)
    for key in report.keys:
        counts = [f"{key.trajectories:,}"] if ragged else []
        grid.add_row(*map(plain, (key.name, key.dtype + _shape(key.shape), *counts, size(key.nbytes))))
    return grid


def batch(report: Sampled) -> None:
    """Print the keys of one batch."""
    out = console.Console(highlight=False)
    _line(out, f"{report.trajectories:,} trajectories, {report.total_samples:,} transitions in {report.path}")
    _line(out, f"one batch of {report.num_chunks:,} in {report.sample_ms:.3g} ms")
    grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("key", "dtype", "shape"):
        grid.add_column(name, overflow="fold")
    for name, dtype, shape in report.keys:
        grid.add_row(*map(plain, (name, dtype, _shape(shape))))
    out.print(grid)


def moved(report: MoveReport) -> None:
    """Print what was joined or divided."""
    out = console.Console(highlight=False)
    again = ", going on with an earlier run" if report.resumed else ""
    counts = f"{report.trajectories:,} trajectories, {report.total_samples:,} transitions"
    _line(out, f"{counts} {report.how} to {report.path}{again}")
    for source in report.sources:
        _line(out, f"from {source}")
    for source in report.left:
        _line(out, f"{source} lists trajectories that came later: they stay there")


def converted(report: ConvertReport) -> None:
    """Print what was converted."""
    out = console.Console(highlight=False)
    sizes = f"{size(report.source_bytes)} read, {size(report.nbytes)} written"
    _line(out, f"{report.trajectories:,} trajectories as {report.trajectory_format} in {report.path} ({sizes})")


def compacted(report: CompactReport) -> None:
    """Print what was folded."""
    out = console.Console(highlight=False)
    if not report.patches:
        _line(out, f"{report.path} has no patches: nothing to fold")
        return
    sizes = f"{size(report.bytes_before)} before, {size(report.bytes_after)} now"
    _line(out, f"{report.patches:,} patch{'es' * (report.patches > 1)} folded in {report.path}: {sizes}")


def imported(report: ImportReport) -> None:
    """Print what was taken over from another library; what was not in yellow."""
    out = console.Console(highlight=False)
    _line(out, f"{report.rows:,} rows of {report.capacity:,} in {report.path}")
    _line(
        out, f"{report.storage} (ndim={report.ndim}), {report.sampler}, {report.writer}, batch_size={report.batch_size}"
    )
    for note in report.notes:
        out.print(plain(note, "yellow"), soft_wrap=True)


def verified(report: VerifyReport) -> None:
    """Print what reading everything found; damage in red."""
    out = console.Console(highlight=False)
    _line(
        out,
        f"{report.files:,} files, {size(report.nbytes)} read, {report.checksums:,} checksums compared in {report.path}",
    )
    _unlisted(out, report.unlisted)
    for damage in report.damage:
        number = "" if damage.trajectory_id is None else f" (id {damage.trajectory_id})"
        out.print(plain(f"damaged: {damage.file}{number}: {damage.problem}", "bold red"), soft_wrap=True)
    if not report.damage:
        _line(out, "all whole")


def _unlisted(out: console.Console, names: tuple[str, ...]) -> None:
    if names:
        _line(
            out,
            f"{len(names):,} trajectory files that no list names (cleared, or never finished): {', '.join(names[:3])}",
        )


def _line(out: console.Console, line: str) -> None:
    out.print(plain(line), soft_wrap=True)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(str(n) for n in shape)}]" if shape else ""
