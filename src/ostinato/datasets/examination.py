"""One examination of a dataset: values of what the checks of its format show are checked, and findings collected."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato.core.options import number_of
from ostinato.datasets.checks import CHECKS, READ_ERRORS, WHOLE, Place, WrongValueError, first_line
from ostinato.datasets.values import CameraChecks, Profile, RowChecks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ostinato.datasets.checks import Severity
    from ostinato.durable.progress import Progress

Array = np.ndarray[Any, np.dtype[Any]]

_PASS_STEPS = 1000
_BLOCK_BYTES = 64 << 20
"""Rows of this size are read at once where episodes are short."""
_NEXT = ("next.", "next/", "next_obs")
_KEPT = 20
"""Findings of one check that are listed; further ones are counted."""
_ORDER = ("error", "warning", "note")
_FRAMES_PER_EPISODE = 12
_MOST_EPISODES = 200
"""Frames of each episode that are decoded, and of how many episodes, unless all are."""
_PLAUSIBLE_BYTES = 64 << 20
_MOST_COMPRESSED = 2000


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, or one remarkable fact."""

    check: str
    """Name of the check, such as "value-nan"; `docs/doctor.md` describes all."""
    severity: Severity
    """`error`, `warning` or `note`."""
    message: str
    """What is wrong, with the numbers found and expected."""
    advice: str
    """What to do."""
    file: str | None = None
    """File, relative to the dataset."""
    episode: int | None = None
    """Position of the episode in the dataset."""
    frame: int | None = None
    """Row within the episode, or frame of the video where no episode is named."""
    field: str | None = None
    """Name of the field."""
    camera: str | None = None
    """Name of the camera."""

    @property
    def place(self) -> str:
        """Where it is, in words; empty if it concerns the whole dataset."""
        parts = (
            ("", self.file),
            ("episode ", self.episode),
            ("frame ", self.frame),
            ("field ", self.field),
            ("camera ", self.camera),
        )
        return ", ".join(f"{name}{value}" for name, value in parts if value is not None)

    def __str__(self) -> str:
        """One line."""
        place = f" [{self.place}]" if self.place else ""
        return f"{self.severity}: {self.check}{place}: {self.message}"


@final
class Pictures:
    """Pictures that are stored encoded, one in each row.

    Args:
        rows: what is stored, in any sequence.
        decode: returns the picture that a row holds: `[H, W, C]`, `[C, H, W]` or gray `[H, W]`.
    """

    def __init__(self, rows: Any, decode: Callable[[Any], Any]) -> None:
        self._rows, self._decode = rows, decode

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self._decode(self._rows[row])


