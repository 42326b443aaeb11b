"""Records that parts exchange: where rows go, what a sampler sees and draws, and the plan of a batch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.core.kinds import show_path
from ostinato.core.rows import as_bits
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, SchemaError, SlotError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from ostinato.core.eligible import EligibleRows
    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Path, Schema
    from ostinato.core.shared_ring import SharedRing


class Run(NamedTuple):
    """Rows `[skip, skip + rows)` of a batch go to the slots `(start + i) % capacity`, in order."""

    start: int
    """Slot of the first row that is written."""
    rows: int
    """Rows that are written."""
    capacity: int
    """Slots of the ring."""
    skip: int = 0
    """Rows that are not written, of a batch longer than the ring: its last rows would overwrite them."""

    def slots(self, device: torch.device | None = None) -> Tensor:
        """Return the slots written, int64 `[rows]`."""
        return ring_range(self.start, self.rows, self.capacity, device)

    def slots_written(self, device: torch.device | None = None) -> Tensor:
        """Return the slots written, int64 `[rows]`; also of a `Picks`."""
        return ring_range(self.start, self.rows, self.capacity, device)

    def of_rows_written(self, values: Tensor) -> Tensor:
        """Return the values of the rows that are written, of values of the batch `[total]`. A *view*."""
        return values[self.skip :]

    @property
    def end(self) -> int:
        """The last slot that is written, plus 1."""
        return min(self.start + self.rows, self.capacity)

    @property
    def cursor(self) -> int:
        """Slot that writing continues at."""
        return (self.start + self.rows) % self.capacity

    def parts(self) -> list[tuple[int, int, int]]:
        """Return the pieces that do not wrap around the end of the ring: first slot, first row, number of rows."""
        first = min(self.rows, self.capacity - self.start)
        pieces = [(self.start, self.skip, first), (0, self.skip + first, self.rows - first)]
        return [piece for piece in pieces if piece[2]]

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return one slot for each row of the batch, int64 `[skip + rows]`, skipped rows included."""
        start = (self.start - self.skip) % self.capacity if self.skip else self.start
        return ring_range(start, self.skip + self.rows, self.capacity, device)

    @property
    def total(self) -> int:
        """Number of rows of the batch, skipped ones included."""
        return self.skip + self.rows


