"""`load_dataset`: copies a selection of a dataset into a buffer, episode by episode, in chunks of rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.buffers.as_dataset import buffer_as_dataset
from ostinato.buffers.options import positive
from ostinato.core import kinds
from ostinato.core.episodes.tracker import Episodes
from ostinato.core.index import select
from ostinato.core.kinds import show_path
from ostinato.core.records import Request
from ostinato.datasets import DatasetStorage, open_dataset
from ostinato.durable.progress import Progress, bar_only
from ostinato.errors import CapacityError, KeyMissingError, OptionError, SchemaError, UsageError
from ostinato.storages import ListStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.rows import Path
    from ostinato.datasets.dataset import Fields
    from ostinato.durable.progress import ProgressOption

_CHUNK_BYTES = 64 << 20
_MOST_ROWS = 1024


class LoadOptions(NamedTuple):
    """The options of `ReplayBuffer.load_dataset`."""

    episodes: Sequence[int] | slice | Tensor | None
    rows: Sequence[int] | slice | Tensor | None
    fields: Fields
    batch_rows: int | None
    overwrite: bool
    progress: ProgressOption


def load_dataset(rb: ReplayBuffer, source: Any, options: LoadOptions) -> int:
    """Copy rows of a dataset into a buffer; see `ReplayBuffer.load_dataset`.

    Args:
        rb: the buffer.
        source: a dataset.
        options: what is copied, and how.
    """
    given = None if options.batch_rows is None else positive("batch_rows", options.batch_rows)
    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.buffers.tensordict import TensorDictReplayBuffer

    collections = rb.writer.collections_only or isinstance(rb, TensorDictReplayBuffer)
    listed = isinstance(rb.storage, ListStorage) and not collections

    with ExitStack() as locks:
        if isinstance(source, ReplayBuffer):
            if source is rb:
                msg = "a buffer cannot be copied into itself: give another buffer, or the path of a dataset"
                raise OptionError(msg)
            locks.enter_context(source._engine.lock)  # noqa: SLF001 (one package)
        dataset = _open(source, options, locks)
        size = given or max(1, min(_MOST_ROWS, _CHUNK_BYTES // max(1, dataset.schema.nbytes)))
        chosen = _chosen_rows(dataset, options.rows)
        _check_room(rb, int(chosen.shape[0]), overwrite=options.overwrite)
        pieces = _Pieces.of(dataset, chosen)
        ends = _EndFlags.of(rb, dataset, pieces)
        _check_seam(rb, ends)
        written, before = 0, rb.write_count
        with Progress(options.progress, "load dataset", chosen.shape[0], unit="rows") as progress:
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
                progress.advance(last - first)
    return written


def _open(source: Any, options: LoadOptions, stack: ExitStack) -> DatasetStorage:
    """Return the source as a dataset of the chosen episodes and fields; files opened here are closed with the stack."""
    from ostinato.buffers.replay import ReplayBuffer

    episodes, fields = options.episodes, options.fields
    if isinstance(source, ReplayBuffer):
        source, fields = buffer_as_dataset(source, fields), None
    if isinstance(source, DatasetStorage):
        return source if episodes is None and fields is None else source.select(episodes=episodes, fields=fields)
    bar = bar_only(options.progress)
    return stack.enter_context(open_dataset(source, episodes=episodes, fields=fields, progress=bar))


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
    if engine.gate is not None and not engine.gate.flow.may_write(rows, engine.stock()):
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


class _Pieces(NamedTuple):
    """Runs of rows that follow each other in one episode."""

    last: Tensor
    """Positions in the selection of the last row of each piece, int64 `[pieces]`."""
    rows: Tensor
    """The same rows, as positions in the dataset, int64 `[pieces]`."""
    firsts: Tensor
    """The first rows, as positions in the dataset, int64 `[pieces]`."""

    @classmethod
    def of(cls, dataset: DatasetStorage, chosen: Tensor) -> _Pieces:
        known: Any = dataset.episode_ends
        ends: Tensor = known[chosen].clone()
        ends[:-1] |= chosen[1:] != chosen[:-1] + 1
        ends[-1] = True
        last = ends.nonzero().flatten()
        firsts = torch.cat((last.new_zeros(1), last[:-1] + 1))
        return cls(last, chosen[last], chosen[firsts])


@final
class _EndFlags:
    """Sets the flags at the ends of pieces that no flag of the dataset marks.

    Args:
        dataset: the rows.
        set_at: fields that are set to True, and the positions in the selection where.
        added: fields that the dataset lacks, with their shape in the buffer, and the positions where they are True.
        by_flags: whether flags end episodes in the buffer; else trajectory ids alone tell them apart.
    """

    def __init__(
        self,
        dataset: DatasetStorage,
        set_at: dict[Path, Tensor],
        added: dict[Path, tuple[tuple[int, ...], Tensor]],
        *,
        by_flags: bool = True,
    ) -> None:
        self.dataset = dataset
        self.set_at, self.added = set_at, added
        self.by_flags = by_flags

    @classmethod
    def of(cls, rb: ReplayBuffer, dataset: DatasetStorage, pieces: _Pieces) -> _EndFlags:
        """Find the flags that end episodes in the buffer, and those that are to be set.

        Raises:
            SchemaError: if no field can mark the end of a piece.
        """
        known = {leaf.path for leaf in dataset.schema.leaves}
        wanted = rb.episodes or Episodes()
        if wanted.fixed:
            msg = f"the buffer has {wanted!r}, tensors that give the episodes of fixed rows: name fields instead"
            raise UsageError(msg)
        found = _resolved(wanted, known)
        paths = list(found.end_paths)
        if found.traj_path is not None and not paths:
            _check_ids(rb, dataset, found.traj_path, pieces)
            return cls(dataset, {}, {}, by_flags=False)
        ended = torch.zeros(pieces.rows.shape[0], dtype=torch.bool, device="cpu")
        for path in paths:
            if path in known:
                ended = ended | _column(dataset, path, pieces.rows).reshape(ended.shape[0], -1).any(1)
        return cls._marking(rb, dataset, paths, pieces, ended)

    @classmethod
    def _marking(
        cls, rb: ReplayBuffer, dataset: DatasetStorage, paths: list[Path], pieces: _Pieces, ended: Tensor
    ) -> _EndFlags:
        known = {leaf.path for leaf in dataset.schema.leaves}
        schema = rb.storage.schema if len(rb.storage) else None
        stored = {} if schema is None else {leaf.path: leaf.shape for leaf in schema.leaves}
        marking = [path for path in paths if path[-1] != "terminated"]
        open_ends = pieces.last[~ended]
        added: dict[Path, tuple[tuple[int, ...], Tensor]] = {}
        for path in marking:
            if path not in known:
                added[path] = stored.get(path, ()), pieces.last
        if open_ends.shape[0] and not marking:
            if rb.episodes is not None and not rb.episodes.soft:
                msg = (
                    f"{open_ends.shape[0]} of {pieces.last.shape[0]} episodes end without termination, and the buffer "
                    f"has {rb.episodes!r}: add a field for cut episodes to end_key, such as 'truncated'"
                )
                raise SchemaError(msg)
            path = (*paths[0][:-1], "truncated")
            added[path] = stored.get(path, ()), open_ends
        missing = [path for path in added if stored and path not in stored]
        if missing:
            msg = (
                f"rows of the buffer have no field {show_path(missing[0])} that could mark the ends of copied episodes:"
                " load into an empty buffer, or write rows with that field"
            )
            raise SchemaError(msg)
        return cls(dataset, {path: open_ends for path in marking if path in known and open_ends.shape[0]}, added)

    def mark(self, payload: Any, first: int, last: int) -> Any:
        """Return the rows `[first, last)` of the selection, with flags."""
        schema, rows = self.dataset.schema, last - first
        for path, at in self.set_at.items():
            value: Tensor = payload.leaves[schema.find(path)]
            value[at[(at >= first) & (at < last)] - first] = True
        data = self.dataset.present(payload, (rows,))
        if not self.added:
            return data
        values: dict[Any, Tensor] = {}
        for path, (shape, at) in self.added.items():
            flags = torch.zeros((rows, *shape), dtype=torch.bool, device="cpu")
            flags[at[(at >= first) & (at < last)] - first] = True
            values[path] = flags
        return kinds.with_fields(data, values)


def _resolved(wanted: Episodes, known: set[Path]) -> Episodes:
    """Return the fields by which the buffer will find episodes; end flags that the dataset lacks are among them."""
    try:
        return wanted.resolve(known | set(wanted.end_paths))
    except KeyMissingError:
        if not wanted.soft:
            raise
        return Episodes(end_key=[("next", "done") if any(path[0] == "next" for path in known) else ("done",)])


def _column(dataset: DatasetStorage, path: Path, rows: Tensor) -> Tensor:
    return dataset.fetch([Request(dataset.schema.find(path), rows)])[0]


def _check_ids(rb: ReplayBuffer, dataset: DatasetStorage, path: Path, pieces: _Pieces) -> None:
    """Check that no two pieces, and none in the buffer, have one trajectory id.

    Raises:
        SchemaError: if they have, so that their rows would form one episode.
    """
    ids = _column(dataset, path, pieces.firsts).reshape(-1)
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
