"""What the pictures of docs show is what the library does; the table of samplers and units has all samplers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ostinato

pytestmark = pytest.mark.house

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> Any:
    """A script of the pictures, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "pictures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_a_script_shown_and_small():
    pictures = {path.stem: path.stat().st_size for path in (DOCS / "pictures").glob("*.png")}
    scripts = "".join(path.read_text() for path in (DOCS / "pictures").glob("*.py"))
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert {make().name for make in script("windows").SCENES} <= set(pictures)
    assert set(pictures) == set(re.findall(r"\((?:\.\./)*pictures/([\w-]+)\.png\)", pages))
    assert not {name for name in pictures if f'"{name}"' not in scripts}
    assert max(pictures.values()) < 60_000
    assert sum(path.stat().st_size for path in DOCS.rglob("*.png")) < 1_600_000


def test_diagrams_are_what_their_script_draws(tmp_path, monkeypatch):
    """Letters may differ by the version of the font library, boxes and their places may not."""
    pytest.importorskip("matplotlib")
    from PIL import Image

    def pixels(path: Path) -> torch.Tensor:
        return torch.from_numpy(np.array(Image.open(path).convert("L"), dtype=np.float32))

    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    for name, make in script("diagrams").DIAGRAMS.items():
        drawn, kept = pixels(make().save(tmp_path / f"{name}.png")), pixels(DOCS / "pictures" / f"{name}.png")
        assert drawn.shape == kept.shape, name
        assert (drawn - kept).abs().mean() < 1, f"{name}.png is not what diagrams.py draws: run `make pictures`"


def test_the_tree_of_the_picture_draws_what_it_says(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    draws = importlib.import_module("draws")
    figure = draws.sum_tree()
    texts = " ".join(text.get_text() for text in figure.axes[0].texts)
    passed, leaf, left, row = re.findall(r"([\d.]+) in its first rows, \1 \+ (\d+) > ([\d.]+): row (\d+)", texts)[0]
    assert float(passed) <= float(left) < float(passed) + float(leaf)
    assert f"P(row {row}) = {leaf}/" in texts
    assert draws.save(draws.hindsight(), tmp_path / "hindsight.png").read_bytes()[:4] == b"\x89PNG"


def table() -> list[tuple[str, list[str]]]:
    """The table of the page: samplers, and what is said of each kind of unit."""
    section = (DOCS / "sampling.md").read_text().split("## Which sampler with which unit")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [
        (cells[0].strip("`"), cells[1:])
        for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    ]


def test_the_table_has_every_sampler():
    public = {name for name in ostinato.__all__ if name.endswith(("Sampler", "SamplerWithoutReplacement"))}
    base = {"Sampler", "SamplerEnsemble", "PrioritySampler"}
    below = (
        (DOCS / "sampling.md")
        .read_text()
        .split("## Which sampler with which unit")[1]
        .split("A list combines units")[0]
    )
    listed = {name for name, _ in table()}
    assert listed <= public
    assert all(f"`{name}`" in below for name in public - base - listed)
    assert all(len(cells) == 3 and all(cells) for _, cells in table())
