"""Where the trajectories of a buffer are: memory, background saver, the directory saved to. Knows no sampling."""

from __future__ import annotations

import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from ostinato.durable.openfiles import OpenFiles
from ostinato.durable.tensorfile import read_tree
from ostinato.trajectories.cache import Cache
from ostinato.trajectories.entries import Held
from ostinato.trajectories.gather import Blocks, Sources
from ostinato.trajectories.saver import Promise, Saver
from ostinato.trajectories.store import Store, highest_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.trajectories.entries import Entry, Place
    from ostinato.trajectories.state import State

__all__ = ["Shelf", "ShelfOptions"]


class ShelfOptions(NamedTuple):
    """How a shelf keeps trajectories.

    Attributes:
        directory: Where they are saved, or below which they are spilled; None: the system's temporary directory.
        auto_save: Save every trajectory durably; otherwise only spill those that leave the cache.
        cache_size: Trajectories kept in memory; 0 keeps none.
        cache_bytes: Bytes kept in memory; None for no bound.
        queue_size: Trajectories that wait for the saver.
        open_files: Files held open.
        allow_pickle: The user's consent to unpickle.
    """

    directory: Path | None
    auto_save: bool
    cache_size: int
    cache_bytes: int | None
    queue_size: int
    open_files: int
    allow_pickle: bool


