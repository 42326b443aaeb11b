"""Packages that do not install beside ours: `make build/originals/.installed` puts them in a folder of their own."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "build" / "originals"


def original(module: str, packages: tuple[str, ...] = (), **around: dict[str, Any]) -> Any:
    """Return a module of the folder, or skip the tests of the file that asks for it.

    Args:
        module: the module.
        packages: packages of which only the folders are used, not what they import.
        around: modules that it imports, without their package, and what it takes from them.
    """
    if not (FOLDER / module.partition(".")[0]).exists():
        pytest.skip(f"{module} is not in {FOLDER}", allow_module_level=True)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # last: packages that are installed come first
    paths = {name: {"__path__": [str(FOLDER / name.replace(".", "/"))]} for name in packages}
    for name, contents in {**paths, **{f"{packages[0]}.{x}": around[x] for x in around}}.items():
        vars(sys.modules.setdefault(name, types.ModuleType(name))).update(contents)
    try:
        return pytest.importorskip(module, exc_type=ImportError)
    finally:
        for name in [name for name in sys.modules if packages and name.partition(".")[0] == packages[0]]:
            del sys.modules[name]  # others ask whether the package is installed
