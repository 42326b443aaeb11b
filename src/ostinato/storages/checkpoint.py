"""Checkpoints of storages: rows as files, save and load hooks, and storages that are saved without a buffer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.kinds import Node, show_path
from ostinato.core.rows import Schema, column_name, describe
from ostinato.durable import CheckpointReader, CheckpointWriter, SavedColumn, progress
from ostinato.durable.arrays import values_of
from ostinato.durable.progress import BYTES, Progress
from ostinato.errors import (
    CheckpointError,
    KindError,
    MissingExtraError,
    OptionError,
    OstinatoError,
    StorageMemoryError,
    UsageError,
)
from ostinato.storages.columns import pack, pack_column, saved_jagged, unpack, unpack_column
from ostinato.storages.table import read_column

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from ostinato.durable.progress import ProgressOption
    from ostinato.storages.base import Storage

_FORMAT = "ostinato-storage"
_ENSEMBLE_FORMAT = "ostinato-storages"
_MAX_DEPTH = 100
_NODES = frozenset({"dict", "list", "tuple", "tensordict"})
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError, OstinatoError)
"""What unexpected values in a state raise in a part."""


def save_storages(path: str | Path, storages: Sequence[Storage]) -> None:
    """Write the rows of several storages as one checkpoint; members without rows are saved as such."""
    states = [convert_rows(storage.state_dict(), storage) if storage.laid_out else None for storage in storages]
    save_rows(path, _ENSEMBLE_FORMAT, states, lambda put: {"members": put})


def save_rows(
    path: str | Path,
    format_name: str,
    states: Sequence[dict[str, Any] | None],
    body: Callable[[list[dict[str, Any] | None]], object],
) -> None:
    """Write the states of storages as a checkpoint.

    Args:
        path: the directory.
        format_name: kind of checkpoint.
        states: of the storages; None for one without rows.
        body: makes the state of the checkpoint of these states, in which the names of arrays are in their place.

    Raises:
        CheckpointError: if something cannot be saved, or the path holds other things.
        StorageMemoryError: if the disk is too small.
    """
    needed = sum(column.nbytes for state in states if state for column in (state.get("columns") or {}).values())
    with CheckpointWriter(path, format_name=format_name, needed_bytes=needed) as writer:
        progress.begin(needed)
        writer.commit(body([state and put_rows(writer, state, _prefix(i, states)) for i, state in enumerate(states)]))


def _prefix(i: int, states: Sequence[Any]) -> str:
    """Return what the names of the arrays of one of several storages begin with."""
    return "" if len(states) == 1 else f"{i}:"


def put_rows(
    writer: Any, state: dict[str, Any], prefix: str, *, done: Collection[str] = (), compare: bool = False
) -> dict[str, Any]:
    """Write the rows of a storage to files, and return its state with their names in their place.

    Args:
        writer: of the checkpoint, or what else has its `add_array` and `add_values`.
        state: of the storage.
        prefix: what the names of its arrays begin with.
        done: columns that are written by others.
        compare: see `CheckpointWriter.add_array`.
    """
    state, allow = dict(state), bool(state.get("allow_pickle"))
    if state.get("columns") is not None:
        for name, column in state["columns"].items():
            if name not in done:
                writer.add_array(f"{prefix}{name}", column, compare=compare)
        state["columns"] = list(state["columns"])
    if state.get("items") is not None:
        writer.add_values(f"{prefix}items", (pack(item, allow_pickle=allow) for item in state["items"]))
        state["items"] = len(state["items"])
    if "objects" in state:
        forms = {}
        for name, values in state["objects"].items():
            forms[name], text, ends = pack_column(name, values, allow_pickle=allow)
            writer.add_array(f"{prefix}{name}.text", text, compare=compare)
            writer.add_array(f"{prefix}{name}.ends", ends, compare=compare)
        state["objects"] = forms
    return state


def get_rows(
    reader: Any,
    state: dict[str, Any],
    storage: Any,
    prefix: str,
    *,
    verify: bool = True,
    objects: bool = True,
) -> dict[str, Any]:
    """Return the state of a storage with its rows where `put_rows` has put their names.

    Args:
        reader: of the checkpoint, or what else has its `record` and `read`.
        state: what `put_rows` returned.
        storage: which will load it.
        prefix: what the names of its arrays begin with.
        verify: compare the checksums of columns, which are read when they are copied.
        objects: read Python objects, which are only counted otherwise.
    """
    state, allow = dict(state), bool(getattr(storage, "allow_pickle", False))
    if "columns" in state:
        state["columns"] = {name: SavedColumn(reader, f"{prefix}{name}", verify=verify) for name in state["columns"]}
    if "objects" in state:
        forms, state["objects"] = state["objects"], {}
        for name, form in forms.items():
            ends = reader.read(f"{prefix}{name}.ends")
            state["objects"][name] = [None] * ends.shape[0]
            if objects:
                text = reader.read(f"{prefix}{name}.text")
                state["objects"][name] = unpack_column(name, form, text, ends, allow_pickle=allow)
    if "items" in state:
        state["items"] = range(int(state["items"]))
        if objects:
            state["items"] = [unpack(item, allow_pickle=allow) for item in reader.values(f"{prefix}items")]
    return state


def load_storages(path: str | Path, storages: Sequence[Storage]) -> None:
    """Read what `save_storages` wrote, for all storages or none.

    Raises:
        CheckpointError: if there is another number of storages, or one does not fit.
    """
    load_states(_read(path, storages, _ENSEMBLE_FORMAT), storages)


def _read(path: str | Path, storages: Sequence[Storage], form: str) -> list[dict[str, Any] | None]:
    """Return the states in a checkpoint; columns are read when they are copied."""
    reader = CheckpointReader(path, format_name=form)
    progress.begin(reader.nbytes)
    with readable(f"a storage in {path}"):
        body = reader.state()
        saved = [body] if form == _FORMAT else body["members"]
        if len(saved) != len(storages):
            msg = f"the checkpoint holds {len(saved)} storages, the ensemble {len(storages)}"
            raise CheckpointError(msg)
        return [
            state and get_rows(reader, state, storage, _prefix(i, saved))
            for i, (state, storage) in enumerate(zip(saved, storages, strict=True))
        ]


def load_states(states: Sequence[dict[str, Any] | None], storages: Sequence[Storage], checkpointer: Any = None) -> None:
    """Load states that were read from a checkpoint, whose rows hooks may have converted; None empties the storage.

    Raises:
        CheckpointError: if one does not fit; nothing has changed.
    """
    pairs = list(zip(states, storages, strict=True))
    for state, storage in pairs:
        _require_known_tree(state, storage)
    restored = [None if state is None else restore_rows(state, storage, checkpointer) for state, storage in pairs]
    restore_storages(restored, storages)
    for storage in storages:
        storage.writes += 1
        storage.exposed = True  # a buffer does not know of the load, so an incremental save writes all rows


def restore_storages(states: Sequence[dict[str, Any] | None], storages: Sequence[Storage]) -> None:
    """Load states into storages, all or none; None empties the storage.

    Raises:
        CheckpointError: if one does not fit; nothing has changed.
    """
    pairs = list(zip(states, storages, strict=True))
    with readable("this storage"):
        for state, storage in pairs:
            if state is not None:
                require_form(state, storage)
                storage.check_state(state)
    filled = [None if state is None else storage.blank() for state, storage in pairs]
    try:
        for state, blank in zip(states, filled, strict=True):
            if blank is not None and state is not None:
                blank.load_state_dict(state)
        progress.finish()  # after this nothing can fail
    except BaseException:
        clear_filled(filled, storages)
        raise
    for storage, rows in zip(storages, filled, strict=True):
        if rows is None:
            storage.clear()
        else:
            storage.take(rows)


def clear_filled(filled: Sequence[Storage | None], storages: Sequence[Storage]) -> None:
    """Drop what a load that has failed has put into storages that `blank` returned."""
    for blank, storage in zip(filled, storages, strict=True):
        if blank is storage:  # it had no rows
            storage.clear()
        elif blank is not None:
            blank.forget_form()


def require_form(state: dict[str, Any], storage: Storage) -> None:
    """Check that a state is of a storage that keeps rows in the same form.

    Raises:
        CheckpointError: naming both forms.
    """
    form = state.get("form")
    if form != storage.form:
        msg = (
            f"{type(storage).__name__} loads states of the form {storage.form!r}, got {form!r}: load what state_dict() "
            "of such a storage returned"
        )
        raise CheckpointError(msg)


def seam_of(state: dict[str, Any], storage: Storage) -> int:
    """Return the slot of the oldest row of a saved ring that `load_state_dict` of a storage rotates to slot 0, else 0.

    A full ring must be rotated if the storage has another capacity: otherwise the newest row would lie before the
    oldest, and the next rows would not replace the oldest.

    Raises:
        CheckpointError: if the rows must be rotated, and the storage cannot do that.
    """
    rows = int(state["rows"] if "rows" in state else len(state.get("items", ())))
    saved, capacity = int(state["capacity"]), capacity_for(storage, max(1, int(state.get("lanes", 1))))
    seam = int(state.get("cursor", 0)) % saved if 0 < rows == saved != capacity else 0
    if seam and not storage.rotates:
        msg = (
            f"the checkpoint holds a full ring of {saved} rows, the oldest in slot {seam}, and "
            f"{type(storage).__name__} cannot load it into a ring of {capacity}: load with the same max_size"
        )
        raise CheckpointError(msg)
    return seam


def capacity_for(storage: Storage, num_envs: int) -> int:
    """Return the capacity of a storage with rows of `num_envs` environments."""
    return storage.capacity if storage.laid_out else -(-storage.max_size // num_envs) * num_envs


def check_schema(storage: Storage, schema: Schema, num_envs: int) -> None:
    """Check that saved rows with this schema may replace the rows present, before `blank` is filled with them.

    Raises:
        CheckpointError: naming what differs.
    """
    mine = storage.schema
    if mine is not None and (mine != schema or storage.num_envs != num_envs):
        msg = (
            f"the checkpoint holds {schema} in {num_envs} environment(s), the storage {mine} in {storage.num_envs}: "
            "load into a buffer with the same schema"
        )
        raise CheckpointError(msg)


def _require_known_tree(state: dict[str, Any] | None, storage: Storage) -> None:
    """Check that rows that are no TensorDicts are loaded into a storage that has had such rows, as in TorchRL.

    Raises:
        UsageError: if the storage has had no rows yet.
    """
    if state is None or storage.laid_out or state.get("schema") is None:
        return
    kind = Schema.from_json(state["schema"]).kind
    if kind not in {"tensordict", "tensorclass"}:
        msg = (
            "Cannot fill a non-initialized pytree-based TensorStorage: the rows saved are "
            f"{'single tensors' if kind == 'tensor' else f'each a {kind}'}. Write rows of the same fields first, or "
            "use dumps and loads of a ReplayBuffer, which need none"
        )
        raise UsageError(msg)


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise a `CheckpointError` for what unexpected values in a state raise in a part."""
    try:
        yield
    except UNREADABLE as error:
        raise_unreadable(what, error)


