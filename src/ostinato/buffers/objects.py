"""Python objects of list storages on their way to disk and back: plain values, trees, and, if allowed, pickles."""

from __future__ import annotations

import pickle
from typing import Any

from ostinato.core import kinds
from ostinato.core.rows import describe
from ostinato.core.state import decode_schema, encode_schema
from ostinato.durable import encode
from ostinato.errors import CheckpointError, KindError

__all__ = ["pack", "unpack"]


def pack(row: Any, *, allow_pickle: bool) -> dict[str, Any]:
    """Turn a row into values that `durable` can write.

    Raises:
        CheckpointError: if it is no tensor, array, TensorDict or plain value, and pickling is not allowed.
    """
    try:
        if kinds.is_tensor_collection(row):
            schema = describe(row, 0)
            return {"form": "tree", "schema": encode_schema(schema), "leaves": schema.flatten(row, (), 0).leaves}
        encode(row, store=lambda *_: "state:0")
    except (CheckpointError, KindError) as error:
        if not allow_pickle:
            instead = ", which is saved only as a pickle:" if isinstance(error, KindError) else "; or"
            msg = f"{kinds.reason_of(error)}{instead} make the storage with ListStorage(allow_pickle=True)"
            raise CheckpointError(msg) from error
        return {"form": "pickle", "bytes": pickle.dumps(row)}
    return {"form": "plain", "value": row}


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
        leaves = schema.flatten(_nest(schema, saved["leaves"]), (), 0, exact=True).leaves
        return schema.build(leaves, (), leaves[0].device)
    if form == "pickle":
        if not allow_pickle:
            msg = (
                "the checkpoint holds pickled objects, and unpickling runs code: if you trust it, load into "
                "ListStorage(allow_pickle=True)"
            )
            raise CheckpointError(msg)
        return pickle.loads(saved["bytes"])  # noqa: S301 (asked for by name, off by default)
    msg = f"the checkpoint holds an object of an unknown form {form!r}"
    raise CheckpointError(msg)


def _nest(schema: Any, leaves: list[Any]) -> Any:
    if len(leaves) != len(schema.leaves):
        msg = f"the checkpoint holds {len(leaves)} tensors for {len(schema.leaves)} fields"
        raise CheckpointError(msg)
    return schema.build(leaves, (), leaves[0].device)
