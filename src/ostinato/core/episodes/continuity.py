"""What rows themselves tell of episodes: where trajectories start and stop, and whether rows are continuous.

Rows that follow each other are continuous if the next observation of one is the observation of the other.
In rows of one environment they are, except at the ends of episodes. Where rows that a buffer takes for one episode are
not, they belong to several environments, or to several episodes whose ends no flag marks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import KindError, UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ostinato.core.rows import Path

FLAGS = frozenset({"done", "terminated", "truncated"})
_NO_STATES = re.compile(
    r"(next_?)?(actions?|rewards?|dones?|terminat(ed|ions?|als?)|truncat(ed|ions?)|timeouts?|mask|discounts?|gamma"
    r"|.*(values?|log_probs?|priority|weights?|advantage|return|target))$"
)
"""Names of fields of a step, and of what a network made of it: they need not equal those of the row that follows."""
_NEXT = re.compile(
    r"(?:next[_.]?|new_)(?P<late>.+)|(?P<early>.+?)(?:_?next|_new|_prime|_after|_tp1)"
    r"|(?P<short>o|s|obs|state|observation)(?:_?2|_)"
)
_ROUNDING = 1e-6
"""Floats whose difference is at most this share of them are equal: one was rounded to float32."""
_NEAR = 0.1
"""Floats whose difference is at most this share of a usual step are close: normalized with other statistics."""
_LEAST_PAIRS = 32
_LEAST_SIDE = 4
"""Steps and environments from which end flags tell the order."""


class Continuity(NamedTuple):
    """Numbers of pairs of rows that follow each other; see `compare`. Add them with `plus`."""

    pairs: int = 0
    equal: int = 0
    """Pairs whose next observation and observation are equal, up to rounding."""
    near: int = 0
    """Pairs in which they differ by a small part of a step."""
    first: int = -1
    """Position of the first pair in which they differ by more; -1 if there is none."""

    @property
    def apart(self) -> int:
        """Pairs in which they differ."""
        return self.pairs - self.equal - self.near

    @property
    def joined(self) -> bool:
        """Whether the rows belong to several environments or episodes.

        Of fewer than 32 pairs nothing is said. Where at least half of the pairs are equal, each one that differs is a
        break: environments do not repeat an observation by chance and then miss it once. Where fewer are equal, but
        half are at least close, observations were normalized anew or are noisy, which hides breaks. Otherwise most
        pairs differ: rows of several environments lie in turn, or next observations are made in another way.
        """
        if self.pairs < _LEAST_PAIRS or not self.apart:
            return False
        return self.mostly_equal or 2 * (self.equal + self.near) < self.pairs

    @property
    def mostly_equal(self) -> bool:
        """Whether at least half of the pairs are equal."""
        return 2 * self.equal >= self.pairs

    def plus(self, other: Continuity) -> Continuity:
        """Return the sums; `first` is that of the first summand that has one."""
        first = self.first if self.first >= 0 or other.first < 0 else self.pairs + other.first
        return Continuity(self.pairs + other.pairs, self.equal + other.equal, self.near + other.near, first)


def compare(fields: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Continuity:
    """Compare the next observations of `n` rows with the observations of the rows that follow them.

    A pair of rows is equal, or close, only if it is so in each field. NaN equals NaN. Cost: one pass over the fields.

    Args:
        fields: for each field of the observation, observations and next observations of the rows, and the observations
            of the rows that follow, each `[n, *shape]`, on one device.
    """
    degrees: Tensor | None = None
    for each in fields:
        if not each[0].numel():
            continue
        found = _degrees(*(_plain(x.reshape(x.shape[0], -1)) for x in each))
        degrees = found if degrees is None else torch.minimum(degrees, found)
    if degrees is None:
        return Continuity()
    apart = degrees == 0
    counts = torch.stack([(degrees == 2).sum(), (degrees == 1).sum(), apart.int().argmax(), apart.any().long()])
    equal, near, first, some = counts.tolist()  # one wait for a device
    return Continuity(degrees.shape[0], equal, near, first if some else -1)


def _degrees(obs: Tensor, nexts: Tensor, after: Tensor) -> Tensor:
    """Return int64 `[n]`: 2 for equal pairs, 1 for close ones, 0 for others."""
    same = (nexts == after) | ((nexts != nexts) & (after != after))  # noqa: PLR0124 (NaN)
    if not nexts.is_floating_point():
        return 2 * same.all(1).long()
    gap = (nexts - after).abs()
    same |= gap <= _ROUNDING * torch.maximum(nexts.abs(), after.abs())
    steps = torch.nan_to_num((nexts - obs).abs(), 0.0, 0.0, 0.0).mean(0)
    close = same | (gap <= _NEAR * steps)
    return same.all(1).long() + close.all(1).long()


def _plain(values: Tensor) -> Tensor:
    """Return numbers of a dtype that every device can compare."""
    if values.is_complex():
        return torch.view_as_real(values).flatten(1)
    if values.is_floating_point():
        return values if values.dtype in {torch.float32, torch.float64} else values.float()
    return values if values.dtype is torch.uint8 else values.long()


def find_mates(paths: Sequence[Path]) -> dict[Path, Path]:
    """Return the fields that, by their names, hold the next value of another one: next field -> field.

    These are `("next", *path)` beside `path`, and `next_x`, `x_next`, `nextx`, `new_x`, `x_prime` and the like beside
    `x` at any level, also `obs2` beside `obs`. Rewards, actions, flags and estimates of networks are left out.
    """
    known = set(paths)
    found = {path: _mate(path, known) for path in paths}
    pairs = {path: mate for path, mate in found.items() if mate is not None and not _mentions(mate)}
    preferred = {mate: path for path, mate in pairs.items() if path[0] == "next" or _begins_next(path[-1])}
    return {path: mate for path, mate in pairs.items() if preferred.get(mate, path) == path}


def _mate(path: Path, known: set[Path]) -> Path | None:
    if len(path) > 1 and path[0] == "next" and path[1:] in known:
        return path[1:]
    for level in range(len(path) - 1, -1, -1):
        name = path[level]
        match = _NEXT.fullmatch(name) if isinstance(name, str) else None
        if match is not None:
            mate = (*path[:level], match["late"] or match["early"] or match["short"], *path[level + 1 :])
            if mate in known:
                return mate
    return None


def _mentions(path: Path) -> bool:
    """Whether a field is one of a step, or of a network, and no observation."""
    return bool(path) and isinstance(path[-1], str) and _NO_STATES.fullmatch(path[-1].rpartition(".")[2]) is not None


def _begins_next(name: Hashable) -> bool:
    return isinstance(name, str) and name.startswith(("next_", "next."))


def looks_next(path: Path, paths: Sequence[Path]) -> bool:
    """Return whether a field holds the next value of another one, or of something not stored, by its name."""
    last = path[-1] if path else None
    named = isinstance(last, str) and ("next" in last or last.startswith("new_"))
    return not _mentions(path) and (named or path in find_mates(paths))


def contradicts_order(
    fields: Sequence[tuple[Tensor, Tensor]], ends: Tensor | None, ids: Sequence[Tensor], steps: Sequence[Tensor]
) -> str | None:
    """Return why rows `[time, environments]` seem to be `[environments, time]`; None if nothing says so.

    Evidence counts only if it contradicts the order and fits the other one, and none does if next observations fit.

    Args:
        fields: observations and next observations, `[T, N, *shape]` each.
        ends: bool `[T, N]`: the last rows of episodes.
        ids: numbers of environments or episodes, `[T, N]` each: they stay the same along time.
        steps: numbers of steps, `[T, N]` each: they count up along time.
    """
    along, beside = _fits(fields, ends), _fits([(a.transpose(0, 1), b.transpose(0, 1)) for a, b in fields], _t(ends))
    if along is not None and along >= 0.5:
        return None
    if _is_turned(along, beside):
        return "the next observation of a row is the observation of the row beside it in the other dimension"
    for x in ids:
        if _is_turned(_share(x[1:] == x[:-1]), _share(x[:, 1:] == x[:, :-1])):
            return "the number of the environment or episode changes in each row, and stays the same beside it"
    for x in steps:
        if _is_turned(_share(x[1:] == x[:-1] + 1), _share(x[:, 1:] == x[:, :-1] + 1)):
            return "the number of the step counts up in the other dimension"
    if ends is not None and min(ends.shape) >= _LEAST_SIDE:
        always, never = ends.all(0), ~ends.any(0)
        if bool(always.any()) and bool((always | never).all()) and not bool(ends.all(1).any()):
            return "each row of some environments ends an episode, and no row of the others"
    return None


def _is_turned(along: float | None, beside: float | None) -> bool:
    """Whether a share is small along time, and large along environments; None where there are no pairs of rows."""
    return along is not None and beside is not None and along < 0.5 <= beside


def _t(ends: Tensor | None) -> Tensor | None:
    return None if ends is None else ends.t()


def _fits(fields: Sequence[tuple[Tensor, Tensor]], ends: Tensor | None) -> float | None:
    """Return the share of rows `[T, N]` whose next observation is the observation of the row after it."""
    inside = slice(None) if ends is None else ~ends[:-1].flatten()
    rows = [(obs[:-1], nexts[:-1], obs[1:]) for obs, nexts in fields]
    found = compare([tuple(x.flatten(0, 1)[inside] for x in each) for each in rows])  # type: ignore[misc]
    return found.equal / found.pairs if found.pairs else None


def _share(holds: Tensor) -> float | None:
    return float(holds.float().mean()) if holds.numel() else None


# -- boundaries --------------------------------------------------------------------------------------------------------

DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")
"""Flags of which any ends a trajectory, under `next` or at the root."""


def find_start_stop_traj(
    *,
    trajectory: Tensor | None = None,
    end: Tensor | None = None,
    at_capacity: bool,
    cursor: int | Tensor | range | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find where trajectories start and stop, from their ids or from flags at their ends.

    Give either `trajectory` or `end`, `[T, *B]` in the order of the storage: steps, then environments. A trajectory
    ends where the id of the next step differs, or at a flag.

    Args:
        trajectory: id of the trajectory of each row.
        end: bool, True for the last row of a trajectory.
        at_capacity: whether the rows are a full ring, in which step 0 follows the last step. Otherwise the last step
            ends a trajectory in any case.
        cursor: for a full ring, the step of the newest row (the last one of a tensor or a range): a trajectory ends
            there, since the next step is the oldest one.
        device: where to compute; None is the device of the input.

    Returns:
        `(start, stop, lengths)` on the device of the input: the first and the last row of each of N trajectories, int64
        `[N, 1 + len(B)]` (step, then environment), and their numbers of rows, int64 `[N]`. Environments follow one
        another, and `start > stop` where a trajectory continues at step 0. New tensors.

    Raises:
        KindError: if both or none of `trajectory` and `end` are given (also a `TypeError`).
        UsageError: if there are no rows, or the cursor is not a step.

    Examples:
        >>> import torch
        >>> from ostinato import find_start_stop_traj
        >>> ids = torch.tensor([4, 4, 1, 2, 2, 4])  # a ring whose newest row is in slot 1
        >>> start, stop, lengths = find_start_stop_traj(trajectory=ids, at_capacity=True, cursor=1)
        >>> start[:, 0].tolist(), stop[:, 0].tolist(), lengths.tolist()
        ([5, 2, 3], [1, 2, 4], [3, 1, 2])
    """
    if (trajectory is None) == (end is None):
        given = "both" if end is not None else "none"
        msg = f"Exactly one of `trajectory` and `end` must be provided, got {given} of them"
        raise KindError(msg)
    signal: Tensor = trajectory if end is None else end  # type: ignore[assignment]
    if signal.ndim == 0:
        msg = "Expected the end-of-trajectory signal to be at least 1-dimensional: [steps, *environments], got a scalar"
        raise UsageError(msg)
    if signal.shape[0] == 0:
        msg = f"Cannot recover trajectory boundaries from an empty (T=0) input, got shape {list(signal.shape)}"
        raise UsageError(msg)
    newest = _newest(cursor) if at_capacity and cursor is not None else None
    found = signal if device is None else signal.to(device)
    ends = found.bool() if trajectory is None else found != found.roll(-1, 0)
    ends = ends.clone() if ends is signal else ends
    if not at_capacity:
        newest = signal.shape[0] - 1
    if newest is not None:
        if not -signal.shape[0] <= newest < signal.shape[0]:
            msg = f"cursor must be a step in [0, {signal.shape[0]}), got {newest}"
            raise UsageError(msg)
        ends[newest] = True
    ends[-1] |= ~ends.any(0)  # a ring without an end, read from step 0
    start, stop, lengths = _between(ends)
    return start.to(signal.device), stop.to(signal.device), lengths.to(signal.device)


