"""The exact ratio of an ensemble: shares as fractions, schedules over steps, and the rows of each batch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
import torch

from ostinato.errors import CheckpointError, KindError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from decimal import Decimal

    from torch import Tensor

Share: TypeAlias = "float | str | Fraction | Decimal"
"""A number, taken as it is written."""
Shares: TypeAlias = "Share | Sequence[Share] | Tensor | np.ndarray[Any, Any]"
"""The share of the first of two members, or one number for each member."""
Ratio: TypeAlias = "Shares | Mapping[int, Shares] | Callable[[int], Shares]"
"""Shares, a mapping of steps to shares, or a function of the step."""
Rounding: TypeAlias = Literal["carry", "nearest"]
"""What becomes of the fraction of a row that a share leaves in a batch."""
RatioSteps: TypeAlias = Literal["batches", "calls"]
"""What a schedule of the ratio counts."""
_MOST_BITS = 1024
_FINE = 2**64
_KINDS = "a number (the share of the first of two members), one number for each member, a mapping of steps to these, or"
_ALLOWED = f"ratio must be {_KINDS} a function of the step that returns these"


class Split(NamedTuple):
    """How a batch is divided among members."""

    members: list[int]
    """The member of each part."""
    sizes: list[int]
    """Rows of each part."""
    owed: tuple[Fraction, ...] | None = None
    """For each member its exact share of the batch less its rows; None without an exact ratio."""


@final
class MixingRatio:
    """Shares of members as exact fractions, constant or following a schedule, and the number of rows of each batch.

    A share `f` of a batch of `B` rows is `B * f`, which need not be an integer. With "carry" the fractions of a row
    that earlier batches left are added: a batch has `floor(B * f)` or `ceil(B * f)` rows, and of two members each one
    has had the sum of its `B * f` up to half a row after every batch. No random numbers are used. With "nearest" each
    batch is rounded on its own, as TorchRL does it: 0.3 of 5 rows are 2 rows in every batch.

    Not thread-safe: the ensemble calls it under its lock.

    Args:
        given: see `SamplerEnsemble`.
        members: number of members.
        rounding: "carry" or "nearest".
        clock: "batches" counts each batch as a step, "calls" the calls of `SamplerEnsemble.step`.

    Raises:
        KindError, OptionError: if something is not as described.
    """

    def __init__(self, given: Any, members: int, rounding: Any, clock: Any) -> None:
        check_choice("rounding", rounding, Rounding)
        check_choice("ratio_steps", clock, RatioSteps)
        self._members = members
        self.rounding: Rounding = rounding
        self.clock: RatioSteps = clock
        self.step = 0
        """Steps done: of batches drawn, or of calls."""
        self.carry = [Fraction(0)] * members
        """For each member the rows that it is owed, in sum 0."""
        self.set(given)

    def set(self, given: Any) -> None:
        """Replace the ratio; steps and carry go on.

        Raises:
            KindError, OptionError: if it is not a ratio of so many members; nothing is changed.
        """
        points: list[tuple[int, list[Fraction]]] | None
        if isinstance(given, Mapping):
            points = sorted((_step(step), _shares(value, self._members)) for step, value in given.items())
            if not points:
                msg = f"{_ALLOWED}; got an empty mapping"
                raise OptionError(msg)
        elif callable(given):
            points = None
        else:
            points = [(0, _shares(given, self._members))]
        self.given, self._points = given, points

    def shares(self) -> list[Fraction]:
        """Return the share of each member at the current step, of sum 1.

        Raises:
            KindError, OptionError: if the function of the schedule returns something else.
        """
        if self._points is None:
            return _shares(self.given(self.step), self._members, f" at step {self.step}")
        steps = [step for step, _ in self._points]
        after = bisect_right(steps, self.step)
        low, start = self._points[max(0, after - 1)]
        if after in (0, len(steps)):
            return start
        high, end = self._points[after]
        done = Fraction(self.step - low, high - low)
        return [a + (b - a) * done for a, b in zip(start, end, strict=True)]

    def split(self, size: int, shares: list[Fraction]) -> tuple[list[int], tuple[Fraction, ...]]:
        """Return the rows of each member in a batch, and what each is owed after it; changes nothing.

        Args:
            size: rows of the batch.
            shares: of sum 1; 0 for members that are left out, whose carry stays as it is.
        """
        exact = [size * share for share in shares]
        if self.rounding == "nearest":
            ends = [round(float(sum(shares[: i + 1])) * size) for i in range(len(shares) - 1)]
            return [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)], (Fraction(0),) * len(shares)
        counts = [math.floor(rows) for rows in exact]
        parts = [rows - count for rows, count in zip(exact, counts, strict=True)]
        due = sorted((i for i, part in enumerate(parts) if part), key=lambda i: (-(self.carry[i] + parts[i]), i))
        for i in due[: size - sum(counts)]:
            counts[i] += 1
        return counts, tuple(rows - count for rows, count in zip(exact, counts, strict=True))

    def count(self, owed: tuple[Fraction, ...], batches: int) -> None:
        """Count a batch that was drawn (`batches` is 1), or take one back that was dropped (-1)."""
        carry = [have + batches * more for have, more in zip(self.carry, owed, strict=True)]
        if max(rows.denominator for rows in carry).bit_length() > _MOST_BITS:  # a schedule of ever new denominators
            carry = [Fraction(round(rows * _FINE), _FINE) for rows in carry[1:]]
            carry = [-sum(carry, Fraction(0)), *carry]
        self.carry = carry
        if self.clock == "batches":
            self.step = max(0, self.step + batches)

    def advance(self, steps: int) -> None:
        """Go on by some steps, where calls are counted.

        Raises:
            UsageError: if batches are counted.
            OptionError: if it is not an integer of at least 0.
        """
        if self.clock != "calls":
            msg = 'each batch is a step of this ratio: make the ensemble with ratio_steps="calls" to count calls'
            raise UsageError(msg)
        self.step += _step(steps)

    def subset(self, chosen: list[int]) -> MixingRatio:
        """Return the ratio among some of the members, at the same step, nothing owed.

        Raises:
            OptionError: if the shares of all of them are 0.
        """
        given: Any = partial(_some, self.given, self._members, chosen)
        if self._points is not None:
            given = {step: [shares[i] for i in chosen] for step, shares in self._points}
        made = MixingRatio(given, len(chosen), self.rounding, self.clock)
        made.step = self.step
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return ratio, step and carry; fractions are text. A function is not part of it."""
        points = self._points
        return {
            "points": None if points is None else [[step, _texts(shares)] for step, shares in points],
            "rounding": self.rounding,
            "steps": self.clock,
            "step": self.step,
            "carry": _texts(self.carry),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a function stays the one that was given."""
        points, self.step, self.carry = self.read_state(state)
        if points is not None:
            self.given, self._points = dict(points), points

    def read_state(self, state: dict[str, Any]) -> tuple[list[tuple[int, list[Fraction]]] | None, int, list[Fraction]]:
        """Return points, step and carry of a state.

        Raises:
            CheckpointError: naming what differs.
        """
        for name, mine in (("rounding", self.rounding), ("steps", self.clock)):
            if state[name] != mine:
                option = "ratio_steps" if name == "steps" else name
                msg = (
                    f"the checkpoint is of an ensemble with {option}={state[name]!r}, this one has {option}={mine!r}: "
                    "make it with the same options"
                )
                raise CheckpointError(msg)
        saved = state["points"]
        if (saved is None) != (self._points is None):
            kinds = ("a function of the step", "numbers")
            msg = (
                f"the ratio of the checkpoint is {kinds[saved is not None]}, that of this ensemble "
                f"{kinds[self._points is not None]}: functions are not saved, give the same one again"
            )
            raise CheckpointError(msg)
        try:
            points = None if saved is None else sorted((_step(at), self._sound(shares)) for at, shares in saved)
            carry = [Fraction(rows) for rows in state["carry"]]
            step = _step(state["step"])
        except (KindError, OptionError, ValueError, TypeError, ZeroDivisionError) as error:
            msg = f"the checkpoint's mixing ratio does not fit this ensemble: {error}"
            raise CheckpointError(msg) from None
        if len(carry) != self._members or sum(carry, Fraction(0)) or points == []:
            msg = f"the checkpoint's mixing ratio is not of {self._members} members: it is of others, or damaged"
            raise CheckpointError(msg)
        return points, step, carry

    def _sound(self, saved: Any) -> list[Fraction]:
        shares = [Fraction(share) for share in saved]
        if len(shares) != self._members or sum(shares) != 1 or min(shares) < 0:
            msg = f"{saved} are no shares of {self._members} members"
            raise OptionError(msg)
        return shares

    def __repr__(self) -> str:
        """Show the shares now, and how they change."""
        shown = ", ".join(map(str, self._points[0][1])) if self._points and len(self._points) == 1 else None
        whole = f"[{shown}]" if shown is not None else f"schedule at step {self.step}"
        whole += "" if self.rounding == "carry" else f", rounding={self.rounding!r}"
        return whole + ("" if self.clock == "batches" else f", ratio_steps={self.clock!r}")


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise `OptionError` if an option is none of the values of a `Literal`."""
    if value not in get_args(choices):
        msg = f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}"
        raise OptionError(msg)


