"""Conversion of TorchRL 0.14 checkpoints to a buffer or to a checkpoint of Ostinato."""

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
from ostinato.core import kinds
from ostinato.core.kinds import Node
from ostinato.datasets.torchrl_rows import SavedRing, read_rows
from ostinato.durable.files import check_new_path, open_file
from ostinato.durable.manifest import holds_checkpoint
from ostinato.durable.progress import BYTES, Progress
from ostinato.durable.torchrl_files import Folder, damaged, is_checkpoint
from ostinato.errors import CheckpointError, CheckpointNotFoundError, OptionError
from ostinato.samplers import PrioritizedSampler, RandomSampler, Sampler, SamplerWithoutReplacement
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage
from ostinato.transforms import Compose
from ostinato.writers import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.durable.progress import ProgressOption
    from ostinato.storages import Storage

__all__ = ["ImportReport", "convert_checkpoint", "is_checkpoint", "load_checkpoint"]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of a conversion."""

    path: str
    """The new directory."""
    storage: str
    """Class of the storage."""
    sampler: str
    """Class of the sampler."""
    writer: str
    """Class of the writer."""
    rows: int
    """Number of rows."""
    capacity: int
    """Capacity of the storage."""
    ndim: int
    """Batch dimensions of the storage."""
    batch_size: int | None
    """Batch size of the buffer; None if it had none."""
    notes: tuple[str, ...]
    """What could not be converted."""


class _Found(NamedTuple):
    """A TorchRL checkpoint as the state of a buffer."""

    ring: SavedRing
    state: dict[str, Any]
    sampler: Sampler
    indexed: bool
    notes: tuple[str, ...]


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    ndim: int | None = None,
    max_size: int | None = None,
    dim_extend: int | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
    allow_pickle: bool = False,
    progress: ProgressOption = None,
) -> ReplayBuffer:
    """Load a TorchRL 0.14 checkpoint into a new buffer: rows (as copies), cursor, priorities, batch size, generator.

    For a directory that `rb.dumps` wrote, rows can be TensorDicts, trees of tensors or tensors; the writer must be a
    round-robin writer, and the sampler Random, Prioritized or WithoutReplacement. Slice samplers save no state and are
    loaded as `RandomSampler`; use `set_sampler`. TorchRL cannot dump a `ListStorage`; instead, pass the file of
    `torch.save(rb.state_dict(), file)`. By default nothing is unpickled. No symbolic link is followed, and sizes are
    compared with the sizes of the files before memory is allocated. TorchRL saves no checksums, so damage within rows
    is not detected.

    Args:
        path: The directory or file.
        ndim: 1 or 2. Required if shape and cursor do not determine it, since TorchRL does not save it.
        max_size: Capacity of a list storage, which TorchRL does not save. None: the number of rows if the storage was
            full, otherwise unbounded.
        dim_extend: `dim_extend` of the buffer, which TorchRL does not save; None: `ndim - 1`.
        scratch_dir: Directory for a `LazyMemmapStorage`; None: use a `LazyTensorStorage`.
        allow_pickle: Allow unpickling the objects of a list storage, which executes the code in the file.
        progress: The bytes of rows copied and their total; see `ostinato.ProgressOption`.

    Returns:
        A `TensorDictReplayBuffer` if the rows come from TorchRL's `TensorDictReplayBuffer`, without the field `index`
        that it writes; otherwise a `ReplayBuffer`.

    Warns:
        UserWarning: Something could not be converted; one warning for each.

    Raises:
        CheckpointNotFoundError: There is nothing at the path, or a directory that TorchRL did not write.
        CheckpointError: A part of the checkpoint has no counterpart in Ostinato.
        OptionError: An option is required or contradicts the files.
        DamagedFileError: A file is damaged; the message names it.
        StorageMemoryError: There is not enough memory or disk space.
    """
    root = Path(path).absolute()
    found = _find(root, ndim, max_size, allow_pickle=allow_pickle)
    ring = found.ring
    storage: Storage
    if root.is_file():
        if scratch_dir is not None:
            msg = f"{root} has a list storage, which keeps its rows in memory: leave scratch_dir out"
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
    columns = found.state["storage"]["state"].get("columns") or {}
    with Progress(progress, "load", sum(column.nbytes for column in columns.values()), unit=BYTES):
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
    overwrite: bool = False,
    progress: ProgressOption = None,
) -> ImportReport:
    """Convert a TorchRL 0.14 checkpoint to a checkpoint of Ostinato. Rows are copied between files, not through memory.

    Args:
        source_path: See `load_checkpoint`.
        save_path: New directory, which appears completely or not at all.
        ndim: See `load_checkpoint`.
        max_size: See `load_checkpoint`.
        allow_pickle: See `load_checkpoint`. Objects other than tensors, arrays and plain values are pickled again.
        overwrite: Replace a checkpoint at the target.
        progress: The bytes written and their total; see `ostinato.ProgressOption`.

    Raises:
        CheckpointError: As `load_checkpoint`, or the target exists.
        OptionError: As `load_checkpoint`.
        DamagedFileError: A file is damaged; the message names it.
        StorageMemoryError: There is not enough disk space.
    """
    source, target = Path(source_path).absolute(), Path(save_path).absolute()
    if not (overwrite and holds_checkpoint(target)):
        check_new_path(target)
    found = _find(source, ndim, max_size, allow_pickle=allow_pickle)
    with Progress(progress, "convert", unit=BYTES):
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
            msg = f"{root} has a list storage, which has ndim=1, got ndim={ndim!r}"
            raise OptionError(msg)
        return _find_list(root, max_size, allow_pickle=allow_pickle)
    if not is_checkpoint(root):
        lacking = "it lacks storage/storage_metadata.json" if root.is_dir() else "it does not exist"
        msg = f"{root} is no directory that TorchRL's rb.dumps wrote: {lacking}"
        raise CheckpointNotFoundError(msg)
    if max_size is not None or allow_pickle:
        msg = f"max_size and allow_pickle are for files of list storages, but {root} is a directory: leave them out"
        raise OptionError(msg)
    folder = Folder(root)
    stored = read_rows(folder, ndim)
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
    if items and all(map(_has_position, items, range(len(items)))):
        items, indexed = [item.exclude("index") for item in items], True
    kept = {"form": "objects", "items": items, "cursor": ring.cursor, "capacity": ring.capacity}
    storage = {"class": "ListStorage", "state": {**kept, "allow_pickle": allow_pickle}}
    sampler = RandomSampler()
    state = _state(ring, storage, sampler, sampler.state_dict(), indexed=indexed)
    size = saved.get("_batch_size")
    if size is not None and (type(size) is not int or size < 1):
        damaged(path, f"its batch size is {str(size)[:40]}")
    state |= {"generator": _generator_of(path, saved), "batch_size": size}
    notes = (
        ["the states of transforms are not converted: append the transforms again"] if saved.get("_transforms") else []
    )
    if ring.capacity == sys.maxsize:
        notes.append(
            "TorchRL does not save the capacity of a list storage: it is unbounded, unless max_size says otherwise"
        )
    return _Found(ring, state, sampler, indexed, tuple(notes))


def _has_position(item: Any, place: int) -> bool:
    """Return whether a row has its position, which TorchRL's TensorDictReplayBuffer writes, and another field."""
    index = kinds.find_field(item, ("index",)) if kinds.is_tensordict(item) and len(item.keys()) > 1 else None
    return isinstance(index, torch.Tensor) and index.dtype is torch.int64 and index.ndim == 0 and int(index) == place


