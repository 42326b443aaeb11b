"""Columns of a table by name, for state and checkpoints: named on the way out, checked and filled on the way in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from ostinato.core.bits import turn_rows
from ostinato.errors import CheckpointError, OptionError
from ostinato.storages.late import LateFields
from ostinato.storages.mirror import MirroredTable
from ostinato.storages.mirror_state import check_apart, column_name, copy_column, dense, fill_mirrored, read_pairs
from ostinato.storages.rowarrays import row_arrays
from ostinato.storages.table import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.rows import Path, Schema
    from ostinato.storages.pairs import Pairs
    from ostinato.storages.table import Table

__all__ = [
    "check_columns",
    "check_form",
    "check_room",
    "fill_columns",
    "map_blocks",
    "name_columns",
    "refuse_mapped_ring",
    "turn_columns",
]


@final
class _Turned:
    """A column of a state whose row `seam` comes first and the rows before it last; read as the column is."""

    def __init__(self, source: Any, seam: int) -> None:
        self._source = source
        self._seam = seam
        self.dtype, self.shape = source.dtype, source.shape
        self.packed = getattr(source, "packed", False)
        if self.packed:
            self.rows, self.offset, self.row_bytes = source.rows, source.offset, source.row_bytes

    def read_into(self, dest: Tensor) -> None:
        """Read the rows into a tensor."""
        copy_column(self._source, dest)
        turn_rows(dest, self._seam)

    def read_rows_into(self, dest: Tensor) -> None:
        """Read the packed rows that it lies in."""
        self._source.read_rows_into(dest)
        turn_rows(dest, self._seam)

    def read_with(self, others: Sequence[tuple[_Turned, Tensor]]) -> None:
        """Read columns of the same packed rows, each into its tensor."""
        self._source.read_with([(other._source, dest) for other, dest in others])  # noqa: SLF001 (its own kind)
        for _, dest in others:
            turn_rows(dest, self._seam)

    def read(self) -> Tensor:
        """Return the rows as a new tensor."""
        source = self._source
        rows = source.clone() if isinstance(source, torch.Tensor) else source.read()
        turn_rows(rows, self._seam)
        return rows


def name_columns(
    table: Table | MirroredTable, late: LateFields, rows: int
) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Return the columns `[rows, *shape]` by name (views), and for late fields `[path, name, name of the mask]`.

    Of a table with single copies come what it keeps, `apart` (bool `[rows]`: next observations that lie apart), and
    for each pair those, in the order of their slots.
    """
    names = [column_name(leaf.path, i) for i, leaf in enumerate(table.schema.leaves)]
    if isinstance(table, MirroredTable):
        columns = {names[i]: column for i, column in zip(table.kept, table.inner.view(slice(rows)), strict=True)}
        columns["apart"], nexts = table.apart_rows(rows)
        columns |= {f"{names[i]}.apart": value for (i, _), value in zip(table.pairs, nexts, strict=True)}
    else:
        columns = dict(zip(names, table.view(slice(rows)), strict=True))
    notes: list[list[Any]] = []
    for i, (path, column) in enumerate(late.columns.items(), len(names)):
        name = column_name(path, i)
        notes.append([list(path), name, f"{name}.has"])
        columns[name], columns[f"{name}.has"] = column[:rows], late.has[path][:rows]
    return columns, notes


def fill_columns(table: Table | MirroredTable, state: dict[str, Any]) -> LateFields:
    """Copy the columns of a state into a table, and return its late fields.

    Columns are tensors, or objects with `dtype`, `shape`, `read_into(tensor)` and `read()`.

    Raises:
        CheckpointError: if a column is missing or has another form; nothing is changed.
    """
    rows, columns = int(state["rows"]), dict(state["columns"])
    saved = check_columns(table.schema, state)
    if saved or isinstance(table, MirroredTable):
        fill_mirrored(table, state, saved)
    elif not state.get("mapped"):
        _fill_plain(table, columns, rows)
    late = LateFields(table.capacity, table.device)
    everywhere = torch.arange(rows if state["late"] else 0, device=table.device)
    for path, name, has in state["late"]:
        late.put(tuple(path), everywhere, dense(columns[name]))
        late.has[tuple(path)][:rows] = dense(columns[has]).to(table.device)
    return late


