"""Tables of calls that raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["raises"]


def raises(*cases: tuple[Callable[[], object], type[Exception], str]) -> None:
    """Fail unless each call raises its error with these words, or with any where these are empty."""
    for call, error, words in cases:
        with pytest.raises(error, match=words or None):
            call()
