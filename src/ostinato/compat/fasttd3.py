"""The replay buffer of FastTD3 and Holosoma (`SimpleReplayBuffer`), on top of Ostinato.

`docs/compat/fasttd3.md` lists the differences from the original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from ostinato import buffers
from ostinato._optional import require
from ostinato.buffers.options import positive
from ostinato.core.options import check_real
from ostinato.core.records import Column, Draw, Request
from ostinato.errors import KeyMissingError, OptionError, SchemaError
from ostinato.samplers import Sampler
from ostinato.storages import LazyTensorStorage
from ostinato.units import SampleUnit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

    from ostinato.core.records import Plan, View
    from ostinato.durable.progress import ProgressOption

__all__ = ["HolosomaReplayBuffer", "SimpleReplayBuffer"]

_END = "ended"
_FLAGS = ("dones", "truncations")


class SimpleReplayBuffer(nn.Module):
    """The most recent steps of parallel environments on one device, with each observation stored once.

    Samples are n-step transitions, computed when they are sampled, on the device: they stop at the first row with
    `dones` or `truncations`, and at the newest row. Drawn with the global generator of the device. Not thread-safe.

    A module without parameters and buffers, as in FastTD3.

    Args:
        n_env: Number of environments.
        buffer_size: Capacity in steps, of each environment.
        n_obs: Numbers of an observation.
        n_act: Numbers of an action.
        n_critic_obs: Numbers of an observation of the critic.
        asymmetric_obs: Rows have observations of the critic.
        playground_mode: The first `n_obs` numbers of an observation of the critic are the observation; only the others
            are stored.
        n_steps: Maximum number of steps of a transition.
        gamma: Discount factor of one step, in [0, 1].
        device: Device of rows and samples; None: the CPU.

    Raises:
        KindError: A number is not an integer.
        OptionError: A number is out of range.

    Examples:
        >>> import torch
        >>> buffer = SimpleReplayBuffer(n_env=4, buffer_size=10, n_obs=3, n_act=2, n_critic_obs=0, n_steps=3)
        >>> obs, flags = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
        >>> after = {"observations": obs, "rewards": torch.ones(4), "dones": flags, "truncations": flags}
        >>> for _ in range(5):
        ...     buffer.extend({"observations": obs, "actions": torch.zeros(4, 2), "next": after})
        >>> batch = buffer.sample(2)
        >>> batch.batch_size, batch["next", "observations"].shape
        (torch.Size([8]), torch.Size([8, 3]))
    """

    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int,
        asymmetric_obs: bool = False,  # noqa: FBT001, FBT002
        playground_mode: bool = False,  # noqa: FBT001, FBT002
        n_steps: int = 1,
        gamma: float = 0.99,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.n_env = positive("n_env", n_env)
        self.buffer_size = positive("buffer_size", buffer_size)
        self.n_obs, self.n_act, self.n_critic_obs = n_obs, n_act, n_critic_obs
        self.asymmetric_obs = asymmetric_obs
        self.playground_mode = playground_mode and asymmetric_obs
        self.n_steps = positive("n_steps", n_steps)
        self.gamma = check_real("gamma", gamma, 0.0, 1.0)
        self.device = torch.device("cpu" if device is None else device)
        if self.playground_mode and n_critic_obs <= n_obs:
            msg = f"playground_mode needs n_critic_obs above n_obs={n_obs}, which it contains, got {n_critic_obs}"
            raise OptionError(msg)
        pairs = {("next", name): (name,) for name in self._states()}
        self._rows = buffers.ReplayBuffer(
            storage=LazyTensorStorage(n_env * buffer_size, ndim=2, device=self.device, single_copy=pairs),
            sampler=_RowsOfEach(n_env),
            dim_extend=0,
            sample_unit=_Steps(n_env, n_steps, gamma, list(pairs)),
        )

    def _states(self) -> dict[str, int]:
        """Return the fields that are stored of a state, and their numbers."""
        stored = self.n_critic_obs - (self.n_obs if self.playground_mode else 0)
        return {"observations": self.n_obs} | ({"critic_observations": stored} if self.asymmetric_obs else {})

    def __len__(self) -> int:
        """Number of rows, of all environments."""
        return len(self._rows)

    @property
    def ptr(self) -> int:
        """Number of steps written."""
        return self._rows.write_count // self.n_env

    @torch.no_grad()
    def extend(self, tensor_dict: TensorDict | Mapping[str, Any]) -> None:
        """Add one step of all environments; if the buffer is full, it replaces the oldest step.

        On CUDA the host waits for the device once, to find observations that are stored already.

        Args:
            tensor_dict: `observations` `[n_env, n_obs]`, `actions` `[n_env, n_act]`, with `asymmetric_obs`
                `critic_observations` `[n_env, n_critic_obs]`, and under `next`: `rewards` `[n_env]`, `dones` and
                `truncations` `[n_env]` (a truncated row is done as well), `observations` and `critic_observations`,
                which are the final ones where an episode ends.

        Raises:
            KeyMissingError: A field is missing; nothing is changed.
            SchemaError: A shape does not match; nothing is changed.
        """
        after = tensor_dict["next"]
        ends = {name: self._field(after, name, ()) != 0 for name in _FLAGS}
        self._rows.add({
            **self._state(tensor_dict),
            "actions": self._field(tensor_dict, "actions", (self.n_act,)),
            "rewards": self._field(after, "rewards", ()),
            **ends,
            _END: ends["dones"] | ends["truncations"],
            "next": self._state(after),
        })  # fmt: skip

    def _state(self, given: Any) -> dict[str, Tensor]:
        found = {"observations": self._field(given, "observations", (self.n_obs,))}
        if self.asymmetric_obs:
            critic = self._field(given, "critic_observations", (self.n_critic_obs,))
            found["critic_observations"] = critic[:, self.n_obs :] if self.playground_mode else critic
        return found

    def _field(self, given: Any, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a field of all environments."""
        if name not in given.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
            msg = f"a step must have the field {name!r}, got {[*given.keys()]}"
            raise KeyMissingError(msg)
        value: Tensor = given[name]
        if value.shape != (self.n_env, *shape):
            msg = f"{name} must have the shape {[self.n_env, *shape]} (environments first), got {list(value.shape)}"
            raise SchemaError(msg)
        return value

    @torch.no_grad()
    def sample(self, batch_size: int) -> TensorDict:
        """Draw rows of each environment uniformly with replacement. On CUDA the host does not wait for the device.

        Args:
            batch_size: Rows of each environment.

        Returns:
            A TensorDict `[n_env * batch_size]`, environment by environment: `observations`, `actions`,
            `critic_observations` (with `asymmetric_obs`), and under `next`: `rewards`, the sum discounted by `gamma^k`,
            `dones`, `truncations` (int64), `observations` and `critic_observations` of the last step, and
            `effective_n_steps`, by which the learner discounts the value of the next observation. Copies.

        Raises:
            EmptyBufferError: There are no rows.
        """
        rows = self.n_env * positive("batch_size", batch_size)
        batch = self._rows.sample(rows)
        steps = batch["effective_n_steps"]
        now, after = ({name: part[name] for name in self._states()} for part in (batch, batch["next"]))
        if self.playground_mode:
            for part in (now, after):
                part["critic_observations"] = torch.cat((part["observations"], part["critic_observations"]), -1)
        after |= {"rewards": batch["rewards"], **{name: batch[name].long() for name in _FLAGS}}
        after["effective_n_steps"] = steps if self.n_steps == 1 else steps.to(torch.float32)
        made: TensorDict = require("tensordict", "tensordict").TensorDict(
            {**now, "actions": batch["actions"], "next": after}, batch_size=[rows], device=self.device
        )
        return made

    def dumps(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Save all rows to a directory, whole or not at all; see `ostinato.ReplayBuffer.dumps`."""
        self._rows.dumps(path, incremental=incremental, progress=progress)

    def loads(self, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Restore what `dumps` saved; see `ostinato.ReplayBuffer.loads`."""
        self._rows.loads(path, progress=progress)


class HolosomaReplayBuffer(SimpleReplayBuffer):
    """The `SimpleReplayBuffer` of Holosoma, whose rows always have observations of the critic.

    Args:
        n_env: See `SimpleReplayBuffer`, also for the other arguments.
        buffer_size: See there.
        n_obs: See there.
        n_act: See there.
        n_critic_obs: See there.
        n_steps: See there.
        gamma: See there.
        device: See there.

    Examples:
        >>> buffer = HolosomaReplayBuffer(n_env=4, buffer_size=10, n_obs=3, n_act=2, n_critic_obs=5, n_steps=3)
        >>> buffer.asymmetric_obs
        True
    """

    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int,
        n_steps: int = 1,
        gamma: float = 0.99,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            n_env, buffer_size, n_obs, n_act, n_critic_obs,
            asymmetric_obs=True, n_steps=n_steps, gamma=gamma, device=device,
        )  # fmt: skip


