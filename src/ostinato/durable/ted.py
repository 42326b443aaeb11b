"""TED2Flat and Flat2TED: conversions between TorchRL's episode data format (TED) and a layout without duplicates.

In TED, fields of a step are at the root, and fields of the next step under `next`, with done flags and rewards under
`next` only. Within an episode, an observation under `next` equals the observation of the following row. The flat layout
therefore stores the observations of each episode in order, followed by the last next observation: `rows + ends` values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch

from ostinato.core import kinds
from ostinato.core.kinds import Node, show_path
from ostinato.core.rows import as_bits, describe, same_rows
from ostinato.errors import CheckpointError, KeyMissingError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

__all__ = ["Flat2TED", "TED2Flat"]

Key: TypeAlias = "str | tuple[str, ...]"
Field: TypeAlias = "tuple[str, ...]"

SHAPE = "_storage_shape"
BARE = "_without_root"
"""Key of the list of flags that have no zeros at the root; absent if all have."""
NOT_FLAT = "it was not made by TED2Flat with the same keys, or is damaged"


class Keys(NamedTuple):
    """Keys of special fields; see `TED2Flat`."""

    done: Field
    shift: Field
    is_full: Field
    flags: frozenset[Field]
    rewards: frozenset[Field]

    @classmethod
    def of(cls, done: Key, shift: Key, is_full: Key, flags: Iterable[Key], rewards: Iterable[Key]) -> Keys:
        """Check keys and return them as paths.

        Raises:
            OptionError: if something is not a key, or is text instead of a tuple.
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
    """The order of rows `[steps, *environments]` in the flat layout: by environment, then by time."""

    shape: tuple[int, ...]
    shift: int
    full: bool
    steps: Tensor
    """Steps of the data in the order of time, int64 `[steps]`."""

    @classmethod
    def of(cls, shape: tuple[int, ...], shift: int, *, full: bool, device: torch.device) -> Line:
        """Return the order of data with these dimensions."""
        steps = torch.arange(shape[0], device=device)
        return cls(shape, shift, full, (steps + shift) % shape[0] if full else steps)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return torch.Size(self.shape[1:]).numel()

    def lay(self, value: Tensor) -> Tensor:
        """Return values `[steps, *environments, *F]` in flat order, `[rows, *F]`. Copy."""
        dims = len(self.shape)
        feature = value.shape[dims:]
        ordered = as_bits(value).index_select(0, self.steps).view(value.dtype)
        return ordered.reshape(self.shape[0], self.num_envs, *feature).transpose(0, 1).reshape(-1, *feature)

    def spread(self, value: Tensor, places: Tensor | None, written: Tensor | None = None) -> Tensor:
        """Return values of the flat layout as `[steps, *environments, *F]`. Copy.

        Args:
            value: in the flat layout.
            places: position of each row in `value`; None if there is one value for each row.
            written: bool `[rows]`: rows that were never written become zeros.
        """
        cells = torch.empty_like(self.steps)
        cells[self.steps] = torch.arange(self.shape[0], device=cells.device)  # the position of each step
        own = (cells.unsqueeze(1) + torch.arange(self.num_envs, device=cells.device) * self.shape[0]).flatten()
        places = own if places is None else places[own].clamp_(max=value.shape[0] - 1)
        out = as_bits(value)[places]
        if written is not None and not self.full:
            out[~written] = 0
        return out.view(value.dtype).reshape(*self.shape, *value.shape[1:])

    def written(self) -> Tensor:
        """Return bool `[rows]` in the order of the data: which rows were written."""
        steps = torch.arange(self.shape[0], device=self.steps.device)
        return (steps < (self.shape[0] if self.full else self.shift)).repeat_interleave(self.num_envs)

    def check(self, rows: Rows, ends: Tensor, keys: Keys) -> None:
        """Check that the flat layout keeps all values.

        Raises:
            CheckpointError: if it does not; names the field and the number of rows.
        """
        present = torch.arange(self.shape[0], device=ends.device).repeat(self.num_envs)
        present = present < (self.shape[0] if self.full else self.shift)
        inner = (~ends & present).nonzero().flatten()
        for key in rows.twice:
            then, now = self.lay(rows.next[key])[inner], self.lay(rows.root[key])[inner + 1]
            lost = int((~same_rows([then], [now])).sum()) if inner.numel() else 0
            if lost:
                msg = (
                    f"in {lost} rows field {show_path(('next', *key))} is not {show_path(key)} of the row that "
                    f"follows, although {show_path(keys.done)} does not end the episode, so the flat layout would "
                    "lose it: save these rows without TED2Flat"
                )
                raise CheckpointError(msg)
        for key in rows.root:
            flags = rows.root[key] if key in keys.flags else None
            if key in keys.rewards or (flags is not None and bool(self.lay(flags)[present].any())):
                msg = (
                    f"field {show_path(key)} at the root would be lost, the flat layout keeps the one under 'next' "
                    "only: omit it, or save these rows without TED2Flat"
                )
                raise CheckpointError(msg)


