"""Types and ranges of options, with one message for each kind of error; counts in messages: "1 row", "1,000 rows"."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from ostinato.errors import KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Object = TypeVar("_Object")
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


def check_number(
    name: str,
    value: Any,
    words: str = "a number",
    holds: Callable[[float], bool] = lambda number: number == number,  # noqa: PLR0124 (not NaN)
    kind: type[Exception] = OptionError,
) -> float:
    """Return an option that is a real number, as a float.

    Args:
        name: of the option.
        value: as it was given.
        words: what is allowed.
        holds: whether a number is allowed.
        kind: the error for something else than a real number.

    Raises:
        OptionError: if it is no number, unless there is another `kind`, or is not allowed.
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not holds(float(value)):
        msg = f"{name} must be {words}, got {value!r}" + ("" if real else f" of type {type(value).__name__}")
        raise OptionError(msg) if real else kind(msg)
    return float(value)


def check_type(name: str, value: Any, kind: type[_Object], advice: str) -> _Object | None:
    """Return an option that is None or an instance of a class.

    Raises:
        KindError: for anything else, with the advice.
    """
    if value is not None and not isinstance(value, kind):
        home = kind.__module__.partition(".")[0]
        article = "an" if home[0] in "aeio" else "a"
        msg = f"{name} must be {article} {home}.{kind.__name__} or None, got {type(value).__name__}: {advice}"
        raise KindError(msg)
    return value


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


def plural(noun: str) -> str:
    """Return the plural of a regular English noun, such as `trajectory`, `patch` or `row`."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def number_of(count: int, noun: str) -> str:
    """Return a count and its noun in singular or plural: `number_of(1_000, "row")` is "1,000 rows"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"
