"""The state of a ledger of priorities: what is refused before any of it is taken over."""

from __future__ import annotations

from typing import Any

import torch

from ostinato.errors import CheckpointError

__all__ = ["MOST_VALUE", "check_ledger"]

MOST_VALUE = 2.0**960
"""Largest value: the sum of 2**36 of them is still finite."""


def check_ledger(state: dict[str, Any], rows: int) -> None:
    """Refuse a state that is damaged, or of another number of rows.

    Raises:
        CheckpointError: if so.
    """
    numbers = [state[name] for name in ("alpha", "eps", "values_alpha", "largest")]
    whole = all(_is_content(state[x], rows) for x in ("priorities", "values"))
    if not (whole and all(map(_is_number, numbers))):
        msg = f"the sampler's state is damaged: it does not hold {rows} finite priorities of at least 0"
        raise CheckpointError(msg)
    alpha, eps, values_alpha, largest = map(float, numbers)
    try:
        most = (max(largest, _top(state["priorities"])) + eps) ** max(alpha, values_alpha)
        fits = max(most, _top(state["values"])) <= MOST_VALUE
    except OverflowError:
        fits = False
    if not fits:
        msg = f"the sampler's state is damaged: (p + eps) ** alpha is above 2**960 with alpha={alpha:g}, eps={eps:g}"
        raise CheckpointError(msg)


def _is_content(x: Any, rows: int) -> bool:
    right = isinstance(x, torch.Tensor) and x.dtype is torch.float64 and tuple(x.shape) == (rows,)
    return right and bool(((x >= 0) & (x < float("inf"))).all())


def _top(x: torch.Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and 0.0 <= x < float("inf")
