"""The records that parts of a buffer exchange: where rows are written, what samplers see and draw, plans of batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.core.kinds import show_path
from ostinato.core.rows import as_bits
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, SchemaError, SlotError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable, Starts
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Path, Schema
    from ostinato.core.shared_ring import SharedRing

__all__ = [
    "Column",
    "Draw",
    "Picks",
    "Placement",
    "Plan",
    "Request",
    "Run",
    "View",
    "as_slots",
    "check_slots",
    "fold",
    "next_path",
    "read_plan",
    "require_values",
    "show_plan",
    "turn_plan",
]


class Run(NamedTuple):
    """Rows `skip` to `skip + rows - 1` of a batch go to the slots `(start + i) % capacity`, in order.

    `skip` is above zero only for batches longer than the ring: their first rows would be overwritten by their last ones
    within the same call, so they are not copied.
    """

    start: int
    rows: int
    capacity: int
    skip: int = 0

    def slots(self, device: torch.device | None = None) -> Tensor:
        """Return the slots written, int64 `[rows]`."""
        return ring_range(self.start, self.rows, self.capacity, device)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return one slot for each row of the batch, int64 `[skip + rows]`, skipped rows included."""
        start = (self.start - self.skip) % self.capacity if self.skip else self.start
        return ring_range(start, self.skip + self.rows, self.capacity, device)

    @property
    def total(self) -> int:
        """Number of rows of the batch, skipped ones included."""
        return self.skip + self.rows


