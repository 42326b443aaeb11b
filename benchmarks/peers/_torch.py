"""Numpy rows as torch tensors, in a dict or in a TensorDict."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.data import Rows


def as_kind(rows: Rows, kind: str) -> Any:
    """Return the rows as a dict of tensors where `kind` is `dict`, else as a TensorDict."""
    tensors = {key: torch.from_numpy(value.copy()) for key, value in rows.items()}
    if kind == "dict":
        return tensors
    batch = next(iter(tensors.values())).shape[:1]
    return import_module("tensordict").TensorDict(tensors, batch_size=batch)


def as_item(rows: Rows, kind: str) -> Any:
    """Return the first row without batch dimension, as a dict of tensors or a TensorDict."""
    if kind != "dict":
        return as_kind(rows, kind)[0].clone()
    return {key: torch.from_numpy(value.copy())[0].clone() for key, value in rows.items()}
