"""The episodes of a dataset in the viewers: roles of fields, frames, curves, and the figure of `ostinato plot`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import DatasetStorage, open_dataset
from ostinato.datasets.columns import TensorColumn, TextColumn
from ostinato.errors import DamagedFileError
from ostinato.viz import Bars, Curves, Film, Position, draw, read_frame
from ostinato.viz.datasets import DatasetSource
from ostinato.viz.figures import size_of
from ostinato.viz.frames import ALL_CAMERAS, read_timeline
from ostinato.viz.report import report

if TYPE_CHECKING:
    from ostinato.viz.figures import FigureSpec

LENGTHS = [5, 1, 8]
ROWS = sum(LENGTHS)
T = np.concatenate([np.arange(length) for length in LENGTHS])


def pictures(camera: int) -> np.ndarray:
    """Pictures `[rows, 3, 8, 8]` whose colour is the row and the camera."""
    made = np.zeros((ROWS, 3, 8, 8), dtype=np.uint8)
    made[:, 0], made[:, 1] = np.arange(ROWS)[:, None, None], camera
    return made


def robot() -> dict[str, Any]:
    """Rows in LeRobot's vocabulary: flat keys with dots, no next observations."""
    row = np.arange(ROWS)
    return {
        "observation.state": np.stack([row, -row], 1).astype(np.float32),
        "observation.images.top": pictures(1),
        "observation.images.wrist": pictures(2),
        "action": np.stack([row / 10] * 14, 1),
        "next.reward": np.ones(ROWS, dtype=np.float32),
        "timestamp": (T / 10).astype(np.float32),
        "done": np.isin(row, np.cumsum(LENGTHS) - 1),
    }


def nested() -> dict[str, Any]:
    """Rows in the vocabulary of reinforcement learning: nested, with next observations."""
    row = np.arange(ROWS)
    done = np.isin(row, np.cumsum(LENGTHS) - 1)
    following = {"observation": np.stack([row + 1], 1), "reward": row.astype(np.float64), "terminated": done}
    return {"observation": np.stack([row], 1), "action": row % 3, "next": {**following, "truncated": ~done & done}}


def source(data: dict[str, Any], **changes: Any) -> DatasetSource:
    dataset = open_dataset(data, episode_ends=np.cumsum(LENGTHS))
    return DatasetSource(DatasetStorage(dataclasses.replace(dataset.contents, **changes)), "data/pusht")


def test_a_frame_has_all_cameras_and_the_vectors_beside_them():
    seen = read_frame(source(robot()), Position(2, 3), ALL_CAMERAS)
    assert seen.title == "episode 2 (3 of 3)"
    assert [picture.camera for picture in seen.current.pictures] == [
        "observation.images.top",
        "observation.images.wrist",
    ]
    assert [picture.pixels[0, 0].tolist() for picture in seen.current.pictures] == [[9, 1, 0], [9, 2, 0]]
    assert [trace.name for trace in seen.following.traces] == ["observation.state"]
    assert seen.following.traces[0].values[:, 0].tolist() == list(range(6, 14))
    facts = dict(seen.facts)
    assert (facts["step"], facts["reward"], facts["done"], facts["timestamp"]) == ("3 of 8", "1", "no", "0.3")
    one = read_frame(source(robot()), Position(0, 4), "observation.images.wrist")
    assert [picture.camera for picture in one.current.pictures] == ["observation.images.wrist"]
    assert dict(one.facts)["done"] == "yes"


def test_next_observations_curves_and_texts_of_an_episode():
    codes = torch.tensor([0] * 5 + [1] + [0, 1, 2, 3, 4, 4, 4, 4])
    task = TextColumn(["lift", "push", "a", "b", "c"], TensorColumn(codes))
    made = source(nested(), texts={("task",): task})
    seen = read_frame(made, Position(2, 0))
    assert seen.current.traces[0].values[:, 0].tolist() == list(range(6, 14))
    assert seen.following.traces[0].values[:, 0].tolist() == list(range(7, 15))
    timeline = read_timeline(made.open(2), 0)
    assert timeline is not None
    assert timeline.reward is not None
    assert timeline.reward.values[:, 0].tolist() == list(range(6, 14))
    assert timeline.ends.tolist() == [7]
    assert [made.returns(index) for index in range(3)] == made.all_returns() == [10.0, 5.0, 76.0]
    texts = [made.open(index).facts for index in range(3)]
    assert texts == [(("task", text),) for text in ("lift", "push", "lift / push / a / ... (5 in all)")]
    assert dict(read_frame(made, Position(1, 0)).facts)["task"] == "push"
    made = DatasetSource(open_dataset(nested(), episode_ends=np.cumsum(LENGTHS), episodes=[2, 0]), "x")
    assert (made.ids, made.find(0), made.find(1)) == ((2, 0), 1, None)
    assert made.open(0).name == "episode 2"
    assert read_frame(made, Position(1, 0)).current.traces[0].values[:, 0].tolist() == list(range(5))


