"""examine: looks for faults in a dataset of any format that `open_dataset` reads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets import open_dataset
from ostinato.datasets.checkpoints import recognizes_torchrl
from ostinato.datasets.lerobot import lerobot_root
from ostinato.datasets.minari import recognizes_minari
from ostinato.datasets.open import known_formats
from ostinato.durable.manifest import holds_checkpoint
from ostinato.durable.progress import Progress
from ostinato.errors import CheckpointNotFoundError, KindError, MissingExtraError, OptionError, OstinatoError
from ostinato.tools.doctor.arrays import ArrayChecks, ZarrFolder
from ostinato.tools.doctor.hdf5 import D4rlFile, RobomimicFile, number_in_name
from ostinato.tools.doctor.lerobot import LeRobotTables
from ostinato.tools.doctor.lerobot_cameras import LeRobotCameras
from ostinato.tools.doctor.minari import MinariFolder
from ostinato.tools.doctor.opened import OpenedChecks
from ostinato.tools.doctor.report import READ_ERRORS, Findings, Place, Profile, Report, first_line
from ostinato.tools.inspect import is_store
from ostinato.tools.verify import verify

if TYPE_CHECKING:
    from ostinato.datasets import DatasetStorage
    from ostinato.durable.progress import ProgressOption

__all__ = ["examine"]

_OPEN_ERRORS: tuple[type[Exception], ...] = (OstinatoError, *READ_ERRORS)
_HDF5_SUFFIXES = {".h5", ".hdf5", ".he5", ".hdf"}
_PASS_STEPS = 1000
_ADVICE = re.compile(r": restore (the file|it) from a copy$")
"""Ends messages on damaged files; it is the advice of the finding, too."""
_FLAGS = {"done", "terminated", "truncated"}
_MAGIC = b"\x89HDF\r\n\x1a\n"


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
        return _examine(source, episode_ends, _Run(Findings(), Profile(), full, bar))


def _examine(source: Any, episode_ends: Any, run: _Run) -> Report:
    if isinstance(source, Mapping):
        found = _mapping(source, episode_ends, run)
        return run.report("(mapping)", found, found.rows)
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
    root = _root(path)
    look = next((look for recognizes, look in _FORMATS if recognizes(root)), None)
    if look is None:
        msg = f"{path} is not a dataset of a known format: these are {', '.join(known_formats())}"
        raise KindError(msg)
    try:
        found = look(root, run)
    except READ_ERRORS as error:
        if isinstance(error, OstinatoError):
            raise
        run.findings.add("file-unreadable", first_line(error), Place(path.name))
        found = _Found("hdf5" if _is_hdf5(root) else "dataset", None, None, "")
    dataset = None if run.findings.has("error") else _open(path, run)  # damaged files may claim any size
    if dataset is None or found.rows is None:
        return run.report(str(path), found, None)
    return run.report(str(path), found, len(dataset), dataset.contents.left_out_because)


def _root(path: Path) -> Path:
    """Return the folder of a dataset whose path is one within it, such as `meta/info.json`; else the path."""
    path = path.absolute()
    return lerobot_root(path) or (path.parent if path.is_file() and recognizes_minari(path) else path)


class _Found(NamedTuple):
    """What a dataset holds."""

    format: str
    episodes: int | None
    rows: int | None
    """Rows in the files; None if they were not read."""
    decoded: str

    @classmethod
    def of(cls, name: str, lengths: list[int], decoded: str) -> Self:
        """Return what is known of a dataset with episodes of these lengths, as far as they could be read."""
        return cls(name, len(lengths), sum(lengths), decoded) if any(lengths) else cls(name, None, None, decoded)


@dataclass(frozen=True)
class _Run:
    """One examination."""

    findings: Findings
    profile: Profile
    full: bool
    bar: Progress

    def steps(self) -> Callable[[int, int], None]:
        """Begin a pass of 1,000 steps; return what is called with the number of its items done and their total."""
        before = self.bar.total
        self.bar.grow(_PASS_STEPS)
        return lambda done, total: self.bar.advance(before + _PASS_STEPS * done // max(total, 1) - self.bar.done)

    def report(self, path: str, found: _Found, rows: int | None, because: str = "") -> Report:
        """Return the report; `rows` can be sampled, and `because` says why others cannot."""
        return Report(
            path=path,
            format=found.format,
            episodes=found.episodes,
            rows=rows,
            stored_rows=found.rows,
            left_out_because=because,
            decoded=found.decoded,
            findings=self.findings.listed,
            omitted=self.findings.omitted,
            profile=self.profile,
        )


def _open(path: Path, run: _Run) -> DatasetStorage | None:
    """Open a dataset as users do; what prevents it becomes a finding."""
    try:
        dataset = open_dataset(path, progress=False)
        dataset.read(len(dataset) - 1)
    except MissingExtraError:
        raise
    except _OPEN_ERRORS as error:
        run.findings.add("not-opened", first_line(error), Place(path.name))
        return None
    return dataset


# -- formats ----------------------------------------------------------------------------------------------------------


def _is_lerobot(path: Path) -> bool:
    meta = path / "meta"
    names = ("info.json", "episodes.jsonl", "tasks.jsonl", "tasks.parquet", "stats.json")
    return any((meta / name).is_file() for name in names) or (meta / "episodes").is_dir()


def _lerobot(path: Path, run: _Run) -> _Found:
    tables = LeRobotTables(path, run.findings, run.profile)
    tables.check(run.steps())
    cameras = LeRobotCameras(tables, run.findings, run.profile, full=run.full)
    cameras.check(run.steps())
    total = tables.total * (len(tables.meta.cameras) + len(tables.meta.images))
    words = "" if cameras.decoded == total else " (12 of each episode, of at most 200 episodes; --full decodes all)"
    decoded = f"{cameras.decoded:,} of {number_of(total, 'picture')} decoded{words}" if total else ""
    return _Found.of(f"lerobot {tables.meta.version}", list(tables.numbers.values()), decoded)


def _is_minari(path: Path) -> bool:
    inside = path / "data" if (path / "data").is_dir() else path
    if (inside / "main_data.hdf5").exists():
        return True
    if not (inside / "metadata.json").is_file():
        return False
    return any(child.name.isdigit() and child.is_dir() for child in inside.iterdir())


def _minari(path: Path, run: _Run) -> _Found:
    return _checked("minari", MinariFolder(path, run.findings, run.profile, full=run.full), run)


def _is_hdf5(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC or path.suffix.lower() in _HDF5_SUFFIXES


def _hdf5(path: Path, run: _Run) -> _Found:
    h5py = require("h5py", "h5")
    with h5py.File(path, "r") as file:
        data = file.get("data")
        demonstrations = isinstance(data, h5py.Group) and any(number_in_name(name) >= 0 for name in data)
        flat = any(name in file for name in ("observations", "actions", "rewards", "terminals"))
    if demonstrations:
        return _checked("robomimic", RobomimicFile(path, run.findings, run.profile, full=run.full), run)
    if flat:
        return _checked("d4rl", D4rlFile(path, run.findings, run.profile, full=run.full), run)
    msg = f"{path} has neither the arrays of D4RL (observations, ...) nor the groups of robomimic (data/demo_0, ...)"
    raise KindError(msg)


def _is_zarr(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".zip"
    names = (".zgroup", "zarr.json", "data/.zgroup", "data/zarr.json", "meta/episode_ends")
    return any((path / name).exists() for name in names)


def _zarr(path: Path, run: _Run) -> _Found:
    return _checked("zarr", ZarrFolder(path, run.findings, run.profile, full=run.full), run)


def _checked(name: str, checks: D4rlFile | RobomimicFile | MinariFolder | ZarrFolder, run: _Run) -> _Found:
    checks.check(run.steps())
    return _Found.of(name, checks.rows.lengths, _pictures(checks.decoded))


def _pictures(count: int) -> str:
    return f"{number_of(count, 'picture')} looked at" if count else ""


# -- saved by Ostinato, RLinf or TorchRL ------------------------------------------------------------------------------


def _is_saved(path: Path) -> bool:
    return path.is_dir() and (bool(_stores(path)) or holds_checkpoint(path) or recognizes_torchrl(path))


def _stores(path: Path) -> list[Path]:
    """Return the directories of trajectories at a path: itself, or one for each rank."""
    return [path] if is_store(path) else sorted(one for one in path.glob("rank_*") if is_store(one))


def _saved(path: Path, run: _Run) -> _Found:
    """Verify the files, then check the rows that `open_dataset` reads."""
    stores = _stores(path)
    kind = "trajectories" if stores else "checkpoint"
    notes = [*filter(None, [_verify(stores or ([path] if holds_checkpoint(path) else []), path, run)])]
    dataset = None if run.findings.has("error") else _open(path, run)
    if dataset is None:
        return _Found(kind, None, None, "; ".join(notes))
    checks = OpenedChecks(dataset, run.findings, run.profile, full=run.full)
    checks.check(run.steps())
    notes += [_pictures(checks.decoded)] if checks.decoded else []
    rows = len(dataset) + dataset.contents.rows_left_out
    return _Found(dataset.format, len(dataset.episode_lengths), rows, "; ".join(notes))


def _verify(roots: list[Path], path: Path, run: _Run) -> str:
    """Verify the files of directories; return how many are intact, in words, empty if there are none to verify."""
    files = checksums = unchecked = 0
    for root in roots:
        inside = "" if root == path else f"{root.name}/"
        try:
            report = verify(root, progress=run.steps())
        except _OPEN_ERRORS as error:
            run.findings.add("saved-damaged", first_line(error), Place(root.name))
            continue
        for damage in report.damage:
            problem = _ADVICE.sub("", damage.problem.removeprefix(f"{root / damage.file} "))
            run.findings.add("saved-damaged", problem, Place(f"{inside}{damage.file}", damage.trajectory_id))
        for name in report.unlisted:
            run.findings.add("file-unlisted", "it is not in the index", Place(f"{inside}{name}"))
        files, checksums = files + report.files, checksums + report.checksums
        unchecked += len(report.unchecked)
    more = f", {number_of(unchecked, 'file')} not checked" if unchecked else ""
    return f"{number_of(files, 'file')} intact, {number_of(checksums, 'checksum')} verified{more}" if roots else ""


_FORMATS: tuple[tuple[Callable[[Path], bool], Callable[[Path, _Run], _Found]], ...] = (
    (_is_lerobot, _lerobot),
    (_is_saved, _saved),
    (_is_minari, _minari),
    (_is_hdf5, _hdf5),
    (_is_zarr, _zarr),
)


# -- mappings ---------------------------------------------------------------------------------------------------------


def _mapping(source: Mapping[Any, Any], ends: Any, run: _Run) -> _Found:
    """Examine arrays in memory."""
    tree = dict(source)
    meta = tree.pop("meta") if isinstance(tree.get("meta"), Mapping) else {}
    known = tree.pop("episode_ends", meta.get("episode_ends"))
    if isinstance(tree.get("data"), Mapping):
        tree |= tree.pop("data")
    arrays = _arrays_of(tree, ())
    ends = known if ends is None else ends
    ends = _ends_of_flags(arrays) if ends is None else _as_array(ends)
    checks = ArrayChecks(run.findings, run.profile, full=run.full)
    checks.check(arrays, ends, run.steps())
    return _Found.of("arrays", checks.rows.lengths, _pictures(checks.decoded))


def _ends_of_flags(arrays: Mapping[str, Any]) -> Any:
    """Return the ends of episodes by the flags of rows, None if there are none."""
    flags = [a.reshape(len(a), -1).any(1) for n, a in arrays.items() if n.rpartition(".")[2] in _FLAGS and a.ndim]
    if not flags or len({len(flag) for flag in flags}) > 1:
        return None
    ends = np.logical_or.reduce(flags)
    ends[-1:] = True
    return np.flatnonzero(ends) + 1


def _arrays_of(tree: Mapping[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _arrays_of(value, (*path, key))
        else:
            found[".".join(map(str, (*path, key)))] = _as_array(value)
    return found


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