class Picks(NamedTuple):
    """Rows `rows[i]` of a batch of `total` go to the slots `slots[i]`; -1 in `kept` marks rows that were not kept."""

    slots: Tensor
    rows: Tensor
    kept: Tensor

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return one slot for each row of the batch, int64 `[total]`, -1 where a row was not kept."""
        return self.kept if device is None else self.kept.to(device)

    @property
    def total(self) -> int:
        """Number of rows of the batch, those not kept included."""
        return int(self.kept.shape[0])


Placement: TypeAlias = Run | Picks


class View(NamedTuple):
    """What a sampler sees of a buffer at the moment of a draw: counts and generations, never data.

    The rows present are in the slots `[0, rows)`.
    """

    rows: int
    capacity: int
    cursor: int
    ring: Ring | SharedRing
    device: torch.device
    episodes: EpisodeTable | None = None
    """The episodes of the rows, if the buffer tracks episodes."""
    starts: Starts | None = None
    """The rows that can be drawn; None means all rows."""

    def require_episodes(self) -> EpisodeTable:
        """Return the episodes, for a unit or sampler that needs them.

        Raises:
            OptionError: if the buffer does not track episodes.
        """
        if self.episodes is None:
            msg = "slices and windows need to know where episodes end: give the buffer episodes=Episodes()"
            raise OptionError(msg)
        return self.episodes


class Draw(NamedTuple):
    """The slots that a sampler drew, int64 `[B]`; with importance `weights` `[B]` from prioritized samplers.

    `generations`, int64 `[B]`, are those of the rows: a later update of their priorities compares them to find rows
    that have been replaced. With `length`, or `lengths` int64 `[B]`, each slot is the first one of a slice of so many
    rows of its episode. If `pad` is not 0, the last row of shorter slices is repeated up to `pad` rows.
    """

    slots: Tensor
    weights: Tensor | None = None
    info: dict[str, Any] | None = None
    generations: Tensor | None = None
    lengths: Tensor | None = None
    pad: int = 0
    length: int = 0

    @property
    def rows_each(self) -> Tensor | int | None:
        """Rows of the slices, one number if all are equal; None if single rows were drawn."""
        return self.length or self.lengths

    def plan(self, schema: Schema, view: View) -> Plan:
        """Return the plan of the batch: the rows drawn, or the rows of the slices that begin there."""
        anchors = self.slots
        if self.length:
            rows, _ = view.require_episodes().window(anchors, 0, self.length - 1)
            return Plan(schema, anchors, rows.view(-1), repeat=self.length)
        lengths = self.lengths
        if lengths is None:
            return Plan(schema, anchors, anchors)
        longest = self.pad or int(lengths.max())
        rows, _ = view.require_episodes().window(anchors, 0, longest - 1)
        steps = torch.arange(longest, device=rows.device)
        inside = steps < lengths[:, None]
        if self.pad:
            padded = rows.gather(1, torch.minimum(steps, lengths[:, None] - 1))
            last = (steps == lengths[:, None] - 1).reshape(-1)
            notes = {("collector", "mask"): inside.reshape(-1)}
            return Plan(schema, anchors, padded.reshape(-1), repeat=longest, last=last, notes=notes)
        owner = torch.arange(lengths.shape[0], device=rows.device).repeat_interleave(lengths)
        return Plan(schema, anchors, rows[inside], owner=owner)


class Request(NamedTuple):
    """Rows of one field for a batch: `slots` int64 `[n]` of the leaf number `leaf`, in the schema's order.

    Where `pick` (bool `[n]`) is True, the row is read from the leaf `other` instead, which has the same dtype and
    shape. Requests that share one slots tensor are cheapest: adjacent fields are then read together.
    """

    leaf: int
    slots: Tensor
    other: int | None = None
    pick: Tensor | None = None


def ring_range(start: int, rows: int, capacity: int, device: torch.device | None = None) -> Tensor:
    """Return `(start + arange(rows)) % capacity`, int64 `[rows]`; the modulo is computed only if the run wraps."""
    stop = start + rows
    if device is None:  # NumPy's range is faster, and ignores torch's default device
        out = torch.from_numpy(np.arange(start, stop, dtype=np.int64))
    else:
        out = torch.arange(start, stop, device=device)
    return out if stop <= capacity else out.remainder_(capacity)


def require_values(tensor: Tensor, what: str) -> None:
    """Check that a tensor has values.

    Raises:
        KindError: if it is on the device meta; `what` names the tensor in the message.
    """
    if tensor.is_meta:
        msg = (
            f"{what} must have values, got a tensor on the device meta: pass device= when you make tensors, since "
            "torch.set_default_device() and `with torch.device(...)` change their default device"
        )
        raise KindError(msg)


def as_slots(slots: Tensor, device: torch.device) -> Tensor:
    """Return slots that a sampler or writer chose as the native extension reads them: int64, contiguous, on `device`.

    Raises:
        KindError: if they are on the device meta.
    """
    require_values(slots, "slots")
    return slots.to(device, torch.int64).contiguous()


def check_slots(slots: Tensor, capacity: int) -> None:
    """Check that slots are in `[0, capacity)`.

    Raises:
        SlotError: if one is outside; the message names the first one.
    """
    bad = (slots < 0) | (slots >= capacity)
    if bad.any():
        at = int(bad.int().argmax())
        msg = f"slot {int(slots[at])} at position {at} is outside [0, {capacity}): nothing has been read or written"
        raise SlotError(msg)


class Column(NamedTuple):
    """One field of a batch of `R` records: the rows to read for it, and how they are combined.

    The rows read are `[R * prod(tail), *shape]`; the field of the batch is `[R, *tail, *shape]`, or `[R, *shape]` with
    `weights`.
    """

    request: Request
    tail: tuple[int, ...] = ()
    """Dimensions between the records and the rows of the field, such as the frames of a stack."""
    weights: Tensor | None = None
    """`[R, tail]`: the field is the sum of the rows, weighted by these."""
    blank: Tensor | None = None
    """bool `[R, *tail]`: True for rows that are replaced by zeros."""
    merge: bool = False
    """Merge `tail` with the first dimension of the rows: `[R, tail * shape[0], *shape[1:]]`."""


class Plan(NamedTuple):
    """The rows that a batch is read from: one gather reads them, and `fold` combines them into fields."""

    schema: Schema
    anchors: Tensor
    """Slots that the sampler drew, int64 `[B]`."""
    records: Tensor
    """Slots of the batch's records, int64 `[R]`; `R` is `B * repeat`."""
    changed: dict[int, Column] = {}  # noqa: RUF012 (never changed in place)
    """Leaves that are not read at the records alone, by their position in the schema."""
    repeat: int = 1
    """Number of records of each anchor, if all have the same number."""
    owner: Tensor | None = None
    """Position of the anchor of each record, int64 `[R]`, ascending, if the numbers differ."""
    last: Tensor | None = None
    """bool `[R]`: True for the last record of each anchor, if records after it are padding."""
    generations: Tensor | None = None
    """Generations of the records, int64 `[R]`, if priorities are updated for each record; else those of the anchors."""
    notes: dict[Any, Tensor] = {}  # noqa: RUF012
    """Values for each record, `[R]`, by name or path: for the info of a sample."""
    fields: dict[str, Tensor] = {}  # noqa: RUF012
    """Fields, `[R]`, that are not stored: for the batch and the info of a sample."""
    elsewhere: dict[Path, Tensor] = {}  # noqa: RUF012
    """Slots, int64 `[R]`, of fields of Python objects that are not read at the records."""

    def with_columns(self, changed: dict[int, Column]) -> Plan:
        """Return the plan with other columns for some leaves."""
        return self._replace(changed={**self.changed, **changed})

    def slots_of(self, position: int) -> Tensor:
        """Return the slots that a leaf is read at."""
        column = self.changed.get(position)
        return self.records if column is None else column.request.slots

    def requests(self) -> list[Request]:
        """Return the rows to read: one request for each leaf of the schema."""
        records, changed = self.records, self.changed
        return [changed[i].request if i in changed else Request(i, records) for i in range(len(self.schema.leaves))]

    def per_record(self, values: Tensor) -> Tensor:
        """Repeat values of the anchors, `[B]`, for their records, `[R]`."""
        if self.owner is not None:
            return values[self.owner]
        return values if self.repeat == 1 else values.repeat_interleave(self.repeat)

    def last_of_each(self) -> Tensor:
        """Return bool `[R]`: True for the last record of each anchor."""
        if self.last is not None:
            return self.last
        if self.owner is not None:
            return torch.cat([self.owner[1:] != self.owner[:-1], torch.ones_like(self.owner[:1], dtype=torch.bool)])
        last = torch.zeros_like(self.records, dtype=torch.bool)
        last.view(-1, self.repeat)[:, -1] = True
        return last

    def first_of_each(self) -> Tensor:
        """Return bool `[R]`: True for the first record of each anchor."""
        if self.owner is not None:
            return torch.cat([torch.ones_like(self.owner[:1], dtype=torch.bool), self.owner[1:] != self.owner[:-1]])
        first = torch.zeros_like(self.records, dtype=torch.bool)
        first.view(-1, self.repeat)[:, 0] = True
        return first

    def find(self, path: Path) -> int | None:
        """Return the position of the leaf at a path, None if there is none."""
        for position, leaf in enumerate(self.schema.leaves):
            if leaf.path == path:
                return position
        return None

    def require(self, path: Path, what: str) -> int:
        """Return the position of the leaf at a path.

        Args:
            path: of the leaf.
            what: the role of the field, for messages.

        Raises:
            KeyMissingError: if there is none.
            KindError: if the field holds Python objects.
        """
        position = self.find(path)
        if position is None and path in {leaf.path for leaf in self.schema.objects}:
            msg = f"{show_path(path)} ({what}) holds Python objects, such as text: name a field of tensors"
            raise KindError(msg)
        if position is None:
            known = ", ".join(show_path(leaf.path) for leaf in self.schema.leaves)
            msg = f"rows have no field {show_path(path)} ({what}); they have {known}: name an existing field"
            raise KeyMissingError(msg)
        return position

    def require_alike(self, first: int, *others: int) -> None:
        """Check that leaves have one dtype and shape.

        Raises:
            SchemaError: if they differ.
        """
        leaves = [self.schema.leaves[position] for position in (first, *others)]
        if len({(leaf.dtype, leaf.shape) for leaf in leaves}) > 1:
            forms = ", ".join(f"{show_path(leaf.path)} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
            msg = f"these fields must have one dtype and shape: {forms}; convert them before writing"
            raise SchemaError(msg)

    def require_absent(self, *names: str) -> None:
        """Check that rows do not have fields of these names, which a unit adds to batches.

        Raises:
            SchemaError: if they have one.
        """
        known = self.schema.paths
        for name in names:
            if (name,) in known:
                msg = f"rows have a field {name!r}, which the unit adds to batches: store it under another name"
                raise SchemaError(msg)

    def slots_read(self) -> Tensor:
        """Return all slots that the batch is read from, int64 `[n]`, with duplicates."""
        parts = {id(column.request.slots): column.request.slots for column in self.changed.values()}
        parts |= {id(slots): slots for slots in self.elsewhere.values()}
        return torch.cat([self.anchors, self.records, *parts.values()])


def show_plan(plan: Plan) -> dict[str, Any]:
    """Return the state of a plan: plain values and tensors, without its schema and anchors. No copy."""
    columns = [
        {
            "position": position,
            **column.request._asdict(),
            **{k: v for k, v in column._asdict().items() if k != "request"},
        }
        for position, column in plan.changed.items()
    ]
    return {
        "records": plan.records,
        "repeat": plan.repeat,
        "owner": plan.owner,
        "last": plan.last,
        "stamps": plan.generations,
        "notes": [[list(key) if isinstance(key, tuple) else key, value] for key, value in plan.notes.items()],
        "fields": [[name, value] for name, value in plan.fields.items()],
        "columns": [{**column, "tail": list(column["tail"])} for column in columns],
    }


def turn_plan(state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
    """Return the state of a plan for rows that have moved: the row of slot `seam` is in slot 0 now."""

    def turned(slots: Tensor) -> Tensor:
        return (slots - seam).remainder_(rows)

    notes = [[key, turned(value) if key == "anchor_index" else value] for key, value in state["notes"]]
    columns = [{**column, "slots": turned(column["slots"])} for column in state["columns"]]
    return {**state, "records": turned(state["records"]), "notes": notes, "columns": columns}


def read_plan(state: dict[str, Any], schema: Schema, anchors: Tensor, rows: int) -> Plan:
    """Return the plan whose state `show_plan` returned. A copy, on the device of the anchors.

    Args:
        state: the state.
        schema: of the rows.
        anchors: slots that were drawn, int64 `[B]`.
        rows: number of rows of the buffer.

    Raises:
        CheckpointError: if it reads rows or fields that do not exist, or its parts do not fit each other.
    """
    device, records = anchors.device, state["records"]
    _check_slots(records, rows)
    count = records.shape[0]
    owner, last, repeat = state["owner"], state["last"], state["repeat"]
    _require(type(repeat) is int and repeat >= 1)
    if owner is None:
        _require(count == repeat * anchors.shape[0])
    else:
        _check_slots(owner, anchors.shape[0])
        _require(owner.shape[0] == count and bool((owner.diff() >= 0).all()))
    _require(last is None or (last.dtype is torch.bool and last.shape == (count,)))
    stamps = state["stamps"]
    _require(stamps is None or (stamps.dtype is torch.int64 and stamps.shape == (count,)))
    named = [*state["notes"], *state["fields"]]
    _require(all(value.shape[:1] == (count,) for _, value in named))
    changed = {column["position"]: _read_column(column, schema, count, rows, device) for column in state["columns"]}
    _require(all(type(i) is int and 0 <= i < len(schema.leaves) for i in changed))
    notes = {tuple(key) if isinstance(key, list) else key: _own(value, device) for key, value in state["notes"]}
    fields = {str(name): _own(value, device) for name, value in state["fields"]}
    parts = (_own(records, device), changed, repeat, _own(owner, device), _own(last, device))
    return Plan(schema, anchors, *parts, _own(stamps, device), notes, fields)


def _read_column(state: dict[str, Any], schema: Schema, records: int, rows: int, device: torch.device) -> Column:
    leaf, other, slots, pick = (state[name] for name in ("leaf", "other", "slots", "pick"))
    tail = tuple(state["tail"])
    _check_slots(slots, rows)
    _require(all(type(size) is int and size >= 1 for size in tail) and slots.shape[0] == records * math.prod(tail))
    known = [i for i in (leaf, other) if i is not None]
    _require(all(type(i) is int and 0 <= i < len(schema.leaves) for i in known))
    _require((other is None) == (pick is None))
    _require(len({(schema.leaves[i].dtype, schema.leaves[i].shape) for i in known}) == 1)
    _require(pick is None or (pick.dtype is torch.bool and pick.shape == slots.shape))
    weights, blank = state["weights"], state["blank"]
    _require(weights is None or (weights.is_floating_point() and weights.shape == (records, *tail) and len(tail) == 1))
    _require(blank is None or (blank.dtype is torch.bool and blank.shape == (records, *tail)))
    request = Request(leaf, _own(slots, device), other, _own(pick, device))
    return Column(request, tail, _own(weights, device), _own(blank, device), bool(state["merge"]))


def _own(value: Any, device: torch.device) -> Any:
    return None if value is None else value.to(device).contiguous().clone()


def _check_slots(slots: Any, rows: int) -> None:
    _require(isinstance(slots, torch.Tensor) and slots.dtype is torch.int64 and slots.ndim == 1)
    _require(not slots.numel() or 0 <= int(slots.min()) <= int(slots.max()) < rows)


def _require(holds: bool) -> None:  # noqa: FBT001
    if not holds:
        msg = "the checkpoint holds a queued draw whose windows do not fit its rows: it is damaged"
        raise CheckpointError(msg)


def fold(plan: Plan, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the fields of a batch from the rows read for its plan. Only weighted and blanked columns are copied."""
    records, out = plan.records.shape[0], list(rows)
    for position, column in plan.changed.items():
        out[position] = _fold(column, out[position], records)
    return out


def _fold(column: Column, rows: Tensor, records: int) -> Tensor:
    if not column.tail:
        return rows
    shape = rows.shape[1:]
    out = rows.view(records, *column.tail, *shape)
    if column.blank is not None:
        as_bits(out)[column.blank] = 0
    if column.weights is not None:
        return _weigh(out, column.weights)
    return out.flatten(1, 2) if column.merge else out


def _weigh(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sums of rows `[R, T, *shape]` with weights `[R, T]`; rows of weight 0 may be infinite."""
    shape = rows.shape[2:]
    native = backend.native
    if native is not None and rows.is_cpu and rows.dtype is weights.dtype:
        out = torch.empty((rows.shape[0], *shape), dtype=rows.dtype, device="cpu")
        single = rows.dtype is torch.float32
        native.weigh_rows(rows.data_ptr(), weights.data_ptr(), *weights.shape, shape.numel(), single, out.data_ptr())
        return out
    spread = weights.view(*weights.shape, *[1] * len(shape)).to(rows.dtype)
    return (rows * spread).masked_fill_(spread == 0, 0).sum(1)


def next_path(path: Path, known: set[Path]) -> Path | None:
    """Return the path of the next step of a field: `("next", *path)`, or `next_` before its last key; None without."""
    nested: Path = ("next", *path)
    if nested in known:
        return nested
    last: Hashable = path[-1] if path else None
    flat: Path = (*path[:-1], f"next_{last}")
    return flat if isinstance(last, str) and flat in known else None
