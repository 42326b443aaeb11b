"""Packages that do not install beside ours: `make build/originals/.installed` puts them in a folder of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "build" / "originals"


def original(module: str) -> Any:
    """Return a module of the folder, or skip the tests of the file that asks for it."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # last: packages that are installed come first
    return pytest.importorskip(module, exc_type=ImportError)
