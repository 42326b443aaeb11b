"""examine: looks for faults in a dataset of any format that `open_dataset` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato._optional import require
from ostinato.errors import CheckpointNotFoundError, KindError, OstinatoError
from ostinato.tools.doctor.arrays import ArrayChecks, ZarrFolder
from ostinato.tools.doctor.hdf5 import D4rlFile, RobomimicFile, number_in_name
from ostinato.tools.doctor.lerobot import LeRobotTables
from ostinato.tools.doctor.lerobot_cameras import LeRobotCameras
from ostinato.tools.doctor.minari import MinariFolder
from ostinato.tools.doctor.report import Findings, Place, Profile, Report
from ostinato.tools.inspect import is_store
from ostinato.tools.verify import verify

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    OnProgress = Callable[[int, int], None]

__all__ = ["examine"]

_HDF5_SUFFIXES = {".h5", ".hdf5", ".he5", ".hdf"}
_FLAGS = {"done", "terminated", "truncated"}
_MAGIC = b"\x89HDF\r\n\x1a\n"


def examine(
    source: str | os.PathLike[str] | Mapping[Any, Any],
    *,
    episode_ends: Any = None,
    full: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Look for faults in a dataset: LeRobot, Minari, D4RL, robomimic, Zarr, a mapping of arrays, or saved trajectories.

    All tables are read once; of pictures and videos, 12 frames of each episode are decoded, of at most 200 episodes
    for each camera. Nothing is changed. Faults become findings of the report: `docs/doctor.md` describes each check.
    Memory does not grow with the rows, except for a few numbers for each episode.

    Args:
        source: a path, or a mapping of arrays `[rows, ...]`.
        episode_ends: for a mapping: the row after the last one of each episode. None takes `episode_ends`, or
            `meta/episode_ends`, of the mapping.
        full: decode all frames.
        on_progress: called with the number of files or episodes done and their total, once for tables and once for
            cameras.

    Returns:
        What was found; `report.ok` tells whether there are no errors.

    Raises:
        CheckpointNotFoundError: if the path does not exist.
        KindError: if it is not a dataset of a known format.
        MissingExtraError: naming the extra to install for the format.

    Example:
        >>> import numpy as np
        >>> from ostinato.tools import examine
        >>> values = np.random.default_rng(0).normal(size=(100, 2))
        >>> report = examine({"observation": values, "action": values}, episode_ends=[40, 120])
        >>> report.ok
        False
        >>> report.findings[0].check
        'episode-bounds'
    """
    findings, profile = Findings(), Profile()
    progress = on_progress or _silent
    if isinstance(source, Mapping):
        return _examine_mapping(source, episode_ends, findings, profile, full=full, on_progress=progress)
    path = Path(source).expanduser()
    if not path.exists():
        msg = f"{path} does not exist: give the folder or file of a dataset"
        raise CheckpointNotFoundError(msg)
    for recognizes, look in _FORMATS:
        if recognizes(path):
            try:
                return look(path, findings, profile, full, progress)
            except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
                if isinstance(error, OstinatoError):
                    raise
                text = (str(error).splitlines() or [type(error).__name__])[0]
                findings.add("file-unreadable", text, Place(path.name))
                return Report(str(path), "unreadable", 0, 0, "", findings.listed, findings.omitted, profile)
    msg = (
        f"{path} is not a dataset of a known format: LeRobot (meta/info.json), Minari (data/metadata.json), D4RL or "
        "robomimic (HDF5), Zarr (data/ and meta/), trajectories or a checkpoint that Ostinato wrote"
    )
    raise KindError(msg)


def _silent(done: int, total: int) -> None:
    """Show nothing."""


# -- formats ----------------------------------------------------------------------------------------------------------


def _is_lerobot(path: Path) -> bool:
    meta = path / "meta"
    names = ("info.json", "episodes.jsonl", "tasks.jsonl", "tasks.parquet", "stats.json")
    return any((meta / name).is_file() for name in names) or (meta / "episodes").is_dir()


def _lerobot(path: Path, findings: Findings, profile: Profile, full: bool, progress: OnProgress) -> Report:  # noqa: FBT001
    tables = LeRobotTables(path, findings, profile)
    tables.check(progress)
    cameras = LeRobotCameras(tables, findings, profile, full=full)
    cameras.check(progress)
    count = len(tables.meta.cameras) + len(tables.meta.images)
    decoded = _decoded(cameras.decoded, tables.total * count, full=full)
    name, episodes = f"lerobot {tables.meta.version}", len(tables.numbers)
    return Report(str(path), name, episodes, tables.total, decoded, findings.listed, findings.omitted, profile)


def _is_minari(path: Path) -> bool:
    if path.is_dir() and (path / "main_data.hdf5").exists():
        return True
    inside = path / "data" if (path / "data").is_dir() else path
    if (inside / "main_data.hdf5").exists():
        return True
    if not inside.is_dir() or not (inside / "metadata.json").is_file():
        return False
    return any(child.name.isdigit() and child.is_dir() for child in inside.iterdir())


