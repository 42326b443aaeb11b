"""The parts of a batch of an ensemble: they are put together, and their rows named."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers.options import leaves_by_path
from ostinato.buffers.sampling import INFO
from ostinato.core import kinds
from ostinato.errors import KindError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def with_source(batch: Any, path: tuple[str, ...], ids: Tensor) -> Any:
    """Return a batch with the member of each row in a field of its own.

    Raises:
        KindError: if the batch has no fields, or other rows than its parts.
        SchemaError: if it has this field already.
    """
    if not kinds.is_mapping(batch):
        msg = f"source_key={kinds.show_path(path)} needs batches with fields, got {type(batch).__name__}: leave it out"
        raise KindError(msg)
    if kinds.find_field(batch, path) is not None:
        msg = f"rows have the field {kinds.show_path(path)} already: give another source_key"
        raise SchemaError(msg)
    if isinstance(batch, dict):
        return kinds.with_fields(batch, {path: ids})
    if batch.batch_size[: ids.ndim] != ids.shape:  # the caller's collate_fn has put the parts end to end
        ids = ids.reshape(-1)
    kinds.put(batch, {path if len(path) > 1 else path[0]: ids}, ids.ndim)
    return batch


def join_parts(parts: Sequence[Any], members: Sequence[int], *, flatten: bool) -> Any:
    """Put the parts of a batch, of these members, end to end with `flatten`, else side by side.

    Raises:
        KindError: if they do not fit together; names the fields that differ, and says how to rename them.
    """
    try:
        return kinds.concatenate(parts) if flatten else kinds.stack_parts(parts)
    except (KindError, SchemaError) as error:
        how = "concatenated end to end" if flatten else "stacked"
        reason = _differences(parts, members) or f"they are of type {type(parts[0]).__name__} ({error})"
        msg = f"the parts of a batch cannot be {how}: {reason}, or give the ensemble a collate_fn, such as list"
        raise KindError(msg) from error


def _differences(parts: Sequence[Any], members: Sequence[int]) -> str:
    """Return how parts differ in kind, fields or shapes, and what to do about it; empty if they do not."""
    named = [isinstance(part, dict) or kinds.is_tensordict(part) for part in parts]
    types = {i: type(part).__name__ for i, part in zip(members, parts, strict=True)}
    if any(named) and len({isinstance(part, dict) for part in parts}) > 1:
        said = ", ".join(f"member {i} gives rows as {name}" for i, name in types.items())
        return f"{said}: make them alike, datasets with open_dataset(path, tensordict=True)"
    if not all(named):
        return ""
    fields = {i: leaves_by_path(part) for i, part in zip(members, parts, strict=True)}
    every = set.intersection(*(set(mine) for mine in fields.values()))
    extra = {i: sorted(set(fields[i]) - every, key=str) for i in sorted(fields) if set(fields[i]) - every}
    if extra:
        said = "; ".join(f"member {i} has also {', '.join(map(kinds.show_path, more))}" for i, more in extra.items())
        return (
            f"their fields differ: {said}. Give them the same names with {_renaming(extra)}, or for a dataset "
            "open_dataset(path, fields={new: old, ...}); or select the fields that all members have with SelectFields "
            "or fields=, write the other fields as well"
        )
    for path in sorted(every, key=str):
        shapes = {i: list(getattr(mine[path], "shape", ())[1:]) for i, mine in fields.items()}
        if len({str(shape) for shape in shapes.values()}) > 1:
            said = ", ".join(f"{shape} in member {i}" for i, shape in shapes.items())
            return f"rows of {kinds.show_path(path)} are {said}. Give them one shape with a transform of the member"
    return ""


def _renaming(extra: dict[int, list[tuple[Any, ...]]]) -> str:
    """Return the transform that renames fields of a member as a later one calls them, if they end in the same key."""
    for i, j in combinations(extra, 2):
        mine, theirs = ({path[-1]: path for path in extra[member]} for member in (i, j))
        names = {path: theirs[key] for key, path in mine.items() if key in theirs}
        if names:
            said = ", ".join(f"{kinds.show_path(old)}: {kinds.show_path(new)}" for old, new in names.items())
            return f"transform=RenameFields({{{said}}}) in member {i}"
    return "transform=RenameFields({old: new}) in a member"


def without_names(data: Any) -> Any:
    """Return the rows of a member without the keys that buffers of TensorDicts add: they name no rows of the batch."""
    found = [key for key in INFO if key in data.keys()] if kinds.is_tensordict(data) else []  # noqa: SIM118 (rows)
    return data.exclude(*found) if found else data


def put_names(batch: Any, names: dict[Any, Tensor]) -> None:
    """Put the keys that name rows into a TensorDict, unless a `collate_fn` has made something else of the rows."""
    ids = names["index", "buffer_ids"]
    lead = ids.shape if batch.batch_size[: ids.ndim] == ids.shape else torch.Size([ids.numel()])
    if batch.batch_size[: len(lead)] == lead:
        shaped = {key: value.reshape(*lead, *value.shape[ids.ndim :]) for key, value in names.items()}
        plain = {key: value for key, value in shaped.items() if isinstance(key, str) or key[0] == "index"}
        kinds.put(batch, plain, len(lead))


def show_names(names: dict[Any, Tensor], *, as_tensordict: bool) -> Any:
    """Nest the keys that name rows: `{"index": {"index", "buffer_ids"}, ...}`."""
    ids = names["index", "buffer_ids"]
    kind = "tensordict" if as_tensordict else "dict"

    def nest(values: dict[str, Any]) -> Any:
        return kinds.make(kinds.Node(kind, tuple(values)), list(values.values()), tuple(ids.shape), ids.device)

    inner = nest({"index": names["index", "index"], "buffer_ids": ids})
    whole = nest({"index": inner, **{key: value for key, value in names.items() if isinstance(key, str)}})
    nested = {key: value for key, value in names.items() if isinstance(key, tuple) and key[0] != "index"}
    return kinds.with_fields(whole, nested) if as_tensordict else {**whole, **nested}
