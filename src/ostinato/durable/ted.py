"""Save and load hooks for TorchRL's episode data format (TED): a flat layout without duplicates, and nested ones.

In TED, fields of a step are at the root, and fields of the next step under `next`, with done flags and rewards under
`next` only. Within an episode, an observation under `next` equals the observation of the following row. The flat layout
therefore stores the observations of each episode in order, followed by the last next observation: `rows + ends` values.
The nested layouts divide these values into trajectories.
"""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core import kinds
from ostinato.core.kinds import Node, show_path
from ostinato.core.rows import as_bits, describe, same_rows
from ostinato.durable.arrays import DTYPES, dtype_name, jagged, values_of
from ostinato.durable.files import damaged
from ostinato.durable.manifest import decode, encode
from ostinato.errors import CheckpointError, DamagedFileError, KeyMissingError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

__all__ = ["Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested"]

Key: TypeAlias = "str | tuple[str, ...]"
Field: TypeAlias = "tuple[str, ...]"

_SHAPE = ("_storage_shape",)
_BARE = ("_without_root",)
"""Key of the list of flags that have no zeros at the root; absent if all have."""
_NOT_FLAT = "it was not made by TED2Flat with the same keys, or is damaged"
_FLAGS = ("done", "truncated", "terminated")
_REWARDS = ("reward",)
_PREFIX = "traj_"
_NOTES = "_ostinato"
"""Dataset with everything that is no tensor, as JSON."""
_MAX_DEPTH = 100


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
        single = [frozenset(map(_as_path, keys)) for keys in (flags, rewards)]
        return cls(_as_path(done), _as_path(shift), _as_path(is_full), *single)

    @property
    def after(self) -> frozenset[Field]:
        """Fields that the flat layout has from `next` only."""
        return self.flags | self.rewards


