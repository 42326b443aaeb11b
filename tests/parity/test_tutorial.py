"""The subjects of TorchRL's tutorial on replay buffers, in one script that differs by the library alone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymEnv, TransformedEnv
from torchrl.envs.transforms import CatFrames, Compose, RenameTransform, StepCounter, UnsqueezeTransform
from torchrl.modules import RandomPolicy

from ._script import library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("gymnasium")

ROWS = 60
Seen = dict[str, Any]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@tensorclass
class Labelled:
    """Images with labels."""

    images: torch.Tensor
    labels: torch.Tensor


def any_objects(lib: Any, home: Path) -> Seen:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(ROWS), collate_fn=lambda batch: batch)
    rb.extend(["x", 3, ("y", None)])
    return {"length": len(rb), "known": all(item in ["x", 3, ("y", None)] for item in rb.sample(5))}


def tensordicts(lib: Any, home: Path) -> Seen:
    seen: Seen = {}
    data = TensorDict({"a": torch.arange(12).view(3, 4), ("b", "c"): torch.arange(15).view(3, 5)}, [3])
    storages = {"memory": lib.LazyTensorStorage(ROWS), "files": lib.LazyMemmapStorage(ROWS, scratch_dir=home / "td")}
    for name, storage in storages.items():
        rb = lib.ReplayBuffer(storage=storage, batch_size=7)
        rb.extend(data)
        batch = rb.sample()
        seen[name] = len(rb), batch.batch_size, batch["b", "c"].shape, batch["b", "c"].dtype
        assert (batch["b", "c"][:, 0] // 5 == batch["a"][:, 0] // 4).all()
    return seen


def tensorclasses(lib: Any, home: Path) -> Seen:
    data = Labelled(  # type: ignore[call-arg]
        images=torch.randint(255, (6, 8, 8, 3)), labels=torch.arange(6), batch_size=[6]
    )
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(ROWS, scratch_dir=home / "tc"), batch_size=5)
    rb.extend(data)
    batch = rb.sample()
    assert torch.equal(batch.images, data.images[batch.labels])
    return {"class": type(batch).__name__, "shape": batch.images.shape}


def trees(lib: Any, home: Path) -> Seen:
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(ROWS, scratch_dir=home / "tree"))
    tree = {"a": torch.randn(3), "b": {"c": torch.zeros(2)}, "d": [torch.ones(1), torch.ones(2)]}
    rb.extend({"a": torch.randn(4, 3), "b": {"c": torch.zeros(4, 2)}, "d": [torch.ones(4, 1), torch.ones(4, 2)]})
    rb.add(tree)
    batch = rb.sample(3)
    return {"length": len(rb), "shapes": [batch["a"].shape, batch["b"]["c"].shape, batch["d"][1].shape]}


def passes(lib: Any, home: Path) -> Seen:
    storage = lib.LazyMemmapStorage(ROWS, scratch_dir=home / "passes")
    sampler = lib.SamplerWithoutReplacement()
    rb = lib.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=3, prefetch=4)
    rb.extend(TensorDict({"a": torch.arange(9)}, [9]))
    found = [batch["a"] for batch in rb]
    endless = lib.ReplayBuffer(storage=lib.LazyTensorStorage(ROWS), batch_size=2)
    endless.extend(torch.arange(5))
    counts = [len(batch) for batch, _ in zip(endless, range(6), strict=False)]
    return {"sizes": [len(x) for x in found], "once": sorted(torch.cat(found).tolist()), "counts": counts}


def _double(batch: TensorDict) -> TensorDict:
    batch["twice"] = 2 * batch["a"]
    return batch


def transforms(lib: Any, home: Path) -> Seen:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(ROWS), transform=_double)
    rb.extend(TensorDict({"a": torch.arange(5.0)}, [5]))
    rb.append_transform(RenameTransform(["a"], ["renamed"]))
    return {"keys": sorted(map(str, rb.sample(2).keys()))}


def slices(lib: Any, home: Path) -> Seen:
    storage = lib.LazyMemmapStorage(ROWS, scratch_dir=home / "slices")
    sampler = lib.SliceSampler(traj_key="episode", num_slices=4)
    rb = lib.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
    episode = torch.tensor([1] * 4 + [2] * 6)
    rb.extend(TensorDict({"episode": episode, "step": torch.arange(10)}, [10]))
    batch = rb.sample()
    steps, ids = batch["step"].view(4, 2), batch["episode"].view(4, 2)
    return {"follow": bool((steps.diff() == 1).all()), "one": bool((ids.diff() == 0).all()), "rows": batch.numel()}


def the_best(lib: Any, home: Path) -> Seen:
    writer = lib.TensorDictMaxValueWriter(rank_key="reward")
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(5), writer=writer, batch_size=4)
    rb.extend(TensorDict({"reward": torch.arange(20.0).roll(7)}, [20]))
    return {"kept": sorted(rb[:]["reward"].tolist())}


def environment() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter())


def collected(lib: Any, home: Path) -> Seen:
    """Frames of an environment, stacked in the transform of the buffer."""
    stack = Compose(UnsqueezeTransform(-1, in_keys=["observation"]), CatFrames(dim=-1, N=4, in_keys=["observation"]))
    rb = lib.TensorDictReplayBuffer(
        storage=lib.LazyMemmapStorage(500, scratch_dir=home / "frames"),
        sampler=lib.SliceSampler(slice_len=4, end_key=("next", "done")),
        transform=stack,
        batch_size=16,
    )
    env = environment()
    for batch in Collector(env, RandomPolicy(env.action_spec), frames_per_batch=50, total_frames=200):
        rb.extend(batch)
    batch = rb.sample()
    return {"length": len(rb), "shape": batch["observation"].shape, "rows": batch.numel()}


SUBJECTS: list[Callable[[Any, Path], Seen]] = [
    any_objects, tensordicts, tensorclasses, trees, passes, transforms, slices, the_best, collected,
]  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_the_script_runs_alike_with_both_libraries(subject: Callable[[Any, Path], Seen], tmp_path: Path) -> None:
    seen = {name: subject(library(name), tmp_path / name) for name in ("torchrl", "ostinato")}
    assert seen["ostinato"] == seen["torchrl"]


def test_priorities_follow_their_rows(tmp_path: Path) -> None:
    """Of Ostinato alone: TorchRL's prioritized sampler needs its extension, which not all its packages contain."""
    lib: Any = library("ostinato")
    sampler = lib.PrioritizedSampler(max_capacity=ROWS, alpha=0.8, beta=1.1)
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "per"), sampler=sampler)
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    _, info = rb.sample(10, return_info=True)
    rb.update_priority(info["index"], torch.zeros(10))
    rb.update_priority(torch.arange(10), (torch.arange(10) < 5).float())
    assert rb.sample(200)["a"].max() < 5
