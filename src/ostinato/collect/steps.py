"""VectorSteps: what a vector environment returns, step by step, becomes rows of true transitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

import torch

from ostinato.buffers import ReplayBuffer, TensorDictReplayBuffer
from ostinato.collect.layout import Layout, join
from ostinato.collect.match import check_arguments, match
from ostinato.collect.results import as_mode, final_observations, flag_each, observations, one_each, per_env
from ostinato.core.casts import cast
from ostinato.errors import OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ostinato.core.episodes.keys import Key
    from ostinato.core.rows import Path

__all__ = ["VectorSteps"]


@final
class VectorSteps:
    """Writes the steps of a vector environment to a buffer, one row per environment and step.

    Each row is a true transition: its next observation is what the action led to, at the end of an episode the last
    observation, never the first one of the next episode. How that is known depends on the environment's mode
    (Gymnasium's `AutoresetMode`):

    - NEXT_STEP: the step after an end resets, and its action is ignored. That is no transition. With `ndim=1` no row
      is written; with `ndim=2`, where every step has a row of each environment, the row's field `mask` is False, and
      the buffer, made with `episodes=Episodes(mask_key="mask")`, never draws it.
    - SAME_STEP: the last observation is taken from `info["final_obs"]`.
    - DISABLED: call `reset(obs, mask)` after resetting environments.

    With `ndim=2` lanes are environments. With `ndim=1` rows of the environments follow each other; a buffer that
    keeps account of episodes (for a unit or a slice sampler) must then read the field `env`, int64:
    `episodes=Episodes(traj_key="env", end_key=["terminated", "truncated"])`.

    An episode that `reset` breaks off has its newest row marked as truncated, so that no window goes on into the next
    one; so have those which a buffer with rows in it comes with, when the first `reset` begins new ones.

    Not thread-safe: one thread steps. Other threads may sample meanwhile.

    Args:
        rb: the buffer.
        num_envs: environments.
        autoreset_mode: Gymnasium's `AutoresetMode`, or its name or value; `for_env` reads it off an environment.
        layout: "flat": `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, each `[B, *shape]`. "ted":
            `observation`, `action`, and under `next`: `observation`, `reward`, `done`, `terminated`, `truncated`, the
            last four `[B, 1]`. None takes "ted" for TensorDict buffers. Each entry of a dict observation is a field
            of its own: `pos` and `next_pos`, or `pos` and `("next", "pos")`.
        keys: other names for parts of a row: `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, `done`
            ("ted"), `env`, `mask`.
        reward_dtype: dtype in which rewards are stored; they are cast to it, and observations to the dtypes of the
            first ones, as `docs/casts.md` says.

    Raises:
        OptionError: if the buffer could not keep episodes apart, saying how to make it.
        CapacityError: if it is too small for the windows of so many environments.

    Example:
        >>> import numpy as np
        >>> from ostinato import Episodes, LazyTensorStorage, NStep, ReplayBuffer, VectorSteps
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(1000, ndim=2), sample_unit=NStep(3, 0.99), episodes=Episodes(mask_key="mask")
        ... )
        >>> steps = VectorSteps(rb, num_envs=2, autoreset_mode="NEXT_STEP")
        >>> steps.reset(np.zeros((2, 4), np.float32))
        >>> after, no = np.ones((2, 4), np.float32), np.zeros(2, bool)
        >>> index = steps.add_step(np.array([0, 1]), after, np.ones(2), no, no)
        >>> len(rb)
        2
    """

    def __init__(
        self,
        rb: ReplayBuffer,
        num_envs: int,
        autoreset_mode: Any,
        *,
        layout: str | None = None,
        keys: Mapping[str, Key] | None = None,
        reward_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_arguments(rb, num_envs)
        self._collection = isinstance(rb, TensorDictReplayBuffer) or rb.writer.collections_only
        self._layout = Layout(layout or ("ted" if self._collection else "flat"), keys)
        self._rb = rb
        self._envs = num_envs
        self._mode = as_mode(autoreset_mode)
        self._reward_dtype = reward_dtype
        self._warned: set[Any] = set()
        self._parts = (rb.storage, rb.sampler)
        self._writes = rb.write_count
        self._match = match(rb, num_envs, self._mode, self._layout)
        self._obs: dict[Path, Tensor] | None = None
        # whether the episode is over, and the next one has not begun
        self._idle = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
        # whether the newest row is one of an episode that goes on
        self._open = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
        self._newest = torch.zeros(num_envs, dtype=torch.int64, device="cpu")

    @classmethod
    def for_env(cls, rb: ReplayBuffer, env: Any, **options: Any) -> Self:
        """Make one for a Gymnasium vector environment: `env.num_envs`, and the mode in `env.metadata`.

        Raises:
            OptionError: if the environment does not say its mode.
        """
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        if mode is None:
            msg = (
                f"{type(env).__name__} does not say how it resets (metadata['autoreset_mode'], since Gymnasium 1.1): "
                "use VectorSteps(rb, num_envs, autoreset_mode)"
            )
            raise OptionError(msg)
        return cls(rb, env.num_envs, mode, **options)

    def __repr__(self) -> str:
        """Options."""
        name = "ted" if self._layout.ted else "flat"
        return f"VectorSteps(num_envs={self._envs}, autoreset_mode={self._mode!r}, layout={name!r})"

    def reset(self, obs: Any, mask: Any = None) -> None:
        """Begin new episodes with the observations that the environment's `reset` returned.

        Args:
            obs: `[num_envs, *shape]`, or a dict of these.
            mask: bool `[num_envs]`: the environments that were reset; None for all. Observations of others are not
                read.

        Raises:
            SchemaError: for another number of environments, or other shapes; nothing is changed.
            UsageError: if the first call leaves environments out.
        """
        chosen = torch.ones_like(self._idle) if mask is None else one_each("mask", mask, self._envs).bool().cpu()
        fresh = observations(obs, self._envs, self._obs, self._warned)
        if self._obs is None:
            if not bool(chosen.all()):
                msg = "the first reset() must begin an episode in every environment: leave mask out"
                raise UsageError(msg)
            self._find_newest()
        else:
            self._follow()
            kept = {path: chosen.to(value.device).view(-1, *[1] * (value.ndim - 1)) for path, value in fresh.items()}
            fresh = {path: torch.where(kept[path], value, self._obs[path]) for path, value in fresh.items()}
        self._break_off(chosen & self._open)
        self._obs = fresh
        self._idle = self._idle & ~chosen  # not in place: the mode (torch.inference_mode) may be another by now
        self._open = self._open & ~chosen

    def add_step(
        self,
        action: Any,
        obs: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Mapping[str, Any] | None = None,
        *,
        extra: Mapping[Any, Any] | None = None,
    ) -> Tensor:
        """Write one step of all environments: the action taken, and what the environment's `step` returned for it.

        Args:
            action: `[num_envs, *shape]`, or a dict of these.
            obs: `[num_envs, *shape]`, or a dict of these.
            reward: `[num_envs]`.
            terminated: bool `[num_envs]`.
            truncated: bool `[num_envs]`.
            info: needed in mode SAME_STEP, where an episode ends.
            extra: more fields of the rows, `[num_envs, *shape]`, such as the state of a recurrent network before the
                step.

        Returns:
            As `ReplayBuffer.extend`: the slot of each environment's row, int64 `[num_envs]`, -1 where none was
            written; with `ndim=2` int64 `[num_envs, 2]`.

        Raises:
            UsageError: before the first `reset`, or if the results do not fit the mode; nothing is changed.
            SchemaError: for another number of environments, or other shapes; nothing is changed.
        """
        before, layout = self._obs, self._layout
        if before is None:
            msg = "add_step() came before reset(): call reset(obs) with the observations of the environment's reset"
            raise UsageError(msg)
        self._follow()
        after = observations(obs, self._envs, before, self._warned)
        ends = {
            "terminated": flag_each("terminated", terminated, self._envs),
            "truncated": flag_each("truncated", truncated, self._envs),
        }
        ended = ends["terminated"] | ends["truncated"]
        self._check_mode(ended, info or {})
        following = after
        if self._mode == "SAME_STEP":
            following = final_observations(after, ended, info or {}, self._warned)
        rewards = cast(one_each("reward", reward, self._envs), self._reward_dtype, layout["reward"], self._warned)
        fields = join(
            [
                layout.observation(before, after=False),
                {(*layout["action"], *path): value for path, value in per_env("action", action, self._envs).items()},
                {layout["reward"]: layout.column(rewards)},
                layout.observation(following, after=True),
                layout.flags(ends),
                self._origin(),
                per_env("extra", dict(extra or {}), self._envs),
            ]
        )
        index = self._write(fields)
        self._writes = self._rb.write_count
        self._obs = after
        self._open = ~(ended | self._idle)
        self._idle = torch.zeros_like(ended) if self._mode == "SAME_STEP" else ended
        return index

    def _follow(self) -> None:
        """Look anew which episodes go on, where parts were exchanged, or others have written or emptied the buffer."""
        rb = self._rb
        parts = (rb.storage, rb.sampler)
        if parts == self._parts and rb.write_count == self._writes:
            return
        if parts != self._parts:
            self._match = match(rb, self._envs, self._mode, self._layout)
        self._parts, self._writes = parts, rb.write_count
        self._open = torch.zeros_like(self._open)
        self._find_newest()

    def _check_mode(self, ended: Tensor, info: Mapping[str, Any]) -> None:
        """Refuse results that an environment of the mode does not give."""
        if self._mode == "DISABLED" and bool(self._idle.any()):
            msg = (
                f"environment(s) {_names(self._idle)} ended and have not been reset: with autoreset_mode 'DISABLED' "
                "reset them and call reset(obs, mask) before the next add_step()"
            )
            raise UsageError(msg)
        if self._mode != "NEXT_STEP":
            return
        if bool((ended & self._idle).any()):
            msg = (
                f"environment(s) {_names(ended & self._idle)} ended in the step that resets them, which NEXT_STEP "
                "environments do not: is autoreset_mode right?"
            )
            raise UsageError(msg)
        if "final_obs" in info:
            msg = "info has 'final_obs', which NEXT_STEP environments do not give: is autoreset_mode 'SAME_STEP'?"
            raise UsageError(msg)

    def _origin(self) -> dict[Path, Tensor]:
        """Return the fields that tell episodes apart, where the buffer reads them."""
        out = {}
        if self._match.env:
            out[self._layout["env"]] = torch.arange(self._envs, device="cpu")
        if self._match.mask:
            out[self._layout["mask"]] = ~self._idle
        return out

    def _write(self, fields: dict[Path, Tensor]) -> Tensor:
        """Write rows and remember where they are."""
        rb, layout, whole = self._rb, self._layout, self._envs
        if rb.storage.ndim > 1:
            index: Tensor = rb.add(layout.rows(fields, whole, collection=self._collection))
            self._newest = (index[:, 0] * rb.storage.num_envs + index[:, 1]).cpu()
            return index
        written = ~self._idle
        index = torch.full((whole,), -1, dtype=torch.int64, device=rb.storage.device)
        if bool(written.all()):
            index = rb.extend(layout.rows(fields, whole, collection=self._collection))
        elif bool(written.any()):
            chosen = {path: value[written.to(value.device)] for path, value in fields.items()}
            rows = layout.rows(chosen, int(written.sum()), collection=self._collection)
            index[written.to(index.device)] = rb.extend(rows)
        self._newest = torch.where(written, index.cpu(), self._newest)
        return index

    def _find_newest(self) -> None:
        """Look which episodes go on in the rows that a buffer comes with."""
        rb, storage, envs = self._rb, self._rb.storage, self._envs
        rows, capacity = len(rb), storage.capacity
        if not rows or storage.schema is None:
            return
        order = (torch.arange(rows, device="cpu") + (storage.cursor if rows == capacity else 0)) % capacity
        if self._match.env:
            ids = self._stored("env", order)
        elif storage.num_envs == envs:
            ids, order = torch.arange(envs, device="cpu"), order[-envs:]
        else:
            return  # rows that do not say where they are from have no episodes
        newest, goes_on = self._newest.clone(), self._open.clone()
        for env in range(envs):
            at = (ids == env).nonzero()
            if at.numel():
                newest[env] = order[at[-1, 0]]
                goes_on[env] = True
        goes_on &= ~(self._stored("terminated", newest) | self._stored("truncated", newest))
        if self._match.mask:
            goes_on &= self._stored("mask", newest)
        self._newest, self._open = newest, goes_on

    def _stored(self, part: str, slots: Tensor) -> Tensor:
        """Return what rows hold in a part with one value each."""
        storage = self._rb.storage
        field: Tensor = storage.read(self._layout[part])
        flat = field.reshape(-1) if storage.ndim == 1 else field.reshape(len(storage))
        return flat[slots.to(flat.device)].cpu()

    def _break_off(self, chosen: Tensor) -> None:
        """Mark the newest rows of episodes that do not go on."""
        rb, storage = self._rb, self._rb.storage
        slots = self._newest[chosen]
        slots = slots[slots < len(rb)].to(storage.device)  # the buffer may have been emptied
        if not slots.numel() or storage.schema is None:
            return
        index: Any = slots
        if storage.ndim > 1:
            steps, lanes = slots // storage.num_envs, slots % storage.num_envs
            index = (lanes, steps) if rb.dim_extend == 1 else (steps, lanes)
        for part in ("truncated", "done"):
            if part in self._layout.paths:
                path = self._layout[part]
                shape = storage.schema.leaves[storage.schema.find(path)].shape
                true = torch.ones(slots.shape[0], *shape, dtype=torch.bool, device=storage.device)
                rb.set_at_(path, true, index)  # type: ignore[arg-type]


def _names(environments: Tensor) -> list[int]:
    return environments.nonzero().flatten().tolist()