class Line(NamedTuple):
    """The order of rows `[steps, *environments]` in the flat layout: by environment, then by time."""

    shape: tuple[int, ...]
    shift: int
    full: bool
    order: Tensor
    """Rows of the data, which are numbered by step, then by environment, in flat order; int64 `[rows]`."""

    @classmethod
    def of(cls, shape: tuple[int, ...], shift: int, *, full: bool, device: torch.device) -> Line:
        """Return the order of data with these dimensions."""
        steps = torch.arange(shape[0], device=device)
        steps = (steps + shift) % shape[0] if full else steps
        num_envs = torch.Size(shape[1:]).numel()
        return cls(
            shape, shift, full, (steps * num_envs + torch.arange(num_envs, device=device).unsqueeze(1)).flatten()
        )

    @classmethod
    def read(cls, fields: Mapping[Field, Tensor], notes: Mapping[Field, Any], keys: Keys) -> tuple[Line, Tensor]:
        """Return the order that `TED2Flat` noted, and which rows end an episode.

        Args:
            fields: in the flat layout.
            notes: its other values.
            keys: of the special fields.

        Raises:
            CheckpointError: There is no order, or there is not one flag for each row.
        """
        shape, shift, full = notes.get(_SHAPE), notes.get(keys.shift), notes.get(keys.is_full)
        shape = (shape,) if type(shape) is int else tuple(shape) if isinstance(shape, (list, tuple)) else ()
        good = shape and all(type(size) is int and 0 < size < 2**40 for size in shape)
        if (
            not good
            or type(shift) is not int
            or not 0 <= shift <= shape[0]
            or not (full is True or (full is False and shift))
        ):
            got = f"{_SHAPE[0]}={shape!r}, {show_path(keys.shift)}={shift!r}, {show_path(keys.is_full)}={full!r}"
            msg = f"the flat layout must contain the order of its rows, got {got}: {_NOT_FLAT}"
            raise CheckpointError(msg)
        done, cells = fields.get(keys.done), math.prod(shape)
        if done is None or done.is_nested or done.numel() != cells:
            got = "nothing" if done is None else "nested ones" if done.is_nested else f"shape {list(done.shape)}"
            msg = f"the flat layout must have {cells} flags {show_path(keys.done)}, got {got}: {_NOT_FLAT}"
            raise CheckpointError(msg)
        line = cls.of(shape, shift, full=full, device=done.device)
        return line, line.ends(done)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return torch.Size(self.shape[1:]).numel()

    def lay(self, value: Tensor) -> Tensor:
        """Return values `[steps, *environments, *F]` in flat order, `[rows, *F]`. Copy."""
        return as_bits(value).flatten(0, len(self.shape) - 1)[self.order].view(value.dtype)

    def spread(self, value: Tensor, places: Tensor | None = None) -> Tensor:
        """Return values of the flat layout as `[steps, *environments, *F]`. Copy.

        Args:
            value: in the flat layout.
            places: position of each row in `value`, for observations, of which rows that were never written become
                zeros; None if there is one value for each row.
        """
        cells = as_bits(value)
        if places is not None:
            cells = cells[places.clamp(max=value.shape[0] - 1)]
        out = torch.empty_like(cells)
        out[self.order] = cells
        if places is not None and not self.full:
            out[~self.written()] = 0
        return out.view(value.dtype).reshape(*self.shape, *value.shape[1:])

    def ends(self, done: Tensor) -> Tensor:
        """Return which rows in flat order end an episode, by their flags: also the newest of each environment."""
        ends = done.detach().bool().reshape(self.num_envs, self.shape[0]).clone()
        ends[:, -1 if self.full else self.shift - 1] = True
        return ends.flatten()

    def written(self) -> Tensor:
        """Return bool `[rows]` in the order of the data: which rows were written."""
        steps = torch.arange(self.shape[0], device=self.order.device)
        return (steps < (self.shape[0] if self.full else self.shift)).repeat_interleave(self.num_envs)

    def check(self, rows: Rows, ends: Tensor, keys: Keys) -> None:
        """Check that the flat layout keeps all values.

        Raises:
            CheckpointError: if it does not; names the field and the number of rows.
        """
        present = self.written()[self.order]
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
        twice = [key for key in after if key not in keys.after]
        for key in (*twice, *(key for key in root if key in keys.after)):
            if key not in root or key not in after or root[key].shape != after[key].shape:
                pair = f"{show_path(key)} and {show_path(('next', *key))}"
                msg = f"the flat layout stores {pair} as one field, but only one of them exists, or their shapes differ"
                raise KeyMissingError(msg)
        done = leaves[[leaf.path for leaf in schema.leaves].index(keys.done)]
        if done.numel() != torch.Size(shape).numel():
            msg = f"{show_path(keys.done)} must be one flag for each row {list(shape)}, got shape {list(done.shape)}"
            raise CheckpointError(msg)
        return cls(shape, root, after, done.bool().reshape(shape), twice)


def leaves_of(data: Any) -> tuple[dict[Field, Tensor], dict[Field, Any]]:
    """Return the tensors of a TensorDict by their paths, and its other values.

    Raises:
        CheckpointError: if it is not a TensorDict.
    """
    if not kinds.is_tensordict(data):
        msg = f"a hook takes the TensorDict returned by its inverse (Flat2TED by TED2Flat), got {type(data).__name__}"
        raise CheckpointError(msg)
    found = kinds.leaves_by_path(data)
    tensors = {path: value for path, value in found.items() if isinstance(value, torch.Tensor)}
    others = {path: value for path, value in found.items() if path not in tensors}
    return tensors, {path: x.data if kinds.is_tensor_collection(x) else x for path, x in others.items()}


def collection(
    fields: Mapping[Field, Tensor], notes: Mapping[Field, Any], device: torch.device, batch: tuple[int, ...] = ()
) -> Any:
    """Return a TensorDict of fields by their paths, and of non-tensor values: the inverse of `leaves_of`."""
    made = kinds.make(Node("tensordict", ()), (), batch, device)
    for path, value in fields.items():
        made.set(path, value)
    for path, note in notes.items():
        made.set_non_tensor(path, note)
    return made


