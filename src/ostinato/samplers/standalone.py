"""Samplers without a buffer: the view of a bare storage, and the index and info of what was drawn from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import torch

from ostinato.core.episodes.tracker import EpisodeTracker, TrackedRows
from ostinato.core.options import check_integer
from ostinato.core.records import Picks, Plan, View, require_values
from ostinato.core.ring import Ring
from ostinato.errors import KindError, PriorityShapeError, SlotError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.records import Draw
    from ostinato.core.rows import Path, Schema

    Index: TypeAlias = Tensor | tuple[Tensor, ...]


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


class Indexing(NamedTuple):
    """What the indices of rows depend on; storages have the same attributes."""

    ndim: int = 1
    """Dimensions of an index: 1, or 2 for `(step, environment)`."""
    num_envs: int = 1
    """Environments of a storage with `ndim=2`."""
    device: torch.device = torch.device("cpu")
    """Device of the slots."""


def read_index(index: Any, storage: BareStorage | None, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Return the slots of an index of rows of a bare storage, and its shape; see `read_slots`.

    Args:
        index: slots, or with a storage of `ndim=2` a pair, or a tensor `[..., 2]`.
        storage: needed for an index with `ndim=2`.
        device: of the slots.

    Raises:
        UsageError: for an index with several dimensions without a storage.
    """
    columns = len(index) if isinstance(index, tuple) else np.ndim(index)
    if columns <= 1:  # slots
        return read_slots(index, Indexing(device=device))
    if storage is None:
        msg = (
            "storage should be provided to update_priority() when the storage has more than one dimension, got an "
            f"index of {columns} columns: pass storage=rb.storage"
        )
        raise UsageError(msg)
    return read_slots(index, storage)


def read_slots(index: Any, storage: Indexing | BareStorage) -> tuple[Tensor, tuple[int, ...]]:
    """Return the slots of an index, and the shape of the index without coordinates.

    Args:
        index: integers of any form; with `ndim=2` a pair of them, or a tensor `[..., 2]`. -1 marks a row that was not
            kept.
        storage: how an index names slots.

    Returns:
        int64 `[n]` on the device of the storage, contiguous.

    Raises:
        KindError: for an index of another kind or shape.
        SlotError: for an environment out of range.
    """
    given = index if isinstance(index, tuple) and len(index) == storage.ndim else (index,)
    parts = tuple(read_integers("an index", part).to(storage.device, torch.int64) for part in given)
    if len({part.shape for part in parts}) > 1:
        msg = f"the parts of an index must have one shape, got {[list(part.shape) for part in parts]}"
        raise KindError(msg)
    slots = parts[0]
    if storage.ndim > 1:
        if len(parts) == 1 and (slots.ndim == 0 or slots.shape[-1] != storage.ndim):
            msg = (
                f"the index of a storage with ndim={storage.ndim} is a pair (step, environment) or a tensor [..., 2], "
                f"got shape {list(slots.shape)}: pass what extend() or sample() gave"
            )
            raise KindError(msg)
        steps, envs = parts if len(parts) > 1 else slots.unbind(-1)
        _check_envs(envs, storage.num_envs)
        slots = torch.where(steps < 0, steps, steps * storage.num_envs + envs)
    return slots.reshape(-1).contiguous(), tuple(slots.shape)


def _check_envs(envs: Tensor, count: int) -> None:
    if envs.device.type == "cpu" and envs.numel() and not -1 <= int(envs.min()) <= int(envs.max()) < count:
        msg = f"environments must be in [0, {count}), got {int(envs.min())} to {int(envs.max())}"
        raise SlotError(msg)


def read_integers(name: str, value: Any) -> Tensor:
    """Return integers of any form as a tensor of any integer dtype, shape and device.

    Raises:
        KindError: naming them by `name`, if they are not integers, or have no values.
    """
    try:
        found = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
    except (TypeError, ValueError) as error:
        msg = f"{name} is an integer, a list or an integer tensor of any device, got {value!r} ({error})"
        raise KindError(msg) from None
    if found.numel() == 0 and not isinstance(value, torch.Tensor):
        found = found.to(torch.int64)
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        msg = f"{name} must hold integers, got {found.dtype}: pass what extend() or sample() gave"
        raise KindError(msg)
    require_values(found, name)
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
    """Return one priority for each row of an index of this shape, float64 `[n]`, on the device they came on.

    Args:
        priority: see `read_priorities`.
        shape: of the index.
        reduce: reduces several priorities of a row, `[n, *shape]`, to one.
        steps: see `check_one_each`.

    Raises:
        KindError, PriorityShapeError: see `read_priorities`.
    """
    values = read_priorities(priority, shape, steps)
    values = reduce(values) if values.ndim > 1 else values.to(torch.float64)
    return values.expand(math.prod(shape)).contiguous()


def read_priorities(priority: Any, batch: tuple[int, ...], steps: int | None) -> Tensor:
    """Return priorities of rows that are indexed in the shape `batch`.

    Args:
        priority: a number or tensor or array: one for all rows, one for each, or `[*batch, *shape]`.
        batch: shape of the index.
        steps: see `check_one_each`.

    Returns:
        Any real dtype, on the device they came on: 0-dim for one priority of all rows, else `[n]` or `[n, *shape]`.

    Raises:
        KindError: if they are not real numbers, or have no values.
        PriorityShapeError: for another shape.
    """
    given = priority
    try:
        if not isinstance(given, torch.Tensor):
            given = torch.as_tensor(np.asarray(priority, dtype=np.float64), device="cpu")
    except (TypeError, ValueError) as error:
        msg = f"priorities are real numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    check_real(given)
    require_values(given, "priorities")
    values, shape, n = given.detach(), tuple(given.shape), math.prod(batch)
    if values.numel() == 1:
        return values.reshape(())
    check_one_each(shape, batch, steps)
    if shape[: len(batch)] == batch:
        return values.reshape(n, *shape[len(batch) :])
    if values.numel() == n:
        return values.reshape(-1)
    msg = (
        "priority should be a number or an iterable of the same length as index, or have its shape "
        f"{list(batch)} (further dimensions are reduced per row), got shape {list(shape)}"
    )
    raise PriorityShapeError(msg)


def check_real(values: Tensor) -> None:
    """Raise `KindError` for priorities that are bool or complex."""
    if values.dtype is torch.bool or values.is_complex():
        msg = f"priorities must be real numbers, got {values.dtype}: pass absolute errors, such as td_error.abs()"
        raise KindError(msg)


def as_picks(slots: Tensor) -> Picks:
    """Return the placement of rows that were written to these slots."""
    kept = slots[slots >= 0]
    return Picks(kept, (slots >= 0).nonzero().flatten(), slots)
