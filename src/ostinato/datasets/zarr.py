"""Zarr replay buffers as Diffusion Policy writes them: arrays in `data`, and the ends of episodes in `meta`."""

from __future__ import annotations

import json
import os
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from ostinato._optional import require
from ostinato.datasets.arrays import examine_arrays, lengths_from_ends
from ostinato.datasets.cache import OpenHandles
from ostinato.datasets.checks import READ_ERRORS, Place, first_line
from ostinato.datasets.columns import BlockColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.examination import is_picture
from ostinato.datasets.format import Format
from ostinato.datasets.stored import Pieces, as_block, last_rows, name_rows, torch_dtype
from ostinato.datasets.values import role_of
from ostinato.durable.progress import PARTS, counted
from ostinato.errors import DamagedFileError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ostinato.core.rows import Path as Key
    from ostinato.datasets.checks import Severity
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.examination import Examination
    from ostinato.datasets.format import Reading

_ENDS = "meta/episode_ends"
_SMALL = 16
"""Numbers of an array of `meta` that is read as a plain value."""
_BLOSC_HEADER = 16
"""Bytes before those that Blosc compressed; the last four are the length of the whole."""
_FILES = (".zarray", "zarr.json")


def recognizes_zarr(source: Any) -> bool:
    """Return whether a path or an object is a Zarr group, in a folder or a zip archive. Does not raise."""
    if not isinstance(source, Path):
        return True
    if source.is_dir():
        return any((source / name).exists() for name in (".zgroup", "zarr.json", _ENDS))
    if ".zarr" in source.name and source.suffix == ".zip":
        return True
    try:
        with zipfile.ZipFile(source) as archive:
            return any(f"{_ENDS}/{name}" in archive.NameToInfo for name in _FILES)
    except (OSError, zipfile.BadZipFile):
        return False


def resembles_zarr(path: Path) -> bool:
    """Return whether a path may be a Zarr group whose description is damaged."""
    inner = ("data/.zgroup", "data/zarr.json")
    return recognizes_zarr(path) or path.suffix == ".zip" or any((path / name).exists() for name in inner)


@final
class _Handle:
    """An open group, and the archive that it is in. Arrays are looked up once: Zarr needs milliseconds for it."""

    def __init__(self, group: Any, store: Any = None) -> None:
        self.group, self.store = group, store
        self._arrays: dict[str, Any] = {}

    def array(self, name: str) -> Any:
        """Return an array."""
        if name not in self._arrays:
            self._arrays[name] = self.group[name]
        return self._arrays[name]


def _open(path: Path, inner: str) -> _Handle:
    zarr = require("zarr", "zarr")
    try:
        store = zarr.storage.ZipStore(str(path), mode="r") if path.is_file() else None
        options = {} if zarr.__version__.startswith("2.") else {"use_consolidated": False}
        group = zarr.open_group(str(path) if store is None else store, mode="r", **options)
        return _Handle(group[inner] if inner else group, store)
    except READ_ERRORS as error:
        msg = f"{path} cannot be opened as Zarr: {error}. Copy or download it again"
        raise DamagedFileError(msg) from error


def _close(handle: _Handle) -> None:
    if handle.store is not None:
        handle.store.close()


