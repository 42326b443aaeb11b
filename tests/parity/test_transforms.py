"""Transforms: when they run, in which order, on which kinds of data, and TorchRL's own objects inside our buffers."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from ._script import Note, both, rows

if TYPE_CHECKING:
    from collections.abc import Callable


def _plus(number: float) -> Callable[[Any], Any]:
    return lambda data: data.apply(lambda x: x + number)


def _times(number: float) -> Callable[[Any], Any]:
    return lambda data: data.apply(lambda x: x * number)


class _AddFive(nn.Module):
    def forward(self, data: Any) -> Any:
        """Add five to all."""
        return data.apply(lambda x: x + 5)


def _reads(rb: Any, note: Note) -> None:
    note("sample", rb.sample)
    for index in (0, slice(None), slice(0, 2), torch.tensor([1, 0]), [1, 0]):
        note.rows(f"rb[{index}]", lambda: rb[index])
    note("field", lambda: rb["obs"])
    note.rows("read_all_in_order", rb.read_all_in_order)
    note.rows("storage", lambda: rb.storage[:])


@pytest.mark.parametrize(
    ("buffer", "storage"), [("ReplayBuffer", "ListStorage"), ("TensorDictReplayBuffer", "LazyTensorStorage")]
)
@both
def test_forward(lib: Any, note: Note, buffer: str, storage: str) -> None:
    rb = getattr(lib, buffer)(storage=getattr(lib, storage)(10), batch_size=2, transform=_AddFive())
    rb.extend(rows(4))
    _reads(rb, note)
    note("append", lambda: rb.append_transform(_times(10)) is rb)
    _reads(rb, note)
    note("iterate", lambda: next(iter(rb)))


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "ListStorage"])
@both
def test_inverse(lib: Any, note: Note, storage: str) -> None:
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), batch_size=2)
    rb.extend(rows(4))
    rb.append_transform(_plus(100), invert=True)
    note("extend", lambda: rb.extend(rows(2, 50)))
    note("add", lambda: rb.add(rows(1, 60)[0]))
    note("stored", lambda: rb.storage[:])
    note("sample", rb.sample)
    note("write_all", lambda: rb.write_all(rows(7)))
    note("stored", lambda: rb.storage[:])


REWARD = {"in_keys": ["reward"]}
BOTH_WAYS = {**REWARD, "in_keys_inv": ["reward"]}
OBJECTS: dict[str, tuple[Any, ...]] = {
    "RewardScaling": (1.0, 10.0),
    "ToTensorImage": (None, None, {"in_keys": ["pixels"]}),
    "RenameTransform": (["reward"], ["r"]),
    "DoubleToFloat": (),
    "DTypeCastTransform": (torch.float32, torch.float64, BOTH_WAYS),
    "ExcludeTransform": ("pixels",),
    "SelectTransform": ("pixels",),
    "UnsqueezeTransform": (-1, REWARD),
    "ObservationNorm": (1.0, 2.0, BOTH_WAYS),
}


@pytest.mark.parametrize("name", OBJECTS)
@both
def test_objects_of_torchrl(lib: Any, note: Note, name: str) -> None:
    """Given to a buffer, and appended within a chain."""
    transforms = pytest.importorskip("torchrl.envs.transforms")

    def make() -> Any:
        arguments = [given for given in OBJECTS[name] if not isinstance(given, dict)]
        options = next((given for given in OBJECTS[name] if isinstance(given, dict)), {})
        return getattr(transforms, name)(*arguments, **options)

    reward = torch.arange(4.0)
    pixels = torch.arange(4 * 2 * 2 * 3, dtype=torch.uint8).view(4, 2, 2, 3)
    data = TensorDict({"reward": reward, "next": {"reward": reward}, "pixels": pixels}, [4])
    for buffer in ("ReplayBuffer", "TensorDictReplayBuffer"):
        given = {"transform": make()} if buffer == "ReplayBuffer" else {}
        rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(10), batch_size=3, **given)
        if not given:
            rb.append_transform(transforms.Compose(transforms.RewardScaling(0.0, 2.0), make()))
        note("extend", lambda: rb.extend(data))
        note("add", lambda: rb.add(data[0]))
        note.rows("stored", lambda: rb.storage[:])
        note("sample", rb.sample)
        note.rows("rows", lambda: rb[:])
        note("the caller's data", lambda: data)
