"""One batch: the rows that were drawn, from memory where a trajectory is there, else by positioned reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato.durable.dtypes import DTYPES, raw_view
from ostinato.durable.headers import Placed
from ostinato.durable.positioned_reads import read_pieces, read_strided
from ostinato.durable.trees import nest
from ostinato.errors import DamagedFileError
from ostinato.trajectories.layout import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.durable.positioned_reads import OpenFile, OpenFiles
    from ostinato.durable.trees import TreePath
    from ostinato.trajectories.index import Entry, Held, Place
    from ostinato.trajectories.layout import Form, Layout, Signature
    from ostinato.trajectories.members import Picked

__all__ = ["Blocks", "Sources", "gather"]

_MOST_FILES = 128
_LARGEST_BLOCK = 31 * 2**20  # glibc learns from blocks of up to 32 MiB


@final
class Blocks:
    """Keeps the system from taking the memory of every freed batch back.

    Large blocks of new memory cost a page fault for each 4 KiB (2.5 ms for 256 pairs of pictures). glibc keeps memory
    for later once a larger block was freed, so one is taken and freed here, untouched. Elsewhere it changes nothing.
    """

    __slots__ = ("_largest",)

    def __init__(self) -> None:
        self._largest = 0

    def expect(self, nbytes: int) -> None:
        """Prepare for batches of `nbytes`."""
        if nbytes > self._largest:
            self._largest = nbytes
            torch.empty(min(2 * nbytes, _LARGEST_BLOCK), dtype=torch.uint8, device="cpu")


class Sources(NamedTuple):
    """Where rows come from besides memory.

    Attributes:
        files: Files held open.
        whole: Reads an entry whose file has no offsets.
        blocks: Prepares memory for batches.
    """

    files: OpenFiles
    whole: Callable[[Entry], Held]
    blocks: Blocks

    def open(self, entry: Entry) -> OpenFile:
        """Return the open file of an entry that has a place."""
        directory = entry.place.directory if entry.place is not None else None
        return self.files.get((directory, entry.id), entry.path)


class _Target(NamedTuple):
    """The batch that is being filled: tensors, and those with elements once more as bytes `[N, bytes of a row]`."""

    tensors: dict[TreePath, Tensor]
    rows: dict[TreePath, np.ndarray]


class _Group(NamedTuple):
    """Drawn transitions whose trajectories share a layout and lie in files in order."""

    entries: list[Entry]
    places: list[Place]
    numbers: list[int]


def gather(picked: Picked, fields: Signature, sources: Sources) -> dict[str, Any]:
    """Return the rows as nested dicts of new tensors `[N, *row]`, in the order in which they were drawn.

    Raises:
        DamagedFileError: naming a file that is missing or too short.
    """
    target = _target(len(picked.which), fields, sources.blocks)
    order = np.argsort(picked.which, kind="stable")
    starts = np.searchsorted(picked.which[order], np.arange(len(picked.entries) + 1))
    groups: dict[Layout, _Group] = {}
    for number, entry in enumerate(picked.entries):
        held, place = entry.held, entry.place  # in this order: a saver sets the place before it lets the memory go
        if held is None and place is not None and place.strides is None and -1 not in place.offsets:
            group = groups.setdefault(entry.form.layout, _Group([], [], []))
            group.entries.append(entry)
            group.places.append(place)
            group.numbers.append(number)
            continue
        chosen = order[starts[number] : starts[number + 1]]
        rows = entry.form.rows(picked.transitions[chosen])
        if held is None and place is not None and place.strides is not None:
            _from_strided(target, entry, place, chosen, rows, sources)
        else:
            _from_memory(target, entry.form, held or sources.whole(entry), chosen, rows)
    for layout, group in groups.items():
        _from_files(target, layout, group, picked, sources)
    return nest(target.tensors)


def _target(count: int, fields: Signature, blocks: Blocks) -> _Target:
    blocks.expect(count * sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in fields.values()))
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


def _from_memory(target: _Target, form: Form, held: Held, chosen: np.ndarray, rows: np.ndarray) -> None:
    for number, field in enumerate(form.fields):
        out = target.rows.get(field.path)
        if out is not None:
            out[chosen] = held.rows[number][rows[:, number]]


def _from_strided(
    target: _Target, entry: Entry, place: Place, chosen: np.ndarray, rows: np.ndarray, sources: Sources
) -> None:
    """Read rows whose elements do not lie in order, one by one."""
    path = entry.path()
    file = sources.open(entry)
    for number, field in enumerate(entry.form.fields):
        tensor = target.tensors.get(field.path)
        if tensor is None or not tensor.numel():
            continue
        strides = (place.strides or ())[number] or _strides_in_order(field.shape, field.torch_dtype.itemsize)
        for position, row in zip(chosen.tolist(), rows[:, number].tolist(), strict=True):
            step, env = divmod(row, entry.form.envs)
            offset = place.offsets[number] + step * strides[0] + env * strides[1]
            placed = Placed(field.path, field.dtype, field.row_shape, offset, strides[2:])
            tensor[position].copy_(read_strided(file.fd, placed, path))


def _strides_in_order(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _rows(entries: list[Entry], which: np.ndarray, transitions: np.ndarray) -> np.ndarray:
    """Return where transitions lie in each field of their trajectories, int64 `[N, F]`."""
    first = entries[0].form
    if all(entry.form is first for entry in entries):
        return first.rows(transitions)
    envs = np.array([entry.form.envs for entry in entries])
    pairings = np.stack([entry.form.pairings for entry in entries])
    return rows_of(transitions, envs[which], pairings[which])


def _from_files(target: _Target, layout: Layout, group: _Group, picked: Picked, sources: Sources) -> None:
    """Read rows by their offsets, ordered by file and offset, a bounded number of files at a time."""
    mine = np.full(len(picked.entries), -1)
    mine[group.numbers] = np.arange(len(group.numbers))
    chosen = np.flatnonzero(mine[picked.which] >= 0)
    file_of = mine[picked.which[chosen]]
    paths = list(layout.signature)
    used = [number for number, path in enumerate(paths) if path in target.rows]
    widths = layout.row_bytes[used]
    bases = np.array([place.offsets for place in group.places], dtype=np.int64)[:, used]
    starts = np.array([target.rows[paths[number]].ctypes.data for number in used], dtype=np.int64)
    rows = _rows(group.entries, file_of, picked.transitions[chosen])
    offsets = (bases[file_of] + rows[:, used] * widths).reshape(-1)
    targets = (starts + chosen[:, None] * widths).reshape(-1)
    files = np.repeat(file_of, len(used))
    order = np.lexsort((offsets, files))
    files, offsets, targets, sizes = files[order], offsets[order], targets[order], np.tile(widths, len(chosen))[order]
    step = max(min(sources.files.limit, _MOST_FILES), 1)
    for first in range(0, len(group.entries), step):
        entries = group.entries[first : first + step]
        opened = [sources.open(entry) for entry in entries]  # held until the reads are done
        low, high = np.searchsorted(files, (first, first + step))
        fds = np.array([file.fd for file in opened], dtype=np.int64)[files[low:high] - first]
        reached = read_pieces(fds, offsets[low:high], sizes[low:high], targets[low:high])
        if reached < high - low:
            path = group.entries[files[low + reached]].path()
            msg = f"{path} ends before byte {offsets[low + reached] + sizes[low + reached]}: it was cut"
            raise DamagedFileError(msg)
        opened.clear()  # before the next ones are opened: the process may have room for as many alone
