"""StorageEnsemble: the storages of a `ReplayBufferEnsemble`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import torch

from ostinato.core.index import Group
from ostinato.durable.progress import BYTES, Progress
from ostinato.errors import KindError, UsageError
from ostinato.storages.base import Storage
from ostinato.storages.checkpoint import check_hook, load_storages, restore_storages, save_storages

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from ostinato.durable.progress import ProgressOption

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

    Examples:
        >>> from ostinato import LazyTensorStorage, StorageEnsemble
        >>> len(StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(1000)))
        2
    """

    laid_out = False
    """Whether rows of its own are laid out: never."""
    shared = False
    """Whether other processes write and read the rows."""

    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        super().__init__(storages, Storage)
        if transforms is not None and len(transforms) != len(storages):
            msg = (
                "transforms must have the same length as the storages provided, one entry for each of "
                f"{len(storages)}, got {len(transforms)}"
            )
            raise KindError(msg)
        self.transforms: list[Any] = [None] * len(storages) if transforms is None else list(transforms)

    def _read(self, chosen: int | list[int], rows: Any) -> Any:
        """Return the rows of one storage, or a list of the rows of each."""
        return self.members[chosen][rows] if isinstance(chosen, int) else [self.members[i][rows] for i in chosen]

    def subset(self, chosen: list[int]) -> Self:
        """Return an ensemble of some of the storages, with their transforms."""
        return type(self)(*(self.members[i] for i in chosen), transforms=[self.transforms[i] for i in chosen])

    # -- rows ----------------------------------------------------------------------------------------------------------

    @property
    def max_size(self) -> int:
        """Sum of the capacities of the storages."""
        return sum(storage.max_size for storage in self.members)

    @property
    def shape(self) -> torch.Size:
        """`(max_size,)`, as in TorchRL: the rows that all storages have room for."""
        return torch.Size((self.max_size,))

    @property
    def ndim(self) -> int:
        """1, as in TorchRL: members count as one dimension. `storages[i].ndim` is that of a storage."""
        return 1

    @property
    def supports_conditional_update(self) -> bool:
        """Whether `update_if_present` can write fields in all storages."""
        return all(storage.supports_conditional_update for storage in self.members)

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether rows of one of the storages may lie in the memory of a tensor."""
        return any(storage.shares_memory(tensor) for storage in self.members)

    def flatten(self) -> Self:
        """Return an ensemble of the flat storages, with their transforms; see `Storage.flatten`."""
        return type(self)(*(storage.flatten() for storage in self.members), transforms=self.transforms)

    def attach(self, buffer: Any) -> None:
        """Do nothing, as `Storage.attach`."""

    def get(self, item: Any) -> list[tuple[int, Any]]:
        """Return rows of several storages, each after the transform of its storage.

        Args:
            item: a TensorDict or dict with the `buffer_ids` (n numbers of storages) and the `index` of each (n indices,
                for example int64 `[n, rows]`).

        Returns:
            For each of the n: the number of the storage, and its rows.
        """
        found = []
        for number, index in zip(item.get("buffer_ids"), item.get("index"), strict=True):
            i = int(number)
            rows, transform = self.members[i].get(index), self.transforms[i]
            found.append((i, rows if transform is None else transform(rows)))
        return found

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:  # noqa: ARG002
        """Raise: rows are written through a storage, `storages[i].set`.

        Raises:
            UsageError: always.
        """
        msg = f"an ensemble has no rows of its own, got {data!r:.60}: write through a storage, ensemble[i]"
        raise UsageError(msg)

    def add(self, data: Any) -> NoReturn:
        """Raise, see `set`."""
        self.set(None, data)

    def extend(self, data: Any) -> NoReturn:
        """Raise, see `set`."""
        self.set(None, data)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Register a function that converts the rows of each storage for a checkpoint; see `TensorStorage`.

        Raises:
            KindError: if it is not callable, or a storage has no fields; no storage has the hook then.
        """
        self._register("save", hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Register a function that converts rows of a checkpoint back, for each storage; see `register_save_hook`."""
        self._register("load", hook)

    def _register(self, when: str, hook: Callable[..., Any]) -> None:
        for storage in self.members:
            check_hook(storage, hook)
        for storage in self.members:
            getattr(storage, f"register_{when}_hook")(hook)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, into all storages or none.

        Raises:
            CheckpointError: if there is another number of storages, or a state does not fit.
        """
        restore_storages(self.states(state), self.members)

    def dumps(self, path: str | os.PathLike[str], *, progress: ProgressOption = None) -> None:
        """Write the rows of all storages to one checkpoint directory; transforms are not saved.

        Args:
            path: a directory that is empty, does not exist, or holds such a checkpoint.
            progress: the bytes done and their total; see `ProgressOption`.

        Raises:
            CheckpointError: if something cannot be saved, or the path holds other things.
            StorageMemoryError: if the disk is too small.
        """
        with Progress(progress, "save", unit=BYTES):
            save_storages(Path(path), self.members)

    def loads(self, path: str | os.PathLike[str], *, progress: ProgressOption = None) -> None:
        """Replace the rows by those that `dumps` wrote, in all storages or none; see `Storage.loads`.

        Raises:
            CheckpointError: if there is another number of storages, or one does not fit.
        """
        with Progress(progress, "load", unit=BYTES):
            load_storages(Path(path), self.members)

    dump = save = dumps
    load = loads
