"""Deliberate differences from TorchRL: a call, what comes of it there, and here. See `docs/compat/torchrl.md`.

A failure means that one of the libraries changed: then the page and this table need a look.
"""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ._script import Library, Note, rows
from .episodes import hindsight_buffer, hindsight_episode, steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def buffer(lib: Any, data: Any, storage: str = "LazyTensorStorage", kind: str = "ReplayBuffer", **options: Any) -> Any:
    """A buffer of five rows with rows in it."""
    rb = getattr(lib, kind)(storage=getattr(lib, storage)(options.pop("capacity", 5)), **options)
    rb.extend(data)
    return rb


def listed(lib: Any, data: Any) -> Any:
    return buffer(lib, data, "ListStorage", capacity=10)


def mapped(lib: Any, data: Any) -> Any:
    return buffer(lib, data, "LazyMemmapStorage")


def indexed(lib: Any, data: Any, **options: Any) -> Any:
    return buffer(lib, data, kind="TensorDictReplayBuffer", **options)


def drawn(rb: Any, times: int = 80, key: str = "obs") -> Any:
    """Every batch that comes in so many draws."""
    return sorted({tuple(rb.sample()[key].tolist()) for _ in range(times)})


# -- data and indices -------------------------------------------------------------------------------------------------


def _assign(rb: Any, index: Any, data: Any) -> Any:
    rb[index] = data
    return rb[:]["obs"].tolist()


def _rejected_length(lib: Any) -> int:
    rb = buffer(lib, torch.zeros(2, 3))
    with pytest.raises((RuntimeError, ValueError)):
        rb.extend(torch.zeros(2, 4))
    return len(rb)


def _grid(lib: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2))
    rb.extend(torch.arange(12).view(3, 4))
    return rb[0].tolist()


DATA: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "numbers in a list storage: the example of the documentation": (
        lambda lib: listed(lib, range(10)).sample(5).tolist(),
        TypeError,
        [4, 9, 3, 0, 3],
    ),
    "iterators in a list storage": (
        lambda lib: listed(lib, (number for number in range(3))).storage[:],
        TypeError,
        [0, 1, 2],
    ),
    "numpy arrays": (lambda lib: buffer(lib, {"a": np.arange(3)})["a"].tolist(), AttributeError, [0, 1, 2]),
    "a root list is a stack": (lambda lib: buffer(lib, [1, 2, 3])[:].tolist(), RuntimeError, [1, 2, 3]),
    "a list of tensordicts in a tensordict buffer": (lambda lib: len(indexed(lib, [rows(1)[0]])), ValueError, 1),
    "a dict for tensordict rows": (
        lambda lib: len(buffer(lib, rows(2)).extend({"obs": torch.zeros(2), "next": {"obs": torch.zeros(2)}})),
        ValueError,
        2,
    ),
    "float64 after float32": (
        lambda lib: buffer(lib, torch.zeros(1)).extend(torch.ones(2, dtype=torch.float64)).tolist(),
        RuntimeError,
        [1, 2],
    ),
    "whole numbers into integers": (
        lambda lib: buffer(lib, torch.zeros(1, dtype=torch.int64)).extend(torch.ones(2)).tolist(),
        RuntimeError,
        [1, 2],
    ),
    "no rows": (lambda lib: buffer(lib, torch.zeros(1)).extend(torch.zeros(0)).tolist(), RuntimeError, []),
    "an empty list in a list storage": (lambda lib: listed(lib, [1]).extend([]).tolist(), RuntimeError, []),
    "length after a refused batch": (_rejected_length, 4, 2),
    "a field of no bytes, mapped": (lambda lib: len(mapped(lib, {"none": torch.zeros(2, 0)})), ValueError, 2),
    "the index is not stored": (
        lambda lib: sorted(indexed(lib, rows(2))[:].keys()),
        ["index", "next", "obs"],
        ["next", "obs"],
    ),
    "rb[:] = rows present": (
        lambda lib: _assign(buffer(lib, rows(3)), slice(None), rows(3, 50)),
        RuntimeError,
        [50.0, 51.0, 52.0],
    ),
    "rb[-1] = is the last row, not the last slot": (
        lambda lib: _assign(buffer(lib, rows(3)), -1, rows(1, 50)[0]),
        [0.0, 1.0, 2.0],
        [0.0, 1.0, 50.0],
    ),
    "writing by mask": (
        lambda lib: _assign(buffer(lib, rows(3)), torch.tensor([True, False, True]), rows(2, 50)),
        IndexError,
        [50.0, 1.0, 51.0],
    ),
    "masks of a list storage": (
        lambda lib: listed(lib, ["a", "b", "c"]).storage[torch.tensor([True, False, True])],
        ["b", "a", "b"],
        ["a", "c"],
    ),
    "with ndim=2 an int is an environment": (_grid, IndexError, [0, 1, 2, 3]),
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