def _is_hdf5(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC or path.suffix.lower() in _HDF5_SUFFIXES


def _hdf5(path: Path, findings: Findings, profile: Profile, full: bool, progress: OnProgress) -> Report:  # noqa: FBT001
    h5py = require("h5py", "h5")
    with h5py.File(path, "r") as file:
        data = file.get("data")
        names = list(data) if isinstance(data, h5py.Group) else []
        known = any(name in file for name in ("observations", "actions", "rewards", "terminals"))
    if any(number_in_name(name) >= 0 for name in names):
        return _checked(
            "robomimic", RobomimicFile(path, findings, profile, full=full), path, findings, profile, progress
        )
    if known:
        return _checked("d4rl", D4rlFile(path, findings, profile, full=full), path, findings, profile, progress)
    msg = (
        f"{path} has neither the arrays of D4RL (observations, actions, ...) nor the groups of robomimic (data/demo_0)"
    )
    raise KindError(msg)


def _minari(path: Path, findings: Findings, profile: Profile, full: bool, progress: OnProgress) -> Report:  # noqa: FBT001
    return _checked("minari", MinariFolder(path, findings, profile, full=full), path, findings, profile, progress)


def _is_zarr(path: Path) -> bool:
    if path.is_file():
        return path.name.endswith(".zarr.zip") or (path.suffix == ".zip" and _is_archive(path))
    names = (".zgroup", "zarr.json", "data/.zgroup", "data/zarr.json", "meta/episode_ends")
    return any((path / name).exists() for name in names)


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _zarr(path: Path, findings: Findings, profile: Profile, full: bool, progress: OnProgress) -> Report:  # noqa: FBT001
    return _checked("zarr", ZarrFolder(path, findings, profile, full=full), path, findings, profile, progress)


def _is_saved(path: Path) -> bool:
    return path.is_dir() and (is_store(path) or (path / "manifest.json").exists())


def _saved(path: Path, findings: Findings, profile: Profile, full: bool, progress: OnProgress) -> Report:  # noqa: ARG001, FBT001
    try:
        report = verify(path, on_progress=progress)
    except (OstinatoError, OSError) as error:
        findings.add("saved-damaged", str(error), Place(path.name))
        return Report(str(path), "ostinato", 0, 0, "", findings.listed, findings.omitted, profile)
    for damage in report.damage:
        findings.add("saved-damaged", damage.problem, Place(damage.file, damage.trajectory_id))
    for name in report.unlisted:
        findings.add("file-unlisted", "it is not in the index", Place(name))
    decoded = f"{report.files:,} files read, {report.checksums:,} checksums verified"
    episodes = report.files if report.kind == "trajectories" else 0
    return Report(
        str(path), f"ostinato {report.kind}", episodes, 0, decoded, findings.listed, findings.omitted, profile
    )


_FORMATS = (
    (_is_lerobot, _lerobot),
    (_is_saved, _saved),
    (_is_minari, _minari),
    (_is_hdf5, _hdf5),
    (_is_zarr, _zarr),
)


def _checked(
    name: str,
    checks: D4rlFile | RobomimicFile | MinariFolder | ZarrFolder,
    path: Path,
    findings: Findings,
    profile: Profile,
    progress: OnProgress,
) -> Report:
    checks.check(progress)
    lengths = checks.rows.lengths
    decoded = f"{checks.decoded:,} pictures looked at" if checks.decoded else ""
    return Report(str(path), name, len(lengths), sum(lengths), decoded, findings.listed, findings.omitted, profile)


def _decoded(frames: int, total: int, *, full: bool) -> str:
    if not total:
        return ""
    words = "all frames" if full else "a sample of the frames (12 of each episode, of 200 episodes)"
    return f"{frames:,} of {total:,} pictures decoded: {words}"


def _examine_mapping(
    source: Mapping[Any, Any], ends: Any, findings: Findings, profile: Profile, *, full: bool, on_progress: OnProgress
) -> Report:
    """Examine arrays in memory."""
    tree = dict(source)
    meta = tree.pop("meta") if isinstance(tree.get("meta"), Mapping) else {}
    known = tree.pop("episode_ends", meta.get("episode_ends"))
    if isinstance(tree.get("data"), Mapping):
        tree |= tree.pop("data")
    arrays = _arrays_of(tree, ())
    ends = known if ends is None else ends
    if ends is None:
        ends = _ends_of_flags(arrays)
    checks = ArrayChecks(findings, profile, full=full)
    checks.check(arrays, None if ends is None else _as_array(ends), on_progress)
    lengths = checks.rows.lengths
    decoded = f"{checks.decoded:,} pictures looked at" if checks.decoded else ""
    return Report(
        "(mapping)", "arrays", len(lengths), sum(lengths), decoded, findings.listed, findings.omitted, profile
    )


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