def _shares(given: Any, count: int, where: str = "") -> list[Fraction]:
    """Return the share of each of `count` members, of sum 1."""
    values = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    if isinstance(values, list | tuple):
        weights = [_fraction(value, where) for value in values]
    elif isinstance(values, Number | str):
        first = _fraction(values, where)
        if not 0 <= first <= 1 or count != 2:
            msg = (
                f"a single number as ratio is the share of the first of two members, in [0, 1]: got {given!r}{where} "
                f"for {count} members; or give one number for each member"
            )
            raise OptionError(msg)
        weights = [first, 1 - first]
    else:
        msg = f"{_ALLOWED}; got {type(given).__name__}{where}"
        raise KindError(msg)
    if len(weights) != count or min(weights) < 0:
        msg = f"ratio must hold one number of at least 0 for each of the {count} members, got {given!r}{where}"
        raise OptionError(msg)
    total = sum(weights)
    if total == 0:
        msg = f"the ratio must not be 0 for all {len(weights)} members{where}"
        raise OptionError(msg)
    return [weight / total for weight in weights]


def _some(given: Any, count: int, chosen: list[int], step: int) -> list[Fraction]:
    """Return what a function gives for some of `count` members."""
    shares = _shares(given(step), count, f" at step {step}")
    return [shares[i] for i in chosen]


def _fraction(value: Any, where: str) -> Fraction:
    """Return the number that was written: 0.1 is 1/10, not the closest binary number."""
    if isinstance(value, bool | complex) or not isinstance(value, Number | str):
        msg = f"{_ALLOWED}; got {value!r} of type {type(value).__name__}{where}"
        raise KindError(msg)
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        msg = f'shares must be finite numbers, or text such as "1/3", got {value!r}{where}'
        raise OptionError(msg) from None


def _step(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value.__index__()) < 0:
        msg = f"steps of a ratio must be integers of at least 0, got {value!r}"
        raise OptionError(msg)
    return int(value.__index__())


def _texts(values: list[Fraction]) -> list[str]:
    return [str(value) for value in values]
