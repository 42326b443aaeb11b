"""Checkpointers: in which layout the rows of a storage are saved, by TorchRL's names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core import kinds
from ostinato.durable.files import atomic_write, make_directories
from ostinato.durable.progress import BYTES, Progress
from ostinato.durable.ted import (
    Flat2TED,
    H5Combine,
    H5Split,
    Nested2TED,
    TED2Flat,
    TED2Nested,
    read_h5,
    with_notes,
    write_h5,
)
from ostinato.errors import CheckpointError, CheckpointNotFoundError, KindError, UsageError
from ostinato.storages.checkpoint import StorageCheckpointerBase, check_hook, convert_rows, load_states
from ostinato.storages.ensemble import StorageEnsemble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ostinato.durable.progress import ProgressOption
    from ostinato.durable.ted import Key
    from ostinato.storages.base import Storage

__all__ = [
    "CompressedListStorageCheckpointer",
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TensorStorageCheckpointer",
]

_COLUMN = "hooked 0: h5"
"""Name of the column with the bytes of an HDF5 file, as `convert_rows` names it."""


@final
class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Saves the rows as they are, with the hooks that were registered."""


@final
class ListStorageCheckpointer(StorageCheckpointerBase):
    """Saves the objects of a list storage; TorchRL's raises `NotImplementedError`."""


@final
class CompressedListStorageCheckpointer(StorageCheckpointerBase):
    """Saves the compressed rows of a `CompressedListStorage` as they are."""


