"""Which shard a row goes to and comes from: arithmetic only, without Ray.

A batch is drawn in two levels. Shard `s` holds rows of values `v_i` (1 for uniform sampling, else the powered
priorities), whose sum is its mass `m_s`. Each position of the batch chooses a shard with probability `m_s / sum m`, and
that shard a row with probability `v_i / m_s`. The product, `v_i / sum m`, is the distribution of a single buffer that
holds all rows.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor


_SLOT_BITS = 40
_SLOT_MASK = (1 << _SLOT_BITS) - 1
MAX_SHARDS = 1 << 20
"""An int64 index has 40 bits for the slot, and room for so many shards."""


class ShardWeight(NamedTuple):
    """The weight of one shard at the time of a draw."""

    rows: int
    """Rows present."""
    mass: float
    """Sum of the values of the rows that can be drawn."""
    least: float
    """Smallest positive value; 1 for uniform sampling."""
    beta: float = 0.0
    """Exponent of the importance weights; 0 for uniform sampling."""


def join_index(shard: int | Tensor, slots: Tensor) -> Tensor:
    """Return slots of a shard (or of one for each) as indices of the whole buffer, int64.

    -1, for a row that was not kept, stays -1.
    """
    return torch.where(slots < 0, slots, slots + (shard << _SLOT_BITS))


def split_index(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shard and the slot of each index of the whole buffer, int64; both are -1 for -1."""
    return index >> _SLOT_BITS, torch.where(index < 0, index, index & _SLOT_MASK)


def allot(masses: Sequence[float], uniforms: Tensor) -> Tensor:
    """Choose a shard for each position of a batch, independently, in proportion to the masses.

    Args:
        masses: Mass of each shard, non-negative, not all 0.
        uniforms: float64 `[B]` in `[0, 1)`.

    Returns:
        int64 `[B]`; a shard with mass 0 is never chosen.
    """
    ends = torch.tensor(list(itertools.accumulate(masses)), dtype=torch.float64, device="cpu")
    chosen = torch.searchsorted(ends, uniforms * ends[-1], right=True)
    last = max(i for i, mass in enumerate(masses) if mass > 0)  # rounding may reach the end
    return chosen.clamp_(max=last)


def allot_consuming(rows: Sequence[int], draws: Sequence[int], uniforms: Tensor) -> Tensor:
    """Choose a shard for each position of a batch if draws consume rows.

    A shard is chosen in proportion to its rows that can be drawn. Each draw removes its share of them, so that no shard
    is chosen more often than its rows can be drawn. If each row can be drawn once, this is the distribution of drawing
    without replacement from all rows. Cost: O(positions x shards).

    Args:
        rows: Rows of each shard that can be drawn.
        draws: How many draws they allow; the sum is at least the number of positions.
        uniforms: float64 `[B]` in `[0, 1)`.

    Returns:
        int64 `[B]`.
    """
    rows_per_draw = [count / allowed if allowed else 0.0 for count, allowed in zip(rows, draws, strict=True)]
    left, chosen = list(draws), []
    for uniform in uniforms.tolist():
        ends = list(itertools.accumulate(each * many for each, many in zip(rows_per_draw, left, strict=True)))
        last = max(i for i, many in enumerate(left) if many)  # rounding may reach the end
        at = min(bisect.bisect_right(ends, uniform * ends[-1]), last)
        left[at] -= 1
        chosen.append(at)
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")


def positions_by_shard(chosen: Tensor) -> dict[int, Tensor]:
    """Return the positions of a batch that each chosen shard fills, int64, ascending."""
    shards, counts = torch.unique(chosen, return_counts=True)
    positions = torch.split(chosen.argsort(stable=True), counts.tolist())
    return dict(zip(shards.tolist(), positions, strict=True))


def weight_factors(weights: Mapping[int, ShardWeight]) -> dict[int, float]:
    """Return the factor from the importance weights of each shard to those of the whole buffer.

    A shard computes `(v / v_min) ** -beta` with its own smallest value, the whole buffer with the smallest one of all
    shards that can be drawn, so that the largest weight is 1.
    """
    least = min(weight.least for weight in weights.values() if weight.mass > 0)
    return {i: (weight.least / least) ** -weight.beta for i, weight in weights.items() if weight.mass > 0}


def write_order(shards: int, first: int, missing: Collection[int]) -> list[int]:
    """Return the shards to try for a write, from the first one on; those that are missing come last."""
    ring = [(first + i) % shards for i in range(shards)]
    return sorted(ring, key=lambda shard: shard in missing)
