"""The blocks of pages that need Ray run, in order."""

from __future__ import annotations

import pytest

from ..test_docs import pages_of, run_blocks


@pytest.mark.parametrize("page", pages_of("python ray"))
def test_blocks_run_in_order(page, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page, "python ray")
