"""Whole state: another process loads what one has saved, and goes on as that one does, in every combination."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.combinations import STORAGES, WRITERS, Cell, pairs
from tests.crash.cells import AHEAD_EVERY, CASES, DRAWN, FEWER, QUICK, SUPPORTED, covering
from tests.crash.modes import WAYS

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.xdist_group("resume"),  # one worker: the processes that save and load are shared
    pytest.mark.timeout(1200),  # two processes of four minutes, where others use the cores too
]


def both_sides(
    folder: Path, way: tuple[str, str], chosen: Iterable[tuple[int, int]], loader: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Let one process save cases and another, at its heels, load them; return what both said."""
    python = [sys.executable, "-W", "ignore", "-m", "tests.crash.cells"]
    save = subprocess.Popen(
        [*python, "save", str(folder), way[0]], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    load = subprocess.Popen(
        [*python, "load", str(folder), *way],
        cwd=ROOT,
        env={**os.environ, **(loader or {})},
        stdin=save.stdout,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert save.stdin is not None
    assert save.stdout is not None
    save.stdout.close()
    with save.stdin as cases:
        cases.write(" ".join(f"{number}:{drawn}" for number, drawn in chosen))
    said = [json.loads(line) for line in load.communicate()[0].splitlines()]
    assert (save.wait(), load.returncode) == (0, 0)
    return said


def differences(said: dict[str, Any]) -> list[str]:
    return [key for key, value in said["found"].items() if said[key] != value]


EVERY = 11
"""One in so many combinations is tried where time is short; `make test-all` tries all."""


@pytest.fixture(
    scope="module",
    params=[(WAYS[0], EVERY), *(pytest.param((way, 1), marks=pytest.mark.slow) for way in WAYS)],
    ids=lambda value: f"{'-'.join(value[0])}-{value[1]}",
)
def resumed(request: pytest.FixtureRequest, quick_path: Path) -> dict[int, dict[str, Any]]:
    way, every = request.param
    folder = quick_path / f"{'-'.join(way)}-{every}"
    folder.mkdir()
    chosen = covering(every)
    found = {said["number"]: said for said in both_sides(folder, way, chosen)}
    assert found.keys() == {number for number, _ in chosen}
    return found


def test_fewer_combinations_hold_every_pair_of_parts() -> None:
    def cells(every: int) -> list[Cell]:
        return [cell for number, _ in covering(every) if isinstance(cell := CASES[number].cell, Cell)]

    chosen = cells(EVERY)
    assert cells(1) == SUPPORTED
    assert len(chosen) < len(SUPPORTED) / (EVERY - 2)
    assert {pair for cell in chosen for pair in pairs(cell)} == {pair for cell in SUPPORTED for pair in pairs(cell)}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_combination_goes_on_bit_for_bit(resumed: dict[int, Any], storage: str, writer: str) -> None:
    """Rows, lengths, states after one restart or five, and the next draws, each save with the one before it removed."""
    seen = 0
    for number, said in resumed.items():
        cell = CASES[number].cell
        if isinstance(cell, Cell) and (cell.storage, cell.writer) == (storage, writer):
            assert not differences(said), (CASES[number], differences(said))
            assert said["drawn"] >= (FEWER if CASES[number].slow else QUICK)
            seen += 1
    there = sum((cell.storage, cell.writer) == (storage, writer) for cell in SUPPORTED)
    whole = len(resumed) == len(CASES) - 5 * len(SUPPORTED)  # each combination at one of six fills, and each kind
    assert seen == there if whole else seen <= there


def test_every_kind_goes_on_bit_for_bit(resumed: dict[int, Any]) -> None:
    """Ensembles, transforms with a state, reservoirs."""
    kinds = [number for number, case in enumerate(CASES) if isinstance(case.cell, str)]
    assert len(kinds) > 5
    for number in kinds:
        assert not differences(resumed[number]), (CASES[number], differences(resumed[number]))


def test_the_cases_cover_what_they_are_meant_to(resumed: dict[int, Any]) -> None:
    """Fills, batches made ahead and passes in their middle, for each sampler."""
    found: dict[str, set[Any]] = defaultdict(set)
    for number, said in resumed.items():
        case = CASES[number]
        if isinstance(case.cell, Cell):
            found[case.cell.sampler] |= {("fill", case.offset), ("ahead", case.ahead), 0 < said["place"] < 1}
    for sampler, seen in found.items():
        assert {("fill", -1), ("fill", 0), ("fill", 1), ("ahead", 0), ("ahead", 2)} <= seen, sampler
        assert (True in seen) == ("WithoutReplacement" in sampler), sampler


def test_what_compiled_code_saved_goes_on_without_it(quick_path: Path) -> None:
    """The process that loads uses torch alone, whatever the one that saved does."""
    if os.environ.get("OSTINATO_NATIVE") == "0":
        pytest.skip("this run is without compiled code already")
    folder = quick_path / "without"
    folder.mkdir()
    chosen = [(number, FEWER) for number, _ in covering()[:: 10 * AHEAD_EVERY + 2]]
    for said in both_sides(folder, WAYS[0], chosen, {"OSTINATO_NATIVE": "0"}):
        assert not differences(said), (CASES[said["number"]], differences(said))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_the_whole_cross_product_goes_on_bit_for_bit(way: tuple[str, str], quick_path: Path) -> None:
    """Each combination at each fill, with and without batches made ahead, for ten thousand indices."""
    folder = quick_path / f"all-{'-'.join(way)}"
    folder.mkdir()
    chosen = [(number, DRAWN) for number in range(len(CASES))]
    said = both_sides(folder, way, chosen)
    assert len(said) == len(CASES)
    wrong = [(CASES[each["number"]], differences(each)) for each in said if differences(each)]
    assert not wrong, wrong[:10]