def _state(
    ring: SavedRing, storage: dict[str, Any], sampler: Sampler, sampling: dict[str, Any], *, indexed: bool
) -> dict[str, Any]:
    """Return the state of a buffer without generator and batch size."""
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


_SAMPLERS = "RandomSampler, PrioritizedSampler and SamplerWithoutReplacement are supported"
_EMPTY_QUEUE_BYTES = 4096
_CALLS = frozenset(
    {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "EXT1", "EXT2", "EXT4"}
)
"""Opcodes that the pickle of an empty queue does not have."""


def _sampler_of(folder: Folder, ring: SavedRing) -> tuple[Sampler, dict[str, Any]]:
    """Return a sampler of the saved kind, and its state.

    Raises:
        CheckpointError: The sampler has no counterpart.
        DamagedFileError: A file is damaged.
    """
    if folder.has("sampler", "sampler_metadata.json"):
        return _prioritized(folder, ring)
    if folder.has("sampler", "meta.json"):
        return _epochs(folder, ring)
    rest = folder.unread("sampler")
    if rest:
        msg = f"{folder.root / rest[0]} belongs to an unsupported sampler: {_SAMPLERS}"
        raise CheckpointError(msg)
    sampler = RandomSampler()
    return sampler, sampler.state_dict()


def _prioritized(folder: Folder, ring: SavedRing) -> tuple[Sampler, dict[str, Any]]:
    path = folder.root / "sampler" / "sampler_metadata.json"
    about = folder.json("sampler", "sampler_metadata.json")
    alpha, beta, eps, capacity = (_number(about.get(f"_{name}")) for name in ("alpha", "beta", "eps", "max_capacity"))
    pair = about.get("_max_priority")
    largest = _number(pair[0]) if isinstance(pair, list) and pair else None
    if alpha is None or beta is None or eps is None or largest is None or capacity is None or capacity % 1:
        damaged(path, f"it must have alpha, beta, eps, the maximum priority and the capacity, got {str(about)[:200]}")
    if capacity < ring.capacity:
        damaged(path, f"its capacity is {capacity:.0f}, but that of the storage is {ring.capacity}")
    entry = {"dtype": "torch.float64", "shape": [int(capacity)]}
    values = folder.array(entry, "sampler", "sumtree.memmap")[: ring.rows].clone()
    if not bool(((values >= 0) & (values < math.inf)).all()):
        damaged(folder.root / "sampler" / "sumtree.memmap", "its values must be finite and at least 0")
    if alpha > 0:
        priorities = (values.pow(1 / alpha) - eps).clamp_(min=0.0)
    else:
        priorities = torch.full_like(values, largest if largest > 0 else 1.0)
        folder.notes.append("with alpha=0 TorchRL saves no priorities: all rows get the maximum priority")
    if not bool((priorities < math.inf).all()):
        damaged(folder.root / "sampler" / "sumtree.memmap", f"its values are too large for alpha={alpha:g}")
    folder.read.add("sampler/mintree.memmap")  # redundant: minima of the same values
    sampler = PrioritizedSampler(int(capacity), alpha, beta, eps)
    state = sampler.state_dict()
    state |= {"priorities": priorities, "values": values, "values_alpha": alpha, "largest": largest}
    return sampler, state


