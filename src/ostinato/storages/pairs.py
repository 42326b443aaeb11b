"""Which next fields a single-copy storage keeps as the field of the row that follows: `single_copy=`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ostinato.core.kinds import show_field, show_path
from ostinato.errors import OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ostinato.core.rows import Leaf, Path, Schema

__all__ = ["Pairs", "SingleCopy", "check_option", "find_pairs"]

SingleCopy: TypeAlias = "bool | Mapping[Any, Any]"
Pairs: TypeAlias = "tuple[tuple[int, int], ...]"
"""Positions of leaves: (next field, the field that it is one row later)."""

_NEVER = frozenset({"reward", "done", "terminated", "truncated"})
"""Fields of a transition, not of a state: `("next", "done")` says nothing of the `done` one row later."""
_PREFIX = "next_"


def check_option(single_copy: object) -> dict[Path, Path] | bool:
    """Return the option with its keys as paths.

    Raises:
        OptionError: if it is neither a bool nor a mapping of keys to keys.
    """
    if isinstance(single_copy, bool):
        return single_copy
    if not isinstance(single_copy, Mapping) or not single_copy:
        msg = (
            "single_copy must be True (find the pairs by their names), False, or a mapping of next keys to keys such "
            f"as {{'next_obs': 'obs'}}, got {single_copy!r}"
        )
        raise OptionError(msg)
    paths = {_path(key): _path(value) for key, value in single_copy.items()}
    clash = set(paths) & set(paths.values())
    if clash or len(set(paths.values())) < len(paths):
        msg = f"single_copy must name every field once, got {single_copy!r}: a field has one next field and is none"
        raise OptionError(msg)
    return paths


def find_pairs(schema: Schema, naming: Mapping[Path, Path] | None) -> Pairs:
    """Find the pairs of a schema, in its order.

    Args:
        schema: form of the rows.
        naming: paths of next fields -> paths; None looks for `("next", *path)` beside `path`, and for `next_x` beside
            `x`, with equal dtypes and shapes, flags and rewards left out.

    Raises:
        OptionError: if there is no pair, or a field that was named does not exist or has no bytes.
        SchemaError: if the fields of a pair that was named differ in dtype or shape.
    """
    at = {leaf.path: i for i, leaf in enumerate(schema.leaves)}
    if naming is None:
        found: dict[int, int] = {}
        for path, position in at.items():
            mate = at.get(_mate(path))
            if mate is not None and _alike(schema.leaves[position], schema.leaves[mate]) and mate not in found.values():
                found[position] = mate
        if not found:
            raise OptionError(_none_found(schema))
        return tuple(found.items())
    for path in (*naming, *naming.values()):
        if path not in at:
            known = ", ".join(show_path(leaf.path) for leaf in schema.leaves)
            msg = f"single_copy names the {show_field(path)}, but the fields are {known}"
            raise OptionError(msg)
    named = tuple((at[path], at[mate]) for path, mate in naming.items())
    for position, mate in named:
        _check_alike(schema.leaves[position], schema.leaves[mate])
    return tuple(sorted(named))


def _path(key: Hashable) -> Path:
    return key if isinstance(key, tuple) else (key,)


def _mate(path: Path) -> Path:
    """Return the path of the field that a next field would be one row later; `()`, which no pair has, if it is none."""
    if not path or path[-1] in _NEVER:
        return ()
    if len(path) > 1 and path[0] == "next":
        return path[1:]
    last = path[-1]
    if not isinstance(last, str) or not last.startswith(_PREFIX) or last.removeprefix(_PREFIX) in _NEVER:
        return ()
    return (*path[:-1], last.removeprefix(_PREFIX))


def _alike(one: Leaf, other: Leaf) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and one.nbytes > 0


def _check_alike(one: Leaf, other: Leaf) -> None:
    if one.dtype is not other.dtype or one.shape != other.shape:
        msg = f"single_copy pairs fields of one dtype and shape, got {one} and {other}"
        raise SchemaError(msg)
    if one.nbytes == 0:
        msg = f"single_copy pairs fields that take memory, got {one}: leave it out"
        raise OptionError(msg)


def _none_found(schema: Schema) -> str:
    known = "; ".join(map(str, schema.leaves))
    return (
        "single_copy=True finds no field that is another one of the next row: it looks for ('next', name) beside name, "
        f"and for next_name beside name, of one dtype and shape; the fields are [{known}]: name the pairs, such as "
        "single_copy={'next_obs': 'obs'}, or leave single_copy out"
    )
