"""Small videos: pictures that tell their rows apart, encoded and decoded with PyAV alone."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import av
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

os.environ.setdefault("SVT_LOG", "1")  # errors only


def pictures(rows: int, height: int, width: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Return `[rows, height, width, 3]`: smooth pictures that move, with the row number in black and white blocks.

    The blocks survive lossy codecs: two rows never decode to the same picture (up to 2**16 rows).
    """
    generator = np.random.default_rng(seed)
    phase = generator.uniform(0, 6, 3)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    time = np.arange(rows, dtype=np.float32)[:, None, None, None]
    waves = (
        (y / height)[None, :, :, None] * 5 + (x / width)[None, :, :, None] * 3 + time * 0.3 + phase.astype(np.float32)
    )
    frames: NDArray[np.uint8] = (127.5 + 120 * np.sin(waves)).astype(np.uint8)
    size = max(2, min(height, width) // 4)
    for bit in range(16):
        top, left = size * (bit // 4), size * (bit % 4)
        on = (np.arange(rows) >> bit & 1).astype(np.uint8) * 255
        frames[:, top : top + size, left : left + size] = on[:, None, None, None]
    return frames


def write_video(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],
    *,
    fps: int = 10,
    codec: str = "libx264",
    keyframes: int = 2,
    b_frames: int = 0,
    crf: int = 23,
) -> None:
    """Write frames `[H, W, 3]`, or an array of them, as one MP4 with a keyframe at least every `keyframes` frames.

    `codec` is an encoder of PyAV: libx264, libx265 (sides that are multiples of 16, at least 64), libsvtav1 or
    mpeg4.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    images = iter(frames)
    first = next(images)
    height, width = first.shape[:2]
    odd = height % 2 or width % 2
    if codec == "libx265" and (height % 16 or width % 16 or min(height, width) < 64):
        message = "libx265 corrupts memory where a side is below 64, or no multiple of 16"
        raise ValueError(message)
    x265 = f"log-level=none:pools=1:frame-threads=1:keyint={keyframes}:min-keyint=1"
    speed = {
        "libx264": {"preset": "veryfast", "sc_threshold": "0", "threads": "1"},
        "libx265": {"preset": "ultrafast", "x265-params": x265},
        "libsvtav1": {"preset": "12", "svtav1-params": "lp=1"},
    }
    options = {"g": str(keyframes), "bf": str(b_frames), "crf": str(crf), **speed.get(codec, {})}
    if codec == "mpeg4":
        options = {"g": str(keyframes), "bf": str(b_frames), "qscale": "2"}
    from ostinato.core.processes import kept_scheduling  # here: the benchmarks import this module without Ostinato

    with kept_scheduling(), av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if odd and codec == "libx264" else "yuv420p"
        for frame in itertools.chain([first], images):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def decode_video(path: Path) -> NDArray[np.uint8]:
    """Return all frames of a file `[T, 3, H, W]`, decoded in order from the beginning."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.ascontiguousarray(np.stack(frames).transpose(0, 3, 1, 2))


def keyframes_of(path: Path) -> list[int]:
    """Return the places, in the order of display, of the keyframes of a file."""
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.pts is not None]
    return [n for n, packet in enumerate(sorted(packets, key=lambda packet: packet.pts or 0)) if packet.is_keyframe]