@final
class StorageEnsembleCheckpointer:
    """Saves the rows of all storages of a `StorageEnsemble` in one checkpoint directory.

    Transforms are not saved.
    """

    @staticmethod
    def dumps(storage: StorageEnsemble, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Write the rows; see `StorageEnsemble.dumps`.

        Raises:
            KindError: if it is not an ensemble.
        """
        _check_ensemble(storage)
        storage.dumps(path, progress=progress)

    @staticmethod
    def loads(storage: StorageEnsemble, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Replace the rows, in all storages or none; see `StorageEnsemble.loads`.

        Raises:
            KindError: if it is not an ensemble.
        """
        _check_ensemble(storage)
        storage.loads(path, progress=progress)


def _check_ensemble(storage: object) -> None:
    if not isinstance(storage, StorageEnsemble):
        msg = f"StorageEnsembleCheckpointer saves a StorageEnsemble, got {type(storage).__name__}"
        raise KindError(msg)


@final
class FlatStorageCheckpointer(StorageCheckpointerBase):
    """Saves rows in TED format with each observation once; see `TED2Flat`, which raises for rows that would be lost.

    Args:
        done_keys: flags, without `next`; None takes `done`, `truncated` and `terminated`.
        reward_keys: rewards, without `next`; None takes `reward`.

    Examples:
        >>> from ostinato import FlatStorageCheckpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), checkpointer=FlatStorageCheckpointer())
        >>> rb.storage.checkpointer
        FlatStorageCheckpointer()
    """

    def __init__(self, done_keys: Iterable[Key] | None = None, reward_keys: Iterable[Key] | None = None) -> None:
        keys = _keys(done_keys, reward_keys)
        self.save_hooks = (TED2Flat(**keys),)
        self.load_hooks = (Flat2TED(**keys),)


@final
class NestedStorageCheckpointer(StorageCheckpointerBase):
    """Saves rows in TED format as nested tensors with an item for each trajectory; see `TED2Nested`.

    Args:
        done_keys: flags, without `next`; None takes `done`, `truncated` and `terminated`.
        reward_keys: rewards, without `next`; None takes `reward`.
    """

    def __init__(self, done_keys: Iterable[Key] | None = None, reward_keys: Iterable[Key] | None = None) -> None:
        keys = _keys(done_keys, reward_keys)
        self.save_hooks = (TED2Nested(**keys),)
        self.load_hooks = (Nested2TED(**keys),)


@final
class H5StorageCheckpointer(StorageCheckpointerBase):
    """Saves rows in TED format as an HDF5 file with a group for each trajectory; needs `pip install 'ostinato[h5]'`.

    `storage.dumps` writes an HDF5 file, which h5py and other programs read. `dumps` of a buffer puts the same bytes
    into its checkpoint. Files are read without following links. Memory while saving: the file, once or twice.

    Args:
        checkpoint_file: name of the file in the directory given to `dumps` of a storage; no effect if the path ends
            with `.h5`, which then is the file.
        done_keys: flags, without `next`; None takes `done`, `truncated` and `terminated`.
        reward_keys: rewards, without `next`; None takes `reward`.
        h5_kwargs: arguments of h5py's `create_dataset`, such as `{"compression": "gzip"}`.
        shift_key: key under which the position of the newest row is stored; see `TED2Nested`.
        is_full_key: key under which it is stored whether the ring is full.
    """

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Iterable[Key] | None = None,
        reward_keys: Iterable[Key] | None = None,
        h5_kwargs: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
    ) -> None:
        keys = {"shift_key": shift_key, "is_full_key": is_full_key, **_keys(done_keys, reward_keys)}
        self.checkpoint_file = checkpoint_file
        self.kwargs: dict[str, Any] = dict(h5_kwargs or {})
        """Arguments of h5py's `create_dataset`."""
        self.save_hooks = (TED2Nested(**keys), H5Split(), partial(_to_h5, self.kwargs))
        self.load_hooks = (_from_h5, H5Combine(), Nested2TED(**keys))

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Add a hook before the file is made; it gets a TensorDict for each trajectory, see `H5Split`."""
        *before, to_file = self.save_hooks
        self.save_hooks = (*before, check_hook(self, hook), to_file)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Add a hook after the file is read; it returns a TensorDict for each trajectory, see `H5Split`."""
        from_file, *after = self.load_hooks
        self.load_hooks = (from_file, check_hook(self, hook), *after)

    def dumps(self, storage: Any, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Write the rows of a storage to an HDF5 file, in place of an older one when it is complete.

        Raises:
            UsageError: if the storage has no rows.
            CheckpointError: if the rows have no HDF5 form.
            StorageMemoryError: if the disk is full.
        """
        if not len(storage):
            msg = "Cannot save a non-initialized storage: an HDF5 file needs rows, write rows first"
            raise UsageError(msg)
        with Progress(progress, "save", unit=BYTES) as bar:
            state = convert_rows(storage.state_dict(), storage, self)
            image = state.pop("columns")[_COLUMN]
            bar.begin(image.nbytes)
            file = self._file(path)
            make_directories(file.parent)
            content = with_notes(image.numpy().tobytes(), {"state": state})
            bar.finish()
            atomic_write(file, content)

    def loads(self, storage: Storage, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Replace the rows of a storage by those of a file that `dumps` wrote.

        Raises:
            CheckpointNotFoundError: if there is no file.
            CheckpointError: if it does not fit this storage; nothing is changed.
            DamagedFileError: if the file is damaged.
        """
        file = self._file(path)
        if not file.is_file():
            msg = f"there is no checkpoint at {file}: give the directory or the file that dumps() has written"
            raise CheckpointNotFoundError(msg)
        with Progress(progress, "load", unit=BYTES) as bar:
            raw = file.read_bytes()
            bar.begin(len(raw))
            state = read_h5(raw)[1].get("state")
            if not isinstance(state, dict) or "hooked" not in state:
                msg = f"{file} holds no rows of a storage: it was written by something else"
                raise CheckpointError(msg)
            load_states([{**state, "columns": {_COLUMN: _as_tensor(raw)}}], [storage], self)

    def _file(self, path: str | Path) -> Path:
        given = Path(path).absolute()
        return given if given.suffix == ".h5" else given / self.checkpoint_file


def _to_h5(options: Mapping[str, Any], data: Any, path: str | Path | None = None) -> Any:  # noqa: ARG001
    """Save hook: the trajectories of `H5Split` as the bytes of an HDF5 file."""
    return {"h5": _as_tensor(write_h5(data, options))}


def _from_h5(data: Any, out: Any = None) -> Any:  # noqa: ARG001
    """Load hook: the inverse of `_to_h5`."""
    raw = kinds.find_field(data, ("h5",))
    if not isinstance(raw, torch.Tensor) or raw.dtype is not torch.uint8:
        msg = "the checkpoint holds no HDF5 file: it was saved with another checkpointer"
        raise CheckpointError(msg)
    return read_h5(raw.numpy().tobytes())[0]


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _keys(done_keys: Iterable[Key] | None, reward_keys: Iterable[Key] | None) -> dict[str, Any]:
    """Return the keys that were given as arguments of the TED hooks."""
    given = {"done_keys": done_keys, "reward_keys": reward_keys}
    return {name: keys if isinstance(keys, str) else tuple(keys) for name, keys in given.items() if keys is not None}
