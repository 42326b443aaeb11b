"""Behaviour cloning from a LeRobot dataset: from video files to a policy that acts, without converting anything.

A point moves in a square towards a red disc that only the camera sees. An expert shows the way in 300 episodes, which
are written as a LeRobot v3 dataset (Parquet and MP4). The buffer is then the dataset itself: `open_dataset` reads and
decodes what is sampled, and `DeltaTimestamps` adds the next actions to each frame, an action chunk as in ACT (Zhao et
al. 2023). The policy sees the camera and its own position, and is run in new episodes afterwards.

    python examples/behaviour_cloning_lerobot.py            # writes behaviour_cloning_lerobot.png: paths of both
    python examples/behaviour_cloning_lerobot.py --quick    # a few seconds, does not learn the task

Needs `pip install 'ostinato[lerobot,viz]'`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ostinato import DeltaTimestamps, ReplayBuffer, export, open_dataset

if TYPE_CHECKING:
    from collections.abc import Callable

FPS = 10
SIZE = 48
"""Pixels of the camera in each direction."""
CHUNK = 4
"""Actions that the policy predicts for each frame; the first one is executed."""
SPEED = 0.08
"""Largest step along each axis; the square is [0, 1] x [0, 1]."""
NEAR = 0.1
"""Distance from the disc that counts as arrived."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    episodes: int = 300
    """Episodes of the expert."""
    steps: int = 25
    """Frames of an episode."""
    updates: int = 1_500
    """Gradient steps."""
    batch: int = 64
    tests: int = 100
    """Episodes of the policy afterwards."""
    seed: int = 0


class Result(NamedTuple):
    """What a run found."""

    losses: list[float]
    success: float
    """Part of the new episodes in which the policy reached the disc."""
    untrained: float
    """The same before training."""
    paths: np.ndarray
    """Paths of the policy, `[tests, steps, 2]`."""
    goals: np.ndarray
    """Discs of these, `[tests, 2]`."""
    shown: np.ndarray
    """Paths of the expert, `[episodes, steps, 2]`."""


