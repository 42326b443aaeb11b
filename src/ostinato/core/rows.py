"""Schema: the structure, dtypes and shapes of a row, which flattens nested rows to tensors and nests them again."""

from __future__ import annotations

import math
import sys
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core import casts, kinds
from ostinato.core.kinds import Node, as_tensor, open_node, require_tensordict, show_field, show_path
from ostinato.errors import CheckpointError, KeyMissingError, KindError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

Path: TypeAlias = "tuple[Hashable, ...]"
OBJECT: Literal["object"] = "object"
"""Stands in a tree for a field of Python objects."""
_Tree: TypeAlias = "tuple[Node, tuple[_Tree, ...]] | Literal['object'] | None"  # None is a tensor

NAME_LENGTH = 1000
"""Longest name of a column: a checkpoint allows 1024 characters, and some names get a suffix."""
_MAPPINGS = frozenset({"dict", "tensordict"})
_KINDS = ("dict", "list", "tuple", "namedtuple", "tensordict", "tensorclass")
_MAX_DEPTH = 100
_MAX_SAVED_DEPTH = 32
_MAX_BATCH = 2**31
_PIECE_BYTES = 2 * 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Leaf(NamedTuple):
    """A tensor field of a row: its path, dtype, and shape without batch dimensions."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this field in one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        """Return path, dtype and shape for messages."""
        return f"{show_path(self.path)}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


NO_TENSORS = Leaf(("(no tensors)",), torch.uint8, (0,))
"""The only leaf, of no bytes, of rows that consist of Python objects only: so every schema has a leaf."""


class ObjectLeaf(NamedTuple):
    """A field of Python objects: its path, and the batch dimensions of its TensorDict that belong to the row."""

    path: Path
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return path and shape for messages."""
        return f"{show_path(self.path)}: object{list(self.shape)}"


class Flat(NamedTuple):
    """Rows without their nesting: leaves `[*batch, *leaf.shape]` in the order of the schema."""

    leaves: list[Tensor]
    batch: tuple[int, ...]
    addresses: list[int] | None = None
    """Addresses of the leaves if all are contiguous CPU memory, which native code can copy."""
    objects: Sequence[np.ndarray[Any, Any]] = ()
    """Fields of Python objects in the order of the schema: object arrays `[*batch, *leaf.shape]`."""
    late: dict[Path, Tensor] = {}  # noqa: RUF012 (never changed in place)
    """Fields that were added after the first rows, `[rows, *shape]` each; they are not in the schema."""
    prepared: tuple[Any, ...] = ()
    """What the columns that are not dense have made of rows to write."""


class _Seen(NamedTuple):
    """The batch that was checked last: loops write batches of one size."""

    shape: tuple[int, ...] | None
    """Shape of its first leaf."""
    lead: int
    batch: tuple[int, ...]
    shapes: list[torch.Size]
    """Shapes of all leaves."""


