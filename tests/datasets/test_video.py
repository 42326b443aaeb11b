"""Columns of video frames: every frame equals that of a linear decode, from any file, in any order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.datasets.cache import BlockCache
from ostinato.datasets.open import Reading
from ostinato.datasets.video import VideoColumn
from ostinato.errors import DamagedFileError, MissingFileError, SchemaError

from .videos import decode_video, pictures, write_video

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FPS = 30
ROWS = 40


@dataclass(frozen=True)
class Spans:
    """Rows that lie in several files, one frame after the other from `starts` seconds on."""

    ends: torch.Tensor
    starts: torch.Tensor
    fps: float

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        files = torch.searchsorted(self.ends, rows, right=True)
        first = torch.cat([torch.zeros(1, dtype=torch.int64), self.ends])[files]
        return files, self.starts[files] + (rows - first).double() / self.fps


def say(row: int) -> str:
    """Name a row in messages."""
    return f"episode {row // 10}, frame {row % 10}"


def column(paths: list[Path], lengths: list[int], shape: tuple[int, ...], **options: Any) -> VideoColumn:
    """Return a column over files, all of whose frames are rows."""
    ends = torch.tensor(list(itertools.accumulate(lengths)))
    starts = options.pop("starts", torch.zeros(len(lengths), dtype=torch.float64))
    fps = options.pop("fps", FPS)
    reading = Reading(BlockCache(1 << 20), options.pop("num_threads", 2), options.pop("tolerance_s", 1e-4))
    return VideoColumn(paths, Spans(ends, starts, fps), (3, shape[0], shape[1]), say, reading, fps)


def read(videos: VideoColumn, rows: Any) -> NDArray[np.uint8]:
    """Return frames as an array."""
    frames: NDArray[np.uint8] = videos.start(torch.as_tensor(rows, dtype=torch.int64))().numpy()
    return frames


KINDS = [
    ("libx264", 1, 0, (32, 48)),
    ("libx264", 2, 0, (32, 48)),
    ("libx264", 10, 2, (34, 50)),
    ("libx264", 250, 2, (33, 47)),
    ("libx265", 10, 2, (64, 80)),
    ("libx265", 250, 0, (64, 80)),
    ("libsvtav1", 2, 0, (64, 64)),
    ("libsvtav1", 10, 0, (66, 70)),
    ("mpeg4", 2, 2, (32, 48)),
    ("mpeg4", 250, 0, (32, 48)),
]


class Film(NamedTuple):
    """Two files of one kind, and their frames, decoded in order."""

    paths: list[Path]
    frames: NDArray[np.uint8]
    lengths: list[int]

    def open(self, **options: Any) -> VideoColumn:
        return column(self.paths, self.lengths, self.frames.shape[2:], **options)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind[:3])))
def film(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Film:
    codec, keyframes, b_frames, (height, width) = request.param
    folder = tmp_path_factory.mktemp("films")
    paths = [folder / "a.mp4", folder / "b.mp4"]
    for seed, path in enumerate(paths):
        frames = pictures(ROWS, height, width, seed=seed)
        write_video(path, frames, fps=FPS, codec=codec, keyframes=keyframes, b_frames=b_frames)
    decoded = [decode_video(path) for path in paths]
    assert [len(frames) for frames in decoded] == [ROWS, ROWS]
    return Film(paths, np.concatenate(decoded), [ROWS, ROWS])


ROW_SETS = st.lists(st.integers(0, 2 * ROWS - 1), max_size=30)
WINDOWS = st.lists(st.integers(0, 2 * ROWS - 8), min_size=1, max_size=5).map(
    lambda starts: [start + step for start in starts for step in range(8)]
)


def test_random_rows_equal_a_linear_decode(film: Film) -> None:
    videos = film.open()

    @given(ROW_SETS | WINDOWS)
    def check(rows: list[int]) -> None:
        got = read(videos, rows)
        assert got.shape == (len(rows), *film.frames.shape[1:])
        np.testing.assert_array_equal(got, film.frames[rows])

    check()
    assert 1 <= len(videos.videos.handles) <= 4
    videos.close()
    assert len(videos.videos.handles) == 0
    np.testing.assert_array_equal(read(videos, [3, 2]), film.frames[[3, 2]])
    videos.close()


def test_reading_on_does_not_begin_anew(film: Film) -> None:
    videos = film.open(num_threads=1)
    for first in range(0, 2 * ROWS, 5):
        rows = list(range(first, first + 5))
        np.testing.assert_array_equal(read(videos, rows), film.frames[rows])
    videos.close()


def test_a_missing_file_and_a_missing_frame_are_named(film: Film, tmp_path: Path) -> None:
    gone = column([tmp_path / "no.mp4"], [ROWS], film.frames.shape[2:])
    with pytest.raises(MissingFileError, match=r"no\.mp4: episode 1, frame 2, shown at 0\.400000 s.*missing"):
        read(gone, [12])
    longer = column(film.paths[:1], [ROWS + 5], film.frames.shape[2:])
    with pytest.raises(DamagedFileError, match=r"a\.mp4: episode 4, frame 1.*the video ends before it"):
        read(longer, [3, 41, 42])
    shifted = column(film.paths[:1], [ROWS], film.frames.shape[2:], starts=torch.tensor([0.01], dtype=torch.float64))
    with pytest.raises(DamagedFileError, match="no frame is shown within the tolerance"):
        read(shifted, [5])
    other = column(film.paths[:1], [ROWS], (16, 16))
    with pytest.raises(SchemaError, match="pixels, the dataset promises 16 x 16"):
        read(other, [5])
