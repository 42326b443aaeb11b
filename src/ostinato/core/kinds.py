"""Kinds of data that buffers accept and return: TensorDicts, tensorclasses, dicts, lists, tuples, arrays, tensors.

This is the only module that uses tensordict. It does not import it to recognize its objects, which exist only where it
is imported already; it does to make the first TensorDict of a process, such as a batch of a loaded buffer.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from ostinato._optional import require, require_installed
from ostinato.errors import KindError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

    from tensordict import TensorDictBase


class Node(NamedTuple):
    """One level of nested data: its kind and its keys in order."""

    kind: str
    """`dict`, `list`, `tuple`, `namedtuple`, `tensordict` or `tensorclass`."""
    keys: tuple[Hashable, ...]
    cls: type | None = None
    """The class, for named tuples and tensorclasses."""
    extra: tuple[int, ...] = ()
    """Batch dimensions of a TensorDict that belong to the row."""


def _tensordict() -> Any:
    """Return the module tensordict, imported for the first TensorDict that is made."""
    module = sys.modules.get("tensordict")  # an import statement takes 0.5 us
    if hasattr(module, "TensorDict"):
        return module
    require_tensordict("a TensorDict")
    return require("tensordict", "tensordict")  # waits for an import in another thread


def require_tensordict(what: str, instead: str = "use rows that are dicts of tensors") -> None:
    """Check that tensordict is installed, for objects that will need it. Does not import it.

    Args:
        what: the object that needs it, the subject of the message.
        instead: what works without it.

    Raises:
        MissingExtraError: if it is not installed.
    """
    require_installed("tensordict", "tensordict", what, instead)


def is_tensordict(data: object) -> TypeGuard[TensorDictBase]:
    """Whether `data` is a TensorDict. Does not import tensordict."""
    module = sys.modules.get("tensordict")  # another thread may be importing it
    return module is not None and isinstance(data, getattr(module, "TensorDictBase", ()))


def is_plain_tensordict(data: object) -> bool:
    """Whether `data` is a TensorDict in memory, not of a subclass: neither lazy, nor in a file, nor of parameters."""
    return type(data) is getattr(sys.modules.get("tensordict"), "TensorDict", None)


def is_tensorclass(data: object) -> bool:
    """Whether `data` is an instance of a tensorclass."""
    module = sys.modules.get("tensordict")
    asks = getattr(module, "is_tensorclass", None)
    return asks is not None and bool(asks(data)) and not isinstance(data, type)


def is_tensor_collection(data: object) -> bool:
    """Whether `data` is a TensorDict or a tensorclass."""
    return is_tensordict(data) or is_tensorclass(data)


def holds_collections(data: object) -> bool:
    """Whether `data` is a TensorDict or a tensorclass, or a list of these."""
    return is_tensor_collection(data) or (type(data) is list and all(map(is_tensor_collection, data)))


def show_path(path: Sequence[Hashable]) -> str:
    """Return a path of keys as text: `'obs'`, or `('next', 'obs')` if it is nested."""
    return "the data itself" if not path else repr(path[0]) if len(path) == 1 else repr(tuple(path))


def show_field(path: Sequence[Hashable]) -> str:
    """Return the name of a field for messages: `field 'obs'`, or `the data itself` if rows are not nested."""
    return f"field {show_path(path)}" if path else "the data itself"


def open_node(data: Any, lead: int) -> tuple[Node, list[Any]] | None:
    """Split one level of nested data into its node and children; None if `data` is a leaf.

    Args:
        data: any value; dicts, lists, tuples, TensorDicts and tensorclasses are nodes, everything else is a leaf.
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
    if is_non_tensor(data):
        return None
    if is_tensorclass(data):
        require_batch(data, lead)
        return _open_tensorclass(data, lead)
    if is_tensordict(data):
        require_batch(data, lead)
        fields = fields_of(data)
        return Node("tensordict", tuple(fields), None, tuple(data.batch_size[lead:])), list(fields.values())
    return None


