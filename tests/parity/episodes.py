"""Rows of episodes, and hindsight buffers, for the scripts of this folder."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict


def steps(*lengths: int, **fields: Any) -> TensorDict:
    """Rows of episodes of these lengths, ended by `("next", "done")`."""
    count = sum(lengths)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    numbers = torch.arange(count, dtype=torch.float32)
    then = {"obs": numbers + 1, "done": done, "terminated": done.clone()}
    return TensorDict({"obs": numbers, "next": then, **fields}, [count])


def hindsight_episode(number: int, count: int, flag: str = "done", *, ends: bool = True) -> TensorDict:
    """An episode whose achieved goals say which row they are of."""
    place = torch.arange(count) + 100.0 * number
    last = (torch.arange(count) == count - 1) & ends
    now = {"achieved_goal": place, "desired_goal": place * 0 - 1}
    after = {**now, "achieved_goal": place + 0.5, "reward": place.unsqueeze(-1) * 0 + 7, flag: last.unsqueeze(-1)}
    return TensorDict({**now, "next": after}, [count])


def hindsight_buffer(lib: Any, **options: Any) -> Any:
    """A hindsight buffer that samples in order; the reward is the distance to the goal."""

    def reward(batch: Any) -> Any:
        return (batch["achieved_goal"] - batch["desired_goal"]).unsqueeze(-1)

    parts = {"storage": lib.LazyTensorStorage(20), "sampler": lib.SamplerWithoutReplacement(shuffle=False)}
    return lib.HERReplayBuffer(reward, **{**parts, **options})
