"""Buffers and datasets: a buffer as a dataset of its episodes, its export, and copies of a dataset into a buffer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, final

import numpy as np
import torch

from ostinato.buffers.options import positive
from ostinato.buffers.queries import slots_in_order
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.variants import TensorDictReplayBuffer
from ostinato.core import kinds
from ostinato.core.episodes.tracker import Episodes, EpisodeTracker
from ostinato.core.index import select
from ostinato.core.kinds import show_path
from ostinato.core.records import Request
from ostinato.core.rows import describe
from ostinato.datasets import DatasetStorage, open_dataset
from ostinato.datasets.cache import BlockCache
from ostinato.datasets.checkpoints import rows_by_episode
from ostinato.datasets.columns import BlockColumn, TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.export import ExportOptions, ExportReport, write_dataset
from ostinato.durable.progress import Progress, bar_only
from ostinato.errors import (
    CapacityError,
    EmptyBufferError,
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
    UsageError,
)
from ostinato.storages import LazyTensorStorage, ListStorage, RaggedTensorStorage, StorageEnsemble
from ostinato.trajectories.buffer import TrajectoryReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.reader import Reader
    from ostinato.core.rows import Leaf, Schema
    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.dataset import Fields
    from ostinato.durable.progress import ProgressOption
    from ostinato.storages import Storage

_CHUNK_BYTES = 64 << 20
_MOST_ROWS = 1024
_IDS: list[Any] = [("collector", "traj_ids"), "traj_ids", "episode"]
"""Usual names of fields of trajectory ids."""

# -- a buffer as a dataset ---------------------------------------------------------------------------------------------


@final
class _StoredColumn:
    """One field of a storage, in another order of rows."""

    def __init__(self, storage: Storage, position: int, leaf: Leaf, slots: Tensor) -> None:
        self._storage, self._position, self._slots = storage, position, slots
        self.dtype: torch.dtype = leaf.dtype
        """Dtype of the field."""
        self.shape: tuple[int, ...] = leaf.shape
        """Shape of the field in one row."""

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Return a function that copies rows to the CPU; see `DatasetColumn`."""
        request = Request(self._position, self._slots[rows].to(self._storage.device))

        def read() -> Tensor:
            return self._storage.fetch([request])[0].cpu()

        return read

    def close(self) -> None:
        """Do nothing: the storage belongs to the buffer."""


def buffer_as_dataset(rb: ReplayBuffer, fields: Fields = None) -> DatasetStorage:
    """Return the rows of a buffer as a dataset of its episodes, the episode with the oldest row first. No copy.

    Rows are TensorDicts if the buffer holds TensorDicts, else dicts.

    Episodes are those that the buffer tracks; else they are found by usual trajectory ids and flags. An episode whose
    first rows were overwritten begins with the first row that is left, and rows of no episode (`mask_key`) are left
    out. The caller holds the lock of the buffer as long
    as it reads the dataset. Rows are those of the storage: no transform runs.

    Args:
        rb: the buffer.
        fields: fields to keep; see `open_dataset`. Others are not read, and may be of any kind.

    Raises:
        EmptyBufferError: if there are no rows.
        UsageError: if rows that lay between others have left the buffer, so that its episodes have gaps.
        KeyMissingError: if nothing tells where episodes end.
        SchemaError: if rows have fields of different lengths.
        KindError: if rows have no named fields, or for an ensemble.
    """
    engine = rb._engine  # noqa: SLF001 (one package)
    storage = engine.storage
    whole: Any = storage
    if isinstance(whole, StorageEnsemble):
        msg = "an ensemble has no rows of its own: pass one of its members, ensemble[i]"
        raise KindError(msg)
    if not len(storage):
        msg = "the buffer is empty: there are no rows to read"
        raise EmptyBufferError(msg)
    if isinstance(storage, DatasetStorage):
        return storage if fields is None else storage.select(fields=fields)
    remover = engine.store.remover
    gaps = engine.sampler.leaves or (remover is not None and not remover.keeps_order)
    if gaps or (engine.writer.mutable and not engine.writer.in_order):
        msg = (
            f"rows between others have left this buffer ({type(engine.sampler).__name__}, "
            f"{type(engine.writer).__name__}), so its episodes have gaps: use a round-robin writer"
        )
        raise UsageError(msg)
    if storage.schema is None:
        return _of_objects(engine, fields)
    ragged = storage.ragged if isinstance(storage, RaggedTensorStorage) else ()
    for path in ragged:
        if _is_wanted(path, fields):
            msg = f"{show_path(path)} has another length in each row: leave it out with fields="
            raise SchemaError(msg)
    paths = [leaf.path for leaf in storage.schema.leaves] + [leaf.path for leaf in storage.schema.objects]
    if not all(path and all(isinstance(key, str) for key in path) for path in paths):
        msg = f"rows of this buffer ({storage.schema.kind}) have fields without names: use dicts or TensorDicts"
        raise KindError(msg)
    slots, lengths = _episodes(engine, storage)
    columns: dict[FieldPath, DatasetColumn] = {
        leaf.path: _StoredColumn(storage, position, leaf, slots)
        for position, leaf in enumerate(storage.schema.leaves)
        if leaf.path not in ragged
    }
    objects = [leaf.path for leaf in storage.schema.objects if _is_wanted(leaf.path, fields)]
    texts = {path: _texts(storage.field_at(slots.to(storage.device), path), path) for path in objects}
    contents = Contents("replay buffer", columns, lengths, texts)
    return DatasetStorage(contents, fields=fields, tensordict=storage.schema.kind == "tensordict")


