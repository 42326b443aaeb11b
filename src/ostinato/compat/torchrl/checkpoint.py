"""Reading what TorchRL 0.14 saved into a buffer of ours, or straight into one of our checkpoints."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ostinato.buffers import ReplayBuffer, TensorDictReplayBuffer
from ostinato.buffers.checkpoint.save import save_state
from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.compat.torchrl.files import Folder, damaged
from ostinato.compat.torchrl.listed import generator_of, read_listed, ring_of
from ostinato.compat.torchrl.parts import batch_size, generator_state, note_the_rest, sampler_of
from ostinato.compat.torchrl.rows import Ring, read_rows
from ostinato.core import kinds
from ostinato.errors import CheckpointError, CheckpointNotFoundError, OptionError
from ostinato.samplers import RandomSampler, Sampler
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage
from ostinato.transforms import Compose
from ostinato.writers import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    import os

    from ostinato.storages import Storage

__all__ = ["ImportReport", "convert_checkpoint", "is_checkpoint", "load_checkpoint"]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was converted."""

    path: str
    """The new directory."""
    storage: str
    """Class of the storage that it loads into."""
    sampler: str
    """Class of the sampler."""
    writer: str
    """Class of the writer."""
    rows: int
    """Rows in it."""
    capacity: int
    """Rows that fit."""
    ndim: int
    """Batch dimensions of the storage."""
    batch_size: int | None
    """Rows that `sample()` gave; None if it was not told."""
    notes: tuple[str, ...]
    """What could not be carried over, in sentences."""


