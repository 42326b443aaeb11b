"""Transforms: when they run, in which order, on which kinds of data, and TorchRL's own objects inside our buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import transforms

from ._script import both, rows

if TYPE_CHECKING:
    from collections.abc import Callable


def _plus(number: float) -> Callable[[Any], Any]:
    return lambda data: data.apply(lambda x: x + number)


class _AddFive(nn.Module):
    def forward(self, data: Any) -> Any:
        """Add five to all."""
        return _plus(5)(data)


@pytest.mark.parametrize(
    ("buffer", "storage"), [("ReplayBuffer", "ListStorage"), ("TensorDictReplayBuffer", "LazyTensorStorage")]
)
@both
def test_forward(lib, note, buffer, storage):
    rb = getattr(lib, buffer)(storage=getattr(lib, storage)(10), batch_size=2, transform=_AddFive())
    rb.extend(rows(4))
    for _ in range(2):
        rb.sample()
        for index in (0, slice(None), slice(0, 2), torch.tensor([1, 0]), [1, 0], "obs"):
            rb[index]
        rb.read_all_in_order()
        rb.storage[:]
        rb.append_transform(lambda data: data.apply(lambda x: x * 10))


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "ListStorage"])
@both
def test_inverse(lib, note, storage):
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), batch_size=2)
    rb.extend(rows(4))
    rb.append_transform(_plus(100), invert=True)
    rb.extend(rows(2, 50))
    rb.add(rows(1, 60)[0])
    rb.storage[:]
    rb.sample()
    rb.write_all(rows(7))
    rb.storage[:]


REWARD = {"in_keys": ["reward"]}
BOTH_WAYS = {**REWARD, "in_keys_inv": ["reward"]}
OBJECTS: dict[str, Callable[[], Any]] = {
    "RewardScaling": lambda: transforms.RewardScaling(1.0, 10.0),
    "ToTensorImage": lambda: transforms.ToTensorImage(None, None, in_keys=["pixels"]),
    "RenameTransform": lambda: transforms.RenameTransform(["reward"], ["r"]),
    "DoubleToFloat": transforms.DoubleToFloat,
    "DTypeCastTransform": lambda: transforms.DTypeCastTransform(torch.float32, torch.float64, **BOTH_WAYS),
    "ExcludeTransform": lambda: transforms.ExcludeTransform("pixels"),
    "SelectTransform": lambda: transforms.SelectTransform("pixels"),
    "UnsqueezeTransform": lambda: transforms.UnsqueezeTransform(-1, **REWARD),
    "ObservationNorm": lambda: transforms.ObservationNorm(1.0, 2.0, **BOTH_WAYS),
    "CatFrames": lambda: transforms.CatFrames(dim=-1, N=4, in_keys=["pixels"]),
}


@pytest.mark.parametrize("name", OBJECTS)
@both
def test_objects_of_torchrl(lib, note, name):
    """Given to a buffer, and appended within a chain."""
    reward = torch.arange(4.0)
    pixels = torch.arange(4 * 2 * 2 * 3, dtype=torch.uint8).view(4, 2, 2, 3)
    done = torch.zeros(4, 1, dtype=torch.bool)
    data = TensorDict({"reward": reward, "next": {"reward": reward, "done": done}, "pixels": pixels}, [4])
    for buffer in ("ReplayBuffer", "TensorDictReplayBuffer"):
        given = {"transform": OBJECTS[name]()} if buffer == "ReplayBuffer" else {}
        rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(10), batch_size=3, **given)
        if not given:
            rb.append_transform(transforms.Compose(transforms.RewardScaling(0.0, 2.0), OBJECTS[name]()))
        rb.extend(data)
        rb.add(data[0])
        rb.storage[:]
        rb.sample()
        rb[:]
        note(data)  # the caller's
