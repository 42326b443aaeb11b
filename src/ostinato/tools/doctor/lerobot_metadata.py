"""The metadata of a LeRobot dataset, read as far as it can be: what is wrong with it becomes findings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ostinato._optional import require
from ostinato.datasets.checks import READ_ERRORS, Place, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostinato.tools.doctor.report import Findings

__all__ = ["Clip", "EpisodeEntry", "LeRobotMetadata", "read_metadata", "whole_number"]

_V3_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_V3_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_V2_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_V2_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


@dataclass(frozen=True)
class Clip:
    """Where the frames of one camera of an episode lie."""

    file: str
    start_s: float
    stop_s: float | None
    """None: the whole file."""


@dataclass
class EpisodeEntry:
    """What the metadata says of an episode."""

    number: int
    length: int | None
    tasks: list[str] | None
    file: str | None
    start: int | None = None
    """First row in the dataset."""
    stop: int | None = None
    clips: dict[str, Clip] = field(default_factory=dict)
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class LeRobotMetadata:
    """What could be read."""

    root: Path
    version: str
    """"v3.0", "v2.1" or "v2.0"."""
    info: dict[str, Any]
    features: dict[str, dict[str, Any]]
    fps: float | None
    episodes: list[EpisodeEntry]
    tasks: dict[int, str] | None
    """Texts by number; None if they could not be read."""
    statistics: dict[str, dict[str, Any]] | None

    @property
    def cameras(self) -> list[str]:
        """Features that are videos."""
        return [name for name, entry in self.features.items() if entry.get("dtype") == "video"]

    @property
    def images(self) -> list[str]:
        """Features that are pictures in the tables."""
        return [name for name, entry in self.features.items() if entry.get("dtype") == "image"]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a feature in one row, None if the metadata does not say."""
        shape = self.features[name].get("shape")
        valid = isinstance(shape, (list, tuple)) and all(whole_number(n) is not None for n in shape)
        return tuple(int(n) for n in shape) if valid and shape is not None else None


