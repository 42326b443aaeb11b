"""The checks of LeRobot datasets: their metadata, their tables, their cameras, and what these say about each other."""

from __future__ import annotations

import math
from functools import partial
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets.checks import READ_ERRORS, Place, WrongValueError, check_numbers, first_line
from ostinato.datasets.examination import Pictures
from ostinato.datasets.parquet import leaf_type, open_table, stored_bytes, to_array
from ostinato.datasets.stored import decode_picture
from ostinato.datasets.values import Moments
from ostinato.datasets.video import gray_frames, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from ostinato.datasets.checks import Severity
    from ostinato.datasets.examination import Examination
    from ostinato.datasets.lerobot import Metadata
    from ostinato.datasets.values import Floats
    from ostinato.datasets.video import VideoHeader

Array = np.ndarray[Any, np.dtype[Any]]

INFO, STATISTICS = "meta/info.json", "meta/stats.json"
_BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_SLACK_S = 1e-4
"""Largest distance between a timestamp and its frame, as LeRobot has it."""


def examine_lerobot(meta: Metadata, look: Examination) -> str:
    """Examine a LeRobot dataset: its metadata, its tables, then its cameras."""
    checks = LeRobotChecks(meta, look)
    checks.check()
    checks.check_cameras()
    decoded = sum(len(camera.times) for camera in look.cameras.values())
    total = checks.total * (len(meta.cameras) + len(meta.images))
    words = "" if decoded == total else " (12 of each episode, of at most 200 episodes; --full decodes all)"
    look.decoded = f"{decoded:,} of {number_of(total, 'picture')} decoded{words}" if total else ""
    return f"lerobot {meta.version}"


class _Clip(NamedTuple):
    """Where the frames of one camera of an episode lie."""

    file: str
    begin: float
    """In seconds."""
    end: float
    """Infinity: the file is that of the episode."""
    number: int
    """Of the episode."""
    rows: int


