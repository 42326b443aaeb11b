"""The memory for skrl beside skrl 2.1.1: same rows, same training; and where a row of the original is wrong."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import pytest
import torch
from torch import nn

from ostinato import PrioritizedSampler
from ostinato.compat.skrl import RandomMemory

from .originals import original

if TYPE_CHECKING:
    from pathlib import Path

theirs: Any = original("skrl.memories.torch")
models: Any = original("skrl.models.torch")
wrappers: Any = original("skrl.envs.wrappers.torch")
trainers: Any = original("skrl.trainers.torch")


class Net(models.Model):  # type: ignore[misc]
    """A critic, or a policy; with `length` a recurrent policy over sequences of so many steps."""

    def __init__(self, role: str, env: Any, length: int = 0) -> None:
        spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "state_space": None}
        super().__init__(**spaces, device="cpu")
        self.length, inputs = length, 3 if "policy" in role else 4
        self.rnn = nn.GRU(inputs, inputs, batch_first=True)
        self.net = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 1))
        self.log_std = nn.Parameter(torch.zeros(1, device="cpu"))
        (models.GaussianMixin if isinstance(self, models.GaussianMixin) else models.DeterministicMixin).__init__(self)

    def get_specification(self) -> dict[str, Any]:
        return {"rnn": {"sequence_length": self.length, "sizes": [(1, 2, 3)]}} if self.length else {}

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        if "policy" not in role:
            return self.net(torch.cat((inputs["observations"], inputs["taken_actions"]), -1)), {}
        x: torch.Tensor = inputs["observations"]
        more: dict[str, Any] = {"log_std": self.log_std}
        if self.length:
            steps = self.length if self.training else 1
            first = inputs["rnn"][0].unflatten(1, (-1, steps))[:, :, 0].contiguous()
            x, last = self.rnn(x.reshape(-1, steps, 3), first)
            x, more["rnn"] = x.flatten(0, 1), [last]
        return torch.tanh(self.net(x)), more


class Gaussian(models.GaussianMixin, Net):  # type: ignore[misc]
    __init__ = Net.__init__


class Value(models.DeterministicMixin, Net):  # type: ignore[misc]
    __init__ = Net.__init__


def train(name: str, kind: Any, folder: Path, length: int = 0, **options: Any) -> tuple[Any, Any]:
    """Train an agent for a few steps on two pendulums, whose episodes end twice; return its weights and its memory."""
    agents = original(f"skrl.agents.torch.{name}")
    torch.manual_seed(0)
    env = wrappers.wrap_env(gymnasium.make_vec("Pendulum-v1", 2, max_episode_steps=20), verbose=False)
    env._env.reset(seed=0)
    roles = ["critic"] if name == "ddpg" else ["critic_1", "critic_2"]
    roles = ["policy", *roles, *(f"target_{role}" for role in roles), *(["target_policy"] if name != "sac" else [])]
    nets = {role: (Gaussian if name == "sac" and role == "policy" else Value)(role, env, length) for role in roles}
    quiet = {"directory": str(folder), "write_interval": 0, "checkpoint_interval": 0}
    settings = getattr(agents, f"{name.upper()}_CFG")(batch_size=8, learning_starts=20, experiment=quiet)
    memory = kind(memory_size=30, num_envs=2, device="cpu", **options)
    agent = getattr(agents, name.upper() + "_RNN" * bool(length))(
        models=nets, memory=memory, cfg=settings, observation_space=env.observation_space,
        action_space=env.action_space, state_space=None, device="cpu",
    )  # fmt: skip
    cfg = {"timesteps": 50, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    trainers.SequentialTrainer(cfg=cfg, env=env, agents=agent).train()
    env._env.close()
    return nn.ModuleDict(nets).state_dict(), memory


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_the_same_draws_teach_the_same_bit_for_bit(name, tmp_path):
    ours, _ = train(name, RandomMemory, tmp_path, replacement=True)
    other, _ = train(name, theirs.RandomMemory, tmp_path, replacement=True)
    assert all(torch.equal(ours[key], other[key]) for key in other)
    train(name, RandomMemory, tmp_path, n_steps=3, discount_factor=0.99)


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_recurrent_agents_train_on_sequences_of_one_episode(name, tmp_path):
    weights, memory = train(name, RandomMemory, tmp_path, 5)
    assert all(bool(x.isfinite().all()) for x in weights.values())
    _, ends = memory.sample(["rewards", "truncated"], batch_size=60, sequence_length=5)[0]
    assert ends.any()
    assert not ends.view(-1, 5)[:, :-1].any()


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_weights_reach_no_loss_of_the_agents_themselves(name, tmp_path):
    """They sample neither weights nor set priorities, which stay equal: the weight of each row is 1."""
    sampler = partial(PrioritizedSampler, 60, alpha=0.6, beta=0.4)
    weights, memory = train(name, RandomMemory, tmp_path, sampler=sampler)
    assert all(bool(x.isfinite().all()) for x in weights.values())
    (found,) = memory.sample(["priority_weight"], batch_size=60)[0]
    assert (found == 1).all()


def fill(memory: Any, steps: int, at_once: int = 1) -> Any:
    for name in ("observations", "rewards"):
        memory.create_tensor(name=name, size=1, dtype=torch.float32)
    for first in range(0, steps, at_once):
        count = torch.arange(first, first + at_once, device="cpu").float().view(-1, 1)
        rows = count.expand(memory.num_envs, 1) if memory.num_envs > 1 else count
        memory.add_samples(observations=rows, rewards=-rows)
    return memory


def test_the_same_calls_give_the_same():
    ours, other = (
        fill(kind(memory_size=5, num_envs=2, device="cpu"), 8) for kind in (RandomMemory, theirs.RandomMemory)
    )
    calls: list[Any] = [
        lambda memory: (len(memory), memory.filled, memory.memory_index, memory.env_index, memory.get_tensor_names()),
        lambda memory: [[x.tolist() for x in part] for part in memory.sample_all(["rewards"], mini_batches=2)],
        lambda memory: [
            [None if x is None else x.tolist() for x in part]
            for part in memory.sample_by_index(["rewards", "none"], indexes=[3, 0, 7], mini_batches=2)
        ],
    ]
    for call in calls:
        assert call(ours) == call(other)


def test_the_original_moves_on_for_each_tensor_of_several_steps():
    """Observation and reward of one step are then in two rows, and a ring written over its end is not full."""
    for kind, rows, apart in ((theirs.RandomMemory, 8, True), (RandomMemory, 4, False)):
        memory = fill(kind(memory_size=9, device="cpu"), 4, 2)
        now, reward = memory.sample_by_index(["observations", "rewards"], indexes=[0, 1, 2, 3])[0]
        assert len(memory) == rows
        assert bool((now != -reward).any()) == apart
        assert fill(kind(memory_size=5, device="cpu"), 6, 3).filled != apart
