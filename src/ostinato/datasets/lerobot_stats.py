"""Statistics of LeRobot datasets: of each episode, and of all, for numbers and for frames; those given are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato.core.options import number_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_MOST_FRAMES = 100

Array = np.ndarray[Any, Any]
Stats = dict[str, Array]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def describe_values(values: Array) -> Stats:
    """Return the statistics of rows `[rows, *shape]`: `[*shape]` each, or `[1]` for single numbers."""
    numbers = values.astype(np.float64)
    numbers = numbers.reshape(len(values), *(values.shape[1:] or (1,)))
    quantiles = np.quantile(numbers, list(QUANTILES.values()), axis=0)
    return {
        "min": numbers.min(0),
        "max": numbers.max(0),
        "mean": numbers.mean(0),
        "std": numbers.std(0),
        "count": np.array([len(values)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


@final
class FrameStats:
    """Statistics of the frames of an episode for each color, in `[0, 1]`. Of a long episode, frames evenly apart count.

    Args:
        frames: number of frames of the episode.
    """

    def __init__(self, frames: int) -> None:
        self._wanted = np.unique(np.linspace(0, frames - 1, min(frames, _MOST_FRAMES)).round().astype(np.int64))
        self._seen = 0
        self._counts = np.zeros((3, 256), np.int64)

    def add(self, frames: Array) -> None:
        """Count the values of the next frames, uint8 `[n, H, W, 3]`."""
        inside = (self._wanted >= self._seen) & (self._wanted < self._seen + len(frames))
        for at in self._wanted[inside] - self._seen:
            for color in range(3):
                self._counts[color] += np.bincount(frames[at, ..., color].reshape(-1), minlength=256)
        self._seen += len(frames)

    def result(self) -> Stats:
        """Return the statistics, `[3, 1, 1]` each."""
        levels = np.arange(256) / 255
        total = self._counts.sum(1, keepdims=True)
        mean = (self._counts * levels).sum(1, keepdims=True) / total
        variance = (self._counts * (levels - mean) ** 2).sum(1, keepdims=True) / total
        below = self._counts.cumsum(1)
        found = {name: levels[(below >= share * total).argmax(1)] for name, share in QUANTILES.items()}
        present = self._counts > 0
        stats = {
            "min": levels[present.argmax(1)],
            "max": levels[255 - present[:, ::-1].argmax(1)],
            "mean": mean,
            "std": np.sqrt(variance),
            **found,
        }
        return {name: value.reshape(3, 1, 1) for name, value in stats.items()} | {
            "count": np.array([len(self._wanted)])
        }


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the statistics of all episodes from those of each. Quantiles are means, as LeRobot has them."""
    names = [name for name in ("min", "max", "mean", "std", "count", *QUANTILES) if name in parts[0]]
    every = {name: np.array([part[name] for part in parts], np.float64) for name in names}
    counts = every["count"].reshape(len(parts), -1)[:, 0]
    weights = (counts / counts.sum()).reshape(-1, *[1] * (every["mean"].ndim - 1))
    found: dict[str, Array] = {name: (values * weights).sum(0) for name, values in every.items() if name != "count"}
    spread = every["std"] ** 2 + (every["mean"] - found["mean"]) ** 2
    found |= {"min": every["min"].min(0), "max": every["max"].max(0), "std": np.sqrt((spread * weights).sum(0))}
    return {**{name: value.tolist() for name, value in found.items()}, "count": [int(counts.sum())]}


# -- comparison with values --------------------------------------------------------------------------------------------


class Moments:
    """Count, mean, standard deviation, smallest and largest value of each dimension, without NaN and infinities."""

    def __init__(self, dimensions: int) -> None:
        self.count = np.zeros(dimensions, np.int64)
        self.mean = np.zeros(dimensions)
        self._squares = np.zeros(dimensions)
        self.low = np.full(dimensions, np.inf)
        self.high = np.full(dimensions, -np.inf)
        self.at_low = np.zeros(dimensions, np.int64)
        self.at_high = np.zeros(dimensions, np.int64)

    @property
    def std(self) -> Floats:
        """Standard deviation (of the population)."""
        deviation: Floats = np.sqrt(self._squares / np.maximum(self.count, 1))
        return deviation

    def feed(self, values: Floats) -> None:
        """Add rows `[n, D]`."""
        valid = np.isfinite(values)
        if valid.all():
            count = np.full(values.shape[1], values.shape[0])
            low, high, clean = values.min(0), values.max(0), values
        else:
            count = valid.sum(0)
            low = np.where(valid, values, np.inf).min(0)
            high = np.where(valid, values, -np.inf).max(0)
            clean = np.where(valid, values, 0.0)
        safe = np.maximum(count, 1)
        mean = clean.sum(0) / safe
        squares = (np.where(valid, clean - mean, 0.0) ** 2).sum(0)
        total = np.maximum(self.count + count, 1)
        shift = mean - self.mean
        self._squares += squares + shift**2 * self.count * count / total
        self.mean += shift * count / total
        self.count += count
        self.at_low = self._limit(self.at_low, (values == low).sum(0), low, self.low, lower=True)
        self.at_high = self._limit(self.at_high, (values == high).sum(0), high, self.high, lower=False)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)

    @staticmethod
    def _limit(
        known: NDArray[np.int64], new: NDArray[np.int64], value: Floats, limit: Floats, *, lower: bool
    ) -> NDArray[np.int64]:
        beyond = value < limit if lower else value > limit
        counts: NDArray[np.int64] = np.where(beyond, new, np.where(value == limit, known + new, known))
        return counts


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
