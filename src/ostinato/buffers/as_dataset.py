"""A buffer as a dataset: its episodes in the order of time, for copies to other buffers and for files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.core import kinds
from ostinato.core.episodes.keys import Episodes
from ostinato.core.episodes.tracker import EpisodeTracker
from ostinato.core.kinds import show_path
from ostinato.core.records import Request
from ostinato.core.rows import describe
from ostinato.datasets import DatasetStorage
from ostinato.datasets.columns import TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.errors import EmptyBufferError, KindError, SchemaError, UsageError
from ostinato.storages import RaggedTensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.buffers.records import Engine
    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.rows import Path
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.storages import Storage

__all__ = ["BufferRows", "buffer_as_dataset"]

_IDS: list[Any] = [("collector", "traj_ids"), "traj_ids", "episode"]
"""Usual names of fields of trajectory ids."""


class BufferRows(NamedTuple):
    """The rows of a buffer as a dataset."""

    dataset: DatasetStorage
    """The rows, episode by episode, as TensorDicts if the buffer holds TensorDicts, else as dicts. Not a copy: rows
    are read from the storage, which must not be written meanwhile."""
    closed: Tensor
    """bool `[episodes]`: whether the last row of an episode has a flag that ends it."""


@final
class _StoredColumn:
    """One field of a storage, in another order of rows."""

    def __init__(self, storage: Storage, position: int, slots: Tensor) -> None:
        self._storage, self._position, self._slots = storage, position, slots
        schema = storage.schema
        if schema is None:
            msg = f"{type(storage).__name__} has no fields"
            raise KindError(msg)
        leaf = schema.leaves[position]
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


def buffer_as_dataset(rb: ReplayBuffer, fields: Any = None) -> BufferRows:
    """Return the rows of a buffer as a dataset of its episodes, the episode with the oldest row first. No copy.

    Episodes are those that the buffer tracks; else they are found by usual trajectory ids and flags. An episode whose
    first rows were overwritten begins with the first row that is left. The caller holds the lock of the buffer as long
    as it reads the dataset. Rows are those of the storage: no transform runs.

    Args:
        rb: the buffer.
        fields: fields to keep; see `open_dataset`.

    Raises:
        EmptyBufferError: if there are no rows.
        UsageError: if rows that lay between others have left the buffer, so that its episodes have gaps.
        KeyMissingError: if nothing tells where episodes end.
        SchemaError: if rows have fields of different lengths.
        KindError: if rows have no named fields.
    """
    engine = rb._engine  # noqa: SLF001 (one package)
    storage = engine.storage
    if not len(storage):
        msg = "the buffer is empty: there are no rows to read"
        raise EmptyBufferError(msg)
    if isinstance(storage, DatasetStorage):
        flags = torch.ones(storage.episode_lengths.shape[0], dtype=torch.bool, device="cpu")
        return BufferRows(DatasetStorage(storage.contents, fields=fields) if fields else storage, flags)
    if engine.sampler.leaves or (engine.writer.mutable and not engine.writer.in_order):
        msg = (
            f"rows between others have left this buffer ({type(engine.sampler).__name__}, "
            f"{type(engine.writer).__name__}), so its episodes have gaps: use a round-robin writer"
        )
        raise UsageError(msg)
    if storage.schema is None:
        return _of_objects(engine, fields)
    if isinstance(storage, RaggedTensorStorage):
        msg = f"the lengths of {', '.join(map(show_path, storage.ragged))} differ between rows: a dataset has none such"
        raise SchemaError(msg)
    paths = [leaf.path for leaf in storage.schema.leaves] + [leaf.path for leaf in storage.schema.objects]
    if not all(path and all(isinstance(key, str) for key in path) for path in paths):
        msg = f"rows of this buffer ({storage.schema.kind}) have fields without names: use dicts or TensorDicts"
        raise KindError(msg)
    slots, lengths, closed = _episodes(engine, storage)
    columns: dict[Path, DatasetColumn] = {
        leaf.path: _StoredColumn(storage, position, slots) for position, leaf in enumerate(storage.schema.leaves)
    }
    texts = {leaf.path: _texts(storage, leaf.path, slots) for leaf in storage.schema.objects}
    contents = Contents("replay buffer", columns, lengths, texts)
    return BufferRows(DatasetStorage(contents, fields=fields, tensordict=storage.schema.kind == "tensordict"), closed)


def _episodes(engine: Engine, storage: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slots of rows, episode by episode, and the length of each episode and whether it has ended."""
    tracker = engine.tracker
    if tracker is None:
        tracker = EpisodeTracker(Episodes(traj_key=_IDS, optional=True), 1, 1)
    table = tracker.table(storage)
    first, lengths, closed, _ = table.episodes()
    steps = torch.arange(int(lengths.sum()), device="cpu")
    steps -= torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return table.shift(torch.repeat_interleave(first, lengths), steps), lengths, closed


