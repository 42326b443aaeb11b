"""Statistics of LeRobot datasets: of each episode, and of all, for numbers and for frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["QUANTILES", "FrameStats", "describe_values", "merged"]

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
