"""Rows in TED form and the order of their cells in the flat layout: what `ted.py` is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ostinato.core import kinds
from ostinato.core.bits import as_bits, same_rows
from ostinato.core.kinds import Node, show_path
from ostinato.core.rows import describe
from ostinato.errors import CheckpointError, KeyMissingError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = [
    "BARE",
    "NOT_FLAT",
    "SHAPE",
    "Field",
    "Key",
    "Keys",
    "Line",
    "Rows",
    "as_path",
    "collection",
    "fill",
    "read_note",
    "read_notes",
    "tensors_of",
]

Key: TypeAlias = "str | tuple[str, ...]"
Field: TypeAlias = "tuple[str, ...]"

SHAPE = "_storage_shape"
BARE = "_without_root"
"""Key that names the flags that have no partner of zeros at the root; it is there only where one lacks."""
NOT_FLAT = "it does not come from TED2Flat with the same keys, or is damaged"


class Keys(NamedTuple):
    """Which fields mean what; see `TED2Flat`."""

    done: Field
    shift: Field
    is_full: Field
    flags: frozenset[Field]
    rewards: frozenset[Field]

    @classmethod
    def of(cls, done: Key, shift: Key, is_full: Key, flags: Iterable[Key], rewards: Iterable[Key]) -> Keys:
        """Check the keys that a user gave.

        Raises:
            OptionError: for something that is no key, or text where a tuple is due.
        """
        for name, keys in (("done_keys", flags), ("reward_keys", rewards)):
            if isinstance(keys, str):
                msg = f"{name} must be a tuple of keys, got the text {keys!r}: write ({keys!r},)"
                raise OptionError(msg)
        return cls(
            as_path(done),
            as_path(shift),
            as_path(is_full),
            frozenset(map(as_path, flags)),
            frozenset(map(as_path, rewards)),
        )


class Line(NamedTuple):
    """How cells `[steps, *environments]` follow one another when flat: by environment, in the order of time."""

    shape: tuple[int, ...]
    shift: int
    full: bool
    steps: Tensor
    """Step of the data at each place of a line, int64 `[steps]`."""

    @classmethod
    def of(cls, shape: tuple[int, ...], shift: int, *, full: bool, device: torch.device) -> Line:
        """Put the steps of the data in the order of time."""
        steps = torch.arange(shape[0], device=device)
        return cls(shape, shift, full, (steps + shift) % shape[0] if full else steps)

    @property
    def lanes(self) -> int:
        """Environments."""
        return torch.Size(self.shape[1:]).numel()

    def lay(self, value: Tensor) -> Tensor:
        """Return values `[steps, *environments, *F]` in flat order, `[cells, *F]`. Copy."""
        dims = len(self.shape)
        feature = value.shape[dims:]
        ordered = as_bits(value).index_select(0, self.steps).view(value.dtype)
        return ordered.reshape(self.shape[0], self.lanes, *feature).transpose(0, 1).reshape(-1, *feature)

    def spread(self, value: Tensor, places: Tensor | None, written: Tensor | None = None) -> Tensor:
        """Return values from their places in the flat layout as `[steps, *environments, *F]`; None: one for each cell.

        Cells that were never written, where `written` is given, get zeros. Copy.
        """
        cells = torch.empty_like(self.steps)
        cells[self.steps] = torch.arange(self.shape[0], device=cells.device)  # the place in its line of each step
        own = (cells.unsqueeze(1) + torch.arange(self.lanes, device=cells.device) * self.shape[0]).flatten()
        places = own if places is None else places[own].clamp_(max=value.shape[0] - 1)
        out = as_bits(value)[places]
        if written is not None and not self.full:
            out[~written] = 0
        return out.view(value.dtype).reshape(*self.shape, *value.shape[1:])

    def written(self) -> Tensor:
        """Return bool `[cells]`, in the order of the data: which were written."""
        steps = torch.arange(self.shape[0], device=self.steps.device)
        return (steps < (self.shape[0] if self.full else self.shift)).repeat_interleave(self.lanes)

    def check(self, rows: Rows, ends: Tensor, keys: Keys) -> None:
        """Refuse rows that the flat layout would not give back.

        Raises:
            CheckpointError: naming the field and the number of rows.
        """
        present = torch.arange(self.shape[0], device=ends.device).repeat(self.lanes)
        present = present < (self.shape[0] if self.full else self.shift)
        inner = (~ends & present).nonzero().flatten()
        for key in rows.twice:
            then, now = self.lay(rows.next[key])[inner], self.lay(rows.root[key])[inner + 1]
            lost = int((~same_rows([then], [now])).sum()) if inner.numel() else 0
            if lost:
                msg = (
                    f"in {lost} rows field {show_path(('next', *key))} is not {show_path(key)} of the row that "
                    f"follows, though {show_path(keys.done)} does not end the episode there, so the flat layout would "
                    "lose it: save these rows without TED2Flat"
                )
                raise CheckpointError(msg)
        for key in rows.root:
            flags = rows.root[key] if key in keys.flags else None
            if key in keys.rewards or (flags is not None and bool(self.lay(flags)[present].any())):
                msg = (
                    f"field {show_path(key)} at the root would be lost, the flat layout keeps that of 'next' alone: "
                    "leave it out, or save these rows without TED2Flat"
                )
                raise CheckpointError(msg)


class Rows(NamedTuple):
    """Rows in TED form, by field."""

    shape: tuple[int, ...]
    root: dict[Field, Tensor]
    next: dict[Field, Tensor]
    """Without `next` in their keys."""
    done: Tensor
    """bool `[*shape]`."""
    twice: list[Field]
    """Observations: there at the root and under `next`."""

    @classmethod
    def read(cls, data: Any, keys: Keys) -> Rows:
        """Sort the fields of rows into those at the root and those under `next`. No copy.

        Raises:
            KeyMissingError: if one half of a pair is not there.
            CheckpointError: if the rows are no tree, or the flag is not one for each row.
        """
        if not kinds.is_mapping(data):
            msg = f"TED2Flat takes a TensorDict or a dict of rows in TED form, got {type(data).__name__}"
            raise CheckpointError(msg)
        found = kinds.find_field(data, keys.done)
        if found is None:
            msg = (
                f"the rows have no field {show_path(keys.done)}, which tells TED2Flat where episodes end: see done_key"
            )
            raise KeyMissingError(msg)
        lead = (
            len(data.batch_size)
            if kinds.is_tensor_collection(data)
            else max(1, found.ndim - (found.shape[-1:] == (1,)))
        )
        schema = describe(data, lead)
        if schema.objects:
            names = ", ".join(show_path(leaf.path) for leaf in schema.objects)
            msg = f"TED2Flat converts tensors, and the rows have Python objects ({names}): save without hooks"
            raise CheckpointError(msg)
        leaves, shape, *_ = schema.flatten(data, None, lead)
        named = {tuple(map(str, leaf.path)): value for leaf, value in zip(schema.leaves, leaves, strict=True)}
        root = {path: value for path, value in named.items() if path[0] != "next"}
        after = {path[1:]: value for path, value in named.items() if path[0] == "next"}
        twice = [key for key in after if key not in keys.flags | keys.rewards]
        for key in (*twice, *(key for key in root if key in keys.flags | keys.rewards)):
            other = (root if key in twice else after).get(key)
            if other is None or other.shape != (after if key in twice else root)[key].shape:
                pair = f"{show_path(key)} and {show_path(('next', *key))}"
                msg = f"the flat layout keeps {pair} as one, but only one is there, or their shapes differ"
                raise KeyMissingError(msg)
        done = leaves[[leaf.path for leaf in schema.leaves].index(keys.done)]
        if done.numel() != torch.Size(shape).numel():
            msg = f"{show_path(keys.done)} must be one flag for each row {list(shape)}, got shape {list(done.shape)}"
            raise CheckpointError(msg)
        return cls(shape, root, after, done.bool().reshape(shape), twice)

    def fields(self) -> list[Field]:
        """Fields of the flat layout, in the order of the data."""
        return [*self.root, *(key for key in self.next if key not in self.root)]


def read_notes(data: Any, keys: Keys) -> tuple[tuple[int, ...], int, bool]:
    """Return shape, shift and whether all was written, as `TED2Flat` noted them."""
    shape, shift, full = (read_note(data, key) for key in ((SHAPE,), keys.shift, keys.is_full))
    shape = (shape,) if type(shape) is int else tuple(shape) if isinstance(shape, (list, tuple)) else ()
    good = shape and all(type(size) is int and 0 < size < 2**40 for size in shape) and type(shift) is int
    if not (good and 0 <= shift <= shape[0] and isinstance(full, bool) and (full or shift)):
        got = f"{SHAPE}={shape!r}, {show_path(keys.shift)}={shift!r}, {show_path(keys.is_full)}={full!r}"
        msg = f"the flat layout must say how its rows lay, got {got}: {NOT_FLAT}"
        raise CheckpointError(msg)
    return shape, shift, full


def read_note(data: Any, path: Field) -> Any:
    """Return a value of a TensorDict that is no tensor; None where there is none."""
    for key in path[:-1]:
        data = kinds.find_field(data, (key,))
    return data.get_non_tensor(path[-1], default=None) if kinds.is_tensordict(data) else None


def tensors_of(data: Any, path: Field = ()) -> list[tuple[Field, Tensor]]:
    """Return the tensors of a TensorDict with their paths.

    Raises:
        CheckpointError: if it is something else.
    """
    if not kinds.is_tensordict(data):
        msg = f"Flat2TED takes the TensorDict that TED2Flat made, got {type(data).__name__}"
        raise CheckpointError(msg)
    found = []
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            found.append(((*path, str(key)), value))
        elif kinds.is_tensordict(value):
            found += tensors_of(value, (*path, str(key)))
    return found


def collection(
    fields: dict[Field, Tensor], notes: dict[Field, Any], device: torch.device, batch: tuple[int, ...] = ()
) -> Any:
    """Nest fields by their paths, and set values that are no tensors."""
    below: dict[str, dict[Field, Tensor]] = {}
    for path, value in fields.items():
        below.setdefault(path[0], {})[path[1:]] = value
    children = [inner[()] if () in inner else collection(inner, {}, device, batch) for inner in below.values()]
    made = kinds.make(Node("tensordict", tuple(below)), children, batch, device)
    for path, note in notes.items():
        made.set_non_tensor(path[0] if len(path) == 1 else path, note)
    return made


def fill(out: Any, rows: dict[Field, Tensor]) -> Any:
    """Write fields into a TensorDict, in place where it has them."""
    for path, value in rows.items():
        place = out.get(path, None)
        if place is None:
            out.set(path, value)
        else:
            place.copy_(value)
    return out


def as_path(key: Any) -> Field:
    """Return a key as a path."""
    flat = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (list, tuple)) else ()
    if not flat or not all(isinstance(part, str) for part in flat):
        msg = f"a key is text or a tuple of text, got {key!r}"
        raise OptionError(msg)
    return flat