class Picks(NamedTuple):
    """Rows `rows[i]` of a batch of `total` rows go to the slots `slots[i]`; all int64."""

    slots: Tensor
    """`[n]`."""
    rows: Tensor
    """`[n]`."""
    kept: Tensor
    """`[total]`: the slot of each row of the batch, -1 for a row that is not kept."""
    cursor: int | None = None
    """Slot that writing continues at; None is the one after the rows present."""

    def slots_written(self, device: torch.device | None = None) -> Tensor:
        """Return the slots written, int64 `[n]`."""
        return self.slots if device is None else self.slots.to(device)

    def of_rows_written(self, values: Tensor) -> Tensor:
        """Return the values of the rows that are written, of values of the batch `[total]`. Copy."""
        return values[self.rows.to(values.device)]

    @property
    def skip(self) -> int:
        """Rows before the first one that is written: they are not told apart from others that are not kept."""
        return 0

    @property
    def end(self) -> int:
        """The largest slot that is written, plus 1; 0 if none is."""
        return int(self.slots.max()) + 1 if self.slots.shape[0] else 0

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return one slot for each row of the batch, int64 `[total]`, -1 where a row was not kept."""
        return self.kept if device is None else self.kept.to(device)

    @property
    def total(self) -> int:
        """Number of rows of the batch, those not kept included."""
        return int(self.kept.shape[0])


Placement: TypeAlias = Run | Picks
"""The slots of the rows of a batch, as a writer chose them."""


class Stored(Protocol):
    """Reads single fields of rows, for samplers."""

    def field_at(self, slots: Tensor, path: Path) -> Tensor | list[Any]:
        """Return a field of the rows at `slots`, int64 `[n]`. Copy.

        Raises:
            KeyMissingError: if rows lack the field.
            KindError: if there are no fields.
        """


class View(NamedTuple):
    """What samplers and units see of a buffer at the moment of a draw: counts, generations and episodes, never data."""

    rows: int
    """Rows present: the slots `[0, rows)`."""
    capacity: int
    """Slots."""
    cursor: int
    """Slot after the newest row."""
    ring: Ring | SharedRing
    """Generations of the slots."""
    device: torch.device
    """Device of slots."""
    episodes: EpisodeTable | None = None
    """Episodes of the rows; None if the buffer does not track them."""
    starts: EligibleRows | None = None
    """Rows that may be drawn; None stands for all of them."""
    stored: Stored | None = None
    """Stored fields, for a sampler that reads some (`Sampler.reads`); None for others."""
    ends: tuple[Path, ...] = ()
    """Fields that end episodes, if the buffer, its unit or its sampler name some."""
    values: Mapping[str, Tensor] | None = None
    """Numbers of each slot that a `RowValues` keeps, by its name; None without such."""

    def read(self, slots: Tensor, path: Path) -> Tensor | list[Any]:
        """Return one stored field of rows: a tensor `[n, *shape]`, or a list of `n` Python objects. Copy.

        Raises:
            KeyMissingError: if rows lack the field.
            KindError: if the storage has no fields.
        """
        if self.stored is None:
            msg = f"this sampler reads the field {show_path(path)}, and its view has no stored fields"
            raise OptionError(msg)
        return self.stored.field_at(slots, path)

    def allowed(self) -> Tensor | None:
        """Return bool `[rows]`: which rows may be drawn by `starts`; None for all. Cost: O(rows)."""
        return None if self.starts is None else self.starts.allowed(torch.arange(self.rows, device=self.device))

    def require_episodes(self) -> EpisodeTable:
        """Return `episodes`, for a unit or sampler that needs them.

        Raises:
            OptionError: if the buffer does not track episodes.
        """
        if self.episodes is None:
            msg = "slices and windows need to know where episodes end: give the buffer episodes=Episodes()"
            raise OptionError(msg)
        return self.episodes


class Draw(NamedTuple):
    """A draw, from the sampler to the batch: single rows, or slices of episodes if `length` or `lengths` is given.

    Samplers give the fields down to `length`; the buffer adds the others. Queues and checkpoints hold draws.
    """

    slots: Tensor
    """int64 `[B]`: the rows drawn, or the first rows of the slices."""
    weights: Tensor | None = None
    """Importance weights `[B]`, of prioritized samplers."""
    info: dict[str, Any] | None = None
    """Further entries of the info of the sample."""
    generations: Tensor | None = None
    """Generations of the rows, int64 `[B]`: later they tell whether a row has been replaced."""
    lengths: Tensor | None = None
    """Rows of each slice, int64 `[B]`."""
    pad: int = 0
    """If not 0, the last row of each slice is repeated up to this number of rows."""
    length: int = 0
    """Rows of every slice, if all are equally long; else 0."""
    serial: int = 0
    """Number of the last write before the draw."""
    last: bool = False
    """Whether the draw ended an epoch."""
    ring: Ring | SharedRing | None = None
    """The ring that `serial` counts in; a load or another storage brings a new one."""
    sampler: Any = None
    """The sampler that drew; it adds fields to slices."""
    rng: Tensor | None = None
    """State of the buffer's generator before the draw, if it was made ahead: where to go back to if it is dropped."""
    plan: Plan | None = None
    """What slices and units make of the rows drawn; None where each is a record of the batch."""
    dice: Tensor | None = None
    """The random numbers of the unit: with them a draw can be expanded again."""
    held: Any = None
    """The rows at the draw, if it was made ahead; see `ostinato.buffers.drawn_ahead.HeldRows`."""

    @property
    def rows_each(self) -> Tensor | int | None:
        """Rows of the slices, one number if all are equally long; None for single rows."""
        return self.length or self.lengths

    @property
    def records(self) -> Tensor:
        """Slots of the batch's records, int64 `[R]`."""
        return self.slots if self.plan is None else self.plan.records

    @property
    def slots_read(self) -> Tensor:
        """Slots of all rows that the batch is made of, int64 `[n]`."""
        return self.slots if self.plan is None else self.plan.slots_read()

    @property
    def record_info(self) -> dict[str, Any]:
        """`info` of the records of the batch; tensors with one value for each row drawn are repeated."""
        found, rows = self.info or {}, self.slots.shape[0]
        if self.plan is None:
            return found
        alike = {key: getattr(value, "shape", ())[:1] == (rows,) for key, value in found.items()}
        return {key: self.plan.per_record(value) if alike[key] else value for key, value in found.items()}

    def part(self, first: int, last: int) -> Draw:
        """Return the rows `[first, last)` of a draw of single rows that is not expanded yet."""
        parts = (None if values is None else values[first:last] for values in (self.weights, self.generations))
        weights, generations = parts
        return self._replace(slots=self.slots[first:last], weights=weights, generations=generations)

    def per_record(self, values: Tensor) -> Tensor:
        """Repeat values of the rows drawn for the records that they became."""
        return values if self.plan is None else self.plan.per_record(values)


