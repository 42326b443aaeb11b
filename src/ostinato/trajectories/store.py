"""Where the trajectories of a buffer are: in memory, waiting for the saver, or in files of a directory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from ostinato.core.processes import whole_in_forks
from ostinato.durable.files import DirectoryLock, fsync_dir, make_directories
from ostinato.durable.manifest import Journal
from ostinato.durable.progress import TRAJECTORIES, Progress
from ostinato.durable.tensorfile import file_checksum
from ostinato.errors import CheckpointError, DamagedFileError, OstinatoError, UsageError
from ostinato.trajectories.cache import Cache
from ostinato.trajectories.gather import RowReader
from ostinato.trajectories.index import (
    JOURNAL,
    DirectoryIndex,
    Entry,
    Head,
    SavedFile,
    TrajectoryData,
    entry_lines,
    has_index,
    read_index,
    trajectory_files,
    write_index,
)
from ostinato.trajectories.saver import SaveGroup, Saver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ostinato.trajectories.checkpoint import BufferState
    from ostinato.trajectories.layout import Layout

__all__ = ["SaveDirectory", "Store", "StoreOptions", "remove_leftovers"]

_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.tmp|.*\.jsonl?\.[0-9a-f]{16}\.tmp")


def remove_leftovers(directory: Path) -> None:
    """Remove half-written files that a killed process left; the caller holds the lock of the directory."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


# -- the directory ----------------------------------------------------------------------------------------------------


@final
class SaveDirectory:
    """A directory that trajectories are saved to: one file each, and a journal of what was saved. Not thread-safe.

    Args:
        directory: The directory; nothing is written before `open`.
        durable: List the trajectories, and survive any crash once `save` has returned. False writes files only.
    """

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self.directory = directory
        self._durable = durable
        self._lock = DirectoryLock(directory)
        self._journal: Journal | None = None
        self._index: DirectoryIndex | None = None
        self._layouts: dict[Layout, int] = {}

    @property
    def counter(self) -> int:
        """The next id, as the directory had it when it was opened."""
        return self._opened().head.counter

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._index is not None

    def open(self, head: Head) -> None:
        """Create and lock the directory, repair what a crash left, and begin a journal.

        Raises:
            CheckpointError: Another buffer saves there, or the directory holds trajectories of another format.
        """
        make_directories(self.directory)
        if not self._durable:
            self._index = DirectoryIndex(self.directory, head, {})
            return
        self._lock.acquire()
        try:
            index = self._recover(head)
            self._begin_journal(index.head)
        except BaseException:
            self._close_journal()
            self._lock.release()
            raise
        self._index = index

    def _recover(self, head: Head) -> DirectoryIndex:
        remove_leftovers(self.directory)
        if not has_index(self.directory):
            return DirectoryIndex(self.directory, head, {})
        index = read_index(self.directory, strict=False)
        index.check_format(head.trajectory_format)
        if (self.directory / JOURNAL).exists():
            write_index(self.directory, index.head, index.infos, index.entries.values())
        return index

    def save(self, entries: Sequence[Entry], format_name: str) -> list[SavedFile | Exception]:
        """Write trajectories that are in memory.

        Args:
            entries: The trajectories.
            format_name: Format of the files; a durable directory has only one.

        Returns:
            For each trajectory its file, or the error.
        """
        results: list[SavedFile | Exception] = []
        for entry in entries:
            try:
                results.append(entry.write(self.directory, format_name, sync=self._durable))
            except Exception as error:  # noqa: BLE001 - reported for this trajectory
                results.append(error)
        if not self._durable:
            return results
        try:
            self._log(
                [
                    Entry(entry.info, entry.layout, file)
                    for entry, file in zip(entries, results, strict=True)
                    if not isinstance(file, Exception)
                ]
            )
        except Exception as error:  # noqa: BLE001 - reported for all of them
            return [result if isinstance(result, Exception) else error for result in results]
        return results

    def _log(self, saved: list[Entry]) -> None:
        """Append trajectories to the journal: from here on they are saved."""
        index = self._opened()
        if not saved:
            return
        journal = self._sound_journal()
        fsync_dir(self.directory)  # the names of the files must be on disk before a line that refers to them
        layouts = dict(self._layouts)
        journal.append([*entry_lines(saved, layouts)])
        self._layouts = layouts
        for entry in saved:
            index.infos[entry.id] = entry.info
            index.entries[entry.id] = entry

    def drop(self, ids: Iterable[int]) -> None:
        """Remove trajectories from the index; their files stay."""
        index = self._opened()
        dropped = [number for number in dict.fromkeys(ids) if number in index.infos]
        if dropped and self._durable:
            self._sound_journal().append([{"drop": dropped}])
        for number in dropped:
            del index.infos[number]
            index.entries.pop(number, None)

    def ids(self) -> set[int]:
        """Return the ids of the listed trajectories."""
        return set(self._opened().infos)

    def write_index(self, head: Head) -> None:
        """Write the index files anew and begin a new journal; the old journal stays in use if this fails."""
        index = self._opened()
        if self._durable:
            write_index(self.directory, head, index.infos, index.entries.values(), keep_journal=True)
            self._begin_journal(head)

    def _begin_journal(self, head: Head) -> None:
        if os.name == "nt":  # an open file cannot be replaced on Windows
            self._close_journal()
        journal = Journal(self.directory / JOURNAL, head.to_json())
        self._close_journal()
        self._journal = journal
        self._layouts.clear()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _sound_journal(self) -> Journal:
        """Return the journal; if it was removed or is damaged, write the index and begin a new one."""
        if self._journal is None or not self._journal.is_sound():
            self.write_index(self._opened().head)
        if self._journal is None:
            msg = f"{self.directory} has no journal"
            raise CheckpointError(msg)
        return self._journal

    def close(self, head: Head) -> None:
        """Write the index, remove the journal and unlock the directory; `open` may be called again."""
        if self._index is None:
            return
        index = self._index
        try:
            if self._durable:
                write_index(self.directory, head, index.infos, index.entries.values())
        finally:
            self._index = None
            self._close_journal()
            with suppress(OSError):
                self._lock.release()

    def _opened(self) -> DirectoryIndex:
        if self._index is None:
            msg = f"{self.directory} is not open for saving"
            raise CheckpointError(msg)
        return self._index


