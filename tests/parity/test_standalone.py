"""Samplers on bare storages: `sampler.sample(storage, batch_size)`, its info, and the messages of both libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ._script import library

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("torchrl", "ostinato")
_LENGTHS = (30, 25, 15, 30)


@pytest.fixture(params=LIBRARIES)
def lib(request: pytest.FixtureRequest) -> Any:
    """One of the two libraries."""
    return library(request.param)


def episodes(**more: Any) -> TensorDict:
    """100 rows of four episodes."""
    number = torch.arange(4).repeat_interleave(torch.tensor(_LENGTHS))
    steps = torch.cat([torch.arange(n) for n in _LENGTHS])
    done = torch.cat([torch.arange(n) == n - 1 for n in _LENGTHS])[:, None]
    return TensorDict({"number": number, "steps": steps, "next": {"done": done}, **more}, [100])


def stored(lib: Any, data: Any, name: str = "LazyTensorStorage") -> Any:
    """A bare storage of 100 rows."""
    storage = getattr(lib, name)(100)
    storage.set(range(100), data)
    return storage


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("SliceSampler", {"traj_key": "number", "slice_len": 5}),
        ("SliceSampler", {"end_key": ("next", "done"), "num_slices": 4}),
        ("SliceSamplerWithoutReplacement", {"num_slices": 4}),
        ("SliceSamplerWithoutReplacement", {"traj_key": "absent", "end_key": ("next", "done"), "slice_len": 5}),
    ],
)
def test_slices_and_their_info(lib: Any, make: str, options: dict[str, Any]) -> None:
    """With both keys, one of them is enough."""
    storage = stored(lib, episodes(is_init=torch.zeros(100, 1, dtype=torch.bool)))
    sampler = getattr(lib, make)(**options)
    for _ in range(10):
        index, info = sampler.sample(storage, 20)
        assert isinstance(index, tuple)
        rows = storage[index].view(4, 5)
        assert rows["number"].unique(dim=1).shape == (4, 1)
        assert bool((rows["steps"].diff() == 1).all())
        last = torch.tensor([[False] * 4 + [True]] * 4).view(20, 1)
        assert torch.equal(info["next", "truncated"], last)
        assert torch.equal(info["next", "done"], rows["next", "done"].view(20, 1) | last)
        assert torch.equal(info["is_init"].view(4, 5), torch.tensor([[True] + [False] * 4] * 4))
        assert ("collector", "mask") not in info


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda lib: lib.SliceSampler(), TypeError, "Either num_slices or slice_len must be not None, and not both"),
        (
            lambda lib: lib.SliceSampler(slice_len=2, pad_output=True),
            ValueError,
            "pad_output=True is incompatible with strict_length=True",
        ),
        (
            lambda lib: lib.SliceSampler(slice_len=2, ends=torch.ones(3), traj_key="a", cache_values=True),
            RuntimeError,
            "are exclusive arguments",
        ),
        (
            lambda lib: lib.SliceSampler(slice_len=40).sample(stored(lib, episodes()), 80),
            RuntimeError,
            "Did not find a single trajectory with sufficient length",
        ),
        (
            lambda lib: lib.SliceSampler(slice_len=4).sample(stored(lib, episodes()), 81),
            RuntimeError,
            "The batch-size must be divisible by the slice length",
        ),
        (
            lambda lib: lib.SliceSampler(num_slices=4).sample(stored(lib, episodes()), 81),
            RuntimeError,
            "The batch-size must be divisible by the number of slices",
        ),
        (
            lambda lib: lib.SamplerWithoutReplacement(drop_last=True).sample(stored(lib, episodes()), 101),
            ValueError,
            r"The batch size \(101\) is greater than the storage capacity \(100\)",
        ),
        (
            lambda lib: lib.RandomSampler().sample(lib.LazyTensorStorage(4), 2),
            RuntimeError,
            "Cannot sample from an empty storage",
        ),
        (
            lambda lib: lib.PrioritizedSampler(4, alpha=-0.5, beta=0.5),
            ValueError,
            "alpha must be greater or equal than 0, got alpha=-0.5",
        ),
        (
            lambda lib: lib.PrioritizedSampler(4, alpha=0.5, beta=0.5, replacement=False),
            TypeError,
            "has no without-replacement variant",
        ),
    ],
)
def test_messages(lib: Any, action: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        action(lib)


def test_attributes_of_slices(lib: Any) -> None:
    sampler = lib.SliceSampler(num_slices=2, span=[False, True], strict_length=False)
    assert (sampler.num_slices, sampler.slice_len, sampler.strict_length) == (2, None, False)
    assert (sampler.traj_key, sampler.end_key, sampler.end_keys) == (None, ("next", "done"), None)
    assert list(sampler.span) == [False, True]
    assert (sampler.truncated_key, sampler.init_key, sampler.pad_output) == (("next", "truncated"), "is_init", False)
    assert (sampler.step_key, sampler.fragmented, sampler.cache_values) == ("step_count", False, False)
    assert (sampler.compile, sampler.use_gpu) == (False, False)
    data = episodes(collector=TensorDict({"traj_ids": torch.zeros(100, dtype=torch.int64)}, [100]))
    sampler.sample(stored(lib, data), 4)
    assert sampler.traj_key == ("collector", "traj_ids")
