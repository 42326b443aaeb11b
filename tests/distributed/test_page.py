"""The blocks of docs/scaling.md that need Ray run, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..test_docs import ROOT, blocks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_blocks_run_in_order(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    found = [text for language, text in blocks(ROOT / "docs" / "scaling.md") if language == "python ray"]
    assert len(found) >= 2
    for number, text in enumerate(found):
        exec(compile(text, f"scaling.md:block{number}", "exec"), namespace)
