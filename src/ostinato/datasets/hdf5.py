"""HDF5 files: opened when they are read, once in each process, and never a source of objects or code."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core.kinds import show_path
from ostinato.core.options import check_choice
from ostinato.datasets.cache import OpenHandles
from ostinato.datasets.checks import READ_ERRORS
from ostinato.datasets.format import Writing
from ostinato.datasets.stored import BLOCK_BYTES, Pieces, as_block, name_rows, torch_dtype
from ostinato.datasets.transitions import Transitions, with_nested_names
from ostinato.durable.files import OpenFile, read_pieces
from ostinato.durable.progress import PARTS, counted
from ostinato.errors import DamagedFileError, OptionError, OstinatoError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.dataset import DatasetStorage
    from ostinato.durable.progress import Progress

_UNKNOWN, _IN_BLOCKS = -1, -2
_SMALL = 16
"""Numbers of a dataset that is read as a plain value."""
_MAGIC = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = {".h5", ".hdf5", ".he5", ".hdf"}


def is_hdf5(source: Any) -> bool:
    """Return whether a source is an object of h5py, or a file that begins as HDF5 files do. Does not raise."""
    if not isinstance(source, Path):
        return True
    try:
        with source.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def resembles_hdf5(path: Path) -> bool:
    """Return whether a path is an HDF5 file, by its name if its beginning is damaged."""
    return path.is_file() and (path.suffix.lower() in _SUFFIXES or is_hdf5(path))


def datasets_of(group: Any) -> dict[str, Any]:
    """Return the arrays of an open group and of those in it, by their path; what cannot be opened is left out."""
    h5py = require("h5py", "h5")
    found: dict[str, Any] = {}
    for name in group:
        try:
            value = group[name]
        except READ_ERRORS:
            continue
        if isinstance(value, h5py.Dataset):
            found[name] = value
        elif isinstance(value, h5py.Group):
            found |= {f"{name}/{key}": item for key, item in datasets_of(value).items()}
    return found


def _open(path: Path) -> Any:
    h5py = require("h5py", "h5")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        reason = str(error)
        if isinstance(error, BlockingIOError) or "open for write" in reason or "unable to lock" in reason:
            msg = (
                f"{path} is open for writing elsewhere, or was not closed by who wrote it ({reason}): close it there; "
                "`h5clear --status` repairs a file whose writer has ended; HDF5_USE_FILE_LOCKING=FALSE reads a file on "
                "a file system without locks"
            )
            raise UsageError(msg) from error
        if isinstance(error, (FileNotFoundError, PermissionError)):
            raise
        msg = f"{path} is not a whole HDF5 file: {reason}. Copy or download it again"
        raise DamagedFileError(msg) from error


def _close(file: Any) -> None:
    file.close()


@final
class Hdf5File:
    """A group of an HDF5 file, which is opened when it is read. Thread-safe; pickled without the open file.

    Args:
        path: the file.
        root: the group in it.
    """

    def __init__(self, path: Path, root: str = "/") -> None:
        self.path = path
        self.root = root
        self._handles: OpenHandles[Any] = OpenHandles(_open, _close)
        self._file: OpenFile | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The path and the group."""
        return {**self.__dict__, "_file": None}

    def descriptor(self) -> OpenFile:
        """Return the file, open for positioned reads, which need no lock and are safe in forked processes.

        Raises:
            DamagedFileError: if it is missing.
        """
        file = self._file
        if file is None:
            file = self._file = OpenFile(self.path)
        return file

    def __str__(self) -> str:
        """The path, and the group if it is not the root."""
        return str(self.path) if self.root == "/" else f"{self.path}:{self.root}"

    @classmethod
    def of(cls, group: Any) -> Hdf5File:
        """Return the file of an `h5py.Group`, which is opened a second time for reading.

        Raises:
            UsageError: if the group is closed, has no file on disk, or is open for writing.
        """
        if not group:
            msg = "the h5py group is closed: open its file again, or give the path of the file"
            raise UsageError(msg)
        file = group.file
        if file.mode != "r" or not Path(file.filename).is_file():
            msg = (
                f"{file.filename} is open with mode {file.mode!r} and driver {file.driver!r}: a dataset is read from a "
                "file on disk that is open for reading; write it, close it and give its path"
            )
            raise UsageError(msg)
        return cls(Path(file.filename).absolute(), group.name)

    def use(self, action: Callable[[Any], Any]) -> Any:
        """Return `action(group)`, which must not keep objects of the file.

        Raises:
            DamagedFileError: if HDF5 cannot read what it needs.
            UsageError: if another program is writing the file.
        """
        try:
            return self._handles.use(self.path, lambda file: action(file[self.root]))
        except (OstinatoError, PermissionError):
            raise
        except (OSError, LookupError, RuntimeError, TypeError, ValueError) as error:
            msg = f"{self} cannot be read: {error}. Copy or download the file again"
            raise DamagedFileError(msg) from error

    @classmethod
    def find(cls, source: Any) -> Hdf5File:
        """Return the file of a path or of an `h5py.Group`."""
        return cls(source) if isinstance(source, Path) else cls.of(source)

    def names(self) -> list[str]:
        """Return the names of all groups and datasets below the group, such as `data/demo_0/actions`.

        No object is opened, so ten thousand episodes take less than a second.
        """

        def visit(group: Any) -> list[str]:
            found: list[bytes] = []
            try:
                group.id.links.visit(found.append)
                return [name.decode() for name in found]
            except (RuntimeError, OSError, UnicodeDecodeError) as error:
                msg = f"{self}: its groups cannot be listed: {error}. Copy or download the file again"
                raise DamagedFileError(msg) from error

        names: list[str] = self.use(visit)
        return names

    def children(self, name: str) -> list[str]:
        """Return the names in a group; none if it cannot be read. Does not raise."""
        try:
            found: list[str] = self.use(lambda group: list(group if name == "/" else group[name]))
        except (OSError, ImportError, LookupError, RuntimeError, TypeError, ValueError):
            return []
        finally:
            self.close()
        return found

    def row_counts(self, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the number of rows of datasets, int64 `[names]`; -1 for those that are missing or no datasets."""
        h5d = require("h5py.h5d", "h5")

        def count(group: Any) -> list[int]:
            return [_rows_of(h5d, group.id, name.encode()) for name in counted(names, PARTS)]

        return np.array(self.use(count), dtype=np.int64)

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        self._handles.close()
        self._file = None


def _rows_of(h5d: Any, group: Any, name: bytes) -> int:
    try:
        shape = h5d.open(group, name).shape
    except (KeyError, RuntimeError, OSError, TypeError):
        return -1
    return int(shape[0]) if shape else -1


class Stored(NamedTuple):
    """What a dataset of an HDF5 file holds."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_rows: int | None
    """Rows of a chunk; None if it is not chunked."""


def describe(file: Hdf5File, name: str) -> Stored:
    """Return what a dataset holds.

    Raises:
        DamagedFileError: if it is missing, or has no rows.
    """

    def look(group: Any) -> Stored:
        found = _find(group, name, str(file))
        if not found.shape:
            msg = f"{file}, {name} is one value, but must have one row per step"
            raise DamagedFileError(msg)
        return Stored(found.dtype, tuple(found.shape), found.chunks[0] if found.chunks else None)

    described: Stored = file.use(look)
    return described


def read_all(file: Hdf5File, name: str, rows: int) -> np.ndarray[Any, Any]:
    """Return all rows of a dataset; see `read_part`."""
    found: np.ndarray[Any, Any] = file.use(lambda group: read_part(group, name, str(file), rows, 0, rows))
    return found


def plain_values(file: Hdf5File, names: Sequence[str]) -> dict[str, Any]:
    """Return small datasets as plain values by name, and what larger ones hold as a text."""

    def read(group: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name in names:
            found = group[name]
            if not hasattr(found, "shape"):
                continue
            small = found.shape is not None and found.size <= _SMALL and found.dtype.kind in "biufSO"
            value = found[()] if small else f"{found.dtype}{list(found.shape or ())}"
            value = value.tolist() if hasattr(value, "tolist") else value
            out[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
        return out

    values: dict[str, Any] = file.use(read)
    return values


def read_part(
    group: Any, name: str, place: str, rows: int, first: int, stop: int, what: str = "all rows"
) -> np.ndarray[Any, Any]:
    """Return rows `[first, stop)` of a dataset.

    Args:
        group: the group that is read.
        name: name of the dataset.
        place: the file, for errors.
        rows: the rows that the dataset must have.
        first: first row.
        stop: row after the last one.
        what: these rows, for errors.

    Raises:
        DamagedFileError: if it is missing, has other rows, or cannot be read.
    """
    found = _find(group, name, place)
    _check_rows(place, name, found.shape, rows)
    try:
        part: np.ndarray[Any, Any] = found[first:stop]
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        msg = f"{place}, {name} cannot be read, {what}: {error}. Copy or download the file again"
        raise DamagedFileError(msg) from error
    return part


def _check_rows(place: str, name: str, shape: tuple[int, ...], rows: int) -> None:
    if shape[:1] != (rows,):
        msg = f"{place}, {name} has the shape {list(shape)}, but the other fields need {rows} rows of it"
        raise DamagedFileError(msg)


def _find(group: Any, name: str, place: str) -> Any:
    try:
        found = group[name]
    except (KeyError, RuntimeError, OSError) as error:
        msg = f"{place}: {name} is missing or cannot be opened ({error}). Copy or download the file again"
        raise DamagedFileError(msg) from error
    if not hasattr(found, "shape"):
        msg = f"{place}: {name} is a group, but must be a dataset with one row per step"
        raise DamagedFileError(msg)
    return found


@final
class Hdf5Source:
    """A field that is stored in datasets of one HDF5 file, one for each episode. A `BlockSource`.

    Args:
        file: the file.
        groups: the group of each episode, such as `episode_3`; one empty text if all rows are in one dataset.
        name: name of the dataset in each group.
        lengths: rows of each dataset, int64 `[groups]`. They are checked when a block is read.
        stops: for errors, if all rows are in one dataset: the row after the last one of each episode.
        decode: turns the rows that were read into those of the field; its second argument names them in errors. None
            if they are stored as they are.
        form: dtype and shape of a row of the field; None are those of the first dataset.
        block_bytes: smallest number of bytes of a block.

    Raises:
        DamagedFileError: if the dataset of the first group is missing or has no rows.
        SchemaError: if it does not hold numbers.
    """

    def __init__(
        self,
        file: Hdf5File,
        groups: Sequence[str],
        name: str,
        lengths: np.ndarray[Any, Any],
        *,
        stops: np.ndarray[Any, Any] | None = None,
        decode: Callable[[np.ndarray[Any, Any], str], np.ndarray[Any, Any]] | None = None,
        form: tuple[np.dtype[Any], tuple[int, ...]] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._file, self._groups, self._name, self._decode, self._stops = file, groups, name, decode, stops
        stored = describe(file, self._full(0))
        _check_rows(str(file), self._full(0), stored.shape, int(lengths[0]))
        self._numpy_dtype, self.shape = (stored.dtype, stored.shape[1:]) if form is None else form
        self.dtype = torch_dtype(self._numpy_dtype, f"{file}: {self._full(0)}")
        row_bytes = self._numpy_dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        self._row_bytes = row_bytes
        self._pieces = Pieces(lengths, row_bytes, stored.chunk_rows if decode is None else None, block_bytes)
        self.starts = self._pieces.starts
        is_plain = (
            decode is None
            and stored.chunk_rows is None
            and self._numpy_dtype.isnative
            and self._numpy_dtype.kind in "iuf"
        )
        self._places = np.full(len(groups), _UNKNOWN, np.int64) if is_plain else None
        """Offset of the dataset of each piece in the file: `_UNKNOWN` until rows of it are read, `_IN_BLOCKS` if HDF5
        does not store its rows one after the other; None if that holds for all."""

    def _full(self, piece: int) -> str:
        return f"{self._groups[piece]}/{self._name}" if self._groups[piece] else self._name

    def load(self, block: int) -> Tensor:
        """Read one block.

        Raises:
            DamagedFileError: naming file, group and dataset, if rows are missing, or differ from those of the first
                dataset in dtype or shape.
        """
        piece, first, stop = self._pieces.locate(block)
        name = self._full(piece)
        rows = int(self._pieces.offsets[piece + 1] - self._pieces.offsets[piece])
        place = f"rows [{first}, {stop})" if self._stops is None else name_rows(first, stop, self._stops)
        part = self._file.use(lambda group: read_part(group, name, str(self._file), rows, first, stop, place))
        if self._decode is not None:
            part = self._decode(part, f"{self._file}, {name}, {place}")
        if part.shape != (stop - first, *self.shape) or part.dtype != self._numpy_dtype:
            msg = (
                f"{self._file}, {name}: rows are {part.dtype}{list(part.shape[1:])}, those of {self._full(0)} are "
                f"{self._numpy_dtype}{list(self.shape)}: all episodes need the same"
            )
            raise DamagedFileError(msg)
        return as_block(part)

    def read_rows(self, rows: Tensor) -> Tensor | None:
        """Read rows at their places in the file; None if the file is chunked or compressed."""
        if self._places is None:
            return None
        at = rows.numpy()
        offsets = self._pieces.offsets
        pieces = np.searchsorted(offsets, at, side="right") - 1
        missing = np.unique(pieces[self._places[pieces] == _UNKNOWN])
        if missing.shape[0]:
            self._file.use(lambda group: self._find_places(group, missing.tolist()))
        places = self._places[pieces]
        if (places == _IN_BLOCKS).any():
            return None
        places = places + (at - offsets[pieces]) * self._row_bytes
        order = np.argsort(places, kind="stable")
        out = torch.empty((at.shape[0], *self.shape), dtype=self.dtype, device="cpu")
        file = self._file.descriptor()
        full = np.full_like(places, file.fd), np.full_like(places, self._row_bytes)
        read = read_pieces(full[0], places[order], full[1], out.data_ptr() + order * self._row_bytes)
        if read < at.shape[0]:
            piece = int(pieces[order[read]])
            msg = f"{self._file}, {self._full(piece)}: the file ends before row {at[order[read]] - offsets[piece]}"
            raise DamagedFileError(msg)
        return out

    def _find_places(self, group: Any, pieces: list[int]) -> None:
        h5d = require("h5py.h5d", "h5")
        for piece in pieces:
            name = self._full(piece)
            found = _find(group, name, str(self._file))
            rows = int(self._pieces.offsets[piece + 1] - self._pieces.offsets[piece])
            _check_rows(str(self._file), name, found.shape, rows)
            is_plain = (
                found.id.get_create_plist().get_layout() == h5d.CONTIGUOUS
                and not found.external
                and (found.shape[1:], found.dtype) == (self.shape, self._numpy_dtype)
                and found.id.get_offset() is not None
            )
            self._places[piece] = found.id.get_offset() if is_plain else _IN_BLOCKS  # type: ignore[index]

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        self._file.close()


_CHUNK_BYTES = 32 << 20


# -- writing -----------------------------------------------------------------------------------------------------------


def _d4rl_names(rows: Transitions) -> dict[str, FieldPath]:
    """Return fields by their names in a file of D4RL.

    Raises:
        SchemaError: if rows have several observations or actions.
    """
    for leaves in (rows.observations, rows.actions):
        if len(leaves) > 1 or len(leaves[0].path) > 1:
            msg = (
                f"D4RL holds one array of observations and one of actions, rows have {show_path(leaves[0].path)}: "
                "choose one of each with fields=, or use layout='robomimic'"
            )
            raise SchemaError(msg)
    names: dict[FieldPath, str] = {
        ("observation",): "observations",
        ("action",): "actions",
        ("next", "reward"): "rewards",
        ("next", "observation"): "next_observations",
    }
    others = {path: _joined(("infos", *path[1:]) if path[0] == "info" else path) for path in rows.leaves}
    return _named(rows, {**others, **names}, ("terminals", "timeouts"))


def _robomimic_names(rows: Transitions) -> dict[str, FieldPath]:
    """Return fields by their names in a demonstration of robomimic.

    Raises:
        SchemaError: if rows have several actions.
    """
    if len(rows.actions[0].path) > 1:
        msg = (
            f"robomimic holds one array of actions, rows have {show_path(rows.actions[0].path)}: choose it with fields="
        )
        raise SchemaError(msg)
    names: dict[FieldPath, str] = {}
    known: dict[FieldPath, str] = {("action",): "actions", ("next", "reward"): "rewards"}
    for path in rows.leaves:
        inner, prefix = (path[1:], "next_obs") if path[:2] == ("next", "observation") else (path, "obs")
        if inner[0] == "observation":
            names[path] = _joined((prefix, *(inner[1:] or ("state",))))
        else:
            names[path] = known.get(path) or _joined(path)
    return _named(rows, names, ("dones",))


def _joined(path: FieldPath) -> str:
    bad = [key for key in path if "/" in str(key) or key in {"", ".", ".."}]
    if bad:
        msg = f"names in HDF5 have no '/', got {bad[0]!r} in {show_path(path)}: rename it with fields="
        raise SchemaError(msg)
    return "/".join(map(str, path))


def _named(rows: Transitions, names: dict[FieldPath, str], own: tuple[str, ...]) -> dict[str, FieldPath]:
    """Return fields by their names in the file, without flags.

    Raises:
        SchemaError: if two have one name.
    """
    found: dict[str, FieldPath] = {}
    for path in (*rows.leaves, *rows.texts):
        if path in rows.flag_paths:
            continue
        name = names.get(path) or _joined(path)
        taken = next((other for other in (*found, *own) if (other + "/").startswith(name + "/")), None)
        taken = taken or next((other for other in (*found, *own) if (name + "/").startswith(other + "/")), None)
        if taken is not None:
            msg = f"{show_path(path)} would be {name} in the file, where {taken} is: rename it with fields="
            raise SchemaError(msg)
        found[name] = path
    return found


class _Writer(NamedTuple):
    """Writes the rows of a dataset to a file."""

    rows: Transitions
    names: dict[str, FieldPath]
    """Fields by their names in a group of the file."""
    compression: str | None
    env_args: dict[str, Any] | None = None
    """How robomimic makes the environment."""

    def d4rl(self, path: Path, progress: Progress) -> None:
        """Write a file with one array for each field."""
        with require("h5py", "h5").File(path, "w") as file:
            flags = {"terminals": self.rows.terminated, "timeouts": self.rows.truncated}
            self._write(file, 0, len(self.rows.dataset), flags, progress)

    def robomimic(self, path: Path, progress: Progress) -> None:
        """Write a file with a group for each episode."""
        flags = {"dones": self.rows.terminated.astype(np.uint8)}
        with require("h5py", "h5").File(path, "w") as file:
            data = file.create_group("data")
            data.attrs["total"] = len(self.rows.dataset)
            data.attrs["env_args"] = json.dumps(self.env_args or {})
            for episode, (first, last) in enumerate(self.rows.spans()):
                group = data.create_group(f"demo_{episode}")
                group.attrs["num_samples"] = last - first
                self._write(group, first, last, flags, progress)

    def _write(self, group: Any, first: int, last: int, flags: dict[str, Any], progress: Progress) -> None:
        """Write the rows `[first, last)` in chunks, and flags, which are those of all rows."""
        create = partial(group.create_dataset, compression=self.compression)
        for name, values in flags.items():
            create(name, data=values[first:last])
        targets = {}
        for name, path in self.names.items():
            text = path in self.rows.texts
            dtype = require("h5py", "h5").string_dtype() if text else self.rows.rows(path, 0, 1).dtype
            shape = () if text else self.rows.leaves[path].shape
            targets[name] = create(name, shape=(last - first, *shape), dtype=dtype)
        size = max(1, _CHUNK_BYTES // max(1, *(leaf.nbytes for leaf in self.rows.leaves.values())))
        for at in range(first, last, size):
            end = min(at + size, last)
            for name, path in self.names.items():
                targets[name][at - first : end - first] = self.rows.rows(path, at, end)
            progress.advance(end - at)


def _prepare_hdf5(dataset: DatasetStorage, given: Mapping[str, Any]) -> Callable[[Path, Progress], None]:
    """Make all checks of a dataset and the options; return what writes.

    Raises:
        OptionError: if an option is wrong.
        SchemaError: if rows lack a field, or have one that the layout has no place for.
        MissingExtraError: naming the extra to install.
    """
    layout = check_choice("layout", given.get("layout", "robomimic"), ("robomimic", "d4rl"))
    compression = check_choice("compression", given.get("compression", "none"), ("none", "gzip", "lzf"))
    require("h5py", "h5")
    packed, env_args = None if compression == "none" else compression, given.get("env_args")
    dataset = with_nested_names(dataset, infos=False)
    if layout == "d4rl":
        if env_args is not None:
            msg = "env_args is for layout='robomimic', D4RL has no place for it: leave it out"
            raise OptionError(msg)
        rows = Transitions(dataset, "D4RL")
        return _Writer(rows, _d4rl_names(rows), packed).d4rl
    try:
        valid = env_args is None or (isinstance(env_args, dict) and json.dumps(env_args, allow_nan=False))
    except (TypeError, ValueError):
        valid = False
    if not valid:
        msg = f"env_args must be a dict of JSON values, got {str(env_args)[:200]}"
        raise OptionError(msg)
    rows = Transitions(dataset, "robomimic", reward=False)
    return _Writer(rows, _robomimic_names(rows), packed, env_args).robomimic


WRITE = Writing("hdf5", ("layout", "env_args", "compression"), _prepare_hdf5, is_file=True)
