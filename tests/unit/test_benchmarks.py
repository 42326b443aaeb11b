"""The benchmarks' own tests: the harness runs, its JSON holds together, its tables are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # other packages install a folder of this name: ours must come first

from benchmarks.published import (  # noqa: E402
    Published,
    tables,
    with_table,
)
from benchmarks.records import Report  # noqa: E402

pytestmark = pytest.mark.house


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
