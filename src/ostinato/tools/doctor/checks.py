"""The checks of the doctor: the name of each, its usual severity, and what to do about what it finds."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["CHECKS", "Check", "Severity"]

Severity: TypeAlias = Literal["error", "warning", "note"]
"""`error`: rows cannot be read, or are wrong. `warning`: probably a fault of the recording. `note`: good to know."""


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
