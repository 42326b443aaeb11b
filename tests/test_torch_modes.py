"""Modes of torch that programs switch on for themselves: the whole public API gives the same results in all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from tests.tour import SCENARIOS, flat, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.house

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


def alternating(first: int) -> Callable[[int], AbstractContextManager[Any]]:
    """What was written, loaded or drawn in inference mode is changed outside of it, and the other way round."""
    return lambda number: torch.inference_mode() if number % 2 == first else nullcontext()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_are_the_same_in_every_mode(scenario: str, tmp_path: Path) -> None:
    wanted = tour(scenario, tmp_path / "plain", lambda _: nullcontext())
    modes = {name: lambda _, make=make: make() for name, make in MODES.items()}
    for name, mode in (modes | {"in turns": alternating(0), "in turns, first": alternating(1)}).items():
        assert tour(scenario, tmp_path / name, mode) == wanted, name


def test_a_default_device_does_not_reach_native_code() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    rb.extend({"x": torch.arange(10.0)})
    with default_device():
        assert rb.sample()["x"].device.type == "cpu"
        assert rb[torch.tensor([1, 2], device="cpu")]["x"].tolist() == [1.0, 2.0]