class Rows(NamedTuple):
    """Rows in TED format by field."""

    shape: tuple[int, ...]
    root: dict[Field, Tensor]
    next: dict[Field, Tensor]
    """Keys without `next`."""
    done: Tensor
    """bool `[*shape]`."""
    twice: list[Field]
    """Observations: fields at the root and under `next`."""

    @classmethod
    def read(cls, data: Any, keys: Keys) -> Rows:
        """Separate the fields of rows into those at the root and those under `next`. No copy.

        Raises:
            KeyMissingError: if one field of a pair is missing.
            CheckpointError: if the rows have no named fields, or there is not one flag for each row.
        """
        if not kinds.is_mapping(data):
            msg = f"TED2Flat takes a TensorDict or a dict of rows in TED format, got {type(data).__name__}"
            raise CheckpointError(msg)
        found = kinds.find_field(data, keys.done)
        if found is None:
            msg = f"the rows have no field {show_path(keys.done)}, which marks the ends of episodes: see done_key"
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
                msg = f"the flat layout stores {pair} as one field, but only one of them exists, or their shapes differ"
                raise KeyMissingError(msg)
        done = leaves[[leaf.path for leaf in schema.leaves].index(keys.done)]
        if done.numel() != torch.Size(shape).numel():
            msg = f"{show_path(keys.done)} must be one flag for each row {list(shape)}, got shape {list(done.shape)}"
            raise CheckpointError(msg)
        return cls(shape, root, after, done.bool().reshape(shape), twice)

    def fields(self) -> list[Field]:
        """Return the fields of the flat layout in the order of the data."""
        return [*self.root, *(key for key in self.next if key not in self.root)]


def read_notes(data: Any, keys: Keys) -> tuple[tuple[int, ...], int, bool]:
    """Return the shape, the shift, and whether all rows were written, as `TED2Flat` stored them."""
    shape, shift, full = (read_note(data, key) for key in ((SHAPE,), keys.shift, keys.is_full))
    shape = (shape,) if type(shape) is int else tuple(shape) if isinstance(shape, (list, tuple)) else ()
    good = shape and all(type(size) is int and 0 < size < 2**40 for size in shape) and type(shift) is int
    if not (good and 0 <= shift <= shape[0] and isinstance(full, bool) and (full or shift)):
        got = f"{SHAPE}={shape!r}, {show_path(keys.shift)}={shift!r}, {show_path(keys.is_full)}={full!r}"
        msg = f"the flat layout must contain the order of its rows, got {got}: {NOT_FLAT}"
        raise CheckpointError(msg)
    return shape, shift, full


def read_note(data: Any, path: Field) -> Any:
    """Return a non-tensor value of a TensorDict; None if there is none."""
    for key in path[:-1]:
        data = kinds.find_field(data, (key,))
    return data.get_non_tensor(path[-1], default=None) if kinds.is_tensordict(data) else None


def tensors_of(data: Any, path: Field = ()) -> list[tuple[Field, Tensor]]:
    """Return the tensors of a TensorDict with their paths.

    Raises:
        CheckpointError: if it is not a TensorDict.
    """
    if not kinds.is_tensordict(data):
        msg = f"Flat2TED takes the TensorDict returned by TED2Flat, got {type(data).__name__}"
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
    """Return a TensorDict of fields by their paths, and of non-tensor values."""
    below: dict[str, dict[Field, Tensor]] = {}
    for path, value in fields.items():
        below.setdefault(path[0], {})[path[1:]] = value
    children = [inner[()] if () in inner else collection(inner, {}, device, batch) for inner in below.values()]
    made = kinds.make(Node("tensordict", tuple(below)), children, batch, device)
    for path, note in notes.items():
        made.set_non_tensor(path[0] if len(path) == 1 else path, note)
    return made


