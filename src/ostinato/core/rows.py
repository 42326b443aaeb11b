"""Schema and leaves: nested rows are flattened once and rebuilt once. The only recursion over keys lives here."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core import casts, kinds
from ostinato.core.kinds import Node, as_tensor, open_node, show_field, show_path
from ostinato.errors import CheckpointError, KeyMissingError, KindError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

__all__ = [
    "OBJECT",
    "Flat",
    "Leaf",
    "ObjectLeaf",
    "Path",
    "Schema",
    "as_bits",
    "as_ordinary",
    "decode_schema",
    "describe",
    "encode_schema",
    "map_leaves",
    "same_rows",
    "turn_rows",
]

Path: TypeAlias = "tuple[Hashable, ...]"


class Leaf(NamedTuple):
    """One field of a row: where it stands in the nesting, its dtype, and its shape without batch dimensions."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this field in one row."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        """Name, dtype and shape, as messages show them."""
        return f"{show_path(self.path)}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class ObjectLeaf(NamedTuple):
    """One field of Python objects: where it stands, and batch dimensions of its TensorDict that belong to the row."""

    path: Path
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Name and shape, as messages show them."""
        return f"{show_path(self.path)}: object{list(self.shape)}"


class Flat(NamedTuple):
    """Rows without their nesting: leaves `[*batch, *leaf.shape]` in schema order."""

    leaves: list[Tensor]
    batch: tuple[int, ...]
    addresses: list[int] | None
    """Where the leaves lie, if all are contiguous CPU memory, which the native copies read as it stands."""
    objects: Sequence[np.ndarray[Any, Any]] = ()
    """Fields of Python objects, `[*batch, *leaf.shape]` object arrays in schema order."""


_Tree: TypeAlias = "tuple[Node, tuple[_Tree, ...]] | Literal['object'] | None"  # None is a tensor
OBJECT: Literal["object"] = "object"
"""Stands in a tree for a leaf of Python objects."""


@final
class Schema:
    """The fixed form of the rows of a storage: tree, names, dtypes and shapes. Immutable; compared by `==`.

    `flatten` checks data against it and gives the leaves in order, `build` is the inverse. `leaves` are the tensors of
    a row, `objects` its fields of Python objects (text, and what TensorDict keeps as `NonTensorData`).
    """

    __slots__ = ("_complex", "_dtypes", "_flat", "_seen", "_warned", "leaves", "objects", "tree")

    def __init__(self, tree: _Tree, leaves: Sequence[Leaf]) -> None:
        self.tree = tree
        self.leaves = tuple(leaves)
        self.objects = tuple(_find_objects(tree, (), ()))
        # One level of nesting is by far the commonest form: it is walked without recursion.
        self._flat = isinstance(tree, tuple) and all(child is None for child in tree[1])
        self._complex = any(leaf.dtype.is_complex for leaf in leaves)  # their conjugates are views that lie
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._seen: tuple[Any, int, tuple[int, ...], list[torch.Size]] = (None, -1, (), [])
        self._warned: set[Path] = set()

    def __eq__(self, other: object) -> bool:
        """Compare tree and leaves."""
        return isinstance(other, Schema) and self.tree == other.tree and self.leaves == other.leaves

    def __hash__(self) -> int:
        """Hash the leaves."""
        return hash(self.leaves)

    def __repr__(self) -> str:
        """List the leaves."""
        return f"Schema({', '.join(map(str, (*self.leaves, *self.objects)))})"

    def __reduce__(self) -> tuple[type[Schema], tuple[_Tree, tuple[Leaf, ...]]]:
        """Pickle tree and leaves; caches are made anew."""
        return Schema, (self.tree, self.leaves)

    @property
    def kind(self) -> str:
        """Kind of the root: `tensor`, `dict`, `list`, `tuple`, `namedtuple`, `tensordict` or `tensorclass`."""
        return "tensor" if self.tree is None or isinstance(self.tree, str) else self.tree[0].kind

    @property
    def nbytes(self) -> int:
        """Bytes of one row, padding not counted."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def paths(self) -> list[Path]:
        """Where all fields stand: tensors, then Python objects."""
        return [*(leaf.path for leaf in self.leaves), *(leaf.path for leaf in self.objects)]

    def find(self, path: Path) -> int:
        """Return the position of a leaf.

        Raises:
            KeyMissingError: if no leaf has this path.
        """
        for position, leaf in enumerate(self.leaves):
            if leaf.path == path:
                return position
        known = ", ".join(map(show_path, self.paths))
        msg = f"no {show_field(path)}: the fields are {known}"
        raise KeyMissingError(msg)

    def only(self, position: int) -> Schema:
        """Return the schema of one leaf alone, which warns of casts together with this one."""
        schema = Schema(None, [self.leaves[position]])
        schema._warned = self._warned
        return schema

    def fit(self, value: Any, path: Path) -> Tensor:
        """Return a leaf of any shape as a tensor of the dtype stored at `path`; of its own if nothing is stored there.

        Raises:
            KindError: if it is no tensor, array or number.
            SchemaError: if it does not fit; see `casts.rule`.
        """
        for leaf in self.leaves:
            if leaf.path == path:
                return casts.fit(value, leaf.dtype, path, self._warned)
        return as_tensor(value, path)

    def flatten(self, data: Any, batch: tuple[int, ...] | None, lead: int, *, exact: bool = False) -> Flat:
        """Check rows against the schema and return their leaves in order. No copy of leaves of the dtypes stored.

        Leaves of other dtypes are cast as `casts.rule` says.

        Args:
            data: rows of the schema's kind (a dict serves for a TensorDict and back).
            batch: the leading dimensions that all leaves must have; None reads them off the first leaf.
            lead: how many leading dimensions there are.
            exact: cast nothing: dtypes must be equal.

        Raises:
            SchemaError: naming the first field that differs, what was expected and what was got.
            KindError: if a leaf is no tensor, array or number.
        """
        values = self._values(data, lead)
        found: list[Any] = []
        if self.objects:
            values, found = values[: len(self.leaves)], values[len(self.leaves) :]
        try:
            flat = self._flatten(values, batch, lead, exact=exact)
        except (NotImplementedError, RuntimeError):
            # only tensors without plain memory (sparse, nested) cannot say their shape or strides
            values = [as_tensor(v, x.path) for v, x in zip(values, self.leaves, strict=True)]
            flat = self._flatten(values, batch, lead, exact=exact)
        if not found:
            return flat
        pairs = zip(self.objects, found, strict=True)
        return flat._replace(objects=[kinds.as_objects(x, leaf.path, (*flat.batch, *leaf.shape)) for leaf, x in pairs])

    def _flatten(self, values: list[Any], batch: tuple[int, ...] | None, lead: int, *, exact: bool) -> Flat:
        batch, shapes = self._expected(values, batch, lead)
        native = backend.native
        if native is not None and not self._complex:
            addresses = native.check_leaves(values, self._dtypes, shapes, Tensor)
            if addresses is not None:
                return Flat(values, batch, addresses)
        out: list[Tensor] = []
        plain = native is not None
        for leaf, value, shape in zip(self.leaves, values, shapes, strict=True):
            plain_array = type(value) is np.ndarray
            tensor = as_tensor(value, leaf.path) if plain_array else casts.read(value, leaf.dtype, leaf.path)
            same = tensor.dtype is leaf.dtype
            if tensor.shape != shape or (exact and not same):
                raise SchemaError(_mismatch(leaf, tensor, batch))
            tensor = tensor if same else casts.cast(tensor, leaf.dtype, leaf.path, self._warned)
            if plain and tensor.is_cpu and tensor.is_contiguous() and tensor.numel() and not tensor.data_ptr():
                tensor = tensor.clone()  # torch's symbolic zeros have no memory until somebody writes to them
            plain = plain and tensor.is_cpu and tensor.is_contiguous()
            out.append(tensor)
        return Flat(out, batch, [tensor.data_ptr() for tensor in out] if plain else None)

    def build(
        self,
        leaves: Sequence[Any],
        batch: tuple[int, ...],
        device: torch.device,
        objects: Sequence[np.ndarray[Any, Any]] = (),
    ) -> Any:
        """Nest leaves (tensors of shape `[*batch, *leaf.shape]`, in order) into the schema's kind. No copy.

        `objects` are the fields of Python objects, as `Flat` holds them.
        """
        if self.tree is None:
            return leaves[0]
        if self._flat:
            return kinds.make(self.tree[0], leaves, batch, device)  # type: ignore[arg-type]
        return _build(self.tree, iter(leaves), iter(objects), batch, device)

    def _values(self, data: Any, lead: int) -> list[Any]:
        """Return the values of the leaves in order, then those of the fields of objects."""
        tree = self.tree
        if tree is None or isinstance(tree, str):
            if open_node(data, lead) is not None:
                raise SchemaError(_wrong_kind(None, data, ()))
            return [data]
        if self._flat and tree[0].kind in _MAPPINGS and (type(data) is dict or kinds.is_tensordict(data)):
            mapping = data
            if type(data) is not dict:
                kinds.require_batch(data, lead)
                mapping = kinds.fields_of(data)
            if len(mapping) == len(tree[0].keys):
                try:
                    values = [mapping[key] for key in tree[0].keys]
                except KeyError:
                    pass
                else:
                    return values
        out: list[Any] = []
        objects: list[Any] = []
        _collect(tree, data, (), lead, (out, objects))
        return [*out, *objects] if objects else out

    def _expected(
        self, values: list[Any], batch: tuple[int, ...] | None, lead: int
    ) -> tuple[tuple[int, ...], list[torch.Size]]:
        """Leading dimensions (read off the first leaf where they are not given) and the shapes that all must have."""
        seen = None
        if batch is None:
            first, leaf = values[0], self.leaves[0]
            seen = first.shape if type(first) is Tensor else casts.read(first, leaf.dtype, leaf.path).shape
            if seen == self._seen[0] and lead == self._seen[1]:
                return self._seen[2], self._seen[3]  # loops write batches of one size
            batch = self._read_batch(seen, lead)
        shapes = [torch.Size((*batch, *leaf.shape)) for leaf in self.leaves]
        if seen is not None:
            self._seen = (seen, lead, batch, shapes)
        return batch, shapes

    def _read_batch(self, shape: tuple[int, ...], lead: int) -> tuple[int, ...]:
        if len(shape) < lead:
            msg = (
                f"field {self.leaves[0]} needs {lead} leading batch dimension(s), got shape {list(shape)}: "
                "use add() for one row"
            )
            raise SchemaError(msg)
        return tuple(shape[:lead])