def raise_unreadable(what: str, error: Exception) -> NoReturn:
    """Raise what unexpected values in the state of a part have raised, which is one of `UNREADABLE`.

    Raises:
        CheckpointError: naming the part; errors that say themselves what is wrong stay as they are.
    """
    if isinstance(error, (CheckpointError, MissingExtraError, StorageMemoryError)):
        raise error
    if isinstance(error, OptionError):  # an option of this part, which the rows do not suit
        msg = f"the checkpoint does not fit {what}: {error}"
    else:
        msg = f"this is not the state of {what} ({error!r:.300}): it is damaged, or of something else"
    raise CheckpointError(msg) from error


class RowHooks:
    """Hooks that convert rows on their way to a checkpoint and back: of a storage, or of a checkpointer.

    Hooks are not saved: register them for each buffer. They are called in the order of registration, each with the
    result of the one before, while the buffer holds its lock.
    """

    save_hooks: tuple[Callable[..., Any], ...] = ()
    """Functions that convert rows for a checkpoint, in order."""
    load_hooks: tuple[Callable[..., Any], ...] = ()
    """Functions that convert rows of a checkpoint back, in order."""
    no_hooks: tuple[type[OstinatoError], str] | None = None
    """The error for a hook, and what the rows have that no hook converts; None where hooks convert them."""

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Register a hook that converts the rows in checkpoints (`dumps`); the storage keeps its rows.

        Args:
            hook: called as `hook(rows, path=None)` with the rows present (views `[rows]`, with `ndim=2`
                `[steps, num_envs]`, of the kind in which they were written); returns a TensorDict or a dict of tensors
                and plain values. If it has an attribute `shift`, that is set before to the step after the newest, and
                `is_full` to True: no row is unwritten.

        Raises:
            KindError: if it is not callable, or the storage has no fields.
            OptionError: if the storage has ragged fields.
        """
        self.save_hooks = (*self.save_hooks, check_hook(self, hook))

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Register a hook that converts rows saved with save hooks back when a checkpoint is loaded (`loads`).

        Args:
            hook: called as `hook(data, out=None)` with the result of the last save hook, or of the load hook before;
                the last one returns the rows with their original fields.

        Raises:
            KindError: if it is not callable, or the storage has no fields.
            OptionError: if the storage has ragged fields.
        """
        self.load_hooks = (*self.load_hooks, check_hook(self, hook))


