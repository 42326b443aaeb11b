"""Checkpoints of buffers: episodes or blocks, priorities, ages; and the figure of `plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer, SliceSampler
from ostinato.errors import CheckpointError
from ostinato.viz import Bars, Curves, Navigator, Position, SavedBuffer, Shares, TrajectoryFolder, read_frame
from ostinato.viz.report import report
from tests.unit.viz.rollouts import file_of, read_stamp, store

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


def test_episodes_are_shown_row_by_row(tmp_path: Path) -> None:
    saved(tmp_path / "a", [3, 5, 2])
    source = SavedBuffer(tmp_path / "a")
    assert source.unit == "episode"
    navigator, seen = Navigator(source), []
    while True:
        shown = read_frame(source, navigator.position)
        index, step, _ = navigator.position
        seen.append((index, step))
        current, following = shown.current.traces[0].values, shown.following.traces[0].values
        assert current[step].tolist() == [index + 1, step]
        assert following[step].tolist() == [index + 1.5, step + 0.5]
        facts = dict(shown.facts)
        assert float(facts["reward"]) == index + 1
        assert facts["done"] == ("yes" if step == shown.steps - 1 else "no")
        assert int(facts["rows since"]) == 10 - len(seen)
        if not navigator.next():
            break
    assert seen == [(index, step) for index, rows in enumerate([3, 5, 2]) for step in range(rows)]
    assert [source.returns(index) for index in range(3)] == [3.0, 10.0, 6.0]


def test_a_full_ring_begins_with_its_oldest_row(tmp_path: Path) -> None:
    saved(tmp_path / "a", [6, 5, 4], capacity=10, sampler=SliceSampler(num_slices=2, end_key=("next", "done")))
    source = SavedBuffer(tmp_path / "a")
    assert [source.extent(index)[0] for index in range(3)] == [1, 5, 4]
    assert read_frame(source, Position(0)).current.traces[0].values.tolist() == [[1.0, 5.0]]
    assert source.ages.sum() == 45


def test_rows_without_episodes_are_shown_in_blocks(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(3000))
    rb.extend({"obs": torch.arange(3500.0)[:, None]})
    rb.dumps(tmp_path / "a")
    source = SavedBuffer(tmp_path / "a")
    assert source.unit == "block"
    assert [source.extent(index)[0] for index in range(3)] == [1000, 1000, 1000]
    assert read_frame(source, Position(1, 2)).current.traces[0].values[2, 0] == 1502
    assert source.returns(0) is None
    assert read_frame(source, Position()).following.note == "not stored"
    rb = ReplayBuffer(storage=LazyTensorStorage(13_000))
    action = torch.arange(12_500) + 1_000_000
    rb.extend({"obs": torch.zeros(12_500, 1), "action": action, "reward": action / 10})
    rb.dumps(tmp_path / "b")
    source = SavedBuffer(tmp_path / "b")
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


def test_priorities_are_shown_where_there_are_some(tmp_path: Path) -> None:
    rb = saved(tmp_path / "plain", [3])
    assert SavedBuffer(tmp_path / "plain").priorities is None
    rb = saved(tmp_path / "a", [3, 5], sampler=PrioritizedSampler(100, alpha=0.7, beta=0.5))
    rb.update_priority(torch.arange(8), torch.arange(8.0) + 1)
    rb.sample(4)
    rb.dumps(tmp_path / "a")
    source = SavedBuffer(tmp_path / "a")
    assert [dict(read_frame(source, Position(1, step)).facts)["priority"] for step in range(5)] == list("45678")
    assert source.history == "4 rows drawn so far, 0.5 for each row written (counted in all, not row by row)"
    assert source.history in report(source).subtitle
    assert SavedBuffer(tmp_path / "plain").history == "no row drawn so far"


def test_images_single_tensors_and_environments(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20, codec={"pixels": "zlib", "done": "zlib"}))
    pixels = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 16, 16).contiguous()
    rb.extend({"pixels": pixels, "next_pixels": pixels + 100, "reward": torch.ones(6), "done": torch.arange(6) == 2})
    rb.dumps(tmp_path / "a")
    source = SavedBuffer(tmp_path / "a")
    assert [source.extent(index)[0] for index in range(len(source.ids))] == [3, 3]
    shown = read_frame(source, Position(1, 1))
    assert read_stamp(shown.current.pictures[0].pixels) == (4, 4, 4)
    assert read_stamp(shown.following.pictures[0].pixels) == (104, 104, 104)
    rb = ReplayBuffer(storage=LazyTensorStorage(20, single_copy=True))
    obs = torch.arange(6.0)[:, None]
    rb.extend({"observation": obs[:5], "next": {"observation": obs[1:], "done": torch.zeros(5, 1, dtype=torch.bool)}})
    rb.dumps(tmp_path / "single")
    shown = read_frame(SavedBuffer(tmp_path / "single"), Position(0, 1))
    assert shown.current.traces[0].values[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert shown.following.traces[0].values[:, 0].tolist() == [1, 2, 3, 4, 5]
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    rb.extend(torch.arange(5.0)[:, None])
    rb.dumps(tmp_path / "b")
    assert read_frame(SavedBuffer(tmp_path / "b"), Position()).current.traces[0].name == "(data)"
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=1)
    flags = torch.zeros(2, 4, 1, dtype=torch.bool)
    flags[1, 1] = True
    rb.extend({"obs": torch.arange(8.0).reshape(2, 4, 1), "done": flags})
    rb.dumps(tmp_path / "c")
    source = SavedBuffer(tmp_path / "c")
    found = [
        read_frame(source, Position(index)).current.traces[0].values[:, 0].tolist() for index in range(len(source.ids))
    ]
    assert sorted(found) == [[0, 1, 2, 3], [4, 5], [6, 7]]


def test_a_checkpoint_without_fields_raises(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(["a", "b"])
    rb.dumps(tmp_path / "objects")
    with pytest.raises(CheckpointError, match="Python objects"):
        SavedBuffer(tmp_path / "objects")
    ReplayBuffer(storage=LazyTensorStorage(10)).dumps(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no rows"):
        SavedBuffer(tmp_path / "empty")
    with pytest.raises(CheckpointError):
        SavedBuffer(tmp_path)


def test_the_episode_key_of_a_buffer_counts(tmp_path: Path) -> None:
    sampler = SliceSampler(num_slices=1, traj_key="run")
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=2)
    rb.extend({"obs": torch.arange(6.0)[:, None], "run": torch.tensor([7, 8, 7, 8, 7, 8])})
    rb.dumps(tmp_path / "a")
    source = SavedBuffer(tmp_path / "a")
    found = [read_frame(source, Position(index), "obs").current.traces[0].values[:, 0].tolist() for index in range(2)]
    assert found == [[0, 2, 4], [1, 3, 5]]


def panels(scene: Any) -> dict[str, Any]:
    return {panel.title: panel for row in scene.rows for panel in row}


def test_the_report_of_a_checkpoint(tmp_path: Path) -> None:
    rb = saved(tmp_path / "a", [3, 5, 2], sampler=PrioritizedSampler(100, alpha=0.7, beta=0.5))
    rb.update_priority(torch.arange(10), torch.arange(10.0) + 1)
    rb.dumps(tmp_path / "a")
    found = panels(report(SavedBuffer(tmp_path / "a")))
    returns = found["Return of each episode"]
    assert isinstance(returns, Curves)
    assert returns.lines[0].y == (3.0, 10.0, 6.0)
    for title in ("Steps of each episode", "Priorities", "Age of rows"):
        assert isinstance(found[title], Bars)
    assert sum(found["Priorities"].stacks[0].counts) == 10
    assert sum(found["Steps of each episode"].stacks[0].counts) == 3
    shares = found["Bytes by field"]
    assert isinstance(shares, Shares)
    assert dict(zip(shares.names, shares.values, strict=True))["observation"] == 80
    assert shares.x_label == "bytes"
    rb.storage[:]["next"]["reward"][1] = torch.nan
    rb.dumps(tmp_path / "a")
    scene = report(SavedBuffer(tmp_path / "a"))
    assert "mean return 8 \u00b7 1 without readable rewards" in scene.subtitle
    assert panels(scene)["Return of each episode"].lines[0].y == (10.0, 6.0)


def test_the_report_of_trajectories(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    file_of(path, 1).unlink()
    scene = report(TrajectoryFolder(path))
    found = panels(scene)
    line = found["Return of each trajectory"].lines[0]
    assert line.x == (0.0, 2.0)
    assert line.y == pytest.approx((0.03, 8.06))
    assert "1 without readable rewards" in scene.subtitle
    assert "Priorities" not in found
    assert np.isclose(sum(found["Age of rows"].stacks[0].counts), 3 * 2 + 2 + 4 * 2)
    assert found["Bytes by field"].names[0] == "curr_obs.extra_view_images"


def test_an_episode_of_very_many_rows_keeps_its_spikes_in_few_points(tmp_path: Path) -> None:
    rows = 100_000
    reward = torch.zeros(rows)
    reward[[5, 77_777]] = torch.tensor([-3.0, 9.0])
    rb = ReplayBuffer(storage=LazyTensorStorage(rows))
    rb.extend({"obs": torch.arange(float(rows))[:, None], "reward": reward, "done": torch.arange(rows) % 2 == 2})
    rb.dumps(tmp_path / "a")
    source = SavedBuffer(tmp_path / "a")
    shown = read_frame(source, Position(0, 50_000))
    assert shown.timeline is not None
    assert shown.timeline.reward is not None
    found = shown.timeline.reward
    assert len(found.steps) == len(found.values) <= 2_000
    assert (found.values.min(), found.values.max()) == (-3, 9)
    assert abs(found.steps[found.values[:, 0].argmax()] - 77_777) <= 100
    assert read_frame(source, Position(0, 50_001)).timeline is shown.timeline  # read once, not at every step
    assert len(shown.current.traces[0].steps) <= 2_000


@pytest.mark.parametrize("rows", [1, 29, 2_500])
def test_bars_over_whole_numbers_are_equally_wide_and_even(rows: int, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(rows))
    rb.extend({"obs": torch.zeros(rows, 1)})
    rb.dumps(tmp_path / "a")
    bars = panels(report(SavedBuffer(tmp_path / "a")))["Age of rows"]  # each age once
    counts = bars.stacks[0].counts
    assert sum(counts) == rows
    assert len(counts) <= 31
    assert len(set(counts[: rows // int(max(counts))])) == 1
    assert bars.edges[0] >= -0.5
    assert f"max {rows - 1:,}" in bars.stacks[0].label
