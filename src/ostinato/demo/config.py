"""Settings of the demo, its progress and its report: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from ostinato import ReplayBuffer

__all__ = ["ENV_ID", "SOLVED_RETURN", "DqnConfig", "Progress", "Report"]

ENV_ID = "CartPole-v1"
"""The simulator: a cart that balances a pole, one point for each step that it stays up, 500 at most."""
SOLVED_RETURN = 475.0
"""Mean return from which Gymnasium calls it solved."""

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
    """Settings of one run of Double DQN; with the defaults seeds 0 to 14 all ended at 485 or more.

    Raises:
        OptionError: if a number is out of its range.
    """

    seed: int = 0
    """Seeds weights, exploration, simulator and buffer, each with a generator of its own."""
    steps: int = 30_000
    """Most environment steps to collect, warm-up included."""
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
    n_step: int = 1
    """Steps whose rewards are added up before the target bootstraps (Sutton, 1988); rows stay single steps."""
    prioritized: bool = False
    """Draw rows by their temporal-difference errors (Schaul et al., 2016) instead of uniformly."""
    alpha: float = 0.6
    """How much the errors matter, if so."""
    beta_start: float = 0.4
    """How much importance weights correct for it when learning starts; 1 at `steps`."""
    threads: int = 1
    """Threads that torch uses meanwhile: networks this small gain nothing from more."""

    def __post_init__(self) -> None:
        """Check every number."""
        for name in _AT_LEAST_ONE:
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in _AT_LEAST_ZERO:
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in _ABOVE_ZERO:
            self._check(name, getattr(self, name) > 0, "above 0")
        for name in _AT_MOST_ONE:
            self._check(name, getattr(self, name) <= 1, "at most 1")
        self._check(
            "warmup_steps", self.warmup_steps < self.steps, f"below steps={self.steps}: use over() for short runs"
        )

    def _check(self, name: str, right: bool, allowed: str) -> None:  # noqa: FBT001
        if not right:
            msg = f"{name} must be {allowed}, got {getattr(self, name)}"
            raise OptionError(msg)

    def beta_at(self, step: int) -> float:
        """Return the exponent of importance weights: on a line from `beta_start` to 1 at `steps`."""
        return self.beta_start + (1.0 - self.beta_start) * min(1.0, step / self.steps)

    def over(self, steps: int) -> DqnConfig:
        """Return these settings for `steps` environment steps; below 10,000 the phases shrink along."""
        share = min(1.0, steps / 10_000)
        return replace(
            self,
            steps=steps,
            warmup_steps=int(self.warmup_steps * share),
            explore_steps=max(1, int(self.explore_steps * share)),
            validate_every=max(1, int(self.validate_every * share)),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands."""

    step: int
    """Environment steps collected."""
    steps: int
    """Most steps that there will be."""
    episodes: int
    """Episodes finished."""
    mean_return: float
    """Mean return of the last 20 episodes; NaN before the first."""
    validation_return: float
    """Mean return of the last validation; NaN before the first."""
    rows: int
    """Rows in the buffer."""
    capacity: int
    """Most rows that fit."""
    samples_per_s: float
    """Rows sampled from the buffer per second of learning."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run gave."""

    config: DqnConfig
    buffer: ReplayBuffer = field(repr=False)
    """The buffer as the run left it."""
    steps: int
    """Environment steps collected."""
    stopped_early: bool
    """Whether the run ended because `patience` validations in a row had solved the task."""
    episode_steps: tuple[int, ...] = field(repr=False)
    """Environment step at which each training episode ended."""
    episode_returns: tuple[float, ...] = field(repr=False)
    """Return of each training episode, random actions included."""
    validation_steps: tuple[int, ...] = field(repr=False)
    """Environment step of each validation."""
    validation_returns: tuple[float, ...] = field(repr=False)
    """Mean return of each validation."""
    snapshot_step: int
    """Step of the weights that were evaluated: those of the best validation, the latest of equals."""
    evaluation_returns: tuple[float, ...]
    """Return of each episode of the final evaluation."""
    updates: int
    """Gradient steps taken."""
    buffer_s: float
    """Seconds spent in `extend`, `sample` and `update_priority`."""
    seconds: float
    """Seconds of the whole run, evaluation included."""

    @property
    def mean_return(self) -> float:
        """Mean return of the final evaluation."""
        return sum(self.evaluation_returns) / len(self.evaluation_returns)