class Request(NamedTuple):
    """The rows of one field to read for a batch.

    Requests that share one slots tensor are cheapest: adjacent fields are read together.
    """

    leaf: int
    """Position of the field among the leaves of the schema."""
    slots: Tensor
    """int64 `[n]`."""


def ring_range(start: int, rows: int, capacity: int, device: torch.device | None = None) -> Tensor:
    """Return `(start + arange(rows)) % capacity`, int64 `[rows]`; the modulo is computed only if the run wraps."""
    stop = start + rows
    if device is None:  # NumPy's range is faster, and has no default device
        out = torch.from_numpy(np.arange(start, stop, dtype=np.int64))
    else:
        out = torch.arange(start, stop, device=device)
    return out if stop <= capacity else out.remainder_(capacity)


def require_values(tensor: Tensor, what: str) -> None:
    """Check that a tensor is not on the device meta, where tensors have no values.

    Raises:
        KindError: naming the tensor by `what`.
    """
    if tensor.is_meta:
        msg = (
            f"{what} must have values, got a tensor on the device meta: name the device of new tensors, since "
            "torch.set_default_device() and `with torch.device(...)` change what they get without"
        )
        raise KindError(msg)


def as_slots(slots: Tensor, device: torch.device) -> Tensor:
    """Return slots that a sampler or writer chose as native code reads them: int64, contiguous, on a device.

    Raises:
        KindError: if they are on the device meta, where tensors have no values.
    """
    require_values(slots, "slots")
    return slots.to(device, torch.int64).contiguous()


def check_slots(slots: Tensor, capacity: int) -> None:
    """Check that slots are in `[0, capacity)`.

    Raises:
        SlotError: naming the first that is not.
    """
    bad = (slots < 0) | (slots >= capacity)
    if bad.any():
        at = int(bad.int().argmax())
        msg = f"slot {int(slots[at])} at position {at} is outside [0, {capacity}): nothing has been read or written"
        raise SlotError(msg)


