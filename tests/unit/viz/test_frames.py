"""Frames: the right image at each step, navigation across trajectories, damaged files."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import tools
from ostinato.errors import CheckpointError
from ostinato.viz import Navigator, Position, TrajectoryFolder, read_frame
from ostinato.viz.frames import ALL_CAMERAS
from ostinato.viz.sources import CACHE_SIZE, is_picture, picture_of
from tests.unit.viz.rollouts import file_of, read_stamp, store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("form", ["safetensors", "pkl"])
def test_each_step_shows_its_own_pictures(form: str, tmp_path: Path) -> None:
    source = TrajectoryFolder(store(tmp_path / "a", form=form), allow_pickle=form == "pkl")
    navigator, seen = Navigator(source), []
    while True:
        shown = read_frame(source, navigator.position, ALL_CAMERAS)
        index, step, env = navigator.position
        seen.append((index, step))
        for following, side in enumerate((shown.current, shown.following)):
            blue = env * 50 + following * 5
            stamps = [read_stamp(picture.pixels) for picture in side.pictures]
            assert stamps == [(index, step, blue + extra) for extra in (0, 10, 20, 21)]
            assert [p.camera for p in side.pictures][2:] == ["extra_view_images [0]", "extra_view_images [1]"]
        facts = dict(shown.facts)
        assert facts["step"] == f"{step} of {shown.steps}"
        assert float(facts["reward"]) == pytest.approx(index + step / 100)
        assert facts["done"] == ("yes (terminated)" if step == shown.steps - 1 else "no")
        assert facts["action"] == f"[{', '.join([f'{step / 10:.4g}'] * 4)}]"
        assert facts["task"] == f"task of {env}"
        if not navigator.next():
            break
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    back = [navigator.position[:2]]
    while navigator.previous():
        back.append(navigator.position[:2])
    assert back == seen[::-1]


def test_cameras_vectors_and_timelines(tmp_path: Path) -> None:
    source = TrajectoryFolder(store(tmp_path / "a"))
    shown = read_frame(source, Position(2, 1, 1))
    assert [picture.camera for picture in shown.current.pictures] == ["main_images"]
    assert shown.timeline is not None
    assert shown.timeline.reward is not None
    assert shown.timeline.action is not None
    assert shown.timeline.reward.values[:, 0] == pytest.approx([2.0, 2.01, 2.02, 2.03])
    assert shown.timeline.ends.tolist() == [3]
    assert shown.timeline.action.values[:, 0] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert read_stamp(read_frame(source, Position(0, 1, 1), "wrist_images").following.pictures[0].pixels) == (0, 1, 65)
    assert len(read_frame(source, Position(), "extra_view_images").current.pictures) == 2
    states = read_frame(source, Position(0, 1, 1), "states").following
    assert not states.pictures
    assert states.traces[0].values[:, 0].tolist() == [0.5, 1.5, 2.5]
    missing = read_frame(source, Position(), "left_images").current
    assert missing.note.startswith("no observation left_images; available: states, main_images")
    shown = read_frame(TrajectoryFolder(store(tmp_path / "states", images=False)), Position(2, 0, 0))
    assert not shown.current.pictures
    assert [(trace.name, trace.values.shape) for trace in shown.current.traces] == [("states", (4, 3))]
    shown = read_frame(TrajectoryFolder(store(tmp_path / "b", next_obs=None)), Position())
    assert [picture.camera for picture in shown.current.pictures] == ["main_images"]
    assert (shown.following.title, [trace.name for trace in shown.following.traces]) == ("vectors", ["states"])
    odd = store(
        tmp_path / "odd",
        [(2, 1)],
        next_obs=None,
        images=False,
        rewards=torch.full((2, 1, 1), 2).bfloat16(),
        actions=torch.ones(2, 1, 20, dtype=torch.int64),
    )
    shown = read_frame(TrajectoryFolder(odd), Position())
    assert shown.following.note == "not stored"
    facts = dict(shown.facts)
    assert (facts["reward"], facts["action"]) == ("2", "[1, 1, 1, 1, 1, 1, 1, 1, ... (20 in all)]")


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ("gone", "pt"),
        ("cut", "safetensors"),
        ("garbage", "pt"),
        ("empty", "safetensors"),
        ("other shape", "safetensors"),
    ],
)
def test_a_broken_file_shows_as_such_and_the_rest_goes_on(how: str, form: str, tmp_path: Path) -> None:
    path = store(tmp_path / "a", form=form)
    bad = file_of(path, 1)
    if how == "gone":
        bad.unlink()
    elif how == "other shape":
        shutil.copy(file_of(path, 2), bad)
    else:
        data = bad.read_bytes()
        bad.write_bytes({"cut": data[: len(data) // 2], "garbage": b"\x07" * len(data), "empty": b""}[how])
    source = TrajectoryFolder(path)
    navigator = Navigator(source, Position(0, 2))
    assert navigator.next()
    assert navigator.position == Position(1, 0, 0)
    shown = read_frame(source, navigator.position)
    assert bad.name in shown.problem
    assert shown.timeline is None
    assert dict(shown.facts) == {"problem": shown.problem}
    assert navigator.next()
    assert navigator.position == Position(2, 0, 0)
    assert read_frame(source, navigator.position).problem == ""
    if how in {"gone", "cut", "empty"}:
        assert source.returns(1) is None
    assert source.returns(2) == pytest.approx(8.06)


def test_a_file_that_comes_back_is_shown_and_one_that_goes_is_not(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    bad = file_of(path, 1)
    bad.rename(tmp_path / "aside")
    source = TrajectoryFolder(path)
    assert read_frame(source, Position(1)).problem
    (tmp_path / "aside").rename(bad)
    assert read_stamp(read_frame(source, Position(1)).current.pictures[0].pixels) == (1, 0, 0)
    bad.unlink()
    assert "missing" in read_frame(source, Position(1)).problem  # its header is in the cache, its pictures are not


def test_flags_with_leading_rows_pair_up(tmp_path: Path) -> None:
    done = torch.zeros(7, 1, 1, dtype=torch.bool)
    done[[0, 3]] = True  # row 0 precedes step 0, row 3 is of step 2
    path = store(tmp_path / "a", [(6, 1)], dones=done, terminations=None)
    source = TrajectoryFolder(path)
    assert [dict(read_frame(source, Position(0, step)).facts)["done"] for step in range(6)] == [
        "no",
        "no",
        "yes",
        *["no"] * 3,
    ]


def test_pickles_need_a_flag_and_an_empty_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="allow_pickle"):
        TrajectoryFolder(store(tmp_path / "a", form="pkl"))
    with pytest.raises(CheckpointError, match="no trajectories at"):
        TrajectoryFolder(tmp_path)
    with pytest.raises(CheckpointError, match="has no trajectories"):
        TrajectoryFolder(store(tmp_path / "b", []))


def test_few_trajectories_stay_open_and_hold_no_pictures(tmp_path: Path) -> None:
    source = TrajectoryFolder(store(tmp_path / "a", [(2, 1)] * 9))
    first = source.open(0)
    for index in range(9):
        read_frame(source, Position(index), ALL_CAMERAS)
    assert source.open(8) is source.open(8)
    assert source.open(8 - CACHE_SIZE + 1) is source.open(8 - CACHE_SIZE + 1)
    assert source.open(0) is not first
    columns: Any = source.open(8).columns
    assert all(tensor.nbytes < 100 for tensor in columns._whole.values())


def test_jumps_go_by_id_where_ids_have_gaps(tmp_path: Path) -> None:
    path = store(tmp_path / "a", [(2, 1)] * 4)
    tools.split(path, tmp_path / "first", 2, move=True)
    source = TrajectoryFolder(path)
    assert source.ids == (2, 3)
    navigator = Navigator(source)
    assert navigator.jump(3)
    assert navigator.position == Position(1, 0, 0)
    assert not navigator.jump(1)
    assert navigator.position == Position(1, 0, 0)
    assert read_stamp(read_frame(source, navigator.position).current.pictures[0].pixels)[0] == 3


def test_pictures_of_all_kinds_become_rgb() -> None:
    assert all(map(is_picture, [(8, 8, 3), (2, 8, 8, 3), (3, 64, 64), (4, 84, 84)]))
    assert not any(map(is_picture, [(8,), (8, 8), (2, 3, 3), (0, 8, 3)]))
    grey = picture_of(np.full((8, 8, 1), 7, dtype=np.uint8))
    assert grey[0].shape == (8, 8, 3)
    assert (grey[0] == 7).all()
    planes = np.stack([np.full((8, 8), value, dtype=np.uint8) for value in (1, 2, 3)])
    assert read_stamp(picture_of(planes)[0]) == (1, 2, 3)
    frames = np.stack([np.full((8, 8), value, dtype=np.uint8) for value in (1, 2, 3, 4)])
    assert [read_stamp(view)[0] for view in picture_of(frames)] == [1, 2, 3, 4]
    assert read_stamp(picture_of(np.full((8, 8, 3), 0.5, dtype=np.float32))[0]) == (127, 127, 127)
    assert read_stamp(picture_of(np.full((8, 8, 4), 200.0))[0]) == (200, 200, 200)
    assert read_stamp(picture_of(np.full((8, 8, 3), np.nan))[0]) == (0, 0, 0)
