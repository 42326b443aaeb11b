"""Comparison of the statistics that a dataset brings with those of its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ostinato.core.options import number_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.tools.doctor.numbers import Moments

Floats: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"

__all__ = ["flat_numbers", "wrong_statistics"]


def wrong_statistics(given: Mapping[str, Any], moments: Moments) -> list[str]:
    """Return what is wrong with statistics, in words; empty if they match the values up to rounding.

    Args:
        given: `min`, `max`, `mean`, `std` (lists of any nesting) and `count`; those that are missing are not compared.
        moments: the statistics of the values.
    """
    problems = []
    for kind in ("min", "max", "mean", "std"):
        if kind not in given:
            continue
        found = flat_numbers(given[kind])
        width = moments.count.shape[0]
        if found is None or not found.shape[0] or width % found.shape[0]:
            problems.append(f"{kind} does not have {width} numbers")
            continue
        expected, allowed, other = _expected(kind, moments, found.shape[0])
        off = ~(np.abs(found - expected) <= allowed) & ~(np.abs(found - other) <= allowed)
        if off.any():
            at = int(np.flatnonzero(off)[0])
            problems.append(f"{kind} of dimension {at} is {found[at]:.6g}, that of the data {expected[at]:.6g}")
    count = flat_numbers(given["count"]) if "count" in given else None
    if count is not None and count.shape[0] and count[0] != moments.count.max():
        problems.append(f"count is {count[0]:.0f}, the data has {number_of(moments.count.max(), 'row')}")
    return problems


def _expected(kind: str, moments: Moments, size: int) -> tuple[Floats, Floats, Floats]:
    """Return a statistic of the values, how far another may be from it, and another valid value of it.

    Args:
        kind: `min`, `max`, `mean` or `std`.
        moments: the statistics of the values.
        size: how many numbers are wanted: fewer than dimensions where LeRobot joins the rows of matrices.
    """
    low, high = moments.low.reshape(-1, size).min(0), moments.high.reshape(-1, size).max(0)
    means, variances = moments.mean.reshape(-1, size), moments.std.reshape(-1, size) ** 2
    mean = means.mean(0)
    std = np.sqrt(np.maximum((variances + means**2).mean(0) - mean**2, 0.0))
    largest = np.maximum(np.abs(low), np.abs(high))
    if kind == "mean":
        return mean, 1e-3 * std + 1e-4 * largest + 1e-8, mean
    if kind == "std":
        rows = int(moments.count.max())
        return std, 1e-2 * std + 1e-4 * largest + 1e-8, std * np.sqrt(rows / max(rows - 1, 1))
    limit = low if kind == "min" else high
    return limit, 1e-4 * (high - low) + 1e-5 * largest + 1e-8, limit


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
