"""Group: a fixed number of members that are selected like the items of a list; the base class of ensembles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch

from ostinato.errors import CheckpointError, KindError, OptionError, SlotError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

T = TypeVar("T")


class Group(ABC, Generic[T]):
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

    @abstractmethod
    def subset(self, chosen: list[int]) -> Self:
        """Return a group of the members at these positions."""

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
        if isinstance(index, tuple):
            return self._read(*split_index(index))
        chosen = choose(index, len(self.members), type(self))
        if isinstance(chosen, int):
            return self.members[chosen]
        return self if chosen == list(range(len(self.members))) else self.subset(chosen)

    def _read(self, which: Any, rows: tuple[Any, ...]) -> Any:
        """Return what an index of members and of their rows selects; without rows, the members."""
        if rows:
            msg = (
                f"Tuple of length greater than 1 are not accepted to index {self._plural} of type {type(self)}, got "
                f"{(which, *rows)!r}: only storages have rows"
            )
            raise SlotError(msg)
        return self[which]

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


def split_index(index: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the index of members, and that of their rows, of a tuple.

    Raises:
        SlotError: if the tuple is empty.
    """
    if not index:
        msg = "an empty tuple names no member: give the number of a member, or a slice"
        raise SlotError(msg)
    return index[0], index[1:]


_TYPES = "Expected an index of type torch.Tensor, range, np.ndarray, int, slice or ellipsis"


def choose(index: Any, count: int, group: type = Group) -> int | list[int]:
    """Return the position, or the positions, that an index selects from `count` members.

    Args:
        index: integers, slices, `...`, and lists, ranges, arrays or tensors of integers.
        count: members.
        group: the class that is indexed, for messages.

    Raises:
        SlotError: if a number is out of range, or none is selected.
        UsageError: for a tensor of more than one dimension.
        KindError: for other indices.
    """
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return _checked(list(range(count))[index], index, count)
    if isinstance(index, list | range | np.ndarray | torch.Tensor):
        found = index if isinstance(index, torch.Tensor) else torch.as_tensor(np.asarray(index), device="cpu")
        if found.ndim > 1:
            msg = (
                f"Cannot index a {group} with tensor indices that have more than one dimension, got shape "
                f"{list(found.shape)}: use one of shape [n]"
            )
            raise UsageError(msg)
        if found.numel() == 0:
            return _checked([], index, count)
        if found.is_floating_point() or found.is_complex():
            msg = f"A floating point index was received when an integer dtype was expected, got {index!r}"
            raise KindError(msg)
        if found.dtype is not torch.bool:
            return (
                _checked([int(found)], index, count)[0] if found.ndim == 0 else _checked(found.tolist(), index, count)
            )
    if isinstance(index, bool) or not hasattr(index, "__index__") or isinstance(index, torch.Tensor | np.ndarray):
        msg = f"{_TYPES}, or a list, of the numbers of members, got {index!r} of type {type(index)} instead."
        raise KindError(msg)
    return _checked([int(index.__index__())], index, count)[0]


def _checked(chosen: list[int], index: Any, count: int) -> list[int]:
    if not chosen or any(not -count <= i < count for i in chosen):
        msg = f"{_TYPES} that names members in [{-count}, {count}), at least one of them, got {index!r}"
        raise SlotError(msg)
    return [i % count for i in chosen]
