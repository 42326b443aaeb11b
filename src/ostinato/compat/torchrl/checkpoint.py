"""Reading what TorchRL 0.14 saved into a buffer of ours, or straight into one of our checkpoints."""

from __future__ import annotations

import math
import os
import pickle
import pickletools
import sys
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ostinato.buffers import ReplayBuffer, TensorDictReplayBuffer
from ostinato.buffers.checkpoint.save import save_state
from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.compat.torchrl.files import Folder, damaged
from ostinato.core import kinds
from ostinato.core.kinds import Node
from ostinato.core.rows import describe, encode_schema
from ostinato.durable.files import open_file
from ostinato.durable.ted import Flat2TED
from ostinato.errors import CheckpointError, CheckpointNotFoundError, OptionError
from ostinato.samplers import PrioritizedSampler, RandomSampler, Sampler, SamplerWithoutReplacement
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage
from ostinato.storages.object_columns import ObjectColumns
from ostinato.storages.single_copy import column_name
from ostinato.transforms import Compose
from ostinato.writers import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from torch import Tensor

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

    ring: _Ring
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
    stored = _read_rows(folder, ndim)
    sampler, sampling = _sampler_of(folder, stored.ring)
    options = {"generator": _generator_state(folder), "batch_size": _batch_size(folder)}
    _note_the_rest(folder)
    storage = {"class": "LazyTensorStorage", "state": stored.state}
    state = _state(stored.ring, storage, sampler, sampling, indexed=stored.indexed)
    return _Found(stored.ring, state | options, sampler, stored.indexed, tuple(folder.notes))


def _find_list(path: Path, max_size: int | None, *, allow_pickle: bool) -> _Found:
    saved = _read_listed(path, allow_pickle=allow_pickle)
    ring = _ring_of(path, saved, max_size)
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
    state |= {"generator": _generator_of(path, saved), "batch_size": size}
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
    ring: _Ring, storage: dict[str, Any], sampler: Sampler, sampling: dict[str, Any], *, indexed: bool
) -> dict[str, Any]:
    """Return the state of a buffer, but for its generator and batch size."""
    writer = TensorDictRoundRobinWriter if indexed else RoundRobinWriter
    return {
        "storage": storage,
        "sampler": {"class": type(sampler).__name__, "state": sampling},
        "writer": {"class": writer.__name__, "state": {"cursor": ring.cursor}},
        "stamps": {"written": ring.written, "base": ring.written - ring.rows, "cursor": ring.cursor, "array": None},
        "rows_written": ring.written,
        "rows_since_empty": ring.written,
        "rows_drawn": 0,
        "transforms": Compose.of(None).state_dict(),
        "unit": None,
        "pending": [],
    }


_SINGLE = "_-single-tensor-_"


class _Ring(NamedTuple):
    """Where rows lie, in rows (cells with `ndim=2`)."""

    ndim: int
    lanes: int
    capacity: int
    rows: int
    cursor: int
    written: int
    """Rows ever written."""


class _Stored(NamedTuple):
    """Rows that were found."""

    ring: _Ring
    state: dict[str, Any]
    """State of a storage of ours."""
    indexed: bool
    """Whether the rows came from a TensorDictReplayBuffer of TorchRL, which writes the row's place into each."""


def _read_rows(folder: Folder, ndim: int | None) -> _Stored:
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
        "schema": encode_schema(schema),
        "single_copy": None,
        "columns": columns,
        "late": [],
    }
    if schema.objects:
        kept = ObjectColumns.of(schema.objects, objects, math.prod(batch))
        state |= kept.state(ring.rows, allow_pickle=False)
    return _Stored(ring, state, indexed)


def _ring(folder: Folder, shape: tuple[int, ...], rows: int, ndim: int | None) -> _Ring:
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
            found[dims] = _Ring(dims, lanes, shape[0] * lanes, rows, cursor * lanes, max(written * lanes, rows))
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


def _without_index(data: Any, ring: _Ring, folder: Folder) -> tuple[Any, bool]:
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