class _Found(NamedTuple):
    """A TorchRL checkpoint in our words."""

    ring: Ring
    state: dict[str, Any]
    sampler: Sampler
    indexed: bool
    notes: tuple[str, ...]


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tell whether a directory looks like one that TorchRL's `rb.dumps` wrote; nothing of it is read.

    Example:
        >>> is_checkpoint(".")
        False
    """
    root = Path(path)
    return (root / "storage" / "storage_metadata.json").is_file() and (root / "buffer_metadata.json").is_file()


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    ndim: int | None = None,
    max_size: int | None = None,
    dim_extend: int | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
    allow_pickle: bool = False,
) -> ReplayBuffer:
    """Return a buffer with what TorchRL 0.14 saved: rows, cursor, priorities, batch size, generator. Copy.

    Rows of a directory that `rb.dumps` wrote may be TensorDicts, trees of tensors or tensors; the writer must be a
    round-robin one, the sampler Random, Prioritized or WithoutReplacement (slice samplers save nothing, and come as
    `RandomSampler`: use `set_sampler`). Of a `ListStorage`, which TorchRL cannot dump, the file of
    `torch.save(rb.state_dict(), file)` is read. Nothing is unpickled, no symbolic link is followed, and sizes are
    compared with those of the files before anything is allocated. TorchRL keeps no checksums: damage within the rows
    cannot be noticed.

    Args:
        path: the directory, or the file.
        ndim: 1 or 2, where shape and cursor do not tell (TorchRL does not save it).
        max_size: capacity of a list storage, which TorchRL does not save; None: as many as there are if it was
            full, else unbounded.
        dim_extend: that of the buffer, which TorchRL does not save; None is `ndim - 1`.
        scratch_dir: keep the rows in a `LazyMemmapStorage` in this directory, not in a `LazyTensorStorage`.
        allow_pickle: unpickle objects of a list storage, which runs whatever code the file brings.

    Returns:
        A `TensorDictReplayBuffer` if rows came from TorchRL's (they then carry their `index`, which is left out here),
        else a `ReplayBuffer`.

    Warns:
        UserWarning: for each thing that could not be carried over.

    Raises:
        CheckpointNotFoundError: if nothing is at the path, or a directory that TorchRL did not write.
        CheckpointError: if a part of the checkpoint has no counterpart here.
        OptionError: if an option is needed, or contradicts the files.
        DamagedFileError: naming the file.
        StorageMemoryError: if there is too little memory, or disk.
    """
    root = Path(path).absolute()
    found = _find(root, ndim, max_size, allow_pickle=allow_pickle)
    ring = found.ring
    storage: Storage
    if root.is_file():
        if scratch_dir is not None:
            msg = f"{root} is of a list storage, which keeps its rows in memory: leave scratch_dir out"
            raise OptionError(msg)
        storage = ListStorage(None if ring.capacity == sys.maxsize else ring.capacity, allow_pickle=allow_pickle)
    elif scratch_dir is None:
        storage = LazyTensorStorage(ring.capacity, ndim=ring.ndim)
    else:
        storage = LazyMemmapStorage(ring.capacity, scratch_dir=Path(scratch_dir), ndim=ring.ndim)
    kind = TensorDictReplayBuffer if found.indexed else ReplayBuffer
    generator = None if found.state["generator"] is None else torch.Generator()
    size = found.state["batch_size"]
    rb = kind(storage=storage, sampler=found.sampler, batch_size=size, dim_extend=dim_extend, generator=generator)
    rb.load_state_dict(found.state)
    for note in found.notes:
        warnings.warn(f"{root}: {note}", UserWarning, stacklevel=2)
    return rb


def convert_checkpoint(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    *,
    ndim: int | None = None,
    max_size: int | None = None,
    allow_pickle: bool = False,
) -> ImportReport:
    """Write what TorchRL 0.14 saved as a checkpoint of ours; rows go from file to file, not through memory.

    Args:
        source_path: see `load_checkpoint`.
        save_path: new directory, which appears whole.
        ndim: see `load_checkpoint`.
        max_size: see `load_checkpoint`.
        allow_pickle: see `load_checkpoint`; objects that are no tensors, arrays or plain values are pickled again.

    Raises:
        CheckpointError: as `load_checkpoint`, or the target exists.
        OptionError: as `load_checkpoint`.
        DamagedFileError: naming the file.
        StorageMemoryError: if the disk is too small.
    """
    source, target = Path(source_path).absolute(), Path(save_path).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        msg = f"{target} exists: choose a path that is free"
        raise CheckpointError(msg)
    found = _find(source, ndim, max_size, allow_pickle=allow_pickle)
    save_state(target, found.state, FORMAT)
    storage, sampler, writer = (str(found.state[part]["class"]) for part in ("storage", "sampler", "writer"))
    ring = found.ring
    return ImportReport(
        str(target),
        storage,
        sampler,
        writer,
        ring.rows,
        ring.capacity,
        ring.ndim,
        found.state["batch_size"],
        found.notes,
    )


def _find(root: Path, ndim: int | None, max_size: int | None, *, allow_pickle: bool) -> _Found:
    """Read a checkpoint; the rows of a directory are mapped, not read."""
    if root.is_file():
        if ndim not in {None, 1}:
            msg = f"{root} is of a list storage, which has ndim=1, got ndim={ndim!r}"
            raise OptionError(msg)
        return _find_list(root, max_size, allow_pickle=allow_pickle)
    if not is_checkpoint(root):
        lacking = "it lacks storage/storage_metadata.json" if root.is_dir() else "it does not exist"
        msg = f"{root} is no directory that TorchRL's rb.dumps wrote: {lacking}"
        raise CheckpointNotFoundError(msg)
    if max_size is not None or allow_pickle:
        msg = f"max_size and allow_pickle are for files of list storages, {root} is a directory: leave them out"
        raise OptionError(msg)
    folder = Folder(root)
    stored = read_rows(folder, ndim)
    sampler, sampling = sampler_of(folder, stored.ring)
    options = {"generator": generator_state(folder), "batch_size": batch_size(folder)}
    note_the_rest(folder)
    storage = {"class": "LazyTensorStorage", "state": stored.state}
    state = _state(stored.ring, storage, sampler, sampling, indexed=stored.indexed)
    return _Found(stored.ring, state | options, sampler, stored.indexed, tuple(folder.notes))


def _find_list(path: Path, max_size: int | None, *, allow_pickle: bool) -> _Found:
    saved = read_listed(path, allow_pickle=allow_pickle)
    ring = ring_of(path, saved, max_size)
    items, indexed = saved["items"], False
    if items and all(map(_tells_place, items, range(len(items)))):
        items, indexed = [item.exclude("index") for item in items], True
    kept = {"form": "objects", "items": items, "cursor": ring.cursor, "capacity": ring.capacity}
    storage = {"class": "ListStorage", "state": {**kept, "allow_pickle": allow_pickle}}
    sampler = RandomSampler()
    state = _state(ring, storage, sampler, sampler.state_dict(), indexed=indexed)
    size = saved.get("_batch_size")
    if size is not None and (type(size) is not int or size < 1):
        damaged(path, f"its batch size is {str(size)[:40]}")
    state |= {"generator": generator_of(path, saved), "batch_size": size}
    notes = ["the states of transforms are left out: append the transforms anew"] if saved.get("_transforms") else []
    if ring.capacity == sys.maxsize:
        notes.append(
            "TorchRL does not save how many rows fit into a list storage: it is unbounded, unless max_size says"
        )
    return _Found(ring, state, sampler, indexed, tuple(notes))


def _tells_place(item: Any, place: int) -> bool:
    """Whether a row holds the place that TorchRL's TensorDictReplayBuffer writes into it, and something else."""
    index = kinds.find_field(item, ("index",)) if kinds.is_tensordict(item) and len(item.keys()) > 1 else None
    return isinstance(index, torch.Tensor) and index.dtype is torch.int64 and index.ndim == 0 and int(index) == place


def _state(
    ring: Ring, storage: dict[str, Any], sampler: Sampler, sampling: dict[str, Any], *, indexed: bool
) -> dict[str, Any]:
    """Return the state of a buffer, but for its generator and batch size."""
    writer = TensorDictRoundRobinWriter if indexed else RoundRobinWriter
    return {
        "storage": storage,
        "sampler": {"class": type(sampler).__name__, "state": sampling},
        "writer": {"class": writer.__name__, "state": {}},
        "stamps": {"written": ring.written, "base": ring.written - ring.rows, "cursor": ring.cursor, "array": None},
        "rows_written": ring.written,
        "rows_since_empty": ring.written,
        "rows_drawn": 0,
        "transforms": Compose.of(None).state_dict(),
        "unit": None,
        "pending": [],
    }
