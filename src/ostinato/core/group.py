"""Group: a fixed number of members that are selected like the items of a list; the base class of ensembles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch

from ostinato.errors import CheckpointError, KindError, OptionError, SlotError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

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
