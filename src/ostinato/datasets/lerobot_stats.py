"""Statistics of LeRobot datasets: of each episode, and of all, for numbers and for frames."""

from __future__ import annotations

from typing import Any, final

import numpy as np

__all__ = ["QUANTILES", "FrameStats", "Totals", "describe_values"]

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_MOST_FRAMES = 100

Array = np.ndarray[Any, Any]
Stats = dict[str, Array]


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


@final
class Totals:
    """Statistics of all episodes. Quantiles are the means of those of the episodes, as LeRobot has them."""

    def __init__(self) -> None:
        self._episodes: dict[str, list[Stats]] = {}

    def add(self, name: str, stats: Stats) -> None:
        """Add the statistics of an episode."""
        self._episodes.setdefault(name, []).append(stats)

    def result(self) -> dict[str, Stats]:
        """Return the statistics of each feature."""
        return {name: _merged(parts) for name, parts in self._episodes.items()}


def _merged(parts: list[Stats]) -> Stats:
    counts = np.array([int(part["count"][0]) for part in parts], np.float64)
    weights = (counts / counts.sum()).reshape(-1, *(1,) * parts[0]["mean"].ndim)

    def mean(name: str) -> Array:
        found: Array = (np.stack([part[name] for part in parts]) * weights).sum(0)
        return found

    middle = mean("mean")
    spread = np.stack([part["std"] ** 2 + (part["mean"] - middle) ** 2 for part in parts])
    return {
        "min": np.min([part["min"] for part in parts], 0),
        "max": np.max([part["max"] for part in parts], 0),
        "mean": middle,
        "std": np.sqrt((spread * weights).sum(0)),
        "count": np.array([int(counts.sum())]),
        **{name: mean(name) for name in QUANTILES},
    }
