"""Reads the rows of a batch: from memory if the trajectory is cached, else by positioned reads of its file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato.durable.arrays import DTYPES, raw_view, shape_nbytes
from ostinato.durable.files import OpenFiles, read_pieces
from ostinato.durable.tensorfile import Placed, nest
from ostinato.errors import DamagedFileError
from ostinato.trajectories.layout import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.durable.files import OpenFile
    from ostinato.durable.tensorfile import TreePath
    from ostinato.trajectories.index import Entry, SavedFile, TrajectoryData
    from ostinato.trajectories.layout import Layout, RowSchema, Signature
    from ostinato.trajectories.trajectory_list import DrawnTransitions

__all__ = ["RowReader"]

_MAX_OPEN = 128
"""Files that one batched read has open at a time."""
_LARGEST_BLOCK = 31 * 2**20
"""glibc adapts its threshold to blocks of up to 32 MiB."""


class _Target(NamedTuple):
    """The batch that is filled: its tensors, and views of the non-empty ones as bytes `[N, bytes of a row]`."""

    tensors: dict[TreePath, Tensor]
    rows: dict[TreePath, np.ndarray]


class _Group(NamedTuple):
    """Trajectories with one schema whose fields are contiguous in their files; `numbers`: positions in the draw."""

    entries: list[Entry]
    files: list[SavedFile]
    numbers: list[int]


@final
class RowReader:
    """Reads rows. Thread-safe.

    Args:
        open_files: Files kept open.
        read_whole: Reads an entry whose file can only be read as a whole.
    """

    def __init__(self, open_files: int, read_whole: Callable[[Entry], TrajectoryData]) -> None:
        self.files = OpenFiles(open_files)
        self._read_whole = read_whole
        self._largest = 0

    def read(self, drawn: DrawnTransitions, fields: Signature) -> dict[str, Any]:
        """Return the rows as nested dicts of new CPU tensors `[N, *row]`, in the order in which they were drawn.

        Raises:
            DamagedFileError: A file is missing or too short; the message names it.
        """
        target = self._target(len(drawn.which), fields)
        order = np.argsort(drawn.which, kind="stable")
        starts = np.searchsorted(drawn.which[order], np.arange(len(drawn.entries) + 1))
        groups: dict[RowSchema, _Group] = {}
        for number, entry in enumerate(drawn.entries):
            data, file = entry.data, entry.file  # in this order: the saver sets the file before it frees the data
            if data is None and file is not None and file.strides is None and -1 not in file.offsets:
                group = groups.setdefault(entry.layout.schema, _Group([], [], []))
                group.entries.append(entry)
                group.files.append(file)
                group.numbers.append(number)
                continue
            chosen = order[starts[number] : starts[number + 1]]
            rows = rows_of([entry.layout], drawn.which[chosen], drawn.transitions[chosen])
            if data is None and file is not None and file.strides is not None:
                _read_strided(target, entry, file, chosen, rows, self._open(entry))
            else:
                _copy_from_memory(target, entry.layout, data or self._read_whole(entry), chosen, rows)
        for schema, group in groups.items():
            self._read_contiguous(target, schema, group, drawn)
        return nest(target.tensors)

    def _open(self, entry: Entry) -> OpenFile:
        directory = entry.file.directory if entry.file is not None else None
        return self.files.get((directory, entry.id), entry.path)

    def _target(self, count: int, fields: Signature) -> _Target:
        self._expect(count * sum(shape_nbytes(shape, DTYPES[dtype]) for dtype, shape in fields.values()))
        tensors = {
            path: torch.empty((count, *row_shape), dtype=DTYPES[dtype], device="cpu")
            for path, (dtype, row_shape) in fields.items()
        }
        rows = {
            path: np.frombuffer(raw_view(tensor), dtype=np.uint8).reshape(count, -1)
            for path, tensor in tensors.items()
            if tensor.numel()
        }
        return _Target(tensors, rows)

    def _expect(self, nbytes: int) -> None:
        """Make glibc reuse the memory of freed batches of `nbytes` instead of returning it to the system.

        Large blocks of new memory cost a page fault for each 4 KiB (2.5 ms for 256 pairs of images). glibc keeps freed
        memory once a larger block was freed, so one is allocated and freed here, untouched. Other allocators ignore it.
        """
        if nbytes > self._largest:
            self._largest = nbytes
            torch.empty(min(2 * nbytes, _LARGEST_BLOCK), dtype=torch.uint8, device="cpu")

    def _read_contiguous(self, target: _Target, schema: RowSchema, group: _Group, drawn: DrawnTransitions) -> None:
        """Read rows by their offsets, ordered by file and offset, a bounded number of files at a time."""
        mine = np.full(len(drawn.entries), -1)
        mine[group.numbers] = np.arange(len(group.numbers))
        chosen = np.flatnonzero(mine[drawn.which] >= 0)
        file_of = mine[drawn.which[chosen]]
        paths = list(schema.signature)
        used = [number for number, path in enumerate(paths) if path in target.rows]
        widths = schema.row_bytes[used]
        bases = np.array([file.offsets for file in group.files], dtype=np.int64)[:, used]
        starts = np.array([target.rows[paths[number]].ctypes.data for number in used], dtype=np.int64)
        rows = rows_of([entry.layout for entry in group.entries], file_of, drawn.transitions[chosen])
        offsets = (bases[file_of] + rows[:, used] * widths).reshape(-1)
        targets = (starts + chosen[:, None] * widths).reshape(-1)
        files = np.repeat(file_of, len(used))
        order = np.lexsort((offsets, files))
        files, offsets, targets = files[order], offsets[order], targets[order]
        sizes = np.tile(widths, len(chosen))[order]
        step = max(min(self.files.limit, _MAX_OPEN), 1)
        for first in range(0, len(group.entries), step):
            entries = group.entries[first : first + step]
            opened = [self._open(entry) for entry in entries]  # kept open until the reads are done
            low, high = np.searchsorted(files, (first, first + step))
            fds = np.array([file.fd for file in opened], dtype=np.int64)[files[low:high] - first]
            reached = read_pieces(fds, offsets[low:high], sizes[low:high], targets[low:high])
            if reached < high - low:
                path = group.entries[files[low + reached]].path()
                msg = f"{path} ends before byte {offsets[low + reached] + sizes[low + reached]}: it was truncated"
                raise DamagedFileError(msg)
            opened.clear()  # before the next ones are opened: the process may not be able to open more


def _copy_from_memory(
    target: _Target, layout: Layout, data: TrajectoryData, chosen: np.ndarray, rows: np.ndarray
) -> None:
    for number, field in enumerate(layout.fields):
        out = target.rows.get(field.path)
        if out is not None:
            out[chosen] = data.rows[number][rows[:, number]]


def _read_strided(
    target: _Target, entry: Entry, file: SavedFile, chosen: np.ndarray, rows: np.ndarray, opened: OpenFile
) -> None:
    """Read rows of fields that are not contiguous, one by one."""
    path = entry.path()
    for number, field in enumerate(entry.layout.fields):
        tensor = target.tensors.get(field.path)
        if tensor is None or not tensor.numel():
            continue
        strides = (file.strides or ())[number] or _contiguous_strides(field.shape, field.torch_dtype.itemsize)
        for position, row in zip(chosen.tolist(), rows[:, number].tolist(), strict=True):
            step, env = divmod(row, entry.layout.envs)
            offset = file.offsets[number] + step * strides[0] + env * strides[1]
            placed = Placed(field.path, field.dtype, field.row_shape, offset, strides[2:])
            tensor[position].copy_(placed.read(opened.fd, path))


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
