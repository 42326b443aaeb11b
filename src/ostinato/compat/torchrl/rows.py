"""The rows of a TorchRL storage: their form, capacity and order, read off the files of `storage/` and `writer/`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ostinato.compat.torchrl.files import damaged
from ostinato.core import kinds
from ostinato.core.rows import column_name, describe
from ostinato.durable.ted import Flat2TED
from ostinato.errors import CheckpointError, OptionError
from ostinato.storages.object_columns import ObjectColumns

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ostinato.compat.torchrl.files import Folder

__all__ = ["Ring", "Stored", "read_rows"]

_SINGLE = "_-single-tensor-_"


class Ring(NamedTuple):
    """Where rows lie, in rows (cells with `ndim=2`)."""

    ndim: int
    lanes: int
    capacity: int
    rows: int
    cursor: int
    written: int
    """Rows ever written."""


class Stored(NamedTuple):
    """Rows that were found."""

    ring: Ring
    state: dict[str, Any]
    """State of a storage of ours."""
    indexed: bool
    """Whether the rows came from a TensorDictReplayBuffer of TorchRL, which writes the row's place into each."""


def read_rows(folder: Folder, ndim: int | None) -> Stored:
    """Read what `storage/` and `writer/` hold; arrays are mapped, not read.

    Raises:
        CheckpointError: if the storage or writer is of a kind that cannot be carried over.
        OptionError: if `ndim` is needed, or contradicts the files.
        DamagedFileError: naming the file.
    """
    if folder.has("storage", "data_indices.json"):
        msg = f"{folder.root} was written from a CompressedListStorage, which has no counterpart here: it is not read"
        raise CheckpointError(msg)
    about = folder.json("storage", "storage_metadata.json")
    path = folder.root / "storage" / "storage_metadata.json"
    rows, tree = about.get("len"), about.get("is_pytree")
    if type(rows) is not int or rows < 0 or not isinstance(tree, bool) or not isinstance(about.get("metadata"), dict):
        damaged(path, f"it must tell the rows and their kind, got {str(about)[:200]}")
    data = _read_tree(folder, about["metadata"]) if tree else folder.tensordict("storage")
    if not tree and data.batch_dims == 0:
        folder.notes.append(
            "the rows were saved through TED2Flat: they were converted back by Flat2TED with its defaults"
        )
        data = Flat2TED()(data)
    shape = tuple(data.batch_size) if kinds.is_tensordict(data) else _common(data, path)
    ring = _ring(folder, shape, rows, ndim)
    data, indexed = _without_index(data, ring, folder)
    schema = describe(data, ring.ndim)
    leaves, batch, _, objects = schema.flatten(data, None, ring.ndim)
    flat = [x.flatten(0, 1) if ring.ndim > 1 else x for x in leaves]
    columns = {
        column_name(leaf.path, i): x[: ring.rows] for i, (leaf, x) in enumerate(zip(schema.leaves, flat, strict=True))
    }
    state = {
        "form": "tensors",
        "rows": ring.rows,
        "cursor": ring.cursor,
        "lanes": ring.lanes,
        "ndim": ring.ndim,
        "capacity": ring.capacity,
        "schema": schema.to_json(),
        "single_copy": None,
        "columns": columns,
        "late": [],
    }
    if schema.objects:
        kept = ObjectColumns.of(schema.objects, objects, math.prod(batch))
        state |= kept.state(ring.rows, allow_pickle=False)
    return Stored(ring, state, indexed)