@final
class LeRobotChecks:
    """Reads the metadata, every table once, and the videos of a dataset, and adds what is wrong to the findings.

    Args:
        meta: the metadata, whose faults the examination takes.
        look: the examination.
    """

    def __init__(self, meta: Metadata, look: Examination) -> None:
        self.meta = meta
        self.numbers: dict[int, int] = {}
        """Rows found of each episode."""
        self.starts: dict[int, int] = {}
        """First row of each episode found."""
        self.total = 0
        """Rows found."""
        self._look = look
        self._complete = True
        self._reported: set[tuple[str, str]] = set()
        self._used_tasks: set[int] = set()
        self._last = -1
        self._read_metadata()

    def check(self) -> None:
        """Check metadata and tables."""
        self._look.expect(len(self.episodes.numbers))
        for name in self._files():
            self._read_file(name)
        self._look.pictures()
        self._check_lengths()
        self._check_counts()
        self._check_tasks()
        self._check_statistics()

    # -- the metadata alone --------------------------------------------------------------------------------------------

    def _read_metadata(self) -> None:
        meta = self.meta
        if meta.info and meta.wrong_version:
            meta.fault("metadata-invalid", meta.wrong_version, INFO, "codebase_version")
        meta.check_info()
        self._look.fps = meta.fps
        self.tasks = meta.read_tasks()
        """Texts of the tasks by number; None if they could not be read."""
        self.episodes = meta.read_episodes(every=True)
        """What the metadata says of each episode."""
        self._at = {number: at for at, number in enumerate(self.episodes.numbers.tolist())}
        self._listed: dict[str, list[int]] = {}
        for at in self._at.values():
            file = self.episodes.tables.known(self.episodes.file_of[at])
            if file is not None:
                self._listed.setdefault(file, []).append(at)
        self.statistics: dict[str, Any] | None = None
        """Statistics of the dataset; None if there are none."""
        if (meta.root / STATISTICS).exists():
            self.statistics = meta.read_object(STATISTICS) or None
        elif meta.major == 3:
            meta.fault("file-missing", "without it nothing is normalized", STATISTICS, severity="warning")

    def _check_counts(self) -> None:
        info, episodes, count = self.meta.info, len(self.episodes.numbers), self.meta.check_count
        count("total_episodes", episodes, f"the table of episodes has {episodes:,}")
        if self._complete:
            count("total_frames", self.total, f"the tables have {self.total:,} rows")
        if self.tasks is not None:
            count("total_tasks", len(self.tasks), f"the table of tasks has {len(self.tasks):,}")
        videos = len(self.meta.cameras) * episodes
        if "total_videos" in info and info["total_videos"] != videos:
            text = f"total_videos is {info['total_videos']!r}, but {videos:,} belong to the episodes"
            self._look.add("count-mismatch", text, Place(file=INFO, field="total_videos"), severity="warning")
        self._check_splits(info.get("splits"), episodes)

    def _check_splits(self, splits: Any, episodes: int) -> None:
        for name, words in splits.items() if isinstance(splits, dict) else ():
            start, _, stop = str(words).partition(":")
            valid = start.isdigit() and stop.isdigit()
            if not valid or not 0 <= int(start) <= int(stop) <= episodes:
                text = f"split {name!r} is {words!r}, the dataset has {number_of(episodes, 'episode')}"
                self._look.add("split-invalid", text, Place(file=INFO, field="splits"))

    def _check_tasks(self) -> None:
        tasks = self.tasks
        file = "meta/tasks.parquet" if self.meta.major == 3 else "meta/tasks.jsonl"
        seen: dict[str, int] = {}
        for number, text in (tasks or {}).items():
            if not text.strip() or text == "None":
                only: Severity | None = "note" if len(tasks or {}) == 1 else None  # usual where a dataset has one task
                self._look.add("task-text", f"task {number} has no text", Place(file=file), severity=only)
            elif text in seen:
                self._look.add("task-text", f"tasks {seen[text]} and {number} are both {text!r}", Place(file=file))
            seen.setdefault(text, number)
            if self._complete and number not in self._used_tasks:
                self._look.add("task-unused", f"no episode has task {number} ({text!r})", Place(file=file))

    # -- the tables ----------------------------------------------------------------------------------------------------

    def _files(self) -> list[str]:
        """Return the tables in the order of their episodes; those that are missing or not listed become findings."""
        root = self.meta.root
        there = sorted(path.relative_to(root).as_posix() for path in (root / "data").rglob("*.parquet"))
        for name in there if self._listed else ():
            if name not in self._listed:
                self._look.add("file-unlisted", "no episode lies in this file", Place(name))
        for name, episodes in self._listed.items():
            if name not in there:
                text = f"{number_of(len(episodes), 'episode')} should lie in it"
                self._look.add("file-missing", text, Place(name, int(self.episodes.numbers[episodes[0]])))
                self._complete = False
        return [name for name in self._listed or there if name in there]

    def _read_file(self, name: str) -> None:
        parquet = require("pyarrow.parquet", "lerobot")
        expected, starts = self._listed.get(name, []), self.episodes.starts
        if expected and starts is not None and starts[expected[0]] >= 0 and not self._complete:
            self.total = int(starts[expected[0]])
        try:
            with parquet.ParquetFile(self.meta.root / name) as file:
                found = [image for image in self.meta.images if image in file.schema_arrow.names]
                images = {image: _Images(self.meta, name, image) for image in found}
                arrays = self._arrays(file.read(columns=self._columns(file.schema_arrow, name)), name)
                numbers = self._numbers_of(arrays, file.metadata.num_rows, expected)
                cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
                for first, stop in pairwise(cuts if len(numbers) else ()):
                    part: dict[str, Any] = {key: values[first:stop] for key, values in arrays.items()}
                    part |= {image: Pictures(range(first, stop), read) for image, read in images.items()}
                    self._episode(int(numbers[first]), part, stop - first, name)
        except READ_ERRORS as error:
            self._complete = False
            numbers = self.episodes.numbers[expected].tolist()
            unread = next((number for number in numbers if number not in self.numbers), None)
            self._look.add("file-unreadable", first_line(error), Place(file=name, episode=unread))

    def _columns(self, schema: Any, file: str) -> list[str]:
        """Compare the columns of a file with the features; return those to read."""
        meta, read = self.meta, []
        pictures = {*meta.cameras, *meta.images}
        for name in (*meta.features, *(n for n in _BOOKKEEPING if n not in meta.features)):
            if name not in schema.names:
                if name not in meta.cameras:
                    self._once("field-missing", "the table has no such column", file, name)
                continue
            if name in pictures:
                continue
            declared, found = meta.features.get(name, {}).get("dtype"), leaf_type(schema.field(name).type)
            if declared is not None and declared != found and declared not in {"language", "list"}:
                alike = _kind(str(declared)) == _kind(found)
                text = f"the features say {declared}, the table has {found}"
                self._once("dtype-mismatch", text, file, name, severity="note" if alike else "error")
            if found != "string":
                read.append(name)
        for name in schema.names:
            if name not in meta.features and name not in _BOOKKEEPING and meta.features:
                self._once("field-unlisted", "the features do not have this column", file, name)
        return read

    def _once(self, check: str, text: str, file: str, name: str, severity: Severity | None = None) -> None:
        """Add a finding about a column, once for all files."""
        if (check, name) not in self._reported:
            self._reported.add((check, name))
            self._look.add(check, text, Place(file=file, field=name), severity=severity)

    def _numbers_of(self, arrays: dict[str, Array], rows: int, expected: list[int]) -> Array:
        """Return the episode of each row: by its column, otherwise by the lengths in the metadata."""
        found = arrays.get("episode_index")
        if found is not None and found.shape[1] == 1:
            return found[:, 0].astype(np.int64)
        known = np.repeat(self.episodes.numbers[expected], np.maximum(self.episodes.lengths[expected], 0))
        return np.pad(known, (0, rows), "edge" if known.shape[0] else "constant")[:rows]

    def _arrays(self, table: Any, file: str) -> dict[str, Array]:
        arrays = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            try:
                values = to_array(column.combine_chunks())
            except WrongValueError as error:
                self._once(error.check, f"{error}, first in row {error.row} of the file", file, name)
                continue
            shape = self.meta.shape(name) if name in self.meta.features else (1,)
            size = None if shape is None else int(np.prod(shape, dtype=np.int64))
            if size is not None and len(values) and values.shape[1] != size:
                text = f"the features say {list(shape or ())}, rows have {number_of(values.shape[1], 'value')}"
                self._once("shape-mismatch", text, file, name)
            arrays[name] = values
        return arrays

    # -- one episode ---------------------------------------------------------------------------------------------------

    def _episode(self, number: int, arrays: dict[str, Any], rows: int, file: str) -> None:
        at = self._at.get(number)
        listed = None if at is None else self.episodes.tables.known(self.episodes.file_of[at])
        where = Place(file, number)
        if number in self.numbers:
            text = "its rows are in more than one place"
            self._look.add("index-order", text, where._replace(field="episode_index"))
        elif at is None and self._at:
            text = f"the table has {number_of(rows, 'row')} of episode {number}, which the metadata lacks"
            self._look.add("episode-bounds", text, where)
        elif number < self._last:
            text = f"its rows come after those of episode {self._last}"
            self._look.add("index-order", text, where._replace(field="episode_index"))
        elif listed not in {None, file}:
            text = f"the metadata says that it lies in {listed}"
            self._look.add("episode-bounds", text, where)
        self._last = max(self._last, number)
        self.starts.setdefault(number, self.total)
        self.numbers[number] = self.numbers.get(number, 0) + rows
        self._check_order(arrays, rows, where)
        self._check_times(arrays, where)
        self._check_episode_task(arrays, None if at is None else self.episodes.tasks[at], where)
        content = {key: values for key, values in arrays.items() if key not in _BOOKKEEPING}
        self._look.episode(number, content, rows, file)
        if at is not None:
            self._check_episode_statistics(self.episodes.statistics[at], content, where)
        self.total += rows

    def _check_order(self, arrays: dict[str, Array], rows: int, where: Place) -> None:
        for name, first in (("frame_index", 0), ("index", self.total)):
            if name in arrays:
                check_numbers(arrays[name][:, 0], np.arange(first, first + rows), name, where, self._look)

    def _check_times(self, arrays: dict[str, Array], where: Place) -> None:
        if "timestamp" not in arrays:
            return
        times = arrays["timestamp"][:, 0].astype(np.float64)
        if not np.isfinite(times).all():
            at = int(np.flatnonzero(~np.isfinite(times))[0])
            self._look.add("value-nan", f"is {times[at]}", where._replace(frame=at, field="timestamp"))
            return
        steps = np.diff(times)
        back = np.flatnonzero(~(steps > 0))
        if back.shape[0]:
            at = int(back[0]) + 1
            text = f"{times[at]:g} s follows {times[at - 1]:g} s"
            self._look.add("timestamp-order", text, where._replace(frame=at, field="timestamp"))
        fps = self.meta.fps
        if fps is None or not times.shape[0]:
            return
        self._look.profile.jitter_ms.append(float(np.abs(steps - 1 / fps).max(initial=0.0) * 1000))
        slack = _SLACK_S + 4 * np.finfo(np.float32).eps * float(np.abs(times).max())
        late = np.flatnonzero(~(np.abs(times - np.arange(times.shape[0]) / fps) <= slack))
        if late.shape[0] and not back.shape[0]:
            at = int(late[0])
            severity: Severity = "error" if self.meta.cameras else "warning"
            off = number_of(late.shape[0], "row")
            text = f"is {times[at]:.6g} s, {at / fps:.6g} s expected at {fps:g} fps ({off} off)"
            self._look.add("timestamp-rate", text, where._replace(frame=at, field="timestamp"), severity=severity)

    def _check_episode_task(self, arrays: dict[str, Array], named: Any, where: Place) -> None:
        if "task_index" not in arrays:
            return
        values, tasks = arrays["task_index"][:, 0], self.tasks
        numbers = {int(number) for number in np.unique(values)}
        self._used_tasks |= numbers
        if tasks is None:
            return
        for number in sorted(numbers - set(tasks)):
            at = int(np.flatnonzero(values == number)[0])
            text = f"task {number} is not in the table of tasks"
            self._look.add("task-unknown", text, where._replace(frame=at, field="task_index"))
        if not isinstance(named, list) or numbers - set(tasks):
            return
        texts = {tasks[number] for number in numbers}
        if not named:
            self._look.add("task-unknown", "the table of episodes gives it no task", where)
        elif texts != set(named):
            text = f"the table of episodes says {sorted(named)}, its rows {sorted(texts)}"
            self._look.add("task-mismatch", text, where)

    def _check_episode_statistics(self, known: Mapping[str, Any], content: dict[str, Any], where: Place) -> None:
        for name, given in known.items():
            values = content.get(name)
            if not isinstance(values, np.ndarray) or not np.isfinite(values).all():
                continue
            moments = Moments(values.shape[1])
            moments.feed(values.astype(np.float64))
            self._compare(given, moments, where._replace(field=name), "statistics of the episode: ")

    def _compare(self, given: Mapping[str, Any], moments: Moments, place: Place, words: str = "") -> None:
        problems = wrong_statistics(given, moments)
        if problems:
            self._look.add("statistics-mismatch", words + "; ".join(problems), place)

    # -- both together -------------------------------------------------------------------------------------------------

    def _check_lengths(self) -> None:
        for number, at in self._at.items():
            found, length = self.numbers.get(number, 0), int(self.episodes.lengths[at])
            missing = number not in self.numbers and not self._complete
            if length not in {-1, found} and not missing:
                text = f"the metadata says {length} rows, the table has {found}"
                file = self.episodes.tables.known(self.episodes.file_of[at])
                self._look.add("episode-length", text, Place(file=file, episode=number))

    def _check_statistics(self) -> None:
        known = self.statistics
        if known is None or not self._complete:
            return
        for name in self.meta.features:
            moments = self._look.rows.moments(name)
            if moments is None or moments.count.min() != self.total:
                continue
            given, place = known.get(name), Place(STATISTICS, field=name)
            if isinstance(given, dict):
                self._compare(given, moments, place)
            else:
                self._look.add("statistics-mismatch", "there are no statistics of this feature", place)

    # -- cameras -------------------------------------------------------------------------------------------------------

    def check_cameras(self) -> None:
        """Check all cameras, those in tables by the pictures that were looked at."""
        videos, done = self.meta.cameras, 0
        total = len(videos) * max(len(self.episodes.numbers), 1)
        progress = self._look.steps() if videos else lambda *_: None
        for name in (*videos, *self.meta.images):
            for count in self._check_video(name) if name in videos else ():
                done += count
                progress(min(done, total), total)
            self._check_brightness(name, self._look.camera(name).brightness)
        self._check_unlisted()

    def _check_brightness(self, name: str, brightness: NDArray[np.float64]) -> None:
        """Compare the mean of a camera, three colors from 0 to 1, with the brightness of the frames looked at."""
        known, place = self.statistics, Place(STATISTICS, camera=name)
        if known is None:
            return
        entry = known.get(name)
        colors = flat_numbers(entry.get("mean")) if isinstance(entry, dict) else None
        if colors is None or colors.shape[0] not in {1, 3} or not np.isfinite(colors).all():
            self._look.add("statistics-mismatch", "there is no mean of its colors", place)
            return
        weights = np.array([0.299, 0.587, 0.114]) if colors.shape[0] == 3 else np.ones(1)
        given, found = float(colors @ weights), float(brightness.mean() / 255) if brightness.shape[0] else None
        if found is not None and abs(given - found) > _MEAN_SLACK:
            text = f"the mean brightness is {given:.3g}, that of the frames looked at {found:.3g} (black 0, white 1)"
            self._look.add("statistics-mismatch", text, place)

    def _check_unlisted(self) -> None:
        cameras = self.episodes.videos.values()
        listed = {videos.files.name(at) for videos in cameras for at in range(len(videos.files))}
        for path in sorted((self.meta.root / "videos").rglob("*.mp4")):
            name = PurePosixPath(path.relative_to(self.meta.root).as_posix())
            if listed and name not in listed:
                self._look.add("file-unlisted", "no episode lies in this file", Place(str(name)))

    # -- videos --------------------------------------------------------------------------------------------------------

    def _check_video(self, name: str) -> Iterator[int]:
        """Check the files of one camera; yields the number of episodes in each."""
        self._check_declared(name)
        for file, group in groupby(self._clips(name), key=lambda clip: clip.file):
            clips = list(group)
            header = self._header(name, file, clips)
            if header is not None:
                self._decode(name, header, [clip for clip in clips if self._check_clip(name, header, clip)])
            yield len(clips)

    def _clips(self, name: str) -> list[_Clip]:
        """Return where the frames of each episode lie, as far as the metadata says, in the order of files and times."""
        videos, found = self.episodes.videos[name], []
        ends = np.full(len(videos.begin), np.inf) if videos.end is None else videos.end
        for at, number in enumerate(self.episodes.numbers.tolist()):
            file, begin, end = videos.files.known(videos.file_of[at]), float(videos.begin[at]), float(ends[at])
            if file is not None and math.isfinite(begin) and not math.isnan(end):
                rows = self.numbers.get(number, max(int(self.episodes.lengths[at]), 0))
                found.append(_Clip(file, begin, end, number, rows))
        return sorted(found)

    def _check_declared(self, name: str) -> None:
        declared = self.meta.video_info(name).get("video.fps")
        if isinstance(declared, (int, float)) and self.meta.fps is not None and declared != self.meta.fps:
            text = f"video.fps is {declared:g}, the fps of the dataset {self.meta.fps:g}"
            self._look.add("video-rate", text, Place(INFO, camera=name), severity="warning")

    def _header(self, name: str, file: str, clips: list[_Clip]) -> VideoHeader | None:
        place = Place(file, clips[0].number, camera=name)
        path = self.meta.root / file
        if not path.exists():
            text = f"{number_of(len(clips), 'episode')} should lie in it"
            self._look.add("file-missing", text, place)
            return None
        try:
            header = read_header(path)
        except READ_ERRORS as error:
            self._look.add("file-unreadable", f"not a readable video: {error}", place)
            return None
        if not header.codec:
            self._look.add("video-codec", "there is no decoder for its codec", place)
            return None
        if header.missing is not None:
            text = f"the file is cut short: frames from {header.missing} on of {len(header.times)} are missing"
            cut = [clip.number for clip in clips if self._first(header, clip) <= header.missing]
            where = place._replace(episode=cut[-1] if cut else place.episode, frame=header.missing)
            self._look.add("file-unreadable", text, where)
        self._check_format(name, header, place)
        return header if self._check_rate(header, place) else None

    def _check_format(self, name: str, header: VideoHeader, place: Place) -> None:
        shape = self.meta.picture_shape(name)
        if shape is not None and shape[1:] != (header.height, header.width):
            text = f"the video has {header.height}x{header.width} pixels, the features say {shape[1]}x{shape[2]}"
            self._look.add("video-size", text, place)
        declared = str(self.meta.video_info(name).get("video.codec", ""))
        if declared and _CODECS.get(declared, declared) != header.codec:
            text = f"the video is {header.codec}, the features say {declared}"
            self._look.add("video-codec", text, place, severity="note")

    def _check_rate(self, header: VideoHeader, place: Place) -> bool:
        fps, steps = self.meta.fps, np.diff(header.times)
        if fps is None:
            return False
        wrong = np.flatnonzero(np.abs(steps - 1 / fps) > _SLACK_S + 1e-3 / fps)
        if not wrong.shape[0]:
            return True
        at, usual = int(wrong[0]), float(1 / max(np.median(steps), 1e-9))
        if abs(usual - fps) > 1e-3 * fps:
            text = f"the video has {usual:.4g} frames per second, the dataset {fps:g}"
            self._look.add("video-rate", text, place)
        else:
            text = f"{steps[at]:.4g} s pass after frame {at}, 1 / fps = {1 / fps:.4g} s expected"
            self._look.add("video-rate", text, place._replace(frame=at + 1))
        return False

    def _first(self, header: VideoHeader, clip: _Clip) -> int:
        """Return the position of the first frame of an episode in its file."""
        start = float(header.times[0]) if len(header.times) else 0.0
        return round((clip.begin - start) * (self.meta.fps or 1.0))

    def _check_clip(self, name: str, header: VideoHeader, clip: _Clip) -> bool:
        """Compare the part of a file that belongs to an episode with its rows; return whether it can be decoded."""
        fps, place = self.meta.fps or 1.0, Place(clip.file, clip.number, camera=name)
        length, frames = clip.rows, len(header.times)
        first = self._first(header, clip)
        if math.isinf(clip.end):
            if frames != length:
                text = f"the video has {number_of(frames, 'frame')}, the episode {number_of(length, 'row')}"
                self._look.add("video-frames", text, place._replace(frame=min(frames, length)))
            return frames >= length
        if abs((clip.end - clip.begin) * fps - length) > 0.5:
            text = f"from {clip.begin:.6g} s to {clip.end:.6g} s are {(clip.end - clip.begin) * fps:.4g} "
            self._look.add("video-bounds", text + f"frames, the episode has {number_of(length, 'row')}", place)
        if first < 0 or first >= frames:
            text = f"it begins at {clip.begin:.6g} s, the video lasts from {self._span(header)}"
            self._look.add("video-bounds", text, place)
            return False
        if abs(header.times[first] - clip.begin) > _SLACK_S + 1e-3 / fps:
            text = f"it begins at {clip.begin:.6g} s, between two frames: the nearest is at {header.times[first]:.6g} s"
            self._look.add("video-bounds", text, place)
        if first + length > frames:
            text = f"the video ends after {frames - first} of {number_of(length, 'frame')} of the episode"
            self._look.add("video-frames", text, place._replace(frame=frames - first))
            return False
        return True

    @staticmethod
    def _span(header: VideoHeader) -> str:
        return f"{header.times[0]:.6g} s to {header.times[-1]:.6g} s" if len(header.times) else "0 s to 0 s"

    def _decode(self, name: str, header: VideoHeader, clips: list[_Clip]) -> None:
        """Decode frames of episodes of a file."""
        stop = 0
        for clip in clips:
            first, rows = self._first(header, clip), clip.rows
            if first < stop and math.isfinite(clip.end):
                text = f"its frames [{first}, {first + rows}) overlap those of the episode before, up to {stop}"
                self._look.add("video-bounds", text, Place(clip.file, clip.number, camera=name))
            stop = max(stop, first + rows)
            read = partial(gray_frames, self.meta.root / clip.file, header.times[first : first + rows])
            self._look.look(name, read, clip.number, rows, self.starts.get(clip.number, 0), clip.file)


