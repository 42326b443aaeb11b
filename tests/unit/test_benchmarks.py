"""The benchmarks' own tests: the harness runs, its JSON holds together, its tables and verdicts are right."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # other packages install a folder of this name: ours must come first

from benchmarks.coordinator import SEATS  # noqa: E402
from benchmarks.published import (  # noqa: E402
    BEGIN,
    END,
    README_PEERS,
    README_WORKS,
    Published,
    publish,
    tables,
    with_table,
)
from benchmarks.records import Library, Report, Result, Round, Section  # noqa: E402
from benchmarks.report import print_report  # noqa: E402
from benchmarks.targets import (  # noqa: E402
    AheadOfAll,
    AtMost,
    AtMostAbove,
    GrowthWithinLimit,
    Seen,
    TailWithin,
    Target,
    TimesPeer,
    WithinLimit,
    WorstWithin,
)
from benchmarks.workloads import WORKLOADS  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.adapter import Adapter

pytestmark = pytest.mark.house


def result(*medians_us: float, worst_cpu_us: float = 0.0) -> Result:
    """Return a result with one round per median; its 99th percentile is twice the median."""
    return Result(tuple(Round(m * 1e-6, m * 1e-6, m * 2e-6, 1e-3, worst_cpu_us * 1e-6, 9) for m in medians_us))


RESULTS = {
    "ostinato": result(20, 10, 30, worst_cpu_us=80),
    "ostinato-torch": result(15),
    "limit-packed": result(10),
    "limit-torch": result(18, 16, 17),
    "torchrl": result(200),
    "cpprb": result(50),
    "sb3": Result(missing="no such thing"),
}


SMALLER = {"ostinato": result(16), "limit-packed": result(4)}


def seen(results: dict[str, Result] = RESULTS) -> Seen:
    """Return results as targets judge them, beside those of a smaller workload."""
    return Seen("uniform.dict", {"uniform.dict": results, "smaller": SMALLER, "gone": {"ostinato": Result()}})


@pytest.mark.parametrize(
    ("target", "measured", "met"),
    [
        (AtMost(20e-6), "20 us", True),
        (TimesPeer("torchrl", 10), "10x", True),
        (TimesPeer("torchrl", 0.5), "0.1x torchrl", True),
        (TimesPeer("limit-packed", 0.6), "2x limit-packed", False),
        (TimesPeer("sb3", 1), "not measured: sb3", None),
        (AheadOfAll(), "2.5x cpprb", True),
        (WithinLimit(1.5), "2x the limit", False),
        (WorstWithin(3), "4x (80 us of processor time)", False),
        (TailWithin(1.5), "2x (40 us)", False),
        (AtMostAbove("smaller", 3e-6), "4 us above", False),
        (GrowthWithinLimit("smaller"), "1.25x, the limit 2.5x", True),
        (GrowthWithinLimit("smaller", 0.4), "1.25x, the limit 2.5x", False),
    ],
)
def test_targets(target: Target, measured: str, met: bool | None) -> None:
    verdict = target.judge(seen())
    assert (verdict.measured, verdict.met) == (measured, met)


def test_pages_show_the_published_measurements() -> None:
    """Tables are not edited by hand: `python -m benchmarks --publish` writes them."""
    found = Published.read()
    assert found.to_text() == (ROOT / "benchmarks" / "published.json").read_text()
    for name, table in tables(found).items():
        text = (ROOT / name).read_text()
        assert with_table(text, table) == text, f"{name} is not what benchmarks/published.json says"


def test_readme_names_the_ratios_of_the_table() -> None:
    works = Published.read().works
    words = {
        "uniform.": "uniform sampling",
        "extend.": "writing",
        "prioritized.": "prioritized",
        "slices-writing.": "slices",
    }
    text = " ".join((ROOT / "README.md").read_text().split())
    for family, words_after in words.items():
        both = [work.times for work in works if work.name.startswith(family) and "torchrl" in work.times]
        times = [each["torchrl"].median_s / each["ostinato"].median_s for each in both]
        claim = f"{min(times):.0f} to {max(times):.0f} times"
        assert re.search(rf"{claim} (faster )?at {words_after}", text), f"README should say: {claim} at {words_after}"


def test_every_library_answers_for_every_workload() -> None:
    """An adapter either does a workload or says why not, whether or not its library is installed."""
    for seat in SEATS:
        adapter = cast("Adapter", importlib.import_module(f"benchmarks.peers.{seat.adapter}"))
        for load in WORKLOADS:
            said = {load.name, load.family} & (adapter.WORKLOADS.keys() | adapter.LACKS.keys())
            assert said, f"{seat.name} says nothing about {load.name}"
        known = {load.family for load in WORKLOADS}
        assert {name.partition(".")[0] for name in adapter.WORKLOADS} <= known


def test_quick_run_of_ostinato(tmp_path: Path) -> None:
    """The whole way, as `make bench` goes it, without peers and limits."""
    path = tmp_path / "bench.json"
    options = ["--quick", "--only", "extend", "--libraries", "ostinato", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = Report.from_json(json.loads(path.read_text()))
    assert [section.name for section in measured.sections] == [
        "extend.dict",
        "extend.tensordict",
        "extend.tdbuffer",
        "extend.numpy",
    ]
    for section in measured.sections:
        ours = section.results["ostinato"]
        assert len(ours.rounds) == 1, ours.missing
        assert ours.rounds[0].calls > 0
        assert 0 < ours.median_s <= ours.worst_s
    assert "dict (quick: 50,000 rows)" in done.stdout


def test_publish_writes_data_and_tables(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/benchmarks.md"):
        (tmp_path / name).write_text(f"before\n\n{BEGIN}\n\nold\n{END}\n\nafter\n")
    libraries = tuple(
        Library(name, name.upper(), "1") for name in dict.fromkeys(("ostinato", "limit-packed", "sb3", *README_PEERS))
    )
    results = {library.name: result(20, 10, 40) for library in libraries} | {"sb3": RESULTS["sb3"]}
    targets = (AtMost(1e-6), TimesPeer("tianshou", 2))
    judged = tuple(target.judge(seen()) for target in targets)
    sections = tuple(Section(name, f"work {name}", "C", results, judged) for name in README_WORKS)
    report = Report(
        {"cpu": "a CPU", "cores": "2", "system": "Linux", "python": "3.11"},
        {"rounds": 3, "quick": False, "only": "all"},
        libraries,
        sections,
    )
    publish(report, tmp_path)
    found = Published.read(tmp_path / "benchmarks" / "published.json")
    assert found == Published.of(Report.from_json(json.loads(json.dumps(report.to_json()))))
    times = found.works[0].times["ostinato"]
    assert (times.median_s, *times.range_s, *times.quartiles_s) == pytest.approx((20e-6, 10e-6, 40e-6, 15e-6, 30e-6))
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| work uniform.dict | **20 us** | 20 us | 1.00x |" in page
    console = Console(file=io.StringIO(), width=160)
    print_report(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "not here: SB3 (no such thing)" in text
    assert "missed  at most 1 us: 20 us" in text
    assert "not judged  >= 2x tianshou: not measured: tianshou" in text
