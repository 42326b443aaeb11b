"""Updates of rows that were sampled before: their arguments, parsed for all kinds of buffers, and the thread of some.

An update names rows by slots and generations, by a sample, or by the info of one. `update_priority` sets priorities.
`update_if_present` sets fields and priorities of the rows that are still the rows that were sampled: results that are
computed elsewhere (a recurrent state, a latent, an advantage) arrive later, when another row may be in the slot. What
belongs to a replaced row is left out and counted; the other rows are changed, each of them whole, and keep their
generations.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core import kinds
from ostinato.core.index import read_integers, read_slots
from ostinato.core.kinds import show_field
from ostinato.core.processes import Work, raise_first, whole_in_forks
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, UsageError
from ostinato.samplers import PrioritySampler
from ostinato.samplers.base import check_not_negative, check_rows
from ostinato.samplers.priorities import check_one_each, read_values, require_real, steps_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from concurrent.futures import Future

    from ostinato.buffers.reader import Reader
    from ostinato.core.index import Indexing
    from ostinato.core.records import Draw
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Schema
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage

    Path: TypeAlias = tuple[Hashable, ...]

_CPU = torch.device("cpu")
_INT = torch.int64
_FLOATS = frozenset({torch.float32, torch.float64})
PAD_MASK = ("collector", "mask")
"""Field of samples that is False in the rows by which `pad_output` lengthens slices."""
GENERATIONS_PER_ERA = 2**44
"""Offset between eras: a load starts a new era, so that generations of older batches match no row."""


def check_sampler(storage: Storage, sampler: Sampler) -> None:
    """Check that a sampler can keep priorities for the rows of a storage.

    Raises:
        SlotError: if the storage holds more rows already.
        OptionError: if the sampler was made for another device.
    """
    if sampler.prioritized:
        as_sampler(sampler).check_rows(len(storage), as_sampler(sampler).max_rows(storage))
        if storage.laid_out:
            as_sampler(sampler).check_device(storage.device)


def as_sampler(sampler: Sampler) -> PrioritySampler:
    """Cast to `PrioritySampler`."""
    return sampler  # type: ignore[return-value]


def steps_of(engine: Reader) -> int | None:
    """Return the steps of what a buffer stores or draws as one item, for which priorities may be given one by one.

    Returns:
        1 for single rows, the length of rows that are trajectories `[T, ...]`; None for slices and windows.
    """
    if engine.sampler.slices or (engine.unit is not None and engine.unit.rows > 1):
        return None
    return steps_of_rows(engine.storage.schema)


# -- names of rows ---------------------------------------------------------------------------------------------------


def generations_at(ring: Ring | SharedRing, era: int, index: Any, storage: Indexing) -> Tensor:
    """Return the generations of the rows at an index, as samples have them, on the device of the storage.

    Returns:
        int64 of the shape of the index without coordinates; -1 where there is no row.
    """
    slots, batch = read_slots(index, storage)
    inside = (slots >= 0) & (slots < ring.capacity)
    found = ring.generations(torch.where(inside, slots, 0))
    return torch.where(inside & (found > 0), found + era * GENERATIONS_PER_ERA, -1).reshape(batch)


def read_generations(given: Any, slots: Tensor, error: type[Exception] = SchemaError) -> Tensor:
    """Return generations int64 `[n]` on the device of the slots.

    Raises:
        KindError: if they are not integers.
        SchemaError: if there is not one for each slot; or another `error`.
    """
    found = read_integers("generation", given).reshape(-1)
    if found.shape != slots.shape:
        msg = (
            f"generation must hold one integer for each of the {slots.shape[0]} rows (the sample's index_generation), "
            f"got {found.shape[0]}: index and generation must address the same number of records"
        )
        raise error(msg)
    return found.to(slots.device, torch.int64).contiguous()


def slots_of_rows(engine: Reader, index: Any) -> Tensor:
    """Return the slots of an index of rows that are present, int64 `[n]`; -1 is left to the caller.

    Raises:
        KindError: if it is not an index.
        SlotError: if a slot is negative, or beyond the rows.
    """
    slots, _ = read_slots(index, engine.storage)
    check_not_negative(slots, least=engine.least_index)
    check_rows(slots, engine.ring.rows)
    return slots


def rows_by_owner(owners: Tensor) -> dict[int, Tensor]:
    """Return the positions of the rows of each member or shard, int64 `[m]`, by its number; -1 is none."""
    return {i: (owners == i).nonzero().flatten() for i in sorted(set(owners.tolist())) if i >= 0}


def part_of(value: Any, at: Tensor, batch: tuple[int, ...]) -> Any:
    """Return the values of the rows at some positions; what has no value for each row stays as it is.

    Args:
        value: `[*batch, *shape]` or `[n, *shape]`, or a tree of such values.
        at: positions among all rows, int64 `[m]`.
        batch: shape of the index of the rows, which are `n` together.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: part_of(item, at, batch) for key, item in value.items()}
    tensor = isinstance(value, Tensor)
    collection = not tensor and kinds.is_tensor_collection(value)
    try:
        found: Any = value if tensor or collection else np.asarray(value)
    except (ValueError, RuntimeError):
        return value  # of no shape: it is named where the rows are
    shape, lead = tuple(found.batch_size if collection else found.shape), len(batch)
    if shape[:lead] == tuple(batch):
        found = found.reshape(-1) if collection else found.reshape((-1, *shape[lead:]))
    elif shape[:1] != (prod(batch),):
        return value  # one for all rows, or of a wrong shape, which is named where the rows are
    return found[at.cpu().numpy() if isinstance(found, np.ndarray) else at.to(found.device or "cpu")]


