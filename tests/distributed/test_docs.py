"""The blocks of pages that need Ray run, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ..test_docs import pages_of, run_blocks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("page", pages_of("python ray"))
def test_blocks_run_in_order(page: Path, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page, "python ray")
