"""Settings of the demo and what it reports: plain data, no torch, no simulator."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import OptionError

SOLVED_RETURN = 475.0
"""Mean return from which Gymnasium calls CartPole-v1 solved (the most that one episode can give is 500)."""


@dataclass(frozen=True, slots=True)
class DqnConfig:
    """Settings of one training run: DQN on a Gymnasium environment with discrete actions.

    Args:
        seed: Seeds exploration, initial weights, the simulator and the buffer's generator. No global generator is touched.
        steps: Environment steps to collect, warm-up included.
        env_id: The Gymnasium environment: flat float observations, discrete actions.
        capacity: Rows the buffer holds before the oldest are overwritten.
        batch_size: Rows per gradient step.
        warmup_steps: Steps of random actions before learning starts.
        collect_steps: Environment steps between two rounds of learning: they enter the buffer in one `extend`.
        updates_per_collect: Gradient steps in one round of learning.
        gamma: Discount factor in [0, 1).
        learning_rate: Step size of Adam at the start; it falls linearly to a tenth.
        tau: Share of the online weights that the target network takes in at every gradient step.
        hidden: Width of the two hidden layers.
        epsilon_end: Share of random actions once exploration has come down.
        explore_steps: Steps over which the share of random actions falls from 1 to `epsilon_end`.
        validate_every: Environment steps between two validations of the current weights.
        validation_episodes: Episodes per validation; their seeds differ from those of the final evaluation.
        evaluation_episodes: Episodes of the final evaluation.
        threads: Threads that torch may use while training.

    Raises:
        OptionError: If a number is outside its range.
    """

    seed: int = 0
    steps: int = 30_000
    env_id: str = "CartPole-v1"
    capacity: int = 50_000
    batch_size: int = 128
    warmup_steps: int = 1_000
    collect_steps: int = 4
    updates_per_collect: int = 2
    gamma: float = 0.99
    learning_rate: float = 1e-3
    tau: float = 0.01
    hidden: int = 128
    epsilon_end: float = 0.04
    explore_steps: int = 5_000
    validate_every: int = 1_000
    validation_episodes: int = 10
    evaluation_episodes: int = 20
    threads: int = 1
