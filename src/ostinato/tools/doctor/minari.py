"""The checks of Minari datasets, with HDF5, Arrow or Parquet files."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.tools.doctor.arrays import check_size, gray, is_picture, usual_rows
from ostinato.tools.doctor.arrow import column_problem, to_array
from ostinato.tools.doctor.cameras import CameraChecks, sampled_episodes, sampled_frames
from ostinato.tools.doctor.hdf5 import datasets_of, number_in_name
from ostinato.tools.doctor.report import READ_ERRORS, Place, first_line
from ostinato.tools.doctor.rows import RowChecks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ostinato.tools.doctor.report import Findings, Profile

__all__ = ["MinariFolder"]

Array = np.ndarray[Any, np.dtype[Any]]

_HDF5 = "main_data.hdf5"
_STEPS = ("actions", "rewards", "terminations", "truncations")
_NEEDED = ("observations", *_STEPS)


@final
class MinariFolder:
    """Checks the folder of a dataset, the one with `data/` or the one with `metadata.json`.

    Args:
        path: the folder.
        findings: where findings are added.
        profile: takes the numbers for plots.
        full: look at all pictures; else at some of each episode.
    """

    def __init__(self, path: Path, findings: Findings, profile: Profile, *, full: bool) -> None:
        self.rows = RowChecks(findings)
        self._data = path / "data" if (path / "data").is_dir() else path
        self._prefix = "data/" if (path / "data").is_dir() else ""
        self._findings = findings
        self._profile = profile
        self._full = full
        self._cameras: dict[str, CameraChecks] = {}
        self._chosen: set[int] = set()
        self._complete = True
        self._total = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def decoded(self) -> int:
        """Number of pictures looked at."""
        return sum(camera.decoded for camera in self._cameras.values())

    def check(self, progress: Callable[[int, int], None]) -> None:
        """Check the dataset."""
        metadata = self._metadata()
        for name in ("observation", "action"):
            self._shapes |= _shapes_of(_parsed(metadata.get(f"{name}_space")), f"{name}s")
        check = self._check_hdf5 if (self._data / _HDF5).exists() else self._check_folders
        episodes = check(progress)
        expected = {"total_episodes": episodes, "total_steps": sum(self.rows.lengths)}
        for key, count in expected.items() if metadata and self._complete else ():
            if metadata.get(key) != count:
                text = f"{key} is {metadata.get(key)!r}, the data has {count:,}"
                self._findings.add("count-mismatch", text, Place(f"{self._prefix}metadata.json", field=key))
        self.rows.finish(self._profile)
        self._profile.cameras += [camera.profile() for camera in self._cameras.values()]

    def _metadata(self) -> dict[str, Any]:
        place = Place(f"{self._prefix}metadata.json")
        try:
            found = json.loads((self._data / "metadata.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._findings.add("file-missing", "the dataset needs this file", place)
            return {}
        except READ_ERRORS as error:
            self._findings.add("file-unreadable", f"not valid JSON: {error}", place)
            return {}
        if not isinstance(found, dict):
            self._findings.add("metadata-invalid", "is not a JSON object", place)
            return {}
        return found

    # -- HDF5 ----------------------------------------------------------------------------------------------------------

    def _check_hdf5(self, progress: Callable[[int, int], None]) -> int:
        h5py = require("h5py", "minari")
        file = self._prefix + _HDF5
        with h5py.File(self._data / _HDF5, "r") as opened:
            names = sorted((name for name in opened if number_in_name(name) >= 0), key=number_in_name)
            self._check_names([number_in_name(name) for name in names], file)
            for number, name in enumerate(names):
                place = Place(f"{file}/{name}", number)
                try:
                    group = opened[name]
                    arrays = {k: v for k, v in datasets_of(group).items() if v.ndim}
                    declared = group.attrs.get("total_steps")
                    self._episode(number, arrays, None if declared is None else int(declared), place)
                except READ_ERRORS as error:
                    self._findings.add("file-unreadable", first_line(error), place)
                    self._complete = False
                progress(number + 1, len(names))
        return len(names)

    def _check_names(self, numbers: list[int], file: str) -> None:
        self._chosen = set(sampled_episodes(len(numbers), full=self._full))
        for at, number in enumerate(numbers):
            if at != number:
                text = f"episode {at} is missing: the next one is {number}"
                self._findings.add("episode-bounds", text, Place(file, at))
                return

    # -- Arrow and Parquet ---------------------------------------------------------------------------------------------

    def _check_folders(self, progress: Callable[[int, int], None]) -> int:
        folders = sorted((p for p in self._data.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        self._check_names([int(p.name) for p in folders], self._prefix)
        for number, folder in enumerate(folders):
            name = f"{self._prefix}{folder.name}"
            parts = sorted(p for p in folder.iterdir() if p.suffix in {".arrow", ".parquet"})
            if not parts:
                self._findings.add("file-missing", "the episode has no table", Place(name, number))
                self._complete = False
                continue
            try:
                columns = dict(_leaves(_read_table(parts[0]), ""))
                self._episode(
                    number, self._arrays(columns, number, name), self._declared(folder, number), Place(name, number)
                )
            except READ_ERRORS as error:
                text = first_line(error)
                self._findings.add("file-unreadable", text, Place(f"{name}/{parts[0].name}", number))
                self._complete = False
            progress(number + 1, len(folders))
        return len(folders)

    def _declared(self, folder: Path, number: int) -> int | None:
        """Return the steps of an episode that its metadata gives."""
        place = Place(f"{self._prefix}{folder.name}/metadata.json", number)
        try:
            steps = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["total_steps"]
        except FileNotFoundError:
            self._findings.add("file-missing", "the episode needs this file", place)
            return None
        except READ_ERRORS as error:
            self._findings.add("file-unreadable", f"does not tell the steps of the episode: {first_line(error)}", place)
            return None
        return steps if isinstance(steps, int) else None

    def _arrays(self, columns: dict[str, Any], number: int, file: str) -> dict[str, Any]:
        """Return the columns of a table as arrays; those of steps lack the last row, which is padding."""
        arrays: dict[str, Any] = {}
        for name, column in columns.items():
            steps = name.partition("/")[0] in _STEPS
            used = column[:-1] if steps else column
            if name == "episode_id" or str(column.type) in {"binary", "large_binary", "string", "null"}:
                if "binary" in str(column.type):
                    arrays[name] = used.to_pylist()
                continue
            problem = column_problem(used)
            if problem is not None:
                self._findings.add(problem[0], problem[1], Place(file, number, problem[2], name))
                continue
            values = to_array(used)
            shape = self._shapes.get(name)
            if values is not None and shape is not None and values.shape[1] == np.prod(shape, dtype=np.int64):
                values = values.reshape(-1, *shape)
            if values is not None:
                arrays[name] = values
        return arrays

    # -- one episode ---------------------------------------------------------------------------------------------------

    def _episode(self, number: int, arrays: dict[str, Any], declared: int | None, place: Place) -> None:
        length = self._check_lengths(arrays, declared, place)
        fields: dict[str, Array] = {}
        pictures: dict[str, Any] = {}
        for name, array in arrays.items():
            if isinstance(array, list) or _holds_jpeg(array):
                pictures[name] = array
                continue
            shape = self._shapes.get(name)
            if shape is not None and tuple(array.shape[1:]) != shape:
                text = f"rows are {list(array.shape[1:])}, the space says {list(shape)}"
                self._findings.add("shape-mismatch", text, place._replace(field=name))
            if is_picture(array.shape, array.dtype):
                pictures[name] = array
            elif array.dtype.kind in "biuf":
                check_size(array)
                fields[name] = np.asarray(array[:])
        self.rows.episode(number, fields, length, file=place.file)
        start, self._total = self._total, self._total + length
        for name, array in pictures.items() if number in self._chosen else ():
            self._look(name, array, number, start, place)

    def _check_lengths(self, arrays: dict[str, Any], declared: int | None, place: Place) -> int:
        """Check that all fields of an episode are there and belong together; returns its steps."""
        for name in _NEEDED:
            if not any(key == name or key.startswith(f"{name}/") for key in arrays):
                self._findings.add("field-missing", "the episode lacks it", place._replace(field=name))
        sizes = {name: len(array) for name, array in arrays.items()}
        length = usual_rows(size for name, size in sizes.items() if name.partition("/")[0] in _STEPS)
        for name, size in sizes.items():
            part = name.partition("/")[0]
            expected = length if part in _STEPS else length + 1
            if size != expected and (part in _STEPS or part == "observations"):
                text = f"has {number_of(size, 'row')}, {expected} expected for {number_of(length, 'step')}"
                self._findings.add("episode-length", text, place._replace(field=name))
        if declared is not None and declared != length:
            text = f"total_steps is {declared}, the arrays have {number_of(length, 'step')}"
            self._findings.add("episode-length", text, place._replace(field="total_steps"))
        return length

    def _look(self, name: str, array: Any, number: int, start: int, place: Place) -> None:
        camera = self._cameras.get(name)
        if camera is None:
            camera = self._cameras[name] = CameraChecks(name, self._findings, self.rows, None)
        try:
            rows = sampled_frames(len(array), full=self._full)
            frames = [(row, gray(_picture(array[row]))) for row in rows]
        except READ_ERRORS as error:
            text = f"a picture cannot be decoded: {error}"
            self._findings.add("file-unreadable", text, place._replace(camera=name))
            return
        camera.episode(number, len(array), start, frames, place.file)


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


def _picture(value: Any) -> Array:
    """Return a picture `[H, W, C]`, decoded if it is a JPEG."""
    if isinstance(value, bytes) or (isinstance(value, np.ndarray) and value.ndim == 1):
        data = value if isinstance(value, bytes) else value.tobytes()
        with require("PIL.Image", "minari").open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    return np.asarray(value)


def _holds_jpeg(array: Any) -> bool:
    """Whether an array of HDF5 holds a JPEG in each row."""
    kind = array.dtype
    if array.ndim > 2 or not len(array) or (kind.kind != "O" and kind != np.uint8):
        return False
    first = array[0]
    return isinstance(first, np.ndarray) and first.dtype == np.uint8 and first[:2].tobytes() == b"\xff\xd8"


def _read_table(path: Path) -> Any:
    """Return the record batch of an episode."""
    if path.suffix == ".parquet":
        table = require("pyarrow.parquet", "minari").ParquetFile(path).read()
    else:
        with require("pyarrow.ipc", "minari").open_file(str(path)) as file:
            table = file.read_all()
    return table.combine_chunks()


def _leaves(table: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a table or of a struct by their path."""
    types = require("pyarrow.types", "minari")
    schema = table.schema if hasattr(table, "schema") else table.type
    for at in range(len(schema)):
        column = table.column(at).combine_chunks() if hasattr(table, "schema") else table.field(at)
        column = column.chunk(0) if hasattr(column, "chunk") else column
        name = f"{prefix}{schema.field(at).name}"
        if types.is_struct(column.type):
            yield from _leaves(column, f"{name}/")
        else:
            yield name, column
