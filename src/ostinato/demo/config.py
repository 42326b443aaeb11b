"""Settings, state and report of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from ostinato import ReplayBuffer

__all__ = ["ENV_ID", "SOLVED_RETURN", "DqnConfig", "Report", "TrainingState"]

ENV_ID = "CartPole-v1"
"""The environment: balance a pole on a cart, with a reward of 1 per step, for at most 500 steps."""
SOLVED_RETURN = 475.0
"""Mean return from which Gymnasium considers the task solved."""

_AT_LEAST_ONE = (
    "steps",
    "capacity",
    "batch_size",
    "collect_steps",
    "updates",
    "hidden",
    "explore_steps",
    "validate_every",
    "validation_episodes",
    "evaluation_episodes",
    "threads",
    "n_step",
)
_AT_LEAST_ZERO = ("seed", "warmup_steps", "patience", "epsilon_end", "alpha", "beta_start")
_ABOVE_ZERO = ("gamma", "tau", "learning_rate", "reward_scale")
_AT_MOST_ONE = ("gamma", "tau", "epsilon_end", "beta_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class DqnConfig:
    """Settings of a run of double DQN. With the defaults, seeds 0 to 14 kept an agent with a return of at least 485.

    Raises:
        OptionError: A number is out of range.
    """

    seed: int = 0
    """Seed of the weights, the exploration, the environment and the buffer, each with its own generator."""
    steps: int = 30_000
    """Maximum number of environment steps, warm-up included."""
    capacity: int = 20_000
    """Capacity of the buffer."""
    batch_size: int = 128
    """Rows per gradient step."""
    warmup_steps: int = 1_000
    """Steps with random actions before learning starts."""
    collect_steps: int = 4
    """Environment steps between two rounds of learning, which one `extend` writes."""
    updates: int = 2
    """Gradient steps per round of learning."""
    gamma: float = 0.99
    """Discount factor."""
    learning_rate: float = 1e-3
    """Initial learning rate of Adam; decreases linearly to a tenth at `steps`."""
    reward_scale: float = 0.1
    """Factor on rewards during learning, which keeps values near 10."""
    tau: float = 0.01
    """Weight of the online network in each update of the target network."""
    hidden: int = 128
    """Width of the two hidden layers."""
    epsilon_end: float = 0.04
    """Final probability of random actions."""
    explore_steps: int = 5_000
    """Steps after the warm-up over which the probability of random actions decreases from 1 to `epsilon_end`."""
    validate_every: int = 1_000
    """Environment steps between two validations."""
    validation_episodes: int = 10
    """Episodes per validation; their seeds differ from those of the evaluation."""
    patience: int = 3
    """Stop after this number of consecutive validations of at least `SOLVED_RETURN`; 0 disables early stopping."""
    evaluation_episodes: int = 20
    """Episodes of the evaluation of the final and of the kept agent, with seeds used for nothing else."""
    n_step: int = 1
    """Number of steps of the n-step return (Sutton, 1988); stored rows are single steps."""
    prioritized: bool = False
    """Sample in proportion to temporal-difference errors (Schaul et al., 2016) instead of uniformly."""
    alpha: float = 0.6
    """Exponent of the priorities."""
    beta_start: float = 0.4
    """Initial exponent of the importance weights; 1 at `steps`."""
    threads: int = 1
    """Number of threads for torch during the run."""

    def __post_init__(self) -> None:
        """Check all numbers."""
        for name in _AT_LEAST_ONE:
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in _AT_LEAST_ZERO:
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in _ABOVE_ZERO:
            self._check(name, getattr(self, name) > 0, "above 0")
        for name in _AT_MOST_ONE:
            self._check(name, getattr(self, name) <= 1, "at most 1")
        self._check(
            "warmup_steps", self.warmup_steps < self.steps, f"below steps={self.steps}: use over(steps) for short runs"
        )

    def _check(self, name: str, right: bool, allowed: str) -> None:  # noqa: FBT001
        if not right:
            msg = f"{name} must be {allowed}, got {getattr(self, name)}"
            raise OptionError(msg)

    def beta_at(self, step: int) -> float:
        """Return the exponent of the importance weights: linear from `beta_start` to 1 at `steps`."""
        return self.beta_start + (1.0 - self.beta_start) * min(1.0, step / self.steps)

    def over(self, steps: int) -> DqnConfig:
        """Return these settings for `steps` environment steps; below 10,000 the phases are shortened in proportion."""
        share = min(1.0, steps / 10_000)
        return replace(
            self,
            steps=steps,
            warmup_steps=int(self.warmup_steps * share),
            explore_steps=max(1, int(self.explore_steps * share)),
            validate_every=max(1, int(self.validate_every * share)),
        )


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a run after a round of collecting and learning."""

    step: int
    """Environment steps collected."""
    steps: int
    """Maximum number of environment steps."""
    episodes: int
    """Episodes finished."""
    mean_return: float
    """Mean return of the last 20 training episodes, with exploration; NaN before the first."""
    validation_return: float
    """Mean return of the last validation; NaN before the first."""
    rows: int
    """Rows in the buffer."""
    capacity: int
    """Capacity of the buffer."""
    samples_per_s: float
    """Rows sampled from the buffer per second of learning."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    config: DqnConfig
    buffer: ReplayBuffer = field(repr=False)
    """The buffer at the end of the run."""
    steps: int
    """Environment steps collected."""
    stopped_early: bool
    """Whether `patience` consecutive validations solved the task."""
    episode_steps: tuple[int, ...] = field(repr=False)
    """Environment step at the end of each training episode."""
    episode_returns: tuple[float, ...] = field(repr=False)
    """Return of each training episode, with exploration."""
    validation_steps: tuple[int, ...] = field(repr=False)
    """Environment step of each validation."""
    validation_returns: tuple[float, ...] = field(repr=False)
    """Mean return of each validation."""
    final_returns: tuple[float, ...]
    """Return of the final agent, the weights of the last step, in each episode of the evaluation."""
    kept_step: int
    """Step of the kept agent: the weights of the best validation, the latest if several are equal."""
    kept_returns: tuple[float, ...]
    """Return of the kept agent in each episode of the evaluation, which are the same as those of the final agent."""
    updates: int
    """Gradient steps taken."""
    buffer_s: float
    """Seconds in `extend`, `sample` and `update_priority`."""
    seconds: float
    """Seconds of the whole run, evaluation included."""

    @property
    def final_return(self) -> float:
        """Mean of `final_returns`."""
        return sum(self.final_returns) / len(self.final_returns)

    @property
    def kept_return(self) -> float:
        """Mean of `kept_returns`."""
        return sum(self.kept_returns) / len(self.kept_returns)

    @property
    def is_final_kept(self) -> bool:
        """Whether the final agent is the kept one."""
        return self.kept_step == self.steps