def _places(ends: Tensor) -> Tensor:
    """Return the position of the observation of each row in the flat layout."""
    return torch.arange(ends.shape[0], device=ends.device) + ends.cumsum(0) - ends.long()


def _as_path(key: Any) -> Field:
    """Return a key as a path."""
    flat = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (list, tuple)) else ()
    if not flat or not all(isinstance(part, str) for part in flat):
        msg = f"a key is text or a tuple of text, got {key!r}"
        raise OptionError(msg)
    return flat


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
        out, notes, _, ends = self._flat(data)
        result = collection(out, notes, ends.device)
        return result if path is None else result.memmap_(path)

    def _flat(self, data: Any) -> tuple[dict[Field, Tensor], dict[Field, Any], Line, Tensor]:
        """Return the fields of the flat layout, its other values, the order of rows, and which end an episode."""
        rows = Rows.read(data, self._keys)
        steps = rows.shape[0]
        shift = steps if self.shift is None else int(self.shift)
        full = self.is_full is None or bool(self.is_full)
        if not 0 <= shift <= steps or (not full and shift == 0):
            msg = f"shift must be in [{0 if full else 1}, {steps}] (steps of the data), got {shift}"
            raise OptionError(msg)
        line = Line.of(rows.shape, shift, full=full, device=rows.done.device)
        ends = line.ends(line.lay(rows.done))
        line.check(rows, ends, self._keys)
        first = _places(ends)
        last = first[ends] + 1
        out: dict[Field, Tensor] = {}
        for key in (*rows.root, *(key for key in rows.next if key not in rows.root)):
            if key not in rows.twice:
                out[key] = line.lay((rows.next if key in self._keys.after else rows.root)[key])
                continue
            now, then = line.lay(rows.root[key]), line.lay(rows.next[key])
            out[key] = now.new_empty((now.shape[0] + last.shape[0], *now.shape[1:]))
            as_bits(out[key])[first] = as_bits(now)
            as_bits(out[key])[last] = as_bits(then)[ends]
        notes: dict[Field, Any] = {self._keys.is_full: full, self._keys.shift: shift, _SHAPE: tuple(rows.shape)}
        bare = [list(key) for key in rows.next if key in self._keys.flags and key not in rows.root]
        return out, notes | ({_BARE: bare} if bare else {}), line, ends


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
            out: TensorDict to write the rows to, in place if it has the fields; None creates one.

        Returns:
            A TensorDict `[steps]` or `[steps, *environments]` in the order of the saved ring. Copy.

        Raises:
            CheckpointError: if `data` was not made by `TED2Flat` with the same keys, or is damaged.
        """
        return self._rows(*leaves_of(data), out)

    def _rows(self, fields: Mapping[Field, Tensor], notes: Mapping[Field, Any], out: Any) -> Any:
        """Return the rows of the fields of the flat layout and its other values, written to `out` if it is given."""
        line, ends = Line.read(fields, notes, self._keys)
        shape, cells = line.shape, ends.shape[0]
        first = _places(ends)
        bare = {_as_path(key) for key in notes.get(_BARE) or ()}
        rows: dict[Field, Tensor] = {}
        for key, value in fields.items():
            if value.ndim and value.shape[0] == cells:
                kept = line.spread(value)
                if key in self._keys.flags and key not in bare:
                    rows[key] = torch.zeros_like(kept)
                rows[("next", *key) if key in self._keys.after else key] = kept
            elif value.ndim and value.shape[0] == cells + int(ends.sum()):
                rows[key] = line.spread(value, first)
                rows[("next", *key)] = line.spread(value, first + 1)
            else:
                many = f"{cells} or {cells + int(ends.sum())}"
                msg = f"field {show_path(key)} must hold {many} values, got shape {list(value.shape)}: {_NOT_FLAT}"
                raise CheckpointError(msg)
        made = collection(rows, {}, ends.device, shape)
        return made if out is None else out.update(made, inplace=True)


@final
class TED2Nested(TED2Flat):
    """Save hook that converts rows in TED format to nested tensors, one trajectory after another.

    The values are those of `TED2Flat`; item `i` of a field holds trajectory `i`: one value for each row, of
    observations one more, the last next observation. A trajectory ends at a flag, and where the rows of an environment
    end.

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
        >>> from ostinato import Nested2TED, TED2Nested
        >>> steps = torch.arange(4.0)
        >>> ends = torch.tensor([False, True, False, False])
        >>> rows = TensorDict({"obs": steps, "next": {"obs": steps + 1, "done": ends}}, [4])
        >>> nested = TED2Nested()(rows)
        >>> [item.tolist() for item in nested["obs"].unbind()], [item.tolist() for item in nested["done"].unbind()]
        ([[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]], [[False, True], [False, False]])
        >>> bool((Nested2TED()(nested) == rows).all())
        True
    """

    def __call__(self, data: Any, path: str | Path | None = None) -> Any:
        """Convert rows.

        Args:
            data: TensorDict `[steps, ...]` or `[steps, *environments, ...]`, or a dict of such tensors.
            path: directory for a result that tensordict maps into memory; None keeps the result in memory.

        Returns:
            A TensorDict `[trajectories]` of nested tensors. Copy.

        Raises:
            CheckpointError: if the layout cannot represent the rows; names the field.
            KeyMissingError: if a required field is missing.
        """
        fields, notes, line, ends = self._flat(data)
        last = ends.view(line.num_envs, -1).clone()
        last[:, -1] = True  # rows that were never written are an item of their own, without a next observation
        stops = last.flatten().nonzero().flatten()
        lengths = torch.diff(stops, prepend=stops.new_full((1,), -1))
        nested = {
            key: jagged(value, lengths if value.shape[0] == ends.shape[0] else lengths + ends[stops])
            for key, value in fields.items()
        }
        result = collection(nested, notes, ends.device, (int(lengths.numel()),))
        return result if path is None else _map(result, nested, notes, path)


def _map(result: Any, fields: dict[Field, Tensor], notes: dict[Field, Any], path: str | Path) -> Any:
    """Return a TensorDict whose nested tensors are in files, which tensordict maps into memory."""
    out = collection({}, notes, torch.device("cpu"), tuple(result.batch_size))
    out.memmap_(path)
    for key, value in fields.items():
        items = value.unbind(0)
        sizes = torch.tensor([list(item.shape) for item in items], dtype=torch.int64, device="cpu")
        made = out.make_memmap(key[0] if len(key) == 1 else key, sizes, dtype=value.dtype)
        for target, item in zip(made.unbind(0), items, strict=True):
            target.copy_(item)
    return out


@final
class Nested2TED(Flat2TED):
    """Load hook: the inverse of `TED2Nested`.

    Args:
        done_key: flag that ends an episode, in the nested layout.
        shift_key: key under which `shift` is stored.
        is_full_key: key under which `is_full` is stored.
        done_keys: flags; rows get them under `next`, and zeros at the root if the saved rows had flags there.
        reward_keys: rewards; rows get them under `next`.

    Examples:
        See `TED2Nested`.
    """

    def __call__(self, data: Any, out: Any = None) -> Any:
        """Convert nested tensors to rows.

        Args:
            data: what `TED2Nested` or `H5Combine` returned.
            out: TensorDict to write the rows to; None creates one.

        Returns:
            A TensorDict `[steps]` or `[steps, *environments]` in the order of the saved ring. Copy.

        Raises:
            CheckpointError: if `data` was not made by `TED2Nested` with the same keys, or is damaged.
        """
        found, notes = leaves_of(data)
        return self._rows({key: values_of(value)[0] for key, value in found.items() if value.is_nested}, notes, out)


@final
class H5Split:
    """Save hook that makes one TensorDict for each trajectory of `TED2Nested`, as an HDF5 file has groups.

    The trajectories are under `traj_0`, `traj_1`, ..., with zeros in front so that their order is that of their names.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import H5Combine, H5Split, TED2Nested
        >>> ends = torch.tensor([False, True, False])
        >>> rows = TensorDict({"action": torch.arange(3), "next": {"done": ends}}, [3])
        >>> split = H5Split()(TED2Nested()(rows))
        >>> sorted(key for key in split.keys() if key.startswith("traj_")), split["traj_0", "action"].tolist()
        (['traj_0', 'traj_1'], [0, 1])
        >>> [item.tolist() for item in H5Combine()(split)["action"].unbind()]
        [[0, 1], [2]]
    """

    def __call__(self, data: Any, path: str | Path | None = None) -> Any:  # noqa: ARG002
        """Split nested tensors.

        Args:
            data: what `TED2Nested` returned.
            path: no effect.

        Returns:
            A TensorDict without batch dimensions. The items are views.

        Raises:
            CheckpointError: if `data` was not made by `TED2Nested`.
        """
        found, notes = leaves_of(data)
        fields = [(key, value.unbind(0)) for key, value in found.items() if value.is_nested]
        counts = {len(items) for _, items in fields}
        if len(counts) != 1:
            msg = f"H5Split takes what TED2Nested returned, got nested tensors of {sorted(counts)} items"
            raise CheckpointError(msg)
        count, device = counts.pop(), fields[0][1][0].device
        width = len(str(count - 1))
        split = {(f"{_PREFIX}{i:0{width}}", *key): item for key, items in fields for i, item in enumerate(items)}
        return collection(split, notes, device)


@final
class H5Combine:
    """Load hook: the inverse of `H5Split`."""

    def __call__(self, data: Any, out: Any = None) -> Any:  # noqa: ARG002
        """Join trajectories.

        Args:
            data: what `H5Split` returned.
            out: no effect.

        Returns:
            A TensorDict `[trajectories]` of nested tensors. Copy.

        Raises:
            CheckpointError: if `data` was not made by `H5Split`, or trajectories have different fields.
        """
        found, notes = leaves_of(data)
        split: dict[str, dict[Field, Tensor]] = {}
        for path, value in found.items():
            if path[0].startswith(_PREFIX):
                split.setdefault(path[0], {})[path[1:]] = value
        names = sorted(split)
        parts = [split[name] for name in names]
        if not parts or any(part.keys() != parts[0].keys() for part in parts):
            msg = (
                f"H5Combine takes trajectories with the same fields under {_PREFIX}0, {_PREFIX}1, ..., got {names[:3]}"
            )
            raise CheckpointError(msg)
        fields = {}
        for key in parts[0]:
            items = [part[key] for part in parts]
            if any(not item.ndim or item.shape[1:] != items[0].shape[1:] for item in items):
                msg = f"the trajectories have field {show_path(key)} in different shapes"
                raise CheckpointError(msg)
            lengths = torch.tensor([item.shape[0] for item in items], dtype=torch.int64, device=items[0].device)
            fields[key] = jagged(torch.cat(items), lengths)
        device = next(iter(fields.values())).device if fields else torch.device("cpu")
        return collection(fields, notes, device, (len(parts),))


# -- HDF5 files of nested tensors, through h5py (the extra `h5`); reading follows no links and runs no code ------------


def write_h5(data: Any, options: Mapping[str, Any]) -> bytes:
    """Return an HDF5 file: TensorDicts as groups, tensors as datasets.

    Args:
        data: a TensorDict of tensors and plain values.
        options: arguments of h5py's `create_dataset`, such as `compression`.

    Raises:
        CheckpointError: if a key or a value has no form in the file.
        MissingExtraError: if h5py is not installed.
    """
    h5py = require("h5py", "h5")
    tensors, values = leaves_of(data)
    for path in (*tensors, *values):
        if len(path) > _MAX_DEPTH:
            msg = f"rows nested more than {_MAX_DEPTH} deep cannot be stored in an HDF5 file"
            raise CheckpointError(msg)
        if any(not key or "/" in key or key in {".", _NOTES} for key in path):
            msg = f"field {show_path(path)} cannot be stored in an HDF5 file under this name"
            raise CheckpointError(msg)
    with h5py.File("checkpoint.h5", "w", driver="core", backing_store=False) as file:
        for path, tensor in tensors.items():
            plain = tensor.detach().cpu().contiguous()
            try:
                array = plain.numpy()
            except TypeError:  # NumPy has no such dtype
                array = plain.view(torch.uint8).numpy()
            file.create_dataset("/".join(path), data=array, **options).attrs["dtype"] = dtype_name(plain.dtype)
        _put_notes(file, {"values": [(list(path), value) for path, value in values.items()], "notes": {}})
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _put_notes(file: Any, said: dict[str, Any]) -> None:
    text = json.dumps(encode(said)).encode()
    file.create_dataset(_NOTES, data=np.frombuffer(text, dtype=np.uint8))


def _get_notes(file: Any) -> dict[str, Any]:
    said: dict[str, Any] = decode(json.loads(np.asarray(file[_NOTES][()]).tobytes()))
    return said


def with_notes(raw: bytes, notes: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file of `write_h5` with other notes."""
    h5py = require("h5py", "h5")
    room = io.BytesIO(raw)
    with h5py.File(room, "r+") as file:
        said = _get_notes(file)
        del file[_NOTES]
        _put_notes(file, {**said, "notes": dict(notes)})
    return room.getvalue()


