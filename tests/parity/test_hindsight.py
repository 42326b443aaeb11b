"""Hindsight buffers: which rows are relabelled, with which goals and rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._differences import Difference, Fails, check
from ._script import Note, both


def _reward(batch: Any) -> torch.Tensor:
    reward: torch.Tensor = batch["achieved_goal"] - batch["desired_goal"]
    return reward.unsqueeze(-1)


def _episode(number: int, steps: int, flag: str = "done", *, ends: bool = True) -> TensorDict:
    place = torch.arange(steps) + 100.0 * number
    last = (torch.arange(steps) == steps - 1) & ends
    after = {"achieved_goal": place + 0.5, "desired_goal": place * 0 - 1, "reward": place.unsqueeze(-1) * 0 + 7}
    now = {"achieved_goal": place, "desired_goal": place * 0 - 1}
    return TensorDict({**now, "next": {**after, flag: last.unsqueeze(-1)}}, [steps])


def _buffer(lib: Any, capacity: int = 20, **options: Any) -> Any:
    sampler = lib.SamplerWithoutReplacement(shuffle=False)
    return lib.HERReplayBuffer(_reward, storage=lib.LazyTensorStorage(capacity), sampler=sampler, **options)


def _part(batch: Any) -> Any:
    keys = ("achieved_goal", "desired_goal", ("next", "desired_goal"), ("next", "reward"))
    return [batch[key] for key in keys]


@pytest.mark.parametrize(("ratio", "flag"), [(0.0, "done"), (0.3, "terminated"), (1.0, "done")])
@both
def test_batches_are_the_same_without_chance(lib: Any, note: Note, ratio: float, flag: str) -> None:
    rb = _buffer(lib, strategy="final", her_ratio=ratio, batch_size=10)
    for number, steps in enumerate((4, 1, 5)):
        rb.extend(_episode(number, steps, flag))
    rb.extend(_episode(3, 6, flag, ends=False))
    for _ in range(4):
        note("batch", lambda: _part(rb.sample()))
    note("of another size", lambda: _part(rb.sample(7)))


@pytest.mark.parametrize("strategy", ["future", "episode", "random"])
@both
def test_goals_come_from_the_same_rows(lib: Any, note: Note, strategy: str) -> None:
    rb = _buffer(lib, strategy=strategy, her_ratio=1.0, batch_size=10)
    rb.extend(torch.cat([_episode(number, 5) for number in range(2)]))
    batches = [rb.sample() for _ in range(150)]
    note("goals", lambda: [sorted({float(batch["desired_goal"][row]) for batch in batches}) for row in range(10)])


def _key(lib: Any) -> bool:
    rb = _buffer(lib)
    rb.extend(_episode(0, 5))
    return "relabelled" in rb.sample(4).keys()  # noqa: SIM118 (a TensorDict iterates over rows)


def _transformed(lib: Any) -> set[float]:
    rb = _buffer(lib, her_ratio=1.0, strategy="final")
    rb.append_transform(lambda batch: batch.set("desired_goal", batch["desired_goal"] * 10))
    rb.extend(_episode(0, 5))
    return set(rb.sample(5)["desired_goal"].tolist())


def _no_flag(lib: Any) -> str:
    rb = _buffer(lib)
    try:
        rb.extend(_episode(0, 5).exclude(("next", "done")))
    except KeyError:
        return "extend"
    try:
        rb.sample(4)
    except KeyError:
        return "sample"
    return "none"


def _truncated(lib: Any) -> set[float]:
    rb = _buffer(lib, her_ratio=1.0, strategy="final")
    for number in range(2):
        rb.extend(_episode(number, 3, "truncated").set(("next", "done"), torch.zeros(3, dtype=torch.bool)))
    return set(rb.sample(3)["desired_goal"].tolist())


def _environments(lib: Any) -> int:
    storage = lib.LazyTensorStorage(10, ndim=2)
    rb = lib.HERReplayBuffer(_reward, storage=storage, dim_extend=0)
    rb.extend(_episode(0, 10).view(5, 2))
    return len(rb.sample(4))


DIFFERENCES = [
    Difference("the batch tells which rows are relabelled", _key, False, True),
    Difference("transforms come after relabelling", _transformed, {4.0}, {40.0}),
    Difference("a field that ends episodes is asked for when rows are written", _no_flag, "sample", "extend"),
    Difference("a truncated row ends its episode", _truncated, {102.0}, {2.0}),
    Difference("several environments", _environments, Fails("NotImplementedError"), 4),
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.reason)
def test_differences(difference: Difference) -> None:
    check(difference)
