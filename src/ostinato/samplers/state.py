"""States of samplers: what they have in common when they are checked, and when rows go to other slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def require(good: bool, problem: str) -> None:  # noqa: FBT001
    """Check a part of a state.

    Raises:
        CheckpointError: if it is not good, naming the problem.
    """
    if not good:
        msg = f"the sampler's state is damaged: {problem}"
        raise CheckpointError(msg)


def require_options(sampler: Any, state: dict[str, Any], names: Iterable[str]) -> None:
    """Check that a state has the options of a sampler, which are attributes of it.

    Raises:
        CheckpointError: naming the first that differs.
    """
    for name in names:
        if state[name] != getattr(sampler, name):
            msg = (
                f"the state is that of {type(sampler).__name__}({name}={state[name]!r}), this one has "
                f"{getattr(sampler, name)!r}: make it with the same options"
            )
            raise CheckpointError(msg)


def new_slots(order: Tensor, slots: Tensor) -> Tensor:
    """Return the slots of rows that were moved, int64 `[n]`, -1 for rows that have left.

    Args:
        order: int64 `[rows]`: the row of slot `order[i]` is in slot `i` now, and all others have left.
        slots: int64 `[n]`, where they were before.
    """
    order = order.to(slots.device)
    size = 1 + max(int(x.max()) if x.numel() else -1 for x in (order, slots))
    places = torch.full((size,), -1, dtype=torch.int64, device=slots.device)
    places[order] = torch.arange(order.shape[0], device=slots.device)
    return places[slots]


def moved(state: dict[str, Any], order: Tensor, values: Iterable[str], slots: Iterable[str]) -> dict[str, Any]:
    """Return a state after rows were moved.

    Args:
        state: of a sampler.
        order: see `new_slots`.
        values: entries with one value for each row, if the state has them.
        slots: entries that list slots; those of rows that have left are dropped.
    """
    changed = {name: state[name][order.to(state[name].device)] for name in values if name in state}
    for name in slots:
        if name in state:
            found = new_slots(order, state[name])
            changed[name] = found[found >= 0]
    return {**state, **changed}
