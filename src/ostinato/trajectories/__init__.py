"""Batched rollouts on disk: the trajectory store, its cache, and uniform sampling of transitions."""

from ostinato.trajectories.buffer import TrajectoryReplayBuffer
from ostinato.trajectories.trajectory import Trajectory

__all__ = ["Trajectory", "TrajectoryReplayBuffer"]
