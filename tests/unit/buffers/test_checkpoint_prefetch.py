"""Draws queued by prefetch come out of a checkpoint as they would have without it, windows and all, bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash

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
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.durable import CheckpointReader
from ostinato.durable.json_codec import encode
from ostinato.durable.manifest import canonical
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
    "sequence": lambda: SequenceUnit(4, "pad", ("next", "done")),
    "strict": lambda: SequenceUnit(4, "strict", ("next", "done"), burn_in=2),
    "stop": lambda: SequenceUnit(4, "stop", ("next", "done")),
    "reset": lambda: SequenceUnit(4, "include_reset", ("next", "done")),
    "frames": lambda: FrameStack(3, ["obs"]),
    "zeros": lambda: FrameStack(3, ["obs"], padding="zeros"),
    "future": lambda: Hindsight(reward),
    "final": lambda: Hindsight(reward, strategy="final"),
    "random": lambda: Hindsight(reward, strategy="random"),
    "episode": lambda: Hindsight(reward, strategy="episode"),
    "chain": lambda: [FrameStack(2, ["obs"]), NStep(3, 0.9)],
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False),
    "padded": lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False, pad_output=True),
    "pass over slices": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done")),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=4, end_key=("next", "done")),
}


def steps(first: int, count: int) -> dict[str, Any]:
    t = torch.arange(first, first + count)
    obs = (t[:, None] * 3 + torch.arange(2)).float()
    done = t % 37 == 36
    after = {"obs": obs + 0.5, "reward": t.float(), "done": done, "achieved_goal": t.float() + 1}
    return {"t": t, "obs": obs, "desired_goal": -t.float(), "achieved_goal": t.float(), "next": after}


def make(unit: str = "rows", sampler: str = "random", depth: int = 3) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=SAMPLERS[sampler](),
        sample_unit=UNITS[unit](),
        batch_size=8,
        prefetch=depth or None,
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


def resumes(rb: Any, again: Any, path: Path) -> None:
    rb.dumps(path)
    again.loads(path)
    same_state(batches(again, 8), batches(rb, 8))


CELLS = [*((unit, "random") for unit in UNITS), *(("rows", sampler) for sampler in SAMPLERS)]
CELLS += [("nstep", "prioritized"), ("future", "passes"), ("frames", "slices"), ("nstep", "prioritized slices")]


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize(("unit", "sampler"), CELLS, ids=str)
def test_an_episode_that_went_on_since_the_draw(unit: str, sampler: str, depth: int, tmp_path: Path) -> None:
    rb = make(unit, sampler, depth)
    rb.extend(steps(0, 60))
    for turn in range(3):
        batches(rb, 1)  # queues draws while the newest episode is still short
        rb.extend(steps(60 + 9 * turn, 9))
    resumes(rb, make(unit, sampler, depth), tmp_path / "save")


@pytest.mark.parametrize("unit", ["nstep", "stop", "random"])
def test_a_second_checkpoint_of_draws_that_came_out_of_one(unit: str, tmp_path: Path) -> None:
    rb = make(unit)
    rb.extend(steps(0, 60))
    rb.sample()
    rb.extend(steps(60, 9))
    rb.dumps(tmp_path / "one")
    again, third = make(unit), make(unit)
    again.loads(tmp_path / "one")
    again.dumps(tmp_path / "two")
    third.loads(tmp_path / "two")
    same_state(batches(third, 6), batches(rb, 6))


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


def test_draws_of_format_1_1_have_no_windows(tmp_path: Path) -> None:
    rb, again = make("nstep"), make("nstep")
    rb.extend(steps(0, 60))
    rb.sample()
    rb.dumps(tmp_path)
    file = tmp_path / "manifest.json"
    node = json.loads(file.read_text())
    assert "steps_to_next_obs" in file.read_text()
    state = CheckpointReader(tmp_path, format_name="ostinato-buffer").state()
    for ticket in state["pending"]:
        del ticket["plan"]
    node["body"]["state"] = encode(state, inline_bytes=2**20)
    node["version"] = [1, 1]
    covered = canonical([node["format"], node["version"], node["body"]])
    file.write_bytes(canonical({**node, "checksum": xxhash.xxh3_64_hexdigest(covered)}))
    again.loads(tmp_path)
    same_state(batches(again, 6), batches(rb, 6))


def test_ensembles(tmp_path: Path) -> None:
    def both() -> ReplayBufferEnsemble:
        members = [make("nstep", depth=0), make("nstep", "prioritized", depth=0)]
        generator = torch.Generator().manual_seed(7)
        return ReplayBufferEnsemble(*members, batch_size=8, generator=generator, prefetch=3)

    one, two = both(), both()
    for rb in one.members:
        rb.extend(steps(0, 60))
    one.sample()
    for rb in one.members:
        rb.extend(steps(60, 9))
    one.dumps(tmp_path / "save")
    two.loads(tmp_path / "save")
    for _ in range(6):
        same_state(two.sample(), one.sample())


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "records beyond": lambda p: p["records"].add_(1000),
    "slots below": lambda p: p["columns"][0]["slots"].sub_(1000),
    "another leaf": lambda p: p["columns"][0].update(leaf=99),
    "another position": lambda p: p["columns"][0].update(position=-1),
    "fewer weights": lambda p: [c.update(weights=c["weights"][:2]) for c in p["columns"] if c["weights"] is not None],
    "fewer records": lambda p: p.update(records=p["records"][:3]),
    "another repeat": lambda p: p.update(repeat=3),
    "no records": lambda p: p.pop("records"),
    "an owner": lambda p: p.update(owner=torch.full_like(p["records"], 77)),
    "short fields": lambda p: p.update(fields=[["gamma", torch.zeros(1)]]),
    "a pick alone": lambda p: p["columns"][0].update(pick=torch.ones(8, dtype=torch.bool)),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_damaged_windows_are_found_before_anything_changes(case: str) -> None:
    rb, other = make("nstep"), make("nstep")
    for mine in (rb, other):
        mine.extend(steps(0, 60))
        mine.sample()
    state = rb.state_dict()
    for ticket in state["pending"]:
        DAMAGE[case](ticket["plan"])
    before = other.state_dict()
    with pytest.raises(CheckpointError):
        other.load_state_dict(state)
    same_state(other.state_dict(), before)
