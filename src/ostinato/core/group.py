"""Group: a fixed number of members that are selected like the items of a list; the base class of ensembles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch

from ostinato.errors import KindError, OptionError, SlotError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Group", "choose"]

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
            SlotError: if a number is out of range.
            KindError: for other indices.
        """
        chosen = choose(index, len(self.members))
        if isinstance(chosen, int):
            return self.members[chosen]
        return self if chosen == list(range(len(self.members))) else self.subset(chosen)


def choose(index: Any, count: int) -> int | list[int]:
    """Return the position, or the positions, that an index selects from `count` members.

    Raises:
        SlotError: if a number is out of range, or none is selected.
        KindError: for other indices than integers, slices, `...`, and lists, ranges, arrays or tensors of integers.
    """
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return _checked(list(range(count))[index], index, count)
    if isinstance(index, list | range | np.ndarray | torch.Tensor):
        found = index if isinstance(index, torch.Tensor) else torch.as_tensor(np.asarray(index), device="cpu")
        if found.numel() == 0:
            return _checked([], index, count)
        whole = not (found.dtype is torch.bool or found.is_floating_point() or found.is_complex())
        if whole and found.ndim == 0:
            index = int(found)
        elif whole and found.ndim == 1:
            return _checked([int(i) for i in found], index, count)
    if isinstance(index, bool) or not hasattr(index, "__index__") or isinstance(index, torch.Tensor | np.ndarray):
        msg = (
            "members are selected by an integer, a slice, `...`, or a list, range, array or tensor [n] of integers, "
            f"got {index!r}"
        )
        raise KindError(msg)
    return _checked([int(index.__index__())], index, count)[0]


def _checked(chosen: list[int], index: Any, count: int) -> list[int]:
    if not chosen or any(not -count <= i < count for i in chosen):
        msg = f"members must be in [{-count}, {count}), at least one of them, got {index!r}"
        raise SlotError(msg)
    return [i % count for i in chosen]
