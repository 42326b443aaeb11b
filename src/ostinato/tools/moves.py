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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ostinato.durable.files import check_free, copy_file, fsync_dir, link_file
from ostinato.durable.locks import DirectoryLock
from ostinato.errors import CheckpointError, CheckpointNotFoundError, DamagedFileError, OptionError
from ostinato.tools.plan import (
    PLAN,
    Plan,
    Step,
    check_size,
    has_plan,
    is_free,
    merge_plan,
    ranks_of,
    read_plan,
    split_plan,
)
from ostinato.trajectories.checkpoint import check_new_path, new_directory
from ostinato.trajectories.index import INDEX, JOURNAL, METADATA, STORE, read_index, write_index
from ostinato.trajectories.store import remove_leftovers

if TYPE_CHECKING:
    import os
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
        ranks = ranks_of(source)
        if not ranks:
            why = (
                "has no directories rank_0, rank_1 and so on: nothing to merge" if source.exists() else "does not exist"
            )
            msg = f"{source} {why}"
            raise CheckpointNotFoundError(msg)
        return ranks

    work = _Work(name, find, lambda ranks: merge_plan(name, ranks), on_progress)
    report = _run(work, Path(save_path).absolute(), copy=copy, move=move)
    return replace(report, left=_left(ranks_of(source))) if move else report


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
        read_index(source)  # tells what is wrong before the directory is locked
        return (source,)

    work = _Work(name, find, lambda _: split_plan(name, source, count), on_progress)
    return _run(work, Path(save_path).absolute(), copy=copy, move=move)


class _Work(NamedTuple):
    """What is asked for."""

    name: dict[str, Any]
    find: Callable[[], Sequence[Path]]
    """Finds the sources."""
    make: Callable[[Sequence[Path]], Plan]
    """Reads the sources, looks at every file, and plans."""
    on_progress: Callable[[int, int], None] | None

    def tell(self, done: int, plan: Plan) -> None:
        """Report progress."""
        if self.on_progress is not None:
            self.on_progress(done, len(plan.steps))


def _run(work: _Work, target: Path, *, copy: bool, move: bool) -> MoveReport:
    if copy and move:
        msg = "copy and move exclude each other: give one of them, or neither for hard links"
        raise OptionError(msg)
    return _move(work, target) if move else _link_or_copy(work, target, copy=copy)


def _move(work: _Work, target: Path) -> MoveReport:
    if has_plan(target, work.name):
        return _finish(target, resumed=True)
    check_new_path(target)
    partial = target.with_name(f"{target.name}.partial")
    resumed = has_plan(partial, work.name)
    if not resumed and not is_free(partial):
        msg = f"{partial} is in the way: it holds other unfinished work; finish that first, or choose another target"
        raise CheckpointError(msg)
    found = read_plan(partial).sources if resumed else work.find()
    sources = [source for source in found if source.is_dir()]
    with _locked(sources):
        if resumed:
            plan = read_plan(partial)
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
        if has_plan(unfinished, work.name):
            msg = (
                f"{unfinished} holds an unfinished move of these trajectories: give move=True (--move) once more, so "
                "that it goes on; nothing was touched"
            )
            raise CheckpointError(msg)
    check_new_path(target)
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


def _link(work: _Work, plan: Plan, directory: Path) -> list[Step]:
    """Link the files into a directory; return those that cannot be linked, which were left alone."""
    rest, done = [], 0
    for step in plan.steps:
        if link_file(step.source, plan.target_of(step, directory)):
            done += 1
            work.tell(done, plan)
        else:
            rest.append(step)
    return rest


def _check_rest(plan: Plan, partial: Path) -> None:
    """Look at the files that an earlier run had not moved yet."""
    waiting = [step for step in plan.steps if not plan.target_of(step, partial).exists()]
    for step in waiting:
        try:
            check_size(step.source, step.known)
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


def _rename_files(work: _Work, plan: Plan, partial: Path) -> None:
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
    plan = read_plan(target)
    merged = plan.name["work"] == "merge"
    moved: dict[Path, set[str]] = {source: set() for source in plan.sources}
    for step in plan.steps:
        moved[step.source.parent].add(step.source.name)
    there = [source for source in plan.sources if source.is_dir()]
    with _locked(there):
        for source in there:
            remove_leftovers(source)
            _take_off(source, moved[source], remove=merged)
    for source in there if merged else ():
        with contextlib.suppress(OSError):  # something else lies there: it stays
            source.rmdir()
    (target / PLAN).unlink(missing_ok=True)
    fsync_dir(target)
    return _report(target, plan.sources, "moved", resumed=resumed)


def _take_off(source: Path, moved: set[str], *, remove: bool) -> None:
    """Take moved files off the list of a source; a file that came later under the name of a moved one stays on it."""
    if _has_lists(source):
        listing = read_index(source)
        names = {number: fact.file_name(listing.head.trajectory_format) for number, fact in listing.infos.items()}
        facts = {n: listing.infos[n] for n, name in names.items() if name not in moved or (source / name).exists()}
        write_index(source, listing.head, facts, [entry for entry in listing.entries.values() if entry.id in facts])
        if facts:
            return
    for name in (STORE, INDEX, METADATA) if remove else ():
        (source / name).unlink(missing_ok=True)


def _has_lists(source: Path) -> bool:
    """Tell whether there is a list to read, however its index is spelt; an earlier run may have removed it."""
    return (source / JOURNAL).exists() or any(source.glob("trajector*_index.json"))


def _left(ranks: Sequence[Path]) -> tuple[str, ...]:
    """Name the directories that list trajectories after a merge."""
    return tuple(str(rank) for rank in ranks if _has_lists(rank) and read_index(rank).infos)


def _report(
    target: Path, sources: Sequence[Path], how: Literal["linked", "copied", "moved"], *, resumed: bool = False
) -> MoveReport:
    facts = read_index(target).infos.values()
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
