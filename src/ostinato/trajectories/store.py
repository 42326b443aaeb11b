"""A directory that a buffer saves to: one file for each trajectory, and a journal of what was saved."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from ostinato.core.forks import whole_in_forks
from ostinato.durable.files import fsync_dir, make_directories
from ostinato.durable.journal import Journal
from ostinato.durable.locks import DirectoryLock
from ostinato.durable.positioned_reads import OpenFiles
from ostinato.durable.tensorfile import file_checksum, read_tree, write_tree
from ostinato.errors import CheckpointError, DamagedFileError, OstinatoError, UsageError
from ostinato.trajectories.cache import Cache
from ostinato.trajectories.gather import Blocks, Sources
from ostinato.trajectories.index import (
    JOURNAL,
    Head,
    Held,
    Listing,
    entry_lines,
    fold,
    has_listing,
    id_of_name,
    place_of,
    read_listing,
)
from ostinato.trajectories.saver import Promise, Saver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ostinato.trajectories.checkpoint import State
    from ostinato.trajectories.index import Entry, Place
    from ostinato.trajectories.layout import Form

__all__ = ["Shelf", "ShelfOptions", "Store", "highest_id", "sweep"]

_LEFT_OVER = re.compile(r"\.[0-9a-f]{16}\.tmp|.*\.jsonl?\.[0-9a-f]{16}\.tmp")


def highest_id(directory: Path) -> int:
    """Return the highest id among the names of trajectory files, listed or not; -1 where there is none."""
    if not directory.is_dir():
        return -1
    return max((number for path in directory.iterdir() if (number := id_of_name(path.name)) is not None), default=-1)


def sweep(directory: Path) -> None:
    """Remove half-written files that a killed process left; the caller holds the lock of the directory."""
    for path in directory.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


@final
class Store:
    """Saves trajectories. Used by one thread at a time; `durable` ones survive any crash once `save` returned."""

    def __init__(self, directory: Path, *, durable: bool) -> None:
        """Name the directory; nothing is touched before `open`."""
        self.directory = directory
        self._durable = durable
        self._lock = DirectoryLock(directory)
        self._journal: Journal | None = None
        self._listing: Listing | None = None
        self._forms: dict[Form, int] = {}

    @property
    def counter(self) -> int:
        """The next id as the directory said it when it was opened."""
        return self._opened().head.counter

    @property
    def is_open(self) -> bool:
        """Whether it is open."""
        return self._listing is not None

    def open(self, head: Head) -> None:
        """Make the directory, lock it, take in what a crash left, and begin a journal.

        Raises:
            CheckpointError: Another buffer saves there, or trajectories of another format lie there.
        """
        make_directories(self.directory)
        if not self._durable:
            self._listing = Listing(self.directory, head, {})
            return
        self._lock.acquire()
        try:
            listing = self._recover(head)
            self._begin_journal(listing.head)
        except BaseException:
            self._close_journal()
            self._lock.release()
            raise
        self._listing = listing

    def _recover(self, head: Head) -> Listing:
        sweep(self.directory)
        if not has_listing(self.directory):
            return Listing(self.directory, head, {})
        listing = read_listing(self.directory, strict=False)
        found = listing.head.trajectory_format
        if found != head.trajectory_format:
            msg = (
                f"{self.directory} holds trajectories as {found}, this buffer saves {head.trajectory_format}: choose "
                "another auto_save_path, or the same trajectory_format"
            )
            raise CheckpointError(msg)
        if (self.directory / JOURNAL).exists():
            fold(self.directory, listing.head, listing.facts, listing.known.values())
        return listing

    def save(self, entries: Sequence[Entry], format_name: str) -> list[Place | Exception]:
        """Write trajectories that lie in memory; return for each its place, or why it could not be written.

        A durable directory has one format, files that are only spilled may be of several.
        """
        results: list[Place | Exception] = []
        for entry in entries:
            try:
                results.append(self._write(entry, format_name))
            except Exception as error:  # noqa: BLE001 - reported for this trajectory
                results.append(error)
        try:
            self._note(entries, results)
        except Exception as error:  # noqa: BLE001 - reported for all of them
            return [result if isinstance(result, Exception) else error for result in results]
        return results

    def _write(self, entry: Entry, format_name: str) -> Place:
        held = entry.held
        if held is None:
            msg = f"trajectory {entry.id} is not in memory"
            raise CheckpointError(msg)
        path = self.directory / entry.file_name(format_name)
        header, checksum = write_tree(path, held.tree, format_name, sync=self._durable)
        return place_of(self.directory, format_name, header, entry.form, checksum)

    def _note(self, entries: Sequence[Entry], results: list[Place | Exception]) -> None:
        """Enter what was written into the journal: from here on it is saved."""
        listing = self._opened()
        saved = [
            type(entry)(entry.facts, entry.form, place)
            for entry, place in zip(entries, results, strict=True)
            if not isinstance(place, Exception)
        ]
        if self._durable and saved:
            journal = self._sound_journal()
            fsync_dir(self.directory)  # the names of the files must be there before a line that names them
            forms = dict(self._forms)
            journal.append([*entry_lines(saved, forms)])
            self._forms = forms
        for entry in saved if self._durable else ():
            listing.facts[entry.id] = entry.facts
            listing.known[entry.id] = entry

    def drop(self, ids: Iterable[int]) -> None:
        """Take trajectories off the list; their files stay."""
        listing = self._opened()
        gone = [number for number in dict.fromkeys(ids) if number in listing.facts]
        if gone and self._durable:
            self._sound_journal().append([{"drop": gone}])
        for number in gone:
            del listing.facts[number]
            listing.known.pop(number, None)

    def ids(self) -> set[int]:
        """Return the ids on the list."""
        return set(self._opened().facts)

    def fold(self, head: Head) -> None:
        """Write index and metadata anew and begin a new journal; the old one stays in force where this fails."""
        listing = self._opened()
        if self._durable:
            fold(self.directory, head, listing.facts, listing.known.values(), keep_journal=True)
            self._begin_journal(head)

    def _begin_journal(self, head: Head) -> None:
        if os.name == "nt":  # there an open file cannot be replaced
            self._close_journal()
        fresh = Journal(self.directory / JOURNAL, head.to_json())
        self._close_journal()
        self._journal = fresh
        self._forms.clear()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _sound_journal(self) -> Journal:
        """Return the journal; where it was removed or could not be mended all is folded in and a new one begun."""
        if self._journal is None or not self._journal.is_sound():
            self.fold(self._opened().head)
        if self._journal is None:
            msg = f"{self.directory} has no journal"
            raise CheckpointError(msg)
        return self._journal

    def close(self, head: Head) -> None:
        """Fold the journal in and give the directory back; `open` may follow."""
        if self._listing is None:
            return
        listing = self._listing
        try:
            if self._durable:
                fold(self.directory, head, listing.facts, listing.known.values())
        finally:
            self._listing = None
            self._close_journal()
            with contextlib.suppress(OSError):
                self._lock.release()

    def _opened(self) -> Listing:
        if self._listing is None:
            msg = f"{self.directory} is not open for saving"
            raise CheckpointError(msg)
        return self._listing


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
        self._process = os.getpid()
        self.sources = Sources(self._files, self._read_and_keep, Blocks())
        whole_in_forks(self, self.lock, self._saver.lock, self._files.lock)

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
            UsageError: The process is a fork of the one that made the buffer.
        """
        self.check_process()
        try:
            self._saver.check()
        finally:
            self._saver.again()
        store = self._store
        if store is None or not store.is_open:  # else without a lock, which is held while files are written
            self._open_store()

    def check_process(self) -> None:
        """Refuse to save in a fork: the saver's thread and the directory belong to the process that made the buffer.

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
        """Refuse what would wait for the saver, in a fork and in the saver's own thread.

        Raises:
            UsageError: This is one of them; `name` was called.
        """
        self.check_process()
        self._saver.check_thread(name)

    def _is_fork(self) -> bool:
        return os.getpid() != self._process

    def _open_store(self) -> Store:
        with self._store_lock:
            if self._store is None:
                directory = self.options.directory if self.options.auto_save else self._make_spill()
                self._store = Store(directory or Path(), durable=self.options.auto_save)
            if not self._store.is_open:
                self._store.open(self._head())
                with self.lock:
                    self.state.counter = max(self.state.counter, self._store.counter, self.lowest_free_id())
            return self._store

    def _head(self) -> Head:
        with self.lock:  # no fork finds the generator in use
            return self.state.head()

    def lowest_free_id(self) -> int:
        """Return the id after the highest one in the directory saved to; 0 where nothing was saved on purpose."""
        directory = self.options.directory
        return highest_id(directory) + 1 if self.options.auto_save and directory is not None else 0

    def _make_spill(self) -> Path:
        base = self.options.directory
        if base is not None:
            make_directories(base)
        return Path(tempfile.mkdtemp(prefix="ostinato-spill-", dir=base))

    def admit(self, entries: Sequence[Entry], promise: Promise) -> None:
        """Keep new entries in memory as far as the cache goes, and queue what must be saved; the caller holds the lock.

        Call `wait_for_room` once the lock is free.
        """
        gone = [left for entry in entries for left in self._cache.put(entry)]
        self._release(gone)
        if self.options.auto_save:
            self._saver.put(entries, promise)
        else:
            self._saver.put([entry for entry in gone if entry.place is None])

    def wait_for_room(self) -> None:
        """Wait while more is queued than may be."""
        self._saver.wait_for_room()

    def check(self) -> None:
        """Raise a failure that was not reported yet; those of a fork are its parent's."""
        if not self._is_fork():
            self._saver.check()

    def flush(self) -> None:
        """Wait until everything queued is saved.

        Raises:
            CheckpointError: Something could not be saved.
            UsageError: This is a fork, or the saver's own thread.
        """
        self.check_process()
        self._saver.flush()
        self._saver.check()

    def _read(self, entry: Entry) -> Held:
        """Return a whole trajectory, from memory or read anew."""
        held = entry.held
        if held is not None:
            return held
        tree = read_tree(entry.path(), entry.saved().format_name, allow_pickle=self.options.allow_pickle)
        return Held(tree, entry.form)

    def read_checked(self, entry: Entry) -> Held:
        """Return a whole trajectory, after its file was compared with its checksum where one was kept.

        Raises:
            DamagedFileError: The file is gone or damaged.
        """
        held, place = entry.held, entry.place
        if held is None and place is not None and place.checksum:
            path = entry.path()
            if file_checksum(path, place.format_name, deep=False) != place.checksum:
                msg = f"{path} is damaged: its checksum differs from the one that was kept"
                raise DamagedFileError(msg)
        return held or self._read(entry)

    def _read_and_keep(self, entry: Entry) -> Held:
        """Read an entry whose file can only be read as a whole, and keep it like a new one."""
        held = self._read(entry)
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
            results = self._open_store().save(entries, self.state.format_name)
        with self.lock:
            for entry, place in zip(entries, results, strict=True):
                if not isinstance(place, Exception):
                    entry.place = place
                    if not entry.cached:
                        entry.held = None
        return results

    def fold_if_same(self, members: Callable[[], list[Entry]]) -> bool:
        """Fold the journal where the directory saved to lists what `members` returns and nothing else; False elsewhere.

        Trajectories that others add meanwhile are listed as soon as they are saved.
        """
        with self._store_lock:
            store = self._open_store()
            with self.lock:
                listed, entries = store.ids(), members()
                waiting = {entry.id for entry in entries if entry.place is None}
                here = {entry.id for entry in entries if entry.place and entry.place.directory == store.directory}
            if len(here) + len(waiting) < len(entries) or not here <= listed <= here | waiting:
                return False
            store.fold(self._head())
            return True

    def empty_cache(self) -> None:
        """Let the memory of the cache go; the caller holds the lock and has taken all entries out of the buffer."""
        self._cache.clear()
        self._files.clear()

    def forget(self, entries: Sequence[Entry], *, unlist: bool) -> None:
        """Do not save `entries` any more, and remove their spilled files. Files saved on purpose stay.

        Args:
            entries: Entries that the buffer had; others may have been added meanwhile.
            unlist: Take those in the directory saved to off its list, too.
        """
        self._saver.cancel(entries)
        with self._store_lock:
            mine = self.directory
            placed = [entry for entry in entries if entry.place is not None and entry.place.directory == mine]
            if not self.options.auto_save:
                for entry in placed:
                    entry.path().unlink(missing_ok=True)
            elif unlist and placed:
                self._open_store().drop([entry.id for entry in placed])

    def clear_cache(self) -> None:
        """Let memory go, after what is in memory alone was saved; ends the saver's thread."""
        self.prepare()
        with self.lock:
            gone = self._cache.clear()
            self._release(gone)
            self._saver.put([] if self.options.auto_save else [entry for entry in gone if entry.place is None])
        self._saver.stop()
        self._saver.check()

    def close(self) -> None:
        """Save what is queued, fold the journal in, close files, end the thread. Spilled files stay.

        In a fork nothing is done: all this is for the process that made the buffer.

        Raises:
            CheckpointError: Something could not be saved.
        """
        if self._is_fork():
            return
        self._saver.stop()
        self._files.clear()
        try:
            self._saver.check()
        except CheckpointError:
            with suppress(OSError, OstinatoError):  # what was not saved matters more
                self._close_store()
            raise
        self._close_store()

    def _close_store(self) -> None:
        with self._store_lock:
            if self._store is not None and self.options.auto_save:
                self._store.close(self._head())

    def end(self) -> None:
        """Close and remove spilled files, and let the memory of the cache go: the buffer is gone.

        The saver and the sources refer back to the shelf, which therefore stays until the next garbage collection;
        trajectories do not.
        """
        if self._is_fork():
            with self.lock:
                self._cache.clear()
            return
        try:
            with suppress(FileNotFoundError):  # somebody has removed the directory before
                self.close()
        finally:
            with self.lock:
                self._cache.clear()
            with self._store_lock:
                if self._store is not None and not self.options.auto_save:
                    shutil.rmtree(self._store.directory, ignore_errors=True)
                    self._store = None
