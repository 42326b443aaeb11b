"""Every public name of TorchRL's replay buffers stands in `docs/compat/torchrl.md`, with where to import it from."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compat" / "torchrl.md"
_ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)


def _rows() -> list[tuple[str, list[str], str]]:
    """Module, names and the place to import from."""
    chapter = PAGE.read_text(encoding="utf-8").split("## Import paths")[1].split("\n## ")[0]
    return [(module, re.findall(r"`(\w+)`", names), place) for module, names, place in _ROW.findall(chapter)]


ROWS = _rows()


def _public(module: str) -> set[str]:
    """Return the public names of one of TorchRL's modules, those that it imports left out."""
    found = importlib.import_module(f"torchrl.data.replay_buffers.{module}")
    own = {
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(found.__name__)
    }
    return set(getattr(found, "__all__", own))


def test_page_has_every_public_name() -> None:
    everything = set(importlib.import_module("torchrl.data.replay_buffers").__all__)
    for module in {module for module, _, _ in ROWS}:
        everything |= _public(module)
    listed = [name for _, names, _ in ROWS for name in names]
    assert sorted(listed) == sorted(everything)


def test_page_tells_where_names_are() -> None:
    ours = importlib.import_module("ostinato")
    for module, name, place in ((module, name, place) for module, names, place in ROWS for name in names):
        assert hasattr(importlib.import_module(f"torchrl.data.replay_buffers.{module}"), name)
        if place.startswith("not available"):
            assert not hasattr(ours, name)
        else:
            [home, *_] = re.findall(r"`([\w.]+)`", place)
            assert hasattr(importlib.import_module(home), name), f"{home}.{name}"
