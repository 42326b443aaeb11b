"""Merging and splitting directories of trajectories with hard links, copies or moves.

Linked and copied files go to a temporary directory, which is renamed to the target when it is complete; sources are
only read. Hard links are safe because trajectory files are never modified in place: new contents are written to
another file, which is then renamed. Index and metadata are written anew for the target.

Moved files are renamed into `TARGET.partial`, which is renamed to the target when it is complete. A plan in this
directory lists the files, so that a later run of the same command resumes with exactly these. Each trajectory is in
exactly one place at any time; trajectories that a source receives meanwhile stay there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ostinato.durable.files import (
    DirectoryLock,
    atomic_write,
    check_free,
    check_new_path,
    copy_file,
    fsync_dir,
    link_file,
    new_directory,
)
from ostinato.durable.manifest import canonical
from ostinato.durable.progress import TRAJECTORIES, Progress
from ostinato.durable.progress import count as count_progress
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    MissingFileError,
    OptionError,
    OstinatoError,
)
from ostinato.trajectories.index import (
    INDEX,
    METADATA,
    STORE,
    DirectoryIndex,
    Entry,
    Head,
    TrajectoryInfo,
    check_size,
    has_index,
    id_of_name,
    rank_directories,
    read_index,
    read_object,
    write_index,
)
from ostinato.trajectories.store import remove_leftovers

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from ostinato.durable.progress import ProgressOption


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The result of `merge` or `split`."""

    path: str
    """The new directory."""
    trajectories: int
    """Number of trajectories in the new directory."""
    total_samples: int
    """Number of transitions in the new directory."""
    sources: tuple[str, ...]
    """The source directories."""
    how: Literal["linked", "copied", "moved"]
    """Whether the files are hard links, copies, or were moved out of the sources."""
    resumed: bool = False
    """Whether an earlier run was resumed."""
    left: tuple[str, ...] = ()
    """After a merge with `move`: sources that received trajectories meanwhile, which stay there."""


def merge(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    *,
    copy: bool = False,
    move: bool = False,
    progress: ProgressOption = None,
) -> MoveReport:
    """Merge the `rank_*` directories of a directory, interleaved by original id and renumbered from 0.

    For equal ids, the lower rank comes first. The new directory has the seed of the lowest rank. By default it has hard
    links: the ranks keep their files, and no disk space is used. Where hard links are not possible, files are copied. A
    resumed move takes the files of its plan; trajectories added later stay in their ranks, which the report names.

    Args:
        source_path: Directory with `rank_0`, `rank_1` and so on.
        save_path: New directory.
        copy: Always copy the files.
        move: Move the files: the ranks lose them, and empty ranks are removed.
        progress: The trajectories done and their total; see `ostinato.ProgressOption`.

    Raises:
        OptionError: Both `copy` and `move` are given.
        CheckpointNotFoundError: There are no ranks.
        CheckpointError: The formats of the ranks differ, the target exists, or files would have to be moved to another
            file system; nothing was touched. Or the move was interrupted: run it again to resume it.
        StorageMemoryError: There is not enough disk space for copies; nothing was touched.
        DamagedFileError: An index is damaged, or a file is missing or has the wrong size or header; nothing was
            touched. Rows are not read; use `verify`. Or, when a move is resumed, a file that still has to be moved is
            damaged.
    """
    source = Path(source_path).absolute()
    name = {"work": "merge", "source": str(source)}

    def find() -> Sequence[Path]:
        ranks = rank_directories(source)
        if not ranks:
            why = (
                "has no directories rank_0, rank_1 and so on: nothing to merge" if source.exists() else "does not exist"
            )
            msg = f"{source} {why}"
            raise CheckpointNotFoundError(msg)
        return ranks

    request = _Request(name, find, lambda ranks: _merge_plan(name, ranks), progress)
    report = request.run(Path(save_path).absolute(), copy=copy, move=move)
    return replace(report, left=_left(rank_directories(source))) if move else report


