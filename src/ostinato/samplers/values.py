"""Arithmetic of priorities: checks, one number per item, the last of duplicates. No state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.errors import CheckpointError, OptionError, PriorityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "BAD_VALUE",
    "MOST_VALUE",
    "REDUCTIONS",
    "check_number",
    "check_priorities",
    "check_size",
    "check_values",
    "last_of_equal",
    "on_device",
    "raise_to",
    "refuse_bad",
    "top_priority",
    "weigh",
]

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "mean": lambda x: x.mean(-1),
    "median": lambda x: x.median(-1).values,
}
"""How the priorities `[n, m]` of an item's steps become one; the median of an even number is the lower one."""

_SHOWN = 8
MOST_VALUE = 2.0**960
"""Largest value of a row: the sum of 2**36 of them is still finite."""
BAD_VALUE = "priorities must be finite and at least 0, got {}{}: nothing has been written"


def check_number(name: str, value: Any) -> float:
    """Return an exponent or offset: a finite number of at least 0.

    Raises:
        OptionError: otherwise.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, (str, bytes)) or not 0.0 <= number < float("inf"):
        msg = f"{name} must be a finite number of at least 0, got {value!r}"
        raise OptionError(msg)
    return number


def check_priorities(state: dict[str, Any], rows: int) -> None:
    """Refuse priorities of a checkpoint that are damaged, or of another number of rows.

    Raises:
        CheckpointError: if so.
    """
    numbers = [state[name] for name in ("alpha", "eps", "values_alpha", "largest")]
    whole = all(_is_content(state[x], rows) for x in ("priorities", "values"))
    if not (whole and all(isinstance(x, (int, float)) and 0.0 <= x < float("inf") for x in numbers)):
        msg = f"the sampler's state is damaged: it does not hold {rows} finite priorities of at least 0"
        raise CheckpointError(msg)
    alpha, eps, values_alpha, largest = map(float, numbers)
    top, value = (float(state[x].max()) if rows else 0.0 for x in ("priorities", "values"))
    try:
        fits = max((max(largest, top) + eps) ** max(alpha, values_alpha), value) <= MOST_VALUE
    except OverflowError:
        fits = False
    if not fits:
        msg = f"the sampler's state is damaged: (p + eps) ** alpha is above 2**960 with alpha={alpha:g}"
        raise CheckpointError(msg)


def _is_content(x: Any, rows: int) -> bool:
    right = isinstance(x, torch.Tensor) and x.dtype is torch.float64 and tuple(x.shape) == (rows,)
    return right and bool(((x >= 0) & (x < float("inf"))).all())


def refuse_bad(priorities: Tensor) -> None:
    """Raise for priorities of which some are negative or not finite.

    Raises:
        PriorityError: naming them and their positions.
    """
    bad = (~((priorities >= 0) & (priorities < float("inf")))).nonzero().flatten()
    values = [f"{value:g}" for value in priorities[bad[:_SHOWN]].tolist()]
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    msg = (
        f"priorities must be finite and at least 0, got {', '.join(values)} at the positions "
        f"{bad[:_SHOWN].tolist()}{more} of {len(priorities)}: pass absolute errors, such as td_error.abs(); nothing "
        "was changed"
    )
    raise PriorityError(msg)


def top_priority(priorities: Tensor, eps: float, alpha: float) -> float:
    """Return the largest of some priorities on the CPU, float64 `[n]`, `n >= 1`.

    Raises:
        PriorityError: if some are negative, not finite, or too large.
    """
    values = priorities.numpy()
    low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not (low >= 0.0 and high < float("inf")):
        refuse_bad(priorities)
    check_size(high, eps, alpha)
    return high


def check_size(priority: float, eps: float, alpha: float) -> None:
    """Refuse a priority whose value would be too large.

    Raises:
        PriorityError: if so.
    """
    try:
        small = (priority + eps) ** alpha <= MOST_VALUE
    except OverflowError:
        small = False
    if not small:
        msg = (
            f"priorities must keep (p + eps) ** alpha at most 2**960, got {priority:g} with alpha={alpha:g}: "
            "scale them down"
        )
        raise PriorityError(msg)


def last_of_equal(slots: Tensor, values: Tensor, keep: Tensor | None) -> Tensor:
    """Return `values` with each replaced by that of the last equal slot, so that the order of writing does not matter.

    No host sync. Where `keep` is False a value counts only if no equal slot has one that counts.
    """
    key = slots * 2 + (1 if keep is None else keep.to(slots.dtype))
    ordered, order = torch.sort(key, stable=True)
    last = torch.searchsorted(ordered, slots * 2 + 1, right=True) - 1
    return values[order[last]]


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-dim tensor on a device, without waiting for it: a float is filled in there."""
    if isinstance(number, float):
        return torch.full((), number, dtype=torch.float64, device=device)
    return number.to(device, torch.float64)


def raise_to(priorities: Tensor, eps: float, alpha: float) -> Tensor:
    """Return `(p + eps) ** alpha` in fresh memory; 0 where `p + eps` is 0, also for `alpha = 0`."""
    if alpha == 0:
        return ((priorities + eps) > 0).to(torch.float64)
    if not priorities.is_cpu:
        return (priorities + eps).pow_(alpha)
    values = priorities.numpy() + eps  # numpy starts an operation in a third of torch's time
    return torch.from_numpy(np.power(values, alpha, out=values))


def weigh(values: Tensor, least: float | Tensor, beta: float) -> Tensor:
    """Return `(v / least) ** -beta`, in place."""
    if not isinstance(least, float):
        return values.div_(least).pow_(-beta)
    array = values.numpy()
    np.power(np.divide(array, least, out=array), -beta, out=array)
    return values


def check_values(values: Tensor) -> None:
    """Refuse values that are negative or not finite.

    Raises:
        OptionError: naming the first one.
    """
    bad = ~((values >= 0) & (values < torch.inf))
    if bad.any():
        at = int(bad.int().argmax())
        msg = BAD_VALUE.format(float(values[at]), f" at position {at}")
        raise OptionError(msg)
