"""Contract suites out of tables: one class of tests for each maker of a part."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["suites"]


def suites(base: type[Any], makers: Mapping[str, Callable[..., Any]], module: str, **members: Any) -> dict[str, Any]:
    """Return subclasses of a contract by name, for the globals of a module."""
    found = {}
    for name, make in makers.items():
        title = "Test" + "".join(word[:1].upper() + word[1:] for word in re.findall(r"\w+", name))
        own = {"make": lambda self, *arguments, make=make: make(*arguments)}
        found[title] = type(title, (base,), {**own, **members, "__module__": module, "__test__": True})
    return found