class Column(NamedTuple):
    """One field of a batch of `R` records: the rows to read, and the arithmetic that follows.

    The rows read are `[R * prod(tail), *shape]`; the field becomes `[R, *tail, *shape]`, or `[R, *shape]` with
    `weights`.
    """

    request: Request
    tail: tuple[int, ...] = ()
    """Dimensions between the records and the rows of the field, such as the frames of a stack."""
    weights: Tensor | None = None
    """`[R, tail]`: factors of the rows, which are then summed."""
    blank: Tensor | None = None
    """bool `[R, *tail]`: rows that are set to zero."""
    merge: bool = False
    """Whether `tail` is merged with the first dimension of the rows: `[R, tail * shape[0], *shape[1:]]`."""
    other: int | None = None
    """Position of another field of the same dtype and shape."""
    pick: Tensor | None = None
    """bool `[R * prod(tail)]`: rows that are read from `other` instead."""

    def fold(self, rows: Tensor, records: int) -> Tensor:
        """Return the field of a batch from the rows read. A view, except for weighted and blanked columns."""
        if not self.tail:
            return rows
        shape = rows.shape[1:]
        out = rows.view(records, *self.tail, *shape)
        if self.blank is not None:
            as_bits(out)[self.blank] = 0
        if self.weights is not None:
            return _weighted_sum(out, self.weights)
        return out.flatten(1, 2) if self.merge else out


