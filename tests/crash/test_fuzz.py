"""Damaged and hostile checkpoints: refused in words with nothing changed, or harmless; in a process with few means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.crash.fuzz import state_of
from tests.crash.mutations import MANIFEST, sign
from tests.registry import registered

if TYPE_CHECKING:
    from collections.abc import Callable

from ostinato.errors import CheckpointError

ROOT = Path(__file__).parents[2]
MANY = 10_000

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(("manner", "refused"), [("damaged", 0.9), ("signed", 0.5)])
@pytest.mark.parametrize(
    ("count", "seed"), [(70, 11), pytest.param(MANY, 12, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_no_mutation_does_harm(manner, refused, incremental, count, seed, tmp_path):
    """So many mutations in a process of its own."""
    if count < MANY and (manner == "damaged") == incremental:
        pytest.skip("each manner and each way of saving once")
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash.fuzz", manner, tmp_path, count, seed, incremental]
    # each thread's heap would reserve 64 MiB of the address space, which is limited
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    last = (tmp_path / "last").read_text().strip() if (tmp_path / "last").exists() else "nothing"
    assert done.returncode == 0, f"it died at {last}:\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert found["refused"] >= refused * count
    assert found["refused"] + found["loaded"] == count


ROWS = "rows.0"
"""Where small fields lie side by side; without the native extension the first field has a file of its own."""


def _set(*way: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        node: Any = body
        for key in way[:-1]:
            node = node[key if key != ROWS or ROWS in node else "0.t"]
        node[way[-1]] = to

    return change


def _nest(depth: int) -> Any:
    node: Any = 0
    for _ in range(depth):
        node = [node]
    return node


STORAGE = ("state", "storage", "state")
HOSTILE: dict[str, Any] = {
    "another dtype": (_set("arrays", "0.t", "dtype", to="float64"), r"column '0.t' must be torch.int64.*float64"),
    "another shape": (
        _set("arrays", "0.t", "shape", to=[12, 2]),
        r"does not lie in the rows|nbytes is|must be torch.int64\[24\]",
    ),
    "a place beyond its row": (_set("arrays", "0.t", "offset", to=77), "does not lie in the rows|exactly the keys"),
    "rows that are not there": (_set("arrays", "0.t", "rows", to="rows.7"), "rows.7|exactly the keys|damaged"),
    "deep nesting": (_set("state", "transforms", to=_nest(80)), "nested more than 64 deep"),
    "a tag nobody knows": (_set("state", "transforms", to={"$call": "os.system"}), r"unknown tag '\$call'"),
    "an array that is not there": (_set(*STORAGE, "columns", 0, to="nothing"), "holds no array 'nothing'"),
    "a negative cursor": (_set(*STORAGE, "cursor", to=-1), r"the storage's cursor must be .*has -1"),
    "a cursor beyond": (
        _set("state", "stamps", "cursor", to=24),
        r"the cursor of the ring must be .*has 24",
    ),
    "negative rows": (_set(*STORAGE, "rows", to=-1), "-1"),
    "fewer rows": (_set(*STORAGE, "rows", to=20), "it is damaged|damaged"),
    "another capacity": (_set(*STORAGE, "capacity", to=23), r"number of rows must be .*24"),
    "negative counts": (_set("state", "rows_drawn", to=-5), "rows_drawn must be an integer"),
    "stamps of none": (_set("state", "stamps", "written", to=3), "24 rows, of which 3 were written"),
    "an unknown class": (_set("state", "sampler", "class", to="os.system"), "sampler is a os.system"),
    "priorities below zero": (_set("state", "sampler", "state", "largest", to={"$float": "-0x1.8p+0"}), "damaged"),
    "a missing column": (_set(*STORAGE, "columns", to=[]), "column|damaged|exactly"),
    "a short generator": (
        _set("state", "generator", to={"$tensor": {"dtype": "uint8", "shape": [3], "data": "AAAA"}}),
        "generator",
    ),
    "no stamps": (_set("state", "stamps", to=None), "NoneType"),
    "no state": (_set("state", to=None), "NoneType"),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a prioritized buffer."""
    registered("transform").fill().dumps(tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests_with_fitting_checksums(what, saved):
    change, message = HOSTILE[what]
    body = json.loads((saved / MANIFEST).read_bytes())["body"]
    change(body)
    (saved / MANIFEST).write_bytes(sign(body, "ostinato-buffer"))
    _refused(saved, message)


def test_keys_given_twice(saved):
    """A reader that took the first and a checksum that took the last could be told different things."""
    text = (saved / MANIFEST).read_bytes()
    (saved / MANIFEST).write_bytes(text.replace(b'"rows_drawn":', b'"rows_drawn":0,"rows_drawn":', 1))
    _refused(saved, "twice")


def _refused(path: Path, message: str) -> None:
    contract = registered("transform")
    used, fresh = (contract.make(contract.capacity) for _ in range(2))
    contract.extend(used, 10, 500)
    before = state_of(used)
    for rb in (used, fresh):
        with pytest.raises(CheckpointError, match=message):
            rb.loads(path)
    assert state_of(used) == before
    assert len(fresh) == 0
    contract.extend(fresh, 5, 0)
    assert fresh[:]["t"].tolist() == list(range(5))
