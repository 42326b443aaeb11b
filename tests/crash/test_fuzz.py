"""Damaged and hostile checkpoints: refused in words with nothing changed, or harmless; in a process with few means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.crash.kinds import KINDS, extend, fill, fingerprint
from tests.crash.modes import LOADS, WAYS
from tests.crash.mutations import MANIFEST, sign

if TYPE_CHECKING:
    from collections.abc import Callable

from ostinato.errors import CheckpointError

ROOT = Path(__file__).parents[2]
MANY, FEW = 10_000, 120

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")


def run(folder: Path, manner: str, count: int, seed: int, way: tuple[str, str]) -> dict[str, Any]:
    """Try so many mutations in a process of its own; return what became of them."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash.fuzz", manner, str(folder), str(count), str(seed)]
    # each thread's heap would reserve 64 MiB of the address space, which is limited
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([*command, *way], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = (folder / "last").read_text().strip() if (folder / "last").exists() else "nothing"
    assert done.returncode == 0, f"it died at {last}:\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("manner", "refused", "way"), [("damaged", 0.9, WAYS[0]), ("signed", 0.5, WAYS[1])])
def test_no_mutation_does_harm(manner: str, refused: float, way: tuple[str, str], tmp_path: Path) -> None:
    found = run(tmp_path, manner, FEW, 11, way)
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert found["refused"] >= refused * FEW


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("manner", ["damaged", "signed"])
def test_no_mutation_of_many_does_harm(manner: str, way: tuple[str, str], tmp_path: Path) -> None:
    found = run(tmp_path, manner, MANY, 12, way)
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert found["refused"] + found["loaded"] == MANY


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
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path upwards": (_set("arrays", ROWS, "file", to="../rows.bin"), "names must not leave the directory"),
    "an absolute path": (_set("arrays", ROWS, "file", to="/etc/passwd"), "names must not leave the directory"),
    "an absurd size": (_set("arrays", ROWS, "shape", to=[2**50]), "nbytes is|implausible"),
    "sizes that overflow": (_set("arrays", ROWS, "shape", to=[2**40, 2**40]), "implausible shape"),
    "an unknown dtype": (_set("arrays", ROWS, "dtype", to="object"), "unknown dtype"),
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
        _set("state", "writer", "state", "cursor", to=24),
        r"the cursor of the ring must be .*has 24",
    ),
    "negative rows": (_set(*STORAGE, "rows", to=-1), "-1"),
    "fewer rows": (_set(*STORAGE, "rows", to=20), "it is damaged|damaged"),
    "another capacity": (_set(*STORAGE, "capacity", to=23), r"number of rows must be .*24"),
    "negative counts": (_set("state", "rows_drawn", to=-5), "rows_drawn must be an integer"),
    "stamps of none": (_set("state", "stamps", "written", to=3), "24 rows, of which 3 were written"),
    "an unknown class": (_set("state", "sampler", "class", to="os.system"), "sampler is a os.system"),
    "priorities below zero": (_set("state", "sampler", "state", "largest", to={"$float": "-0x1.8p+0"}), "damaged"),
    "no state": (_set("state", to=None), "NoneType"),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests_with_fitting_checksums(what: str, load: str, tmp_path: Path) -> None:
    fill(KINDS["prioritized"]()).dumps(tmp_path / "a")
    change, message = HOSTILE[what]
    path = tmp_path / "a" / MANIFEST
    body = json.loads(path.read_bytes())["body"]
    change(body)
    path.write_bytes(sign(body, "ostinato-buffer"))
    _refused(tmp_path / "a", message, load)


@pytest.mark.parametrize("load", LOADS)
def test_keys_given_twice(load: str, tmp_path: Path) -> None:
    """A reader that took the first and a checksum that took the last could be told different things."""
    fill(KINDS["prioritized"]()).dumps(tmp_path / "a")
    path = tmp_path / "a" / MANIFEST
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"rows_drawn":', b'"rows_drawn":0,"rows_drawn":', 1))
    _refused(tmp_path / "a", "twice", load)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", ["data", MANIFEST])
def test_links_are_refused(name: str, load: str, tmp_path: Path) -> None:
    fill(KINDS["prioritized"]()).dumps(tmp_path / "a")
    path = (
        tmp_path / "a" / name
        if name == MANIFEST
        else max((tmp_path / "a").glob("*.bin"), key=lambda file: file.name.startswith(("rows", "0.t", "0_t")))
    )
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    _refused(tmp_path / "a", "symbolic link", load)


def _refused(path: Path, message: str, load: str) -> None:
    used, fresh = KINDS["prioritized"](), KINDS["prioritized"]()
    extend(used, 500, 10)
    before = fingerprint(used.state_dict())
    for rb in (used, fresh):
        with pytest.raises(CheckpointError, match=message):
            rb.loads(path, **LOADS[load])
    assert fingerprint(used.state_dict()) == before
    assert len(fresh) == 0
    extend(fresh, 0, 5)
    assert fresh[:]["t"].tolist() == list(range(5))
