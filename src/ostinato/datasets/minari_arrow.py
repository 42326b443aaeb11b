"""The Arrow and Parquet files of a Minari dataset: a folder for each episode, whose fields are padded to T + 1 rows."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ostinato._optional import require
from ostinato.datasets.cache import OpenHandles
from ostinato.datasets.checks import FirstFault, Place, WrongValueError, read_object
from ostinato.datasets.parquet import flat_values
from ostinato.datasets.stored import BLOCK_BYTES, Pieces, as_block, decode_jpegs, torch_dtype
from ostinato.durable.progress import PARTS, counted
from ostinato.errors import DamagedFileError, MissingFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.core.rows import Path as Key
    from ostinato.datasets.checks import Faults

_JPEG_ROWS = 8
"""Pictures that are decoded together."""
_SUFFIXES = {"arrow": (".arrow", ".feather", ".ipc"), "parquet": (".parquet",)}


class _Handle(NamedTuple):
    """The open files of one episode."""

    readers: list[Any]
    files: list[Any]


def arrow_files(folder: Path, kind: str) -> list[Path]:
    """Return the files of an episode in the order of its rows."""
    paths = [path for path in folder.iterdir() if path.suffix in _SUFFIXES[kind]] if folder.is_dir() else []
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.stem)])


def _open(folder: Path, kind: str) -> _Handle:
    pa = require("pyarrow", "minari")
    paths = arrow_files(folder, kind)
    if not paths:
        msg = f"{folder} has no {kind} file: the episode is missing"
        raise MissingFileError(msg)
    handle = _Handle([], [])
    try:
        for path in paths:
            handle.files.append(pa.memory_map(str(path)))
            opener = require("pyarrow.parquet", "minari").ParquetFile if kind == "parquet" else pa.ipc.open_file
            handle.readers.append(opener(handle.files[-1]))
    except (pa.ArrowException, OSError, ValueError) as error:
        _close(handle)
        msg = f"{folder}: its {kind} file cannot be read: {error}. Copy or download it again"
        raise DamagedFileError(msg) from error
    return handle


def _close(handle: _Handle) -> None:
    for file in handle.files:
        file.close()


def _schema(handle: _Handle) -> Any:
    reader = handle.readers[0]
    return reader.schema_arrow if hasattr(reader, "schema_arrow") else reader.schema


def _arrays(handle: _Handle, top: str) -> list[Any]:
    """Return the pieces of a column."""
    out: list[Any] = []
    for reader in handle.readers:
        if hasattr(reader, "schema_arrow"):
            out += reader.read(columns=[top]).column(top).chunks
        else:
            out += [reader.get_batch(i).column(top) for i in range(reader.num_record_batches)]
    return out


def arrow_columns(folder: Path, kind: str) -> dict[str, Any]:
    """Read all columns of an episode, those of structs by their path, as Arrow arrays.

    Raises:
        DamagedFileError: if there is no file, or it cannot be read.
    """
    pa = require("pyarrow", "minari")
    handle = _open(folder, kind)
    try:
        return dict(
            pair
            for field in _schema(handle)
            for pair in _leaves(field.name, pa.chunked_array(_arrays(handle, field.name), field.type).combine_chunks())
        )
    finally:
        _close(handle)


def _leaves(name: str, column: Any) -> Iterator[tuple[str, Any]]:
    """Yield a column, or those of a struct, by their path."""
    if not require("pyarrow.types", "minari").is_struct(column.type):
        yield name, column
        return
    for at in range(column.type.num_fields):
        yield from _leaves(f"{name}/{column.type.field(at).name}", column.field(at))


def _leaf_fields(name: str, field: Any) -> Iterator[tuple[str, Any]]:
    """Yield a field of a schema, or those of a struct, by their path."""
    if not require("pyarrow.types", "minari").is_struct(field.type):
        yield name, field
        return
    for at in range(field.type.num_fields):
        inner = field.type.field(at)
        yield from _leaf_fields(f"{name}/{inner.name}", inner)


@final
class ArrowEpisodes:
    """The episodes of a folder with a folder for each.

    Args:
        folder: folder of the dataset.
        numbers: episodes that are used.
        count: episodes of the whole dataset, as its metadata says.
        kind: "arrow" or "parquet".

    Raises:
        DamagedFileError: if the metadata of an episode is missing.
    """

    def __init__(self, folder: Path, numbers: Sequence[int], count: int, kind: str) -> None:
        self._folders = [folder / str(number) for number in numbers]
        self._kind = kind
        self.others = sum(path.name.isdigit() and int(path.name) >= count for path in folder.iterdir())
        """Episodes in the folder beyond the number in the metadata."""
        self._handles: OpenHandles[_Handle] = OpenHandles(partial(_open, kind=kind), _close)
        faults = FirstFault(folder)

        def steps(number: int) -> int:
            return declared_steps(folder, Place(f"{number}/metadata.json"), faults)

        self.lengths = np.array([steps(number) for number in counted(numbers, PARTS)], dtype=np.int64)
        """Steps of each episode, int64 `[episodes]`."""
        schema = self._handles.use(self._folders[0], _schema)
        self._fields = {name: found for field in schema for name, found in _leaf_fields(field.name, field)}

    def source(self, parts: Key, extra: int, space: Any = None) -> _ArrowSource:
        """Return a field, whose parts are keys of dicts (text) and positions in tuples (int)."""
        field = self._fields.get("/".join(map(str, parts)))
        if field is None:
            msg = f"{self._folders[0]} has no field {'/'.join(map(str, parts))}"
            raise DamagedFileError(msg)
        return _ArrowSource(self._handles, self._folders, self._kind, parts, field, self.lengths, extra, space)

    def texts(self, parts: Key, extra: int) -> list[str]:
        """Read all rows of a field of text.

        Raises:
            DamagedFileError: if an episode has no text there, or other rows.
        """
        out: list[str] = []
        for folder, length in counted(zip(self._folders, self.lengths, strict=True), PARTS):
            read = partial(_read, folder=folder, parts=parts, total=int(length) + 1, first=0, stop=int(length) + extra)
            found = self._handles.use(folder, read).to_pylist()
            if not all(isinstance(value, str) for value in found):
                msg = f"{folder}: {'/'.join(map(str, parts))} must be {length + extra} texts"
                raise DamagedFileError(msg)
            out += found
        return out

    def infos(self) -> tuple[dict[Key, int], list[str]]:
        """Return the infos that are arrays, with their extra rows, and a sentence for each of the others."""
        found: dict[Key, int] = {}
        said: list[str] = []
        for name, field in self._fields.items():
            if not name.startswith("infos/"):
                continue
            if _number_type(field.type) is None:
                said.append(f"{name} does not hold numbers ({field.type}), and is left out.")
            else:
                found[tuple(name.split("/")[1:])] = 1
        return found, said


def declared_steps(root: Path, place: Place, faults: Faults) -> int:
    """Return the steps of an episode that its metadata gives; 0 if it gives none."""
    found = read_object(root, place, faults)
    steps = None if found is None else found.get("total_steps")
    if type(steps) is int and steps > 0:
        return steps
    if found is not None:
        faults.add("metadata-invalid", f"total_steps must be an integer of at least 1, got {steps!r}", place)
    return 0


def _number_type(kind: Any) -> np.dtype[Any] | None:
    """Return the dtype of numbers, or of fixed-size lists of them; None for others."""
    types = require("pyarrow.types", "minari")
    if types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        found: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return found
    return None


def _read(handle: _Handle, folder: Path, parts: Key, total: int, first: int, stop: int) -> Any:
    """Return rows of a field as an Arrow array.

    Raises:
        DamagedFileError: if the episode has other rows, lacks the field, or cannot be read.
    """
    pa = require("pyarrow", "minari")
    name = "/".join(map(str, parts))
    try:
        arrays = _arrays(handle, str(parts[0]))
        for part in parts[1:]:
            arrays = [array.field(str(part)) for array in arrays]
        rows = sum(map(len, arrays))
        if rows != total:
            msg = f"{folder}: {name} has {rows} rows, but metadata.json says {total - 1} steps, which need {total}"
            raise DamagedFileError(msg)
        return (arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)).slice(first, stop - first)
    except (pa.ArrowException, OSError, KeyError) as error:
        msg = f"{folder}: {name} cannot be read: {error}. Copy or download the episode again"
        raise DamagedFileError(msg) from error


@final
class _ArrowSource:
    """A field of all episodes. A `BlockSource`; blocks end with episodes."""

    def __init__(
        self,
        handles: OpenHandles[_Handle],
        folders: list[Path],
        kind: str,
        parts: Key,
        field: Any,
        lengths: np.ndarray[Any, Any],
        extra: int,
        space: Any,
    ) -> None:
        self._handles, self._folders, self._parts = handles, folders, parts
        self._totals = lengths + 1
        found = _number_type(field.type)
        self._is_jpeg = found is None and space is not None and space.dtype == np.uint8
        self.shape = tuple(space.shape) if space is not None else _info_shape(field)
        self._numpy_dtype: np.dtype[Any] = np.dtype(np.uint8) if self._is_jpeg else found or np.dtype(object)
        self.dtype = torch_dtype(self._numpy_dtype, f"{folders[0]}: {'/'.join(map(str, parts))}")
        row_bytes = self._numpy_dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        block_bytes = _JPEG_ROWS * row_bytes if self._is_jpeg else 1 << 62 if kind == "parquet" else BLOCK_BYTES
        self._pieces = Pieces(lengths + extra, row_bytes, None, block_bytes)
        self.starts = self._pieces.starts

    def load(self, block: int) -> Tensor:
        """Read one block.

        Raises:
            DamagedFileError: naming the folder of the episode.
        """
        piece, first, stop = self._pieces.locate(block)
        folder, total = self._folders[piece], int(self._totals[piece])

        def read(handle: _Handle) -> np.ndarray[Any, Any]:
            array = _read(handle, folder, self._parts, total, first, stop)
            return self._numbers(array, f"{folder}, {'/'.join(map(str, self._parts))}, row {first} and following")

        return as_block(self._handles.use(folder, read))

    def _numbers(self, array: Any, place: str) -> np.ndarray[Any, Any]:
        """Return a copy of an Arrow array, whose memory is that of the file."""
        if self._is_jpeg and not array.null_count:
            return decode_jpegs(array.to_pylist(), place, self.shape)
        try:
            flat, _ = flat_values(array, (math.prod(self.shape),) if self.shape else ())
        except WrongValueError as error:
            msg = f"{place}: {error}"
            raise DamagedFileError(msg) from error
        numbers: np.ndarray[Any, Any] = flat.to_numpy(zero_copy_only=False)
        if numbers.dtype != self._numpy_dtype:
            msg = f"{place}: rows are {array.type}, those of the first episode are {self._numpy_dtype}"
            raise DamagedFileError(msg)
        return np.array(numbers.reshape(len(array), *self.shape))

    def close(self) -> None:
        """Close files; the next read opens them again."""
        self._handles.close()


def _info_shape(field: Any) -> tuple[int, ...]:
    """Return the shape of a row: Minari writes that of arrays beside the field."""
    if not hasattr(field.type, "list_size"):
        return ()
    if field.metadata and b"shape" in field.metadata:
        return tuple(int(number) for number in field.metadata[b"shape"].split(b",") if number)
    return (int(field.type.list_size),)
