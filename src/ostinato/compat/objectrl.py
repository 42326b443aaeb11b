"""The replay buffer of ObjectRL, on top of Ostinato. `docs/compat/objectrl.md` lists the differences from the original.

A saved buffer is the file `<path>.metadata`, which ObjectRL can read, and a directory with the experience, which the
metadata names. A save writes a new directory, replaces the metadata with one rename, and then removes the old
directory. If it is interrupted, metadata and experience still match.
"""

from __future__ import annotations

import gc
import io
import pickle
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import torch

from ostinato import buffers
from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.buffers.options import positive
from ostinato.core.index import apply_index, plain_index
from ostinato.core.records import View
from ostinato.core.ring import Ring
from ostinato.durable import CheckpointReader, atomic_write
from ostinato.durable.progress import BYTES, Progress
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    EpochEndError,
    KindError,
    OptionError,
    UsageError,
)
from ostinato.samplers import SamplerWithoutReplacement
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensordict import TensorDict
    from torch import Tensor

    from ostinato.durable.progress import ProgressOption

__all__ = ["LoadReport", "Metadata", "ReplayBuffer"]


@final
class ReplayBuffer:
    """A buffer of the most recent experience, with TensorDicts as input and output.

    Rows are stored in memory-mapped files (`storing_device` is a CPU) or on a GPU; samples are copies on `device`.
    Samples are drawn with torch's global generator. Not thread-safe.

    Args:
        device: Device of samples.
        storing_device: Device of the stored rows, CPU or CUDA.
        buffer_size: Capacity; further rows replace the oldest.
        print_gc_warning: Warn when a write ran out of memory and is repeated after garbage collection.

    Raises:
        KindError: `buffer_size` is not an integer.
        OptionError: `buffer_size` is below 1, or the storing device is neither CPU nor CUDA.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> cpu = torch.device("cpu")
        >>> buffer = ReplayBuffer(device=cpu, storing_device=cpu, buffer_size=100)
        >>> buffer.add_batch(TensorDict({"obs": torch.zeros(8, 3), "reward": torch.ones(8)}, [8]))
        >>> len(buffer), buffer.sample_batch(4)["obs"].shape
        (8, torch.Size([4, 3]))
    """

    def __init__(
        self,
        device: torch.device | str,
        storing_device: torch.device | str,
        buffer_size: int,
        print_gc_warning: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self.device = torch.device(device)
        self.print_gc_warning = print_gc_warning
        self._storing_device = torch.device(storing_device)
        self._memory = self._make(buffer_size)
        self._epochs: _Epochs | None = None

    def _get_storage(self, buffer_size: int, device: torch.device) -> LazyMemmapStorage | LazyTensorStorage:
        """Return the storage for a device: memory-mapped files on a CPU, tensors on a GPU."""
        if device.type == "cpu":
            return LazyMemmapStorage(buffer_size)
        if device.type == "cuda":
            return LazyTensorStorage(buffer_size, device=device)
        msg = f"storing_device must be a CPU or CUDA device, got {device}"
        raise OptionError(msg)

    def _make(self, buffer_size: int, storing_device: torch.device | None = None) -> buffers.TensorDictReplayBuffer:
        storage = self._get_storage(positive("buffer_size", buffer_size), storing_device or self._storing_device)
        return buffers.TensorDictReplayBuffer(storage=storage)

    # -- sizes ------------------------------------------------------------------------------------------------

    @property
    def storing_device(self) -> torch.device:
        """Device of the stored rows. Setting it moves the rows."""
        return self._storing_device

    @storing_device.setter
    def storing_device(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._replace(self._make(self.buffer_size, device), self._newest(len(self)))
        self._storing_device = device

    @property
    def buffer_size(self) -> int:
        """Capacity. Setting it keeps the newest rows, from slot 0 on, oldest first."""
        return self._memory.storage.capacity

    @buffer_size.setter
    def buffer_size(self, buffer_size: int) -> None:
        fresh = self._make(buffer_size)
        self._replace(fresh, self._newest(min(buffer_size, len(self))))

    @property
    def data_size(self) -> int:
        """Number of rows stored. Setting it to a smaller number keeps the first slots."""
        return len(self._memory)

    @data_size.setter
    def data_size(self, rows: int) -> None:
        _check_range("data_size", rows, len(self), "add rows, or load() saved rows")
        if rows < len(self):
            self._replace(self._make(self.buffer_size), torch.arange(rows, device="cpu"))

    @property
    def pointer(self) -> int:
        """Slot of the next row. Setting it makes the next rows replace others, or follow the last row."""
        return self._memory.cursor

    @pointer.setter
    def pointer(self, slot: int) -> None:
        _check_range("pointer", slot, min(len(self), self.buffer_size - 1), "there must be no empty slots between rows")
        self._memory._engine.store.move_cursor(slot)  # noqa: SLF001 (no public way: parts that rely on ring order would fail)

    @property
    def size(self) -> int:
        """Number of rows stored."""
        return len(self)

    def __len__(self) -> int:
        """Return the number of rows stored."""
        return len(self._memory)

    def __repr__(self) -> str:
        """Return devices and sizes."""
        return (
            f"{type(self).__name__}(device={self.device}, storing_device={self.storing_device}, "
            f"buffer_size={self.buffer_size}, data_size={self.data_size}, pointer={self.pointer})"
        )

    def _newest(self, rows: int) -> Tensor:
        """Return the slots of the newest rows, oldest first."""
        held = len(self)
        first = self.pointer if held == self.buffer_size else 0
        return (torch.arange(held - rows, held, device="cpu") + first) % max(held, 1)

    def _replace(self, fresh: buffers.TensorDictReplayBuffer, slots: Tensor) -> None:
        """Replace the underlying buffer by `fresh` and copy the rows at `slots` to it."""
        if slots.numel():
            fresh.extend(self._memory[slots])
        if self._epochs is not None:
            self._epochs.end()
        self._memory, self._epochs = fresh, None

    # -- writing ----------------------------------------------------------------------------------------------

    def reset(self, buffer_size: int | None = None) -> None:
        """Remove all rows, their schema and the epoch iterator; release memory and disk space.

        Args:
            buffer_size: New capacity; None keeps it.
        """
        self._replace(
            self._make(self.buffer_size if buffer_size is None else buffer_size), torch.arange(0, device="cpu")
        )

    def add(self, experience: TensorDict) -> None:
        """Add one row: a TensorDict without batch dimensions, on any device.

        Raises:
            KindError: `experience` is not a TensorDict.
            SchemaError: A field does not match the stored rows; nothing is changed.
            StorageMemoryError: There is not enough memory, even after garbage collection.
        """
        self._write(lambda: self._memory.add(experience))

    def add_batch(self, batch: TensorDict) -> None:
        """Add rows `[B]` in order; see `add`. If there are more than `buffer_size`, the last ones are kept."""
        self._write(lambda: self._memory.extend(batch))

    def _write(self, write: Callable[[], Any]) -> None:
        """Write; if memory, disk space or file handles run out, collect garbage and write again."""
        try:
            write()
        except (MemoryError, OSError, torch.cuda.OutOfMemoryError) as error:
            if self.print_gc_warning:
                msg = f"a write failed ({error}): repeating it after garbage collection"
                warnings.warn(msg, RuntimeWarning, stacklevel=3)
        else:
            return
        gc.collect()  # outside the except block, where the traceback keeps objects alive
        write()

    # -- reading ----------------------------------------------------------------------------------------------

    def sample_batch(self, batch_size: int) -> TensorDict:
        """Sample rows uniformly with replacement.

        Args:
            batch_size: Number of rows.

        Returns:
            A TensorDict `[batch_size]` on `device` with the slots of the rows as `index`. A copy.

        Raises:
            EmptyBufferError: The buffer is empty.
        """
        batch: TensorDict = self._memory.sample(positive("batch_size", batch_size))
        return batch.to(self.device)

    def sample_random(self, batch_size: int) -> TensorDict:
        """Same as `sample_batch`."""
        return self.sample_batch(batch_size)

    def sample_by_index(self, indices: list[int] | Tensor | range) -> TensorDict:
        """Read rows by slot; negative slots count from the end.

        Returns:
            A TensorDict `[len(indices)]` on `device`. A copy.

        Raises:
            SlotError: A slot is out of range.
        """
        rows: TensorDict = self._memory[_check_indices(indices)]
        return rows.to(self.device)

    def sample_by_index_fields(
        self, indices: list[int] | Tensor | range, fields: list[str]
    ) -> Tensor | tuple[Tensor, ...]:
        """Read some fields of rows by slot; other fields are not read.

        Args:
            indices: See `sample_by_index`.
            fields: Names; tuples for nested fields.

        Returns:
            For one field a tensor `[len(indices), *shape]` on `device`, for several a tuple of tensors. Copies.

        Raises:
            KeyMissingError: A field does not exist.
            SlotError: A slot is out of range.
        """
        _check_names(fields)
        index = plain_index(_check_indices(indices))
        columns = [self._memory[field] for field in fields]
        picked = tuple(apply_index(column, index.to(column.device)).to(self.device) for column in columns)
        return picked[0] if len(picked) == 1 else picked

    def sample_all(self) -> TensorDict:
        """Read all rows in the order of their slots, which is the order of writing until the buffer is full. A copy.

        Raises:
            UsageError: The buffer is empty.
        """
        return self.sample_by_index(range(len(self)))

    # -- epochs -----------------------------------------------------------------------------------------------

    def calculate_num_batches(self, batch_size: int) -> int:
        """Return the number of batches per epoch over the stored rows, including a smaller last batch."""
        return -(-len(self) // positive("batch_size", batch_size))

    def create_epoch_iterator(self, batch_size: int, n_epochs: int = 1) -> Iterator[TensorDict]:
        """Start epochs. Each epoch has every row stored now exactly once, in a new random order.

        `get_next_batch` continues the same iterator. Rows added later are not included; if they replace rows, the
        iterator returns the new contents of the slots.

        Args:
            batch_size: Rows per batch; the last batch of an epoch can be smaller.
            n_epochs: Number of epochs, at least 1.

        Returns:
            An iterator over `n_epochs * calculate_num_batches(batch_size)` TensorDicts on `device`.
        """
        size, epochs = positive("batch_size", batch_size), positive("n_epochs", n_epochs)
        self._epochs = _Epochs(self.sample_by_index, len(self), size, epochs)
        return self._epochs

    def get_next_batch(self, batch_size: int) -> TensorDict:
        """Return the next batch of the epoch iterator, or a random batch if there is no iterator.

        Args:
            batch_size: Rows of a random batch; the iterator has its own batch size.

        Raises:
            EpochEndError: The iterator is exhausted; a subclass of `StopIteration`.
            EmptyBufferError: The buffer is empty.
        """
        epochs = self._epochs
        if epochs is None:
            return self.sample_batch(batch_size)
        try:
            return next(epochs)
        except StopIteration:
            msg = (
                f"the epochs are over: all {epochs.batches} batches were returned; call create_epoch_iterator() or "
                "get_steps_and_iterator() for new epochs (n_epochs=0 for random batches)"
            )
            raise EpochEndError(msg) from None

    def get_steps_and_iterator(self, n_epochs: int, max_iter: int, batch_size: int) -> int:
        """Start epochs or return to random batches; return the number of batches to request from `get_next_batch`.

        Args:
            n_epochs: Number of epochs; 0 ends the iterator, and `get_next_batch` samples at random.
            max_iter: Number of batches if `n_epochs` is 0; otherwise ignored.
            batch_size: Rows per batch.

        Returns:
            `n_epochs * calculate_num_batches(batch_size)`, or `max_iter`.
        """
        if n_epochs != 0:
            self.create_epoch_iterator(batch_size, n_epochs)
            return positive("n_epochs", n_epochs) * self.calculate_num_batches(batch_size)
        _check_range("max_iter", max_iter, None, "it is the number of random batches")
        self._epochs = None
        return max_iter

    # -- saving -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, metadata_only: bool = False, progress: ProgressOption = None) -> None:
        """Write `<path>.metadata`, which ObjectRL can read, and the experience.

        The save is atomic: until it is complete, an earlier save under the same path stays valid.

        Args:
            path: Path without extension; missing directories are created.
            metadata_only: Do not save the experience; the experience of an earlier save is then no longer loaded.
            progress: The bytes done and their total; see `ostinato.ProgressOption`.

        Raises:
            StorageMemoryError: There is not enough disk space.
        """
        numbers = Metadata(self.buffer_size, self.data_size, self.pointer)
        with Progress(progress, "save", unit=BYTES):
            _save_files(str(path), numbers, None if metadata_only else self._memory.dumps)

    def load(self, path: str | Path, *, progress: ProgressOption = None) -> LoadReport:
        """Load experience and metadata, or the metadata only, with a warning.

        Without experience, an empty buffer takes `buffer_size` from the metadata, and a buffer that already has
        `data_size` rows takes `pointer`. Sizes of missing rows are reported, not restored.

        Args:
            path: The path that was passed to `save`.
            progress: The bytes done and their total; see `ostinato.ProgressOption`.

        Returns:
            What was restored.

        Raises:
            CheckpointNotFoundError: There is no such file; nothing is changed.
            CheckpointError: Metadata and experience contradict each other; nothing is changed.
            DamagedFileError: A file is damaged; nothing is changed.
        """
        metadata, name, told = _read_metadata(str(path))
        directory = _find_experience(str(path), metadata, name, told=told)
        if directory is not None:
            fresh = self._make(metadata.buffer_size)
            with Progress(progress, "load", unit=BYTES):
                fresh.loads(directory)
            self._replace(fresh, torch.arange(0, device="cpu"))
            return LoadReport(str(path), metadata, (*Metadata._fields, "experience"), len(self))
        if len(self) == 0:
            self.reset(metadata.buffer_size)
            return LoadReport(str(path), metadata, ("buffer_size",), 0)
        if (self.buffer_size, self.data_size) != metadata[:2]:
            msg = (
                f"{path}.metadata has buffer_size={metadata.buffer_size}, data_size={metadata.data_size} and no "
                f"experience, but this buffer holds {len(self)} rows of {self.buffer_size}: reset() it first"
            )
            raise CheckpointError(msg)
        self.pointer = metadata.pointer
        return LoadReport(str(path), metadata, Metadata._fields, 0)


def _check_indices(indices: Any) -> Any:
    """Check that indices select a batch of rows."""
    shape = list(indices.shape) if isinstance(indices, torch.Tensor) else None
    if not isinstance(indices, (list, range, torch.Tensor)) or (shape is not None and len(shape) != 1):
        shown = repr(indices) if shape is None else f"a tensor of shape {shape}"
        msg = f"indices must be a list, a range or a tensor [B], got {shown}"
        raise KindError(msg)
    return indices


def _check_range(name: str, given: Any, most: int | None, hint: str) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0 or (most is not None and given > most):
        msg = f"{name} must be {'a non-negative integer' if most is None else f'in [0, {most}]'}, got {given!r}: {hint}"
        raise OptionError(msg)


def _check_names(fields: Any) -> None:
    if not isinstance(fields, (list, tuple)) or not fields:
        msg = f"fields must be a list of names, such as ['obs'], got {fields!r}"
        raise KindError(msg)


@final
class _Epochs:
    """An iterator over the batches of several epochs, each with every row once in a new random order.

    Args:
        read: Returns the rows of slots, int64 `[B]`.
        rows: Rows of an epoch: the slots `[0, rows)`.
        batch_size: Rows per batch; the last batch of an epoch can be smaller.
        n_epochs: Number of epochs.
    """

    def __init__(self, read: Callable[[Tensor], TensorDict], rows: int, batch_size: int, n_epochs: int) -> None:
        self.batches = n_epochs * -(-rows // batch_size)
        """Total number of batches."""
        self._read = read
        self._batch_size = batch_size
        self._sampler = SamplerWithoutReplacement()
        self._view = View(
            rows, rows, 0, Ring(rows), torch.device("cpu")
        )  # a fixed view: new rows do not join the epoch
        self._left = self.batches
        self._ended = False

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> TensorDict:
        """Return the next batch.

        Raises:
            UsageError: The buffer was reset, resized or loaded.
        """
        if self._ended:
            msg = "the buffer was reset, resized or loaded since this iterator was created: create a new one"
            raise UsageError(msg)
        if self._left == 0:
            raise StopIteration
        batch = self._read(self._sampler.draw(self._view, self._batch_size, None).slots)
        self._left -= 1
        return batch

    def end(self) -> None:
        """Invalidate the iterator, because the rows were removed."""
        self._ended = True


_NUMBERS = ("buffer_size", "data_size", "pointer")


class Metadata(NamedTuple):
    """Capacity, number of rows, and the slot of the next row."""

    buffer_size: int
    data_size: int
    pointer: int


class LoadReport(NamedTuple):
    """The result of `load`; `str` returns a sentence."""

    path: str
    """The path that was passed to `load`."""
    metadata: Metadata
    """The contents of the metadata file."""
    restored: tuple[str, ...]
    """Which of `buffer_size`, `data_size`, `pointer` and `experience` were restored."""
    rows: int
    """Number of rows loaded."""

    def __str__(self) -> str:
        """Return the report as a sentence."""
        found = f"{self.rows} rows of experience" if "experience" in self.restored else "no experience"
        return f"{self.path}: restored {', '.join(self.restored) or 'nothing'} ({found} found)"


def _save_files(path: str, metadata: Metadata, dump: Callable[[Path], None] | None) -> None:
    """Write metadata, and the experience with `dump`, unless it is None.

    Raises:
        StorageMemoryError: There is not enough disk space; an earlier save stays valid.
    """
    target = _metadata_file(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    before = _previous_directory(path)
    name = None
    if dump is not None:
        directory = next(place for place in _directories(path) if place.name != before)
        dump(directory)
        name = directory.name
    file = io.BytesIO()
    torch.save({**metadata._asdict(), "experience": name}, file)
    atomic_write(target, file.getbuffer())
    for place in _directories(path) if name is not None else ():
        if place.name != name:
            shutil.rmtree(place, ignore_errors=True)


def _read_metadata(path: str) -> tuple[Metadata, str | None, bool]:
    """Read `<path>.metadata`, written by Ostinato or ObjectRL, without executing code in it.

    Returns:
        The numbers; the name of the directory with the experience (None if there is none); and whether the file has
        that entry, which ObjectRL does not write.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CheckpointError: It is a directory, or its numbers contradict each other.
        DamagedFileError: It is damaged or not a metadata file.
    """
    file = _metadata_file(path)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        msg = f"there is no {file}: give the path that was given to save(), without '.metadata'"
        raise CheckpointNotFoundError(msg) from None
    except IsADirectoryError as error:
        msg = f"{file} is a directory, give the path that was given to save(), without '.metadata'"
        raise CheckpointError(msg) from error
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        msg = f"{file} is damaged or not a metadata file: {str(error).splitlines()[0] if str(error) else error!r}"
        raise DamagedFileError(msg) from error
    if not isinstance(found, dict) or any(type(found.get(name)) is not int for name in _NUMBERS):
        msg = f"{file} must hold the integers {', '.join(_NUMBERS)}, got {_describe(found)}"
        raise DamagedFileError(msg)
    numbers = Metadata(*(found[name] for name in _NUMBERS))
    size, rows, pointer = numbers
    if not (size > 0 and 0 <= rows <= size and 0 <= pointer < size and pointer <= rows):
        msg = f"{file} contradicts itself: {_describe(numbers._asdict())}"
        raise CheckpointError(msg)
    name = found.get("experience")
    if name is not None and name not in {place.name for place in _directories(path)}:
        msg = f"{file} has the experience {name!r}, which is not a directory name for this path"
        raise DamagedFileError(msg)
    return numbers, name, "experience" in found


def _find_experience(path: str, metadata: Metadata, name: str | None, *, told: bool) -> Path | None:
    """Return the directory with the experience for the metadata. If there is none, warn and return None.

    Raises:
        CheckpointError: There is experience that does not match the metadata.
        DamagedFileError: The experience is damaged.
    """
    candidates = [place for place in _directories(path) if place.exists() and (not told or place.name == name)]
    differs = ""
    for directory in candidates:
        held = _saved_sizes(directory)
        if held == metadata:
            return directory
        differs = f"{directory} holds {_describe(held._asdict())}"
    if differs:
        msg = (
            f"{_metadata_file(path)} has {_describe(metadata._asdict())}, but {differs}: they are not of one save; "
            "remove the wrong one"
        )
        raise CheckpointError(msg)
    missing = f" {_metadata_file(path).with_name(name)} is missing" if name is not None else ""
    msg = f"{_metadata_file(path)} comes without experience: only metadata is restored.{missing}"
    warnings.warn(msg, UserWarning, stacklevel=3)
    return None


def _saved_sizes(directory: Path) -> Metadata:
    """Return the sizes of a checkpoint without reading its rows."""
    try:
        state = CheckpointReader(directory, format_name=FORMAT).state()
        storage = state["storage"]["state"]
        return Metadata(
            int(storage["capacity"]),
            int(storage["rows"]),
            int(state["writer"]["state"].get("cursor", state["stamps"]["cursor"])),
        )
    except (KeyError, TypeError) as error:
        msg = f"{directory} has no valid state ({error!r}): it was not written by save()"
        raise DamagedFileError(msg) from error


def _previous_directory(path: str) -> str | None:
    """Return the directory of an earlier save, which must be kept until the new save is complete."""
    try:
        _, name, told = _read_metadata(path)
    except CheckpointError:
        return None
    return name if told else next((place.name for place in _directories(path) if place.exists()), None)


def _directories(path: str) -> tuple[Path, Path]:
    """Return the two directories that saves use alternately."""
    file = Path(path)
    return file.with_name(f"{file.name}.experience-0"), file.with_name(f"{file.name}.experience-1")


def _metadata_file(path: str) -> Path:
    file = Path(path)
    return file.with_name(f"{file.name}.metadata")


def _describe(found: object) -> str:
    if not isinstance(found, dict):
        return f"a {type(found).__name__}"
    return ", ".join(f"{key}={value!r}" for key, value in list(found.items())[:5]) or "an empty dict"