def render(place: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Return camera frames uint8 `[B, SIZE, SIZE, 3]`: a red disc, and the point in white."""
    axis = (np.arange(SIZE) + 0.5) / SIZE
    frames = np.full((len(place), SIZE, SIZE, 3), 30, dtype=np.uint8)
    for centers, radius, colour in ((goal, 0.10, (220, 40, 40)), (place, 0.05, (255, 255, 255))):
        far = (axis[None, None, :] - centers[:, 0, None, None]) ** 2 + (
            axis[None, :, None] - centers[:, 1, None, None]
        ) ** 2
        frames[far < radius**2] = colour
    return frames


def steer(place: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Return the expert's action: straight to the disc, and slower close to it."""
    action: np.ndarray = np.clip(0.5 * (goal - place), -SPEED, SPEED).astype(np.float32)
    return action


def play(
    settings: Settings,
    episodes: int,
    rng: np.random.Generator,
    policy: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Run episodes side by side, of the expert where there is no policy; return places, actions, frames and discs."""
    place, goal = rng.random((episodes, 2), dtype=np.float32), rng.random((episodes, 2), dtype=np.float32)
    places, actions, frames = [], [], []
    for _ in range(settings.steps):
        seen = render(place, goal)
        action = steer(place, goal) if policy is None else policy(seen, place)
        places.append(place)
        actions.append(action)
        frames.append(seen)
        place = np.clip(place + action, 0, 1)
    return np.stack(places, 1), np.stack(actions, 1), np.stack(frames, 1), goal


def write_dataset(settings: Settings, folder: Path) -> np.ndarray:
    """Write episodes of the expert as a LeRobot dataset; return their paths."""
    places, actions, frames, _ = play(settings, settings.episodes, np.random.default_rng(settings.seed), None)
    episodes = [
        {"observation.images.top": frames[i], "observation.state": places[i], "action": actions[i]}
        for i in range(settings.episodes)
    ]
    export(episodes, folder, format="lerobot", fps=FPS, task="move to the red disc")
    return places


class Policy(nn.Module):
    """Predicts the next actions `[B, CHUNK, 2]` from the camera and the position."""

    def __init__(self) -> None:
        super().__init__()
        self.camera = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (SIZE // 8) ** 2, 64),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(64 + 2, 128), nn.ReLU(), nn.Linear(128, 2 * CHUNK))

    def forward(self, frames: Tensor, state: Tensor) -> Tensor:
        """Take frames uint8 `[B, 3, SIZE, SIZE]` and positions `[B, 2]`."""
        seen = self.camera(frames.float() / 255 - 0.5)
        return SPEED * torch.tanh(self.head(torch.cat([seen, state], -1))).view(-1, CHUNK, 2)

    @torch.no_grad()
    def act(self, frames: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the first action of each chunk for frames `[B, SIZE, SIZE, 3]`."""
        chunk = self(torch.from_numpy(frames).permute(0, 3, 1, 2), torch.from_numpy(place))
        action: np.ndarray = chunk[:, 0].numpy()
        return action


def clone(settings: Settings, policy: Policy, folder: Path) -> list[float]:
    """Train on frames and action chunks of the dataset; actions after the end of an episode do not count."""
    dataset = open_dataset(folder, cache="memory")
    rb = ReplayBuffer(
        storage=dataset,
        sample_unit=DeltaTimestamps({"action": [i / FPS for i in range(CHUNK)]}, fps=dataset.fps),
        batch_size=settings.batch,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    print(repr(dataset), flush=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    losses, began = [], time.perf_counter()
    for update in range(1, settings.updates + 1):
        batch = rb.sample()
        wrong = (policy(batch["observation.images.top"], batch["observation.state"]) - batch["action"]).square()
        loss = wrong[~batch["action_is_pad"]].mean() / SPEED**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if update % max(1, settings.updates // 10) == 0:
            recent, speed = sum(losses[-50:]) / len(losses[-50:]), update / (time.perf_counter() - began)
            print(f"update {update:5,} of {settings.updates:,}: loss {recent:.4f}, {speed:3.0f} updates/s", flush=True)
    dataset.close()
    return losses


def arrived(places: np.ndarray, goals: np.ndarray) -> float:
    """Return the part of the episodes that end near their disc."""
    return float((np.linalg.norm(places[:, -1] - goals, axis=-1) < NEAR).mean())


def run(settings: Settings) -> Result:
    """Write the dataset, clone the expert, and run the policy in new episodes."""
    torch.manual_seed(settings.seed)  # the network's first weights
    policy = Policy()
    fresh = np.random.default_rng(settings.seed + 1)
    places, _, _, goals = play(settings, settings.tests, fresh, policy.act)
    untrained = arrived(places, goals)
    with tempfile.TemporaryDirectory() as folder:
        print(f"writing {settings.episodes} episodes of the expert as videos", flush=True)
        shown = write_dataset(settings, Path(folder) / "expert")
        losses = clone(settings, policy, Path(folder) / "expert")
    places, _, _, goals = play(settings, settings.tests, np.random.default_rng(settings.seed + 1), policy.act)
    success = arrived(places, goals)
    print(f"new episodes in which the policy reaches the disc: {success:.0%}, before training {untrained:.0%}")
    return Result(losses, success, untrained, places, goals, shown)


def draw(result: Result, path: Path) -> None:
    """Draw the paths of expert and policy, and the loss."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for way in result.shown[:30]:
        left.plot(*way.T, color="0.6", lw=0.8)
    left.set_title("episodes of the expert")
    for way, goal in zip(result.paths[:30], result.goals[:30], strict=True):
        near = np.linalg.norm(way[-1] - goal) < NEAR
        middle.plot(*way.T, color="#0072B2" if near else "#B36B00", lw=0.9)
        middle.plot(*goal, "o", color="tab:red", ms=5, alpha=0.7)
    middle.set_title(f"policy: {result.success:.0%} arrive (before {result.untrained:.0%})")
    for axes in (left, middle):
        axes.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
    smooth = np.convolve(result.losses, np.ones(25) / 25, "valid") if len(result.losses) > 25 else result.losses
    right.semilogy(smooth, color="#0072B2")
    right.set(xlabel="update", title="loss of the action chunks")
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Settings.updates, help="gradient steps (default 1500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of episodes, weights and batches")
    parser.add_argument("--quick", action="store_true", help="a short run that does not learn the task")
    picture = Path("behaviour_cloning_lerobot.png")
    parser.add_argument("--picture", type=Path, default=picture, help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the network is small: threads would wait for each other
    settings = Settings(updates=given.steps, seed=given.seed)
    if given.quick:
        settings = Settings(episodes=4, steps=10, updates=20, tests=10, seed=given.seed)
    draw(run(settings), given.picture)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
