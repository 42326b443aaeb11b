"""Checkpoints as datasets: those of buffers and storages of this library, and those of TorchRL. Files are mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.episodes.tracker import Episodes, as_flags, as_ids
from ostinato.core.options import number_of
from ostinato.core.records import Run
from ostinato.core.rows import Leaf, column_name
from ostinato.datasets.dataset import Contents
from ostinato.datasets.format import Format
from ostinato.datasets.torchrl_rows import read_rows
from ostinato.durable import CheckpointReader
from ostinato.durable.arrays import DTYPES
from ostinato.durable.manifest import format_of, holds_checkpoint
from ostinato.durable.torchrl_files import Folder, is_checkpoint
from ostinato.errors import CheckpointError, DamagedFileError, KindError, OptionError, OstinatoError, SchemaError
from ostinato.storages.coded import SavedCoded, known_codec
from ostinato.storages.columns import check_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.format import Reading

_BUFFER, _STORAGE = "ostinato-buffer", "ostinato-storage"
_ENSEMBLES = ("ostinato-ensemble", "ostinato-storages")
_IN_ORDER = ("RoundRobinWriter", "TensorDictRoundRobinWriter", "ImmutableDatasetWriter")
_IDS: list[Any] = [("collector", "traj_ids"), "traj_ids", "episode"]
_CPU = torch.device("cpu")


@final
class SavedField:
    """One memory-mapped field; a compressed one is decompressed row by row.

    With `single_copy`, a next observation is the observation of the next row, unless it is stored separately.

    Args:
        mapped: the field `[rows, *shape]`, or the observations in whose rows it lies.
        apart: bool `[rows]`: the rows whose value is stored separately.
        nexts: the values stored separately.
    """

    def __init__(self, mapped: Tensor | SavedCoded, apart: Tensor | None = None, nexts: Tensor | None = None) -> None:
        self._mapped, self._apart, self._nexts = mapped, apart, nexts
        self._rank = None if apart is None else apart.cumsum(0) - 1
        self.shape = tuple(mapped.shape[1:])
        """Shape of the field in one row."""
        self.nbytes = mapped.nbytes if nexts is None else nexts.nbytes
        """Bytes of the field in its file."""

    def rows(self, slots: Tensor, after: Tensor) -> Tensor:
        """Return the values at `slots`, `[N, ...]`; `after` has the slots of the next rows. Copy."""
        if self._apart is None or self._rank is None or self._nexts is None:
            return self._mapped.index_select(0, slots)
        found = self._mapped.index_select(0, after)
        aside = self._apart[slots]
        found[aside] = self._nexts[self._rank[slots[aside]]]
        return found


def map_fields(reader: CheckpointReader, storage: dict[str, Any]) -> dict[tuple[str, ...], SavedField]:
    """Map the fields that every row has; those that only some rows have, and ragged ones, are left out.

    Args:
        reader: of the checkpoint.
        storage: the state of the storage in it.
    """
    leaves = storage["schema"]["leaves"]
    paths = [tuple(str(key) for key in leaf["path"]) for leaf in leaves]
    names = [column_name(leaf["path"], position) for position, leaf in enumerate(leaves)]
    mates = dict(storage.get("single_copy") or ())
    apart = reader.read("apart") if mates else None
    coded = storage.get("codec") or {}
    found: dict[tuple[str, ...], SavedField] = {}
    for position, (path, name) in enumerate(zip(paths, names, strict=True)):
        source = mates.get(position, position)
        if name in storage.get("ragged", ()):
            continue
        mapped: Tensor | SavedCoded
        if names[source] in coded:
            leaf = Leaf(path, DTYPES[leaves[source]["dtype"]], tuple(leaves[source]["shape"]))
            values, ends = reader.open_mapped(f"{names[source]}.blobs"), reader.read(f"{names[source]}.ends")
            check_ends(values, ends)
            mapped = SavedCoded(leaf, known_codec(leaf, coded[names[source]]), values, ends)
        else:
            mapped = reader.open_mapped(names[source])
        derived = (apart, reader.read(f"{name}.apart")) if position in mates else ()
        found[path] = SavedField(mapped, *derived)
    return found


def saved_episodes(
    saved: dict[str, Any] | None, storage: dict[str, Any], fields: Mapping[Any, SavedField]
) -> EpisodeTable | None:
    """Return the episodes of saved rows; None if nothing tells where they end.

    Args:
        saved: the saved episodes of the buffer; None takes usual trajectory ids and flags of the rows.
        storage: the state of the storage.
        fields: the fields of the rows.
    """
    rows, capacity = int(storage["rows"]), int(storage["capacity"])
    table = EpisodeTable(capacity, max(1, int(storage["lanes"])))
    if saved:
        table.load_state_dict({key: value for key, value in saved.items() if key not in {"read", "runs"}})
        return table
    try:
        wanted = Episodes(traj_key=_IDS, optional=True).resolve(set(fields))
    except OstinatoError:
        return None
    run = Run(int(storage["cursor"]) if rows == capacity else 0, rows, capacity)
    slots = run.slots(_CPU)
    after = _after(slots, storage)
    ends = torch.zeros(rows, dtype=torch.bool, device="cpu")
    for path in wanted.end_paths:
        ends |= as_flags(fields[path].rows(slots, after), path, rows)
    traj = wanted.traj_path
    table.record(run, ends, None if traj is None else as_ids(fields[traj].rows(slots, after), traj, rows), None)
    return table


def _after(slots: Tensor, storage: dict[str, Any]) -> Tensor:
    """Return the slots of the rows after some rows, of the same environment."""
    num_envs, rows = max(1, int(storage["lanes"])), int(storage["rows"])
    return (slots + num_envs).remainder(int(storage["capacity"])).clamp(max=rows - 1)


class _Opened(NamedTuple):
    """A checkpoint whose fields are mapped."""

    identity: str
    """Differs if another checkpoint is saved to the same path."""
    storage: dict[str, Any]
    """State of the storage."""
    fields: dict[Any, SavedField]
    episodes: dict[str, Any] | None
    """Saved episodes."""
    in_order: bool
    """Whether the writer writes rows in ring order."""
    arrivals: Tensor | None = None
    """When the row of each slot was written, int64 `[rows]`, 0 where it was deleted; None: in ring order."""
    used_up: Tensor | None = None
    """Slots of rows that the sampler has removed, int64; None for one that removes none."""


@final
class _CheckpointColumn:
    """One field of a checkpoint in the order of time. Pickled as the path of the checkpoint."""

    def __init__(
        self, opened: _Opened, path: FieldPath, order: _Order, source: tuple[Callable[[Path], Any], Path]
    ) -> None:
        self._field, self._order = opened.fields[path], order
        self._identity, self._path, self._source = opened.identity, path, source
        sample = self._field.rows(order.slots[:1], order.after[:1])
        self.dtype: torch.dtype = sample.dtype
        """Dtype of the field."""
        self.shape: tuple[int, ...] = tuple(sample.shape[1:])
        """Shape of the field in one row."""

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Return a function that copies rows; see `DatasetColumn`."""
        slots, after = self._order.slots[rows], self._order.after[rows]
        return lambda: self._field.rows(slots, after)

    def close(self) -> None:
        """Do nothing: mapped files are closed when nothing uses them."""

    def __reduce__(self) -> Any:
        """Return how the file is mapped again."""
        return _reopened, (self._source, self._identity, self._path, self._order)


