"""What a buffer's checkpoint holds, read from its files alone: no buffer is made, no row kept, nothing printed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.core.rows import column_name
from ostinato.durable import ArrayRecord, CheckpointReader, read_stream, verify_array
from ostinato.durable.arrays import ColumnRecord
from ostinato.durable.patched_arrays import column_of, mapped_pieces, read_runs
from ostinato.errors import DamagedFileError
from ostinato.tools.tally import Tally, elements

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["ChainReport", "CheckpointReport", "FieldReport", "LinkReport", "PriorityReport", "inspect_checkpoint"]

_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FieldReport:
    """One field of the rows."""

    name: str
    """Keys from the root, joined by dots; `(data)` where a row is a bare tensor, `(objects)` for a list storage."""
    dtype: str
    """Dtype, or `object`."""
    shape: tuple[int, ...]
    """Shape of one row's value."""
    rows: int
    """Rows that have the field."""
    nbytes: int
    """Bytes of its values."""
    minimum: float | int | None = None
    """Smallest number, NaN left out; None without data, for complex numbers, objects, or if data was not read."""
    maximum: float | int | None = None
    """Largest number; None as above."""
    mean: float | None = None
    """Mean; None as above."""
    nan_count: int | None = None
    """Numbers that are NaN; None as above."""


@dataclass(frozen=True, slots=True)
class PriorityReport:
    """The priorities of a prioritized buffer."""

    rows: int
    """Rows that have one: all."""
    alpha: float
    """Exponent of priorities."""
    beta: float
    """Exponent of importance weights."""
    minimum: float | None = None
    """Smallest priority; None without rows, or if data was not read."""
    mean: float | None = None
    """Mean; None as above."""
    maximum: float | None = None
    """Largest; None as above."""
    zero_share: float | None = None
    """Share of rows with priority 0; None as above."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One file of an array: its base, or a patch over what comes before it."""

    kind: str
    """`base` or `patch`."""
    rows: int
    """Rows that it holds."""
    runs: int
    """Runs of rows that follow each other."""
    nbytes: int
    """Bytes of its file."""


@dataclass(frozen=True, slots=True)
class ChainReport:
    """An array that incremental saves have added to; `compact` folds it into one file."""

    name: str
    """Name of the array: `rows.0` holds the packed rows of several fields."""
    links: tuple[LinkReport, ...]
    """Its files, in the order in which they are laid over each other."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint."""

    path: str
    """Its directory."""
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
    """Rows saved."""
    capacity: int
    """Rows that fitted into the buffer."""
    rows_written: int
    """Rows ever written."""
    rows_drawn: int
    """Rows ever sampled."""
    exact_resume: bool
    """Whether the state of a generator was saved, so that sampling goes on with the same rows."""
    nbytes: int
    """Bytes of all files, the manifest among them."""
    verified: bool
    """Whether every file was read and its checksums compared."""
    fields: tuple[FieldReport, ...]
    """The fields of the rows, in their order."""
    priorities: PriorityReport | None = None
    """Priorities; None where the sampler has none."""
    chains: tuple[ChainReport, ...] = ()
    """Arrays that have patches of incremental saves."""


def inspect_checkpoint(path: str | os.PathLike[str], *, read_data: bool = True) -> CheckpointReport:
    """Report on a checkpoint that `dumps` wrote.

    Files are read block by block: the extra memory is some tens of MB, whatever their size (and one byte per row for a
    field that only some rows have).

    Args:
        path: Directory of the checkpoint.
        read_data: Read every file, compare checksums and make statistics; without it only the manifest is read and
            the size of each file compared.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CheckpointError: if it is one that this release cannot read.
        DamagedFileError: naming the file that is damaged.

    Example:
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
    try:
        return _report(root, reader, read_data=read_data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DamagedFileError):
            raise
        msg = f"the manifest of {root} does not describe a replay buffer ({error!r}): it was not written by dumps"
        raise DamagedFileError(msg) from error


def _report(root: Path, reader: CheckpointReader, *, read_data: bool) -> CheckpointReport:
    state = reader.state()
    storage = state["storage"]["state"]
    columns = list(_columns(reader, storage))
    streamed = {column.name for column in columns if _has_one_file(reader, column.name)}
    if read_data:
        for name, record in reader.arrays.items():
            if name not in streamed:
                verify_array(root, record)
    fields = tuple(_measured(root, reader, column) if read_data else column.field for column in columns)
    manifest = sum(file.stat().st_size for file in root.glob("manifest.json"))
    return CheckpointReport(
        path=str(root),
        format=FORMAT,
        version=".".join(str(part) for part in reader.version),
        storage=str(state["storage"]["class"]),
        sampler=str(state["sampler"]["class"]),
        writer=str(state["writer"]["class"]),
        rows=int(storage["rows"] if "rows" in storage else storage["items"]),
        capacity=int(storage["capacity"]),
        rows_written=int(state["rows_written"]),
        rows_drawn=int(state["rows_drawn"]),
        exact_resume=state["generator"] is not None,
        nbytes=manifest + sum(record.total_bytes for record in reader.arrays.values()),
        verified=read_data,
        fields=fields,
        priorities=_priorities(state["sampler"]["state"], read_data=read_data),
        chains=tuple(_chain(root, name, record) for name, record in reader.arrays.items() if record.patches),
    )


def _has_one_file(reader: CheckpointReader, name: str) -> bool:
    record = reader.record(name)
    return isinstance(record, ArrayRecord) and not record.patches


def _chain(root: Path, name: str, record: ArrayRecord) -> ChainReport:
    base = LinkReport("base", record.base_rows, 1, record.nbytes)
    patches = zip(read_runs(root, record), record.patches, strict=True)
    links = (LinkReport("patch", int(runs[:, 1].sum()), len(runs), patch.nbytes) for runs, patch in patches)
    return ChainReport(name, (base, *links))


def _priorities(state: Any, *, read_data: bool) -> PriorityReport | None:
    """Report on the state of a prioritized sampler; the manifest's loader has compared its checksums."""
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
    """A field, the name of its array, and which rows have it (None: all)."""

    field: FieldReport
    name: str
    has: Tensor | None = None


