"""Rows of episodes in Parquet files: numbers of any shape, text and pictures, read when their rows are."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.datasets.cache import OpenHandles
from ostinato.datasets.checks import FirstFault, Place, WrongValueError, check_numbers
from ostinato.datasets.columns import BlockColumn
from ostinato.datasets.stored import decode_picture
from ostinato.errors import DamagedFileError, MissingFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.datasets.cache import BlockCache
    from ostinato.datasets.lerobot import Episodes
    from ostinato.datasets.video import VideoFiles

Ints = np.ndarray[Any, np.dtype[np.int64]]

_OPEN_FILES = 16
"""Most files that stay open. Opening one reads its footer: 40 us; milliseconds and megabytes for 1000 row groups."""


class ParquetTable(NamedTuple):
    """An open Parquet file."""

    parquet: Any
    bounds: Ints
    """First row of each row group, and the number of rows."""
    names: frozenset[str]

    def pieces(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the row groups of the rows `[first, stop)`: group, and the first and last row in it, half-open."""
        group = int(np.searchsorted(self.bounds, first, side="right")) - 1
        while first < stop:
            start, end = int(self.bounds[group]), int(self.bounds[group + 1])
            if end > first:
                yield group, first - start, min(stop, end) - start
                first = end
            group += 1

    def columns(self, names: Sequence[str], group: int) -> dict[str, Any]:
        """Read some columns of a row group as Arrow arrays."""
        table = self.parquet.read_row_group(group, columns=list(names), use_threads=False)
        return {name: table.column(name).combine_chunks() for name in names}


def open_table(path: Path) -> ParquetTable:
    """Open a Parquet file."""
    source = require("pyarrow", "lerobot").OSFile(str(path))
    parquet = require("pyarrow.parquet", "lerobot").ParquetFile(source)
    footer = parquet.metadata
    counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    return ParquetTable(parquet, np.array([0, *itertools.accumulate(counts)]), frozenset(parquet.schema_arrow.names))


def _close(file: ParquetTable) -> None:
    file.parquet.close(force=True)


class NumberField(NamedTuple):
    """A field of numbers, as a dataset describes it."""

    name: str
    """Of the column."""
    dtype: torch.dtype
    """Values of a wider kind of number are converted to it; integers must keep their value."""
    shape: tuple[int, ...] = ()
    """In one row; the column has lists, nested once for each dimension."""
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    """bool `[n]`: the values from 0 that occur, all others raise; None for any."""


class Announced:
    """A column that will be read; it is no longer among those pending when its read has ended, or was given up."""

    def __init__(self, name: str, pending: dict[int, str]) -> None:
        self._pending = pending
        pending[id(self)] = name

    def settle(self) -> None:
        """Remove the column from those pending."""
        self._pending.pop(id(self), None)

    def __del__(self) -> None:
        self.settle()


_CHECKED = {name: NumberField(name, torch.int64) for name in ("episode_index", "index")}


