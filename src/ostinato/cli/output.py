"""Answers of commands: JSON for machines or a table for people."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["answer", "to_json"]

_Report = TypeVar("_Report")


def answer(report: _Report, table: Callable[[_Report], None], *, as_json: bool) -> None:
    """Print a report: as JSON, or through the function that lays it out."""
    if as_json:
        sys.stdout.write(to_json(report) + "\n")
    else:
        table(report)


def to_json(value: Any) -> str:
    """Return JSON; infinities and NaN, which it has no words for, become text."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
