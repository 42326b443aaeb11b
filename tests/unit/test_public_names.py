"""Names that users import: what the root exports hides nothing, and examples need no private module."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import re
import typing
from pathlib import Path

import ostinato
from ostinato import protocols, transforms

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


def test_a_star_import_hides_no_name_of_python() -> None:
    exported = {*ostinato.__all__, *protocols.__all__}
    for other in (builtins, typing, collections.abc):
        names = getattr(other, "__all__", None) or vars(other)
        assert not exported & set(names), other.__name__


def test_every_transform_has_a_root_name() -> None:
    roots = {getattr(ostinato, name) for name in ostinato.__all__}
    for name in ("Cast", "Compose", "Exclude", "Rename", "RewardScale", "Select", "ToDevice"):
        assert name in transforms.__all__
        assert getattr(transforms, name) in roots


def test_documentation_imports_nothing_from_core() -> None:
    pattern = re.compile(r"^\s*(?:from|import) ostinato\.(?:core|_\w+)\b.*$", re.MULTILINE)
    assert {page: found for page in PAGES if (found := pattern.findall(page.read_text()))} == {}


def test_protocols_exports_what_the_base_classes_name() -> None:
    """The types of the library in signatures of the public methods of `Sampler`, `Writer` and `SampleUnit`."""
    source = ROOT / "src" / "ostinato"
    for path, name in (("samplers/base.py", "Sampler"), ("writers/ring.py", "Writer"), ("units/base.py", "SampleUnit")):
        tree = ast.parse((source / path).read_text())
        [base] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        core = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in {"ostinato.core.records", "ostinato.core.ring"}
            for alias in node.names
        }
        methods = [node for node in base.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
        named = {
            node.id
            for method in methods
            for part in (*(arg.annotation for arg in method.args.args), method.returns)
            if part is not None
            for node in ast.walk(part)
            if isinstance(node, ast.Name)
        }
        assert named & core, f"{name} names no type of {path}"
        assert named & core <= set(protocols.__all__), name