def _in_order(lib: Any) -> Any:
    return buffer(lib, torch.arange(4), capacity=10, batch_size=2, sampler=lib.SamplerWithoutReplacement(shuffle=False))


def _epochs(lib: Any) -> Any:
    rb = _in_order(lib)
    rb.sample()
    return [[batch.tolist() for batch in rb], [batch.tolist() for batch in rb]]


def _write_in_an_epoch(lib: Any) -> Any:
    rb = _in_order(lib)
    first = rb.sample().tolist()
    rb.extend(torch.tensor([50, 51]))
    return [first, rb.sample().tolist(), rb.sample().tolist()]


def _after_exchange(lib: Any) -> Any:
    """Where writing goes on after `set_storage` and `set_writer`."""
    found = []
    for name, part in (("set_storage", lib.LazyTensorStorage(5)), ("set_writer", lib.RoundRobinWriter())):
        rb = buffer(lib, torch.arange(3))
        getattr(rb, name)(part)
        found.append(rb.extend(torch.arange(2)).tolist())
    return found


def _inserted(lib: Any) -> Any:
    rb = buffer(lib, torch.arange(3))
    rb.insert_transform(0, lambda data: data + 1)
    return rb[:].tolist()


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


def _new_key(lib: Any) -> Any:
    rb = mapped(lib, rows(2))
    rb.write_all(rows(2).set("new", torch.ones(2)))
    return sorted(rb[:].keys())


def _counted(lib: Any) -> int:
    storage = lib.LazyTensorStorage(10)
    for _ in range(2):
        storage.set(range(3), torch.arange(3))
    return len(storage)


def _lazy_stack(lib: Any) -> float:
    storage = lib.LazyStackStorage(4)
    for length in (2, 3):
        storage.set(length - 2, TensorDict({"a": torch.ones(length)}))
    storage[:].zero_()
    return float(storage[0]["a"][0])


def _generations(lib: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(2), writer=lib.RoundRobinWriter(track_generations=True))
    rb.extend(torch.arange(3))
    return rb.writer.generations_of(torch.arange(2)).tolist()


PARTS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "each loop is one whole epoch": (_epochs, [[[2, 3]], [[0, 1], [2, 3]]], [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]),
    "new rows join the epoch": (_write_in_an_epoch, [[0, 1], [0, 1], [2, 3]], [[0, 1], [2, 3], [50, 51]]),
    "state of compressed rows": (lambda lib: "codec" in lib.CompressedListStorage(10).state_dict(), False, True),
    "writing goes on after the newest row": (_after_exchange, [[3, 4], [0, 1]], [[0, 1], [3, 4]]),
    "plain functions inserted": (_inserted, AttributeError, [1, 2, 3]),
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
    "state of pytrees": (lambda lib: bool(buffer(lib, {"a": torch.arange(3)}).state_dict()), TypeError, True),
    "pickling a mapped buffer": (lambda lib: len(pickle.loads(pickle.dumps(mapped(lib, rows(3))))), TypeError, 3),
    "a new field, mapped": (_new_key, ["next", "obs"], ["new", "next", "obs"]),
    "slices of mapped rows may gain keys": (lambda lib: mapped(lib, rows(2))[:].is_locked, True, False),
    "mapped tensors are tensors": (
        lambda lib: type(mapped(lib, torch.arange(3))[:]).__name__,
        "MemoryMappedTensor",
        "Tensor",
    ),
    "stats": (lambda lib: type(lib.ReplayBuffer().stats()).__name__, "dict", "BufferStats"),
    "rows that are replaced do not count twice": (_counted, 6, 3),
    "lazy stacks are copies": (_lazy_stack, 0.0, 1.0),
    "generations are serial numbers": (_generations, [1, 0], [3, 2]),
}

