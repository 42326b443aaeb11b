"""Compares what was drawn with what was written, row by row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ostinato.testing.audit.cases import Array, Case, Row, Sample, Stream

_AFTER = {"terminated": "next-at-termination", "truncated": "next-at-truncation", "newest": "next-at-ring-end"}
"""Kinds of a wrong next observation, by the place of the row."""


class Problem(NamedTuple):
    """Something that came back wrong."""

    kind: str
    """A key of `KINDS`."""
    message: str


class _Drawn(NamedTuple):
    """One row that was drawn; flags and discounts that the buffer does not return are -1."""

    obs: Array
    action: Array
    reward: float
    next_obs: Array
    terminated: float
    truncated: float
    discount: float


@final
class Comparison:
    """The distinct rows or sequences of several samples of a buffer, beside the rows written to it.

    Args:
        case: The case.
        stream: What was written.
        samples: What was drawn since.
    """

    def __init__(self, case: Case, stream: Stream, samples: Sequence[Sample]) -> None:
        self._case, self._stream = case, stream
        self._samples = samples
        self._width = int(np.prod(case.shape))
        table = np.concatenate([self._table(sample) for sample in samples])
        self._windows, numbers = np.unique(table, axis=0, return_inverse=True)
        self._counts = np.bincount(numbers.reshape(-1), minlength=len(self._windows))

    def _table(self, sample: Sample) -> Array:
        """Return drawn windows as rows of numbers."""
        rows = sample.rows
        missing = np.full((rows, 1), -1.0)
        parts = (sample.obs, sample.action, sample.reward, sample.next_obs)
        flags = (sample.terminated, sample.truncated, sample.discount)
        columns = [missing if part is None else np.asarray(part).reshape(rows, -1) for part in (*parts, *flags)]
        return np.concatenate(columns, axis=1, dtype=np.float64).reshape(rows // self._case.sequence, -1)

    def _rows(self, window: Array) -> Iterator[_Drawn]:
        width = self._width
        for row in window.reshape(self._case.sequence, -1):
            yield _Drawn(row[:width], row[width : width + 3], row[width + 3], row[width + 4 : -3], *row[-3:])

    @property
    def counts(self) -> dict[tuple[int, int], int]:
        """How often each start was drawn, by environment and position."""
        found: dict[tuple[int, int], int] = {}
        for window, count in zip(self._windows, self._counts, strict=True):
            start = self._stream.find(window)
            if start is not None:
                found[start] = found.get(start, 0) + int(count)
        return found

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the rows, and starts that were not drawn."""
        dtype = str(np.asarray(self._samples[0].obs).dtype)
        if dtype != self._case.dtype:
            yield Problem("dtype", f"observations are written as {self._case.dtype} and come back as {dtype}")
        for window in self._windows:
            before: tuple[int, int] | None = None
            marked = True
            for drawn in self._rows(window):
                place = self._stream.find(drawn.obs)
                if place is None:
                    yield Problem("mixed-row", f"an observation begins with {_text(drawn.obs[:3])}, which no row does")
                    break
                yield from self._check(place, drawn)
                follows = before is not None and place == (before[0], before[1] + 1)
                if not (marked or follows):
                    yield Problem(
                        "joined-sequence", f"after {self._row(before)} comes {self._row(place)}, and no flag says so"
                    )
                before, marked = place, drawn.terminated > 0 or drawn.truncated > 0
        yield from self._coverage()

    def _row(self, place: tuple[int, int] | None) -> Row:
        env, position = place or (0, 0)
        return self._stream.rows[env][position]

    def _check(self, place: tuple[int, int], drawn: _Drawn) -> Iterator[Problem]:
        """Yield what is wrong with one drawn row: a transition over up to `n_steps` steps."""
        case, stream = self._case, self._stream
        env, position = place
        rows = stream.rows[env]
        row = rows[position]
        if position <= len(rows) - case.capacity - case.n_steps:  # n - 1 rows may wait for their windows
            yield Problem("old-row", f"{row} is drawn, {len(rows) - position} steps after it was written")
        if not np.array_equal(drawn.obs, stream.observation(env, row.episode, row.step).reshape(-1)):
            yield Problem("values", f"the observation of {row} comes back as {_text(drawn.obs)}")
        if not np.array_equal(drawn.action, stream.action(row)):
            yield Problem("mixed-row", f"{row} comes with the action of {_text(drawn.action)}")
        window = rows[position : position + case.n_steps]
        window = window[: next((at for at, each in enumerate(window, 1) if each.end), len(window))]
        last = window[-1]
        at_newest = position + len(window) == len(rows)
        yield from self._check_next(row, last, drawn, last.end or ("newest" if at_newest else ""))
        at_edge = "n-step-ring-end" if len(rows) > case.capacity else "n-step-newest"
        reward = sum(case.gamma**at * each.reward for at, each in enumerate(window))
        if not math.isclose(drawn.reward, reward, rel_tol=1e-5):
            kind = "mixed-row" if case.n_steps == 1 else at_edge if at_newest else "n-step-sum"
            yield Problem(kind, f"the reward of {row} is {drawn.reward:g}, and {reward:g} is right")
        discount = case.gamma ** len(window)
        if drawn.discount >= 0 and not math.isclose(drawn.discount, discount, rel_tol=1e-5):
            kind = at_edge if at_newest else "n-step-discount"
            yield Problem(kind, f"the discount of {row} is {drawn.discount:g}, and {discount:g} is right")

    def _check_next(self, row: Row, last: Row, drawn: _Drawn, place: str) -> Iterator[Problem]:
        """Yield what is wrong with the next observation and the flag of a transition that ends with `last`."""
        following = self._stream.observation(last.env, last.episode, last.step + 1).reshape(-1)
        if not np.array_equal(drawn.next_obs, following):
            tags, right = _text(drawn.next_obs[:3]), _text(following[:3])
            yield Problem(
                _AFTER.get(place, "mixed-row"),
                f"the next observation of {row} begins with {tags}, and {right} is right (environment, episode, step)",
            )
        for name, flag in (("terminated", drawn.terminated), ("truncated", drawn.truncated)):
            if flag >= 0 and (flag > 0) != (last.end == name):
                end = f"is {last.end}" if last.end else "does not end"
                yield Problem("end-flag", f"the step of {last} {end}, and the flag {name} is {flag:g}")

    def _coverage(self) -> Iterator[Problem]:
        starts = self.starts()
        missing = sorted(starts - set(self.counts))
        if missing:
            shown = self._row(missing[0])
            yield Problem("never-drawn", f"{len(missing)} of {len(starts)} starts are never drawn, such as {shown}")

    def starts(self) -> set[tuple[int, int]]:
        """Return the rows that any buffer can draw: not the oldest of a full ring, nor windows of the newest row."""
        case, found = self._case, set()
        for env, rows in enumerate(self._stream.rows):
            length = max(case.n_steps, case.sequence)
            for position in range(max(len(rows) - case.capacity + 1, 0), len(rows) - length):
                window = rows[position : position + case.sequence]
                if window[0].episode == window[-1].episode:
                    found.add((env, position))
        return found


def _text(numbers: Array) -> str:
    return f"({', '.join(f'{number:g}' for number in numbers[:8])})"


def p_value(counts: Sequence[float], weights: Sequence[float]) -> float:
    """Return the probability of counts at least as uneven as these, if outcomes have these weights.

    Wilson and Hilferty (1931): (X / k)^(1/3) is nearly normal with mean 1 - 2 / 9k and variance 2 / 9k.
    """
    expected = np.array(weights) * (sum(counts) / sum(weights))
    degrees = len(counts) - 1
    chi = float(((np.array(counts) - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return 0.5 * math.erfc(((chi / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))
