"""Adapters for the replay buffers that are known by name."""

from __future__ import annotations

import importlib
import inspect
import shutil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.errors import OptionError
from ostinato.testing.audit.adapter import Adapter, Feature
from ostinato.testing.audit.cases import ALPHA, BETA, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ostinato.testing.audit.cases import Array, Case, Step


class TorchRL(Adapter):
    """`TensorDictReplayBuffer` and its relatives, composed of `torchrl.data.replay_buffers`; `ndim=2` storages."""

    features: tuple[Feature, ...] = ("num_envs", "sequence", "priority", "save")
    module = "torchrl.data.replay_buffers"
    storage_options: Mapping[str, Any] = MappingProxyType({})

    def make(self, case: Case) -> Any:
        """See `Adapter`. Sequences are those of `SliceSampler`."""
        parts, rows = importlib.import_module(self.module), case.capacity * case.num_envs
        options: dict[str, Any] = {}
        if case.prioritized:
            options["sampler"] = parts.PrioritizedSampler(rows, ALPHA, BETA)
        if case.sequence > 1:
            options["sampler"] = parts.SliceSampler(slice_len=case.sequence, end_key=("next", "done"))
        if case.n_steps > 1:
            options["sample_unit"] = parts.NStep(case.n_steps, case.gamma)
        storage = parts.LazyTensorStorage(rows, ndim=min(case.num_envs, 2), **self.storage_options)
        return self.factory(storage=storage, dim_extend=0, **options)

    def add(self, buffer: Any, step: Step) -> None:
        """See `Adapter`."""
        tensordict = require("tensordict", "tensordict").TensorDict
        flags = {"terminated": step.terminated, "truncated": step.truncated, "done": step.terminated | step.truncated}
        following = {name: flag[:, None] for name, flag in flags.items()}
        following |= {"reward": step.reward[:, None], "obs": step.next_obs}
        row = {"obs": step.obs, "action": step.action, "next": following}
        rows = tensordict(row, [len(step.reward)])
        buffer.extend(rows[None] if len(rows) > 1 else rows)

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:
        """See `Adapter`."""
        batch, info = buffer.sample(size * case.sequence, return_info=True)
        after = batch["next"]
        return Sample(
            batch["obs"],
            batch["action"],
            after["reward"],
            after["obs"],
            after["terminated"],
            truncated=after["truncated"] if case.sequence == 1 else None,
            discount=batch.get("gamma", None),
            weight=info.get("priority_weight", None),
            index=info,
        )

    def prioritize(self, buffer: Any, sample: Sample, priorities: Array) -> None:
        """See `Adapter`."""
        buffer.update_priority(sample.index["index"], torch.from_numpy(priorities))

    def save(self, buffer: Any, path: Path) -> None:
        """See `Adapter`."""
        buffer.dumps(path)

    def load(self, case: Case, path: Path) -> Any:
        """See `Adapter`."""
        buffer = self.make(case)
        buffer.loads(path)
        return buffer


@final
class Ostinato(TorchRL):
    """`ostinato.ReplayBuffer` and its subclasses, with observations stored once."""

    features: tuple[Feature, ...] = ("num_envs", "n_step", "sequence", "priority", "save")
    module = "ostinato"
    storage_options = MappingProxyType({"single_copy": {("next", "obs"): "obs"}})

    def prioritize(self, buffer: Any, sample: Sample, priorities: Array) -> None:
        """See `Adapter`. The info of the sample has generations, so that replaced rows keep their priorities."""
        buffer.update_priority(sample.index, torch.from_numpy(priorities))


@final
class StableBaselines3(Adapter):
    """`stable_baselines3.common.buffers.ReplayBuffer` and its subclasses; n-step if the class takes `n_steps`."""

    def __init__(self, factory: Any) -> None:
        super().__init__(factory)
        self.features = ("num_envs", "save")
        if "n_steps" in inspect.signature(factory).parameters:
            self.features += ("n_step",)

    def make(self, case: Case) -> Any:
        """See `Adapter`."""
        spaces = require("gymnasium.spaces", "sb3")
        low, high = (0, 255) if case.dtype == "uint8" else (-np.inf, np.inf)
        options = {"n_steps": case.n_steps, "gamma": case.gamma} if "n_step" in self.features else {}
        return self.factory(
            case.capacity * case.num_envs,
            spaces.Box(low, high, case.shape, case.dtype),
            spaces.Box(-np.inf, np.inf, (3,)),
            device="cpu",
            n_envs=case.num_envs,
            **options,
        )

    def add(self, buffer: Any, step: Step) -> None:
        """See `Adapter`."""
        infos = [{"TimeLimit.truncated": bool(late)} for late in step.truncated]
        obs, action, reward, next_obs, terminated, truncated = (field.numpy() for field in step)
        buffer.add(obs, next_obs, action, reward, terminated | truncated, infos)

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:  # noqa: ARG002
        """See `Adapter`."""
        batch = buffer.sample(size)
        return Sample(
            batch.observations,
            batch.actions,
            batch.rewards,
            batch.next_observations,
            batch.dones,
            discount=batch.discounts,
        )

    def save(self, buffer: Any, path: Path) -> None:
        """See `Adapter`; as `save_replay_buffer` does."""
        require("stable_baselines3.common.save_util", "sb3").save_to_pkl(path, buffer)

    def load(self, case: Case, path: Path) -> Any:  # noqa: ARG002
        """See `Adapter`; as `load_replay_buffer` does."""
        return require("stable_baselines3.common.save_util", "sb3").load_from_pkl(path)


