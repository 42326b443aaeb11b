"""Comparison of the statistics that a dataset brings with those of its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.tools.doctor.numbers import Moments

__all__ = ["flat_numbers", "wrong_statistics"]


def wrong_statistics(given: Mapping[str, Any], moments: Moments) -> list[str]:
    """Return what is wrong with statistics, in words; empty if they match the values up to rounding.

    Args:
        given: `min`, `max`, `mean`, `std` (lists of any nesting) and `count`; those that are missing are not compared.
        moments: the statistics of the values.
    """
    size = np.maximum(np.abs(moments.low), np.abs(moments.high))
    spread = moments.high - moments.low
    edge = 1e-4 * spread + 1e-5 * size + 1e-8
    center = 1e-3 * moments.std + 1e-4 * size + 1e-8
    width = 1e-2 * moments.std + 1e-4 * size + 1e-8
    sample = moments.std * np.sqrt(moments.count / np.maximum(moments.count - 1, 1))
    problems = []
    for kind, expected, allowed in (
        ("min", moments.low, edge),
        ("max", moments.high, edge),
        ("mean", moments.mean, center),
        ("std", moments.std, width),
    ):
        if kind not in given:
            continue
        found = flat_numbers(given[kind])
        if found is None or found.shape != expected.shape:
            problems.append(f"{kind} does not have {expected.shape[0]} numbers")
            continue
        off = ~(np.abs(found - expected) <= allowed)
        if kind == "std":
            off &= ~(np.abs(found - sample) <= allowed)
        if off.any():
            at = int(np.flatnonzero(off)[0])
            problems.append(f"{kind} of dimension {at} is {found[at]:.6g}, that of the data {expected[at]:.6g}")
    count = flat_numbers(given["count"]) if "count" in given else None
    if count is not None and count.shape[0] and count[0] != moments.count.max():
        problems.append(f"count is {count[0]:.0f}, the data has {moments.count.max()} rows")
    return problems


def flat_numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return the numbers of nested lists in one array `[n]`, None if they are something else."""
    while isinstance(value, list) and value and isinstance(value[0], list):
        try:
            value = [number for inner in value for number in inner]
        except TypeError:
            return None
    try:
        return np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return None