_MAPPINGS = frozenset({"dict", "tensordict"})


_LISTS = (
    ". Lists inside a row are nesting, not arrays: give a tensor or an array; for ragged rows use ListStorage, or pad "
    "them to one length"
)


def describe(data: Any, lead: int, *, bare: bool = False) -> Schema:
    """Read the schema off the first rows that are written.

    Args:
        data: rows with `lead` leading batch dimensions.
        lead: number of batch dimensions (0 for one row).
        bare: let rows have fields of Python objects alone.

    Raises:
        SchemaError: if there is no field, or leaves disagree in their leading dimensions.
        KindError: if a leaf is no tensor, array, number or text.
    """
    leaves: list[Leaf] = []
    shapes: list[tuple[int, ...]] = []

    def walk(value: Any, path: Path) -> _Tree:
        if kinds.is_non_tensor(value) or kinds.is_text(value, lead):
            return OBJECT
        if not lead and kinds.is_text(value, 1):
            msg = (
                f"{show_field(path)} of a row is a list of text: wrap it in tensordict.NonTensorData, which keeps it "
                "as one object, or join it to one text"
            )
            raise KindError(msg)
        opened = open_node(value, lead)
        if opened is not None:
            node, children = opened
            return node, tuple(walk(child, (*path, key)) for key, child in zip(node.keys, children, strict=True))
        leaf, shape = _describe_leaf(value, path, lead)
        leaves.append(leaf)
        shapes.append(shape)
        return None

    schema = Schema(walk(data, ()), leaves)
    if not leaves and not (bare and schema.objects):
        raise SchemaError(_no_tensors(schema))
    for leaf, shape in zip(leaves, shapes, strict=True):
        if shape != shapes[0]:
            msg = (
                f"{show_field(leaf.path)} has batch size {list(shape)}, {show_field(leaves[0].path)} has "
                f"{list(shapes[0])}: all fields must agree in their first {lead} dimension(s)"
            )
            raise SchemaError(msg)
    return schema