@final
class Schema:
    """Structure, field names, dtypes and shapes of the rows of a storage. Immutable; compared by value.

    `flatten` checks rows and returns their leaves in order; `build` is the inverse. `leaves` are the tensor fields of a
    row, `objects` its fields of Python objects (text, and what TensorDict keeps as `NonTensorData`).
    """

    __slots__ = (
        "_complex",
        "_dtypes",
        "_flat",
        "_get",
        "_json",
        "_no_tensors",
        "_seen",
        "_warned",
        "column_names",
        "is_plain",
        "keys",
        "leaves",
        "nested",
        "objects",
        "tree",
    )

    def __init__(self, tree: _Tree, leaves: Sequence[Leaf]) -> None:
        self.tree = tree
        self.leaves = tuple(leaves)
        self.objects = tuple(_find_objects(tree, (), ()))
        self.column_names = [column_name(leaf.path, i) for i, leaf in enumerate(leaves)]
        """Names of the leaves in a checkpoint, see `column_name`."""
        # Rows of one level of nesting are by far the most common: they are flattened without recursion.
        self._no_tensors = self.leaves == (NO_TENSORS,)
        self._flat = isinstance(tree, tuple) and not self._no_tensors and all(child is None for child in tree[1])
        self._get: Callable[[Any], tuple[Any, ...]] | None = None
        if isinstance(tree, tuple) and self._flat and tree[0].kind in _MAPPINGS:
            keys = tree[0].keys
            self._get = itemgetter(*keys) if len(keys) > 1 else lambda fields: (fields[keys[0]],)
        self.is_plain = tree is None or (not self._no_tensors and _holds_mappings(tree))
        """Whether a row is one tensor, or dicts and TensorDicts of tensors, without batch dimensions of their own."""
        self.nested = self.is_plain and not self._flat and tree is not None
        """Whether such a row has several levels."""
        self.keys = None if tree is None else tuple(x.path if self.nested else x.path[0] for x in self.leaves)
        """Keys of the leaves where rows are one dict of tensors: names, or paths if they are nested."""
        self._complex = any(leaf.dtype.is_complex for leaf in leaves)  # a conjugate view shares memory it must not
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._seen = _Seen(None, -1, (), [])
        self._warned: set[Path] = set()
        self._json: dict[str, Any] | None = None

    def __eq__(self, other: object) -> bool:
        """Compare tree and leaves."""
        return isinstance(other, Schema) and self.tree == other.tree and self.leaves == other.leaves

    def __hash__(self) -> int:
        """Hash the leaves."""
        return hash(self.leaves)

    def __repr__(self) -> str:
        """List the fields."""
        return f"Schema({', '.join(map(str, (*self.leaves, *self.objects)))})"

    def __reduce__(self) -> tuple[type[Schema], tuple[_Tree, tuple[Leaf, ...]]]:
        """Pickle tree and leaves; caches are built again."""
        return Schema, (self.tree, self.leaves)

    @property
    def kind(self) -> str:
        """Kind of the root: `tensor`, `dict`, `list`, `tuple`, `namedtuple`, `tensordict` or `tensorclass`."""
        return "tensor" if self.tree is None or isinstance(self.tree, str) else self.tree[0].kind

    @property
    def nbytes(self) -> int:
        """Bytes of one row without padding."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def paths(self) -> list[Path]:
        """Paths of all fields: tensors, then Python objects."""
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
        """Return the schema of one leaf, which shares the record of the warnings about casts with this schema."""
        schema = Schema(None, [self.leaves[position]])
        schema._warned = self._warned
        return schema

    def fit(self, value: Any, path: Path) -> Tensor:
        """Return a leaf of any shape as a tensor of the dtype stored at `path`; in its own dtype if there is none.

        Raises:
            KindError: if it is not a tensor, array or number.
            SchemaError: if it cannot be cast; see `casts.rule`.
        """
        for leaf in self.leaves:
            if leaf.path == path:
                return casts.fit(value, leaf.dtype, path, self._warned)
        return as_tensor(value, path)

    # -- rows to leaves and back ---------------------------------------------------------------------------------------

    def flatten(self, data: Any, batch: tuple[int, ...] | None, lead: int, *, exact: bool = False) -> Flat:
        """Check rows against the schema and return their leaves in order.

        Leaves of the stored dtypes are not copied; others are cast as `casts.rule` says.

        Args:
            data: rows of the kind of the schema (a dict is accepted for a TensorDict and vice versa).
            batch: leading dimensions that all leaves must have; None takes those of the first leaf.
            lead: number of leading dimensions.
            exact: require equal dtypes instead of casting.

        Raises:
            SchemaError: naming the first field that differs, what was expected and what was given.
            KindError: if a leaf is not a tensor, array or number.
        """
        values = self._values(data, lead)
        found: list[Any] = []
        if self.objects:
            values, found = values[: len(self.leaves)], values[len(self.leaves) :]
        try:
            flat = self._check(values, batch, lead, exact=exact)
        except (NotImplementedError, RuntimeError):
            for leaf, value in zip(self.leaves, values, strict=True):
                as_tensor(value, leaf.path)  # raises for tensors without plain memory: sparse and nested ones
            raise
        if not found:
            return flat
        pairs = zip(self.objects, found, strict=True)
        return flat._replace(objects=[kinds.as_objects(x, leaf.path, (*flat.batch, *leaf.shape)) for leaf, x in pairs])

    def _check(self, values: list[Any], batch: tuple[int, ...] | None, lead: int, *, exact: bool) -> Flat:
        """Check the dtypes and shapes of leaves; cast those that differ."""
        seen, first = self._seen, values[0]
        if batch is None and lead == seen.lead and type(first) is Tensor and first.shape == seen.shape:
            batch, shapes = seen.batch, seen.shapes
        else:
            batch, shapes = self._expected(first, batch, lead)
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
                tensor = tensor.clone()  # torch's symbolic zeros have no memory until they are written to
            plain = plain and tensor.is_cpu and tensor.is_contiguous()
            out.append(tensor)
        return Flat(out, batch, [tensor.data_ptr() for tensor in out] if plain else None)

    def _expected(
        self, first: Any, batch: tuple[int, ...] | None, lead: int
    ) -> tuple[tuple[int, ...], list[torch.Size]]:
        """Return the leading dimensions, by default those of the first leaf, and the shapes required of all leaves."""
        if batch is not None:
            return batch, [torch.Size((*batch, *leaf.shape)) for leaf in self.leaves]
        leaf = self.leaves[0]
        shape = first.shape if type(first) is Tensor else casts.read(first, leaf.dtype, leaf.path).shape
        if len(shape) < lead:
            msg = (
                f"field {leaf} needs {lead} leading batch dimension(s), got shape {list(shape)}: use add() for one row"
            )
            raise SchemaError(msg)
        batch = tuple(shape[:lead])
        shapes = [torch.Size((*batch, *leaf.shape)) for leaf in self.leaves]
        self._seen = _Seen(shape, lead, batch, shapes)
        return batch, shapes

    def _values(self, data: Any, lead: int) -> list[Any]:
        """Return the values of the leaves in order, followed by those of the fields of objects."""
        tree = self.tree
        if tree is None or isinstance(tree, str):
            if open_node(data, lead) is not None:
                raise SchemaError(_wrong_kind(None, data, ()))
            return [data]
        if self._get is not None and (type(data) is dict or kinds.is_tensordict(data)):
            fields = data
            if type(data) is not dict:
                kinds.require_batch(data, lead)
                fields = kinds.fields_of(data)
            if len(fields) == len(tree[0].keys):
                try:
                    return list(self._get(fields))
                except KeyError:
                    pass  # the checks below name the field
        out: list[Any] = []
        objects: list[Any] = []
        _collect(tree, data, (), lead, (out, objects))
        if self._no_tensors:
            batch = kinds.leading(data if kinds.is_tensor_collection(data) else objects[0], lead)
            return [torch.empty((*batch, 0), dtype=NO_TENSORS.dtype, device="cpu"), *objects]
        return [*out, *objects]

    def build(
        self,
        leaves: Sequence[Any],
        batch: tuple[int, ...],
        device: torch.device,
        objects: Sequence[np.ndarray[Any, Any]] = (),
    ) -> Any:
        """Nest leaves (tensors `[*batch, *leaf.shape]` in order) into the kind of the schema. No copy.

        `objects` are the fields of Python objects as in `Flat`.
        """
        if self.tree is None:
            return leaves[0]
        if self._flat:
            return kinds.make(self.tree[0], leaves, batch, device)  # type: ignore[arg-type]
        return _build(self.tree, iter(leaves), iter(objects), batch, device)

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values, which the caller must not modify: they are kept for the next call.

        Raises:
            CheckpointError: if a key is not text, an integer, a bool or None.
        """
        if self._json is None:
            leaves = [
                {
                    "path": [_check_key(key) for key in leaf.path],
                    "dtype": str(leaf.dtype).removeprefix("torch."),
                    "shape": list(leaf.shape),
                }
                for leaf in self.leaves
            ]
            self._json = {"leaves": leaves, "tree": _encode_tree(self.tree)}
        return self._json

    @classmethod
    def from_json(cls, body: Any, *, known: Schema | None = None) -> Schema:
        """Return the schema in JSON values. Nothing is imported.

        Args:
            body: what `to_json` returned, or a schema.
            known: a schema that is returned if `body` describes it.

        Raises:
            CheckpointError: if the values are not a schema, or name a class that this process has not imported.
            MissingExtraError: if rows are TensorDicts, and tensordict is not installed.
        """
        if isinstance(body, Schema):
            return body
        if known is not None and body == known.to_json():
            return known
        try:
            leaves = [
                Leaf(tuple(map(_check_key, x["path"])), _dtype(x["dtype"]), _shape(x["shape"])) for x in body["leaves"]
            ]
            unread = list(leaves)
            tree = _decode_tree(body["tree"], (), (), unread)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            msg = f"the checkpoint's schema cannot be read: {error}"
            raise CheckpointError(msg) from error
        if unread and not (leaves == [NO_TENSORS] and tree is not None):
            msg = f"the checkpoint's schema has the fields {unread}, which its tree lacks: it is damaged"
            raise CheckpointError(msg)
        return cls(tree, leaves)


