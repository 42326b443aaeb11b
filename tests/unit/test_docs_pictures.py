"""What the pictures of docs show is what the library does; and the table of samplers and units says what they do."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ostinato
from ostinato import (
    FrameStack,
    Hindsight,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SequenceUnit,
)
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.house

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Draws of a few rows take six times as long when the threads of two tests wait for each other on two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def script(name: str) -> Any:
    """A script of the pictures, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "pictures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_a_script_shown_and_small() -> None:
    pictures = {path.stem: path.stat().st_size for path in (DOCS / "pictures").glob("*.png")}
    scripts = "".join(path.read_text() for path in (DOCS / "pictures").glob("*.py"))
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert {make().name for make in script("windows").SCENES} <= set(pictures)
    assert set(pictures) == set(re.findall(r"\((?:\.\./)*pictures/([\w-]+)\.png\)", pages))
    assert not {name for name in pictures if f'"{name}"' not in scripts}
    assert max(pictures.values()) < 60_000
    assert sum(path.stat().st_size for path in DOCS.rglob("*.png")) < 1_600_000


def test_diagrams_are_what_their_script_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_tree_of_the_picture_draws_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    draws = importlib.import_module("draws")
    figure = draws.sum_tree()
    texts = " ".join(text.get_text() for text in figure.axes[0].texts)
    passed, leaf, left, row = re.findall(r"([\d.]+) in its first rows, \1 \+ (\d+) > ([\d.]+): row (\d+)", texts)[0]
    assert float(passed) <= float(left) < float(passed) + float(leaf)
    assert f"P(row {row}) = {leaf}/" in texts
    assert draws.save(draws.hindsight(), tmp_path / "hindsight.png").read_bytes()[:4] == b"\x89PNG"


OPTIONS: dict[str, Any] = {
    "PrioritizedSampler": lambda: PrioritizedSampler(100, 0.6, 0.4),
    "PrioritizedSliceSampler": lambda: PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=2),
}


def reward_fn(batch: Any) -> torch.Tensor:
    reached: torch.Tensor = batch["next_achieved_goal"] == batch["desired_goal"]
    return reached.float()


COLUMNS: list[list[Any]] = [
    [lambda: None, lambda: NStep(3, 0.9), lambda: FrameStack(2, ["obs"]), lambda: Hindsight(reward_fn)],
    [lambda: SequenceUnit(3), lambda: SequenceUnit(3, "stop"), lambda: SequenceUnit(3, "include_reset")],
    [lambda: SequenceUnit(3, "strict")],
]


def table() -> list[tuple[str, list[str]]]:
    """The table of the page: samplers, and what is said of each kind of unit."""
    section = (DOCS / "sampling.md").read_text().split("## Which sampler with which unit")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [
        (cells[0].strip("`"), cells[1:])
        for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    ]


def test_the_table_has_every_sampler() -> None:
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
    assert all(len(cells) == len(COLUMNS) and all(cells) for _, cells in table())


def drawn(sampler: Any, unit: Any, rows: dict[str, torch.Tensor], batches: int) -> set[int]:
    """Slots of all rows drawn, or of the anchors where windows are made around them."""
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, sample_unit=unit)
    rb.extend(rows)
    seen: set[int] = set()
    for _ in range(batches):
        _, info = rb.sample(24, return_info=True)
        seen |= set(info.get("anchor_index", info["index"]).tolist())
    return seen


@pytest.mark.parametrize(("name", "cells"), table(), ids=[name for name, _ in table()])
def test_every_cell_of_the_table_is_true(name: str, cells: list[str]) -> None:
    at = torch.arange(30)
    rows = {"obs": at.float(), "reward": at.float(), "next_obs": at + 1.0, "done": at % 10 == 9}
    rows |= {"achieved_goal": at.float(), "next_achieved_goal": at + 1.0, "desired_goal": at * 0.0}
    options = {"slice_len": 2} if name.startswith("Slice") else {}
    make = OPTIONS.get(name, lambda: getattr(ostinato, name)(**options))
    for said, units in zip(cells, COLUMNS, strict=True):
        for unit in units:
            if said == "raises":
                with pytest.raises(OptionError, match="leave one of them out"):
                    drawn(make(), unit(), rows, 1)
                continue
            seen = drawn(make(), unit(), rows, 200)
            assert seen == {i for i in range(30) if i % 10 < 8 or not re.search(r"\bM`", said)}