def split(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    count: int,
    *,
    copy: bool = False,
    move: bool = False,
    progress: ProgressOption = None,
) -> MoveReport:
    """Take the first `count` trajectories of a directory into a new one; ids stay the same.

    By default the new directory has hard links, or copies where links are not possible, and the source keeps all
    trajectories.

    Args:
        source_path: Directory of trajectories.
        save_path: New directory.
        count: Number of trajectories.
        copy: Always copy the files.
        move: Move the files: the source loses them and keeps the rest.
        progress: The trajectories done and their total; see `ostinato.ProgressOption`.

    Raises:
        OptionError: `count` is not positive, or both `copy` and `move` are given.
        CheckpointNotFoundError: There are no trajectories.
        CheckpointError: There are fewer trajectories, the target exists, or files would have to be moved to another
            file system; nothing was touched. Or the move was interrupted: run it again to resume it.
        StorageMemoryError: There is not enough disk space for copies; nothing was touched.
        DamagedFileError: An index is damaged, or a file is missing or has the wrong size or header; nothing was
            touched. Rows are not read; use `verify`. Or, when a move is resumed, a file that still has to be moved is
            damaged.
    """
    if count < 1:
        msg = f"split_count must be at least 1, got {count}"
        raise OptionError(msg)
    source = Path(source_path).absolute()
    name = {"work": "split", "source": str(source), "count": count}

    def find() -> Sequence[Path]:
        read_index(source)  # raises before the directory is locked
        return (source,)

    request = _Request(name, find, lambda _: _split_plan(name, source, count), progress)
    return request.run(Path(save_path).absolute(), copy=copy, move=move)


@dataclass(frozen=True, slots=True)
class _Request:
    """A requested merge or split."""

    name: dict[str, Any]
    find: Callable[[], Sequence[Path]]
    """Finds the sources."""
    make: Callable[[Sequence[Path]], _Plan]
    """Reads the sources, checks all files, and returns the plan."""
    progress: ProgressOption

    def run(self, target: Path, *, copy: bool, move: bool) -> MoveReport:
        """Execute the request."""
        if copy and move:
            msg = "copy and move exclude each other: give one of them, or neither for hard links"
            raise OptionError(msg)
        with Progress(self.progress, str(self.name["work"]), unit=TRAJECTORIES) as bar:
            return self._move(target, bar) if move else self._link_or_copy(target, bar, copy=copy)

    def _move(self, target: Path, bar: Progress) -> MoveReport:
        if _has_plan(target, self.name):
            return _finish(target, resumed=True)
        check_new_path(target)
        partial = target.with_name(f"{target.name}.partial")
        resumed = _has_plan(partial, self.name)
        if not resumed and not _is_free(partial):
            msg = f"{partial} is in the way: it has other unfinished work; finish that first, or choose another target"
            raise CheckpointError(msg)
        found = _read_plan(partial).sources if resumed else self.find()
        sources = [source for source in found if source.is_dir()]
        with _locked(sources):
            if resumed:
                plan = _read_plan(partial)
                _check_rest(plan, partial)
            else:
                plan = self.make(sources)
                _check_one_disk(sources, target)
                plan.begin(partial)
            bar.begin(len(plan.steps))
            self._rename_files(plan, partial, bar)
            bar.finish()
            for directory in (partial, *sources):
                fsync_dir(directory)
            if target.is_dir():
                target.rmdir()
            partial.rename(target)
            fsync_dir(target.parent)
        return _finish(target, resumed=resumed)

    def _link_or_copy(self, target: Path, bar: Progress, *, copy: bool) -> MoveReport:
        for unfinished in (target, target.with_name(f"{target.name}.partial")):
            if _has_plan(unfinished, self.name):
                msg = (
                    f"{unfinished} holds an unfinished move of these trajectories: give move=True (--move) again to "
                    "resume it; nothing was touched"
                )
                raise CheckpointError(msg)
        check_new_path(target)
        sources = self.find()
        plan = self.make(sources)
        bar.begin(len(plan.steps))
        with new_directory(target) as temporary:
            rest = plan.steps if copy else self._link(plan, temporary, bar)
            check_free(temporary, sum(step.source.stat().st_size for step in rest))
            for step in rest:
                copy_file(step.source, plan.target_of(step, temporary))
                bar.advance()
            bar.finish()
            plan.write_index(temporary)
        return _report(target, sources, "copied" if rest else "linked")

    @staticmethod
    def _link(plan: _Plan, directory: Path, bar: Progress) -> list[_Step]:
        """Link the files into a directory. Return the steps whose files cannot be linked."""
        rest = []
        for step in plan.steps:
            if link_file(step.source, plan.target_of(step, directory)):
                bar.advance()
            else:
                rest.append(step)
        return rest

    @staticmethod
    def _rename_files(plan: _Plan, partial: Path, bar: Progress) -> None:
        moved = 0
        try:
            for step in plan.steps:
                path = plan.target_of(step, partial)
                if not path.exists():
                    step.source.rename(path)
                moved += 1
                bar.advance()
        except OSError as error:
            msg = (
                f"stopped after {moved} of {len(plan.steps)} trajectories: {error}; the moved ones are in {partial}, "
                "the others in their sources: run the same command again to resume"
            )
            raise CheckpointError(msg) from error


