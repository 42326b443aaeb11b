"""TED2Nested, H5Split and their inverses: the flat layout of episodes with one item for each trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.kinds import Node, show_path
from ostinato.durable.ted import (
    BARE,
    SHAPE,
    Flat2TED,
    Keys,
    TED2Flat,
    collection,
    read_note,
    read_notes,
    tensors_of,
)
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ostinato.durable.ted import Field, Key

__all__ = ["H5Combine", "H5Split", "Nested2TED", "TED2Nested"]

_FLAGS = ("done", "truncated", "terminated")
_REWARDS = ("reward",)
_PREFIX = "traj_"


@final
class TED2Nested:
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

    shift: int | None
    """Step after the newest one; see `TED2Flat`."""
    is_full: bool | None
    """Whether all steps were written; see `TED2Flat`."""

    def __init__(
        self,
        done_key: Key = ("next", "done"),
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
        done_keys: Iterable[Key] = _FLAGS,
        reward_keys: Iterable[Key] = _REWARDS,
    ) -> None:
        kinds.require_tensordict(type(self).__name__, "save the rows without hooks")
        flags, rewards = _listed(done_keys), _listed(reward_keys)
        self._keys = Keys.of(done_key, shift_key, is_full_key, flags, rewards)
        self._flat = TED2Flat(done_key, shift_key, is_full_key, flags, rewards)
        self.shift = self.is_full = None

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
        self._flat.shift, self._flat.is_full = self.shift, self.is_full
        flat = self._flat(data)
        fields = dict(tensors_of(flat))
        shape, shift, full = read_notes(flat, self._keys)
        done = self._keys.done[1:] if self._keys.done[0] == "next" else self._keys.done
        lengths, extra = _trajectories(fields[done], shape, shift, full=full)
        nested = {
            key: _nest(value, lengths if value.shape[0] == fields[done].shape[0] else lengths + extra)
            for key, value in fields.items()
        }
        notes: dict[Field, Any] = {self._keys.is_full: full, self._keys.shift: shift, (SHAPE,): tuple(shape)}
        bare = read_note(flat, (BARE,))
        result = collection(
            nested, notes | ({(BARE,): bare} if bare else {}), fields[done].device, (int(lengths.numel()),)
        )
        return result if path is None else _map(result, nested, path)


def _trajectories(done: Tensor, shape: tuple[int, ...], shift: int, *, full: bool) -> tuple[Tensor, Tensor]:
    """Return the rows of each trajectory of the flat layout, and 1 where a last next observation follows, else 0."""
    ends = done.detach().bool().reshape(-1, shape[0]).clone()
    ends[:, -1 if full else shift - 1] = True
    last = ends.clone()
    last[:, -1] = True  # rows that were never written are an item of their own, without a next observation
    stops = last.flatten().nonzero().flatten()
    return torch.diff(stops, prepend=stops.new_full((1,), -1)), ends.flatten()[stops].long()


def _nest(value: Tensor, lengths: Tensor) -> Tensor:
    """Return a nested tensor of consecutive rows. No copy."""
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    return torch.nested.nested_tensor_from_jagged(value, offsets)


def _flatten(value: Tensor) -> Tensor:
    """Return the rows of a nested tensor, one item after another."""
    if value.layout is torch.jagged:
        return value.values().detach()
    return torch.cat(list(value.unbind(0))).detach()


def _map(result: Any, fields: dict[Field, Tensor], path: str | Path) -> Any:
    """Return a TensorDict whose nested tensors are in files, which tensordict maps into memory."""
    out = collection({}, {}, torch.device("cpu"), tuple(result.batch_size))
    for key, value in result.items():
        if kinds.is_non_tensor(value):
            out.set_non_tensor(key, value.data)
    out.memmap_(path)
    for key, value in fields.items():
        items = value.unbind(0)
        sizes = torch.tensor([list(item.shape) for item in items], dtype=torch.int64, device="cpu")
        made = out.make_memmap(key[0] if len(key) == 1 else key, sizes, dtype=value.dtype)
        for target, item in zip(made.unbind(0), items, strict=True):
            target.copy_(item)
    return out


@final
class Nested2TED:
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

    def __init__(
        self,
        done_key: Key = "done",
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
        done_keys: Iterable[Key] = _FLAGS,
        reward_keys: Iterable[Key] = _REWARDS,
    ) -> None:
        kinds.require_tensordict(type(self).__name__, "save the rows without hooks")
        flags, rewards = _listed(done_keys), _listed(reward_keys)
        self._keys = Keys.of(done_key, shift_key, is_full_key, flags, rewards)
        self._flat = Flat2TED(done_key, shift_key, is_full_key, flags, rewards)

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
        fields = {key: _flatten(value) for key, value in tensors_of(data) if value.is_nested}
        shape, shift, full = read_notes(data, self._keys)
        notes: dict[Field, Any] = {self._keys.is_full: full, self._keys.shift: shift, (SHAPE,): tuple(shape)}
        bare = read_note(data, (BARE,))
        device = next(iter(fields.values())).device if fields else torch.device("cpu")
        return self._flat(collection(fields, notes | ({(BARE,): bare} if bare else {}), device), out=out)


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
        fields = [(key, value.unbind(0)) for key, value in tensors_of(data) if value.is_nested]
        counts = {len(items) for _, items in fields}
        if len(counts) != 1:
            msg = f"H5Split takes what TED2Nested returned, got nested tensors of {sorted(counts)} items"
            raise CheckpointError(msg)
        count, device = counts.pop(), fields[0][1][0].device
        width = len(str(count - 1))
        names = [f"{_PREFIX}{i:0{width}}" for i in range(count)]
        made = [collection({key: items[i] for key, items in fields}, {}, device) for i in range(count)]
        out = kinds.make(Node("tensordict", tuple(names)), made, (), device)
        for key, value in data.items():
            if kinds.is_non_tensor(value):
                out.set_non_tensor(key, value.data)
        return out


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
        if not kinds.is_tensordict(data):
            msg = f"H5Combine takes the TensorDict returned by H5Split, got {type(data).__name__}"
            raise CheckpointError(msg)
        names = sorted(key for key in data.keys() if str(key).startswith(_PREFIX))  # noqa: SIM118
        parts = [dict(tensors_of(data.get(name))) for name in names]
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
            fields[key] = _nest(torch.cat(items), lengths)
        device = next(iter(fields.values())).device if fields else torch.device("cpu")
        joined = collection(fields, {}, device, (len(parts),))
        for key, value in data.items():
            if kinds.is_non_tensor(value):
                joined.set_non_tensor(key, value.data)
        return joined


def _listed(keys: Iterable[Key]) -> Iterable[Key]:
    """Return keys that can be iterated over twice; `Keys.of` refuses text."""
    return keys if isinstance(keys, str) else tuple(keys)