@final
class _RowsOfEach(Sampler):
    """Draws the same number of rows of each environment, environment by environment."""

    reads = True
    row_values = ()

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs

    def __repr__(self) -> str:
        """Options."""
        return f"_RowsOfEach(num_envs={self._num_envs})"

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw uniformly with replacement; the batch size is a multiple of the number of environments."""
        envs = self._num_envs
        shape = (envs, batch_size // envs)
        steps = torch.randint(0, view.rows // envs, shape, generator=generator, device=view.device)
        return Draw((steps * envs + torch.arange(envs, device=view.device).unsqueeze(1)).view(-1))


@final
class _Steps(SampleUnit):
    """Transitions over up to `n` steps, decided on the device of the rows, without an episode table in host memory.

    `view.read` needs a sampler that reads fields.
    """

    rank = 1

    def __init__(self, num_envs: int, n: int, gamma: float, next_keys: list[tuple[str, ...]]) -> None:
        self._num_envs = num_envs
        self._n, self._gamma = n, gamma
        self._moved = [*next_keys, *((name,) for name in _FLAGS)]

    def __repr__(self) -> str:
        """Options."""
        return f"_Steps(n={self._n}, gamma={self._gamma:g})"

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Read the rewards of all steps, and the fields after the step from the last one."""
        envs, capacity, slots = self._num_envs, view.capacity // self._num_envs, plan.records
        offsets = torch.arange(self._n, device=slots.device)
        step = (slots // envs).unsqueeze(1)
        newest = (view.cursor // envs - 1 - step) % capacity
        rows = (step + torch.minimum(offsets, newest)) % capacity * envs + (slots % envs).unsqueeze(1)
        ended: Any = view.read(rows.view(-1), (_END,))
        before = ended.view(rows.shape).cumsum(1) - ended.view(rows.shape).long()
        inside = (before == 0) & (offsets <= newest)
        steps = inside.sum(1)
        last = rows.gather(1, steps.unsqueeze(1) - 1).view(-1)
        weights = torch.pow(self._gamma, offsets.to(torch.float32)) * inside
        positions = [plan.require(path, "a field after the step") for path in self._moved]
        changed = {at: Column(Request(at, last)) for at in positions}
        reward = plan.require(("rewards",), "the reward of a step")
        changed[reward] = Column(Request(reward, rows.view(-1)), (self._n,), weights)
        return plan.with_columns(changed)._replace(fields={**plan.fields, "effective_n_steps": steps})
