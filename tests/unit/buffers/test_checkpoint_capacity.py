"""Checkpoints of full rings loaded into buffers of another capacity: rows come by age, and nothing crosses the seam."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    LimitedSampler,
    NStep,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
)
from ostinato.core.records import Draw, View
from ostinato.errors import CheckpointError, OptionError

from ...registry import ring


def transitions(first: int, count: int) -> dict[str, torch.Tensor]:
    t = torch.arange(float(first), float(first + count))
    return {"obs": t, "next_obs": t + 1, "reward": torch.ones(count), "done": torch.zeros(count, dtype=torch.bool)}


@pytest.mark.parametrize("verify", [True, False])
def test_no_window_leads_from_the_newest_row_to_the_oldest(verify, tmp_path):
    """`tests/unit/units` resizes rings with every unit; here with single copies."""

    def make(size: int) -> ReplayBuffer:
        storage = LazyTensorStorage(size, single_copy={"next_obs": "obs"})
        return ReplayBuffer(storage=storage, sample_unit=NStep(3, 1.0), batch_size=60)

    rb = make(5)
    rb.extend(transitions(0, 7))
    other = make(8)
    rb.dumps(tmp_path / "save")
    other.loads(tmp_path / "save", verify=verify)
    for first in (7, 9, 11):
        x = other.sample()
        assert torch.equal(x["next_obs"], x["obs"] + x["steps_to_next_obs"])
        other.extend(transitions(first, 2))


def test_a_ring_that_came_from_a_larger_one_is_saved(tmp_path):
    larger, same, other = (ring(size) for size in (8, 6, 6))
    larger.extend({"x": torch.arange(8)})
    larger.empty()
    larger.extend({"x": torch.arange(6)})
    larger[0] = {"x": torch.tensor(9)}  # generations are in an array from now on, of as many slots as were written
    same.load_state_dict(larger.state_dict())
    same.dumps(tmp_path / "save")
    other.loads(tmp_path / "save")
    assert other[:]["x"].tolist() == [9, 1, 2, 3, 4, 5]


def test_a_ring_that_would_have_to_be_moved_is_not_mapped(tmp_path):
    rb, other, same = (ring(size) for size in (5, 9, 5))
    rb.extend({"x": torch.arange(7)})
    rb.dumps(tmp_path / "save")
    other.extend({"x": torch.arange(2)})
    with pytest.raises(OptionError, match="max_size=5"):
        other.loads(tmp_path / "save", mmap=True)
    assert other[:]["x"].tolist() == [0, 1]
    same.loads(tmp_path / "save", mmap=True)
    assert same[:]["x"].tolist() == [5, 6, 2, 3, 4]


class Own(Sampler):
    """A sampler with a state that names slots."""

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size,), generator=generator))

    def state_dict(self) -> dict[str, Any]:
        return {"slots": torch.arange(3)}


def test_a_sampler_that_cannot_follow_raises_and_nothing_changes():
    rb, same, other = (ring(size, sampler=Own(), batch_size=4) for size in (5, 5, 9))
    rb.extend({"x": torch.arange(7)})
    same.load_state_dict(rb.state_dict())
    with pytest.raises(CheckpointError, match="move_state"):
        other.load_state_dict(rb.state_dict())
    assert len(other) == 0


@pytest.mark.parametrize(
    ("sampler", "uses"),
    [
        (SamplerWithoutReplacement, 1),
        (lambda: SamplerWithoutReplacement(endless=True), 1),
        (lambda: LimitedSampler(2), 2),
    ],
    ids=["passes", "endless", "limited"],
)
def test_rows_are_drawn_as_often_as_they_would_have_been(sampler, uses):
    rb, other = (ring(size, sampler=sampler(), batch_size=2) for size in (7, 9))
    rb.extend({"id": torch.arange(12)})
    drawn = rb.sample()["id"].tolist()
    other.load_state_dict(rb.state_dict())
    while len(drawn) < 7 * uses:
        drawn += other.sample()["id"].tolist()
    assert sorted(drawn[: 7 * uses]) == sorted(uses * list(range(5, 12)))
