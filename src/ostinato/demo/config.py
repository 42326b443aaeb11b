"""Settings of the demo, its progress and its report: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from ostinato import ReplayBuffer

__all__ = ["SOLVED_RETURN", "DqnConfig", "Progress", "Report"]

SOLVED_RETURN = 475.0
"""Mean return from which Gymnasium calls CartPole-v1 solved; no episode can give more than 500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DqnConfig:
    """Settings of one run: Double DQN on a Gymnasium environment with discrete actions.

    Raises:
        OptionError: if a number is out of its range.
    """

    seed: int = 0
    """Seeds weights, exploration, simulator and buffer, each with a generator of its own."""
    steps: int = 30_000
    """Most environment steps to collect, warm-up included."""
    env_id: str = "CartPole-v1"
    """The Gymnasium environment: flat observations, discrete actions."""
    capacity: int = 20_000
    """Rows that the buffer holds before the oldest are overwritten."""
    batch_size: int = 128
    """Rows per gradient step."""
    warmup_steps: int = 1_000
    """Steps with random actions before learning starts."""
    collect_steps: int = 4
    """Environment steps between two rounds of learning; they enter the buffer in one `extend`."""
    updates: int = 2
    """Gradient steps in one round of learning."""
    gamma: float = 0.99
    """Discount factor."""
    learning_rate: float = 1e-3
    """Step size of Adam at the start; it falls along a line to a tenth of that at `steps`."""
    reward_scale: float = 0.1
    """Factor on rewards while learning: it keeps the values that the network has to reach near 10."""
    tau: float = 0.01
    """Share of the learned weights that the target network takes in at each gradient step."""
    hidden: int = 128
    """Width of the two hidden layers."""
    epsilon_end: float = 0.04
    """Share of random actions when exploration has come down."""
    explore_steps: int = 5_000
    """Steps after the warm-up over which that share falls from 1 to `epsilon_end`."""
    validate_every: int = 1_000
    """Environment steps between two validations."""
    validation_episodes: int = 10
    """Episodes per validation; their seeds are not those of the final evaluation."""
    patience: int = 3
    """Stop after this many validations in a row of `SOLVED_RETURN` or more; 0 never stops early."""
    evaluation_episodes: int = 20
    """Episodes of the final evaluation."""
    threads: int = 1
    """Threads that torch uses meanwhile: networks this small gain nothing from more."""

    def __post_init__(self) -> None:
        """Check every number."""
        may_be_zero = {"seed", "patience", "epsilon_end", "warmup_steps"}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str):
                continue
            low = 0 if item.name in may_be_zero else 1 if isinstance(value, int) else 0.0
            high = 1.0 if item.name in {"gamma", "tau", "epsilon_end"} else float("inf")
            if not low <= value <= high or (isinstance(item.default, float) and not may_be_zero & {item.name} and not value):
                msg = f"{item.name} must be in {'[' if item.name in may_be_zero or low else '('}{low}, {high}], got {value}"
                raise OptionError(msg)
        if self.warmup_steps >= self.steps:
            msg = f"warmup_steps={self.warmup_steps} leaves nothing to learn in steps={self.steps}: lower it, or use over()"
            raise OptionError(msg)

    def over(self, steps: int) -> DqnConfig:
        """Return these settings for `steps` environment steps; for a short run the phases shrink along."""
        share = min(1.0, steps / 10_000)
        return replace(
            self,
            steps=steps,
            warmup_steps=int(self.warmup_steps * share),
            explore_steps=max(1, int(self.explore_steps * share)),
            validate_every=max(1, int(self.validate_every * share)),
        )
