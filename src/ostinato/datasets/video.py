"""Columns of video frames: the frames of a batch, decoded by a bounded pool of threads; a frame is never shifted."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core.processes import whole_in_forks
from ostinato.datasets.cache import OpenHandles, RowCache, new_rows
from ostinato.errors import DamagedFileError, MissingFileError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.datasets.format import Reading

    _Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NEAR_FRAMES = 16
"""Where a file has no index, a gap of at most so many frames is decoded; beyond a larger one the file is searched."""
_ATTACHED_PICTURE = 0x0400
_TOGETHER = 32
"""Frames that `gray_frames` decodes and keeps at a time."""
_TOLERANCE_S = 1e-4
_PLANES = ((0, 2), (1, 0), (2, 1))
"""Channel of a picture, and its plane in the format `gbrp`."""


class _Wanted(NamedTuple):
    """Frames of one file, ordered by time."""

    path: Path
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    """`[k]`: when each frame is shown."""
    places: _Numbers
    """`[k]`: its position in the batch."""
    rows: _Numbers
    """`[k]`: its row, for messages."""

    def part(self, begin: int, end: int) -> _Wanted:
        """Return the frames in the range `[begin, end)`."""
        span = slice(begin, end)
        return _Wanted(self.path, self.seconds[span], self.places[span], self.rows[span])


@final
class VideoFiles:
    """Open videos and the threads that decode them, shared by all cameras of a dataset. Thread-safe.

    Each thread decodes with one file at a time; decoding and conversion run without the interpreter lock. Pickled
    without files and threads; a forked process opens files and starts threads of its own.

    Args:
        num_threads: threads that decode.
        tolerance_s: largest distance in seconds between a frame and the time that is asked for.
        most: videos that stay open while no thread uses them.
    """

    def __init__(self, num_threads: int, tolerance_s: float, most: int = 16) -> None:
        self.num_threads = num_threads
        self.tolerance_s = tolerance_s
        self.handles: OpenHandles[_Video] = OpenHandles(_Video, _Video.close, max(most, num_threads))
        """The open videos."""
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        whole_in_forks(self, self._lock)

    def __getstate__(self) -> dict[str, Any]:
        """The options."""
        return {"num_threads": self.num_threads, "tolerance_s": self.tolerance_s, "handles": self.handles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without threads."""
        self.__dict__.update(state)
        self._begin()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` in one of the threads."""
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # a forked process has no threads
                self._process = os.getpid()
                self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="ostinato-video")
            return self._pool.submit(work)

    def close(self) -> None:
        """Close the files that no thread uses, and end the threads when they are done; the next read starts anew."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown(wait=True)
        self.handles.close()


@final
class VideoColumn:
    """A field of pictures that are frames of videos, uint8 `[3, H, W]` as red, green and blue.

    A frame is found by its time: it must be shown within `tolerance_s` of the time of its row, else an error is raised.
    The rows of a read are grouped by file and keyframe; every group is decoded once, from its keyframe to the last
    frame wanted.

    Args:
        files: the videos.
        locate: takes rows, int64 `[n]`; returns the position of the video of each row in `files`, int64 `[n]`, and when
            its frame is shown there, in seconds, float64 `[n]`. Must be picklable.
        shape: `(3, H, W)`: what frames must have.
        describe: names a row in error messages, such as "episode 3, frame 17". Must be picklable.
        reading: options and what the columns of a dataset share.
        fps: frames per second; None if not known.
    """

    dtype = torch.uint8

    def __init__(
        self,
        files: Sequence[Path],
        locate: Callable[[Tensor], tuple[Tensor, Tensor]],
        shape: tuple[int, int, int],
        describe: Callable[[int], str],
        reading: Reading,
        fps: float | None = None,
    ) -> None:
        if list(shape[:-2]) != [3]:
            msg = f"frames of videos are [3, H, W], the dataset describes them as {list(shape)}: correct its metadata"
            raise SchemaError(msg)
        self.files = files
        self.shape: tuple[int, ...] = tuple(shape)
        self.fps = fps
        self._locate, self.describe = locate, describe
        self.videos = reading.videos
        self.kept: RowCache | None = None
        """Frames that were decoded last."""

    def keep_frames(self, rows: int, max_bytes: int) -> None:
        """Keep decoded frames in memory, of `rows` rows in all, up to `max_bytes` bytes."""
        self.kept = RowCache(rows, self.shape, max_bytes)

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to decode rows, int64 `[n]`.

        Returns:
            A function that waits for the frames and returns them, uint8 `[n, 3, H, W]`.

        Raises:
            DamagedFileError: by that function, naming file, episode and frame: the video is damaged or cut short, or no
                frame is shown at the time of the row, or there is no decoder for its codec.
            MissingFileError: by that function: the video does not exist.
            MissingExtraError: by that function: PyAV is not installed.
            SchemaError: by that function: a frame has another size than `shape`.
        """
        if self.kept is None:
            out, places = new_rows(rows.shape[0], self.shape), np.arange(rows.shape[0])
        else:
            out, found = self.kept.read(rows.numpy())
            places = np.flatnonzero(~found)
        frames = out.numpy()
        jobs = _Jobs(self, frames)
        repeated = self._submit(rows, places, jobs) if places.shape[0] else []

        def read() -> Tensor:
            jobs.wait()
            for place, first in repeated:  # one by one: torch's threads hang in a forked process
                np.copyto(frames[place], frames[first])
            return out

        return read

    def _submit(self, rows: Tensor, places: _Numbers, jobs: _Jobs) -> list[tuple[int, int]]:
        """Begin to decode the rows for some places of the batch.

        Returns:
            The places that repeat a frame, each with the place whose frame it repeats.
        """
        at = rows.numpy()[places]
        numbers, seconds = (values.numpy() for values in self._locate(torch.from_numpy(at)))
        order = np.lexsort((seconds, numbers))
        numbers, seconds = numbers[order], seconds[order].astype(np.float64, copy=False)
        places, at = places[order], at[order]
        new = np.concatenate([[True], (numbers[1:] != numbers[:-1]) | (seconds[1:] != seconds[:-1])])
        first = places[new]
        numbers, seconds, at = numbers[new], seconds[new], at[new]
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), first.shape[0]]
        for begin, end in itertools.pairwise(cuts):
            span = slice(begin, end)
            jobs.submit(_Wanted(self.files[int(numbers[begin])], seconds[span], first[span], at[span]), share=True)
        again = first[np.cumsum(new) - 1][~new]
        return list(zip(places[~new].tolist(), again.tolist(), strict=True))

    def close(self) -> None:
        """Close the videos; the next read opens them again."""
        self.videos.close()


class _Jobs:
    """The frames of one read: divided among the threads, and written to their places in the batch.

    Args:
        column: what is read.
        out: the batch, uint8 `[n, 3, H, W]`.
    """

    def __init__(self, column: VideoColumn, out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.column, self.out = column, out
        self.videos: VideoFiles = column.videos
        self._futures: list[Future[None]] = []
        self._failed = False

    def submit(self, wanted: _Wanted, *, share: bool) -> None:
        """Decode frames of one file in another thread; with `share`, in several ones if that pays."""
        self._futures.append(self.videos.submit(partial(self._run, wanted, share=share)))

    def wait(self) -> None:
        """Wait for all frames.

        Raises:
            The first error of a job; the others have ended then, too.
        """
        error: BaseException | None = None
        for future in self._futures:  # a job adds others to the list before it ends
            found = future.exception()
            error = error or found
        if error is not None:
            raise error

    def _run(self, wanted: _Wanted, *, share: bool) -> None:
        if self._failed:
            return
        try:
            self._decode(wanted, share=share)
        except BaseException:
            self._failed = True
            raise

    def _decode(self, wanted: _Wanted, *, share: bool) -> None:
        def action(video: _Video) -> None:
            ticks = video.ticks(wanted.seconds, self.videos.tolerance_s)
            fps, size = self.column.fps, wanted.places.shape[0]
            if share and self.videos.num_threads > 1 and size > 1:
                bounds = _shares(video.runs(ticks[1], fps), size, self.videos.num_threads)
                for begin, end in itertools.pairwise(bounds[1:]):
                    self.submit(wanted.part(begin, end), share=False)
                ticks = [bound[: bounds[1]] for bound in ticks]
            places = wanted.places.tolist()
            video.read(ticks, lambda at, frame: self._keep(video, at, places[at], frame), fps)
            if self.column.kept is not None:
                count = len(ticks[1])
                self.column.kept.keep(wanted.rows[:count], self.out, wanted.places[:count])

        try:
            self.videos.handles.use(wanted.path, action)
        except _ReadError as error:
            row = self.column.describe(int(wanted.rows[error.at]))
            where = f"{wanted.path}: {row}, shown at {wanted.seconds[error.at]:.6f} s"
            msg = f"{where}, cannot be read: {error.why}"
            raise error.kind(msg) from error.__cause__

    def _keep(self, video: _Video, at: int, place: int, frame: Any) -> None:
        height, width = self.column.shape[1:]
        if (frame.height, frame.width) != (height, width):
            why = f"it has {frame.height} x {frame.width} pixels, the dataset promises {height} x {width}"
            raise _ReadError(why, SchemaError, at)
        video.convert(frame, self.out[place])


class _ReadError(Exception):
    """A frame cannot be read: why, the error to raise, and its position among the frames wanted."""

    def __init__(self, why: str, kind: type[Exception] = DamagedFileError, at: int = 0) -> None:
        super().__init__(why)
        self.why, self.kind, self.at = why, kind, at


class _NotFoundError(_ReadError):
    """No frame is shown at a time; decoding from an earlier keyframe may find it."""


@final
class _Video:
    """One open file: its first video stream, a decoder, and where both are. Used by one thread at a time."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        av = require("av", "lerobot")
        self._errors = av.error.FFmpegError
        try:
            self._container = av.open(str(path), metadata_errors="replace")
        except FileNotFoundError as error:
            why = "the file is missing"
            raise _ReadError(why, MissingFileError) from error
        except self._errors as error:
            raise _ReadError(_because(error)) from error
        try:
            self._stream = self._choose()
        except BaseException:
            self._container.close()
            raise
        context = self._stream.codec_context
        context.thread_count = (
            threads  # one for reading rows: jobs run side by side; threads in a decoder would add delay
        )
        self._decoder = context
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._entries: Any = getattr(self._stream, "index_entries", ())
        self._tick = float(self._stream.time_base)
        self._packets: Iterator[Any] = iter(())
        self._live = False  # whether the decoder goes on after the frame `_at`
        self._at = self._key = 0

    def _choose(self) -> Any:
        for stream in self._container.streams.video:
            if not int(stream.disposition) & _ATTACHED_PICTURE:
                if stream.codec_context is None:
                    why = (
                        "there is no decoder for its video: the file is cut short, or this build of FFmpeg lacks the "
                        "codec (the package av from PyPI has the usual ones)"
                    )
                    raise _ReadError(why)
                return stream
        why = "the file has no video stream that can be decoded"
        raise _ReadError(why)

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    # -- time ----------------------------------------------------------------------------------------------------------

    def ticks(self, seconds: np.ndarray[Any, np.dtype[np.float64]], tolerance_s: float) -> list[list[int]]:
        """Return times in units of the stream: the earliest that is near enough, the nearest, and the latest."""
        # some containers count milliseconds only: a frame is as near as they can say
        tolerance = max(tolerance_s, min(self._tick / 2, 0.0005) + 1e-9)
        bounds = (
            np.ceil((seconds - tolerance) / self._tick),
            np.rint(seconds / self._tick),
            np.floor((seconds + tolerance) / self._tick),
        )
        return [bound.astype(np.int64).tolist() for bound in bounds]

    def runs(self, wanted: list[int], fps: float | None) -> list[int]:
        """Return the positions in `wanted` (ascending) before which it costs nothing to start at another keyframe."""
        if not len(self._entries):
            near = _NEAR_FRAMES / (fps or 30) / self._tick
            return [i for i in range(1, len(wanted)) if wanted[i] - wanted[i - 1] > near]
        search = self._entries.search_timestamp
        keys = [search(tick) for tick in wanted]
        return [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]

    def _skips(self, begin: int, end: int, fps: float | None) -> bool:
        """Whether frames after `begin` need not be decoded for the frame at `end`, which is later."""
        if not len(self._entries):
            return (end - begin) * self._tick * (fps or 30) > _NEAR_FRAMES
        search = self._entries.search_timestamp
        return bool(search(end) > search(begin, any_frame=True) + 1)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def read(self, ticks: list[list[int]], keep: Callable[[int, Any], None], fps: float | None) -> None:
        """Decode frames that are wanted, and call `keep(position, frame)` for each."""
        exact = ticks[1]
        at = 0
        while at < len(exact):
            end = at + 1
            while end < len(exact) and not self._skips(exact[end - 1], exact[end], fps):
                end += 1
            passed = ticks[0][at] <= self._at  # a frame that is gone may be the nearest
            if not self._live or passed or self._skips(self._at, exact[at], fps):
                self._seek(exact[at], at)
            try:
                self._run(ticks, at, end, keep)
            except _NotFoundError:  # what is marked as a keyframe may depend on earlier frames, or the search is vague
                key = self._key
                self._seek(key - 1 if len(self._entries) else self._stream.start_time or 0, at)
                if self._key >= key:
                    raise
                self._run(ticks, at, end, keep)
            at = end

    def _seek(self, tick: int, at: int) -> None:
        """Go to the last keyframe that is shown at `tick` or before it; to the first one if there is none."""
        target, before = tick, None
        self._live = False
        try:
            while True:
                self._container.seek(target, stream=self._stream, backward=True)
                self._packets = self._container.demux(self._stream)
                first = next(self._packets, None)
                while first is not None and first.size and not first.is_keyframe:
                    first = next(self._packets, None)
                if first is None or not first.size:
                    why = "there is no keyframe before it, or the file is cut short"
                    raise _ReadError(why, at=at)
                self._key = _shown(first)
                if self._key <= tick or first.dts is None or first.dts == before:
                    break
                before, target = first.dts, first.dts - 1
        except self._errors as error:
            raise _ReadError(_because(error), at=at) from error
        self._packets = itertools.chain([first], self._packets)
        self._live = True
        self._at = self._key - 1

    def _run(self, ticks: list[list[int]], at: int, end: int, keep: Callable[[int, Any], None]) -> None:
        """Decode forward until the frames `[at, end)` are there."""
        match = _Match(ticks, at, end, keep)
        unsent = set(ticks[1][at:end])
        for packet in self._packets:
            frames = self._send(packet, match)
            unsent.discard(packet.pts)
            if not packet.size:
                self._live = False
            elif not unsent and match.at + len(frames) < end:
                frames += self._send(None, match)  # the decoder delays frames: get them without decoding others
                self._live = False
            for frame in frames:
                if frame.pts is not None and frame.pts >= self._key:  # those before it lack what they refer to
                    self._check(frame, match)
                    self._at = frame.pts
                    match.take(frame)
            if match.at == end:
                return
            if not self._live:
                match.finish()
                return
        self._live = False
        match.finish()

    def _send(self, packet: Any, match: _Match) -> list[Any]:
        if packet is not None and packet.size and packet.is_corrupt:
            self._live = False
            why = "the file is cut short or damaged before this frame"
            raise _ReadError(why, at=match.at)
        try:
            found: list[Any] = self._decoder.decode(packet)
        except self._errors as error:
            if packet is not None and packet.size and _shown(packet) < self._key:
                return []
            self._live = False
            raise _ReadError(_because(error), at=match.at) from error
        return found

    def _check(self, frame: Any, match: _Match) -> None:
        if frame.is_corrupt:
            self._live = False
            why = f"the frame at {frame.pts * self._tick:.6f} s is damaged"
            raise _ReadError(why, at=match.at)

    def convert(self, frame: Any, out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Write a frame as red, green and blue to `out`, uint8 `[3, H, W]`."""
        kind = (frame.format.name, frame.width, frame.height, int(frame.colorspace), int(frame.color_range))
        write = _write_planar if _is_planar_exact(*kind) else _write_packed
        write(self._reformatter, frame, out)


def _write_planar(reformatter: Any, frame: Any, out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    picture = reformatter.reformat(frame, format="gbrp", threads=1)
    for channel, number in _PLANES:
        plane = picture.planes[number]
        pixels = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        np.copyto(out[channel], pixels[: out.shape[1], : out.shape[2]])


def _write_packed(reformatter: Any, frame: Any, out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    plane = reformatter.reformat(frame, format="rgb24", threads=1).planes[0]
    height, width = out.shape[1:]
    pixels = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, : 3 * width]
    for channel in range(3):
        np.copyto(out[channel], pixels[:, channel::3])


@lru_cache(maxsize=256)
def _is_planar_exact(name: str, width: int, height: int, colorspace: int, color_range: int) -> bool:
    """Whether frames convert to planes with the same bytes as to pixels, as other readers convert them.

    That takes half of the time or less. It depends on the size and on the build of FFmpeg, so it is tried with noise.
    """
    av = require("av", "lerobot")
    frame = av.VideoFrame(width, height, name)
    generator = np.random.default_rng(0)
    for plane in frame.planes:
        plane.update(generator.integers(0, 256, plane.buffer_size, dtype=np.uint8).tobytes())
    frame.colorspace, frame.color_range = colorspace, color_range
    planar, packed = (np.empty((3, height, width), np.uint8) for _ in range(2))
    _write_planar(av.video.reformatter.VideoReformatter(), frame, planar)
    _write_packed(av.video.reformatter.VideoReformatter(), frame, packed)
    return bool((planar == packed).all())


class _Match:
    """Assigns frames, which come in the order of time, to the times `[at, end)` of those wanted."""

    def __init__(self, ticks: list[list[int]], at: int, end: int, keep: Callable[[int, Any], None]) -> None:
        self._low, self._exact, self._high = ticks
        self.at, self._end, self._keep = at, end, keep
        self._earlier: Any = None

    def take(self, frame: Any) -> None:
        """Keep the frame for the times to which it is nearest."""
        pts = frame.pts
        while self.at < self._end and pts >= self._exact[self.at]:
            exact = self._exact[self.at]
            earlier = self._earlier
            fits = earlier is not None and self._low[self.at] <= earlier.pts
            if fits and exact - earlier.pts < pts - exact:
                self._keep(self.at, earlier)
            elif self._low[self.at] <= pts <= self._high[self.at]:
                self._keep(self.at, frame)
            else:
                self._raise(f"the next frame is at {pts - exact:+d} units of its time base")
            self.at += 1
        self._earlier = frame

    def finish(self) -> None:
        """Assign the last frame of the file."""
        while self.at < self._end:
            if self._earlier is None or self._earlier.pts < self._low[self.at]:
                self._raise("the video ends before it")
            self._keep(self.at, self._earlier)
            self.at += 1

    def _raise(self, why: str) -> None:
        why = f"no frame is shown within the tolerance of this time, {why}: check the timestamps, or raise tolerance_s"
        raise _NotFoundError(why, at=self.at)


def _shown(packet: Any) -> int:
    """Return when the frame of a packet is shown."""
    return int(packet.dts if packet.pts is None else packet.pts)


def _because(error: Exception) -> str:
    return f"{getattr(error, 'strerror', None) or error}: the file is damaged or cut short"


def _shares(cuts: list[int], size: int, most: int) -> list[int]:
    """Return the bounds of at most `most` shares of `size` frames, about equal, that begin at some of `cuts`."""
    bounds = [0]
    for part in range(1, most):
        at = bisect.bisect_left(cuts, size * part / most)
        if at < len(cuts) and cuts[at] > bounds[-1]:
            bounds.append(cuts[at])
    return [*bounds, size]


class VideoHeader(NamedTuple):
    """What the index of a video file says of its frames."""

    times: NDArray[np.float64]
    """Seconds at which frames are shown `[n]`, in order."""
    height: int
    width: int
    codec: str
    """Name of the codec, such as "h264"; empty if there is no decoder for it."""
    missing: int | None
    """First frame whose bytes lie behind the end of the file; None if all are there."""


def read_header(path: Path) -> VideoHeader:
    """Read the index of a video file; no frame is read.

    Raises:
        OSError, ValueError: if it is not a video.
    """
    av = require("av", "lerobot")
    with av.open(str(path), metadata_errors="replace") as container:
        if not container.streams.video:
            msg = "there is no video in the file"
            raise ValueError(msg)
        stream = container.streams.video[0]
        context = stream.codec_context
        entries = list(stream.index_entries)
        unit = float(stream.time_base)
        ticks = np.array([entry.timestamp for entry in entries], np.int64)
        order = np.argsort(ticks, kind="stable")
        start = stream.start_time or 0
        times = (ticks[order] - (ticks.min() if len(ticks) else 0) + start) * unit
        size = path.stat().st_size
        cut = [number for number, at in enumerate(order) if entries[at].pos + entries[at].size > size]
        codec = "" if context is None else str(context.codec.canonical_name)
        height, width = (0, 0) if context is None else (context.height, context.width)
        return VideoHeader(times, height, width, codec, cut[0] if cut else None)


def gray_frames(path: Path, times: NDArray[np.float64], wanted: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield frames as gray pictures `[H, W]`.

    Args:
        path: the file.
        times: when frames are shown, in seconds.
        wanted: positions in `times`, ascending.

    Raises:
        DamagedFileError: if the next frame is missing or damaged.
    """
    video = _Video(path, threads=0)
    found: list[NDArray[np.uint8]] = []
    try:
        for first in range(0, len(wanted), _TOGETHER):
            ticks = video.ticks(times[list(wanted[first : first + _TOGETHER])], _TOLERANCE_S)
            video.read(ticks, lambda _, frame: found.append(frame.to_ndarray(format="gray")), None)
            yield from found
            found.clear()
    except _ReadError as error:
        yield from found
        raise error.kind(error.why) from error
    finally:
        video.close()
