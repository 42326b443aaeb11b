"""Python objects of storages: copied when they are written, and turned into what files hold.

Files hold text, plain values, trees of tensors, and, if that is allowed, pickles.
"""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.rows import describe, map_leaves
from ostinato.core.state import decode_schema, encode_schema
from ostinato.durable import decode, encode
from ostinato.durable.manifest import canonical, parse_json
from ostinato.errors import CheckpointError, DamagedFileError, OstinatoError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["owned", "pack", "pack_column", "unpack", "unpack_column"]


def owned(row: Any) -> Any:
    """Copy the tensors and arrays of a row: callers reuse theirs, and a view would keep a whole batch alive.

    The copies are ordinary tensors, detached, also where the rows are written in inference mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return map_leaves(row, _own_leaf)
    return map_leaves(row, _own_leaf)


def _own_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) or kinds.is_tensor_collection(leaf):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def pack(row: Any, *, allow_pickle: bool) -> dict[str, Any]:
    """Turn a row into values that `durable` can write.

    Raises:
        CheckpointError: if it is no tensor, array, TensorDict or plain value, and pickling is not allowed.
    """
    if kinds.is_tensor_collection(row):
        try:
            return _pack_tree(row, allow_pickle=allow_pickle)
        except OstinatoError as error:
            if not allow_pickle:
                msg = (
                    f"a row cannot be saved: {kinds.reason_of(error)}, which is saved only as a pickle: make the "
                    "storage with allow_pickle=True"
                )
                raise CheckpointError(msg) from error
            return {"form": "pickle", "bytes": pickle.dumps(row)}
    try:
        encode(row, store=lambda *_: "state:0")
    except CheckpointError as error:
        if not allow_pickle:
            msg = f"{error}; or make the storage with allow_pickle=True"
            raise CheckpointError(msg) from error
        return {"form": "pickle", "bytes": pickle.dumps(row)}
    return {"form": "plain", "value": row}


def _pack_tree(row: Any, *, allow_pickle: bool) -> dict[str, Any]:
    schema = describe(row, 0, bare=True)
    flat = schema.flatten(row, (), 0)
    packed = {"form": "tree", "schema": encode_schema(schema), "leaves": flat.leaves}
    if not schema.objects:
        return packed
    columns = [values.reshape(-1).tolist() for values in flat.objects]
    return {**packed, "objects": [[pack(v, allow_pickle=allow_pickle) for v in values] for values in columns]}


def unpack(saved: dict[str, Any], *, allow_pickle: bool) -> Any:
    """Turn what `pack` made into a row again.

    Raises:
        CheckpointError: if it is a pickle and unpickling is not allowed.
    """
    form = saved.get("form")
    if form == "plain":
        return saved["value"]
    if form == "tree":
        schema = decode_schema(saved["schema"])
        objects = _unpack_objects(schema, saved, allow_pickle=allow_pickle)
        leaves = schema.flatten(_nest(schema, saved["leaves"], objects), (), 0, exact=True).leaves
        return schema.build(leaves, (), _device(leaves), objects)
    if form == "pickle":
        if not allow_pickle:
            msg = (
                "the checkpoint holds pickled objects, and unpickling runs code: if you trust it, load into "
                "a storage made with allow_pickle=True"
            )
            raise CheckpointError(msg)
        return pickle.loads(saved["bytes"])  # noqa: S301 (asked for by name, off by default)
    msg = f"the checkpoint holds an object of an unknown form {form!r}"
    raise CheckpointError(msg)


def _unpack_objects(schema: Any, saved: dict[str, Any], *, allow_pickle: bool) -> list[np.ndarray[Any, Any]]:
    columns = saved.get("objects", [])
    out = []
    for leaf, packed in zip(schema.objects, columns, strict=True):
        values = [unpack(value, allow_pickle=allow_pickle) for value in packed]
        out.append(np.fromiter(values, dtype=object, count=len(values)).reshape(leaf.shape))
    return out


def _device(leaves: list[Tensor]) -> torch.device:
    return leaves[0].device if leaves else torch.device("cpu")


def _nest(schema: Any, leaves: list[Any], objects: list[np.ndarray[Any, Any]]) -> Any:
    if len(leaves) != len(schema.leaves):
        msg = f"the checkpoint holds {len(leaves)} tensors for {len(schema.leaves)} fields"
        raise CheckpointError(msg)
    return schema.build(leaves, (), _device(leaves), objects)


def pack_column(name: str, values: Sequence[Any], *, allow_pickle: bool) -> tuple[str, Tensor, Tensor]:
    """Turn a column of objects into two arrays: the bytes of all values, and where each value ends.

    Returns:
        "text" (each value is UTF-8) or "json" (each value is JSON), uint8 `[bytes]`, and int64 `[values]`.

    Raises:
        CheckpointError: naming the column, if a value is no text or plain value, and pickling is not allowed.
    """
    form, parts = "text", _as_text(values)
    if parts is None:
        form, parts = "json", list[bytes]()
        for i, value in enumerate(values):
            try:
                parts.append(canonical(encode(pack(value, allow_pickle=allow_pickle))))
            except CheckpointError as error:
                msg = f"value {i} of the column {name[:200]!r} cannot be saved: {error}"
                raise CheckpointError(msg) from error
    ends = torch.tensor([len(part) for part in parts], dtype=torch.int64, device="cpu").cumsum(0)
    whole = bytearray(b"".join(parts))
    text = torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8, device="cpu")
    return form, text, ends


def _as_text(values: Sequence[Any]) -> list[bytes] | None:
    """Return values as UTF-8; None if one is no text, or holds surrogates, which UTF-8 does not know."""
    if not {str}.issuperset(map(type, values)):
        return None
    try:
        return [value.encode("utf-8") for value in values]
    except UnicodeEncodeError:
        return None


def unpack_column(name: str, form: object, text: Tensor, ends: Tensor, *, allow_pickle: bool) -> list[Any]:
    """Turn what `pack_column` made into objects again.

    Raises:
        DamagedFileError: if the arrays do not fit each other, or hold something else.
        CheckpointError: if there are pickles, and unpickling is not allowed.
    """
    sound = text.dtype is torch.uint8 and ends.dtype is torch.int64 and text.ndim == ends.ndim == 1
    stops = [0, *ends.tolist()] if sound else []
    sound = sound and stops[-1] == text.shape[0] and all(a <= b for a, b in itertools.pairwise(stops))
    if not sound or form not in {"text", "json"}:
        msg = f"the column {name[:200]!r} of the checkpoint does not hold {ends.shape[0]} values: it is damaged"
        raise DamagedFileError(msg)
    whole = text.numpy().tobytes()
    parts = [whole[a:b] for a, b in itertools.pairwise(stops)]
    if form == "text":
        try:
            return [part.decode("utf-8") for part in parts]
        except UnicodeDecodeError as error:
            msg = f"the column {name[:200]!r} of the checkpoint is damaged: {error}"
            raise DamagedFileError(msg) from error
    where = f"column {name[:200]!r}"
    return [unpack(decode(parse_json(part, where), where=where), allow_pickle=allow_pickle) for part in parts]