def _kind(dtype: str) -> str:
    return dtype.rstrip("0123456789").removeprefix("u")


_MEAN_SLACK = 0.15
"""Statistics of cameras are those of some frames, before they were encoded; so is the brightness of a sample."""
_CODECS = {"libx264": "h264", "libx265": "hevc", "h265": "hevc", "libsvtav1": "av1", "libdav1d": "av1", "avc1": "h264"}


@final
class _Images:
    """Reads the pictures of one column of a table, row group by row group."""

    def __init__(self, meta: Metadata, file: str, name: str) -> None:
        self._path, self._name, self._shape = meta.root / file, name, meta.picture_shape(name)
        self._table: Any = None
        self._group = -1
        self._rows: Any = None

    def __call__(self, row: int) -> Array:
        """Return the picture `[H, W, C]` in a row of the file.

        Raises:
            WrongValueError: if there is none, or it has another size.
        """
        self._table = self._table or open_table(self._path)
        group, at, _ = next(self._table.pieces(row, row + 1))
        if group != self._group:
            self._group, self._rows = (
                group,
                stored_bytes(self._table.columns([self._name], group)[self._name], "picture"),
            )
        data = self._rows[at].as_buffer()
        if data is None:
            raise WrongValueError(
                row, "there is no picture (null): those in files of their own are not read", "value-null"
            )
        picture = decode_picture(data.to_pybytes(), "lerobot")
        if self._shape is not None and picture.shape[:2] != self._shape[1:]:
            text = f"it has {picture.shape[0]}x{picture.shape[1]} pixels, the features say {self._shape[1:]}"
            raise WrongValueError(row, text, "video-size")
        return picture


