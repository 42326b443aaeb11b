"""The memory for skrl beside skrl 2.1.1: same rows, same training; and where a row of the original is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import pytest
import torch
from torch import nn

from ostinato.compat.skrl import RandomMemory

from .originals import original

if TYPE_CHECKING:
    from pathlib import Path

theirs: Any = original("skrl.memories.torch")
models: Any = original("skrl.models.torch")
wrappers: Any = original("skrl.envs.wrappers.torch")
trainers: Any = original("skrl.trainers.torch")

HIDDEN = 8


class Net(models.Model):  # type: ignore[misc]
    """A policy or a critic; with `length` a recurrent policy over sequences of so many steps."""

    def __init__(self, inputs: int, outputs: int, env: Any, length: int = 0) -> None:
        super().__init__(
            observation_space=env.observation_space, action_space=env.action_space, state_space=None, device="cpu"
        )
        self.length, self.envs = length, env.num_envs
        self.rnn = nn.GRU(inputs, inputs, batch_first=True) if length else nn.Identity()
        self.inputs = inputs
        self.net = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))
        self.log_std = nn.Parameter(torch.zeros(outputs, device="cpu"))

    def get_specification(self) -> dict[str, Any]:
        sizes = [(1, self.envs, self.inputs)]
        return {"rnn": {"sequence_length": self.length, "sizes": sizes}} if self.length else {}

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        x, more = inputs["observations"], {}
        if "taken_actions" in inputs and role != "policy":
            x = torch.cat((x, inputs["taken_actions"]), -1)
        if self.length:
            steps = self.length if self.training else 1
            first = inputs["rnn"][0].unflatten(1, (-1, steps))[:, :, 0].contiguous()
            x, last = self.rnn(x.unflatten(0, (-1, steps)), first)
            x, more = x.flatten(0, 1), {"rnn": [last]}
        out = 2 * torch.tanh(self.net(x)) if role.endswith("policy") else self.net(x)
        return out, {"log_std": self.log_std, **more}


class Policy(models.GaussianMixin, Net):  # type: ignore[misc]
    def __init__(self, env: Any, length: int) -> None:
        Net.__init__(self, 3, 1, env, length)
        models.GaussianMixin.__init__(self)


class Value(models.DeterministicMixin, Net):  # type: ignore[misc]
    def __init__(self, inputs: int, env: Any, length: int = 0) -> None:
        Net.__init__(self, inputs, 1, env, length)
        models.DeterministicMixin.__init__(self)


def train(name: str, kind: Any, folder: Path, *, length: int = 0, **options: Any) -> tuple[dict[str, Any], Any]:
    """Train an agent for a few steps on two pendulums, whose episodes end twice; return its weights."""
    agents = original(f"skrl.agents.torch.{name}")
    torch.manual_seed(0)
    env = wrappers.wrap_env(gymnasium.make_vec("Pendulum-v1", 2, max_episode_steps=20), verbose=False)
    memory = kind(memory_size=30, num_envs=2, device="cpu", **options)
    nets: dict[str, Any] = {"policy": (Policy(env, length) if name == "sac" else Value(3, env, length))}
    twins = ("critic",) if name == "ddpg" else ("critic_1", "critic_2")
    nets |= {prefix + twin: Value(4, env) for twin in twins for prefix in ("", "target_")}
    if name != "sac":
        nets["target_policy"] = Value(3, env, length)
    settings = getattr(agents, f"{name.upper()}_CFG")(
        batch_size=8, learning_starts=20, random_timesteps=0,
        experiment={"directory": str(folder), "write_interval": 0, "checkpoint_interval": 0},
    )  # fmt: skip
    agent = getattr(agents, name.upper() + ("_RNN" if length else ""))(
        models=nets, memory=memory, cfg=settings, observation_space=env.observation_space,
        action_space=env.action_space, state_space=None, device="cpu",
    )  # fmt: skip
    env._env.reset(seed=0)
    cfg = {"timesteps": 50, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    trainers.SequentialTrainer(cfg=cfg, env=env, agents=agent).train()
    env._env.close()
    return {key: value for key, net in nets.items() for key, value in net.state_dict(prefix=key + ".").items()}, memory


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_the_same_draws_teach_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    ours, _ = train(name, RandomMemory, tmp_path, replacement=True)
    other, _ = train(name, theirs.RandomMemory, tmp_path, replacement=True)
    assert all(torch.equal(ours[key], other[key]) for key in other)
    train(name, RandomMemory, tmp_path, n_steps=3, discount_factor=0.99)


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_recurrent_agents_train_on_sequences_of_one_episode(name: str, tmp_path: Path) -> None:
    weights, memory = train(name, RandomMemory, tmp_path, length=5)
    assert all(bool(x.isfinite().all()) for x in weights.values())
    _, ends = memory.sample(["rewards", "truncated"], batch_size=60, sequence_length=5)[0]
    assert ends.any()
    assert not ends.view(-1, 5)[:, :-1].any()


def fill(memory: Any, steps: int, at_once: int = 1) -> Any:
    for name in ("observations", "rewards"):
        memory.create_tensor(name=name, size=1, dtype=torch.float32)
    for first in range(0, steps, at_once):
        count = torch.arange(first, first + at_once, device="cpu").float().view(-1, 1)
        rows = count.expand(memory.num_envs, 1) if memory.num_envs > 1 else count
        memory.add_samples(observations=rows, rewards=-rows)
    return memory


@pytest.mark.parametrize(("num_envs", "steps"), [(1, 3), (1, 9), (2, 3), (2, 9)])
def test_the_same_calls_give_the_same(num_envs: int, steps: int, tmp_path: Path) -> None:
    names = ["rewards", "observations", "nothing"]
    both = [
        fill(kind(memory_size=5, num_envs=num_envs, device="cpu"), steps)
        for kind in (RandomMemory, theirs.RandomMemory)
    ]
    ours, other = both
    for attribute in ("filled", "memory_index", "env_index"):
        assert getattr(ours, attribute) == getattr(other, attribute)
    assert len(ours) == len(other)
    assert ours.get_tensor_names() == other.get_tensor_names()
    assert torch.equal(
        ours.get_tensor_by_name("rewards").nan_to_num(), other.get_tensor_by_name("rewards").nan_to_num()
    )
    index = torch.arange(len(ours), device="cpu")
    calls: list[Any] = [lambda m: m.sample_by_index(names, indexes=index, mini_batches=2)]
    if ours.filled:
        calls += [lambda m: m.sample_all(names, mini_batches=2)]
    for call in calls:
        for a, b in zip(call(ours), call(other), strict=True):
            assert a[2] is None is b[2]
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[1], b[1])
    other.save(str(tmp_path), format="npz")
    loaded = fill(RandomMemory(memory_size=5, num_envs=num_envs, device="cpu"), 0)
    loaded.load(str(next((tmp_path / "memories").iterdir())))
    assert torch.equal(loaded.tensors["rewards"].nan_to_num(), ours.tensors["rewards"].nan_to_num())


def test_sequences_of_the_original_join_the_newest_and_the_oldest_rows() -> None:
    def joined(memory: Any) -> bool:
        found = fill(memory, 8).sample(["observations"], batch_size=400, sequence_length=3)[0][0]
        return bool((found.view(-1, 3).diff() != 1).any())

    assert joined(theirs.RandomMemory(memory_size=6, device="cpu", replacement=True))
    assert not joined(RandomMemory(memory_size=6, device="cpu", replacement=True))


def test_the_original_moves_on_for_each_tensor_of_several_steps() -> None:
    """Observation and reward of one step are then in two rows, and a ring written over its end is not full."""
    for kind, rows, apart in ((theirs.RandomMemory, 8, True), (RandomMemory, 4, False)):
        memory = fill(kind(memory_size=9, device="cpu"), 4, 2)
        now, reward = memory.sample_by_index(["observations", "rewards"], indexes=[0, 1, 2, 3])[0]
        assert len(memory) == rows
        assert bool((now != -reward).any()) == apart
        assert fill(kind(memory_size=5, device="cpu"), 6, 3).filled != apart


def test_the_original_loads_nothing(tmp_path: Path) -> None:
    fill(theirs.RandomMemory(memory_size=4, device="cpu"), 4).save(str(tmp_path))
    path = str(next((tmp_path / "memories").iterdir()))
    for kind, rows in ((theirs.RandomMemory, 0), (RandomMemory, 4)):
        memory = fill(kind(memory_size=4, device="cpu"), 0)
        memory.load(path)
        assert len(memory) == rows
        assert bool(memory.get_tensor_by_name("rewards").isnan().all()) == (rows == 0)
