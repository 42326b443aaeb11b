"""What the audit writes: rows whose fields say where they come from; and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Array: TypeAlias = np.ndarray[Any, Any]

ALPHA = 0.6
"""Exponent of priorities in prioritized cases."""
BETA = 0.4
"""Exponent of importance weights in prioritized cases."""
_SHOWN = ("capacity", "steps", "episode")


@dataclass(frozen=True)
class Case:
    """The options of a buffer, and the rows that are written to it.

    Environment `e` has episodes of `episode + e` steps, so that environments end at different times.
    """

    capacity: int = 7
    """Steps of each environment that the buffer holds."""
    steps: int = 17
    """Steps of each environment that are written."""
    num_envs: int = 1
    """Environments that are written side by side."""
    episode: int = 3
    """Steps of an episode of the first environment."""
    ends: tuple[str, ...] = ("truncated", "terminated")
    """How episodes end, in turn."""
    n_steps: int = 1
    """Steps of a drawn transition."""
    gamma: float = 0.5
    """Discount factor of n-step transitions."""
    sequence: int = 1
    """Rows of a drawn sequence."""
    prioritized: bool = False
    """Whether rows are drawn by priority, with the exponents `ALPHA` and `BETA`."""
    shape: tuple[int, ...] = (6,)
    """Shape of an observation."""
    dtype: str = "float32"
    """Data type of observations: "float32" or "uint8"."""

    def smaller(self) -> Iterator[Case]:
        """Yield cases with less: one environment, one kind of end, a smaller number, fewer rounds of the ring."""
        if self.num_envs > 1:
            yield replace(self, num_envs=1)
        if len(self.ends) > 1:
            yield from (replace(self, ends=(end,)) for end in self.ends)
        if self.steps > self.capacity:
            yield replace(self, steps=self.steps - self.capacity)
        if self.capacity > 1 + max(self.n_steps, self.sequence):
            rounds, cursor = divmod(self.steps, self.capacity)
            yield replace(self, capacity=self.capacity - 1, steps=rounds * (self.capacity - 1) + cursor)
            yield replace(self, capacity=self.capacity - 1)
        for name, bound in {"steps": 1, "episode": 1, "n_steps": 2, "sequence": 2}.items():
            if getattr(self, name) > bound:
                yield replace(self, **{name: getattr(self, name) - 1})

    def __str__(self) -> str:
        """The call that makes the case."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        shown = [f"{name}={value!r}" for name, (value, usual) in values.items() if name in _SHOWN or value != usual]
        return f"Case({', '.join(shown)})"


class Row(NamedTuple):
    """One step of one environment."""

    env: int
    episode: int
    step: int
    reward: float
    end: str
    """"terminated", "truncated" or ""."""

    def __str__(self) -> str:
        """The row in words."""
        return f"environment {self.env}, episode {self.episode}, step {self.step}"


class Step(NamedTuple):
    """One step of all environments, as an adapter writes it: tensors on the CPU."""

    obs: Tensor
    """`[E, *shape]`, of the dtype of the case."""
    action: Tensor
    """`[E, 3]`, float32."""
    reward: Tensor
    """`[E]`, float32."""
    next_obs: Tensor
    """`[E, *shape]`: at the end of an episode its last observation, not the first one of the next episode."""
    terminated: Tensor
    """`[E]`, bool."""
    truncated: Tensor
    """`[E]`, bool."""


@dataclass(frozen=True)
class Sample:
    """A batch as an adapter returns it: arrays or tensors, `[B, ...]`; of sequences `[B, T, ...]` or `[B * T, ...]`."""

    obs: Any
    action: Any
    reward: Any
    next_obs: Any
    terminated: Any
    """Where the target must not bootstrap."""
    truncated: Any = None
    """Where an episode ended without termination; None if the buffer does not return it."""
    discount: Any = None
    """What the value of the next observation is multiplied with; None if the buffer does not return it."""
    weight: Any = None
    """Importance weights of prioritized draws."""
    index: Any = None
    """What `Adapter.prioritize` needs."""

    @property
    def rows(self) -> int:
        """Number of rows, those of sequences included."""
        return np.asarray(self.reward).size


@final
class Stream:
    """The rows of a case, in the order of writing, and where each one is found.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self.rows: list[list[Row]] = [[] for _ in range(case.num_envs)]
        """The rows written so far, by environment."""
        self._places: dict[tuple[int, int, int], int] = {}
        size = int(np.prod(case.shape))
        limits = np.iinfo(np.uint8) if case.dtype == "uint8" else np.finfo(np.float32)
        self._filling = np.resize(np.array([limits.min, limits.max, 1]), size).astype(case.dtype)

    def steps(self, count: int) -> Iterator[Step]:
        """Record and yield the next steps."""
        for _ in range(count):
            rows = [self._next(env) for env in range(self._case.num_envs)]
            arrays = (
                np.stack([self.observation(row.env, row.episode, row.step) for row in rows]),
                np.stack([self.action(row) for row in rows]),
                np.array([row.reward for row in rows], np.float32),
                np.stack([self.observation(row.env, row.episode, row.step + 1) for row in rows]),
                np.array([row.end == "terminated" for row in rows]),
                np.array([row.end == "truncated" for row in rows]),
            )
            yield Step(*map(torch.from_numpy, arrays))

    def _next(self, env: int) -> Row:
        case, rows = self._case, self.rows[env]
        before = rows[-1] if rows else Row(env, -1, 0, 0.0, "terminated")
        episode, step = (before.episode + 1, 0) if before.end else (before.episode, before.step + 1)
        last = step + 1 == case.episode + env
        end = case.ends[(episode + env) % len(case.ends)] if last else ""
        row = Row(env, episode, step, float(len(rows) + 1 + 100 * env), end)
        self._places[env, episode, step] = len(rows)
        rows.append(row)
        return row

    def observation(self, env: int, episode: int, step: int) -> Array:
        """Return the observation at a step: three numbers say which, the others are the limits of the dtype."""
        values = self._filling.copy()
        values[:3] = (env, episode % 250, step)
        return values.reshape(self._case.shape)

    def action(self, row: Row) -> Array:
        """Return the action of a row."""
        return np.array([row.env, row.episode, row.step], np.float32)

    def find(self, tags: Array) -> tuple[int, int] | None:
        """Return the environment and the position of the row that the first numbers of an observation name."""
        if not np.all(np.isfinite(tags[:3])):
            return None
        env, episode, step = (int(number) for number in tags[:3])
        place = self._places.get((env, episode, step))
        return None if place is None else (env, place)
