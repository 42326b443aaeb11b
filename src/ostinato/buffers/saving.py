"""How a buffer is saved and loaded: checkpoints in a directory, and the state as a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.buffers.checkpoint.state import own_copy
from ostinato.buffers.lifecycle import Lifecycle
from ostinato.durable.progress import BYTES, Progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato.durable.progress import ProgressOption


class Saving(Lifecycle):
    """The part of `ReplayBuffer` that saves and loads its state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: rows, cursor, generations, sampler, generator, transforms, queued draws.

        A copy, of rows present alone, for `torch.save` and `load_state_dict`; `dumps` saves without copying. The rows
        of a `ListStorage` are the stored objects. Pending updates are written first.
        """
        self._pipeline.settle()
        with self._engine.lock:
            return {**own_copy(self._state()), "_batch_size": self._batch_size}  # TorchRL's name, read by its scripts

    def _state(self) -> dict[str, Any]:
        return self._engine.state(self._pipeline.draws, self._transform, self._batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy; sampling goes on exactly where it was.

        Raises:
            CheckpointError: if the state does not fit the parts of this buffer; nothing is changed.
        """
        engine = self._engine
        self._pipeline.settle()
        with engine.saves.lock, engine.lock:
            engine.load_state(state, self._transform, self._batch_size)
            self._pipeline.forget()

    def dumps(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Save the whole state to the directory `path`, whole or not at all; saving over an older one is legal.

        What is saved is the state of one moment. Other threads go on sampling and writing while rows of tensor storages
        are written; they wait for what is small, for Python objects, and for save hooks. Extra memory: at most 64 MB,
        fields of Python objects as files hold them, and what save hooks return.

        Args:
            path: the directory.
            incremental: write only the rows that have changed since the save that `path` holds, where this buffer made
                it or was loaded from it, and everything otherwise: also after a view of rows was handed out
                (`rb[2:5]`, `rb.storage["obs"]`), and where patches would take more bytes than the rows.
            progress: the bytes done and their total; see `ProgressOption`.

        Raises:
            CheckpointError: if something cannot be saved, if no load would take the state, or if the path holds other
                things; an older save stays whole.
            DamagedFileError: if an incremental save finds the chain damaged that it would fold: save without it.
            StorageMemoryError: if the disk is too small, naming the bytes needed; an older save stays whole.
        """
        with Progress(progress, "save", unit=BYTES):
            self._pipeline.settle()
            self._engine.save(path, self._state, incremental=incremental)

    def loads(
        self, path: str | Path, *, verify: bool = True, mmap: bool = False, progress: ProgressOption = None
    ) -> None:
        """Restore what `dumps` saved.

        Args:
            path: the directory.
            verify: compare the checksum of every block of rows that is read; False saves that time where the files are
                trusted to be whole. Tables of patches are verified in any case.
            mmap: do not read the rows: map their files, which come in page by page as rows are sampled (text and other
                Python objects are read at once). Opens at once, whatever the size, and needs memory for rows that are
                used alone. What is written goes to memory, the files stay as they are; they must not be removed by
                others as long as the buffer lives, but may be saved over. Sizes and tables are verified, checksums of
                rows are not (`ostinato verify` does). For `LazyTensorStorage` on the CPU without `single_copy`,
                `codec` or `kinds`, on Linux and macOS.
            progress: the bytes done and their total; see `ProgressOption`.

        Raises:
            CheckpointError: if the checkpoint does not fit the parts of this buffer; nothing is changed.
            DamagedFileError: if a file is damaged, naming it.
            OptionError: if rows of this storage cannot be mapped.
        """
        engine = self._engine
        with Progress(progress, "load", unit=BYTES), engine.saves.lock, engine.lock:
            engine.load(path, self.load_state_dict, verify=verify, mmap=mmap)

    def save(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Do `dumps`."""
        self.dumps(path, incremental=incremental, progress=progress)

    dump = save

    def load(
        self, path: str | Path, *, verify: bool = True, mmap: bool = False, progress: ProgressOption = None
    ) -> None:
        """Do `loads`."""
        self.loads(path, verify=verify, mmap=mmap, progress=progress)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert the rows when `dumps` saves them; see the storage's `register_save_hook`."""
        with self._engine.lock:
            self.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert rows back when `loads` reads them; see the storage's `register_load_hook`."""
        with self._engine.lock:
            self.storage.register_load_hook(hook)
