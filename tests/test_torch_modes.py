"""Modes of torch that programs switch on for themselves: the whole public API gives the same results in all of them."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from tests.tour import SCENARIOS, flat, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

META = torch.device("meta")


@contextmanager
def default_device() -> Iterator[None]:
    """What `torch.set_default_device` does, undone at the end."""
    torch.set_default_device(META)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "with a device": lambda: META,
    "default device": default_device,
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def tour(scenario: str, directory: Path, mode: Callable[[int], AbstractContextManager[Any]]) -> dict[str, Any]:
    """Everything that a scenario gives, its step number i taken within `mode(i)`."""
    directory.mkdir()
    found: dict[str, Any] = {}
    steps = walk(scenario, directory)
    for number in range(10_000):
        with mode(number):
            step = next(steps, None)
        if step is None:
            return found
        found |= flat(step[1], step[0])
    raise AssertionError(scenario)


@functools.cache
def _wanted(scenario: str) -> dict[str, Any]:
    import tempfile
    from pathlib import Path as Directory

    with tempfile.TemporaryDirectory() as directory:
        return tour(scenario, Directory(directory) / "plain", lambda _: nullcontext())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_are_the_same_in_every_mode(scenario: str, mode: str, tmp_path: Path) -> None:
    assert tour(scenario, tmp_path / "mode", lambda _: MODES[mode]()) == _wanted(scenario)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_inference_mode_may_come_and_go(scenario: str, first: int, tmp_path: Path) -> None:
    """What was written, loaded or drawn in inference mode is changed outside of it, and the other way round."""

    def mode(number: int) -> AbstractContextManager[Any]:
        return torch.inference_mode() if number % 2 == first else nullcontext()

    assert tour(scenario, tmp_path / "mode", mode) == _wanted(scenario)


def test_a_default_device_does_not_reach_native_code() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    rb.extend({"x": torch.arange(10.0)})
    with default_device():
        assert rb.sample()["x"].device.type == "cpu"
        assert rb[torch.tensor([1, 2], device="cpu")]["x"].tolist() == [1.0, 2.0]
