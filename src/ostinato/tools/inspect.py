"""Reports on the contents of a checkpoint or a directory of trajectories, read from the files without a buffer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch

from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.core.rows import column_name
from ostinato.datasets.checkpoints import read_checkpoint
from ostinato.datasets.minari import recognizes_minari
from ostinato.datasets.rlinf import read_rlinf
from ostinato.durable import ArrayRecord, CheckpointReader, verify_array
from ostinato.durable.arrays import read_blocks, read_runs
from ostinato.durable.manifest import format_of, holds_checkpoint
from ostinato.durable.progress import BYTES, TRAJECTORIES, Progress
from ostinato.durable.tensorfile import flatten, show
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    KindError,
    OstinatoError,
    SchemaError,
    StorageMemoryError,
)
from ostinato.groups.recovery import FORMAT as GROUPS
from ostinato.trajectories import TrajectoryReplayBuffer
from ostinato.trajectories.index import JOURNAL, METADATA, Entry, has_index, read_index

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from ostinato.datasets.dataset import Contents
    from ostinato.durable.progress import ProgressOption

_PIECE_BYTES = 2**20
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class FieldReport:
    """One field of the rows."""

    name: str
    """Keys joined by dots; `(data)` for rows that are single tensors, `(objects)` for a list storage."""
    dtype: str
    """Dtype, or `object`."""
    shape: tuple[int, ...]
    """Shape of one row."""
    rows: int
    """Number of rows that have the field."""
    nbytes: int
    """Bytes of the values."""
    minimum: float | int | None = None
    """Minimum, without NaN; None without values, for complex numbers, for objects, or if data was not read."""
    maximum: float | int | None = None
    """Maximum; None as for `minimum`."""
    mean: float | None = None
    """Mean; None as for `minimum`."""
    nan_count: int | None = None
    """Number of NaN; None as for `minimum`."""


@dataclass(frozen=True, slots=True)
class PriorityReport:
    """The priorities of a prioritized buffer."""

    rows: int
    """Number of rows, which all have a priority."""
    alpha: float
    """Exponent of the priorities."""
    beta: float
    """Exponent of the importance weights."""
    minimum: float | None = None
    """Minimum; None without rows, or if data was not read."""
    mean: float | None = None
    """Mean; None as for `minimum`."""
    maximum: float | None = None
    """Maximum; None as for `minimum`."""
    zero_share: float | None = None
    """Fraction of rows with priority 0; None as for `minimum`."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One file of an array: its base or a patch."""

    kind: str
    """`base` or `patch`."""
    rows: int
    """Number of rows in the file."""
    runs: int
    """Number of ranges of consecutive rows."""
    nbytes: int
    """Bytes of the file."""


@dataclass(frozen=True, slots=True)
class ChainReport:
    """An array with patches of incremental saves; `compact` merges them into one file."""

    name: str
    """Name of the array; `rows.0` has the packed rows of several fields."""
    links: tuple[LinkReport, ...]
    """The files, in the order in which they are applied."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint."""

    path: str
    """The directory."""
    format: str
    """Kind of checkpoint."""
    version: str
    """Version of the format."""
    storage: str
    """Class of the storage."""
    sampler: str
    """Class of the sampler."""
    writer: str
    """Class of the writer."""
    rows: int
    """Number of rows that can be sampled; all saved ones if data was not read."""
    capacity: int
    """Capacity of the buffer."""
    episodes: int | None
    """Number of episodes; None for Python objects, without rows, or if data was not read."""
    rows_written: int
    """Number of rows ever written."""
    rows_drawn: int
    """Number of rows ever sampled."""
    exact_resume: bool
    """Whether the state of a generator was saved, so that sampling resumes with the same rows."""
    nbytes: int
    """Bytes of all files, including the manifest."""
    verified: bool
    """Whether all files were read and their checksums verified."""
    fields: tuple[FieldReport, ...]
    """The fields of the rows, in order."""
    priorities: PriorityReport | None = None
    """The priorities; None if the sampler has none."""
    chains: tuple[ChainReport, ...] = ()
    """Arrays with patches of incremental saves."""
    assumptions: tuple[str, ...] = ()
    """What the checkpoint does not say of its episodes, and how they were counted."""
    stored_rows: int = 0
    """Number of saved rows."""
    left_out_because: str = ""
    """Why some of them cannot be sampled."""


