"""The door: kinds of data that come in and go out. The only file that knows tensordict; it asks before importing."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ostinato.errors import KindError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from tensordict import TensorDictBase

__all__ = [
    "Node",
    "as_tensor",
    "find_field",
    "holds_collections",
    "is_mapping",
    "is_tensor_collection",
    "is_tensordict",
    "make",
    "open_node",
    "put",
    "require_batch",
    "require_eager",
    "show_field",
    "show_path",
    "stack",
    "stack_parts",
    "unstack",
    "with_fields",
]


class Node(NamedTuple):
    """One level of nested data: its kind and its keys, in order."""

    kind: str
    """`dict`, `list`, `tuple`, `namedtuple`, `tensordict` or `tensorclass`."""
    keys: tuple[Hashable, ...]
    cls: type | None = None
    """The class to rebuild, for named tuples and tensorclasses."""
    extra: tuple[int, ...] = ()
    """Batch dimensions of a TensorDict that belong to the row, not to the batch."""


def is_tensordict(data: object) -> TypeGuard[TensorDictBase]:
    """Tell whether `data` is a TensorDict; tensordict is not imported if nobody else did."""
    module = sys.modules.get("tensordict")  # another thread may be in the middle of importing it
    return module is not None and isinstance(data, getattr(module, "TensorDictBase", ()))


def is_tensorclass(data: object) -> bool:
    """Tell whether `data` is an instance of a tensorclass."""
    module = sys.modules.get("tensordict")
    asks = getattr(module, "is_tensorclass", None)
    return asks is not None and bool(asks(data)) and not isinstance(data, type)


def is_tensor_collection(data: object) -> bool:
    """Tell whether `data` is a TensorDict or a tensorclass."""
    return is_tensordict(data) or is_tensorclass(data)


def holds_collections(data: object) -> bool:
    """Tell whether `data` is a TensorDict or a tensorclass, or a list of these."""
    return is_tensor_collection(data) or (type(data) is list and all(map(is_tensor_collection, data)))


def show_path(path: Sequence[Hashable]) -> str:
    """Write a path of keys as users would: `'obs'`, or `('next', 'obs')` where it is nested."""
    return "the data itself" if not path else repr(path[0]) if len(path) == 1 else repr(tuple(path))


def show_field(path: Sequence[Hashable]) -> str:
    """Name a field in a message: `field 'obs'`, or `the data itself` where rows are no tree."""
    return f"field {show_path(path)}" if path else "the data itself"


def open_node(data: Any, lead: int) -> tuple[Node, list[Any]] | None:
    """Split one level of nested data into its node and children; None where `data` is a leaf.

    Args:
        data: any value; dict, list, tuple, TensorDict and tensorclass are nodes, all else is a leaf.
        lead: number of leading batch dimensions of the rows (0 for one row).
    """
    if isinstance(data, Tensor):
        return None
    if isinstance(data, dict):
        return Node("dict", tuple(data)), list(data.values())
    if isinstance(data, (list, tuple)):
        named = isinstance(data, tuple) and hasattr(data, "_fields")
        kind = "namedtuple" if named else "list" if isinstance(data, list) else "tuple"
        return Node(kind, tuple(range(len(data))), type(data) if named else None), list(data)
    if is_tensorclass(data):
        require_batch(data, lead)
        return _open_tensorclass(data, lead)
    if is_tensordict(data):
        require_batch(data, lead)
        keys, values = [], []
        for key, value in data.items():
            keys.append(key)
            values.append(value)
        return Node("tensordict", tuple(keys), None, tuple(data.batch_size[lead:])), values
    return None


def require_batch(data: Any, lead: int) -> None:
    """Refuse a TensorDict or tensorclass with fewer than `lead` batch dimensions.

    Raises:
        SchemaError: one row came where rows were due.
    """
    if data.batch_dims < lead:
        msg = f"extend() needs {lead} batch dimension(s), got batch_size={list(data.batch_size)}: add() takes one row"
        raise SchemaError(msg)


def _open_tensorclass(data: Any, lead: int) -> tuple[Node, list[Any]] | None:
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(data, (NonTensorData, NonTensorStack)):
        return None  # text and other objects: the leaf check names the field and the way out
    inner = data.to_tensordict(retain_none=False)
    keys = tuple(inner.keys())
    values = [getattr(data, key) for key in keys]
    return Node("tensorclass", keys, type(data), tuple(data.batch_size[lead:])), values


def make(node: Node, children: Sequence[Any], batch: tuple[int, ...], device: torch.device) -> Any:
    """Build one level of nested data: the inverse of `open_node`.

    Args:
        node: kind and keys.
        children: values in the order of the keys.
        batch: leading batch dimensions that the children share.
        device: device of the leaves.
    """
    kind = node.kind
    if kind == "dict":
        return dict(zip(node.keys, children, strict=True))
    if kind == "list":
        return list(children)
    if kind == "tuple":
        return tuple(children)
    if kind == "namedtuple":
        return node.cls(*children)  # type: ignore[misc]
    # sys.modules, since an import statement costs half a microsecond; loaded rows may be the first TensorDicts here
    tensordict: Any = sys.modules.get("tensordict")
    if not hasattr(tensordict, "TensorDict"):
        tensordict = importlib.import_module("tensordict")  # waits for another thread that has begun to import it
    # The public constructor checks every shape again and takes 7 us for five fields; these were checked when stored.
    td = tensordict.TensorDict._new_unsafe(  # noqa: SLF001
        dict(zip(node.keys, children, strict=True)),
        batch_size=torch.Size((*batch, *node.extra) if node.extra else batch),
    )
    td._device = device  # noqa: SLF001 (as an argument it takes as long as all the rest)
    return td if kind == "tensordict" else node.cls.from_tensordict(td)  # type: ignore[union-attr]


def put(data: Any, values: Mapping[Any, Tensor], lead: int = 1) -> None:
    """Add fields `[*B, *shape]` to a fresh TensorDict or tensorclass `[*B, *rest]`, repeated over `rest`.

    Args:
        data: where to.
        values: fields by key; a tuple is a nested key.
        lead: dimensions of `B`.
    """
    batch = data.batch_size
    for key, value in values.items():
        if len(batch) > lead:
            head, shape = value.shape[:lead], value.shape[lead:]
            value = value.reshape(*head, *[1] * (len(batch) - lead), *shape).expand(*batch, *shape)  # noqa: PLW2901
        plain = type(key) is str and is_tensordict(data)
        if plain and value.shape[:lead] == batch[:lead] and data.device in (None, value.device):
            # set() checks all this again, and takes 2 us for each
            data._set_str(key, value, inplace=False, validated=True, non_blocking=False)  # noqa: SLF001
        else:
            data.set(key, value)


def is_mapping(data: object) -> bool:
    """Tell whether `data` has fields by name: a dict, a TensorDict or a tensorclass."""
    return isinstance(data, dict) or is_tensor_collection(data)


def require_eager(what: str) -> None:
    """Refuse to read or write rows while torch records or transforms what is computed.

    Tensors made inside `torch.func.vmap`, `grad` and the like have no memory of their own and end with the transform; a
    trace would repeat one batch for ever.

    Args:
        what: what the buffer was asked to do, for the message.

    Raises:
        UsageError: inside a transform of `torch.func`, or `torch.jit.trace`; names it.
    """
    transform: Any = torch._C._functorch.peek_interpreter_stack()  # noqa: SLF001 (torch has no public name for it)
    if transform is None and not torch._C._is_tracing():  # noqa: SLF001 (torch.jit.is_tracing takes four times as long)
        return
    name = "torch.jit.trace" if transform is None else f"torch.func ({transform.key().name.lower()})"
    msg = f"{what} inside {name} is not possible: do it outside, and pass the batch or its tensors in or out"
    raise UsageError(msg)


def find_field(data: Any, path: Sequence[Hashable]) -> Any:
    """Return the field of nested data at a path, None if there is none."""
    for key in path:
        if isinstance(data, (list, tuple)) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif is_mapping(data) and key in data.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
            data = data[key] if isinstance(data, dict) else data.get(key)
        else:
            return None
    return data


def with_fields(data: Any, values: Mapping[tuple[str, ...], Tensor]) -> Any:
    """Return a fresh batch with fields `[B, *shape]` set by their paths; levels that lack are made. In place."""
    for path, value in values.items():
        *parents, last = path
        level = data
        for key in parents:
            if key not in level.keys():  # noqa: SIM118
                _set(level, key, {} if isinstance(level, dict) else level.empty())
            level = level[key] if isinstance(level, dict) else level.get(key)
        _set(level, last, value)
    return data


def _set(level: Any, key: str, value: Any) -> None:
    if isinstance(level, dict):
        level[key] = value
    elif isinstance(value, Tensor):
        put(level, {key: value})
    else:
        level.set(key, value)


def as_tensor(value: Any, path: Sequence[Hashable], like: torch.dtype | None = None) -> Tensor:
    """Turn one leaf into a tensor; tensors pass as they are, numpy arrays share their memory.

    Args:
        value: a tensor, a numpy array or scalar, or a Python number.
        path: where the leaf stands, for messages.
        like: dtype that a bare Python number takes (numbers carry none); None, or one that cannot hold it, gives int64,
            bool and float32, whatever torch's default dtype. Numbers and arrays lie on the CPU, whatever torch's
            default device.

    Raises:
        KindError: for anything else, text and ragged sequences included, naming what to use instead.
    """
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided or value.is_meta:
            raise KindError(_refuse(path, "a nested, sparse or meta tensor"))
        followed = value.requires_grad or forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
        return (value.detach() if followed else value).resolve_conj().resolve_neg()
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "OUSVMm":
            raise KindError(_refuse(path, f"a numpy array of dtype {value.dtype}"))
        return _from_numpy(np.asarray(value), path)
    if isinstance(value, (bool, int, float)):
        dtype = like if like is not None and _holds(like, value) else None
        if dtype is not None and isinstance(value, int) and not dtype.is_floating_point and dtype is not torch.bool:
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            if not low <= value <= high:
                raise KindError(_refuse(path, f"the number {value}, which {dtype} cannot hold"))
        try:
            return torch.tensor(value, dtype=dtype or _number_dtype(value), device="cpu")
        except (OverflowError, RuntimeError, ValueError) as error:
            raise KindError(_refuse(path, f"the number {value!r} ({error})")) from None
    raise KindError(_refuse(path, type(value).__name__))


def _from_numpy(array: np.ndarray[Any, Any], path: Sequence[Hashable]) -> Tensor:
    """Share an array's memory where torch can, else copy it (read-only, foreign byte order, odd strides)."""
    try:
        if array.flags.writeable:
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        pass
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True, order="C"))
    except TypeError:
        raise KindError(_refuse(path, f"a numpy array of dtype {array.dtype}")) from None