# -- windows and streams ----------------------------------------------------------------------------------------------


def _windows(lib: Any, data: Any, size: int, *, capacity: int = 20, **options: Any) -> Any:
    return buffer(lib, data, capacity=capacity, batch_size=size, **options)


def _fragments(*numbers: int) -> Callable[[Any], Any]:
    """Every pair of rows that slices of one trajectory, written with these steps, consist of."""

    def pairs(lib: Any) -> Any:
        trajectory = torch.zeros(len(numbers), dtype=torch.int64)
        data = TensorDict({"traj": trajectory, "step": torch.tensor(numbers)}, [len(numbers)])
        sampler = lib.SliceSampler(slice_len=2, traj_key="traj", step_key="step", fragmented=True)
        return drawn(_windows(lib, data, 2, sampler=sampler), key="step")

    return pairs


def _only_truncated(lib: Any) -> Any:
    data = steps(2, 2)
    data["next", "truncated"] = data["next", "done"].clone()
    data["next", "done"].zero_()
    return drawn(_windows(lib, data, 2, sampler=lib.SliceSampler(slice_len=2)))


def _reused_ids(lib: Any) -> Any:
    data = TensorDict({"episode": torch.tensor([0, 0, 1, 1, 0, 0]), "obs": torch.arange(6)}, [6])
    return _windows(lib, data, 4, sampler=lib.SliceSampler(slice_len=4, traj_key="episode")).sample()["obs"].tolist()


def _around_the_corner(lib: Any) -> Any:
    ends = torch.tensor([False, True, False, True, False, False])
    sampler = lib.SliceSampler(slice_len=2, ends=ends, cache_values=True)
    storage = lib.TensorStorage(TensorDict({"obs": torch.arange(6)}, [6]))
    return drawn(lib.ReplayBuffer(storage=storage, sampler=sampler, batch_size=2, writer=lib.ImmutableDatasetWriter()))


def _span(lib: Any) -> Any:
    def lengths(length: int, right: int) -> list[int]:
        rb = _windows(lib, steps(5), length, sampler=lib.SliceSampler(slice_len=length, span=(False, right)))
        return sorted({len(batch) for batch in drawn(rb, 200)})

    return [lengths(3, 2), lengths(4, 1)]


def _passes(lib: Any) -> Any:
    sampler = lib.SliceSamplerWithoutReplacement(slice_len=2, shuffle=False)
    return [len(batch["obs"]) for batch in _windows(lib, steps(1, 2, 2), 4, sampler=sampler)]


def _versions(lib: Any, values: list[int], size: int, now: int = 0, **options: Any) -> Any:
    """The rows that come in a draw at a version of the consumer."""
    data = TensorDict({"policy_version": torch.tensor(values), "row": torch.arange(len(values))}, [len(values)])
    sampler = lib.StalenessAwareSampler(**options)
    rb = indexed(lib, data, sampler=sampler, batch_size=size)
    sampler.consumer_version = now
    return sorted(set(rb.sample()["row"].tolist()))


def _interleaved(lib: Any) -> Any:
    data = TensorDict({"t": torch.arange(6), "episode": torch.arange(6) % 2}, [6])
    sampler = lib.StreamingSliceSampler(slice_len=3, traj_key="episode")
    return indexed(lib, data, sampler=sampler, batch_size=6, capacity=50).sample()["t"].tolist()


def _drawn_again(lib: Any) -> int:
    def fail(batch: Any) -> Any:
        raise ValueError

    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(4), consume_after_n_samples=1, batch_size=2)
    rb.extend(torch.arange(4))
    rb.append_transform(fail)
    with pytest.raises(ValueError):
        rb.sample()
    return len(rb)