class _Order(NamedTuple):
    """Slots of rows in the order of the dataset, and those of the rows after them, int64 `[rows]` each."""

    slots: Tensor
    after: Tensor


def _reopened(
    source: tuple[Callable[[Path], Any], Path], identity: str, path: FieldPath, order: _Order
) -> _CheckpointColumn:
    opened = source[0](source[1])
    if opened.identity != identity:
        msg = f"another checkpoint was saved to {source[1]} since the dataset was opened: open it again"
        raise CheckpointError(msg)
    return _CheckpointColumn(opened, path, order, source)


# -- checkpoints of this library ---------------------------------------------------------------------------------------


def recognizes_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint directory of a buffer, a storage or an ensemble."""
    kind = format_of(path)  # None if the manifest is damaged or missing, which is an error of this format
    return path.is_dir() and (kind in (_BUFFER, _STORAGE, *_ENSEMBLES) or (kind is None and holds_checkpoint(path)))


def read_checkpoint(path: Path, reading: Reading) -> Contents:  # noqa: ARG001 (a format's signature)
    """Return the rows that `rb.dumps` or `storage.dumps` saved, the oldest episode first. Checksums are not compared.

    Raises:
        KindError: if the checkpoint holds Python objects, or rows of several buffers.
        DamagedFileError: if the manifest or a file is damaged.
    """
    return _contents("checkpoint", _open_own, path)


def _open_own(path: Path) -> _Opened:
    kind = format_of(path) or _BUFFER
    if kind in _ENSEMBLES:
        msg = f"{path} is the checkpoint of an ensemble: load it, and save its members one by one"
        raise KindError(msg)
    reader = CheckpointReader(path, format_name=kind)
    try:
        state = reader.state()
        storage = state["storage"]["state"] if kind == _BUFFER else state
        if "items" in storage:
            msg = f"{path} holds Python objects, which have no fields: save rows of a storage of tensors"
            raise KindError(msg)
        if "hooked" in storage:
            msg = f"{path} holds rows that save hooks have converted: load it, and save it without hooks"
            raise KindError(msg)
        if not storage.get("rows"):
            msg = f"{path} holds no rows"
            raise SchemaError(msg)
        order = kind == _STORAGE or state["writer"]["class"] in _IN_ORDER
        ring = state.get("stamps") or {}
        arrivals = ring.get("arrivals", ring.get("array"))
        identity = reader.save or f"{path.stat().st_mtime_ns}"
        used_up = None if kind == _STORAGE else state["sampler"]["state"].get("free")
        return _Opened(identity, storage, map_fields(reader, storage), state.get("episodes"), order, arrivals, used_up)
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        if isinstance(error, OstinatoError):
            raise
        msg = f"the manifest of {path} does not describe rows ({error!r})"
        raise DamagedFileError(msg) from error


# -- checkpoints of TorchRL --------------------------------------------------------------------------------------------


def recognizes_torchrl(path: Path) -> bool:
    """Whether a path is a directory that TorchRL's `rb.dumps` wrote."""
    return path.is_dir() and is_checkpoint(path)