def fill(out: Any, rows: dict[Field, Tensor]) -> Any:
    """Write fields to a TensorDict, in place if it has them."""
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


_FLAGS = ("done", "truncated", "terminated")
_REWARDS = ("reward",)


@final
class TED2Flat:
    """Save hook that converts rows in TED format to the flat layout, which stores each observation once.

    Observation fields have `rows + ends` values, all other fields `rows`; flags and rewards are those under `next`. A
    ring is unrolled to the order of time; with time x environments, the environments follow one another. Rows that the
    layout cannot represent raise an error: observations under `next` that differ from the following row within an
    episode (for example after n-step sums), and flags at the root that are set.

    Memory: that of the flat layout. Storages set `shift` and `is_full` before they call the hook; without them, all
    rows are written and in the order of time. Use one hook for each storage.

    Args:
        done_key: flag that ends an episode, bool `[*batch]` or `[*batch, 1]`.
        shift_key: key under which `shift` is stored.
        is_full_key: key under which `is_full` is stored.
        done_keys: flags, without `next`.
        reward_keys: rewards, without `next`.

    Raises:
        OptionError: if `done_keys` or `reward_keys` are text instead of a tuple.
        MissingExtraError: tensordict is not installed (`pip install 'ostinato[tensordict]'`).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import Flat2TED, TED2Flat
        >>> steps = torch.arange(4.0)
        >>> ends = torch.tensor([False, True, False, True])
        >>> rows = TensorDict({"obs": steps, "next": {"obs": steps + 1, "done": ends}}, [4])
        >>> rows["next", "obs"][ends] = -1.0
        >>> flat = TED2Flat()(rows)
        >>> flat["obs"]
        tensor([ 0.,  1., -1.,  2.,  3., -1.])
        >>> bool((Flat2TED()(flat) == rows).all())
        True
    """

    shift: int | None
    """Step after the newest one."""
    is_full: bool | None
    """Whether all steps were written; else only those before `shift`."""

    def __init__(
        self,
        done_key: Key = ("next", "done"),
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
        done_keys: Iterable[Key] = _FLAGS,
        reward_keys: Iterable[Key] = _REWARDS,
    ) -> None:
        kinds.require_tensordict(type(self).__name__, "save the rows without hooks")
        self._keys = Keys.of(done_key, shift_key, is_full_key, done_keys, reward_keys)
        self.shift = self.is_full = None

    def __call__(self, data: Any, path: str | Path | None = None) -> Any:
        """Convert rows.

        Args:
            data: TensorDict `[steps, ...]` or `[steps, *environments, ...]`, or a dict of such tensors.
            path: directory for a result that tensordict maps into memory; None keeps the result in memory.

        Returns:
            A TensorDict without batch dimensions. Copy.

        Raises:
            CheckpointError: if the flat layout cannot represent the rows; names the field.
            KeyMissingError: if a required field is missing.
        """
        rows = Rows.read(data, self._keys)
        steps = rows.shape[0]
        shift = steps if self.shift is None else int(self.shift)
        full = self.is_full is None or bool(self.is_full)
        if not 0 <= shift <= steps or (not full and shift == 0):
            msg = f"shift must be in [{0 if full else 1}, {steps}] (steps of the data), got {shift}"
            raise OptionError(msg)
        line = Line.of(rows.shape, shift, full=full, device=rows.done.device)
        ends = line.lay(rows.done).view(line.num_envs, steps)
        ends[:, -1 if full else shift - 1] = True
        ends = ends.flatten()
        line.check(rows, ends, self._keys)
        first = torch.arange(ends.shape[0], device=ends.device) + ends.cumsum(0) - ends.long()
        last = first[ends] + 1
        out: dict[Field, Tensor] = {}
        for key in rows.fields():
            if key not in rows.twice:
                out[key] = line.lay(rows.next[key] if key in self._keys.flags | self._keys.rewards else rows.root[key])
                continue
            now, then = line.lay(rows.root[key]), line.lay(rows.next[key])
            out[key] = now.new_empty((now.shape[0] + last.shape[0], *now.shape[1:]))
            as_bits(out[key])[first] = as_bits(now)
            as_bits(out[key])[last] = as_bits(then)[ends]
        notes: dict[Field, Any] = {self._keys.is_full: full, self._keys.shift: shift, (SHAPE,): tuple(rows.shape)}
        bare = [list(key) for key in rows.next if key in self._keys.flags and key not in rows.root]
        result = collection(out, notes | ({(BARE,): bare} if bare else {}), ends.device)
        return result if path is None else result.memmap_(path)