@final
class EpisodeFiles:
    """Parquet files that hold the rows of episodes one after the other, one or several episodes for each file.

    Every episode is checked when one of its rows is first read: the file has as many rows as its episodes together, and
    the columns `episode_index` and `index`, where the file has them, belong to this episode. Thread-safe.

    Args:
        episodes: where the rows of each episode lie. Episodes of a file are neighbours.
        indexed: whether `index` counts the rows of the dataset from 0; else it need only count up within an episode.
        said_by: the file that tells the lengths, for messages.
        cache: keeps what was read.

    Raises:
        DamagedFileError: if the episodes of a file are not neighbours.
    """

    def __init__(self, episodes: Episodes, *, indexed: bool, said_by: Path, cache: BlockCache) -> None:
        self.paths, self.file_of, self.numbers = episodes.tables, episodes.file_of, episodes.numbers
        self.cache, file_of, lengths = cache, episodes.file_of, episodes.lengths
        self.starts: Ints = np.concatenate([[0], np.cumsum(lengths)])
        """First row of each episode, and the number of rows: int64 `[episodes + 1]`."""
        first = np.concatenate([[0], np.flatnonzero(np.diff(file_of)) + 1])
        files, at = np.unique(file_of[first], return_index=True)
        if files.shape[0] != first.shape[0]:
            again = int(first[np.setdiff1d(np.arange(first.shape[0]), at)[0]])
            msg = (
                f"{said_by}: episode {self.numbers[again]} lies in {self.path_of(again)}, apart from the episodes "
                "before it there: the episodes of a file must follow each other"
            )
            raise DamagedFileError(msg)
        self._firsts = dict(zip(file_of[first].tolist(), first.tolist(), strict=True))
        self._stops = dict(zip(file_of[first].tolist(), [*first[1:].tolist(), len(file_of)], strict=True))
        self._indexed, self._said_by = indexed, said_by
        self._known = np.zeros(len(lengths), dtype=bool)
        self._handles: OpenHandles[ParquetTable] = OpenHandles(open_table, _close, _OPEN_FILES)
        self._fields = dict(_CHECKED)
        self._blocks: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._groups = cache.register()
        self._pending: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """All but the reads that are pending."""
        return {**self.__dict__, "_pending": {}}

    # -- what lies where -----------------------------------------------------------------------------------------------

    def episode_of(self, row: int) -> int:
        """Return the position of the episode that has a row."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def describe(self, row: int) -> str:
        """Name the episode and frame of a row, for messages."""
        episode = self.episode_of(row)
        return f"episode {self.numbers[episode]}, frame {row - self.starts[episode]}"

    def first_row(self, episode: int) -> int:
        """Return the row of the dataset that is the first one of the file of an episode."""
        return int(self.starts[self._firsts[int(self.file_of[episode])]])

    def path_of(self, episode: int) -> Path:
        """Return the file of an episode."""
        found: Path = self.paths[int(self.file_of[episode])]
        return found

    # -- reading -------------------------------------------------------------------------------------------------------

    def column(self, field: NumberField) -> BlockColumn:
        """Return a field of numbers as a column. Columns that are started together are read together."""
        self._fields[field.name] = field
        column = BlockColumn(_NumberBlocks(self, field), self.cache, self)
        self._blocks[field.name] = column.name
        self._names[column.name] = field.name
        return column

    def announce(self, name: int) -> Announced:
        """Expect that a column will be read, until what this returns is settled or dropped."""
        return Announced(self._names[name], self._pending)

    def load(self, episode: int, name: str) -> Tensor:
        """Read one column of an episode, `[rows, *shape]`. The columns announced now are read, too, into the cache.

        Raises:
            MissingFileError: if the file is missing.
            DamagedFileError: naming the file and the episode, if it cannot be read or has rows of another one.
        """
        others = set(self._pending.copy().values()) - {name}
        names = [name, *(other for other in others if (self._blocks[other], episode) not in self.cache)]
        found: dict[str, Tensor] = self.use(episode, lambda file: self._read(episode, file, names))
        for other in names[1:]:
            self.cache.put((self._blocks[other], episode), found[other])
        return found[name]

    def use(self, episode: int, action: Callable[[ParquetTable], Any]) -> Any:
        """Return `action(file)` of the file of an episode; see `load`."""
        path = self.path_of(episode)
        try:
            return self._handles.use(path, action)
        except DamagedFileError:
            raise
        except FileNotFoundError as error:
            msg = f"{path} is missing: it holds episode {self.numbers[episode]}; restore it, or choose other episodes"
            raise MissingFileError(msg) from error
        except (OSError, ValueError, TypeError, NotImplementedError) as error:  # those of pyarrow, too
            msg = (
                f"{path} cannot be read (episode {self.numbers[episode]}, frames "
                f"[0, {self.starts[episode + 1] - self.starts[episode]})): {error}"
            )
            raise DamagedFileError(msg) from error

    def _read(self, episode: int, file: ParquetTable, names: Sequence[str]) -> dict[str, Tensor]:
        """Read some columns of an episode from its open file, and check that they are rows of this episode."""
        if self._known[episode]:
            return self._rows(episode, file, names)
        self._check_count(episode, file)
        checked = [name for name in _CHECKED if name in file.names]
        found = self._rows(episode, file, list(dict.fromkeys([*names, *checked])))
        faults, place = FirstFault(self.path_of(episode)), Place(episode=int(self.numbers[episode]))
        if "episode_index" in found:
            check_numbers(found["episode_index"].numpy(), self.numbers[episode], "episode_index", place, faults)
        if "index" in found:
            numbers = found["index"].numpy()
            first = int(self.starts[episode]) if self._indexed else int(numbers[0])
            check_numbers(numbers, np.arange(first, first + numbers.shape[0]), "index", place, faults)
        self._known[episode] = True
        return found

    def check(self, episode: int, file: ParquetTable) -> None:
        """Raise `DamagedFileError` if the rows in an open file are not those of the episode."""
        if not self._known[episode]:
            self._read(episode, file, ())

    def _rows(self, episode: int, file: ParquetTable, names: Sequence[str]) -> dict[str, Tensor]:
        """Read some columns of an episode. Copy."""
        for name in names:
            self.raise_missing(name, file, episode)
        before = self.first_row(episode)
        first, stop = (int(row) - before for row in self.starts[episode : episode + 2])
        parts = []
        for group, start, end in file.pieces(first, stop):
            row = before + int(file.bounds[group])
            if end - start == file.bounds[group + 1] - file.bounds[group]:
                parts.append(self._decode(file.columns(names, group), row))
            else:
                whole = self._group(int(self.file_of[episode]), group, row, file, names)
                parts.append({name: whole[name][start:end].clone() for name in names})
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in names}

    def _group(self, at: int, group: int, row: int, file: ParquetTable, names: Sequence[str]) -> dict[str, Tensor]:
        """Return columns of a row group with rows of several episodes, which the cache keeps."""
        missing = [name for name in names if (self._groups, name, at, group) not in self.cache]
        found = self._decode(file.columns(missing, group), row) if missing else {}

        def load(name: str) -> Tensor:
            return found[name] if name in found else self._decode(file.columns([name], group), row)[name]

        return {name: self.cache.get((self._groups, name, at, group), partial(load, name)) for name in names}

    def _decode(self, arrays: dict[str, Any], row: int) -> dict[str, Tensor]:
        """Return the numbers of Arrow arrays whose first values are those of `row`."""
        out = {}
        for name, array in arrays.items():
            try:
                values = _numbers(array, self._fields[name])
            except WrongValueError as error:
                self.raise_wrong(name, row + error.row, str(error))
            out[name] = torch.from_numpy(values)
        return out

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def _check_count(self, episode: int, file: ParquetTable) -> None:
        at = int(self.file_of[episode])
        first, stop = self._firsts[at], self._stops[at]
        rows, found = int(self.starts[stop] - self.starts[first]), int(file.bounds[-1])
        if found != rows:
            which = f"episode {self.numbers[first]}"
            if stop > first + 1:
                which = f"its episodes {self.numbers[first]} to {self.numbers[stop - 1]}"
            msg = f"{self.paths[at]} has {found} rows, but {self._said_by} gives {rows} rows to {which}"
            raise DamagedFileError(msg)

    def raise_missing(self, name: str, file: ParquetTable, episode: int) -> None:
        """Raise `DamagedFileError` if a file lacks a column."""
        if name not in file.names:
            msg = (
                f"{self.path_of(episode)} (episode {self.numbers[episode]}) has no column {name!r}: it has "
                f"{', '.join(sorted(file.names))}"
            )
            raise DamagedFileError(msg)

    def raise_wrong(self, name: str, row: int, what: str) -> NoReturn:
        """Raise `DamagedFileError` for a value in a row of the dataset."""
        msg = f"{self.path_of(self.episode_of(row))}, column {name!r}, {self.describe(row)}: {what}"
        raise DamagedFileError(msg)

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        self._handles.close()


@final
class _NumberBlocks:
    """The numbers of one column, one block for each episode; see `BlockSource`."""

    def __init__(self, files: EpisodeFiles, field: NumberField) -> None:
        self._files, self._name = files, field.name
        self.dtype, self.shape = field.dtype, field.shape

    @property
    def starts(self) -> Ints:
        """First row of each episode, and the number of rows."""
        return self._files.starts

    def load(self, block: int) -> Tensor:
        """Read one episode, `[rows, *shape]`; see `BlockSource`."""
        return self._files.load(block, self._name)

    def close(self) -> None:
        """Close files."""
        self._files.close()


def _numbers(array: Any, field: NumberField) -> np.ndarray[Any, Any]:
    """Return an Arrow array of numbers, or of nested lists of them, as `[rows, *shape]`. Copy."""
    dtype = np.dtype(str(field.dtype).removeprefix("torch."))
    flat, each = flat_values(array, field.shape)
    values = _cast(flat.to_numpy(zero_copy_only=False), dtype, each).reshape(len(array), *field.shape)
    if field.allowed is not None:
        inside = (values >= 0) & (values < field.allowed.shape[0])
        wrong = np.flatnonzero(~(inside & field.allowed[np.where(inside, values, 0)]))
        if wrong.shape[0]:
            raise WrongValueError(int(wrong[0]), f"{values[wrong[0]]} is not the number of a task of the dataset")
    return values


def _cast(found: np.ndarray[Any, Any], dtype: np.dtype[Any], each: int) -> np.ndarray[Any, Any]:
    if found.dtype == dtype:
        return found.copy()
    kinds = found.dtype.kind + dtype.kind
    if kinds not in ("ff", "ii", "iu", "ui", "uu", "if", "uf"):
        raise WrongValueError(0, f"values are {found.dtype}, where {dtype} is described")
    out = found.astype(dtype)
    if kinds != "ff":
        changed = np.flatnonzero(out != found)
        if changed.shape[0]:
            raise WrongValueError(int(changed[0]) // each, f"{found[changed[0]]} does not fit {dtype}")
    return out


class _Bytes:
    """Values of different lengths in one column: text, or the files of pictures. Row groups are kept in the cache.

    Args:
        files: the files and the episodes in them.
        name: of the column: text or bytes, or a struct with the field `bytes`.
        kind: what the values are, for messages.
    """

    def __init__(self, files: EpisodeFiles, name: str, kind: str) -> None:
        self.files, self.name, self.kind = files, name, kind
        self.key = files.cache.register()

    def at(self, row: int, last: dict[tuple[int, int], Any]) -> bytes:
        """Return the bytes of a row. `last` holds the row group read last, empty at first."""
        episode = self.files.episode_of(row)
        at, before = int(self.files.file_of[episode]), self.files.first_row(episode)

        def find(file: ParquetTable) -> bytes:
            self.files.check(episode, file)
            group, start, _ = next(file.pieces(row - before, row - before + 1))
            if (at, group) not in last:
                read = partial(self._read, file, group, before + int(file.bounds[group]), episode)
                found = self.files.cache.get((self.key, at, group), read)
                last.clear()
                last[at, group] = found
            value: bytes = last[at, group][start].as_buffer().to_pybytes()
            return value

        found: bytes = self.files.use(episode, find)
        return found

    def _read(self, file: ParquetTable, group: int, row: int, episode: int) -> Any:
        """Return a row group as an Arrow array, whose first value is that of `row`."""
        self.files.raise_missing(self.name, file, episode)
        try:
            array = stored_bytes(file.columns([self.name], group)[self.name], self.kind)
        except WrongValueError as error:
            self.files.raise_wrong(self.name, row, str(error))
        if array.null_count:
            what = f"the row has no {self.kind} (null): values in files of their own are not read"
            self.files.raise_wrong(self.name, row + first_null(array), what)
        return array


@final
class TextBlocks:
    """A field of text in Parquet files, different in each row; see `TextColumn`. Thread-safe.

    Args:
        files: the files and the episodes in them.
        name: of the column.
    """

    def __init__(self, files: EpisodeFiles, name: str) -> None:
        self._values = _Bytes(files, name, "text")

    def read(self, rows: Tensor) -> np.ndarray[Any, Any]:
        """Return the texts of rows, an object array `[n]`."""
        wanted, places = np.unique(rows.numpy(), return_inverse=True)
        last: dict[tuple[int, int], Any] = {}
        found = np.empty(wanted.shape[0], dtype=object)
        for at, row in enumerate(wanted.tolist()):
            try:
                found[at] = self._values.at(row, last).decode()
            except UnicodeDecodeError as error:
                self._values.files.raise_wrong(self._values.name, row, f"the text is not UTF-8: {error}")
        texts: np.ndarray[Any, Any] = found[places]
        return texts


@final
class PictureColumn:
    """Pictures stored as PNG or JPEG files in a column of bytes, decoded when their rows are read. Thread-safe.

    Row groups of compressed pictures, and decoded ones, are kept in the cache.

    Args:
        files: the files and the episodes in them.
        name: of the column: bytes, or a struct with the field `bytes`.
        shape: `(C, H, W)` of the pictures, which are uint8.
        videos: its threads decode pictures, too.
    """

    dtype = torch.uint8

    def __init__(self, files: EpisodeFiles, name: str, shape: tuple[int, ...], videos: VideoFiles) -> None:
        self.shape, self._videos = shape, videos
        self._values = _Bytes(files, name, "picture")

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to decode rows; see `DatasetColumn`."""
        wanted, places = np.unique(rows.numpy(), return_inverse=True)
        out = torch.empty((wanted.shape[0], *self.shape), dtype=self.dtype, device="cpu")
        size = -(-wanted.shape[0] // self._videos.num_threads)
        jobs = [
            self._videos.submit(partial(self._fill, out[first : first + size], wanted[first : first + size].tolist()))
            for first in range(0, wanted.shape[0], size or 1)
        ]

        def read() -> Tensor:
            errors = [job.exception() for job in jobs]
            for error in errors:
                if error is not None:
                    raise error
            return out[torch.from_numpy(places)]

        return read

    def _fill(self, out: Tensor, rows: list[int]) -> None:
        """Decode neighbouring rows into a part of a batch."""
        last: dict[tuple[int, int], Any] = {}
        cache, key = self._values.files.cache, self._values.key
        for place, row in enumerate(rows):
            out[place] = cache.get((key, "row", row), partial(self._decode, row, last))

    def _decode(self, row: int, last: dict[tuple[int, int], Any]) -> Tensor:
        """Decode the picture of a row, uint8 `[C, H, W]`; `last` has the row group read last."""
        fail = partial(self._values.files.raise_wrong, self._values.name, row)
        try:
            pixels = decode_picture(self._values.at(row, last), "lerobot")
        except WrongValueError as error:
            fail(str(error))
        pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
        if pixels.dtype != np.uint8 or pixels.shape != (*self.shape[1:], self.shape[0]):
            what = f"the picture is {pixels.dtype} {list(pixels.shape)}, where uint8 [H, W, C] of {list(self.shape)}"
            fail(f"{what} [C, H, W] is described")
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def close(self) -> None:
        """Close files."""
        self._values.files.close()


_NAMES = {"float": "float32", "double": "float64", "halffloat": "float16", "large_string": "string"}


def leaf_type(kind: Any) -> str:
    """Return the name of the values of an Arrow type, those of lists included: "float32", "string", "struct"."""
    types = require("pyarrow.types", "lerobot")
    while _is_list(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        return "struct"
    if types.is_dictionary(kind):
        kind = kind.value_type
    return _NAMES.get(str(kind), str(kind))


def stored_bytes(array: Any, kind: str) -> Any:
    """Return an Arrow array of text or bytes, also from a dictionary or from structs with the field `bytes`.

    Raises:
        WrongValueError: if it has other values; `kind` says what they should be.
    """
    types = require("pyarrow.types", "lerobot")
    array = array.dictionary_decode() if types.is_dictionary(array.type) else getattr(array, "storage", array)
    if types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        array = array.field("bytes")
    if str(array.type) not in {"binary", "large_binary", "string", "large_string"}:
        raise WrongValueError(0, f"values are of type {array.type}, where {kind} is described")
    return array


def _is_list(kind: Any) -> bool:
    types = require("pyarrow.types", "lerobot")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def first_null(array: Any) -> int:
    """Return the first row of an Arrow array that has no value."""
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])


