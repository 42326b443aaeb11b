"""Indices of users and what they select: rows of a storage (`rb[3]`, `rb[mask]`, `rb[:, 1]`), or members of a group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ostinato.core.records import require_values
from ostinato.errors import CheckpointError, KindError, OptionError, SlotError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence


class Selection(NamedTuple):
    """Selected slots: a `span` if possible, else `slots`; results have the leading dimensions `batch`."""

    span: slice | None
    slots: Tensor
    batch: tuple[int, ...]


_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def select(index: Any, shape: tuple[int, ...], device: torch.device, *, swap: bool = False) -> Selection:
    """Convert an index to slots.

    Args:
        index: int, slice, list, range, int or bool tensor or array of any device, `...`, None, or a tuple of these.
        shape: `(rows,)`, or `(steps, num_envs)` of the rows present.
        device: device of the slots.
        swap: the first two dimensions of the index are environments and steps, in this order.

    Raises:
        SlotError: naming the index and the length, if it is out of range.
        KindError: if it is not an index.
    """
    rows = shape[0]
    if len(shape) == 1:
        if isinstance(index, (int, np.integer)) and not isinstance(index, (bool, np.bool_)):
            at = int(index)
            if not -rows <= at < rows:
                raise SlotError(_range_message(at, rows))
            at %= rows
            return Selection(slice(at, at + 1), _NONE, ())
        if index is ...:
            index = slice(None)
        if isinstance(index, slice):
            plain_index(index)
            span = range(*index.indices(rows))
            return Selection(slice(span.start, max(span.start, span.stop), span.step), _NONE, (len(span),))
    index = plain_index(index)
    if len(shape) == 1 and isinstance(index, Tensor) and index.dtype is not torch.bool:
        return _by_tensor(index, rows, device)
    count = rows if len(shape) == 1 else rows * shape[1]
    grid = torch.arange(count, device="cpu").reshape(shape)
    picked = apply_index(grid.transpose(0, 1) if swap else grid, index)
    return Selection(None, picked.reshape(-1).contiguous().to(device), tuple(picked.shape))


def apply_index(tensor: Tensor, index: Any) -> Tensor:
    """Index a tensor; errors of torch become errors that name the shape.

    Raises:
        SlotError: if it is out of range.
        KindError: if it is not an index.
    """
    try:
        return tensor[index]
    except IndexError as error:
        msg = f"{error}: the rows present have the shape {list(tensor.shape)}"
        raise SlotError(msg) from None
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"rows are chosen by int, slice, tensor, mask or tuple of these, got {index!r} ({error})"
        raise KindError(msg) from None


def is_field(index: Any) -> bool:
    """Whether an index is the name of a field: a str, or a tuple of str."""
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and bool(index) and all(isinstance(key, str) for key in index)


def plain_index(index: Any) -> Any:
    """Convert lists, ranges and arrays in an index to tensors on the CPU; the rest is unchanged."""
    return tuple(map(_plain, index)) if isinstance(index, tuple) else _plain(index)


def _plain(index: Any) -> Any:
    """Convert lists, ranges and arrays to tensors on the CPU; the rest is unchanged."""
    if isinstance(index, Tensor):
        require_values(index, "an index")
        return (
            index if type(index) is Tensor else index.as_subclass(Tensor)
        ).cpu()  # without its class, which rows must not get
    if isinstance(index, slice) and index.step is not None and index.step < 0:
        msg = f"slices of rows have a positive step, got {index!r}: index with a tensor to reverse"
        raise KindError(msg)
    if isinstance(index, (list, range, np.ndarray)):
        try:
            out = torch.as_tensor(np.asarray(index), device="cpu")
        except (TypeError, ValueError) as error:
            msg = f"rows are chosen by int, slice, tensor, mask or tuple of these, got {index!r} ({error})"
            raise KindError(msg) from None
        return out.to(torch.int64) if out.numel() == 0 else out
    return index


def _by_tensor(index: Tensor, rows: int, device: torch.device) -> Selection:
    if index.is_floating_point() or index.is_complex():
        msg = f"an index tensor must hold integers or bools, got {index.dtype}"
        raise KindError(msg)
    slots = index.reshape(-1).to(torch.int64)
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < -rows or high >= rows:
            raise SlotError(_range_message(high if high >= rows else low, rows))
        if low < 0:
            slots = torch.where(slots < 0, slots + rows, slots)
    return Selection(None, slots.contiguous().to(device), tuple(index.shape))


def _range_message(index: int, rows: int) -> str:
    return f"index {index} is out of range for {rows} rows: use an index in [{-rows}, {rows})"


# -- slots -------------------------------------------------------------------------------------------------------------


class Indexing(Protocol):
    """The properties of a storage that its indices depend on."""

    @property
    def ndim(self) -> int:
        """Dimensions of an index: 1, or 2 for `(step, environment)`."""

    @property
    def num_envs(self) -> int:
        """Environments of a storage with `ndim=2`."""

    @property
    def device(self) -> torch.device:
        """Device of the slots."""


class Slots(NamedTuple):
    """An index that names slots: of a ring, or of shards, one number for shard and slot."""

    device: torch.device = torch.device("cpu")
    ndim: int = 1
    num_envs: int = 1


def read_integers(name: str, value: Any) -> Tensor:
    """Return integers of any form as a tensor of any integer dtype, shape and device.

    Raises:
        KindError: naming them by `name`, if they are not integers, or have no values.
    """
    try:
        found = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"{name} is an integer, a list or an integer tensor of any device, got {value!r} ({error})"
        raise KindError(msg) from None
    if found.numel() == 0 and not isinstance(value, Tensor):
        found = found.to(torch.int64)
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        msg = f"{name} must hold integers, got {found.dtype}: pass what extend() or sample() gave"
        raise KindError(msg)
    require_values(found, name)
    return found.detach()


def read_slots(index: Any, storage: Indexing) -> tuple[Tensor, tuple[int, ...]]:
    """Return slots int64 `[n]` on the storage's device, and the shape of the index without coordinates.

    Raises:
        KindError: for an index of another kind or shape.
        SlotError: for an environment out of range.
    """
    if isinstance(index, tuple) and len(index) == storage.ndim:
        parts = tuple(read_integers("an index", part).to(storage.device, torch.int64) for part in index)
        if len({part.shape for part in parts}) > 1:
            msg = f"the parts of an index must have one shape, got {[list(part.shape) for part in parts]}"
            raise KindError(msg)
    else:
        whole = read_integers("an index", index).to(storage.device, torch.int64)
        if storage.ndim == 1:
            parts = (whole,)
        elif whole.ndim == 0 or whole.shape[-1] != storage.ndim:
            msg = (
                f"the index of a storage with ndim={storage.ndim} is a pair (step, environment) or a tensor [..., 2], "
                f"got shape {list(whole.shape)}: pass what extend() or sample() gave"
            )
            raise KindError(msg)
        else:
            parts = tuple(whole.unbind(-1))
    if storage.ndim > 1:
        _check_envs(parts[1], storage.num_envs)
        parts = (torch.where(parts[0] < 0, parts[0], parts[0] * storage.num_envs + parts[1]),)
    return parts[0].reshape(-1).contiguous(), tuple(parts[0].shape)


def as_index(slots: Tensor, storage: Indexing) -> Tensor | tuple[Tensor, Tensor]:
    """Return slots as samples name them: int64 `[n]`; with `ndim=2` the pair `(step, environment)` of these."""
    return slots if storage.ndim == 1 else (slots // storage.num_envs, slots % storage.num_envs)


def _check_envs(envs: Tensor, count: int) -> None:
    if envs.device.type == "cpu" and envs.numel() and not -1 <= int(envs.min()) <= int(envs.max()) < count:
        msg = f"environments must be in [0, {count}), got {int(envs.min())} to {int(envs.max())}"
        raise SlotError(msg)


# -- members of ensembles ----------------------------------------------------------------------------------------------

T = TypeVar("T")


class Group(Generic[T]):
    """Members of one class, numbered from 0. `group[i]` is a member; a slice or list selects a smaller group."""

    def __init__(self, members: Sequence[T], base: type[T]) -> None:
        if not members:
            msg = f"{type(self).__name__} needs at least one {base.__name__}, got none"
            raise OptionError(msg)
        for i, member in enumerate(members):
            if not isinstance(member, base):
                msg = f"{type(self).__name__} holds instances of {base.__name__}, got {type(member).__name__} at {i}"
                raise KindError(msg)
        self.members: tuple[T, ...] = tuple(members)
        self._plural = f"{base.__name__.lower()}s"

    def __repr__(self) -> str:
        """List the members."""
        return f"{type(self).__name__}({', '.join(map(repr, self.members))})"

    def subset(self, chosen: list[int]) -> Self:
        """Return a group of the members at these positions."""
        make: Any = type(self)
        some: Self = make(*(self.members[i] for i in chosen))
        return some

    def __len__(self) -> int:
        """Number of members."""
        return len(self.members)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the members."""
        return iter(self.members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, or a group of the members selected by a slice, list or integer tensor.

        Raises:
            SlotError: if a number is out of range, or for a tuple of more than one index.
            UsageError: for a tensor of more than one dimension.
            KindError: for other indices.
        """
        chosen, rows = choose(index, len(self.members), type(self))
        if rows is not None:
            return self._read(chosen, rows)
        if isinstance(chosen, int):
            return self.members[chosen]
        return self if chosen == list(range(len(self.members))) else self.subset(chosen)

    def _read(self, chosen: int | list[int], rows: Any) -> Any:
        """Return what an index of rows selects of the chosen members."""
        msg = (
            f"Tuple of length greater than 1 are not accepted to index {self._plural} of type {type(self)}, got "
            f"{(chosen, rows)!r}: only storages have rows"
        )
        raise SlotError(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the members by their numbers as text."""
        members: Sequence[Any] = self.members
        return {str(i): member.state_dict() for i, member in enumerate(members)}

    def states(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states in what `state_dict` returned.

        Raises:
            CheckpointError: if it is of another number of members.
        """
        if set(state) != {str(i) for i in range(len(self))}:
            msg = f"the state holds the {self._plural} {sorted(state)}, the ensemble has {len(self)}"
            raise CheckpointError(msg)
        return [state[str(i)] for i in range(len(self))]

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the state of each member to a directory in `path`, named by its number."""
        members: Sequence[Any] = self.members
        for i, member in enumerate(members):
            member.dumps(Path(path) / str(i))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore what `dumps` saved, member by member."""
        members: Sequence[Any] = self.members
        for i, member in enumerate(members):
            member.loads(Path(path) / str(i))


_TYPES = "Expected an index of type torch.Tensor, range, np.ndarray, int, slice or ellipsis"


def choose(index: Any, count: int, group: type) -> tuple[int | list[int], Any]:
    """Return the position, or the positions, that an index selects from `count` members, and the index of their rows.

    Args:
        index: integers, slices, `...`, and lists, ranges, arrays or tensors of integers; or a tuple of one of these and
            what selects rows.
        count: members.
        group: the class that is indexed, for messages.

    Returns:
        The second value is None if the index is of members alone.

    Raises:
        SlotError: if a number is out of range, or none is selected.
        UsageError: for a tensor of more than one dimension.
        KindError: for other indices.
    """
    rows: Any = None
    if isinstance(index, tuple):
        if not index:
            msg = "an empty tuple names no member: give the number of a member, or a slice"
            raise SlotError(msg)
        index, *rest = index
        rows = None if not rest else rest[0] if len(rest) == 1 else tuple(rest)
    if index is Ellipsis:
        return list(range(count)), rows
    if isinstance(index, slice):
        found: Any = list(range(count))[index]
    else:
        found = _numbers(index, group)
    each = found if isinstance(found, list) else [found]
    if not each or any(not -count <= i < count for i in each):
        msg = f"{_TYPES} that names members in [{-count}, {count}), at least one of them, got {index!r}"
        raise SlotError(msg)
    return [i % count for i in found] if isinstance(found, list) else found % count, rows


def _numbers(index: Any, group: type) -> int | list[int]:
    """Return an integer, or the integers of a list, range, array or tensor."""
    if isinstance(index, list | range | np.ndarray | torch.Tensor):
        values = index if isinstance(index, torch.Tensor) else torch.as_tensor(np.asarray(index), device="cpu")
        if values.ndim > 1:
            msg = (
                f"Cannot index a {group} with tensor indices that have more than one dimension, got shape "
                f"{list(values.shape)}: use one of shape [n]"
            )
            raise UsageError(msg)
        if values.numel() and (values.is_floating_point() or values.is_complex()):
            msg = f"A floating point index was received when an integer dtype was expected, got {index!r}"
            raise KindError(msg)
        if not values.numel() or values.dtype is not torch.bool:
            return values.tolist()
    elif not isinstance(index, bool) and hasattr(index, "__index__"):
        return int(index.__index__())
    msg = f"{_TYPES}, or a list, of the numbers of members, got {index!r} of type {type(index)} instead."
    raise KindError(msg)


def check_members(ids: torch.Tensor, count: int, error: type[Exception] = SlotError) -> torch.Tensor:
    """Return the numbers of members, as int64.

    Raises:
        KindError: if they are not integers.
        Exception: `error`, if one is out of range.
    """
    if ids.dtype is torch.bool or ids.is_floating_point() or ids.is_complex():
        msg = f"ReplayBufferEnsemble member ids must be integers, got {ids.dtype}"
        raise KindError(msg)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        msg = f"ReplayBufferEnsemble member ids must lie in [0, {count - 1}], got {int(ids.min())} to {int(ids.max())}"
        raise error(msg)
    return ids.to(torch.int64)