def _groups_of_environments(lib: Any) -> Any:
    storage, sampler = lib.LazyTensorStorage(8, ndim=2), lib.PromptGroupSampler(num_groups=2)
    rb = lib.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.extend(TensorDict({"query": torch.arange(8).view(2, 4) // 4}, [2, 4]))
    groups = rb.sample()["query"].view(2, 2)
    return bool((groups == groups[:, :1]).all())


WINDOWS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "steps are in the order of writing": (_fragments(0, 1, 4, 3, 2), [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1)]),
    "a step that comes again begins an episode": (_fragments(0, 1, 0, 1), RuntimeError, [(0, 1)]),
    "an episode that was only truncated ends": (
        _only_truncated,
        [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)],
        [(0.0, 1.0), (2.0, 3.0)],
    ),
    "rows of one id are one episode": (_reused_ids, RuntimeError, [0, 1, 4, 5]),
    "flags keep their shape": (
        lambda lib: list(
            _windows(lib, steps(4, shape=()), 4, sampler=lib.SliceSampler(slice_len=4))
            .sample(return_info=True)[1]["next", "done"]
            .shape
        ),
        [4, 4],
        [4],
    ),
    "the last row is not followed by the first": (
        _around_the_corner,
        [(0, 1), (2, 3), (4, 5), (5, 0)],
        [(0, 1), (2, 3), (4, 5)],
    ),
    "a span on the right leaves slice_len - i rows or more": (_span, [[3], [2, 3, 4]], [[1, 2, 3], [3, 4]]),
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
    "newer rows are fresh": (lambda lib: _versions(lib, [1, 1, 1], 20), RuntimeError, [0, 1, 2]),
    "large versions are exact": (
        lambda lib: _versions(lib, [2**25, 2**25 + 1], 40, 2**25 + 1, max_staleness=0),
        [0, 1],
        [1],
    ),
    "windows of interleaved episodes": (_interleaved, RuntimeError, [0, 2, 4, 1, 3, 5]),
    "a batch that could not be made is drawn again": (_drawn_again, 2, 4),
    "groups of environments": (_groups_of_environments, NotImplementedError, True),
}

# -- ensembles, datasets, hindsight -----------------------------------------------------------------------------------


def pair(lib: Any, sampler: str = "RandomSampler", **options: Any) -> Any:
    """An ensemble of two buffers of eight rows."""
    members = [indexed(lib, rows(8, base), sampler=getattr(lib, sampler)(), capacity=10) for base in (0, 100)]
    return lib.ReplayBufferEnsemble(*members, **options)


def _shares(lib: Any) -> Any:
    rb = pair(lib, p=[0.75, 0.25], num_buffer_sampled=4)
    return sorted({int((rb.sample(4)["index", "buffer_ids"] == 0).sum()) for _ in range(60)})


def _offline(lib: Any, kind: str = "ReplayBuffer") -> Any:
    rb = buffer(lib, TensorDict({"obs": torch.arange(20)}, [20]), kind=kind, capacity=20)
    return lib.OfflineToOnlineReplayBuffer(rb, online_capacity=5)


def _indexed_dataset(lib: Any) -> Any:
    rb = _offline(lib, "TensorDictReplayBuffer")
    rb.extend(TensorDict({"obs": torch.arange(3)}, [3]))
    return sorted(rb.sample(4).keys())


def _copied_twice(lib: Any) -> bool:
    source, target = buffer(lib, rows(20), capacity=20), lib.ReplayBuffer(storage=lib.LazyTensorStorage(20))
    return max(Counter(lib.prefill_replay_buffer(target, source)[:]["obs"].tolist()).values()) > 1


def _relabelled(lib: Any, *episodes: TensorDict, tenfold: bool = False) -> Any:
    """The goals of a batch of three or more rows."""
    rb = hindsight_buffer(lib, her_ratio=1.0, strategy="final")
    if tenfold:
        rb.append_transform(lambda batch: batch.set("desired_goal", batch["desired_goal"] * 10))
    for episode in episodes:
        rb.extend(episode)
    return sorted(set(rb.sample(3)["desired_goal"].tolist()))


def _told(lib: Any) -> bool:
    rb = hindsight_buffer(lib)
    rb.extend(hindsight_episode(0, 5))
    return "relabelled" in rb.sample(4).keys()  # noqa: SIM118 (a TensorDict iterates over rows)


