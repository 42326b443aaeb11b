"""The pages show the benchmarks that were published."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # other packages install a folder of this name: ours must come first

from benchmarks.published import Published, tables, with_table  # noqa: E402

pytestmark = pytest.mark.house


def test_pages_show_the_published_measurements():
    """Tables are not edited by hand: `python -m benchmarks --publish` writes them."""
    found = Published.read()
    assert found.to_text() == (ROOT / "benchmarks" / "published.json").read_text()
    for name, table in tables(found).items():
        text = (ROOT / name).read_text()
        assert with_table(text, table) == text, f"{name} is not what benchmarks/published.json says"
