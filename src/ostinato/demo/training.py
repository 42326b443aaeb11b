"""The loop: collect, extend, sample, learn."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ostinato import LazyTensorStorage, NStep, PrioritizedSampler, RandomSampler, ReplayBuffer, Sampler
from ostinato.demo.agent import Agent
from ostinato.demo.config import SOLVED_RETURN, DqnConfig, Progress, Report
from ostinato.demo.simulate import Collector, evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["make_buffer", "train"]

_RECENT_EPISODES = 20
_VALIDATION_SEEDS = 1_000_000
_EVALUATION_SEEDS = 2_000_000
"""Far from each other and from the seeds of training, which are small."""


def make_buffer(config: DqnConfig) -> ReplayBuffer:
    """Make the buffer of a run: rows in memory, drawn uniformly or by priority, from a generator of its own.

    Rows are single steps; with `n_step` above 1 those drawn become transitions over several.
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


def train(config: DqnConfig, on_progress: Callable[[Progress], None] | None = None) -> Report:
    """Train from nothing and evaluate on episodes of unseen seeds.

    The weights evaluated are those of the best validation, as averaged by the target network; validation and
    evaluation play episodes of different seeds. Runs with the same settings on the same machine give the same
    numbers.

    Args:
        config: Settings.
        on_progress: Called after every round of collecting and learning.

    Raises:
        MissingExtraError: if Gymnasium is not installed.

    Example:
        >>> report = train(DqnConfig().over(200))
        >>> report.steps, len(report.buffer)
        (200, 200)
    """
    start = time.perf_counter()
    with _threads(config.threads), closing(Collector(config.seed)) as collector:
        run = _Run(config, collector)
        while collector.steps < config.steps and not run.solved:
            run.advance()
            if on_progress is not None:
                on_progress(run.progress())
        return run.report(start)


class _Run:
    """The moving parts of one run."""

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
        """Whether the last validations, `patience` of them, all solved the task."""
        last = self.validation_returns[-self.config.patience :]
        return 0 < self.config.patience == len(last) and min(last) >= SOLVED_RETURN

    def advance(self) -> None:
        """Collect a few rows, learn from a few batches, validate when it is time."""
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
        """Take one gradient step; with priorities, tell the buffer how wrong the values were."""
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

    def progress(self) -> Progress:
        """Return where the run stands."""
        elapsed = time.perf_counter() - self.learning_since if self.learning_since else 0.0
        return Progress(
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
        """Evaluate the best snapshot and sum the run up."""
        self.agent.target.load_state_dict(self.best)
        returns = self._play(_EVALUATION_SEEDS, self.config.evaluation_episodes)
        return Report(
            config=self.config,
            buffer=self.buffer,
            steps=self.collector.steps,
            stopped_early=self.collector.steps < self.config.steps,
            episode_steps=tuple(self.collector.episode_steps),
            episode_returns=tuple(self.collector.episode_returns),
            validation_steps=tuple(self.validation_steps),
            validation_returns=tuple(self.validation_returns),
            snapshot_step=self.best_step,
            evaluation_returns=tuple(returns),
            updates=self.updates,
            buffer_s=self.buffer_s,
            seconds=time.perf_counter() - start,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