def column_name(path: Path, position: int) -> str:
    """Return the name of a column in a checkpoint: its position and path, cut to `NAME_LENGTH` characters."""
    return f"{position}.{'.'.join(map(str, path))}"[:NAME_LENGTH] if path else f"{position}.data"


def describe(data: Any, lead: int, *, bare: bool = False) -> Schema:
    """Return the schema of the first rows that are written.

    Args:
        data: rows with `lead` leading batch dimensions.
        lead: number of batch dimensions (0 for one row).
        bare: allow rows that consist of fields of Python objects only.

    Raises:
        SchemaError: if there is no field, or leaves differ in their leading dimensions.
        KindError: if a leaf is not a tensor, array, number or text.
    """
    leaves: list[Leaf] = []
    shapes: list[tuple[int, ...]] = []
    tree = _describe_tree(data, (), lead, leaves, shapes)
    schema = Schema(tree, leaves)
    if not leaves and not bare and isinstance(tree, tuple) and (schema.kind == "tensordict" or schema.objects):
        return Schema(tree, [NO_TENSORS])
    if not leaves and not (bare and schema.objects):
        msg = "rows have no fields: give at least one tensor"
        if schema.objects:
            msg = "rows are single Python objects: give them a name, as in {'text': rows}, or use ListStorage"
        raise SchemaError(msg)
    for leaf, shape in zip(leaves, shapes, strict=True):
        if shape != shapes[0]:
            msg = (
                f"{show_field(leaf.path)} has batch size {list(shape)}, {show_field(leaves[0].path)} has "
                f"{list(shapes[0])}: all fields must agree in their first {lead} dimension(s)"
            )
            raise SchemaError(msg)
    return schema


