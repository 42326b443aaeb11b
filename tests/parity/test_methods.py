"""Each public method and attribute of TorchRL's classes exists here, or is in the table of `docs/compat/torchrl.md`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchrl.data.replay_buffers as torchrl_buffers
from tensordict import tensorclass
from torchrl.data.replay_buffers import scheduler

import ostinato
from ostinato.compat import torchrl as compat

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "compat" / "torchrl.md"
_ROW = re.compile(r"^\| ((?:`\w+`,? ?)+) \| ((?:`\w+`,? ?)+) \| (.+) \|$", re.MULTILINE)
_ELSEWHERE = {"Trajectory": compat.Trajectory}
"""Classes that are not the root's class of that name."""
_MADE: dict[str, Callable[[], object]] = {
    "SamplerEnsemble": lambda: ostinato.SamplerEnsemble(ostinato.RandomSampler()),
    "TED2Flat": ostinato.TED2Flat,
    "TED2Nested": ostinato.TED2Nested,
    "H5Split": ostinato.H5Split,
}
"""Objects whose attributes are set by the constructor."""


@tensorclass
class _Plain:
    """A tensorclass without fields: the methods that each has."""


def _classes() -> dict[str, tuple[Any, Any]]:
    """Name -> TorchRL's class and ours."""
    found = {}
    names = [*torchrl_buffers.__all__, *(name for name in vars(scheduler) if name.endswith(("Scheduler", "List")))]
    for name in names:
        theirs = getattr(torchrl_buffers, name, None) or getattr(scheduler, name)
        ours = _ELSEWHERE.get(name, getattr(ostinato, name, None))
        if inspect.isclass(theirs) and ours is not None:
            found[name] = theirs, ours
    return found


CLASSES = _classes()


def _public(cls: Any) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def _missing(name: str) -> set[str]:
    theirs, ours = CLASSES[name]
    expected = _public(theirs)
    if hasattr(theirs, "from_tensordict"):  # a tensorclass: its own fields and methods alone
        expected -= _public(_Plain)
    return expected - _public(ours) - (_public(_MADE[name]()) if name in _MADE else set())


def _table() -> dict[str, set[str]]:
    """Class -> names that the page says are missing."""
    chapter = PAGE.read_text(encoding="utf-8").split("## Missing methods")[1].split("\n## ")[0]
    table: dict[str, set[str]] = {}
    for classes, names, _ in _ROW.findall(chapter):
        for name in re.findall(r"\w+", classes):
            table.setdefault(name, set()).update(re.findall(r"\w+", names))
    return table


TABLE = _table()


def test_page_names_the_missing_methods() -> None:
    assert {name: missing for name in CLASSES if (missing := _missing(name))} == TABLE
    assert len(CLASSES) >= 60
