"""Priorities: their options and checks, their values in a sum tree, and several of them as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.core.options import check_choice, check_integer
from ostinato.core.rank_order import REDUCTIONS
from ostinato.core.records import require_values
from ostinato.errors import CapacityError, KindError, OptionError, PriorityError, PriorityShapeError, warn_caller
from ostinato.samplers.priority_tree import MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.rows import Schema

_MAX_CAPACITY = 2**36
_MAX_EXPONENT = 2.0
"""Exponents of papers are at most 1, and those of TorchRL's examples 1.1; beyond, a few rows are all that is drawn."""
_ROUNDING = 1e-6
_SHOWN = 8


def reduce_items(items: Tensor, reduction: str) -> Tensor:
    """Reduce the values of each item to one priority.

    Args:
        items: `[n, *shape]`, any real dtype.
        reduction: "max", "min", "mean" or "median"; of an even number the median is the lower one.

    Returns:
        float64 `[n]`.

    Raises:
        PriorityError: if items have no value.
    """
    flat = items.reshape(items.shape[0], -1).to(torch.float64)
    if flat.shape[1] == 0:
        msg = f"priorities of {items.shape[0]} items have the shape {list(items.shape)}: no number per item"
        raise PriorityError(msg)
    return flat[:, 0] if flat.shape[1] == 1 else REDUCTIONS[reduction](flat)


def steps_of_rows(schema: Schema | None) -> int:
    """Return the length of rows that are trajectories `[T, ...]`, where all fields have this dimension; else 1."""
    shapes = () if schema is None else [leaf.shape for leaf in schema.leaves]
    lengths = {shape[:1] for shape in shapes}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else 1


def check_one_each(given: tuple[int, ...], batch: tuple[int, ...], steps: int | None) -> None:
    """Check that priorities are not those of all pairs of rows: `[B, B]` comes from `[B] - [B, 1]`, and is never meant.

    Args:
        given: shape of the priorities.
        batch: shape of the index of the rows.
        steps: steps of each row, where rows are trajectories; 1 for single rows, None for windows of any length.

    Raises:
        PriorityShapeError: if they are.
    """
    if batch and batch[-1] > 1 and given == (*batch, batch[-1]) and steps is not None and steps != batch[-1]:
        msg = (
            f"the priorities of an index of shape {list(batch)} have the shape {list(batch)}, or further dimensions of "
            f"values of one row, got {list(given)}: a number for each pair of rows. Errors of shape [B] less "
            "predictions of shape [B, 1] broadcast to [B, B]: use .squeeze(-1) on the latter. Where there are as many "
            "values for each row as rows, reduce them first, such as .amax(-1)"
        )
        raise PriorityShapeError(msg)


def read_priorities(priority: Any, batch: tuple[int, ...], steps: int | None) -> Tensor:
    """Return priorities of rows that are indexed in the shape `batch`.

    Args:
        priority: a number or tensor or array: one for all rows, one for each, or `[*batch, *shape]`.
        batch: shape of the index.
        steps: see `check_one_each`.

    Returns:
        Any real dtype, on the device they came on: 0-dim for one priority of all rows, else `[n]` or `[n, *shape]`.

    Raises:
        KindError: if they are not real numbers, or have no values.
        SchemaError: for another shape; a `RuntimeError` as well.
    """
    try:
        values = (
            priority
            if isinstance(priority, torch.Tensor)
            else torch.as_tensor(np.asarray(priority, dtype=np.float64), device="cpu")
        )
    except (TypeError, ValueError) as error:
        msg = f"priorities are real numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    require_real(values)
    require_values(values, "priorities")
    values, shape, n = values.detach(), tuple(values.shape), int(np.prod(batch, dtype=np.int64))
    if values.numel() == 1:
        return values.reshape(())
    check_one_each(shape, batch, steps)
    if shape[: len(batch)] == batch:
        return values.reshape(n, *shape[len(batch) :])
    if values.numel() == n:
        return values.reshape(-1)
    msg = (
        "priority should be a number or an iterable of the same length as index, or have its shape "
        f"{list(batch)} (further dimensions are reduced per row), got shape {list(shape)}"
    )
    raise PriorityShapeError(msg)


def require_real(values: Tensor) -> None:
    """Check that priorities are real numbers.

    Raises:
        KindError: if they are not.
    """
    if values.dtype is torch.bool or values.is_complex():
        msg = f"priorities must be real numbers, got {values.dtype}: pass absolute errors, such as td_error.abs()"
        raise KindError(msg)


