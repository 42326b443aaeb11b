"""Rows written through an ensemble: which member each row goes to, the write to all members, and later updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ostinato.buffers.checks import require_tracking
from ostinato.buffers.conditional_updates import ConditionalUpdate, ConditionalUpdateResult, parse_conditional
from ostinato.buffers.mixing import Member, as_members, locked, unpack
from ostinato.buffers.priority_updates import in_era
from ostinato.core import kinds
from ostinato.core.episodes.keys import as_path
from ostinato.core.rows import map_leaves
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, UsageError
from ostinato.writers import RoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.core.episodes.keys import Key
    from ostinato.transforms import Compose

__all__ = ["Route", "check_route", "end_streams", "require_route", "update_rows", "write_rows"]


class Route(NamedTuple):
    """Which member a row is written to: exactly one of the two is given."""

    path: tuple[str, ...] | None = None
    """Field that holds the number of the member of each row."""
    dim: int | None = None
    """Batch dimension whose entries are the members."""


def check_route(routing_key: Key | None, routing_dim: int | None, members: Sequence[Member]) -> Route | None:
    """Return how rows are routed, None if they are not.

    Raises:
        OptionError: if both are given, or a member has `storage.ndim=2`.
        KindError: if the dimension is not an integer.
    """
    if routing_key is None and routing_dim is None:
        return None
    if routing_key is not None and routing_dim is not None:
        msg = "routing_key and routing_dim are mutually exclusive: name a field, or a dimension, of the members"
        raise OptionError(msg)
    if routing_dim is not None and (isinstance(routing_dim, bool) or not isinstance(routing_dim, int)):
        msg = f"routing_dim must be an integer, got {routing_dim!r}"
        raise KindError(msg)
    if any(member.engine.storage.ndim > 1 for member in members):
        msg = (
            "routed rows are flat, and members with storage.ndim=2 take whole steps of all environments: leave "
            "routing_key and routing_dim out, and write through the members, ensemble[i].extend(rows)"
        )
        raise OptionError(msg)
    return Route(None if routing_key is None else as_path(routing_key), routing_dim)


def write_rows(members: Sequence[Member], route: Route, transform: Compose, data: Any, *, ranked: bool) -> Any:
    """Write each row to its member, in the order of the rows.

    The rows for all members are checked before the first one is written. The caller holds the lock of the ensemble.

    Args:
        members: of the ensemble.
        route: which member a row goes to.
        transform: of the ensemble; its inverse runs first.
        data: TensorDict `[*B]`, of which each entry is a row.
        ranked: whether priorities in the rows are used.

    Returns:
        TensorDict `[rows]` with `buffer_ids`, `index` and `index_generation`, int64, in the order of
        `data.reshape(-1)`.

    Raises:
        KindError: if numbers of members are not integers.
        SchemaError: if rows do not match those of their member, a number is no member, or there is not one number for
            each row.
    """
    if transform.steps:
        data = transform.inv(data)
        if data is None:  # it keeps the rows until it has enough of them
            return _names(torch.empty(0, dtype=torch.int64, device="cpu"))
    ids = _members_of(data, route, len(members))
    names = _names(ids)
    if ids.shape[0]:
        flat = data.reshape(-1)
        rows = {i: (ids == i).nonzero().flatten() for i in sorted(set(ids.tolist()))}
        parts = {i: flat[at] for i, at in rows.items()}
        for i, made in _write(members, parts, ranked=ranked).items():
            if made[0].shape == rows[i].shape:  # else a transform changed the number of rows
                names["index"][rows[i]], names["index_generation"][rows[i]] = (values.to(ids.device) for values in made)
    return names


def _names(ids: Tensor) -> Any:
    """Return the names of rows of these members that are not written yet."""
    fields = {"buffer_ids": ids, "index": torch.full_like(ids, -1), "index_generation": torch.zeros_like(ids)}
    return kinds.make(kinds.Node("tensordict", tuple(fields)), list(fields.values()), (ids.shape[0],), ids.device)


def _write(members: Sequence[Member], parts: dict[int, Any], *, ranked: bool) -> dict[int, tuple[Tensor, Tensor]]:
    """Check all parts, then write them. Returns index and generation of the rows of each."""
    undo: list[Callable[[], None]] = []
    with locked([members[i] for i in parts]):
        try:
            accepted = {i: members[i].accept(part) for i, part in parts.items()}
            accepted = {i: rows for i, rows in accepted.items() if rows is not None}  # the others wait in a transform
            for i, rows in accepted.items():
                undo.append(members[i].engine.check_rows(rows, ranked=ranked))
        except Exception:
            for drop in undo:
                drop()
            raise
        return {i: members[i].write(rows, ranked=ranked) for i, rows in accepted.items()}


def _members_of(data: Any, route: Route, members: int) -> Tensor:
    """Return the number of the member of each row, int64 `[rows]`."""
    ids = _in_field(data, route.path) if route.path is not None else _along(data, route.dim or 0, members)
    if ids.dtype is torch.bool or ids.is_floating_point() or ids.is_complex():
        msg = f"ReplayBufferEnsemble member ids must be integers, got {ids.dtype}"
        raise KindError(msg)
    ids = ids.to(torch.int64)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < members:
        msg = (
            f"ReplayBufferEnsemble member ids must lie in [0, {members - 1}], got {int(ids.min())} to {int(ids.max())}"
        )
        raise SchemaError(msg)
    return ids


def _in_field(data: Any, path: tuple[str, ...]) -> Tensor:
    ids = kinds.find_field(data, path)
    key = kinds.show_path(path)
    if ids is None:
        msg = f"the rows have no field {key}, which routing_key names: write the number of the member of each row there"
        raise KeyMissingError(msg)
    if not isinstance(ids, Tensor):
        msg = f"the field {key}, which routing_key names, must be a tensor of integers, got {type(ids).__name__}"
        raise KindError(msg)
    batch = data.batch_size
    if ids.shape[: len(batch)].numel() != ids.numel():
        msg = (
            f"routing_key {key} must contain one member id per record, got shape {tuple(ids.shape)} for batch size "
            f"{tuple(batch)}"
        )
        raise SchemaError(msg)
    return ids.reshape(-1)


def _along(data: Any, dim: int, members: int) -> Tensor:
    batch = tuple(data.batch_size)
    if not batch:
        msg = "routing_dim requires batched input, got a TensorDict without batch dimensions"
        raise SchemaError(msg)
    if not -len(batch) <= dim < len(batch):
        msg = f"routing_dim={dim} is no dimension of data of batch size {list(batch)}"
        raise SchemaError(msg)
    if batch[dim] != members:
        msg = f"routing_dim {dim} has size {batch[dim]}, expected {members} ensemble members."
        raise SchemaError(msg)
    shape = [1] * len(batch)
    shape[dim] = members
    return torch.arange(members, device=data.device or "cpu").reshape(shape).expand(batch).reshape(-1)


def require_route(route: Route | None, data: Any, verb: str, members: int) -> Route:
    """Return how rows are routed.

    Raises:
        KindError: if the data is not a TensorDict.
        UsageError: if rows are not routed.
    """
    if not kinds.is_tensordict(data):
        msg = (
            f"Routed replay writes require a TensorDict input, got {type(data).__name__}: write other data through one "
            f"of the {members} members, ensemble[i].{verb}(rows)"
        )
        raise KindError(msg)
    if route is None:
        msg = (
            f"ReplayBufferEnsemble writes are disabled: write through one of its {members} members, "
            f"ensemble[i].{verb}(rows), or make it with routing_key or routing_dim"
        )
        raise UsageError(msg)
    return route


# -- updates of rows that were written ---------------------------------------------------------------------------------


def update_rows(
    members: Sequence[Member],
    index: Any,
    generation: Any,
    patch: Any,
    *,
    version: Any = None,
    priority: Any = None,
    **options: Any,
) -> ConditionalUpdateResult:
    """Write fields of rows that are still there, each in its member; see `ReplayBufferEnsemble.update_if_present`.

    The arguments for all members are checked before the first row is changed.
    """
    index, ids, generations = unpack(index, generation)
    lead = index.shape[: index.ndim - (1 if members[0].engine.storage.ndim > 1 else 0)]
    ids, index = as_members(ids, lead, len(members)), index.reshape(-1, *index.shape[len(lead) :])
    if not isinstance(generations, Tensor) or generations.numel() != ids.numel():
        msg = f"generation and routed index metadata must address the same number of records, {ids.numel()}: pass both"
        raise OptionError(msg)
    whole = torch.Size(lead)

    def part(value: Any, at: Tensor) -> Any:
        if kinds.is_tensor_collection(value):
            return value.reshape(-1)[at.to(value.device or "cpu")]
        values = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if values.shape[: len(whole)] != whole:
            return value  # one for all rows, or of a wrong shape, which the member names
        return values.reshape(-1, *values.shape[len(whole) :])[at.to(values.device)]

    rows = {i: (ids == i).nonzero().flatten() for i in sorted(set(ids.tolist()))}
    with locked([members[i] for i in rows]):
        updates = {
            i: parse_conditional(
                members[i].engine.storage,
                members[i].engine.sampler,
                index[at],
                generations.reshape(-1)[at.to(generations.device)],
                part(patch, at) if kinds.is_tensor_collection(patch) else map_leaves(patch, lambda v, at=at: part(v, at)),
                version=None if version is None else part(version, at),
                priority=None if priority is None else part(priority, at),
                **options,
            )
            for i, at in rows.items()
        }
        return _apply(members, updates, rows, whole)


def _apply(
    members: Sequence[Member], updates: dict[int, ConditionalUpdate], rows: dict[int, Tensor], lead: torch.Size
) -> ConditionalUpdateResult:
    for i in updates:
        if not members[i].engine.sampler.prioritized:
            require_tracking(members[i].engine.writer)
    updated = torch.zeros(lead.numel(), dtype=torch.bool, device="cpu")
    rejected = torch.zeros_like(updated) if any(update.versions is not None for update in updates.values()) else None
    for i, update in updates.items():
        made = members[i].engine.update_present(update)
        updated[rows[i].cpu()] = made.updated.cpu().reshape(-1)
        if rejected is not None and made.version_rejected is not None:
            rejected[rows[i].cpu()] = made.version_rejected.cpu().reshape(-1)
    return ConditionalUpdateResult(updated.reshape(lead), None if rejected is None else rejected.reshape(lead))


def end_streams(members: Sequence[Member], end: Key, terminated: Key | None, truncated: Key | None) -> None:
    """End the episode of the newest row of each member; see `ReplayBufferEnsemble.end_streams`."""
    keys = [as_path(key) for key in (end, terminated, truncated) if key is not None]
    if len(set(keys)) < len(keys):
        msg = f"end, terminated and truncated keys must be distinct, got {keys}"
        raise OptionError(msg)
    with locked(members):
        updates = [(member, _last_row(member, end, terminated, truncated)) for member in members]
        for member, update in updates:
            if update is not None:
                member.engine.update_present(update)


def _last_row(
    member: Member, end: Key, terminated: Key | None, truncated: Key | None
) -> ConditionalUpdate | None:
    """Return the update that ends the newest episode of a member; None if it has no rows."""
    engine = member.engine
    storage, writer, tracker = engine.storage, engine.writer, engine.tracker
    marks = None
    if tracker is not None and storage.schema is not None:
        marks = tracker.wanted.resolve({leaf.path for leaf in storage.schema.leaves})
    path = as_path(end)
    ring_order = isinstance(writer, RoundRobinWriter) and storage.ndim == 1
    if not ring_order or tracker is None or (marks is not None and path not in marks.end_paths):
        msg = (
            "end_streams requires one-dimensional conditional-update storage, generation-tracking round-robin writers "
            f"and end-key slice samplers that read {kinds.show_path(path)}, got {storage!r}, {writer!r} and "
            f"{engine.sampler!r}"
        )
        raise UsageError(msg)
    if not len(storage) or marks is None:
        return None
    slots = torch.tensor([(engine.ring.cursor - 1) % len(storage)], device=storage.device)
    _require_one_stream(member, marks.traj_path)
    done = storage.scores_at(slots, path)
    if done is None or done.dtype is not torch.bool:
        msg = f"end_streams requires a boolean end_key field, got {None if done is None else done.dtype}"
        raise KindError(msg)
    patch = {path: torch.ones_like(done)}
    cut = None if truncated is None else storage.scores_at(slots, as_path(truncated))
    if cut is not None and truncated is not None:
        over = None if terminated is None else storage.scores_at(slots, as_path(terminated))
        open_ = ~done if over is None else ~done & ~over
        patch[as_path(truncated)] = cut | open_.reshape(cut.shape)
    generations = in_era(engine.ring.generations(slots), engine.era)
    return parse_conditional(storage, engine.sampler, slots, generations, patch)


def _require_one_stream(member: Member, path: Any) -> None:
    """Check that all rows of a member have one trajectory id.

    Raises:
        UsageError: if they have several: one of them may be used again.
    """
    if path is None:
        return
    storage = member.engine.storage
    ids = storage.scores_at(torch.arange(len(storage), device=storage.device), path)
    if ids is not None and bool((ids != ids[:1]).any()):
        msg = (
            "end_streams supports trajectory-keyed slice samplers only when every record of a member carries the same "
            f"trajectory id, got several in {kinds.show_path(path)}: restarted producers may use old ones again"
        )
        raise UsageError(msg)
