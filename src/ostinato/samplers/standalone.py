"""Samplers without a buffer: the view of a bare storage, and the index and info of what was drawn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import numpy as np
import torch

from ostinato.core.episodes.tracker import EpisodeTracker, TrackedRows
from ostinato.core.options import check_integer
from ostinato.core.records import Picks, Plan, View, require_values
from ostinato.core.ring import Ring
from ostinato.errors import KindError, PriorityShapeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.records import Draw
    from ostinato.core.rows import Path, Schema

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
    slots, each = draw.slots, draw.rows_each
    info: dict[Any, Any] = dict(draw.info or {})
    weights = draw.weights
    plan = None
    if each is not None:
        schema = storage.schema
        if schema is None:
            msg = f"{type(storage).__name__} has no fields for slices: use LazyTensorStorage"
            raise UsageError(msg)
        plan = Plan.of_slices(schema, view.require_episodes(), slots, each, draw.pad)
        slots = plan.records
        weights = None if weights is None else plan.per_record(weights)
        info.update(plan.notes)
    envs = storage.num_envs
    whole: Index = slots if storage.ndim == 1 else (slots.div(envs, rounding_mode="floor"), slots % envs)
    if plan is not None:
        whole = whole if isinstance(whole, tuple) else (whole,)
        found = marks(plan, storage[whole if len(whole) > 1 else whole[0]])
        for path, flags in found.items():
            info[path if len(path) > 1 else path[0]] = flags
    if weights is not None:
        info["priority_weight"] = weights
    return whole, info


def read_index(index: Any, storage: BareStorage | None, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Return the slots of an index, int64 `[n]` without rows that were not kept (-1), and their shape.

    Args:
        index: an integer, range, list, array or tensor; with a storage of `ndim=2` a pair, or a tensor `[..., 2]`.
        storage: needed for an index with `ndim=2`.
        device: of the slots.

    Raises:
        KindError: if it is not an index.
        UsageError: for an index with several dimensions without a storage.
    """
    if isinstance(index, tuple):
        parts = [_integers(part).to(device, torch.int64) for part in index]
    else:
        whole = _integers(index).to(device, torch.int64)
        parts = list(whole.unbind(-1)) if whole.ndim > 1 else [whole]
    if len(parts) == 1:
        return parts[0].reshape(-1), tuple(parts[0].shape)
    if storage is None:
        msg = (
            "storage should be provided to update_priority() when the storage has more than one dimension, got an "
            f"index of {len(parts)} columns: pass storage=rb.storage"
        )
        raise UsageError(msg)
    if len(parts) != _WRAPPED or storage.ndim != _WRAPPED or parts[0].shape != parts[1].shape:
        msg = f"an index of a storage with ndim={storage.ndim} has {storage.ndim} columns, got {len(parts)}"
        raise KindError(msg)
    slots = torch.where(parts[0] < 0, parts[0], parts[0] * storage.num_envs + parts[1])
    return slots.reshape(-1), tuple(slots.shape)


def _integers(value: Any) -> Tensor:
    try:
        found = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
    except (TypeError, ValueError) as error:
        msg = f"an index is an integer, or a list, array or tensor of integers, got {value!r} ({error})"
        raise KindError(msg) from None
    if not found.numel():
        return found.to(torch.int64)
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        msg = f"an index must hold integers, got {found.dtype}"
        raise KindError(msg)
    require_values(found, "an index")
    return found.detach()


def steps_of_rows(schema: Schema | None) -> int:
    """Return the length of rows that are trajectories `[T, ...]`, where all fields have this dimension; else 1."""
    shapes = () if schema is None else [leaf.shape for leaf in schema.leaves]
    lengths = {shape[:1] for shape in shapes}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else 1


def check_one_each(given: tuple[int, ...], batch: tuple[int, ...], steps: int | None) -> None:
    """Check that priorities are not those of all pairs of rows: `[B, B]` comes from `[B] - [B, 1]`, and is never meant.

    Args:
        given: shape of the priorities.
        batch: shape of the index of the rows.
        steps: steps of each row, where rows are trajectories; 1 for single rows, None for windows of any length.

    Raises:
        PriorityShapeError: if they are.
    """
    if batch and batch[-1] > 1 and given == (*batch, batch[-1]) and steps is not None and steps != batch[-1]:
        msg = (
            f"the priorities of an index of shape {list(batch)} have the shape {list(batch)}, or further dimensions of "
            f"values of one row, got {list(given)}: a number for each pair of rows. Errors of shape [B] less "
            "predictions of shape [B, 1] broadcast to [B, B]: use .squeeze(-1) on the latter. Where there are as many "
            "values for each row as rows, reduce them first, such as .amax(-1)"
        )
        raise PriorityShapeError(msg)


def read_values(priority: Any, shape: tuple[int, ...], reduce: Callable[[Tensor], Tensor], steps: int | None) -> Tensor:
    """Return one priority for each row of an index of this shape, float64 `[n]`; `steps` as for `check_one_each`.

    Raises:
        KindError: if they are not real numbers.
        UsageError: for another number of them.
    """
    try:
        given = priority if isinstance(priority, torch.Tensor) else np.asarray(priority, dtype=np.float64)
        values = torch.as_tensor(given, device=None if isinstance(given, torch.Tensor) else "cpu", dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"priorities are real numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    values, rows = values.detach(), int(np.prod(shape, dtype=np.int64))
    if values.numel() == 1:
        return values.reshape(1).expand(rows).contiguous()
    check_one_each(tuple(values.shape), shape, steps)
    if values.ndim > len(shape) > 0 and tuple(values.shape[: len(shape)]) == shape:
        return reduce(values.reshape(rows, -1))
    if values.numel() == rows:
        return values.reshape(-1).contiguous()
    msg = (
        "priority should be a number or an iterable of the same length as index, got priorities of shape "
        f"{list(values.shape)} for an index of shape {list(shape)}"
    )
    raise PriorityShapeError(msg)


def as_picks(slots: Tensor) -> Picks:
    """Return the placement of rows that were written to these slots."""
    kept = slots[slots >= 0]
    return Picks(kept, (slots >= 0).nonzero().flatten(), slots)
