"""Draws of distinct rows: uniform, or in proportion to weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_ROUNDS = 8
"""Rounds of single draws, before the rest of a batch is drawn from an order of all rows."""
_LARGE = 4
"""A batch of at least one row in so many is drawn from an order of all rows at once."""


def draw_distinct(total: int, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw `count` different numbers of `[0, total)`; every order of every set of them is equally likely.

    Cost: O(count log count); O(total) if `count` is a quarter of them or more.

    Returns:
        int64 `[count]` on `device`.
    """

    def single(number: int) -> Tensor:
        return torch.randint(0, total, (number,), generator=generator, device=device)

    def ordered() -> Tensor:
        return torch.randperm(total, generator=generator, device=device)

    return _draw(single, ordered, count, large=_LARGE * count >= total)


def draw_weighted(
    sums: Tensor, weights: Tensor, count: int, generator: torch.Generator | None, *, distinct: bool
) -> Tensor:
    """Draw `count` numbers of `[0, n)` in proportion to their weights.

    Distinct numbers are drawn one after the other, each in proportion to the weights of those not drawn yet.

    Args:
        sums: cumulative sums of the weights, float64 `[n]`.
        weights: all above 0, float64 `[n]`.
        count: how many; at most `n` if they are distinct.
        generator: source of random numbers.
        distinct: whether no number occurs twice.

    Returns:
        int64 `[count]`.
    """
    top = weights.shape[0] - 1

    def single(number: int) -> Tensor:
        points = torch.rand(number, dtype=torch.float64, generator=generator, device=sums.device) * sums[-1]
        return torch.searchsorted(sums, points, right=True).clamp_(max=top)

    def ordered() -> Tensor:  # the order in which exponential clocks of these rates ring
        times = torch.empty_like(weights).exponential_(generator=generator)
        return (times / weights).argsort(stable=True)

    if not distinct:
        return single(count)
    return _draw(single, ordered, count, large=_LARGE * count >= weights.shape[0])


def _draw(single: Callable[[int], Tensor], ordered: Callable[[], Tensor], count: int, *, large: bool) -> Tensor:
    """Draw distinct numbers: single draws without those that were drawn before, then an order without them.

    Both have the same distribution: that of draws one after the other, each among the numbers that are left.
    """
    if large:
        return ordered()[:count]
    found = single(count)
    for turn in range(_ROUNDS):
        found = found[_first_of_each(found)]
        if found.shape[0] == count:
            return found
        if turn < _ROUNDS - 1:
            found = torch.cat((found, single(count - found.shape[0])))
    order = ordered()
    return torch.cat((found, order[~torch.isin(order, found)]))[:count]


def _first_of_each(values: Tensor) -> Tensor:
    """Return the positions at which a value occurs for the first time, ascending."""
    ranked, order = values.sort(stable=True)
    first = torch.ones_like(ranked, dtype=torch.bool)
    first[1:] = ranked[1:] != ranked[:-1]
    return order[first].sort().values
