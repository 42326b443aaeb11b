"""`find_start_stop_traj`: where trajectories start and stop in rows in the order of a storage."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.errors import KindError, UsageError

DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")
"""Flags of which any ends a trajectory, under `next` or at the root."""


def find_start_stop_traj(
    *,
    trajectory: Tensor | None = None,
    end: Tensor | None = None,
    at_capacity: bool,
    cursor: int | Tensor | range | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find where trajectories start and stop, from their ids or from flags at their ends.

    Give either `trajectory` or `end`, `[T, *B]` in the order of the storage: steps, then environments. A trajectory
    ends where the id of the next step differs, or at a flag.

    Args:
        trajectory: id of the trajectory of each row.
        end: bool, True for the last row of a trajectory.
        at_capacity: whether the rows are a full ring, in which step 0 follows the last step. Otherwise the last step
            ends a trajectory in any case.
        cursor: for a full ring, the step of the newest row (the last one of a tensor or a range): a trajectory ends
            there, since the next step is the oldest one.
        device: where to compute; None is the device of the input.

    Returns:
        `(start, stop, lengths)` on the device of the input: the first and the last row of each of N trajectories, int64
        `[N, 1 + len(B)]` (step, then environment), and their numbers of rows, int64 `[N]`. Environments follow one
        another, and `start > stop` where a trajectory continues at step 0. New tensors.

    Raises:
        KindError: if both or none of `trajectory` and `end` are given (also a `TypeError`).
        UsageError: if there are no rows, or the cursor is not a step.

    Examples:
        >>> import torch
        >>> from ostinato import find_start_stop_traj
        >>> ids = torch.tensor([4, 4, 1, 2, 2, 4])  # a ring whose newest row is in slot 1
        >>> start, stop, lengths = find_start_stop_traj(trajectory=ids, at_capacity=True, cursor=1)
        >>> start[:, 0].tolist(), stop[:, 0].tolist(), lengths.tolist()
        ([5, 2, 3], [1, 2, 4], [3, 1, 2])
    """
    if (trajectory is None) == (end is None):
        given = "both" if end is not None else "none"
        msg = f"Exactly one of `trajectory` and `end` must be provided, got {given} of them"
        raise KindError(msg)
    signal: Tensor = trajectory if end is None else end  # type: ignore[assignment]
    if signal.ndim == 0:
        msg = "Expected the end-of-trajectory signal to be at least 1-dimensional: [steps, *environments], got a scalar"
        raise UsageError(msg)
    if signal.shape[0] == 0:
        msg = f"Cannot recover trajectory boundaries from an empty (T=0) input, got shape {list(signal.shape)}"
        raise UsageError(msg)
    newest = _newest(cursor) if at_capacity and cursor is not None else None
    found = signal if device is None else signal.to(device)
    ends = found.bool() if trajectory is None else found != found.roll(-1, 0)
    ends = ends.clone() if ends is signal else ends
    if not at_capacity:
        newest = signal.shape[0] - 1
    if newest is not None:
        if not -signal.shape[0] <= newest < signal.shape[0]:
            msg = f"cursor must be a step in [0, {signal.shape[0]}), got {newest}"
            raise UsageError(msg)
        ends[newest] = True
    ends[-1] |= ~ends.any(0)  # a ring without an end, read from step 0
    start, stop, lengths = _between(ends)
    return start.to(signal.device), stop.to(signal.device), lengths.to(signal.device)


def _between(ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts, stops and lengths from flags `[T, *B]` that have an end in each environment."""
    steps, dims = ends.shape[0], ends.ndim
    found = ends.transpose(0, -1).nonzero()
    stop = found if dims == 1 else found[:, [dims - 1, *range(1, dims - 1), 0]]
    if not stop.shape[0]:
        return stop, stop.clone(), stop[:, 0].clone()
    other = (stop[1:, 1:] != stop[:-1, 1:]).any(1)  # where the next environment begins
    firsts = torch.cat((other.new_ones(1), other)).nonzero().flatten()
    lasts = torch.cat((other, other.new_ones(1))).nonzero().flatten()
    before = stop[:, 0].roll(1)
    before[firsts] = stop[lasts, 0]
    start = stop.clone()
    start[:, 0] = (before + 1) % steps
    return start, stop, (stop[:, 0] - start[:, 0]) % steps + 1


def _newest(cursor: int | Tensor | range) -> int:
    """Return the last step of a cursor."""
    what = "tensor" if isinstance(cursor, Tensor) else "range"
    if isinstance(cursor, (Tensor, range)):
        values = cursor.reshape(-1).tolist() if isinstance(cursor, Tensor) else cursor
        if not len(values):
            msg = f"cursor must not be an empty {what}: give the step of the newest row"
            raise UsageError(msg)
        cursor = values[-1]
    if isinstance(cursor, bool) or not hasattr(cursor, "__index__"):
        msg = f"cursor should be an integer or a 1d tensor or a range, got {cursor!r}"
        raise UsageError(msg)
    return int(cursor.__index__())
