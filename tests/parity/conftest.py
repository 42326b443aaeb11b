"""The `both` fixture: runs a script against TorchRL and Ostinato. Without TorchRL nothing here is collected."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ._script import Note, compare, library

if TYPE_CHECKING:
    from ._script import Both, Script

_HERE = Path(__file__).parent
_MISSING = importlib.util.find_spec("torchrl") is None


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of this folder."""
    config.addinivalue_line("markers", "parity: runs the same script against TorchRL and against Ostinato")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the files of this folder out where there is nothing to compare with: they import TorchRL."""
    return True if _MISSING and collection_path.parent == _HERE and collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.parity)


@pytest.fixture
def both() -> Both:
    """Run a script against both libraries, each from seed 0, and compare the notes it took."""

    def run(script: Script) -> None:
        notes = []
        for name in ("torchrl", "ostinato"):
            note = Note()
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                script(library(name), note)
            notes.append(note)
        assert notes[0].steps, "the script noted nothing"
        differences = compare(*notes)
        assert not differences, "\n".join(differences)

    return run