@final
class Shelf:
    """Keeps trajectories and finds them again. `lock` guards which of them are in memory."""

    def __init__(self, options: ShelfOptions, state: State) -> None:
        """Touch nothing yet."""
        self.options = options
        self.state = state
        self.lock = threading.RLock()
        self._cache = Cache(options.cache_size, options.cache_bytes)
        self._files = OpenFiles(options.open_files)
        self._store_lock = threading.RLock()
        self._store: Store | None = None
        self._saver = Saver(self._save, options.queue_size)
        self.sources = Sources(self._files, self.path_of, self._read_whole, Blocks())

    @property
    def directory(self) -> Path | None:
        """Where trajectories are saved or spilled; None before the first spill."""
        if self.options.auto_save:
            return self.options.directory
        return None if self._store is None else self._store.directory

    def stats(self) -> dict[str, int]:
        """Return counts of what is where."""
        with self.lock:
            cached, nbytes = len(self._cache), self._cache.nbytes
        return {
            "cached_trajectories": cached,
            "cached_bytes": nbytes,
            "pending_saves": self._saver.pending,
            "open_files": len(self._files),
        }

    def prepare(self) -> None:
        """Report an unreported failure and make sure that there is a directory to save to.

        Raises:
            CheckpointError: A trajectory could not be saved, or the directory cannot be used.
        """
        self._saver.check()
        self._open_store()

    def _open_store(self) -> Store:
        with self._store_lock:
            if self._store is None:
                directory = self.options.directory if self.options.auto_save else self._make_spill()
                self._store = Store(directory or Path(), durable=self.options.auto_save)
            if not self._store.is_open:
                self._store.open(self.state.head())
                self.state.counter = max(self.state.counter, self.lowest_free_id())
            return self._store

    def lowest_free_id(self) -> int:
        """Return the id after the highest one in the directory saved to; 0 where nothing was saved on purpose."""
        directory = self.options.directory
        return highest_id(directory) + 1 if self.options.auto_save and directory is not None else 0

    def _make_spill(self) -> Path:
        base = self.options.directory
        if base is not None:
            base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="ostinato-spill-", dir=base))

    def admit(self, entries: Sequence[Entry]) -> list[Entry]:
        """Keep new entries in memory as far as the cache goes; the caller holds the lock.

        Returns:
            Those to hand to `save` once the lock is free.
        """
        gone = [left for entry in entries for left in self._cache.put(entry)]
        self._release(gone)
        return list(entries) if self.options.auto_save else [entry for entry in gone if entry.place is None]

    def save(self, entries: Sequence[Entry], promise: Promise | None = None) -> None:
        """Queue entries; waits while the queue is full."""
        for entry in entries:
            self._saver.put(entry, promise)

    def check(self) -> None:
        """Raise a failure that was not reported yet."""
        self._saver.check()

    def flush(self) -> None:
        """Wait until everything queued is saved.

        Raises:
            CheckpointError: Something could not be saved.
        """
        self._saver.flush()
        self._saver.check()

    def path_of(self, entry: Entry) -> Path:
        """Return the file of a saved entry."""
        place = entry.place
        return (place.directory if place is not None else Path()) / entry.file_name(self.state.format_name)

    def read_tree(self, entry: Entry) -> Held:
        """Return a whole trajectory, from memory or read anew."""
        held = entry.held
        if held is not None:
            return held
        tree = read_tree(self.path_of(entry), self.state.format_name, allow_pickle=self.options.allow_pickle)
        return Held(tree, entry.form)

    def _read_whole(self, entry: Entry) -> Held:
        """Read an entry whose file can only be read as a whole, and keep it like a new one."""
        held = self.read_tree(entry)
        with self.lock:
            if entry.held is None and self.options.cache_size:
                entry.held = held
                self._release(self._cache.put(entry))
            else:
                self._cache.touch(entry)
        return held

    def _release(self, gone: Sequence[Entry]) -> None:
        for entry in gone:
            if entry.place is not None:
                entry.held = None

    def _save(self, entries: Sequence[Entry]) -> list[Place | Exception]:
        """Save in the saver's thread."""
        with self._store_lock:
            results = self._open_store().save(entries)
        with self.lock:
            for entry, place in zip(entries, results, strict=True):
                if not isinstance(place, Exception):
                    entry.place = place
                    if not entry.cached:
                        entry.held = None
        return results

    def fold_if_same(self, directory: Path, ids: set[int]) -> bool:
        """Fold the journal where `directory` is the one saved to and lists exactly `ids`; False elsewhere."""
        with self._store_lock:
            store = self._store
            if not self.options.auto_save or store is None or not store.is_open or store.directory != directory:
                return False
            if store.ids() != ids:
                return False
            store.fold(self.state.head())
            return True

    def forget(self, entries: Sequence[Entry], *, unlist: bool) -> None:
        """Let go of everything: memory, what waits to be saved, and spilled files. Files saved on purpose stay.

        Args:
            entries: All entries of the buffer.
            unlist: Take those in the directory saved to off its list, too.
        """
        self._saver.cancel()
        with self.lock:
            self._cache.clear()
            self._files.clear()
        with self._store_lock:
            store = self._store
            if store is None:
                return
            if not self.options.auto_save:
                self._remove_spill(store)
            elif unlist and store.is_open:
                mine = store.directory
                store.drop([e.id for e in entries if e.place is not None and e.place.directory == mine])

    def _remove_spill(self, store: Store) -> None:
        shutil.rmtree(store.directory, ignore_errors=True)
        self._store = None

    def clear_cache(self) -> None:
        """Let memory go, after what is in memory alone was saved; ends the saver's thread."""
        self.prepare()
        with self.lock:
            gone = self._cache.clear()
            self._release(gone)
            unsaved = [] if self.options.auto_save else [entry for entry in gone if entry.place is None]
        self.save(unsaved)
        self._saver.stop()
        self._saver.check(retry=False)

    def close(self) -> None:
        """Save what is queued, fold the journal in, close files, end the thread. Spilled files stay.

        Raises:
            CheckpointError: Something could not be saved.
        """
        self._saver.stop()
        self._files.clear()
        try:
            self._saver.check(retry=False)
        finally:
            with self._store_lock:
                if self._store is not None and self.options.auto_save:
                    self._store.close(self.state.head())

    def end(self) -> None:
        """Close and remove spilled files: the buffer is gone."""
        try:
            with suppress(FileNotFoundError):  # somebody has removed the directory before
                self.close()
        finally:
            with self._store_lock:
                if self._store is not None and not self.options.auto_save:
                    self._remove_spill(self._store)