def fields_of(data: TensorDictBase) -> dict[str, Any]:
    """Return the fields of a TensorDict by name; a lazy stack is stacked.

    Warns if the rows of a lazy stack have different fields: rollouts that begin with the last step of another one have
    a few more in their first step, which are left out.

    Raises:
        SchemaError: if a field of a lazy stack cannot be stacked, or if its rows have no field in common.
    """
    if type(data).__name__ == "TensorDict":  # the most common class; the lookup of a missing attribute is slow
        return dict(data.items())
    parts = getattr(data, "tensordicts", None)
    if parts is None:
        return dict(data.items())
    names = [set(part.keys()) for part in parts]
    lacking = sorted(map(str, set.union(*names) - set.intersection(*names))) if names else []
    if lacking and len(names[0]) and not set.intersection(*names):
        msg = f"the rows of a lazy stack have no field in common, only some have {lacking}: use ListStorage"
        raise SchemaError(msg)
    if lacking:
        warnings.warn(
            f"not stored: {lacking}, which only some rows of the lazy stack have: give all rows the same fields, or "
            "use ListStorage for rows of different fields",
            UserWarning,
            stacklevel=2,
        )
    out = {}
    for key in data.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
        try:
            out[key] = data.get(key)
        except RuntimeError as error:
            msg = (
                f"{show_field((key,))} of a lazy stack cannot be stacked ({error}): give all rows one shape, pad them "
                "to one length, or use RaggedTensorStorage or ListStorage"
            )
            raise SchemaError(msg) from error
    return out


def require_batch(data: Any, lead: int) -> None:
    """Check that a TensorDict or tensorclass has at least `lead` batch dimensions.

    Raises:
        SchemaError: if it has fewer: one row was given instead of rows.
    """
    if data.batch_dims < lead:
        msg = f"extend() needs {lead} batch dimension(s), got batch_size={list(data.batch_size)}: add() takes one row"
        raise SchemaError(msg)


def _open_tensorclass(data: Any, lead: int) -> tuple[Node, list[Any]]:
    inner = data.to_tensordict(retain_none=False)
    keys = tuple(inner.keys())
    fields = {key: inner.get(key) for key in keys}
    values = [fields[key] if is_non_tensor(fields[key]) else getattr(data, key) for key in keys]
    return Node("tensorclass", keys, type(data), tuple(data.batch_size[lead:])), values


def is_non_tensor(data: object) -> bool:
    """Whether `data` is a wrapper of objects in a TensorDict: `NonTensorData`, `MetaData` or `NonTensorStack`."""
    asks = getattr(sys.modules.get("tensordict"), "is_non_tensor", None)
    return asks is not None and bool(asks(data)) and not isinstance(data, type)


def is_text(data: object, lead: int) -> bool:
    """Whether a leaf of plain data is text: str, bytes, or arrays and lists `[*batch]` of these.

    In arrays and lists, some of the values may be None. A list is text only if it represents rows (`lead` of at least
    1).
    """
    if isinstance(data, (str, bytes)):
        return True
    if isinstance(data, np.ndarray):
        return data.dtype.kind in "US" or (data.dtype.kind == "O" and _all_text(data.reshape(-1).tolist()))
    if not lead or (type(data) is not list and type(data) is not tuple):
        return False
    return _all_text(data) if lead == 1 else bool(data) and all(is_text(item, lead - 1) for item in data)


def _all_text(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values)) - {type(None)}
    return bool(kinds) and all(issubclass(kind, (str, bytes)) for kind in kinds)


