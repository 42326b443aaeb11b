"""StorageEnsemble: the storages of a `ReplayBufferEnsemble`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

from ostinato.core.group import Group
from ostinato.errors import OptionError
from ostinato.storages.base import Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StorageEnsemble"]


@final
class StorageEnsemble(Group[Storage]):
    """The storages of a `ReplayBufferEnsemble`. It has no rows itself; rows are written through its members.

    Args:
        *storages: at least one.
        transforms: for each storage the transform of rows read from it, or None; None for no transforms.

    Raises:
        KindError: if one is not a storage.
        OptionError: if there is none, or another number of transforms.

    Example:
        >>> from ostinato import LazyTensorStorage, StorageEnsemble
        >>> len(StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(1000)))
        2
    """

    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        super().__init__(storages, Storage)
        if transforms is not None and len(transforms) != len(storages):
            msg = f"transforms must hold one entry for each of the {len(storages)} storages, got {len(transforms)}"
            raise OptionError(msg)
        self.transforms: list[Any] = [None] * len(storages) if transforms is None else list(transforms)

    def __repr__(self) -> str:
        """List the storages."""
        return f"StorageEnsemble({', '.join(map(repr, self.members))})"

    def subset(self, chosen: list[int]) -> Self:
        """Return an ensemble of some of the storages, with their transforms."""
        return type(self)(*(self.members[i] for i in chosen), transforms=[self.transforms[i] for i in chosen])
