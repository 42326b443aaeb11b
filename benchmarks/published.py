"""The measurements that the documentation shows: kept as data, from which all of its tables are written.

`published.json` holds the median of each round, so that tables give medians and the site's picture the spread.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.records import LIMIT_PREFIX, Library, Report
from benchmarks.targets import OURS, human

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
DATA = "benchmarks/published.json"
FORMAT = 1
MICROSECONDS = 1e6
QUICK = "A quick run: small buffers and few calls. Neither times nor verdicts are those of the full sizes."
PEERS = ("torchrl", "cpprb", "sb3", "tianshou", "rlox", "rlinf", "isaacgymenvs")
"""The peers' columns of the table, where they were measured."""
README_PEERS = PEERS[:5]
README_WORKS = (
    "uniform.dict",
    "extend.dict",
    "add.dict",
    "prioritized.dict",
    "slices.dict",
    "slices-writing.dict",
    "images.dict",
    "mmap.dict",
    "amp.dict",
    "start.import",
)
"""The rows of README's table."""
BEGIN, END = "<!-- times: written by python -m benchmarks --publish -->", "<!-- end of times -->"


@dataclass(frozen=True)
class Times:
    """What one library needed for one work: seconds per call, the median of each round."""

    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_s)

    @property
    def range_s(self) -> tuple[float, float]:
        """The fastest and the slowest round."""
        return min(self.rounds_s), max(self.rounds_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Half of the rounds lie between these."""
        if len(self.rounds_s) == 1:
            return self.range_s
        first, _, third = statistics.quantiles(self.rounds_s, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True)
class Work:
    """One workload with the times of the libraries that did it."""

    name: str
    title: str
    limit: str
    times: Mapping[str, Times]

    @property
    def limit_s(self) -> float | None:
        """Seconds per call of the fastest limit, or None where none was measured."""
        limits = (times.median_s for name, times in self.times.items() if name.startswith(LIMIT_PREFIX))
        return min(limits, default=None)


@dataclass(frozen=True)
class Published:
    """The published measurements of one run."""

    machine: Mapping[str, str]
    settings: Mapping[str, str | int | bool]
    libraries: tuple[Library, ...]
    works: tuple[Work, ...]

    @classmethod
    def of(cls, report: Report) -> Published:
        """Keep of a report what is published: the median of each round, to four digits."""
        works = []
        for section in report.sections:
            times = {
                name: Times(tuple(float(f"{turn.median_s:.3e}") for turn in result.rounds))
                for name, result in section.results.items()
                if result.rounds
            }
            works.append(Work(section.name, section.title, section.limit, times))
        return cls(report.machine, report.settings, report.libraries, tuple(works))

    def to_text(self) -> str:
        """Return the text of `published.json`: one line for each work, times in microseconds."""
        head = {
            "format": FORMAT,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "libraries": [vars(library) for library in self.libraries],
        }
        lines = [
            json.dumps(
                {
                    "name": work.name,
                    "title": work.title,
                    "limit": work.limit,
                    "times_us": {
                        name: [float(f"{s * MICROSECONDS:.4g}") for s in times.rounds_s]
                        for name, times in work.times.items()
                    },
                }
            )
            for work in self.works
        ]
        return json.dumps(head, indent=1)[:-2] + ',\n "works": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def read(cls, path: Path = ROOT / DATA) -> Published:
        """Read `published.json`.

        Raises:
            ValueError: if the file has another format.
        """
        return cls.parse(path.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, text: str) -> Published:
        """Return the measurements that the text of `published.json` holds; raises ValueError for another format."""
        values: dict[str, Any] = json.loads(text)
        if values.get("format") != FORMAT:
            msg = f"published.json must have format {FORMAT}, got {values.get('format')!r}: publish a report again"
            raise ValueError(msg)
        works = tuple(
            Work(
                work["name"],
                work["title"],
                work["limit"],
                {name: Times(tuple(us / MICROSECONDS for us in row)) for name, row in work["times_us"].items()},
            )
            for work in values["works"]
        )
        return cls(values["machine"], values["settings"], tuple(Library(**row) for row in values["libraries"]), works)


def publish(report: Report, root: Path = ROOT) -> list[Path]:
    """Write the measurements of a whole run to `published.json`, and the tables of README and docs/benchmarks.md.

    Returns:
        The files that were written.

    Raises:
        ValueError: if the run was a quick one or lacks something that the tables show; nothing is written then.
    """
    _check_whole(report)
    text = Published.of(report).to_text()
    found = Published.parse(text)  # the tables show what the file holds: its times are rounded
    texts = {root / DATA: text}
    for name, table in tables(found).items():
        texts[root / name] = with_table((root / name).read_text(encoding="utf-8"), table)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def tables(found: Published) -> dict[str, str]:
    """Return the table of each page that has one, by the path of the page."""
    works = {work.name: work for work in found.works}
    short = _table([works[name] for name in README_WORKS if name in works], README_PEERS, found)
    return {"README.md": short, "docs/benchmarks.md": markdown(found)}


def with_table(text: str, table: str) -> str:
    """Return a page with another table between its two marks.

    Raises:
        ValueError: if the page has not both marks once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        msg = f"a page must have each of the lines {BEGIN!r} and {END!r} once"
        raise ValueError(msg)
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{table}\n{END}", text, flags=re.DOTALL
    )


