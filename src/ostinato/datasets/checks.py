"""What checks of datasets tell: faults at places. Reading a dataset raises the first one, the doctor collects them."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, final

import numpy as np

from ostinato.core.options import number_of
from ostinato.errors import DamagedFileError, MissingFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path


T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

Severity: TypeAlias = Literal["error", "warning", "note"]
"""`error`: rows cannot be read, or are wrong. `warning`: probably a fault of the recording. `note`: good to know."""

READ_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError)
READ_ERRORS += (EOFError, ArithmeticError, MemoryError, SyntaxError, SystemError, zipfile.BadZipFile, zlib.error)
"""What libraries raise for damaged files."""


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


class WrongValueError(ValueError):
    """A value of a column that is not what is expected.

    Args:
        row: its row, counted from the first one of the column.
        what: what is wrong.
        check: the check that finds it.
    """

    def __init__(self, row: int, what: str, check: str = "dtype-mismatch") -> None:
        super().__init__(what)
        self.row, self.check = row, check


class Faults(Protocol):
    """Takes faults: `FirstFault` or `Examination`. What adds one goes on with what it can read, unless `add` raises."""

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
            row = "" if place.frame is None else f", episode {place.episode}, frame {place.frame}"
            msg = f"{self._root / (place.file or '')}{row}: {message}"
            raise (MissingFileError if check == "file-missing" else DamagedFileError)(msg)


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


def check_fields(names: Collection[str], needed: Iterable[str], whose: str, place: Place, faults: Faults) -> None:
    """Check that there are fields, or fields below them; `whose` they are is for the message."""
    for name in needed:
        if name not in names and not any(key.startswith(f"{name}/") for key in names):
            faults.add("field-missing", f"{whose} has no {name}", place._replace(field=name))


def check_numbers(found: Array, expected: Any, name: str, place: Place, faults: Faults) -> None:
    """Compare the numbers of rows `[n]` in a field with those expected, `[n]` or one for all."""
    wrong = np.flatnonzero(found != expected)
    if wrong.shape[0]:
        at = int(wrong[0])
        value = np.broadcast_to(expected, found.shape)[at]
        text = f"{name} is {found[at]} where {value} is expected ({number_of(wrong.shape[0], 'row')} off)"
        faults.add("index-order", text, place._replace(frame=at, field=name))


def usual_rows(sizes: Iterable[int]) -> int:
    """Return the number of rows that most arrays have, 0 if there are none."""
    counts = Counter(sizes)
    return int(counts.most_common(1)[0][0]) if counts else 0
