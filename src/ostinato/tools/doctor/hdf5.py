"""The checks of HDF5 files: those of D4RL and of robomimic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.tools.doctor.arrays import check_size, is_picture, looks, pieces_of_episodes, usual_rows
from ostinato.tools.doctor.cameras import CameraChecks, sampled_episodes
from ostinato.tools.doctor.report import READ_ERRORS, Place, first_line
from ostinato.tools.doctor.rows import RowChecks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato.tools.doctor.report import Findings, Profile

__all__ = ["D4rlFile", "RobomimicFile", "datasets_of", "number_in_name"]

Array = np.ndarray[Any, np.dtype[Any]]

_NEEDED = ("observations", "actions", "rewards", "terminals")
_SKIPPED = ("metadata", "states")


def datasets_of(group: Any) -> dict[str, Any]:
    """Return the arrays of a group and of those in it, by their path; groups that cannot be read are left out."""
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


def number_in_name(name: str) -> int:
    """Return the number at the end of a name such as "demo_12"; -1 if there is none."""
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


@final
class D4rlFile:
    """Checks a file with flat arrays of all transitions.

    Args:
        path: the file.
        findings: where findings are added.
        profile: takes the numbers for plots.
        full: look at all pictures; else at some of each episode.
    """

    def __init__(self, path: Path, findings: Findings, profile: Profile, *, full: bool) -> None:
        self.rows = RowChecks(findings)
        self.decoded = 0
        """Number of pictures looked at."""
        self._path = path
        self._findings = findings
        self._profile = profile
        self._full = full

    def check(self, progress: Callable[[int, int], None]) -> None:
        """Check the file."""
        h5py = require("h5py", "h5")
        with h5py.File(self._path, "r") as file:
            arrays = {k: v for k, v in datasets_of(file).items() if not k.startswith(_SKIPPED)}
            for name in _NEEDED:
                if name not in arrays and not any(key.startswith(f"{name}/") for key in arrays):
                    self._findings.add(
                        "field-missing", "D4RL files have this array", Place(self._path.name, field=name)
                    )
            if "timeouts" not in arrays:
                text = "without timeouts, an episode that was cut off runs into the next one"
                self._findings.add("flag-missing", text, Place(self._path.name, field="timeouts"))
            rows = self._common_rows(arrays)
            if rows:
                ends = self._ends(arrays, rows)
                looks_at = {name: a for name, a in arrays.items() if a.ndim and a.shape[0] == rows}
                self._check_arrays(looks_at, ends, progress)
        self.rows.finish(self._profile)

    def _common_rows(self, arrays: dict[str, Any]) -> int:
        sizes = {name: array.shape[0] for name, array in arrays.items() if array.ndim}
        if not sizes:
            return 0
        rows = usual_rows(sizes.values())
        for name, size in sizes.items():
            if size != rows:
                text = f"has {number_of(size, 'row')}, most arrays have {rows:,}"
                self._findings.add("count-mismatch", text, Place(self._path.name, field=name))
        return rows

    def _ends(self, arrays: dict[str, Any], rows: int) -> list[int]:
        flags = np.zeros(rows, bool)
        for name in ("terminals", "timeouts"):
            if name in arrays and arrays[name].shape[0] == rows:
                try:
                    flags |= np.asarray(arrays[name][:]).reshape(rows, -1).any(1)
                except READ_ERRORS:
                    continue  # the pass over all arrays reports it
        flags[-1] = True
        ends: list[int] = (np.flatnonzero(flags) + 1).tolist()
        return ends

    def _check_arrays(self, arrays: dict[str, Any], ends: list[int], progress: Callable[[int, int], None]) -> None:
        numbers = {name: a for name, a in arrays.items() if a.dtype.kind in "biuf" and not is_picture(a.shape, a.dtype)}
        pictures = {name: a for name, a in arrays.items() if is_picture(a.shape, a.dtype)}
        pieces = pieces_of_episodes(numbers, ends, self._findings, self._path.name)
        for number, (fields, length) in enumerate(pieces):
            self.rows.episode(number, fields, length, file=self._path.name)
            progress(number + 1, len(ends))
        for name, array in pictures.items():
            self.decoded += looks(array, ends, self._camera(name), file=self._path.name, full=self._full)

    def _camera(self, name: str) -> CameraChecks:
        return CameraChecks(name, self._findings, self.rows, None)


@final
class RobomimicFile:
    """Checks a file with a group of arrays for each demonstration. Arguments as those of `D4rlFile`."""

    def __init__(self, path: Path, findings: Findings, profile: Profile, *, full: bool) -> None:
        self.rows = RowChecks(findings, end_flags=False)
        self.decoded = 0
        """Number of pictures looked at."""
        self._path = path
        self._findings = findings
        self._profile = profile
        self._full = full
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._names: set[str] = set()
        self._cameras: dict[str, CameraChecks] = {}

    def check(self, progress: Callable[[int, int], None]) -> None:
        """Check the file."""
        h5py = require("h5py", "h5")
        with h5py.File(self._path, "r") as file:
            data = file["data"]
            names = sorted((name for name in data if number_in_name(name) >= 0), key=number_in_name)
            chosen = set(sampled_episodes(len(names), full=self._full))
            looked: list[tuple[int, str, dict[str, Any], int]] = []
            for number, name in enumerate(names):
                try:
                    length, pictures = self._demonstration(number, name, data[name])
                except READ_ERRORS as error:
                    text = first_line(error)
                    self._findings.add("file-unreadable", text, Place(f"{self._path.name}/data/{name}", number))
                    continue
                if number in chosen and pictures:
                    looked.append((number, name, pictures, length))
                progress(number + 1, len(names))
            self._check_total(data, sum(self.rows.lengths))
            self._check_masks(file, set(names))
            for number, name, pictures, length in looked:
                self._look(number, name, pictures, length)
        self.rows.finish(self._profile)
        self._profile.cameras += [camera.profile() for camera in self._cameras.values()]
        self.decoded = sum(camera.decoded for camera in self._cameras.values())

    def _demonstration(self, number: int, name: str, group: Any) -> tuple[int, dict[str, Any]]:
        """Check one demonstration; returns its rows and its pictures."""
        file = f"{self._path.name}/data/{name}"
        arrays = {key: array for key, array in datasets_of(group).items() if array.ndim and key not in _SKIPPED}
        if "actions" not in arrays:
            self._findings.add(
                "field-missing", "the demonstration has no actions", Place(file, number, field="actions")
            )
        length = usual_rows(array.shape[0] for array in arrays.values())
        for key, array in arrays.items():
            if array.shape[0] != length:
                text = f"has {number_of(array.shape[0], 'row')}, the other fields of the demonstration {length}"
                self._findings.add("episode-length", text, Place(file, number, field=key))
            if self._shapes.setdefault(key, array.shape[1:]) != array.shape[1:]:
                text = f"rows are {list(array.shape[1:])}, those of other demonstrations {list(self._shapes[key])}"
                self._findings.add("shape-mismatch", text, Place(file, number, field=key))
        self._check_names(number, set(arrays), file)
        declared = group.attrs.get("num_samples")
        if declared is not None and int(declared) != length:
            text = f"num_samples is {int(declared)}, the arrays have {number_of(length, 'row')}"
            self._findings.add("episode-length", text, Place(file, number, field="num_samples"))
        fields, pictures = {}, {}
        for key, array in arrays.items():
            if is_picture(array.shape, array.dtype):
                if not key.startswith("next_obs/"):
                    pictures[key] = array
            elif array.dtype.kind in "biuf" and array.shape[1:] == self._shapes[key]:
                check_size(array)
                fields[key] = np.asarray(array[:])
        self.rows.episode(number, fields, length, file=file)
        return length, pictures

    def _check_names(self, number: int, names: set[str], file: str) -> None:
        if not self._names:
            self._names = names
        for key in sorted(self._names - names):
            self._findings.add("field-missing", "other demonstrations have it", Place(file, number, field=key))

    def _check_total(self, data: Any, rows: int) -> None:
        total = data.attrs.get("total")
        if total is not None and int(total) != rows:
            text = f"total is {int(total):,}, the demonstrations have {number_of(rows, 'row')}"
            self._findings.add("count-mismatch", text, Place(f"{self._path.name}/data", field="total"))

    def _check_masks(self, file: Any, names: set[str]) -> None:
        for key, array in datasets_of(file["mask"]).items() if "mask" in file else ():
            given = [item.decode() if isinstance(item, bytes) else str(item) for item in array[:].reshape(-1)]
            unknown = [name for name in given if name not in names]
            if unknown:
                text = f"lists {unknown[0]!r}, which is not in the file ({number_of(len(unknown), 'such name')})"
                self._findings.add("split-invalid", text, Place(f"{self._path.name}/mask/{key}"))

    def _look(self, number: int, name: str, pictures: dict[str, Any], length: int) -> None:
        for key, array in pictures.items():
            camera = self._cameras.get(key)
            if camera is None:
                camera = self._cameras[key] = CameraChecks(key, self._findings, self.rows, None)
            start = sum(self.rows.lengths[:number])
            file = f"{self._path.name}/data/{name}"
            looks(array, [length], camera, file=file, full=self._full, number=number, start=start)
