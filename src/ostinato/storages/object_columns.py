"""Fields of Python objects in a storage of tensors: text, and what TensorDict keeps as `NonTensorData`."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.kinds import show_field
from ostinato.core.records import Run
from ostinato.core.rows import Schema, column_name, describe, map_leaves
from ostinato.durable import decode, encode
from ostinato.durable.manifest import canonical, parse_json
from ostinato.errors import CheckpointError, DamagedFileError, OstinatoError
from ostinato.storages.memory import HeapMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import ObjectLeaf, Path

__all__ = ["ObjectColumns", "check_objects", "own_values", "owned", "pack", "pack_column", "unpack", "unpack_column"]


def owned(row: Any) -> Any:
    """Copy the tensors and arrays of a row: callers reuse theirs, and a view would keep a whole batch in memory.

    The copies are normal tensors without autograd history, also in inference mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return map_leaves(row, _own_leaf)
    return map_leaves(row, _own_leaf)


def _own_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) or kinds.is_tensor_collection(leaf):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def pack(row: Any, *, allow_pickle: bool) -> dict[str, Any]:
    """Convert a row to values that checkpoints can hold.

    Raises:
        CheckpointError: if it is not a tensor, array, TensorDict or plain value, and pickling is not allowed.
    """
    if kinds.is_tensor_collection(row):
        try:
            return _pack_tree(row, allow_pickle=allow_pickle)
        except OstinatoError as error:
            if not allow_pickle:
                msg = (
                    f"a row cannot be saved: {kinds.reason_of(error)}, which can only be pickled: create the "
                    "storage with allow_pickle=True"
                )
                raise CheckpointError(msg) from error
            return {"form": "pickle", "bytes": pickle.dumps(row)}
    try:
        encode(row, store=lambda *_: "state:0")
    except CheckpointError as error:
        if not allow_pickle:
            msg = f"{error}; or create the storage with allow_pickle=True"
            raise CheckpointError(msg) from error
        return {"form": "pickle", "bytes": pickle.dumps(row)}
    return {"form": "plain", "value": row}


def _pack_tree(row: Any, *, allow_pickle: bool) -> dict[str, Any]:
    schema = describe(row, 0, bare=True)
    flat = schema.flatten(row, (), 0)
    packed = {"form": "tree", "schema": schema.to_json(), "leaves": flat.leaves}
    if not schema.objects:
        return packed
    columns = [values.reshape(-1).tolist() for values in flat.objects]
    return {**packed, "objects": [[pack(v, allow_pickle=allow_pickle) for v in values] for values in columns]}


def unpack(saved: dict[str, Any], *, allow_pickle: bool) -> Any:
    """Convert the result of `pack` back to a row.

    Raises:
        CheckpointError: if it is a pickle and unpickling is not allowed.
    """
    form = saved.get("form")
    if form == "plain":
        return saved["value"]
    if form == "tree":
        schema = Schema.from_json(saved["schema"])
        objects = _unpack_objects(schema, saved, allow_pickle=allow_pickle)
        leaves = schema.flatten(_nest(schema, saved["leaves"], objects), (), 0, exact=True).leaves
        return schema.build(leaves, (), _device(leaves), objects)
    if form == "pickle":
        if not allow_pickle:
            msg = (
                "the checkpoint holds pickled objects, and unpickling executes code: if you trust it, load into "
                "a storage with allow_pickle=True"
            )
            raise CheckpointError(msg)
        return pickle.loads(saved["bytes"])  # noqa: S301 (asked for by name, off by default)
    msg = f"the checkpoint holds an object of unknown form {form!r}"
    raise CheckpointError(msg)


def _unpack_objects(schema: Any, saved: dict[str, Any], *, allow_pickle: bool) -> list[np.ndarray[Any, Any]]:
    columns = saved.get("objects", [])
    out = []
    for leaf, packed in zip(schema.objects, columns, strict=True):
        values = [unpack(value, allow_pickle=allow_pickle) for value in packed]
        out.append(np.fromiter(values, dtype=object, count=len(values)).reshape(leaf.shape))
    return out


def _device(leaves: list[Tensor]) -> torch.device:
    return leaves[0].device if leaves else torch.device("cpu")


def _nest(schema: Any, leaves: list[Any], objects: list[np.ndarray[Any, Any]]) -> Any:
    if len(leaves) != len(schema.leaves):
        msg = f"the checkpoint holds {len(leaves)} tensors for {len(schema.leaves)} fields"
        raise CheckpointError(msg)
    return schema.build(leaves, (), _device(leaves), objects)


def pack_column(name: str, values: Sequence[Any], *, allow_pickle: bool) -> tuple[str, Tensor, Tensor]:
    """Convert a column of objects to two arrays: the bytes of all values, and the end of each value.

    Returns:
        "text" (each value is UTF-8) or "json" (each value is JSON), uint8 `[bytes]`, and int64 `[values]`.

    Raises:
        CheckpointError: naming the column, if a value is not text or a plain value, and pickling is not allowed.
    """
    form, parts = "text", _as_text(values)
    if parts is None:
        form, parts = "json", list[bytes]()
        for i, value in enumerate(values):
            try:
                parts.append(canonical(encode(pack(value, allow_pickle=allow_pickle))))
            except CheckpointError as error:
                msg = f"value {i} of the column {name[:200]!r} cannot be saved: {error}"
                raise CheckpointError(msg) from error
    ends = torch.tensor([len(part) for part in parts], dtype=torch.int64, device="cpu").cumsum(0)
    whole = bytearray(b"".join(parts))
    text = torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8, device="cpu")
    return form, text, ends


