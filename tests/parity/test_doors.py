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
    "list of tensors": lambda: [_count(2), _count(2) + 5],
    "tuple of tensors": lambda: (_count(3), torch.zeros(3, 2)),
    "list of dicts": lambda: [{"a": _count(2)}, {"a": _count(2) + 7}],
    "list of tensordicts": lambda: [TensorDict({"a": _count(2) + i}, []) for i in range(3)],
    "dict": lambda: {"a": _count(3), "b": {"c": torch.zeros(3, 2), 30: torch.ones(3)}},
    "dict with a list": lambda: {"a": _count(3), "l": [_count(3), _count(3) + 1]},
    "tensordict": lambda: TensorDict({"a": _count(3), "n": {"b": torch.zeros(3, 2)}}, [3]),
    "tensordict rows with a batch size": lambda: TensorDict({"a": _count(6).view(3, 2)}, [3, 2]),
    "tensorclass": lambda: _pair(_count(3), torch.zeros(3, 2), batch_size=[3]),
    "lazy stack": lambda: LazyStackedTensorDict(TensorDict({"a": 1.0}, []), TensorDict({"a": 2.0}, [])),
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


def _buffer(lib: Any, storage: str = "LazyTensorStorage") -> Any:
    return lib.ReplayBuffer(storage=getattr(lib, storage)(6), batch_size=3)


@pytest.mark.parametrize("kind", EXTEND)
@both
def test_extend(lib: Any, note: Note, kind: str) -> None:
    storages = ["LazyTensorStorage", "LazyMemmapStorage"]
    for storage in storages[: 1 if kind == "zero-size field" else 2]:  # TorchRL cannot map a field of no bytes
        rb = _buffer(lib, storage)
        for _ in range(2):
            note("extend", lambda: rb.extend(EXTEND[kind]()))
            note("rows", lambda: rb[:])
            note("sample", lambda: rb.sample())
            note("one row", lambda: rb[0])


@pytest.mark.parametrize("kind", ADD)
@both
def test_add(lib: Any, note: Note, kind: str) -> None:
    rb = _buffer(lib)
    for _ in range(2):
        note("add", lambda: rb.add(ADD[kind]()))
        note("rows", lambda: rb[:])
        note("sample", lambda: rb.sample())


@both
def test_what_is_refused(lib: Any, note: Note) -> None:
    for kind, make in BAD_EXTEND.items():
        note.refusal(kind, lambda: _buffer(lib).extend(make()))
    note.refusal("add of text", lambda: _buffer(lib).add("a"))


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "other shape": ({"a": torch.zeros(2, 3)}, {"a": torch.ones(2, 4)}),
    "a column where numbers are": ({"a": torch.zeros(2)}, {"a": torch.ones(2, 1)}),
    "a fraction into int": ({"a": torch.zeros(2, dtype=torch.int64)}, {"a": torch.full((2,), 0.5)}),
    "other nesting": ({"a": torch.zeros(2)}, {"a": {"x": torch.ones(2)}}),
    "fewer keys": ({"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.zeros(2)}),
    "more keys": ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.ones(2)}),
}


@both
def test_rows_that_do_not_fit(lib: Any, note: Note) -> None:
    for kind, (first, second) in MISFITS.items():
        if "keys" not in kind:  # TorchRL takes TensorDicts with other keys: see test_differences_data.py
            rb = _buffer(lib)
            rb.extend(TensorDict(first, [2]))
            note.refusal(f"tensordict, {kind}", lambda: rb.extend(TensorDict(second, [2])))
        plain = _buffer(lib)
        plain.extend(first)
        note.refusal(f"dict, {kind}", lambda: plain.extend(second))


@both
def test_kinds_of_keys_and_containers_come_back(lib: Any, note: Note) -> None:
    rb = _buffer(lib)
    rb.extend({"a": _count(3), "b": {"c": (torch.zeros(3, 2), [torch.ones(3)])}, 30: torch.zeros(3)})
    note("keys", lambda: [(type(key).__name__, key) for key in rb.sample()])
    note("containers", lambda: [type(rb.sample()["b"]["c"]).__name__, type(rb.sample()["b"]["c"][1]).__name__])