# -- priorities ------------------------------------------------------------------------------------------------------


class PriorityUpdate(NamedTuple):
    """New priorities, as samplers take them, not yet written."""

    slots: Tensor
    """int64 `[n]`, contiguous; -1 marks a row that the writer did not keep."""
    priorities: Tensor
    """float32 or float64 `[n]`, contiguous."""
    generations: Tensor | None
    """Generations of the rows when they were drawn, int64 `[n]`, contiguous."""

    def of_era(self, era: int) -> PriorityUpdate:
        """Return the update with generations as they are counted in an era."""
        if self.generations is None:
            return self
        return self._replace(generations=self.generations - era * GENERATIONS_PER_ERA)

    def check(self, sampler: PrioritySampler, rows: int, *, least_index: int) -> None:
        """Check on the CPU that the update is valid: for several buffers that are updated together.

        Raises:
            PriorityError: for invalid priorities.
            SlotError: for an index below `least_index`; without generations, if one is beyond the rows.
        """
        if self.slots.is_cpu and self.slots.numel():
            check_not_negative(self.slots, least=least_index)
            sampler.check(self.priorities)
            if self.generations is None:
                check_rows(self.slots, rows)


def parse_update(
    index: Any,
    priority: Any,
    generation: Any,
    storage: Indexing,
    reduce: Callable[[Tensor], Tensor],
    steps: Callable[[], int | None],
    *,
    env_first: bool = False,
) -> PriorityUpdate:
    """Parse the arguments of `update_priority`; see `ReplayBuffer.update_priority`.

    Args:
        index: indices, or a sample, or the info of a sample.
        priority: priorities.
        generation: generations; None takes those of a sample.
        storage: how an index names slots.
        reduce: reduces several priorities of a row, `[n, *shape]`, to one.
        steps: see `steps_of`; called where the shape of priorities is not that of the index.
        env_first: whether priorities may be `[num_envs, steps]`, as the data given to `extend`.

    Raises:
        UsageError: if there are no priorities.
        KeyMissingError: if a sample has no index.
        KindError, SchemaError, SlotError: for arguments of another type, shape or range. Whether priorities are valid
            is checked when they are written.
    """
    if kinds.func_transform() is not None or kinds.is_tracing():
        kinds.require_eager("updating priorities")
    if type(index) is not Tensor:
        index, priority, generation = unpack_sample(index, priority, generation)
    if env_first:
        priority = _in_storage_order(priority, index)
    # the usual case needs no conversion: one native call checks dtypes, shapes and memory
    native = backend.native
    if type(index) is Tensor and type(priority) is Tensor and index.ndim == storage.ndim == 1 and native is not None:
        dtype, shape = priority.dtype, index.shape
        if dtype in _FLOATS and storage.device == _CPU:
            leaves, dtypes = [index, priority], [_INT, dtype]
            if generation is not None:
                leaves, dtypes = [index, priority, generation], [_INT, dtype, _INT]
            if native.check_leaves(leaves, dtypes, [shape] * len(leaves), Tensor) is not None:
                return PriorityUpdate(index, priority, generation)
    if priority is None:
        msg = "update_priority() needs the new priorities: update_priority(index, priority)"
        raise UsageError(msg)
    slots, batch = read_slots(index, storage)
    if isinstance(priority, (int, float)) and not isinstance(priority, bool):  # filled in on the device: no copy to it
        values = torch.full(slots.shape, float(priority), dtype=torch.float64, device=storage.device)
    else:
        values = read_values(priority, batch, reduce, steps()).to(storage.device)
    return PriorityUpdate(slots, values, None if generation is None else read_generations(generation, slots))


