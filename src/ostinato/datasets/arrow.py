"""Arrow columns of numbers, and of nested lists of them, as arrays; what cannot be one is told with its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato._optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = {"float": "float32", "double": "float64", "halffloat": "float16", "large_string": "string"}


class WrongValueError(ValueError):
    """A value of a column that is not what is expected.

    Args:
        row: its row, counted from the first one of the column.
        what: what is wrong.
        check: the check that finds it.
    """

    def __init__(self, row: int, what: str, check: str = "dtype-mismatch") -> None:
        super().__init__(what)
        self.row, self.check = row, check


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


def first_null(array: Any) -> int:
    """Return the first row of an Arrow array that has no value."""
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])


def flat_values(array: Any, shape: Sequence[int] | None = None) -> tuple[Any, int]:
    """Return the numbers in an Arrow array, or in nested lists of them, and how many each row has.

    Args:
        array: the array, or one of an extension type of matrices.
        shape: of a row, nested once for each dimension; None for that of the first row.

    Raises:
        WrongValueError: if there is no value, another number of values, or no numbers.
    """
    types = require("pyarrow.types", "lerobot")
    left, each = list(shape or ()), 1
    while True:
        array = getattr(array, "storage", array)
        if array.null_count:
            raise WrongValueError(first_null(array) // each, "there is no value (null)", "value-null")
        fixed = types.is_fixed_size_list(array.type)
        if not (fixed or types.is_list(array.type) or types.is_large_list(array.type)):
            break
        counts = np.full(len(array), array.type.list_size) if fixed else np.diff(array.offsets.to_numpy())
        size = int(counts[:1].sum()) if shape is None else left.pop(0) if left else 1
        wrong = np.flatnonzero(counts != size)
        if wrong.shape[0]:
            expected = f"those before have {size}" if shape is None else f"the shape {list(shape)} asks for {size}"
            what = f"a list of {counts[wrong[0]]} values, where {expected}"
            raise WrongValueError(int(wrong[0]) // max(each, 1), what, "shape-mismatch")
        array, each = array.flatten(), each * size
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        raise WrongValueError(0, f"values are of type {array.type}, not numbers")
    if int(np.prod(left, dtype=np.int64)) != 1:
        raise WrongValueError(0, f"{each} values, where the shape {list(shape or ())} is described", "shape-mismatch")
    return array, each


def to_array(column: Any) -> np.ndarray[Any, Any]:
    """Return an Arrow array of numbers, or of nested lists of them, as `[n, values]`.

    Raises:
        WrongValueError: see `flat_values`.
    """
    flat, each = flat_values(column)
    values: np.ndarray[Any, Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(column), each)
