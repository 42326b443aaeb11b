"""The training loop: collect, extend, sample, learn; then save and reload the buffer."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from ostinato import LazyTensorStorage, NStep, PrioritizedSampler, RandomSampler, ReplayBuffer, Sampler
from ostinato._optional import require
from ostinato.demo.agent import Agent
from ostinato.demo.config import ENV_ID, SOLVED_RETURN, DqnConfig, Report, TrainingState
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    Policy = Callable[[Tensor], Tensor]

__all__ = ["Collector", "EnvSpec", "Reopened", "evaluate", "make_buffer", "make_env", "save_and_reopen", "train"]

_UNBOUNDED = 1e6


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Sizes of an environment."""

    observation_size: int
    """Numbers per observation."""
    actions: int
    """Number of discrete actions."""
    observation_scale: tuple[float, ...]
    """Factor on each number: 4 divided by its bound, so that bounded numbers vary by about 1; 1 without a bound."""

    @classmethod
    def of(cls, env: Any) -> Self:
        """Read the spaces of a Gymnasium environment with flat observations and discrete actions."""
        bounds = [float(bound) for bound in env.observation_space.high]
        scale = tuple(4.0 / bound if bound < _UNBOUNDED else 1.0 for bound in bounds)
        return cls(len(bounds), int(env.action_space.n), scale)


def make_env() -> Any:
    """Create the Gymnasium environment.

    Raises:
        MissingExtraError: Gymnasium is not installed.
    """
    return require("gymnasium", "demo").make(ENV_ID)


class Collector:
    """Steps one environment and returns the transitions as rows.

    Args:
        seed: Seed of the environment and of the exploration.
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
            epsilon: Probability of random actions.

        Returns:
            Rows `[count, ...]` in order of time: `observation`, `action`, `reward`, `next_observation` (at the end of
            an episode its final observation), `terminated`, `truncated`, `episode` (its number) and `step` (environment
            steps before it).
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

    def __enter__(self) -> Self:
        """Return the collector itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the environment."""
        self.close()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _tensor(observation: Any) -> Tensor:
    return torch.from_numpy(np.asarray(observation, dtype=np.float32))


def evaluate(policy: Policy, seeds: Sequence[int]) -> list[float]:
    """Play one episode per seed, all in parallel, without exploration.

    Args:
        policy: From observations `[B, O]` to actions `[B]`.
        seeds: One seed per episode.

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


_RECENT_EPISODES = 20
_VALIDATION_SEEDS = 1_000_000
_EVALUATION_SEEDS = 2_000_000
"""The seeds of training, validation and evaluation do not overlap."""


def make_buffer(config: DqnConfig) -> ReplayBuffer:
    """Create the buffer of a run: rows in memory, sampled uniformly or by priority, with its own generator.

    Rows are single steps; with `n_step` above 1, samples are n-step transitions.
    """
    sampler: Sampler = RandomSampler()
    if config.prioritized:
        sampler = PrioritizedSampler(config.capacity, config.alpha, config.beta_start, eps=1e-3)
    return ReplayBuffer(
        storage=LazyTensorStorage(config.capacity),
        sampler=sampler,
        sample_unit=NStep(config.n_step, config.gamma) if config.n_step > 1 else None,
        batch_size=config.batch_size,
        generator=torch.Generator().manual_seed(config.seed),
    )


def train(config: DqnConfig, on_state: Callable[[TrainingState], None] | None = None) -> Report:
    """Train from scratch and evaluate on episodes with unseen seeds.

    Two agents are evaluated, both with weights of the target network and on the same episodes: the final one, and the
    one that is kept, that of the best validation. Validation chose it, so that its return there says too much; the
    episodes of the evaluation are others. Runs with equal settings on the same machine give equal numbers.

    Args:
        config: Settings.
        on_state: Called after each round of collecting and learning.

    Raises:
        MissingExtraError: Gymnasium is not installed.

    Examples:
        >>> report = train(DqnConfig().over(200))
        >>> report.steps, len(report.buffer)
        (200, 200)
    """
    start = time.perf_counter()
    with _threads(config.threads), Collector(config.seed) as collector:
        run = _Run(config, collector)
        while collector.steps < config.steps and not run.solved:
            run.advance()
            if on_state is not None:
                on_state(run.state())
        return run.report(start)


