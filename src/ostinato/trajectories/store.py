"""A directory that a buffer saves to: one file for each trajectory, and a journal of what was saved."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, final

from ostinato.durable.files import fsync_dir, make_directories
from ostinato.durable.journal import Journal
from ostinato.durable.locks import DirectoryLock
from ostinato.durable.tensorfile import write_tree
from ostinato.errors import CheckpointError
from ostinato.trajectories.entries import id_of_name, place_of
from ostinato.trajectories.listing import JOURNAL, Head, Listing, entry_lines, fold, has_listing, read_listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ostinato.trajectories.entries import Entry, Place
    from ostinato.trajectories.form import Form

__all__ = ["Store", "highest_id", "sweep"]

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