def _columns(reader: CheckpointReader, storage: Any) -> Iterator[_Column]:
    """Find the fields: those that every row has, then those that came later."""
    if "items" in storage:
        field = FieldReport("(objects)", "object", (), int(storage["items"]), reader.record("items").nbytes)
        yield _Column(field, "items")
        return
    if "hooked" in storage:
        yield from _converted(reader, storage["hooked"]["tree"], ())
        return
    late = {name: (keys, mask) for keys, name, mask in storage["late"]}
    masks = {mask for _, mask in late.values()}
    leaves = storage["schema"]["leaves"] if storage["schema"] else ()
    paths = {column_name(leaf["path"], position): leaf["path"] for position, leaf in enumerate(leaves)}
    for name in storage.get("objects", ()):
        # the path stands behind the position, as in the names of columns
        shown, ends = name.partition(".")[2], reader.record(f"{name}.ends")
        text = reader.record(f"{name}.text")
        nbytes = ends.nbytes + text.nbytes
        yield _Column(FieldReport(shown, "object", (), int(storage["rows"]), nbytes), f"{name}.text")
    for name in storage["columns"]:
        if name in masks or name == "apart":
            continue
        keys, mask = late[name] if name in late else (paths[name.removesuffix(".apart")], None)
        record = reader.record(name)
        has = None if mask is None else reader.read(mask)
        rows = record.shape[0] if has is None else int(has.sum())
        shown = ".".join(str(key) for key in keys) or "(data)"
        if name not in paths and name not in late:
            shown += " (kept apart)"  # the rest of a single copy is the field of the row that follows
        yield _Column(FieldReport(shown, record.dtype, record.shape[1:], rows, record.nbytes), name, has)


def _converted(reader: CheckpointReader, tree: Any, path: tuple[Any, ...]) -> Iterator[_Column]:
    """Find the arrays that saving hooks made of the rows."""
    for key, child in zip(tree.get("keys", ()), tree.get("children", ()), strict=True):
        yield from _converted(reader, child, (*path, key))
    if tree["kind"] == "tensor":
        record = reader.record(tree["name"])
        count, *shape = record.shape or (1,)
        shown = f"{'.'.join(map(str, path)) or '(data)'} (converted by hooks)"
        yield _Column(FieldReport(shown, record.dtype, tuple(shape), count, record.nbytes), tree["name"])


def _measured(root: Path, reader: CheckpointReader, column: _Column) -> FieldReport:
    """Read a column, comparing the checksum of each block, and add its statistics."""
    record, field = reader.record(column.name), column.field
    if field.dtype == "object" or record.torch_dtype.is_complex:
        if isinstance(record, ArrayRecord):
            verify_array(root, record)
        return field
    width, start, tally = math.prod(field.shape), 0, Tally()
    for numbers in _numbers(root, reader, column.name):
        end = start + numbers.numel()
        tally.see(numbers if column.has is None else numbers[_present(column.has, width, start, end)])
        start = end
    return replace(field, minimum=tally.minimum, maximum=tally.maximum, mean=tally.mean, nan_count=tally.nan_count)


def _numbers(root: Path, reader: CheckpointReader, name: str) -> Iterator[Tensor]:
    """Yield the elements of a field in order; checksums of files of its own are compared, others were."""
    record = reader.record(name)
    if isinstance(record, ArrayRecord) and not record.patches:
        raw = replace(record, dtype="uint8", shape=(record.nbytes,))  # the bytes of the file as they are
        yield from elements(read_stream(root, raw), record.torch_dtype)
        return
    whole = reader.whole(record.of) if isinstance(record, ColumnRecord) else record
    offset = record.offset if isinstance(record, ColumnRecord) else 0
    for rows in mapped_pieces(root, whole, _PIECE_BYTES):
        yield column_of(rows, offset, record.torch_dtype, record.shape[1:]).reshape(-1)


def _present(has: Tensor, width: int, start: int, end: int) -> Tensor:
    """Spread a mask over rows of `width` elements to one over the elements `[start, end)`."""
    first = start // width
    rows = has[first : -(-end // width)]
    return rows.repeat_interleave(width)[start - first * width : end - first * width]