def _check_rest(plan: _Plan, partial: Path) -> None:
    """Check the files that an earlier run did not move."""
    waiting = [step for step in plan.steps if not plan.target_of(step, partial).exists()]
    for step in waiting:
        try:
            check_size(step.source, step.known)
        except DamagedFileError as error:
            done = len(plan.steps) - len(waiting)
            msg = (
                f"{error}. {done} of {len(plan.steps)} trajectories are in {partial} already, the others in their "
                "sources: restore the file from a copy, then run the same command again"
            )
            raise DamagedFileError(msg) from error


def _check_one_disk(sources: Sequence[Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if {path.stat().st_dev for path in sources} != {target.parent.stat().st_dev}:
        msg = (
            f"{target} is on another file system, to which files cannot be renamed: leave out move=True (--move), "
            "so that they are copied, then remove the source"
        )
        raise CheckpointError(msg)


def _finish(target: Path, *, resumed: bool) -> MoveReport:
    """Update the indexes of the sources. The plan is removed last, so that this step can be repeated."""
    plan = _read_plan(target)
    merged = plan.name["work"] == "merge"
    moved: dict[Path, set[str]] = {source: set() for source in plan.sources}
    for step in plan.steps:
        moved[step.source.parent].add(step.source.name)
    there = [source for source in plan.sources if source.is_dir()]
    with _locked(there):
        for source in there:
            remove_leftovers(source)
            _remove_from_index(source, moved[source], remove=merged)
    for source in there if merged else ():
        with contextlib.suppress(OSError):  # the directory has other files and is kept
            source.rmdir()
    (target / _PLAN).unlink(missing_ok=True)
    fsync_dir(target)
    return _report(target, plan.sources, "moved", resumed=resumed)


def _remove_from_index(source: Path, moved: set[str], *, remove: bool) -> None:
    """Remove moved files from the index of a source, except a new file with the name of a moved one."""
    if has_index(source):
        index = read_index(source)
        infos = {n: i for n, i in index.infos.items() if index.path(n).name not in moved or index.path(n).exists()}
        write_index(source, index.head, infos, [entry for entry in index.entries.values() if entry.id in infos])
        if infos:
            return
    for name in (STORE, INDEX, METADATA) if remove else ():
        (source / name).unlink(missing_ok=True)


def _left(ranks: Sequence[Path]) -> tuple[str, ...]:
    """Return the directories that have trajectories after a merge."""
    return tuple(str(rank) for rank in ranks if has_index(rank) and read_index(rank).infos)


def _report(
    target: Path, sources: Sequence[Path], how: Literal["linked", "copied", "moved"], *, resumed: bool = False
) -> MoveReport:
    infos = read_index(target).infos.values()
    total = sum(info.num_samples for info in infos)
    return MoveReport(str(target), len(infos), total, tuple(map(str, sources)), how, resumed)


@contextlib.contextmanager
def _locked(sources: Sequence[Path]) -> Iterator[None]:
    """Hold the locks of the sources."""
    with contextlib.ExitStack() as stack:
        for source in sources:
            lock = DirectoryLock(source)
            lock.acquire()
            stack.callback(lock.release)
        yield


_PLAN = "ostinato_plan.json"


class _Step(NamedTuple):
    """One file: its path, its entry in the new index, and the layout of its fields (None for a pickle)."""

    source: Path
    info: TrajectoryInfo
    known: Entry | None


class _Plan(NamedTuple):
    """All steps of a merge or split; `name` identifies the request."""

    name: dict[str, Any]
    sources: tuple[Path, ...]
    head: Head
    steps: list[_Step]

    def target_of(self, step: _Step, directory: Path) -> Path:
        """Return the path of a file in the new directory."""
        return directory / step.info.file_name(self.head.trajectory_format)

    def write_index(self, directory: Path) -> None:
        """Write index, metadata and journal of the new directory."""
        infos = {step.info.trajectory_id: step.info for step in self.steps}
        write_index(directory, self.head, infos, [step.known for step in self.steps if step.known is not None])

    def begin(self, partial: Path) -> None:
        """Write the index of the new directory, and last the plan, which makes it valid."""
        partial.mkdir(exist_ok=True)
        remove_leftovers(partial)
        fsync_dir(partial.parent)
        self.write_index(partial)
        steps = [[self.sources.index(s.source.parent), s.source.name, s.info.trajectory_id] for s in self.steps]
        node = {"name": self.name, "sources": [str(source) for source in self.sources], "steps": steps}
        atomic_write(partial / _PLAN, canonical(node))


def _has_plan(directory: Path, name: dict[str, Any]) -> bool:
    """Return whether a directory has the unfinished plan of this request."""
    path = directory / _PLAN
    if not path.exists():
        return False
    return read_object(path).get("name") == name


def _is_free(partial: Path) -> bool:
    """Return whether a directory has at most the files of a run that moved nothing."""
    own = (f"{_PLAN}.", INDEX, METADATA, STORE)
    return not partial.exists() or all(path.name.startswith(own) for path in partial.iterdir())


def _read_plan(directory: Path) -> _Plan:
    """Read the plan of an earlier run and the index of its files.

    Raises:
        DamagedFileError: The plan is damaged.
    """
    path = directory / _PLAN
    node, index = read_object(path), read_index(directory)
    try:
        sources = tuple(Path(source) for source in node["sources"])
        steps = []
        for place, file, number in node["steps"]:
            if id_of_name(file) is None or set(file) & set("/\\"):
                msg = f"file {file[:80]!r}"
                raise ValueError(msg)
            steps.append(_Step(sources[place] / file, index.infos[number], index.entries.get(number)))
        return _Plan(node["name"], sources, index.head, steps)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        msg = f"{path} is damaged: not a valid plan ({error!r})"
        raise DamagedFileError(msg) from error


def _merge_plan(name: dict[str, Any], ranks: Sequence[Path]) -> _Plan:
    """Plan a merge: interleaved by id, equal ids in the order of the directories, renumbered from 0.

    Raises:
        CheckpointError: The formats differ, or a directory has no trajectories.
        DamagedFileError: A file or an index is missing or damaged.
    """
    indexes = [read_index(rank) for rank in ranks]
    formats = {index.directory.name: index.head.trajectory_format for index in indexes}
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{rank}: {format_name}" for rank, format_name in formats.items())
        msg = (
            f"the ranks of {ranks[0].parent} have different formats ({shown}): convert them to one first "
            "(ostinato convert)"
        )
        raise CheckpointError(msg)
    order = sorted((number, place) for place, index in enumerate(indexes) for number in index.infos)
    steps = [_step(indexes[place], number, new) for new, (number, place) in enumerate(order)]
    return _Plan(name, tuple(ranks), Head(indexes[0].head.trajectory_format, len(steps), indexes[0].head.seed), steps)


def _split_plan(name: dict[str, Any], source: Path, count: int) -> _Plan:
    """Plan a split: the first trajectories of a directory, with the same ids.

    Raises:
        CheckpointError: There are fewer trajectories.
        DamagedFileError: A file or an index is missing or damaged.
    """
    index = read_index(source)
    if count > len(index.infos):
        msg = f"split_count must be in [1, {len(index.infos)}] (trajectories in {source}), got {count}"
        raise CheckpointError(msg)
    ids = list(index.infos)[:count]
    head = Head(index.head.trajectory_format, max(ids) + 1, index.head.seed)
    return _Plan(name, (source,), head, [_step(index, number, number) for number in ids])


def _step(index: DirectoryIndex, number: int, new: int) -> _Step:
    """Check the size of a file before anything is changed; if its size is unknown, check its header."""
    known = None
    try:
        if index.head.trajectory_format == "pkl" and number not in index.entries:
            index.check_end(number)
        else:
            known = index.check(number, allow_pickle=False)
    except OstinatoError as error:
        msg = f"{error}: nothing was touched"
        raise (MissingFileError if isinstance(error, FileNotFoundError) else DamagedFileError)(msg) from error
    count_progress(1, TRAJECTORIES)  # the plan has no total yet: only a bar shows it
    moved = index.infos[number]._replace(trajectory_id=new)
    return _Step(index.path(number), moved, None if known is None else replace(known, info=moved))