def as_objects(value: Any, path: Sequence[Hashable], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Convert one field of objects to an object array, one element for each row. The objects are not copied.

    Args:
        value: `NonTensorData` and `MetaData` (one object for all rows), `NonTensorStack`, arrays of text or objects,
            lists `[*shape]`; one object where `shape` is empty.
        path: of the field, for messages.
        shape: leading dimensions of the rows, and batch dimensions that belong to the row.

    Raises:
        SchemaError: if there is not one object for each row.
        KindError: if it is a tensor or an array of numbers.
    """
    out = np.empty(shape, dtype=object)
    if is_non_tensor(value):
        if is_tensordict(value):
            _fill(out, value.tolist() if shape else [value.tolist()], path, shape)
            return out
        own = tuple(value.batch_size)
        if own[: len(shape)] != shape[: len(own)]:
            raise SchemaError(_wrong_number(path, shape, f"batch size {list(own)}"))
        out.fill(value.data)
    elif (
        out.size == 0
        and isinstance(value, (Tensor, np.ndarray))
        and (not getattr(value, "is_nested", False) and tuple(value.shape) == shape)
    ):
        return out  # TensorDict and NumPy convert an empty list to numbers
    elif isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind not in "USO"):
        msg = (
            f"{show_field(path)} holds Python objects, got a {type(value).__name__} of {value.dtype}: give one object "
            "for each row (a list), or wrap it in tensordict.NonTensorData"
        )
        raise KindError(msg)
    elif isinstance(value, np.ndarray):
        if value.shape != shape:
            raise SchemaError(_wrong_number(path, shape, f"an array of shape {list(value.shape)}"))
        out[...] = value.astype(object)
    elif shape:
        _fill(out, value, path, shape)
    else:
        out[()] = value
    return out


def leading(value: Any, lead: int) -> tuple[int, ...]:
    """Return the leading dimensions of a TensorDict, or of one field of objects: those that `as_objects` asks for."""
    if is_tensor_collection(value):
        return tuple(value.batch_size[:lead])
    shape: list[int] = []
    while len(shape) < lead:
        shape.append(len(value))
        value = value[0] if len(value) else ()
    return tuple(shape)


def _fill(out: np.ndarray[Any, Any], items: Any, path: Sequence[Hashable], shape: tuple[int, ...]) -> None:
    """Copy nested lists to an object array, one level for each dimension."""
    if out.ndim == 0:
        out[()] = items[0]
        return
    if not isinstance(items, (list, tuple)):
        raise SchemaError(_wrong_number(path, shape, f"one {type(items).__name__}"))
    if len(items) != out.shape[0]:
        raise SchemaError(_wrong_number(path, shape, f"a list of {len(items)}"))
    if out.ndim == 1:
        out[:] = np.fromiter(items, dtype=object, count=len(items))
        return
    for part, item in zip(out, items, strict=True):
        _fill(part, item, path, shape)


def _wrong_number(path: Sequence[Hashable], shape: tuple[int, ...], got: str) -> str:
    return (
        f"{show_field(path)} holds Python objects and needs one for each row (shape {list(shape)}), got {got}: "
        "give one object for each row, or tensordict.NonTensorData for one object that all rows share"
    )


def make_objects(node: Node, values: np.ndarray[Any, Any]) -> Any:
    """Convert an object array to a field of its node: the inverse of `as_objects`.

    TensorDicts and tensorclasses get `NonTensorStack` (`NonTensorData` for one row), other kinds lists (one object).
    """
    if node.kind not in {"tensordict", "tensorclass"}:
        return values.tolist() if values.ndim else values[()]
    tensordict = _tensordict()
    if values.ndim == 0:
        return tensordict.NonTensorData(values[()])
    if values.size == 0:
        return tensordict.NonTensorData(None, batch_size=values.shape)
    if values.ndim == 1:
        return tensordict.NonTensorStack(*map(tensordict.NonTensorData, values.tolist()))
    return tensordict.NonTensorStack(*(make_objects(node, part) for part in values))


def fields_by_path(data: Any, path: tuple[Hashable, ...] = ()) -> dict[tuple[Hashable, ...], Any]:
    """Return the fields of nested dicts and TensorDicts in memory by their paths; other things are fields."""
    plain = getattr(sys.modules.get("tensordict"), "TensorDict", dict)
    found: dict[tuple[Hashable, ...], Any] = {}
    for key, value in data.items():
        if type(value) is dict or type(value) is plain:
            found |= fields_by_path(value, (*path, key))
        else:
            found[*path, key] = value
    return found


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
    # The public constructor checks all shapes again, which takes 7 us for five fields; they were checked when written.
    td = _tensordict().TensorDict._new_unsafe(  # noqa: SLF001
        dict(zip(node.keys, children, strict=True)),
        batch_size=torch.Size((*batch, *node.extra) if node.extra else batch),
    )
    td._device = device  # noqa: SLF001 (as an argument, it takes as long as everything else)
    return td if kind == "tensordict" else node.cls.from_tensordict(td)  # type: ignore[union-attr]


def put(data: Any, values: Mapping[Any, Tensor], lead: int = 1) -> None:
    """Add fields `[*B, *shape]` to a fresh TensorDict or tensorclass `[*B, *rest]`, repeated over `rest`.

    Args:
        data: the TensorDict or tensorclass.
        values: fields by key; a tuple is a nested key.
        lead: dimensions of `B`.
    """
    batch = data.batch_size
    if -1 in batch:  # a lazy stack of rows of different lengths: each part repeats its own values
        for number, part in enumerate(data.unbind(0)):
            put(part, {key: value[number] for key, value in values.items()}, lead - 1)
        return
    for key, value in values.items():
        if len(batch) > lead:
            head, shape = value.shape[:lead], value.shape[lead:]
            value = value.reshape(*head, *[1] * (len(batch) - lead), *shape).expand(*batch, *shape)  # noqa: PLW2901
        plain = type(key) is str and is_tensordict(data)
        if plain and value.shape[:lead] == batch[:lead] and data.device in (None, value.device):
            # set() checks this again, which takes 2 us for each
            data._set_str(key, value, inplace=False, validated=True, non_blocking=False)  # noqa: SLF001
        else:
            data.set(key, value)


def is_mapping(data: object) -> bool:
    """Whether `data` has named fields: a dict, a TensorDict or a tensorclass."""
    return isinstance(data, dict) or is_tensor_collection(data)


# torch has no public name for the first; torch.jit.is_tracing takes four times as long as the second
func_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
"""Return the transform of `torch.func` that is active, None if there is none."""
is_tracing: Callable[[], bool] = torch._C._is_tracing  # noqa: SLF001
"""Return whether `torch.jit.trace` is active."""


def require_eager(what: str) -> None:
    """Check that rows are not read or written inside a transform of `torch.func` or a trace.

    Tensors inside `torch.func.vmap`, `grad` and similar have no memory of their own and end with the transform; a trace
    would return the same batch in every call.

    Args:
        what: the operation, for the message.

    Raises:
        UsageError: inside a transform of `torch.func`, or `torch.jit.trace`; names it.
    """
    transform = func_transform()
    if transform is None and not is_tracing():
        return
    name = "torch.jit.trace" if transform is None else f"torch.func ({transform.key().name.lower()})"
    msg = f"{what} inside {name} is not possible: do it outside, and pass the batch or its tensors in or out"
    raise UsageError(msg)


def find_field(data: Any, path: Sequence[Hashable]) -> Any:
    """Return the field of nested data at a path; None if there is none."""
    for key in path:
        if isinstance(data, dict):
            if key not in data:
                return None
            data = data[key]
        elif isinstance(data, (list, tuple)):
            if not isinstance(key, int) or key >= len(data):
                return None
            data = data[key]
        elif is_tensor_collection(data) and key in data.keys():  # noqa: SIM118 (it iterates over rows)
            data = data.get(key)
        else:
            return None
    return data


def leaves_by_path(data: Any) -> dict[tuple[Any, ...], Any]:
    """Return the leaves of nested data with named fields by their paths."""
    found: dict[tuple[Any, ...], Any] = {}
    for key, value in data.items():
        nested = not isinstance(value, Tensor) and is_mapping(value) and not is_non_tensor(value)
        found |= {(key, *path): leaf for path, leaf in leaves_by_path(value).items()} if nested else {(key,): value}
    return found


def with_fields(data: Any, values: Mapping[tuple[Any, ...], Tensor]) -> Any:
    """Set fields `[B, *shape]` of a new batch by their paths and return it; missing levels are created. In place."""
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


def as_tensor(value: Any, path: Sequence[Hashable]) -> Tensor:
    """Convert one leaf to a tensor of its own dtype. Tensors are not copied; numpy arrays share their memory.

    Args:
        value: a tensor, a numpy array or scalar, or a Python number.
        path: of the leaf, for messages.

    Returns:
        The tensor. Python numbers become bool, int64, float32 and complex64, independently of torch's default dtype.
        They and arrays are on the CPU, independently of torch's default device.

    Raises:
        KindError: for everything else, including text and ragged sequences; the message says what to use instead.
    """
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise KindError(_unsuitable(path, "a nested, sparse, quantized or meta tensor"))
        followed = value.requires_grad or forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
        return (value.detach() if followed else value).resolve_conj().resolve_neg()
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "OUSVMm":
            raise KindError(_unsuitable(path, f"a numpy array of dtype {value.dtype}"))
        return _from_numpy(np.asarray(value), path)
    if isinstance(value, (bool, int, float, complex)):
        try:
            tensor = torch.tensor(value, dtype=_number_dtype(value), device="cpu")
        except (OverflowError, RuntimeError, ValueError) as error:
            raise KindError(_unsuitable(path, f"the number {value!r} ({error})")) from None
        if isinstance(value, float) and math.isfinite(value) and not bool(tensor.isfinite()):
            msg = (
                f"{show_field(path)} holds the number {value!r}, and first rows store Python floats as {tensor.dtype}, "
                "which cannot hold it: give it as numpy.float64, or as a tensor"
            )
            raise KindError(msg)
        return tensor
    raise KindError(_unsuitable(path, type(value).__name__))


def _from_numpy(array: np.ndarray[Any, Any], path: Sequence[Hashable]) -> Tensor:
    """Share the memory of an array if torch can, else copy it (read-only, other byte order, unsupported strides)."""
    try:
        if array.flags.writeable:
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        pass
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True, order="C"))
    except TypeError:
        raise KindError(_unsuitable(path, f"a numpy array of dtype {array.dtype}")) from None


def _number_dtype(value: object) -> torch.dtype:
    """Return the dtype of a Python number; not torch's default dtype, which may change between two writes."""
    for kind, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float32)):
        if isinstance(value, kind):
            return dtype
    return torch.complex64


