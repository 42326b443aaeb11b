"""The builders of datasets write what they say: rows in order, pictures that differ, keyframes at their distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")

from .builders import decode_video, keyframes_of, lerobot_v3, pictures, write_video

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("codec", ["libx264", "libx265", "libsvtav1", "mpeg4", "ffv1"])
@pytest.mark.parametrize(("keyframes", "b_frames"), [(1, 0), (10, 2), (250, 0)])
def test_frames_decode_in_the_order_in_which_they_were_written(
    tmp_path: Path, codec: str, keyframes: int, b_frames: int
) -> None:
    frames = pictures(21, 64, 80)
    write_video(tmp_path / "a.mp4", frames, codec=codec, keyframes=keyframes, b_frames=b_frames)
    decoded = decode_video(tmp_path / "a.mp4").transpose(0, 2, 3, 1)
    distance = np.abs(decoded[:, None].astype(int) - frames[None]).mean((2, 3, 4))
    assert distance.argmin(1).tolist() == list(range(21))
    assert len(np.unique(decoded.reshape(21, -1), axis=0)) == 21
    assert len(keyframes_of(tmp_path / "a.mp4")) == -(-21 // keyframes)


def test_cameras_have_files_and_times_of_their_own(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    model = lerobot_v3(
        tmp_path,
        lengths=(3, 4, 2, 5),
        cameras={"top": (32, 32), "wrist": (32, 48)},
        episodes_per_video={"top": 3, "wrist": 1},
        files_per_chunk=2,
        skipped_frames={"top": 2},
    )
    table = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert table["videos/top/from_timestamp"] == pytest.approx([0.2, 0.5, 0.9, 0.2])
    assert table["videos/wrist/from_timestamp"] == [0, 0, 0, 0]
    assert table["videos/wrist/chunk_index"] == [0, 0, 1, 1]
    assert table["videos/wrist/file_index"] == [0, 1, 0, 1]
    second = decode_video(tmp_path / "videos/top/chunk-000/file-001.mp4")
    np.testing.assert_array_equal(second[2:], model.columns["top"][9:])
    assert model.columns["wrist"].shape == (14, 3, 32, 48)
    assert (model.starts, model.ends) == ([0, 3, 7, 9], [3, 7, 9, 14])
