"""What `docs/compat/torchrl.md` says of names, arguments and methods is true; the blocks that need TorchRL run."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchrl.data.replay_buffers as torchrl_buffers
from tensordict import tensorclass
from torchrl.data.replay_buffers import scheduler

import ostinato
from ostinato.buffers.options import BufferOptions
from ostinato.compat import torchrl as compat
from ostinato.samplers.ensemble import MixOptions
from ostinato.samplers.slices import SliceOptions

from ..test_docs import pages_of, run_blocks
from ._script import Library

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (Path(__file__).parents[2] / "docs" / "compat" / "torchrl.md").read_text(encoding="utf-8")
THEIRS: Any = Library("torchrl")


def _chapter(title: str, row: str) -> list[Any]:
    """The rows of the tables of a chapter, a tuple of the groups of the pattern each."""
    return re.findall(rf"^{row}$", PAGE.split(f"## {title}")[1].split("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize("page", pages_of("python torchrl"))
def test_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_blocks(page, "python torchrl")


# -- import paths -----------------------------------------------------------------------------------------------------


def _exported(module: Any) -> set[str]:
    """Return the public names of one of TorchRL's modules, those that it imports left out."""
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith(module.__name__)}
    return set(getattr(module, "__all__", (name for name in own if not name.startswith("_"))))


def test_every_public_name_stands_in_the_page_with_its_place():
    everything, listed = set(torchrl_buffers.__all__), []
    for module_name, names, place in _chapter("Import paths", r"\| `(\w+)` \| (.+) \| (.+) \|"):
        module = importlib.import_module(f"torchrl.data.replay_buffers.{module_name}")
        everything |= _exported(module)
        for name in re.findall(r"`(\w+)`", names):
            listed.append(name)
            assert hasattr(module, name)
            if place.startswith("not available"):
                assert not hasattr(ostinato, name)
            else:
                [home, *_] = re.findall(r"`([\w.]+)`", place)
                assert hasattr(importlib.import_module(home), name), f"{home}.{name}"
    assert sorted(listed) == sorted(everything)


# -- arguments --------------------------------------------------------------------------------------------------------

TAKEN = {
    "kwargs",
    "shared",
    "compile",
    "use_gpu",
    "fragmented",
    "checkpointer",
    "service_backend_options",
    "transport_options",
}
"""Arguments that are taken, so that they can be refused with a reason."""


def _arguments(cls: Any) -> list[str]:
    """Return the names of the arguments of a class, those that it passes on as `Unpack` included."""
    found: list[str] = []
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        options = [
            kind for kind in (BufferOptions, SliceOptions, MixOptions) if kind.__name__ in str(parameter.annotation)
        ]
        if options:
            found += options[0].__annotations__
        elif name not in {"self", "args"}:
            found.append(name)
    return found


def test_every_argument_stands_in_the_page_with_what_it_does():
    tables: dict[str, dict[str, str]] = {}
    for name, *cells in _chapter("Constructor arguments", r"\| `(\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|"):
        for word, cell in zip(("supported", "no effect", "raises"), cells, strict=True):
            tables.setdefault(name, {}).update(dict.fromkeys(re.findall(r"`(\w+)`", cell), word))
    assert len(tables) >= 40
    for name, words in tables.items():
        theirs = ["replacement"] if name == "RandomSampler" else _arguments(getattr(THEIRS, name))  # taken, not shown
        assert set(words) == set(theirs), name
        ours = _arguments(getattr(ostinato, name))
        for argument, word in words.items():
            if argument not in TAKEN:
                assert (argument in ours) == (word != "raises"), f"{name}({argument}=): the page says {word}"
    for argument, word in tables["ReplayBuffer"].items():
        if word == "raises":
            with pytest.raises((TypeError, ValueError), match=argument):
                ostinato.TensorDictReplayBuffer(**{argument: True})  # type: ignore[arg-type]


# -- methods ----------------------------------------------------------------------------------------------------------

MADE: dict[str, Callable[[], object]] = {
    "SamplerEnsemble": lambda: ostinato.SamplerEnsemble(ostinato.RandomSampler()),
    "TED2Flat": ostinato.TED2Flat,
    "TED2Nested": ostinato.TED2Nested,
    "H5Split": ostinato.H5Split,
}
"""Objects whose attributes are set by the constructor."""


@tensorclass
class _Plain:
    """A tensorclass without fields: the methods that each has."""


def _public(value: Any) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def test_every_missing_method_stands_in_the_page():
    listed: dict[str, set[str]] = {}
    for classes, names in _chapter("Missing methods", r"\| ((?:`\w+`,? ?)+) \| ((?:`\w+`,? ?)+) \| .+ \|"):
        for name in re.findall(r"\w+", classes):
            listed.setdefault(name, set()).update(re.findall(r"\w+", names))
    missing, compared = {}, 0
    for name in (*torchrl_buffers.__all__, *(n for n in vars(scheduler) if n.endswith(("Scheduler", "List")))):
        theirs, ours = getattr(THEIRS, name), getattr(ostinato, name, None)
        ours = compat.Trajectory if name == "Trajectory" else ours  # not the root's class of that name
        if not inspect.isclass(theirs) or ours is None:
            continue
        compared += 1
        expected = _public(theirs) - (_public(_Plain) if hasattr(theirs, "from_tensordict") else set())
        if found := expected - _public(ours) - (_public(MADE[name]()) if name in MADE else set()):
            missing[name] = found
    assert missing == listed
    assert compared >= 60
