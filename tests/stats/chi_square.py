"""The chi-square test, by the Wilson-Hilferty approximation of its tail: no scipy needed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["p_value"]


def p_value(counts: Sequence[int], weights: Sequence[float] | None = None) -> float:
    """Return the probability of counts at least as uneven as these, if outcomes have these weights (default: equal).

    Wilson and Hilferty (1931): (X / k)^(1/3) is nearly normal with mean 1 - 2 / 9k and variance 2 / 9k.
    """
    total = sum(counts)
    shares = [1 / len(counts)] * len(counts) if weights is None else [w / sum(weights) for w in weights]
    chi = sum((count - total * share) ** 2 / (total * share) for count, share in zip(counts, shares, strict=True))
    free = len(counts) - 1
    z = ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return 0.5 * math.erfc(z / math.sqrt(2))
