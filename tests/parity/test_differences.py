"""Each deliberate difference from TorchRL, with its reason: what theirs does, what ours does. See `docs/compat/torchrl.md`.

A failure here means that one of the libraries changed: then the page and this table need a look.
"""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ._script import Raised, describe, library, outcome, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Fails(NamedTuple):
    """The expected error, by the name of its class."""

    name: str


class Difference(NamedTuple):
    """A script of one library, and what comes of it in each."""

    reason: str
    script: Callable[[Any], object]
    theirs: object
    ours: object


def _filled(lib: Any, data: Any, capacity: int = 5, buffer: str = "ReplayBuffer", **options: Any) -> Any:
    """A buffer over `LazyTensorStorage(capacity)` with rows in it."""
    rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(capacity), **options)
    rb.extend(data)
    return rb


def _listed(lib: Any, data: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), **options)
    rb.extend(data)
    return rb


def _mapped(lib: Any, data: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(5, **options))
    rb.extend(data)
    return rb


def _grid(lib: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), **options)
    rb.extend(torch.arange(12).view(3, 4))
    return rb


def _in_order(lib: Any, **options: Any) -> Any:
    return _filled(lib, torch.arange(4), 10, sampler=lib.SamplerWithoutReplacement(shuffle=False), **options)


def _assign(rb: Any, index: Any, data: Any, key: str = "obs") -> list[float]:
    rb[index] = data
    values: list[float] = rb[:][key].tolist()
    return values


def _rejected_length(lib: Any) -> int:
    rb = _filled(lib, torch.zeros(2, 3))
    with pytest.raises((RuntimeError, ValueError)):
        rb.extend(torch.zeros(2, 4))
    return len(rb)


def _epochs(lib: Any) -> list[list[list[int]]]:
    rb = _in_order(lib, batch_size=2)
    rb.sample()
    return [[batch.tolist() for batch in rb], [batch.tolist() for batch in rb]]


def _write_in_an_epoch(lib: Any) -> list[list[int]]:
    rb = _in_order(lib, batch_size=2)
    first = rb.sample().tolist()
    rb.extend(torch.tensor([50, 51]))
    return [first, rb.sample().tolist(), rb.sample().tolist()]


def _after_set_storage(lib: Any) -> tuple[list[int], int]:
    rb = _filled(lib, torch.arange(3))
    rb.set_storage(lib.LazyTensorStorage(5))
    return rb.extend(torch.arange(2)).tolist(), len(rb)


def _after_set_writer(lib: Any) -> list[int]:
    rb = _filled(lib, torch.arange(3))
    rb.set_writer(lib.RoundRobinWriter())
    slots: list[int] = rb.extend(torch.arange(2)).tolist()
    return slots


def _inserted_function(lib: Any) -> list[int]:
    rb = _filled(lib, torch.arange(3))
    rb.insert_transform(0, lambda data: data + 1)
    values: list[int] = rb[:].tolist()
    return values


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


def _best(lib: Any, values: list[float], **options: Any) -> Any:
    writer = lib.TensorDictMaxValueWriter(**{"rank_key": "k", **options})
    return _filled(lib, TensorDict({"k": torch.tensor(values)}, [len(values)]), 2, writer=writer)


def _new_key(rb: Any) -> list[str]:
    rb.write_all(rows(2).set("new", torch.ones(2)))
    return sorted(rb[:].keys())


def _pickled(rb: Any) -> int:
    return len(pickle.loads(pickle.dumps(rb)))


def _smaller(lib: Any) -> int:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5))
    rb.load_state_dict(_filled(lib, rows(8), 10).state_dict())
    return len(rb)


