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

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Draws of a few rows take six times as long when the threads of two tests wait for each other on two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def windows() -> Any:
    """The script, as a module."""
    return script("windows")


def script(name: str) -> Any:
    """A script of the pictures, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "pictures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def shown(scene: Any) -> list[list[tuple[int | None, list[tuple[int, str]], list[list[str]], str]]]:
    """Slots and texts of each line, by block."""
    return [
        [
            (
                line.anchor,
                [(read.slot, read.text) for read in line.reads if read.kind != "next"],
                [[read.text + ("*" if read.kind == "masked" else "") for read in reads] for _, reads in line.chips],
                line.note,
            )
            for line in block.lines
        ]
        for block in scene.blocks
    ]


def test_returns(windows: Any) -> None:
    assert shown(windows.n_step()) == [
        [
            (5, [(5, "1"), (6, "γ"), (7, "γ²")], [], "k = 3, bootstraps from next_obs of 7"),
            (7, [(7, "1"), (8, "γ")], [], "k = 2, terminated: no bootstrap"),
            (11, [(11, "1"), (12, "γ"), (13, "γ²")], [], "k = 3, bootstraps from next_obs of 13"),
            (13, [(13, "1"), (14, "γ")], [], "k = 2, truncated: bootstraps from next_obs of 14"),
            (15, [(15, "1"), (0, "γ"), (1, "γ²")], [], "k = 3, bootstraps from next_obs of 1"),
            (3, [(3, "1"), (4, "γ")], [], "k = 2, newest row: bootstraps from next_obs of 4"),
        ]
    ]


def test_windows(windows: Any) -> None:
    held = [[line[2][0] if line[2] else line[3] for line in block] for block in shown(windows.sequence())]
    ten = ["9*", "9", "10", "11", "12", "13"]
    assert held == [
        [ten, ["5", "6", "7", "8", "8*", "8*"], ["1", "2", "3", "4", "4*", "4*"]],
        [["5*", "5*", "5", "6", "7", "8"], ["15", "0", "1", "2", "3", "4"]],
        ["never drawn", "never drawn"],
    ]


def test_stacks(windows: Any) -> None:
    repeat, zeros = [[line[2] for line in block] for block in shown(windows.frame_stack())]
    assert repeat == [
        [["10", "11", "12"], ["11", "12", "12'"]],
        [["9*", "9", "10"], ["9", "10", "10'"]],
        [["9*", "9*", "9"], ["9*", "9", "9'"]],
        [["5*", "5*", "5"], ["5*", "5", "5'"]],
        [["15*", "15", "0"], ["15", "0", "0'"]],
    ]
    assert zeros == [[[re.sub(r"\d+\*", "0*", text) for text in stack] for stack in line] for line in repeat[1:3]]


def test_slices(windows: Any) -> None:
    four, five, loose = shown(windows.slices())
    assert four[0][1] == [(slot, "1/3" if slot == 5 else "1/9") for slot in (0, 1, 5, 9, 10, 11, 15)]
    assert five[0][1] == [(slot, "1/4") for slot in (0, 9, 10, 15)]
    assert loose[0][1] == [(slot, "1/3" if slot == 5 else "1/6") for slot in (0, 5, 9, 10, 15)]
    assert four[1][2] == [["15", "0", "1", "2"]]
    assert loose[2][2] == [["5", "6", "7", "8"]]


def test_every_picture_is_made_by_a_script_shown_and_small(windows: Any) -> None:
    pictures = {path.stem: path.stat().st_size for path in (DOCS / "pictures").glob("*.png")}
    scripts = "".join(path.read_text() for path in (DOCS / "pictures").glob("*.py"))
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert {make().name for make in windows.SCENES} <= set(pictures)
    assert set(pictures) == set(re.findall(r"\((?:\.\./)*pictures/([\w-]+)\.png\)", pages))
    assert not {name for name in pictures if f'"{name}"' not in scripts}
    assert max(pictures.values()) < 60_000
    assert sum(path.stat().st_size for path in DOCS.rglob("*.png")) < 1_600_000


def test_pictures_can_be_drawn(windows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    paint = importlib.import_module("paint")
    assert paint.paint(windows.n_step(), tmp_path).read_bytes()[:4] == b"\x89PNG"


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


def test_screenshots_are_shown_and_stay_small() -> None:
    page = (DOCS / "viewing.md").read_text() + (DOCS / "doctor.md").read_text()
    taken = {path.stem for path in (DOCS / "screenshots").glob("*.png")}
    assert taken == set(re.findall(r"\(screenshots/(\w+)\.png\)", page))
    assert all(f'"{name}.png"' in (DOCS / "screenshots" / "take.py").read_text() for name in taken)
