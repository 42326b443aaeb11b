"""A report as tables for the terminal, and its targets as markdown; the tables of docs are those of `published`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from benchmarks.published import QUICK, ratio, versions
from benchmarks.records import LIMIT_PREFIX, fastest_limit_s
from benchmarks.targets import OURS, human

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.records import Report, Section

_WORDS = {True: ("met", "green"), False: ("missed", "red"), None: ("not judged", "yellow")}


def _ours_s(section: Section) -> float | None:
    return section.results[OURS].median_s if _measured(section, OURS) else None


def print_report(report: Report, console: Console) -> None:
    """Print every workload with every library, also those that are missing, and the verdicts."""
    for section in report.sections:
        _print_section(section, report, console)
    if report.settings.get("quick"):
        console.print(QUICK)
    machine = report.machine
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}; "
        f"one thread.\nmedian: of {report.settings['rounds']} rounds; "
        "vs us, vs limit: time divided by Ostinato's, by that of the fastest limit; p99 and worst call: of a "
        "usual round; its CPU: the same without interruptions by others; spread: slowest round by fastest."
    )
    console.print(Text(f"Measured: {versions(report.libraries)}"))
    for library in report.libraries:
        if library.missing is not None:
            console.print(Text(f"Missing: {library.title}: {library.missing}", style="yellow"))


def _print_section(section: Section, report: Report, console: Console) -> None:
    console.print(section_table(section, report))
    console.print(Text(f"limit: {section.limit}", style="dim"))
    for line in absent(section, report):
        console.print(Text(line, style="dim"))
    for verdict in section.verdicts:
        word, colour = _WORDS[verdict.met]
        console.print(Text.assemble((f"{word:>10}", colour), f"  {verdict.target}: {verdict.measured}"))
    console.print()


def section_table(section: Section, report: Report) -> Table:
    """Return the table of one workload, fastest first."""
    table = Table(title=section.title, title_justify="left", title_style="bold")
    table.add_column("library", min_width=22)
    for head in ("median", "vs us", "vs limit", "mean", "p99", "worst call", "its CPU", "spread"):
        table.add_column(head, justify="right", min_width=8)
    ours_s, limit_s = _ours_s(section), fastest_limit_s(section.results)
    titles = _titles(report)
    measured = {name: result for name, result in section.results.items() if result.rounds}
    for name, result in sorted(measured.items(), key=lambda item: item[1].median_s):
        style = "bold" if name == OURS else "dim" if name.startswith(LIMIT_PREFIX) else None
        times = [human(value) for value in (result.mean_s, result.p99_s, result.worst_s, result.worst_cpu_s)]
        if all(turn.calls == 1 for turn in result.rounds):
            times = [""] * len(times)  # one call: these would repeat its time, or time the waiting for a process
        ratios = ("" if other_s is None else ratio(result.median_s, other_s) for other_s in (ours_s, limit_s))
        cells = (human(result.median_s), *ratios, *times, f"{result.spread:.2f}x")
        table.add_row(Text(titles[name]), *cells, style=style)
    return table


def absent(section: Section, report: Report) -> list[str]:
    """Return a line for each reason why libraries have no numbers in a section."""
    reasons: dict[str, list[str]] = {}
    for library in report.libraries:
        result = section.results[library.name]
        if not result.rounds:
            reason = "missing, see below" if library.missing is not None else result.missing
            reasons.setdefault(reason or "not measured", []).append(library.title)
    return [f"not here: {', '.join(names)} ({reason})" for reason, names in reasons.items()]


def markdown_targets(report: Report) -> str:
    """Return a table with one row per target and whether it was met."""
    lines = ["| work | target | measured | |", "|---|---|---|---|"]
    for section in report.sections:
        for verdict in section.verdicts:
            cells = (section.title, verdict.target, verdict.measured, _WORDS[verdict.met][0])
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _measured(section: Section, name: str) -> bool:
    return name in section.results and bool(section.results[name].rounds)


def _titles(report: Report) -> dict[str, str]:
    return {library.name: library.title for library in report.libraries}
