"""Joining and dividing directories of trajectories: by hard links, by copying files, or by moving them.

Linked and copied files go into a temporary directory that becomes the target once it is complete; the sources are only
read. Links are safe because trajectory files are never edited in place, only written anew under another name and
renamed; lists and metadata, which are rewritten, are written anew for the target and never linked.

Moved files go by `rename` into `TARGET.partial`, which becomes the target once it is complete; a plan in it names each
file, so that a later run of the same command goes on with these and no others. So each trajectory is in exactly one
place at any moment; one that a source gets meanwhile stays there and on its list.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from ostinato.durable.files import atomic_write, check_free, copy_file, fsync_dir, link_file, open_file
from ostinato.durable.locks import DirectoryLock
from ostinato.durable.manifest import canonical, parse_json
from ostinato.durable.positioned_reads import pread
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    MissingFileError,
    OptionError,
    OstinatoError,
)
from ostinato.tools.verify import check_content
from ostinato.trajectories.checkpoint import check_new, new_directory
from ostinato.trajectories.index import (
    INDEX,
    JOURNAL,
    METADATA,
    STORE,
    Entry,
    Facts,
    Head,
    Listing,
    file_name,
    fold,
    id_of_name,
    read_listing,
)
from ostinato.trajectories.store import sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["MoveReport", "merge", "split"]


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
    how: Literal["linked", "copied", "moved"]
    """Whether the sources share the files (hard links), have files of their own, or no longer have them."""
    resumed: bool = False
    """Whether an earlier run had begun with it."""
    left: tuple[str, ...] = ()
    """After a merge that moved: directories that list trajectories which came later; they stay there."""


def merge(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    *,
    copy: bool = False,
    move: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MoveReport:
    """Join the `rank_*` directories of a directory into one: interleaved by original id, renumbered from 0.

    Of equal ids the lower rank comes first. The new directory has the seed of the lowest rank. By default it gets hard
    links: the ranks keep their files, and no disk space is used. Where that is not possible (another file system, or
    one without links), files are copied. A move that goes on after it stopped takes what it had planned; trajectories
    that came later stay in their ranks, which the report names.

    Args:
        source_path: Directory that holds `rank_0`, `rank_1` and so on.
        save_path: New directory.
        copy: Copy the files in any case.
        move: Move the files: the ranks lose them, and the emptied directories are removed.
        on_progress: Called with the number of files done and of all files.

    Raises:
        OptionError: Both `copy` and `move`.
        CheckpointNotFoundError: There are no ranks.
        CheckpointError: Formats of the ranks differ, the target exists, or files would have to be moved to another
            file system; nothing was touched. Or moving stopped half-way: run it again to go on.
        StorageMemoryError: The disk has too little room for copies; nothing was touched.
        DamagedFileError: A list, or a file by its size or header, is missing or damaged; nothing was touched. Rows are
            not read: `verify` does that. Of an unfinished move: a file that still has to be moved.
    """
    source = Path(source_path).absolute()
    name = {"work": "merge", "source": str(source)}

    def find() -> Sequence[Path]:
        ranks = _ranks_of(source)
        if not ranks:
            why = (
                "has no directories rank_0, rank_1 and so on: nothing to merge" if source.exists() else "does not exist"
            )
            msg = f"{source} {why}"
            raise CheckpointNotFoundError(msg)
        return ranks

    work = _Work(name, find, lambda ranks: _merge_plan(name, ranks), on_progress)
    report = _run(work, Path(save_path).absolute(), copy=copy, move=move)
    return replace(report, left=_left(_ranks_of(source))) if move else report


def split(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    count: int,
    *,
    copy: bool = False,
    move: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MoveReport:
    """Take the first `count` trajectories of a directory into a new one; they keep their ids.

    By default the new directory gets hard links, or copies where links are not possible, and the source keeps all of
    its trajectories.

    Args:
        source_path: Directory of trajectories.
        save_path: New directory.
        count: How many.
        copy: Copy the files in any case.
        move: Move the files: the source loses them, and lists the rest.
        on_progress: Called with the number of files done and of all files.

    Raises:
        OptionError: `count` is not positive, or both `copy` and `move`.
        CheckpointNotFoundError: No trajectories are there.
        CheckpointError: There are fewer trajectories, the target exists, or files would have to be moved to another
            file system; nothing was touched. Or moving stopped half-way: run it again to go on.
        StorageMemoryError: The disk has too little room for copies; nothing was touched.
        DamagedFileError: A list, or a file by its size or header, is missing or damaged; nothing was touched. Rows are
            not read: `verify` does that. Of an unfinished move: a file that still has to be moved.
    """
    if count < 1:
        msg = f"split_count must be 1 or more, got {count}"
        raise OptionError(msg)
    source = Path(source_path).absolute()
    name = {"work": "split", "source": str(source), "count": count}

    def find() -> Sequence[Path]:
        read_listing(source)  # tells what is wrong before the directory is locked
        return (source,)

    work = _Work(name, find, lambda _: _split_plan(name, source, count), on_progress)
    return _run(work, Path(save_path).absolute(), copy=copy, move=move)


class _Work(NamedTuple):
    """What is asked for."""

    name: dict[str, Any]
    find: Callable[[], Sequence[Path]]
    """Finds the sources."""
    make: Callable[[Sequence[Path]], _Plan]
    """Reads the sources, looks at every file, and plans."""
    on_progress: Callable[[int, int], None] | None

    def tell(self, done: int, plan: _Plan) -> None:
        """Report progress."""
        if self.on_progress is not None:
            self.on_progress(done, len(plan.steps))


def _run(work: _Work, target: Path, *, copy: bool, move: bool) -> MoveReport:
    if copy and move:
        msg = "copy and move exclude each other: give one of them, or neither for hard links"
        raise OptionError(msg)
    return _move(work, target) if move else _link_or_copy(work, target, copy=copy)


def _move(work: _Work, target: Path) -> MoveReport:
    if _has_plan(target, work.name):
        return _finish(target, resumed=True)
    check_new(target)
    partial = target.with_name(f"{target.name}.partial")
    resumed = _has_plan(partial, work.name)
    if not resumed and not _is_free(partial):
        msg = f"{partial} is in the way: it holds other unfinished work; finish that first, or choose another target"
        raise CheckpointError(msg)
    found = _read_plan(partial).sources if resumed else work.find()
    sources = [source for source in found if source.is_dir()]
    with _locked(sources):
        if resumed:
            plan = _read_plan(partial)
            _check_rest(plan, partial)
        else:
            plan = work.make(sources)
            _check_one_disk(sources, target)
            plan.begin(partial)
        _rename_files(work, plan, partial)
        for directory in (partial, *sources):
            fsync_dir(directory)
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
        fsync_dir(target.parent)
    return _finish(target, resumed=resumed)


def _link_or_copy(work: _Work, target: Path, *, copy: bool) -> MoveReport:
    for unfinished in (target, target.with_name(f"{target.name}.partial")):
        if _has_plan(unfinished, work.name):
            msg = (
                f"{unfinished} holds an unfinished move of these trajectories: give move=True (--move) once more, so "
                "that it goes on; nothing was touched"
            )
            raise CheckpointError(msg)
    check_new(target)
    sources = work.find()
    plan = work.make(sources)
    with new_directory(target) as temporary:
        rest = plan.steps if copy else _link(work, plan, temporary)
        check_free(temporary, sum(step.source.stat().st_size for step in rest))
        for done, step in enumerate(rest, len(plan.steps) - len(rest) + 1):
            copy_file(step.source, plan.target_of(step, temporary))
            work.tell(done, plan)
        plan.write_lists(temporary)
    return _report(target, sources, "copied" if rest else "linked")


def _link(work: _Work, plan: _Plan, directory: Path) -> list[_Step]:
    """Link the files into a directory; return those that cannot be linked, which were left alone."""
    rest, done = [], 0
    for step in plan.steps:
        if link_file(step.source, plan.target_of(step, directory)):
            done += 1
            work.tell(done, plan)
        else:
            rest.append(step)
    return rest


def _check_rest(plan: _Plan, partial: Path) -> None:
    """Look at the files that an earlier run had not moved yet."""
    waiting = [step for step in plan.steps if not plan.target_of(step, partial).exists()]
    for step in waiting:
        try:
            _check_size(step.source, step.known)
        except DamagedFileError as error:
            done = len(plan.steps) - len(waiting)
            msg = (
                f"{error}. {done} of {len(plan.steps)} trajectories lie in {partial} already, the others where they "
                "were: restore the file from a copy, then run the same command again"
            )
            raise DamagedFileError(msg) from error


def _check_one_disk(sources: Sequence[Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if {path.stat().st_dev for path in sources} != {target.parent.stat().st_dev}:
        msg = (
            f"{target} is on another file system, where files cannot be moved at once: leave out move=True (--move), "
            "so that they are copied, then remove the source"
        )
        raise CheckpointError(msg)


def _rename_files(work: _Work, plan: _Plan, partial: Path) -> None:
    moved = 0
    try:
        for step in plan.steps:
            path = plan.target_of(step, partial)
            if not path.exists():
                step.source.rename(path)
            moved += 1
            work.tell(moved, plan)
    except OSError as error:
        msg = (
            f"stopped after {moved} of {len(plan.steps)} trajectories: {error}; those moved lie in {partial}, the "
            "others where they were: run the same command again to go on"
        )
        raise CheckpointError(msg) from error


def _finish(target: Path, *, resumed: bool) -> MoveReport:
    """Bring the lists of the sources up to date; the plan in the target goes last, so that this can be done again."""
    plan = _read_plan(target)
    merged = plan.name["work"] == "merge"
    moved: dict[Path, set[str]] = {source: set() for source in plan.sources}
    for step in plan.steps:
        moved[step.source.parent].add(step.source.name)
    there = [source for source in plan.sources if source.is_dir()]
    with _locked(there):
        for source in there:
            sweep(source)
            _take_off(source, moved[source], remove=merged)
    for source in there if merged else ():
        with contextlib.suppress(OSError):  # something else lies there: it stays
            source.rmdir()
    (target / _PLAN).unlink(missing_ok=True)
    fsync_dir(target)
    return _report(target, plan.sources, "moved", resumed=resumed)


def _take_off(source: Path, moved: set[str], *, remove: bool) -> None:
    """Take moved files off the list of a source; a file that came later under the name of a moved one stays on it."""
    if _has_lists(source):
        listing = read_listing(source)
        names = {number: file_name(fact, listing.head.trajectory_format) for number, fact in listing.facts.items()}
        facts = {n: listing.facts[n] for n, name in names.items() if name not in moved or (source / name).exists()}
        fold(source, listing.head, facts, [entry for entry in listing.known.values() if entry.id in facts])
        if facts:
            return
    for name in (STORE, INDEX, METADATA) if remove else ():
        (source / name).unlink(missing_ok=True)


def _has_lists(source: Path) -> bool:
    """Tell whether there is a list to read, however its index is spelt; an earlier run may have removed it."""
    return (source / JOURNAL).exists() or any(source.glob("trajector*_index.json"))


def _left(ranks: Sequence[Path]) -> tuple[str, ...]:
    """Name the directories that list trajectories after a merge."""
    return tuple(str(rank) for rank in ranks if _has_lists(rank) and read_listing(rank).facts)


def _report(
    target: Path, sources: Sequence[Path], how: Literal["linked", "copied", "moved"], *, resumed: bool = False
) -> MoveReport:
    facts = read_listing(target).facts.values()
    total = sum(fact.num_samples for fact in facts)
    return MoveReport(str(target), len(facts), total, tuple(map(str, sources)), how, resumed)


@contextlib.contextmanager
def _locked(sources: Sequence[Path]) -> Iterator[None]:
    """Hold the right to save into the sources."""
    with contextlib.ExitStack() as stack:
        for source in sources:
            lock = DirectoryLock(source)
            lock.acquire()
            stack.callback(lock.release)
        yield


_PLAN = "ostinato_plan.json"
_RANK = re.compile(r"rank_(\d+)")


class _Step(NamedTuple):
    """One file: where it lies, what it is in the new directory, and where its fields lie (None: a pickle)."""

    source: Path
    facts: Facts
    known: Entry | None


class _Plan(NamedTuple):
    """Everything to be done: `name` tells the same work from other work."""

    name: dict[str, Any]
    sources: tuple[Path, ...]
    head: Head
    steps: list[_Step]

    def target_of(self, step: _Step, directory: Path) -> Path:
        """Return the place of a file in the new directory."""
        return directory / file_name(step.facts, self.head.trajectory_format)

    def write_lists(self, directory: Path) -> None:
        """Write index, metadata and list of the new directory."""
        facts = {step.facts.trajectory_id: step.facts for step in self.steps}
        fold(directory, self.head, facts, [step.known for step in self.steps if step.known is not None])

    def begin(self, partial: Path) -> None:
        """Write down what will be moved: first the lists of the new directory, last the plan, which makes it valid."""
        partial.mkdir(exist_ok=True)
        sweep(partial)
        fsync_dir(partial.parent)
        self.write_lists(partial)
        steps = [[self.sources.index(s.source.parent), s.source.name, s.facts.trajectory_id] for s in self.steps]
        node = {"name": self.name, "sources": [str(source) for source in self.sources], "steps": steps}
        atomic_write(partial / _PLAN, canonical(node))


def _has_plan(directory: Path, name: dict[str, Any]) -> bool:
    """Tell whether a directory belongs to this work, and the work is not done."""
    path = directory / _PLAN
    if not path.exists():
        return False
    node = _parse(path)
    return isinstance(node, dict) and node.get("name") == name


def _is_free(partial: Path) -> bool:
    """Tell whether nothing lies in a directory but what a run that had moved nothing left."""
    own = (f"{_PLAN}.", INDEX, METADATA, STORE)
    return not partial.exists() or all(path.name.startswith(own) for path in partial.iterdir())


def _read_plan(directory: Path) -> _Plan:
    """Read the plan of an earlier run, and what it had found out of the files.

    Raises:
        DamagedFileError: It is not as it should be.
    """
    path = directory / _PLAN
    node, listing = _parse(path), read_listing(directory)
    try:
        sources = tuple(Path(source) for source in node["sources"])
        steps = []
        for place, file, number in node["steps"]:
            if id_of_name(file) is None or set(file) & set("/\\"):
                msg = f"file {file[:80]!r}"
                raise ValueError(msg)
            steps.append(_Step(sources[place] / file, listing.facts[number], listing.known.get(number)))
        return _Plan(node["name"], sources, listing.head, steps)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        msg = f"{path} is damaged: no plan ({error!r})"
        raise DamagedFileError(msg) from error


def _parse(path: Path) -> Any:
    with os.fdopen(open_file(path), "rb") as stream:
        return parse_json(stream.read(), path)


def _ranks_of(source: Path) -> tuple[Path, ...]:
    """Return the directories `rank_*` of a directory in the order of their numbers."""
    if not source.is_dir():
        return ()
    found = [
        (int(match[1]), path) for path in source.iterdir() if (match := _RANK.fullmatch(path.name)) and path.is_dir()
    ]
    return tuple(path for _, path in sorted(found))


def _merge_plan(name: dict[str, Any], ranks: Sequence[Path]) -> _Plan:
    """Plan to join directories: interleaved by id, of equal ids the first directory's first, renumbered from 0.

    Raises:
        CheckpointError: Their formats differ, or one holds no trajectories.
        DamagedFileError: A file or a list is missing or damaged.
    """
    listings = [read_listing(rank) for rank in ranks]
    formats = {listing.directory.name: listing.head.trajectory_format for listing in listings}
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{rank}: {format_name}" for rank, format_name in formats.items())
        msg = (
            f"the ranks of {ranks[0].parent} have different formats ({shown}): convert them to one first "
            "(ostinato convert)"
        )
        raise CheckpointError(msg)
    order = sorted((number, place) for place, listing in enumerate(listings) for number in listing.facts)
    steps = [_step(listings[place], number, new) for new, (number, place) in enumerate(order)]
    return _Plan(name, tuple(ranks), Head(listings[0].head.trajectory_format, len(steps), listings[0].head.seed), steps)


def _split_plan(name: dict[str, Any], source: Path, count: int) -> _Plan:
    """Plan to take the first trajectories of a directory; they keep their ids.

    Raises:
        CheckpointError: There are fewer.
        DamagedFileError: A file or a list is missing or damaged.
    """
    listing = read_listing(source)
    if count > len(listing.facts):
        msg = f"split_count must be in [1, {len(listing.facts)}] (trajectories in {source}), got {count}"
        raise CheckpointError(msg)
    ids = list(listing.facts)[:count]
    head = Head(listing.head.trajectory_format, max(ids) + 1, listing.head.seed)
    return _Plan(name, (source,), head, [_step(listing, number, number) for number in ids])


def _step(listing: Listing, number: int, new: int) -> _Step:
    """Look at one file before anything is touched: its size, and where no size is known, what it holds."""
    facts, known, format_name = listing.facts[number], listing.known.get(number), listing.head.trajectory_format
    path = listing.directory / file_name(facts, format_name)
    try:
        if known is not None:
            _check_size(path, known)
        elif format_name == "pkl":
            _check_end_of_pickle(path)
        else:
            known = check_content(listing, number, allow_pickle=False)
    except OstinatoError as error:
        msg = f"{error}: nothing was touched"
        raise (MissingFileError if isinstance(error, FileNotFoundError) else DamagedFileError)(msg) from error
    moved = facts._replace(trajectory_id=new)
    return _Step(path, moved, None if known is None else replace(known, facts=moved))


def _check_size(path: Path, known: Entry | None) -> None:
    """Refuse a file that is missing, no regular file, or of another size than its list says.

    Raises:
        DamagedFileError: naming it.
    """
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if known is not None and known.place is not None and known.place.nbytes != size:
        _damaged(path, f"{size} bytes, its list says {known.place.nbytes} (ostinato verify tells more)")


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