def _describe_tree(value: Any, path: Path, lead: int, leaves: list[Leaf], shapes: list[tuple[int, ...]]) -> _Tree:
    """Return a tree; append its leaves and their leading dimensions."""
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
        pairs = zip(node.keys, children, strict=True)
        return node, tuple(_describe_tree(child, (*path, key), lead, leaves, shapes) for key, child in pairs)
    leaf, shape = _describe_leaf(value, path, lead)
    leaves.append(leaf)
    shapes.append(shape)
    return None


def _describe_leaf(value: Any, path: Path, lead: int) -> tuple[Leaf, tuple[int, ...]]:
    """Return a leaf and its leading dimensions."""
    tensor = as_tensor(value, path)
    if tensor.ndim < lead:
        lists = (
            ". Lists inside a row are nesting, not arrays: give a tensor or an array; for ragged rows use "
            "RaggedTensorStorage, or pad them to one length"
        )
        msg = (
            f"{show_field(path)} has shape {list(tensor.shape)}, but extend() needs {lead} leading batch "
            f"dimension(s): use add() for one row{lists if any(isinstance(k, int) for k in path) else ''}"
        )
        raise SchemaError(msg)
    return Leaf(path, tensor.dtype, tuple(tensor.shape[lead:])), tuple(tensor.shape[:lead])


def _find_objects(tree: _Tree, path: Path, shape: tuple[int, ...]) -> Iterator[ObjectLeaf]:
    """Yield the fields of objects; their shape is that of the TensorDict that contains them."""
    if isinstance(tree, str):
        yield ObjectLeaf(path, shape)
    elif tree is not None:
        node, children = tree
        below = node.extra if node.kind in {"tensordict", "tensorclass"} else shape
        for key, child in zip(node.keys, children, strict=True):
            yield from _find_objects(child, (*path, key), below)