@final
class _Root:
    """A Zarr group: of a path, which is opened where it is read, or an object whose store is elsewhere.

    Args:
        path: folder or zip archive; None for another store.
        inner: path of the group in it.
        group: the group of another store.
    """

    def __init__(self, path: Path | None, inner: str = "", group: Any = None) -> None:
        self._path, self._inner = path, inner.strip("/")
        self._object = None if group is None else _Handle(group)
        self._handles: OpenHandles[_Handle] = OpenHandles(partial(_open, inner=self._inner), _close)

    def __str__(self) -> str:
        """The path, and the group if it is not the root."""
        place = str(self._path) if self._object is None else str(self._object.group)
        return f"{place}:{self._inner}" if self._inner else place

    @classmethod
    def find(cls, source: Any) -> _Root:
        """Return the group of a path or of a `zarr.Group`; one in a folder or archive is opened again."""
        if isinstance(source, Path):
            return cls(source)
        store = source.store
        place = getattr(store, "root", None) or getattr(store, "path", None)
        if place is not None and type(store).__name__ in {
            "LocalStore",
            "DirectoryStore",
            "NestedDirectoryStore",
            "ZipStore",
        }:
            return cls(Path(place).absolute(), source.path)
        return cls(None, group=source)

    def use(self, action: Callable[[_Handle], Any]) -> Any:
        """Return `action(handle)`."""
        if self._object is not None:
            return action(self._object)
        return self._handles.use(cast("Path", self._path), action)

    def arrays(self) -> list[str]:
        """Return the names of all arrays, such as `data/img`.

        Raises:
            DamagedFileError: if a description is not JSON, or the archive is damaged.
            SchemaError: if an array holds Python objects. Its description is read before Zarr opens it, which may load
                such objects.
        """
        if self._path is None:
            return sorted(self.use(lambda handle: list(_names(handle.group, ""))))
        found = []
        for name, text in _descriptions(self._path, self._inner):
            place = f"{self._path}: {name}"
            if b"pickle" in text.lower():
                msg = f"{place} holds pickled Python objects, which are never loaded: store numbers"
                raise SchemaError(msg)
            try:
                description = json.loads(text)
            except ValueError as error:
                msg = f"{place}: its description is not JSON: {error}"
                raise DamagedFileError(msg) from error
            if isinstance(description, dict) and description.get("node_type", "array") == "array":
                found.append(name)
        return sorted(found)

    def file(self, key: str) -> Path | None:
        """Return the path of a key of the store; None if it is not in a folder."""
        return None if self._path is None or self._path.is_file() else self._path / key

    def close(self) -> None:
        """Close files; the next read opens them again."""
        self._handles.close()


def _names(group: Any, prefix: str) -> Iterator[str]:
    for name, _ in group.arrays():
        yield f"{prefix}{name}"
    for name, inner in group.groups():
        yield from _names(inner, f"{prefix}{name}/")


def _descriptions(path: Path, inner: str) -> Iterator[tuple[str, bytes]]:
    """Return the name and description of each array, and of groups of Zarr 3; folders of chunks are not listed."""
    if path.is_file():
        start = f"{inner}/" if inner else ""
        try:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    head, _, tail = name.rpartition("/")
                    if tail in _FILES and head.startswith(start):
                        yield head[len(start) :], archive.read(name)
        except READ_ERRORS as error:
            msg = f"{path} is not a whole zip archive: {error}. Copy or download it again"
            raise DamagedFileError(msg) from error
        return
    for folder, folders, files in counted(os.walk(path / inner), PARTS):
        for name in _FILES:
            if name in files:
                text = (Path(folder) / name).read_bytes()
                if name == ".zarray" or b'"array"' in text:
                    folders.clear()
                yield Path(folder).relative_to(path / inner).as_posix(), text


def read_zarr(source: Any, reading: Reading) -> Contents:
    """Return the contents of a Zarr replay buffer.

    Args:
        source: path of the folder or of the zip archive, or a `zarr.Group`.
        reading: how files are read.

    Raises:
        DamagedFileError: if arrays are missing, or differ in their number of rows.
        EpisodesError: if `meta/episode_ends` does not ascend to the number of rows.
        SchemaError: if an array does not hold numbers.
    """
    root = _Root.find(source)
    names = root.arrays()
    fields = [name for name in names if name.startswith("data/")]
    if _ENDS not in names or not fields:
        what = "no array in data" if fields == [] and _ENDS in names else f"no {_ENDS}"
        msg = f"{root} has {what}: a replay buffer has arrays in data, and {_ENDS}; it has {', '.join(names) or 'none'}"
        raise DamagedFileError(msg)
    ends = _read(root, _ENDS, slice(None), "")
    stops = np.asarray(ends).astype(np.int64, copy=False)
    sources = [ZarrSource(root, name, stops) for name in fields]
    rows = sources[0].rows
    for found in sources:
        if found.rows != rows:
            msg = f"{root}: {found.name} has {found.rows} rows, {sources[0].name} has {rows}: all need the same"
            raise DamagedFileError(msg)
    lengths = lengths_from_ends(ends, rows, f"{root}: {_ENDS}")
    columns: dict[Key, DatasetColumn] = {
        tuple(found.name.split("/")[1:]): BlockColumn(found, reading.cache) for found in sources
    }
    said = [text for found in sources if (text := found.missing_chunks()) is not None]
    if ("done",) not in columns:
        columns["done",] = last_rows(lengths)
        said.append("The format does not tell terminated from truncated episodes: done is the last row of each.")
    metadata = _metadata(root, [name for name in names if name.startswith("meta/") and name != _ENDS])
    return Contents("zarr", columns, lengths, {}, None, metadata, tuple(said))


