"""Minari datasets, HDF5 or Arrow: observations have one row more than steps, so both observations are one array."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from ostinato._optional import require
from ostinato.datasets.columns import BlockColumn, MovedColumn, TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.minari_arrow import ArrowEpisodes
from ostinato.datasets.minari_hdf5 import Hdf5Episodes
from ostinato.datasets.stored import EitherColumn, StoredRows
from ostinato.errors import DamagedFileError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ostinato.core.rows import Path as Key
    from ostinato.datasets.columns import BlockSource, DatasetColumn
    from ostinato.datasets.open import Reading

__all__ = ["read_minari", "recognizes_minari"]


class Episodes(Protocol):
    """The files of the episodes, which differ between the formats of Minari."""

    lengths: np.ndarray[Any, np.dtype[np.int64]]
    """Steps of each episode, int64 `[episodes]`."""
    others: int
    """Episodes in the files beyond the number in the metadata."""

    def source(self, parts: Key, extra: int, space: Any = None) -> BlockSource:
        """Return a field, whose parts are keys of dicts (text) and positions in tuples (int).

        Args:
            parts: where the field is, such as `("observations", "camera")`.
            extra: 1 if it has one row more than steps, else 0.
            space: its space in Gymnasium; None for infos and numbers.
        """

    def texts(self, parts: Key, extra: int) -> list[str]:
        """Read all rows of a field of text."""

    def infos(self) -> tuple[dict[Key, int], list[str]]:
        """Return the infos that are arrays, with their extra rows, and a sentence for each of the others."""


class _Leaf(NamedTuple):
    parts: Key
    space: Any

    @property
    def path(self) -> tuple[str, ...]:
        """Keys in the dataset: the position in a tuple is a text."""
        return tuple(str(part) for part in self.parts)


def recognizes_minari(source: Any) -> bool:
    """Return whether a path is the folder of a Minari dataset, its `data` folder, or its HDF5 file."""
    return not isinstance(source, Path) or _data_folder(source) is not None


def _data_folder(path: Path) -> Path | None:
    folders = [path / "data", path] if path.is_dir() else [path.parent] if path.name == "main_data.hdf5" else []
    for folder in folders:
        try:
            metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(metadata, dict) and {"data_format", "total_episodes"} <= metadata.keys():
            return folder
    return None


def read_minari(source: Any, reading: Reading) -> Contents:
    """Return the contents of a Minari dataset.

    Args:
        source: path of its folder, or a `minari.MinariDataset`, whose filtered episodes are used.
        reading: how files are read.

    Raises:
        MissingExtraError: if Minari, or the library of the files, is not installed.
        DamagedFileError: if files are missing or disagree.
        SchemaError: if a space has no tensors.
    """
    if isinstance(source, Path):
        folder = _data_folder(source) or source
        metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
        spaces = [_space(metadata, name, folder) for name in ("observation_space", "action_space")]
        numbers: Sequence[int] = range(_count(metadata, folder))
    else:
        folder = Path(source.storage.data_path)
        metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
        spaces = [source.observation_space, source.action_space]
        numbers = [int(number) for number in source.episode_indices]
    if not numbers:
        msg = f"{folder} has no episodes: there is nothing to sample"
        raise SchemaError(msg)
    leaves = [list(_leaves(space, (top,))) for space, top in zip(spaces, ("observations", "actions"), strict=True)]
    episodes = _episodes(folder, metadata, numbers, [leaf.parts for leaf in (*leaves[0], *leaves[1])])
    contents = _contents(episodes, leaves[0], leaves[1], metadata, reading)
    total = int(contents.lengths.sum())
    if list(numbers) != list(range(metadata["total_episodes"])):
        return replace(contents, selection=f"episodes {list(numbers)}")
    if metadata.get("total_steps", total) != total:
        said = f"metadata.json says {metadata['total_steps']} steps; the episodes have {total}, all used."
        return replace(contents, assumptions=(*contents.assumptions, said))
    return contents


def _count(metadata: dict[str, Any], folder: Path) -> int:
    count = metadata["total_episodes"]
    if type(count) is not int or count < 0:
        msg = f"{folder / 'metadata.json'}: total_episodes must be a number of episodes, got {count!r}"
        raise DamagedFileError(msg)
    return count


def _space(metadata: dict[str, Any], name: str, folder: Path) -> Any:
    if name not in metadata:
        msg = (
            f"{folder / 'metadata.json'} has no {name}; it could only be found by making the environment, which runs "
            "code of others: open it with minari.load_dataset and pass the MinariDataset"
        )
        raise DamagedFileError(msg)
    try:
        return require("minari.serialization", "minari").deserialize_space(metadata[name])
    except (ValueError, KeyError, TypeError, AssertionError, NotImplementedError) as error:
        msg = f"{folder / 'metadata.json'}: {name} cannot be read: {error!r}"
        raise DamagedFileError(msg) from error


def _leaves(space: Any, parts: Key) -> Iterator[_Leaf]:
    kind = type(space).__name__
    if kind in {"Dict", "Tuple"}:
        for key, inner in space.spaces.items() if kind == "Dict" else enumerate(space.spaces):
            yield from _leaves(inner, (*parts, key))
    else:
        yield _Leaf(parts, space)


def _episodes(folder: Path, metadata: dict[str, Any], numbers: Any, fields: list[Key]) -> Episodes:
    kind = metadata["data_format"]
    if kind == "hdf5":
        return Hdf5Episodes(folder / "main_data.hdf5", numbers, _count(metadata, folder), fields)
    if kind in {"arrow", "parquet"}:
        return ArrowEpisodes(folder, numbers, _count(metadata, folder), kind)
    msg = f"{folder / 'metadata.json'}: data_format is {kind!r}, known are hdf5, arrow and parquet"
    raise DamagedFileError(msg)


def _contents(
    episodes: Episodes,
    observations: list[_Leaf],
    actions: list[_Leaf],
    metadata: dict[str, Any],
    reading: Reading,
) -> Contents:
    lengths = torch.from_numpy(episodes.lengths)
    ends, shifts = lengths.cumsum(0), torch.arange(lengths.shape[0], device="cpu")
    now, after = StoredRows(ends, shifts), StoredRows(ends, shifts, step=1)
    columns: dict[Key, DatasetColumn] = {}
    texts: dict[Key, TextColumn] = {}

    def add(parts: Key, rest: tuple[str, ...], extra: int, space: Any = None) -> None:
        places = [(rest, now), (("next", *rest), after)] if extra else [(rest, None)]
        if type(space).__name__ == "Text":
            values, codes = np.unique(np.array(episodes.texts(parts, extra), dtype=object), return_inverse=True)
            column: DatasetColumn = TensorColumn(torch.from_numpy(codes.astype(np.int64)))
            for path, move in places:
                texts[path] = TextColumn(values.tolist(), column if move is None else MovedColumn(column, move))
            return
        column = BlockColumn(episodes.source(parts, extra, space), reading.cache)
        columns.update({path: column if move is None else MovedColumn(column, move) for path, move in places})

    for leaf in observations:
        add(leaf.parts, ("observation", *leaf.path[1:]), 1, leaf.space)
    for leaf in actions:
        add(leaf.parts, ("action", *leaf.path[1:]), 0, leaf.space)
    for name, key in (("rewards", "reward"), ("terminations", "terminated"), ("truncations", "truncated")):
        columns["next", key] = BlockColumn(episodes.source((name,), 0), reading.cache)
    columns["next", "done"] = EitherColumn(columns["next", "terminated"], columns["next", "truncated"])
    infos, assumptions = episodes.infos()
    if episodes.others:
        assumptions.append(
            f"metadata.json has {metadata['total_episodes']} episodes; {episodes.others} more are left out."
        )
    for parts, extra in infos.items():
        add(("infos", *parts), ("info", *(str(part) for part in parts)), extra)
    return Contents(f"minari {metadata['data_format']}", columns, lengths, texts, None, metadata, tuple(assumptions))