def _describe_leaf(value: Any, path: Path, lead: int) -> tuple[Leaf, tuple[int, ...]]:
    """Return a leaf and its leading dimensions."""
    tensor = as_tensor(value, path)
    if tensor.ndim < lead:
        msg = (
            f"{show_field(path)} has shape {list(tensor.shape)}, but extend() needs {lead} leading batch "
            f"dimension(s): use add() for one row{_LISTS if any(isinstance(k, int) for k in path) else ''}"
        )
        raise SchemaError(msg)
    return Leaf(path, tensor.dtype, tuple(tensor.shape[lead:])), tuple(tensor.shape[:lead])


def _no_tensors(schema: Schema) -> str:
    if not schema.objects:
        return "rows have no fields: give at least one tensor"
    fields = ", ".join(show_path(leaf.path) for leaf in schema.objects)
    return (
        f"rows have Python objects alone ({fields}), and tensor storages need a tensor beside them: give at least one "
        "tensor, or use ListStorage"
    )


def _find_objects(tree: _Tree, path: Path, shape: tuple[int, ...]) -> Iterator[ObjectLeaf]:
    """Yield the fields of objects; their shape is that of the TensorDict that holds them."""
    if isinstance(tree, str):
        yield ObjectLeaf(path, shape)
    elif tree is not None:
        node, children = tree
        below = node.extra if node.kind in {"tensordict", "tensorclass"} else shape
        for key, child in zip(node.keys, children, strict=True):
            yield from _find_objects(child, (*path, key), below)


