"""The pages show the benchmarks that were published."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # other packages install a folder of this name: ours must come first

from benchmarks.published import Published, tables, with_table  # noqa: E402

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
