"""Casts of written data to the stored dtype: the rules, their checks and their warning; see `docs/casts.md`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ostinato.core.kinds import as_tensor, show_field
from ostinato.errors import CastWarning, SchemaError, warn_caller

if TYPE_CHECKING:
    from collections.abc import Hashable

Rule: TypeAlias = Literal["exact", "usual", "rounds", "checked", "never"]
"""How values of one dtype are written to a field of another.

- `exact`: cast silently; every value is kept.
- `usual`: rounded silently (float64 to float32); raises if a finite value would become infinite.
- `rounds`: cast silently if every value is kept, else rounded with one warning per field and buffer; raises if a finite
  value would become infinite. On an accelerator, values are not read, and the dtypes alone cause the warning.
- `checked`: cast silently if every value is kept, else raises; always raises on an accelerator.
- `never`: raises.
"""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""Dtypes that are cast; others, such as 8-bit floats, must be equal to the stored dtype."""

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_KNOWN = frozenset(DTYPES)
_FLOAT32_MAX = torch.finfo(torch.float32).max


def rule(source: torch.dtype, stored: torch.dtype) -> Rule:
    """Return how values of dtype `source` are written to a field of dtype `stored`."""
    if source is stored:
        return "exact"
    if source not in _KNOWN or stored not in _KNOWN or (source.is_complex and not stored.is_complex):
        return "never"
    if source is torch.bool:
        return "exact"
    source, stored = _REAL.get(source, source), _REAL.get(stored, stored)
    if not stored.is_floating_point:
        if source.is_floating_point:
            return "checked"
        (low, high), (least, most) = _range(source), _range(stored)
        return "exact" if least <= low and high <= most else "checked"
    if source.is_floating_point:
        if source is torch.float64 and stored is torch.float32:
            return "usual"
        wider = _digits(stored) >= _digits(source) and torch.finfo(stored).max >= torch.finfo(source).max
        return "exact" if wider else "rounds"
    return "exact" if torch.iinfo(source).max < 2 ** _digits(stored) else "rounds"


def cast(value: Tensor, stored: torch.dtype, path: tuple[Hashable, ...], warned: set[Any]) -> Tensor:
    """Return `value` in the dtype of a field. Copy, unless the dtypes are equal.

    Never waits for a device: values are read on the CPU only.

    Args:
        value: any shape.
        stored: dtype of the field.
        path: of the field, for messages.
        warned: fields whose warning was issued; updated.

    Raises:
        SchemaError: if there is no cast between the dtypes, or a value does not fit; see `rule`.
    """
    source = value.dtype
    if source is stored:
        return value
    found = rule(source, stored)
    if found == "never":
        msg = (
            f"{_clash(value, stored, path)}, which is never cast: a storage keeps the dtypes of its first rows; "
            "convert the values before writing"
        )
        raise SchemaError(msg)
    if found == "checked":
        if not value.is_cpu:
            msg = (
                f"{_clash(value, stored, path)} on {value.device}, where values are not checked: convert "
                f"them before writing, with .to({stored})"
            )
            raise SchemaError(msg)
        _require(value, ~_kept_whole(value, stored), stored, path)
        return value.to(stored)
    out = value.to(stored)
    if value.is_cpu and found != "exact" and not bool(torch.isfinite(out).all()):
        _require(value, (torch.isfinite(value) & ~torch.isfinite(out)).numpy(), stored, path)
    if found == "rounds" and path not in warned and not (value.is_cpu and _kept(value, out)):
        _warn(value, stored, path)
        warned.add(path)  # afterwards, since a filter may turn the warning into an error
    return out


def fit(value: Any, stored: torch.dtype, path: tuple[Hashable, ...], warned: set[Any]) -> Tensor:
    """Return a leaf as a tensor in the dtype of a field; see `read` and `cast`."""
    return cast(read(value, stored, path), stored, path, warned)