def _number_dtype(value: float) -> torch.dtype:
    """Return what a bare Python number becomes: not torch's default dtype, which may change between two writes."""
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32


def _holds(dtype: torch.dtype, value: Any) -> bool:
    if isinstance(value, bool):
        return dtype is torch.bool
    return dtype.is_floating_point or (isinstance(value, int) and dtype is not torch.bool)


def _refuse(path: Sequence[Hashable], what: str) -> str:
    return (
        f"{show_field(path)} holds {what}: tensor storages take tensors, numpy arrays and numbers with one fixed "
        "shape per field. For text, ragged sequences and other objects use ListStorage, or pad them to one length"
    )


def stack(items: Sequence[Any], like: Mapping[tuple[Hashable, ...], torch.dtype] | None = None) -> Any:
    """Stack a list of rows into one batch along a new first dimension: what a root list stands for.

    Args:
        items: at least one row, all of one kind: TensorDicts, tensors, arrays, numbers, or trees of these.
        like: dtypes of the fields stored, which bare Python numbers take.

    Raises:
        KindError: if the rows are of different kinds, or cannot be stacked.
        SchemaError: if their shapes differ.
    """
    try:
        if is_tensor_collection(items[0]):
            return torch.stack(list(items), 0)
        return _stack(items, (), like or {})
    except RuntimeError as error:
        msg = (
            f"the rows of the list cannot be stacked ({error}): give all rows one shape; for ragged rows use "
            "ListStorage, or pad them to one length"
        )
        raise SchemaError(msg) from error


