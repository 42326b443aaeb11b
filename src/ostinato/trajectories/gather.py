"""One batch: the rows that were drawn, from memory where a trajectory is there, else by positioned reads of its file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ostinato.durable.dtypes import DTYPES, raw_view
from ostinato.durable.extents import GAP_BYTES, read_run, read_strided
from ostinato.durable.headers import Placed
from ostinato.durable.trees import nest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.openfiles import OpenFiles
    from ostinato.durable.trees import TreePath
    from ostinato.trajectories.entries import Entry, Held, Place
    from ostinato.trajectories.form import Form
    from ostinato.trajectories.members import Picked

__all__ = ["Sources", "gather"]

_Fields: TypeAlias = "dict[TreePath, tuple[str, tuple[int, ...]]]"


class Sources(NamedTuple):
    """Where rows come from besides memory.

    Attributes:
        files: Files held open.
        path: Returns the file of an entry.
        whole: Reads an entry whose file has no offsets.
    """

    files: OpenFiles
    path: Callable[[Entry], Path]
    whole: Callable[[Entry], Held]


class _Target(NamedTuple):
    """The batch that is being filled: tensors, and their memory by rows and as bytes."""

    tensors: dict[TreePath, Tensor]
    rows: dict[TreePath, np.ndarray]
    views: dict[TreePath, memoryview]


class _Group(NamedTuple):
    """Drawn transitions whose trajectories share a form and lie in files in order."""

    entries: list[Entry]
    places: list[Place]
    numbers: list[int]


def gather(picked: Picked, fields: _Fields, sources: Sources) -> dict[str, Any]:
    """Return the rows as nested dicts of new tensors `[N, *row]`, in the order in which they were drawn.

    Raises:
        DamagedFileError: naming a file that is missing or too short.
    """
    target = _target(len(picked.which), fields)
    order = np.argsort(picked.which, kind="stable")
    starts = np.searchsorted(picked.which[order], np.arange(len(picked.entries) + 1))
    groups: dict[Form, _Group] = {}
    for number, entry in enumerate(picked.entries):
        held, place = entry.held, entry.place  # in this order: a saver sets the place before it lets the memory go
        if held is None and place is not None and place.strides is None and -1 not in place.offsets:
            group = groups.setdefault(entry.form, _Group([], [], []))
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
    for form, group in groups.items():
        _from_files(target, form, group, picked, sources)
    return nest(target.tensors)


def _target(count: int, fields: _Fields) -> _Target:
    tensors = {
        path: torch.empty((count, *row_shape), dtype=DTYPES[dtype]) for path, (dtype, row_shape) in fields.items()
    }
    views = {path: raw_view(tensor) for path, tensor in tensors.items() if tensor.numel()}
    rows = {path: np.frombuffer(view, dtype=np.uint8).reshape(count, -1) for path, view in views.items()}
    return _Target(tensors, rows, views)


def _from_memory(target: _Target, form: Form, held: Held, chosen: np.ndarray, rows: np.ndarray) -> None:
    for number, field in enumerate(form.fields):
        out = target.rows.get(field.path)
        if out is not None:
            out[chosen] = held.rows[number][rows[:, number]]


def _from_strided(
    target: _Target, entry: Entry, place: Place, chosen: np.ndarray, rows: np.ndarray, sources: Sources
) -> None:
    """Read rows whose elements do not lie in order, one by one."""
    path = sources.path(entry)
    file = sources.files.get(path)
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


def _from_files(target: _Target, form: Form, group: _Group, picked: Picked, sources: Sources) -> None:
    """Read rows by their offsets, ordered by file and offset; what lies close together in one call."""
    mine = np.full(len(picked.entries), -1)
    mine[group.numbers] = np.arange(len(group.numbers))
    chosen = np.flatnonzero(mine[picked.which] >= 0)
    file_of = mine[picked.which[chosen]]
    used = [number for number, field in enumerate(form.fields) if field.path in target.views]
    widths = form.row_bytes[used]
    bases = np.array([place.offsets for place in group.places], dtype=np.int64)[:, used]
    offsets = (bases[file_of] + form.rows(picked.transitions[chosen])[:, used] * widths).T.reshape(-1)
    files = np.tile(file_of, len(used))
    ends = offsets + np.repeat(widths, len(chosen))
    order = np.lexsort((offsets, files))
    offsets, files, ends = offsets[order], files[order], ends[order]
    gaps = offsets[1:] - ends[:-1]
    cuts = np.flatnonzero((files[1:] != files[:-1]) | (gaps > GAP_BYTES) | (gaps < 0)) + 1
    pieces: list[memoryview] = []
    for number, width in zip(used, widths.tolist(), strict=True):
        view = target.views[form.fields[number].path]
        pieces += [view[at : at + width] for at in (chosen * width).tolist()]
    ordered = [pieces[number] for number in order.tolist()]
    starts = offsets.tolist()
    run_files = files[np.concatenate(([0], cuts))].tolist()
    bounds = [0, *cuts.tolist(), len(ordered)]
    last = -1
    for run, file_number in enumerate(run_files):
        if file_number != last:
            path = sources.path(group.entries[file_number])
            file, last = sources.files.get(path), file_number
        read_run(file.fd, ordered[bounds[run] : bounds[run + 1]], starts[bounds[run] : bounds[run + 1]], path)