def read_torchrl(path: Path, reading: Reading) -> Contents:  # noqa: ARG001 (a format's signature)
    """Return the rows of a TorchRL checkpoint, the oldest episode first. Nothing is unpickled.

    Raises:
        CheckpointError: if the storage or writer has no counterpart, or its number of dimensions is ambiguous.
        DamagedFileError: if a file is damaged.
    """
    return _contents("torchrl checkpoint", _open_torchrl, path)


def _open_torchrl(path: Path) -> _Opened:
    folder = Folder(path.absolute())
    try:
        stored = read_rows(folder, None)
    except OptionError as error:
        msg = f"{error}: use ostinato.compat.torchrl.convert_checkpoint, which takes ndim, and open what it writes"
        raise CheckpointError(msg) from error
    storage = stored.state
    if not storage["rows"]:
        msg = f"{path} holds no rows"
        raise SchemaError(msg)
    leaves = storage["schema"]["leaves"]
    names = [column_name(leaf["path"], position) for position, leaf in enumerate(leaves)]
    paths = [tuple(str(key) for key in leaf["path"]) for leaf in leaves]
    fields: dict[Any, SavedField] = {
        path: SavedField(storage["columns"][name]) for path, name in zip(paths, names, strict=True)
    }
    seen = (path / "storage" / "storage_metadata.json").stat()
    return _Opened(f"{seen.st_mtime_ns} {seen.st_size}", storage, fields, None, in_order=True)


# -- both --------------------------------------------------------------------------------------------------------------


def _contents(name: str, open_files: Callable[[Path], _Opened], path: Path) -> Contents:
    path = path.absolute()
    opened = open_files(path)
    storage = opened.storage
    if not opened.fields:
        msg = f"{path} has no field that every row has"
        raise SchemaError(msg)
    notes = _left_out(storage)
    slots, in_order = _present(opened)
    if not slots.shape[0]:
        msg = f"{path} holds no rows: all of them were deleted or used up"
        raise SchemaError(msg)
    table = saved_episodes(opened.episodes, storage, opened.fields) if in_order else None
    if table is not None:
        slots, lengths = rows_by_episode(table)
        if table.masked:
            notes.append(f"Rows of no episode are left out ({number_of(table.masked, 'row')}).")
    else:
        lengths = torch.ones_like(slots)
        why = "nothing tells where episodes end" if in_order else "rows between others have left the buffer"
        notes.append(f"Each row is an episode of its own, since {why}.")
    order = _Order(slots, _after(slots, storage))
    columns: dict[FieldPath, DatasetColumn] = {
        field or ("data",): _CheckpointColumn(opened, field, order, (open_files, path)) for field in opened.fields
    }
    metadata = {"capacity": int(storage["capacity"]), "num_envs": max(1, int(storage["lanes"]))}
    left_out = int(storage["rows"]) - int(slots.shape[0])
    gone = "they were deleted or used up" if table is None else "they belong to no episode"
    return Contents(
        name,
        columns,
        lengths,
        metadata=metadata,
        assumptions=tuple(notes),
        rows_left_out=left_out,
        left_out_because=gone if left_out else "",
    )


def _present(opened: _Opened) -> tuple[Tensor, bool]:
    """Return the slots of the rows that can be sampled, oldest first, and whether they are all that were written."""
    storage = opened.storage
    start = int(storage["cursor"]) if storage["rows"] == storage["capacity"] else 0
    slots = Run(start, storage["rows"], storage["capacity"]).slots(_CPU)
    times = (
        torch.arange(1, slots.shape[0] + 1, device=_CPU) if opened.arrivals is None else opened.arrivals.cpu()[slots]
    )
    present = times > 0
    if opened.used_up is not None:
        present &= ~torch.isin(slots, opened.used_up.cpu())
    return slots[present], opened.in_order and bool(present.all()) and bool((times.diff() > 0).all())


def rows_by_episode(table: EpisodeTable) -> tuple[Tensor, Tensor]:
    """Return the slots of rows, episode by episode, and the rows of each episode."""
    first, lengths, _, _ = table.episodes()
    steps = torch.arange(int(lengths.sum()), device="cpu")
    steps -= torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return table.shift(torch.repeat_interleave(first, lengths), steps), lengths


def _left_out(storage: dict[str, Any]) -> list[str]:
    """Return a sentence for each kind of fields that is not read."""
    kinds = {
        "of which only some rows have a value": [".".join(map(str, late[0])) for late in storage.get("late") or ()],
        "with different lengths in each row": list(storage.get("ragged") or ()),
        "of Python objects": list(storage.get("objects") or ()),
    }
    return [f"Fields {what} are left out: {', '.join(map(str, names))}." for what, names in kinds.items() if names]


OSTINATO = Format("Ostinato", recognizes_checkpoint, read_checkpoint)
TORCHRL = Format("TorchRL", recognizes_torchrl, read_torchrl)
