"""Draws queued by prefetch come out of a checkpoint as they would have without it, windows and all, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    FrameStack,
    Hindsight,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.errors import CheckpointError

from ...tags import same_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")  # next observations are made up
CAPACITY = 400


def reward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["desired_goal"] + batch["achieved_goal"]


UNITS: dict[str, Callable[[], Any]] = {
    "rows": lambda: None,
    "nstep": lambda: NStep(5, 0.9),
    "strict": lambda: SequenceUnit(4, "strict", ("next", "done"), burn_in=2),
    "stop": lambda: SequenceUnit(4, "stop", ("next", "done")),
    "reset": lambda: SequenceUnit(4, "include_reset", ("next", "done")),
    "frames": lambda: FrameStack(3, ["obs"]),
    "future": lambda: Hindsight(reward),
    "random": lambda: Hindsight(reward, strategy="random"),
    "chain": lambda: [FrameStack(2, ["obs"]), NStep(3, 0.9)],
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False),
    "pass over slices": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done")),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=4, end_key=("next", "done")),
}


def steps(first: int, count: int) -> dict[str, Any]:
    t = torch.arange(first, first + count)
    obs = (t[:, None] * 3 + torch.arange(2)).float()
    done = t % 37 == 36
    after = {"obs": obs + 0.5, "reward": t.float(), "done": done, "achieved_goal": t.float() + 1}
    return {"t": t, "obs": obs, "desired_goal": -t.float(), "achieved_goal": t.float(), "next": after}


def make(unit: str = "rows", sampler: str = "random") -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=SAMPLERS[sampler](),
        sample_unit=UNITS[unit](),
        batch_size=8,
        prefetch=3,
        generator=torch.Generator().manual_seed(2),
        episodes=Episodes(("next", "done")),
    )


def batches(rb: Any, count: int) -> list[Any]:
    out = []
    for _ in range(count):
        batch, info = rb.sample(return_info=True)
        own = {key: value for key, value in info.items() if isinstance(key, str) and key != "index_generation"}
        out.append([batch, own])
    return out


CELLS = [*((unit, "random") for unit in UNITS), *(("rows", sampler) for sampler in SAMPLERS)]
CELLS += [("nstep", "prioritized"), ("future", "passes"), ("frames", "slices"), ("nstep", "prioritized slices")]


@pytest.mark.parametrize(("unit", "sampler"), CELLS, ids=str)
def test_an_episode_that_went_on_since_the_draw(unit: str, sampler: str, tmp_path: Path) -> None:
    """The second copy comes from a checkpoint of draws that came out of one."""
    rb, again, third = (make(unit, sampler) for _ in range(3))
    rb.extend(steps(0, 60))
    for turn in range(3):
        batches(rb, 1)  # queues draws while the newest episode is still short
        rb.extend(steps(60 + 9 * turn, 9))
    rb.dumps(tmp_path / "one")
    again.loads(tmp_path / "one")
    again.dumps(tmp_path / "two")
    third.loads(tmp_path / "two")
    expected = batches(rb, 8)
    same_state(batches(again, 8), expected)
    same_state(batches(third, 8), expected)


def test_windows_of_which_rows_were_replaced_are_those_of_the_draw(tmp_path: Path) -> None:
    rb, again = make("nstep"), make("nstep")
    rb.extend(steps(0, CAPACITY))
    rb.sample()
    rb.extend(steps(CAPACITY, CAPACITY - 20))
    rb.dumps(tmp_path / "save")
    again.loads(tmp_path / "save")
    out = batches(again, 6)
    same_state(out, batches(rb, 6))
    for turn, (batch, _) in enumerate(out):
        first, count = batch["t"], batch["steps_to_next_obs"]
        expected = (first + count - 1)[:, None] * 3 + torch.arange(2) + 0.5
        assert torch.equal(batch["next"]["obs"], expected)
        assert bool((first >= CAPACITY - 20).all()) == (turn >= 3)  # three batches were drawn before


DAMAGE: list[Callable[[dict[str, Any]], Any]] = [
    lambda p: p["records"].add_(1000),
    lambda p: p["columns"][0]["slots"].sub_(1000),
    lambda p: p["columns"][0].update(leaf=99),
    lambda p: p["columns"][0].update(position=-1),
    lambda p: [c.update(weights=c["weights"][:2]) for c in p["columns"] if c["weights"] is not None],
    lambda p: p.update(records=p["records"][:3]),
    lambda p: p.update(repeat=3),
    lambda p: p.pop("records"),
    lambda p: p.update(owner=torch.full_like(p["records"], 77)),
    lambda p: p.update(fields=[["gamma", torch.zeros(1)]]),
    lambda p: p["columns"][0].update(pick=torch.ones(8, dtype=torch.bool)),
]


def test_damaged_windows_are_found_before_anything_changes() -> None:
    rb, other = make("nstep"), make("nstep")
    for mine in (rb, other):
        mine.extend(steps(0, 60))
        mine.sample()
    before = other.state_dict()
    for damage in DAMAGE:
        state = rb.state_dict()
        for ticket in state["pending"]:
            damage(ticket["plan"])
        with pytest.raises(CheckpointError):
            other.load_state_dict(state)
        same_state(other.state_dict(), before)