@final
class Flat2TED:
    """Load hook: the inverse of `TED2Flat`.

    Args:
        done_key: flag that ends an episode, in the flat layout.
        shift_key: key under which `shift` is stored.
        is_full_key: key under which `is_full` is stored.
        done_keys: flags; rows get them under `next`, and zeros at the root if the saved rows had flags there.
        reward_keys: rewards; rows get them under `next`.

    Raises:
        OptionError: if `done_keys` or `reward_keys` are text instead of a tuple.
        MissingExtraError: tensordict is not installed (`pip install 'ostinato[tensordict]'`).

    Examples:
        See `TED2Flat`.
    """

    def __init__(
        self,
        done_key: Key = "done",
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
        done_keys: Iterable[Key] = _FLAGS,
        reward_keys: Iterable[Key] = _REWARDS,
    ) -> None:
        kinds.require_tensordict(type(self).__name__, "save the rows without hooks")
        self._keys = Keys.of(done_key, shift_key, is_full_key, done_keys, reward_keys)

    def __call__(self, data: Any, out: Any = None) -> Any:
        """Convert the flat layout to rows; observations of steps that were never written are zeros.

        Args:
            data: what `TED2Flat` returned.
            out: TensorDict to write the rows to; None creates one.

        Returns:
            A TensorDict `[steps]` or `[steps, *environments]` in the order of the saved ring. Copy.

        Raises:
            CheckpointError: if `data` was not made by `TED2Flat` with the same keys, or is damaged.
        """
        fields = dict(tensors_of(data))
        shape, shift, full = read_notes(data, self._keys)
        line = Line.of(
            shape, shift, full=full, device=next(iter(fields.values())).device if fields else torch.device("cpu")
        )
        cells = line.num_envs * shape[0]
        ends = fields.get(self._keys.done)
        if ends is None or ends.is_nested or ends.numel() != cells:
            got = "nothing" if ends is None else "nested ones" if ends.is_nested else f"shape {list(ends.shape)}"
            msg = f"the flat layout must have {cells} flags {show_path(self._keys.done)}, got {got}: {NOT_FLAT}"
            raise CheckpointError(msg)
        ends = ends.detach().bool().reshape(line.num_envs, shape[0]).clone()
        ends[:, -1 if full else shift - 1] = True
        ends = ends.flatten()
        first = torch.arange(cells, device=ends.device) + ends.cumsum(0) - ends.long()
        written = line.written()
        bare = {as_path(key) for key in read_note(data, (BARE,)) or ()}
        rows: dict[Field, Tensor] = {}
        for key, value in fields.items():
            if value.ndim and value.shape[0] == cells:
                kept = line.spread(value, None)
                if key in self._keys.flags and key not in bare:
                    rows[key] = torch.zeros_like(kept)
                rows[("next", *key) if key in self._keys.flags | self._keys.rewards else key] = kept
            elif value.ndim and value.shape[0] == cells + int(ends.sum()):
                rows[key] = line.spread(value, first, written)
                rows[("next", *key)] = line.spread(value, first + 1, written)
            else:
                many = f"{cells} or {cells + int(ends.sum())}"
                msg = f"field {show_path(key)} must hold {many} values, got shape {list(value.shape)}: {NOT_FLAT}"
                raise CheckpointError(msg)
        return collection(rows, {}, ends.device, shape) if out is None else fill(out, rows)
