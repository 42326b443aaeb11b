"""The exception tree: every error also inherits the nearest built-in, so old `except` lines still work."""

from __future__ import annotations

import sys
import warnings
from errno import ENOENT

__all__ = [
    "CapacityError",
    "CastWarning",
    "CheckpointError",
    "CheckpointNotFoundError",
    "DamagedFileError",
    "DirectoryInUseError",
    "EmptyBufferError",
    "EpisodesError",
    "EpisodesWarning",
    "EpochEndError",
    "KeyMissingError",
    "KindError",
    "LostBufferError",
    "MissingExtraError",
    "MissingFileError",
    "NoAnswerError",
    "NoPermitError",
    "NoTensorDictError",
    "OptionError",
    "OstinatoError",
    "PriorityError",
    "PriorityShapeError",
    "SavedOverError",
    "SchemaError",
    "SlotError",
    "StackError",
    "StorageMemoryError",
    "TooFewRowsError",
    "UsageError",
    "WaitTimeoutError",
]


class OstinatoError(Exception):
    """Root of every error that Ostinato raises on purpose."""


class SchemaError(OstinatoError, ValueError):
    """Rows do not match what the storage holds: shape, dtype, key set or nesting."""


class KeyMissingError(SchemaError, KeyError):
    """A field that was asked for, or that rows must have, is not there."""

    def __str__(self) -> str:
        """Return the message itself (`KeyError` would show its repr)."""
        return str(self.args[0]) if self.args else ""


class KindError(OstinatoError, TypeError):
    """A value of a kind that this part does not take."""


class NoTensorDictError(KindError, SchemaError):
    """Rows are not TensorDicts, where nothing else can be written."""


class StackError(SchemaError, KindError, RuntimeError):
    """Rows given as a list cannot be stacked: they differ in kind, keys or shape."""


class CapacityError(OstinatoError, ValueError):
    """A capacity that is not positive, or too small for what is asked of it."""


class OptionError(OstinatoError, ValueError):
    """An argument out of its range, or two arguments that exclude each other."""


class PriorityError(OstinatoError, ValueError):
    """Priorities that are negative or not finite, or leave no row that could be drawn."""


class EmptyBufferError(OstinatoError, RuntimeError):
    """Rows were asked of a buffer that has none."""


class TooFewRowsError(EmptyBufferError, OptionError):
    """A full batch was asked of fewer rows than it has."""


class EpisodesError(SchemaError, RuntimeError, TypeError):
    """Rows do not tell where episodes end: there are no fields, or a field has several values for each row."""


class EpochEndError(OstinatoError, StopIteration):
    """A batch was asked of an epoch iterator that has given all of its batches."""


class UsageError(OstinatoError, RuntimeError):
    """A call that this object cannot serve in the state it is in."""


class PriorityShapeError(SchemaError, UsageError):
    """Priorities do not have the shape of their index; a `RuntimeError`, as in TorchRL."""


class DirectoryInUseError(OptionError, UsageError):
    """A directory of mapped files belongs to another storage."""


class WaitTimeoutError(OstinatoError, TimeoutError):
    """Readers or writers waited for each other as long as they were told to."""


class SlotError(OstinatoError, IndexError):
    """An index outside the rows stored."""


class StorageMemoryError(OstinatoError, MemoryError):
    """More memory or disk was asked for than there is."""


class CheckpointError(OstinatoError, ValueError):
    """A checkpoint cannot be written, or does not fit the buffer that loads it."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing is saved at the path: it does not exist, or the directory holds no checkpoint and no trajectories."""

    errno = ENOENT


class SavedOverError(CheckpointError):
    """Another checkpoint has replaced the one being read: read again."""


class DamagedFileError(CheckpointError):
    """A file of a checkpoint is damaged, truncated or not ours."""


class MissingFileError(DamagedFileError, FileNotFoundError):
    """A file that a checkpoint names is missing; the rest of the checkpoint is there."""

    errno = ENOENT


class LostBufferError(OstinatoError, RuntimeError):
    """The process that held a buffer is gone, and its rows with it."""


class NoAnswerError(LostBufferError, TimeoutError):
    """An actor did not answer in time: it is stopped, overloaded or not reachable. The call may still take effect."""


class NoPermitError(NoAnswerError, WaitTimeoutError):
    """The rate limiter did not answer in time. Nothing has changed."""


class MissingExtraError(OstinatoError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class CastWarning(UserWarning):
    """Values are rounded to the dtype of the field that they are written to; given once per field and buffer."""


class EpisodesWarning(UserWarning):
    """Rows that a buffer takes for steps of one episode do not follow each other; given once per buffer."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this package."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 (warnings has skip_file_prefixes from Python 3.12 on)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "ostinato":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
