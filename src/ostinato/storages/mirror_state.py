"""States of tables with single copies: checked before they are used, and read into tables of either kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.core.bits import as_bits
from ostinato.errors import CheckpointError
from ostinato.storages.mirror import MirroredTable

if TYPE_CHECKING:
    from ostinato.core.rows import Path, Schema
    from ostinato.storages.pairs import Pairs
    from ostinato.storages.table import Table

__all__ = [
    "NAME_LENGTH",
    "check_apart",
    "checked_apart",
    "column_name",
    "copy_column",
    "dense",
    "fill_mirrored",
    "read_pairs",
]

NAME_LENGTH = 1000
"""Most characters of a column's name: files take 1024, and what belongs to a column has its name with a suffix."""
_BLOCK_ROWS = 4096


def column_name(path: Path, position: int) -> str:
    """Return the name of a column in a state: its position and path, of which long ones are cut."""
    return f"{position}.{'.'.join(map(str, path))}"[:NAME_LENGTH] if path else f"{position}.data"


def dense(source: Any) -> Tensor:
    """Return a column of a state as a tensor."""
    return source if isinstance(source, Tensor) else source.read()


def copy_column(source: Any, dest: Tensor) -> None:
    """Copy a column of a state to where it belongs, unless it lies there."""
    if not isinstance(source, Tensor):
        source.read_into(dest)
    elif dest.numel() and source.data_ptr() != dest.data_ptr():
        dest.copy_(source)


def read_pairs(state: dict[str, Any], schema: Schema) -> Pairs:
    """Return the pairs of a state; none if it has no single copies, or was written before there were any.

    Raises:
        CheckpointError: if they fit no such rows.
    """
    saved = state.get("single_copy") or []
    leaves = schema.leaves
    try:
        pairs = tuple((int(position), int(mate)) for position, mate in saved)
        flat = [position for pair in pairs for position in pair]
        good = len(set(flat)) == len(flat) and all(0 <= position < len(leaves) for position in flat)
        good = good and all(leaves[i][1:] == leaves[j][1:] and leaves[i].nbytes > 0 for i, j in pairs)
    except (TypeError, ValueError):
        good = False
    if not good:
        msg = f"the checkpoint pairs the fields {saved} of {schema} as single copies: it is damaged"
        raise CheckpointError(msg)
    return pairs


def check_apart(state: dict[str, Any]) -> Tensor:
    """Return the notes of a state, having checked them; see `checked_apart`."""
    if "apart" not in state["columns"]:
        msg = "the checkpoint's column 'apart' is missing: it is damaged"
        raise CheckpointError(msg)
    lanes = max(1, int(state["lanes"]))
    return checked_apart(dense(state["columns"]["apart"]), int(state["rows"]), lanes, int(state["capacity"]))


def checked_apart(apart: Tensor, rows: int, lanes: int, capacity: int) -> Tensor:
    """Return the notes of a state, bool `[rows]` on the CPU, having checked that they lead to no row that is not there.

    Raises:
        CheckpointError: otherwise.
    """
    full = rows == capacity
    apart = apart.cpu()
    good = apart.dtype is torch.bool and apart.shape == (rows,) and rows <= capacity
    if not good or not (full or bool(apart[max(0, rows - lanes) :].all())) or (full and lanes > rows):
        msg = (
            f"the checkpoint's notes on single copies ({apart.dtype}{list(apart.shape)} for {rows} rows) lead to rows "
            "that it does not hold: it is damaged"
        )
        raise CheckpointError(msg)
    return apart


def fill_mirrored(table: Table | MirroredTable, state: dict[str, Any], saved: Pairs) -> None:
    """Copy the columns of a state into a table, where one of them, or both, have single copies.

    Raises:
        CheckpointError: if they have other ones; nothing is changed.
    """
    mine: Pairs = table.pairs if isinstance(table, MirroredTable) else ()
    if mine and saved and set(mine) != set(saved):
        names = [column_name(leaf.path, i) for i, leaf in enumerate(table.schema.leaves)]
        theirs, own = ({names[i]: names[j] for i, j in pairs} for pairs in (saved, mine))
        msg = f"the checkpoint has the single copies {theirs}, the storage {own}: make it with the same single_copy"
        raise CheckpointError(msg)
    if saved:
        _fill_from_single(table, state, saved)
    elif isinstance(table, MirroredTable):
        _fill_from_plain(table, state)


def _fill_from_single(table: Table | MirroredTable, state: dict[str, Any], saved: Pairs) -> None:
    rows, lanes, capacity = int(state["rows"]), max(1, int(state["lanes"])), int(state["capacity"])
    columns = state["columns"]
    apart = check_apart(state)
    names = [f"{column_name(table.schema.leaves[i].path, i)}.apart" for i, _ in saved]
    nexts = [dense(columns[name]) for name in names]
    after = torch.arange(rows, device="cpu") + lanes
    after = torch.where(after >= capacity, after - capacity, after).clamp_max(max(0, rows - 1))
    if isinstance(table, MirroredTable):
        nexts = [nexts[saved.index(pair)] for pair in table.pairs]
        table.sides.reserve(int(apart.sum()) + lanes)
        _copy_kept(table, columns, rows)
        table.begin(apart, nexts)
        if capacity != table.capacity and rows == capacity:  # the ring closes elsewhere now: its seam lies apart
            seam = torch.arange(rows - lanes, rows, device="cpu")
            table.put_apart(seam[~apart[seam]], after[seam[~apart[seam]]])
        return
    for (position, mate), aside in zip(saved, nexts, strict=True):
        leaf = table.schema.leaves[mate]
        copy_column(columns[column_name(leaf.path, mate)], table.columns[mate][:rows])
        dest, source = as_bits(table.columns[position]), as_bits(table.columns[mate])
        for first in range(0, rows, _BLOCK_ROWS):
            at = after[first : first + _BLOCK_ROWS].to(table.device)
            dest[first : first + at.shape[0]] = source.index_select(0, at)
        dest[torch.nonzero(apart).view(-1).to(table.device)] = as_bits(aside).to(table.device)
    done = {position for pair in saved for position in pair}
    for i, leaf in enumerate(table.schema.leaves):
        if i not in done:
            copy_column(columns[column_name(leaf.path, i)], table.columns[i][:rows])


def _fill_from_plain(table: MirroredTable, state: dict[str, Any]) -> None:
    rows, columns = int(state["rows"]), state["columns"]
    leaves = table.schema.leaves
    nexts = [dense(columns[column_name(leaves[i].path, i)]).to(table.device) for i, _ in table.pairs]
    _copy_kept(table, columns, rows)
    table.begin(torch.zeros(rows, dtype=torch.bool, device="cpu"), [value[:0] for value in nexts])
    table.relink(torch.arange(rows, device="cpu"), nexts)


def _copy_kept(table: MirroredTable, columns: dict[str, Any], rows: int) -> None:
    for i, column in zip(table.kept, table.inner.columns, strict=True):
        copy_column(columns[column_name(table.schema.leaves[i].path, i)], column[:rows])