def read(value: Any, stored: torch.dtype, path: tuple[Hashable, ...]) -> Tensor:
    """Return a leaf as a tensor without rounding; see `as_tensor`.

    Python numbers become bool, int64, float64 and complex128, or the dtype `stored` if they fit.

    Raises:
        KindError: if it is not a tensor, array or number.
        SchemaError: if it is a Python int that fits neither `stored` nor int64.
    """
    if isinstance(value, (int, float, complex)) and not isinstance(value, np.generic):
        if _fits_plainly(value, stored):
            return torch.tensor(value, dtype=stored, device="cpu")
        if not isinstance(value, int):
            wide = torch.float64 if isinstance(value, float) else torch.complex128
            return torch.tensor(value, dtype=wide, device="cpu")
        if not -(2**63) <= value < 2**63:
            msg = (
                f"{show_field(path)} must be {_name(stored)}, got a Python int of {value.bit_length()} bits, which "
                "int64 cannot hold: give it as a float, or as a NumPy number or tensor of a wider dtype"
            )
            raise SchemaError(msg)
    return as_tensor(value, path)


def _fits_plainly(value: complex, stored: torch.dtype) -> bool:
    """Whether a Python number certainly fits a dtype; False if that is not known."""
    if isinstance(value, float):
        small = -_FLOAT32_MAX <= value <= _FLOAT32_MAX or not math.isfinite(value)
        return stored is torch.float64 or (stored is torch.float32 and small)
    if not isinstance(value, int) or stored not in _KNOWN or stored.is_complex:
        return False
    if stored.is_floating_point:
        return bool(abs(value) <= 2 ** _digits(stored))
    low, high = _range(stored)
    return low <= value <= high


def _digits(dtype: torch.dtype) -> int:
    """Return the bits of precision of a floating-point dtype, which holds every integer up to 2 to that power."""
    return 1 - int(np.log2(torch.finfo(dtype).eps))


def _range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _array(value: Tensor) -> np.ndarray[Any, Any]:
    """Return the values of a CPU tensor as an array: NumPy compares all integer dtypes, torch does not."""
    return (value.to(torch.float32) if value.dtype is torch.bfloat16 else value).numpy()


def _kept_whole(value: Tensor, stored: torch.dtype) -> np.ndarray[Any, Any]:
    """Return for each value whether an integer dtype, or bool, can hold it."""
    array = _array(value)
    low, high = _range(stored)
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
        return np.asarray((array == np.trunc(array)) & (array >= low) & (array < float(high + 1)))
    info = np.iinfo(array.dtype)
    return np.asarray((array >= max(low, info.min)) & (array <= min(high, info.max)))


def _kept(value: Tensor, out: Tensor) -> bool:
    """Whether a cast to a floating-point dtype has kept every value."""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        back = out.to(value.dtype)
        return bool(((back == value) | value.isnan()).all())
    array, digits = _array(value).reshape(-1), _digits(_REAL.get(out.dtype, out.dtype))
    size = (
        array if array.dtype.kind == "u" else np.abs(array.astype(np.int64))
    )  # -2**63 is unchanged, and is 2**63 as uint64
    size = size.astype(np.uint64)
    lowest = size & (~size + np.uint64(1))  # the lowest set bit
    return bool(((size >> np.uint64(digits) < lowest) | (size == 0)).all())


def _require(value: Tensor, bad: np.ndarray[Any, Any], stored: torch.dtype, path: tuple[Hashable, ...]) -> None:
    """Raise for the first value that does not fit.

    Raises:
        SchemaError: naming the value and its position.
    """
    if not bad.any():
        return
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    where = f" at {list(at)}" if at else ""
    msg = (
        f"{_clash(value, stored, path)} with the value {value[at].item()!r}{where}, which {_name(stored)} cannot hold: "
        "a storage keeps the dtypes of its first rows; convert the values before writing, or write first rows of a "
        "dtype that holds all of them"
    )
    raise SchemaError(msg)


def _clash(value: Tensor, stored: torch.dtype, path: tuple[Hashable, ...]) -> str:
    return f"{show_field(path)} must be {_name(stored)}, got {_name(value.dtype)}"


def _warn(value: Tensor, stored: torch.dtype, path: tuple[Hashable, ...]) -> None:
    """Warn at the line that called this package."""
    msg = (
        f"{show_field(path)} is stored as {_name(stored)}, to which the {_name(value.dtype)} values written are "
        "rounded: convert them before writing, or write first rows of the dtype that is to be kept. Shown once for "
        "each field of a buffer; warnings.filterwarnings('ignore', category=ostinato.errors.CastWarning) silences it"
    )
    warn_caller(msg, CastWarning)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
