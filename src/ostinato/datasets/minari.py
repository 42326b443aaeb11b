"""Minari datasets, HDF5 or Arrow: observations have one row more than steps, so both observations are one array."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets.checks import READ_ERRORS, Place, WrongValueError, first_line, read_object, usual_rows
from ostinato.datasets.columns import BlockColumn, MovedColumn, TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.examination import Pictures
from ostinato.datasets.format import Format
from ostinato.datasets.hdf5 import datasets_of
from ostinato.datasets.minari_arrow import ArrowEpisodes, arrow_columns, arrow_files, declared_steps
from ostinato.datasets.minari_hdf5 import Hdf5Episodes
from ostinato.datasets.minari_writer import WRITE
from ostinato.datasets.parquet import to_array
from ostinato.datasets.stored import StoredRows, decode_picture
from ostinato.errors import DamagedFileError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ostinato.core.rows import Path as Key
    from ostinato.datasets.columns import BlockSource, DatasetColumn
    from ostinato.datasets.examination import Examination
    from ostinato.datasets.format import Reading

_HDF5 = "main_data.hdf5"
_FLAGS = {"rewards": "reward", "terminations": "terminated", "truncations": "truncated"}
_STEPS = ("actions", *_FLAGS)
_NEEDED = ("observations", *_STEPS)


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
    folders = [path / "data", path] if path.is_dir() else [path.parent] if path.name == _HDF5 else []
    for folder in folders:
        try:
            metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(metadata, dict) and {"data_format", "total_episodes"} <= metadata.keys():
            return folder
    return None


def resembles_minari(path: Path) -> bool:
    """Return whether a path is the folder of a Minari dataset whose description may be damaged or missing."""
    inside = path / "data" if (path / "data").is_dir() else path
    if (inside / _HDF5).exists():
        return True
    return (inside / "metadata.json").is_file() and bool(_folders(inside))


def _folders(inside: Path) -> list[Path]:
    """Return the folders of episodes, of Arrow and Parquet, in their order."""
    return sorted((p for p in inside.iterdir() if p.name.isdigit() and p.is_dir()), key=lambda p: int(p.name))


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
        return Hdf5Episodes(folder / _HDF5, numbers, _count(metadata, folder), fields)
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
                texts[path] = TextColumn(values.tolist(), MovedColumn(column, move))
            return
        column = BlockColumn(episodes.source(parts, extra, space), reading.cache)
        columns.update({path: column if move is None else MovedColumn(column, move) for path, move in places})

    for leaf in observations:
        add(leaf.parts, ("observation", *leaf.path[1:]), 1, leaf.space)
    for leaf in actions:
        add(leaf.parts, ("action", *leaf.path[1:]), 0, leaf.space)
    for name, key in _FLAGS.items():
        columns["next", key] = BlockColumn(episodes.source((name,), 0), reading.cache)
    columns["next", "done"] = MovedColumn(columns["next", "terminated"], None, columns["next", "truncated"])
    infos, assumptions = episodes.infos()
    if episodes.others:
        assumptions.append(
            f"metadata.json has {metadata['total_episodes']} episodes; {episodes.others} more are left out."
        )
    for parts, extra in infos.items():
        add(("infos", *parts), ("info", *(str(part) for part in parts)), extra)
    return Contents(f"minari {metadata['data_format']}", columns, lengths, texts, None, metadata, tuple(assumptions))


# -- checks ------------------------------------------------------------------------------------------------------------


def examine_minari(path: Path, look: Examination) -> str:
    """Examine the folder of a dataset, the one with `data/` or the one with `metadata.json`."""
    _Examined(path, look).check()
    return "minari"


_Read = tuple[dict[str, Any], int | None]
"""Arrays of an episode, and the steps that it should have."""


@final
class _Examined:
    """Examines a dataset."""

    def __init__(self, path: Path, look: Examination) -> None:
        self._root = path
        self._data = path / "data" if (path / "data").is_dir() else path
        self._prefix = "data/" if (path / "data").is_dir() else ""
        self._look = look
        self._complete = True
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self) -> None:
        """Examine metadata and episodes."""
        look, place = self._look, Place(f"{self._prefix}metadata.json")
        metadata = read_object(self._root, place, look) or {}
        for name in ("observation", "action"):
            self._shapes |= _shapes_of(_parsed(metadata.get(f"{name}_space")), f"{name}s")
        with contextlib.ExitStack() as stack:
            found = self._groups(stack) if (self._data / _HDF5).exists() else self._tables()
            look.expect(len(found))
            gap = next((at for at, (number, _, _) in enumerate(found) if at != number), None)
            if gap is not None:
                text = f"episode {gap} is missing: the next one is {found[gap][0]}"
                look.add("episode-bounds", text, Place(self._prefix, gap))
            for at, (_, file, read) in enumerate(found):
                where = Place(self._prefix + file, at)
                try:
                    self._episode(*read(where), where)
                except READ_ERRORS as error:
                    check = "file-missing" if isinstance(error, FileNotFoundError) else "file-unreadable"
                    look.add(check, first_line(error), where)
                    self._complete = False
        for key, count in {"total_episodes": len(found), "total_steps": look.total}.items():
            if metadata and self._complete and metadata.get(key) != count:
                text = f"{key} is {metadata.get(key)!r}, the data has {count:,}"
                look.add("count-mismatch", text, place._replace(field=key))

    # -- files ---------------------------------------------------------------------------------------------------------

    def _groups(self, stack: contextlib.ExitStack) -> list[tuple[int, str, Callable[[Place], _Read]]]:
        """Return the numbers of the episodes of the HDF5 file, the place of each, and what reads it."""
        file = stack.enter_context(require("h5py", "minari").File(self._data / _HDF5, "r"))
        numbers = sorted(int(name[8:]) for name in file if name.startswith("episode_") and name[8:].isdigit())
        return [(n, f"{_HDF5}/episode_{n}", partial(_read_group, file, f"episode_{n}")) for n in numbers]

    def _tables(self) -> list[tuple[int, str, Callable[[Place], _Read]]]:
        """Return the numbers of the episodes in folders, the table of each, and what reads it."""
        found: list[tuple[int, str, Callable[[Place], _Read]]] = []
        for folder in _folders(self._data):
            kind = "parquet" if arrow_files(folder, "parquet") else "arrow"
            first = "".join(f"/{path.name}" for path in arrow_files(folder, kind)[:1])
            found.append((int(folder.name), f"{folder.name}{first}", partial(self._read_table, folder, kind)))
        return found

    def _read_table(self, folder: Path, kind: str, place: Place) -> _Read:
        """Read an episode; the columns of steps lose the last row, which is padding."""
        arrays: dict[str, Any] = {}
        for name, column in arrow_columns(folder, kind).items():
            used = column[:-1] if name.partition("/")[0] in _STEPS else column
            if name == "episode_id" or str(column.type) in {"binary", "large_binary", "string", "null"}:
                if "binary" in str(column.type):
                    arrays[name] = Pictures(used, lambda picture: _decoded(picture.as_py()))
                continue
            try:
                values = to_array(used)
            except WrongValueError as error:
                self._look.add(error.check, str(error), place._replace(frame=error.row, field=name))
                continue
            if not len(values):
                continue
            shape = self._shapes.get(name)
            fits = shape is not None and values.shape[1] == np.prod(shape, dtype=np.int64)
            arrays[name] = values.reshape(-1, *(shape or ())) if fits else values
        about = Place(f"{self._prefix}{folder.name}/metadata.json", place.episode)
        return arrays, declared_steps(self._root, about, self._look) or None

    # -- one episode ---------------------------------------------------------------------------------------------------

    def _episode(self, arrays: dict[str, Any], declared: int | None, place: Place) -> None:
        look = self._look
        steps = self._steps(arrays, declared, place)
        for name, array in arrays.items():
            shape = self._shapes.get(name)
            if shape is not None and not isinstance(array, Pictures) and tuple(array.shape[1:]) != shape:
                text = f"rows are {list(array.shape[1:])}, the space says {list(shape)}"
                look.add("shape-mismatch", text, place._replace(field=name))
        look.episode(place.episode or 0, arrays, steps, place.file)
        look.pictures()

    def _steps(self, arrays: dict[str, Any], declared: int | None, place: Place) -> int:
        """Check that all fields of an episode are there and belong together; return its steps."""
        for name in _NEEDED:
            if not any(key == name or key.startswith(f"{name}/") for key in arrays):
                self._look.add("field-missing", "the episode lacks it", place._replace(field=name))
        sizes = {name: len(array) for name, array in arrays.items()}
        steps = usual_rows(size for name, size in sizes.items() if name.partition("/")[0] in _STEPS)
        for name, size in sizes.items():
            part = name.partition("/")[0]
            expected = steps if part in _STEPS else steps + 1
            if size != expected and part in _NEEDED:
                text = f"has {number_of(size, 'row')}, {expected} expected for {number_of(steps, 'step')}"
                self._look.add("episode-length", text, place._replace(field=name))
        if declared is not None and declared != steps:
            text = f"total_steps is {declared}, the arrays have {number_of(steps, 'step')}"
            self._look.add("episode-length", text, place._replace(field="total_steps"))
        return steps


def _read_group(file: Any, name: str, _: Place) -> _Read:
    """Read the arrays of an episode, which stay in the open file."""
    arrays = {k: a for k, a in datasets_of(file[name]).items() if a.ndim}
    declared = file[name].attrs.get("total_steps")
    found = {k: Pictures(a, _decoded) if _holds_jpeg(a) else a for k, a in arrays.items()}
    return found, None if declared is None else int(declared)


def _parsed(space: Any) -> Any:
    """Return a space, which Minari writes as a text of JSON; None if it is something else."""
    try:
        return json.loads(space) if isinstance(space, str) else None
    except (ValueError, RecursionError):
        return None


def _shapes_of(space: Any, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the boxes in a space by the names of their arrays."""
    if not isinstance(space, dict):
        return {}
    inner = space.get("subspaces")
    if isinstance(inner, dict):
        return {key: shape for part in inner for key, shape in _shapes_of(inner[part], f"{name}/{part}").items()}
    shape = space.get("shape")
    if space.get("type") != "Box" or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
        return {}
    return {name: tuple(shape)}


def _decoded(picture: Any) -> Any:
    """Return a JPEG, its bytes in an array or as `bytes`, as a picture."""
    return decode_picture(picture if isinstance(picture, bytes) else picture.tobytes(), "minari")


def _holds_jpeg(array: Any) -> bool:
    """Whether an array of HDF5 holds a JPEG in each row."""
    kind = array.dtype
    if array.ndim > 2 or not len(array) or (kind.kind != "O" and kind != np.uint8):
        return False
    first = array[0]
    return isinstance(first, np.ndarray) and first.dtype == np.uint8 and first[:2].tobytes() == b"\xff\xd8"


FORMAT = Format(
    "Minari",
    recognizes_minari,
    read_minari,
    objects=("minari.MinariDataset",),
    examine=examine_minari,
    resembles=resembles_minari,
    root=lambda path: path.parent if path.is_file() else path,
    write=WRITE,
)
