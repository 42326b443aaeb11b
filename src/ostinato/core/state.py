"""Schemas as JSON values and back: paths with any plain key, classes by name, never by import."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.kinds import Node
from ostinato.core.rows import OBJECT, Leaf, Schema
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["decode_schema", "encode_schema"]

_KINDS = ("dict", "list", "tuple", "namedtuple", "tensordict", "tensorclass")
_MAX_DEPTH = 32
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
    if depth > _MAX_DEPTH or body["kind"] not in _KINDS:
        msg = f"nesting is {depth} deep (at most {_MAX_DEPTH}) or of an unknown kind {body['kind']!r}"
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