def _number(value: Any) -> float | None:
    good = type(value) in {int, float} and 0 <= value < 2**53
    return float(value) if good else None


def _epochs(folder: Folder, ring: SavedRing) -> tuple[Sampler, dict[str, Any]]:
    path = folder.root / "sampler" / "meta.json"
    saved = folder.tensordict("sampler")
    found = dict(saved.items())
    last, left, rows = (found.get(name) for name in ("drop_last", "_sample_list", "len_storage"))
    if not (isinstance(last, torch.Tensor) and last.numel() == 1):
        msg = f"{path} belongs to an unsupported sampler: {_SAMPLERS}"
        raise CheckpointError(msg)
    sampler = SamplerWithoutReplacement(drop_last=bool(last))
    state = sampler.state_dict()
    folder.notes.append("TorchRL does not save whether SamplerWithoutReplacement shuffles: shuffling is enabled")
    order = _order(left, rows, ring)
    if order is None or left is None:
        folder.notes.append("the pass of SamplerWithoutReplacement cannot be resumed: a new one starts")
    else:
        state |= {"order": order, "rows": ring.rows, "at": ring.rows - int(left.numel())}
    return sampler, state


def _order(left: Any, rows: Any, ring: SavedRing) -> Tensor | None:
    """Return an order with the rows sampled so far first; None if the saved list does not match the rows."""
    if not (isinstance(left, torch.Tensor) and left.dtype is torch.int64 and left.ndim == 1 and ring.num_envs == 1):
        return None
    if not isinstance(rows, torch.Tensor) or rows.numel() != 1 or int(rows) != ring.rows or left.numel() > ring.rows:
        return None
    if left.numel() == 0 or not 0 <= int(left.min()) <= int(left.max()) < ring.rows:
        return None
    drawn = torch.ones(ring.rows, dtype=torch.bool, device="cpu")
    drawn[left] = False
    return torch.cat((drawn.nonzero().flatten(), left)) if int(drawn.sum()) + left.numel() == ring.rows else None