def stack_parts(items: Sequence[Any]) -> Any:
    """Stack batches along a new first dimension; TensorDicts of different fields or shapes side by side, uncopied.

    Raises:
        KindError: if they are of different kinds, or cannot be stacked.
        SchemaError: if their shapes differ.
    """
    if all(map(is_tensordict, items)):
        return sys.modules["tensordict"].LazyStackedTensorDict.maybe_dense_stack(list(items), 0)
    return stack(items)


def _stack(items: Sequence[Any], path: tuple[Hashable, ...], like: Mapping[tuple[Hashable, ...], torch.dtype]) -> Any:
    opened = open_node(items[0], 0)
    if opened is None:
        if type(items[0]) in {int, float, bool} and len({type(item) for item in items}) == 1:
            dtype = like.get(path)
            fits = dtype is not None and _holds(dtype, items[0])
            return torch.tensor(list(items), dtype=dtype if fits else _number_dtype(items[0]), device="cpu")
        return torch.stack([as_tensor(item, path, like.get(path)) for item in items], 0)
    node = opened[0]
    columns: list[list[Any]] = [[] for _ in node.keys]
    for item in items:
        other = open_node(item, 0)
        if other is None or other[0].kind != node.kind or set(other[0].keys) != set(node.keys):
            msg = (
                f"a list at the root is a stack of rows of one kind, got a {node.kind} with the keys {list(node.keys)} "
                f"and {item!r}: give all rows the same keys"
            )
            raise KindError(msg)
        values = dict(zip(other[0].keys, other[1], strict=True))
        for key, column in zip(node.keys, columns, strict=True):
            column.append(values[key])
    children = [_stack(column, (*path, key), like) for key, column in zip(node.keys, columns, strict=True)]
    return make(node, children, (len(items),), torch.device("cpu"))


def unstack(data: Any) -> list[Any]:
    """Split a batch into its rows (a TensorDict, tensor or array by its first dimension, else any iterable)."""
    if is_tensordict(data) or is_tensorclass(data) or isinstance(data, Tensor):
        return list(data.unbind(0))
    return list(data)
