"""Which data comes in, and what `extend`, `add` and `sample` return of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from ._script import both, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    Makers: TypeAlias = dict[str, Callable[[], Any]]

BUFFERS = ["ReplayBuffer", "TensorDictReplayBuffer"]


@tensorclass
class _Pair:
    """Two fields."""

    a: torch.Tensor
    b: torch.Tensor


# mypy knows nothing of the constructor that the decorator adds
_pair: Any = _Pair


def _count(n: int) -> torch.Tensor:
    return torch.arange(n)


TABLES: Makers = {
    "tensor": lambda: _count(4),
    "list of tensors": lambda: [_count(2), _count(2) + 5],
    "tuple of tensors": lambda: (_count(3), torch.zeros(3, 2)),
    "list of dicts": lambda: [{"a": _count(2)}, {"a": _count(2) + 7}],
    "list of tensordicts": lambda: [TensorDict({"a": _count(2) + i}, []) for i in range(3)],
    "dict": lambda: {"a": _count(3), "b": {"c": (torch.zeros(3, 2), [_count(3), _count(3) + 1]), 30: torch.ones(3)}},
    "tensordict": lambda: TensorDict({"a": _count(3), "n": {"b": torch.zeros(3, 2)}}, [3]),
    "tensordict rows with a batch size": lambda: TensorDict({"a": _count(6).view(3, 2)}, [3, 2]),
    "tensorclass": lambda: _pair(_count(3), torch.zeros(3, 2), batch_size=[3]),
    "lazy stack": lambda: LazyStackedTensorDict(TensorDict({"a": 1.0}, []), TensorDict({"a": 2.0}, [])),
}
ROWS: Makers = {
    "tensor": lambda: _count(2),
    "0-d tensor": lambda: torch.tensor(3),
    "tuple": lambda: (_count(2), torch.tensor(1.0)),
    "document": lambda: {"a": torch.randn(3), "b": {"c": (torch.zeros(2), [torch.ones(1)])}, 30: -torch.ones(())},
    "tensordict": lambda: TensorDict({"a": 1.0, "n": {"b": torch.zeros(2)}}, []),
    "tensorclass": lambda: _pair(torch.tensor(1), torch.zeros(2), batch_size=[]),
}


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@both
def test_tables(lib, note, storage):
    for method, kinds in (("extend", TABLES), ("add", ROWS)):
        for make in kinds.values():
            rb = lib.ReplayBuffer(storage=getattr(lib, storage)(6), batch_size=3)
            for _ in range(2):
                getattr(rb, method)(make())
                rb[:]
                rb[0]
                rb.sample()
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(6), batch_size=3)
    rb.extend({**TABLES["dict"](), "none": torch.zeros(3, 0)})
    note([(type(key).__name__, key) for key in rb.sample()])


LISTS: Makers = {
    "tensors": lambda: [torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)],
    "one tensor": lambda: torch.arange(6).view(3, 2),
    "tensordicts": lambda: [rows(3)[i] for i in range(3)],
    "one tensordict": lambda: rows(3),
    "dicts of tensors": lambda: [{"a": torch.tensor(i), "b": {"c": torch.zeros(2)}} for i in range(3)],
    "tuples of tensors": lambda: [(torch.tensor(i), torch.zeros(2)) for i in range(3)],
}
OBJECTS: Makers = {
    "range": lambda: range(3),
    "mixed": lambda: ["a", 1, None],
    "arrays": lambda: [torch.zeros(2).numpy() for _ in range(3)],
    "set": lambda: {1, 2, 3},
    "ragged tensors": lambda: [torch.zeros(1), torch.zeros(2), torch.zeros(3)],
}


@pytest.mark.parametrize("kind", [*LISTS, *OBJECTS])
@both
def test_lists(lib, note, kind):
    options = {"collate_fn": lambda x: x} if kind in OBJECTS else {}
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=4, **options)
    rb.extend({**LISTS, **OBJECTS}[kind]())
    rb.sample(return_info=True)
    for index in (1, -1, slice(0, 2), slice(None, None, 2), torch.tensor([0, 2]), [2, 1]):
        rb[index]
    list(rb.storage)
    if kind in OBJECTS:
        rb.add("z")
        with note.refusals():
            rb.extend("abc")
            rb.extend(torch.tensor(3.0))


@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("buffer", BUFFERS)
@both
def test_writes_and_samples(lib, note, buffer, storage):
    rb = getattr(lib, buffer)(storage=getattr(lib, storage)(5), batch_size=4)
    for count, start in ((3, 0), (4, 10), (12, 20), (5, 40), (1, 50)):
        rb.extend(rows(count, start))
        len(rb)
        rb[:]
        rb.sample(return_info=True)
    for number in range(3):
        rb.add(rows(1, number)[0])
    sample = rb.sample(2)
    rb.storage[:]  # sampling writes nothing
    note((sample.is_locked, sample["obs"].device.type, rb.write_count))


@both
def test_defaults_and_the_index(lib, note):
    data = TensorDict({"index": torch.tensor([7, 8, 9]), "a": torch.zeros(3)}, [3])
    for buffer, writer in zip(BUFFERS, ("TensorDictRoundRobinWriter", "RoundRobinWriter"), strict=True):
        rb = getattr(lib, buffer)()
        note((rb.storage, rb.sampler, rb.writer, rb.storage.max_size, len(rb), bool(rb)))
        for parts in ({}, {"writer": getattr(lib, writer)()}):
            rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(5), batch_size=2, **parts)
            rb.extend(data.clone())
            rb[:]
            rb.sample(include_info=True)
    note(lib.TensorDictReplayBuffer(priority_key="p").priority_key)
