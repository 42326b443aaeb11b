"""A vector environment with known values, and the log of its transitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

gym = pytest.importorskip("gymnasium", minversion="1.1")
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

LENGTHS = (
    (3, "terminated"),
    (1, "truncated"),
    (5, "truncated"),
    (2, "terminated"),
    (4, "terminated"),
    (1, "terminated"),
)
MODES = {mode.name: mode for mode in AutoresetMode}


class Transition(NamedTuple):
    """One true transition."""

    obs: tuple[float, ...]
    action: int
    reward: float
    next_obs: tuple[float, ...]
    terminated: bool
    truncated: bool


class Known(gym.Env):  # type: ignore[name-defined, misc, unused-ignore]
    """Observations are (environment, episode, step); episodes have the lengths and ends of a list."""

    def __init__(self, number: int, *, nested: bool = False) -> None:
        box = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        space = gym.spaces.Dict({"where": box, "goal": gym.spaces.Dict({"far": box})}) if nested else box
        self.observation_space: Any = space
        self.action_space: Any = gym.spaces.Discrete(1000)
        self.number, self.nested, self.episode, self.step_number = number, nested, -1, 0

    def _see(self) -> Any:
        here = np.array([self.number, self.episode, self.step_number], np.float32)
        return {"where": here, "goal": {"far": -here}} if self.nested else here

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.step_number = self.episode + 1, 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        length, how = LENGTHS[(self.number + self.episode) % len(LENGTHS)]
        over = self.step_number == length
        reward = float(action) + 0.5
        return self._see(), reward, over and how == "terminated", over and how == "truncated", {}


def make(envs: int, mode: str, *, nested: bool = False, copy: bool = True) -> SyncVectorEnv:
    """The vector environment."""
    parts = [lambda i=i: Known(i, nested=nested) for i in range(envs)]
    return SyncVectorEnv(parts, autoreset_mode=MODES[mode], copy=copy)


def log(envs: int, mode: str, actions: np.ndarray) -> list[list[Transition]]:
    """What each environment did, stepped by hand; in mode NEXT_STEP the action after an end is ignored."""
    out: list[list[Transition]] = []
    for number in range(envs):
        env, rows, over = Known(number), [], False
        before, _ = env.reset()
        for action in actions[:, number].tolist():
            if over:
                before, _ = env.reset()
                over = False
                if mode == "NEXT_STEP":
                    continue
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append(Transition(tuple(before), action, reward, tuple(after), terminated, truncated))
            before, over = after, terminated or truncated
        out.append(rows)
    return out


def run(
    steps: Any, env: SyncVectorEnv, actions: np.ndarray, extra: Callable[[np.ndarray], Any] | None = None
) -> list[tuple[np.ndarray, np.ndarray, Any]]:
    """Step an environment and hand everything on; where it does not reset by itself, reset what has ended.

    Returns:
        For each step its action, which environments had ended before it, and the index of its rows.
    """
    steps.reset(env.reset()[0])
    over, done = np.zeros(env.num_envs, bool), []
    for action in actions:
        more = {} if extra is None else {"extra": extra(action)}
        *result, terminated, truncated, info = env.step(action)
        done.append((action, over, steps.add_step(action, *result, terminated, truncated, info, **more)))
        over = terminated | truncated
        if env.metadata["autoreset_mode"] == AutoresetMode.DISABLED and over.any():
            steps.reset(env.reset(options={"reset_mask": over.copy()})[0], over)
    return done


def actions_for(count: int, envs: int) -> np.ndarray:
    """Actions that are all different, so that a row tells which one it belongs to."""
    return np.arange(count * envs).reshape(count, envs)
