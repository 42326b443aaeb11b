"""What an episode table refuses: slots outside the ring, and states that are not whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["CUT", "ENDED", "OPEN", "check_episode_state"]

OPEN, ENDED, CUT = 0, 1, 2
"""An episode goes on, was closed by its last row, or was cut off by a row that belongs to no episode."""

_NUMBERS = ("capacity", "lanes", "cursor", "serial")
_ARRAYS = {
    "episode": torch.int32,
    "serials": torch.int64,
    "keys": torch.int64,
    "kinds": torch.uint8,
    "status": torch.uint8,
    "free": torch.int64,
}


def check_episode_state(state: Any, capacity: int, lanes: int) -> dict[str, Tensor]:
    """Return the tensors of a state, contiguous, if it is whole and that of such a table.

    Raises:
        CheckpointError: otherwise.
    """
    _require(isinstance(state, dict) and set(state) == {*_NUMBERS, *_ARRAYS}, "its keys are wrong")
    _require(all(type(state[name]) is int for name in _NUMBERS), "a count is not an integer")
    if (state["capacity"], state["lanes"]) != (capacity, lanes):
        msg = (
            f"the checkpoint's episode table has capacity {state['capacity']} and {state['lanes']} lanes, this one "
            f"{capacity} and {lanes}: load it into a buffer of the same size"
        )
        raise CheckpointError(msg)
    tensors = {}
    for name, dtype in _ARRAYS.items():
        x = state[name]
        right = isinstance(x, torch.Tensor) and x.dtype is dtype and x.dim() == 1 and x.is_cpu
        _require(right, f"{name} is not {dtype} [n] on the CPU")
        tensors[name] = x.contiguous()
    arrays = {name: x.numpy() for name, x in tensors.items()}
    _check_records(arrays, state)
    _check_open(arrays, state)
    return tensors


def _check_records(arrays: dict[str, npt.NDArray[Any]], state: dict[str, Any]) -> None:
    episode, serials = arrays["episode"], arrays["serials"]
    records, capacity = serials.shape[0], state["capacity"]
    _require(0 <= state["cursor"] < capacity and episode.shape[0] <= capacity, "it has more rows than slots")
    _require(records <= 2 * capacity, "it has more records than rows could ever need")
    _require(all(arrays[x].shape[0] == records for x in ("keys", "kinds", "status")), "its lengths differ")
    inside = bool(((episode >= -1) & (episode < records)).all())
    _require(inside, "a row is in an episode that is not there")
    rows = np.bincount(episode[episode >= 0], minlength=records)
    _require(np.array_equal(np.sort(arrays["free"]), np.flatnonzero(rows == 0)), "its free records hold rows")
    live = serials[rows > 0]
    _require(not serials[rows == 0].any(), "a free record has a serial number")
    _require(bool(((live >= 1) & (live <= state["serial"])).all()), "a serial number is out of range")
    _require(np.unique(live).shape == live.shape and state["serial"] >= 0, "a serial number repeats")
    _require(bool((arrays["status"] <= CUT).all()), "the status of an episode is unknown")
    _require(bool(((rows > 0) | (arrays["status"] == OPEN)).all()), "a free record has a status")


def _check_open(arrays: dict[str, npt.NDArray[Any]], state: dict[str, Any]) -> None:
    """What goes on is known by its lane or its id, and nothing else is."""
    episode, keys, kinds = arrays["episode"], arrays["keys"], arrays["kinds"]
    _require(bool((kinds <= 1).all()), "the stream of an episode is unknown")
    rows = np.bincount(episode[episode >= 0], minlength=keys.shape[0])
    is_open = (arrays["status"] == OPEN) & (rows > 0)
    _require(not keys[~is_open].any() and not kinds[~is_open].any(), "an episode that is closed has a stream")
    streams = np.stack([kinds[is_open].astype(np.int64), keys[is_open]])
    _require(np.unique(streams, axis=1).shape == streams.shape, "two episodes go on in one stream")
    first = state["cursor"] - episode.shape[0]
    lanes = (first + np.arange(episode.shape[0])) % state["capacity"] % state["lanes"]
    in_lane = np.append(is_open & (kinds == 0), [False])[episode]  # the last one answers for -1
    _require(np.array_equal(lanes[in_lane], keys[episode[in_lane]]), "an episode of a lane has rows in another")


def _require(good: bool, what: str) -> None:  # noqa: FBT001
    if not good:
        msg = f"the state of the episode table is damaged: {what}; load another checkpoint"
        raise CheckpointError(msg)