_SAMPLERS = "RandomSampler, PrioritizedSampler and SamplerWithoutReplacement can"
_EMPTY_QUEUE_BYTES = 4096
_CALLS = frozenset(
    {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "EXT1", "EXT2", "EXT4"}
)
"""What an empty queue needs none of."""


def _sampler_of(folder: Folder, ring: _Ring) -> tuple[Sampler, dict[str, Any]]:
    """Return a sampler like the one saved, and its state.

    Raises:
        CheckpointError: if it is of a kind that cannot be carried over.
        DamagedFileError: naming the file.
    """
    if folder.has("sampler", "sampler_metadata.json"):
        return _prioritized(folder, ring)
    if folder.has("sampler", "meta.json"):
        return _epochs(folder, ring)
    rest = folder.unread("sampler")
    if rest:
        msg = f"{folder.root / rest[0]} is of a sampler that cannot be carried over: {_SAMPLERS}"
        raise CheckpointError(msg)
    sampler = RandomSampler()
    return sampler, sampler.state_dict()


def _prioritized(folder: Folder, ring: _Ring) -> tuple[Sampler, dict[str, Any]]:
    path = folder.root / "sampler" / "sampler_metadata.json"
    about = folder.json("sampler", "sampler_metadata.json")
    alpha, beta, eps, capacity = (_number(about.get(f"_{name}")) for name in ("alpha", "beta", "eps", "max_capacity"))
    pair = about.get("_max_priority")
    largest = _number(pair[0]) if isinstance(pair, list) and pair else None
    if alpha is None or beta is None or eps is None or largest is None or capacity is None or capacity % 1:
        damaged(path, f"it must tell alpha, beta, eps, the largest priority and the capacity, got {str(about)[:200]}")
    if capacity < ring.capacity:
        damaged(path, f"its capacity is {capacity:.0f}, that of the storage {ring.capacity}")
    entry = {"dtype": "torch.float64", "shape": [int(capacity)]}
    values = folder.array(entry, "sampler", "sumtree.memmap")[: ring.rows].clone()
    if not bool(((values >= 0) & (values < math.inf)).all()):
        damaged(folder.root / "sampler" / "sumtree.memmap", "its values must be finite and at least 0")
    if alpha > 0:
        priorities = (values.pow(1 / alpha) - eps).clamp_(min=0.0)
    else:
        priorities = torch.full_like(values, largest if largest > 0 else 1.0)
        folder.notes.append("with alpha=0 TorchRL saves no priorities: all rows have the largest one")
    if not bool((priorities < math.inf).all()):
        damaged(folder.root / "sampler" / "sumtree.memmap", f"its values are too large for alpha={alpha:g}")
    folder.read.add("sampler/mintree.memmap")  # it repeats the other one
    sampler = PrioritizedSampler(int(capacity), alpha, beta, eps)
    state = sampler.state_dict()
    state |= {"priorities": priorities, "values": values, "values_alpha": alpha, "largest": largest}
    return sampler, state


def _number(value: Any) -> float | None:
    good = type(value) in {int, float} and 0 <= value < 2**53
    return float(value) if good else None


def _epochs(folder: Folder, ring: _Ring) -> tuple[Sampler, dict[str, Any]]:
    path = folder.root / "sampler" / "meta.json"
    saved = folder.tensordict("sampler")
    found = dict(saved.items())
    last, left, rows = (found.get(name) for name in ("drop_last", "_sample_list", "len_storage"))
    if not (isinstance(last, torch.Tensor) and last.numel() == 1):
        msg = f"{path} is of a sampler that cannot be carried over: {_SAMPLERS}"
        raise CheckpointError(msg)
    sampler = SamplerWithoutReplacement(drop_last=bool(last))
    state = sampler.state_dict()
    folder.notes.append("TorchRL does not save whether SamplerWithoutReplacement shuffles: it does from here on")
    order = _order(left, rows, ring)
    if order is None or left is None:
        folder.notes.append("the pass of SamplerWithoutReplacement cannot go on where it was: a new one begins")
    else:
        state |= {"order": order, "rows": ring.rows, "at": ring.rows - int(left.numel())}
    return sampler, state


