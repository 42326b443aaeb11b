"""Running statistics of the values of one field, and its unusual steps; memory does not grow with the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ostinato.datasets.lerobot_stats import Moments

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_SAMPLE = 4096
_SAMPLE_VALUES = 1 << 20
_TOP = 16
_BEFORE, _AFTER = 3, 6
_FEW = 16
"""Dimensions with so few values are switches, flags or classes."""
_MOST_DIMENSIONS = 256
"""Steps are not compared in wider fields."""


class Event(NamedTuple):
    """One unusual step of one dimension."""

    dimension: int
    episode: int
    step: int
    """Row of the episode with the value after the step."""
    before: float
    after: float
    ratio: float
    """Size as a multiple of the usual one."""
    switch: bool
    """Whether the values are flat before and after it, as those of a gripper."""


class FieldNumbers:
    """The values of one field over the dataset.

    Args:
        dimensions: values of one row.
        steps: whether the differences of successive rows are compared.
    """

    def __init__(self, dimensions: int, *, steps: bool) -> None:
        self.moments = Moments(dimensions)
        self._steps = steps and dimensions <= _MOST_DIMENSIONS
        self._rows = 0
        self._values = _Spaced(dimensions)
        self._differences = _Spaced(dimensions)
        self._top = np.full((0, dimensions), 0.0)
        self._where = np.zeros((0, dimensions, 3), np.int64)
        self._around = np.zeros((0, dimensions, _BEFORE + _AFTER))

    @property
    def sample(self) -> Floats:
        """Evenly spaced rows `[n, D]`."""
        return self._values.rows

    def distinct(self) -> NDArray[np.int64]:
        """Return the number of different values of each dimension, of evenly spaced rows."""
        rows = np.sort(self.sample, 0)
        changes: NDArray[np.int64] = (np.diff(rows, axis=0) != 0).sum(0)
        return changes + 1

    def feed(self, values: Floats, episode: int, step: int) -> None:
        """Add successive rows `[n, D]` of an episode, of which the first is its row `step`."""
        first = self._rows
        self._rows += values.shape[0]
        self.moments.feed(values)
        self._values.feed(values)
        if self._steps and values.shape[0] > 1:
            sizes = np.abs(np.diff(values, axis=0))
            sizes[~np.isfinite(sizes)] = 0.0
            sizes[_turned(values)] = 0.0
            self._differences.feed(sizes)
            self._keep_top(values, sizes, episode, step, first)

    def _keep_top(self, values: Floats, sizes: Floats, episode: int, step: int, first: int) -> None:
        if self._top.shape[0] == _TOP and (sizes.max(0) <= self._top[-1]).all():
            return
        kept = min(_TOP, sizes.shape[0])
        at = np.argpartition(-sizes, kept - 1, axis=0)[:kept]
        columns = np.arange(sizes.shape[1])
        around = at[:, :, None] + 1 + np.arange(-_BEFORE, _AFTER)
        inside = (around >= 0) & (around < values.shape[0])
        found = np.where(inside, values[np.clip(around, 0, values.shape[0] - 1), columns[:, None]], np.nan)
        where = np.stack([np.full_like(at, episode), at + 1 + step, at + 1 + first], -1)
        top = np.concatenate([self._top, sizes[at, columns]])
        where, found = np.concatenate([self._where, where]), np.concatenate([self._around, found])
        best = np.argsort(-top, axis=0, kind="stable")[:_TOP]
        self._top, self._where, self._around = top[best, columns], where[best, columns], found[best, columns]

    def ratios(self) -> Floats:
        """Return the largest differences as multiples of the usual one: `[n, 2]`, row of the dataset and multiple."""
        if not self._top.size:
            return np.zeros((0, 2))
        scale = self._scale()
        ratio = np.where(scale > 0, self._top / np.where(scale > 0, scale, 1.0), 0.0)
        return np.stack([self._where[..., 2].astype(np.float64).ravel(), ratio.ravel()], -1)

    def _scale(self) -> Floats:
        """Return the usual size of a step of each dimension: what nine of ten steps that change it stay below."""
        sizes = self._differences.rows
        moving = np.where(sizes > 0, sizes, np.nan)
        some = (sizes > 0).any(0)
        usual = np.zeros(sizes.shape[1])
        if some.any():
            usual[some] = np.nanquantile(moving[:, some], 0.9, axis=0)
        often = np.quantile(sizes, 0.99, axis=0) if sizes.shape[0] >= 1000 else usual
        return np.maximum(np.maximum(usual, often), 0.02 * self._spread(0.005))

    def _spread(self, outside: float) -> Floats:
        """Return the range of each dimension without a share of the values at both ends."""
        values = np.where(np.isfinite(self.sample), self.sample, 0.0)
        low, high = np.quantile(values, (outside, 1 - outside), axis=0)
        spread: Floats = high - low
        return spread

    def events(self) -> list[Event]:
        """Return steps that are far larger than the others of their dimension; few of each dimension."""
        if self._differences.rows.shape[0] < 20:
            return []
        scale, spread, distinct = self._scale(), self._spread(0.02), self.distinct()
        moving = (self._differences.rows > 0).sum(0)
        least = np.maximum(8 * scale, self._above_gap())
        found: list[Event] = []
        for dimension in np.flatnonzero((distinct > _FEW) & (moving >= 20)):
            for size, place, around in zip(
                self._top[:, dimension], self._where[:, dimension], self._around[:, dimension], strict=True
            ):
                if size >= least[dimension] and size > 0.5 * spread[dimension] and not _wraps(around):
                    flat = _is_flat(around, spread[dimension])
                    before, after = around[_BEFORE - 1], around[_BEFORE]
                    ratio = float(size / scale[dimension])
                    event = Event(int(dimension), int(place[0]), int(place[1]), before, after, ratio, flat)
                    _join(found, event)
        return found

    def _above_gap(self) -> Floats:
        """Return the size above which steps of each dimension stand out: three times the next smaller step.

        Without such a gap, large steps are the tail of a distribution, as those of contact forces. The last of several
        gaps counts: there may be wrapped angles above it.
        """
        top = np.concatenate([self._top, np.zeros((1, self._top.shape[1]))])
        gaps = (top[:-1] > 0) & (top[:-1] >= 3 * top[1:])
        if self._top.shape[0] == _TOP:
            gaps[-1] = False  # the next smaller one is not known
        last = gaps.shape[0] - 1 - np.argmax(gaps[::-1], 0)
        sizes: Floats = np.where(gaps.any(0), top[last, np.arange(top.shape[1])], np.inf)
        return sizes


def _join(found: list[Event], event: Event) -> None:
    """Add an event, unless it belongs to one that is known: a spike begins with its first step."""
    for at, other in enumerate(found):
        if _same(event, other):
            found[at] = min(event, other, key=lambda one: one.step)
            return
    found.append(event)


def _same(one: Event, other: Event) -> bool:
    """Whether both belong to one spike, which goes and comes back."""
    near = abs(one.step - other.step) <= _AFTER
    return one.dimension == other.dimension and one.episode == other.episode and near


def _is_flat(around: Floats, spread: float) -> bool:
    before, after = around[:_BEFORE], around[_BEFORE:]
    parts = [part[np.isfinite(part)] for part in (before, after)]
    return all(part.size > 1 and np.ptp(part) <= 0.02 * max(spread, 1e-30) for part in parts)


def _wraps(around: Floats) -> bool:
    """Whether a step is an angle that passes its limit."""
    before, after = around[_BEFORE - 1], around[_BEFORE]
    size = abs(after - before)
    for turn in (2 * np.pi, 360.0):
        centered = before * after < 0 and min(abs(before), abs(after)) > 0.4 * turn
        positive = min(before, after) >= -0.1 * turn and max(before, after) > 0.85 * turn
        if abs(size - turn) < 0.2 * turn and (centered or positive):
            return True
    return False


def _turned(values: Floats) -> NDArray[np.bool_]:
    """Return where four values are a quaternion that changes its sign, which is the same rotation: `[n - 1, D]`."""
    found = np.zeros((values.shape[0] - 1, values.shape[1]), bool)
    if values.shape[1] < 4:
        return found
    squares = values * values
    unit = np.abs(squares[:, :-3] + squares[:, 1:-2] + squares[:, 2:-1] + squares[:, 3:] - 1) < 0.02
    for first in np.flatnonzero(unit.mean(0) > 0.5):
        four = values[:, first : first + 4]
        opposite = (four[1:] * four[:-1]).sum(1) < -0.9
        both = unit[1:, first] & unit[:-1, first]
        found[:, first : first + 4] |= (both & opposite)[:, None]
    return found


class _Spaced:
    """Evenly spaced rows of a stream: at most twice `_SAMPLE`, fewer of wide fields."""

    def __init__(self, dimensions: int) -> None:
        self._most = max(64, min(_SAMPLE, _SAMPLE_VALUES // max(dimensions, 1)))
        self._parts = np.zeros((0, dimensions))
        self._stride = 1
        self._seen = 0
        self._pending: list[Floats] = []
        self._waiting = 0

    def feed(self, rows: Floats) -> None:
        taken = rows[(-self._seen) % self._stride :: self._stride]
        self._seen += rows.shape[0]
        self._pending.append(taken.copy())
        self._waiting += taken.shape[0]
        if self._waiting > self._most:
            self._merge()

    def _merge(self) -> None:
        self._parts = np.concatenate([self._parts, *self._pending])
        self._pending, self._waiting = [], 0
        while self._parts.shape[0] > 2 * self._most:
            self._parts = self._parts[::2]
            self._stride *= 2

    @property
    def rows(self) -> Floats:
        """The rows kept so far."""
        self._merge()
        return self._parts
