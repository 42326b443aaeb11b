"""Frames: the right image at each step, navigation across trajectories, damaged files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ostinato import tools
from ostinato.errors import CheckpointError
from ostinato.viz import Navigator, Position, TrajectoryFolder, read_frame
from ostinato.viz.frames import ALL_CAMERAS
from ostinato.viz.sources import is_picture, picture_of
from tests.unit.viz.rollouts import file_of, read_stamp, store


@pytest.mark.parametrize("form", ["safetensors", "pkl"])
def test_each_step_shows_its_own_pictures(form, tmp_path):
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


def test_fields_that_are_missing_or_odd(tmp_path):
    done = torch.zeros(7, 1, 1, dtype=torch.bool)
    done[[0, 3]] = True  # row 0 precedes step 0, row 3 is of step 2
    odd: dict[str, Any] = {
        "rewards": torch.full((6, 1, 1), 2).bfloat16(),
        "actions": torch.ones(6, 1, 20, dtype=torch.int64),
        "extra": {"empty": "", "nothing": [], "words": ["a", "b"]},
    }
    path = store(tmp_path / "a", [(6, 1)], dones=done, terminations=None, next_obs=None, images=False, **odd)
    source = TrajectoryFolder(path)
    shown = read_frame(source, Position())
    assert [(trace.name, trace.values.shape) for trace in shown.current.traces] == [("states", (6, 3))]
    assert shown.following.note == "not stored"
    assert read_frame(source, Position(), "left_images").current.note == "no observation left_images; available: states"
    facts = dict(shown.facts)
    assert (facts["reward"], facts["action"]) == ("2", "[1, 1, 1, 1, 1, 1, 1, 1, ... (20 in all)]")
    assert facts["task"] == "task of 0"
    assert "nothing" not in facts
    ends = [dict(read_frame(source, Position(0, step)).facts)["done"] for step in range(6)]
    assert ends == ["no", "no", "yes", "no", "no", "no"]
    with pytest.raises(CheckpointError):
        TrajectoryFolder(store(tmp_path / "b", []))


@pytest.mark.parametrize(
    ("how", "form"), [("gone", "pt"), ("cut", "safetensors"), ("garbage", "pt"), ("swapped", "pt")]
)
def test_a_broken_file_shows_as_such_and_the_rest_goes_on(how, form, tmp_path):
    path = store(tmp_path / "a", form=form)
    bad = file_of(path, 1)
    data = bad.read_bytes()
    other = file_of(path, 2).read_bytes()
    bad.write_bytes({"cut": data[: len(data) // 2], "garbage": b"\x07" * len(data), "swapped": other}.get(how, b""))
    if how == "gone":
        bad.rename(tmp_path / "aside")
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
    if how in {"gone", "cut"}:
        assert source.returns(1) is None
    assert source.returns(2) == pytest.approx(8.06)
    bad.write_bytes(data)
    assert read_stamp(read_frame(source, Position(1)).current.pictures[0].pixels) == (1, 0, 0), "it came back"
    bad.unlink()
    assert "missing" in read_frame(source, Position(1)).problem  # its header is in the cache, its pictures are not


def test_jumps_go_by_id(tmp_path):
    path = store(tmp_path / "a", [(2, 1)] * 11)
    tools.split(path, tmp_path / "first", 2, move=True)
    source = TrajectoryFolder(path)
    assert source.ids == tuple(range(2, 11))
    navigator = Navigator(source)
    assert navigator.jump(3)
    assert navigator.position == Position(1, 0, 0)
    assert not navigator.jump(1)
    assert navigator.position == Position(1, 0, 0)
    assert read_stamp(read_frame(source, navigator.position).current.pictures[0].pixels)[0] == 3
    first = source.open(0)
    for index in range(9):
        source.open(index)
    assert source.open(0) is not first, "few are kept open"


def test_pictures_of_all_kinds_become_rgb():
    assert all(map(is_picture, [(8, 8, 3), (2, 8, 8, 3), (3, 64, 64), (4, 84, 84)]))
    assert not any(map(is_picture, [(8,), (8, 8), (2, 3, 3), (0, 8, 3)]))
    one = np.ones((8, 8), dtype=np.uint8)
    grey = picture_of(7 * one[..., None])
    assert (grey[0].shape, read_stamp(grey[0])) == ((8, 8, 3), (7, 7, 7))
    assert read_stamp(picture_of(np.stack([one, 2 * one, 3 * one]))[0]) == (1, 2, 3)
    assert [read_stamp(view)[0] for view in picture_of(np.stack([one, 2 * one, 3 * one, 4 * one]))] == [1, 2, 3, 4]
    for value, channels, seen in ((0.5, 3, 127), (200.0, 4, 200), (np.nan, 3, 0)):
        assert read_stamp(picture_of(np.full((8, 8, channels), value))[0]) == (seen, seen, seen)
