"""Fields of Python objects in a storage of tensors: text, and what TensorDict keeps as `NonTensorData`."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any, NoReturn, final

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
from ostinato.storages.columns import Columns, join_blobs, split_blobs
from ostinato.storages.memory import HeapMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Flat, ObjectLeaf


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
    try:
        if kinds.is_tensor_collection(row):
            return _pack_tree(row, allow_pickle=allow_pickle)
        encode(row, store=lambda *_: "state:0")
    except OstinatoError as error:
        if not allow_pickle:
            msg = f"a row cannot be saved: {kinds.reason_of(error)}; or create the storage with allow_pickle=True"
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
        schema, leaves = Schema.from_json(saved["schema"]), saved["leaves"]
        columns = zip(schema.objects, saved.get("objects", []), strict=True)
        objects = [object_array(values, leaf.shape, allow_pickle=allow_pickle) for leaf, values in columns]
        if len(leaves) != len(schema.leaves):
            msg = f"the checkpoint holds {len(leaves)} tensors for {len(schema.leaves)} fields"
            raise CheckpointError(msg)
        device = leaves[0].device if leaves else torch.device("cpu")
        row = schema.build(leaves, (), device, objects)
        return schema.build(schema.flatten(row, (), 0, exact=True).leaves, (), device, objects)
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


def object_array(packed: Sequence[Any], shape: tuple[int, ...], *, allow_pickle: bool) -> np.ndarray[Any, Any]:
    """Return packed objects as an object array of a shape.

    Raises:
        CheckpointError: if there is another number of them, or they are pickled and that is not allowed.
    """
    values = [unpack(value, allow_pickle=allow_pickle) for value in packed]
    if len(values) != math.prod(shape):
        msg = f"the checkpoint holds {len(values)} objects for {math.prod(shape)} places: it is damaged"
        raise CheckpointError(msg)
    return np.fromiter(values, dtype=object, count=len(values)).reshape(shape)


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
    return form, *join_blobs(parts)


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
    where = f"column {name[:200]!r}"
    if text.dtype is not torch.uint8 or form not in {"text", "json"}:
        _raise_damaged(where, f"it holds {text.dtype} of the form {form!r}")
    try:
        parts = split_blobs(text, ends)
        if form == "text":
            return [part.decode("utf-8") for part in parts]
    except (DamagedFileError, UnicodeDecodeError) as error:
        _raise_damaged(where, error)
    return [unpack(decode(parse_json(part, where), where=where), allow_pickle=allow_pickle) for part in parts]


def _raise_damaged(where: str, reason: object) -> NoReturn:
    msg = f"the {where} of the checkpoint is damaged: {reason}"
    raise DamagedFileError(msg)


@final
class ObjectColumns(Columns):
    """Object arrays `[capacity, *leaf.shape]`, one for each field, in memory of the host.

    Objects are copied when they are written (tensors, arrays and containers in them). Reads return the stored objects:
    a change to a mutable object that was read is a change to the storage. Columns are read and written while Python's
    global lock is held, so a reader never sees half a value; generations show whether a row was replaced meanwhile, as
    for tensors.

    Args:
        schema: of a row.
        capacity: rows.
        allow_pickle: of the storage.

    Raises:
        StorageMemoryError: if there are not eight bytes of memory for each row and field.
    """

    def __init__(self, schema: Schema, capacity: int, *, allow_pickle: bool) -> None:
        leaves = schema.objects
        HeapMemory(torch.device("cpu")).check(sum(8 * capacity * math.prod(leaf.shape) for leaf in leaves))
        self.positions = range(len(schema.leaves), len(schema.leaves) + len(leaves))
        self._allow_pickle = allow_pickle
        self._names = object_names(leaves)
        self._columns = [np.empty((capacity, *leaf.shape), dtype=object) for leaf in leaves]

    @property
    def nbytes(self) -> int:
        """Bytes of the references; the sizes of the objects are not known."""
        return sum(column.nbytes for column in self._columns)

    def prepare(self, flat: Flat, rows: int, cursor: int | None) -> list[np.ndarray[Any, Any]]:  # noqa: ARG002
        """Return the fields of rows, `[rows, *shape]`, with copies of mutable objects."""
        pairs = zip(flat.objects, self._columns, strict=True)
        return [own_values(values).reshape((rows, *column.shape[1:])) for values, column in pairs]

    def write(self, placement: Placement, prepared: list[np.ndarray[Any, Any]]) -> None:
        """Write rows."""
        for column, values in zip(self._columns, prepared, strict=True):
            if isinstance(placement, Run):
                first = min(placement.rows, placement.capacity - placement.start)
                middle = placement.skip + first
                column[placement.start : placement.start + first] = values[placement.skip : middle]
                column[: placement.rows - first] = values[middle : placement.total]
            else:
                column[placement.slots.cpu().numpy()] = values[placement.rows.cpu().numpy()]

    def write_field(self, position: int, slots: Tensor, value: np.ndarray[Any, Any]) -> None:
        """Write one field, `[n, *shape]`."""
        self._columns[position - self.positions[0]][slots.cpu().numpy()] = value

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[np.ndarray[Any, Any]]:  # noqa: ARG002
        """Return the objects at slots."""
        where = slots.cpu().numpy()
        return [column[where] for column in self._columns]

    def clear(self) -> None:
        """Remove all objects."""
        for column in self._columns:
            column.fill(None)

    def keep(self, slots: Tensor) -> None:
        """Move the objects at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        self._replace(self.gather(slots))

    def _replace(self, columns: Sequence[np.ndarray[Any, Any]]) -> None:
        for column, values in zip(self._columns, columns, strict=True):
            column[: len(values)] = values
            column[len(values) :] = None

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add lists of the objects of the first rows by name to a state, not copied."""
        named = zip(self._names, self._columns, strict=True)
        state["objects"] = {name: column[:rows].reshape(-1).tolist() for name, column in named}
        state["allow_pickle"] = self._allow_pickle

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> Callable[[], None]:  # noqa: ARG002
        """Copy what `add_state` added, after `check_objects`; return a function that replaces all objects by it."""
        read = []
        for name, column in zip(self._names, self._columns, strict=True):
            values = state["objects"][name]
            flat = np.fromiter(values, dtype=object, count=len(values))
            read.append(own_values(flat).reshape((int(state["rows"]), *column.shape[1:])))
        return lambda: self._replace(read)


def object_names(leaves: Sequence[ObjectLeaf]) -> list[str]:
    """Return the names of fields of objects in a checkpoint."""
    return [f"object {column_name(leaf.path, position)}" for position, leaf in enumerate(leaves)]


def check_objects(schema: Schema, state: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the objects of a state by name.

    Raises:
        CheckpointError: naming a field that is missing, or has not one object for each row.
    """
    saved, out, rows = state.get("objects") or {}, {}, int(state["rows"])
    for name, leaf in zip(object_names(schema.objects), schema.objects, strict=True):
        values, each = saved.get(name), math.prod(leaf.shape)
        if not isinstance(values, list) or len(values) != rows * each:
            got = f"{len(values)}" if isinstance(values, list) else "none"
            msg = f"the checkpoint must hold {rows * each} objects for {show_field(leaf.path)}, got {got}: damaged"
            raise CheckpointError(msg)
        out[name] = values
    return out


def own_values(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an object array in which tensors, arrays and containers are copies."""
    flat = values.reshape(-1).tolist()
    if not _IMMUTABLE.issuperset(map(type, flat)):
        flat = [value if type(value) in _IMMUTABLE else owned(value) for value in flat]
    return np.fromiter(flat, dtype=object, count=len(flat)).reshape(values.shape)


_IMMUTABLE = frozenset({str, bytes, int, float, complex, bool, type(None)})
