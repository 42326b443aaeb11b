"""The blocks of pages that need TorchRL run, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ..test_docs import pages_of, run_blocks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("page", pages_of("python torchrl"))
def test_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_blocks(page, "python torchrl")
