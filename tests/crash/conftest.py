"""Where checkpoints lie that are not there to show that they reach the disk: in memory, if there is such a place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def quick_path() -> Iterator[Path]:
    """A folder where waiting for the disk takes no time; removed at the end of the module."""
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ostinato-", dir=place) as found:
        yield Path(found)
