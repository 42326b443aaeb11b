"""Calls of an ensemble that its members do: writes, updates of rows named by member and index, ends of streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ostinato.buffers.options import warn_of_sampler
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.updates import (
    PAD_MASK,
    as_sampler,
    parse_update,
    part_of,
    priorities_of_batch,
    read_generations,
    rows_by_owner,
    steps_of,
)
from ostinato.core import kinds
from ostinato.core.episodes.tracker import as_path
from ostinato.core.index import check_members, read_integers
from ostinato.core.kinds import show_path
from ostinato.core.options import check_integer
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, UsageError
from ostinato.samplers import SliceSampler
from ostinato.samplers.priorities import check_one_each, read_priorities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ostinato.buffers.mixing import EnsembleEngine, Member
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.updates import ConditionalUpdate
    from ostinato.core.episodes.tracker import Key
    from ostinato.core.rows import Path

_WINDOWS = ("anchor_index", "anchor_generation", "validity_mask", "step_in_sequence", PAD_MASK)
"""Fields of samples with windows around anchors, whose priorities are those of the anchors, and of padded slices."""
_NAMES = "an ensemble's rows are named by index and buffer_ids: pass the sample, or its info"

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
    route = check_integer("routing_dim", routing_dim) if routing_key is None else as_path(routing_key)
    if any(member.engine.storage.ndim > 1 for member in members):
        msg = (
            "routed rows are flat, and members with storage.ndim=2 take whole steps of all environments: leave "
            "routing_key and routing_dim out, and write through the members, ensemble[i].extend(rows)"
        )
        raise OptionError(msg)
    return route


def _names(ids: Tensor) -> Any:
    """Return the names of rows of these members that are not written yet."""
    fields = {"buffer_ids": ids, "index": torch.full_like(ids, -1), "index_generation": torch.zeros_like(ids)}
    return kinds.make(kinds.Node("tensordict", tuple(fields)), list(fields.values()), (ids.shape[0],), ids.device)


def _write_parts(members: Sequence[Member], parts: dict[int, Any], *, ranked: bool) -> dict[int, tuple[Tensor, Tensor]]:
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


def _in_field(data: Any, path: tuple[str, ...]) -> Tensor:
    ids = kinds.find_field(data, path)
    key = show_path(path)
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
    if not -len(batch) <= dim < len(batch):
        msg = f"routing_dim requires batched input, got no dimension {dim} in a TensorDict of batch size {list(batch)}"
        raise SchemaError(msg)
    if batch[dim] != members:
        msg = f"routing_dim {dim} has size {batch[dim]}, expected {members} ensemble members."
        raise SchemaError(msg)
    shape = [1] * len(batch)
    shape[dim] = members
    return torch.arange(members, device=data.device or "cpu").reshape(shape).expand(batch).reshape(-1)


# -- names of rows -----------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """Rows of an ensemble: `*lead` is the shape of the batch that they are named in, and `n` its number of entries."""

    lead: torch.Size
    indices: Tensor
    """Index of each row in its member, `[n]`, with `ndim=2` `[n, 2]`."""
    generations: Tensor | None
    """Generations that were given with the rows, `[n]`; None if there were none."""
    members: dict[int, Tensor]
    """Members that have some of the rows, in order, and the positions of these rows, int64 `[k]`."""

    def parts(self, **values: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """Iterate over the members that have some of the rows: `index`, `generation` and `values` of these."""
        given = {"index": self.indices, "generation": self.generations, **values}
        return ((i, part_of(given, at, self.lead)) for i, at in self.members.items())


class EnsembleUpdate(NamedTuple):
    """Conditional updates of several members, whose arguments were checked."""

    rows: Named
    parts: dict[int, ConditionalUpdate]


def require_names(engines: Sequence[Reader]) -> None:
    """Raise `UsageError` if rows have no names: the members of an ensemble draw by themselves."""
    if not engines:
        msg = (
            "the dataset draws by itself, and its rows have no names: make it a ReplayBuffer of this process without a "
            "rate_limiter"
        )
        raise UsageError(msg)


def read_names(engines: Sequence[Reader], sample: Any, generation: Any = None) -> Named:
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
    ids = check_members(ids, len(engines))
    generations = None if generations is None else read_generations(generations, ids)
    return Named(lead, index.reshape(-1, *index.shape[len(lead) :]), generations, rows_by_owner(ids))


def _unpack(sample: Any, given: Any) -> tuple[Tensor, Tensor, Any]:
    """Return index, members and generations of a sample, of its info, or of the `index` in one of them."""
    found = sample
    if _has(found, "index") and kinds.is_mapping(found["index"]):
        given = found.get("index_generation", None) if given is None else given
        found = found["index"]
    if not (_has(found, "index") and _has(found, "buffer_ids")):
        keys = f" with the keys {sorted(map(str, sample.keys()))}" if kinds.is_mapping(sample) else ""
        msg = f"{_NAMES}; got {type(sample).__name__}{keys}"
        raise KindError(msg)
    return read_integers("index", found["index"]), read_integers("buffer_ids", found["buffer_ids"]), given


def _has(data: Any, key: str) -> bool:
    return kinds.is_mapping(data) and key in data.keys()  # noqa: SIM118 (a TensorDict iterates over rows)


def steps_of_all(engines: Sequence[Reader]) -> int | None:
    """Return the steps of an item, see `steps_of`; None if the members differ."""
    found = {steps_of(engine) for engine in engines}
    return found.pop() if len(found) == 1 else None


# -- priorities --------------------------------------------------------------------------------------------------------


def _ranked(engines: Sequence[Reader]) -> bool:
    """Return whether a member keeps priorities; warn if none does."""
    require_names(engines)
    for engine in engines:
        if engine.sampler.prioritized:
            return True
    warn_of_sampler(engines[0].sampler)
    return False


def _set(engines: Sequence[Reader], changes: dict[int, tuple[Any, Any, Any]]) -> None:
    """Check the priorities of all members, then set them."""
    updates = []
    for i, change in changes.items():
        engine = engines[i]
        sampler = as_sampler(engine.sampler)
        update = parse_update(*change, engine.storage, sampler.reduce, partial(steps_of, engine))
        update.check(sampler, engine.ring.rows, least_index=engine.least_index)
        updates.append((engine, update))
    for engine, update in updates:
        engine.update_priorities(update)


# -- ends of streams ---------------------------------------------------------------------------------------------------


def _check_stream(member: ReplayBuffer, number: int, end: Path) -> None:
    """Check that a buffer holds one stream whose end `end` marks.

    Raises:
        UsageError: naming what does not fit.
    """
    storage, sampler, episodes = member.storage, member.sampler, member.episodes
    known = None if storage.schema is None or not len(storage) else {leaf.path for leaf in storage.schema.leaves}
    found = episodes if episodes is None or known is None else episodes.resolve(known)
    if (
        storage.ndim != 1
        or not (member.writer.in_order and member.writer.mutable)
        or not isinstance(sampler, SliceSampler)
        or (known is not None and (found is None or end not in found.end_paths))
    ):
        msg = (
            "end_streams requires one-dimensional storages, round-robin writers and slice samplers whose episodes end "
            f"at end_key={show_path(end)}, member {number} has {storage!r}, {member.writer!r} and {sampler!r}"
        )
        raise UsageError(msg)
    traj = None if found is None or known is None else found.traj_path
    if traj is not None:
        ids = storage.scores_at(torch.arange(len(storage), device=storage.device), traj)
        if ids is None or not bool((ids == ids[0]).all()):
            msg = (
                "end_streams supports trajectory-keyed slice samplers only if every record of a member carries the "
                f"same trajectory id: those of member {number} have several under {show_path(traj)}, and new rows may "
                "have any of them"
            )
            raise UsageError(msg)


def _ended_row(
    member: ReplayBuffer, end: Path, terminated: Path | None, truncated: Path | None
) -> tuple[Tensor, dict[Any, Tensor]]:
    """Return the slot of the newest row, and the flags that it gets.

    Raises:
        KindError: if the row has no boolean end flag.
    """
    storage = member.storage
    slot = torch.tensor([(member.cursor - 1) % storage.capacity], dtype=torch.int64, device=storage.device)
    done = storage.scores_at(slot, end)
    if done is None or done.dtype is not torch.bool:
        msg = f"end_streams requires a boolean end_key field, rows have {show_path(end)} as {done and done.dtype}"
        raise KindError(msg)
    values: dict[Any, Tensor] = {end: torch.ones_like(done)}
    cut = None if truncated is None else storage.scores_at(slot, truncated)
    if cut is not None and truncated is not None:
        stop = None if terminated is None else storage.scores_at(slot, terminated)
        values[truncated] = cut | ~(done if stop is None else done | stop)
    return slot, values


class RoutedBuffer(ReplayBuffer):
    """The part of `ReplayBufferEnsemble` whose calls go to the members that rows name."""

    _engine: EnsembleEngine  # type: ignore[assignment]
    _route: Route | None = None

    @property
    def members(self) -> tuple[ReplayBuffer, ...]:
        """The buffers."""
        return tuple(member.buffer for member in self._engine.members)

    @property
    def routing_key(self) -> str | tuple[str, ...] | None:
        """Field that holds the number of the member of each row written; None if there is none."""
        route = self._route
        return None if not isinstance(route, tuple) else route[0] if len(route) == 1 else route

    @property
    def routing_dim(self) -> int | None:
        """Batch dimension of written data whose entries are the members; None if there is none."""
        return self._route if isinstance(self._route, int) else None

    def add(self, data: Any) -> Any:  # type: ignore[override]
        """Write one row to the member that its `routing_key` names.

        Args:
            data: TensorDict without batch dimensions.

        Returns:
            TensorDict of `buffer_ids`, `index` and `index_generation`.

        Raises:
            UsageError: if the ensemble has no `routing_key`.
            KindError, SchemaError: as in `extend`.
        """
        if isinstance(self._require_route(data, "add"), int):
            msg = "Use extend() for routing_dim writes: one row has no dimension of members"
            raise UsageError(msg)
        if data.batch_size:
            msg = (
                f"add() expects a scalar TensorDict record, got batch_size={list(data.batch_size)}: use extend() for "
                "several rows"
            )
            raise SchemaError(msg)
        return self.extend(data.unsqueeze(0))[0]

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Any:  # type: ignore[override]
        """Write each row to its member; the rows of one member keep their order.

        The rows of all members are checked before the first one is written. If a write fails after that (too little
        memory, a rank that is not a number), members of lower numbers have their rows.

        Args:
            data: TensorDict `[*B]`; each entry is a row. With `routing_dim`, that dimension has one entry for each
                member.
            update_priority: False gives the rows the default priority, as in `ReplayBuffer.extend`.

        Returns:
            TensorDict `[rows]` of int64 tensors in the order of `data.reshape(-1)`: `buffer_ids`, the member of each
            row, its `index` there, and its `index_generation`. The index is -1 and the generation 0 where the writer
            did not keep the row, or an inverse transform of the member changed the number of rows; a transform of the
            ensemble that holds rows back gives no names.

        Raises:
            UsageError: if the ensemble has neither `routing_key` nor `routing_dim`.
            KindError: if the data is not a TensorDict, or numbers of members are not integers.
            SchemaError: if rows do not match those of their member, a number is no member, or there is not one number
                for each row; nothing is changed.
        """
        route = self._require_route(data, "extend")
        with self._engine.lock:
            return self._write(data, route, ranked=update_priority is not False)

    def _write(self, data: Any, route: Route, *, ranked: bool) -> Any:
        if self.transform.steps:
            data = self.transform.inv(data)
            if data is None:  # it keeps the rows until it has enough of them
                return _names(torch.empty(0, dtype=torch.int64, device="cpu"))
        count = len(self)
        ids = _in_field(data, route) if isinstance(route, tuple) else _along(data, route, count)
        ids = check_members(ids, count, SchemaError)
        names, rows = _names(ids), rows_by_owner(ids)
        flat = data.reshape(-1) if rows else data
        parts = {i: flat[at] for i, at in rows.items()}
        for i, made in _write_parts(self._engine.own, parts, ranked=ranked).items():
            if made[0].shape == rows[i].shape:  # else a transform changed the number of rows
                for key, values in zip(("index", "index_generation"), made, strict=True):
                    names[key][rows[i]] = values.to(ids.device)
        return names

    def _require_route(self, data: Any, verb: str) -> Route:
        """Return how rows are routed.

        Raises:
            KindError: if the data is not a TensorDict.
            UsageError: if rows are not routed.
        """
        if not kinds.is_tensordict(data):
            msg = (
                f"Routed replay writes require a TensorDict input, got {type(data).__name__}: write other data through "
                f"one of the {len(self)} members, ensemble[i].{verb}(rows)"
            )
            raise KindError(msg)
        if self._route is None:
            msg = (
                f"ReplayBufferEnsemble writes are disabled: write through one of its {len(self)} members, "
                f"ensemble[i].{verb}(rows), or make it with routing_key or routing_dim"
            )
            raise UsageError(msg)
        return self._route

    def _as_stored(self, options: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
        return options, lambda: None  # each member copies what is its own

    def end_streams(
        self,
        *,
        end_key: Key = ("next", "done"),
        terminated_key: Key | None = ("next", "terminated"),
        truncated_key: Key | None = ("next", "truncated"),
    ) -> None:
        """Make the newest row of each member the last one of its episode, before collectors start anew.

        Members without rows stay as they are. Write to none of them meanwhile.

        Args:
            end_key: bool field that ends episodes for the members' slice samplers; becomes True.
            terminated_key: bool field that is read only.
            truncated_key: bool field that becomes True, if rows have it, unless the row ended its episode before; None
                changes no such field.

        Raises:
            UsageError: if a member holds more than one stream, or has no slice sampler of this `end_key`; nothing is
                changed.
            OptionError: if keys are equal.
            KindError: if the end flag is not bool; nothing is changed.
        """
        end = as_path(end_key)
        terminated, truncated = (None if key is None else as_path(key) for key in (terminated_key, truncated_key))
        given = [path for path in (end, terminated, truncated) if path is not None]
        if len(set(given)) < len(given):
            msg = (
                f"end, terminated and truncated keys must be distinct, got end_key={end_key!r}, terminated_key="
                f"{terminated_key!r} and truncated_key={truncated_key!r}"
            )
            raise OptionError(msg)
        with self._engine.lock:
            for number, member in enumerate(self.members):
                _check_stream(member, number, end)
            filled = [member for member in self.members if len(member.storage)]
            patches = [_ended_row(member, end, terminated, truncated) for member in filled]
            for member, (slot, values) in zip(filled, patches, strict=True):
                member._engine.store.edit_fields(values, slot, swap=False, same=True)  # noqa: SLF001 (one package)

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Give rows new priorities, each in its member; rows of members without priorities are left out.

        Indices, priorities and generations are checked as in `ReplayBuffer.update_priority`; if one check fails, no
        member is changed.

        Args:
            index: a sampled TensorDict, the info of a sample, or the `index` in it, a dict or TensorDict of `index` and
                `buffer_ids`; the first two bring their generation along.
            priority: one for all, or in the shape of the index, `[parts, rows]` or flat; further dimensions are reduced
                per row.
            generation: the sample's `index_generation`.

        Raises:
            PriorityError: for priorities that are negative, NaN or infinite; nothing is changed.
            SlotError: if a row or a member is out of range; nothing is changed.
        """
        with self._engine.lock:
            engines = self._engine.engines
            if not _ranked(engines):
                return
            if priority is None:
                msg = "update_priority() needs the new priorities: update_priority(sample, priority)"
                raise UsageError(msg)
            named = read_names(engines, index, generation)
            values = read_priorities(priority, tuple(named.lead), steps_of_all(engines))
            parts = ((i, given) for i, given in named.parts(priority=values) if engines[i].sampler.prioritized)
            _set(engines, {i: (given["index"], given["priority"], given["generation"]) for i, given in parts})

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities that it has under each member's `priority_key`.

        The key is that of the member the row is of, `"td_error"` where it is a plain `ReplayBuffer`.

        Raises:
            KeyMissingError: if a member's key is missing; nothing is changed.
            PriorityError: for priorities that are negative, NaN or infinite; nothing is changed.
        """
        with self._engine.lock:
            engines = self._engine.engines
            if not _ranked(engines):
                return
            index, ids, generations = _unpack(data, None)
            items = ids.shape[:2]  # rows, or trajectories, whose steps have one priority
            owner = ids.reshape(items.numel(), -1)[:, 0]
            fields: dict[Any, Any] = {name: data.get(name, None) for name in _WINDOWS}
            fields |= {"index": index, "index_generation": generations}
            changes: dict[int, tuple[Any, Any, Any]] = {}
            for i, at in rows_by_owner(check_members(owner, len(engines))).items():
                engine = engines[i]
                if not engine.sampler.prioritized:
                    continue
                path = engine.priority_path or ("td_error",)
                key = path if len(path) > 1 else path[0]
                found = data.get(key, None)
                if found is not None:
                    check_one_each(tuple(found.shape), tuple(ids.shape), steps_of(engine))
                part = {name: value for name, value in {**fields, key: found}.items() if value is not None}
                reduce = as_sampler(engine.sampler).reduce
                changes[i] = priorities_of_batch(part_of(part, at, items), key, reduce, engine.storage.ndim)
            _set(engines, changes)
