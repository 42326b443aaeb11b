"""What passes between engine, pipeline and checkpoints: draws of ensembles, sources, gathered rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.observer import DrawRule
    from ostinato.buffers.rate_limit import Ask, LimiterState
    from ostinato.core.episodes.tracker import EpisodeTracker
    from ostinato.core.records import Draw
    from ostinato.core.ring import Ring
    from ostinato.core.shared_ring import SharedRing
    from ostinato.storages import Storage
    from ostinato.units import SampleUnit


class CompositeDraw(NamedTuple):
    """A draw of an ensemble."""

    parts: list[tuple[int, Draw]]
    """The member that each part of the batch comes from, and the draw of the part."""
    rng: Tensor | None = None
    """As in `Draw`."""
    carry: list[float] | None = None
    """What the batch left of the exact share of each member; see `Split`."""
    last: bool = False
    """Ensembles have no epochs."""


class Draws:
    """Base of what stands behind a buffer, a shared one, and an ensemble: where no call waits, and draws made ahead."""

    direct: Direct | None = None
    """Native calls that write and draw in place of the methods; see `ostinato.buffers.direct`."""
    direct_tried = True
    """Whether `direct` was looked for since the parts changed."""
    limits: tuple[LimiterState, ...] = ()
    """The counts of a rate limiter, or of a queue; empty where no call waits."""
    rules: tuple[DrawRule, ...] = ()
    """What permits and counts draws: the limits, and rows that are used up."""
    unit: SampleUnit | None = None
    tracker: EpisodeTracker | None = None
    lock: Any
    generator: torch.Generator | None
    pending: deque[Any]
    """Draws that a checkpoint left; they are delivered first."""

    def may_draw(self, rows: int) -> bool:  # noqa: ARG002
        """Whether a draw of so many rows need not wait."""
        return True

    def wait_to_draw(self, rows: int, ask: Ask, queued: Callable[[], bool] = lambda: False) -> int:  # noqa: ARG002
        """Return the rows to draw, once they may be drawn."""
        return rows

    def give_back(self, draw: Any) -> None:
        """Undo the counts of a draw whose batch was not delivered."""

    def undraw(self, queued: list[Any]) -> None:
        """Drop draws that were made ahead, the oldest first, and those of a checkpoint, as if they were never made."""
        with self.lock:
            dropped = [*queued, *self.pending]
            for draw in dropped:
                self.give_back(draw)
            self.pending.clear()
            if dropped and dropped[0].rng is not None and self.generator is not None:
                self.generator.set_state(dropped[0].rng)


class Source(NamedTuple):
    """A storage and its collate function, which are exchanged together."""

    storage: Storage
    collate: Callable[[Any], Any] | None


class Rows(NamedTuple):
    """Rows gathered for a draw, whole as of the write number `serial`."""

    source: Source
    payload: Any
    serial: int
    ring: Ring | SharedRing | None
    draw: Draw
    """The draw; its generations and plan are those of the rows gathered."""
    stale: Tensor | None = None
    """bool `[R]`: which rows had been replaced when they were loaded from a checkpoint; None if none was."""