@final
class LeRobot(Adapter):
    """`lerobot.rl.buffer.ReplayBuffer` as LeRobot's learner makes and saves it; pictures are not augmented."""

    features: tuple[Feature, ...] = ("save",)
    _options: Final = MappingProxyType(
        {"device": "cpu", "state_keys": ["observation.state"], "use_drq": False, "optimize_memory": True}
    )

    def make(self, case: Case) -> Any:
        """See `Adapter`."""
        return self.factory(case.capacity, **{**self._options, "image_augmentation_function": lambda images: images})

    def add(self, buffer: Any, step: Step) -> None:
        """See `Adapter`."""
        buffer.add(
            state={"observation.state": step.obs},
            action=step.action,
            reward=float(step.reward[0]),
            next_state={"observation.state": step.next_obs},
            done=bool(step.terminated[0]),
            truncated=bool(step.truncated[0]),
        )

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:  # noqa: ARG002
        """See `Adapter`."""
        batch = buffer.sample(size)
        return Sample(
            batch["state"]["observation.state"],
            batch["action"],
            batch["reward"],
            batch["next_state"]["observation.state"],
            batch["done"],
            truncated=batch["truncated"],
        )

    def save(self, buffer: Any, path: Path) -> None:
        """See `Adapter`; as `save_training_checkpoint` of the learner does."""
        if path.exists():
            shutil.rmtree(path)
        buffer.to_lerobot_dataset("audit", fps=10, root=path)

    def load(self, case: Case, path: Path) -> Any:
        """See `Adapter`."""
        dataset = importlib.import_module("lerobot.datasets").LeRobotDataset("audit", root=path)
        return self.factory.from_lerobot_dataset(dataset, capacity=case.capacity, **self._options)


@final
class Skrl(Adapter):
    """`skrl.memories.torch.RandomMemory`, with the tensors of skrl's off-policy agents."""

    features: tuple[Feature, ...] = ("num_envs", "sequence", "save")
    _names = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")

    def make(self, case: Case) -> Any:
        """See `Adapter`."""
        buffer = self.factory(memory_size=case.capacity, num_envs=case.num_envs, device="cpu", replacement=True)
        size, dtype = int(np.prod(case.shape)), getattr(torch, case.dtype)
        kinds = ((size, dtype), (3, torch.float32), (1, torch.float32), (size, dtype), (1, torch.bool), (1, torch.bool))
        for name, (width, kind) in zip(self._names, kinds, strict=True):
            buffer.create_tensor(name, size=width, dtype=kind)
        return buffer

    def add(self, buffer: Any, step: Step) -> None:
        """See `Adapter`."""
        rows = (field.reshape(len(field), -1) for field in step)
        buffer.add_samples(**dict(zip(self._names, rows, strict=True)))

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:
        """See `Adapter`."""
        return Sample(*buffer.sample(list(self._names), batch_size=size, sequence_length=case.sequence)[0])

    def save(self, buffer: Any, path: Path) -> None:
        """See `Adapter`."""
        buffer.save(str(path))

    def load(self, case: Case, path: Path) -> Any:
        """See `Adapter`; the newest file is read."""
        buffer = self.make(case)
        buffer.load(str(max((path / "memories").iterdir())))
        return buffer


@final
class SimpleReplay(Adapter):
    """`SimpleReplayBuffer` of FastTD3 and Holosoma."""

    features: tuple[Feature, ...] = ("num_envs", "n_step")

    def make(self, case: Case) -> Any:
        """See `Adapter`."""
        return self.factory(
            n_env=case.num_envs,
            buffer_size=case.capacity,
            n_obs=int(np.prod(case.shape)),
            n_act=3,
            n_critic_obs=1,
            n_steps=case.n_steps,
            gamma=case.gamma,
            device="cpu",
        )

    def add(self, buffer: Any, step: Step) -> None:
        """See `Adapter`."""
        rows, critic = len(step.reward), torch.zeros(len(step.reward), 1, device="cpu", dtype=torch.float32)
        following = {
            "observations": step.next_obs.reshape(rows, -1),
            "critic_observations": critic,
            "rewards": step.reward,
            "dones": (step.terminated | step.truncated).long(),
            "truncations": step.truncated.long(),
        }
        row = {
            "observations": step.obs.reshape(rows, -1),
            "critic_observations": critic,
            "actions": step.action,
            "next": following,
        }
        buffer.extend(require("tensordict", "tensordict").TensorDict(row, [rows]))

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:
        """See `Adapter`."""
        batch = buffer.sample(size)
        after = batch["next"]
        return Sample(
            batch["observations"],
            batch["actions"],
            after["rewards"],
            after["observations"],
            (after["dones"] > 0) & (after["truncations"] == 0),
            discount=case.gamma ** after["effective_n_steps"],
        )


