"""Updates of rows that are named by member and index: priorities and fields, checked for all members first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers.conditional_updates import ConditionalUpdateResult, parse_conditional
from ostinato.buffers.options import require_tracking, warn_of_sampler
from ostinato.buffers.priority_updates import (
    PAD_MASK,
    as_sampler,
    parse_update,
    priorities_of_batch,
    read_integers,
    read_priorities,
    read_slots,
    steps_of,
)
from ostinato.core import kinds
from ostinato.core.rows import map_leaves
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, SlotError, UsageError
from ostinato.samplers.base import check_not_negative, check_rows
from ostinato.samplers.standalone import check_one_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.buffers.engine import LocalEngine

_WINDOWS = ("anchor_index", "anchor_generation", "validity_mask", "step_in_sequence", PAD_MASK)
"""Fields of samples with windows around anchors, whose priorities are those of the anchors, and of padded slices."""
_NAMES = "an ensemble's rows are named by index and buffer_ids: pass the sample, or its info"


class Named(NamedTuple):
    """Rows of an ensemble: `*lead` is the shape of the batch that they are named in, and `n` its number of entries."""

    lead: torch.Size
    indices: Tensor
    """Index of each row in its member, `[n]`, with `ndim=2` `[n, 2]`."""
    generations: Any
    """Generations that were given with the rows; None if there were none."""
    members: dict[int, Tensor]
    """Members that have some of the rows, in order, and the positions of these rows, int64 `[k]`."""


def require_names(engines: Sequence[LocalEngine]) -> None:
    """Raise `UsageError` if rows have no names: the members of an ensemble draw by themselves."""
    if not engines:
        msg = (
            "the dataset draws by itself, and its rows have no names: make it a ReplayBuffer of this process without a "
            "rate_limiter"
        )
        raise UsageError(msg)


def read_names(engines: Sequence[LocalEngine], sample: Any, generation: Any = None) -> Named:
    """Return the rows that a sample, its info, or the `index` in one of them names.

    Raises:
        KindError: if it does not name rows.
        SchemaError: if there is not one member for each row, or for each part.
        SlotError: if a number is no member.
    """
    require_names(engines)
    index, ids, generations = _unpack(sample, generation)
    lead = index.shape[: index.ndim - (1 if engines[0].storage.ndim > 1 else 0)]
    if ids.shape != lead[: ids.ndim]:
        msg = f"buffer_ids must have the shape {list(lead)} of the index, or {list(lead[:1])}, got {list(ids.shape)}"
        raise SchemaError(msg)
    ids = ids.reshape(*ids.shape, *[1] * (len(lead) - ids.ndim)).expand(lead).reshape(-1)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(engines):
        msg = f"buffer_ids must be in [0, {len(engines)}), got {int(ids.min())} to {int(ids.max())}"
        raise SlotError(msg)
    rows = [(ids == i).nonzero().flatten() for i in range(len(engines))]
    members = {i: at for i, at in enumerate(rows) if at.shape[0]}
    return Named(lead, index.reshape(-1, *index.shape[len(lead) :]), generations, members)


def _unpack(sample: Any, given: Any) -> tuple[Tensor, Tensor, Any]:
    """Return index, members and generations of a sample, of its info, or of the `index` in one of them."""
    found = sample
    if _has(found, "index") and _is_tree(found["index"]):
        given = found.get("index_generation", None) if given is None else given
        found = found["index"]
    if not (_has(found, "index") and _has(found, "buffer_ids")):
        keys = f" with the keys {sorted(map(str, sample.keys()))}" if _is_tree(sample) else ""
        msg = f"{_NAMES}; got {type(sample).__name__}{keys}"
        raise KindError(msg)
    return read_integers("index", found["index"]), read_integers("buffer_ids", found["buffer_ids"]), given


def _is_tree(data: Any) -> bool:
    return isinstance(data, dict) or kinds.is_tensordict(data)


def _has(data: Any, key: str) -> bool:
    return _is_tree(data) and key in data.keys()  # noqa: SIM118 (a TensorDict iterates over rows)


def _take(values: Any, at: Tensor) -> Any:
    return None if values is None else values.index_select(0, at.to(values.device))


def _steps(engines: Sequence[LocalEngine]) -> int | None:
    """Return the steps of an item, see `steps_of`; None if the members differ."""
    found = {steps_of(engine) for engine in engines}
    return found.pop() if len(found) == 1 else None


# -- priorities --------------------------------------------------------------------------------------------------------


def _ranked(engines: Sequence[LocalEngine]) -> bool:
    """Return whether a member keeps priorities; warn if none does."""
    require_names(engines)
    for engine in engines:
        if engine.sampler.prioritized:
            return True
    warn_of_sampler(engines[0].sampler)
    return False


def update_priorities(engines: Sequence[LocalEngine], index: Any, priority: Any, generation: Any) -> None:
    """Give rows new priorities; see `ReplayBufferEnsemble.update_priority`. The caller holds the locks."""
    if not _ranked(engines):
        return
    if priority is None:
        msg = "update_priority() needs the new priorities: update_priority(sample, priority)"
        raise UsageError(msg)
    named = read_names(engines, index, generation)
    values = read_priorities(priority, tuple(named.lead), _steps(engines))
    generations, rows = named.generations, named.indices.shape[0]
    if generations is not None:
        generations = read_integers("generation", generations).reshape(-1)
        if generations.shape[0] != rows:
            msg = f"generation must hold one integer for each of the {rows} rows, got {generations.shape[0]}"
            raise SchemaError(msg)
    _set(
        engines,
        {
            i: (_take(named.indices, at), values if values.ndim == 0 else _take(values, at), _take(generations, at))
            for i, at in named.members.items()
            if engines[i].sampler.prioritized
        },
    )


def update_from_batch(engines: Sequence[LocalEngine], batch: Any) -> None:
    """Give rows the priorities in a sample; see `ReplayBufferEnsemble.update_tensordict_priority`."""
    if not _ranked(engines):
        return
    index, ids, generations = _unpack(batch, None)
    lead = min(2, ids.ndim)
    owner = ids.reshape(-1, ids.shape[lead:].numel())[:, 0]
    changes: dict[int, tuple[Any, Any, Any]] = {}
    for i, engine in enumerate(engines):
        at = (owner == i).nonzero().flatten()
        if not engine.sampler.prioritized or not at.shape[0]:
            continue
        path = engine.priority_path or ("td_error",)
        found = batch.get(path if len(path) > 1 else path[0], None)
        if found is None:
            msg = f"the batch has no key {kinds.show_path(path)}: write the priorities there, or call update_priority()"
            raise KeyMissingError(msg)
        check_one_each(tuple(found.shape), tuple(ids.shape), steps_of(engine))
        fields: dict[Any, Any] = {"index": index, "priority": found, "index_generation": generations}
        fields |= {name: batch.get(name, None) for name in _WINDOWS}
        part = {
            name: _take(value.reshape(-1, *value.shape[lead:]), at)
            for name, value in fields.items()
            if value is not None
        }
        reduce = as_sampler(engine.sampler).reduce
        changes[i] = priorities_of_batch(part, "priority", reduce, engine.storage.ndim)
    _set(engines, changes)


def _set(engines: Sequence[LocalEngine], changes: dict[int, tuple[Any, Any, Any]]) -> None:
    """Check the priorities of all members, then set them."""
    updates = []
    for i, change in changes.items():
        engine = engines[i]
        sampler = as_sampler(engine.sampler)
        update = parse_update(*change, engine.storage, sampler.reduce, steps_of(engine))
        update.check(sampler, engine.ring.rows, least_index=engine.least_index)
        updates.append((engine, update))
    for engine, update in updates:
        engine.update_priorities(update)


def reset_priorities(engines: Sequence[LocalEngine], index: Any) -> None:
    """Give rows the default priority again; see `ReplayBufferEnsemble.mark_update`. The caller holds the locks."""
    named = read_names(engines, index)
    parts = [(engines[i], _take(named.indices, at)) for i, at in named.members.items()]
    parts = [(engine, rows) for engine, rows in parts if engine.sampler.prioritized]
    for engine, rows in parts:
        slots, _ = read_slots(rows, engine.storage)
        check_not_negative(slots, least=engine.least_index)
        check_rows(slots, engine.ring.rows)
    for engine, rows in parts:
        engine.reset_priorities(rows)


# -- fields of rows that are still there -------------------------------------------------------------------------------


def _part(value: Any, at: Tensor, lead: torch.Size) -> Any:
    """Return the entries of values `[*lead, *shape]` at some rows; one value for all rows stays as it is."""
    if kinds.is_tensor_collection(value):
        return value.reshape(-1)[at.to(value.device or "cpu")]
    values = value if isinstance(value, Tensor) else np.asarray(value)
    if tuple(values.shape[: len(lead)]) != tuple(lead):
        return value  # or of a wrong shape, which the member names
    flat = values.reshape((-1, *values.shape[len(lead) :]))
    return flat[at.to(flat.device) if isinstance(flat, Tensor) else at.cpu().numpy()]


def update_fields(
    engines: Sequence[LocalEngine],
    index: Any,
    generation: Any,
    patch: Any,
    *,
    version: Any = None,
    priority: Any = None,
    **options: Any,
) -> ConditionalUpdateResult:
    """Write fields of rows that are still there, each in its member; see `ReplayBufferEnsemble.update_if_present`.

    The arguments for all members are checked before the first row is changed. The caller holds the locks.
    """
    named = read_names(engines, index, generation)
    lead, generations = named.lead, named.generations
    if not isinstance(generations, Tensor) or generations.numel() != lead.numel():
        msg = f"generation and routed index metadata must address the same number of records, {lead.numel()}: pass both"
        raise OptionError(msg)
    if priority is not None:
        check_one_each(tuple(np.shape(priority)), tuple(lead), _steps(engines))

    updates = {
        i: parse_conditional(
            engines[i].storage,
            engines[i].sampler,
            _take(named.indices, at),
            _take(generations.reshape(-1), at),
            map_leaves(patch, partial(_part, at=at, lead=lead)),
            least_index=engines[i].least_index,
            steps=steps_of(engines[i]),
            version=None if version is None else _part(version, at, lead),
            priority=None if priority is None else _part(priority, at, lead),
            **options,
        )
        for i, at in named.members.items()
    }
    for i in updates:
        if not engines[i].sampler.prioritized:
            require_tracking(engines[i].writer)
    updated = torch.zeros(lead.numel(), dtype=torch.bool, device="cpu")
    rejected = torch.zeros_like(updated) if any(update.versions is not None for update in updates.values()) else None
    for i, update in updates.items():
        made, at = engines[i].update_present(update), named.members[i].cpu()
        updated[at] = made.updated.cpu().reshape(-1)
        if rejected is not None and made.version_rejected is not None:
            rejected[at] = made.version_rejected.cpu().reshape(-1)
    return ConditionalUpdateResult(updated.reshape(lead), None if rejected is None else rejected.reshape(lead))