def _in_storage_order(priority: Any, index: Any) -> Any:
    """Return priorities `[num_envs, steps]`, as the data given to `extend`, in the order of its index."""
    if isinstance(priority, Tensor) and priority.ndim > 1:
        rows = index[0].numel() if isinstance(index, tuple) else index.shape[0] if isinstance(index, Tensor) else 0
        if priority.shape[0] != rows and priority.shape[:2].numel() == rows:
            return priority.transpose(0, 1).flatten(0, 1)
    return priority


# -- samples ----------------------------------------------------------------------------------------------------------


def unpack_sample(sample: Any, priority: Any, generation: Any) -> tuple[Any, Any, Any]:
    """Return index, priorities and generations of a sample or its info; of anything else, the arguments.

    Priorities of windows become those of their anchors: the largest of the valid rows of each window, or one for each.
    Priorities of the rows that `pad_output` repeats are left out.

    Raises:
        KeyMissingError: if a sample has no index.
    """
    if not (isinstance(sample, dict) or kinds.is_tensor_collection(sample)):
        return sample, priority, generation
    keys = sample.keys()
    if "index" not in keys:
        msg = f"a sample must have the key 'index' to update priorities, got {sorted(map(str, keys))}"
        raise KeyMissingError(msg)
    windows = "anchor_index" in keys and "validity_mask" in keys
    if generation is None:
        generation = sample.get("anchor_generation" if windows else "index_generation", None)
    if windows and priority is not None:
        return _of_anchors(sample, priority, generation)
    mask = None if priority is None else sample.get(PAD_MASK, None)
    if mask is not None:
        return _without_padding(sample["index"], mask, priority, generation)
    return sample["index"], priority, generation


def rows_of_sample(sample: Any, generation: Any) -> tuple[Any, Any]:
    """Return index and generations of a sample or its info; of anything else, the arguments.

    Raises:
        KeyMissingError: if a sample has no index.
    """
    index, _, generations = unpack_sample(sample, None, generation)
    return index, generations


def _without_padding(index: Any, mask: Tensor, priority: Any, generations: Any) -> tuple[Any, Any, Any]:
    """Return index, priorities and generations without the rows that pad slices: they repeat the row before them."""
    index = torch.stack(index, -1) if isinstance(index, tuple) else index
    lead, shape = mask.shape, tuple(np.shape(priority))
    if prod(shape) == 1 or shape[: len(lead)] != lead or index.shape[: len(lead)] != lead:
        return index, priority, generations
    rows = index.reshape(lead.numel(), -1)
    keep = mask.reshape(-1).to(rows.device).clone()
    keep[:1] = True
    keep[1:] |= (rows[1:] != rows[:-1]).any(1)
    at = keep.nonzero().flatten()
    return part_of(index, at, lead), part_of(priority, at, lead), part_of(generations, at, lead)


