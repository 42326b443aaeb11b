"""What checks of datasets tell: faults at places. Reading a dataset raises the first one, the doctor collects them."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, final

import numpy as np

from ostinato.errors import DamagedFileError, MissingFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ostinato.datasets.lerobot_stats import Moments

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

Severity: TypeAlias = Literal["error", "warning", "note"]
"""`error`: rows cannot be read, or are wrong. `warning`: probably a fault of the recording. `note`: good to know."""

READ_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError)
READ_ERRORS += (EOFError, ArithmeticError, MemoryError, SyntaxError, zipfile.BadZipFile, zlib.error)
"""What libraries raise for damaged files."""

_FRAMES_PER_EPISODE = 12
_MOST_FRAMES = 2400
"""Frames of each camera that are decoded unless all are."""
_PLAUSIBLE_BYTES = 64 << 20
_MOST_COMPRESSED = 2000


class Check(NamedTuple):
    """One kind of finding."""

    severity: Severity
    """Usual severity; a single finding may have another."""
    advice: str
    """What to do."""


_RESTORE = "restore the file from a copy, or remove its episodes from the dataset"
_META = "correct the metadata, or write it again from the data with the tool that made the dataset"
_ROWS = "record these episodes again, or remove them"

CHECKS: dict[str, Check] = {
    # files and metadata
    "file-missing": Check("error", _RESTORE),
    "file-unreadable": Check("error", _RESTORE),
    "file-unlisted": Check("note", "remove the file, or add its episodes to the metadata"),
    "metadata-invalid": Check("error", _META),
    "count-mismatch": Check("error", _META),
    "split-invalid": Check("error", _META),
    # fields
    "field-missing": Check("error", "write the field, or remove it from the metadata"),
    "field-unlisted": Check("note", "describe the field in the metadata if it should be read"),
    "dtype-mismatch": Check("error", "cast the field, or correct its dtype in the metadata"),
    "shape-mismatch": Check("error", "correct the rows, or the shape in the metadata"),
    "value-null": Check("error", _ROWS),
    # episodes
    "episode-length": Check("error", "correct the length in the metadata, or write the missing rows"),
    "episode-bounds": Check("error", _META),
    "episode-duplicate": Check("warning", "remove the copies: they are sampled more often than other episodes"),
    "index-order": Check("error", "number the rows again, or put them in order"),
    "timestamp-order": Check("error", "sort the rows by time, or record the episode again"),
    "timestamp-rate": Check("warning", "write timestamps of frame / fps, or correct fps"),
    # values
    "value-nan": Check("error", "remove or fill the rows before training"),
    "value-infinite": Check("error", "remove or fill the rows before training"),
    "value-jump": Check("warning", "look at the steps around it (ostinato view), and cut the episode there"),
    "dimension-constant": Check("note", "leave the dimension out, or do not divide by its standard deviation"),
    "dimension-saturated": Check("note", "check the range of the sensor or the limits of the action"),
    "reward-constant": Check("note", "use it for imitation, or add rewards"),
    "flag-missing": Check("note", "episodes end where the dataset says, without a reason: value targets need one"),
    "episode-joined": Check(
        "warning",
        "mark the last row of each episode, also at time limits, and write the rows of each environment by themselves",
    ),
    "flag-position": Check("warning", "split the episode there, or clear the flag"),
    "statistics-mismatch": Check("warning", "compute the statistics again: normalization uses them"),
    # tasks
    "task-unknown": Check("error", "add the task to the table of tasks, or correct the rows"),
    "task-mismatch": Check("warning", "let the table of episodes name the tasks that the rows have"),
    "task-unused": Check("warning", "remove the task, or look for its missing episodes"),
    "task-text": Check("warning", "give each task one text of its own"),
    # cameras
    "video-frames": Check("error", "encode the video again from its pictures, one frame for each row"),
    "video-bounds": Check("error", _META),
    "video-rate": Check("error", "encode the video at the fps of the dataset, without changing its frames"),
    "video-size": Check("error", "correct the shape in the metadata, or encode the video again"),
    "video-codec": Check("error", "install a build of PyAV with this decoder, or encode the video again"),
    "camera-blank": Check("warning", "check cable and exposure; record these episodes again, or leave the camera out"),
    "camera-frozen": Check("warning", "check cable and driver; record these episodes again, or leave the camera out"),
    # saved by Ostinato or RLinf
    "not-opened": Check("error", "the message says what open_dataset needs"),
    "saved-damaged": Check("error", "restore the file from a copy"),
}
"""All checks by name. `docs/doctor.md` describes each."""


class Place(NamedTuple):
    """Where a fault is; what does not apply is None."""

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


WHOLE = Place()
"""The whole dataset."""


@final
class Pictures:
    """Pictures that are stored encoded, one in each row.

    Args:
        rows: what is stored, in any sequence.
        decode: returns the picture that a row holds.
    """

    def __init__(self, rows: Any, decode: Callable[[Any], Any]) -> None:
        self._rows, self._decode = rows, decode

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self._decode(self._rows[row])


class Faults(Protocol):
    """Takes faults. What adds one goes on with what it can still read, unless `add` raises."""

    def add(self, check: str, message: str, place: Place = WHOLE, *, severity: Severity | None = None) -> None:
        """Add what a check has found; its severity is the usual one of the check unless given."""


@final
class FirstFault:
    """`Faults` that raises the first error; warnings and notes pass.

    Args:
        root: the dataset.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, check: str, message: str, place: Place = WHOLE, *, severity: Severity | None = None) -> None:
        """Raise the error of a check.

        Raises:
            MissingFileError: if a file is missing.
            DamagedFileError: for all other errors.
        """
        if (severity or CHECKS[check].severity) == "error":
            msg = f"{self._root / (place.file or '')}: {message}"
            raise (MissingFileError if check == "file-missing" else DamagedFileError)(msg)


