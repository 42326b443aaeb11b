"""What TorchRL's tutorial on replay buffers shows, as far as no other file of this folder does it."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, tensorclass

from ._script import Note, both, library
from ._training import corridor

if TYPE_CHECKING:
    from torch import Tensor


@tensorclass
class Pictures:
    """Pictures and what they show."""

    images: Tensor
    labels: Tensor


def nested(rows: int = 3) -> TensorDict:
    """Return rows with a nested field."""
    fields = {"a": torch.arange(rows * 4).view(rows, 4), ("b", "c"): torch.arange(rows * 5).view(rows, 5)}
    return TensorDict(fields, batch_size=[rows])


def identity(rows: Any) -> Any:
    """Return rows as they are."""
    return rows


@both
def test_tensorclasses(lib: Any, note: Note) -> None:
    images = torch.randint(255, (40, 8, 8, 3), dtype=torch.uint8)
    fields = TensorDict({"images": images, "labels": torch.arange(40)}, [40])
    rows = Pictures.from_tensordict(fields)  # type: ignore[attr-defined]
    for storage in (lib.LazyTensorStorage(100), lib.LazyMemmapStorage(100), lib.ListStorage(100)):
        rb = lib.ReplayBuffer(storage=storage, batch_size=12)
        note("extend", lambda: rb.extend(rows))
        note("kind", lambda: type(rb.sample()).__name__)
        note("labels", lambda: rb.sample().labels)
        note("images", lambda: rb.sample().images)


@both
def test_transforms_of_pictures(lib: Any, note: Note) -> None:
    from torchrl.envs import Compose, ToTensorImage

    keys = ["pixels", ("next", "pixels")]
    out = ["scaled", ("next", "scaled")]
    rb = lib.TensorDictReplayBuffer(
        storage=lib.LazyMemmapStorage(100),
        transform=Compose(ToTensorImage(in_keys=keys, out_keys=out)),
        batch_size=16,
    )
    images = torch.randint(255, (41, 6, 6, 3), dtype=torch.uint8)
    rb.extend(TensorDict({"pixels": images[:-1], "next": {"pixels": images[1:]}}, [40]))
    note("sample", lambda: rb.sample()["scaled"])
    note("next", lambda: rb.sample()["next", "scaled"].shape)
    rb.append_transform(lambda batch: batch.exclude("pixels"))
    note("keys", lambda: sorted(rb.sample().exclude("index").keys()))


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


def test_priorities() -> None:
    """TorchRL's trees do not load beside this version of torch: the same steps, and what they must show."""
    lib = library("ostinato")
    torch.manual_seed(0)
    sampler = lib.PrioritizedSampler(max_capacity=10, alpha=0.8, beta=1.1)
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), sampler=sampler, collate_fn=identity)
    index = rb.extend([1, "foo", None])
    rb.update_priority(index=index, priority=torch.tensor([0, 1_000, 0.1]))
    batch, info = rb.sample(10, return_info=True)
    assert batch == ["foo"] * 10
    assert info["index"].tolist() == [1] * 10
    rb = lib.TensorDictReplayBuffer(
        storage=lib.LazyMemmapStorage(10),
        sampler=lib.PrioritizedSampler(max_capacity=10, alpha=0.8, beta=1.1),
        priority_key="td_error",
        batch_size=256,
    )
    rb.extend(nested(5))
    batch = rb.sample()
    batch["td_error"] = (batch["index"] == 3).float() * 1_000
    rb.update_tensordict_priority(batch)
    assert (rb.sample()["index"] == 3).float().mean() > 0.9
