"""The arguments of `update_priority`, and the priorities in rows and samples: parsed here for all kinds of buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core import kinds
from ostinato.core.index import read_slots
from ostinato.core.records import require_values
from ostinato.errors import KeyMissingError, SchemaError, UsageError
from ostinato.samplers.base import check_not_negative, check_rows
from ostinato.samplers.priorities import check_one_each, one_each, read_priorities, require_real, steps_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ostinato.buffers.records import Engine, Ticket
    from ostinato.core.index import Indexing
    from ostinato.core.ring import Ring
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers import PrioritySampler, Sampler
    from ostinato.storages import Storage

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


def steps_of(engine: Engine) -> int | None:
    """Return the steps of what a buffer stores or draws as one item, for which priorities may be given one by one.

    Returns:
        1 for single rows, the length of rows that are trajectories `[T, ...]`; None for slices and windows.
    """
    if engine.sampler.slices or (engine.unit is not None and engine.unit.rows > 1):
        return None
    return steps_of_rows(engine.storage.schema)


# -- updates ----------------------------------------------------------------------------------------------------------


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
    steps: int | None,
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
        steps: see `steps_of`.
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
        index, priority, generation = _unpack_sample(index, priority, generation)
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
        values = one_each(read_priorities(priority, batch, steps).to(storage.device), slots.shape[0], reduce)
    return PriorityUpdate(slots, values, _generations(generation, slots))


def generations_at(ring: Ring | SharedRing, era: int, index: Any, storage: Indexing) -> Tensor:
    """Return the generations of the rows at an index, as samples have them, on the device of the storage.

    Returns:
        int64 of the shape of the index without coordinates; -1 where there is no row.
    """
    slots, batch = read_slots(index, storage)
    inside = (slots >= 0) & (slots < ring.capacity)
    found = ring.generations(torch.where(inside, slots, 0))
    return torch.where(inside & (found > 0), found + era * GENERATIONS_PER_ERA, -1).reshape(batch)


def _generations(given: Any, slots: Tensor) -> Tensor | None:
    return None if given is None else read_generations(given, slots)


def read_generations(given: Any, slots: Tensor) -> Tensor:
    """Return generations int64 `[n]` on the device of the slots.

    Raises:
        SchemaError: if there is not one integer for each slot.
    """
    found = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given), device="cpu")
    if found.numel() != slots.shape[0] or found.dtype is torch.bool or found.is_floating_point():
        msg = (
            f"generation must hold one integer for each of the {slots.shape[0]} rows (the sample's index_generation), "
            f"got {found.dtype}{list(found.shape)}"
        )
        raise SchemaError(msg)
    require_values(found, "generation")
    return found.reshape(-1).to(slots.device, torch.int64).contiguous()


def _in_storage_order(priority: Any, index: Any) -> Any:
    """Return priorities `[num_envs, steps]`, as the data given to `extend`, in the order of its index."""
    if isinstance(priority, Tensor) and priority.ndim > 1:
        rows = index[0].numel() if isinstance(index, tuple) else index.shape[0] if isinstance(index, Tensor) else 0
        if priority.shape[0] != rows and priority.shape[:2].numel() == rows:
            return priority.transpose(0, 1).flatten(0, 1)
    return priority


# -- samples ----------------------------------------------------------------------------------------------------------


def _unpack_sample(sample: Any, priority: Any, generation: Any) -> tuple[Any, Any, Any]:
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
    index, _, generations = _unpack_sample(sample, None, generation)
    return index, generations


def _without_padding(index: Any, mask: Tensor, priority: Any, generations: Any) -> tuple[Any, Any, Any]:
    """Return index, priorities and generations without the rows that pad slices: they repeat the row before them."""
    index = torch.stack(index, -1) if isinstance(index, tuple) else index
    values = priority if isinstance(priority, Tensor) else torch.as_tensor(np.asarray(priority), device="cpu")
    lead = mask.shape
    if values.numel() == 1 or values.shape[: len(lead)] != lead or index.shape[: len(lead)] != lead:
        return index, priority, generations
    rows = index.reshape(lead.numel(), -1)
    keep = mask.reshape(-1).to(rows.device).clone()
    keep[:1] = True
    keep[1:] |= (rows[1:] != rows[:-1]).any(1)
    if isinstance(generations, Tensor):
        generations = generations.reshape(-1)[keep.to(generations.device)]
    values = values.flatten(0, len(lead) - 1)[keep.to(values.device)]
    return index.flatten(0, len(lead) - 1)[keep], values, generations


def _of_anchors(sample: Any, priority: Any, generations: Any) -> tuple[Any, Any, Any]:
    """Return index, priorities and generations of the anchors of windows, whatever the shape of the batch."""
    valid, anchors = sample["validity_mask"], sample["anchor_index"]
    if isinstance(anchors, tuple):
        anchors = torch.stack(anchors, -1)
    lead, anchors = valid.shape, anchors.reshape(-1, *anchors.shape[valid.ndim :])
    first = (sample["step_in_sequence"] == 0).reshape(-1)
    windows = int(first.sum())
    values = priority if isinstance(priority, Tensor) else torch.as_tensor(np.asarray(priority), device="cpu")
    if values.numel() == 1:
        values = values.reshape(1).expand(lead)
    if values.shape[: len(lead)] != lead or (len(lead) == 1 and lead[0] == windows):  # one for each window
        of_rows = isinstance(generations, Tensor) and generations.numel() == first.numel()
        return anchors[first], values, generations.reshape(-1)[first] if of_rows else generations
    seen = valid.reshape(-1).to(anchors.device)
    if not bool(seen.all()):
        anchors, first = anchors[seen], first[seen]
        values = values.reshape(seen.numel(), -1)[seen.to(values.device)]
        if isinstance(generations, Tensor):
            generations = generations.reshape(-1)[seen.to(generations.device)]
    index, group = torch.unique(anchors, dim=0, return_inverse=True)
    values = values.detach().reshape(first.numel(), -1).to(torch.float64).amax(1)
    best = values.new_full((index.shape[0],), -torch.inf).scatter_reduce_(0, group.to(values.device), values, "amax")
    if isinstance(generations, Tensor):
        at = group.to(generations.device)
        generations = generations.new_zeros(index.shape[0]).scatter_(0, at, generations.reshape(-1))
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
    index, priority, generations = _unpack_sample(sample, priority, None)
    lead = index.ndim - (1 if ndim > 1 else 0)
    if lead > 1:
        first = index[:, :1].reshape(index.shape[0], *[1] * (lead - 1), *index.shape[lead:])
        if bool((index == first).all()):
            while index.ndim > (2 if ndim > 1 else 1):
                index = index[:, 0]
                generations = None if generations is None else generations[:, 0]
            priority = reduce(priority.reshape(priority.shape[0], -1))
    return index, priority, generations


def priority_fields(ticket: Ticket, era: int, *, tracked: bool = False) -> dict[str, Tensor]:
    """Return the fields that samples of prioritized buffers have besides their index, `[R]` each; none for others.

    With `tracked`, for a writer that `tracks_generations`, others have the generations too.

    `priority_weight` is the weight of the row drawn, `index_generation` the generation of each record; windows around
    anchors also have `anchor_generation`, the generation of the anchor.
    """
    draw, plan = ticket.draw, ticket.plan
    if draw.weights is None and not tracked:
        return {}
    found = {} if draw.weights is None else {"priority_weight": ticket.per_record(draw.weights)}
    if draw.generations is not None:
        found["index_generation"] = draw.generations if plan is None or plan.generations is None else plan.generations
        if plan is not None and "anchor_index" in plan.notes:
            found["anchor_generation"] = plan.per_record(draw.generations)
        for key in found.keys() - {"priority_weight"}:
            found[key] = in_era(found[key], era)
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