def _fill_plain(table: Table, columns: dict[str, Any], rows: int) -> None:
    """Copy columns in: packed rows as they lie where they lie alike here, else column by column."""
    names = [column_name(leaf.path, i) for i, leaf in enumerate(table.schema.leaves)]
    waiting = dict(zip(names, table.columns, strict=True))
    for array in row_arrays(table, names):
        sources = [(columns[member.name], member.offset) for member in array.members]
        if sources and _lie_alike(sources, array.row_bytes, columns):
            sources[0][0].read_rows_into(array.data[:rows])
            for member in array.members:
                del waiting[member.name]
    groups: dict[str, list[tuple[Any, Tensor]]] = {}
    for name, column in waiting.items():
        source = columns[name]
        if not getattr(source, "packed", False):
            copy_column(source, column[:rows])
        else:
            groups.setdefault(source.rows, []).append((source, column[:rows]))
    for group in groups.values():
        group[0][0].read_with(group)


def _lie_alike(sources: list[tuple[Any, int]], row_bytes: int, columns: dict[str, Any]) -> bool:
    """Whether saved columns lie in one array of packed rows, alone, at these offsets."""
    first = sources[0][0]
    if not getattr(first, "packed", False) or first.row_bytes != row_bytes:
        return False
    same = all(getattr(x, "rows", None) == first.rows and x.offset == offset for x, offset in sources)
    return same and sum(getattr(x, "rows", None) == first.rows for x in columns.values()) == len(sources)


def map_blocks(schema: Schema, state: dict[str, Any], capacity: int) -> tuple[list[Block], list[Tensor]]:
    """Map saved columns into memory for `capacity` rows, laid out as they were saved.

    Raises:
        CheckpointError: if the rows were saved with single copies, or a column is missing or has another form.
    """
    columns, rows = state["columns"], int(state["rows"])
    pairs = read_pairs(state, schema)
    if pairs:
        names = {schema.leaves[i].path: schema.leaves[mate].path for i, mate in pairs}
        shown = ", ".join(f"{_dotted(path)} (as {_dotted(mate)} of the next row)" for path, mate in names.items())
        msg = (
            f"the checkpoint was saved with single_copy, it stores {shown} once: such rows cannot be mapped, load it "
            "with mmap=False"
        )
        raise CheckpointError(msg)
    found: dict[str, tuple[Any, list[tuple[int, int]]]] = {}
    for i, leaf in enumerate(schema.leaves):
        name = column_name(leaf.path, i)
        _check_column(columns, name, leaf.dtype, (rows, *leaf.shape))
        source = columns[name]
        found.setdefault(source.rows, (source, []))[1].append((i, source.offset))
    layout = [Block(source.row_bytes, tuple(members)) for source, members in found.values()]
    return layout, [source.map_rows(capacity) for source, _ in found.values()]


def turn_columns(state: dict[str, Any], seam: int) -> dict[str, Any]:
    """Return the state of a full ring with its oldest row, in slot `seam`, in slot 0; columns turn when they are read.

    The state is that of a ring of the same capacity with the cursor at 0. No copy.
    """
    columns = dict(state["columns"])
    aside = int(check_apart(state)[:seam].sum()) if state.get("single_copy") else 0
    sides = {name for name in columns if state.get("single_copy") and name.endswith(".apart")}
    turned = {name: _Turned(column, aside if name in sides else seam) for name, column in columns.items()}
    objects = {name: _turned(values, seam, int(state["rows"])) for name, values in (state.get("objects") or {}).items()}
    return {**state, "columns": turned, "cursor": 0, **({"objects": objects} if objects else {})}


