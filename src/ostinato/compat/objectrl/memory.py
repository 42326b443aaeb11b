"""ObjectRL's experience memory. A door: storage, samplers and ring are the engine's."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato import buffers
from ostinato.buffers.options import positive
from ostinato.compat.objectrl.epochs import Epochs
from ostinato.compat.objectrl.saved import LoadReport, Metadata, find_experience, read_metadata, write
from ostinato.core.index import apply_index, plain_index
from ostinato.errors import CheckpointError, EpochEndError, KindError, OptionError
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

__all__ = ["ReplayBuffer"]


@final
class ReplayBuffer:
    """A memory of the newest experience, TensorDict in and TensorDict out.

    Rows are kept in memory-mapped files (`storing_device` CPU) or on a GPU; what is sampled is a copy on `device`.
    Draws follow torch's global generator. Serves one thread at a time.

    Args:
        device: where samples go.
        storing_device: where rows are kept: a CPU or CUDA device.
        buffer_size: most rows kept; further ones replace the oldest.
        print_gc_warning: warn when a write found no room and is tried again after garbage collection.

    Raises:
        KindError: if `buffer_size` is not an integer.
        OptionError: if it is below 1, or for another storing device.

    Example:
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
        self._epochs: Epochs | None = None

    def _get_storage(self, buffer_size: int, device: torch.device) -> LazyMemmapStorage | LazyTensorStorage:
        """Return the storage for a device: files on the CPU, tensors on a GPU."""
        if device.type == "cpu":
            return LazyMemmapStorage(buffer_size)
        if device.type == "cuda":
            return LazyTensorStorage(buffer_size, device=device)
        msg = f"storing_device must be a CPU or CUDA device, got {device}"
        raise OptionError(msg)

    def _make(self, buffer_size: int, storing_device: torch.device | None = None) -> buffers.TensorDictReplayBuffer:
        storage = self._get_storage(positive("buffer_size", buffer_size), storing_device or self._storing_device)
        return buffers.TensorDictReplayBuffer(storage=storage)

    # -- numbers ----------------------------------------------------------------------------------------------

    @property
    def storing_device(self) -> torch.device:
        """Where rows are kept; setting it moves them."""
        return self._storing_device

    @storing_device.setter
    def storing_device(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._exchange(self._make(self.buffer_size, device), self._newest(len(self)))
        self._storing_device = device

    @property
    def buffer_size(self) -> int:
        """Most rows kept; setting it keeps the newest rows, from slot 0 on, oldest first."""
        return self._memory.storage.capacity

    @buffer_size.setter
    def buffer_size(self, buffer_size: int) -> None:
        fresh = self._make(buffer_size)
        self._exchange(fresh, self._newest(min(buffer_size, len(self))))

    @property
    def data_size(self) -> int:
        """Rows stored; setting it to fewer keeps the first slots."""
        return len(self._memory)

    @data_size.setter
    def data_size(self, rows: int) -> None:
        _require("data_size", rows, len(self), "add rows, or load() saved ones")
        if rows < len(self):
            self._exchange(self._make(self.buffer_size), torch.arange(rows, device="cpu"))

    @property
    def pointer(self) -> int:
        """Slot of the next row; setting it makes the next rows replace others, or go on after the last."""
        return self._memory.cursor

    @pointer.setter
    def pointer(self, slot: int) -> None:
        _require("pointer", slot, min(len(self), self.buffer_size - 1), "no slot may stay empty between rows")
        self._memory.cursor = slot

    @property
    def size(self) -> int:
        """Rows stored."""
        return len(self)

    def __len__(self) -> int:
        """Rows stored."""
        return len(self._memory)

    def __repr__(self) -> str:
        """Devices and numbers."""
        return (
            f"{type(self).__name__}(device={self.device}, storing_device={self.storing_device}, "
            f"buffer_size={self.buffer_size}, data_size={self.data_size}, pointer={self.pointer})"
        )

    def _newest(self, rows: int) -> Tensor:
        """Return the slots of the newest rows, oldest first."""
        held = len(self)
        first = self.pointer if held == self.buffer_size else 0
        return (torch.arange(held - rows, held, device="cpu") + first) % max(held, 1)

    def _exchange(self, fresh: buffers.TensorDictReplayBuffer, slots: Tensor) -> None:
        """Go on with another memory that holds the rows of some slots of this one."""
        if slots.numel():
            fresh.extend(self._memory[slots])
        if self._epochs is not None:
            self._epochs.end()
        self._memory, self._epochs = fresh, None

    # -- writing ----------------------------------------------------------------------------------------------

    def reset(self, buffer_size: int | None = None) -> None:
        """Forget all rows, their form and the epoch iterator; give memory and disk back.

        Args:
            buffer_size: most rows from now on; None keeps the number.
        """
        self._exchange(
            self._make(self.buffer_size if buffer_size is None else buffer_size), torch.arange(0, device="cpu")
        )

    def add(self, experience: TensorDict) -> None:
        """Add one row: a TensorDict without batch dimensions, from any device.

        Raises:
            KindError: if it is no TensorDict.
            SchemaError: naming the field, if it does not match the rows stored; nothing is changed.
            StorageMemoryError: if there is no room, also after garbage collection.
        """
        self._write(lambda: self._memory.add(experience))

    def add_batch(self, batch: TensorDict) -> None:
        """Add rows `[B]`, in order; see `add`. Of more than `buffer_size` rows the last ones stay."""
        self._write(lambda: self._memory.extend(batch))

    def _write(self, write: Callable[[], Any]) -> None:
        """Write; where memory, disk or files run out, collect garbage and write once more."""
        try:
            write()
        except (MemoryError, OSError, torch.cuda.OutOfMemoryError) as error:
            if self.print_gc_warning:
                msg = f"a write failed ({error}): trying once more after garbage collection"
                warnings.warn(msg, RuntimeWarning, stacklevel=3)
        else:
            return
        gc.collect()  # outside the except block: the error's traceback keeps what it passed alive
        write()

    # -- reading ----------------------------------------------------------------------------------------------

    def sample_batch(self, batch_size: int) -> TensorDict:
        """Draw independent uniform rows.

        Args:
            batch_size: rows.

        Returns:
            A TensorDict `[batch_size]` on `device`, with the slots of its rows as `index`. Copy.

        Raises:
            EmptyBufferError: if nothing is stored.
        """
        batch: TensorDict = self._memory.sample(positive("batch_size", batch_size))
        return batch.to(self.device)

    def sample_random(self, batch_size: int) -> TensorDict:
        """Do `sample_batch`."""
        return self.sample_batch(batch_size)

    def sample_by_index(self, indices: list[int] | Tensor | range) -> TensorDict:
        """Read rows by their slots, negative ones from the end.

        Returns:
            A TensorDict `[len(indices)]` on `device`. Copy.

        Raises:
            SlotError: if a slot is out of range of the rows stored.
        """
        rows: TensorDict = self._memory[_many(indices)]
        return rows.to(self.device)

    def sample_by_index_fields(
        self, indices: list[int] | Tensor | range, fields: list[str]
    ) -> Tensor | tuple[Tensor, ...]:
        """Read some fields of rows by their slots; the other fields are not touched.

        Args:
            indices: as in `sample_by_index`.
            fields: names, nested ones as tuples.

        Returns:
            For one field a tensor `[len(indices), *shape]` on `device`, for several a tuple of them. Copies.

        Raises:
            KeyMissingError: if there is no such field.
            SlotError: if a slot is out of range of the rows stored.
        """
        _require_names(fields)
        index = plain_index(_many(indices))
        columns = [self._memory[field] for field in fields]
        picked = tuple(apply_index(column, index.to(column.device)).to(self.device) for column in columns)
        return picked[0] if len(picked) == 1 else picked

    def sample_all(self) -> TensorDict:
        """Read all rows in the order of their slots: the order of writing, until the memory is full. Copy.

        Raises:
            UsageError: if nothing is stored.
        """
        return self.sample_by_index(range(len(self)))

    # -- epochs -----------------------------------------------------------------------------------------------

    def calculate_num_batches(self, batch_size: int) -> int:
        """Return the batches of one epoch over the rows stored; the last one may be smaller, and counts."""
        return -(-len(self) // positive("batch_size", batch_size))

    def create_epoch_iterator(self, batch_size: int, n_epochs: int = 1) -> Iterator[TensorDict]:
        """Begin epochs: in each, every row stored now comes exactly once, in an order shuffled anew.

        `get_next_batch` goes on with the same iterator. Rows added meanwhile wait for the next call; those that they
        replace are given out as what they are then.

        Args:
            batch_size: rows of a batch; the last one of an epoch holds what is left.
            n_epochs: epochs, at least 1.

        Returns:
            An iterator over `n_epochs * calculate_num_batches(batch_size)` TensorDicts on `device`.
        """
        size, epochs = positive("batch_size", batch_size), positive("n_epochs", n_epochs)
        self._epochs = Epochs(self.sample_by_index, len(self), size, epochs)
        return self._epochs

    def get_next_batch(self, batch_size: int) -> TensorDict:
        """Return the next batch of the epoch iterator, or random rows where none was made.

        Args:
            batch_size: rows of a random batch; the iterator has its own size.

        Raises:
            EpochEndError: if the iterator has given all its batches; a kind of `StopIteration`.
            EmptyBufferError: if nothing is stored.
        """
        epochs = self._epochs
        if epochs is None:
            return self.sample_batch(batch_size)
        try:
            return next(epochs)
        except StopIteration:
            msg = (
                f"the epochs are over: all {epochs.batches} batches were given; call create_epoch_iterator() or "
                "get_steps_and_iterator() for new ones (n_epochs=0 for random batches)"
            )
            raise EpochEndError(msg) from None

    def get_steps_and_iterator(self, n_epochs: int, max_iter: int, batch_size: int) -> int:
        """Begin epochs, or go back to random batches, and return how many batches to ask `get_next_batch` for.

        Args:
            n_epochs: epochs; 0 ends any and makes `get_next_batch` sample at random.
            max_iter: batches to ask for if `n_epochs` is 0; not used otherwise.
            batch_size: rows of a batch.

        Returns:
            `n_epochs * calculate_num_batches(batch_size)`, or `max_iter`.
        """
        if n_epochs != 0:
            self.create_epoch_iterator(batch_size, n_epochs)
            return positive("n_epochs", n_epochs) * self.calculate_num_batches(batch_size)
        _require("max_iter", max_iter, None, "it is the number of random batches")
        self._epochs = None
        return max_iter

    # -- saving -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, metadata_only: bool = False) -> None:
        """Write `<path>.metadata`, which ObjectRL reads as well, and the experience beside it.

        Whole or not at all: until the last step an earlier save under this path stays what it was.

        Args:
            path: path without extension; its directory is made if it is missing.
            metadata_only: leave the experience out; that of an earlier save is then not loaded any more.

        Raises:
            StorageMemoryError: if the disk is too small.
        """
        numbers = Metadata(self.buffer_size, self.data_size, self.pointer)
        write(str(path), numbers, None if metadata_only else self._memory.dumps)

    def load(self, path: str | Path) -> LoadReport:
        """Restore what is there: experience and metadata, or metadata alone, with a warning.

        Without experience an empty memory takes over `buffer_size`, and a memory that holds `data_size` rows already
        the `pointer`; numbers of rows that are not there are reported, not believed.

        Args:
            path: as given to `save`.

        Returns:
            What was restored.

        Raises:
            CheckpointNotFoundError: if nothing is saved there; nothing is changed.
            CheckpointError: if metadata and experience disagree; nothing is changed.
            DamagedFileError: naming the damaged file; nothing is changed.
        """
        metadata, name, told = read_metadata(str(path))
        directory = find_experience(str(path), metadata, name, told=told)
        if directory is not None:
            fresh = self._make(metadata.buffer_size)
            fresh.loads(directory)
            self._exchange(fresh, torch.arange(0, device="cpu"))
            return LoadReport(str(path), metadata, (*Metadata._fields, "experience"), len(self))
        if len(self) == 0:
            self.reset(metadata.buffer_size)
            return LoadReport(str(path), metadata, ("buffer_size",), 0)
        if (self.buffer_size, self.data_size) != metadata[:2]:
            msg = (
                f"{path}.metadata says buffer_size={metadata.buffer_size}, data_size={metadata.data_size} and comes "
                f"without experience, this memory holds {len(self)} rows of {self.buffer_size}: reset() it first"
            )
            raise CheckpointError(msg)
        self.pointer = metadata.pointer
        return LoadReport(str(path), metadata, Metadata._fields, 0)


def _many(indices: Any) -> Any:
    """Refuse what would choose no batch of rows."""
    shape = list(indices.shape) if isinstance(indices, torch.Tensor) else None
    if not isinstance(indices, (list, range, torch.Tensor)) or (shape is not None and len(shape) != 1):
        shown = repr(indices) if shape is None else f"a tensor of shape {shape}"
        msg = f"indices must be a list, a range or a tensor [B], got {shown}"
        raise KindError(msg)
    return indices


def _require(name: str, given: Any, most: int | None, hint: str) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0 or (most is not None and given > most):
        msg = f"{name} must be {'an integer from 0 on' if most is None else f'in [0, {most}]'}, got {given!r}: {hint}"
        raise OptionError(msg)


def _require_names(fields: Any) -> None:
    if not isinstance(fields, (list, tuple)) or not fields:
        msg = f"fields must be a list of names, such as ['obs'], got {fields!r}"
        raise KindError(msg)