def _collect(tree: _Tree, data: Any, path: Path, lead: int, out: tuple[list[Any], list[Any]]) -> None:
    """Append the leaves of data to two lists: tensors, and fields of objects."""
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
    if opened is None or (opened[0].kind != node.kind and not {opened[0].kind, node.kind} <= _MAPPINGS):
        raise SchemaError(_wrong_kind(node, data, path))
    children = dict(zip(opened[0].keys, opened[1], strict=True))
    if children.keys() != set(node.keys):
        raise KeyMissingError(_wrong_keys(node, children, path))
    for key, subtree in zip(node.keys, subtrees, strict=True):
        _collect(subtree, children[key], (*path, key), lead, out)


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


def _holds_mappings(tree: _Tree) -> bool:
    """Whether all nodes of a tree are dicts, or TensorDicts without batch dimensions of their own, of tensors."""
    if not isinstance(tree, tuple):
        return tree is None
    return tree[0].kind in _MAPPINGS and not tree[0].extra and all(map(_holds_mappings, tree[1]))


def _mismatch(leaf: Leaf, tensor: Tensor, batch: tuple[int, ...]) -> str:
    def show(dtype: torch.dtype, shape: Sequence[int]) -> str:
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"

    return (
        f"{show_field(leaf.path)} must be {show(leaf.dtype, (*batch, *leaf.shape))} (batch size {list(batch)}), got "
        f"{show(tensor.dtype, tensor.shape)}: convert it before writing"
    )


def _wrong_kind(node: Node | None, data: Any, path: Path) -> str:
    expected = "one tensor" if node is None else f"a {node.kind} with the keys {list(node.keys)}"
    instead = (
        ". Text must be in the first rows already; for ragged sequences use RaggedTensorStorage or ListStorage"
        if node is None and isinstance(data, (list, tuple))
        else ""
    )
    return (
        f"{show_path(path)} must be {expected}, got {type(data).__name__}: the storage keeps the structure of its "
        f"first rows{instead}"
    )


def _wrong_keys(node: Node, children: dict[Any, Any], path: Path) -> str:
    missing = [key for key in node.keys if key not in children]
    unknown = [key for key in children if key not in node.keys]
    where = f" in {show_path(path)}" if path else ""
    parts = [f"missing {missing}"] if missing else []
    parts += [f"unknown {unknown}"] if unknown else []
    return (
        f"rows must have the keys {list(node.keys)}{where}, got {list(children)} ({', '.join(parts)}): the "
        "storage keeps the structure of its first rows"
    )


def map_leaves(data: Any, change: Callable[[Any], Any], *, depth: int = 0) -> Any:
    """Apply `change` to every leaf of nested data and nest the results in the same way.

    Only dicts, lists, tuples and named tuples are opened: leaves may be tensors, TensorDicts, or any object.

    Raises:
        KindError: if data is nested more than 100 deep, for example because it contains itself.
    """
    if type(data) not in {dict, list, tuple} and not hasattr(data, "_fields"):
        return change(data)
    if depth > _MAX_DEPTH:
        msg = f"a row is nested more than {_MAX_DEPTH} deep, or contains itself: wrap it in an object of your own"
        raise KindError(msg)
    opened = open_node(data, 0)
    if opened is None:
        return change(data)
    node, children = opened
    changed = [map_leaves(child, change, depth=depth + 1) for child in children]
    return kinds.make(node, changed, (), torch.device("cpu"))


def _check_key(key: Any) -> Any:
    if key is None or isinstance(key, (str, bool, int)):
        return key
    msg = f"only text, integers, bools and None can be saved as keys, got {key!r} of type {type(key).__name__}"
    raise CheckpointError(msg)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        msg = f"this torch has no dtype {name!r}"
        raise CheckpointError(msg)
    return dtype


def _shape(shape: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in shape):
        msg = f"a shape must consist of integers of at least 0, got {shape!r}"
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
        "keys": [_check_key(key) for key in node.keys],
        "class": None if node.cls is None else _name_class(node.cls),
        "extra": list(node.extra),
        "children": [_encode_tree(child) for child in children],
    }


