"""The plan of a merge or a split: which file becomes which trajectory. Kept beside moved files until all is done."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ostinato.durable.files import atomic_write, fsync_dir, open_file
from ostinato.durable.manifest import canonical, parse_json
from ostinato.durable.positioned_reads import pread
from ostinato.errors import CheckpointError, DamagedFileError, MissingFileError, OstinatoError
from ostinato.tools.check import check_content
from ostinato.trajectories.index import (
    INDEX,
    METADATA,
    STORE,
    DirectoryIndex,
    Entry,
    Head,
    TrajectoryInfo,
    id_of_name,
    read_index,
    write_index,
)
from ostinato.trajectories.store import remove_leftovers

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PLAN",
    "Plan",
    "Step",
    "check_size",
    "has_plan",
    "is_free",
    "merge_plan",
    "ranks_of",
    "read_plan",
    "split_plan",
]

PLAN = "ostinato_plan.json"
_RANK = re.compile(r"rank_(\d+)")


class Step(NamedTuple):
    """One file: where it lies, what it is in the new directory, and where its fields lie (None: a pickle)."""

    source: Path
    facts: TrajectoryInfo
    known: Entry | None


class Plan(NamedTuple):
    """Everything to be done: `name` tells the same work from other work."""

    name: dict[str, Any]
    sources: tuple[Path, ...]
    head: Head
    steps: list[Step]

    def target_of(self, step: Step, directory: Path) -> Path:
        """Return the place of a file in the new directory."""
        return directory / step.facts.file_name(self.head.trajectory_format)

    def write_lists(self, directory: Path) -> None:
        """Write index, metadata and list of the new directory."""
        facts = {step.facts.trajectory_id: step.facts for step in self.steps}
        write_index(directory, self.head, facts, [step.known for step in self.steps if step.known is not None])

    def begin(self, partial: Path) -> None:
        """Write down what will be moved: first the lists of the new directory, last the plan, which makes it valid."""
        partial.mkdir(exist_ok=True)
        remove_leftovers(partial)
        fsync_dir(partial.parent)
        self.write_lists(partial)
        steps = [[self.sources.index(s.source.parent), s.source.name, s.facts.trajectory_id] for s in self.steps]
        node = {"name": self.name, "sources": [str(source) for source in self.sources], "steps": steps}
        atomic_write(partial / PLAN, canonical(node))


def has_plan(directory: Path, name: dict[str, Any]) -> bool:
    """Tell whether a directory belongs to this work, and the work is not done."""
    path = directory / PLAN
    if not path.exists():
        return False
    node = _parse(path)
    return isinstance(node, dict) and node.get("name") == name


def is_free(partial: Path) -> bool:
    """Tell whether nothing lies in a directory but what a run that had moved nothing left."""
    own = (f"{PLAN}.", INDEX, METADATA, STORE)
    return not partial.exists() or all(path.name.startswith(own) for path in partial.iterdir())


def read_plan(directory: Path) -> Plan:
    """Read the plan of an earlier run, and what it had found out of the files.

    Raises:
        DamagedFileError: It is not as it should be.
    """
    path = directory / PLAN
    node, listing = _parse(path), read_index(directory)
    try:
        sources = tuple(Path(source) for source in node["sources"])
        steps = []
        for place, file, number in node["steps"]:
            if id_of_name(file) is None or set(file) & set("/\\"):
                msg = f"file {file[:80]!r}"
                raise ValueError(msg)
            steps.append(Step(sources[place] / file, listing.infos[number], listing.entries.get(number)))
        return Plan(node["name"], sources, listing.head, steps)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        msg = f"{path} is damaged: no plan ({error!r})"
        raise DamagedFileError(msg) from error


def _parse(path: Path) -> Any:
    with os.fdopen(open_file(path), "rb") as stream:
        return parse_json(stream.read(), path)


def ranks_of(source: Path) -> tuple[Path, ...]:
    """Return the directories `rank_*` of a directory in the order of their numbers."""
    if not source.is_dir():
        return ()
    found = [
        (int(match[1]), path) for path in source.iterdir() if (match := _RANK.fullmatch(path.name)) and path.is_dir()
    ]
    return tuple(path for _, path in sorted(found))


def merge_plan(name: dict[str, Any], ranks: Sequence[Path]) -> Plan:
    """Plan to join directories: interleaved by id, of equal ids the first directory's first, renumbered from 0.

    Raises:
        CheckpointError: Their formats differ, or one holds no trajectories.
        DamagedFileError: A file or a list is missing or damaged.
    """
    listings = [read_index(rank) for rank in ranks]
    formats = {listing.directory.name: listing.head.trajectory_format for listing in listings}
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{rank}: {format_name}" for rank, format_name in formats.items())
        msg = (
            f"the ranks of {ranks[0].parent} have different formats ({shown}): convert them to one first "
            "(ostinato convert)"
        )
        raise CheckpointError(msg)
    order = sorted((number, place) for place, listing in enumerate(listings) for number in listing.infos)
    steps = [_step(listings[place], number, new) for new, (number, place) in enumerate(order)]
    return Plan(name, tuple(ranks), Head(listings[0].head.trajectory_format, len(steps), listings[0].head.seed), steps)


def split_plan(name: dict[str, Any], source: Path, count: int) -> Plan:
    """Plan to take the first trajectories of a directory; they keep their ids.

    Raises:
        CheckpointError: There are fewer.
        DamagedFileError: A file or a list is missing or damaged.
    """
    listing = read_index(source)
    if count > len(listing.infos):
        msg = f"split_count must be in [1, {len(listing.infos)}] (trajectories in {source}), got {count}"
        raise CheckpointError(msg)
    ids = list(listing.infos)[:count]
    head = Head(listing.head.trajectory_format, max(ids) + 1, listing.head.seed)
    return Plan(name, (source,), head, [_step(listing, number, number) for number in ids])


def _step(listing: DirectoryIndex, number: int, new: int) -> Step:
    """Look at one file before anything is touched: its size, and where no size is known, what it holds."""
    facts, known, format_name = listing.infos[number], listing.entries.get(number), listing.head.trajectory_format
    path = listing.directory / facts.file_name(format_name)
    try:
        if known is not None:
            check_size(path, known)
        elif format_name == "pkl":
            _check_end_of_pickle(path)
        else:
            known = check_content(listing, number, allow_pickle=False)
    except OstinatoError as error:
        msg = f"{error}: nothing was touched"
        raise (MissingFileError if isinstance(error, FileNotFoundError) else DamagedFileError)(msg) from error
    moved = facts._replace(trajectory_id=new)
    return Step(path, moved, None if known is None else replace(known, info=moved))


def check_size(path: Path, known: Entry | None) -> None:
    """Refuse a file that is missing, no regular file, or of another size than its list says.

    Raises:
        DamagedFileError: naming it.
    """
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if known is not None and known.file is not None and known.file.nbytes != size:
        _damaged(path, f"{size} bytes, its list says {known.file.nbytes} (ostinato verify tells more)")


def _check_end_of_pickle(path: Path) -> None:
    """Refuse a pickle that was cut, without running it: a whole one ends with a dot."""
    fd = open_file(path)
    try:
        if pread(fd, 1, max(os.fstat(fd).st_size - 1, 0)) != b".":
            _damaged(path, "a pickle without its end")
    finally:
        os.close(fd)


def _damaged(path: Path, problem: str) -> NoReturn:
    msg = f"{path} is damaged: {problem}"
    raise DamagedFileError(msg)
