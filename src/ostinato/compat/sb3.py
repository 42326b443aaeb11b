"""Replay buffers for the off-policy algorithms of Stable-Baselines3: `replay_buffer_class=ReplayBuffer`.

`docs/compat/sb3.md` lists the differences from the buffers of Stable-Baselines3. Importing this module imports
Stable-Baselines3.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato import buffers
from ostinato._optional import require
from ostinato.buffers.options import positive
from ostinato.core.episodes.tracker import Episodes
from ostinato.core.rows import map_leaves
from ostinato.errors import KeyMissingError, OptionError, SchemaError, UsageError
from ostinato.samplers import PrioritizedSampler
from ostinato.storages import LazyTensorStorage
from ostinato.units import NStep, SampleUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from gymnasium.spaces import Space
    from stable_baselines3.common.buffers import ReplayBuffer as HostBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import Tensor

    from ostinato.core.records import Plan, View
    from ostinato.samplers import Sampler

    Array: TypeAlias = np.ndarray[Any, Any]
else:
    HostBuffer = require("stable_baselines3.common.buffers", "sb3").ReplayBuffer
    BaseCallback = require("stable_baselines3.common.callbacks", "sb3").BaseCallback
    _aliases = require("stable_baselines3.common.type_aliases", "sb3")
    DictReplayBufferSamples, ReplayBufferSamples = _aliases.DictReplayBufferSamples, _aliases.ReplayBufferSamples

__all__ = ["NStepReplayBuffer", "PrioritizedReplayBuffer", "PriorityCallback", "ReplayBuffer", "td_errors"]


class ReplayBuffer(HostBuffer):
    """The most recent transitions of `n_envs` environments, with each observation stored once.

    A next observation is stored separately only if it is not the observation of the next row: at the end of an episode,
    where it is the final observation. With `gamma`, samples are n-step transitions over up to `n_steps` steps, computed
    when they are sampled: they stop at the end of the episode, at a reset in the middle of an episode, and at the
    newest row. Samples are drawn with torch's global generator, which the `seed` of an algorithm sets. Pickling
    includes all rows, so `save_replay_buffer` and `load_replay_buffer` work. Not thread-safe.

    Args:
        buffer_size: Capacity in transitions of all environments (`buffer_size // n_envs` steps, at least one).
        observation_space: Any space that Stable-Baselines3 supports, including `Dict`.
        action_space: Any space that Stable-Baselines3 supports.
        device: Device of samples; rows are stored in main memory.
        n_envs: Number of parallel environments.
        optimize_memory_usage: No effect. Observations are always stored once, without loss of final observations and
            with `handle_timeout_termination`.
        handle_timeout_termination: Return `dones` of 0 for episodes that ended only because of a time limit
            (`infos[i]["TimeLimit.truncated"]`), so that the target bootstraps.
        n_steps: Maximum number of steps of a transition. More than one requires `gamma`.
        gamma: Discount factor in [0, 1] of the algorithm. If given, samples have `discounts`, which is `gamma^k` for a
            transition over `k` steps; None leaves discounting to the algorithm.
        sampler: The sampler, or a callable that returns one; None: uniform over all rows. A sampler with a state of
            rows serves one buffer, a callable any number of models. With a `PrioritizedSampler` (of capacity
            `buffer_size`) use `sample_with_info` and `update_priority`.

    Raises:
        CapacityError: In the first `add`, if `n_steps` exceeds the number of steps that fit.
        KindError: A number is not an integer.
        OptionError: A number is out of range, `gamma` is missing, or the sampler serves another buffer.
        StorageMemoryError: In the first `add`, if there is not enough memory.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from ostinato.compat.sb3 import ReplayBuffer
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer, buffer_size=1000, seed=0)
        >>> _ = model.learn(200)
        >>> model.replay_buffer.size(), model.replay_buffer.sample(32).observations.shape
        (200, torch.Size([32, 4]))
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Space[Any],
        action_space: Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,  # noqa: FBT001, FBT002
        handle_timeout_termination: bool = True,  # noqa: FBT001, FBT002
        *,
        n_steps: int = 1,
        gamma: float | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
    ) -> None:
        steps = max(positive("buffer_size", buffer_size) // positive("n_envs", n_envs), 1)
        # skip the direct base class, which only allocates arrays
        super(HostBuffer, self).__init__(steps, observation_space, action_space, device, n_envs=n_envs)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._schemas = _schemas(observation_space, self.obs_shape)
        pairs = {("next_obs", *path): ("obs", *path) for path in self._schemas}
        self._unit = _n_steps(n_steps, gamma, list(pairs))
        self._episode_numbers = None if self._unit is None else _EpisodeNumbers(n_envs)
        self._rows = buffers.ReplayBuffer(
            storage=LazyTensorStorage(steps * n_envs, ndim=2, single_copy=pairs),
            sampler=sampler,
            dim_extend=0,
            sample_unit=None if self._unit is None else [self._unit, _SeparateRewards()],
            episodes=None if self._unit is None else Episodes(traj_key="episode"),
        )

    @property
    def n_steps(self) -> int:
        """Maximum number of steps of a transition."""
        return 1 if self._unit is None else self._unit.n

    @property
    def gamma(self) -> float | None:
        """Discount factor; None if the algorithm discounts."""
        return None if self._unit is None else self._unit.gamma

    # -- writing ----------------------------------------------------------------------------------------------

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: Sequence[dict[str, Any]]
    ) -> None:
        """Store one step of every environment; if the buffer is full, it replaces the oldest step. One copy.

        Args:
            obs: Observations `[n_envs, *shape]`, or a dict of them; converted to the dtype of their space.
            next_obs: Observations after the step; at the end of an episode the final observation, not the one after the
                reset. The algorithms of Stable-Baselines3 take it from `infos[i]["terminal_observation"]`.
            action: `[n_envs, *shape]`.
            reward: `[n_envs]`, stored as float32.
            done: `[n_envs]`: whether the episode ended, for any reason.
            infos: One dict per environment; only `TimeLimit.truncated` is read, and only with
                `handle_timeout_termination`.

        Raises:
            KeyMissingError: A dict of observations lacks a key of the space.
            SchemaError: A shape does not match; nothing is changed.
        """
        now, after = self._observation("obs", obs), self._observation("next_obs", next_obs)
        over = self._checked("done", done, np.bool_)
        late = np.zeros_like(over)
        if self.handle_timeout_termination:
            late = self._checked("infos", [info.get("TimeLimit.truncated", False) for info in infos], np.bool_)
        row = {
            "obs": now,
            "next_obs": after,
            "action": self._action(action),
            "reward": self._checked("reward", reward, np.float32),
            "terminated": over & ~late,
        }
        if self._episode_numbers is None:
            self._rows.add(row)
        else:
            self._rows.add({**row, "episode": self._episode_numbers.episodes(_leaves(now))})
            self._episode_numbers.record(_leaves(after), over | late)
        self._update_counters()

    def reset(self) -> None:
        """Remove all rows; memory is kept."""
        self._rows.empty()
        self._update_counters()

    def _update_counters(self) -> None:
        """Update the attributes of the base class."""
        rows = self._rows
        self.full = len(rows) == self.buffer_size * self.n_envs
        self.pos = rows.cursor // self.n_envs

    def _observation(self, name: str, given: Any) -> Any:
        if () in self._schemas:
            return self._checked(name, given, *self._schemas[()])
        keys = [path[0] for path in self._schemas]
        missing = [key for key in keys if key not in given]
        if missing:
            msg = f"{name} must have the keys {keys} of the observation space, got {list(given)}: add {missing}"
            raise KeyMissingError(msg)
        return {key: self._checked(f"{name}[{key!r}]", given[key], *self._schemas[key,]) for key in keys}

    def _action(self, given: Any) -> Array:
        dtype = self._maybe_cast_dtype(self.action_space.dtype)
        array = np.asarray(given, dtype=dtype)
        flat = array.reshape(self.n_envs, -1) if array.size == self.n_envs * self.action_dim else array
        return self._checked("action", flat, dtype, (self.action_dim,))

    def _checked(self, name: str, given: Any, dtype: Any, shape: tuple[int, ...] = ()) -> Array:
        """Return an array `[n_envs, *shape]`.

        Raises:
            SchemaError: The shape differs.
        """
        array: Array = np.asarray(given, dtype=dtype)
        wanted = (self.n_envs, *shape)
        if array.shape != wanted and shape == (1,) and array.shape == wanted[:1]:
            array = array.reshape(wanted)  # discrete observations lack the trailing dimension
        if array.shape != wanted:
            msg = f"{name} must have the shape {list(wanted)} (environments first), got {list(array.shape)}"
            raise SchemaError(msg)
        return array

    # -- reading ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Sample transitions.

        Args:
            batch_size: Number of transitions, at least 1.
            env: Normalizes observations and rewards (of each step, before they are summed) with its current statistics.

        Returns:
            `ReplayBufferSamples`, or `DictReplayBufferSamples` for `Dict` observations: tensors on `device`, copies.
            `observations` and `next_observations` `[B, *shape]`, `actions` `[B, action_dim]`, `dones` (float32, 1 where
            the target must not bootstrap), `rewards` (float32) and, with `gamma`, `discounts` (float32) `[B, 1]`.

        Raises:
            EmptyBufferError: The buffer is empty.
            OptionError: `batch_size` is below 1.
            UsageError: The sampler is prioritized: the importance weights would be lost.
        """
        if self._rows.sampler.prioritized:
            msg = (
                f"{type(self._rows.sampler).__name__} returns importance weights, which samples do not have: use "
                "sample_with_info()"
            )
            raise UsageError(msg)
        return self._samples(self._rows.sample(batch_size), env)

    def sample_with_info(self, batch_size: int, env: VecNormalize | None = None) -> tuple[Any, dict[str, Any]]:
        """Sample transitions together with their indices; see `sample`.

        Returns:
            The samples, and a dict of tensors on the CPU: `index` (step and environment, int64 `[B]` each) and, with a
            prioritized sampler, `priority_weight` `[B]` and `index_generation` `[B]`.
        """
        batch, info = self._rows.sample(batch_size, return_info=True)
        return self._samples(batch, env), info

    def update_priority(self, info: dict[str, Any], priority: Any) -> None:
        """Set the priorities of the rows of a sample; rows that were replaced since are skipped.

        Args:
            info: The dict that `sample_with_info` returned.
            priority: Finite non-negative numbers, `[B]` or `[B, 1]`, such as absolute TD errors.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; nothing is changed.
        """
        self._rows.update_priority(info, priority)

    def _get_samples(self, batch_inds: Array, env: VecNormalize | None = None) -> Any:  # noqa: ARG002
        """Raise: this method of the base class reads arrays that do not exist here."""
        msg = "_get_samples is not supported: use sample()"
        raise UsageError(msg)

    def _samples(self, batch: dict[str, Any], env: VecNormalize | None) -> Any:
        rewards = batch["reward"].reshape(len(batch["reward"]), -1)
        if env is not None:
            rewards = torch.from_numpy(env.normalize_reward(rewards.numpy()))
        discounts = None
        if self._unit is not None:
            steps = torch.arange(rewards.shape[1], device="cpu")
            taken = steps < batch["steps_to_next_obs"].unsqueeze(-1)
            rewards = (rewards * torch.pow(self._unit.gamma, steps) * taken).sum(1, keepdim=True)
            discounts = batch["gamma"].unsqueeze(-1).to(self.device)
        return (ReplayBufferSamples if () in self._schemas else DictReplayBufferSamples)(
            observations=self._for_learner(batch["obs"], env),
            actions=batch["action"].to(self.device),
            next_observations=self._for_learner(batch["next_obs"], env),
            dones=batch["terminated"].unsqueeze(-1).to(self.device, torch.float32),
            rewards=rewards.to(self.device),
            discounts=discounts,
        )

    def _for_learner(self, obs: Any, env: VecNormalize | None) -> Any:
        """Return normalized observations on `device`."""
        if env is not None:
            obs = map_leaves(env.normalize_obs(map_leaves(obs, torch.Tensor.numpy)), torch.from_numpy)
        return map_leaves(obs, lambda x: x.to(self.device))

    @property
    def dones(self) -> Array:  # type: ignore[override]
        """Where episodes terminated, float32 `[buffer_size, n_envs]`. A copy; writes to it are lost.

        With `optimize_memory_usage`, `learn` marks the last row as done when it is called again, because the buffer of
        Stable-Baselines3 would lose the observation after it. This buffer does not need the mark.
        """
        found = np.zeros((self.buffer_size, self.n_envs), np.float32)
        if len(self._rows):
            found[: self.size()] = self._rows["terminated"].numpy()
        return found


@final
class NStepReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` with the defaults of the `NStepReplayBuffer` of Stable-Baselines3: three steps, `gamma` 0.99.

    Args:
        buffer_size: See `ReplayBuffer`, also for the other arguments.
        observation_space: See there.
        action_space: See there.
        device: See there.
        n_envs: See there.
        optimize_memory_usage: See there.
        handle_timeout_termination: See there.
        n_steps: Maximum number of steps of a transition.
        gamma: Discount factor of the algorithm.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=NStepReplayBuffer, buffer_size=1000, seed=0)
        >>> model.replay_buffer.n_steps
        3
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Space[Any],
        action_space: Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,  # noqa: FBT001, FBT002
        handle_timeout_termination: bool = True,  # noqa: FBT001, FBT002
        n_steps: int = 3,
        gamma: float = 0.99,
    ) -> None:
        super().__init__(
            buffer_size, observation_space, action_space, device, n_envs, optimize_memory_usage,
            handle_timeout_termination, n_steps=n_steps, gamma=gamma,
        )  # fmt: skip


@final
class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` whose `sample` draws rows in proportion to their priorities (Schaul et al. 2016).

    The algorithms of Stable-Baselines3 pass no TD errors to their buffers: `PriorityCallback` computes them. Their
    losses do not use importance weights, see `docs/compat/sb3.md`; `sample_with_info` returns these.

    Args:
        buffer_size: See `ReplayBuffer`, also for the other arguments.
        observation_space: See there.
        action_space: See there.
        device: See there.
        n_envs: See there.
        optimize_memory_usage: See there.
        handle_timeout_termination: See there.
        n_steps: Maximum number of steps of a transition; see there.
        gamma: See there.
        alpha: Exponent of priorities; 0 is uniform.
        beta: Exponent of importance weights.
        eps: Added to each priority.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from ostinato.compat.sb3 import PrioritizedReplayBuffer, PriorityCallback
        >>> options = {"n_steps": 3, "gamma": 0.99}
        >>> model = DQN(
        ...     "MlpPolicy", "CartPole-v1", replay_buffer_class=PrioritizedReplayBuffer, replay_buffer_kwargs=options,
        ...     buffer_size=1000, seed=0,
        ... )
        >>> _ = model.learn(200, callback=PriorityCallback())
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Space[Any],
        action_space: Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,  # noqa: FBT001, FBT002
        handle_timeout_termination: bool = True,  # noqa: FBT001, FBT002
        *,
        n_steps: int = 1,
        gamma: float | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
    ) -> None:
        rows = max(positive("buffer_size", buffer_size), positive("n_envs", n_envs))
        super().__init__(
            buffer_size, observation_space, action_space, device, n_envs, optimize_memory_usage,
            handle_timeout_termination, n_steps=n_steps, gamma=gamma,
            sampler=partial(PrioritizedSampler, rows, alpha=alpha, beta=beta, eps=eps),
        )  # fmt: skip
        self._drawn: list[tuple[Any, dict[str, Any]]] | None = None

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Sample transitions by priority; see `ReplayBuffer.sample`."""
        samples, info = self.sample_with_info(batch_size, env)
        if self._drawn is not None:
            self._drawn.append((samples, info))
        return samples

    def take_samples(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return the samples since the last call with their infos, and keep those that follow; at first none."""
        taken, self._drawn = self._drawn or [], []
        return taken


class PriorityCallback(BaseCallback):
    """Updates the priorities of a `PrioritizedReplayBuffer` after each step in the environments.

    The priorities of the rows trained on since the step before are their TD errors with the networks as they are now.
    Costs one forward pass of networks and targets for each batch.

    Raises:
        UsageError: When training starts, if the algorithm has no `PrioritizedReplayBuffer`.
    """

    def _on_training_start(self) -> None:
        self._buffer().take_samples()

    def _on_step(self) -> bool:
        for samples, info in self._buffer().take_samples():
            self._buffer().update_priority(info, td_errors(self.model, samples))
        return True

    def _on_training_end(self) -> None:
        self._on_step()

    def _buffer(self) -> PrioritizedReplayBuffer:
        algorithm: Any = self.model
        found = algorithm.replay_buffer
        if not isinstance(found, PrioritizedReplayBuffer):
            msg = f"PriorityCallback needs replay_buffer_class=PrioritizedReplayBuffer, got {type(found).__name__}"
            raise UsageError(msg)
        return found


def td_errors(model: Any, samples: Any) -> Tensor:
    """Return the absolute TD errors of samples with the networks of DQN, QR-DQN, TD3, DDPG or SAC as they are now.

    Args:
        model: The algorithm.
        samples: What `sample` returned.

    Returns:
        `[B]`: for critics the mean of their errors, for quantiles the error of their mean.

    Raises:
        UsageError: The algorithm is another one.
    """
    host = require("stable_baselines3", "sb3")
    now, after, actions = samples.observations, samples.next_observations, samples.actions
    with torch.no_grad():
        if "quantile_net" in vars(model):
            values, best = model.quantile_net(now).mean(1), model.quantile_net_target(after).mean(1)
            values, best = _of_actions(values, best, actions)
        elif isinstance(model, host.DQN):
            values, best = _of_actions(model.q_net(now), model.q_net_target(after), actions)
        elif isinstance(model, (host.TD3, host.SAC)):
            values = torch.cat(model.critic(now, actions), 1)
            best = _value_of_actor(model, after, entropy=isinstance(model, host.SAC))
        else:
            msg = f"td_errors() knows DQN, QR-DQN, TD3, DDPG and SAC, got {type(model).__name__}"
            raise UsageError(msg)
        discounts = model.gamma if samples.discounts is None else samples.discounts
        errors: Tensor = (samples.rewards + (1 - samples.dones) * discounts * best - values).abs().mean(1)
        return errors


def _of_actions(values: Tensor, after: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of actions and the largest ones afterwards, `[B, 1]`, of those of all actions."""
    return values.gather(1, actions.long()), after.max(1, keepdim=True).values


def _value_of_actor(model: Any, after: Any, *, entropy: bool) -> Tensor:
    """Return the target value of observations under the policy, `[B, 1]`."""
    if entropy:
        actions, log_prob = model.actor.action_log_prob(after)
        scale = model.ent_coef_tensor if model.log_ent_coef is None else model.log_ent_coef.exp()
        bonus = -scale * log_prob.unsqueeze(1)
    else:
        actions, bonus = model.actor_target(after), 0.0
    value: Tensor = torch.cat(model.critic_target(after, actions), 1).min(1, keepdim=True).values + bonus
    return value


@final
class _EpisodeNumbers:
    """Numbers the episodes of parallel environments, from their ends and from observations that do not follow.

    Environments are reset in the middle of an episode if `learn` is called again or the environment is replaced. The
    buffer is not notified; it compares each observation with the next observation of the previous row.
    """

    def __init__(self, n_envs: int) -> None:
        self._num_envs = n_envs
        self._number = np.arange(n_envs)
        self._over = np.zeros(n_envs, np.bool_)
        self._after: list[Array] | None = None

    def episodes(self, obs: list[Array]) -> Array:
        """Return the number of each environment's episode, int64 `[n_envs]`, for a step that starts at `obs`."""
        fresh = self._over
        for before, now in zip(self._after or [], obs, strict=bool(self._after)):
            fresh = fresh | (_row_bytes(before) != _row_bytes(now)).any(1)
        self._number = self._number + self._num_envs * fresh
        return self._number

    def record(self, next_obs: list[Array], over: Array) -> None:
        """Record the end of a step."""
        self._after, self._over = [x.copy() for x in next_obs], over


@final
class _SeparateRewards(SampleUnit):
    """Keeps the rewards of n steps separate, `[B, n]`: they are normalized and clipped before they are summed."""

    rank = 4

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Remove the weights of the sum."""
        position = plan.require(("reward",), "the reward of a step")
        return plan.with_columns({position: plan.changed[position]._replace(weights=None)})


def _n_steps(n_steps: int, gamma: float | None, next_obs: list[tuple[str, ...]]) -> NStep | None:
    """Return the unit for n-step transitions; None if they are not requested.

    Raises:
        OptionError: `gamma` is missing.
    """
    if gamma is not None:
        return NStep(positive("n_steps", n_steps), gamma, reward_key="reward", next_keys=[*next_obs, "terminated"])
    if positive("n_steps", n_steps) > 1:
        msg = f"n_steps={n_steps} needs a discount factor: pass gamma= as well, the gamma of the algorithm"
        raise OptionError(msg)
    return None


def _schemas(space: Any, shape: Any) -> dict[tuple[str, ...], tuple[Any, tuple[int, ...]]]:
    """Return dtype and shape of each array of an observation by path; `()` if it is a single array."""
    if not isinstance(shape, dict):
        return {(): (space.dtype, shape)}
    return {(key,): (space.spaces[key].dtype, part) for key, part in shape.items()}


def _leaves(obs: Any) -> list[Array]:
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def _row_bytes(array: Array) -> Array:
    """Return rows as bytes, `[n, bytes]`, so that NaN equals NaN."""
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