_TABLES_TAKE = (
    ": tensor storages take tensors, numpy arrays and numbers with one fixed shape per field, and text. Wrap other "
    "objects in tensordict.NonTensorData; for ragged sequences use RaggedTensorStorage or ListStorage, or "
    "pad them to one length"
)


def _unsuitable(path: Sequence[Hashable], what: str) -> str:
    return f"{show_field(path)} holds {what}{_TABLES_TAKE}"


def reason_of(error: Exception) -> str:
    """Return the message of an error without the advice to use another storage."""
    return str(error).replace(_TABLES_TAKE, "")


Fit: TypeAlias = "Callable[[Any, tuple[Hashable, ...]], Tensor]"
_NUMBERS = frozenset({int, float, bool})


def stack(
    items: Sequence[Any],
    fit: Fit | None = None,
    *,
    objects: Collection[tuple[Hashable, ...]] = (),
    batches: bool = False,
    table: bool = False,
) -> Any:
    """Stack a list of rows into one batch along a new first dimension. Text and other objects of dicts become lists.

    Args:
        items: at least one row, all of one kind: TensorDicts, tensors, arrays, numbers, or trees of these.
        fit: called as `fit(leaf, path)`; returns the tensor to store. None keeps the dtypes of the leaves.
        objects: paths of the fields that contain Python objects.
        batches: the items are batches, whose lists without tensors are columns of objects.
        table: the rows are for a tensor storage; error messages then name the alternatives.

    Raises:
        KindError: if the rows are of different kinds, or cannot be stacked.
        SchemaError: if their shapes differ.
    """

    def holds_objects(path: tuple[Hashable, ...], item: Any) -> bool:
        if batches and isinstance(item, list):
            return path in objects or not _holds_tensor(item)
        return path in objects or isinstance(item, (str, bytes)) or is_non_tensor(item)

    try:
        if is_tensor_collection(items[0]) and (fit is None or _share_dtypes(items)):
            return torch.stack(list(items), 0)
        return _stack(items, (), fit, holds_objects)
    except RuntimeError as error:
        ragged = "; for ragged rows use RaggedTensorStorage or ListStorage, or pad them to one length" if table else ""
        msg = f"the rows of the list cannot be stacked ({error}): give all rows one shape{ragged}"
        raise SchemaError(msg) from error
    except KindError as error:
        if table:
            raise
        raise KindError(reason_of(error)) from None


