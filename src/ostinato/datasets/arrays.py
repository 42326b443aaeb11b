"""Datasets in memory: a mapping of arrays, one row per step, with the ends of the episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ostinato.core.kinds import as_tensor, show_path
from ostinato.core.options import number_of
from ostinato.datasets.checks import Place, usual_rows
from ostinato.datasets.columns import TensorColumn
from ostinato.datasets.dataset import Contents
from ostinato.errors import EpisodesError, OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.core.rows import Path
    from ostinato.datasets.examination import Examination

Array = np.ndarray[Any, Any]

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
    tree, episode_ends = _fields_and_ends(source, episode_ends)
    columns = {path: _tensor(path, value) for path, value in _leaves(tree)}
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


def _fields_and_ends(source: Mapping[Any, Any], ends: Any) -> tuple[dict[Any, Any], Any]:
    """Return the fields, and the ends of the episodes: those given, or those in the mapping, or None."""
    tree = dict(source)
    meta = tree.get("meta")
    if ends is None and "episode_ends" in tree:
        ends = tree.pop("episode_ends")
    elif ends is None and isinstance(meta, Mapping) and "episode_ends" in meta:
        ends = meta["episode_ends"]
        del tree["meta"]
        tree |= tree.pop("data") if isinstance(tree.get("data"), Mapping) else {}
    return tree, ends


def _leaves(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the paths and values of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _tensor(path: Path, value: Any) -> Tensor:
    wrong = [key for key in path if not isinstance(key, str)]
    if wrong:
        msg = f"keys of a dataset are text, got {wrong[0]!r} in {show_path(path)}"
        raise OptionError(msg)
    tensor = as_tensor(value, path).detach().cpu()
    if tensor.ndim == 0:
        msg = f"{show_path(path)} is one number: a field has one value for each row"
        raise SchemaError(msg)
    return tensor


def lengths_from_ends(ends: Any, rows: int, where: str = "episode_ends") -> Tensor:
    """Return the rows of each episode, int64 `[episodes]`, from the row after the last one of each episode.

    Raises:
        EpisodesError: if the ends are not integers, do not ascend from 1, or do not end at `rows`.
    """

    def fail(text: str, _: int | None) -> None:
        msg = f"{where} {text}"
        raise EpisodesError(msg)

    stops = _ascending(ends, rows, fail)
    return torch.from_numpy(np.diff(np.array(stops, np.int64), prepend=0))


def _ascending(ends: Any, rows: int, tell: Callable[[str, int | None], None]) -> list[int]:
    """Return the ends that ascend up to the number of rows; `tell` takes what is wrong with others, and the episode."""
    array = np.asarray(ends)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.shape[0]:
        tell(f"must be integers [episodes], got {array.dtype}{list(array.shape)}", None)
        return [rows]
    good = [0]
    for episode, end in enumerate(array.tolist()):
        if end <= good[-1]:
            rest = f"one row or more for each episode: episode {episode} would be the rows [{good[-1]}, {end})"
            tell(f"must ascend, {rest}", episode)
        elif end > rows:
            tell(f"ends at row {end}, the fields have {rows} rows: the last end is the number of rows", episode)
        else:
            good.append(end)
    if good[-1] < rows and int(array.max()) <= rows:
        tell(f"ends at row {good[-1]}, the fields have {rows} rows: the last end is the number of rows", None)
    return good[1:] or [rows]


def lengths_from_flags(columns: Mapping[Path, Tensor]) -> Tensor:
    """Return the rows of each episode, int64 `[episodes]`, from flags; rows after the last flag are an episode, too.

    Raises:
        EpisodesError: if there are no flags.
    """
    for level in (("next",), ()):
        found = [columns[*level, name] for name in _FLAGS if (*level, name) in columns]
        if found:
            return torch.from_numpy(np.diff(ends_of([flag.bool().numpy() for flag in found]), prepend=0))
    msg = (
        "nothing tells where episodes end: give episode_ends (the row after the last one of each episode), or one of "
        "the fields done, terminated, truncated"
    )
    raise EpisodesError(msg)


def ends_of(flags: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the row after the last one of each episode, int64 `[episodes]`; rows after the last flag are one, too.

    Args:
        flags: `[rows, ...]` each, of the same number of rows.
    """
    ends = np.logical_or.reduce([flag.reshape(flag.shape[0], -1).any(1) for flag in flags])
    ends[-1:] = True
    return np.flatnonzero(ends) + 1


# -- checks ------------------------------------------------------------------------------------------------------------


def examine_mapping(source: Mapping[Any, Any], episode_ends: Any, look: Examination) -> str:
    """Examine a mapping of arrays; arguments as those of `read_arrays`."""
    tree, ends = _fields_and_ends(source, episode_ends)
    arrays = {".".join(map(str, path)): _as_array(value) for path, value in _leaves(tree)}
    examine_arrays(arrays, _flagged(arrays) if ends is None else _as_array(ends), look)
    return "arrays"


def examine_arrays(arrays: Mapping[str, Any], ends: Any, look: Examination, where: str | None = None) -> None:
    """Examine arrays of NumPy or Zarr `[rows, ...]` by name.

    Args:
        arrays: the arrays.
        ends: the row after the last one of each episode; None if they are not known.
        look: the examination.
        where: name of the file of the ends.
    """
    used, rows = same_rows(arrays, look)
    if not used:
        look.add("field-missing", "there are no arrays of rows", Place(where))
        return
    place = Place(where, field="episode_ends")
    if ends is None:
        look.add("episode-bounds", "nothing tells where episodes end", place)
        stops = [rows]
    else:
        stops = _ascending(ends, rows, lambda text, at: look.add("episode-bounds", text, place._replace(episode=at)))
    look.whole(used, stops)


def same_rows(arrays: Mapping[str, Any], look: Examination, file: str | None = None) -> tuple[dict[str, Any], int]:
    """Return the arrays that have as many rows as most, and that number; the others become findings."""
    sizes = {name: array.shape[0] for name, array in arrays.items() if len(array.shape)}
    rows = usual_rows(sizes.values())
    for name, size in sizes.items():
        if size != rows:
            text = f"has {number_of(size, 'row')}, most arrays have {rows:,}"
            look.add("count-mismatch", text, Place(file, field=name))
    return {name: arrays[name] for name, size in sizes.items() if size == rows}, rows


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _flagged(arrays: Mapping[str, Any]) -> Any:
    """Return the ends of episodes by the flags of rows, None if there are none."""
    flags = [a for name, a in arrays.items() if name.rpartition(".")[2] in _FLAGS and a.ndim]
    return ends_of(flags) if len({len(flag) for flag in flags}) == 1 else None
