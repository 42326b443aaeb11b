"""A replay buffer for the off-policy algorithms of Stable-Baselines3: `replay_buffer_class=ReplayBuffer`.

A door: ring, episodes, draws and n-step returns are the engine's. How it differs from Stable-Baselines3's own buffers:
`docs/compat/sb3.md`. Importing this module imports Stable-Baselines3, which nothing else here needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato import buffers
from ostinato._optional import require
from ostinato.buffers.options import positive
from ostinato.core.episodes.keys import Episodes
from ostinato.core.rows import map_leaves
from ostinato.errors import KeyMissingError, OptionError, SchemaError, UsageError
from ostinato.storages import LazyTensorStorage
from ostinato.units import NStep, SampleUnit
from ostinato.units.base import require_field

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from gymnasium.spaces import Space
    from stable_baselines3.common.buffers import ReplayBuffer as HostBuffer
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import Tensor

    from ostinato.core.records import Plan, View
    from ostinato.samplers import Sampler

    Array: TypeAlias = np.ndarray[Any, Any]
else:
    HostBuffer = require("stable_baselines3.common.buffers", "sb3").ReplayBuffer
    _aliases = require("stable_baselines3.common.type_aliases", "sb3")
    DictReplayBufferSamples, ReplayBufferSamples = _aliases.DictReplayBufferSamples, _aliases.ReplayBufferSamples

__all__ = ["ReplayBuffer"]


@final
class ReplayBuffer(HostBuffer):
    """The newest transitions of `n_envs` environments, each observation stored once.

    A next observation takes memory of its own only where it is not the observation of the next row: at the ends of
    episodes, where it is the true final one. With `gamma` each row drawn becomes the transition over its next `n_steps`
    steps, made when it is drawn: it stops where its episode ends, where the environment was reset in the middle of one,
    and at the newest row. Draws follow torch's global generator, which `seed=` of an algorithm sets. Pickles, with all
    rows present, so `save_replay_buffer` and `load_replay_buffer` work. Serves one thread at a time.

    Args:
        buffer_size: most transitions kept, of all environments together (`buffer_size // n_envs` steps, at least one).
        observation_space: any that Stable-Baselines3 knows, `Dict` included.
        action_space: likewise.
        device: where samples go; rows are kept in main memory.
        n_envs: environments side by side.
        optimize_memory_usage: no effect: what it asks for, observations stored once, is always so, and costs neither
            the last observations of episodes nor `handle_timeout_termination`.
        handle_timeout_termination: let `dones` of samples be 0 where an episode ended by its time limit alone
            (`infos[i]["TimeLimit.truncated"]`), so that the target bootstraps there.
        n_steps: most steps of a transition. More than one needs `gamma`.
        gamma: discount of one step, in [0, 1]: that of the algorithm. With it samples carry `discounts`,
            `gamma^k` of the `k` steps taken; None leaves discounting to the algorithm.
        sampler: which rows are drawn; None is uniform over all rows. With a `PrioritizedSampler` (of `buffer_size`)
            use `sample_with_info` and `update_priority`.

    Raises:
        CapacityError: at the first `add`, if there are more `n_steps` than steps fit.
        KindError: if a number is no integer.
        OptionError: if a number is out of range, or `gamma` is missing.
        StorageMemoryError: at the first `add`, if there is not enough memory.

    Example:
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
        sampler: Sampler | None = None,
    ) -> None:
        steps = max(positive("buffer_size", buffer_size) // positive("n_envs", n_envs), 1)
        # the base of the base: what stands between only lays out arrays, of which there are none here
        super(HostBuffer, self).__init__(steps, observation_space, action_space, device, n_envs=n_envs)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._forms = _forms(observation_space, self.obs_shape)
        pairs = {("next_obs", *path): ("obs", *path) for path in self._forms}
        self._unit = _n_steps(n_steps, gamma, list(pairs))
        self._seams = None if self._unit is None else _Seams(n_envs)
        self._rows = buffers.ReplayBuffer(
            storage=LazyTensorStorage(steps * n_envs, ndim=2, single_copy=pairs),
            sampler=sampler,
            dim_extend=0,
            sample_unit=None if self._unit is None else [self._unit, _EachReward()],
            episodes=None if self._unit is None else Episodes(traj_key="episode"),
        )

    @property
    def n_steps(self) -> int:
        """Most steps of a transition."""
        return 1 if self._unit is None else self._unit.n

    @property
    def gamma(self) -> float | None:
        """Discount of one step; None where the algorithm alone discounts."""
        return None if self._unit is None else self._unit.gamma

    # -- writing ----------------------------------------------------------------------------------------------

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: Sequence[dict[str, Any]]
    ) -> None:
        """Store one step of every environment, the newest in the place of the oldest. One copy.

        Args:
            obs: observations `[n_envs, *shape]`, or a dict of them; converted to the dtype of their space.
            next_obs: those after the step: at the end of an episode its final ones, not those after the reset.
                Stable-Baselines3's algorithms take them from `infos[i]["terminal_observation"]`.
            action: `[n_envs, *shape]`.
            reward: `[n_envs]`, stored as float32.
            done: `[n_envs]`: whether the episode is over, for whatever reason.
            infos: one for each environment; only `TimeLimit.truncated` is read, and only if
                `handle_timeout_termination`.

        Raises:
            KeyMissingError: if a dict of observations lacks a key of the space.
            SchemaError: if shapes do not match; nothing is changed.
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
        if self._seams is None:
            self._rows.add(row)
        else:
            self._rows.add({**row, "episode": self._seams.episodes(_leaves(now))})
            self._seams.note(_leaves(after), over | late)
        self._count()

    def reset(self) -> None:
        """Forget all rows; memory is kept."""
        self._rows.empty()
        self._count()

    def _count(self) -> None:
        """Let the host's numbers follow the engine's."""
        rows = self._rows
        self.full = len(rows) == self.buffer_size * self.n_envs
        self.pos = rows.cursor // self.n_envs

    def _observation(self, name: str, given: Any) -> Any:
        if () in self._forms:
            return self._checked(name, given, *self._forms[()])
        keys = [path[0] for path in self._forms]
        missing = [key for key in keys if key not in given]
        if missing:
            msg = f"{name} must have the keys {keys} of the observation space, got {list(given)}: add {missing}"
            raise KeyMissingError(msg)
        return {key: self._checked(f"{name}[{key!r}]", given[key], *self._forms[key,]) for key in keys}

    def _action(self, given: Any) -> Array:
        dtype = self._maybe_cast_dtype(self.action_space.dtype)
        array = np.asarray(given, dtype=dtype)
        flat = array.reshape(self.n_envs, -1) if array.size == self.n_envs * self.action_dim else array
        return self._checked("action", flat, dtype, (self.action_dim,))

    def _checked(self, name: str, given: Any, dtype: Any, shape: tuple[int, ...] = ()) -> Array:
        """Return an array `[n_envs, *shape]`.

        Raises:
            SchemaError: if it has another shape.
        """
        array: Array = np.asarray(given, dtype=dtype)
        wanted = (self.n_envs, *shape)
        if array.shape != wanted and shape == (1,) and array.shape == wanted[:1]:
            array = array.reshape(wanted)  # discrete observations come without the dimension that they are stored with
        if array.shape != wanted:
            msg = f"{name} must have the shape {list(wanted)} (environments first), got {list(array.shape)}"
            raise SchemaError(msg)
        return array

    # -- reading ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions.

        Args:
            batch_size: transitions, at least 1.
            env: normalizes observations and rewards (each step's, before they are added up) with its statistics of now.

        Returns:
            `ReplayBufferSamples`, or `DictReplayBufferSamples` for `Dict` observations: tensors on `device`, copies.
            `observations` and `next_observations` `[B, *shape]`, `actions` `[B, action_dim]`, `dones` (float32: 1 where
            the target must not bootstrap), `rewards` (float32) and, with `gamma`, `discounts` (float32) `[B, 1]`.

        Raises:
            EmptyBufferError: if there are no rows.
            OptionError: if `batch_size` is below 1.
            UsageError: if rows are drawn by priority: the weights would be lost.
        """
        if self._rows.sampler.prioritized:
            msg = (
                f"{type(self._rows.sampler).__name__} gives weights, for which a sample has no place: use "
                "sample_with_info()"
            )
            raise UsageError(msg)
        return self._samples(self._rows.sample(batch_size), env)

    def sample_with_info(self, batch_size: int, env: VecNormalize | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw transitions, and say which; see `sample`.

        Returns:
            The samples, and tensors on the CPU under the keys `index` (step and environment, int64 `[B]` each) and, if
            rows are drawn by priority, `priority_weight` `[B]` and `index_generation` `[B]`.
        """
        batch, info = self._rows.sample(batch_size, return_info=True)
        return self._samples(batch, env), info

    def update_priority(self, info: dict[str, Any], priority: Any) -> None:
        """Give the rows of a sample new priorities; rows that were replaced since are left alone.

        Args:
            info: what `sample_with_info` returned.
            priority: finite numbers of at least 0, `[B]` or `[B, 1]`, such as absolute TD errors.

        Raises:
            PriorityError: for priorities that are negative, NaN or infinite; nothing is changed.
        """
        self._rows.update_priority(info, priority)

    def _get_samples(self, batch_inds: Array, env: VecNormalize | None = None) -> Any:  # noqa: ARG002
        """Refuse what the host's own buffers use inside."""
        msg = "this buffer draws and reads in one go: use sample()"
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
        return (ReplayBufferSamples if () in self._forms else DictReplayBufferSamples)(
            observations=self._seen(batch["obs"], env),
            actions=batch["action"].to(self.device),
            next_observations=self._seen(batch["next_obs"], env),
            dones=batch["terminated"].unsqueeze(-1).to(self.device, torch.float32),
            rewards=rewards.to(self.device),
            discounts=discounts,
        )

    def _seen(self, obs: Any, env: VecNormalize | None) -> Any:
        """Return observations as the learner is to see them."""
        if env is not None:
            obs = map_leaves(env.normalize_obs(map_leaves(obs, torch.Tensor.numpy)), torch.from_numpy)
        return map_leaves(obs, lambda x: x.to(self.device))

    @property
    def dones(self) -> Array:  # type: ignore[override]
        """Where episodes terminated, float32 `[buffer_size, n_envs]`. A copy; what is written into it is lost.

        There for `learn`, which with `optimize_memory_usage` marks the last row so when it is called once more: its own
        buffer would lose the observation after that row. This one does not, and the mark is needless.
        """
        found = np.zeros((self.buffer_size, self.n_envs), np.float32)
        if len(self._rows):
            found[: self.size()] = self._rows["terminated"].numpy()
        return found


@final
class _Seams:
    """Numbers the episodes of environments side by side: by their ends, and by observations that do not follow.

    The environments are reset in the middle of an episode where `learn` is called again, or the environment exchanged.
    Nobody tells the buffer; the next observation of the row before shows it.
    """

    def __init__(self, n_envs: int) -> None:
        self._count = n_envs
        self._number = np.arange(n_envs)
        self._over = np.zeros(n_envs, np.bool_)
        self._after: list[Array] | None = None

    def episodes(self, obs: list[Array]) -> Array:
        """Return the number of each environment's episode, int64 `[n_envs]`, for a step that starts at `obs`."""
        fresh = self._over
        for before, now in zip(self._after or [], obs, strict=bool(self._after)):
            fresh = fresh | (_bits(before) != _bits(now)).any(1)
        self._number = self._number + self._count * fresh
        return self._number

    def note(self, next_obs: list[Array], over: Array) -> None:
        """Remember how a step ended."""
        self._after, self._over = [x.copy() for x in next_obs], over


@final
class _EachReward(SampleUnit):
    """Leaves the rewards of n steps apart, `[B, n]`: normalizing clips each of them, and then they are added up."""

    rank = 4

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Take back the sum."""
        position = require_field(plan, ("reward",), "the reward of a step")
        return plan.with_columns({position: plan.changed[position]._replace(weights=None)})


def _n_steps(n_steps: int, gamma: float | None, next_obs: list[tuple[str, ...]]) -> NStep | None:
    """Return what makes transitions over several steps; None where none is asked for.

    Raises:
        OptionError: if there is no discount to add rewards up with.
    """
    if gamma is not None:
        return NStep(positive("n_steps", n_steps), gamma, reward_key="reward", next_keys=[*next_obs, "terminated"])
    if positive("n_steps", n_steps) > 1:
        msg = f"n_steps={n_steps} needs a discount to add rewards up with: give gamma= as well, that of the algorithm"
        raise OptionError(msg)
    return None


def _forms(space: Any, shape: Any) -> dict[tuple[str, ...], tuple[Any, tuple[int, ...]]]:
    """Return dtype and shape of each array of an observation, by its path: `()` where there is but one."""
    if not isinstance(shape, dict):
        return {(): (space.dtype, shape)}
    return {(key,): (space.spaces[key].dtype, part) for key, part in shape.items()}


def _leaves(obs: Any) -> list[Array]:
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def _bits(array: Array) -> Array:
    """Return rows as bytes, `[n, bytes]`: NaN equals itself."""
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
