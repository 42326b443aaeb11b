"""Nested dicts of tensors and plain values in files: flattened to paths and nested again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ostinato.errors import KindError

if TYPE_CHECKING:
    from collections.abc import Mapping

TreePath: TypeAlias = "tuple[str, ...]"
MAX_DEPTH = 32


def show(path: TreePath) -> str:
    """Return a path for messages: `curr_obs.main_images`."""
    return ".".join(path)


def flatten(tree: Mapping[str, Any], *, where: object) -> dict[TreePath, Any]:
    """Return the values of nested dicts by their paths in order, including empty dicts.

    Raises:
        KindError: A key is not text, or dicts are nested more than 32 deep.
    """
    found: dict[TreePath, Any] = {}
    waiting: list[tuple[TreePath, Any]] = [((), tree)]
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, dict) or (path and not value):
            found[path] = value
            continue
        if len(path) >= MAX_DEPTH:
            msg = f"{where}: {show(path)[:80]} is nested more than {MAX_DEPTH} deep"
            raise KindError(msg)
        for key in value:
            if not isinstance(key, str):
                msg = (
                    f"{where}: the key {key!r:.80} in {show(path) or 'the root'} must be text, got {type(key).__name__}"
                )
                raise KindError(msg)
        waiting += [((*path, key), value[key]) for key in reversed(value)]
    return found


def nest(values: Mapping[TreePath, Any]) -> dict[str, Any]:
    """Return nested dicts: the inverse of `flatten`."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return root


def check_plain_value(value: object, where: object) -> None:
    """Check that files without pickle can hold a value.

    Raises:
        KindError: It is not None, text, a number, a bool, or a list, tuple or dict of these.
    """
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if item is None or isinstance(item, (str, bool, int, float)):
            continue
        if isinstance(item, (list, tuple)) and depth < MAX_DEPTH:
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, dict) and depth < MAX_DEPTH and all(isinstance(key, str) for key in item):
            waiting += [(part, depth + 1) for part in item.values()]
        else:
            msg = (
                f"{where} holds a {type(item).__name__}, which cannot be saved: tensors, numpy arrays, text, numbers, "
                "None, and lists and dicts of these can"
            )
            raise KindError(msg)
