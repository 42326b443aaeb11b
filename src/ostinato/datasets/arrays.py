"""Datasets in memory: a mapping of arrays, one row per step, with the ends of the episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ostinato.core.kinds import as_tensor, show_path
from ostinato.datasets.columns import TensorColumn
from ostinato.datasets.dataset import Contents
from ostinato.errors import EpisodesError, OptionError, SchemaError

if TYPE_CHECKING:
    from ostinato.core.rows import Path

__all__ = ["lengths_from_ends", "lengths_from_flags", "read_arrays"]

_FLAGS = ("done", "terminated", "truncated")


def read_arrays(source: Mapping[Any, Any], episode_ends: Any = None) -> Contents:
    """Return the contents of a mapping of arrays or tensors `[rows, *shape]`, nested mappings included. No copy.

    Args:
        source: fields by name. `episode_ends`, or `meta` with `episode_ends`, holds the ends if they are not given.
        episode_ends: integers, ascending: the number of rows up to the end of each episode, as in Diffusion Policy's
            Zarr files; the last one is the number of rows. None: from `source`, or from its flags `done`,
            `terminated` and `truncated`, under `next` or at the root.

    Raises:
        SchemaError: if the fields differ in their number of rows.
        EpisodesError: if the ends are missing or wrong.
    """
    tree = dict(source)
    meta = tree.get("meta")
    if episode_ends is None and "episode_ends" in tree:
        episode_ends = tree.pop("episode_ends")
    elif episode_ends is None and isinstance(meta, Mapping) and "episode_ends" in meta:
        episode_ends = meta["episode_ends"]
        del tree["meta"]
        tree |= tree.pop("data") if isinstance(tree.get("data"), Mapping) else {}
    columns: dict[Path, Tensor] = {}
    _collect(tree, (), columns)
    if not columns:
        msg = "the mapping has no array: give one array [rows, ...] for each field"
        raise SchemaError(msg)
    sizes = {path: value.shape[0] for path, value in columns.items()}
    rows = next(iter(sizes.values()))
    for path, size in sizes.items():
        if size != rows:
            msg = f"{show_path(path)} has {size} rows, {show_path(next(iter(sizes)))} has {rows}: all need the same"
            raise SchemaError(msg)
    lengths = lengths_from_flags(columns) if episode_ends is None else lengths_from_ends(episode_ends, rows)
    return Contents("arrays", {path: TensorColumn(value) for path, value in columns.items()}, lengths)


def _collect(tree: Mapping[Any, Any], path: Path, out: dict[Path, Tensor]) -> None:
    for key, value in tree.items():
        if not isinstance(key, str):
            msg = f"keys of a dataset are text, got {key!r} in {show_path(path)}"
            raise OptionError(msg)
        if isinstance(value, Mapping):
            _collect(value, (*path, key), out)
            continue
        tensor = as_tensor(value, (*path, key)).detach().cpu()
        if tensor.ndim == 0:
            msg = f"{show_path((*path, key))} is one number: a field has one value for each row"
            raise SchemaError(msg)
        out[*path, key] = tensor


def lengths_from_ends(ends: Any, rows: int, where: str = "episode_ends") -> Tensor:
    """Return the rows of each episode, int64 `[episodes]`, from the row after the last one of each episode.

    Raises:
        EpisodesError: if the ends are not integers, do not ascend from 1, or do not end at `rows`.
    """
    array = np.asarray(ends)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.shape[0]:
        msg = f"{where} must be integers [episodes], got {array.dtype}{list(array.shape)}"
        raise EpisodesError(msg)
    bounds = np.concatenate([[0], array.astype(np.int64)])
    wrong = np.flatnonzero(np.diff(bounds) <= 0)
    if wrong.shape[0]:
        at = int(wrong[0])
        msg = (
            f"{where} must ascend, one row or more for each episode: episode {at} would be the rows "
            f"[{bounds[at]}, {bounds[at + 1]})"
        )
        raise EpisodesError(msg)
    if int(bounds[-1]) != rows:
        msg = f"{where} ends at row {bounds[-1]}, the fields have {rows} rows: the last end is the number of rows"
        raise EpisodesError(msg)
    return torch.from_numpy(np.diff(bounds))


def lengths_from_flags(columns: Mapping[Path, Tensor]) -> Tensor:
    """Return the rows of each episode, int64 `[episodes]`, from flags; rows after the last flag are an episode, too.

    Raises:
        EpisodesError: if there are no flags.
    """
    for level in (("next",), ()):
        found = [columns[*level, name] for name in _FLAGS if (*level, name) in columns]
        if found:
            ends = torch.stack([flag.reshape(flag.shape[0], -1).any(1) for flag in found]).any(0)
            ends[-1:] = True
            at = ends.nonzero().flatten() + 1
            return at.diff(prepend=at.new_zeros(1))
    msg = (
        "nothing tells where episodes end: give episode_ends (the row after the last one of each episode), or one of "
        "the fields done, terminated, truncated"
    )
    raise EpisodesError(msg)
