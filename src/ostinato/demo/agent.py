"""The learner: Double DQN with a Huber loss and a slowly moving target network. It sees batches, never the buffer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.demo.config import DqnConfig
    from ostinato.demo.simulate import EnvSpec

__all__ = ["Agent", "QNetwork"]


class QNetwork(nn.Module):
    """Two hidden layers that score every action; smooth ones, since ReLU made the return of CartPole jump about."""

    def __init__(self, spec: EnvSpec, hidden: int, generator: torch.Generator) -> None:
        """Draw the weights.

        Args:
            spec: Sizes and scale of the observations, number of actions.
            hidden: Width of the hidden layers.
            generator: Source of the weights; torch's global generator is left alone.
        """
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(spec.observation_scale, dtype=torch.float32, device="cpu"))
        self.first = _linear(spec.observation_size, hidden, generator)
        self.second = _linear(hidden, hidden, generator)
        self.last = _linear(hidden, spec.actions, generator)

    def forward(self, observation: Tensor) -> Tensor:
        """Return the value of each action, float32 `[B, A]`, of observations `[B, O]`."""
        hidden = nn.functional.silu(self.first(observation * self.scale))
        values: Tensor = self.last(nn.functional.silu(self.second(hidden)))
        return values


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")  # the meta device draws no numbers
    bound = 1.0 / math.sqrt(inputs)
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer


class Agent:
    """Double DQN (van Hasselt et al., 2016): the learned network chooses the next action, the target one values it.

    Args:
        config: Settings.
        spec: The environment's sizes.
        generator: Source of the initial weights.
    """

    def __init__(self, config: DqnConfig, spec: EnvSpec, generator: torch.Generator) -> None:
        self.config = config
        self.network = QNetwork(spec, config.hidden, generator)
        self.target = QNetwork(spec, config.hidden, generator)
        self.target.load_state_dict(self.network.state_dict())
        self.target.requires_grad_(requires_grad=False)
        # eps: with Adam's default 1e-8 the tiny gradients of a solved task make full steps, and the return falls again.
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=config.learning_rate, eps=1e-3, fused=True)
        self._pairs = list(zip(self.target.parameters(), self.network.parameters(), strict=True))

    def act(self, observations: Tensor) -> Tensor:
        """Return the best actions, int64 `[B]`, for observations `[B, O]`, by the learned weights."""
        with torch.inference_mode():
            values: Tensor = self.network(observations)
            return values.argmax(dim=-1)

    def learn(self, batch: Mapping[str, Tensor], step: int, weights: Tensor | None = None) -> Tensor:
        """Take one gradient step.

        Args:
            batch: Rows as `Collector.collect` makes them, or transitions over several steps, as `NStep` makes them of
                these.
            step: Environment steps so far; the step size falls with them.
            weights: Importance weights of the rows, float32 `[B]`; None for rows drawn uniformly.

        Returns:
            Temporal-difference errors, float32 `[B]`.
        """
        goal = self.goals(batch)
        values: Tensor = self.network(batch["observation"])
        value = values.gather(1, batch["action"][:, None]).squeeze(1)
        losses = nn.functional.smooth_l1_loss(value, goal, reduction="none")
        loss = losses.mean() if weights is None else (losses * weights).mean()
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * (1.0 - 0.9 * step / self.config.steps)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        with torch.no_grad():
            for target, learned in self._pairs:
                target.lerp_(learned, self.config.tau)
        return goal - value.detach()

    @torch.no_grad()
    def goals(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the values should have been: r + gamma * Q_target(s', argmax_a Q(s', a)), float32 `[B]`.

        In a batch of transitions over `k` steps, which has a field `gamma`, r is the sum of their discounted rewards,
        s' the last state, and gamma that field, gamma^k.

        A terminated episode has no future. A truncated one has: only the clock stopped it, so its last state is
        valued like any other.
        """
        following = batch["next_observation"]
        choice = self.network(following).argmax(dim=-1, keepdim=True)
        values: Tensor = self.target(following)
        future = values.gather(1, choice).squeeze(1)
        reward = batch["reward"] * self.config.reward_scale
        return reward + batch.get("gamma", self.config.gamma) * future.masked_fill(batch["terminated"], 0.0)

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the target network's weights: the moving average of those learned."""
        return {name: value.clone() for name, value in self.target.state_dict().items()}
