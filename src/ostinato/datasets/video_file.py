"""One video file: its header, and frames of it as gray pictures, without assuming that either is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ostinato._optional import require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


class BrokenFrameError(Exception):
    """A frame that cannot be decoded."""

    def __init__(self, frame: int, why: str) -> None:
        super().__init__(f"frame {frame}: {why}")
        self.frame = frame
        self.why = why


class VideoHeader(NamedTuple):
    """What the index of a video file says of its frames."""

    times: NDArray[np.float64]
    """Seconds at which frames are shown `[n]`, in order."""
    keyframes: NDArray[np.int64]
    """Positions of the frames that can be decoded alone."""
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
    with av.open(str(path)) as container:
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
        keys = np.flatnonzero([entries[at].is_keyframe for at in order]) if entries else np.zeros(0, np.int64)
        size = path.stat().st_size
        cut = [number for number, at in enumerate(order) if entries[at].pos + entries[at].size > size]
        codec = "" if context is None else str(context.codec.canonical_name)
        height, width = (0, 0) if context is None else (context.height, context.width)
        return VideoHeader(times, keys, height, width, codec, cut[0] if cut else None)


def gray_frames(path: Path, header: VideoHeader, wanted: list[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield frames as gray pictures `[H, W]` with their positions, in ascending order.

    Args:
        path: the file.
        header: of the file.
        wanted: positions of frames, ascending.

    Raises:
        BrokenFrameError: if a frame is missing or damaged. Frames after it are not read.
    """
    av = require("av", "lerobot")
    remaining = list(wanted)
    with av.open(str(path)) as container:
        stream: Any = container.streams.video[0]
        stream.thread_type = "AUTO"
        unit, step = float(stream.time_base), _half_step(header.times)
        at = -1
        while remaining:
            target = remaining[0]
            _seek(container, stream, header, target, unit)
            try:
                for frame in container.decode(stream):
                    if frame.pts is None:
                        continue
                    at = int(np.abs(header.times - frame.pts * unit).argmin())
                    if abs(header.times[at] - frame.pts * unit) > step or at > target:
                        break
                    if at == target:
                        if frame.is_corrupt:
                            raise BrokenFrameError(target, "its data is damaged")
                        yield target, frame.to_ndarray(format="gray")
                        remaining.pop(0)
                        if not remaining or _seeks(header, target, remaining[0]):
                            break
                        target = remaining[0]
                else:
                    at = len(header.times)
            except av.error.FFmpegError as error:
                raise BrokenFrameError(target, str(error)) from error
            if remaining and remaining[0] == target:
                raise BrokenFrameError(target, "the decoder does not return it")


def _half_step(times: NDArray[np.float64]) -> float:
    return float(np.median(np.diff(times)) / 2) if len(times) > 1 else 0.5


def _seeks(header: VideoHeader, now: int, target: int) -> bool:
    """Whether a keyframe lies between two positions: it is quicker to begin there."""
    between = (header.keyframes > now + 8) & (header.keyframes <= target)
    return bool(between.any())


def _seek(container: Any, stream: Any, header: VideoHeader, target: int, unit: float) -> None:
    container.seek(max(0, round(header.times[target] / unit)), stream=stream, backward=True, any_frame=False)