class Camera(Protocol):
    """An examination of the pictures of one camera."""

    name: str
    decoded: int
    """Number of pictures seen."""

    @property
    def brightness(self) -> Array:
        """Mean of each picture seen, from 0 to 255 `[n]`."""

    def episode(
        self, number: int, rows: int, start: int, frames: Iterable[tuple[int, Array]], file: str | None
    ) -> None:
        """Examine pictures of one episode.

        Args:
            number: position of the episode.
            rows: its number of rows.
            start: its first row in the dataset.
            frames: rows of the episode and their pictures, gray uint8 `[H, W]`, in ascending order.
            file: where they lie.
        """


class Examination(Faults, Protocol):
    """An examination of a dataset by the doctor, to which the module of a format shows what the files hold."""

    full: bool
    """Whether all pictures are looked at; else some of each episode."""
    fps: float | None
    """Rows per second, where the format knows."""
    decoded: str
    """Which pictures were looked at, in words, where a format says more than their number."""
    end_flags: bool
    """Whether `done`, `terminated` and `truncated` may only be set in the last row of an episode."""

    @property
    def total(self) -> int:
        """Rows of the episodes shown so far."""

    def expect(self, episodes: int) -> None:
        """Begin a pass over so many episodes."""

    def episode(self, number: int, arrays: Mapping[str, Any], rows: int, file: str | None = None) -> dict[str, Any]:
        """Examine the numbers of an episode.

        Args:
            number: its position.
            arrays: arrays `[n, ...]` by name, of any library, or `Pictures`; `n` may differ between them.
            rows: its number of rows.
            file: where it lies.

        Returns:
            The arrays that hold pictures, if those of this episode are to be looked at: see `look`.
        """

    def look(
        self, name: str, picture: Callable[[int], Any], number: int, rows: int, start: int, file: str | None
    ) -> None:
        """Examine pictures of a camera in one episode.

        Args:
            name: the camera.
            picture: returns the picture of a row of the episode: `[H, W, C]`, `[C, H, W]` or gray `[H, W]`.
            number: position of the episode.
            rows: its number of pictures.
            start: its first row in the dataset.
            file: where they lie.
        """

    def whole(self, arrays: Mapping[str, Any], ends: Sequence[int], file: str | None = None) -> None:
        """Examine arrays that hold the rows of all episodes.

        Args:
            arrays: arrays `[rows, ...]` by name.
            ends: the row after the last one of each episode.
            file: where they lie.
        """

    def camera(self, name: str) -> Camera:
        """Return the examination of a camera, for frames that come one after the other."""

    def steps(self) -> Callable[[int, int], None]:
        """Begin a pass; return what is called with the number of its items done and their total."""

    def moments(self, name: str) -> Moments | None:
        """Return the statistics of a field, None if it was not shown."""

    def add_jitter(self, milliseconds: float) -> None:
        """Note the largest distance of a step in time from the usual one in an episode, for plots."""

    def zero_share(self, name: str) -> float:
        """Return the share of rows of a field that are all zeros, of evenly spaced ones."""

    def is_state(self, name: str) -> bool:
        """Whether a field holds observations."""


def first_line(error: BaseException) -> str:
    """Return the message of an error on one line, its class if it has none."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def read_file(root: Path, place: Place, read: Callable[[Path], T], faults: Faults) -> T | None:
    """Return what a function reads from a file of a dataset; None if it cannot be read."""
    try:
        return read(root / (place.file or ""))
    except FileNotFoundError:
        faults.add("file-missing", "it is missing: the dataset needs it", place)
    except READ_ERRORS as error:
        faults.add("file-unreadable", f"it cannot be read: {first_line(error)}", place)
    return None


def read_object(root: Path, place: Place, faults: Faults) -> dict[str, Any] | None:
    """Return the object in a file of JSON; None if there is none."""
    found = read_file(root, place, lambda path: [json.loads(path.read_text("utf-8"))], faults)
    if found is None or isinstance(found[0], dict):
        return None if found is None else found[0]
    faults.add("metadata-invalid", "it is no JSON object", place)
    return None


def usual_rows(sizes: Iterable[int]) -> int:
    """Return the number of rows that most arrays have, 0 if there are none."""
    counts = Counter(sizes)
    return int(counts.most_common(1)[0][0]) if counts else 0


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


def sampled_episodes(count: int, *, full: bool) -> list[int]:
    """Return the positions of episodes whose frames are decoded: evenly spaced, all if `full`."""
    most = _MOST_FRAMES // _FRAMES_PER_EPISODE
    return list(range(count)) if full or count <= most else np.linspace(0, count - 1, most).astype(int).tolist()


def sampled_frames(length: int, *, full: bool) -> list[int]:
    """Return the rows of an episode whose frames are decoded: evenly spaced with both ends, all if `full`."""
    if full or length <= _FRAMES_PER_EPISODE:
        return list(range(length))
    return sorted(set(np.linspace(0, length - 1, _FRAMES_PER_EPISODE).astype(int).tolist()))
