"""The numbers of a buffer of groups: what they are, how they are measured, and a logger for TensorBoard."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato._optional import require
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WINDOW_S = 60
"""Seconds over which tokens are counted for `tokens_per_s`."""


class GroupStats(NamedTuple):
    """Numbers of a `GroupBuffer`.

    Attributes:
        counts: Groups in each state, since the buffer was created.
        dropped: Groups dropped, by reason.
        staleness: Groups trained, by the steps between their oldest policy version and their training.
        ages: Groups that are neither trained nor dropped, by the seconds since their admission, each rounded up to a
            power of two.
        lease_times: Leases that were made and have ended since the buffer was opened, by their seconds, rounded up to a
            power of two.
        leases: Active leases.
        step: The trainer's last step.
        admitted: Groups admitted, which is the cursor unless `admit(cursor=)` gave another.
        tokens: Tokens appended.
        tokens_per_s: Tokens appended per second, in the last minute or since the buffer was opened.
        oldest_s: Seconds since the oldest group that still takes responses was admitted.
        disk_bytes: Bytes of the files of the log.
        needed_bytes: Those that groups need; compaction removes the rest.
        problem: Why the last compaction in the background failed, if it did; `compact` tries again.
    """

    counts: dict[str, int]
    dropped: dict[str, int]
    staleness: dict[int, int]
    ages: dict[int, int]
    lease_times: dict[int, int]
    leases: int
    step: int
    admitted: int
    tokens: int
    tokens_per_s: float
    oldest_s: float
    disk_bytes: int
    needed_bytes: int
    problem: str


def histogram(seconds: Iterable[float]) -> dict[int, int]:
    """Count times by the power of two, at least 1, to which each is rounded up; sorted."""
    return dict(sorted(Counter(map(_rounded, seconds)).items()))


def _rounded(seconds: float) -> int:
    return 1 << max(0, math.ceil(seconds) - 1).bit_length()


@final
class Meter:
    """What is measured while a buffer is open. Needs a lock of its caller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start measuring by a clock, in seconds."""
        self._clock, self.began = clock, clock()
        self._tokens: Counter[int] = Counter()
        """Tokens of each of the last seconds."""
        self._leased: dict[str, float] = {}
        self.lease_times: Counter[int] = Counter()
        """Leases that have ended; see `GroupStats`."""

    def record(self, event: dict[str, Any]) -> None:
        """Measure a change."""
        now, lease = self._clock(), event.get("lease", "")
        match event["op"]:
            case "append":
                self._tokens[int(now)] += event["tokens"]
                if len(self._tokens) > _WINDOW_S + 1:
                    del self._tokens[min(self._tokens)]
            case "lease":
                self._leased[lease] = now
            case "ack" | "release" if lease in self._leased:
                self.lease_times[_rounded(now - self._leased.pop(lease))] += 1
            case "rewind":
                self._leased.clear()

    def tokens_per_s(self) -> float:
        """Return the tokens of each second of the last minute, or since the beginning."""
        now = self._clock()
        first = max(self.began, now - _WINDOW_S)
        return sum(count for second, count in self._tokens.items() if second >= int(first)) / max(1.0, now - first)


@final
class GroupLogger:
    """Writes the numbers of a buffer of groups for TensorBoard: call it once for each training step.

    Counts are written as they are (`groups/counts/ready`), distributions as mean and maximum (`groups/staleness/mean`).

    Args:
        buffer: A `GroupBuffer`, or a handle to one in another process.
        writer: A folder, for a `torch.utils.tensorboard.SummaryWriter`; or any object with
            `add_scalar(name, value, step)`.
        prefix: What the names begin with.

    Raises:
        MissingExtraError: `writer` is a folder, and TensorBoard is not installed.
        OptionError: `writer` is no folder and has no `add_scalar`.

    Examples:
        >>> from ostinato import GroupBuffer, GroupLogger
        >>> class Prints:
        ...     def add_scalar(self, name, value, step):
        ...         if value:
        ...             print(name, value, step)
        >>> buffer = GroupBuffer()
        >>> names = buffer.admit(["2 + 3 ="])
        >>> stats = GroupLogger(buffer, Prints())(step=7)  # doctest: +ELLIPSIS
        groups/counts/waiting 1 7
        groups/ages/mean 1.0 7
        groups/ages/max 1 7
        groups/admitted 1 7
        groups/oldest_s ...
    """

    def __init__(self, buffer: Any, writer: Any, *, prefix: str = "groups") -> None:
        if isinstance(writer, str | Path):
            require("tensorboard")
            writer = require("torch.utils.tensorboard").SummaryWriter(str(writer))
        if not callable(getattr(writer, "add_scalar", None)):
            msg = f"writer must be a folder or have add_scalar(name, value, step), got {type(writer).__name__}"
            raise OptionError(msg)
        self._buffer, self._writer, self._prefix = buffer, writer, prefix

    def __call__(self, step: int | None = None) -> GroupStats:
        """Write the numbers of now under a step, the trainer's last one by default, and return them."""
        stats: GroupStats = self._buffer.stats()
        for name, value in _scalars(stats).items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, stats.step if step is None else step)
        return stats


def _scalars(stats: GroupStats) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in stats._asdict().items():
        if name in {"counts", "dropped"}:
            found |= {f"{name}/{key}": count for key, count in value.items()}
        elif isinstance(value, dict) and value:
            mean = sum(key * count for key, count in value.items()) / sum(value.values())
            found |= {f"{name}/mean": mean, f"{name}/max": max(value)}
        elif isinstance(value, int | float):
            found[name] = value
    return found