def _generator_state(folder: Folder) -> Tensor | None:
    """Return the state of the buffer's generator; None if it had none.

    Raises:
        DamagedFileError: A file is damaged.
    """
    if not folder.has("rng_state"):
        return None
    about = folder.json("rng_state", "meta.json")
    if about.get("device") != "cpu":
        folder.notes.append(
            f"the generator of the device {str(about.get('device'))[:40]} is not converted: pass a new one"
        )
        folder.read.add("rng_state/rng_state.memmap")
        return None
    state = dict(folder.tensordict("rng_state").items()).get("rng_state")
    path = folder.root / "rng_state" / "rng_state.memmap"
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.ndim != 1:
        damaged(path, "it must be the state of a generator, uint8")
    try:
        torch.Generator().set_state(state.clone())
    except RuntimeError as error:
        damaged(path, f"torch rejects it as the state of a generator: {str(error)[:200]}")
    return state.clone()


def _batch_size(folder: Folder) -> int | None:
    """Return the batch size of the buffer.

    Raises:
        DamagedFileError: The file is damaged.
    """
    about = folder.json("buffer_metadata.json")
    size = about.get("batch_size")
    if size is not None and (type(size) is not int or not 0 < size < 2**40):
        damaged(folder.root / "buffer_metadata.json", f"batch_size must be positive or null, got {str(size)[:40]}")
    if about.get("consume_after_n_samples") is not None:
        folder.notes.append("consume_after_n_samples is not converted: rows stay until they are overwritten")
    return size


def _note_the_rest(folder: Folder) -> None:
    """Describe the files that were not read; none of them is unpickled."""
    if folder.has("transform.t"):
        folder.notes.append("the states of transforms (transform.t) are not converted: append the transforms again")
        folder.read.add("transform.t")
    if folder.has("prefetch.pkl"):
        folder.read.add("prefetch.pkl")
        if not _is_empty_queue(folder):
            folder.notes.append("prefetched batches (prefetch.pkl) are not converted: they are pickled")
    rest = folder.unread()
    if rest:
        folder.notes.append(f"{len(rest)} files that no metadata mentions are not converted: {', '.join(rest[:3])}")


def _is_empty_queue(folder: Folder) -> bool:
    """Return whether the opcodes of a pickle, which is not executed, include none that could create a tensor."""
    fd = open_file(folder.root / "prefetch.pkl")
    with os.fdopen(fd, "rb") as file:
        text = file.read(_EMPTY_QUEUE_BYTES + 1)
    if len(text) > _EMPTY_QUEUE_BYTES:
        return False
    try:
        return not any(step.name in _CALLS for step, _, _ in pickletools.genops(text))
    except (ValueError, IndexError, OverflowError):
        return False


