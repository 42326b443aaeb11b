"""What the header of each page shows beside the title: the version, and where the repository is."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def link(project: dict[str, Any]) -> tuple[str, str]:
    """Return address and title: of the repository, or of the changelog where `project.urls` names no repository."""
    url = project.get("urls", {}).get("Repository")
    return ("changelog/", "Changelog") if url is None else (url, "Repository")
