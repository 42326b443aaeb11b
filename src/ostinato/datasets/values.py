"""Checks of the values of a dataset, fed episode by episode: the same for every format."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash

from ostinato.core.episodes.continuity import Continuity, compare, find_mates
from ostinato.core.options import number_of
from ostinato.datasets.checks import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ostinato.datasets.checks import Faults, Severity
    from ostinato.datasets.examination import Examination

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

Role: TypeAlias = Literal["action", "state", "reward", "terminated", "truncated", "done", "place", "other"]
"""What a field is for. `place` numbers rows or times them: its values are not content."""

_NAMES: dict[str, Role] = {
    "action": "action",
    "actions": "action",
    "reward": "reward",
    "rewards": "reward",
    "terminals": "terminated",
    "terminations": "terminated",
    "terminated": "terminated",
    "timeouts": "truncated",
    "truncations": "truncated",
    "truncated": "truncated",
    "done": "done",
    "dones": "done",
    "timestamp": "place",
    "frame_index": "place",
    "episode_index": "place",
    "index": "place",
    "task_index": "place",
}
_STATES = {"observation", "observations", "observation.state", "state", "agent_pos", "qpos"}
_FLAGS = ("terminated", "truncated", "done")
_CELLS = 9
"""Positions of each episode at which its state is kept, to tell whether anything moved."""
_SHOWN = 8
_FEW_VALUES = 16
"""Dimensions with so few values are switches or classes: they are at their limits often."""
_PIECE_VALUES = 1 << 19


def role_of(name: str) -> Role:
    """Return the role of a field by its name."""
    last = name.replace("/", ".").removeprefix("next.").rpartition(".")[2]
    if name.removeprefix("next.") in _NAMES:
        return _NAMES[name.removeprefix("next.")]
    if name in _STATES or name.startswith(("observation", "obs", "state")):
        return "state"
    return _NAMES.get(last, "other") if last in {"reward", "terminated", "truncated", "done", "action"} else "other"


@dataclass(frozen=True)
class FieldProfile:
    """The values of a field, for plots."""

    name: str
    low: np.ndarray
    """Smallest value of each dimension `[D]`."""
    high: np.ndarray
    """Largest value of each dimension `[D]`."""
    quantiles: np.ndarray
    """5, 25, 50, 75 and 95 % of each dimension `[5, D]`, of evenly spaced rows."""
    at_limits: np.ndarray
    """Share of rows at the smallest and at the largest value `[2, D]`; 0 for dimensions of few values, as switches."""


@dataclass(frozen=True)
class CameraProfile:
    """The brightness of a camera in the frames that were decoded."""

    name: str
    times: np.ndarray
    """Position of the frames in the dataset, as a row number `[n]`."""
    brightness: np.ndarray
    """Mean of the frame, 0 to 255 `[n]`."""


@dataclass
class Profile:
    """Numbers of the dataset for the page of plots."""

    lengths: list[int] = field(default_factory=list)
    """Rows of each episode."""
    jitter_ms: list[float] = field(default_factory=list)
    """Largest distance of a step in time from 1 / fps, for each episode with timestamps."""
    fields: list[FieldProfile] = field(default_factory=list)
    """Actions, observations and rewards."""
    jumps: dict[str, np.ndarray] = field(default_factory=dict)
    """Largest differences of successive values by field: `[n, 2]`, row of the dataset and multiple of the usual one."""
    cameras: list[CameraProfile] = field(default_factory=list)
    """Brightness over time."""


class RowChecks:
    """Checks values: NaN, constant and saturated dimensions, jumps, copies of episodes, flags and rewards.

    Args:
        findings: where findings are added.
    """

    def __init__(self, findings: Faults) -> None:
        self._findings = findings
        self.end_flags = True
        """Whether `done`, `terminated` and `truncated` may only be set in the last row of an episode."""
        self._numbers: dict[str, FieldNumbers] = {}
        self._copies: dict[bytes, int | None] = {}
        self._set: dict[str, bool] = {}
        self._cells: dict[int, NDArray[np.float32]] = {}
        self._continuity = Continuity()
        self._broken: Place | None = None
        self.lengths: dict[int, int] = {}
        """Rows of each episode fed so far."""

    def moments(self, name: str) -> Moments | None:
        """Return the statistics of a field, None if it was not fed."""
        return self._numbers[name].moments if name in self._numbers else None

    def episode(
        self, place: Place, fields: Mapping[str, Array], rows: int, nexts: Mapping[str, Array] | None = None
    ) -> None:
        """Check one episode.

        Args:
            place: its position in the dataset, and its file.
            fields: numbers `[n, *shape]` by name; `n` may differ between fields.
            rows: its number of rows.
            nexts: next observations that `fields` do not have, of which nothing else is checked.
        """
        number = place.episode or 0
        self.lengths[number] = self.lengths.get(number, 0) + rows
        self._follow({**fields, **(nexts or {})}, rows, place)
        digest, continuous, states = xxhash.xxh3_128(), False, []
        for name, values in fields.items():
            flat = values.reshape(values.shape[0], -1)
            if not flat.shape[1] or not flat.shape[0]:
                continue
            self._feed(name, flat, place._replace(field=name))
            role = role_of(name)
            if role in {"action", "state", "reward", "other"}:
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(flat).view(np.uint8).data)
                continuous |= role in {"action", "state"} and _is_continuous(flat)
            if role == "state":
                states.append(flat[np.linspace(0, flat.shape[0] - 1, _CELLS).astype(int)])
            if role in _FLAGS:
                self._flag(role, flat, place._replace(field=name))
        self._copy(digest.digest(), rows, place, continuous=continuous)
        if states:
            self._cells[number] = np.concatenate([cell.astype(np.float32) for cell in states], 1)

    def _follow(self, fields: Mapping[str, Array], rows: int, place: Place) -> None:
        """Compare the next observation of each row with the observation of the row after it."""
        names = {tuple(re.split("[./]", name)): name for name, values in fields.items() if values.shape[0] == rows}
        pairs = [(fields[names[obs]], fields[names[after]]) for after, obs in find_mates(list(names)).items()]
        pairs = [(obs, nexts) for obs, nexts in pairs if obs.shape == nexts.shape and obs.size]
        triples = [(_tensor(obs[:-1]), _tensor(nexts[:-1]), _tensor(obs[1:])) for obs, nexts in pairs]
        found = compare(triples) if rows > 1 else Continuity()
        if found.first >= 0 and self._broken is None:
            self._broken = place._replace(frame=found.first)
        self._continuity = self._continuity.plus(found)

    def _feed(self, name: str, flat: Array, place: Place) -> None:
        numbers = self._numbers.get(name)
        if numbers is None:
            steps = role_of(name) == "action" or name in {"observation.state", "state", "agent_pos"}
            numbers = self._numbers[name] = FieldNumbers(flat.shape[1], steps=steps)
        piece = max(2, _PIECE_VALUES // flat.shape[1])
        for first in range(0, flat.shape[0], piece):
            numbers.feed(flat[first : first + piece].astype(np.float64), place.episode or 0, first)
        if flat.dtype.kind in "fc":
            self._finite(name, flat, place)

    def _finite(self, name: str, flat: Array, place: Place) -> None:
        if np.isfinite(flat).all():
            return
        severity: Severity = "warning" if role_of(name) == "other" else "error"
        for check, found, what in (
            ("value-nan", np.isnan(flat), "NaN"),
            ("value-infinite", np.isinf(flat), "infinities"),
        ):
            if found.any():
                steps, dimensions = np.nonzero(found)
                text = f"{found.sum():,} {what} in {_dimensions(np.unique(dimensions), flat.shape[1])}"
                self._findings.add(check, text, place._replace(frame=steps[0]), severity=severity)

    def _flag(self, role: str, flat: Array, place: Place) -> None:
        raised = (flat != 0).any(1)
        self._set[role] = self._set.get(role, False) or bool(raised.any())
        early = np.flatnonzero(raised[:-1])
        if early.shape[0] and self.end_flags:
            rows = number_of(early.shape[0], "row")
            text = f"is set in {rows} before the last one of the episode, which has {len(flat):,} rows"
            self._findings.add("flag-position", text, place._replace(frame=early[0]))

    def _copy(self, digest: bytes, rows: int, place: Place, *, continuous: bool) -> None:
        """Compare the content of an episode with those before it. Short or discrete ones may be equal by chance."""
        known = self._copies.setdefault(digest, place.episode)
        if known == place.episode or rows < 3:
            return
        severity: Severity = "warning" if continuous else "note"
        text = f"its rows ({rows:,}) are equal to those of episode {known}"
        self._findings.add("episode-duplicate", text, place, severity=severity)

    def zero_share(self, name: str) -> float:
        """Return the share of rows of a field that are all zeros, of evenly spaced ones."""
        numbers = self._numbers.get(name)
        sample = numbers.sample if numbers is not None else np.zeros((0, 1))
        return float((sample == 0).all(1).mean()) if sample.shape[0] else 1.0

    def motion(self, episode: int, start: float, stop: float) -> float | None:
        """Return how far the state moves within a part of an episode, as a share of its range in the dataset.

        Args:
            episode: its position in the dataset.
            start: begin of the part, from 0 to 1.
            stop: end of the part.

        Returns:
            The largest share of all dimensions; None if the episode has no state.
        """
        cells = self._cells.get(episode)
        states = [n.moments for name, n in self._numbers.items() if role_of(name) == "state"]
        if cells is None or sum(m.low.shape[0] for m in states) != cells.shape[1]:
            return None
        low, high = np.concatenate([m.low for m in states]), np.concatenate([m.high for m in states])
        first, last = int(np.ceil(start * (_CELLS - 1) - 1e-9)), int(np.floor(stop * (_CELLS - 1) + 1e-9))
        part = cells[first : last + 1]
        spread = np.where(high > low, high - low, np.inf)
        return float((np.ptp(part, axis=0) / spread).max()) if part.shape[0] > 1 else 0.0

    # -- at the end ----------------------------------------------------------------------------------------------------

    def finish(self, profile: Profile) -> None:
        """Add the findings about the whole dataset, and the numbers for plots."""
        profile.lengths = list(self.lengths.values())
        for name, numbers in self._numbers.items():
            role = role_of(name)
            if role in {"action", "state", "other"}:
                self._limits(name, role, numbers)
            if role == "reward" and self._is_constant(numbers):
                text = f"all {numbers.moments.count.max():,} rewards are {numbers.moments.low[0]:g}"
                self._findings.add("reward-constant", text, Place(field=name))
            if role in {"action", "state", "reward"}:
                profile.fields.append(_profile(name, numbers))
            self._jumps(name, numbers, profile)
        found = self._continuity
        if found.joined and self._broken is not None:
            seen = "episodes end there without a flag" if found.mostly_equal else "rows of several environments in turn"
            text = (
                f"in {found.apart:,} of {found.pairs:,} pairs of rows that follow each other in an episode, the next "
                f"observation of the first is not the observation of the second: {seen}?"
            )
            self._findings.add("episode-joined", text, self._broken)
        raised = [role for role in _FLAGS if self._set.get(role)]
        if self._set and not raised:
            self._findings.add("flag-missing", f"never set: {' and '.join(self._set)}, so no episode ends by a flag")

    @staticmethod
    def _is_constant(numbers: FieldNumbers) -> bool:
        moments = numbers.moments
        return bool(moments.count.max() > 1 and (moments.low == moments.high).all())

    def _limits(self, name: str, role: Role, numbers: FieldNumbers) -> None:
        moments, width = numbers.moments, numbers.moments.count.shape[0]
        if moments.count.max() < 20:
            return
        constant = np.flatnonzero(moments.low == moments.high)
        if constant.shape[0]:
            whole = constant.shape[0] == width
            values = f" (always {moments.low[constant[0]]:g})" if constant.shape[0] == 1 else ""
            text = f"{_dimensions(constant, width)} never change{'s' if constant.shape[0] == 1 < width else ''}{values}"
            severity: Severity = "warning" if whole and role == "action" and moments.count.max() >= 100 else "note"
            self._findings.add("dimension-constant", text, Place(field=name), severity=severity)
        many = numbers.distinct() > _FEW_VALUES
        share = np.maximum(moments.at_low, moments.at_high) / np.maximum(moments.count, 1)
        stuck = np.flatnonzero(many & (share >= 0.1) & (moments.count >= 50))
        if stuck.shape[0]:
            worst = stuck[np.argmax(share[stuck])]
            limit = moments.low if moments.at_low[worst] > moments.at_high[worst] else moments.high
            text = (
                f"{_dimensions(stuck, width)} often at the smallest or largest value: dimension {worst} is "
                f"{limit[worst]:g} in {share[worst]:.0%} of the rows"
            )
            self._findings.add("dimension-saturated", text, Place(field=name))

    def _jumps(self, name: str, numbers: FieldNumbers, profile: Profile) -> None:
        ratios = numbers.ratios()
        if ratios.shape[0]:
            profile.jumps[name] = ratios
        events = numbers.events()
        by_dimension: dict[int, list[Event]] = {}
        for event in events:
            by_dimension.setdefault(event.dimension, []).append(event)
        for found in by_dimension.values():
            usual = self._is_habit(found)
            if usual and all(event.switch for event in found):
                continue  # a gripper that opens and closes
            for event in found[:1] if usual else found:
                severity: Severity = "note" if usual or event.switch else "warning"
                text = (
                    f"dimension {event.dimension} steps from {event.before:.4g} to {event.after:.4g}, "
                    f"{event.ratio:.0f} times a usual step" + (f"; {len(found)} such steps" if usual else "")
                )
                place = Place(None, event.episode, event.step, name)
                self._findings.add("value-jump", text, place, severity=severity)

    def _is_habit(self, events: list[Event]) -> bool:
        """Whether a dimension makes such steps in its ordinary course: in many episodes, or back and forth."""
        episodes = len({event.episode for event in events})
        if len(events) >= 8 or (episodes >= 3 and episodes >= 0.2 * len(self.lengths)):
            return True
        sizes = [abs(event.after - event.before) for event in events]
        alike = len(events) > 1 and max(sizes) < 1.2 * min(sizes)
        return alike and all(event.switch for event in events)


def _tensor(values: Array) -> Any:
    """Return numbers as a tensor, of a dtype that it can have."""
    wide = values.dtype.newbyteorder("=") if values.dtype.kind != "u" or values.dtype.itemsize == 1 else np.int64
    return torch.from_numpy(np.ascontiguousarray(values, wide))


def _is_continuous(flat: Array) -> bool:
    """Whether most rows have a fraction and differ from the one before."""
    if flat.dtype.kind != "f":
        return False
    values = flat.astype(np.float64)
    fractions = (values != np.round(values)).any(1)
    changes = (flat[1:] != flat[:-1]).any(1)
    return bool(fractions.mean() > 0.5 and changes.mean() > 0.5) if changes.shape[0] else False


def _dimensions(found: NDArray[np.int64], width: int) -> str:
    if width == 1:
        return "the values"
    if found.shape[0] == width:
        return f"all {width} dimensions"
    shown = ", ".join(str(number) for number in found[:_SHOWN]) + (", ..." if found.shape[0] > _SHOWN else "")
    return f"dimension{'s' if found.shape[0] > 1 else ''} {shown} of {width}"


def _profile(name: str, numbers: FieldNumbers) -> FieldProfile:
    moments, sample = numbers.moments, numbers.sample
    clean = np.where(np.isfinite(sample), sample, 0.0)
    some = clean if clean.shape[0] else np.zeros((1, clean.shape[1]))
    quantiles = np.quantile(some, (0.05, 0.25, 0.5, 0.75, 0.95), axis=0)
    known = moments.count > 0
    low, high = np.where(known, moments.low, 0.0), np.where(known, moments.high, 0.0)
    share = np.stack([moments.at_low, moments.at_high]) / np.maximum(moments.count, 1)
    share[:, numbers.distinct() <= _FEW_VALUES] = 0.0
    return FieldProfile(name, low, high, quantiles, share)


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_SAMPLE = 4096
_SAMPLE_VALUES = 1 << 20
_TOP = 16
_BEFORE, _AFTER = 3, 6
_FEW = 16
"""Dimensions with so few values are switches, flags or classes."""
_MOST_DIMENSIONS = 256
"""Steps are not compared in wider fields."""


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


_DARK = 8.0
"""Frames whose mean is below are black if hardly any pixel is brighter."""
_PLAIN = 1.5
"""Standard deviation of the pixels of a frame of one color, up to rounding of the codec."""


class _Run(NamedTuple):
    """Successive decoded frames that are alike."""

    first: int
    last: int
    frames: int


class CameraChecks:
    """Looks at frames of one camera, episode by episode.

    Args:
        name: the camera.
        look: takes the findings; its checks of rows tell whether the robot moved.
    """

    def __init__(self, name: str, look: Examination) -> None:
        self._name, self._look = name, look
        self._second = 10.0 if look.fps is None else look.fps
        self.times: list[int] = []
        """Position of the frames seen in the dataset, as row numbers."""
        self._brightness: list[float] = []

    def episode(self, place: Place, length: int, start: int, frames: Iterable[tuple[int, NDArray[np.uint8]]]) -> None:
        """Look at frames of one episode.

        Args:
            place: the episode, its file and the camera.
            length: its rows.
            start: its first row in the dataset.
            frames: rows of the episode and their pictures, gray `[H, W]`, in ascending order.
        """
        blank, same = list[_Run](), list[_Run]()
        before: NDArray[np.uint8] | None = None
        seen = 0
        for row, picture in frames:
            seen += 1
            self.times.append(start + row)
            self._brightness.append(float(picture.mean()))
            empty = _is_blank(picture)
            _extend(blank, row, alike=empty and before is not None and _is_blank(before), counts=empty)
            _extend(same, row, alike=before is not None and not empty and _is_same(before, picture), counts=True)
            before = picture
        self._check_blank(place, length, seen, blank)
        self._check_frozen(place, length, seen, same)

    def _check_blank(self, place: Place, length: int, seen: int, runs: list[_Run]) -> None:
        for run in runs:
            whole = run.frames == seen
            if whole or (run.frames > 1 and run.last - run.first >= max(self._second, 10)):
                rows = "all" if whole else f"rows {run.first} to {run.last},"
                looked = f"{number_of(run.frames, 'frame')} looked at, {number_of(length, 'row')}"
                text = f"the picture is black or of one color: {rows} {looked}"
                self._look.add("camera-blank", text, place._replace(frame=run.first))

    def _check_frozen(self, place: Place, length: int, seen: int, runs: list[_Run]) -> None:
        for run in runs:
            span = run.last - run.first
            if run.frames < 3 or length < 10:
                continue
            moved = self._look.rows.motion(place.episode or 0, run.first / (length - 1), run.last / (length - 1))
            whole = run.frames == seen
            long = span >= max(2 * self._second, 10)
            if (whole and (long if moved is None else moved >= 0.05)) or (long and moved is not None and moved >= 0.2):
                goal = any(word in self._name.lower() for word in ("goal", "target", "background"))
                severity: Severity = "note" if goal else "warning"
                motion = "" if moved is None else f", while the state moves by {moved:.0%} of its range"
                text = f"the picture stays the same from row {run.first} to {run.last} of {length} rows{motion}"
                self._look.add("camera-frozen", text, place._replace(frame=run.first), severity=severity)

    @property
    def brightness(self) -> NDArray[np.float64]:
        """Mean of each frame seen, from 0 to 255 `[n]`."""
        return np.array(self._brightness)

    def profile(self) -> CameraProfile:
        """Return the brightness over time."""
        return CameraProfile(self._name, np.array(self.times), self.brightness)


def _extend(runs: list[_Run], row: int, *, alike: bool, counts: bool) -> None:
    """Add a frame to the last run, or begin one."""
    if alike and runs:
        runs[-1] = _Run(runs[-1].first, row, runs[-1].frames + 1)
    elif counts:
        runs.append(_Run(row, row, 1))


def _is_blank(picture: NDArray[np.uint8]) -> bool:
    if picture.std() < _PLAIN:
        return True
    return bool(picture.mean() < _DARK and np.quantile(picture, 0.999) < 4 * _DARK)


def _is_same(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """Whether two pictures are equal, up to what a codec changes when it encodes the same picture again."""
    if one.shape != other.shape:
        return False
    distance = np.abs(one.astype(np.int16) - other.astype(np.int16))
    return bool(distance.mean() < 0.5 and (distance > 10).mean() < 1e-4)