def _metadata(root: _Root, names: list[str]) -> dict[str, Any]:
    sizes: list[int] = root.use(lambda handle: [handle.array(name).size for name in names])
    small = [name for name, size in zip(names, sizes, strict=True) if size <= _SMALL]
    return {name.partition("/")[2]: _read(root, name, (), "").tolist() for name in small}


def _read(root: _Root, name: str, rows: Any, place: str) -> np.ndarray[Any, Any]:
    """Return rows of an array.

    Raises:
        DamagedFileError: if they cannot be read; `place` names them.
    """
    try:
        found: np.ndarray[Any, Any] = np.asarray(root.use(lambda handle: handle.array(name)[rows]))
    except DamagedFileError:
        raise
    except READ_ERRORS as error:
        msg = f"{root}: {name} cannot be read{place}: {error}. Copy or download it again"
        raise DamagedFileError(msg) from error
    return found


@final
class ZarrSource:
    """An array of a Zarr replay buffer. A `BlockSource`, whose blocks are the chunks.

    Args:
        root: the group.
        name: name of the array in it.
        stops: row after the last one of each episode, for errors.

    Raises:
        DamagedFileError: if the array cannot be opened.
        SchemaError: if it does not hold numbers.
    """

    def __init__(self, root: _Root, name: str, stops: np.ndarray[Any, Any]) -> None:
        self._root, self._stops = root, stops
        self.name = name
        """Name of the array, such as `data/img`."""
        try:
            dtype, shape, self._chunks, codecs = root.use(lambda handle: _describe(handle.array(name)))
        except READ_ERRORS as error:
            msg = (
                f"{root}: {name} cannot be opened: {error}. If a codec is missing, install and import its package "
                "before (imagecodecs, numcodecs); else copy or download the array again"
            )
            raise DamagedFileError(msg) from error
        if dtype.kind not in "biuf" or "pickle" in codecs:
            msg = f"{root}: {name} does not hold numbers ({dtype}): leave it out of data; objects are never loaded"
            raise SchemaError(msg)
        if not shape:
            msg = f"{root}: {name} is one value, but must have one row per step"
            raise DamagedFileError(msg)
        self.rows: int = shape[0]
        """Number of rows."""
        self._numpy_dtype, self.shape = dtype.newbyteorder("="), tuple(shape[1:])
        self.dtype = torch_dtype(dtype, f"{root}: {name}")
        self._pieces = Pieces(np.array([self.rows]), 1, self._chunks[0], 1)
        self.starts = self._pieces.starts
        self._is_blosc = "blosc" in codecs and "sharding" not in codecs

    def missing_chunks(self) -> str | None:
        """Return a sentence about chunks that are not stored, which Zarr reads as a fixed value; None if all are."""

        def count(handle: _Handle) -> tuple[int, int, Any]:
            array = handle.array(self.name)
            if getattr(array, "shards", None) is not None:
                return 0, 0, None
            return int(array.nchunks), int(array.nchunks_initialized), array.fill_value

        total, there, value = self._root.use(count)
        if there >= total:
            return None
        return f"{total - there} of {total} chunks of {self.name} are not stored; Zarr reads their rows as {value}."

    def load(self, block: int) -> Tensor:
        """Read one chunk.

        Raises:
            DamagedFileError: naming array, rows and episode.
        """
        _, first, stop = self._pieces.locate(block)
        place = f", {name_rows(first, stop, self._stops)}"
        if self._is_blosc:
            self._check_sizes(block, place)
        part = _read(self._root, self.name, slice(first, stop), place)
        if part.shape != (stop - first, *self.shape):
            msg = f"{self._root}: {self.name}{place} has the shape {list(part.shape)}: the array was changed"
            raise DamagedFileError(msg)
        return as_block(part)

    def _check_sizes(self, block: int, place: str) -> None:
        """Check that files of chunks are as long as Blosc says: it reads beyond the end of one that was cut short."""
        counts = [-(-size // chunk) for size, chunk in zip(self.shape, self._chunks[1:], strict=True)]
        for rest in np.ndindex(*counts):
            key = self._root.use(partial(_chunk_key, name=self.name, at=(block, *rest)))
            path = self._root.file(key)
            if path is None or not path.exists():
                continue
            with path.open("rb") as file:
                header = file.read(_BLOSC_HEADER)
                size = os.fstat(file.fileno()).st_size
            wanted = int.from_bytes(header[12:], "little")
            if len(header) < _BLOSC_HEADER or size < wanted:
                msg = f"{self._root}: {self.name} cannot be read{place}: {path} has {size} bytes, Blosc says {wanted}"
                raise DamagedFileError(msg)

    def close(self) -> None:
        """Close files; the next read opens them again."""
        self._root.close()


def _chunk_key(handle: _Handle, name: str, at: tuple[int, ...]) -> str:
    """Return the path of a chunk in the store."""
    array = handle.array(name)
    if hasattr(array, "metadata"):
        return f"{array.path}/{array.metadata.encode_chunk_key(at)}"
    return str(array._chunk_key(at))  # noqa: SLF001 (zarr 2 has no other name for it)


def _describe(array: Any) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...], str]:
    """Return dtype, shape, chunks and codecs of an array."""
    names = ("filters", "compressors", "serializer") if hasattr(array, "compressors") else ("filters", "compressor")
    codecs = [getattr(array, name, None) for name in names]  # of zarr 3, and of zarr 2
    return np.dtype(array.dtype), tuple(array.shape), tuple(array.chunks), str(codecs).lower()