def _of_anchors(sample: Any, priority: Any, generations: Any) -> tuple[Any, Any, Any]:
    """Return index, priorities and generations of the anchors of windows, whatever the shape of the batch."""
    valid, anchors = sample["validity_mask"], sample["anchor_index"]
    anchors = torch.stack(anchors, -1) if isinstance(anchors, tuple) else anchors
    lead, first = valid.shape, (sample["step_in_sequence"] == 0).reshape(-1).nonzero().flatten()
    values = priority if isinstance(priority, Tensor) else torch.as_tensor(np.asarray(priority), device="cpu")
    if values.numel() == 1:
        values = values.reshape(1).expand(lead)
    if values.shape[: len(lead)] != lead or lead == first.shape:  # one for each window
        return part_of(anchors, first, lead), values, part_of(generations, first, lead)
    seen = valid.reshape(-1).nonzero().flatten()
    anchors, values, generations = (part_of(each, seen, lead) for each in (anchors, values, generations))
    index, group = torch.unique(anchors, dim=0, return_inverse=True)
    values = values.detach().reshape(seen.shape[0], -1).to(torch.float64).amax(1)
    best = values.new_full((index.shape[0],), -torch.inf).scatter_reduce_(0, group.to(values.device), values, "amax")
    if isinstance(generations, Tensor):
        generations = generations.new_zeros(index.shape[0]).scatter_(0, group.to(generations.device), generations)
    return index, best, generations


def priorities_of_batch(
    sample: Any, key: str | tuple[str, ...], reduce: Callable[[Tensor], Tensor], ndim: int
) -> tuple[Any, Tensor, Any]:
    """Return index, priorities and generations of a sampled TensorDict, one of each per item.

    Where the rows are trajectories, the batch has them as `[B, T]`, all steps of an item with one index: their
    priorities are reduced.

    Raises:
        KeyMissingError: if it has no priorities, or no index.
    """
    path = (key,) if isinstance(key, str) else tuple(key)
    priority = sample.get(path if len(path) > 1 else path[0], None)
    if priority is None:
        msg = f"the batch has no key {kinds.show_path(path)}: write the priorities there, or call update_priority()"
        raise KeyMissingError(msg)
    index, priority, generations = unpack_sample(sample, priority, None)
    lead = index.ndim - (1 if ndim > 1 else 0)
    if lead > 1:
        first = index[:, :1].reshape(index.shape[0], *[1] * (lead - 1), *index.shape[lead:])
        if bool((index == first).all()):
            while index.ndim > (2 if ndim > 1 else 1):
                index = index[:, 0]
                generations = None if generations is None else generations[:, 0]
            priority = reduce(priority.reshape(priority.shape[0], -1))
    return index, priority, generations


def row_names(engine: Reader, draw: Draw, notes: dict[Any, Any], index: Callable[[Tensor], Any]) -> dict[Any, Any]:
    """Return what samples have besides their rows, `[R]` each: `index`, weights and generations, and `notes`.

    Samples of prioritized buffers have the `priority_weight` of the row drawn, and the `index_generation` of each
    record; windows around anchors also the `anchor_generation`, that of the anchor. Others have the generations where
    the writer `tracks_generations`.

    Args:
        engine: of the buffer.
        draw: the draw.
        notes: further entries, by name or path.
        index: returns slots as samples name them.
    """
    plan, weights, generations, era = draw.plan, draw.weights, draw.generations, engine.store.era
    found: dict[Any, Any] = {"index": index(draw.records)}
    if weights is not None:
        found["priority_weight"] = draw.per_record(weights)
    if generations is not None and (weights is not None or engine.writer.tracks_generations):
        found["index_generation"] = in_era(
            generations if plan is None or plan.generations is None else plan.generations, era
        )
        if plan is not None and "anchor_index" in plan.notes:
            found["anchor_generation"] = in_era(plan.per_record(generations), era)
    found |= notes
    if "anchor_index" in notes:
        found["anchor_index"] = index(notes["anchor_index"])
    return found


def in_era(generations: Tensor, era: int) -> Tensor:
    """Return generations as users see them: those of another era match no row."""
    return generations + era * GENERATIONS_PER_ERA if era else generations