_MAGIC = (b"PK", b"\x80")  # zip archive, or the pickle format before torch 1.6
_ERRORS = (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def _read_listed(path: Path, *, allow_pickle: bool) -> dict[str, Any]:
    """Read the state of a buffer with a list storage.

    Args:
        path: The file.
        allow_pickle: Allow unpickling what `weights_only=True` rejects, which executes the code in the file.

    Returns:
        TorchRL's state, with TensorDicts as `items`.

    Raises:
        CheckpointError: The file has pickled objects and `allow_pickle` is False, or is something else.
        DamagedFileError: The file is damaged.
    """
    with path.open("rb") as file:
        if not file.read(2).startswith(_MAGIC):
            damaged(path, "it is not a file of torch.save")
    try:
        state = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            damaged(path, str(error)[:200])
        msg = (
            f"{path} has pickled objects, and unpickling runs code: if you trust the file, pass allow_pickle=True "
            f"({str(error).splitlines()[0][:200]})"
        )
        raise CheckpointError(msg) from error
    except _ERRORS as error:
        damaged(path, f"it is not a file of torch.save: {str(error)[:200]}")
    items = state.get("_storage") if isinstance(state, dict) else None
    items = items.get("_storage") if isinstance(items, dict) else None
    if not isinstance(items, list) or not isinstance(state.get("_writer"), dict):
        msg = f"{path} is not the state_dict of a TorchRL buffer over a ListStorage: save other storages with dumps"
        raise CheckpointError(msg)
    if state.get("_sampler"):
        msg = f"{path} belongs to a sampler that is not supported with a list storage: only RandomSampler is"
        raise CheckpointError(msg)
    return {**state, "items": [_row(item, path) for item in items]}


def _ring_of(path: Path, state: dict[str, Any], max_size: int | None) -> SavedRing:
    """Return the numbers of rows and the cursor; TorchRL does not save the capacity.

    Raises:
        OptionError: `max_size` contradicts the file.
        DamagedFileError: The file is damaged.
    """
    rows, writer = len(state["items"]), state["_writer"]
    cursor, written = writer.get("_cursor"), writer.get("_write_count", 0)
    if type(cursor) is not int or type(written) is not int or not 0 <= cursor <= rows or written < 0:
        damaged(
            path, f"the cursor {str(cursor)[:40]} and the write count {str(written)[:40]} contradict its {rows} rows"
        )
    wrapped = cursor != rows or (cursor == 0 and rows > 0)
    capacity = rows if wrapped else sys.maxsize if max_size is None else max_size
    if max_size is not None and (capacity != max_size or max_size < max(rows, 1)):
        msg = f"{path} holds {rows} rows {'in a full storage' if wrapped else ''}, got max_size={max_size}"
        raise OptionError(msg)
    return SavedRing(1, 1, capacity, rows, cursor % capacity, max(written, rows))


def _generator_of(path: Path, state: dict[str, Any]) -> Tensor | None:
    """Return the state of the buffer's generator; None if it had none, or one of another device."""
    saved = state.get("_rng")
    if not isinstance(saved, (tuple, list)) or len(saved) != 2 or str(saved[1]) != "cpu":
        return None
    try:
        torch.Generator().set_state(saved[0])
    except (RuntimeError, TypeError) as error:
        damaged(path, f"torch rejects the state of its generator: {str(error)[:200]}")
    return saved[0]  # type: ignore[no-any-return]


def _row(item: Any, path: Path) -> Any:
    """Return the original row: TorchRL saves a TensorDict as an OrderedDict with its keys joined by dots."""
    if not isinstance(item, OrderedDict):
        return item
    below: OrderedDict[str, Any] = OrderedDict()
    for key, value in item.items():
        first, dot, rest = str(key).partition(".")
        if dot and isinstance(below.setdefault(first, OrderedDict()), OrderedDict):
            below[first][rest] = value
        elif first in below:
            damaged(path, f"a row has two values for {first[:80]!r}")
        elif not first.startswith("__"):
            below[first] = value
    fields = [_row(value, path) for value in below.values()]
    return kinds.make(Node("tensordict", tuple(below)), fields, (), torch.device("cpu"))