class Plan(NamedTuple):
    """How drawn rows become a batch: the result of all index arithmetic, so that one gather and `fold` remain."""

    schema: Schema
    anchors: Tensor
    """Slots that the sampler drew, int64 `[B]`."""
    records: Tensor
    """Slots of the batch's records, int64 `[R]`; `R` is `B * repeat`."""
    changed: dict[int, Column] = {}  # noqa: RUF012 (never changed in place)
    """Leaves that are not simply read at the records, by their position in the schema."""
    repeat: int = 1
    """Records of each anchor, if all anchors have the same number."""
    owner: Tensor | None = None
    """Anchor of each record, int64 `[R]`, ascending, if anchors have different numbers of records."""
    last: Tensor | None = None
    """bool `[R]`: the last record of each anchor, if records after it are padding."""
    generations: Tensor | None = None
    """Generations of the records, int64 `[R]`, if each may get a new priority; None for those of the anchors."""
    notes: dict[Any, Tensor] = {}  # noqa: RUF012
    """Entries `[R]` of the info of a sample, by name or path."""
    fields: dict[str | Path, Tensor] = {}  # noqa: RUF012
    """Fields `[R, *shape]` of the batch and the info that are not stored, by name or path."""
    elsewhere: dict[Path, Tensor] = {}  # noqa: RUF012
    """Slots, int64 `[R]`, of fields of Python objects that are not read at the records."""

    @classmethod
    def of_slices(
        cls, schema: Schema, episodes: EpisodeTable, firsts: Tensor, lengths: Tensor | int, pad: int = 0
    ) -> Plan:
        """Return the plan of slices.

        Args:
            schema: schema of the rows.
            episodes: episodes of the rows.
            firsts: first rows of the slices, int64 `[B]`.
            lengths: rows of each slice, int64 `[B]`, or of every slice.
            pad: if not 0, the last row of each slice is repeated up to this number of rows.
        """
        if isinstance(lengths, int):
            return cls(schema, firsts, episodes.slices(firsts, lengths), repeat=lengths)
        longest = pad or int(lengths.max())
        rows = episodes.slices(firsts, longest).view(firsts.shape[0], longest)
        steps = torch.arange(longest, device=rows.device)
        inside = steps < lengths[:, None]
        if pad:
            padded = rows.gather(1, torch.minimum(steps, lengths[:, None] - 1))
            last = (steps == lengths[:, None] - 1).reshape(-1)
            notes = {("collector", "mask"): inside.reshape(-1)}
            return cls(schema, firsts, padded.reshape(-1), repeat=longest, last=last, notes=notes)
        owner = torch.arange(lengths.shape[0], device=rows.device).repeat_interleave(lengths)
        return cls(schema, firsts, rows[inside], owner=owner)

    def with_columns(self, changed: dict[int, Column]) -> Plan:
        """Return the plan with some columns replaced."""
        return self._replace(changed={**self.changed, **changed})

    def slots_of(self, position: int) -> Tensor:
        """Return the slots that a leaf is read at."""
        column = self.changed.get(position)
        return self.records if column is None else column.request.slots

    def requests(self) -> list[Request]:
        """Return one request for each leaf of the schema, then one for each field that others take rows from.

        Raises:
            SchemaError: if rows are picked from a field of another dtype or shape.
        """
        records, changed = self.records, self.changed
        out = [changed[i].request if i in changed else Request(i, records) for i in range(len(self.schema.leaves))]
        for position, ((leaf, slots), *_, other, pick) in changed.items():
            if other is not None and pick is not None:
                self.require_alike(leaf, other)
                at = slots
                if at.is_cpu:  # a mask would wait for a device
                    out[position], at = Request(leaf, slots[~pick]), slots[pick]
                out.append(Request(other, at))
        return out

    def per_record(self, values: Tensor) -> Tensor:
        """Repeat values of the anchors, `[B]`, for their records, `[R]`."""
        if self.owner is not None:
            return values[self.owner]
        return values if self.repeat == 1 else values.repeat_interleave(self.repeat)

    def last_of_each(self) -> Tensor:
        """Return bool `[R]`: which records are the last ones of their anchors. Shared: do not write to it."""
        if self.last is not None:
            return self.last
        if self.owner is None:
            return flags_at(self.repeat - 1, self.repeat, self.records.shape[0], self.records.device)
        return torch.cat([self.owner[1:] != self.owner[:-1], torch.ones_like(self.owner[:1], dtype=torch.bool)])

    def first_of_each(self) -> Tensor:
        """Return bool `[R]`: which records are the first ones of their anchors. Shared: do not write to it."""
        if self.owner is None:
            return flags_at(0, self.repeat, self.records.shape[0], self.records.device)
        return torch.cat([torch.ones_like(self.owner[:1], dtype=torch.bool), self.owner[1:] != self.owner[:-1]])

    def find(self, path: Path | None) -> int | None:
        """Return the position of the leaf at a path, None if there is none."""
        paths = [leaf.path for leaf in self.schema.leaves]
        return paths.index(path) if path in paths else None

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
            msg = (
                f"the field {show_path(path)} ({what}) is not present in storage, whose rows have {known}: name an "
                "existing field"
            )
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

    def require_read(self, *positions: int | None) -> None:
        """Check that other units read some leaves at other rows at most.

        Raises:
            OptionError: if one computes them.
        """
        for position in positions:
            column = None if position is None else self.changed.get(position)
            if position is not None and column is not None and (column.tail or column.other is not None):
                msg = (
                    f"another unit computes {show_path(self.schema.leaves[position].path)}, which cannot be stacked or "
                    "read at offsets: leave it out of this unit"
                )
                raise OptionError(msg)

    def require_absent(self, *names: str | Path) -> None:
        """Check that rows do not have fields of these names or paths, which a unit adds to batches.

        Raises:
            SchemaError: if they have one.
        """
        known = self.schema.paths
        for name in names:
            path: Path = (name,) if isinstance(name, str) else name
            if path in known:
                msg = (
                    f"rows have a field {show_path(path)}, which the unit adds to batches: store it under another name"
                )
                raise SchemaError(msg)

    def slots_read(self) -> Tensor:
        """Return all slots that the batch is read from, int64 `[n]`."""
        parts = {id(column.request.slots): column.request.slots for column in self.changed.values()}
        parts |= {id(slots): slots for slots in self.elsewhere.values()}
        return torch.cat([self.anchors, self.records, *parts.values()])

    def fold(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the fields of a batch from the rows read. Views, except for weighted and blanked columns."""
        count = len(self.schema.leaves)
        records, out, others = self.records.shape[0], list(rows[:count]), iter(rows[count:])
        for position, column in self.changed.items():
            if column.pick is not None:
                out[position] = _joined(out[position], next(others), column.pick)
            out[position] = column.fold(out[position], records)
        return out

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plan as plain values and tensors, without its schema and anchors; nothing is copied."""
        columns: list[dict[str, Any]] = []
        for position, column in self.changed.items():
            rest = {name: value for name, value in column._asdict().items() if name != "request"}
            columns.append({"position": position, **column.request._asdict(), **rest, "tail": list(column.tail)})
        return {
            "records": self.records,
            "repeat": self.repeat,
            "owner": self.owner,
            "last": self.last,
            "stamps": self.generations,
            "notes": _listed(self.notes),
            "fields": _listed(self.fields),
            "columns": columns,
            "elsewhere": _listed(self.elsewhere),
        }

    @staticmethod
    def turn_state(state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved: the row of slot `i` of `rows` is in slot `(i - seam) % rows` now."""

        def turned(slots: Tensor) -> Tensor:
            return (slots - seam).remainder_(rows)

        return {
            **state,
            "records": turned(state["records"]),
            "notes": [[key, turned(value) if key == "anchor_index" else value] for key, value in state["notes"]],
            "columns": [{**column, "slots": turned(column["slots"])} for column in state["columns"]],
            "elsewhere": [[path, turned(slots)] for path, slots in state["elsewhere"]],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], schema: Schema, anchors: Tensor, rows: int) -> Plan:
        """Return a plan from what `state_dict` returned, by copy, on the device of the anchors.

        Args:
            state: what `state_dict` returned.
            schema: schema of the rows.
            anchors: slots that were drawn, int64 `[B]`.
            rows: rows of the buffer.

        Raises:
            CheckpointError: if the state refers to rows or fields that do not exist, or its parts do not match.
        """
        device, records, generations = anchors.device, state["records"], state["stamps"]
        owner, last, repeat = state["owner"], state["last"], state["repeat"]
        count, leaves = _check_slots(records, rows), len(schema.leaves)
        _require(type(repeat) is int and repeat >= 1)
        if owner is None:
            _require(count == repeat * anchors.shape[0])
        else:
            _require(_check_slots(owner, anchors.shape[0]) == count and bool((owner.diff() >= 0).all()))
        _require(_is_of(last, torch.bool, count) and _is_of(generations, torch.int64, count))
        _require(all(value.shape[:1] == (count,) for name in ("notes", "fields") for _, value in state[name]))
        _require(all(_check_slots(slots, rows) == count for _, slots in state["elsewhere"]))
        _require(
            all(type(column["position"]) is int and 0 <= column["position"] < leaves for column in state["columns"])
        )
        changed = {column["position"]: _read_column(column, schema, count, rows, device) for column in state["columns"]}
        owner, last, generations = (_own(x, device) for x in (owner, last, generations))
        notes, fields, elsewhere = (_named(state[name], device) for name in ("notes", "fields", "elsewhere"))
        records = _own(records, device)
        return cls(schema, anchors, records, changed, repeat, owner, last, generations, notes, fields, elsewhere)


def _read_column(state: dict[str, Any], schema: Schema, records: int, rows: int, device: torch.device) -> Column:
    leaf, other, slots, pick, merge = (state[name] for name in ("leaf", "other", "slots", "pick", "merge"))
    tail, weights, blank = tuple(state["tail"]), state["weights"], state["blank"]
    _require(all(type(size) is int and size >= 1 for size in tail))
    count = _check_slots(slots, rows)
    _require(count == records * math.prod(tail) and _is_of(pick, torch.bool, count))
    known = [i for i in (leaf, other) if i is not None]
    _require(all(type(i) is int and 0 <= i < len(schema.leaves) for i in known) and (other is None) == (pick is None))
    _require(len({(schema.leaves[i].dtype, schema.leaves[i].shape) for i in known}) == 1)
    _require(merge is False or (merge is True and len(tail) == 1 and all(schema.leaves[i].shape for i in known)))
    _require(weights is None or (weights.is_floating_point() and weights.shape == (records, *tail) and len(tail) == 1))
    _require(_is_of(blank, torch.bool, records, *tail))
    weights, blank, pick = (_own(value, device) for value in (weights, blank, pick))
    return Column(Request(leaf, _own(slots, device)), tail, weights, blank, merge, other, pick)


def _listed(named: dict[Any, Tensor]) -> list[list[Any]]:
    """Return tensors by name or path as pairs."""
    return [[list(key) if isinstance(key, tuple) else key, value] for key, value in named.items()]


def _named(pairs: list[list[Any]], device: torch.device) -> dict[Any, Tensor]:
    """Return what `_listed` was of. Copy."""
    return {tuple(key) if isinstance(key, list) else key: _own(value, device) for key, value in pairs}


def _is_of(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> bool:
    """Return whether a tensor, if there is one, has a dtype and shape."""
    return tensor is None or (tensor.dtype is dtype and tensor.shape == shape)


def _own(value: Any, device: torch.device) -> Any:
    return None if value is None else value.to(device).contiguous().clone()


def _check_slots(slots: Any, rows: int) -> int:
    """Return the number of slots, which are all below `rows`."""
    _require(isinstance(slots, torch.Tensor) and slots.dtype is torch.int64 and slots.ndim == 1)
    _require(not slots.numel() or 0 <= int(slots.min()) <= int(slots.max()) < rows)
    return int(slots.shape[0])


def _require(holds: bool) -> None:  # noqa: FBT001
    if not holds:
        msg = "the checkpoint holds a queued draw whose windows do not fit its rows: it is damaged"
        raise CheckpointError(msg)


def _joined(ones: Tensor, others: Tensor, pick: Tensor) -> Tensor:
    """Return the rows of two fields in order, `others` where `pick` is set. Tensors on devices hold a row for each."""
    if ones.is_nested:
        sides, chosen = (ones.unbind(), others.unbind()), pick.tolist()
        rows = iter(sides[0]), iter(sides[1])
        found = [next(rows[i]) for i in chosen] if pick.is_cpu else [sides[p][i] for i, p in enumerate(chosen)]
        lengths = torch.tensor([0, *map(len, found)], dtype=torch.int64, device=pick.device)
        return torch.nested.nested_tensor_from_jagged(torch.cat(found), lengths.cumsum(0))
    if not pick.is_cpu:
        where = pick.view(-1, *[1] * (ones.ndim - 1))
        return torch.where(where, as_bits(others), as_bits(ones)).view(ones.dtype)
    out = torch.empty((pick.shape[0], *ones.shape[1:]), dtype=ones.dtype, pin_memory=ones.is_pinned(), device="cpu")
    as_bits(out)[~pick], as_bits(out)[pick] = as_bits(ones), as_bits(others)
    return out


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of rows `[R, T, *shape]` by weights `[R, T]`; a row of weight 0 may be infinite."""
    shape = rows.shape[2:]
    native = backend.native
    if native is not None and rows.is_cpu and rows.dtype is weights.dtype:
        out = torch.empty((rows.shape[0], *shape), dtype=rows.dtype, device="cpu")
        single = rows.dtype is torch.float32
        native.weigh_rows(rows.data_ptr(), weights.data_ptr(), *weights.shape, shape.numel(), single, out.data_ptr())
        return out
    spread = weights.view(*weights.shape, *[1] * len(shape)).to(rows.dtype)
    return (rows * spread).masked_fill_(spread == 0, 0).sum(1)


@lru_cache(maxsize=32)
def flags_at(first: int, step: int, count: int, device: torch.device) -> Tensor:
    """Return bool `[count]`, True at `first`, `first + step`, and so on. Shared by all callers: do not write to it."""
    with torch.inference_mode(mode=False):
        flags = torch.zeros(count, dtype=torch.bool, device=device)
    flags[first::step] = True
    return flags


def next_path(path: Path, known: set[Path]) -> Path | None:
    """Return the field of the next step of `path`: `("next", *path)`, or `path` with `next_` before its last key."""
    nested: Path = ("next", *path)
    if nested in known:
        return nested
    last: Hashable = path[-1] if path else None
    flat: Path = (*path[:-1], f"next_{last}")
    return flat if isinstance(last, str) and flat in known else None
