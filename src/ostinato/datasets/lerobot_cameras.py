"""The checks of the cameras of LeRobot datasets: video files and pictures in tables."""

from __future__ import annotations

import io
from itertools import groupby
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets.checks import READ_ERRORS, Place, sampled_episodes, sampled_frames
from ostinato.datasets.lerobot_metadata import INFO, STATISTICS
from ostinato.datasets.lerobot_stats import flat_numbers
from ostinato.datasets.video_file import BrokenFrameError, gray_frames, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ostinato.datasets.checks import Camera, Examination
    from ostinato.datasets.lerobot_checks import LeRobotTables
    from ostinato.datasets.lerobot_metadata import Clip, EpisodeEntry
    from ostinato.datasets.video_file import VideoHeader

_SLACK_S = 1e-4
_MEAN_SLACK = 0.15
"""Statistics of cameras are those of some frames, before they were encoded; so is the brightness of a sample."""
_CODECS = {"libx264": "h264", "libx265": "hevc", "h265": "hevc", "libsvtav1": "av1", "libdav1d": "av1", "avc1": "h264"}


@final
class LeRobotCameras:
    """Checks every video file, and the pictures of cameras.

    Args:
        tables: the tables, which were checked before.
        look: the examination.
    """

    def __init__(self, tables: LeRobotTables, look: Examination) -> None:
        self._tables = tables
        self._meta = tables.meta
        self._examination = look
        self._full = look.full
        self._chosen: set[int] = set()

    def check(self) -> int:
        """Check all cameras; return the number of frames looked at."""
        numbers = [entry.number for entry in self._tables.entries]
        self._chosen = {numbers[at] for at in sampled_episodes(len(numbers), full=self._full)}
        cameras, progress = [*self._meta.cameras, *self._meta.images], self._examination.steps()
        decoded = done = 0
        total = len(cameras) * max(len(numbers), 1)
        for name in cameras:
            camera = self._examination.camera(name)
            files = self._check_video if name in self._meta.cameras else self._check_images
            for count in files(name, camera):
                done += count
                progress(min(done, total), total)
            decoded += camera.decoded
            self._check_statistics(name, camera.brightness)
        self._check_unlisted()
        return decoded

    def _check_statistics(self, name: str, brightness: NDArray[np.float64]) -> None:
        """Compare the mean of a camera, three colors from 0 to 1, with the brightness of the frames looked at."""
        known, place = self._tables.statistics, Place(STATISTICS, camera=name)
        if known is None:
            return
        entry = known.get(name)
        colors = flat_numbers(entry.get("mean")) if isinstance(entry, dict) else None
        if colors is None or colors.shape[0] not in {1, 3} or not np.isfinite(colors).all():
            self._examination.add("statistics-mismatch", "there is no mean of its colors", place)
            return
        weights = np.array([0.299, 0.587, 0.114]) if colors.shape[0] == 3 else np.ones(1)
        given, found = float(colors @ weights), float(brightness.mean() / 255) if brightness.shape[0] else None
        if found is not None and abs(given - found) > _MEAN_SLACK:
            text = f"the mean brightness is {given:.3g}, that of the frames looked at {found:.3g} (black 0, white 1)"
            self._examination.add("statistics-mismatch", text, place)

    def _check_unlisted(self) -> None:
        listed = {clip.file for entry in self._tables.entries for clip in entry.clips.values()}
        for path in sorted((self._meta.root / "videos").rglob("*.mp4")):
            name = path.relative_to(self._meta.root).as_posix()
            if listed and name not in listed:
                self._examination.add("file-unlisted", "no episode lies in this file", Place(name))

    # -- videos --------------------------------------------------------------------------------------------------------

    def _check_video(self, name: str, checks: Camera) -> Iterator[int]:
        """Check the files of one camera; yields the number of episodes in each."""
        self._check_declared(name)
        found = [(entry, entry.clips[name]) for entry in self._tables.entries if name in entry.clips]
        found.sort(key=lambda pair: (pair[1].file, pair[1].start_s))
        for file, group in groupby(found, key=lambda pair: pair[1].file):
            episodes = list(group)
            header = self._header(name, file, episodes)
            if header is not None:
                usable = [pair for pair in episodes if self._check_clip(name, header, *pair)]
                self._look(checks, header, file, usable)
            yield len(episodes)

    def _check_declared(self, name: str) -> None:
        declared = self._meta.video_info(name).get("video.fps")
        if isinstance(declared, (int, float)) and self._meta.fps is not None and declared != self._meta.fps:
            text = f"video.fps is {declared:g}, the fps of the dataset {self._meta.fps:g}"
            self._examination.add("video-rate", text, Place(INFO, camera=name), severity="warning")

    def _header(self, name: str, file: str, episodes: list[tuple[EpisodeEntry, Clip]]) -> VideoHeader | None:
        place = Place(file, episodes[0][0].number, camera=name)
        path = self._meta.root / file
        if not path.exists():
            text = f"{len(episodes)} episode{'s' if len(episodes) > 1 else ''} should lie in it"
            self._examination.add("file-missing", text, place)
            return None
        try:
            header = read_header(path)
        except READ_ERRORS as error:
            self._examination.add("file-unreadable", f"not a readable video: {error}", place)
            return None
        if not header.codec:
            self._examination.add("video-codec", "there is no decoder for its codec", place)
            return None
        if header.missing is not None:
            text = f"the file is cut short: frames from {header.missing} on of {len(header.times)} are missing"
            cut = [entry.number for entry, clip in episodes if self._first(header, clip) <= header.missing]
            where = place._replace(episode=cut[-1] if cut else place.episode, frame=header.missing)
            self._examination.add("file-unreadable", text, where)
        self._check_format(name, header, place)
        return header if self._check_rate(header, place) else None

    def _check_format(self, name: str, header: VideoHeader, place: Place) -> None:
        shape = self._meta.picture_shape(name)
        if shape is not None and shape[1:] != (header.height, header.width):
            text = f"the video has {header.height}x{header.width} pixels, the features say {shape[1]}x{shape[2]}"
            self._examination.add("video-size", text, place)
        declared = str(self._meta.video_info(name).get("video.codec", ""))
        if declared and _CODECS.get(declared, declared) != header.codec:
            text = f"the video is {header.codec}, the features say {declared}"
            self._examination.add("video-codec", text, place, severity="note")

    def _check_rate(self, header: VideoHeader, place: Place) -> bool:
        fps, steps = self._meta.fps, np.diff(header.times)
        if fps is None:
            return False
        wrong = np.flatnonzero(np.abs(steps - 1 / fps) > _SLACK_S + 1e-3 / fps)
        if not wrong.shape[0]:
            return True
        at, usual = int(wrong[0]), float(1 / max(np.median(steps), 1e-9))
        if abs(usual - fps) > 1e-3 * fps:
            text = f"the video has {usual:.4g} frames per second, the dataset {fps:g}"
            self._examination.add("video-rate", text, place)
        else:
            text = f"{steps[at]:.4g} s pass after frame {at}, 1 / fps = {1 / fps:.4g} s expected"
            self._examination.add("video-rate", text, place._replace(frame=at + 1))
        return False

    def _first(self, header: VideoHeader, clip: Clip) -> int:
        """Return the position of the first frame of an episode in its file."""
        start = float(header.times[0]) if len(header.times) else 0.0
        return round((clip.start_s - start) * (self._meta.fps or 1.0))

    def _check_clip(self, name: str, header: VideoHeader, entry: EpisodeEntry, clip: Clip) -> bool:
        """Compare the part of a file that belongs to an episode with its rows; return whether it can be decoded."""
        fps, place = self._meta.fps or 1.0, Place(clip.file, entry.number, camera=name)
        length, frames = self._length(entry), len(header.times)
        first = self._first(header, clip)
        if clip.stop_s is None:
            if frames != length:
                text = f"the video has {number_of(frames, 'frame')}, the episode {number_of(length, 'row')}"
                self._examination.add("video-frames", text, place._replace(frame=min(frames, length)))
            return frames >= length
        if abs((clip.stop_s - clip.start_s) * fps - length) > 0.5:
            text = f"from {clip.start_s:.6g} s to {clip.stop_s:.6g} s are {(clip.stop_s - clip.start_s) * fps:.4g} "
            self._examination.add("video-bounds", text + f"frames, the episode has {number_of(length, 'row')}", place)
        if first < 0 or first >= frames:
            text = f"it begins at {clip.start_s:.6g} s, the video lasts from {self._span(header)}"
            self._examination.add("video-bounds", text, place)
            return False
        if abs(header.times[first] - clip.start_s) > _SLACK_S + 1e-3 / fps:
            text = (
                f"it begins at {clip.start_s:.6g} s, between two frames: the nearest is at {header.times[first]:.6g} s"
            )
            self._examination.add("video-bounds", text, place)
        if first + length > frames:
            text = f"the video ends after {frames - first} of {number_of(length, 'frame')} of the episode"
            self._examination.add("video-frames", text, place._replace(frame=frames - first))
            return False
        return True

    @staticmethod
    def _span(header: VideoHeader) -> str:
        return f"{header.times[0]:.6g} s to {header.times[-1]:.6g} s" if len(header.times) else "0 s to 0 s"

    def _length(self, entry: EpisodeEntry) -> int:
        return self._tables.numbers.get(entry.number, entry.length or 0)

    def _look(self, checks: Camera, header: VideoHeader, file: str, episodes: list[tuple[EpisodeEntry, Clip]]) -> None:
        """Decode frames of episodes of a file."""
        stop = 0
        for entry, clip in episodes:
            first, length = self._first(header, clip), self._length(entry)
            if first < stop and clip.stop_s is not None:
                text = f"its frames [{first}, {first + length}) overlap those of the episode before, up to {stop}"
                self._examination.add("video-bounds", text, Place(file, entry.number, camera=checks.name))
            stop = max(stop, first + length)
            if entry.number not in self._chosen or not length:
                continue
            wanted = [first + row for row in sampled_frames(length, full=self._full)]
            last = len(header.times) if header.missing is None else header.missing
            frames = gray_frames(self._meta.root / file, header, [at for at in wanted if at < last])
            try:
                start = self._tables.starts.get(entry.number, 0)
                checks.episode(entry.number, length, start, ((at - first, gray) for at, gray in frames), file)
            except BrokenFrameError as error:
                place = Place(file, entry.number, error.frame - first, camera=checks.name)
                self._examination.add("file-unreadable", f"frame {error.frame} of the video: {error.why}", place)

    # -- pictures in tables --------------------------------------------------------------------------------------------

    def _check_images(self, name: str, checks: Camera) -> Iterator[int]:
        """Look at pictures of one camera in the tables; yields the number of episodes in each file."""
        parquet = require("pyarrow.parquet", "lerobot")
        for file, group in groupby(self._tables.entries, key=lambda entry: entry.file):
            episodes = list(group)
            path = self._meta.root / (file or "")
            if file is not None and path.is_file():
                try:
                    with parquet.ParquetFile(path) as table:
                        if name in table.schema_arrow.names:
                            self._look_at_rows(checks, table, file, episodes)
                except READ_ERRORS:  # the pass over the tables reported it
                    pass
            yield len(episodes)

    def _look_at_rows(self, checks: Camera, table: Any, file: str, episodes: list[EpisodeEntry]) -> None:
        """Read the row groups that hold chosen rows, one after the other."""
        sizes = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        ends, first = np.cumsum(sizes), 0
        group, rows = -1, None
        for entry in episodes:
            length = self._length(entry)
            pictures = []
            for row in sampled_frames(length, full=self._full) if entry.number in self._chosen else []:
                at = int(np.searchsorted(ends, first + row, side="right"))
                if at >= len(sizes):
                    break
                if at != group:
                    group, rows = at, table.read_row_group(at, columns=[checks.name]).column(0)
                value = rows[first + row - (int(ends[at]) - sizes[at])].as_py() if rows is not None else None
                picture = self._picture(checks.name, value, Place(file, entry.number, row, camera=checks.name))
                if picture is not None:
                    pictures.append((row, picture))
            if pictures:
                checks.episode(entry.number, length, self._tables.starts.get(entry.number, 0), pictures, file)
            first += length

    def _picture(self, name: str, value: Any, place: Place) -> NDArray[np.uint8] | None:
        image = require("PIL.Image", "lerobot")
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (None, None)
        if data is None and path and (self._meta.root / path).is_file():
            data = (self._meta.root / path).read_bytes()
        if data is None:
            self._examination.add("value-null", "there is no picture", place)
            return None
        try:
            with image.open(io.BytesIO(data)) as picture:
                gray: NDArray[np.uint8] = np.asarray(picture.convert("L"))
        except READ_ERRORS as error:
            self._examination.add("file-unreadable", f"not a readable picture: {error}", place)
            return None
        shape = self._meta.picture_shape(name)
        if shape is not None and gray.shape != shape[1:]:
            text = f"the picture has {gray.shape[0]}x{gray.shape[1]} pixels, the features say {shape[1]}x{shape[2]}"
            self._examination.add("video-size", text, place)
        return gray
