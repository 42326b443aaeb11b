"""LeRobot datasets for the benchmarks, written once under build/recordings; both libraries read the same files.

The videos are as LeRobot's writer encodes them by default: AV1, a keyframe every second frame, quality 30, 30 frames/s.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tests.datasets.builders import lerobot_v3
from tests.datasets.videos import pictures, write_video

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

FPS: Final = 30
FRAMES: Final = 8
"""Frames of a window of each camera: the frame of the row drawn and those before it."""
CAMERAS: Final = ("observation.images.top", "observation.images.wrist")
STATE: Final = "observation.state"
SIZES: Final = {"96": (96, 96), "480": (480, 640)}
_EPISODE: Final = 50
"""Rows of an episode with cameras; the last one has those that are left."""
_FOLDER: Final = Path(__file__).resolve().parents[1] / "build" / "recordings"


def offsets(kind: str) -> dict[str, list[float]]:
    """Return `delta_timestamps` of a workload: windows of both cameras, or of the state where there is no camera."""
    keys = CAMERAS if kind.partition("-")[0] in SIZES else (STATE,)
    return {key: [n / FPS for n in range(1 - FRAMES, 1)] for key in keys}


def recording(kind: str, rows: int) -> Path:
    """Return the folder of a dataset of `rows` rows: `96` and `480` with two cameras, `open` with short episodes."""
    name = kind.partition("-")[0]
    folder = _FOLDER / f"{name}-{rows}"
    if not folder.exists():
        part = _FOLDER / f"{folder.name}.{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        if name in SIZES:
            _with_cameras(part, rows, *SIZES[name])
        else:
            lerobot_v3(part, lengths=[10] * (rows // 10), fps=FPS, episodes_per_file=2500)
        part.rename(folder)
    return folder


def _with_cameras(folder: Path, rows: int, height: int, width: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = [min(_EPISODE, rows - start) for start in range(0, rows, _EPISODE)]
    lerobot_v3(folder, lengths=lengths, fps=FPS, episodes_per_file=len(lengths))
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet")
    starts = np.cumsum([0, *lengths]) / FPS
    for number, key in enumerate(CAMERAS):
        info["features"][key] = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
        }
        video = folder / f"videos/{key}/chunk-000/file-000.mp4"
        frames = _frames(lengths, height, width, number)
        write_video(video, frames, fps=FPS, codec="libsvtav1", keyframes=2, crf=30)
        columns: dict[str, Any] = {"chunk_index": [0] * len(lengths), "file_index": [0] * len(lengths)}
        columns |= {"from_timestamp": starts[:-1], "to_timestamp": starts[1:]}
        for name, values in columns.items():
            episodes = episodes.append_column(f"videos/{key}/{name}", pa.array(values))
    path.write_text(json.dumps(info))
    pq.write_table(episodes, folder / "meta/episodes/chunk-000/file-000.parquet")


def _frames(lengths: list[int], height: int, width: int, camera: int) -> Iterator[NDArray[np.uint8]]:
    """Pictures that move before a texture, about 10 kB of video a frame of 480x640; flat ones would decode faster."""
    texture = np.random.default_rng(camera).integers(0, 16, (64, 64, 3), dtype=np.uint8)
    texture = np.tile(texture, (height // 64 + 1, width // 64 + 1, 1))[:height, :width]
    for episode, length in enumerate(lengths):
        moving = pictures(length, height, width, seed=episode * len(CAMERAS) + camera)
        yield from moving // 8 * 7 + texture
