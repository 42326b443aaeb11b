"""The checks of arrays of rows with the ends of the episodes: mappings, and the Zarr files of Diffusion Policy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.tools.doctor.cameras import CameraChecks, sampled_episodes, sampled_frames
from ostinato.tools.doctor.report import READ_ERRORS, Place, first_line
from ostinato.tools.doctor.rows import RowChecks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from ostinato.tools.doctor.checks import Severity
    from ostinato.tools.doctor.report import Findings, Profile

__all__ = ["ArrayChecks", "ZarrFolder", "check_size", "gray", "is_picture", "looks", "pieces_of_episodes", "usual_rows"]

Array = np.ndarray[Any, np.dtype[Any]]

_PLAUSIBLE_BYTES = 64 << 20
_MOST_COMPRESSED = 2000
_BLOCK_BYTES = 64 << 20
"""Rows of this size are read at once where episodes are short."""


def is_picture(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether an array `[rows, ...]` holds pictures: three dimensions, of which one is of colors."""
    if len(shape) != 4 or min(shape[1:]) > 4 or np.dtype(dtype).kind not in "uf":
        return False
    sides = sorted(shape[1:])
    return sides[0] in {1, 3, 4} and sides[1] >= 8


def gray(picture: Array) -> NDArray[np.uint8]:
    """Return a picture `[H, W, C]` or `[C, H, W]` as gray `[H, W]`; numbers from 0 to 1 are scaled to 255."""
    channels = int(np.argmin(picture.shape))
    values = picture.astype(np.float32).mean(channels)
    if picture.dtype.kind == "f" and values.size and float(values.max()) <= 1.0:
        values = values * 255
    result: NDArray[np.uint8] = np.clip(np.nan_to_num(values), 0, 255).astype(np.uint8)
    return result


def check_size(array: Any) -> None:
    """Check that an array of HDF5 can be as large as it says: a damaged header may ask for all memory.

    Raises:
        ValueError: if its values cannot be in the bytes that the file has for it.
    """
    number: Any = getattr(array, "id", None)
    if not hasattr(number, "get_storage_size"):
        return
    nbytes, stored = int(array.nbytes), int(number.get_storage_size())
    if nbytes > _PLAUSIBLE_BYTES and nbytes > _MOST_COMPRESSED * stored:
        msg = f"it should hold {nbytes:,} bytes, the file has {stored:,} for it"
        raise ValueError(msg)


def usual_rows(sizes: Iterable[int]) -> int:
    """Return the number of rows that most arrays have, 0 if there are none."""
    counts = Counter(sizes)
    return int(counts.most_common(1)[0][0]) if counts else 0


def looks(
    array: Any,
    ends: list[int],
    camera: CameraChecks,
    *,
    file: str | None,
    full: bool,
    number: int = 0,
    start: int = 0,
) -> int:
    """Look at pictures `[rows, ...]` of episodes; returns how many.

    Args:
        array: an array of NumPy, h5py or Zarr.
        ends: the row after the last one of each episode.
        camera: checks the pictures.
        file: where they lie.
        full: look at all.
        number: number of the first episode.
        start: number of its first row in the dataset.
    """
    before = camera.decoded
    chosen = sampled_episodes(len(ends), full=full)
    for at in chosen:
        first, stop = ends[at - 1] if at else 0, ends[at]
        frames = ((row, gray(np.asarray(array[first + row]))) for row in sampled_frames(stop - first, full=full))
        camera.episode(number + at, stop - first, start + first, frames, file)
    return camera.decoded - before


def pieces_of_episodes(
    arrays: Mapping[str, Any], ends: list[int], findings: Findings, file: str | None
) -> Iterator[tuple[dict[str, Array], int]]:
    """Yield the rows of one episode after the other; an array that cannot be read is left out from there on."""
    readers = {name: _Reader(array) for name, array in arrays.items()}
    start = 0
    for number, stop in enumerate(ends):
        fields = {}
        for name in list(readers):
            try:
                fields[name] = readers[name].rows(start, stop)
            except READ_ERRORS as error:
                text = first_line(error)
                findings.add("file-unreadable", text, Place(file, number, field=name))
                del readers[name]
        yield fields, stop - start
        start = stop