class Broken:
    """A column whose file cannot be read."""

    dtype, shape = torch.float32, (2,)

    def start(self, rows: torch.Tensor) -> Any:
        del rows
        msg = "data/chunk-000/file-000.mp4: episode 2, frame 1 cannot be decoded"
        raise DamagedFileError(msg)

    def close(self) -> None:
        """Do nothing."""


def test_a_damaged_file_is_shown_as_such():
    data = robot()
    columns = open_dataset(data, episode_ends=np.cumsum(LENGTHS)).contents.columns
    made = source(data, columns={**columns, ("action",): Broken()})
    seen = read_frame(made, Position(0, 0))
    assert "episode 2, frame 1 cannot be decoded" in seen.problem
    with pytest.raises(DamagedFileError, match="frame 1"):
        report(made, 0)
    made = source(data, columns={**columns, ("next.reward",): Broken()})
    assert made.all_returns() == [None] * 3
    made = source(data, texts={("task",): TextColumn(["lift"], Broken())})
    assert "frame 1" in made.open(0).problem
    with pytest.raises(DamagedFileError, match="frame 1"):
        report(made, 0)


def panels(spec: FigureSpec) -> dict[str, Any]:
    return {panel.title: panel for row in spec.rows for panel in row}


def test_the_figure_of_a_robot_dataset(tmp_path):
    made = source(robot(), fps=10.0)
    spec = report(made, 2)
    assert spec.title == "pusht, 14 rows, 3 episodes, arrays"
    assert spec.subtitle == "episode 2: 8 steps · 10 rows per second · mean length 4.667 · mean return 4.667"
    found = panels(spec)
    film = found["observation.images.wrist"]
    assert isinstance(film, Film)
    assert film.notes == ("step 0", "step 1", "step 2", "step 4", "step 5", "step 7")
    assert [image[0, 0].tolist() for image in film.pictures] == [[6 + step, 2, 0] for step in (0, 1, 2, 4, 5, 7)]
    action = found["episode 2: action (12 of 14)"]
    assert isinstance(action, Curves)
    assert len(action.lines) == 12
    assert action.lines[3].y == pytest.approx([row / 10 for row in range(6, 14)])
    assert found["episode 2: observation.state"].lines[1].y == tuple(float(-row) for row in range(6, 14))
    assert found["episode 2: reward"].lines[0].y == (1.0,) * 8
    spread = found["Actions (12 of 14)"]
    assert sum(spread.lines[0].y) == pytest.approx(100.0)
    assert {"observation.images.top", "action"} <= set(found["Bytes by field"].names)
    written = draw(spec, tmp_path / "figure.png", size=size_of(spec))
    assert written.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_figure_of_vectors_and_discrete_actions():
    found = panels(report(source(nested()), 0))
    assert not any(isinstance(panel, Film) for panel in found.values())
    actions = found["Actions"]
    assert isinstance(actions, Bars)
    assert sum(actions.stacks[0].counts) == ROWS
    assert found["episode 0: observation"].lines[0].y == (0.0, 1.0, 2.0, 3.0, 4.0)
    nothing = {"observation": np.full((ROWS, 3), np.nan), "action": np.full((ROWS, 2), np.nan)}
    spread = panels(report(source(nothing), 1))["Actions"]
    assert all(sum(line.y) == 0 for line in spread.lines)


def test_fields_get_their_roles_by_the_names_that_datasets_use():
    roles = source({**robot(), "next": np.zeros(ROWS)}).roles
    assert (roles.reward, roles.action, dict(roles.ends)) == (("next.reward",), ("action",), {"done": ("done",)})
    assert list(roles.current) == ["observation.state", "observation.images.top", "observation.images.wrist"]
    assert not roles.following
    assert list(roles.extra) == ["timestamp", "next"]
    assert set(source(nested()).roles.ends) == {"terminated", "truncated"}
