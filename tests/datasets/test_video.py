"""Columns of video frames: every frame equals that of a linear decode, from any file, in any order."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.processes import kept_scheduling
from ostinato.datasets.cache import BlockCache
from ostinato.datasets.format import Reading
from ostinato.datasets.video import VideoColumn, read_header
from ostinato.errors import DamagedFileError, MissingFileError, SchemaError

from .videos import decode_video, keyframes_of, pictures, write_video

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FPS = 30
ROWS = 40


@dataclass(frozen=True)
class Placed:
    """The file of each row, and when it is shown there."""

    files: torch.Tensor
    seconds: torch.Tensor

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.files[rows], self.seconds[rows]


def following(*lengths: int, first: float = 0.0) -> Placed:
    """Rows that are the frames of files, one after the other."""
    files = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    steps = torch.cat([torch.arange(length) for length in lengths])
    return Placed(files, first + steps.double() / FPS)


def at(seconds: torch.Tensor) -> Placed:
    """Rows of one file, at any times."""
    return Placed(torch.zeros(len(seconds), dtype=torch.int64), seconds)


def say(row: int) -> str:
    """Name a row in messages."""
    return f"episode {row // 10}, frame {row % 10}"


def column(paths: list[Path], placed: Placed, shape: tuple[int, ...] = (64, 80), **options: Any) -> VideoColumn:
    fps = options.pop("fps", FPS)
    reading = Reading(BlockCache(1 << 20), options.pop("num_threads", 2), options.pop("tolerance_s", 1e-4))
    return VideoColumn(paths, placed, (3, shape[0], shape[1]), say, reading, fps)


def read(videos: VideoColumn, rows: Any) -> NDArray[np.uint8]:
    """Return frames as an array."""
    frames: NDArray[np.uint8] = videos.start(torch.as_tensor(rows, dtype=torch.int64))().numpy()
    return frames


KINDS = [
    ("libx264", 1, 0, (32, 48)),
    ("libx264", 250, 2, (33, 47)),
    ("libx265", 10, 2, (64, 80)),
    ("libsvtav1", 10, 0, (66, 70)),
    ("mpeg4", 2, 2, (32, 48)),
]


class Film(NamedTuple):
    """Two files of one kind, and their frames, decoded in order."""

    paths: list[Path]
    frames: NDArray[np.uint8]

    def open(self, **options: Any) -> VideoColumn:
        return column(self.paths, following(ROWS, ROWS), self.frames.shape[2:], **options)


def filmed(folder: Path, size: tuple[int, int], **options: Any) -> Film:
    paths = [folder / "a.mp4", folder / "b.mp4"]
    for seed, path in enumerate(paths):
        write_video(path, pictures(ROWS, *size, seed=seed), fps=FPS, **options)
    return Film(paths, np.concatenate([decode_video(path) for path in paths]))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind[:3])))
def film(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Film:
    codec, keyframes, b_frames, size = request.param
    made = filmed(tmp_path_factory.mktemp("films"), size, codec=codec, keyframes=keyframes, b_frames=b_frames)
    for path, frames in zip(made.paths, np.split(made.frames, 2), strict=True):
        assert len(np.unique(frames.reshape(ROWS, -1), axis=0)) == ROWS
        assert (len(keyframes_of(path)) > 1) == (keyframes < ROWS)
    return made


ROW_SETS = st.lists(st.integers(0, 2 * ROWS - 1), max_size=30)
WINDOWS = st.lists(st.integers(0, 2 * ROWS - 8), min_size=1, max_size=5).map(
    lambda starts: [start + step for start in starts for step in range(8)]
)


def test_random_rows_equal_a_linear_decode(film):
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
    for first in range(0, 2 * ROWS, 5):  # reading on
        rows = list(range(first, first + 5))
        np.testing.assert_array_equal(read(videos, rows), film.frames[rows])
    videos.close()


# -- other kinds of files ----------------------------------------------------------------------------------------------

X265 = "log-level=none:pools=1:frame-threads=1:open-gop=1:keyint=10:min-keyint=10:bframes=3:b-adapt=0"
X264 = "open-gop=1:keyint=10:min-keyint=10:bframes=3:b-pyramid=normal:scenecut=0:threads=1"
EVEN = [n * 512 for n in range(ROWS)]
UNEVEN = np.cumsum(np.random.default_rng(3).integers(200, 2000, ROWS)).tolist()
PLAIN = {"g": "10", "bf": "2", "threads": "1"}
FILES: dict[str, tuple[str, list[int], dict[str, str], dict[str, str]]] = {
    "open_gop.mp4": ("libx264", EVEN, {"x264-params": X264}, {}),
    "open_gop_hevc.mp4": ("libx265", EVEN, {"preset": "ultrafast", "x265-params": X265}, {}),
    "refresh.mp4": ("libx264", EVEN, {"x264-params": "intra-refresh=1:keyint=10:bframes=0:scenecut=0:threads=1"}, {}),
    "uneven.mkv": ("libx264", UNEVEN, PLAIN, {}),
    "late.mp4": ("libx264", [pts + 51200 for pts in UNEVEN], PLAIN, {}),
    "fragments.mp4": ("libx264", EVEN, PLAIN, {"movflags": "frag_keyframe+empty_moov"}),
    "negative.mp4": ("libx264", EVEN, PLAIN, {"movflags": "negative_cts_offsets"}),
    "av1.mkv": ("libsvtav1", EVEN, {"g": "10", "preset": "12", "svtav1-params": "lp=1"}, {}),
}


def write_frames(path: Path, codec: str, pts: list[int], options: dict[str, str], container: dict[str, str]) -> None:
    """Write frames `[64, 80]` that are shown at given times, in units of 1 / 15360 s."""
    with kept_scheduling(), av.open(str(path), "w", options=container) as output:
        stream: Any = output.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = 80, 64, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 15360)
        for picture, shown in zip(pictures(len(pts), 64, 80), pts, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = shown, Fraction(1, 15360)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def shown(path: Path) -> tuple[torch.Tensor, NDArray[np.uint8]]:
    """Return the times and the frames of a file, decoded in order."""
    with av.open(str(path)) as container:
        base = container.streams.video[0].time_base or Fraction(1)
        times = [float((frame.pts or 0) * base) for frame in container.decode(video=0)]
    return torch.tensor(times, dtype=torch.float64), decode_video(path)


@pytest.mark.parametrize("name", FILES)
def test_frames_are_found_by_their_time(name, tmp_path):
    path = tmp_path / name
    write_frames(path, *FILES[name])
    seconds, frames = shown(path)
    assert len(frames) == ROWS
    generator = np.random.default_rng(0)
    for fps in (FPS, None):
        videos = column([path], at(seconds), fps=fps)
        for size in generator.integers(1, 8, 30):
            rows = generator.integers(0, ROWS, size)
            np.testing.assert_array_equal(read(videos, rows), frames[rows])
        videos.close()


def test_the_nearest_frame_within_the_tolerance_is_chosen(tmp_path):
    path = tmp_path / "a.mp4"
    write_frames(path, "libx264", EVEN, PLAIN, {})
    seconds, frames = shown(path)
    every = np.arange(ROWS)
    for shift in (-0.016, -0.004, 0.004, 0.016):  # frames are 0.0333 s apart
        videos = column([path], at(seconds + shift), tolerance_s=0.02)
        for rows in (every, every[::-3].copy(), *every[7:20, None]):  # the last ones go on where others ended
            np.testing.assert_array_equal(read(videos, rows), frames[rows])
        near = column([path], at(seconds + shift), tolerance_s=0.003)
        with pytest.raises(DamagedFileError, match="no frame is shown within the tolerance"):
            read(near, [10])


CUTS = [
    ("libx264", {}, "a.mp4"),
    ("libx264", {"movflags": "faststart"}, "a.mp4"),
    ("libsvtav1", {"movflags": "frag_keyframe+empty_moov"}, "a.mp4"),
    ("libx264", {}, "a.mkv"),
]


@pytest.mark.parametrize(("codec", "container", "name"), CUTS)
def test_a_file_cut_short_gives_the_right_frames_or_an_error(codec, container, name, tmp_path):
    whole, path = tmp_path / name, tmp_path / f"cut_{name}"
    options = {"g": "10", "preset": "12", "svtav1-params": "lp=1"} if codec == "libsvtav1" else PLAIN
    write_frames(whole, codec, EVEN, options, container)
    seconds, frames = shown(whole)
    data = whole.read_bytes()
    right = wrong = 0
    for size in [*range(0, len(data), len(data) // 12), len(data) - 1]:
        path.write_bytes(data[:size])
        videos = column([path], at(seconds))
        for rows in ([0], [13], [ROWS - 1], list(range(8, 16))):
            try:
                got = read(videos, rows)
            except DamagedFileError as error:
                wrong += f"{path}: episode" in str(error)
            else:
                np.testing.assert_array_equal(got, frames[rows])
                right += 1
    assert wrong > 6
    assert right > 0 or container == {}


def test_an_unknown_codec_is_an_error(tmp_path):
    path = tmp_path / "a.mp4"
    write_frames(path, "libx264", EVEN, PLAIN, {})
    seconds, _ = shown(path)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzzz"))
    with pytest.raises(DamagedFileError, match=r"a\.mp4: episode 0, frame 3.*lacks the codec"):
        read(column([path], at(seconds)), [3])


def test_text_in_a_file_that_is_not_utf_8_is_no_error(tmp_path):
    path = tmp_path / "a.mp4"
    write_frames(path, "libx264", EVEN, PLAIN, {})
    seconds, frames = shown(path)
    path.write_bytes(path.read_bytes().replace(b"Lavf", b"\xf1\xf2\xf3\xf4"))
    np.testing.assert_array_equal(read(column([path], at(seconds)), [3]), frames[[3]])
    assert len(read_header(path).times) == len(frames)


# -- threads and processes ---------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Film:
    return filmed(tmp_path, (32, 48), keyframes=10, b_frames=2)


def test_an_error_of_one_thread_names_the_frame_and_the_next_read_works(two):
    one, size = two.paths[:1], (32, 48)
    videos = column([*one, two.paths[1].with_name("no.mp4")], following(ROWS, ROWS), size)
    for _ in range(3):
        with pytest.raises(MissingFileError, match=r"no\.mp4: episode 5, frame 0, shown at 0\.333333 s.*missing"):
            read(videos, [1, 50, 3, 20])
        np.testing.assert_array_equal(read(videos, [1, 3]), two.frames[[1, 3]])
    for wrong, rows, message in (
        (column(one, following(ROWS + 5), size), [3, 41, 42], r"a\.mp4: episode 4, frame 1.*ends before it"),
        (column(one, following(ROWS, first=0.01), size), [5], "no frame is shown within the tolerance"),
        (column(one, following(ROWS), (16, 16)), [5], "pixels, the dataset promises 16 x 16"),
    ):
        with pytest.raises((DamagedFileError, SchemaError), match=message):
            read(wrong, rows)