# -- statistics --------------------------------------------------------------------------------------------------------


def wrong_statistics(given: Mapping[str, Any], moments: Moments) -> list[str]:
    """Return what is wrong with statistics, in words; empty if they match the values up to rounding.

    Args:
        given: `min`, `max`, `mean`, `std` (lists of any nesting) and `count`; those that are missing are not compared.
        moments: the statistics of the values.
    """
    problems = []
    for kind in ("min", "max", "mean", "std"):
        if kind not in given:
            continue
        found = flat_numbers(given[kind])
        width = moments.count.shape[0]
        if found is None or not found.shape[0] or width % found.shape[0]:
            problems.append(f"{kind} does not have {width} numbers")
            continue
        expected, allowed, other = _expected(kind, moments, found.shape[0])
        off = ~(np.abs(found - expected) <= allowed) & ~(np.abs(found - other) <= allowed)
        if off.any():
            at = int(np.flatnonzero(off)[0])
            problems.append(f"{kind} of dimension {at} is {found[at]:.6g}, that of the data {expected[at]:.6g}")
    count = flat_numbers(given["count"]) if "count" in given else None
    if count is not None and count.shape[0] and count[0] != moments.count.max():
        problems.append(f"count is {count[0]:.0f}, the data has {number_of(moments.count.max(), 'row')}")
    return problems


