"""The rows of a TorchRL 0.14 checkpoint as the state of a storage of this library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ostinato.core import kinds
from ostinato.durable.ted import Flat2TED
from ostinato.durable.torchrl_files import damaged
from ostinato.errors import CheckpointError, OptionError
from ostinato.storages.tensor import TensorStorage

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.durable.torchrl_files import Folder

_SINGLE = "_-single-tensor-_"


class SavedRing(NamedTuple):
    """The rows of a storage (cells, with `ndim=2`)."""

    ndim: int
    num_envs: int
    capacity: int
    rows: int
    cursor: int
    written: int
    """Number of rows ever written."""


class StoredRows(NamedTuple):
    """The rows of a checkpoint."""

    ring: SavedRing
    state: dict[str, Any]
    """State of an Ostinato storage."""
    indexed: bool
    """Whether the rows come from a TorchRL TensorDictReplayBuffer, which writes the position into each row."""


def read_rows(folder: Folder, ndim: int | None) -> StoredRows:
    """Read `storage/` and `writer/`; arrays are mapped, not read.

    Raises:
        CheckpointError: The storage or writer has no counterpart.
        OptionError: `ndim` is required, or contradicts the files.
        DamagedFileError: A file is damaged.
    """
    if folder.has("storage", "data_indices.json"):
        msg = f"{folder.root} was written from a CompressedListStorage, which has no counterpart in Ostinato"
        raise CheckpointError(msg)
    about = folder.json("storage", "storage_metadata.json")
    path = folder.root / "storage" / "storage_metadata.json"
    rows, tree = about.get("len"), about.get("is_pytree")
    if type(rows) is not int or rows < 0 or not isinstance(tree, bool) or not isinstance(about.get("metadata"), dict):
        damaged(path, f"it must have the number of rows and their kind, got {str(about)[:200]}")
    data = _read_tree(folder, about["metadata"]) if tree else folder.tensordict("storage")
    if not tree and data.batch_dims == 0:
        folder.notes.append("the rows were saved with TED2Flat: they were converted back by Flat2TED with its defaults")
        data = Flat2TED()(data)
    shape = tuple(data.batch_size) if kinds.is_tensordict(data) else _common(data, path)
    ring = _ring(folder, shape, rows, ndim)
    data, indexed = _without_index(data, ring, folder)
    state, rows = TensorStorage(data, ndim=ring.ndim).state_dict(), slice(ring.rows)
    each = {name: len(values) // state["rows"] for name, values in state.get("objects", {}).items()}
    state |= {
        "rows": ring.rows,
        "cursor": ring.cursor,
        "columns": {name: column[rows] for name, column in state["columns"].items()},
        "objects": {name: state["objects"][name][: ring.rows * count] for name, count in each.items()},
    }
    return StoredRows(ring, state, indexed)


def _ring(folder: Folder, shape: tuple[int, ...], rows: int, ndim: int | None) -> SavedRing:
    """Determine `ndim` from shape and cursor, since TorchRL does not save it."""
    path = folder.root / "writer" / "metadata.json"
    about = folder.json("writer", "metadata.json")
    cursor, written = about.get("cursor"), about.get("write_count", 0)
    if "rank_key" in about:
        msg = f"{path} belongs to a TensorDictMaxValueWriter: only checkpoints of round-robin writers are read"
        raise CheckpointError(msg)
    if type(cursor) is not int or type(written) is not int or written < 0:
        damaged(path, f"it must have the cursor and the write count, got {str(about)[:200]}")
    if "generation_shape" in about:
        folder.notes.append("the generations of rows (track_generations) are not converted: Ostinato tracks its own")
    found = {}
    for dims in range(1, len(shape) + 1):
        num_envs = math.prod(shape[1:dims])
        steps, rest = divmod(rows, num_envs) if num_envs else (0, 1)
        if rest == 0 and 0 <= cursor < shape[0] and (steps == shape[0] or steps == cursor):
            found[dims] = SavedRing(
                dims, num_envs, shape[0] * num_envs, rows, cursor * num_envs, max(written * num_envs, rows)
            )
    good = list(found)
    if not good:
        damaged(path, f"cursor {cursor} and {rows} rows contradict the shape {list(shape)} of the storage")
    if ndim is None and len(good) > 1:
        msg = (
            f"{folder.root} may be a storage with ndim={' or ndim='.join(map(str, good))} (its shape is {list(shape)}, "
            "and TorchRL does not save ndim): pass ndim"
        )
        raise OptionError(msg)
    dims = good[0] if ndim is None else ndim
    if dims not in good or dims > 2:
        msg = f"{folder.root} holds a storage with ndim={good[0]}, got ndim={ndim!r}; ndim=1 and ndim=2 can be read"
        raise OptionError(msg)
    return found[dims]


def _without_index(data: Any, ring: SavedRing, folder: Folder) -> tuple[Any, bool]:
    """Remove the field `index` that TorchRL's TensorDictReplayBuffer writes into rows."""
    index = kinds.find_field(data, ("index",)) if kinds.is_tensordict(data) else None
    if not isinstance(index, torch.Tensor) or index.dtype is not torch.int64 or len(data.keys()) < 2:
        return data, False
    steps = ring.rows // ring.num_envs
    places = torch.arange(steps, device="cpu")
    for _ in range(index.ndim - 1):
        places = places.unsqueeze(-1)
    if not bool((index[:steps] == places).all()):
        folder.notes.append("the field 'index' is not the position of the rows: it is kept as data")
        return data, False
    return data.exclude("index"), True


def _read_tree(folder: Folder, entries: dict[str, Any]) -> Any:
    """Read a tree of tensors: a nested dict by the parts of the names, or a single tensor."""
    if set(entries) == {_SINGLE}:
        return folder.array(entries[_SINGLE], "storage", f"{_SINGLE}.memmap")
    root: dict[str, Any] = {}
    numbered = False
    for name, entry in entries.items():
        parts = name.split(".")
        if not folder.has("storage", *parts[:-1], f"{parts[-1]}.memmap") and folder.has("storage", f"{name}.memmap"):
            parts = [name]  # a key that has dots
        numbered = numbered or any(part.isdigit() for part in parts)
        level = root
        for part in parts[:-1]:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                damaged(folder.root / "storage" / "storage_metadata.json", f"{name[:80]!r} is both a tensor and a tree")
        if parts[-1] in level:
            damaged(folder.root / "storage" / "storage_metadata.json", f"{name[:80]!r} appears twice")
        level[parts[-1]] = folder.array(entry, "storage", *parts[:-1], f"{parts[-1]}.memmap")
    if not root:
        damaged(folder.root / "storage" / "storage_metadata.json", "it has no field")
    if numbered:
        folder.notes.append(
            "the rows are a tree with numbers as keys; TorchRL does not save which nodes are lists, tuples or dicts, "
            "so all are loaded as dicts with string keys ('0', '1', ...)"
        )
    return root


def _common(data: Any, path: Path) -> tuple[int, ...]:
    """Return the leading dimensions that all tensors of a tree have in common."""
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(data)]
    shared = list(shapes[0])
    for shape in shapes[1:]:
        same = [one == other for one, other in zip(shared, shape, strict=False)]
        shared = shared[: (same + [False]).index(False)]  # noqa: RUF005
    if not shared:
        damaged(path, f"its tensors have no dimension in common: {shapes[:4]}")
    return tuple(shared)
