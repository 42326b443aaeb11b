"""Rows written through an ensemble: which member each row goes to, and the write to all members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.episodes.tracker import as_path
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.mixing import Member
    from ostinato.core.episodes.tracker import Key
    from ostinato.transforms import Compose


Route: TypeAlias = "tuple[str, ...] | int"
"""The field that holds the number of the member of each row, or the batch dimension whose entries are the members."""


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
    return routing_dim if routing_key is None else as_path(routing_key)


def write_rows(members: Sequence[Member], route: Route, transform: Compose, data: Any, *, ranked: bool) -> Any:
    """Write each row to its member, in the order of the rows.

    The rows for all members are checked before the first one is written. The caller holds the locks.

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
    try:
        accepted = {i: members[i].buffer._accept(part) for i, part in parts.items()}  # noqa: SLF001 (one package)
        accepted = {i: rows for i, rows in accepted.items() if rows is not None}  # the others wait in a transform
        for i, rows in accepted.items():
            undo.append(members[i].engine.store.check_rows(rows, ranked=ranked))
    except Exception:
        for drop in undo:
            drop()
        raise
    return {i: members[i].write(rows, ranked=ranked) for i, rows in accepted.items()}


def _members_of(data: Any, route: Route, members: int) -> Tensor:
    """Return the number of the member of each row, int64 `[rows]`."""
    ids = _in_field(data, route) if isinstance(route, tuple) else _along(data, route, members)
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
