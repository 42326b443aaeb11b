"""Offline data with one's own experience: shares, options, loaded datasets and filled buffers."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._differences import Difference, Fails, check
from ._script import Note, both


def _rows(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"obs": torch.arange(first, first + count)}, [count])


def _dataset(lib: Any, buffer: str = "ReplayBuffer") -> Any:
    rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(20))
    rb.extend(_rows(20))
    return rb


def _mixed(lib: Any, **options: Any) -> Any:
    return lib.OfflineToOnlineReplayBuffer(_dataset(lib), **{"online_capacity": 10, **options})


def _prefill(lib: Any, *arguments: Any, **options: Any) -> Any:
    home = "ostinato" if lib.name == "ostinato" else "torchrl.data.replay_buffers.offline_to_online"
    return importlib.import_module(home).prefill_replay_buffer(*arguments, **options)


@pytest.mark.parametrize("fraction", [0.25, 0.8])
@both
def test_batches(lib: Any, note: Note, fraction: float) -> None:
    rb = _mixed(lib, offline_fraction=fraction, batch_size=10)
    note("online empty", lambda: rb.sample())
    note("slots", lambda: rb.extend(_rows(4, 100)))
    for size in (None, 4, 7):
        note(f"size {size}", lambda: rb.sample(size))
    for step in (3, 7, 10, 12):
        rb.anneal(step, 10)
        note("annealed", lambda: (rb.offline_fraction, rb.sample()))
    note("lengths", lambda: (len(rb), len(rb.offline_buffer), len(rb.online_buffer)))


@both
def test_options(lib: Any, note: Note) -> None:
    storage = lib.LazyTensorStorage(3)
    note("both", lambda: _mixed(lib, online_storage=storage))
    note("neither", lambda: _mixed(lib, online_capacity=None))
    note("storage", lambda: len(_mixed(lib, online_capacity=None, online_storage=storage).online_buffer))
    for fraction in (0.0, 1.0, -0.5):
        note("fraction", lambda: _mixed(lib, offline_fraction=fraction))
    note("no size", lambda: _mixed(lib).sample())
    note("kwargs", lambda: _mixed(lib, split=True))
    note("name without size", lambda: lib.OfflineToOnlineReplayBuffer("minari:x", online_capacity=3))
    rb = _mixed(lib, transform=lambda batch: batch.set("twice", batch["obs"] * 2), batch_size=4)
    note("transform", lambda: rb.sample().keys())


@both
def test_names_of_datasets(lib: Any, note: Note) -> None:
    utils = importlib.import_module("torchrl.data.datasets.utils")

    given: list[Any] = []

    def make(name: str, **options: Any) -> Any:
        given.append((name, sorted(options.items())))
        return _dataset(lib)

    utils.register_dataset("ostinato-test", make, replace=True)
    rb = lib.OfflineToOnlineReplayBuffer("ostinato-test:a", online_capacity=5, batch_size=4, split=1)
    note("sample", lambda: rb.sample().batch_size)
    filled = _prefill(lib, lib.ReplayBuffer(storage=lib.LazyTensorStorage(30)), "ostinato-test:b", chunk_size=7)
    note("filled", lambda: len(filled))
    note("options", lambda: given)


def _copies(lib: Any) -> int:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20))
    return max(Counter(_prefill(lib, rb, _dataset(lib))[:]["obs"].tolist()).values())


def _indexed(lib: Any) -> Any:
    rb = lib.OfflineToOnlineReplayBuffer(_dataset(lib, "TensorDictReplayBuffer"), online_capacity=5)
    rb.extend(_rows(3))
    return sorted(rb.sample(4).keys())


DIFFERENCES = [
    Difference("no row of a dataset is copied twice", lambda lib: _copies(lib) > 1, True, False),
    Difference("a dataset that names its rows", _indexed, Fails("KeyError"), ["obs"]),
    Difference(
        "annealing over no steps",
        lambda lib: _mixed(lib).anneal(1, 0),
        Fails("ZeroDivisionError"),
        Fails("OptionError"),
    ),
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.reason)
def test_differences(difference: Difference) -> None:
    check(difference)
