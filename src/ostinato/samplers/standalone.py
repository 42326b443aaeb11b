"""Samplers without a buffer: the view of a bare storage, and the index and info of what was drawn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from ostinato.core.episodes.tracker import EpisodeTracker, TrackedRows
from ostinato.core.index import as_index
from ostinato.core.options import check_integer
from ostinato.core.records import Picks, Plan, View
from ostinato.core.ring import Ring
from ostinato.errors import KindError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.records import Draw
    from ostinato.core.rows import Path

    Index: TypeAlias = Tensor | tuple[Tensor, ...]

_WRAPPED = 2


class BareStorage(TrackedRows, Protocol):
    """A storage as samplers read it without a buffer; every `Storage` is one."""

    @property
    def ndim(self) -> int:
        """Dimensions of an index: 1, or 2 for `(step, environment)`."""

    def __getitem__(self, index: Any) -> Any:
        """Return rows."""

    def field_at(self, slots: Tensor, path: Path) -> Tensor | list[Any]:
        """Return a field of some rows."""


@final
class Standalone:
    """Ring and episodes of a bare storage, as far as a sampler can know them.

    A storage does not report its writes. Rows that were added show in its length and cursor, and episodes are read from
    the rows at each draw; rows replaced without either are known from `written`.
    """

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] | None = None
        self._ring: Ring | None = None
        self._tracker: EpisodeTracker | None = None

    def written(self) -> None:
        """Record that rows were written, wherever they are."""
        self._seen = self._tracker = None

    def view(self, storage: BareStorage, wanted: Episodes | None, *, reads: bool, keep: bool) -> View:
        """Return the view of a storage now. Cost: O(1); with episodes O(rows), unless they are kept.

        Args:
            storage: the storage.
            wanted: where episodes end; None for a sampler that needs none.
            reads: whether the sampler reads stored fields.
            keep: use the episodes of the last call while length and cursor are the same.
        """
        rows, ring = len(storage), self._ring
        seen = (storage.capacity, storage.num_envs, storage.device, rows, storage.cursor)
        if ring is None or seen != self._seen:
            ring = Ring(storage.capacity, storage.device, after=0 if ring is None else ring.written + 1)
            ring.take_over(rows, storage.cursor)
            self._ring, self._seen, self._tracker = ring, seen, None
        view = ring.view()._replace(stored=storage if reads else None)
        if wanted is None or not rows:
            return view
        if self._tracker is None or self._tracker.wanted is not wanted or not keep:
            self._tracker = EpisodeTracker(wanted, need=1, span=1)
        episodes, starts = self._tracker.view(storage)
        return view._replace(episodes=episodes, starts=starts)


def check_request(storage: object, batch_size: object) -> None:
    """Check what `Sampler.sample` was given.

    Raises:
        KindError: if there is no storage, or no integer.
        OptionError: if the integer is below 0.
    """
    if not hasattr(storage, "capacity") or not hasattr(storage, "__len__"):
        msg = f"sample() of a sampler takes a storage, such as rb.storage, got {type(storage).__name__}"
        raise KindError(msg)
    check_integer("batch_size", batch_size, 0)


def index_and_info(
    draw: Draw, view: View, storage: BareStorage, marks: Callable[[Plan, Any], dict[Path, Tensor]]
) -> tuple[Index, dict[Any, Any]]:
    """Return the index of the rows drawn, and the info of the sample.

    Args:
        draw: what the sampler drew.
        view: of the storage, at the draw.
        storage: where the flags of slices are read.
        marks: the sampler's function that returns the flags of its slices.
    """
    each, weights = draw.rows_each, draw.weights
    info: dict[Any, Any] = dict(draw.info or {})
    if each is None:
        whole: Index = as_index(draw.slots, storage)
    else:
        schema = storage.schema
        if schema is None:
            msg = f"{type(storage).__name__} has no fields for slices: use LazyTensorStorage"
            raise UsageError(msg)
        plan = Plan.of_slices(schema, view.require_episodes(), draw.slots, each, draw.pad)
        weights = None if weights is None else plan.per_record(weights)
        info.update(plan.notes)
        index = as_index(plan.records, storage)
        for path, flags in marks(plan, storage[index]).items():
            info[path if len(path) > 1 else path[0]] = flags
        whole = index if isinstance(index, tuple) else (index,)
    if weights is not None:
        info["priority_weight"] = weights
    return whole, info


def as_picks(slots: Tensor) -> Picks:
    """Return the placement of rows that were written to these slots."""
    kept = slots[slots >= 0]
    return Picks(kept, (slots >= 0).nonzero().flatten(), slots)
