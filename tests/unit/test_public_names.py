"""Names that users import: what the root exports hides nothing, and examples need no private module."""

from __future__ import annotations

import builtins
import collections.abc
import re
import typing
from pathlib import Path

import ostinato
from ostinato import protocols, transforms

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


def test_a_star_import_hides_no_name_of_python():
    exported = {*ostinato.__all__, *protocols.__all__}
    for other in (builtins, typing, collections.abc):
        names = getattr(other, "__all__", None) or vars(other)
        assert not exported & set(names), other.__name__


def test_every_transform_has_a_root_name():
    roots = {getattr(ostinato, name) for name in ostinato.__all__}
    for name in ("Cast", "Compose", "Exclude", "Rename", "RewardScale", "Select", "ToDevice"):
        assert name in transforms.__all__
        assert getattr(transforms, name) in roots


def test_documentation_imports_nothing_from_core():
    pattern = re.compile(r"^\s*(?:from|import) ostinato\.(?:core|_\w+)\b.*$", re.MULTILINE)
    assert {page: found for page in PAGES if (found := pattern.findall(page.read_text()))} == {}
