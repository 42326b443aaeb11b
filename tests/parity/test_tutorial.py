"""What TorchRL's tutorial on replay buffers shows, as far as no other file of this folder does it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from ._script import Note, both
from ._training import corridor


def nested(rows: int = 3) -> TensorDict:
    """Return rows with a nested field."""
    fields = {"a": torch.arange(rows * 4).view(rows, 4), ("b", "c"): torch.arange(rows * 5).view(rows, 5)}
    return TensorDict(fields, batch_size=[rows])


@both
def test_collected_trajectories(lib: Any, note: Note) -> None:
    from torchrl.collectors import Collector

    torch.manual_seed(0)
    env = corridor()
    rb = lib.TensorDictReplayBuffer(
        storage=lib.LazyMemmapStorage(200),
        sampler=lib.SliceSampler(traj_key=("collector", "traj_ids"), num_slices=4),
        batch_size=16,
    )
    for rows in Collector(env, frames_per_batch=50, total_frames=100):
        rb.extend(rows)
    note("length", lambda: len(rb))

    def one_trajectory_each() -> bool:
        ids = rb.sample()["collector", "traj_ids"].view(4, 4)
        return bool((ids == ids[:, :1]).all())

    note("slices", one_trajectory_each)
    note("steps follow each other", lambda: bool((rb.sample()["step_count"].view(4, 4).diff(dim=1) == 1).all()))


@both
def test_stacked_frames(lib: Any, note: Note) -> None:
    """Frames are stored once, and stacked in the transform of the buffer."""
    from torchrl.collectors import Collector
    from torchrl.envs import CatFrames, Compose, UnsqueezeTransform

    torch.manual_seed(0)
    keys = ["observation"]
    rb = lib.TensorDictReplayBuffer(
        storage=lib.LazyMemmapStorage(200),
        sampler=lib.SliceSampler(slice_len=4, end_key=("next", "done")),
        transform=Compose(UnsqueezeTransform(-1, in_keys=keys), CatFrames(dim=-1, N=4, in_keys=keys)),
        batch_size=16,
    )
    for rows in Collector(corridor(), frames_per_batch=50, total_frames=100):
        rb.extend(rows)
    note("length", lambda: len(rb))
    note("shape", lambda: rb.sample()["observation"].shape)