@final
class Cpprb(Adapter):
    """`cpprb.ReplayBuffer` and `cpprb.PrioritizedReplayBuffer`."""

    def __init__(self, factory: Any) -> None:
        super().__init__(factory)
        self._prioritized = hasattr(getattr(factory, "func", factory), "update_priorities")
        self.features = ("n_step", "save", "priority") if self._prioritized else ("n_step", "save")

    def make(self, case: Case) -> Any:
        """See `Adapter`."""
        obs = {"shape": case.shape, "dtype": case.dtype}
        fields: dict[str, Any] = {"obs": obs, "act": {"shape": 3}, "rew": {}, "next_obs": obs, "done": {}}
        options: dict[str, Any] = {"alpha": ALPHA} if self._prioritized else {}
        if case.n_steps > 1:
            options["Nstep"] = {"size": case.n_steps, "gamma": case.gamma, "rew": "rew", "next": "next_obs"}
        return self.factory(case.capacity, fields, **options)

    def add(self, buffer: Any, step: Step) -> None:
        """See `Adapter`."""
        obs, action, reward, next_obs, done, truncated = (field[0].numpy() for field in step)
        buffer.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=done)
        if done or truncated:
            buffer.on_episode_end()

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:  # noqa: ARG002
        """See `Adapter`."""
        batch = buffer.sample(size, BETA) if self._prioritized else buffer.sample(size)
        return Sample(
            batch["obs"],
            batch["act"],
            batch["rew"],
            batch["next_obs"],
            batch["done"],
            weight=batch.get("weights"),
            index=batch.get("indexes"),
        )

    def prioritize(self, buffer: Any, sample: Sample, priorities: Array) -> None:
        """See `Adapter`."""
        buffer.update_priorities(sample.index, priorities)

    def save(self, buffer: Any, path: Path) -> None:
        """See `Adapter`."""
        buffer.save_transitions(str(path.with_suffix(".npz")))

    def load(self, case: Case, path: Path) -> Any:
        """See `Adapter`."""
        buffer = self.make(case)
        buffer.load_transitions(str(path.with_suffix(".npz")))
        return buffer


@final
class Flashbax(Adapter):
    """`flashbax.make_flat_buffer`: the next observation is the first one of the row after."""

    features: tuple[Feature, ...] = ("num_envs",)

    def make(self, case: Case) -> Any:
        """See `Adapter`: the functions of the buffer, its state, and the number of draws."""
        rows = case.capacity * case.num_envs
        functions = self.factory(rows, min_length=1, sample_batch_size=rows, add_batch_size=case.num_envs)
        return {"functions": functions, "state": None, "draws": 0}

    def add(self, buffer: Any, step: Step) -> None:
        """See `Adapter`."""
        rows = {name: field.numpy() for name, field in step._asdict().items() if name != "next_obs"}
        if buffer["state"] is None:
            first = {name: require("jax.numpy").asarray(field[0]) for name, field in rows.items()}
            buffer["state"] = buffer["functions"].init(first)
        buffer["state"] = buffer["functions"].add(buffer["state"], rows)

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:  # noqa: ARG002
        """See `Adapter`."""
        buffer["draws"] += 1
        key = require("jax.random").key(buffer["draws"])
        first, second = buffer["functions"].sample(buffer["state"], key).experience
        return Sample(
            first["obs"], first["action"], first["reward"], second["obs"], first["terminated"], first["truncated"]
        )


_ADAPTERS: tuple[tuple[str, type[Adapter]], ...] = (
    ("SimpleReplayBuffer", SimpleReplay),
    ("lerobot", LeRobot),
    ("skrl", Skrl),
    ("cpprb", Cpprb),
    ("flashbax", Flashbax),
    ("sb3", StableBaselines3),
    ("stable_baselines3", StableBaselines3),
    ("torchrl", TorchRL),
    ("ostinato", Ostinato),
)
"""Adapters by a part of the full name of the class or of one of its bases; the first one that fits."""


def name_of(factory: Any) -> str:
    """Return module and name of a class, a function, a `functools.partial` of one, or the class of an object."""
    target = getattr(factory, "func", factory)
    target = target if hasattr(target, "__qualname__") else type(target)
    return f"{target.__module__}.{target.__qualname__}"


def adapter_of(factory: Any) -> type[Adapter]:
    """Return the adapter for a class or a callable, by its name or those of the base classes.

    Raises:
        OptionError: There is none.
    """
    target = getattr(factory, "func", factory)
    names = [name_of(base) for base in getattr(target, "__mro__", (target,))]
    for part, adapter in _ADAPTERS:
        if any(part in name for name in names):
            return adapter
    known = ", ".join(part for part, _ in _ADAPTERS)
    msg = f"there is no adapter for {name_of(factory)} (known are {known}): give a subclass of Adapter"
    raise OptionError(msg)
