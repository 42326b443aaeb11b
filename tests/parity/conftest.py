"""Without TorchRL nothing here is collected; all is marked `parity`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_MISSING = importlib.util.find_spec("torchrl") is None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the files of this folder out where there is nothing to compare with: they import TorchRL."""
    return True if _MISSING and collection_path.parent == _HERE and collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.parity)