# -- rows -------------------------------------------------------------------------------------------------------------


def priorities_of_rows(
    data: Any, path: tuple[Hashable, ...] | None, rows: int, sampler: PrioritySampler, device: torch.device
) -> Tensor | None:
    """Return the priorities in rows about to be written, checked.

    Args:
        data: the rows.
        path: field that holds priorities; None for none.
        rows: number of rows.
        sampler: reduces several priorities of a row to one.
        device: where to return them.

    Returns:
        float64 `[rows]`; None if the rows have no priorities.

    Raises:
        PriorityError: for invalid priorities, naming their positions; nothing has been written.
        SchemaError: if their number is not a multiple of `rows`, or there is one for each pair of rows.
    """
    values = None if path is None else _find(data, path, rows, sampler)
    if values is None:
        return None
    values = values.to(device)
    sampler.check(values)
    return values


def _find(data: Any, path: tuple[Hashable, ...], rows: int, sampler: PrioritySampler) -> Tensor | None:
    if type(data) is list:
        found = [_find(row, path, rows // max(len(data), 1), sampler) for row in data]
        present = [values for values in found if values is not None]
        return torch.cat(present) if present and len(present) == len(found) else None
    field = kinds.find_field(data, path)
    if field is None:
        return None
    values = kinds.as_tensor(field, path)
    if values.is_complex():
        require_real(values)
    if values.numel() == 0 or values.numel() % rows:
        msg = f"{kinds.show_path(path)} must hold priorities of {rows} rows, got shape {list(values.shape)}"
        raise SchemaError(msg)
    if values.shape == (rows, rows) and not all(np.shape(leaf)[:2] == (rows, rows) for leaf in _leaves(data)):
        check_one_each(tuple(values.shape), (rows,), 1)
    return sampler.reduce(values.reshape(rows, -1)).contiguous()


def _leaves(data: Any) -> list[Any]:
    """Return the fields of rows."""
    opened = kinds.open_node(data, 1)
    return [data] if opened is None else [leaf for child in opened[1] for leaf in _leaves(child)]


# -- conditional updates ---------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class ConditionalUpdateResult:
    """What became of each row of `update_if_present`, in the order of its index."""

    updated: Tensor
    """bool, of the shape of the index: rows that were present and were changed."""
    version_rejected: Tensor | None = None
    """bool, of the same shape: rows that were present, and that hold a newer version, or got one in the same call; None
    without `version_key`."""

    @property
    def updated_count(self) -> int:
        """Number of rows that were changed."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of rows that were present and have a newer version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of rows that had been replaced or removed; nothing of them was written."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class Versions(NamedTuple):
    """The versions that come with an update."""

    path: Path
    """The stored field of versions."""
    given: Tensor
    """`[n]`, of the stored dtype."""
    newer: bool
    """Whether a version must be larger than the one stored; else it may be equal."""


class ConditionalUpdate(NamedTuple):
    """An update whose arguments were checked; `n` rows."""

    slots: Tensor
    """int64 `[n]`; any integers: those outside of the buffer name no row."""
    generations: Tensor
    """int64 `[n]`."""
    batch: tuple[int, ...]
    """Shape of the index."""
    fields: dict[Path, Tensor]
    """Values `[n, *shape]` of the stored dtype and shape."""
    versions: Versions | None = None
    priorities: Tensor | None = None
    """`[n]`."""

    def present(self, ring: Ring | SharedRing, era: int) -> Tensor:
        """Return bool `[n]`: which rows are still in their slots."""
        inside = (self.slots >= 0) & (self.slots < ring.capacity)
        generations = (self.generations - era * GENERATIONS_PER_ERA).contiguous()
        return inside & ring.matches(torch.where(inside, self.slots, 0), generations)

    def accepted(self, present: Tensor, read: Callable[[Tensor, Path], Tensor | None]) -> Tensor:
        """Return bool `[n]`: which of the rows present are updated: all of them, or those with a newer version.

        Of rows in one slot only that with the largest version is, of equal versions the last one.
        """
        versions = self.versions
        if versions is None or not bool(present.any()):
            return present
        at = present.nonzero().reshape(-1)
        slots, given = self.slots[at], versions.given[at]
        stored = read(slots, versions.path)
        if stored is None:  # its field was there when the arguments were parsed: the storage was exchanged
            raise KeyMissingError(_no_field(versions.path))
        stored = stored.reshape(-1)
        good = given > stored if versions.newer else given >= stored
        accepted = torch.zeros_like(present)
        accepted[at] = good & _last_of_each(slots, given)
        return accepted

    def result(self, present: Tensor, accepted: Tensor) -> ConditionalUpdateResult:
        """Return what became of the rows."""
        rejected = None if self.versions is None else (present & ~accepted).reshape(self.batch)
        return ConditionalUpdateResult(accepted.reshape(self.batch), rejected)

    def chosen(self, accepted: Tensor) -> Tensor:
        """Return which of the rows are written, int64 `[m]`: of equal slots the last one."""
        at = accepted.nonzero().reshape(-1)
        return at[_last_of_each(self.slots[at])] if at.numel() else at


def join_results(
    batch: tuple[int, ...], parts: Mapping[int, Tensor], found: Mapping[int, ConditionalUpdateResult], *, versions: bool
) -> ConditionalUpdateResult:
    """Join the results of several buffers, of the rows at these positions; other rows were not changed."""
    updated = torch.zeros(prod(batch), dtype=torch.bool, device="cpu")
    rejected = torch.zeros_like(updated) if versions else None
    for i, result in found.items():
        at = parts[i].cpu()
        updated[at] = result.updated.cpu().reshape(-1)
        if rejected is not None and result.version_rejected is not None:
            rejected[at] = result.version_rejected.cpu().reshape(-1)
    return ConditionalUpdateResult(updated.reshape(batch), None if rejected is None else rejected.reshape(batch))


def _last_of_each(slots: Tensor, rank: Tensor | None = None) -> Tensor:
    """Return bool `[n]`: for each slot, the row with the largest rank, of equal ranks the last one."""
    rows = slots.shape[0]
    order = torch.arange(rows, device=slots.device) if rank is None else torch.argsort(rank, stable=True)
    order = order[torch.argsort(slots[order], stable=True)]
    ordered = slots[order]
    last = torch.ones(rows, dtype=torch.bool, device=slots.device)
    last[:-1] = ordered[1:] != ordered[:-1]
    mask = torch.zeros_like(last)
    mask[order[last]] = True
    return mask


def parse_conditional(
    engine: Reader,
    index: Any,
    generation: Any,
    patch: Any,
    *,
    version_key: Any = None,
    version: Any = None,
    require_newer: bool = False,
    priority: Any = None,
) -> ConditionalUpdate:
    """Check the arguments of `ReplayBuffer.update_if_present`, which describes them.

    Raises:
        UsageError: if the storage has no fields, or no rows yet.
        SlotError: for an index below `least_index` of the engine.
        OptionError, SchemaError, KindError, KeyMissingError, PriorityError: see there.
    """
    storage, sampler = engine.storage, engine.sampler
    index, generation = rows_of_sample(index, generation)
    slots, batch = read_slots(index, storage)
    check_not_negative(slots, least=engine.least_index)
    if generation is None:
        msg = "update_if_present() needs generations: pass index_generation as well, or a sample that has them"
        raise OptionError(msg)
    generations = read_generations(generation, slots, OptionError)
    if (version_key is None) != (version is None):
        msg = "version_key and version must be provided together: the stored field of versions, and the new versions"
        raise OptionError(msg)
    fields = {path: _as_column(storage, path, value, batch) for path, value in _as_fields(patch).items()}
    versions: Versions | None = None
    if version_key is not None:
        path = _version_path(version_key, fields)
        given = _as_versions(storage, path, version, prod(batch))
        fields[path], versions = given, Versions(path, given.reshape(-1), require_newer)
    priorities = None
    if priority is not None:
        if not isinstance(sampler, PrioritySampler):
            msg = f"{type(sampler).__name__} has no priorities: leave priority= out, or use a PrioritizedSampler"
            raise OptionError(msg)
        priorities = read_values(priority, batch, sampler.reduce, steps_of(engine)).to(storage.device)
        sampler.check(priorities)
    return ConditionalUpdate(slots, generations, batch, fields, versions, priorities)


def _require_schema(storage: Storage) -> Schema:
    schema = storage.schema
    if schema is None:
        if storage.laid_out:
            msg = (
                f"Conditional updates are not supported by {type(storage).__name__}, which has no fields: use "
                "LazyTensorStorage or LazyMemmapStorage"
            )
        else:
            msg = (
                f"Conditional updates require an initialized storage with fields, got an empty {type(storage).__name__}"
                ": they are not supported before the first row"
            )
        raise UsageError(msg)
    return schema


def _as_fields(patch: Any) -> dict[Path, Any]:
    """Return the values of a patch by their paths."""
    if patch is None:
        return {}
    if kinds.is_tensor_collection(patch):
        return {_as_path(key): value for key, value in patch.items(include_nested=True, leaves_only=True)}
    if not isinstance(patch, Mapping):
        msg = f"patch must be a dict or a TensorDict of stored fields, got {type(patch).__name__}"
        raise KindError(msg)
    found: dict[Path, Any] = {}
    for key, value in patch.items():
        start = _as_path(key)
        nested = isinstance(value, dict) or (kinds.is_tensordict(value) and not kinds.is_non_tensor(value))
        leaves = (
            {(*start, *path): leaf for path, leaf in kinds.leaves_by_path(value).items()} if nested else {start: value}
        )
        if found.keys() & leaves.keys():
            msg = f"patch names {show_field(next(iter(found.keys() & leaves.keys())))} twice: name it once"
            raise OptionError(msg)
        found |= leaves
    return found


def _as_path(key: Any) -> Path:
    return key if isinstance(key, tuple) else (key,)


def _no_field(path: Path) -> str:
    return f"Key {path if len(path) > 1 else path[0]!r} does not exist in the storage: a patch changes stored tensors"


def _fit(storage: Storage, path: Path, value: Any, what: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return values of a field as they are stored, in any shape, and the shape of the field in a row.

    Raises:
        UsageError: if the storage has no fields.
        KeyMissingError: if it has not this one.
        SchemaError: for a tensor of another dtype.
    """
    schema = _require_schema(storage)
    leaf = next((leaf for leaf in schema.leaves if leaf.path == path), None)
    if leaf is None:
        raise KeyMissingError(_no_field(path))
    if isinstance(value, Tensor) and value.dtype is not leaf.dtype:
        msg = (
            f"dtype mismatch for {what}: got {value.dtype}, the storage holds {leaf.dtype}: convert it with "
            f".to({leaf.dtype})"
        )
        raise SchemaError(msg)
    return schema.fit(value, path).detach().to(storage.device), leaf.shape


def _as_column(storage: Storage, path: Path, value: Any, batch: tuple[int, ...]) -> Tensor:
    """Return the values of a field as they are stored, `[n, *shape]`."""
    what = f"patch key {show_field(path)}"
    values, of_row = _fit(storage, path, value, what)
    rows = prod(batch)
    shape = (rows, *of_row)
    allowed = {(*batch, *of_row), shape}
    if tuple(values.shape) not in allowed and not (values.shape[:1] == shape[:1] and values.numel() == prod(shape)):
        msg = (
            f"shape mismatch for {what}: got {list(values.shape)}, expected {rows} records with feature shape "
            f"{list(of_row)}"
        )
        raise SchemaError(msg)
    return values.reshape(shape)


def _version_path(key: Any, patched: dict[Path, Tensor]) -> Path:
    """Return the path of the field of versions.

    Raises:
        OptionError: if it is not named by a path, or is among the fields patched.
    """
    if isinstance(key, str) and "." in key:
        msg = (
            f"Dotted-string version keys are not supported: got {key!r}. Pass the nested key in tuple form, "
            f"{tuple(key.split('.'))!r}"
        )
        raise OptionError(msg)
    if _as_path(key) in patched:
        msg = f"version_key {key!r} may not appear in patch: it is written from version="
        raise OptionError(msg)
    return _as_path(key)


def _as_versions(storage: Storage, path: Path, version: Any, rows: int) -> Tensor:
    """Return versions as they are stored, `[n, *shape]`, one number each."""
    given, of_row = _fit(storage, path, version, "version")
    if prod(of_row) != 1:
        msg = (
            f"version_key {show_field(path)} must reference a per-record scalar field; the storage holds feature shape "
            f"{list(of_row)}"
        )
        raise OptionError(msg)
    if given.numel() not in {1, rows} or (given.numel() == 1 and given.ndim > 1 and rows != 1):
        msg = f"version must be a scalar or hold one entry per record, got shape {list(given.shape)} for {rows} records"
        raise OptionError(msg)
    return given.reshape(-1).expand(rows).reshape(rows, *of_row).contiguous()


def as_stored(storage: Storage, values: Any) -> tuple[Any, Callable[[], Any]]:
    """Return tensors on the storage's device: those of an accelerator are copied in its stream, without waiting for it.

    A thread that waits for a copy would wait for all the work that was queued before it; an event after the copies
    waits for no more than them. Returns the values and a function that waits for the copies.
    """
    if storage.device.type != "cpu" or not torch.cuda.is_available():
        return values, lambda: None
    devices: set[torch.device] = set()
    found = _to_host(values, devices)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]
    return found, lambda: [event.synchronize() for event in events]


def _to_host(value: Any, devices: set[torch.device]) -> Any:
    """Return a tensor, or nested tensors, on the CPU, once their streams are done; adds their devices."""
    if isinstance(value, Tensor):
        if not value.is_cuda:
            return value
        devices.add(value.device)
        return value.to("cpu", non_blocking=True)
    if kinds.is_tensor_collection(value):
        value = dict(value.items(include_nested=True, leaves_only=True))
    if isinstance(value, Mapping):
        return {key: _to_host(item, devices) for key, item in value.items()}
    return value


# -- updates in a thread ----------------------------------------------------------------------------------------------


@final
class UpdateQueue:
    """Updates that run in a thread, in the order in which they were submitted.

    Thread-safe. A copy of a buffer, and a forked process, start without the updates that are pending here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[Future[ConditionalUpdateResult]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        whole_in_forks(self, self._lock)

    def submit(
        self,
        operation: Callable[[], ConditionalUpdateResult],
        through: Callable[[Callable[[], ConditionalUpdateResult]], Future[ConditionalUpdateResult]] | None,
    ) -> Future[ConditionalUpdateResult]:
        """Queue an update: in a thread of its own, or in that of `through`, which makes the batches in order."""
        with self._lock:
            self._follow_fork()
            if through is not None:
                future = through(operation)
            else:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-updates")
                future = self._executor.submit(Work(operation))
            self._pending.append(future)
            return future

    def _follow_fork(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._executor = None
            self._pending.clear()

    def settle(self) -> None:
        """Wait for the updates that are pending now, and raise the first error of one; once."""
        raise_first(self._take_done())  # held by no local variable, which the traceback of the error would keep

    def _take_done(self) -> list[Future[Any]]:
        """Wait for the updates that are pending now, remove them, and return them."""
        with self._lock:
            self._follow_fork()
            pending = list(self._pending)
        wait_for(pending)
        with self._lock:
            done = [future for future in pending if future in self._pending]  # else another thread has seen it
            for future in done:
                self._pending.remove(future)
        return done

    def wait(self, timeout_s: float) -> bool:
        """Wait until no update is pending, at most `timeout_s`; return whether none is."""
        with self._lock:
            self._follow_fork()
            pending = list(self._pending)
        return not wait_for(pending, min(timeout_s, threading.TIMEOUT_MAX)).not_done

    def close(self) -> None:
        """End the thread, once it has made the updates that are pending."""
        with self._lock:
            self._follow_fork()
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
