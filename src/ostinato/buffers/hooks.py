"""Hooks of storages: rows are converted on their way into a checkpoint, and back when it is loaded.

The state of a storage whose rows were converted has the arrays of the converted form as its `columns`, and says in
`hooked` how these nest (`tree`), which hooks made them, and which fields the rows had. `buffers/checkpoint.py` writes
and reads it like any other state. The caller holds the buffer's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.core import kinds
from ostinato.core.kinds import Node, show_path
from ostinato.core.rows import describe
from ostinato.core.state import decode_schema, encode_schema
from ostinato.errors import CheckpointError, OstinatoError
from ostinato.storages.mirror_state import column_name, dense

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.storages import Storage

__all__ = ["converted", "restoring"]

_MAX_DEPTH = 100
_NODES = frozenset({"dict", "list", "tuple", "tensordict"})


def converted(state: dict[str, Any], storages: Sequence[Storage]) -> dict[str, Any]:
    """Return the state of a buffer, or of an ensemble, with the rows as the save hooks of its storages make them.

    Memory: whatever the hooks return.

    Raises:
        CheckpointError: if a hook returns something that a checkpoint cannot hold.
    """
    return _each(state, storages, _convert)


def restoring(
    restore: Callable[[dict[str, Any]], None], storages: Sequence[Storage]
) -> Callable[[dict[str, Any]], None]:
    """Return `restore` for states read from a checkpoint: the load hooks give the rows the form that they had.

    It raises `CheckpointError` if rows were converted and there is no load hook, or the other way round, or what the
    load hooks return is not rows of the form saved; nothing is changed then.
    """
    return lambda state: restore(_each(state, storages, _restore))


def _each(
    state: dict[str, Any], storages: Sequence[Storage], change: Callable[[dict[str, Any], Storage], dict[str, Any]]
) -> dict[str, Any]:
    members = state.get("members")
    if members is None:
        part = state["storage"]
        return {**state, "storage": {**part, "state": change(part["state"], storages[0])}}
    if len(members) != len(storages):
        return state  # the ensemble says so itself
    return {**state, "members": [_each(m, [s], change) for m, s in zip(members, storages, strict=True)]}


def _convert(saved: dict[str, Any], storage: Storage) -> dict[str, Any]:
    if not storage.save_hooks or len(storage) == 0:
        return saved
    schema = storage.schema
    if schema is not None and schema.objects:
        fields = ", ".join(show_path(leaf.path) for leaf in schema.objects)
        msg = f"saving hooks convert tensors, and the rows have Python objects ({fields}): save without hooks"
        raise CheckpointError(msg)
    steps, newest = storage.shape[0], storage.cursor // storage.lanes
    rows = storage.read(slice(None))
    form = encode_schema(describe(rows, storage.ndim))
    for hook in storage.save_hooks:
        for name, value in (("is_full", True), ("shift", newest or steps)):
            if hasattr(hook, name):
                setattr(hook, name, value)
        rows = hook(rows, path=None)
    columns: dict[str, Tensor] = {}
    names = [getattr(hook, "__name__", type(hook).__name__) for hook in storage.save_hooks]
    note = {"hooks": names, "form": form, "tree": _take_apart(rows, (), columns)}
    return {**saved, "columns": columns, "hooked": note}


def _restore(saved: dict[str, Any], storage: Storage) -> dict[str, Any]:
    note = saved.get("hooked")
    if note is None and (not storage.load_hooks or not saved.get("rows")):
        return saved
    mine = [getattr(hook, "__name__", type(hook).__name__) for hook in storage.load_hooks]
    if note is None:
        msg = (
            f"the checkpoint holds rows as they are, and the storage has the loading hooks {mine}, which convert rows "
            "back that saving hooks have converted: load it into a buffer without loading hooks"
        )
        raise CheckpointError(msg)
    if not storage.load_hooks:
        msg = (
            f"the rows of the checkpoint were converted by the saving hooks {note['hooks']}: register the loading "
            "hooks that convert them back (register_load_hook) before loads()"
        )
        raise CheckpointError(msg)
    try:
        rows = _rebuild(note["tree"], saved["columns"], 0)
        count, lanes = int(saved["rows"]), max(1, int(saved["lanes"]))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        msg = f"the checkpoint does not say how its converted rows nest ({error!r}): it is damaged"
        raise CheckpointError(msg) from error
    for hook in storage.load_hooks:
        rows = hook(rows, out=None)
    shape = (count,) if storage.ndim == 1 else (count // lanes, lanes)
    columns = _columns(rows, note, shape, saved, mine)
    plain = {key: value for key, value in saved.items() if key != "hooked"}
    return {**plain, "columns": columns, "single_copy": None}


def _columns(
    rows: Any, note: dict[str, Any], shape: tuple[int, ...], saved: dict[str, Any], hooks: list[str]
) -> dict[str, Tensor]:
    """Return the columns that a plain state has, having checked that the rows have the fields that were saved."""
    form = decode_schema(note["form"])
    try:
        got = {leaf.path for leaf in describe(rows, len(shape)).leaves}
    except OstinatoError as error:
        msg = f"the loading hooks {hooks} returned no rows: {error}"
        raise CheckpointError(msg) from error
    wanted = {leaf.path: leaf for leaf in form.leaves}
    problem = [f"lack {show_path(path)}" for path in wanted.keys() - got]
    problem += [f"have {show_path(path)} besides" for path in got - wanted.keys()]
    values: dict[Any, Tensor] = {}
    for path in wanted.keys() & got:
        leaf, value = wanted[path], kinds.as_tensor(kinds.find_field(rows, path), path)
        if value.dtype is leaf.dtype and tuple(value.shape) == (*shape, *leaf.shape):
            values[path] = value.reshape(saved["rows"], *leaf.shape)
        else:
            problem.append(f"have {show_path(path)} as {value.dtype}{list(value.shape)}")
    if problem:
        msg = (
            f"after the loading hooks {hooks} the rows {', '.join(sorted(problem)[:4])}; {note['hooks']} had been "
            f"given {list(shape)} rows of {form}: register the hooks that convert back, with the same options"
        )
        raise CheckpointError(msg)
    schema = decode_schema(saved["schema"])
    columns = {column_name(leaf.path, i): values[leaf.path] for i, leaf in enumerate(schema.leaves)}
    for path, name, has in saved["late"]:  # hooks run where all rows have them, else reading the rows raises
        columns[name], columns[has] = (
            values[tuple(path)],
            torch.ones(int(saved["rows"]), dtype=torch.bool, device="cpu"),
        )
    return columns


def _take_apart(data: Any, path: tuple[Any, ...], columns: dict[str, Tensor]) -> dict[str, Any]:
    """Return how what a hook returned nests, with its tensors by name in `columns`."""
    if len(path) > _MAX_DEPTH:
        msg = f"a saving hook returned data nested more than {_MAX_DEPTH} deep"
        raise CheckpointError(msg)
    if isinstance(data, torch.Tensor):
        if data.is_nested or data.layout is not torch.strided:
            msg = f"a saving hook returned a nested or sparse tensor at {show_path(path)}: return dense tensors"
            raise CheckpointError(msg)
        name = f"hooked {len(columns)}: {'.'.join(map(str, path))}"[:200]
        columns[name] = data.detach()
        return {"kind": "tensor", "name": name}
    opened = kinds.open_node(data, 0)
    if opened is None:
        if kinds.is_non_tensor(data) and kinds.is_tensordict(data):
            msg = f"a saving hook returned a NonTensorStack at {show_path(path)}: return tensors and NonTensorData"
            raise CheckpointError(msg)
        value = data.data if kinds.is_tensor_collection(data) else data  # what a TensorDict wraps that is no tensor
        return {"kind": "value", "value": value}
    node, children = opened
    if node.kind not in _NODES:
        msg = f"a saving hook returned a {node.kind} at {show_path(path)}: return a TensorDict or a dict"
        raise CheckpointError(msg)
    below = [_take_apart(child, (*path, key), columns) for key, child in zip(node.keys, children, strict=True)]
    return {"kind": node.kind, "keys": list(node.keys), "batch": list(node.extra), "children": below}


def _rebuild(tree: dict[str, Any], columns: dict[str, Any], depth: int) -> Any:
    """Return the data that `_take_apart` was given; its tensors are read now, on the CPU."""
    kind = tree["kind"]
    if kind == "tensor":
        return dense(columns[tree["name"]])
    if kind == "value":
        return tree["value"]
    if kind not in _NODES or depth > _MAX_DEPTH or len(tree["keys"]) != len(tree["children"]):
        msg = f"the checkpoint says of its converted rows that they are a {str(kind)[:40]!r}: it is damaged"
        raise CheckpointError(msg)
    made = [_rebuild(child, columns, depth + 1) for child in tree["children"]]
    device = torch.device("cpu")
    if kind != "tensordict":
        return kinds.make(Node(kind, tuple(tree["keys"])), made, (), device)
    plain = {i for i, child in enumerate(tree["children"]) if child["kind"] not in {"tensor", "tensordict"}}
    keys = tuple(key for i, key in enumerate(tree["keys"]) if i not in plain)
    parts = [part for i, part in enumerate(made) if i not in plain]
    batch = tuple(tree["batch"])
    if any(tuple(part.shape[: len(batch)]) != batch for part in parts):
        msg = f"the checkpoint says of its converted rows that {keys} have the batch size {list(batch)}: it is damaged"
        raise CheckpointError(msg)
    rows = kinds.make(Node("tensordict", keys, None, batch), parts, (), device)
    for i in plain:
        rows.set_non_tensor(tree["keys"][i], made[i])
    return rows