def _collect(tree: _Tree, data: Any, path: Path, lead: int, out: tuple[list[Any], list[Any]]) -> None:
    """Put the leaves of data into two lists: tensors, and fields of objects."""
    if isinstance(tree, str):
        out[1].append(data)
        return
    opened = open_node(data, lead)
    if tree is None:
        if opened is not None:
            raise SchemaError(_wrong_kind(None, data, path))
        out[0].append(data)
        return
    node, subtrees = tree
    if opened is None or not _same_kind(opened[0].kind, node.kind):
        raise SchemaError(_wrong_kind(node, data, path))
    children = dict(zip(opened[0].keys, opened[1], strict=True))
    if children.keys() != set(node.keys):
        raise KeyMissingError(_wrong_keys(node, children, path))
    for key, subtree in zip(node.keys, subtrees, strict=True):
        _collect(subtree, children[key], (*path, key), lead, out)


def _same_kind(got: str, stored: str) -> bool:
    return got == stored or (got in _MAPPINGS and stored in _MAPPINGS)


def _build(tree: _Tree, leaves: Any, objects: Any, batch: tuple[int, ...], device: torch.device) -> Any:
    if not isinstance(tree, tuple):
        return next(leaves)
    node, subtrees = tree
    children = [
        kinds.make_objects(node, next(objects))
        if isinstance(subtree, str)
        else _build(subtree, leaves, objects, batch, device)
        for subtree in subtrees
    ]
    return kinds.make(node, children, batch, device)


def _mismatch(leaf: Leaf, tensor: Tensor, batch: tuple[int, ...]) -> str:
    expected = Leaf(leaf.path, leaf.dtype, (*batch, *leaf.shape))
    got = Leaf(leaf.path, tensor.dtype, tuple(tensor.shape))
    return (
        f"{show_field(leaf.path)} must be {_form(expected)} (batch size {list(batch)}), got "
        f"{_form(got)}: convert it before writing"
    )


def _form(leaf: Leaf) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def _wrong_kind(node: Node | None, data: Any, path: Path) -> str:
    expected = "one tensor" if node is None else f"a {node.kind} with the keys {list(node.keys)}"
    instead = (
        ". Text must be there in the first rows; for ragged sequences use ListStorage"
        if node is None and isinstance(data, (list, tuple))
        else ""
    )
    return (
        f"{show_path(path)} must be {expected}, got {type(data).__name__}: the storage keeps the form of its first "
        f"rows{instead}"
    )