# -- memory, queue and directory --------------------------------------------------------------------------------------


class StoreOptions(NamedTuple):
    """How a store keeps trajectories.

    Attributes:
        directory: Where trajectories are saved, or where the directory for evicted ones is made; None: the system's
            temporary directory.
        auto_save: Save every trajectory durably; otherwise only write those that leave the cache to a temporary
            directory ("spill" them).
        cache_size: Trajectories kept in memory; 0 keeps none.
        cache_bytes: Bytes kept in memory; None for no bound.
        queue_size: Trajectories that may wait for the saver.
        open_files: Files kept open.
        allow_pickle: Whether files may be unpickled.
        bar: Whether a terminal shows a bar while the directory is opened and closed.
    """

    directory: Path | None
    auto_save: bool
    cache_size: int
    cache_bytes: int | None
    queue_size: int
    open_files: int
    allow_pickle: bool
    bar: bool

    @property
    def save_directory(self) -> Path | None:
        """Where every trajectory is saved; None without `auto_save`."""
        return self.directory if self.auto_save else None


@final
class Store:
    """Holds the trajectories of a buffer. `lock` guards which of them are in memory."""

    def __init__(self, options: StoreOptions, state: BufferState) -> None:
        """Make a store; nothing is written yet."""
        self.options = options
        self.state = state
        self.lock = threading.RLock()
        self._cache = Cache(options.cache_size, options.cache_bytes)
        self._directory_lock = threading.RLock()
        self._directory: SaveDirectory | None = None
        self._saver = Saver(self._save, options.queue_size)
        self._process = os.getpid()
        self.rows = RowReader(options.open_files, self._read_and_keep)
        whole_in_forks(self, self.lock, self._saver.lock, self.rows.files.lock)

    @property
    def directory(self) -> Path | None:
        """Where trajectories are saved or spilled; None before the first one is spilled."""
        if self.options.auto_save:
            return self.options.directory
        return None if self._directory is None else self._directory.directory

    def stats(self) -> dict[str, int]:
        """Return counts of cached trajectories and bytes, pending saves and open files."""
        with self.lock:
            cached, nbytes = len(self._cache), self._cache.nbytes
        return {
            "cached_trajectories": cached,
            "cached_bytes": nbytes,
            "pending_saves": self._saver.pending,
            "open_files": len(self.rows.files),
        }

    # -- checks before a call -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Raise an error that was not reported yet, and open the directory.

        Raises:
            CheckpointError: A trajectory could not be saved, or the directory cannot be used.
            UsageError: The process is a fork of the one that made the buffer.
        """
        self._check_process()
        try:
            self._saver.check()
        finally:
            self._saver.retry()
        directory = self._directory
        # Checked without the lock, which is held while files are written.
        if directory is None or not directory.is_open:
            with Progress(self.options.bar, "open", unit=TRAJECTORIES):
                self._open_directory()

    def _check_process(self) -> None:
        """Raise in a fork: the saver's thread and the directory belong to the process that made the buffer.

        Raises:
            UsageError: This is a fork.
        """
        if self._is_fork():
            msg = (
                "this buffer was made in another process, which saves its trajectories: here it can only be sampled; "
                "make a buffer of its own, with a directory of its own, in each process that adds"
            )
            raise UsageError(msg)

    def check_caller(self, name: str) -> None:
        """Raise in a fork, and in the saver's own thread, where the call `name` would wait for itself.

        Raises:
            UsageError: This is one of them.
        """
        self._check_process()
        self._saver.check_thread(name)

    def check(self) -> None:
        """Raise an error that was not reported yet; in a fork it is left to the parent."""
        if not self._is_fork():
            self._saver.check()

    def _is_fork(self) -> bool:
        return os.getpid() != self._process

    # -- adding and saving --------------------------------------------------------------------------------------------

    def admit(self, entries: Sequence[Entry], group: SaveGroup) -> None:
        """Cache new entries and queue those that must be saved. The caller holds the lock.

        Call `wait_for_room` once the lock is released.
        """
        evicted = [left for entry in entries for left in self._cache.put(entry)]
        self._release(evicted)
        if self.options.auto_save:
            self._saver.submit(entries, group)
        else:
            self._saver.submit([entry for entry in evicted if entry.file is None])

    def wait_for_room(self) -> None:
        """Block while the queue of the saver is over its limit."""
        self._saver.wait_for_room()

    def flush(self) -> None:
        """Wait until everything queued is saved.

        Raises:
            CheckpointError: A trajectory could not be saved.
            UsageError: This is a fork, or the saver's own thread.
        """
        self._check_process()
        self._saver.flush()
        self._saver.check()

    def _release(self, evicted: Sequence[Entry]) -> None:
        """Free the memory of those that are saved."""
        for entry in evicted:
            if entry.file is not None:
                entry.data = None

    def _save(self, entries: Sequence[Entry]) -> list[SavedFile | Exception]:
        """Save entries; runs in the saver's thread."""
        with self._directory_lock:
            results = self._open_directory().save(entries, self.state.format_name)
        with self.lock:
            for entry, file in zip(entries, results, strict=True):
                if not isinstance(file, Exception):
                    entry.file = file
                    if not entry.cached:
                        entry.data = None
        return results

    def _open_directory(self) -> SaveDirectory:
        with self._directory_lock:
            if self._directory is None:
                path = self.options.save_directory or self._make_spill_directory()
                self._directory = SaveDirectory(path, durable=self.options.auto_save)
            if not self._directory.is_open:
                self._directory.open(self._head())
                with self.lock:
                    self.state.counter = max(self.state.counter, self._directory.counter, self.lowest_free_id())
            return self._directory

    def _make_spill_directory(self) -> Path:
        base = self.options.directory
        if base is not None:
            make_directories(base)
        return Path(tempfile.mkdtemp(prefix="ostinato-spill-", dir=base))

    def _head(self) -> Head:
        with self.lock:  # a fork must not copy the generator while it is in use
            return self.state.head()

    def lowest_free_id(self) -> int:
        """Return the id after the highest one in the directory that is saved to; 0 without `auto_save`."""
        directory = self.options.save_directory
        return 0 if directory is None else max(trajectory_files(directory).values(), default=-1) + 1

    def rewrite_index_if_same(self, entries_of: Callable[[], list[Entry]]) -> bool:
        """Write the index of the directory if it lists the entries of the buffer and nothing else.

        Trajectories that other threads add meanwhile are listed as soon as they are saved.

        Args:
            entries_of: Returns the entries of the buffer; called with the lock held.

        Returns:
            Whether it was written.
        """
        with self._directory_lock:
            directory = self._open_directory()
            with self.lock:
                listed, entries = directory.ids(), entries_of()
                waiting = {entry.id for entry in entries if entry.file is None}
                here = {entry.id for entry in entries if entry.file and entry.file.directory == directory.directory}
            if len(here) + len(waiting) < len(entries) or not here <= listed <= here | waiting:
                return False
            directory.write_index(self._head())
            return True

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_checked(self, entry: Entry) -> TrajectoryData:
        """Return a whole trajectory; its file is compared with its checksum if that is known.

        Raises:
            DamagedFileError: The file is missing or damaged.
        """
        data, file = entry.data, entry.file
        if data is None and file is not None and file.checksum:
            path = entry.path()
            if file_checksum(path, file.format_name, deep=False) != file.checksum:
                msg = f"{path} is damaged: its checksum differs from the one that was kept"
                raise DamagedFileError(msg)
        return data or entry.read(allow_pickle=self.options.allow_pickle)

    def _read_and_keep(self, entry: Entry) -> TrajectoryData:
        """Read an entry whose file can only be read as a whole, and cache it like a new one."""
        data = entry.read(allow_pickle=self.options.allow_pickle)
        with self.lock:
            if entry.data is None and self.options.cache_size:
                entry.data = data
                self._release(self._cache.put(entry))
            else:
                self._cache.touch(entry)
        return data

    # -- removing and closing -----------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Empty the cache. The caller holds the lock and has removed all entries from the buffer."""
        self._cache.clear()
        self.rows.files.clear()

    def forget(self, entries: Sequence[Entry], *, unlist: bool) -> None:
        """Cancel saving `entries`, and remove their spilled files. Files of `auto_save` stay.

        Args:
            entries: Entries that the buffer had; other threads may have added more meanwhile.
            unlist: Also remove those in the directory of `auto_save` from its index.
        """
        self._saver.cancel(entries)
        with self._directory_lock:
            saved = [entry for entry in entries if entry.file is not None and entry.file.directory == self.directory]
            if not self.options.auto_save:
                for entry in saved:
                    entry.path().unlink(missing_ok=True)
            elif unlist and saved:
                self._open_directory().drop([entry.id for entry in saved])

    def clear_cache(self) -> None:
        """Empty the cache after saving what is only in memory, and end the saver's thread."""
        self.prepare()
        with self.lock:
            evicted = self._cache.clear()
            self._release(evicted)
            self._saver.submit([] if self.options.auto_save else [entry for entry in evicted if entry.file is None])
        self._saver.stop()
        self._saver.check()

    def close(self) -> None:
        """Save what is queued, write the index, close files and end the saver's thread. Spilled files stay.

        In a fork nothing is done: this is left to the process that made the buffer.

        Raises:
            CheckpointError: A trajectory could not be saved.
        """
        if self._is_fork():
            return
        self._saver.stop()
        self.rows.files.clear()
        try:
            self._saver.check()
        except CheckpointError:
            with suppress(OSError, OstinatoError):  # the first error matters more
                self._close_directory()
            raise
        self._close_directory()

    def _close_directory(self) -> None:
        with self._directory_lock:
            if self._directory is not None and self.options.auto_save:
                self._directory.close(self._head())

    def end(self) -> None:
        """Close, remove spilled files and empty the cache; called when the buffer is garbage.

        The saver and the reader of rows refer back to the store, which therefore lives until the next garbage
        collection; its trajectories are freed at once.
        """
        if self._is_fork():
            with self.lock:
                self._cache.clear()
            return
        try:
            with suppress(FileNotFoundError):  # the directory was removed before
                self.close()
        finally:
            with self.lock:
                self._cache.clear()
            with self._directory_lock:
                if self._directory is not None and not self.options.auto_save:
                    shutil.rmtree(self._directory.directory, ignore_errors=True)
                    self._directory = None
