"""StorageEnsemble: the storages of a `ReplayBufferEnsemble`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

from ostinato.core.group import Group, choose
from ostinato.errors import KindError
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

    `storages[i]` is a storage, a slice or list selects some of them. `storages[i, rows]` are the rows of one, and
    `storages[:, rows]` is a list of the rows of each, without transforms.

    Raises:
        KindError: if one is not a storage, or for another number of transforms.
        OptionError: if there is none.

    Example:
        >>> from ostinato import LazyTensorStorage, StorageEnsemble
        >>> len(StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(1000)))
        2
    """

    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        super().__init__(storages, Storage)
        if transforms is not None and len(transforms) != len(storages):
            msg = (
                "transforms must have the same length as the storages provided, one entry for each of "
                f"{len(storages)}, got {len(transforms)}"
            )
            raise KindError(msg)
        self.transforms: list[Any] = [None] * len(storages) if transforms is None else list(transforms)

    def __repr__(self) -> str:
        """List the storages."""
        return f"StorageEnsemble({', '.join(map(repr, self.members))})"

    def _read(self, which: Any, rows: tuple[Any, ...]) -> Any:
        """Return the rows of one storage, or a list of the rows of each."""
        if not rows:
            return self[which]
        chosen = choose(which, len(self), type(self))
        index = rows[0] if len(rows) == 1 else rows
        return self.members[chosen][index] if isinstance(chosen, int) else [self.members[i][index] for i in chosen]

    def subset(self, chosen: list[int]) -> Self:
        """Return an ensemble of some of the storages, with their transforms."""
        return type(self)(*(self.members[i] for i in chosen), transforms=[self.transforms[i] for i in chosen])