def inspect_checkpoint(
    path: str | os.PathLike[str], *, read_data: bool = True, progress: ProgressOption = None
) -> CheckpointReport:
    """Return a report on a checkpoint that `dumps` wrote.

    Files are read in blocks: this takes some tens of MB of memory for files of any size, plus one byte per row for a
    field that only some rows have.

    Args:
        path: Directory of the checkpoint.
        read_data: Read all files, verify checksums and compute statistics. Otherwise only the manifest is read and the
            size of each file is checked.
        progress: The bytes read and their total; see `ostinato.ProgressOption`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointError: The version is not supported.
        DamagedFileError: A file is damaged; the message names it.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> indices = rb.extend({"reward": torch.tensor([1.0, 2.0, 6.0])})
        >>> rb.dumps("saved")
        >>> inspect_checkpoint("saved").fields[0].mean
        3.0
    """
    root = Path(path)
    reader = CheckpointReader(root, format_name=FORMAT)
    with Progress(progress, "inspect", reader.nbytes if read_data else 0, unit=BYTES):
        try:
            return _checkpoint_report(root, reader, read_data=read_data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, DamagedFileError):
                raise
            msg = f"the manifest of {root} does not describe a replay buffer ({error!r}): it was not written by dumps"
            raise DamagedFileError(msg) from error


def _checkpoint_report(root: Path, reader: CheckpointReader, *, read_data: bool) -> CheckpointReport:
    state = reader.state()
    storage = state["storage"]["state"]
    columns = list(_columns(reader, storage))
    streamed = {column.name for column in columns if _has_one_file(reader, column.name)}
    if read_data:
        for name, record in reader.arrays.items():
            if name not in streamed:
                verify_array(root, record)
    fields = tuple(_with_statistics(root, reader, column) if read_data else column.field for column in columns)
    manifest = sum(file.stat().st_size for file in root.glob("manifest.json"))
    contents = _contents(read_checkpoint, root) if read_data else None
    stored = int(storage["rows"] if "rows" in storage else storage["items"])
    return CheckpointReport(
        path=str(root),
        format=FORMAT,
        version=".".join(str(part) for part in reader.version),
        storage=str(state["storage"]["class"]),
        sampler=str(state["sampler"]["class"]),
        writer=str(state["writer"]["class"]),
        rows=stored - (0 if contents is None else contents.rows_left_out),
        capacity=int(storage["capacity"]),
        episodes=None if contents is None else int(contents.lengths.shape[0]),
        rows_written=int(state["rows_written"]),
        rows_drawn=int(state["rows_drawn"]),
        exact_resume=state["generator"] is not None,
        nbytes=manifest + sum(record.total_bytes for record in reader.arrays.values()),
        verified=read_data,
        fields=fields,
        priorities=_priorities(state["sampler"]["state"], read_data=read_data),
        chains=tuple(_chain(root, name, record) for name, record in reader.arrays.items() if record.patches),
        assumptions=() if contents is None else contents.assumptions,
        stored_rows=stored,
        left_out_because="" if contents is None else contents.left_out_because,
    )


def _contents(read: Callable[[Path, Any], Contents], root: Path) -> Contents | None:
    """Return the rows of a directory as a dataset, whose episodes are counted; None if they are none."""
    try:
        return read(root, None)
    except (KindError, SchemaError):
        return None


def _has_one_file(reader: CheckpointReader, name: str) -> bool:
    record = reader.record(name)
    return record.of is None and not record.patches


def _chain(root: Path, name: str, record: ArrayRecord) -> ChainReport:
    base = LinkReport("base", record.base_rows, 1, record.files[0].nbytes)
    patches = zip(read_runs(root, record), record.patches, strict=True)
    links = (LinkReport("patch", int(runs[:, 1].sum()), len(runs), patch.nbytes) for runs, patch in patches)
    return ChainReport(name, (base, *links))