def _check_whole(report: Report) -> None:
    if report.settings.get("quick") or report.settings.get("only", "all") != "all":
        msg = f"only a whole run is published, got {report.settings}: run `make bench` without BENCH_ARGS"
        raise ValueError(msg)
    missing = [library.title for library in report.libraries if library.missing and library.name in README_PEERS]
    measured = {section.name for section in report.sections if section.results[OURS].rounds}
    missing += [name for name in README_WORKS if name not in measured]
    if missing:
        msg = f"README's table needs {', '.join(missing)}, which this run has not measured"
        raise ValueError(msg)


def markdown(found: Published) -> str:
    """Return a table with one row per workload: ours, the fastest limit, our ratio to it, each peer's ratio to ours."""
    shown = [name for name in PEERS if any(name in work.times for work in found.works)]
    machine, missing = found.machine, [library.title for library in found.libraries if library.missing is not None]
    note = (
        f"Time per call: median of {found.settings['rounds']} rounds, one thread, {machine['cpu']} "
        f"({machine['cores']} cores), Python {machine['python']}. In brackets: time divided by Ostinato's. "
        "`limit`: the same bytes copied by bare C into preallocated memory (process start: `import torch` "
        "alone; units, sharing and threads: a plain sample); `vs limit`: Ostinato's time divided by it. "
        f"{versions(found.libraries)}."
    )
    lines = [
        _table(found.works, shown, found),
        note + (f" Not measured there: {', '.join(missing)}." if missing else ""),
    ]
    if found.settings.get("quick"):
        lines += ["", f"**{QUICK}**"]
    return "\n".join(lines) + "\n"


def _table(works: Sequence[Work], peers: Sequence[str], found: Published) -> str:
    titles = {library.name: library.title for library in found.libraries}
    rows = [["work", "Ostinato", "limit", "vs limit", *(titles[name] for name in peers)]]
    rows += [_row(work, peers) for work in works]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines) + "\n"


def _row(work: Work, peers: Sequence[str]) -> list[str]:
    ours_s = work.times[OURS].median_s if OURS in work.times else None
    cells = [work.title, "-" if ours_s is None else f"**{human(ours_s)}**"]
    cells.append("-" if work.limit_s is None else human(work.limit_s))
    cells.append("-" if ours_s is None or work.limit_s is None else ratio(ours_s, work.limit_s))
    for name in peers:
        peer_s = work.times[name].median_s if name in work.times else None
        times = "" if peer_s is None or ours_s is None else f" ({ratio(peer_s, ours_s)})"
        cells.append("-" if peer_s is None else human(peer_s) + times)
    return cells


def ratio(seconds: float, other_s: float) -> str:
    """Return how many times as long as another time a time is, with two or three digits."""
    times = seconds / other_s
    return f"{times:.0f}x" if times >= 10 else f"{times:.2f}x"


def versions(libraries: Sequence[Library]) -> str:
    """Return the names and versions of the libraries that were measured."""
    present = [library for library in libraries if library.missing is None]
    return ", ".join(f"{lib.title} {lib.version}" for lib in present if not lib.name.startswith(LIMIT_PREFIX))