def _order(left: Any, rows: Any, ring: _Ring) -> Tensor | None:
    """Return an order in which the rows that were drawn come first; None if the list is not of these rows."""
    if not (isinstance(left, torch.Tensor) and left.dtype is torch.int64 and left.ndim == 1 and ring.lanes == 1):
        return None
    if not isinstance(rows, torch.Tensor) or rows.numel() != 1 or int(rows) != ring.rows or left.numel() > ring.rows:
        return None
    if left.numel() == 0 or not 0 <= int(left.min()) <= int(left.max()) < ring.rows:
        return None
    drawn = torch.ones(ring.rows, dtype=torch.bool, device="cpu")
    drawn[left] = False
    return torch.cat((drawn.nonzero().flatten(), left)) if int(drawn.sum()) + left.numel() == ring.rows else None


def _generator_state(folder: Folder) -> Tensor | None:
    """Return the state of the generator that the buffer owned; None where there was none.

    Raises:
        DamagedFileError: naming the file.
    """
    if not folder.has("rng_state"):
        return None
    about = folder.json("rng_state", "meta.json")
    if about.get("device") != "cpu":
        folder.notes.append(f"the generator was one of {str(about.get('device'))[:40]}: it is left out, give a new one")
        folder.read.add("rng_state/rng_state.memmap")
        return None
    state = dict(folder.tensordict("rng_state").items()).get("rng_state")
    path = folder.root / "rng_state" / "rng_state.memmap"
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.ndim != 1:
        damaged(path, "it must be the state of a generator, uint8")
    try:
        torch.Generator().set_state(state.clone())
    except RuntimeError as error:
        damaged(path, f"torch does not take it as the state of a generator: {str(error)[:200]}")
    return state.clone()


def _batch_size(folder: Folder) -> int | None:
    """Return the batch size of the buffer.

    Raises:
        DamagedFileError: naming the file.
    """
    about = folder.json("buffer_metadata.json")
    size = about.get("batch_size")
    if size is not None and (type(size) is not int or not 0 < size < 2**40):
        damaged(folder.root / "buffer_metadata.json", f"batch_size must be positive or null, got {str(size)[:40]}")
    if about.get("consume_after_n_samples") is not None:
        folder.notes.append("consume_after_n_samples has no counterpart: rows stay until they are overwritten")
    return size


def _note_the_rest(folder: Folder) -> None:
    """Say of files that nothing was read from what they were; none of them is unpickled."""
    if folder.has("transform.t"):
        folder.notes.append("the states of transforms (transform.t) are left out: append the transforms anew")
        folder.read.add("transform.t")
    if folder.has("prefetch.pkl"):
        folder.read.add("prefetch.pkl")
        if not _is_empty_queue(folder):
            folder.notes.append("batches made ahead (prefetch.pkl) are left out: they are pickled")
    rest = folder.unread()
    if rest:
        folder.notes.append(f"{len(rest)} files are not named by any metadata, and left out: {', '.join(rest[:3])}")


def _is_empty_queue(folder: Folder) -> bool:
    """Look at the steps of a pickle, without carrying them out, for one that could make a tensor."""
    fd = open_file(folder.root / "prefetch.pkl")
    with os.fdopen(fd, "rb") as file:
        text = file.read(_EMPTY_QUEUE_BYTES + 1)
    if len(text) > _EMPTY_QUEUE_BYTES:
        return False
    try:
        return not any(step.name in _CALLS for step, _, _ in pickletools.genops(text))
    except (ValueError, IndexError, OverflowError):
        return False


