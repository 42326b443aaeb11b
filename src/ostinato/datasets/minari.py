"""Minari datasets, HDF5 or Arrow: observations have one row more than steps, so both observations are one array."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets.checks import (
    READ_ERRORS,
    FirstFault,
    Place,
    WrongValueError,
    check_fields,
    first_line,
    read_object,
    usual_rows,
)
from ostinato.datasets.columns import BlockColumn, MovedColumn, TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.examination import Pictures
from ostinato.datasets.format import Format
from ostinato.datasets.hdf5 import Hdf5File, Hdf5Source, datasets_of, describe
from ostinato.datasets.minari_arrow import ArrowEpisodes, arrow_columns, arrow_files, declared_steps
from ostinato.datasets.minari_writer import WRITE
from ostinato.datasets.parquet import to_array
from ostinato.datasets.stored import StoredRows, decode_jpegs, decode_picture
from ostinato.errors import DamagedFileError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ostinato.core.rows import Path as Key
    from ostinato.datasets.columns import BlockSource, DatasetColumn
    from ostinato.datasets.examination import Examination
    from ostinato.datasets.format import Reading

_HDF5 = "main_data.hdf5"
_SPACE_ERRORS: tuple[type[Exception], ...] = (AssertionError, *READ_ERRORS)
_FLAGS = {"rewards": "reward", "terminations": "terminated", "truncations": "truncated"}
_JPEG_ROWS = 8
"""Pictures that are decoded together."""
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
    except _SPACE_ERRORS as error:
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


# -- the file of HDF5 --------------------------------------------------------------------------------------------------


@final
class Hdf5Episodes:
    """The episodes of `main_data.hdf5`.

    Args:
        path: the file.
        numbers: episodes that are used.
        count: episodes of the whole dataset, as its metadata says.
        fields: observations and actions that each episode must have.

    Raises:
        DamagedFileError: if an episode is missing, or lacks a field.
    """

    def __init__(self, path: Path, numbers: Sequence[int], count: int, fields: Sequence[Key]) -> None:
        if not path.is_file():
            msg = f"{path} is missing: metadata.json says that the dataset is in HDF5"
            raise DamagedFileError(msg)
        self._file = Hdf5File(path)
        self._groups = [f"episode_{number}" for number in numbers]
        self._names: dict[str, set[str]] = {group: set() for group in self._groups}
        self.others = 0
        """Episodes in the file beyond the number in the metadata."""
        for name in self._file.names():
            group, _, rest = name.partition("/")
            self.others += not rest and group.startswith("episode_") and group[8:].isdigit() and int(group[8:]) >= count
            if group in self._names:
                self._names[group].add(rest)
        required = sorted({*_FLAGS, *map(_name, fields)})
        for number, (group, names) in enumerate(self._names.items()):
            check_fields(names, required, "the episode", Place(group, number), FirstFault(path))
        self.lengths = self._file.row_counts([f"{group}/rewards" for group in self._groups])
        """Steps of each episode, int64 `[episodes]`."""
        wrong = np.flatnonzero(self.lengths < 1)
        if wrong.shape[0]:
            msg = f"{path}: {self._groups[wrong[0]]} has no steps: its dataset rewards must have one row or more"
            raise DamagedFileError(msg)

    def source(self, parts: Key, extra: int, space: Any = None) -> Hdf5Source:
        """Return a field, whose parts are keys of dicts (text) and positions in tuples (int)."""
        name, lengths = _name(parts), self.lengths + extra
        if space is not None and getattr(space, "dtype", None) == np.uint8 and len(space.shape) > 1:
            stored = describe(self._file, f"{self._groups[0]}/{name}")
            if stored.dtype.hasobject or (stored.shape[1:] != space.shape and len(stored.shape) == 2):
                shape, size = tuple(space.shape), int(np.prod(space.shape))
                return Hdf5Source(
                    self._file,
                    self._groups,
                    name,
                    lengths,
                    decode=partial(decode_jpegs, shape=shape),
                    form=(np.dtype(np.uint8), shape),
                    block_bytes=_JPEG_ROWS * size,
                )
        return Hdf5Source(self._file, self._groups, name, lengths)

    def texts(self, parts: Key, extra: int) -> list[str]:
        """Read all rows of a field of text.

        Raises:
            DamagedFileError: if an episode has no text there, or other rows.
        """
        h5py = require("h5py", "minari")
        out: list[str] = []
        for group, length in zip(self._groups, self.lengths, strict=True):
            name = f"{group}/{_name(parts)}"
            found = self._file.use(partial(_read_texts, h5py, name))
            if found is None or len(found) != length + extra:
                had = "no texts" if found is None else f"{len(found)} texts"
                msg = f"{self._file}, {name} must be {length + extra} texts, there are {had}"
                raise DamagedFileError(msg)
            out += found
        return out

    def infos(self) -> tuple[dict[Key, int], list[str]]:
        """Return the infos that are arrays, with their extra rows, and a sentence for each of the others."""
        counts = Counter(name for names in self._names.values() for name in names if name.startswith("infos/"))
        groups = {name.rpartition("/")[0] for name in counts}
        first = self._names[self._groups[0]]
        found: dict[Key, int] = {}
        said: list[str] = []
        for name in sorted(counts.keys() - groups):
            if counts[name] != len(self._groups):
                said.append(f"{name} is in {counts[name]} of {len(self._groups)} episodes, and is left out.")
            elif name in first:
                reason = self._is_left_out(name, found)
                said += [] if reason is None else [f"{name} {reason}, and is left out."]
        return found, said

    def _is_left_out(self, name: str, found: dict[Key, int]) -> str | None:
        """Add a field of infos to `found`, or return the reason why it cannot be read by rows."""
        place = f"{self._groups[0]}/{name}"
        rows = int(self._file.row_counts([place])[0])
        if rows not in {self.lengths[0], self.lengths[0] + 1}:
            return "does not have one row per step"
        kind = describe(self._file, place).dtype
        if kind.kind not in "biuf":
            return f"does not hold numbers ({kind})"
        parts = tuple(int(p[7:]) if _is_position(p) else p for p in name.split("/")[1:])
        found[parts] = rows - int(self.lengths[0])
        return None


def _is_position(part: str) -> bool:
    return part.startswith("_index_") and part[7:].isdigit()


def _name(parts: Key) -> str:
    return "/".join(f"_index_{part}" if isinstance(part, int) else str(part) for part in parts)


def _read_texts(h5py: Any, name: str, group: Any) -> list[str] | None:
    found = group[name]
    if not isinstance(found, h5py.Dataset) or h5py.check_string_dtype(found.dtype) is None:
        return None
    try:
        return list(found.asstr()[()])
    except (OSError, UnicodeDecodeError):
        return None


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

    def check(self) -> None:
        """Examine metadata and episodes."""
        look, place = self._look, Place(f"{self._prefix}metadata.json")
        metadata = read_object(self._root, place, look) or {}
        for name in ("observation", "action"):
            with contextlib.suppress(DamagedFileError):  # opening the dataset tells it
                for leaf in _leaves(_space(metadata, f"{name}_space", self._data), (f"{name}s",)):
                    if type(leaf.space).__name__ == "Box":
                        look.shapes[_name(leaf.parts)] = tuple(leaf.space.shape)
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
            shape = self._look.shapes.get(name)
            fits = shape is not None and values.shape[1] == np.prod(shape, dtype=np.int64)
            arrays[name] = values.reshape(-1, *(shape or ())) if fits else values
        about = Place(f"{self._prefix}{folder.name}/metadata.json", place.episode)
        return arrays, declared_steps(self._root, about, self._look) or None

    # -- one episode ---------------------------------------------------------------------------------------------------

    def _episode(self, arrays: dict[str, Any], declared: int | None, place: Place) -> None:
        steps = self._steps(arrays, declared, place)
        self._look.episode(place.episode or 0, arrays, steps, place.file)
        self._look.pictures()

    def _steps(self, arrays: dict[str, Any], declared: int | None, place: Place) -> int:
        """Check that all fields of an episode are there and belong together; return its steps."""
        check_fields(arrays, _NEEDED, "the episode", place, self._look)
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
