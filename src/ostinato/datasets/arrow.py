"""Arrow columns as NumPy arrays, for tables that need not be what their metadata says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["column_problem", "leaf_type", "to_array"]

_NAMES = {"float": "float32", "double": "float64", "halffloat": "float16", "large_string": "string"}


def leaf_type(kind: Any) -> str:
    """Return the name of the values of an Arrow type, those of lists included: "float32", "string", "struct"."""
    types = require("pyarrow.types", "lerobot")
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        return "struct"
    if types.is_dictionary(kind):
        kind = kind.value_type
    return _NAMES.get(str(kind), str(kind))


def to_array(column: Any) -> np.ndarray[Any, Any] | None:
    """Return `[n, values]` of an Arrow array of numbers or of nested lists of them; None where `column_problem` is."""
    rows = len(column)
    flat, _ = _flatten(column)
    if flat is None or not rows or len(flat) % rows:
        return None
    values: np.ndarray[Any, Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(rows, -1) if values.dtype.kind in "biuf" else None


def column_problem(column: Any) -> tuple[str, str, int | None] | None:
    """Return why rows of a column cannot be an array, None if they can.

    Returns:
        The check, the message, and the first row that it is about.
    """
    flat, problem = _flatten(column)
    if problem is not None:
        return problem
    if flat is not None and leaf_type(flat.type) not in _NUMBERS:
        return "dtype-mismatch", f"holds {leaf_type(flat.type)}, not numbers", None
    return None


_NUMBERS = {"bool", "float16", "float32", "float64"} | {f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)}


def _flatten(column: Any) -> tuple[Any, tuple[str, str, int | None] | None]:
    types, compute = require("pyarrow.types", "lerobot"), require("pyarrow.compute", "lerobot")
    rows, level = len(column), column
    while True:
        if level.null_count:
            at = int(np.flatnonzero(level.is_null().to_numpy(zero_copy_only=False))[0])
            row = at * rows // max(len(level), 1)
            return None, ("value-null", f"{number_of(level.null_count, 'value')}, which are null", row)
        kind = level.type
        if types.is_fixed_size_list(kind):
            level = level.flatten()
        elif types.is_list(kind) or types.is_large_list(kind):
            sizes = compute.list_value_length(level).to_numpy(zero_copy_only=False)
            other = _first_other(sizes)
            if other is not None:
                text = f"lists have {number_of(sizes[other], 'value')}, those before {sizes[0]}"
                return None, ("shape-mismatch", text, other * rows // max(len(level), 1))
            level = level.flatten()
        else:
            return level, None


def _first_other(sizes: Sequence[int] | np.ndarray[Any, Any]) -> int | None:
    other = np.flatnonzero(np.asarray(sizes) != sizes[0]) if len(sizes) else np.zeros(0, int)
    return int(other[0]) if other.shape[0] else None