_MAGIC = (b"PK", b"\x80")  # an archive, or the pickle that torch wrote before 1.6
_ERRORS = (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def _read_listed(path: Path, *, allow_pickle: bool) -> dict[str, Any]:
    """Read the state of a buffer over a list storage.

    Args:
        path: the file.
        allow_pickle: unpickle what `weights_only=True` refuses, which runs whatever code the file brings.

    Returns:
        TorchRL's state, with TensorDicts in place of theirs in `items`.

    Raises:
        CheckpointError: if it holds pickled objects and `allow_pickle` is false, or is of something else.
        DamagedFileError: naming the file.
    """
    with path.open("rb") as file:
        if not file.read(2).startswith(_MAGIC):
            damaged(path, "not a file of torch.save: it begins otherwise")
    try:
        state = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            damaged(path, str(error)[:200])
        msg = (
            f"{path} holds more than tensors and plain values, and unpickling runs code: if you trust it, pass "
            f"allow_pickle=True ({str(error).splitlines()[0][:200]})"
        )
        raise CheckpointError(msg) from error
    except _ERRORS as error:
        damaged(path, f"not a file of torch.save: {str(error)[:200]}")
    items = state.get("_storage") if isinstance(state, dict) else None
    items = items.get("_storage") if isinstance(items, dict) else None
    if not isinstance(items, list) or not isinstance(state.get("_writer"), dict):
        msg = f"{path} is not the state_dict of a TorchRL buffer over a ListStorage: save other storages with dumps"
        raise CheckpointError(msg)
    if state.get("_sampler"):
        msg = f"{path} is of a sampler that cannot be carried over with a list storage: RandomSampler can"
        raise CheckpointError(msg)
    return {**state, "items": [_row(item, path) for item in items]}


def _ring_of(path: Path, state: dict[str, Any], max_size: int | None) -> _Ring:
    """Tell how many rows there are and where the next one goes; TorchRL does not save how many fit.

    Raises:
        OptionError: if `max_size` contradicts the file.
        DamagedFileError: naming the file.
    """
    rows, writer = len(state["items"]), state["_writer"]
    cursor, written = writer.get("_cursor"), writer.get("_write_count", 0)
    if type(cursor) is not int or type(written) is not int or not 0 <= cursor <= rows or written < 0:
        damaged(
            path, f"its writer has the cursor {str(cursor)[:40]} and the count {str(written)[:40]} with {rows} rows"
        )
    wrapped = cursor != rows or (cursor == 0 and rows > 0)
    capacity = rows if wrapped else sys.maxsize if max_size is None else max_size
    if max_size is not None and (capacity != max_size or max_size < max(rows, 1)):
        msg = f"{path} holds {rows} rows {'in a full storage' if wrapped else ''}, got max_size={max_size}"
        raise OptionError(msg)
    return _Ring(1, 1, capacity, rows, cursor % capacity, max(written, rows))


def _generator_of(path: Path, state: dict[str, Any]) -> Tensor | None:
    """Return the state of the generator that the buffer owned; None where there was none, or one of a device."""
    saved = state.get("_rng")
    if not isinstance(saved, (tuple, list)) or len(saved) != 2 or str(saved[1]) != "cpu":
        return None
    try:
        torch.Generator().set_state(saved[0])
    except (RuntimeError, TypeError) as error:
        damaged(path, f"torch does not take its generator's state: {str(error)[:200]}")
    return saved[0]  # type: ignore[no-any-return]


def _row(item: Any, path: Path) -> Any:
    """Return a row as it was put in: TorchRL saves a TensorDict as an OrderedDict with its keys joined by dots."""
    if not isinstance(item, OrderedDict):
        return item
    below: OrderedDict[str, Any] = OrderedDict()
    for key, value in item.items():
        first, dot, rest = str(key).partition(".")
        if dot and isinstance(below.setdefault(first, OrderedDict()), OrderedDict):
            below[first][rest] = value
        elif first in below:
            damaged(path, f"a row has {first[:80]!r} twice")
        elif not first.startswith("__"):
            below[first] = value
    fields = [_row(value, path) for value in below.values()]
    return kinds.make(Node("tensordict", tuple(below)), fields, (), torch.device("cpu"))