def _decode_tree(body: Any, path: tuple[Any, ...], lead: tuple[int, ...], unread: list[Leaf]) -> Any:
    """Return a tree; take its leaves from the front of `unread`, whose first dimensions are those of TensorDicts.

    Raises:
        CheckpointError: naming a field that does not fit.
    """
    if body is None:
        leaf = unread.pop(0) if unread else None
        if leaf is None or leaf.path != path or leaf.shape[: len(lead)] != lead:
            msg = f"the checkpoint's schema puts {leaf} at {path} under the batch size {list(lead)}: it is damaged"
            raise CheckpointError(msg)
        return None
    if body == {"kind": OBJECT}:
        return OBJECT
    if len(path) > _MAX_SAVED_DEPTH or body["kind"] not in _KINDS:
        msg = f"nesting is {len(path)} deep (at most {_MAX_SAVED_DEPTH}) or of an unknown kind {body['kind']!r}"
        raise CheckpointError(msg)
    if body["kind"] == "tensordict":
        require_tensordict("a checkpoint whose rows are TensorDicts", "save it again with rows that are dicts")
    keys, extra = tuple(map(_check_key, body["keys"])), _shape(body["extra"])
    if math.prod(extra) > _MAX_BATCH:
        msg = f"the checkpoint's schema has the batch size {list(extra)}: it is damaged"
        raise CheckpointError(msg)
    node, pairs = Node(body["kind"], keys, _find_class(body["class"]), extra), zip(keys, body["children"], strict=True)
    return node, tuple([_decode_tree(child, (*path, key), extra or lead, unread) for key, child in pairs])


_local_classes: WeakValueDictionary[str, type] = WeakValueDictionary()
"""Classes defined in functions whose rows were saved: no module has them."""


def _name_class(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in name:
        _local_classes[name] = cls
    return name


def _find_class(name: Any) -> type | None:
    """Return a class of a module that is already imported: reading a checkpoint must not execute code.

    A class defined in a function is the last one of its name whose rows this process has saved.
    """
    if name is None:
        return None
    module, _, qualname = str(name).partition(":")
    found: Any = _local_classes.get(str(name)) or sys.modules.get(module)
    for part in qualname.split(".") if not isinstance(found, type) else ():
        found = getattr(found, part, None)
    named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if not named and not (isinstance(found, type) and hasattr(found, "from_tensordict")):
        how = "it was defined in a function" if "<locals>" in str(name) else "import its module before loading"
        msg = f"the rows are of class {name}, which is not imported here: {how}"
        raise CheckpointError(msg)
    return found  # type: ignore[no-any-return]


def as_bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers if torch cannot index its dtype (unsigned integers, 8-bit floats); else return it."""
    dtype = tensor.dtype
    rare = dtype in {torch.uint16, torch.uint32, torch.uint64} or str(dtype).startswith("torch.float8")
    return tensor.view(_INTEGERS[dtype.itemsize]) if rare else tensor


def as_ordinary(tensor: Tensor) -> Tensor:
    """Return a normal tensor with the memory of an inference tensor (`torch.inference_mode`); others unchanged.

    Normal tensors can be modified in place in any mode. No copy.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def same_rows(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return bool `[n]`: whether row i is equal bit by bit in each pair of tensors (NaN equals itself)."""
    out: Tensor | None = None
    for one, other in zip(ones, others, strict=True):
        same = (_as_integers(one) == _as_integers(other)).flatten(1).all(1)
        out = same if out is None else out & same
    if out is None:
        msg = "there is nothing to compare"
        raise ValueError(msg)
    return out


def _as_integers(tensor: Tensor) -> Tensor:
    if tensor.dtype.itemsize == 16:  # complex128
        tensor = torch.view_as_real(tensor)
    return tensor.unsqueeze(-1).view(_INTEGERS[min(tensor.dtype.itemsize, 8)])


def turn_rows(rows: Tensor, seam: int) -> None:
    """Rotate rows `[n, ...]` in place: row `seam` becomes row 0, and the rows before it come last.

    Memory: a copy of the smaller part, and 2 MiB.
    """
    if not seam:
        return
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
