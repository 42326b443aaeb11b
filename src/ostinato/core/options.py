"""Types and ranges of options, with one message for each kind of error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from ostinato.errors import KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

_Name = TypeVar("_Name", bound=str)

LARGEST = 2**62
"""Options and counts are below it: sums and differences of two fit int64."""


def check_integer(
    name: str, value: Any, least: int | None = None, kind: type[Exception] = KindError, *, below: int = LARGEST
) -> int:
    """Return an option that is an integer of at least `least`, if there is such a bound.

    Args:
        name: of the option.
        value: as it was given.
        least: the smallest that is allowed.
        kind: the error for something else than an integer.
        below: a bound of its absolute value.

    Raises:
        KindError: if it is no integer, unless there is another `kind`.
        OptionError: if it is out of range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        msg = f"{name} must be {_words(least)}, got {value!r} of type {type(value).__name__}"
        raise kind(msg)
    number = int(value.__index__())
    if least is not None and number < least:
        msg = f"{name} must be {_words(least)}, got {value!r}"
        raise OptionError(msg)
    if not -below < number < below:
        msg = f"{name} must be below {below}, got {value}"
        raise OptionError(msg)
    return number


def _words(least: int | None) -> str:
    return {None: "an integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")


def check_real(name: str, value: Any, least: float, most: float) -> float:
    """Return an option that is a real number in `[least, most]`.

    Raises:
        OptionError: if it is not.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not least <= number <= most:
        msg = f"{name} must be in [{least:g}, {most:g}], got {value!r}"
        raise OptionError(msg)
    return number


def check_choice(name: str, value: _Name, choices: Iterable[str]) -> _Name:
    """Return an option that is one of some names.

    Raises:
        OptionError: if it is not, naming them.
    """
    if value not in choices:
        msg = f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
        raise OptionError(msg)
    return value
