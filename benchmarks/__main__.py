"""Command line of the benchmarks: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.coordinator import ROOT, SEATS, Table, run
from benchmarks.published import Published, markdown, publish
from benchmarks.records import Report
from benchmarks.report import markdown_targets, print_report
from benchmarks.workloads import WORKLOADS, select

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_JSON = ROOT / "build" / "bench.json"
PEERS_VARIABLE = "OSTINATO_BENCH_PEERS_PYTHON"


def _parser() -> argparse.ArgumentParser:
    families = ", ".join(dict.fromkeys(load.family for load in WORKLOADS))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures Ostinato beside its peers.")
    parser.add_argument("--quick", action="store_true", help="small buffers and 3 rounds: a look, not a result")
    parser.add_argument("--only", metavar="LIST", help=f"workloads or families, separated by commas: {families}")
    parser.add_argument(
        "--libraries", metavar="LIST", help=f"separated by commas: {', '.join(seat.name for seat in SEATS)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds per workload (7; 3 when quick)")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, metavar="FILE", help="where to write the report")
    parser.add_argument(
        "--peers-python",
        default=os.environ.get(PEERS_VARIABLE, sys.executable),
        metavar="EXE",
        help=f"interpreter with benchmarks/requirements.txt installed (${PEERS_VARIABLE}, else this one)",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print docs/benchmarks.md's table of a report")
    parser.add_argument(
        "--publish", type=Path, metavar="FILE", help="write a report's times to published.json, docs and README"
    )
    parser.add_argument("--targets", type=Path, metavar="FILE", help="print the targets of a report as markdown")
    return parser


def _words(value: str | None) -> list[str] | None:
    return None if value is None else [word.strip() for word in value.split(",") if word.strip()]


def _read(path: Path) -> Report:
    return Report.from_json(json.loads(path.read_text()))


def _publish(path: Path) -> int:
    try:
        written = publish(_read(path))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("".join(f"wrote {file.relative_to(ROOT)}\n" for file in written))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and returns the exit status: 0, or 2 where the arguments are wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.publish is not None:
        return _publish(options.publish)
    if options.markdown is not None:
        sys.stdout.write(markdown(Published.of(_read(options.markdown))))
        return 0
    if options.targets is not None:
        sys.stdout.write(markdown_targets(_read(options.targets)))
        return 0
    rounds = options.rounds if options.rounds is not None else 3 if options.quick else 7
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        loads = select(options.only, quick=options.quick)
        table = Table(_words(options.libraries), str(Path(options.peers_python).absolute()))
    except ValueError as error:
        parser.error(str(error))
    with table, console.status("starting the libraries") as status:
        settings: dict[str, str | int | bool] = {"quick": options.quick, "only": options.only or "all"}
        report = run(loads, table, rounds, settings, status.update)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    print_report(report, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
