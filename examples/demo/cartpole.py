"""The demo, `ostinato demo`: double DQN on Gymnasium's CartPole-v1, with the public API of Ostinato.

Collects with an epsilon-greedy policy, extends the buffer, samples and learns; then saves the buffer, loads it into a
new one, compares what both sample, and draws a figure. About half a minute of processor time.

    ostinato demo                     # or: python examples/demo/cartpole.py
    ostinato demo --steps 2000        # a few seconds, learns little

Needs `pip install 'ostinato[demo]'`.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import gymnasium
import numpy as np
import torch
from rich import console, progress
from torch import Tensor, nn

from ostinato import LazyTensorStorage, NStep, PrioritizedSampler, RandomSampler, ReplayBuffer, Sampler
from ostinato.errors import CheckpointError, OptionError
from ostinato.viz import Bars, Curves, FigureSpec, Level, Line, Mark, Points, Stack, draw

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Policy = Callable[[Tensor], Tensor]

# -- settings and report ---------------------------------------------------------------------------------------------

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
        return _mean(self.final_returns)

    @property
    def kept_return(self) -> float:
        """Mean of `kept_returns`."""
        return _mean(self.kept_returns)

    @property
    def is_final_kept(self) -> bool:
        """Whether the final agent is the kept one."""
        return self.kept_step == self.steps


# -- the agent -------------------------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    """A Q-network with two hidden layers and SiLU activations, which gave steadier returns on CartPole than ReLU."""

    def __init__(self, spec: EnvSpec, hidden: int, generator: torch.Generator) -> None:
        """Initialize the weights.

        Args:
            spec: Sizes and scale of the observations, number of actions.
            hidden: Width of the hidden layers.
            generator: Generator for the weights; torch's global generator is not used.
        """
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(spec.observation_scale, dtype=torch.float32, device="cpu"))
        self.first = _linear(spec.observation_size, hidden, generator)
        self.second = _linear(hidden, hidden, generator)
        self.last = _linear(hidden, spec.actions, generator)

    def forward(self, observation: Tensor) -> Tensor:
        """Return the value of each action, float32 `[B, A]`, for observations `[B, O]`."""
        hidden = nn.functional.silu(self.first(observation * self.scale))
        values: Tensor = self.last(nn.functional.silu(self.second(hidden)))
        return values


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    # the meta device draws no random numbers
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = 1.0 / math.sqrt(inputs)
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer


class Agent:
    """Double DQN (van Hasselt et al., 2016).

    The online network selects the next action, and the target network evaluates it.

    Args:
        config: Settings.
        spec: Sizes of the environment.
        generator: Generator for the initial weights.
    """

    def __init__(self, config: DqnConfig, spec: EnvSpec, generator: torch.Generator) -> None:
        self.config = config
        self.network = QNetwork(spec, config.hidden, generator)
        self.target = QNetwork(spec, config.hidden, generator)
        self.target.load_state_dict(self.network.state_dict())
        self.target.requires_grad_(requires_grad=False)
        # With the default eps of 1e-8, tiny gradients cause full steps once the task is solved, and the return falls.
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=config.learning_rate, eps=1e-3, fused=True)
        self._pairs = list(zip(self.target.parameters(), self.network.parameters(), strict=True))

    def act(self, observations: Tensor) -> Tensor:
        """Return the greedy actions of the online network, int64 `[B]`, for observations `[B, O]`."""
        with torch.inference_mode():
            values: Tensor = self.network(observations)
            return values.argmax(dim=-1)

    def learn(self, batch: Mapping[str, Tensor], step: int, weights: Tensor | None = None) -> Tensor:
        """Take one gradient step.

        Args:
            batch: Rows in the format of `Collector.collect`, or n-step transitions that `NStep` made from them.
            step: Environment steps so far; the learning rate decreases with them.
            weights: Importance weights of the rows, float32 `[B]`; None for uniform sampling.

        Returns:
            Temporal-difference errors, float32 `[B]`.
        """
        target = self.targets(batch)
        values: Tensor = self.network(batch["observation"])
        value = values.gather(1, batch["action"][:, None]).squeeze(1)
        losses = nn.functional.smooth_l1_loss(value, target, reduction="none")
        loss = losses.mean() if weights is None else (losses * weights).mean()
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * (1.0 - 0.9 * step / self.config.steps)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        with torch.no_grad():
            for averaged, learned in self._pairs:
                averaged.lerp_(learned, self.config.tau)
        return target - value.detach()

    @torch.no_grad()
    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the targets r + gamma * Q_target(s', argmax_a Q(s', a)), float32 `[B]`.

        If the batch has the field `gamma` (n-step transitions over `k` steps), r is the discounted sum of rewards, s'
        the last state, and gamma^k the value of that field. The target of a terminated episode does not bootstrap; that
        of a truncated episode does.
        """
        following = batch["next_observation"]
        choice = self.network(following).argmax(dim=-1, keepdim=True)
        values: Tensor = self.target(following)
        future = values.gather(1, choice).squeeze(1)
        reward = batch["reward"] * self.config.reward_scale
        return reward + batch.get("gamma", self.config.gamma) * future.masked_fill(batch["terminated"], 0.0)

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the weights of the target network."""
        return {name: value.clone() for name, value in self.target.state_dict().items()}


# -- training --------------------------------------------------------------------------------------------------------

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
    """Create the Gymnasium environment."""
    return gymnasium.make(ENV_ID)


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


def _mean(values: Sequence[float]) -> float:
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


# -- the figure ------------------------------------------------------------------------------------------------------

_SMOOTH_EPISODES = 10
_MAX_POINTS = 6_000
_BARS = 24
_TRACK_M = 2.4
_LEANING_DEGREES = 12.0


def training_figure(report: Report) -> FigureSpec:
    """Return the figure of a run.

    Args:
        report: The result of `train`; its buffer is read, not changed.
    """
    rows = {name: column.numpy() for name, column in report.buffer.read_all_in_order().items()}
    final = f"final agent {report.final_return:.1f}"
    kept = f"kept agent (step {report.kept_step:,}) {report.kept_return:.1f}"
    agents = final if report.is_final_kept else f"{final}, {kept}"
    episodes = f"{len(report.final_returns)} new episodes"
    return FigureSpec(
        title=f"Double DQN on {ENV_ID}: {agents} (mean return of {episodes})",
        subtitle=(
            f"seed {report.config.seed} · {report.steps:,} environment steps · {report.updates:,} updates of "
            f"{report.config.batch_size} {_drawn(report.config.n_step)} · {report.seconds:.0f} s · "
            f"buffer {len(report.buffer):,} of {report.config.capacity:,} rows"
        ),
        rows=(
            (_learning(report),),
            (_states(rows, report.steps), _ages(rows, report.steps), _last_panel(report, rows)),
        ),
    )


def _drawn(n_step: int) -> str:
    return "rows" if n_step == 1 else f"{n_step}-step returns"


def _learning(report: Report) -> Curves:
    steps, returns = report.episode_steps, report.episode_returns
    return Curves(
        title="Return per training episode",
        x_label="environment steps",
        y_label="return (steps upright)",
        lines=(
            Line("episode, with exploration", _floats(steps), _floats(returns), "quiet", "dots"),
            Line(f"mean of {_SMOOTH_EPISODES} episodes", _floats(steps), _trailing_mean(returns), "first"),
            Line(
                f"validation: mean of {report.config.validation_episodes}\nepisodes, greedy",
                _floats(report.validation_steps),
                report.validation_returns,
                "second",
                "beads",
            ),
        ),
        levels=(Level(SOLVED_RETURN, f"solved: {SOLVED_RETURN:g}"),),
        marks=_marks(report),
        y_range=(0.0, 520.0),
    )


def _marks(report: Report) -> tuple[Mark, ...]:
    """Mark the returns of the agents in the evaluation, at the steps of their weights."""
    episodes = f"{len(report.final_returns)} new episodes"
    if report.is_final_kept:
        return (Mark(report.steps, report.final_return, f"final agent, which is kept:\nmean of {episodes}"),)
    return (
        Mark(report.kept_step, report.kept_return, f"kept agent:\nmean of {episodes}"),
        Mark(report.steps, report.final_return, "final agent:\nmean of the same ones", "D"),
    )


def _states(rows: dict[str, Any], now: int) -> Points:
    """Plot the states of the rows."""
    order = np.argsort(rows["step"])
    chosen = order[:: math.ceil(len(order) / _MAX_POINTS)]
    share = "" if len(chosen) == len(order) else f" (1 row in {math.ceil(len(order) / _MAX_POINTS)})"
    observations = rows["observation"][chosen]
    return Points(
        title=f"States in the buffer{share}",
        x_label="cart position (m)",
        y_label="pole angle (degrees)",
        value_label="age (environment steps)",
        x=_floats(observations[:, 0]),
        y=_floats(np.degrees(observations[:, 2])),
        value=_floats(now - rows["step"][chosen]),
        levels=(
            Level(-_TRACK_M, "end of episode", axis="x"),
            Level(_TRACK_M, axis="x"),
            Level(-_LEANING_DEGREES),
            Level(_LEANING_DEGREES),
        ),
    )


def _ages(rows: dict[str, Any], now: int) -> Bars:
    """Plot rows by age and by how their episode ended."""
    ages = now - rows["step"]
    terminated = np.isin(rows["episode"], rows["episode"][rows["terminated"]])
    truncated = np.isin(rows["episode"], rows["episode"][rows["truncated"]]) & ~terminated
    edges = np.linspace(0, max(int(ages.max()), 1), _BARS + 1)
    return Bars(
        title="Age of rows by end of episode",
        x_label="age (environment steps)",
        y_label="rows",
        edges=_floats(edges),
        stacks=(
            Stack("terminated", _counts(ages[terminated], edges), "second"),
            Stack("truncated", _counts(ages[truncated], edges), "first"),
            Stack("unfinished", _counts(ages[~terminated & ~truncated], edges), "quiet"),
        ),
    )


def _actions(rows: dict[str, Any]) -> Bars:
    """Plot rows by pole angle and action."""
    angles = np.degrees(rows["observation"][:, 2])
    edges = np.linspace(-_LEANING_DEGREES, _LEANING_DEGREES, _BARS + 1)
    return Bars(
        title="Pole angle by action",
        x_label="pole angle (degrees)",
        y_label="rows",
        edges=_floats(edges),
        stacks=(
            Stack("push left", _counts(angles[rows["action"] == 0], edges), "third"),
            Stack("push right", _counts(angles[rows["action"] == 1], edges), "first"),
        ),
    )


def _last_panel(report: Report, rows: dict[str, Any]) -> Bars:
    sampler = report.buffer.sampler
    if not isinstance(sampler, PrioritizedSampler):
        return _actions(rows)
    return _priorities(sampler, rows)


def _priorities(sampler: PrioritizedSampler, rows: dict[str, Any]) -> Bars:
    """Plot rows by priority, on a logarithmic axis."""
    kept = sampler.priorities.numpy() + sampler.eps
    exponents = np.log10(kept)
    edges = np.linspace(exponents.min() - 0.05, exponents.max() + 0.05, _BARS + 1)
    ended = rows["terminated"]
    return Bars(
        title="Priorities: last |TD error|",
        x_label=f"log10(priority + {sampler.eps:g})",
        y_label="rows",
        edges=_floats(edges),
        stacks=(
            Stack("not terminal", _counts(exponents[~ended], edges), "first"),
            Stack("terminal", _counts(exponents[ended], edges), "second"),
        ),
    )


def _counts(values: Any, edges: Any) -> tuple[float, ...]:
    return _floats(np.histogram(values, bins=edges)[0])


def _trailing_mean(returns: tuple[float, ...]) -> tuple[float, ...]:
    sums = np.cumsum((0.0, *returns))
    ends = np.arange(1, len(returns) + 1)
    starts = np.maximum(ends - _SMOOTH_EPISODES, 0)
    return _floats((sums[ends] - sums[starts]) / (ends - starts))


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


# -- what is printed and written -------------------------------------------------------------------------------------


def run(output: Path, config: DqnConfig) -> None:
    """Train, save and reopen the buffer, and draw it; write `checkpoint`, `demo.png` and `report.json`.

    Args:
        output: Directory for the three, which are replaced.
        config: Settings.
    """
    output.mkdir(parents=True, exist_ok=True)
    out = console.Console(highlight=False, markup=False)
    with _shown(config, out) as on_state:
        report = train(config, on_state)
    _print_result(out, report)
    reopened = save_and_reopen(report, output / "checkpoint")
    image = draw(training_figure(report), output / "demo.png")
    summary = {each.name: getattr(report, each.name) for each in fields(report) if each.name != "buffer"}
    means = {"final_return": report.final_return, "kept_return": report.kept_return}
    summary = {**summary, **means, "config": asdict(config)}
    (output / "report.json").write_text(f"{json.dumps(summary, indent=2)}\n")
    seconds = f"saved in {reopened.save_s * 1000:.0f} ms, reloaded in {reopened.load_s * 1000:.0f} ms"
    _say(
        out,
        f"Checkpoint: {reopened.rows:,} rows, {reopened.nbytes / 1000:,.0f} kB, {seconds}; "
        f"the next {reopened.batches} batches of both buffers are equal",
    )
    _say(out, f"Figure:     {image}")
    _say(out, f"Contents:   ostinato inspect {reopened.path}")


def _say(out: console.Console, text: str, style: str = "") -> None:
    """Print a line; a terminal wraps it at words, a file gets it whole."""
    out.print(text, style=style, soft_wrap=not out.is_terminal)


@contextmanager
def _shown(config: DqnConfig, out: console.Console) -> Iterator[Callable[[TrainingState], None]]:
    """Show the state of the training in a line while the block runs; yields the function to call with each."""
    _say(out, f"Double DQN on {ENV_ID} with ostinato.ReplayBuffer, at most {config.steps:,} steps", "bold")
    columns = (
        progress.BarColumn(bar_width=7),
        progress.TextColumn("{task.completed:>6,.0f} steps  {task.fields[facts]}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=out) as bar:
        task = bar.add_task("train", total=config.steps, facts="")

        def show(now: TrainingState) -> None:
            returned = "   -" if math.isnan(now.mean_return) else f"{now.mean_return:4.0f}"
            speed = f"{now.samples_per_s / 1000:4.0f}k samples/s"
            facts = f"training return {returned}  buffer {now.rows / now.capacity:4.0%}  {speed}"
            bar.update(task, completed=now.step, facts=facts)

        yield show
        bar.update(task, total=bar.tasks[task].completed)  # a run that stopped early is complete as well


def _print_result(out: console.Console, report: Report) -> None:
    """Print the result of the training: the final agent, and the one that is kept."""
    episodes = f"{len(report.final_returns)} new episodes"
    agents = [("Final agent", report.steps, report.final_returns, f"in {episodes}")]
    if not report.is_final_kept:
        agents.append(("Kept agent", report.kept_step, report.kept_returns, "in the same episodes"))
    for name, step, returns, where in agents:
        numbers = f"mean return {_mean(returns):.1f}, lowest {min(returns):.0f}, {where}"
        _say(out, f"{name} (step {step:,}): {numbers}", "bold")
    kept = "It is kept" if report.is_final_kept else "Kept"
    best = f"{max(report.validation_returns):.1f} in {report.config.validation_episodes} other episodes"
    count = len(report.validation_returns)
    _say(out, f"{kept} as the best of {count} validation{'s' * (count != 1)}: {best}")
    _say(out, "The highest return is 500. Agents play greedily, with averaged weights")
    each = f"{report.buffer_s / max(report.updates, 1) * 1e6:.0f} us per update, extend included"
    _say(
        out,
        f"{report.steps:,} steps, {report.updates:,} updates in {report.seconds:.1f} s, of which "
        f"{report.buffer_s:.1f} s in the buffer ({each})",
    )


if __name__ == "__main__":
    run(Path("ostinato-demo"), DqnConfig())