# -- checks ------------------------------------------------------------------------------------------------------------


def examine_zarr(path: Path, look: Examination) -> str:
    """Examine a Zarr replay buffer."""
    zarr = require("zarr", "zarr")
    root = zarr.open_group(zarr.storage.ZipStore(path, mode="r") if path.is_file() else path, mode="r")
    arrays: dict[str, Any] = {}
    data = root.get("data", {})
    for name in data:
        try:
            array = data[name]
        except READ_ERRORS as error:
            look.add("file-unreadable", first_line(error), Place(f"data/{name}", field=name))
            continue
        if hasattr(array, "shape"):
            arrays[name] = array
    examine_arrays(arrays, _stored_ends(root, look), look, _ENDS)
    for name, array in arrays.items():
        _check_chunks(name, array, look)
    return "zarr"


def _stored_ends(root: Any, look: Examination) -> Any:
    try:
        return np.asarray(root[_ENDS][:])
    except KeyError:
        look.add("file-missing", "the ends of the episodes are missing", Place(_ENDS))
    except READ_ERRORS as error:
        look.add("file-unreadable", first_line(error), Place(_ENDS))
    return None


def _check_chunks(name: str, array: Any, look: Examination) -> None:
    """Look for chunks that are missing: they read as zeros. Zarr leaves out chunks of zeros itself."""
    there, count = array.nchunks_initialized, array.nchunks
    if not 0 < there < count:
        return
    missing = (count - there) / count
    suspect = array.dtype.kind == "f" and array.ndim > 1 and look.rows.zero_share(name) <= 1.2 * missing + 0.01
    picture = is_picture(array.shape, array.dtype)
    if suspect or picture:
        text = f"{count - there} of {count} chunks have no file, and only their rows are zeros"
        severity: Severity = "warning" if picture or role_of(name) == "state" else "note"
        look.add("file-missing", text, Place(f"data/{name}", field=name), severity=severity)


FORMAT = Format(
    "Zarr", recognizes_zarr, read_zarr, objects=("zarr.Group",), examine=examine_zarr, resembles=resembles_zarr
)