def _wrong_keys(node: Node, children: dict[Any, Any], path: Path) -> str:
    missing = [key for key in node.keys if key not in children]
    unknown = [key for key in children if key not in node.keys]
    where = f" in {show_path(path)}" if path else ""
    parts = [f"missing {missing}"] if missing else []
    parts += [f"unknown {unknown}"] if unknown else []
    return (
        f"rows must have the keys {list(node.keys)}{where}, got {list(children)} ({', '.join(parts)}): the "
        "storage keeps the form of its first rows"
    )


def map_leaves(data: Any, change: Callable[[Any], Any], *, depth: int = 0) -> Any:
    """Apply `change` to every leaf of nested data and nest the results the same way.

    Dicts, lists, tuples and named tuples are opened, nothing else: leaves may be tensors, TensorDicts, or any object.

    Raises:
        KindError: if data is nested more than 100 deep, as data that holds itself is.
    """
    if type(data) not in {dict, list, tuple} and not hasattr(data, "_fields"):
        return change(data)
    if depth > _MAX_DEPTH:
        msg = f"a row is nested more than {_MAX_DEPTH} deep, or holds itself: wrap it in an object of your own"
        raise KindError(msg)
    opened = open_node(data, 0)
    if opened is None:
        return change(data)
    node, children = opened
    changed = [map_leaves(child, change, depth=depth + 1) for child in children]
    return kinds.make(node, changed, (), torch.device("cpu"))


_MAX_DEPTH = 100


_KINDS = ("dict", "list", "tuple", "namedtuple", "tensordict", "tensorclass")
_MAX_DEPTH_state = 32
_MOST_EXTRA = 2**31


def encode_schema(schema: Schema) -> dict[str, Any]:
    """Turn a schema into JSON values.

    Raises:
        CheckpointError: if a key is neither text, integer, bool nor None.
    """
    return {
        "leaves": [
            {
                "path": [_key(k) for k in leaf.path],
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "shape": list(leaf.shape),
            }
            for leaf in schema.leaves
        ],
        "tree": _encode_tree(schema.tree),
    }


def decode_schema(body: Any) -> Schema:
    """Turn JSON values into a schema; nothing is imported on the way.

    Raises:
        CheckpointError: if the values are not those of a schema, or name a class that this process has not imported.
    """
    try:
        leaves = [Leaf(tuple(map(_unkey, x["path"])), _dtype(x["dtype"]), _shape(x["shape"])) for x in body["leaves"]]
        tree, paths = _decode_tree(body["tree"], (), 0)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"the checkpoint's schema cannot be read: {error}"
        raise CheckpointError(msg) from error
    if paths != [leaf.path for leaf in leaves]:
        msg = f"the checkpoint's schema names the fields {[leaf.path for leaf in leaves]}, its tree {paths}"
        raise CheckpointError(msg)
    _check_extra(tree, iter(leaves), ())
    return Schema(tree, leaves)


def _key(key: Any) -> Any:
    if key is None or isinstance(key, (str, bool, int)):
        return key
    msg = f"only text, integers, bools and None can be saved as keys, got {key!r} of type {type(key).__name__}"
    raise CheckpointError(msg)


def _unkey(key: Any) -> Any:
    if key is None or isinstance(key, (str, bool, int)):
        return key
    msg = f"a key must be text, integer, bool or None, got {key!r}"
    raise CheckpointError(msg)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        msg = f"this torch has no dtype {name!r}"
        raise CheckpointError(msg)
    return dtype


def _shape(shape: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in shape):
        msg = f"a shape must hold integers of at least 0, got {shape!r}"
        raise CheckpointError(msg)
    return tuple(shape)


def _encode_tree(tree: Any) -> Any:
    if tree is None:
        return None
    if isinstance(tree, str):
        return {"kind": OBJECT}
    node, children = tree
    return {
        "kind": node.kind,
        "keys": [_key(key) for key in node.keys],
        "class": None if node.cls is None else f"{node.cls.__module__}:{node.cls.__qualname__}",
        "extra": list(node.extra),
        "children": [_encode_tree(child) for child in children],
    }