def _ring(folder: Folder, shape: tuple[int, ...], rows: int, ndim: int | None) -> Ring:
    """Tell a ring of rows from one of time x environments: TorchRL does not note the `ndim` of the storage."""
    path = folder.root / "writer" / "metadata.json"
    about = folder.json("writer", "metadata.json")
    cursor, written = about.get("cursor"), about.get("write_count", 0)
    if "rank_key" in about:
        msg = f"{path} is of a TensorDictMaxValueWriter: only checkpoints of round-robin writers are read"
        raise CheckpointError(msg)
    if type(cursor) is not int or type(written) is not int or written < 0:
        damaged(path, f"it must tell the writer's cursor and count, got {str(about)[:200]}")
    if "generation_shape" in about:
        folder.notes.append("the generations of rows (track_generations) are left out: every buffer here keeps stamps")
    found = {}
    for dims in range(1, len(shape) + 1):
        lanes = math.prod(shape[1:dims])
        steps, rest = divmod(rows, lanes) if lanes else (0, 1)
        if rest == 0 and 0 <= cursor < shape[0] and (steps == shape[0] or steps == cursor):
            found[dims] = Ring(dims, lanes, shape[0] * lanes, rows, cursor * lanes, max(written * lanes, rows))
    good = list(found)
    if not good:
        damaged(
            path, f"a cursor at {cursor} and {rows} rows in a storage of the shape {list(shape)} contradict each other"
        )
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


def _without_index(data: Any, ring: Ring, folder: Folder) -> tuple[Any, bool]:
    """Leave out the `index` that TorchRL's TensorDictReplayBuffer writes into rows: ours gives it with samples."""
    index = kinds.find_field(data, ("index",)) if kinds.is_tensordict(data) else None
    if not isinstance(index, torch.Tensor) or index.dtype is not torch.int64 or len(data.keys()) < 2:
        return data, False
    steps = ring.rows // ring.lanes
    places = torch.arange(steps, device="cpu")
    for _ in range(index.ndim - 1):
        places = places.unsqueeze(-1)
    if not bool((index[:steps] == places).all()):
        folder.notes.append("the field 'index' does not tell the rows' places: it is kept as data")
        return data, False
    return data.exclude("index"), True


def _read_tree(folder: Folder, entries: dict[str, Any]) -> Any:
    """Read a tree of tensors: nested dicts by the parts of the names, or the tensor alone."""
    if set(entries) == {_SINGLE}:
        return folder.array(entries[_SINGLE], "storage", f"{_SINGLE}.memmap")
    root: dict[str, Any] = {}
    numbered = False
    for name, entry in entries.items():
        parts = name.split(".")
        if not folder.has("storage", *parts[:-1], f"{parts[-1]}.memmap") and folder.has("storage", f"{name}.memmap"):
            parts = [name]  # a key with dots
        numbered = numbered or any(part.isdigit() for part in parts)
        level = root
        for part in parts[:-1]:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                damaged(folder.root / "storage" / "storage_metadata.json", f"{name[:80]!r} is a tensor and a tree")
        if parts[-1] in level:
            damaged(folder.root / "storage" / "storage_metadata.json", f"{name[:80]!r} is there twice")
        level[parts[-1]] = folder.array(entry, "storage", *parts[:-1], f"{parts[-1]}.memmap")
    if not root:
        damaged(folder.root / "storage" / "storage_metadata.json", "it names no field")
    if numbered:
        folder.notes.append(
            "the rows are a tree with numbers as keys; TorchRL does not save which of them are lists, tuples or dicts, "
            "so they come as dicts with keys of text ('0', '1', ...)"
        )
    return root


def _common(data: Any, path: Path) -> tuple[int, ...]:
    """Return the leading dimensions that all tensors of a tree share."""
    shapes = [tuple(leaf.shape) for leaf in _leaves(data)]
    shared = list(shapes[0])
    for shape in shapes[1:]:
        same = [one == other for one, other in zip(shared, shape, strict=False)]
        shared = shared[: (same + [False]).index(False)]  # noqa: RUF005
    if not shared:
        damaged(path, f"its tensors have no dimension in common: {shapes[:4]}")
    return tuple(shared)


def _leaves(data: Any) -> list[Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    return [leaf for value in data.values() for leaf in _leaves(value)]