class _Run:
    """The state of one run."""

    def __init__(self, config: DqnConfig, collector: Collector) -> None:
        self.config = config
        self.collector = collector
        self.agent = Agent(config, collector.spec, torch.Generator().manual_seed(config.seed))
        self.buffer = make_buffer(config)
        self.validation_steps: list[int] = []
        self.validation_returns: list[float] = []
        self.best: dict[str, Tensor] = {}
        self.best_step = 0
        self.updates = 0
        self.buffer_s = 0.0
        self.learning_since: float | None = None

    @property
    def solved(self) -> bool:
        """Whether the last `patience` validations all solved the task."""
        last = self.validation_returns[-self.config.patience :]
        return 0 < self.config.patience == len(last) and min(last) >= SOLVED_RETURN

    def advance(self) -> None:
        """Collect rows, learn from batches, and validate when it is due."""
        config, collector = self.config, self.collector
        count = min(config.collect_steps, config.steps - collector.steps)
        rows = collector.collect(count, self.agent.act, self._epsilon())
        self._timed(lambda: self.buffer.extend(rows))
        if collector.steps >= config.warmup_steps:
            self.learning_since = self.learning_since or time.perf_counter()
            for _ in range(config.updates):
                self._learn()
            self.updates += config.updates
        due = (collector.steps - count) // config.validate_every < collector.steps // config.validate_every
        if due or collector.steps == config.steps:
            self._validate()

    def _learn(self) -> None:
        """Take one gradient step; with a prioritized sampler, update the priorities."""
        sampler = self.buffer.sampler
        if not isinstance(sampler, PrioritizedSampler):
            self.agent.learn(self._timed(self.buffer.sample), self.collector.steps)
            return
        sampler.beta = self.config.beta_at(self.collector.steps)
        batch, info = self._timed(lambda: self.buffer.sample(return_info=True))
        errors = self.agent.learn(batch, self.collector.steps, info["priority_weight"])
        self._timed(lambda: self.buffer.update_priority(info, errors.abs()))

    def _epsilon(self) -> float:
        done = max(0, self.collector.steps - self.config.warmup_steps) / self.config.explore_steps
        return max(self.config.epsilon_end, 1.0 - done * (1.0 - self.config.epsilon_end))

    def _timed(self, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.buffer_s += time.perf_counter() - start
        return result

    def _validate(self) -> None:
        mean = _mean(self._play(_VALIDATION_SEEDS, self.config.validation_episodes))
        if not self.validation_returns or mean >= max(self.validation_returns):
            self.best, self.best_step = self.agent.snapshot(), self.collector.steps
        self.validation_steps.append(self.collector.steps)
        self.validation_returns.append(mean)

    def _play(self, first_seed: int, episodes: int) -> list[float]:
        @torch.inference_mode()
        def policy(observations: Tensor) -> Tensor:
            values: Tensor = self.agent.target(observations)
            return values.argmax(dim=-1)

        return evaluate(policy, range(first_seed, first_seed + episodes))

    def state(self) -> TrainingState:
        """Return the state of the run."""
        elapsed = time.perf_counter() - self.learning_since if self.learning_since else 0.0
        return TrainingState(
            step=self.collector.steps,
            steps=self.config.steps,
            episodes=len(self.collector.episode_returns),
            mean_return=_mean(self.collector.episode_returns[-_RECENT_EPISODES:]),
            validation_return=self.validation_returns[-1] if self.validation_returns else float("nan"),
            rows=len(self.buffer),
            capacity=self.config.capacity,
            samples_per_s=self.updates * self.config.batch_size / elapsed if elapsed else 0.0,
        )

    def report(self, start: float) -> Report:
        """Evaluate the final and the best weights and return the report."""
        final = kept = self._play(_EVALUATION_SEEDS, self.config.evaluation_episodes)
        if self.best_step != self.collector.steps:
            self.agent.target.load_state_dict(self.best)
            kept = self._play(_EVALUATION_SEEDS, self.config.evaluation_episodes)
        return Report(
            config=self.config,
            buffer=self.buffer,
            steps=self.collector.steps,
            stopped_early=self.collector.steps < self.config.steps,
            episode_steps=tuple(self.collector.episode_steps),
            episode_returns=tuple(self.collector.episode_returns),
            validation_steps=tuple(self.validation_steps),
            validation_returns=tuple(self.validation_returns),
            final_returns=tuple(final),
            kept_step=self.best_step,
            kept_returns=tuple(kept),
            updates=self.updates,
            buffer_s=self.buffer_s,
            seconds=time.perf_counter() - start,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_BATCHES = 5


@dataclass(frozen=True, slots=True)
class Reopened:
    """The result of saving a buffer, loading it into a new one and comparing the two."""

    path: Path
    """Directory of the checkpoint."""
    rows: int
    """Rows in the checkpoint."""
    nbytes: int
    """Bytes of all files."""
    save_s: float
    """Seconds to save."""
    load_s: float
    """Seconds to load."""
    batches: int
    """Batches that both buffers sampled afterwards, equal in every field."""


def save_and_reopen(report: Report, path: str | os.PathLike[str]) -> Reopened:
    """Save the buffer of a run, load it into a new buffer, and check that both sample the same batches.

    Args:
        report: The result of `train`; its buffer is sampled from.
        path: Directory of the checkpoint; an existing checkpoint is replaced.

    Raises:
        CheckpointError: The loaded buffer samples different batches.
    """
    target = Path(path)
    start = time.perf_counter()
    report.buffer.dumps(target)
    saved = time.perf_counter()
    reopened = make_buffer(report.config)
    reopened.loads(target)
    loaded = time.perf_counter()
    for number in range(_BATCHES):
        mine, theirs = report.buffer.sample(), reopened.sample()
        different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        if different:
            msg = f"batch {number} after reopening {target} differs from the saved buffer in the fields {different}"
            raise CheckpointError(msg)
    nbytes = sum(file.stat().st_size for file in target.iterdir())
    return Reopened(target, len(reopened), nbytes, saved - start, loaded - saved, _BATCHES)
