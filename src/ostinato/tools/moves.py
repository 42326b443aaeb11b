"""Joining and dividing directories of trajectories, by moving files or by copying them.

Moved files go by `rename` into `TARGET.partial`, which becomes the target once it is complete; a plan in it tells a
later run of the same command what it may go on with. So each trajectory is in exactly one place at any moment.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.durable.files import atomic_write, copy_file, fsync_dir
from ostinato.durable.locks import DirectoryLock
from ostinato.durable.manifest import canonical, parse_json
from ostinato.errors import CheckpointError, OptionError
from ostinato.trajectories.checkpoint import check_new, new_directory
from ostinato.trajectories.entries import Entry, Facts, file_name
from ostinato.trajectories.listing import INDEX, JOURNAL, METADATA, STORE, Head, Listing, fold, read_listing, resolve
from ostinato.trajectories.store import sweep

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["MoveReport", "merge", "split"]

_PLAN = "ostinato_plan.json"
_RANK = re.compile(r"rank_(\d+)")


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What was joined or divided."""

    path: str
    """The new directory."""
    trajectories: int
    """Trajectories in it."""
    total_samples: int
    """Transitions in it."""
    sources: tuple[str, ...]
    """Directories that they came from."""
    copied: bool
    """Whether the sources still have them."""
    resumed: bool = False
    """Whether an earlier run had begun with it."""


class _Step(NamedTuple):
    """One file: where it lies, and what it is in the new directory."""

    source: Path
    facts: Facts
    known: Entry | None


class _Work(NamedTuple):
    """Everything to be done: `name` tells the same work from other work."""

    name: dict[str, Any]
    sources: tuple[Path, ...]
    head: Head
    steps: list[_Step]