def _share_dtypes(items: Sequence[Any]) -> bool:
    """Whether TensorDicts have one dtype for each field; torch would stack others in a dtype that may round values."""
    if not all(map(is_tensor_collection, items)):
        return False
    leaves = (
        {key: getattr(x, "dtype", None) for key, x in item.items(include_nested=True, leaves_only=True)}
        for item in items
    )
    first = next(leaves)
    return all(other == first for other in leaves)


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stack rows of any kind. TensorDicts of different fields or shapes become a lazy stack of copies, as in TorchRL.

    Raises:
        KindError: if other rows are of different kinds, or cannot be stacked.
        SchemaError: if their shapes differ.
    """
    try:
        return stack(rows)
    except (SchemaError, KeyError):
        if not all(map(is_tensor_collection, rows)):
            raise
        lazy = sys.modules["tensordict"].LazyStackedTensorDict
        return lazy.maybe_dense_stack(_of_one_device([row.clone() for row in rows]), 0)


def stack_parts(items: Sequence[Any]) -> Any:
    """Stack batches along a new first dimension. TensorDicts of different fields or shapes become a lazy stack.

    Raises:
        KindError: if they are of different kinds, or cannot be stacked.
        SchemaError: if their shapes differ.
    """
    if any(isinstance(item, list) and not _holds_tensor(item) for item in items):
        msg = "lists of objects have no fields to stack: give each batch as a dict or TensorDict"
        raise KindError(msg)
    if not all(map(is_tensor_collection, items)):
        return stack(items, batches=True)
    lazy = sys.modules["tensordict"].LazyStackedTensorDict
    rows = _of_one_device(items)
    try:
        return lazy.maybe_dense_stack(rows, 0)
    except RuntimeError:
        return lazy.lazy_stack(rows, 0)  # of lazy stacks


def as_tensordict(data: Any, rows: int) -> Any:
    """Return a dict, a TensorDict or a tensorclass of rows as a TensorDict `[rows]`. No copy of tensors.

    Raises:
        KindError: if keys are not text.
    """
    if is_tensordict(data):
        return data
    if is_tensorclass(data):
        return data.to_tensordict()
    try:
        return _tensordict().TensorDict(data, batch_size=[rows])
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"these rows cannot be a TensorDict: {reason_of(error)}"
        raise KindError(msg) from error


def lazy_stack(rows: Sequence[Any], dim: int = 0) -> Any:
    """Return TensorDicts or tensorclasses as one, stacked along `dim`, whose fields are stacked when they are read."""
    return _tensordict().lazy_stack(_of_one_device(rows), dim)


def _of_one_device(rows: Sequence[Any]) -> list[Any]:
    """Return TensorDicts without a device if only some name one, as rows of a checkpoint do: such do not stack."""
    devices = {row.device for row in rows}
    return list(rows) if len(devices) == 1 or None not in devices else [row.copy().clear_device_() for row in rows]


def stack_lengths(rows: Sequence[Any], *, padded: bool) -> Any:
    """Stack TensorDicts whose fields differ in their first dimension. Copy.

    Args:
        rows: TensorDicts or tensorclasses with the same fields.
        padded: pad fields with 0 to the longest, and add bool masks `[n, longest]` under "masks", as a TensorDict;
            otherwise, fields of different lengths become jagged nested tensors.

    Raises:
        SchemaError: if they have different fields.
        RuntimeError: if fields differ in other dimensions.
    """
    names = set(rows[0].keys(include_nested=True))
    for row in rows:
        if set(row.keys(include_nested=True)) != names:
            lacking = sorted(map(str, names ^ set(row.keys(include_nested=True))))
            msg = f"rows of one batch must have the same fields, and some lack {lacking}"
            raise SchemaError(msg)
    if not padded:
        return lazy_stack(rows).densify(layout=torch.jagged)
    batch, masks = _pad([row.to_tensordict() if is_tensorclass(row) else row for row in rows])
    return batch.set("masks", masks)


def _pad(rows: Sequence[TensorDictBase]) -> tuple[TensorDictBase, TensorDictBase]:
    """Return padded rows and the masks of their fields; fields without dimensions need none."""
    batch, masks = (_tensordict().TensorDict({}, [len(rows)]) for _ in range(2))
    for key in rows[0].keys():  # noqa: SIM118 (a TensorDict iterates over rows)
        values = [row.get(key) for row in rows]
        if is_non_tensor(values[0]):
            batch.set(key, lazy_stack(values))
        elif is_tensordict(values[0]):
            inner, inner_masks = _pad(values)
            batch.set(key, inner)
            masks.set(key, inner_masks)
        elif not values[0].ndim:
            batch.set(key, torch.stack(values))
        else:
            lengths = torch.tensor([len(value) for value in values], dtype=torch.int64, device=values[0].device)
            batch.set(key, torch.nn.utils.rnn.pad_sequence(values, batch_first=True))
            longest = torch.arange(int(lengths.max()), dtype=torch.int64, device=lengths.device)
            masks.set(key, longest < lengths[:, None])
    return batch, masks


def concatenate(batches: Sequence[Any]) -> Any:
    """Concatenate batches of one structure along the first dimension of each leaf. Copy.

    Raises:
        KindError: if a leaf is neither a tensor, an array nor a list.
        SchemaError: if fields or shapes differ.
    """
    if all(isinstance(batch, list) for batch in batches):  # a list at the root is a list of rows
        return [row for batch in batches for row in batch]
    try:
        if is_tensor_collection(batches[0]):
            return torch.cat(list(batches), 0)
        return tree_map(_join, *batches, is_leaf=_is_column)
    except KindError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        msg = f"the batches cannot be concatenated ({error}): give all rows the same fields and shapes"
        raise SchemaError(msg) from error


def _is_column(value: object) -> bool:
    return is_tensor_collection(value) or (isinstance(value, list) and not _holds_tensor(value))


def _join(*leaves: Any) -> Any:
    if isinstance(leaves[0], list):
        return [item for leaf in leaves for item in leaf]
    if isinstance(leaves[0], np.ndarray):
        return np.concatenate(leaves)
    if isinstance(leaves[0], Tensor) or is_tensor_collection(leaves[0]):
        return torch.cat(leaves, 0)
    msg = f"a field holds {type(leaves[0]).__name__}, which cannot be concatenated"
    raise KindError(msg)


def _stack(
    items: Sequence[Any], path: tuple[Hashable, ...], fit: Fit | None, holds_objects: Callable[[Any, Any], bool]
) -> Any:
    """Stack one level of rows and the levels below it; `holds_objects(path, item)` tells of columns of objects."""
    if path and any(holds_objects(path, item) for item in items):
        return list(items)
    opened = open_node(items[0], 0)
    if opened is None:
        return _stack_leaves(items, path, fit)
    node = opened[0]
    columns: list[list[Any]] = [[] for _ in node.keys]
    for item in items:
        other = open_node(item, 0)
        if other is None or other[0].kind != node.kind or set(other[0].keys) != set(node.keys):
            msg = (
                f"a list at the root is a stack of rows of one kind, got a {node.kind} with the keys "
                f"{list(node.keys)} and {item!r}: give all rows the same keys"
            )
            raise KindError(msg)
        values = dict(zip(other[0].keys, other[1], strict=True))
        for key, column in zip(node.keys, columns, strict=True):
            column.append(values[key])
    children = [_stack(x, (*path, key), fit, holds_objects) for key, x in zip(node.keys, columns, strict=True)]
    return make(node, children, (len(items),), torch.device("cpu"))


def _stack_leaves(items: Sequence[Any], path: tuple[Hashable, ...], fit: Fit | None) -> Tensor:
    types = {type(item) for item in items}
    if types <= _NUMBERS and (fit is not None or len(types) == 1):
        try:
            widest = float if float in types else int if int in types else bool
            dtype = torch.float64 if fit is not None and widest is float else _number_dtype(widest())
            numbers = torch.tensor(list(items), dtype=dtype, device="cpu")
        except (OverflowError, RuntimeError, ValueError):
            pass  # integers beyond int64 are converted one by one
        else:
            return numbers if fit is None else fit(numbers, path)
    return torch.stack([as_tensor(item, path) if fit is None else fit(item, path) for item in items], 0)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, Tensor) or is_tensor_collection(value)


def unstack(data: Any) -> list[Any]:
    """Split a batch into its rows: a TensorDict, tensor or array along its first dimension, or any iterable."""
    return list(data.unbind(0) if isinstance(data, Tensor) or is_tensor_collection(data) else data)
