"""Checkpoints of buffers: episodes or blocks, priorities, ages; and the figure of `plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer, SliceSampler
from ostinato.errors import CheckpointError
from ostinato.viz import Bars, Curves, Position, SavedBuffer, Shares, read_frame
from ostinato.viz.report import report
from tests.unit.viz.rollouts import read_stamp

if TYPE_CHECKING:
    from pathlib import Path


def episode(number: int, rows: int) -> dict[str, Any]:
    """Rows that say where they come from: observation `[number, step]`, reward `number`."""
    steps = torch.arange(rows).float()
    place = torch.stack([torch.full((rows,), float(number)), steps], -1)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[-1] = True
    return {
        "observation": place,
        "action": steps[:, None] / 10,
        "next": {"observation": place + 0.5, "reward": torch.full((rows, 1), float(number)), "done": done},
    }


def saved(path: Path, lengths: list[int], capacity: int = 100, **parts: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=4, **parts)
    for number, rows in enumerate(lengths, 1):
        rb.extend(episode(number, rows))
    rb.dumps(path)
    return rb


def dumped(path: Path, rows: Any, capacity: int = 20, **options: Any) -> SavedBuffer:
    """The saved buffer that holds these rows."""
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity, **options))
    rb.extend(rows)
    rb.dumps(path)
    return SavedBuffer(path)


def current(source: SavedBuffer) -> list[Any]:
    """The first number of each row, by episode."""
    found = [read_frame(source, Position(index)).current.traces[0].values for index in range(len(source.ids))]
    return [values[:, 0].tolist() for values in found]


def test_rows_without_episodes_are_shown_in_blocks(tmp_path):
    source = dumped(tmp_path / "a", {"obs": torch.arange(3500.0)[:, None]}, 3000)
    assert source.unit == "block"
    assert [source.extent(index)[0] for index in range(3)] == [1000, 1000, 1000]
    assert read_frame(source, Position(1, 2)).current.traces[0].values[2, 0] == 1502
    assert source.returns(0) is None
    assert read_frame(source, Position()).following.note == "not stored"
    action = torch.arange(12_500) + 1_000_000
    rows = {"obs": torch.zeros(12_500, 1), "action": action, "reward": action / 10}
    source = dumped(tmp_path / "b", rows, 13_000)
    facts = dict(read_frame(source, Position(12, 345)).facts)
    assert (facts["slot"], facts["rows since"], facts["action"]) == ("12345", "154", "1012345")
    assert facts["reward"] == "101234.5"
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.rand(8, 2)})
    rb.write_all({"obs": torch.rand(8, 2), "late": torch.rand(8)})
    rb.extend({"obs": torch.rand(1, 2)})
    rb.dumps(tmp_path / "late")
    source = SavedBuffer(tmp_path / "late")
    assert dict(read_frame(source, Position()).facts)["not shown"] == "late (only some rows have it)"
    assert source.field_bytes() == {"obs": 72, "late": 36}


def test_images_single_tensors_and_environments(tmp_path):
    pixels = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 16, 16).contiguous()
    rows: dict[str, Any] = {
        "pixels": pixels,
        "next_pixels": pixels + 100,
        "reward": torch.ones(6),
        "done": torch.arange(6) == 2,
    }
    source = dumped(tmp_path / "a", rows, codec={"pixels": "zlib", "done": "zlib"})
    assert [source.extent(index)[0] for index in range(len(source.ids))] == [3, 3]
    shown = read_frame(source, Position(1, 1))
    assert read_stamp(shown.current.pictures[0].pixels) == (4, 4, 4)
    assert read_stamp(shown.following.pictures[0].pixels) == (104, 104, 104)
    shown = read_frame(dumped(tmp_path / "b", torch.arange(5.0)[:, None]), Position())
    assert shown.current.traces[0].name == "(data)"
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=1)
    flags = torch.zeros(2, 4, 1, dtype=torch.bool)
    flags[1, 1] = True
    rb.extend({"obs": torch.arange(8.0).reshape(2, 4, 1), "done": flags})
    rb.dumps(tmp_path / "c")
    assert sorted(current(SavedBuffer(tmp_path / "c"))) == [[0, 1, 2, 3], [4, 5], [6, 7]]


def test_which_episodes_there_are(tmp_path):
    saved(tmp_path / "ring", [6, 5, 4], capacity=10, sampler=SliceSampler(num_slices=2, end_key=("next", "done")))
    source = SavedBuffer(tmp_path / "ring")
    assert [source.extent(index)[0] for index in range(3)] == [1, 5, 4]
    assert read_frame(source, Position(0)).current.traces[0].values.tolist() == [[1.0, 5.0]], "the oldest row"
    assert source.ages.sum() == 45
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(num_slices=1, traj_key="run"), batch_size=2)
    rb.extend({"obs": torch.arange(6.0)[:, None], "run": torch.tensor([7, 8, 7, 8, 7, 8])})
    rb.dumps(tmp_path / "keys")
    assert current(SavedBuffer(tmp_path / "keys")) == [[0, 2, 4], [1, 3, 5]]
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(["a", "b"])
    rb.dumps(tmp_path / "objects")
    ReplayBuffer(storage=LazyTensorStorage(10)).dumps(tmp_path / "empty")
    for name, words in (("objects", "Python objects"), ("empty", "no rows"), ("", "")):
        with pytest.raises(CheckpointError, match=words):
            SavedBuffer(tmp_path / name)


def panels(scene: Any) -> dict[str, Any]:
    return {panel.title: panel for row in scene.rows for panel in row}


def test_the_report_of_a_checkpoint(tmp_path):
    saved(tmp_path / "plain", [3])
    plain = SavedBuffer(tmp_path / "plain")
    assert (plain.priorities, plain.history) == (None, "no row drawn so far")
    rb = saved(tmp_path / "a", [3, 5, 2], sampler=PrioritizedSampler(100, alpha=0.7, beta=0.5))
    rb.update_priority(torch.arange(10), torch.arange(10.0) + 1)
    rb.sample(5)
    rb.dumps(tmp_path / "a")
    source = SavedBuffer(tmp_path / "a")
    assert [dict(read_frame(source, Position(1, step)).facts)["priority"] for step in range(5)] == list("45678")
    assert source.history == "5 rows drawn so far, 0.5 for each row written (counted in all, not row by row)"
    scene = report(source)
    assert source.history in scene.subtitle
    found = panels(scene)
    returns = found["Return of each episode"]
    assert isinstance(returns, Curves)
    assert returns.lines[0].y == (3.0, 10.0, 6.0)
    for title, count in (("Steps of each episode", 3), ("Priorities", 10), ("Age of rows", 10)):
        assert isinstance(found[title], Bars)
        assert sum(found[title].stacks[0].counts) == count
    shares = found["Bytes by field"]
    assert isinstance(shares, Shares)
    assert dict(zip(shares.names, shares.values, strict=True))["observation"] == 80
    assert shares.x_label == "bytes"
    rb.storage[:]["next"]["reward"][1] = torch.nan
    rb.dumps(tmp_path / "a")
    scene = report(SavedBuffer(tmp_path / "a"))
    assert "mean return 8 \u00b7 1 without readable rewards" in scene.subtitle
    assert panels(scene)["Return of each episode"].lines[0].y == (10.0, 6.0)


def test_an_episode_of_very_many_rows_keeps_its_spikes_in_few_points(tmp_path):
    rows = 100_000
    reward = torch.zeros(rows)
    reward[[5, 77_777]] = torch.tensor([-3.0, 9.0])
    data = {"obs": torch.arange(float(rows))[:, None], "reward": reward, "done": torch.zeros(rows, dtype=torch.bool)}
    source = dumped(tmp_path / "a", data, rows)
    shown = read_frame(source, Position(0, 50_000))
    assert shown.timeline is not None
    assert shown.timeline.reward is not None
    found = shown.timeline.reward
    assert len(found.steps) == len(found.values) <= 2_000
    assert (found.values.min(), found.values.max()) == (-3, 9)
    assert abs(found.steps[found.values[:, 0].argmax()] - 77_777) <= 100
    assert read_frame(source, Position(0, 50_001)).timeline is shown.timeline  # read once, not at every step
    assert len(shown.current.traces[0].steps) <= 2_000
