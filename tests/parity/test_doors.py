"""Which data comes in: kinds, nesting, root lists and tuples, and rows that do not fit the ones stored."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from ._script import Note, both

if TYPE_CHECKING:
    from collections.abc import Callable


@tensorclass
class Pair:
    """Two fields."""

    a: torch.Tensor
    b: torch.Tensor


def _count(n: int) -> torch.Tensor:
    return torch.arange(n)


# mypy knows nothing of the constructor that the decorator adds
_pair: Any = Pair


EXTEND: dict[str, Callable[[], Any]] = {
    "tensor": lambda: _count(4),
    "half precision": lambda: torch.zeros(4, 2, dtype=torch.float16),
    "list of 0-d tensors": lambda: [torch.tensor(1.0), torch.tensor(2.0)],
    "list of tensors": lambda: [_count(2), _count(2) + 5],
    "tuple of tensors": lambda: (_count(3), torch.zeros(3, 2)),
    "tuple of a list": lambda: ([_count(3)], _count(3)),
    "list of tuples": lambda: [(_count(2), torch.zeros(1)), (_count(2) + 1, torch.ones(1))],
    "list of dicts": lambda: [{"a": _count(2)}, {"a": _count(2) + 7}],
    "list of tensordicts": lambda: [TensorDict({"a": _count(2) + i}, []) for i in range(3)],
    "dict": lambda: {"a": _count(3), "b": {"c": torch.zeros(3, 2), 30: torch.ones(3)}},
    "dict with a list": lambda: {"a": _count(3), "l": [_count(3), _count(3) + 1]},
    "tensordict": lambda: TensorDict({"a": _count(3), "n": {"b": torch.zeros(3, 2)}}, [3]),
    "tensordict rows with a batch size": lambda: TensorDict({"a": _count(6).view(3, 2)}, [3, 2]),
    "tensorclass": lambda: _pair(_count(3), torch.zeros(3, 2), batch_size=[3]),
    "lazy stack": lambda: LazyStackedTensorDict(TensorDict({"a": 1.0}, []), TensorDict({"a": 2.0}, [])),
    "scalar bools": lambda: {"done": torch.tensor([True, False])},
    "non-contiguous": lambda: _count(12).view(3, 4).t(),
    "zero-size field": lambda: {"a": _count(3), "none": torch.zeros(3, 0)},
}
ADD: dict[str, Callable[[], Any]] = {
    "tensor": lambda: _count(2),
    "0-d tensor": lambda: torch.tensor(3),
    "tuple": lambda: (_count(2), torch.tensor(1.0)),
    "document": lambda: {"a": torch.randn(3), "b": {"c": (torch.zeros(2), [torch.ones(1)])}, 30: -torch.ones(())},
    "tensordict": lambda: TensorDict({"a": 1.0, "n": {"b": torch.zeros(2)}}, []),
    "tensorclass": lambda: _pair(torch.tensor(1), torch.zeros(2), batch_size=[]),
}
BAD_EXTEND: dict[str, Callable[[], Any]] = {
    "0-d tensor": lambda: torch.tensor(1.0),
    "empty dict": dict,
    "tensordict without a batch size": lambda: TensorDict({"a": _count(3)}, []),
    "ragged list": lambda: [_count(2), _count(3)],
    "ragged dict": lambda: {"a": _count(3), "b": _count(4)},
    "list of text": lambda: ["a", "b"],
    "text": lambda: "abc",
    "a number": lambda: 3,
}
BAD_ADD: dict[str, Callable[[], Any]] = {"text": lambda: "a"}


def _buffer(lib: Any, storage: str = "LazyTensorStorage") -> Any:
    return lib.ReplayBuffer(storage=getattr(lib, storage)(6), batch_size=3)


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("kind", EXTEND)
@both
def test_extend(lib: Any, note: Note, kind: str, storage: str) -> None:
    if (kind, storage) == ("zero-size field", "LazyMemmapStorage"):
        pytest.skip("TorchRL cannot map a field of no bytes; see test_differences")

    rb = _buffer(lib, storage)
    note("extend", lambda: rb.extend(EXTEND[kind]()))
    note("rows", lambda: rb[:])
    note("sample", lambda: rb.sample())
    note("one row", lambda: rb[0])
    note("again", lambda: rb.extend(EXTEND[kind]()))
    note("rows", lambda: rb[:])


@pytest.mark.parametrize("kind", ADD)
@both
def test_add(lib: Any, note: Note, kind: str) -> None:
    rb = _buffer(lib)
    note("add", lambda: rb.add(ADD[kind]()))
    note("rows", lambda: rb[:])
    note("sample", lambda: rb.sample())
    note("again", lambda: rb.add(ADD[kind]()))
    note("length", lambda: len(rb))


@pytest.mark.parametrize("kind", BAD_EXTEND)
@both
def test_extend_refused(lib: Any, note: Note, kind: str) -> None:
    rb = _buffer(lib)
    note.refusal("extend", lambda: rb.extend(BAD_EXTEND[kind]()))


@pytest.mark.parametrize("kind", BAD_ADD)
@both
def test_add_refused(lib: Any, note: Note, kind: str) -> None:
    rb = _buffer(lib)
    note.refusal("add", lambda: rb.add(BAD_ADD[kind]()))


MISFITS = {
    "other shape": ({"a": torch.zeros(2, 3)}, {"a": torch.ones(2, 4)}),
    "fewer dimensions": ({"a": torch.zeros(2, 3)}, {"a": torch.ones(2)}),
    "a column where numbers are": ({"a": torch.zeros(2)}, {"a": torch.ones(2, 1)}),
    "a fraction into int": ({"a": torch.zeros(2, dtype=torch.int64)}, {"a": torch.full((2,), 0.5)}),
    "complex into float": ({"a": torch.zeros(2)}, {"a": torch.ones(2, dtype=torch.complex64)}),
    "other nesting": ({"a": torch.zeros(2)}, {"a": {"x": torch.ones(2)}}),
}


@pytest.mark.parametrize("kind", MISFITS)
@both
def test_rows_that_do_not_fit(lib: Any, note: Note, kind: str) -> None:
    first, second = MISFITS[kind]
    rb = _buffer(lib)
    rb.extend(TensorDict(first, [2]))
    note.refusal("tensordict", lambda: rb.extend(TensorDict(second, [2])))
    rb = _buffer(lib)
    rb.extend(first)
    note.refusal("dict", lambda: rb.extend(second))


@both
def test_keys_of_a_dict_must_be_the_same(lib: Any, note: Note) -> None:
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    for first, second in ((one, two), (two, one)):
        rb = _buffer(lib)
        rb.extend(first)
        note.refusal(f"{list(first)} then {list(second)}", lambda: rb.extend(second))


@both
def test_order_of_keys_is_free(lib: Any, note: Note) -> None:
    rb = _buffer(lib)
    rb.extend({"b": _count(2), "a": _count(2) + 10})
    rb.extend({"a": _count(2) + 20, "b": _count(2) + 30})
    note("by name", lambda: rb[:])
    rb = _buffer(lib)
    rb.extend(TensorDict({"b": _count(2), "a": _count(2) + 10}, [2]))
    rb.extend(TensorDict({"a": _count(2) + 20, "b": _count(2) + 30}, [2]))
    note("by name, tensordict", lambda: rb[:])


@both
def test_kinds_of_keys_and_containers_come_back(lib: Any, note: Note) -> None:
    rb = _buffer(lib)
    rb.extend({"a": _count(3), "b": {"c": (torch.zeros(3, 2), [torch.ones(3)])}, 30: torch.zeros(3)})
    note("keys", lambda: [(type(key).__name__, key) for key in rb.sample()])
    note("containers", lambda: [type(rb.sample()["b"]["c"]).__name__, type(rb.sample()["b"]["c"][1]).__name__])
