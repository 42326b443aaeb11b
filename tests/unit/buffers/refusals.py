"""Tables of calls that raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["raises", "refuses"]


def raises(*cases: tuple[Callable[[], object], type[Exception], str]) -> None:
    """Fail unless each call raises its error with these words, or with any where these are empty."""
    for call, error, words in cases:
        with pytest.raises(error, match=words or None):
            call()


def refuses(table: Mapping[type[Exception], Mapping[str, Any]]) -> None:
    """Fail unless each call raises the error that it stands under, with its words; a tuple has several calls."""
    for error, calls in table.items():
        for words, call in calls.items():
            raises(*((each, error, words) for each in (call if isinstance(call, tuple) else (call,))))