def _is_wanted(path: FieldPath, fields: Fields) -> bool:
    """Whether a field is among those to keep, or below one of them."""
    if fields is None:
        return True
    keys = fields.values() if isinstance(fields, Mapping) else fields
    wanted = [(key,) if isinstance(key, str) else tuple(key) for key in keys]
    return any(path[: len(key)] == key for key in wanted)


def _episodes(engine: Reader, storage: Any) -> tuple[Tensor, Tensor]:
    """Return the slots of rows, episode by episode, and the rows of each episode."""
    tracker = engine.tracker
    if tracker is None:
        tracker = EpisodeTracker(Episodes(traj_key=_IDS, optional=True), 1, 1)
    return rows_by_episode(tracker.table(storage))


def _texts(values: Any, path: FieldPath) -> TextColumn:
    """Return a field of text. Copy of its values."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        msg = f"{show_path(path)} holds Python objects: leave it out with fields="
        raise SchemaError(msg)
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    codes = torch.tensor([numbers[value] for value in values], dtype=torch.int64, device="cpu")
    return TextColumn(list(numbers), TensorColumn(codes))


def _of_objects(engine: Reader, fields: Any) -> DatasetStorage:
    """Return the rows of a storage of Python objects, stacked. Copy."""
    storage, wanted = engine.storage, None if engine.tracker is None else engine.tracker.wanted
    rows, order = len(storage), slots_in_order(engine)
    data = storage.present(storage.gather(order), (rows,))
    data = kinds.stack_rows(data) if isinstance(data, list) else data
    if not kinds.is_mapping(data):
        msg = f"rows of {type(data).__name__} have no named fields: use rows that are dicts or TensorDicts"
        raise KindError(msg)
    made = ReplayBuffer(storage=LazyTensorStorage(rows), episodes=None if wanted is None or wanted.fixed else wanted)
    made.extend(data)
    return buffer_as_dataset(made, fields)


# -- export ------------------------------------------------------------------------------------------------------------


def export(
    source: Any,
    path: str | Path,
    format: str = "lerobot",  # noqa: A002 (the word of the command line)
    *,
    episodes: Sequence[int] | slice | Tensor | None = None,
    fields: Fields = None,
    overwrite: bool = False,
    progress: ProgressOption = None,
    **options: Unpack[ExportOptions],
) -> ExportReport:
    """Write a buffer, a dataset or episodes in the format of another tool.

    The episodes of a buffer are written in the order of time, that with the oldest row first; one whose first rows
    were overwritten begins with the first row that is left, and an unfinished one ends with the newest row. A buffer is
    locked meanwhile. Rows are those of the storage: no transform runs.

    Whether the source fits the format is checked before anything is written. The files are written beside `path` and
    renamed when they are complete: after an error or a kill there is nothing at the path, or what was there before.
    Memory: the numbers of one episode, and a few images.

    Args:
        source: a `ReplayBuffer`, a `TrajectoryReplayBuffer`, what `open_dataset` returns or takes, or a list of
            episodes, each a dict or TensorDict of rows `[steps, ...]`.
        path: the new folder, or file.
        format: "lerobot" (v3), "minari" or "hdf5".
        episodes: positions of the episodes to write, in this order; None for all.
        fields: keys to keep, or a mapping of new keys to keys of the source; None for all.
        overwrite: replace what is at the path.
        progress: the rows done and their total; see `ProgressOption`.
        **options: of the format, see `ExportOptions`.

    Returns:
        What was written.

    Raises:
        CheckpointError: if there is something at the path.
        SchemaError: if the format cannot hold the rows.
        OptionError: if an option is not one of the format, or out of its range.
        KindError: if the source is none of these, or an encoder is missing.
        MissingExtraError: naming the extra to install.

    Examples:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from ostinato import export, open_dataset
        >>> episodes = [{"observation": torch.zeros(5, 3), "action": torch.zeros(5, 2)} for _ in range(2)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export(episodes, Path(folder) / "data", fps=10, task="reach")
        >>> report.episodes, report.rows
        (2, 10)
    """
    with ExitStack() as stack:
        dataset = _as_dataset(source, stack, episodes, fields, progress)
        return write_dataset(dataset, path, format, options, overwrite=overwrite, progress=progress)


def _as_dataset(
    source: Any, stack: ExitStack, episodes: Any, fields: Fields, progress: ProgressOption
) -> DatasetStorage:
    """Return some episodes and fields of a source as a dataset, which is valid until the stack is closed."""
    bar = bar_only(progress)
    if isinstance(source, TrajectoryReplayBuffer):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trajectories"
        source.save_checkpoint(str(folder), progress=bar)
        source = folder
    if isinstance(source, ReplayBuffer):
        stack.enter_context(source._engine.lock)  # noqa: SLF001 (one package)
        source, fields = buffer_as_dataset(source, fields), None
    elif isinstance(source, (list, tuple)):
        source = _of_episodes(source)
    if not isinstance(source, DatasetStorage):
        return stack.enter_context(open_dataset(source, episodes=episodes, fields=fields, progress=bar))
    return source if episodes is None and fields is None else source.select(episodes=episodes, fields=fields)


def _of_episodes(episodes: Sequence[Any]) -> DatasetStorage:
    """Return a list of episodes as a dataset. Tensors are not copied."""
    if not episodes:
        msg = "the list of episodes is empty: there is nothing to write"
        raise SchemaError(msg)
    schema: Schema | None = None
    flats = []
    for number, rows in enumerate(episodes):
        if not kinds.is_mapping(rows):
            msg = f"episode {number} is {type(rows).__name__}: give dicts or TensorDicts of rows [steps, ...]"
            raise KindError(msg)
        schema = describe(rows, 1) if schema is None else schema
        try:
            flat = schema.flatten(rows, None, 1)
        except SchemaError as error:
            error.add_note(f"in episode {number}; all episodes have the fields of the first one")
            raise
        if not flat.batch[0]:
            msg = f"episode {number} has no rows: leave it out"
            raise SchemaError(msg)
        flats.append(flat)
    known: Any = schema
    cache = BlockCache(1)
    columns: dict[FieldPath, DatasetColumn] = {
        leaf.path: BlockColumn(_Episodes([flat.leaves[i].detach().cpu() for flat in flats]), cache)
        for i, leaf in enumerate(known.leaves)
    }
    texts = {
        leaf.path: _texts([text for flat in flats for text in flat.objects[i]], leaf.path)
        for i, leaf in enumerate(known.objects)
    }
    lengths = torch.tensor([flat.batch[0] for flat in flats], dtype=torch.int64, device="cpu")
    return DatasetStorage(Contents("episodes", columns, lengths, texts))


@final
class _Episodes:
    """One field of a list of episodes, an episode a block."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values
        self.dtype: torch.dtype = values[0].dtype
        """Dtype of the field."""
        self.shape: tuple[int, ...] = tuple(values[0].shape[1:])
        """Shape of the field in one row."""
        self.starts = np.cumsum([0, *(len(value) for value in values)])
        """First row of each episode, and the number of rows, int64 `[episodes + 1]`."""

    def load(self, block: int) -> Tensor:
        """Return the rows of an episode."""
        return self._values[block]

    def close(self) -> None:
        """Do nothing: there is no file."""


# -- copies of datasets ------------------------------------------------------------------------------------------------


def load_dataset(
    rb: ReplayBuffer,
    source: Any,
    rows: Any,
    batch_rows: int | None,
    progress: ProgressOption,
    *,
    overwrite: bool,
    **selection: Any,
) -> int:
    """Copy rows of a dataset into a buffer; see `ReplayBuffer.load_dataset`."""
    given = None if batch_rows is None else positive("batch_rows", batch_rows)
    collections = rb.writer.collections_only or isinstance(rb, TensorDictReplayBuffer)
    listed = isinstance(rb.storage, ListStorage) and not collections
    if source is rb:
        msg = "a buffer cannot be copied into itself: give another buffer, or the path of a dataset"
        raise OptionError(msg)
    with ExitStack() as stack:
        dataset = _as_dataset(source, stack, progress=progress, **selection)
        size = given or max(1, min(_MOST_ROWS, _CHUNK_BYTES // max(1, dataset.schema.nbytes)))
        chosen = _chosen_rows(dataset, rows)
        _check_room(rb, int(chosen.shape[0]), overwrite=overwrite)
        ends = _EndFlags(rb, dataset, chosen)
        _check_seam(rb, ends)
        written, before = 0, rb.write_count
        with Progress(progress, "load dataset", chosen.shape[0], unit="rows") as shown:
            for first in range(0, chosen.shape[0], size):
                last = min(first + size, chosen.shape[0])
                try:
                    data = ends.mark(dataset.gather(chosen[first:last]), first, last)
                    data = kinds.as_tensordict(data, last - first) if collections else data
                    index = rb.extend([_row_at(data, at) for at in range(last - first)] if listed else data)
                except Exception as error:
                    error.add_note(f"load_dataset: {written} of {chosen.shape[0]} rows were written before")
                    raise
                written += index.shape[0]
                if rb.write_count != before + written:
                    msg = "another thread wrote to the buffer during load_dataset: its rows lie between those copied"
                    raise UsageError(msg)
                shown.advance(last - first)
    return written


def _row_at(data: Any, at: int) -> Any:
    """Return one row, for a storage of Python objects. Copy."""
    if isinstance(data, dict):
        return {key: _row_at(value, at) for key, value in data.items()}
    return data[at].clone() if isinstance(data, torch.Tensor) or kinds.is_tensordict(data) else data[at]


def _chosen_rows(dataset: DatasetStorage, rows: Any) -> Tensor:
    """Return positions of rows, int64 `[n]`, ascending."""
    every = torch.arange(len(dataset), device="cpu")
    if rows is None:
        return every
    picked = select(list(rows) if isinstance(rows, range) else rows, (len(dataset),), dataset.device)
    found = picked.slots if picked.span is None else every[picked.span]
    if picked.batch == () or not bool((found[1:] > found[:-1]).all()):
        msg = (
            f"rows must be a slice, a mask or ascending positions of rows in [0, {len(dataset)}), got {rows!r}: they "
            "are copied in the order of time"
        )
        raise OptionError(msg)
    if not found.shape[0]:
        msg = f"rows={rows!r} chooses none of {len(dataset)} rows"
        raise OptionError(msg)
    return found


def _check_room(rb: ReplayBuffer, rows: int, *, overwrite: bool) -> None:
    """Check that the buffer can be written, and has room.

    Raises:
        UsageError: if it cannot be written, or its rows have two dimensions, or its rate limiter would wait.
        CapacityError: if rows would leave.
    """
    storage, engine = rb.storage, rb._engine  # noqa: SLF001 (one package)
    if isinstance(storage, DatasetStorage) or not rb.writer.mutable:
        what = f"its storage is {storage!r}" if rb.writer.mutable else f"its writer is {rb.writer!r}"
        msg = f"the buffer is read-only, {what}: copy to a buffer with LazyTensorStorage and a round-robin writer"
        raise UsageError(msg)
    if storage.ndim > 1:
        msg = (
            f"the buffer has ndim={storage.ndim}, rows of several environments side by side, and the episodes of a "
            "dataset follow each other: use a storage with ndim=1"
        )
        raise UsageError(msg)
    if not all(limit.flow.may_write(rows, engine.stock()) for limit in engine.limits):
        msg = f"the rate limiter of the buffer does not permit {rows} rows now: load the dataset without one"
        raise UsageError(msg)
    free = storage.max_size - len(storage)
    if rows > free and not overwrite:
        msg = (
            f"{rows} rows do not fit: the buffer has room for {free} of max_size={storage.max_size}. Use a larger "
            "storage, choose episodes or rows, or give overwrite=True to let the last rows replace the oldest"
        )
        raise CapacityError(msg)
    if storage.budget and not overwrite:
        msg = (
            "the storage removes rows when they exceed max_bytes, and how many bytes the rows take is known only when "
            "they are compressed: give overwrite=True to let the last rows replace the oldest"
        )
        raise CapacityError(msg)


@final
class _EndFlags:
    """Sets the flags at the ends of pieces that no flag of the dataset marks.

    A piece is a run of rows that follow each other in one episode.

    Args:
        rb: the buffer.
        dataset: the rows.
        chosen: positions of the rows that are copied, int64 `[n]`, ascending.

    Raises:
        SchemaError: if no field can mark the end of a piece.
    """

    def __init__(self, rb: ReplayBuffer, dataset: DatasetStorage, chosen: Tensor) -> None:
        self.dataset = dataset
        self.set_at: dict[FieldPath, Tensor] = {}
        """Fields that are set to True, and the positions in the selection where."""
        self.added: dict[FieldPath, tuple[int, ...]] = {}
        """Those of these fields that the dataset lacks, and their shape in the buffer."""
        marked: Any = dataset.episode_ends
        ends: Tensor = marked[chosen].clone()
        ends[:-1] |= chosen[1:] != chosen[:-1] + 1
        ends[-1] = True
        last = ends.nonzero().flatten()
        known = {leaf.path for leaf in dataset.schema.leaves}
        wanted = rb.episodes or Episodes()
        if wanted.fixed:
            msg = f"the buffer has {wanted!r}, tensors that give the episodes of fixed rows: name fields instead"
            raise UsageError(msg)
        found = _resolved(wanted, known)
        self.by_flags = bool(found.end_paths) or found.traj_path is None
        """Whether flags end episodes in the buffer; else trajectory ids alone tell them apart."""
        if not self.by_flags and found.traj_path is not None:
            firsts = torch.cat((last.new_zeros(1), last[:-1] + 1))
            _check_ids(rb, found.traj_path, self._read(found.traj_path, chosen[firsts]).reshape(-1))
            return
        ended = torch.zeros(last.shape[0], dtype=torch.bool, device="cpu")
        for path in known.intersection(found.end_paths):
            ended |= self._read(path, chosen[last]).reshape(last.shape[0], -1).any(1)
        self._mark(rb, list(found.end_paths), last, last[~ended])

    def _read(self, path: FieldPath, rows: Tensor) -> Tensor:
        return self.dataset.fetch([Request(self.dataset.schema.find(path), rows)])[0]

    def _mark(self, rb: ReplayBuffer, paths: list[FieldPath], last: Tensor, open_ends: Tensor) -> None:
        """Choose the flags that mark the ends of pieces, and those of them that are not marked yet."""
        known = {leaf.path for leaf in self.dataset.schema.leaves}
        schema = rb.storage.schema if len(rb.storage) else None
        stored = {} if schema is None else {leaf.path: leaf.shape for leaf in schema.leaves}
        marking = [path for path in paths if path[-1] != "terminated"]
        for path in marking:
            if path not in known:
                self.added[path], self.set_at[path] = stored.get(path, ()), last
            elif open_ends.shape[0]:
                self.set_at[path] = open_ends
        if open_ends.shape[0] and not marking:
            if rb.episodes is not None and not rb.episodes.soft:
                msg = (
                    f"{open_ends.shape[0]} of {last.shape[0]} episodes end without termination, and the buffer has "
                    f"{rb.episodes!r}: add a field for cut episodes to end_key, such as 'truncated'"
                )
                raise SchemaError(msg)
            path = (*paths[0][:-1], "truncated")
            self.added[path], self.set_at[path] = stored.get(path, ()), open_ends
        missing = [path for path in self.added if stored and path not in stored]
        if missing:
            msg = (
                f"rows of the buffer have no field {show_path(missing[0])} that could mark the ends of copied episodes:"
                " load into an empty buffer, or write rows with that field"
            )
            raise SchemaError(msg)

    def mark(self, payload: Any, first: int, last: int) -> Any:
        """Return the rows `[first, last)` of the selection, with flags."""
        schema, rows = self.dataset.schema, last - first
        added: dict[Any, Tensor] = {
            path: torch.zeros((rows, *shape), dtype=torch.bool, device="cpu") for path, shape in self.added.items()
        }
        for path, at in self.set_at.items():
            flags: Tensor = added[path] if path in added else payload.leaves[schema.find(path)]
            flags[at[(at >= first) & (at < last)] - first] = True
        return kinds.with_fields(self.dataset.present(payload, (rows,)), added)


def _resolved(wanted: Episodes, known: set[FieldPath]) -> Episodes:
    """Return the fields by which the buffer will find episodes; end flags that the dataset lacks are among them."""
    try:
        return wanted.resolve(known | set(wanted.end_paths))
    except KeyMissingError:
        if not wanted.soft:
            raise
        return Episodes(end_key=[("next", "done") if any(path[0] == "next" for path in known) else ("done",)])


def _check_ids(rb: ReplayBuffer, path: FieldPath, ids: Tensor) -> None:
    """Check that no two pieces, and none in the buffer, have one trajectory id.

    Raises:
        SchemaError: if they have, so that their rows would form one episode.
    """
    storage = rb.storage
    held = storage.scores_at(torch.arange(len(storage), device=storage.device), path) if len(storage) else None
    present = ids[:0] if held is None else torch.unique(held.reshape(-1).cpu())
    values, counts = torch.unique(torch.cat((ids, present)), return_counts=True)
    if bool((counts > 1).any()):
        msg = (
            f"several episodes would have the trajectory id {int(values[counts > 1][0])} in {show_path(path)}, so that "
            "their rows would form one: choose other episodes, or give the buffer an end_key as well"
        )
        raise SchemaError(msg)


def _check_seam(rb: ReplayBuffer, ends: _EndFlags) -> None:
    """Check that the newest row in the buffer ends its episode.

    Raises:
        UsageError: if it does not, so that the first row copied would continue it.
    """
    storage = rb.storage
    if not len(storage) or not rb.writer.in_order or not ends.by_flags:
        return
    schema = storage.schema
    known = set() if schema is None else {leaf.path for leaf in schema.leaves}
    paths = [path for path in _resolved(rb.episodes or Episodes(), known).end_paths if path in known]
    slot = torch.tensor([(rb.cursor - 1) % storage.capacity], dtype=torch.int64, device=storage.device)
    flags = [storage.scores_at(slot, path) for path in paths]
    if flags and not any(bool(flag.any()) for flag in flags if flag is not None):
        msg = (
            "the newest episode in the buffer has not ended, and the rows of the dataset would continue it: load the "
            f"dataset before, or set {' or '.join(map(show_path, paths))} of the newest row"
        )
        raise UsageError(msg)
