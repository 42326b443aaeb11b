"""Deliberate differences: how one is written down and checked, and buffers to show them on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ._script import Raised, describe, library, outcome

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Difference", "Fails", "check", "filled", "grid", "in_order", "listed", "mapped"]


class Fails(NamedTuple):
    """The expected error, by the name of its class."""

    name: str


class Difference(NamedTuple):
    """A script of one library, and what comes of it in each."""

    reason: str
    script: Callable[[Any], object]
    theirs: object
    ours: object


def check(difference: Difference) -> None:
    """Run the script against both libraries and compare with what is written down."""
    for which, expected in (("torchrl", difference.theirs), ("ostinato", difference.ours)):
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            got = outcome(lambda: difference.script(library(which)))  # noqa: B023 (runs at once)
        if isinstance(expected, Fails):
            assert isinstance(got, Raised), f"{which}: {got}"
            assert got.name == expected.name, f"{which}: {got}"
        else:
            assert got == describe(expected), f"{which}: {difference.reason}"


def filled(lib: Any, data: Any, capacity: int = 5, buffer: str = "ReplayBuffer", **options: Any) -> Any:
    """A buffer over `LazyTensorStorage(capacity)` with rows in it."""
    rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(capacity), **options)
    rb.extend(data)
    return rb


def listed(lib: Any, data: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), **options)
    rb.extend(data)
    return rb


def mapped(lib: Any, data: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(5, **options))
    rb.extend(data)
    return rb


def grid(lib: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), **options)
    rb.extend(torch.arange(12).view(3, 4))
    return rb


def in_order(lib: Any, **options: Any) -> Any:
    return filled(lib, torch.arange(4), 10, sampler=lib.SamplerWithoutReplacement(shuffle=False), **options)