def whole_number(value: Any) -> int | None:
    """Return an integer, None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_metadata(root: Path, findings: Findings) -> LeRobotMetadata:
    """Read `meta/` of a dataset. Nothing is raised for what is missing or wrong: it becomes a finding."""
    info = _read_object(root / "meta/info.json", root, findings) or {}
    is_v3 = (root / "meta/episodes").is_dir() or (root / "meta/tasks.parquet").exists()
    version = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith(("v2", "v3")):
        if info:
            text = f"codebase_version is {version!r}, v2.0, v2.1 or v3.0 expected"
            findings.add("metadata-invalid", text, Place(file="meta/info.json", field="codebase_version"))
        version = "v3.0" if is_v3 else "v2.1"
    raw = info.get("features")
    features = {k: v for k, v in raw.items() if isinstance(v, dict)} if isinstance(raw, dict) else {}
    if info and not features:
        findings.add("metadata-invalid", "there are no features", Place(file="meta/info.json", field="features"))
    fps = info.get("fps")
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0 < fps < 1e6:
        if info:
            findings.add(
                "metadata-invalid", f"fps is {fps!r}, a positive number expected", Place(file="meta/info.json")
            )
        fps = None
    meta = LeRobotMetadata(root, version, info, features, None if fps is None else float(fps), [], None, None)
    if version.startswith("v3"):
        _read_v3(meta, findings)
    else:
        _read_v2(meta, findings)
    return meta


def _read_text(path: Path, root: Path, findings: Findings, *, needed: bool = True) -> str | None:
    name = path.relative_to(root).as_posix()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if needed:
            findings.add("file-missing", "the dataset needs this file", Place(file=name))
    except READ_ERRORS as error:
        findings.add("file-unreadable", str(error), Place(file=name))
    return None


def _read_object(path: Path, root: Path, findings: Findings) -> dict[str, Any] | None:
    text = _read_text(path, root, findings)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        findings.add("file-unreadable", f"not valid JSON: {error}", Place(file=path.relative_to(root).as_posix()))
        return None
    if not isinstance(value, dict):
        findings.add("metadata-invalid", "is not a JSON object", Place(file=path.relative_to(root).as_posix()))
        return None
    return value


def _read_lines(path: Path, root: Path, findings: Findings, *, needed: bool = True) -> list[dict[str, Any]] | None:
    text = _read_text(path, root, findings, needed=needed)
    if text is None:
        return None
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            value = error
        if isinstance(value, dict):
            rows.append(value)
        else:
            text = f"line {number} is not a JSON object"
            findings.add("file-unreadable", text, Place(file=path.relative_to(root).as_posix()))
    return rows


def _read_table(path: Path, root: Path, findings: Findings, *, columns: list[str] | None = None) -> Any:
    """Return a Parquet table, None if it cannot be read."""
    parquet = require("pyarrow.parquet", "lerobot")
    name = path.relative_to(root).as_posix()
    if not path.exists():
        findings.add("file-missing", "the dataset needs this file", Place(file=name))
        return None
    try:
        return parquet.ParquetFile(path).read(columns=columns)
    except READ_ERRORS as error:
        findings.add("file-unreadable", first_line(error), Place(file=name))
        return None


# -- version 3 --------------------------------------------------------------------------------------------------------


def _read_v3(meta: LeRobotMetadata, findings: Findings) -> None:
    table = _read_table(meta.root / "meta/tasks.parquet", meta.root, findings)
    if table is not None:
        meta.tasks = _task_table(table, findings)
    if (meta.root / "meta/stats.json").exists():
        meta.statistics = _read_object(meta.root / "meta/stats.json", meta.root, findings)
    else:
        findings.add(
            "file-missing", "without it nothing is normalized", Place(file="meta/stats.json"), severity="warning"
        )
    paths = sorted((meta.root / "meta/episodes").glob("*/*.parquet"))
    if not paths:
        findings.add("file-missing", "there is no table of episodes", Place(file="meta/episodes"))
    for path in paths:
        found = _read_table(path, meta.root, findings)
        if found is not None:
            meta.episodes += _v3_episodes(meta, found, path.relative_to(meta.root).as_posix(), findings)
    meta.episodes.sort(key=lambda entry: entry.number)


def _task_table(table: Any, findings: Findings) -> dict[int, str] | None:
    names = [name for name in table.column_names if name != "task_index"]
    text = next((n for n in ("__index_level_0__", "task") if n in names), names[0] if names else None)
    if text is None or "task_index" not in table.column_names:
        findings.add("metadata-invalid", f"the columns are {table.column_names}", Place(file="meta/tasks.parquet"))
        return None
    numbers, texts = table.column("task_index").to_pylist(), table.column(text).to_pylist()
    return {int(n): str(t) for n, t in zip(numbers, texts, strict=True) if n is not None}


def _v3_episodes(meta: LeRobotMetadata, table: Any, file: str, findings: Findings) -> Iterator[EpisodeEntry]:
    columns = {name: table.column(name) for name in table.column_names}
    needed = ["episode_index", "length", "tasks", "data/chunk_index", "data/file_index"]
    needed += ["dataset_from_index", "dataset_to_index"]
    for name in meta.cameras:
        needed += [f"videos/{name}/{part}" for part in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")]
    for name in needed:
        if name not in columns:
            findings.add("metadata-invalid", f"the column {name} is missing", Place(file=file, field=name))
    plain = {name: columns[name].to_pylist() for name in needed if name in columns}
    statistics = _v3_statistics(meta, columns)
    for at in range(table.num_rows):
        row = {name: values[at] for name, values in plain.items()}
        number = whole_number(row.get("episode_index"))
        if number is None:
            findings.add("metadata-invalid", f"row {at} has no episode_index", Place(file=file))
            continue
        place = {"chunk_index": row.get("data/chunk_index"), "file_index": row.get("data/file_index")}
        data = _file_name(meta, "data_path", _V3_DATA, place, findings)
        entry = EpisodeEntry(number, whole_number(row.get("length")), row.get("tasks"), data)
        entry.start, entry.stop = row.get("dataset_from_index"), row.get("dataset_to_index")
        for name in meta.cameras:
            clip = _v3_clip(meta, name, row, findings)
            if clip is not None:
                entry.clips[name] = clip
        entry.statistics = {
            feature: {kind: values[at] for kind, values in kinds.items()} for feature, kinds in statistics.items()
        }
        yield entry


def _v3_statistics(meta: LeRobotMetadata, columns: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    pictures = {*meta.cameras, *meta.images}
    found: dict[str, dict[str, list[Any]]] = {}
    for name in meta.features:
        for kind in ("min", "max", "mean", "std", "count"):
            key = f"stats/{name}/{kind}"
            if name not in pictures and key in columns:
                found.setdefault(name, {})[kind] = columns[key].to_pylist()
    return found


def _v3_clip(meta: LeRobotMetadata, name: str, row: dict[str, Any], findings: Findings) -> Clip | None:
    part = f"videos/{name}/"
    place = {key: row.get(part + key) for key in ("chunk_index", "file_index")}
    file = _file_name(meta, "video_path", _V3_VIDEO, {**place, "video_key": name}, findings)
    start, stop = row.get(part + "from_timestamp"), row.get(part + "to_timestamp")
    if file is None or not isinstance(start, (int, float)) or not isinstance(stop, (int, float)):
        return None
    return Clip(file, float(start), float(stop))


def _file_name(meta: LeRobotMetadata, key: str, default: str, place: dict[str, Any], findings: Findings) -> str | None:
    """Return the name of a file of the dataset from its pattern; None if the pattern or a number is wrong."""
    pattern = meta.info.get(key) or default
    try:
        name = str(pattern).format(**place)
    except (LookupError, ValueError, TypeError, AttributeError):
        return None  # a missing number was reported, and a wrong pattern leads to missing files
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        text = f"{key} leads out of the dataset: {name}"
        findings.add("metadata-invalid", text, Place(file="meta/info.json", field=key))
        return None
    return name


# -- version 2 --------------------------------------------------------------------------------------------------------


def _read_v2(meta: LeRobotMetadata, findings: Findings) -> None:
    tasks = _read_lines(meta.root / "meta/tasks.jsonl", meta.root, findings)
    if tasks is not None:
        meta.tasks = {row["task_index"]: str(row.get("task")) for row in tasks if "task_index" in row}
    old = meta.version == "v2.0"
    if (meta.root / "meta/stats.json").exists():
        meta.statistics = _read_object(meta.root / "meta/stats.json", meta.root, findings)
    episodes = _read_lines(meta.root / "meta/episodes.jsonl", meta.root, findings) or []
    lines = _read_lines(meta.root / "meta/episodes_stats.jsonl", meta.root, findings, needed=not old) or []
    statistics = {row.get("episode_index"): row.get("stats") for row in lines}
    size = whole_number(meta.info.get("chunks_size")) or 1000
    for row in episodes:
        number = whole_number(row.get("episode_index"))
        if number is None:
            text = "a line has no episode_index"
            findings.add("metadata-invalid", text, Place(file="meta/episodes.jsonl"))
            continue
        place = {"episode_chunk": number // max(size, 1), "episode_index": number}
        file = _file_name(meta, "data_path", _V2_DATA, place, findings)
        entry = EpisodeEntry(number, whole_number(row.get("length")), row.get("tasks"), file)
        for name in meta.cameras:
            video = _file_name(meta, "video_path", _V2_VIDEO, {**place, "video_key": name}, findings)
            if video is not None:
                entry.clips[name] = Clip(video, 0.0, None)
        known = statistics.get(number)
        entry.statistics = {k: v for k, v in known.items() if isinstance(v, dict)} if isinstance(known, dict) else {}
        meta.episodes.append(entry)
    meta.episodes.sort(key=lambda entry: entry.number)
