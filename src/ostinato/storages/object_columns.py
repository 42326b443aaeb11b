"""Fields of Python objects beside the tensors of a storage: text, and what TensorDict keeps as `NonTensorData`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.draw import Run
from ostinato.core.kinds import show_field
from ostinato.errors import CheckpointError
from ostinato.storages.memory import HeapMemory
from ostinato.storages.mirror_state import column_name
from ostinato.storages.objects import owned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ostinato.core.draw import Placement
    from ostinato.core.rows import ObjectLeaf, Path, Schema

__all__ = ["ObjectColumns", "check_objects", "own_values"]


@final
class ObjectColumns:
    """Object arrays `[capacity, *leaf.shape]`, one for each field, in memory of the host.

    Objects are copied when they are written (tensors, arrays and containers in them), and handed out as they are: what
    is changed in a mutable object that was read is changed in the storage. A column is read and written while Python's
    global lock is held: a reader never meets half a value, and whether a row was replaced meanwhile is told by its
    generation, as for tensors.

    Args:
        leaves: the fields.
        capacity: rows.

    Raises:
        StorageMemoryError: if there is no memory for eight bytes a row and field.
    """

    def __init__(self, leaves: Sequence[ObjectLeaf], capacity: int) -> None:
        HeapMemory(torch.device("cpu")).check(sum(8 * capacity * math.prod(leaf.shape) for leaf in leaves))
        self._leaves = tuple(leaves)
        self.paths = {leaf.path: position for position, leaf in enumerate(leaves)}
        self._columns = [np.empty((capacity, *leaf.shape), dtype=object) for leaf in leaves]

    @classmethod
    def of(cls, leaves: Sequence[ObjectLeaf], objects: Sequence[np.ndarray[Any, Any]], rows: int) -> ObjectColumns:
        """Make columns of the fields of `rows` rows, `[*batch, *leaf.shape]` each, which they hold. Copy."""
        made = cls(leaves, rows)
        made.set(Run(0, rows, rows), made.owned(objects, rows))
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the references; the objects do not say."""
        return sum(column.nbytes for column in self._columns)

    def column(self, path: Path) -> np.ndarray[Any, Any]:
        """Return one field, `[capacity, *shape]`. View."""
        return self._columns[self.paths[path]]

    def owned(self, objects: Sequence[np.ndarray[Any, Any]], rows: int) -> list[np.ndarray[Any, Any]]:
        """Return fields `[*batch, *shape]` as `[rows, *shape]`, with copies of what callers may change later."""
        out = []
        for leaf, values in zip(self._leaves, objects, strict=True):
            out.append(own_values(values).reshape((rows, *leaf.shape)))
        return out

    def set(self, placement: Placement, objects: Sequence[np.ndarray[Any, Any]]) -> None:
        """Put rows `[rows, *shape]` where a placement says."""
        for column, values in zip(self._columns, objects, strict=True):
            if isinstance(placement, Run):
                first = min(placement.rows, placement.capacity - placement.start)
                middle = placement.skip + first
                column[placement.start : placement.start + first] = values[placement.skip : middle]
                column[: placement.rows - first] = values[middle : placement.total]
            else:
                column[placement.slots.cpu().numpy()] = values[placement.rows.cpu().numpy()]

    def edit(self, slots: Tensor, objects: Sequence[np.ndarray[Any, Any]]) -> None:
        """Replace the rows at `slots`; of duplicates the last one wins."""
        where = slots.cpu().numpy()
        for column, values in zip(self._columns, objects, strict=True):
            column[where] = values

    def get(self, where: Tensor | slice, elsewhere: Mapping[Path, Tensor] | None = None) -> list[np.ndarray[Any, Any]]:
        """Return the objects at slots (int64 `[n]`) or in a span; fields that `elsewhere` names, at other slots."""
        found = []
        at = where if isinstance(where, slice) else where.cpu().numpy()
        for leaf, column in zip(self._leaves, self._columns, strict=True):
            other = None if elsewhere is None else elsewhere.get(leaf.path)
            found.append(column[at].copy() if other is None else column[other.cpu().numpy()])
        return found

    def clear(self) -> None:
        """Let go of all objects."""
        for column in self._columns:
            column.fill(None)

    def state(self, rows: int, *, allow_pickle: bool) -> dict[str, Any]:
        """Return what a storage's state says of the first `rows` rows: lists of objects by name, not copied."""
        named = zip(self._names(), self._columns, strict=True)
        return {
            "objects": {name: column[:rows].reshape(-1).tolist() for name, column in named},
            "allow_pickle": allow_pickle,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; `check_objects` has accepted it."""
        rows = int(state["rows"])
        for name, leaf, column in zip(self._names(), self._leaves, self._columns, strict=True):
            values = state["objects"][name]
            flat = np.fromiter(values, dtype=object, count=len(values))
            column[:rows] = own_values(flat).reshape((rows, *leaf.shape))
            column[rows:] = None

    def _names(self) -> list[str]:
        return [_name(leaf, position) for position, leaf in enumerate(self._leaves)]


def check_objects(schema: Schema, state: dict[str, Any]) -> None:
    """Raise if a state lacks fields of objects that its schema has, or has another number of them.

    Raises:
        CheckpointError: naming the field.
    """
    saved = state.get("objects") or {}
    for position, leaf in enumerate(schema.objects):
        values, count = saved.get(_name(leaf, position)), int(state["rows"]) * math.prod(leaf.shape)
        if not isinstance(values, list) or len(values) != count:
            got = f"{len(values)}" if isinstance(values, list) else "none"
            msg = f"the checkpoint must hold {count} objects for {show_field(leaf.path)}, got {got}: it is damaged"
            raise CheckpointError(msg)


def own_values(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an object array in which tensors, arrays and containers are copies."""
    flat = values.reshape(-1).tolist()
    if not _IMMUTABLE.issuperset(map(type, flat)):
        flat = [value if type(value) in _IMMUTABLE else owned(value) for value in flat]
    return np.fromiter(flat, dtype=object, count=len(flat)).reshape(values.shape)


_IMMUTABLE = frozenset({str, bytes, int, float, complex, bool, type(None)})


def _name(leaf: ObjectLeaf, position: int) -> str:
    return f"object {column_name(leaf.path, position)}"
