"""Small agents of TorchRL that train from a replay buffer of either library: environments, losses, loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["corridor", "dqn", "greedy_return", "update"]

LENGTH = 4
"""Steps from the start of the corridor to its end."""


def corridor() -> Any:
    """Return an environment: a corridor of `LENGTH + 1` cells; each step costs 0.1, the last cell gives 1.

    The best return is `1 - 0.1 * (LENGTH - 1)`, which steps to the right alone reach.
    """
    from torchrl.data import Bounded, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase, StepCounter, TransformedEnv

    class Corridor(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(observation=Bounded(0, 1, (LENGTH + 1,), dtype=torch.float32))
            self.action_spec = Categorical(2)
            self.reward_spec = Unbounded((1,))

        def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
            self.cell = 0
            return TensorDict({"observation": self._see()}, [])

        def _step(self, tensordict: TensorDictBase) -> TensorDict:
            self.cell = max(0, self.cell + (1 if int(tensordict["action"]) else -1))
            there = self.cell == LENGTH
            reward = torch.tensor([1.0 if there else -0.1])
            ended = torch.tensor([there])
            return TensorDict({"observation": self._see(), "reward": reward, "done": ended, "terminated": ended}, [])

        def _set_seed(self, seed: int | None) -> None:
            del seed  # nothing is random

        def _see(self) -> Tensor:
            return torch.eye(LENGTH + 1)[self.cell]

    return TransformedEnv(Corridor(), StepCounter(max_steps=3 * LENGTH))


def dqn(gamma: float = 0.9) -> tuple[Any, Any, Any, Any]:
    """Return policy, exploring policy, loss and target updater for the corridor; draw from the global generator."""
    from torchrl.data import Categorical
    from torchrl.modules import EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss, HardUpdate

    spec = Categorical(2)
    net = nn.Sequential(nn.Linear(LENGTH + 1, 32), nn.Tanh(), nn.Linear(32, 2))
    policy = QValueActor(net, in_keys=["observation"], spec=spec, action_space="categorical")
    explore = TensorDictSequential(policy, EGreedyModule(spec, eps_init=0.5, eps_end=0.5))
    loss = DQNLoss(policy, action_space="categorical", delay_value=True)
    loss.make_value_estimator(gamma=gamma)
    return policy, explore, loss, HardUpdate(loss, value_network_update_interval=20)


def update(loss: Any, batch: Any, optimizer: torch.optim.Optimizer, target: Any) -> None:
    """Take one gradient step on a batch; the loss writes `td_error` into it."""
    losses = loss(batch)
    optimizer.zero_grad()
    torch.stack([value for key, value in losses.items() if key.startswith("loss")]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    target.step()


def greedy_return(env: Any, policy: Any) -> float:
    """Return the return of the policy without exploration."""
    from torchrl.envs import ExplorationType, set_exploration_type

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        return float(env.rollout(64, policy)["next", "reward"].sum())