def _decode_tree(body: Any, path: tuple[Any, ...], depth: int) -> tuple[Any, list[tuple[Any, ...]]]:
    if body is None:
        return None, [path]
    if body == {"kind": OBJECT}:
        return OBJECT, []
    if depth > _MAX_DEPTH_state or body["kind"] not in _KINDS:
        msg = f"nesting is {depth} deep (at most {_MAX_DEPTH_state}) or of an unknown kind {body['kind']!r}"
        raise CheckpointError(msg)
    keys = tuple(map(_unkey, body["keys"]))
    node = Node(body["kind"], keys, _find_class(body["class"]), _shape(body["extra"]))
    children, paths = [], []
    for key, child in zip(keys, body["children"], strict=True):
        tree, below = _decode_tree(child, (*path, key), depth + 1)
        children.append(tree)
        paths += below
    return (node, tuple(children)), paths


def _check_extra(tree: Any, leaves: Iterator[Leaf], lead: tuple[int, ...]) -> None:
    """Refuse a TensorDict whose batch dimensions are not those of the leaves below it.

    Raises:
        CheckpointError: naming the first leaf that does not fit.
    """
    if tree is None:
        leaf = next(leaves)
        if leaf.shape[: len(lead)] != lead:
            msg = f"the checkpoint's schema puts the field {leaf.path} under the batch size {list(lead)}: it is damaged"
            raise CheckpointError(msg)
        return
    if isinstance(tree, str):
        return
    node, children = tree
    if math.prod(node.extra) > _MOST_EXTRA:
        msg = f"the checkpoint's schema has the batch size {list(node.extra)}: it is damaged"
        raise CheckpointError(msg)
    for child in children:
        _check_extra(child, leaves, node.extra or lead)


def _find_class(name: Any) -> type | None:
    """Look a class up among the modules that are imported already: a checkpoint must not run code."""
    if name is None:
        return None
    module, _, qualname = str(name).partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if not named and not (isinstance(found, type) and hasattr(found, "from_tensordict")):
        msg = f"the rows are of class {name}, which is not imported here: import its module before loading"
        raise CheckpointError(msg)
    return found  # type: ignore[no-any-return]


_PIECE_BYTES = 2 * 2**20
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """View a tensor by its bits where torch cannot index its dtype (unsigned integers, 8-bit floats); else as it is."""
    dtype = tensor.dtype
    rare = dtype in {torch.uint16, torch.uint32, torch.uint64} or str(dtype).startswith("torch.float8")
    return tensor.view(_SIGNED[dtype.itemsize]) if rare else tensor


def as_ordinary(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor with the memory of an inference tensor (`torch.inference_mode`); others as they are.

    Ordinary tensors may be changed in place in any mode. No copy.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def same_rows(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return bool `[n]`: whether row i of every tensor is that of its partner, bit by bit (NaN equals itself)."""
    out: Tensor | None = None
    for one, other in zip(ones, others, strict=True):
        same = (_integers(one) == _integers(other)).flatten(1).all(1)
        out = same if out is None else out & same
    if out is None:
        msg = "there is nothing to compare"
        raise ValueError(msg)
    return out


def turn_rows(rows: Tensor, seam: int) -> None:
    """Turn rows `[n, ...]` in place, so that row `seam` becomes row 0 and the rows before it come last.

    Memory: a copy of the smaller part, and 2 MiB.
    """
    bits, n = as_bits(rows), rows.shape[0]
    rest = n - seam
    step = max(1, _PIECE_BYTES * n // max(1, rows.nbytes))
    if seam <= rest:
        kept = bits[:seam].clone()
        for first in range(0, rest, step):
            last = min(first + step, rest)
            bits[first:last] = bits[first + seam : last + seam].clone()
        bits[rest:] = kept
        return
    kept = bits[seam:].clone()
    for last in range(seam, 0, -step):
        first = max(0, last - step)
        bits[first + rest : last + rest] = bits[first:last].clone()
    bits[:rest] = kept


def _integers(tensor: Tensor) -> Tensor:
    if tensor.dtype.itemsize == 16:  # complex128
        tensor = torch.view_as_real(tensor)
    return tensor.unsqueeze(-1).view(_SIGNED[min(tensor.dtype.itemsize, 8)])