def flat_values(array: Any, shape: Sequence[int] | None = None) -> tuple[Any, int]:
    """Return the numbers in an Arrow array, or in nested lists of them, and how many each row has.

    Args:
        array: the array, or one of an extension type of matrices.
        shape: of a row, nested once for each dimension; None for that of the first row.

    Raises:
        WrongValueError: if there is no value, another number of values, or no numbers.
    """
    types, compute = require("pyarrow.types", "lerobot"), require("pyarrow.compute", "lerobot")
    left, each = list(shape or ()), 1
    while True:
        array = getattr(array, "storage", array)
        if array.null_count:
            raise WrongValueError(first_null(array) // each, "there is no value (null)", "value-null")
        if not _is_list(array.type):
            break
        counts = compute.list_value_length(array).to_numpy(zero_copy_only=False)
        size = int(counts[:1].sum()) if shape is None else left.pop(0) if left else 1
        wrong = np.flatnonzero(counts != size)
        if wrong.shape[0]:
            expected = f"those before have {size}" if shape is None else f"the shape {list(shape)} asks for {size}"
            what = f"a list of {counts[wrong[0]]} values, where {expected}"
            raise WrongValueError(int(wrong[0]) // max(each, 1), what, "shape-mismatch")
        array, each = array.flatten(), each * size
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        raise WrongValueError(0, f"values are of type {array.type}, not numbers")
    if int(np.prod(left, dtype=np.int64)) != 1:
        raise WrongValueError(0, f"{each} values, where the shape {list(shape or ())} is described", "shape-mismatch")
    return array, each


def to_array(column: Any) -> np.ndarray[Any, Any]:
    """Return an Arrow array of numbers, or of nested lists of them, as `[n, values]`.

    Raises:
        WrongValueError: see `flat_values`.
    """
    flat, each = flat_values(column)
    values: np.ndarray[Any, Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(column), each)
