"""The simulator's side: collecting rows, and playing whole episodes to see how good a policy is."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from ostinato._optional import require
from ostinato.demo.config import ENV_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Policy = Callable[[Tensor], Tensor]

__all__ = ["Collector", "EnvSpec", "evaluate", "make_env"]

_UNBOUNDED = 1e6


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What a network must know of an environment."""

    observation_size: int
    """Numbers in an observation."""
    actions: int
    """Number of discrete actions."""
    observation_scale: tuple[float, ...]
    """Factor on each number: four over its bound, so that bounded ones vary by about one; 1 without a bound."""

    @classmethod
    def of(cls, env: Any) -> Self:
        """Read the spaces of a Gymnasium environment with flat observations and discrete actions."""
        bounds = [float(bound) for bound in env.observation_space.high]
        scale = tuple(4.0 / bound if bound < _UNBOUNDED else 1.0 for bound in bounds)
        return cls(len(bounds), int(env.action_space.n), scale)


def make_env() -> Any:
    """Make the Gymnasium environment.

    Raises:
        MissingExtraError: if Gymnasium is not installed.
    """
    return require("gymnasium", "demo").make(ENV_ID)


class Collector:
    """Steps one environment and turns what happens into rows.

    Args:
        seed: Seed of the simulator and of exploration.
    """

    def __init__(self, seed: int) -> None:
        self._env = make_env()
        self.spec = EnvSpec.of(self._env)
        self._random = np.random.default_rng(seed)
        self._observation, _ = self._env.reset(seed=seed)
        self._return = 0.0
        self.steps = 0
        self.episode_steps: list[int] = []
        self.episode_returns: list[float] = []

    def collect(self, count: int, policy: Policy, epsilon: float) -> dict[str, Tensor]:
        """Take `count` steps.

        Args:
            count: Environment steps.
            policy: From observations `[1, O]` to actions `[1]`.
            epsilon: Share of random actions.

        Returns:
            Rows `[count, ...]` in order of time: `observation`, `action`, `reward`, `next_observation` (the last one
            of its episode where that ends, never the first of the next), `terminated`, `truncated`, `episode` (its
            number) and `step` (environment steps before it).
        """
        rows = [self._step(policy, epsilon) for _ in range(count)]
        columns = zip(*rows, strict=True)
        names = ("observation", "action", "reward", "next_observation", "terminated", "truncated", "episode", "step")
        return {name: torch.from_numpy(np.array(column)) for name, column in zip(names, columns, strict=True)}

    def _step(self, policy: Policy, epsilon: float) -> tuple[Any, ...]:
        before = self._observation
        explore = self._random.random() < epsilon
        action = self._random.integers(self.spec.actions) if explore else policy(_tensor(before)[None]).item()
        after, reward, terminated, truncated, _ = self._env.step(int(action))
        row = (
            before,
            int(action),
            np.float32(reward),
            after,
            terminated,
            truncated,
            len(self.episode_steps),
            self.steps,
        )
        self.steps += 1
        self._return += float(reward)
        self._observation = after
        if terminated or truncated:
            self._end_episode()
        return row

    def _end_episode(self) -> None:
        self.episode_steps.append(self.steps)
        self.episode_returns.append(self._return)
        self._return = 0.0
        self._observation, _ = self._env.reset()

    def close(self) -> None:
        """Close the simulator."""
        self._env.close()


def _tensor(observation: Any) -> Tensor:
    return torch.from_numpy(np.asarray(observation, dtype=np.float32))


def evaluate(policy: Policy, seeds: Sequence[int]) -> list[float]:
    """Play one whole episode per seed, all side by side, without exploration.

    Args:
        policy: From observations `[B, O]` to actions `[B]`.
        seeds: One for each episode.

    Returns:
        The return of each episode.
    """
    with ExitStack() as stack:
        envs = [stack.enter_context(closing(make_env())) for _ in seeds]
        observations = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
        returns = [0.0] * len(envs)
        playing = list(range(len(envs)))
        while playing:
            actions = policy(_tensor(observations[playing])).tolist()
            still = []
            for i, action in zip(playing, actions, strict=True):
                observations[i], reward, terminated, truncated, _ = envs[i].step(action)
                returns[i] += float(reward)
                if not (terminated or truncated):
                    still.append(i)
            playing = still
        return returns
