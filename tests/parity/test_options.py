"""Every constructor argument of TorchRL stands in `docs/compat/torchrl.md`, and what the page says of it is true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from ostinato.buffers.options import BufferOptions

from ._script import library

PAGE = Path(__file__).parents[2] / "docs" / "compat" / "torchrl.md"
_ROW = re.compile(r"^\| `(\w+)` \| (supported|no effect|raises) \| (.+) \|$", re.MULTILINE)
_HIDDEN = {"RandomSampler": {"replacement": True}}
"""Arguments that TorchRL takes without showing them in the signature."""
_TAKEN = {
    "shared",
    "compile",
    "use_gpu",
    "fragmented",
    "checkpointer",
    "service_backend_options",
    "transport_options",
}
"""Arguments that are taken, so that they can be refused with a reason."""


def _tables() -> dict[str, dict[str, str]]:
    """Class -> argument -> what the page says of it."""
    chapter = PAGE.read_text(encoding="utf-8").split("## Constructor arguments")[1].split("\n## ")[0]
    sections = re.split(r"^### (\w+)$", chapter, flags=re.MULTILINE)[1:]
    return {
        name: {row[0]: row[1] for row in _ROW.findall(text)}
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }


TABLES = _tables()


def _arguments(cls: Any) -> list[str]:
    """Return the names of the arguments of a class, those that it passes on as `Unpack[BufferOptions]` included."""
    found: list[str] = []
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if "BufferOptions" in str(parameter.annotation):
            found += BufferOptions.__annotations__
        elif name not in {"self", "args"}:
            found.append(name)
    return found


@pytest.mark.parametrize("name", TABLES)
def test_page_names_every_argument_and_tells_the_truth(name: str) -> None:
    assert set(TABLES[name]) == set(_HIDDEN.get(name) or _arguments(getattr(library("torchrl"), name)))
    ours = _arguments(getattr(library("ostinato"), name))
    for argument, word in TABLES[name].items():
        if argument not in {"kwargs", *_TAKEN}:
            assert (argument in ours) == (word != "raises"), f"{name}({argument}=): the page says {word}"


def test_refused_arguments_raise() -> None:
    for argument, word in TABLES["ReplayBuffer"].items():
        if word == "raises":
            with pytest.raises((TypeError, ValueError), match=argument):
                library("ostinato").TensorDictReplayBuffer(**{argument: True})


def test_page_covers_the_classes() -> None:
    public = {name for name in vars(library("ostinato")) if name not in {"name", "Sampler", "Writer"}}
    assert public == set(TABLES)