def _texts(storage: Storage, path: Path, slots: Tensor) -> TextColumn:
    """Return a field of text. Copy of its values."""
    values = storage.field_at(slots.to(storage.device), path)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        msg = f"{show_path(path)} holds Python objects: leave it out with fields="
        raise SchemaError(msg)
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    codes = torch.tensor([numbers[value] for value in values], dtype=torch.int64, device="cpu")
    return TextColumn(list(numbers), TensorColumn(codes))


def _of_objects(engine: Engine, fields: Any) -> BufferRows:
    """Return the rows of a storage of Python objects, stacked. Copy."""
    storage = engine.storage
    rows = len(storage)
    oldest = engine.ring.cursor if rows == storage.capacity else 0
    order = (torch.arange(rows, device=storage.device) + oldest) % rows
    data = storage.present(storage.gather(order), (rows,))
    data = kinds.stack_rows(data) if isinstance(data, list) else data
    if not kinds.is_mapping(data):
        msg = f"rows of {type(data).__name__} have no named fields: use rows that are dicts or TensorDicts"
        raise KindError(msg)
    schema = describe(data, 1)
    if schema.objects:
        msg = f"{show_path(schema.objects[0].path)} holds Python objects: use a storage of tensors"
        raise SchemaError(msg)
    flat = schema.flatten(data, (rows,), 1)
    copy = _Listed(dict(zip([leaf.path for leaf in schema.leaves], flat.leaves, strict=True)))
    lengths, closed = copy.episodes(engine)
    columns: dict[Path, DatasetColumn] = {path: TensorColumn(value.cpu()) for path, value in copy.values.items()}
    contents = Contents("replay buffer", columns, lengths)
    return BufferRows(DatasetStorage(contents, fields=fields, tensordict=kinds.is_tensor_collection(data)), closed)


class _Listed(NamedTuple):
    """Fields of rows in the order of time."""

    values: dict[Path, Tensor]

    def episodes(self, engine: Engine) -> tuple[Tensor, Tensor]:
        """Return the length of each episode, and whether it has ended."""
        wanted = None if engine.tracker is None else engine.tracker.wanted
        wanted = Episodes(traj_key=_IDS, optional=True) if wanted is None or wanted.fixed else wanted
        found = wanted.resolve(set(self.values))
        rows = next(iter(self.values.values())).shape[0]
        ends = torch.zeros(rows, dtype=torch.bool, device="cpu")
        for path in found.end_paths:
            ends |= self.values[path].reshape(rows, -1).any(1).cpu()
        closed = ends.clone()
        if found.traj_path is not None:
            ids = self.values[found.traj_path].reshape(rows)
            ends[:-1] |= (ids[1:] != ids[:-1]).cpu()
        ends[-1] = True
        at = ends.nonzero().flatten() + 1
        return at.diff(prepend=at.new_zeros(1)), closed[at - 1]
