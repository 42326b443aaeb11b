"""Deliberate differences from TorchRL: a call, what comes of it there, and here. See `docs/compat/torchrl.md`.

A failure means that one of the libraries changed: then the page and this table need a look.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from tensordict import TensorDict

from ._script import Library, Note, rows
from .episodes import hindsight_buffer, hindsight_episode, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    Table: TypeAlias = dict[str, tuple[Callable[[Any], Any], Any, Any]]


def buffer(lib: Any, data: Any, storage: str = "LazyTensorStorage", kind: str = "ReplayBuffer", **options: Any) -> Any:
    """A buffer of five rows with rows in it."""
    rb = getattr(lib, kind)(storage=getattr(lib, storage)(options.pop("capacity", 5)), **options)
    rb.extend(data)
    return rb


def mapped(lib: Any, data: Any) -> Any:
    return buffer(lib, data, "LazyMemmapStorage")


def indexed(lib: Any, data: Any, **options: Any) -> Any:
    return buffer(lib, data, kind="TensorDictReplayBuffer", **options)


def drawn(rb: Any) -> Any:
    """Every batch that comes in 80 draws."""
    return sorted({tuple(rb.sample()["obs"].tolist()) for _ in range(80)})


# -- data and indices -------------------------------------------------------------------------------------------------


def _assign(rb: Any, index: Any, data: Any) -> Any:
    rb[index] = data
    return rb[:]["obs"].tolist()


DATA: Table = {
    "a list of tensordicts in a tensordict buffer": (lambda lib: len(indexed(lib, [rows(1)[0]])), ValueError, 1),
    "the index is not stored": (
        lambda lib: sorted(indexed(lib, rows(2))[:].keys()),
        ["index", "next", "obs"],
        ["next", "obs"],
    ),
    "rb[-1] = is the last row, not the last slot": (
        lambda lib: _assign(buffer(lib, rows(3)), -1, rows(1, 50)[0]),
        [0.0, 1.0, 2.0],
        [0.0, 1.0, 50.0],
    ),
    "a step of all environments for tensordict buffers": (
        lambda lib: lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2)).add(rows(3)).tolist(),
        RuntimeError,
        [[0, 0], [0, 1], [0, 2]],
    ),
    "the length of a given block counts cells": (
        lambda lib: len(lib.TensorStorage(torch.arange(12).view(3, 4), ndim=2)),
        3,
        12,
    ),
    "dim_extend with one dimension": (
        lambda lib: list(buffer(lib, torch.zeros(2, 4), dim_extend=1)[:].shape),
        [2, 4],
        [4, 2],
    ),
}

# -- samplers, parts, states ------------------------------------------------------------------------------------------


def _write_in_an_epoch(lib: Any) -> Any:
    sampler = lib.SamplerWithoutReplacement(shuffle=False)
    rb = buffer(lib, torch.arange(4), capacity=10, batch_size=2, sampler=sampler)
    first = rb.sample().tolist()
    rb.extend(torch.tensor([50, 51]))
    return [first, rb.sample().tolist(), rb.sample().tolist()]


class _TimesTen:
    """Adds one when rows are read, multiplies by ten when they are written."""

    def forward(self, data: Any) -> Any:
        return data + 1

    def inv(self, data: Any) -> Any:
        return data * 10


def _inverted_add(lib: Any) -> int:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5))
    rb.append_transform(lambda data: {"a": data["a"] + 1}, invert=True)
    rb.add({"a": torch.tensor(5)})
    return int(rb.storage[:]["a"][0])


PARTS: Table = {
    "new rows join the epoch": (_write_in_an_epoch, [[0, 1], [0, 1], [2, 3]], [[0, 1], [2, 3], [50, 51]]),
    "objects with forward and inv": (
        lambda lib: buffer(lib, torch.arange(3), transform=_TimesTen())[:].tolist(),
        RuntimeError,
        [1, 11, 21],
    ),
    "inverse of add for dicts": (_inverted_add, 5, 6),
    "ancestry without replacement": (
        lambda lib: issubclass(lib.SamplerWithoutReplacement, lib.RandomSampler),
        False,
        True,
    ),
    "slices of mapped rows may gain keys": (lambda lib: mapped(lib, rows(2))[:].is_locked, True, False),
    "mapped tensors are tensors": (
        lambda lib: type(mapped(lib, torch.arange(3))[:]).__name__,
        "MemoryMappedTensor",
        "Tensor",
    ),
}

# -- windows and streams ----------------------------------------------------------------------------------------------


def _windows(lib: Any, data: Any, size: int, **options: Any) -> Any:
    return buffer(lib, data, capacity=20, batch_size=size, **options)


def _reused_ids(lib: Any) -> Any:
    data = TensorDict({"episode": torch.tensor([0, 0, 1, 1, 0, 0]), "obs": torch.arange(6)}, [6])
    return _windows(lib, data, 4, sampler=lib.SliceSampler(slice_len=4, traj_key="episode")).sample()["obs"].tolist()


def _around_the_corner(lib: Any) -> Any:
    ends = torch.tensor([False, True, False, True, False, False])
    sampler = lib.SliceSampler(slice_len=2, ends=ends, cache_values=True)
    storage = lib.TensorStorage(TensorDict({"obs": torch.arange(6)}, [6]))
    return drawn(lib.ReplayBuffer(storage=storage, sampler=sampler, batch_size=2, writer=lib.ImmutableDatasetWriter()))


def _passes(lib: Any) -> Any:
    sampler = lib.SliceSamplerWithoutReplacement(slice_len=2, shuffle=False)
    return [len(batch["obs"]) for batch in _windows(lib, steps(1, 2, 2), 4, sampler=sampler)]


WINDOWS: Table = {
    "rows of one id are one episode": (_reused_ids, RuntimeError, [0, 1, 4, 5]),
    "the last row is not followed by the first": (
        _around_the_corner,
        [(0, 1), (2, 3), (4, 5), (5, 0)],
        [(0, 1), (2, 3), (4, 5)],
    ),
    "batches are full until the pass ends": (_passes, [2, 2], [4]),
    "the index of a slice is one number a row": (
        lambda lib: list(
            _windows(lib, steps(4), 4, kind="TensorDictReplayBuffer", sampler=lib.SliceSampler(slice_len=4))
            .sample()["index"]
            .shape
        ),
        [4, 1],
        [4],
    ),
}

# -- ensembles, datasets, hindsight -----------------------------------------------------------------------------------


def pair(lib: Any, sampler: str = "RandomSampler", **options: Any) -> Any:
    """An ensemble of two buffers of eight rows."""
    members = [indexed(lib, rows(8, base), sampler=getattr(lib, sampler)(), capacity=10) for base in (0, 100)]
    return lib.ReplayBufferEnsemble(*members, **options)


def _relabelled(lib: Any, *episodes: TensorDict, tenfold: bool = False) -> Any:
    """The goals of a batch of three or more rows."""
    rb = hindsight_buffer(lib, her_ratio=1.0, strategy="final")
    if tenfold:
        rb.append_transform(lambda batch: batch.set("desired_goal", batch["desired_goal"] * 10))
    for episode in episodes:
        rb.extend(episode)
    return sorted(set(rb.sample(3)["desired_goal"].tolist()))


def _truncated(number: int) -> TensorDict:
    return hindsight_episode(number, 3, "truncated").set(("next", "done"), torch.zeros(3, dtype=torch.bool))


COMPOSED: Table = {
    "a part is whole, though a pass ends in it": (
        lambda lib: list(pair(lib, "SamplerWithoutReplacement", sample_from_all=True).sample(20)["obs"].shape),
        [2, 8],
        [2, 10],
    ),
    "transforms come after relabelling": (
        lambda lib: _relabelled(lib, hindsight_episode(0, 3), tenfold=True),
        [2.0],
        [20.0],
    ),
    "a truncated row ends its episode": (lambda lib: _relabelled(lib, _truncated(0), _truncated(1)), [102.0], [2.0]),
}
TABLE = {**DATA, **PARTS, **WINDOWS, **COMPOSED}


@pytest.mark.parametrize("name", TABLE)
def test_difference(name):
    script, *expected = TABLE[name]
    for library, wanted in zip(("torchrl", "ostinato"), expected, strict=True):
        note = Note(library)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            note.run(name, lambda: script(Library(library)))  # noqa: B023 (runs at once)
        got: Any = note.steps[0][1]
        if isinstance(wanted, type):
            assert getattr(got, "name", got) == wanted.__name__, library
        else:
            assert got == note.describe(wanted), library