def _as_text(values: Sequence[Any]) -> list[bytes] | None:
    """Return values as UTF-8; None if one is not text, or contains surrogates, which UTF-8 cannot encode."""
    if not {str}.issuperset(map(type, values)):
        return None
    try:
        return [value.encode("utf-8") for value in values]
    except UnicodeEncodeError:
        return None


def unpack_column(name: str, form: object, text: Tensor, ends: Tensor, *, allow_pickle: bool) -> list[Any]:
    """Convert the result of `pack_column` back to objects.

    Raises:
        DamagedFileError: if the arrays do not match, or contain other data.
        CheckpointError: if there are pickles, and unpickling is not allowed.
    """
    sound = text.dtype is torch.uint8 and ends.dtype is torch.int64 and text.ndim == ends.ndim == 1
    stops = [0, *ends.tolist()] if sound else []
    sound = sound and stops[-1] == text.shape[0] and all(a <= b for a, b in itertools.pairwise(stops))
    if not sound or form not in {"text", "json"}:
        msg = f"the column {name[:200]!r} of the checkpoint does not hold {ends.shape[0]} values: it is damaged"
        raise DamagedFileError(msg)
    whole = text.numpy().tobytes()
    parts = [whole[a:b] for a, b in itertools.pairwise(stops)]
    if form == "text":
        try:
            return [part.decode("utf-8") for part in parts]
        except UnicodeDecodeError as error:
            msg = f"the column {name[:200]!r} of the checkpoint is damaged: {error}"
            raise DamagedFileError(msg) from error
    where = f"column {name[:200]!r}"
    return [unpack(decode(parse_json(part, where), where=where), allow_pickle=allow_pickle) for part in parts]


@final
class ObjectColumns:
    """Object arrays `[capacity, *leaf.shape]`, one for each field, in memory of the host.

    Objects are copied when they are written (tensors, arrays and containers in them). Reads return the stored objects:
    a change to a mutable object that was read is a change to the storage. Columns are read and written while Python's
    global lock is held, so a reader never sees half a value; generations show whether a row was replaced meanwhile, as
    for tensors.

    Args:
        leaves: the fields.
        capacity: rows.

    Raises:
        StorageMemoryError: if there are not eight bytes of memory for each row and field.
    """

    def __init__(self, leaves: Sequence[ObjectLeaf], capacity: int) -> None:
        HeapMemory(torch.device("cpu")).check(sum(8 * capacity * math.prod(leaf.shape) for leaf in leaves))
        self._leaves = tuple(leaves)
        self.paths = {leaf.path: position for position, leaf in enumerate(leaves)}
        self._columns = [np.empty((capacity, *leaf.shape), dtype=object) for leaf in leaves]

    @classmethod
    def of(cls, leaves: Sequence[ObjectLeaf], objects: Sequence[np.ndarray[Any, Any]], rows: int) -> ObjectColumns:
        """Create columns of the fields of `rows` rows, `[*batch, *leaf.shape]` each. Copy."""
        made = cls(leaves, rows)
        made.set(Run(0, rows, rows), made.owned(objects, rows))
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the references; the sizes of the objects are not known."""
        return sum(column.nbytes for column in self._columns)

    def column(self, path: Path) -> np.ndarray[Any, Any]:
        """Return one field, `[capacity, *shape]`. View."""
        return self._columns[self.paths[path]]

    def owned(self, objects: Sequence[np.ndarray[Any, Any]], rows: int) -> list[np.ndarray[Any, Any]]:
        """Return fields `[*batch, *shape]` as `[rows, *shape]` with copies of mutable objects."""
        out = []
        for leaf, values in zip(self._leaves, objects, strict=True):
            out.append(own_values(values).reshape((rows, *leaf.shape)))
        return out

    def set(self, placement: Placement, objects: Sequence[np.ndarray[Any, Any]]) -> None:
        """Write rows `[rows, *shape]` to the slots of a placement."""
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
        """Return the objects at slots (int64 `[n]`) or in a span; fields in `elsewhere` at other slots."""
        found = []
        at = where if isinstance(where, slice) else where.cpu().numpy()
        for leaf, column in zip(self._leaves, self._columns, strict=True):
            other = None if elsewhere is None else elsewhere.get(leaf.path)
            found.append(column[at].copy() if other is None else column[other.cpu().numpy()])
        return found

    def keep(self, slots: Tensor) -> None:
        """Move the objects at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        where = slots.cpu().numpy()
        for column in self._columns:
            column[: len(where)] = column[where]
            column[len(where) :] = None

    def clear(self) -> None:
        """Remove all objects."""
        for column in self._columns:
            column.fill(None)

    def state(self, rows: int, *, allow_pickle: bool) -> dict[str, Any]:
        """Return the entries of a storage state: lists of the objects of the first `rows` rows by name, not copied."""
        named = zip(self._names(), self._columns, strict=True)
        return {
            "objects": {name: column[:rows].reshape(-1).tolist() for name, column in named},
            "allow_pickle": allow_pickle,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned, after `check_objects`."""
        rows = int(state["rows"])
        for name, leaf, column in zip(self._names(), self._leaves, self._columns, strict=True):
            values = state["objects"][name]
            flat = np.fromiter(values, dtype=object, count=len(values))
            column[:rows] = own_values(flat).reshape((rows, *leaf.shape))
            column[rows:] = None

    def _names(self) -> list[str]:
        return [_name(leaf, position) for position, leaf in enumerate(self._leaves)]


def check_objects(schema: Schema, state: dict[str, Any]) -> None:
    """Check that a state has all fields of objects of its schema, with the right number of objects.

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