def _turned(values: list[Any], seam: int, rows: int) -> list[Any]:
    """Return the objects of `rows` rows with those of the row in slot `seam` first."""
    first = seam * (len(values) // max(rows, 1))
    return values[first:] + values[:first]


def refuse_mapped_ring(state: dict[str, Any], seam: int, capacity: int) -> NoReturn:
    """Raise for rows that are to be mapped where they would have to be moved.

    Raises:
        OptionError: naming both capacities.
    """
    msg = (
        f"mmap=True maps rows where they lie: the checkpoint is a full ring of {state['capacity']} rows, the oldest in "
        f"slot {seam}, and would have to be moved into a ring of {capacity}: load without mmap, or into a storage with "
        f"max_size={state['capacity']}"
    )
    raise OptionError(msg)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def check_room(state: dict[str, Any], ndim: int, capacity: int) -> None:
    """Refuse a state that does not fit.

    Raises:
        CheckpointError: if it has more rows than `capacity`, or other dimensions.
    """
    if state["ndim"] != ndim:
        msg = f"the checkpoint has ndim={state['ndim']}, the storage ndim={ndim}: load into one of that form"
        raise CheckpointError(msg)
    if not all(isinstance(state.get(name), int) for name in ("rows", "cursor", "lanes", "capacity")):
        msg = "the checkpoint's storage has no rows, cursor, lanes or capacity: it is damaged"
        raise CheckpointError(msg)
    if int(state["rows"]) < 0 or int(state["lanes"]) < 1 or int(state["rows"]) % int(state["lanes"]):
        msg = f"the checkpoint holds {state['rows']} rows in {state['lanes']} lanes: it is damaged"
        raise CheckpointError(msg)
    if int(state["rows"]) > capacity:
        msg = (
            f"the checkpoint holds {state['rows']} rows, the storage has room for {capacity}: load into one "
            f"with max_size >= {state['rows']}"
        )
        raise CheckpointError(msg)


def check_form(mine: Schema, my_lanes: int, saved: Schema, lanes: int) -> None:
    """Refuse rows of another form.

    Raises:
        CheckpointError: naming both forms.
    """
    if mine != saved or my_lanes != lanes:
        msg = (
            f"the checkpoint holds {saved} in {lanes} lane(s), the storage {mine} in {my_lanes}: load into a "
            "buffer of that form"
        )
        raise CheckpointError(msg)


def check_columns(schema: Schema, state: dict[str, Any]) -> Pairs:
    """Refuse columns that are missing or of another form, before the first is copied; return the single copies.

    Raises:
        CheckpointError: naming the column, its form and the one it must have.
    """
    rows, columns = int(state["rows"]), state["columns"]
    saved = read_pairs(state, schema)
    nexts = {pair[0] for pair in saved}
    for i, leaf in enumerate(schema.leaves):
        if i not in nexts:
            _check_column(columns, column_name(leaf.path, i), leaf.dtype, (rows, *leaf.shape))
    if saved:
        count = int(check_apart(state).sum())
        for i in nexts:
            leaf = schema.leaves[i]
            _check_column(columns, f"{column_name(leaf.path, i)}.apart", leaf.dtype, (count, *leaf.shape))
    known = {leaf.path for leaf in schema.leaves}
    for path, name, has in state["late"]:
        value = columns.get(name)
        if not path or tuple(path) in known or value is None:
            msg = f"the checkpoint's field {path!r}, which came later, is not there or there twice: it is damaged"
            raise CheckpointError(msg)
        _check_column(columns, name, value.dtype, (rows, *value.shape[1:]))
        _check_column(columns, has, torch.bool, (rows,))
    return saved


def _check_column(columns: dict[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = columns.get(name)
    if source is None or source.dtype is not dtype or tuple(source.shape) != shape:
        got = "nothing" if source is None else f"{source.dtype}{list(source.shape)}"
        msg = f"the checkpoint's column {name!r} must be {dtype}{list(shape)}, got {got}: it is damaged"
        raise CheckpointError(msg)
