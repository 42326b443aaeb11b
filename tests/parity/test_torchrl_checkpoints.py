"""Checkpoints that the TorchRL installed here writes now come in as those in `tests/data` do."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from ostinato.compat.torchrl import load_checkpoint

from ..unit.compat.test_torchrl import DATA, EXPECTED, lists


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that TorchRL has just written, in a process of its own."""
    root = tmp_path_factory.mktemp("torchrl")
    script = Path(__file__).with_name("_write_torchrl.py")
    done = subprocess.run([sys.executable, str(script), str(root)], capture_output=True, text=True, check=False)
    if "ImportError" in done.stderr:
        pytest.skip(f"TorchRL's compiled part cannot be loaded here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return root


def test_the_cases_are_those_in_git(written):
    def names(root: Path) -> list[str]:
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

    assert names(written) == names(DATA)
    fresh: dict[str, Any] = json.loads((written / "expected.json").read_text())
    assert fresh.keys() == EXPECTED.keys()
    for name in ("ring", "mapped", "prioritized", "list.pt"):  # seeded, or without chance
        assert fresh[name] == EXPECTED[name]


def test_they_load(written):
    expected = json.loads((written / "expected.json").read_text())
    for name, want in expected.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rb = load_checkpoint(written / name)
        if name.endswith(".pt"):
            assert [lists(row) for row in rb.storage[:]] == want["items"]
        else:
            assert lists(rb.storage[:]) == want["rows"]
        assert rb.cursor == want["cursor"] * rb.storage.num_envs
        if "values" in want:
            assert rb.sampler.state_dict()["values"].tolist() == want["values"]
        for sample in want.get("samples", ()):
            assert lists(rb.sample()) == sample