def check_hook(owner: RowHooks, hook: Any) -> Callable[..., Any]:
    """Return a hook.

    Raises:
        KindError: if it is not callable.
        OstinatoError: the one of `RowHooks.no_hooks`.
    """
    if owner.no_hooks is not None:
        error, reason = owner.no_hooks
        msg = f"{type(owner).__name__} has {reason}, got the hook {hook!r}"
        raise error(msg)
    if callable(hook) and not isinstance(hook, type):
        return hook  # type: ignore[no-any-return]
    msg = f"a hook is a callable, got {hook!r}: pass an object such as TED2Flat(), or a function"
    raise KindError(msg)


class StorageCheckpointerBase(RowHooks):
    """Base class of checkpointers, which save the rows of a storage and load them.

    A checkpointer has hooks that convert rows on their way to a checkpoint and back. `storage.checkpointer = ...`, or
    `ReplayBuffer(checkpointer=...)`, makes them part of `dumps` and `loads` of the storage and of its buffer. Hooks of
    the storage itself run after those of the checkpointer. Rows are in a checkpoint directory of this library: it is
    complete or absent, has checksums, and restores the order of a full ring.
    """

    def dumps(self, storage: Any, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Write the rows of a storage to a checkpoint directory; see `Storage.dumps`.

        Raises:
            UsageError: if no row was ever written (also a `RuntimeError`).
            CheckpointError: if something cannot be saved, or the path holds other things.
            StorageMemoryError: if the disk is too small.
        """
        with Progress(progress, "save", unit=BYTES):
            if not storage.laid_out:
                msg = "Cannot save a non-initialized storage: write rows first"
                raise UsageError(msg)
            save_rows(path, _FORMAT, [convert_rows(storage.state_dict(), storage, self)], lambda put: put[0])

    def loads(self, storage: Any, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Replace the rows of a storage by saved ones; see `Storage.loads`.

        Raises:
            CheckpointNotFoundError: if there is no checkpoint.
            CheckpointError: if it does not fit this storage; nothing is changed.
        """
        with Progress(progress, "load", unit=BYTES):
            load_states(_read(path, [storage], _FORMAT), [storage], self)

    def __repr__(self) -> str:
        """Class and hooks."""
        return f"{type(self).__name__}()"


def hooks_of(storage: Storage, name: str, checkpointer: Any = None) -> tuple[Callable[..., Any], ...]:
    """Return the hooks that convert the rows of a storage: those of its checkpointer, then its own.

    Args:
        storage: the storage.
        name: `save_hooks` or `load_hooks`.
        checkpointer: takes the place of that of the storage.

    Raises:
        CheckpointError: if the checkpointer has a format of its own instead of hooks.
    """
    used = storage.checkpointer if checkpointer is None else checkpointer
    found = () if used is None else getattr(used, name, None)
    if found is None:
        msg = (
            f"{type(used).__name__} has no {name}: its format cannot be part of the checkpoint of a buffer. Save the "
            "storage with storage.dumps, or subclass StorageCheckpointerBase and register hooks"
        )
        raise CheckpointError(msg)
    return (*found, *getattr(storage, name))


def convert_rows(saved: dict[str, Any], storage: Storage, checkpointer: Any = None) -> dict[str, Any]:
    """Return the state of a storage with its rows as its save hooks make them; the state itself if it has none.

    Args:
        saved: the state.
        storage: the storage.
        checkpointer: takes the place of that of the storage.

    Raises:
        CheckpointError: if a hook returns something that a checkpoint cannot hold.
    """
    hooks = hooks_of(storage, "save_hooks", checkpointer)
    if not hooks or len(storage) == 0:
        return saved
    schema = storage.schema
    if schema is not None and schema.objects:
        fields = ", ".join(show_path(leaf.path) for leaf in schema.objects)
        msg = f"saving hooks convert tensors, and the rows have Python objects ({fields}): save without hooks"
        raise CheckpointError(msg)
    steps, newest = storage.shape[0], storage.cursor // storage.num_envs
    rows = storage.read(slice(None))
    form = describe(rows, storage.ndim).to_json()
    for hook in hooks:
        for name, value in (("is_full", True), ("shift", newest or steps)):
            if hasattr(hook, name):
                setattr(hook, name, value)
        rows = hook(rows, path=None)
    columns: dict[str, Tensor] = {}
    names = [getattr(hook, "__name__", type(hook).__name__) for hook in hooks]
    note = {"hooks": names, "form": form, "tree": _take_apart(rows, (), columns)}
    return {**saved, "columns": columns, "hooked": note}


def restore_rows(saved: dict[str, Any], storage: Storage, checkpointer: Any = None) -> dict[str, Any]:
    """Return the state of a storage with its rows as the load hooks of a storage convert them back.

    Raises:
        CheckpointError: if rows were converted and there is no load hook, or the other way round, or the hooks return
            other fields than were saved.
    """
    note, hooks = saved.get("hooked"), hooks_of(storage, "load_hooks", checkpointer)
    if note is None and (not hooks or not saved.get("rows")):
        return saved
    mine = [getattr(hook, "__name__", type(hook).__name__) for hook in hooks]
    if note is None:
        msg = (
            f"the checkpoint holds rows as they are, and the storage has the loading hooks {mine}, which convert rows "
            "back that saving hooks have converted: load it into a buffer without loading hooks"
        )
        raise CheckpointError(msg)
    if not hooks:
        msg = (
            f"the rows of the checkpoint were converted by the saving hooks {note['hooks']}: register the loading "
            "hooks that convert them back (register_load_hook) before loads()"
        )
        raise CheckpointError(msg)
    with readable("a storage with hooks"):
        rows = _rebuild(note["tree"], saved["columns"], 0)
        count, num_envs = int(saved["rows"]), max(1, int(saved["lanes"]))
    for hook in hooks:
        rows = hook(rows, out=None)
    shape = (count,) if storage.ndim == 1 else (count // num_envs, num_envs)
    columns = _columns(rows, note, shape, saved, mine)
    plain = {key: value for key, value in saved.items() if key not in {"hooked", "codec"}}
    return {**plain, "columns": columns, "single_copy": None}


def _columns(
    rows: Any, note: dict[str, Any], shape: tuple[int, ...], saved: dict[str, Any], hooks: list[str]
) -> dict[str, Tensor]:
    """Return the columns that a plain state has, having checked that the rows have the fields that were saved."""
    form, schema = Schema.from_json(note["form"]), Schema.from_json(saved["schema"])
    try:
        leaves = form.flatten(rows, shape, len(shape), exact=True).leaves
    except OstinatoError as error:
        msg = (
            f"the loading hooks {hooks} returned other rows than {note['hooks']} had been given, {list(shape)} rows of "
            f"{form}: {error}. Register the hooks that convert back, with the same options"
        )
        raise CheckpointError(msg) from error
    pairs = zip(form.leaves, leaves, strict=True)
    values = {leaf.path: value.reshape(saved["rows"], *leaf.shape) for leaf, value in pairs}
    columns = {column_name(leaf.path, i): values[leaf.path] for i, leaf in enumerate(schema.leaves)}
    for path, name, has in saved["late"]:  # hooks run where all rows have them, else reading the rows raises
        columns[name], columns[has] = values[tuple(path)], torch.ones(saved["rows"], dtype=torch.bool, device="cpu")
    return columns


def _take_apart(data: Any, path: tuple[Any, ...], columns: dict[str, Tensor]) -> dict[str, Any]:
    """Return how what a hook returned nests, with its tensors by name in `columns`."""
    if len(path) > _MAX_DEPTH:
        msg = f"a saving hook returned data nested more than {_MAX_DEPTH} deep"
        raise CheckpointError(msg)
    if isinstance(data, torch.Tensor):
        name = f"hooked {len(columns)}: {'.'.join(map(str, path))}"[:200]
        if data.is_nested:
            columns[name], columns[f"{name} (lengths)"] = values_of(data)
            return {"kind": "nested", "name": name, "lengths": f"{name} (lengths)"}
        if data.layout is not torch.strided:
            msg = f"a saving hook returned a sparse tensor at {show_path(path)}: return dense or nested tensors"
            raise CheckpointError(msg)
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
        return read_column(columns[tree["name"]])
    if kind == "nested":
        return saved_jagged(read_column(columns[tree["name"]]), read_column(columns[tree["lengths"]]))
    if kind == "value":
        return tree["value"]
    if kind not in _NODES or depth > _MAX_DEPTH or len(tree["keys"]) != len(tree["children"]):
        msg = f"the checkpoint's converted rows have the unknown kind {str(kind)[:40]!r}: it is damaged"
        raise CheckpointError(msg)
    made = [_rebuild(child, columns, depth + 1) for child in tree["children"]]
    device = torch.device("cpu")
    if kind != "tensordict":
        return kinds.make(Node(kind, tuple(tree["keys"])), made, (), device)
    plain = {i for i, child in enumerate(tree["children"]) if child["kind"] not in {"tensor", "nested", "tensordict"}}
    keys = tuple(key for i, key in enumerate(tree["keys"]) if i not in plain)
    parts = [part for i, part in enumerate(made) if i not in plain]
    batch = tuple(tree["batch"])
    if any(tuple(part.shape[: len(batch)]) != batch for part in parts):
        msg = f"the checkpoint's converted rows {keys} have the invalid batch size {list(batch)}: it is damaged"
        raise CheckpointError(msg)
    rows = kinds.make(Node("tensordict", keys, None, batch), parts, (), device)
    for i in plain:
        rows.set_non_tensor(tree["keys"][i], made[i])
    return rows