class _Reader:
    """Reads ranges of rows of an array one after the other, in large blocks."""

    def __init__(self, array: Any) -> None:
        self._array = array
        row = max(1, int(np.prod(array.shape[1:], dtype=np.int64)) * np.dtype(array.dtype).itemsize)
        self._rows = max(1, _BLOCK_BYTES // row // 8)
        self._first = 0
        self._block = np.zeros((0, *array.shape[1:]), array.dtype)

    def rows(self, start: int, stop: int) -> Array:
        if not self._block.shape[0]:
            check_size(self._array)
        if start < self._first or stop > self._first + self._block.shape[0]:
            self._first, self._block = start, self._read(start, stop)
        return self._block[start - self._first : stop - self._first]

    def _read(self, start: int, stop: int) -> Array:
        try:
            return np.asarray(self._array[start : max(stop, start + self._rows)])
        except READ_ERRORS:
            return np.asarray(self._array[start:stop])  # the fault may lie behind these rows


@final
class ArrayChecks:
    """Checks arrays `[rows, ...]` with the ends of the episodes.

    Args:
        findings: where findings are added.
        profile: takes the numbers for plots.
        full: look at all pictures; else at some of each episode.
    """

    def __init__(self, findings: Findings, profile: Profile, *, full: bool) -> None:
        self.rows = RowChecks(findings)
        self.decoded = 0
        """Number of pictures looked at."""
        self._findings = findings
        self._profile = profile
        self._full = full

    def check(
        self, arrays: Mapping[str, Any], ends: Any, progress: Callable[[int, int], None], *, where: str | None = None
    ) -> None:
        """Check arrays.

        Args:
            arrays: arrays of NumPy, h5py or Zarr by name.
            ends: the row after the last one of each episode; None if they are not known.
            progress: called with the number of episodes done and their total.
            where: name of the file of the ends.
        """
        sizes = {name: array.shape[0] for name, array in arrays.items() if len(array.shape)}
        if not sizes:
            self._findings.add("field-missing", "there are no arrays of rows", Place(where))
            return
        rows = usual_rows(sizes.values())
        for name, size in sizes.items():
            if size != rows:
                text = f"has {number_of(size, 'row')}, most arrays have {rows:,}"
                self._findings.add("count-mismatch", text, Place(field=name))
        good = self._usable_ends(ends, rows, where)
        used = {name: a for name, a in arrays.items() if sizes.get(name) == rows}
        pictures = {n: a for n, a in used.items() if is_picture(a.shape, a.dtype)}
        numbers = {n: a for n, a in used.items() if n not in pictures and np.dtype(a.dtype).kind in "biuf"}
        for number, (fields, length) in enumerate(pieces_of_episodes(numbers, good, self._findings, None)):
            self.rows.episode(number, fields, length)
            progress(number + 1, len(good))
        self._look(pictures, good)
        self.rows.finish(self._profile)

    def _look(self, pictures: dict[str, Any], ends: list[int]) -> None:
        for name, array in pictures.items():
            camera = CameraChecks(name, self._findings, self.rows, None)
            try:
                looks(array, ends, camera, file=None, full=self._full)
            except READ_ERRORS as error:
                text = first_line(error)
                self._findings.add("file-unreadable", text, Place(camera=name))
            self.decoded += camera.decoded
            self._profile.cameras.append(camera.profile())

    def _usable_ends(self, ends: Any, rows: int, where: str | None) -> list[int]:
        """Check the ends; return those that ascend, up to the last row."""
        place = Place(where, field="episode_ends")
        if ends is None:
            self._findings.add("episode-bounds", "nothing tells where episodes end", place)
            return [rows]
        values = np.asarray(ends)
        if values.ndim != 1 or values.dtype.kind not in "iu" or not values.shape[0]:
            text = f"is {values.dtype}{list(values.shape)}, integers [episodes] expected"
            self._findings.add("episode-bounds", text, place)
            return [rows]
        good: list[int] = []
        for number, end in enumerate(values.tolist()):
            before = good[-1] if good else 0
            if end <= before:
                what = "is empty" if end == before else "overlaps the episode before"
                text = f"the episode {what}: it ends at row {end}, the one before at {before}"
                self._findings.add("episode-bounds", text, place._replace(episode=number))
            elif end > rows:
                text = f"the episode ends at row {end}, the arrays have {number_of(rows, 'row')}"
                self._findings.add("episode-bounds", text, place._replace(episode=number))
            else:
                good.append(end)
        if not good or (good[-1] < rows and int(values.max()) <= rows):
            text = f"the last episode ends at row {good[-1] if good else 0}, the arrays have {number_of(rows, 'row')}"
            self._findings.add("episode-bounds", text, place)
        return good or [rows]


@final
class ZarrFolder:
    """Checks a Zarr group with `data/` and `meta/episode_ends`. Arguments as those of `ArrayChecks`."""

    def __init__(self, path: Path, findings: Findings, profile: Profile, *, full: bool) -> None:
        self._checks = ArrayChecks(findings, profile, full=full)
        self._path = path
        self._findings = findings

    @property
    def rows(self) -> RowChecks:
        """The checks of the rows."""
        return self._checks.rows

    @property
    def decoded(self) -> int:
        """Number of pictures looked at."""
        return self._checks.decoded

    def check(self, progress: Callable[[int, int], None]) -> None:
        """Check the group."""
        zarr = require("zarr", "zarr")
        store = zarr.storage.ZipStore(self._path, mode="r") if self._path.is_file() else self._path
        root = zarr.open_group(store, mode="r")
        arrays: dict[str, Any] = {}
        data = root.get("data", {})
        for name in data:
            try:
                array = data[name]
            except READ_ERRORS as error:
                self._findings.add("file-unreadable", first_line(error), Place(f"data/{name}", field=name))
                continue
            if hasattr(array, "shape"):
                arrays[name] = array
        self._checks.check(arrays, self._ends(root), progress, where="meta/episode_ends")
        for name, array in arrays.items():
            self._check_chunks(name, array)

    def _ends(self, root: Any) -> Any:
        try:
            return np.asarray(root["meta/episode_ends"][:])
        except KeyError:
            self._findings.add("file-missing", "the ends of the episodes are missing", Place("meta/episode_ends"))
        except READ_ERRORS as error:
            self._findings.add("file-unreadable", first_line(error), Place("meta/episode_ends"))
        return None

    def _check_chunks(self, name: str, array: Any) -> None:
        """Look for chunks that are missing: they read as zeros. Zarr leaves out chunks of zeros itself."""
        there, count = array.nchunks_initialized, array.nchunks
        if not 0 < there < count:
            return
        missing = (count - there) / count
        suspect = array.dtype.kind == "f" and array.ndim > 1 and self.rows.zero_share(name) <= 1.2 * missing + 0.01
        picture = is_picture(array.shape, array.dtype)
        if suspect or picture:
            text = f"{count - there} of {count} chunks have no file, and only their rows are zeros"
            severity: Severity = "warning" if picture or self.rows.role(name) == "state" else "note"
            self._findings.add("file-missing", text, Place(f"data/{name}", field=name), severity=severity)
