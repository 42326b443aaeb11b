"""The blocks of pages that need Ray run, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ..test_docs import ROOT, blocks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("page", "least"), [("scaling.md", 2), ("flow.md", 1), ("operating.md", 1)])
def test_blocks_run_in_order(
    page: str, least: int, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    found = [text for language, text in blocks(ROOT / "docs" / page) if language == "python ray"]
    assert len(found) >= least
    for number, text in enumerate(found):
        exec(compile(text, f"{page}:block{number}", "exec"), namespace)
