"""Draws queued by prefetch come out of a checkpoint as they would have without it, windows and all, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    ReplayBuffer,
)
from ostinato.errors import CheckpointError

from ...registry import CAPACITY, SAMPLERS, UNITS, rows, seeded
from ...tags import same_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")  # next observations are made up


def make(unit: str = "none", sampler: str = "RandomSampler") -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=SAMPLERS[sampler].make(CAPACITY),
        sample_unit=UNITS[unit](CAPACITY),
        batch_size=6,
        prefetch=3,
        generator=seeded(2),
        episodes=Episodes(("next", "done")),
    )


def batches(rb: Any, count: int) -> list[Any]:
    out = []
    for _ in range(count):
        batch, info = rb.sample(return_info=True)
        own = {key: value for key, value in info.items() if isinstance(key, str) and key != "index_generation"}
        out.append([batch, own])
    return out


CELLS = [(unit, "RandomSampler") for unit in UNITS]
CELLS += [("none", name) for name in ("SamplerWithoutReplacement", "PrioritizedSampler", "SliceSampler")]
CELLS += [("none", "SliceSamplerWithoutReplacement"), ("none", "PrioritizedSliceSampler")]
CELLS += [("NStep", "PrioritizedSampler"), ("Hindsight", "SamplerWithoutReplacement")]


@pytest.mark.parametrize(("unit", "sampler"), CELLS, ids=str)
def test_an_episode_that_went_on_since_the_draw(unit: str, sampler: str, tmp_path: Path) -> None:
    """The second copy comes from a checkpoint of draws that came out of one."""
    rb, again, third = (make(unit, sampler) for _ in range(3))
    rb.extend(rows(10))
    for start in (10, 13, 16):
        rb.sample()  # queues draws while the newest episode is still short
        rb.extend(rows(3, start))
    rb.dumps(tmp_path / "one")
    again.loads(tmp_path / "one")
    again.dumps(tmp_path / "two")
    third.loads(tmp_path / "two")
    expected = batches(rb, 8)
    same_state(batches(again, 8), expected)
    same_state(batches(third, 8), expected)


def test_windows_of_which_rows_were_replaced_are_those_of_the_draw(tmp_path: Path) -> None:
    rb, again = make("NStep"), make("NStep")
    rb.extend(rows(CAPACITY))
    rb.sample()
    rb.extend(rows(CAPACITY - 4, CAPACITY))
    rb.dumps(tmp_path / "save")
    again.loads(tmp_path / "save")
    out = batches(again, 6)
    same_state(out, batches(rb, 6))
    for turn, (batch, _) in enumerate(out):
        last = batch["t"] + batch["steps_to_next_obs"]
        assert torch.equal(batch["next", "obs"].flatten(), last.float())
        assert bool((batch["t"] >= CAPACITY - 4).all()) == (turn >= 3)  # three batches were drawn before


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
    lambda p: p["columns"][0].update(pick=torch.ones(6, dtype=torch.bool)),
]


def test_damaged_windows_are_found_before_anything_changes() -> None:
    rb, other = make("NStep"), make("NStep")
    for mine in (rb, other):
        mine.extend(rows(CAPACITY))
        mine.sample()
    before = other.state_dict()
    for damage in DAMAGE:
        state = rb.state_dict()
        for ticket in state["pending"]:
            damage(ticket["plan"])
        with pytest.raises(CheckpointError):
            other.load_state_dict(state)
        same_state(other.state_dict(), before)
