"""Deliberate differences from TorchRL, with reasons: sampling, parts, writers and state. See `docs/compat/torchrl.md`.

A failure here means that one of the libraries changed: then the page and this table need a look.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from ._differences import Difference, Fails, check, filled, in_order, listed, mapped
from ._script import library, rows

if TYPE_CHECKING:
    from pathlib import Path


def _epochs(lib: Any) -> list[list[list[int]]]:
    rb = in_order(lib, batch_size=2)
    rb.sample()
    return [[batch.tolist() for batch in rb], [batch.tolist() for batch in rb]]


def _write_in_an_epoch(lib: Any) -> list[list[int]]:
    rb = in_order(lib, batch_size=2)
    first = rb.sample().tolist()
    rb.extend(torch.tensor([50, 51]))
    return [first, rb.sample().tolist(), rb.sample().tolist()]


def _stacked(lib: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyStackStorage(10, stack_dim=1))
    rb.extend([TensorDict({"x": torch.arange(2)}, []) for _ in range(3)])
    return rb


def _after_set_storage(lib: Any) -> tuple[list[int], int]:
    rb = filled(lib, torch.arange(3))
    rb.set_storage(lib.LazyTensorStorage(5))
    return rb.extend(torch.arange(2)).tolist(), len(rb)


def _after_set_writer(lib: Any) -> list[int]:
    rb = filled(lib, torch.arange(3))
    rb.set_writer(lib.RoundRobinWriter())
    slots: list[int] = rb.extend(torch.arange(2)).tolist()
    return slots


def _inserted_function(lib: Any) -> list[int]:
    rb = filled(lib, torch.arange(3))
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
    return filled(lib, TensorDict({"k": torch.tensor(values)}, [len(values)]), 2, writer=writer)


def _new_key(rb: Any) -> list[str]:
    rb.write_all(rows(2).set("new", torch.ones(2)))
    return sorted(rb[:].keys())


def _pickled(rb: Any) -> int:
    return len(pickle.loads(pickle.dumps(rb)))


def _smaller(lib: Any) -> int:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5))
    rb.load_state_dict(filled(lib, rows(8), 10).state_dict())
    return len(rb)


TABLE = {
    # sampling
    "no rows asked for": Difference(
        "an empty batch trains nothing",
        lambda lib: len(filled(lib, torch.arange(3)).sample(0)),
        0,
        Fails("OptionError"),
    ),
    "another batch size with prefetch": Difference(
        "the batches are ready, of another size",
        lambda lib: len(filled(lib, torch.arange(3), batch_size=4, prefetch=2, generator=torch.Generator()).sample(2)),
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
    "stack_dim beyond the rows": Difference(
        "a dimension that rows do not have is a mistake",
        lambda lib: tuple(_stacked(lib).sample(3).batch_size),
        (3,),
        Fails("SchemaError"),
    ),
    "bare NonTensorData": Difference(
        "a table has fields with names",
        lambda lib: filled(lib, NonTensorData("a", batch_size=[3])) and None,
        None,
        Fails("SchemaError"),
    ),
    "state of compressed rows": Difference(
        "a state says how rows are compressed",
        lambda lib: "codec" in lib.CompressedListStorage(10).state_dict(),
        False,
        True,
    ),
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
        lambda lib: filled(lib, torch.arange(3), transform=_TimesTen())[:].tolist(),
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
        lambda lib: isinstance(filled(lib, {"a": torch.arange(3)}).state_dict(), dict),
        Fails("TypeError"),
        True,
    ),
    "pickling a mapped buffer": Difference(
        "pickling copies the rows", lambda lib: _pickled(mapped(lib, rows(3))), Fails("TypeError"), 3
    ),
    "a new field, mapped": Difference(
        "write_all brings it to every storage",
        lambda lib: _new_key(mapped(lib, rows(2))),
        ["next", "obs"],
        ["new", "next", "obs"],
    ),
    "slices of mapped rows": Difference(
        "a view may gain keys of its own", lambda lib: mapped(lib, rows(2))[:].is_locked, True, False
    ),
    "mapped tensors": Difference(
        "they are tensors over mapped memory",
        lambda lib: type(mapped(lib, torch.arange(3))[:]).__name__,
        "MemoryMappedTensor",
        "Tensor",
    ),
    "stats": Difference(
        "named and typed", lambda lib: type(lib.ReplayBuffer().stats()).__name__, "dict", "BufferStats"
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_difference(name: str) -> None:
    check(TABLE[name])


def test_saving(tmp_path: Path) -> None:
    """List storages and pytree buffers save, and loading needs no rows beforehand."""
    theirs, ours = library("torchrl"), library("ostinato")
    with pytest.raises(NotImplementedError):
        listed(theirs, [torch.ones(2)]).dumps(tmp_path / "a")
    listed(ours, [torch.ones(2), torch.zeros(3)]).dumps(tmp_path / "b")
    items = ours.ReplayBuffer(storage=ours.ListStorage(10))
    items.loads(tmp_path / "b")
    assert [len(item) for item in items.storage[:]] == [2, 3]

    for lib in (theirs, ours):
        filled(lib, {"a": torch.arange(3)}).dumps(tmp_path / lib.name)
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
        rb = mapped(lib, rows(3), scratch_dir=str(home))
        if lib.name == "ostinato":
            rb.storage.flush()
        lengths.append(len(lib.ReplayBuffer(storage=lib.LazyMemmapStorage(5, scratch_dir=str(home), existsok=True))))
    assert lengths == [0, 3]