def _truncated(number: int) -> TensorDict:
    return hindsight_episode(number, 3, "truncated").set(("next", "done"), torch.zeros(3, dtype=torch.bool))


def _hindsight_environments(lib: Any) -> int:
    rb = hindsight_buffer(lib, storage=lib.LazyTensorStorage(10, ndim=2), dim_extend=0)
    rb.extend(hindsight_episode(0, 10).view(5, 2))
    return len(rb.sample(4))


COMPOSED: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "queries go through the members": (
        lambda lib: len(pair(lib).query(lambda one: True, trajectory_key="obs")),
        TypeError,
        16,
    ),
    "every batch has its share": (_shares, [0, 1, 2, 3, 4], [3]),
    "a part is whole, though a pass ends in it": (
        lambda lib: list(pair(lib, "SamplerWithoutReplacement", sample_from_all=True).sample(20)["obs"].shape),
        [2, 8],
        [2, 10],
    ),
    "priorities of a sample can be updated": (
        lambda lib: pair(lib).update_tensordict_priority(pair(lib).sample(4)),
        AttributeError,
        None,
    ),
    "`...` is all members": (lambda lib: len(pair(lib)[...]), TypeError, 2),
    "no row of a dataset is copied twice": (_copied_twice, True, False),
    "a dataset that names its rows": (_indexed_dataset, KeyError, ["obs"]),
    "hindsight batches tell which rows are relabelled": (
        _told,
        False,
        True,
    ),
    "transforms come after relabelling": (
        lambda lib: _relabelled(lib, hindsight_episode(0, 3), tenfold=True),
        [2.0],
        [20.0],
    ),
    "a truncated row ends its episode": (lambda lib: _relabelled(lib, _truncated(0), _truncated(1)), [102.0], [2.0]),
    "hindsight in several environments": (_hindsight_environments, NotImplementedError, 4),
}
TABLE = {**DATA, **PARTS, **WINDOWS, **COMPOSED}


@pytest.mark.parametrize("name", TABLE)
def test_difference(name: str) -> None:
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


def test_saving(tmp_path: Path) -> None:
    """List storages and pytree buffers save, and loading needs no rows beforehand."""
    theirs, ours = Library("torchrl"), Library("ostinato")
    with pytest.raises(NotImplementedError):
        listed(theirs, [torch.ones(2)]).dumps(tmp_path / "a")
    listed(ours, [torch.ones(2), torch.zeros(3)]).dumps(tmp_path / "b")
    items = ours.ReplayBuffer(storage=ours.ListStorage(10))
    items.loads(tmp_path / "b")
    assert [len(item) for item in items.storage[:]] == [2, 3]
    for lib in (theirs, ours):
        buffer(lib, {"a": torch.arange(3)}).dumps(tmp_path / lib.name)
    with pytest.raises(RuntimeError):
        theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(5)).loads(tmp_path / "torchrl")
    fresh = ours.ReplayBuffer(storage=ours.LazyTensorStorage(5))
    fresh.loads(tmp_path / "ostinato")
    assert fresh["a"].tolist() == [0, 1, 2]


def test_files_and_hooks(tmp_path: Path) -> None:
    """Ours opens the mapped rows that `flush` noted, and calls the hooks of an ensemble."""
    found = []
    for lib in map(Library, ("torchrl", "ostinato")):
        home = tmp_path / lib.name
        calls: list[Any] = []

        def hook(data: Any, calls: list[Any] = calls, **_: Any) -> Any:
            calls.append(data)
            return data

        rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(5, scratch_dir=str(home)))
        rb.extend(rows(3))
        if lib.name == "ostinato":
            rb.storage.flush()
        again = lib.LazyMemmapStorage(5, scratch_dir=str(home), existsok=True)
        ensemble = pair(lib)
        ensemble.register_save_hook(hook)
        ensemble.dumps(tmp_path / f"{lib.name} ensemble")
        found.append((len(lib.ReplayBuffer(storage=again)), len(calls)))
    assert found == [(0, 0), (3, 2)]
