"""Losses, trainer hooks and transforms of TorchRL with buffers of Ostinato: the same training, to the last bit."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, OneHot
from torchrl.envs import EnvBase
from torchrl.envs.transforms import MultiStepTransform
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.modules.distributions import TanhNormal
from torchrl.modules.tensordict_module import ProbabilisticActor, ValueOperator
from torchrl.objectives import DQNLoss, SACLoss, SoftUpdate
from torchrl.trainers.trainers import ReplayBufferTrainer

from ostinato import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

from ._script import library

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 5


class Corridor(EnvBase):  # type: ignore[misc]
    """Five cells; action 1 goes right, where the last cell pays 1 and ends the episode, action 0 goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = self.steps = 0
        self.observation_spec = Composite(observation=Bounded(0, 1, (LENGTH,), dtype=torch.float32))
        self.action_spec = OneHot(2)
        self.reward_spec = Bounded(0, 1, (1,), dtype=torch.float32)

    def _seen(self) -> torch.Tensor:
        return nn.functional.one_hot(torch.tensor(self.cell), LENGTH).float()

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        self.cell = self.steps = 0
        return TensorDict({"observation": self._seen(), "done": torch.zeros(1, dtype=torch.bool)}, [])

    def _step(self, tensordict: Any) -> TensorDict:
        right = bool(tensordict["action"][1])
        self.steps += 1
        self.cell = min(self.cell + 1, LENGTH - 1) if right else 0
        won = torch.tensor([self.cell == LENGTH - 1])
        done = won | torch.tensor([self.steps == 20])
        flags = {"done": done, "terminated": won, "truncated": done & ~won}
        return TensorDict({"observation": self._seen(), "reward": won.float(), **flags}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        yield


def train(rb: Any, *, frames: int = 1000) -> tuple[float, torch.Tensor]:
    """Train DQN with hooks of TorchRL's trainer; return the greedy return, and all parameters."""
    torch.manual_seed(0)
    env = Corridor()
    value = TensorDictModule(nn.Linear(LENGTH, 2), in_keys=["observation"], out_keys=["action_value"])
    actor = QValueActor(value.module, in_keys=["observation"], spec=env.action_spec)
    explore = TensorDictSequential(
        actor, EGreedyModule(env.action_spec, eps_init=0.8, eps_end=0.2, annealing_num_steps=800)
    )
    loss = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    loss.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss, eps=0.9)
    optimizer = torch.optim.Adam(loss.parameters(), 0.05)
    hook = ReplayBufferTrainer(rb, batch_size=32, flatten_tensordicts=True)
    collector = Collector(env, explore, total_frames=frames, frames_per_batch=50)
    for batch in collector:
        hook.extend(batch)
        for _ in range(12):
            drawn = hook.sample(batch)
            value = loss(drawn)["loss"]
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            target.step()
            hook.update_priority(drawn)
    collector.shutdown()
    with torch.no_grad():
        reached = env.rollout(20, actor)["next", "reward"].sum()
    return float(reached), torch.cat([p.detach().flatten() for p in loss.parameters()])


@pytest.mark.parametrize("steps", [1, 3])
def test_dqn_learns_the_same_with_both_libraries(steps: int) -> None:
    results = []
    for name in ("torchrl", "ostinato"):
        lib: Any = library(name)
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(1000), batch_size=32)
        if steps > 1:
            rb.append_transform(MultiStepTransform(n_steps=steps, gamma=0.9))
        results.append(train(rb))
    (theirs, parameters), (ours, mine) = results
    assert theirs == ours == 1
    assert torch.equal(parameters, mine)


def test_dqn_with_priorities() -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(1000), batch_size=32)
    reached, _ = train(rb)
    assert reached == 1
    priorities = rb.sampler.priorities  # type: ignore[attr-defined]
    assert priorities.unique().numel() > 10  # those of the loss


def test_sac_reports_priorities_that_the_buffer_takes() -> None:
    torch.manual_seed(0)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(200), batch_size=16)
    policy = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        spec=Bounded(-1, 1, (2,)),
    )

    class Value(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 1)

        def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(torch.cat((observation, action), -1))
            return found

    loss = SACLoss(actor, ValueOperator(Value(), in_keys=["observation", "action"]))
    rb.extend(
        TensorDict(
            {
                "observation": torch.randn(100, 3),
                "action": torch.rand(100, 2),
                "next": {
                    "observation": torch.randn(100, 3),
                    "reward": torch.randn(100, 1),
                    "done": torch.zeros(100, 1, dtype=torch.bool),
                    "terminated": torch.zeros(100, 1, dtype=torch.bool),
                },
            },
            [100],
        )
    )
    before = rb.sampler.priorities  # type: ignore[attr-defined]
    batch = rb.sample()
    losses = loss(batch)
    assert torch.isfinite(losses["loss_qvalue"])
    rb.update_tensordict_priority(batch)
    after = rb.sampler.priorities  # type: ignore[attr-defined]
    assert set((before != after).nonzero().flatten().tolist()) <= set(batch["index"].tolist())
    picked = batch["index"]
    last = {int(slot): float(value) for slot, value in zip(picked, batch["td_error"].flatten(), strict=True)}
    for slot, value in last.items():
        assert after[slot] == pytest.approx(value)
    assert rb.stats().stale_updates == 0