def _priorities(state: Any, *, read_data: bool) -> PriorityReport | None:
    """Return the report on the state of a prioritized sampler; its checksums were verified with the manifest."""
    kept = state.get("priorities") if isinstance(state, dict) else None
    if kept is None:
        return None
    report = PriorityReport(int(kept.shape[0]), float(state["alpha"]), float(state["beta"]))
    if not read_data or kept.numel() == 0:
        return report
    low, high = kept.aminmax()
    zeros = float((kept == 0).double().mean())
    return replace(report, minimum=float(low), mean=float(kept.mean()), maximum=float(high), zero_share=zeros)


@dataclass(frozen=True, slots=True)
class _Column:
    """A field, the name of its array, and the mask of rows that have it (None: all)."""

    field: FieldReport
    name: str
    has: Tensor | None = None


def _column(
    reader: CheckpointReader, shown: str, rows: int, *names: str, dtype: str = "", shape: Any = None, has: Any = None
) -> _Column:
    """Return a field of some arrays, whose first one has its values."""
    record, nbytes = reader.record(names[0]), sum(reader.record(name).nbytes for name in names)
    form = record.shape[1:] if shape is None else tuple(shape)
    return _Column(FieldReport(shown or "(data)", dtype or record.dtype, form, rows, nbytes), names[0], has)


def _columns(reader: CheckpointReader, storage: Any) -> Iterator[_Column]:
    """Yield the fields: first those that every row has, then those that only some rows have."""
    if "items" in storage:
        yield _column(reader, "(objects)", int(storage["items"]), "items", dtype="object", shape=())
        return
    if "hooked" in storage:
        yield from _hooked_columns(reader, storage["hooked"]["tree"], ())
        return
    rows = int(storage["rows"])
    late = {name: (keys, mask) for keys, name, mask in storage["late"]}
    parts = {"apart", *(mask for _, mask in late.values())}
    leaves = storage["schema"]["leaves"] if storage["schema"] else ()
    known = {column_name(leaf["path"], position): leaf for position, leaf in enumerate(leaves)}
    for name in storage.get("objects", ()):
        shown = name.partition(".")[2]  # the path follows the position, as in the names of columns
        yield _column(reader, shown, rows, f"{name}.text", f"{name}.ends", dtype="object", shape=())
    coded, ragged = storage.get("codec") or {}, storage.get("ragged") or ()
    for name, leaf in known.items():
        names = (f"{name}.{'blobs' if name in coded else 'values'}", f"{name}.ends")
        shown = _shown(leaf["path"]) or "(data)"
        if name in coded:
            shown += f" ({leaf['dtype']}, {coded[name]})"
            yield _column(reader, shown, rows, *names, dtype="object", shape=leaf["shape"])
        elif name in ragged:
            shown += f" (ragged, {reader.record(names[0]).shape[0]} values)"
            yield _column(reader, shown, reader.record(names[1]).shape[0], *names)
        parts |= {*names} if name in coded or name in ragged else set()
    for name in storage["columns"]:
        if name in parts:
            continue
        keys, mask = late[name] if name in late else (known[name.removesuffix(".apart")]["path"], None)
        has = None if mask is None else reader.read(mask)
        count = reader.record(name).shape[0] if has is None else int(has.sum())
        # with single_copy, other rows use the field of the next row
        shown = (_shown(keys) or "(data)") + ("" if name in known or name in late else " (kept apart)")
        yield _column(reader, shown, count, name, has=has)


def _shown(path: Any) -> str:
    return ".".join(map(str, path))


def _hooked_columns(reader: CheckpointReader, tree: Any, path: tuple[Any, ...]) -> Iterator[_Column]:
    """Yield the arrays that saving hooks made from the rows."""
    for key, child in zip(tree.get("keys", ()), tree.get("children", ()), strict=True):
        yield from _hooked_columns(reader, child, (*path, key))
    if tree["kind"] in {"tensor", "nested"}:
        rows = (*reader.record(tree["name"]).shape, 1)[0]
        yield _column(reader, f"{_shown(path) or '(data)'} (converted by hooks)", rows, tree["name"])


