"""Every sampler and unit has a page that explains it, and the formulas of the pages can be shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ostinato
from ostinato import Sampler, SampleUnit, Writer
from ostinato.samplers import SamplerEnsemble

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted((DOCS / "samplers").glob("*.md")), DOCS / "mixing.md"]
BASES = {"Sampler", "SampleUnit", "Writer", "WriterEnsemble"}
"""Base classes, which docs/extending.md is about, and a part that users never make."""


def public_parts() -> list[str]:
    """Return the names of all samplers, units and writers."""
    kinds = (Sampler, SampleUnit, Writer, SamplerEnsemble)
    found = [name for name in ostinato.__all__ if isinstance(getattr(ostinato, name), type)]
    return [name for name in found if issubclass(getattr(ostinato, name), kinds) and name not in BASES]


def test_each_part_has_a_page_and_a_task():
    pages, tasks = "".join(page.read_text() for page in PAGES), (DOCS / "sampling.md").read_text()
    for name in public_parts():
        assert re.search(rf"`{name}\b", pages), f"no page explains {name}"
        if not name.endswith(("Writer", "Ensemble")):
            assert f"`{name}" in tasks, f"no task of docs/sampling.md leads to {name}"


def test_pages_that_draw_have_formula_example_and_source():
    for page in PAGES:
        text = page.read_text()
        assert re.search(r"^```python$.*?^assert ", text, re.MULTILINE | re.DOTALL), f"{page.name} shows no result"
        assert "**Cost.**" in text, f"{page.name} has no cost"
        if page.name != "episodes.md":
            assert "\n$$\n" in text, f"{page.name} has no formula"
            assert re.search(r"\*\*Sources?\.\*\*", text), f"{page.name} names no source"


def test_formulas_become_mathml():
    converter = pytest.importorskip("latex2mathml.converter")
    text = "\n".join(page.read_text() for page in PAGES)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for block, inline in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, flags=re.DOTALL):
        formula = (block or inline).strip()
        assert "\\" not in converter.convert(formula), f"{formula} is not understood"
        assert not re.search(r"\\[^a-zA-Z]", formula), f"Markdown removes the backslash of an escape in {formula}"