def _between(ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts, stops and lengths from flags `[T, *B]` that have an end in each environment."""
    steps, dims = ends.shape[0], ends.ndim
    found = ends.transpose(0, -1).nonzero()
    stop = found if dims == 1 else found[:, [dims - 1, *range(1, dims - 1), 0]]
    if not stop.shape[0]:
        return stop, stop.clone(), stop[:, 0].clone()
    other = (stop[1:, 1:] != stop[:-1, 1:]).any(1)  # where the next environment begins
    firsts = torch.cat((other.new_ones(1), other)).nonzero().flatten()
    lasts = torch.cat((other, other.new_ones(1))).nonzero().flatten()
    before = stop[:, 0].roll(1)
    before[firsts] = stop[lasts, 0]
    start = stop.clone()
    start[:, 0] = (before + 1) % steps
    return start, stop, (stop[:, 0] - start[:, 0]) % steps + 1


def _newest(cursor: int | Tensor | range) -> int:
    """Return the last step of a cursor."""
    what = "tensor" if isinstance(cursor, Tensor) else "range"
    if isinstance(cursor, (Tensor, range)):
        values = cursor.reshape(-1).tolist() if isinstance(cursor, Tensor) else cursor
        if not len(values):
            msg = f"cursor must not be an empty {what}: give the step of the newest row"
            raise UsageError(msg)
        cursor = values[-1]
    if isinstance(cursor, bool) or not hasattr(cursor, "__index__"):
        msg = f"cursor should be an integer or a 1d tensor or a range, got {cursor!r}"
        raise UsageError(msg)
    return int(cursor.__index__())