def one_each(values: Tensor, rows: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return one priority for each of `rows` rows, float64 `[n]`, contiguous.

    Args:
        values: as `read_priorities` returns them.
        rows: of the index.
        reduce: reduces several priorities of a row, `[n, *shape]`, to one.
    """
    values = reduce(values) if values.ndim > 1 else values.to(torch.float64)
    return values.expand((rows,)).contiguous()


def check_exponent(name: str, value: Any) -> float:
    """Return `alpha` or `beta` as a float; numbers that rounding took just below 0 become 0.

    Raises:
        OptionError: if it is not a number in [0, 2].

    Warns: `UserWarning`, above 1.
    """
    rounded = isinstance(value, (float, np.floating)) and -_ROUNDING <= value < 0
    number = check_number(name, 0.0 if rounded else value)
    if number > _MAX_EXPONENT:
        msg = (
            f"{name} must be in [0, {_MAX_EXPONENT:g}], where 0 is none and 1 the full effect, got {name}={value!r}: "
            "give a number such as 0.5"
        )
        raise OptionError(msg)
    if number > 1 + _ROUNDING:
        msg = (
            f"{name}={value!r} is above 1, where draws exaggerate priorities and weights overcorrect: use a number in "
            "[0, 1], as in prioritized replay (Schaul et al., 2016)"
        )
        warn_caller(msg, UserWarning)
    return number


def check_number(name: str, value: Any) -> float:
    """Return an exponent or offset as a float.

    Raises:
        OptionError: if it is not a finite number of at least 0.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, (str, bytes)) or not 0.0 <= number < float("inf"):
        word = "than" if name == "alpha" else "to"  # TorchRL's words
        msg = f"{name} must be greater or equal {word} 0, got {name}={value!r}: give a finite number of at least 0"
        raise OptionError(msg)
    return number


def raise_invalid(priorities: Tensor) -> None:
    """Raise for priorities of which some are negative or not finite.

    Raises:
        PriorityError: naming them and their positions.
    """
    bad = (~((priorities >= 0) & (priorities < float("inf")))).nonzero().flatten()
    values = [f"{value:g}" for value in priorities[bad[:_SHOWN]].tolist()]
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    msg = (
        f"priorities must be finite and at least 0, got {', '.join(values)} at the positions "
        f"{bad[:_SHOWN].tolist()}{more} of {len(priorities)}: pass absolute errors, such as td_error.abs(); nothing "
        "was changed"
    )
    raise PriorityError(msg)


def check_reduction(reduction: str) -> str:
    """Return how several priorities of an item become one.

    Raises:
        OptionError: for another name.
    """
    return check_choice("reduction", reduction, [name for name in REDUCTIONS if name != "sum"])


def check_capacity(value: Any) -> int:
    """Return the most rows of a sampler with priorities.

    Raises:
        KindError: if it is no integer.
        CapacityError: if it is out of range.
    """
    number = check_integer("max_capacity", value)
    if not 1 <= number <= _MAX_CAPACITY:
        msg = (
            f"max_capacity must be in [1, 2**36] (rows), got {number}: priorities take memory for every slot, so give "
            "the storage a max_size"
        )
        raise CapacityError(msg)
    return number


def values_of(priorities: Tensor, eps: float, alpha: float) -> Tensor:
    """Return `(p + eps) ** alpha` in fresh memory; 0 where `p + eps` is 0, also for `alpha = 0`."""
    if alpha == 0:
        return ((priorities + eps) > 0).to(torch.float64)
    if not priorities.is_cpu:
        return (priorities + eps).pow_(alpha)
    values = priorities.numpy() + eps  # numpy starts an operation in a third of torch's time
    return torch.from_numpy(np.power(values, alpha, out=values))


def fits(priority: float, eps: float, alpha: float) -> bool:
    """Return whether the value of a priority is at most `MAX_VALUE`."""
    try:
        return bool((priority + eps) ** alpha <= MAX_VALUE)
    except OverflowError:
        return False


def last_of_equal(slots: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Return `values` with each replaced by that of the last equal slot, so that the order of writing does not matter.

    No host sync. Where `keep` is False, a value counts only if no equal slot has one that counts.
    """
    ordered, order = torch.sort(slots * 2 + keep.to(slots.dtype), stable=True)
    last = torch.searchsorted(ordered, slots * 2 + 1, right=True) - 1
    return values[order[last]]


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-dim float64 tensor on a device, without a host sync."""
    if isinstance(number, float):
        return torch.full((), number, dtype=torch.float64, device=device)
    return number.to(device, torch.float64)


def is_column(x: Any, rows: int) -> bool:
    """Return whether `x` is a float64 tensor `[rows]` of finite numbers of at least 0."""
    matches = isinstance(x, torch.Tensor) and x.dtype is torch.float64 and tuple(x.shape) == (rows,)
    return matches and bool(((x >= 0) & (x < float("inf"))).all())
