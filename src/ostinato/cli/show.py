"""What the commands print: progress, tables, errors. All layout is here, no decision."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostinato._optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich import box, console, progress, table, text

    from ostinato.demo import DqnConfig, Progress, Reopened, Report
    from ostinato.tools import ChainReport, CheckpointReport, PriorityReport
else:
    box, console, progress, table, text = (
        require(f"rich.{name}", "cli") for name in ("box", "console", "progress", "table", "text")
    )

__all__ = ["checkpoint", "error", "files", "plain", "result", "size", "training"]


def plain(words: str, style: str = "") -> text.Text:
    """Return text to print as it is; escapes that a terminal would obey, in names from files say, are spelt out."""
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return text.Text("".join(shown), style=style)


def error(message: str) -> None:
    """Print a message as one red line on stderr, in the words of the command line."""
    line = " ".join(message.split()).replace("allow_pickle=True", "--allow-pickle")
    console.Console(stderr=True).print(plain(f"error: {line}", "bold red"), soft_wrap=True)


@contextmanager
def training(config: DqnConfig) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar while the block runs; it yields the function to call with each `Progress`."""
    out = console.Console()
    out.print(f"[bold]Double DQN on CartPole-v1[/] through ostinato.ReplayBuffer, at most {config.steps:,} steps")
    bar = progress.Progress(
        progress.BarColumn(bar_width=16),
        progress.TextColumn("{task.completed:>6,.0f} steps  {task.fields[facts]}"),
        progress.TimeElapsedColumn(),
        console=out,
    )
    with bar:
        task = bar.add_task("train", total=config.steps, facts="")

        def on_progress(now: Progress) -> None:
            bar.update(task, completed=now.step, facts=_facts(now))

        yield on_progress
        bar.update(task, total=bar.tasks[task].completed)  # a run that stops early is done, too


def _facts(now: Progress) -> str:
    seen = "   -" if math.isnan(now.mean_return) else f"{now.mean_return:4.0f}"
    return f"return {seen}  buffer {now.rows / now.capacity:4.0%}  {now.samples_per_s / 1000:4.0f}k samples/s"


def result(report: Report) -> None:
    """Print what the training gave."""
    out = console.Console(highlight=False)
    episodes = len(report.evaluation_returns)
    out.print(
        f"Mean evaluation return over {episodes} new episodes: [bold green]{report.mean_return:.1f}[/] of 500 "
        f"(worst {min(report.evaluation_returns):.0f})",
        soft_wrap=True,
    )
    why = "the best validation, the latest of equals" if report.updates else "the start: nothing was learned yet"
    out.print(f"Weights: moving average at step {report.snapshot_step:,}, {why}", soft_wrap=True)
    calls = max(report.updates, 1)
    out.print(
        f"{report.steps:,} steps, {report.updates:,} updates in {report.seconds:.1f} s; of these "
        f"{report.buffer_s:.1f} s in the buffer ({report.buffer_s / calls * 1e6:.0f} us per update, extend included)",
        soft_wrap=True,
    )


def files(reopened: Reopened, drawn: Path) -> None:
    """Print what was written, and that it reads back."""
    out = console.Console(highlight=False)
    out.print(
        f"Checkpoint: {reopened.rows:,} rows, {size(reopened.nbytes)}, saved in {reopened.save_s * 1000:.0f} ms, "
        f"reopened in {reopened.load_s * 1000:.0f} ms; the next {reopened.batches} batches of both buffers are equal",
        soft_wrap=True,
    )
    out.print(plain(f"Picture:    {drawn}"), soft_wrap=True)
    out.print(plain(f"Look inside: ostinato inspect {reopened.path}"), soft_wrap=True)


def checkpoint(report: CheckpointReport) -> None:
    """Print a checkpoint's report as a table."""
    out = console.Console(highlight=False)
    out.print(plain(report.path, "bold"), soft_wrap=True)
    out.print(
        f"{report.rows:,} of {report.capacity:,} rows, {size(report.nbytes)}; {report.rows_written:,} rows written and "
        f"{report.rows_drawn:,} drawn so far",
        soft_wrap=True,
    )
    out.print(
        plain(f"{report.storage}, {report.sampler}, {report.writer}; {report.format} {report.version}"), soft_wrap=True
    )
    resume = "exactly where it stopped" if report.exact_resume else "with new random numbers (no generator was saved)"
    checks = "all checksums fit" if report.verified else "checksums not compared"
    out.print(f"{checks}; sampling goes on {resume}", soft_wrap=True)
    if report.priorities is not None:
        out.print(_priorities(report.priorities), soft_wrap=True)
    for chain in report.chains:
        out.print(plain(f"{chain.name}: {chain_words(chain)}"), soft_wrap=True)
    out.print(_fields(report))


def chain_words(chain: ChainReport) -> str:
    """Say in a line what a chain is made of."""
    base, *patches = chain.links
    words = ", ".join(
        f"{link.rows:,} rows in {link.runs:,} run{'s' * (link.runs > 1)} {size(link.nbytes)}" for link in patches
    )
    return f"base of {base.rows:,} rows {size(base.nbytes)}, then {len(patches)} patches: {words}"


def _priorities(seen: PriorityReport) -> str:
    if seen.minimum is None:
        return f"priorities of {seen.rows:,} rows (alpha {seen.alpha:g}, beta {seen.beta:g})"
    numbers = f"min {_number(seen.minimum)}, mean {_number(seen.mean)}, max {_number(seen.maximum)}"
    share = f"{seen.zero_share or 0:.0%} zero"
    return f"priorities of {seen.rows:,} rows: {numbers}, {share} (alpha {seen.alpha:g}, beta {seen.beta:g})"


def _fields(report: CheckpointReport) -> table.Table:
    """Lay out the fields; rows get a column only where some rows lack a field."""
    ragged = any(field.rows != report.rows for field in report.fields)
    grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("field", "type"):
        grid.add_column(name, overflow="fold")
    for name in (*(["rows"] if ragged else []), "size", "min", "mean", "max", "NaN"):
        grid.add_column(name, justify="right", no_wrap=True)
    for field in report.fields:
        shape = f"[{', '.join(str(n) for n in field.shape)}]" if field.shape else ""
        rows = [f"{field.rows:,}"] if ragged else []
        numbers = (_number(n) for n in (field.minimum, field.mean, field.maximum, field.nan_count))
        cells = (field.name, field.dtype + shape, *rows, size(field.nbytes), *numbers)
        grid.add_row(*(plain(cell) for cell in cells))
    return grid


def size(nbytes: int) -> str:
    """Write a number of bytes with a unit."""
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