def _expected(kind: str, moments: Moments, size: int) -> tuple[Floats, Floats, Floats]:
    """Return a statistic of the values, how far another may be from it, and another valid value of it.

    Args:
        kind: `min`, `max`, `mean` or `std`.
        moments: the statistics of the values.
        size: how many numbers are wanted: fewer than dimensions where LeRobot joins the rows of matrices.
    """
    low, high = moments.low.reshape(-1, size).min(0), moments.high.reshape(-1, size).max(0)
    means, variances = moments.mean.reshape(-1, size), moments.std.reshape(-1, size) ** 2
    mean = means.mean(0)
    std = np.sqrt(np.maximum((variances + means**2).mean(0) - mean**2, 0.0))
    largest = np.maximum(np.abs(low), np.abs(high))
    if kind == "mean":
        return mean, 1e-3 * std + 1e-4 * largest + 1e-8, mean
    if kind == "std":
        rows = int(moments.count.max())
        return std, 1e-2 * std + 1e-4 * largest + 1e-8, std * np.sqrt(rows / max(rows - 1, 1))
    limit = low if kind == "min" else high
    return limit, 1e-4 * (high - low) + 1e-5 * largest + 1e-8, limit


def flat_numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return the numbers of nested lists in one array `[n]`, None if they are something else."""
    while isinstance(value, list) and value and isinstance(value[0], list):
        try:
            value = [number for inner in value for number in inner]
        except TypeError:
            return None
    try:
        return np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return None
