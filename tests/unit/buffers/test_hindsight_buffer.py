"""`HERReplayBuffer`: which rows get which goals, episode boundaries, and the state of the buffer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    HERReplayBuffer,
    HindsightStrategy,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from ostinato.errors import KeyMissingError, OptionError

from ...registry import reached
from ...stats.chi_square import p_value
from .refusals import raises

pytestmark = pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")  # next goals are made up

NO_GOAL = -1.0


def episode(number: int, steps: int, *, first: int = 0, ends: bool = True) -> TensorDict:
    """Rows whose achieved goal tells episode and step."""
    place = torch.arange(first, first + steps) + 100.0 * number
    goal = torch.full_like(place, NO_GOAL)
    done = (torch.arange(steps) == steps - 1) & ends
    after = {"achieved_goal": place + 0.5, "desired_goal": goal, "reward": torch.full((steps, 1), 7.0), "done": done}
    return TensorDict({"achieved_goal": place, "desired_goal": goal.clone(), "next": after}, [steps])


def buffer(capacity: int = 100, *, reward_fn: Any = reached, **options: Any) -> HERReplayBuffer:
    options = {"her_ratio": 1.0, "batch_size": 64, "generator": torch.Generator().manual_seed(0), **options}
    return HERReplayBuffer(reward_fn, storage=LazyTensorStorage(capacity), **options)


def goals_of(present: list[float], strategy: str, row: float) -> list[float]:
    """Return the goals that a row may get: a plain model of the strategies."""
    mine = sorted(place for place in present if place // 100 == row // 100)
    return {
        "future": [place for place in mine if place >= row],
        "final": mine[-1:],
        "episode": mine,
        "random": present,
    }[strategy]


@pytest.mark.parametrize("strategy", list(HindsightStrategy))
def test_goals_are_uniform_over_what_the_strategy_names(strategy):
    rb = buffer(18, strategy=strategy)  # 22 rows: the ring has overwritten the first four
    for number, steps in enumerate((6, 1, 8)):
        rb.extend(episode(number, steps))
    rb.extend(episode(3, 7, ends=False))
    present = rb[:]["achieved_goal"].tolist()
    batch = rb.sample(30_000)
    counts = Counter(zip(batch["achieved_goal"].tolist(), batch["desired_goal"].tolist(), strict=True))
    weights = {
        (row, goal): 1 / len(goals) for row in present for goals in [goals_of(present, strategy, row)] for goal in goals
    }
    assert set(counts) == set(weights)
    keys = sorted(weights)
    assert p_value([counts[key] for key in keys], [weights[key] for key in keys]) > 1e-4


def test_the_first_rows_of_every_batch_are_relabelled_and_no_others():
    seen: list[Any] = []

    def reward(batch: Any) -> torch.Tensor:
        seen.append(batch.batch_size[0])
        return reached(batch)

    for sampler, ratio in (
        (RandomSampler(), 0.29),
        (SamplerWithoutReplacement(), 0.0),
        (PrioritizedSampler(100, 0.7, 0.5), 0.5),
        (SliceSampler(slice_len=4), 1.0),
    ):
        rb = buffer(reward_fn=reward, her_ratio=ratio, prefetch=2, batch_size=100, sampler=sampler)
        for number in range(5):
            rb.extend(episode(number, 20))
        count = int(100 * ratio)
        for _ in range(3):
            batch, info = rb.sample(return_info=True)
            relabelled = torch.arange(100) < count
            assert torch.equal(batch["relabelled"], relabelled)
            assert torch.equal(info["relabelled"], relabelled)
            for goals in (batch["desired_goal"], batch["next", "desired_goal"]):
                assert torch.equal(goals != NO_GOAL, relabelled)
            assert torch.equal(batch["next", "reward"][:count, 0], reached(batch)[:count])
            assert (batch["next", "reward"][count:] == 7).all()
        assert (rb[:]["desired_goal"] == NO_GOAL).all(), "stored rows keep their goals"
        rb.close()
    assert set(seen) == {28, 50, 100}, "the function gets the relabelled rows alone"


def test_other_keys():
    place = torch.arange(6.0)
    rows = TensorDict(
        {"obs": {"at": place, "to": place - 50}, "r": torch.zeros(6), "last": place == 3, "next": {"other": place}}, [6]
    )
    rb = HERReplayBuffer(
        lambda batch: batch["obs", "to"] * 2,
        her_ratio=1.0,
        strategy="final",
        goal_key=("obs", "to"),
        achieved_goal_key=("obs", "at"),
        reward_key="r",
        end_key="last",
        storage=LazyTensorStorage(6),
        batch_size=32,
    )
    rb.extend(rows)
    batch = rb.sample()
    assert torch.equal(batch["obs", "to"], torch.where(batch["obs", "at"] <= 3, 3.0, 5.0))
    assert torch.equal(batch["r"], batch["obs", "to"] * 2)
    assert (rb.goal_key, rb.achieved_goal_key) == (("obs", "to"), ("obs", "at"))
    assert (rb.reward_key, rb.end_key) == ("r", "last")


def test_what_is_wrong_is_named():
    def sampled(key: Any) -> Any:
        rb = buffer(batch_size=4, her_ratio=0.5)
        rb.extend(episode(0, 9).exclude(key))
        return rb.sample()

    raises(
        (lambda: buffer(strategy="past"), OptionError, "strategy must be one of"),
        (lambda: sampled(("next", "done")), KeyMissingError, "where episodes end"),
        *((lambda key=key: sampled(key), KeyMissingError, key) for key in ("desired_goal", "achieved_goal")),
    )