def _with_statistics(root: Path, reader: CheckpointReader, column: _Column) -> FieldReport:
    """Read a column, verify the checksum of each block, and return the field with its statistics."""
    record, field = reader.record(column.name), column.field
    if field.dtype == "object" or record.torch_dtype.is_complex:
        if record.of is None:
            verify_array(root, record)
        return field
    width, start, statistics = math.prod(field.shape), 0, RunningStatistics()
    for numbers in _numbers(root, reader, column.name):
        end = start + numbers.numel()
        statistics.update(numbers if column.has is None else numbers[_present(column.has, width, start, end)])
        start = end
    return statistics.describe(field)


def _numbers(root: Path, reader: CheckpointReader, name: str) -> Iterator[Tensor]:
    """Yield the elements of a field in order; verifies the checksum of a field with its own file."""
    record = reader.record(name)
    if record.of is None and not record.patches:
        yield from elements(read_blocks(root, record.files[0]), record.torch_dtype)
        return
    for rows in torch.split(reader.open_mapped(name), max(1, _PIECE_BYTES // max(1, record.row_bytes))):
        yield rows.reshape(-1)


def _present(has: Tensor, width: int, start: int, end: int) -> Tensor:
    """Expand a mask over rows of `width` elements to a mask over the elements `[start, end)`."""
    first = start // width
    rows = has[first : -(-end // width)]
    return rows.repeat_interleave(width)[start - first * width : end - first * width]


_PIECE = 2**18
"""Number of elements processed at a time: 2 MiB as float64."""


@final
class RunningStatistics:
    """Count, bounds and mean of a stream of numbers; NaN is counted separately."""

    def __init__(self) -> None:
        self.count = 0
        """Numbers that are not NaN."""
        self.nan_count = 0
        self.minimum: float | int | None = None
        """Smallest number; None if there are none."""
        self.maximum: float | int | None = None
        """Largest number; None if there are none."""
        self._sum = 0.0

    def update(self, numbers: Tensor) -> None:
        """Add real numbers of any dtype, `[n]`."""
        for piece in torch.split(numbers, _PIECE):
            self._update(piece)

    def _update(self, piece: Tensor) -> None:
        # Integers stay integers, so that their bounds are exact.
        exact = not piece.is_floating_point() and piece.dtype is not torch.uint64
        wide = piece.to(torch.int64 if exact else torch.float64)
        if not exact:
            missing = wide.isnan()
            self.nan_count += int(missing.sum())
            wide = wide[~missing]
        if wide.numel() == 0:
            return
        low, high = wide.min().item(), wide.max().item()
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        self._sum += float(wide.double().sum())
        self.count += wide.numel()

    @property
    def mean(self) -> float | None:
        """Mean; None if there are no numbers or infinities of both signs."""
        mean = self._sum / self.count if self.count else math.nan
        return None if math.isnan(mean) else mean

    def describe(self, field: FieldReport) -> FieldReport:
        """Return a field with these statistics."""
        return replace(field, minimum=self.minimum, maximum=self.maximum, mean=self.mean, nan_count=self.nan_count)


def elements(blocks: Iterable[bytearray], dtype: torch.dtype) -> Iterator[Tensor]:
    """Convert a stream of bytes to tensors of whole elements, `[n]` each. No copy of a block of whole elements.

    Args:
        blocks: Bytes of any lengths; an element can span two blocks.
        dtype: Dtype of the elements.
    """
    rest = b""
    for block in blocks:
        raw = bytearray(rest) + block if rest else block
        whole = len(raw) // dtype.itemsize * dtype.itemsize
        if whole:
            yield torch.frombuffer(raw, dtype=dtype, count=whole // dtype.itemsize)
        rest = bytes(raw[whole:])


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One key of the trajectories."""

    name: str
    """Keys joined by dots."""
    dtype: str
    """Dtype."""
    shape: tuple[int, ...]
    """Shape of one transition."""
    trajectories: int
    """Number of trajectories that have the key with this dtype and shape."""
    nbytes: int
    """Bytes of its rows in all trajectories."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """One directory of trajectories."""

    path: str
    """The directory."""
    trajectory_format: str
    """`pt`, `pkl` or `safetensors`."""
    trajectories: int
    """Number of trajectories."""
    total_samples: int
    """Number of transitions: the sum of T * B."""
    trajectory_counter: int
    """The next id."""
    seed: int
    """Seed of the buffer."""
    exact_resume: bool
    """Whether the state of a generator was saved, so that sampling resumes with the same rows."""
    journal: bool
    """Whether there is a journal: the directory is in use, or its process was killed."""
    models: int
    """Number of different model weights."""
    shapes: tuple[tuple[int, ...], ...]
    """Different `[T, B]`."""
    episodes: int | None
    """Number of episodes; None if files were not read, for pickles, or if trajectories have different fields."""
    unlisted: tuple[str, ...]
    """Trajectory files that are not in the index: removed or incomplete."""
    nbytes: int | None = None
    """Bytes of the files; None if they were not read."""
    keys: tuple[KeyReport, ...] = ()
    """Keys of the batches; empty if the files were not read."""


def inspect_store(
    path: str | os.PathLike[str],
    *,
    read_headers: bool = True,
    allow_pickle: bool = False,
    progress: ProgressOption = None,
) -> StoreReport:
    """Return a report on a directory of trajectories.

    Args:
        path: The directory.
        read_headers: Read the size, keys and flags of each file (a `pkl` file is unpickled). Otherwise only the index
            is read.
        allow_pickle: Allow unpickling, which executes the code in the files.
        progress: The trajectories read and their total; see `ostinato.ProgressOption`.

    Raises:
        CheckpointNotFoundError: There are no trajectories.
        CheckpointError: The trajectories are pickled, and `allow_pickle` is False.
        DamagedFileError: A file is damaged; the message names it.
    """
    root = Path(path)
    entries: list[Entry] = []
    with Progress(progress, "inspect", unit=TRAJECTORIES) as bar:
        index = read_index(root)
        infos = index.infos.values()
        if read_headers:
            index.check_pickle(allow_pickle=allow_pickle)
        bar.begin(len(infos))
        for _, found in index.check_files(index.infos if read_headers else (), allow_pickle=allow_pickle):
            if not isinstance(found, Entry):
                raise found
            entries.append(found)
            bar.advance()
        unread = not read_headers or index.head.trajectory_format == "pkl"
        contents = None if unread else _contents(read_rlinf, root)
    return StoreReport(
        path=str(root),
        trajectory_format=index.head.trajectory_format,
        trajectories=len(index.infos),
        total_samples=sum(info.num_samples for info in infos),
        trajectory_counter=index.head.counter,
        seed=index.head.seed,
        exact_resume=index.head.generator is not None,
        journal=(root / JOURNAL).exists(),
        models=len({info.model_weights_id for info in infos}),
        shapes=tuple(sorted({info.shape[:2] for info in infos})),
        episodes=None if contents is None else int(contents.lengths.shape[0]),
        unlisted=index.unlisted(),
        nbytes=sum(e.file.nbytes for e in entries if e.file is not None) if read_headers else None,
        keys=_keys(entries),
    )


def _keys(entries: list[Entry]) -> tuple[KeyReport, ...]:
    found: dict[Any, list[int]] = {}
    for entry in entries:
        for path, (dtype, shape) in entry.layout.signature.items():
            counts = found.setdefault((path, dtype, shape), [0, 0])
            counts[0] += 1
        for field, nbytes in zip(entry.layout.fields, entry.layout.field_bytes, strict=True):
            found[field.path, field.dtype, field.row_shape][1] += nbytes
    return tuple(KeyReport(show(path), dtype, shape, *counts) for (path, dtype, shape), counts in found.items())


class BatchKey(NamedTuple):
    """One key of a batch."""

    name: str
    """Keys joined by dots."""
    dtype: str
    """Dtype."""
    shape: tuple[int, ...]
    """Shape of the batch, rows first."""


@dataclass(frozen=True, slots=True)
class SampleReport:
    """The contents of one sampled batch."""

    path: str
    """The directory."""
    trajectories: int
    """Number of trajectories."""
    total_samples: int
    """Number of transitions in the directory."""
    num_samples: int
    """Transitions of the batch."""
    sample_ms: float
    """Time to draw and read the batch."""
    keys: tuple[BatchKey, ...]
    """The keys of the batch."""


def sample_store(
    path: str | os.PathLike[str],
    num_samples: int,
    *,
    enable_cache: bool = False,
    cache_size: int = 5,
    sample_window_size: int = 0,
    allow_pickle: bool = False,
) -> SampleReport:
    """Load a directory of trajectories, sample one batch and return a report on it. Checksums are not compared.

    Args:
        path: The directory.
        num_samples: Transitions of the batch.
        enable_cache: Cache trajectories that can only be read completely (`pkl`).
        cache_size: Number of trajectories to cache.
        sample_window_size: Sample from this number of most recent trajectories; 0: from all.
        allow_pickle: Allow unpickling, which executes the code in the files.

    Raises:
        CheckpointNotFoundError: There are no trajectories.
        CheckpointError: The trajectories are pickled, and `allow_pickle` is False.
        DamagedFileError: A file is damaged; the message names it.
        StorageMemoryError: There is not enough memory for the batch.
    """
    buffer = TrajectoryReplayBuffer(
        enable_cache=enable_cache,
        cache_size=cache_size,
        sample_window_size=sample_window_size,
        allow_pickle=allow_pickle,
    )
    buffer.load_checkpoint(path)
    start = time.perf_counter()
    try:
        batch = buffer.sample(num_samples)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OstinatoError):
            raise
        msg = f"not enough memory for a batch of {num_samples} transitions, reduce num_samples: {error}"
        raise StorageMemoryError(msg) from error
    seconds = time.perf_counter() - start
    keys = tuple(
        BatchKey(show(key), str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in flatten(batch, where="batch").items()
    )
    return SampleReport(str(path), len(buffer), buffer.total_samples, num_samples, seconds * 1000, keys)


def kind_of(path: str | os.PathLike[str]) -> Literal["trajectories", "buffer", "groups"]:
    """Return the kind of data in a directory: trajectories, the checkpoint that `dumps` of a buffer wrote, or groups.

    Raises:
        CheckpointNotFoundError: None of them; the message describes what is there instead.
        CheckpointError: The path is a file.
    """
    root = Path(path)
    if is_store(root):
        return "trajectories"
    if holds_checkpoint(root):
        return "groups" if format_of(root) == GROUPS else "buffer"
    if not root.is_dir():
        if root.exists():
            msg = f"{root} is a file: give a directory of trajectories, or one that dumps() wrote"
            raise CheckpointError(msg)
        msg = f"there is no directory {root}"
        raise CheckpointNotFoundError(msg)
    if (root / "storage" / "storage_metadata.json").exists():
        msg = f"{root} is a checkpoint of TorchRL: convert it first (ostinato convert)"
        raise CheckpointNotFoundError(msg)
    inside = sorted(child.name for child in root.iterdir() if is_store(child) or holds_checkpoint(child))
    if inside:
        names = ", ".join(inside[:_MAX_NAMES]) + (", ..." if len(inside) > _MAX_NAMES else "")
        msg = f"{root} contains directories with data: give one of {names} in it"
        if all(is_store(root / name) and name.startswith("rank_") for name in inside):
            msg += ", or merge them first (ostinato merge)"
    else:
        msg = f"{root} has neither trajectories nor a checkpoint that dumps() wrote"
    raise CheckpointNotFoundError(msg)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory has trajectories, as opposed to the checkpoint of a buffer."""
    root = Path(path)
    return has_index(root) or ((root / METADATA).exists() and not recognizes_minari(root))  # which has such a file, too
