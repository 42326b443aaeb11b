"""A list storage of TorchRL, which `dumps` does not take there: what `torch.save(rb.state_dict(), file)` wrote."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ostinato.compat.torchrl.files import damaged
from ostinato.compat.torchrl.rows import Ring
from ostinato.core import kinds
from ostinato.core.kinds import Node
from ostinato.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["generator_of", "read_listed", "ring_of"]

_MAGIC = (b"PK", b"\x80")  # an archive, or the pickle that torch wrote before 1.6
_ERRORS = (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def read_listed(path: Path, *, allow_pickle: bool) -> dict[str, Any]:
    """Read the state of a buffer over a list storage.

    Args:
        path: the file.
        allow_pickle: unpickle what `weights_only=True` refuses, which runs whatever code the file brings.

    Returns:
        TorchRL's state, with TensorDicts in place of theirs in `items`.

    Raises:
        CheckpointError: if it holds pickled objects and `allow_pickle` is false, or is of something else.
        DamagedFileError: naming the file.
    """
    with path.open("rb") as file:
        if not file.read(2).startswith(_MAGIC):
            damaged(path, "not a file of torch.save: it begins otherwise")
    try:
        state = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            damaged(path, str(error)[:200])
        msg = (
            f"{path} holds more than tensors and plain values, and unpickling runs code: if you trust it, pass "
            f"allow_pickle=True ({str(error).splitlines()[0][:200]})"
        )
        raise CheckpointError(msg) from error
    except _ERRORS as error:
        damaged(path, f"not a file of torch.save: {str(error)[:200]}")
    items = state.get("_storage") if isinstance(state, dict) else None
    items = items.get("_storage") if isinstance(items, dict) else None
    if not isinstance(items, list) or not isinstance(state.get("_writer"), dict):
        msg = f"{path} is not the state_dict of a TorchRL buffer over a ListStorage: save other storages with dumps"
        raise CheckpointError(msg)
    if state.get("_sampler"):
        msg = f"{path} is of a sampler that cannot be carried over with a list storage: RandomSampler can"
        raise CheckpointError(msg)
    return {**state, "items": [_row(item, path) for item in items]}


def ring_of(path: Path, state: dict[str, Any], max_size: int | None) -> Ring:
    """Tell how many rows there are and where the next one goes; TorchRL does not save how many fit.

    Raises:
        OptionError: if `max_size` contradicts the file.
        DamagedFileError: naming the file.
    """
    rows, writer = len(state["items"]), state["_writer"]
    cursor, written = writer.get("_cursor"), writer.get("_write_count", 0)
    if type(cursor) is not int or type(written) is not int or not 0 <= cursor <= rows or written < 0:
        damaged(
            path, f"its writer has the cursor {str(cursor)[:40]} and the count {str(written)[:40]} with {rows} rows"
        )
    wrapped = cursor != rows or (cursor == 0 and rows > 0)
    capacity = rows if wrapped else sys.maxsize if max_size is None else max_size
    if max_size is not None and (capacity != max_size or max_size < max(rows, 1)):
        msg = f"{path} holds {rows} rows {'in a full storage' if wrapped else ''}, got max_size={max_size}"
        raise OptionError(msg)
    return Ring(1, 1, capacity, rows, cursor % capacity, max(written, rows))


def generator_of(path: Path, state: dict[str, Any]) -> Tensor | None:
    """Return the state of the generator that the buffer owned; None where there was none, or one of a device."""
    saved = state.get("_rng")
    if not isinstance(saved, (tuple, list)) or len(saved) != 2 or str(saved[1]) != "cpu":
        return None
    try:
        torch.Generator().set_state(saved[0])
    except (RuntimeError, TypeError) as error:
        damaged(path, f"torch does not take its generator's state: {str(error)[:200]}")
    return saved[0]  # type: ignore[no-any-return]


def _row(item: Any, path: Path) -> Any:
    """Return a row as it was put in: TorchRL saves a TensorDict as an OrderedDict with its keys joined by dots."""
    if not isinstance(item, OrderedDict):
        return item
    below: OrderedDict[str, Any] = OrderedDict()
    for key, value in item.items():
        first, dot, rest = str(key).partition(".")
        if dot and isinstance(below.setdefault(first, OrderedDict()), OrderedDict):
            below[first][rest] = value
        elif first in below:
            damaged(path, f"a row has {first[:80]!r} twice")
        elif not first.startswith("__"):
            below[first] = value
    fields = [_row(value, path) for value in below.values()]
    return kinds.make(Node("tensordict", tuple(below)), fields, (), torch.device("cpu"))
