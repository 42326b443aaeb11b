"""What the pictures of docs show is what the library does; and the table of samplers and units says what they do."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

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

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def windows() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("windows", DOCS / "pictures" / "windows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["windows"] = module
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
        [ten, ["5*", "5*", "5", "6", "7", "8"], ["15", "0", "1", "2", "3", "4"]],
        [ten, "never drawn", "never drawn"],
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
    assert zeros == [[[re.sub(r"\d+\*", "0*", text) for text in stack] for stack in line] for line in repeat]


def test_slices(windows: Any) -> None:
    four, five, loose = shown(windows.slices())
    assert four[0][1] == [(slot, "1/3" if slot == 5 else "1/9") for slot in (0, 1, 5, 9, 10, 11, 15)]
    assert five[0][1] == [(slot, "1/4") for slot in (0, 9, 10, 15)]
    assert loose[0][1] == [(slot, "1/3" if slot == 5 else "1/6") for slot in (0, 5, 9, 10, 15)]
    assert four[1][2] == [["15", "0", "1", "2"]]
    assert loose[2][2] == [["5", "6", "7", "8"]]


def test_every_picture_is_there_and_small(windows: Any) -> None:
    pictures = {path.stem: path.stat().st_size for path in (DOCS / "pictures").glob("*.png")}
    page = (DOCS / "sampling.md").read_text()
    assert (
        set(pictures) == {make().name for make in windows.SCENES} == set(re.findall(r"\(pictures/(\w+)\.png\)", page))
    )
    assert sum(pictures.values()) < 300_000


def test_pictures_can_be_drawn(windows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    paint = importlib.import_module("paint")
    assert paint.paint(windows.n_step(), tmp_path).read_bytes()[:4] == b"\x89PNG"


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
    assert sum(path.stat().st_size for path in DOCS.rglob("*.png")) < 2_000_000
