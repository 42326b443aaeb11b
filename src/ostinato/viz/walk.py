"""Where a viewer stands, and how it moves: by steps, over the ends of trajectories, by trajectory, by environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from ostinato.viz.reel import Reels

__all__ = ["Spot", "Walk"]


class Spot(NamedTuple):
    """A place: position of the trajectory, step, environment (the batch index)."""

    reel: int = 0
    step: int = 0
    env: int = 0


@final
class Walk:
    """Moves over the trajectories of a place. Every move answers whether it went anywhere."""

    def __init__(self, reels: Reels, spot: Spot | None = None) -> None:
        """Stand at `spot`, or at the first step of the first trajectory."""
        self._reels = reels
        self.spot = Spot()
        if spot is not None:
            self._go(spot.reel, spot.step, spot.env)

    def next(self) -> bool:
        """Go one step on, from the last step to the first one of the next trajectory."""
        index, step, env = self.spot
        if step + 1 < self._reels.open(index).steps:
            return self._go(index, step + 1, env)
        return self.next_trajectory()

    def previous(self) -> bool:
        """Go one step back, from the first step to the last one of the trajectory before."""
        index, step, env = self.spot
        if step > 0:
            return self._go(index, step - 1, env)
        return index > 0 and self._go(index - 1, self._reels.open(index - 1).steps - 1, env)

    def next_trajectory(self) -> bool:
        """Go to the first step of the next trajectory."""
        index = self.spot.reel + 1
        return index < len(self._reels.ids) and self._go(index, 0, self.spot.env)

    def previous_trajectory(self) -> bool:
        """Go to the first step of the trajectory before."""
        return self.spot.reel > 0 and self._go(self.spot.reel - 1, 0, self.spot.env)

    def next_env(self) -> bool:
        """Go to the next environment of the batch, same step."""
        return self._go(self.spot.reel, self.spot.step, self.spot.env + 1)

    def previous_env(self) -> bool:
        """Go to the environment before, same step."""
        return self._go(self.spot.reel, self.spot.step, self.spot.env - 1)

    def first(self) -> bool:
        """Go to the first step of the trajectory."""
        return self._go(self.spot.reel, 0, self.spot.env)

    def last(self) -> bool:
        """Go to the last step of the trajectory."""
        return self._go(self.spot.reel, self._reels.open(self.spot.reel).steps - 1, self.spot.env)

    def jump(self, trajectory_id: int) -> bool:
        """Go to the first step of the trajectory of an id; False where there is none."""
        index = self._reels.find(trajectory_id)
        if index is None:
            return False
        self._go(index, 0, self.spot.env)
        return True

    def _go(self, index: int, step: int, env: int) -> bool:
        """Move as near as there is something."""
        index = min(max(index, 0), len(self._reels.ids) - 1)
        reel = self._reels.open(index)
        spot = Spot(index, min(max(step, 0), reel.steps - 1), min(max(env, 0), reel.envs - 1))
        moved, self.spot = spot != self.spot, spot
        return moved