def read_h5(raw: bytes | memoryview) -> tuple[Any, dict[str, Any]]:
    """Return the data that `write_h5` was given, and the notes of `with_notes`. Tensors are on the CPU. Copy.

    Raises:
        DamagedFileError: if it is no such file, or contains links, external or virtual data, or other values.
        MissingExtraError: if h5py is not installed.
    """
    h5py = require("h5py", "h5")
    try:
        with h5py.File(io.BytesIO(raw), "r") as file:
            tensors: dict[tuple[str, ...], Tensor] = {}
            _get(h5py, file, (), tensors)
            said = _get_notes(file)
        data = collection(tensors, {tuple(path): value for path, value in said["values"]}, torch.device("cpu"))
        notes: dict[str, Any] = said["notes"]
    except DamagedFileError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        msg = f"this is not an HDF5 file of a checkpoint ({error!r:.200}): it is damaged, or of something else"
        raise DamagedFileError(msg) from error
    return data, notes


def _get(h5py: Any, group: Any, path: tuple[str, ...], tensors: dict[tuple[str, ...], Tensor]) -> None:
    """Read the tensors of a group, and of the groups in it."""
    for name in group:
        here = (*path, name)
        if here == (_NOTES,):
            continue
        if type(group.get(name, getlink=True)) is not h5py.HardLink or len(path) > _MAX_DEPTH:
            damaged("the HDF5 file", f"it has a link at {show_path(here)}, which is not followed")
        item = group[name]
        if isinstance(item, h5py.Group):
            _get(h5py, item, here, tensors)
        else:
            tensors[here] = _tensor(item, here)


def _tensor(item: Any, path: tuple[str, ...]) -> Tensor:
    name = str(item.attrs.get("dtype", ""))
    if name not in DTYPES or item.external or item.is_virtual or item.dtype.kind not in "biufc":
        damaged("the HDF5 file", f"it has other data than rows at {show_path(path)}, {item!r}")
    tensor, dtype = torch.from_numpy(np.ascontiguousarray(item[()])), DTYPES[name]
    if tensor.dtype is dtype:
        return tensor
    if tensor.dtype is not torch.uint8:
        damaged("the HDF5 file", f"it has {show_path(path)} as {tensor.dtype} and {dtype}")
    return tensor.view(dtype)