TABLE = {
    # data that comes in
    "numbers in a list storage": Difference(
        "004 prints tensor([4, 9, 3, 0, 3]) for this example; TorchRL 0.14 has no collation for numbers",
        lambda lib: _listed(lib, range(10)).sample(5).tolist(),
        Fails("TypeError"),
        [4, 9, 3, 0, 3],
    ),
    "iterators in a list storage": Difference(
        "004 calls the argument an iterable",
        lambda lib: _listed(lib, (number for number in range(3))).storage[:],
        Fails("TypeError"),
        [0, 1, 2],
    ),
    "numpy arrays": Difference(
        "arrays are as fixed in shape as tensors",
        lambda lib: _filled(lib, {"a": np.arange(3)})["a"].tolist(),
        Fails("AttributeError"),
        [0, 1, 2],
    ),
    "a list of numbers": Difference(
        "a root list is a stack of values, as 004 says",
        lambda lib: _filled(lib, [1, 2, 3])[:].tolist(),
        Fails("RuntimeError"),
        [1, 2, 3],
    ),
    "a dict for tensordict rows": Difference(
        "the fields are the same ones",
        lambda lib: len(_filled(lib, rows(2)).extend({"obs": torch.zeros(2), "next": {"obs": torch.zeros(2)}})),
        Fails("ValueError"),
        2,
    ),
    "nothing at all": Difference(
        "it wrote nothing and said so nowhere", lambda lib: len(_filled(lib, None)), 0, Fails("KindError")
    ),
    "a missing field": Difference(
        "such rows would show what memory held",
        lambda lib: len(_filled(lib, rows(2)).extend(rows(2).exclude("obs"))),
        2,
        Fails("KeyMissingError"),
    ),
    "an unknown field": Difference(
        "older rows would get zeros that nobody wrote; write_all adds fields on purpose",
        lambda lib: len(_filled(lib, rows(2)).extend(rows(2).set("x", torch.ones(2)))),
        2,
        Fails("KeyMissingError"),
    ),
    "a shape that broadcasts": Difference(
        "one value per row is not three",
        lambda lib: len(_filled(lib, torch.zeros(2, 3)).extend(torch.zeros(2, 1))),
        2,
        Fails("SchemaError"),
    ),
    "length after a refused batch": Difference("all or nothing: garbage rows could be sampled", _rejected_length, 4, 2),
    "a field of no bytes, mapped": Difference(
        "files of no bytes cannot be mapped, and need not be",
        lambda lib: len(_mapped(lib, {"none": torch.zeros(2, 0)})),
        Fails("ValueError"),
        2,
    ),
    "lists of tensordicts in a tensordict buffer": Difference(
        "a root list is a stack of values, as 004 says",
        lambda lib: len(_filled(lib, [rows(1)[0]], buffer="TensorDictReplayBuffer")),
        Fails("ValueError"),
        1,
    ),
    # rows by index
    "the index of tensordict rows": Difference(
        "it is where a row lies, not data: samples carry it, the storage does not keep it",
        lambda lib: sorted(_filled(lib, rows(2), buffer="TensorDictReplayBuffer")[:].keys()),
        ["index", "next", "obs"],
        ["next", "obs"],
    ),
    "rb[:] = rows present": Difference(
        "002 calls it equivalent to write_all",
        lambda lib: _assign(_filled(lib, rows(3)), slice(None), rows(3, 50)),
        Fails("RuntimeError"),
        [50.0, 51.0, 52.0],
    ),
    "rb[-1] =": Difference(
        "the last row present, as in reading; not the last slot",
        lambda lib: _assign(_filled(lib, rows(3)), -1, rows(1, 50)[0]),
        [0.0, 1.0, 2.0],
        [0.0, 1.0, 50.0],
    ),
    "writing past the length": Difference(
        "no reader could ever see that row",
        lambda lib: _assign(_filled(lib, rows(3)), 4, rows(1, 50)[0]),
        [0.0, 1.0, 2.0],
        Fails("SlotError"),
    ),
    "writing by mask": Difference(
        "the mask that reads them writes them",
        lambda lib: _assign(_filled(lib, rows(3)), torch.tensor([True, False, True]), rows(2, 50)),
        Fails("IndexError"),
        [50.0, 1.0, 51.0],
    ),
    "one number for a whole row": Difference(
        "it would fill every field",
        lambda lib: _assign(_filled(lib, rows(3)), 0, 7.0),
        [7.0, 1.0, 2.0],
        Fails("SchemaError"),
    ),
    "write_all with fewer rows": Difference(
        "name them with end=", lambda lib: _filled(lib, rows(3)).write_all(rows(2, 50)), None, Fails("SchemaError")
    ),
    "masks of a list storage": Difference(
        "a mask chooses rows",
        lambda lib: _listed(lib, ["a", "b", "c"]).storage[torch.tensor([True, False, True])],
        ["b", "a", "b"],
        ["a", "c"],
    ),
    "a list storage row past the end": Difference(
        "assignment replaces, add appends",
        lambda lib: _listed(lib, ["a"]).__setitem__(1, "b"),
        None,
        Fails("SlotError"),
    ),
    "an index inside rows": Difference(
        "rb[...] chooses rows, whatever they are made of",
        lambda lib: int(_filled(lib, torch.arange(6).view(3, 2))[1, 1]),
        3,
        Fails("SlotError"),
    ),
    "floats as an index": Difference(
        "a slip", lambda lib: _filled(lib, torch.arange(3))[torch.tensor([1.0])].tolist(), [1], Fails("KindError")
    ),
    "a lane": Difference(
        "with ndim=2 an int is a lane, as in rb[:]",
        lambda lib: _grid(lib)[0].tolist(),
        Fails("IndexError"),
        [0, 1, 2, 3],
    ),
    "a step for tensordict buffers": Difference(
        "add writes one step of all lanes, as the example of 004 does",
        lambda lib: lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2)).add(rows(3)).tolist(),
        Fails("RuntimeError"),
        [[0, 0], [0, 1], [0, 2]],
    ),
    "length of a given block": Difference(
        "len counts cells, however the rows came",
        lambda lib: len(lib.TensorStorage(torch.arange(12).view(3, 4), ndim=2)),
        3,
        12,
    ),
    "dim_extend with one dimension": Difference(
        "rb[i] is row i, so rb[:] has rows first",
        lambda lib: tuple(_filled(lib, torch.zeros(2, 4), dim_extend=1)[:].shape),
        (2, 4),
        (4, 2),
    ),
    # sampling
    "no rows asked for": Difference(
        "an empty batch trains nothing",
        lambda lib: len(_filled(lib, torch.arange(3)).sample(0)),
        0,
        Fails("OptionError"),
    ),
    "another batch size with prefetch": Difference(
        "the batches are ready, of another size",
        lambda lib: len(_filled(lib, torch.arange(3), batch_size=4, prefetch=2, generator=torch.Generator()).sample(2)),
        2,
        Fails("OptionError"),
    ),
    "a loop after a sample": Difference(
        "each for loop is one whole epoch, also after break or sample",
        _epochs,
        [[[2, 3]], [[0, 1], [2, 3]]],
        [[[0, 1], [2, 3]], [[0, 1], [2, 3]]],
    ),
    "writes during an epoch": Difference(
        "new rows join the rows not yet drawn, none is drawn twice",
        _write_in_an_epoch,
        [[0, 1], [0, 1], [2, 3]],
        [[0, 1], [2, 3], [50, 51]],
    ),
    # parts and options
    "capacity zero": Difference(
        "refused when made, not at the first write",
        lambda lib: lib.LazyTensorStorage(0).max_size,
        0,
        Fails("CapacityError"),
    ),
    "capacity as text": Difference(
        "a slip", lambda lib: lib.LazyTensorStorage("3").max_size, 3, Fails("CapacityError")
    ),
    "batch size -1": Difference(
        "refused when made", lambda lib: lib.ReplayBuffer(batch_size=-1).batch_size, -1, Fails("OptionError")
    ),
    "a number as sampler": Difference(
        "set_ methods check as the constructor does",
        lambda lib: type(lib.ReplayBuffer().set_sampler(5)).__name__,
        "RandomSampler",
        Fails("KindError"),
    ),
    "drop_last set later": Difference(
        "set_ methods check as the constructor does",
        lambda lib: type(lib.ReplayBuffer().set_sampler(lib.SamplerWithoutReplacement(drop_last=True))).__name__,
        "RandomSampler",
        Fails("OptionError"),
    ),
    "cursor after set_storage": Difference(
        "writing starts where the new rows end", _after_set_storage, ([3, 4], 0), ([0, 1], 2)
    ),
    "cursor after set_writer": Difference("writing goes on after the newest row", _after_set_writer, [0, 1], [3, 4]),
    "a number as generator": Difference(
        "refused when made, not at the first sample",
        lambda lib: lib.ReplayBuffer(generator=5).batch_size,
        None,
        Fails("KindError"),
    ),
    "plain functions inserted": Difference(
        "append_transform takes them", _inserted_function, Fails("AttributeError"), [1, 2, 3]
    ),
    "objects with forward and inv": Difference(
        "all that a transform needs",
        lambda lib: _filled(lib, torch.arange(3), transform=_TimesTen())[:].tolist(),
        Fails("RuntimeError"),
        [1, 11, 21],
    ),
    "inverse of add for dicts": Difference("add and extend write the same rows", _inverted_add, 5, 6),
    "ancestry without replacement": Difference(
        "code that asks for a RandomSampler gets one",
        lambda lib: issubclass(lib.SamplerWithoutReplacement, lib.RandomSampler),
        False,
        True,
    ),
    # writers
    "NaN as a rank": Difference(
        "NaN outranks nothing and says that something broke",
        lambda lib: len(_best(lib, [1.0, float("nan")])),
        2,
        Fails("SchemaError"),
    ),
    "an unknown reduction": Difference(
        "refused when made",
        lambda lib: type(lib.TensorDictMaxValueWriter(reduction="nonsense")).__name__,
        "TensorDictMaxValueWriter",
        Fails("OptionError"),
    ),
    # state
    "a state that is too large": Difference(
        "a buffer never exceeds its capacity", _smaller, 8, Fails("CheckpointError")
    ),
    "state of pytrees": Difference(
        "nothing about them is special",
        lambda lib: isinstance(_filled(lib, {"a": torch.arange(3)}).state_dict(), dict),
        Fails("TypeError"),
        True,
    ),
    "pickling a mapped buffer": Difference(
        "pickling copies the rows", lambda lib: _pickled(_mapped(lib, rows(3))), Fails("TypeError"), 3
    ),
    "a new field, mapped": Difference(
        "write_all brings it to every storage",
        lambda lib: _new_key(_mapped(lib, rows(2))),
        ["next", "obs"],
        ["new", "next", "obs"],
    ),
    "slices of mapped rows": Difference(
        "a view may gain keys of its own", lambda lib: _mapped(lib, rows(2))[:].is_locked, True, False
    ),
    "mapped tensors": Difference(
        "they are tensors over mapped memory",
        lambda lib: type(_mapped(lib, torch.arange(3))[:]).__name__,
        "MemoryMappedTensor",
        "Tensor",
    ),
    "stats": Difference(
        "named and typed", lambda lib: type(lib.ReplayBuffer().stats()).__name__, "dict", "BufferStats"
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_difference(name: str) -> None:
    difference = TABLE[name]
    for which, expected in (("torchrl", difference.theirs), ("ostinato", difference.ours)):
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            lib = library(which)
            got = outcome(lambda: difference.script(lib))
        if isinstance(expected, Fails):
            assert isinstance(got, Raised), f"{which}: {got}"
            assert got.name == expected.name, f"{which}: {got}"
        else:
            assert got == describe(expected), f"{which}: {difference.reason}"


def test_saving(tmp_path: Path) -> None:
    """List storages and pytree buffers save; loading needs no rows beforehand; mapped directories reopen after flush."""
    theirs, ours = library("torchrl"), library("ostinato")
    with pytest.raises(NotImplementedError):
        _listed(theirs, [torch.ones(2)]).dumps(tmp_path / "a")
    _listed(ours, [torch.ones(2), torch.zeros(3)]).dumps(tmp_path / "b")
    items = ours.ReplayBuffer(storage=ours.ListStorage(10))
    items.loads(tmp_path / "b")
    assert [len(item) for item in items.storage[:]] == [2, 3]

    for lib in (theirs, ours):
        _filled(lib, {"a": torch.arange(3)}).dumps(tmp_path / lib.name)
    with pytest.raises(RuntimeError):
        theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(5)).loads(tmp_path / "torchrl")
    fresh = ours.ReplayBuffer(storage=ours.LazyTensorStorage(5))
    fresh.loads(tmp_path / "ostinato")
    assert fresh["a"].tolist() == [0, 1, 2]