def merge(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    *,
    copy: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MoveReport:
    """Join the `rank_*` directories of a directory into one: interleaved by original id, renumbered from 0.

    Of equal ids the lower rank comes first. The new directory has the seed of the lowest rank.

    Args:
        source_path: Directory that holds `rank_0`, `rank_1` and so on.
        save_path: New directory.
        copy: Copy the files; otherwise they are moved, and the emptied directories go.
        on_progress: Called with the number of files done and of all files.

    Raises:
        CheckpointError: There are no ranks, their formats differ, the target exists, or files would have to be moved to
            another file system; nothing was touched. Or moving stopped half-way: run it again to go on.
        DamagedFileError: A file or a list is missing or damaged; nothing was touched.
    """
    source, target = Path(source_path).absolute(), Path(save_path).absolute()
    name = {"work": "merge", "source": str(source)}
    if not copy and _has_plan(target, name):
        return _finish(target, _ranks(source), merged=True)
    work = _merge_work(source, name)
    return _run(work, target, copy=copy, on_progress=on_progress)


def split(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    count: int,
    *,
    copy: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MoveReport:
    """Take the first `count` trajectories of a directory into a new one; they keep their ids.

    Args:
        source_path: Directory of trajectories.
        save_path: New directory.
        count: How many.
        copy: Copy the files; otherwise they are moved, and the source lists the rest.
        on_progress: Called with the number of files done and of all files.

    Raises:
        OptionError: `count` is not positive.
        CheckpointError: There are fewer trajectories, the target exists, or files would have to be moved to another
            file system; nothing was touched. Or moving stopped half-way: run it again to go on.
        DamagedFileError: A file or a list is missing or damaged; nothing was touched.
    """
    if count < 1:
        msg = f"split_count must be 1 or more, got {count}"
        raise OptionError(msg)
    source, target = Path(source_path).absolute(), Path(save_path).absolute()
    name = {"work": "split", "source": str(source), "count": count}
    if not copy and _has_plan(target, name):
        return _finish(target, (source,), merged=False)
    listing = read_listing(source)
    if count > len(listing.facts):
        msg = f"split_count must be in [1, {len(listing.facts)}] (trajectories in {source}), got {count}"
        raise CheckpointError(msg)
    facts = list(listing.facts.values())[:count]
    steps = [_step(listing, fact, fact) for fact in facts]
    head = Head(listing.head.trajectory_format, max(fact.trajectory_id for fact in facts) + 1, listing.head.seed)
    work = _Work(name, (source,), head, steps)
    return _run(work, target, copy=copy, on_progress=on_progress)


def _ranks(source: Path) -> tuple[Path, ...]:
    found = [
        (int(match[1]), path) for path in source.iterdir() if (match := _RANK.fullmatch(path.name)) and path.is_dir()
    ]
    return tuple(path for _, path in sorted(found))


def _merge_work(source: Path, name: dict[str, Any]) -> _Work:
    ranks = _ranks(source) if source.is_dir() else ()
    if not ranks:
        msg = f"{source} has no directories rank_0, rank_1 and so on: nothing to merge"
        raise CheckpointError(msg)
    listings = [read_listing(rank) for rank in ranks]
    formats = {listing.directory.name: listing.head.trajectory_format for listing in listings}
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{rank}: {format_name}" for rank, format_name in formats.items())
        msg = f"the ranks of {source} have different formats ({shown}): convert them to one first (ostinato convert)"
        raise CheckpointError(msg)
    order = sorted((number, place) for place, listing in enumerate(listings) for number in listing.facts)
    steps = [
        _step(listings[place], listings[place].facts[number], listings[place].facts[number]._replace(trajectory_id=new))
        for new, (number, place) in enumerate(order)
    ]
    return _Work(name, ranks, Head(listings[0].head.trajectory_format, len(steps), listings[0].head.seed), steps)


def _step(listing: Listing, old: Facts, new: Facts) -> _Step:
    known = listing.known.get(old.trajectory_id)
    path = listing.directory / file_name(old, listing.head.trajectory_format)
    return _Step(path, new, None if known is None else replace(known, facts=new))


def _run(work: _Work, target: Path, *, copy: bool, on_progress: Callable[[int, int], None] | None) -> MoveReport:
    check_new(target)
    partial = target.with_name(f"{target.name}.partial")
    resumed = not copy and _has_plan(partial, work.name)
    if not copy and not resumed and _holds_more_than_a_torn_plan(partial):
        msg = f"{partial} is in the way: it holds other unfinished work; finish that first, or choose another target"
        raise CheckpointError(msg)
    _check_files(work, partial if resumed else None)
    if copy:
        with new_directory(target) as temporary:
            for step, path in _each(work, temporary, on_progress):
                copy_file(step.source, path)
            _write_lists(work, temporary)
        return _report(target, work.sources, copied=True)
    with _locked(work.sources):
        _check_one_disk(work.sources, target)
        _move(work, partial, on_progress)
        sweep(partial)
        _write_lists(work, partial)
        for directory in (partial, *work.sources):
            fsync_dir(directory)
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
        fsync_dir(target.parent)
    return _finish(target, work.sources, merged=work.name["work"] == "merge", resumed=resumed)


def _check_files(work: _Work, partial: Path | None) -> None:
    """Look at every file before anything is touched."""
    for step in work.steps:
        if partial is not None and (partial / file_name(step.facts, work.head.trajectory_format)).exists():
            continue
        if not step.source.is_file() or step.source.is_symlink():
            msg = f"{step.source} is missing or no regular file: nothing was touched"
            raise CheckpointError(msg)
        if step.known is not None and step.known.place and step.known.place.nbytes != step.source.stat().st_size:
            msg = f"{step.source} has another size than its list says: run ostinato verify; nothing was touched"
            raise CheckpointError(msg)


def _check_one_disk(sources: Sequence[Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if {path.stat().st_dev for path in sources} != {target.parent.stat().st_dev}:
        msg = (
            f"{target} is on another file system, where files cannot be moved at once: use --copy, then remove "
            "the source"
        )
        raise CheckpointError(msg)


def _each(work: _Work, directory: Path, on_progress: Callable[[int, int], None] | None) -> Iterator[tuple[_Step, Path]]:
    for done, step in enumerate(work.steps, 1):
        yield step, directory / file_name(step.facts, work.head.trajectory_format)
        if on_progress is not None:
            on_progress(done, len(work.steps))


def _move(work: _Work, partial: Path, on_progress: Callable[[int, int], None] | None) -> None:
    partial.mkdir(exist_ok=True)
    atomic_write(partial / _PLAN, canonical(work.name))
    moved = 0
    try:
        for step, path in _each(work, partial, on_progress):
            if not path.exists():
                step.source.rename(path)
            moved += 1
    except OSError as error:
        msg = (
            f"stopped after {moved} of {len(work.steps)} trajectories: {error}; those moved lie in {partial}, the "
            "others where they were: run the same command again to go on"
        )
        raise CheckpointError(msg) from error


def _write_lists(work: _Work, directory: Path) -> None:
    facts = {step.facts.trajectory_id: step.facts for step in work.steps}
    known = {step.facts.trajectory_id: step.known for step in work.steps if step.known is not None}
    if work.head.trajectory_format != "pkl":  # the places in files of others are found out now, once
        unknown = [number for number in facts if number not in known]
        listing = Listing(directory, work.head, facts)
        known |= {n: e for n, e in resolve(listing, unknown, allow_pickle=False) if isinstance(e, Entry)}
    fold(directory, work.head, facts, known.values())


def _has_plan(directory: Path, name: dict[str, Any]) -> bool:
    path = directory / _PLAN
    return path.exists() and parse_json(path.read_bytes(), path) == name


def _holds_more_than_a_torn_plan(directory: Path) -> bool:
    return directory.exists() and any(not path.name.startswith(f"{_PLAN}.") for path in directory.iterdir())


def _finish(target: Path, sources: tuple[Path, ...], *, merged: bool, resumed: bool = True) -> MoveReport:
    """Bring the lists of the sources up to date; the plan in the target goes last, so that this can be done again."""
    gone = set() if merged else set(read_listing(target).facts)
    with _locked(sources):
        for source in sources:
            sweep(source)
            if merged:
                for name in (JOURNAL, INDEX, "trajector_index.json", METADATA, STORE):
                    (source / name).unlink(missing_ok=True)
                continue
            listing = read_listing(source)
            facts = {number: fact for number, fact in listing.facts.items() if number not in gone}
            fold(source, listing.head, facts, [entry for entry in listing.known.values() if entry.id in facts])
    for source in sources if merged else ():
        with contextlib.suppress(OSError):  # something else lies there: it stays
            source.rmdir()
    (target / _PLAN).unlink(missing_ok=True)
    fsync_dir(target)
    return _report(target, sources, copied=False, resumed=resumed)


def _report(target: Path, sources: tuple[Path, ...], *, copied: bool, resumed: bool = False) -> MoveReport:
    facts = read_listing(target).facts.values()
    total = sum(fact.num_samples for fact in facts)
    return MoveReport(str(target), len(facts), total, tuple(map(str, sources)), copied, resumed)


@contextlib.contextmanager
def _locked(sources: Sequence[Path]) -> Iterator[None]:
    """Hold the right to save into the sources."""
    with contextlib.ExitStack() as stack:
        for source in sources:
            lock = DirectoryLock(source)
            lock.acquire()
            stack.callback(lock.release)
        yield
