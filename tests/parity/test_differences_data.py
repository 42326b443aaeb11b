"""Deliberate differences from TorchRL, with reasons: data and indices. See `docs/compat/torchrl.md`.

A failure here means that one of the libraries changed: then the page and this table need a look.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ._differences import Difference, Fails, check, filled, grid, listed, mapped
from ._script import rows


def _assign(rb: Any, index: Any, data: Any, key: str = "obs") -> list[float]:
    rb[index] = data
    values: list[float] = rb[:][key].tolist()
    return values


def _rejected_length(lib: Any) -> int:
    rb = filled(lib, torch.zeros(2, 3))
    with pytest.raises((RuntimeError, ValueError)):
        rb.extend(torch.zeros(2, 4))
    return len(rb)


TABLE = {
    # data that comes in
    "numbers in a list storage": Difference(
        "the documentation prints tensor([4, 9, 3, 0, 3]) for this example; TorchRL 0.14 has no collation for numbers",
        lambda lib: listed(lib, range(10)).sample(5).tolist(),
        Fails("TypeError"),
        [4, 9, 3, 0, 3],
    ),
    "iterators in a list storage": Difference(
        "the documentation calls the argument an iterable",
        lambda lib: listed(lib, (number for number in range(3))).storage[:],
        Fails("TypeError"),
        [0, 1, 2],
    ),
    "numpy arrays": Difference(
        "arrays are as fixed in shape as tensors",
        lambda lib: filled(lib, {"a": np.arange(3)})["a"].tolist(),
        Fails("AttributeError"),
        [0, 1, 2],
    ),
    "a list of numbers": Difference(
        "a root list is a stack of values, as the documentation says",
        lambda lib: filled(lib, [1, 2, 3])[:].tolist(),
        Fails("RuntimeError"),
        [1, 2, 3],
    ),
    "a dict for tensordict rows": Difference(
        "the fields are the same ones",
        lambda lib: len(filled(lib, rows(2)).extend({"obs": torch.zeros(2), "next": {"obs": torch.zeros(2)}})),
        Fails("ValueError"),
        2,
    ),
    "float64 after float32": Difference(
        "NumPy and Gymnasium loops write float64; the table of docs/casts.md says what fits",
        lambda lib: filled(lib, torch.zeros(1)).extend(torch.ones(2, dtype=torch.float64)).tolist(),
        Fails("RuntimeError"),
        [1, 2],
    ),
    "whole numbers into integers": Difference(
        "values that a dtype holds exactly fit",
        lambda lib: filled(lib, torch.zeros(1, dtype=torch.int64)).extend(torch.ones(2)).tolist(),
        Fails("RuntimeError"),
        [1, 2],
    ),
    "no rows": Difference(
        "loops over environments come to steps in which no row is written",
        lambda lib: filled(lib, torch.zeros(1)).extend(torch.zeros(0)).tolist(),
        Fails("RuntimeError"),
        [],
    ),
    "an empty list in a list storage": Difference(
        "as in a tensor storage",
        lambda lib: listed(lib, [1]).extend([]).tolist(),
        Fails("RuntimeError"),
        [],
    ),
    "nothing at all": Difference(
        "it wrote nothing and said so nowhere", lambda lib: len(filled(lib, None)), 0, Fails("KindError")
    ),
    "a missing field": Difference(
        "such rows would show what memory held",
        lambda lib: len(filled(lib, rows(2)).extend(rows(2).exclude("obs"))),
        2,
        Fails("KeyMissingError"),
    ),
    "an unknown field": Difference(
        "older rows would get zeros that nobody wrote; write_all adds fields on purpose",
        lambda lib: len(filled(lib, rows(2)).extend(rows(2).set("x", torch.ones(2)))),
        2,
        Fails("KeyMissingError"),
    ),
    "a shape that broadcasts": Difference(
        "one value per row is not three",
        lambda lib: len(filled(lib, torch.zeros(2, 3)).extend(torch.zeros(2, 1))),
        2,
        Fails("SchemaError"),
    ),
    "length after a refused batch": Difference("all or nothing: garbage rows could be sampled", _rejected_length, 4, 2),
    "a field of no bytes, mapped": Difference(
        "files of no bytes cannot be mapped, and need not be",
        lambda lib: len(mapped(lib, {"none": torch.zeros(2, 0)})),
        Fails("ValueError"),
        2,
    ),
    "lists of tensordicts in a tensordict buffer": Difference(
        "a root list is a stack of values, as the documentation says",
        lambda lib: len(filled(lib, [rows(1)[0]], buffer="TensorDictReplayBuffer")),
        Fails("ValueError"),
        1,
    ),
    # rows by index
    "the index of tensordict rows": Difference(
        "it is where a row lies, not data: samples carry it, the storage does not keep it",
        lambda lib: sorted(filled(lib, rows(2), buffer="TensorDictReplayBuffer")[:].keys()),
        ["index", "next", "obs"],
        ["next", "obs"],
    ),
    "rb[:] = rows present": Difference(
        "the documentation calls it equivalent to write_all",
        lambda lib: _assign(filled(lib, rows(3)), slice(None), rows(3, 50)),
        Fails("RuntimeError"),
        [50.0, 51.0, 52.0],
    ),
    "rb[-1] =": Difference(
        "the last row present, as in reading; not the last slot",
        lambda lib: _assign(filled(lib, rows(3)), -1, rows(1, 50)[0]),
        [0.0, 1.0, 2.0],
        [0.0, 1.0, 50.0],
    ),
    "writing past the length": Difference(
        "no reader could ever see that row",
        lambda lib: _assign(filled(lib, rows(3)), 4, rows(1, 50)[0]),
        [0.0, 1.0, 2.0],
        Fails("SlotError"),
    ),
    "writing by mask": Difference(
        "the mask that reads them writes them",
        lambda lib: _assign(filled(lib, rows(3)), torch.tensor([True, False, True]), rows(2, 50)),
        Fails("IndexError"),
        [50.0, 1.0, 51.0],
    ),
    "one number for a whole row": Difference(
        "it would fill every field",
        lambda lib: _assign(filled(lib, rows(3)), 0, 7.0),
        [7.0, 1.0, 2.0],
        Fails("SchemaError"),
    ),
    "masks of a list storage": Difference(
        "a mask chooses rows",
        lambda lib: listed(lib, ["a", "b", "c"]).storage[torch.tensor([True, False, True])],
        ["b", "a", "b"],
        ["a", "c"],
    ),
    "a list storage row past the end": Difference(
        "assignment replaces, add appends",
        lambda lib: listed(lib, ["a"]).__setitem__(1, "b"),
        None,
        Fails("SlotError"),
    ),
    "an index inside rows": Difference(
        "rb[...] chooses rows, whatever they are made of",
        lambda lib: int(filled(lib, torch.arange(6).view(3, 2))[1, 1]),
        3,
        Fails("SlotError"),
    ),
    "floats as an index": Difference(
        "a slip", lambda lib: filled(lib, torch.arange(3))[torch.tensor([1.0])].tolist(), [1], Fails("KindError")
    ),
    "a lane": Difference(
        "with ndim=2 an int is a lane, as in rb[:]",
        lambda lib: grid(lib)[0].tolist(),
        Fails("IndexError"),
        [0, 1, 2, 3],
    ),
    "a step for tensordict buffers": Difference(
        "add writes one step of all lanes, as the documentation's example does",
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
        lambda lib: tuple(filled(lib, torch.zeros(2, 4), dim_extend=1)[:].shape),
        (2, 4),
        (4, 2),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_difference(name: str) -> None:
    check(TABLE[name])