def test_reopening_mapped_files(tmp_path: Path) -> None:
    """TorchRL opens the files of an existing directory as empty; ours opens the rows that `flush` noted."""
    lengths = []
    for lib in (library("torchrl"), library("ostinato")):
        home = tmp_path / lib.name
        rb = _mapped(lib, rows(3), scratch_dir=str(home))
        if lib.name == "ostinato":
            rb.storage.flush()
        lengths.append(len(lib.ReplayBuffer(storage=lib.LazyMemmapStorage(5, scratch_dir=str(home), existsok=True))))
    assert lengths == [0, 3]


def test_draws_that_differ() -> None:
    """Shuffled epochs and cells of two dimensions are drawn in another way: equally fair, not the same numbers."""
    shuffled, cells = [], []
    for lib in (library("torchrl"), library("ostinato")):
        rb = _filled(
            lib,
            torch.arange(100),
            100,
            sampler=lib.SamplerWithoutReplacement(),
            generator=torch.Generator().manual_seed(0),
        )
        shuffled.append(rb.sample(100).tolist())
        grid = _grid(lib, generator=torch.Generator().manual_seed(0))
        cells.append(grid.sample(50).tolist())
    assert shuffled[0] != shuffled[1]
    assert sorted(shuffled[0]) == sorted(shuffled[1])
    assert cells[0] != cells[1]
    assert set(cells[0]) <= set(range(12))
    assert set(cells[1]) <= set(range(12))
