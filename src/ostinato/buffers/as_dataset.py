"""A buffer as a dataset: its episodes in the order of time, for copies to other buffers and for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core import kinds
from ostinato.core.episodes.tracker import Episodes, EpisodeTracker
from ostinato.core.kinds import show_path
from ostinato.core.records import Request
from ostinato.core.rows import describe
from ostinato.datasets import DatasetStorage
from ostinato.datasets.columns import TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.errors import EmptyBufferError, KindError, SchemaError, UsageError
from ostinato.storages import RaggedTensorStorage, StorageEnsemble

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.buffers.records import Engine
    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.dataset import Fields
    from ostinato.storages import Storage

_IDS: list[Any] = [("collector", "traj_ids"), "traj_ids", "episode"]
"""Usual names of fields of trajectory ids."""


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
        leaf.path: _StoredColumn(storage, position, slots)
        for position, leaf in enumerate(storage.schema.leaves)
        if leaf.path not in ragged
    }
    objects = [leaf.path for leaf in storage.schema.objects if _is_wanted(leaf.path, fields)]
    texts = {path: _texts(storage, path, slots) for path in objects}
    contents = Contents("replay buffer", columns, lengths, texts)
    return DatasetStorage(contents, fields=fields, tensordict=storage.schema.kind == "tensordict")


def _is_wanted(path: FieldPath, fields: Fields) -> bool:
    """Whether a field is among those to keep, or below one of them."""
    if fields is None:
        return True
    keys = fields.values() if isinstance(fields, Mapping) else fields
    wanted = [(key,) if isinstance(key, str) else tuple(key) for key in keys]
    return any(path[: len(key)] == key for key in wanted)


def _episodes(engine: Engine, storage: Any) -> tuple[Tensor, Tensor]:
    """Return the slots of rows, episode by episode, and the rows of each episode."""
    tracker = engine.tracker
    if tracker is None:
        tracker = EpisodeTracker(Episodes(traj_key=_IDS, optional=True), 1, 1)
    table = tracker.table(storage)
    first, lengths, _, _ = table.episodes()
    steps = torch.arange(int(lengths.sum()), device="cpu")
    steps -= torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return table.shift(torch.repeat_interleave(first, lengths), steps), lengths


def _texts(storage: Storage, path: FieldPath, slots: Tensor) -> TextColumn:
    """Return a field of text. Copy of its values."""
    values = storage.field_at(slots.to(storage.device), path)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        msg = f"{show_path(path)} holds Python objects: leave it out with fields="
        raise SchemaError(msg)
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    codes = torch.tensor([numbers[value] for value in values], dtype=torch.int64, device="cpu")
    return TextColumn(list(numbers), TensorColumn(codes))


def _of_objects(engine: Engine, fields: Any) -> DatasetStorage:
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
    values = {leaf.path: value.cpu() for leaf, value in zip(schema.leaves, flat.leaves, strict=True)}
    columns: dict[FieldPath, DatasetColumn] = {path: TensorColumn(value) for path, value in values.items()}
    contents = Contents("replay buffer", columns, _lengths_of(values, engine))
    return DatasetStorage(contents, fields=fields, tensordict=kinds.is_tensor_collection(data))


def _lengths_of(values: dict[FieldPath, Tensor], engine: Engine) -> Tensor:
    """Return the rows of each episode, int64 `[episodes]`, of rows in the order of time."""
    wanted = None if engine.tracker is None else engine.tracker.wanted
    wanted = Episodes(traj_key=_IDS, optional=True) if wanted is None or wanted.fixed else wanted
    found = wanted.resolve(set(values))
    rows = next(iter(values.values())).shape[0]
    ends = torch.zeros(rows, dtype=torch.bool, device="cpu")
    for path in found.end_paths:
        ends |= values[path].reshape(rows, -1).any(1)
    if found.traj_path is not None:
        ids = values[found.traj_path].reshape(rows)
        ends[:-1] |= ids[1:] != ids[:-1]
    ends[-1] = True
    at = ends.nonzero().flatten() + 1
    return at.diff(prepend=at.new_zeros(1))
