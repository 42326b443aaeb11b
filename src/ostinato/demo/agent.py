"""The learner: Double DQN with a Huber loss and a slowly moving target network. It knows batches, not buffers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.demo.config import DqnConfig


def q_network(observation_size: int, actions: int, hidden: int, generator: torch.Generator) -> nn.Sequential:
    """Build the multilayer perceptron that scores every action.

    Weights come from `generator`, so that building a network leaves torch's global generator alone.

    Args:
        observation_size: Numbers in one observation.
        actions: Number of discrete actions.
        hidden: Width of the two hidden layers.
        generator: Source of the initial weights.

    Returns:
        A module from observations `[B, observation_size]` to action values `[B, actions]`.
    """
    widths = (observation_size, hidden, hidden, actions)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
        bound = 1.0 / math.sqrt(inputs)
        with torch.no_grad():
            linear.weight.uniform_(-bound, bound, generator=generator)
            linear.bias.uniform_(-bound, bound, generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Agent:
    """Two networks, one optimizer and the rules of Double DQN (van Hasselt et al., 2016)."""

    def __init__(self, config: DqnConfig, observation_size: int, actions: int, generator: torch.Generator) -> None:
        self.config = config
        self.online = q_network(observation_size, actions, config.hidden, generator)
        self.target = q_network(observation_size, actions, config.hidden, generator)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(requires_grad=False)
        self._optimizer = torch.optim.Adam(self.online.parameters(), lr=config.learning_rate, fused=True)

    @torch.no_grad()
    def act(self, observations: Tensor) -> Tensor:
        """Return the greedy action of each observation.

        Args:
            observations: float32 `[B, observation_size]`.

        Returns:
            int64 `[B]`.
        """
        return self.online(observations).argmax(dim=-1)

    def learn(self, batch: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            best = self.online(batch["next_observation"]).argmax(dim=-1, keepdim=True)
            future = self.target(batch["next_observation"]).gather(1, best).squeeze(1)
            alive = (~batch["terminated"]).to(future.dtype)
            goal = batch["reward"] + self.config.gamma * alive * future
        value = self.online(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        error = goal - value
        loss = nn.functional.smooth_l1_loss(value, goal)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self._follow()
        return error.detach()

    def _follow(self):
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), self.config.tau)