@final
class Examination:
    """An examination of a dataset by the doctor, to which the module of a format shows what the files hold.

    It collects faults (it is a `Faults`), checks the values that are shown, and keeps numbers for plots.

    Args:
        full: look at all pictures; else at some of each episode.
        bar: shows the steps done; it grows by 1,000 for each pass.
    """

    def __init__(self, bar: Progress, *, full: bool) -> None:
        self.full = full
        """Whether all pictures are looked at; else some of each episode."""
        self.profile = Profile()
        """The numbers for plots."""
        self.rows = RowChecks(self)
        """The checks of numbers, and what they have found so far."""
        self.fps: float | None = None
        """Rows per second, where the format knows."""
        self.decoded = ""
        """Which pictures were looked at, in words, where a format says more than their number."""
        self.cameras: dict[str, CameraChecks] = {}
        """The checks of each camera."""
        self.shapes: dict[str, tuple[int, ...] | None] = {}
        """Shape of the rows of each field, of the first episode unless the format knows."""
        self._bar = bar
        self._every = 1
        self._episodes = 0
        self._step: Callable[[int, int], None] = lambda _, __: None
        self._waiting: deque[Callable[[], None]] = deque()
        self._kept: dict[tuple[str, str], list[Finding]] = {}
        self._more: Counter[str] = Counter()

    # -- findings ------------------------------------------------------------------------------------------------------

    def add(self, check: str, message: str, place: Place = WHOLE, *, severity: Severity | None = None) -> None:
        """Add what a check has found; its severity is the usual one of the check unless given."""
        known = CHECKS[check]
        severity = known.severity if severity is None else severity
        kept = self._kept.setdefault((check, severity), [])
        if len(kept) >= _KEPT:
            self._more[check] += 1
            return
        numbers = {name: int(value) for name, value in place._asdict().items() if isinstance(value, (int, np.integer))}
        kept.append(Finding(check, severity, message, known.advice, **{**place._asdict(), **numbers}))

    def has(self, severity: Severity) -> bool:
        """Whether there is a finding of this severity."""
        return any(name == severity for _, name in self._kept)

    @property
    def listed(self) -> tuple[Finding, ...]:
        """The findings that are kept, errors first."""
        every = [finding for kept in self._kept.values() for finding in kept]
        return tuple(sorted(every, key=lambda finding: _ORDER.index(finding.severity)))

    @property
    def omitted(self) -> dict[str, int]:
        """Number of further findings by check."""
        return dict(self._more)

    # -- what formats show ---------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Rows of the episodes shown so far."""
        return sum(self.rows.lengths.values())

    def steps(self) -> Callable[[int, int], None]:
        """Begin a pass of 1,000 steps; return what is called with the number of its items done and their total."""
        before = self._bar.total
        self._bar.grow(_PASS_STEPS)
        return lambda done, total: self._bar.advance(before + _PASS_STEPS * done // max(total, 1) - self._bar.done)

    def expect(self, episodes: int) -> None:
        """Begin a pass over so many episodes."""
        self._step, self._episodes = self.steps(), episodes
        self._every = 1 if self.full else max(1, -(-episodes // _MOST_EPISODES))

    def episode(
        self,
        number: int,
        arrays: Mapping[str, Any],
        rows: int,
        file: str | None = None,
        *,
        nexts: Mapping[str, Array] | None = None,
    ) -> None:
        """Examine the numbers of an episode; `pictures` examines its pictures afterwards.

        Args:
            number: its position.
            arrays: arrays `[n, ...]` by name, of any library, or `Pictures`; `n` may differ between them.
            rows: its number of rows.
            file: where it lies.
            nexts: next observations that `arrays` do not have, of which nothing else is checked.
        """
        fits: dict[str, Any] = {}
        for name, array in arrays.items():
            shape = None if isinstance(array, Pictures) else tuple(array.shape[1:])
            expected = self.shapes.setdefault(name, shape)
            if shape in {None, expected}:
                fits[name] = array
            else:
                text = f"rows are {list(shape or ())}, expected are {list(expected or ())}"
                self.add("shape-mismatch", text, Place(file, number, field=name))
        start, (numbers, pictures) = self.total, _divided(fits)
        for array in numbers.values():
            check_size(array)
        fields = {name: np.asarray(array[:]) for name, array in numbers.items()}
        self.rows.episode(Place(file, number), fields, rows, nexts)
        self._step(min(len(self.rows.lengths), self._episodes), self._episodes)
        for name, array in pictures.items():
            read = partial(map, array.__getitem__)
            self._waiting.append(partial(self.look, name, read, number, len(array), start, file))

    def pictures(self) -> None:
        """Examine the pictures of the episodes shown since the last call; best when the ranges of states are known."""
        while self._waiting:
            self._waiting.popleft()()

    def look(
        self,
        name: str,
        read: Callable[[list[int]], Iterable[Any]],
        number: int,
        rows: int,
        start: int,
        file: str | None,
    ) -> None:
        """Examine pictures of a camera in one episode, if those of this episode are to be looked at.

        Args:
            name: the camera.
            read: yields the pictures of rows of the episode, ascending: `[H, W, C]`, `[C, H, W]` or gray `[H, W]`.
            number: position of the episode.
            rows: its number of pictures.
            start: its first row in the dataset.
            file: where they lie.
        """
        if number % self._every or not rows:
            return
        some = np.linspace(0, rows - 1, min(rows, _FRAMES_PER_EPISODE)).astype(int).tolist()
        wanted = list(range(rows)) if self.full else some
        left, place = iter(wanted), Place(file, number, camera=name)
        frames = ((next(left), _gray(picture)) for picture in read(wanted))
        try:
            self.camera(name).episode(place, rows, start, frames)
        except READ_ERRORS as error:
            check = error.check if isinstance(error, WrongValueError) else "file-unreadable"
            text = f"a picture cannot be read: {first_line(error)}"
            self.add(check, text, place._replace(frame=next(left, None)))

    def camera(self, name: str) -> CameraChecks:
        """Return the checks of a camera."""
        return self.cameras.setdefault(name, CameraChecks(name, self))

    def whole(self, arrays: Mapping[str, Any], ends: Sequence[int], file: str | None = None) -> None:
        """Examine arrays that hold the rows of all episodes.

        Args:
            arrays: arrays `[rows, ...]` by name.
            ends: the row after the last one of each episode.
            file: where they lie.
        """
        self.expect(len(ends))
        numbers, pictures = _divided(arrays)
        readers = {name: _Reader(array) for name, array in numbers.items()}
        for number, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            fields: dict[str, Any] = {
                name: Pictures(range(start, stop), array.__getitem__) for name, array in pictures.items()
            }
            for name in list(readers):
                try:
                    fields[name] = readers[name].rows(start, stop)
                except READ_ERRORS as error:  # the array is left out from here on
                    self.add("file-unreadable", first_line(error), Place(file, number, field=name))
                    del readers[name]
            self.episode(number, fields, stop - start, file)
        self.pictures()

    def finish(self) -> None:
        """Check what needs the whole dataset."""
        self.rows.finish(self.profile)
        self.profile.cameras = [camera.profile() for camera in self.cameras.values()]
        count = sum(len(camera.times) for camera in self.cameras.values())
        self.decoded = self.decoded or (f"{number_of(count, 'picture')} looked at" if count else "")


def is_picture(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether an array `[rows, ...]` holds pictures: three dimensions, of which one is of colors."""
    if len(shape) != 4 or min(shape[1:]) > 4 or np.dtype(dtype).kind not in "uf":
        return False
    sides = sorted(shape[1:])
    return sides[0] in {1, 3, 4} and sides[1] >= 8


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


def _divided(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of numbers, and those of pictures, without the pictures of next observations."""
    pictures = {n: a for n, a in arrays.items() if isinstance(a, Pictures) or is_picture(a.shape, a.dtype)}
    numbers = {n: a for n, a in arrays.items() if n not in pictures and np.dtype(a.dtype).kind in "biuf"}
    return numbers, {name: array for name, array in pictures.items() if not name.startswith(_NEXT)}


def _gray(picture: Any) -> NDArray[np.uint8]:
    """Return a picture `[H, W, C]` or `[C, H, W]` as gray `[H, W]`; numbers from 0 to 1 are scaled to 255."""
    values = np.asarray(picture)
    if values.dtype == np.uint8 and values.ndim == 2:
        return values
    if values.ndim == 3:
        values = values.astype(np.float32).mean(int(np.argmin(values.shape)))
    if np.asarray(picture).dtype.kind == "f" and values.size and float(values.max()) <= 1.0:
        values = values * 255
    result: NDArray[np.uint8] = np.clip(np.nan_to_num(values), 0, 255).astype(np.uint8)
    return result


class _Reader:
    """Reads ranges of rows of an array one after the other, in large blocks."""

    def __init__(self, array: Any) -> None:
        self._array = array
        row = max(1, int(np.prod(array.shape[1:], dtype=np.int64)) * np.dtype(array.dtype).itemsize)
        self._rows = max(1, _BLOCK_BYTES // row // 8)
        self._first = 0
        self._block = np.zeros((0, *array.shape[1:]), array.dtype)

    def rows(self, start: int, stop: int) -> Array:
        """Return rows `[start, stop)`."""
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
