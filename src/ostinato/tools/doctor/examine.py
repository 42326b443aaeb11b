"""examine: looks for faults in a dataset of any format that `open_dataset` reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.core.options import number_of
from ostinato.datasets import open_dataset
from ostinato.datasets.arrays import examine_mapping
from ostinato.datasets.checks import READ_ERRORS, Place, first_line
from ostinato.datasets.hdf5 import resembles_hdf5
from ostinato.datasets.open import formats, known_formats
from ostinato.durable.manifest import holds_checkpoint
from ostinato.durable.progress import Progress
from ostinato.errors import CheckpointNotFoundError, KindError, MissingExtraError, OptionError, OstinatoError
from ostinato.tools.doctor.examination import Collected, examine_rows
from ostinato.tools.inspect import is_store
from ostinato.tools.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.datasets import DatasetStorage
    from ostinato.datasets.format import Format
    from ostinato.durable.progress import ProgressOption
    from ostinato.tools.doctor.report import Report

_OPEN_ERRORS: tuple[type[Exception], ...] = (OstinatoError, *READ_ERRORS)
_ADVICE = re.compile(r": restore (the file|it) from a copy$")
"""Ends messages on damaged files; it is the advice of the finding, too."""


def examine(
    source: str | os.PathLike[str] | Mapping[Any, Any],
    *,
    episode_ends: Any = None,
    full: bool = False,
    progress: ProgressOption = None,
) -> Report:
    """Look for faults in a dataset of any format that `open_dataset` reads, or in a mapping of arrays.

    All tables are read once; of pictures and videos, 12 frames of each episode are decoded, of at most 200 episodes
    for each camera. Nothing is changed. Faults become findings of the report: `docs/doctor.md` describes each check.
    Memory holds one episode without its pictures, the table of episodes, and a few numbers for each episode.

    Args:
        source: a path, or a mapping of arrays `[rows, ...]`.
        episode_ends: for a mapping: the row after the last one of each episode. None takes `episode_ends`, or
            `meta/episode_ends`, of the mapping.
        full: decode all frames.
        progress: the steps done and their total, which grows by 1,000 for tables, for cameras and for checksums; see
            `ostinato.ProgressOption`.

    Returns:
        What was found; `report.ok` tells whether there are no errors.

    Raises:
        CheckpointNotFoundError: if the path does not exist.
        KindError: if it is not a dataset of a known format.
        MissingExtraError: naming the extra to install for the format.

    Examples:
        >>> import numpy as np
        >>> from ostinato.tools import examine
        >>> values = np.random.default_rng(0).normal(size=(100, 2))
        >>> report = examine({"observation": values, "action": values}, episode_ends=[40, 120])
        >>> report.ok
        False
        >>> report.findings[0].check
        'episode-bounds'
    """
    with Progress(progress, "doctor", 0, unit="steps") as bar:
        return _examine(source, episode_ends, Collected(bar, full=full))


def _examine(source: Any, episode_ends: Any, look: Collected) -> Report:
    if isinstance(source, Mapping):
        name = examine_mapping(source, episode_ends, look)
        look.finish()
        return look.report("(mapping)", name, look.total)
    if episode_ends is not None:
        msg = f"episode_ends is for a mapping of arrays, got it with {source!r}: the files say where episodes end"
        raise OptionError(msg)
    given: Any = source
    if not isinstance(given, (str, os.PathLike)):
        msg = f"the doctor takes the path of a dataset or a mapping of arrays, got {type(given).__name__}"
        raise KindError(msg)
    path = Path(source).expanduser()
    if not path.exists():
        msg = f"{path} does not exist: give the folder or file of a dataset"
        raise CheckpointNotFoundError(msg)
    kind, root = _recognize(path.absolute())
    if kind is None and not _stores(root):
        msg = f"{path} is not a dataset of a known format: these are {', '.join(known_formats())}"
        raise KindError(msg)
    if kind is None or kind.examine is None:
        return _saved(root, path, look)
    return _files(kind.examine, root, path, look)


def _recognize(path: Path) -> tuple[Format | None, Path]:
    """Return the format of a dataset, maybe damaged, and the path of the whole dataset."""
    for kind in formats():
        root = kind.find(path)
        if root is not None:
            return kind, root
    return None, path


def _files(checks: Callable[[Path, Collected], str], root: Path, path: Path, look: Collected) -> Report:
    """Check the files of a dataset as far as they can be read, and open it if they have no errors."""
    try:
        name = checks(root, look)
    except READ_ERRORS as error:
        if isinstance(error, OstinatoError):
            raise
        look.add("file-unreadable", first_line(error), Place(path.name))
        return look.report(str(path), "hdf5" if resembles_hdf5(root) else "dataset", None)
    look.finish()
    dataset = None if look.has("error") else _open(path, look)  # damaged files may claim any size
    if dataset is None:
        return look.report(str(path), name, None)
    return look.report(str(path), name, len(dataset), because=dataset.contents.left_out_because)


def _open(path: Path, look: Collected) -> DatasetStorage | None:
    """Open a dataset as users do; what prevents it becomes a finding."""
    try:
        dataset = open_dataset(path, progress=False)
        dataset.read(len(dataset) - 1)
    except MissingExtraError:
        raise
    except _OPEN_ERRORS as error:
        look.add("not-opened", first_line(error), Place(path.name))
        return None
    return dataset


# -- formats without checks of their own: what Ostinato, RLinf and TorchRL saved ---------------------------------------


def _stores(path: Path) -> list[Path]:
    """Return the directories of trajectories at a path: itself, or one for each rank."""
    return [path] if is_store(path) else sorted(one for one in path.glob("rank_*") if is_store(one))


def _saved(root: Path, path: Path, look: Collected) -> Report:
    """Verify the files, then check the rows that `open_dataset` reads."""
    stores = _stores(root)
    notes = [_verify(stores or ([root] if holds_checkpoint(root) else []), root, look)]
    dataset = None if look.has("error") else _open(root, look)
    if dataset is None:
        look.decoded = notes[0]
        return look.report(str(path), "trajectories" if stores else "checkpoint", None)
    examine_rows(dataset, look)
    look.finish()
    look.decoded = "; ".join(filter(None, [*notes, look.decoded]))
    contents, rows = dataset.contents, None if look.has("error") else len(dataset)
    stored = len(dataset) + contents.rows_left_out
    return look.report(str(path), dataset.format, rows, stored=stored, because=contents.left_out_because)


def _verify(roots: list[Path], path: Path, look: Collected) -> str:
    """Verify the files of directories; return how many are intact, in words, empty if there are none to verify."""
    files = checksums = unchecked = 0
    for root in roots:
        inside = "" if root == path else f"{root.name}/"
        try:
            report = verify(root, progress=look.steps())
        except _OPEN_ERRORS as error:
            look.add("saved-damaged", first_line(error), Place(root.name))
            continue
        for damage in report.damage:
            problem = _ADVICE.sub("", damage.problem.removeprefix(f"{root / damage.file} "))
            look.add("saved-damaged", problem, Place(f"{inside}{damage.file}", damage.trajectory_id))
        for name in report.unlisted:
            look.add("file-unlisted", "it is not in the index", Place(f"{inside}{name}"))
        files, checksums = files + report.files, checksums + report.checksums
        unchecked += len(report.unchecked)
    more = f", {number_of(unchecked, 'file')} not checked" if unchecked else ""
    return f"{number_of(files, 'file')} intact, {number_of(checksums, 'checksum')} verified{more}" if roots else ""
