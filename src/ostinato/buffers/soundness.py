"""Whether numbers that a checkpoint gave can be those of a buffer: asked before anything is loaded."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.errors import CheckpointError, OptionError, OstinatoError, StorageMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_counts", "check_ticket", "readable"]

_COUNTS = ("rows_written", "rows_since_empty", "rows_drawn")
_MOST = 2**62
_FOREIGN = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError, OstinatoError)


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Say in words, as a `CheckpointError`, what values of a kind or size that nobody expects raise in a part."""
    try:
        yield
    except (CheckpointError, StorageMemoryError):
        raise
    except OptionError as error:  # an option of this part, which the rows do not suit
        msg = f"the checkpoint does not fit {what}: {error}"
        raise CheckpointError(msg) from error
    except _FOREIGN as error:
        msg = f"this is not the state of {what} ({error!r:.300}): it is damaged, or of something else"
        raise CheckpointError(msg) from error


def check_counts(state: dict[str, Any], rows: int) -> None:
    """Refuse counts, cursors and stamps that a buffer of so many rows cannot have.

    Raises:
        CheckpointError: naming the first of them.
    """
    storage, stamps = state["storage"]["state"], state["stamps"]
    capacity = _whole("the storage's capacity", storage["capacity"], 1, _MOST * 2)
    _whole("the number of rows", rows, 0, capacity + 1)
    for name in _COUNTS:
        _whole(name, state[name], 0, _MOST)
    written = _whole("the number of stamps", stamps["written"], 0, _MOST)
    base = _whole("the first stamp", stamps["base"], 0, written + 1)
    _whole("the cursor of the stamps", stamps["cursor"], 0, capacity)
    array = stamps["array"]
    if array is not None:
        sound = isinstance(array, Tensor) and array.dtype is torch.int64 and array.ndim == 1
        sound = sound and rows <= array.shape[0] <= capacity
        if not sound or (array.numel() and not 0 <= int(array.min()) <= int(array.max()) <= written):
            msg = f"the checkpoint's stamps are not those of {rows} rows: it is damaged"
            raise CheckpointError(msg)
    elif rows > written - base:
        msg = f"the checkpoint holds {rows} rows, of which {written - base} were written: it is damaged"
        raise CheckpointError(msg)
    cursors = {"storage's": storage.get("cursor"), "writer's": state["writer"]["state"].get("cursor")}
    for whose, cursor in cursors.items():
        if cursor is not None:
            # where the ring is not full yet, its rows end at the cursor: a gap would hold rows nobody wrote
            low, high = (rows, rows + 1) if rows < capacity else (0, capacity)
            _whole(f"the {whose} cursor", cursor, low, high)


def check_ticket(state: dict[str, Any], *, episodes: bool) -> None:
    """Refuse a queued draw that does not hold what draws hold.

    Args:
        state: of the draw.
        episodes: whether the buffer can tell slices from each other.

    Raises:
        CheckpointError: naming what is wrong.
    """
    problem = ""
    slots, rng, dice = state["slots"], state["rng"], state.get("dice")
    if not isinstance(slots, Tensor) or slots.dtype is not torch.int64 or slots.ndim != 1 or not slots.numel():
        problem = "has no slots"
    elif type(state["last"]) is not bool:
        problem = "does not say whether it ended a pass"
    elif rng is not None and not (isinstance(rng, Tensor) and rng.dtype is torch.uint8):
        problem = "has no state of a generator"
    elif dice is not None and not (isinstance(dice, Tensor) and bool(dice.isfinite().all())):
        problem = "has random numbers that are none"
    elif (state.get("length") or state.get("lengths") is not None) and not episodes:
        problem = "is of slices, and this buffer has none"
    for name in ("weights", "stamps", "lengths"):
        value = state.get(name)
        if value is not None and not (isinstance(value, Tensor) and value.ndim == 1):
            problem = f"has no {name}"
    lengths = state.get("lengths")
    if lengths is not None and not problem and (lengths.dtype is not torch.int64 or int(lengths.min()) < 1):
        problem = "is of slices without rows"
    if problem:
        msg = f"a queued draw of the checkpoint {problem}: it is damaged"
        raise CheckpointError(msg)


def _whole(what: str, value: Any, low: int, high: int) -> int:
    """Return an integer in `[low, high)`."""
    if type(value) is not int or not low <= value < high:
        msg = f"{what} must be an integer in [{low}, {high}), the checkpoint has {value!r:.80}: it is damaged"
        raise CheckpointError(msg)
    return value
