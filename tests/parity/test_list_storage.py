"""ListStorage: what comes in, what a batch is made of, and how rows are addressed."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, rows

if TYPE_CHECKING:
    from collections.abc import Callable


BATCHES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: [torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)],
    "one tensor": lambda: torch.arange(6).view(3, 2),
    "tensordicts": lambda: [rows(3)[i] for i in range(3)],
    "one tensordict": lambda: rows(3),
    "dicts of tensors": lambda: [{"a": torch.tensor(i), "b": {"c": torch.zeros(2)}} for i in range(3)],
    "tuples of tensors": lambda: [(torch.tensor(i), torch.zeros(2)) for i in range(3)],
}
OBJECTS: dict[str, Callable[[], Any]] = {
    "range": lambda: range(3),
    "mixed": lambda: ["a", 1, None],
    "arrays": lambda: [torch.zeros(2).numpy() for _ in range(3)],
    "set": lambda: {1, 2, 3},
    "ragged tensors": lambda: [torch.zeros(1), torch.zeros(2), torch.zeros(3)],
}


@pytest.mark.parametrize("batch", BATCHES)
@both
def test_default_collate(lib: Any, note: Note, batch: str) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=4)
    note("extend", lambda: rb.extend(BATCHES[batch]()))
    note("sample", lambda: rb.sample(return_info=True))
    for index in (1, -1, slice(0, 2), torch.tensor([0, 2]), [2, 1]):
        note(f"rb[{index}]", lambda: rb[index])
    note("storage", lambda: (rb.storage[:], rb.storage[0]))


@pytest.mark.parametrize("batch", OBJECTS)
@both
def test_any_object(lib: Any, note: Note, batch: str) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=4, collate_fn=lambda x: x)
    note("extend", lambda: rb.extend(OBJECTS[batch]()))
    note("sample", lambda: rb.sample(return_info=True))
    for index in (0, -1, slice(1, None), slice(None, None, 2), torch.tensor([0, 2]), [2, 1]):
        note(f"rb[{index}]", lambda: rb[index])
    note("storage", lambda: list(rb.storage))
    note("add", lambda: (rb.add("z"), len(rb)))
    for bad in ("abc", torch.tensor(3.0)):
        note.refusal("no batch", lambda: rb.extend(bad))


RAGGED: dict[str, Callable[[int], TensorDict]] = {
    "lengths": lambda n: TensorDict({"n": {"x": torch.arange(n + 1)}, "y": torch.zeros(2)}, []),
    "batches": lambda n: TensorDict({"x": torch.arange(n + 1)}, [n + 1]),
    "keys": lambda n: TensorDict({str(n): torch.zeros(2)}, []),
}


@both
def test_tensordicts_of_different_shapes(lib: Any, note: Note) -> None:
    for kind, make in RAGGED.items():
        rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=4)
        rb.extend([make(n) for n in range(3)])
        for batch in (rb.sample(), rb[0:3], rb[[2, 0]]):
            note(f"{kind}: class", lambda: [type(batch).__name__, list(batch.batch_size)])
            note(f"{kind}: rows", lambda: [row.to_dict() for row in batch.unbind(0)])
