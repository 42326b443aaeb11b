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
    "lists of tensors": lambda: [[torch.tensor(i), torch.zeros(2)] for i in range(3)],
}
OBJECTS: dict[str, Callable[[], Any]] = {
    "range": lambda: range(3),
    "floats": lambda: [1.0, 2.0, 3.0],
    "strings": lambda: ["a", "b", "c"],
    "mixed": lambda: ["a", 1, None],
    "dicts of numbers": lambda: [{"a": 1}, {"a": 2}, {"a": 3}],
    "arrays": lambda: [torch.zeros(2).numpy() for _ in range(3)],
    "set": lambda: {1, 2, 3},
    "complex": lambda: [1j, 2j, 3j],
    "ragged tensors": lambda: [torch.zeros(1), torch.zeros(2), torch.zeros(3)],
}


@pytest.mark.parametrize("batch", BATCHES)
@both
def test_default_collate(lib: Any, note: Note, batch: str) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=4)
    note("extend", lambda: rb.extend(BATCHES[batch]()))
    note("sample", lambda: rb.sample(return_info=True))
    note("one row", lambda: rb[1])
    note("last row", lambda: rb[-1])
    for index in (slice(None), slice(0, 2), torch.tensor([0, 2]), [2, 1]):
        note(f"rb[{index}]", lambda: rb[index])
    note("storage", lambda: rb.storage[:])
    note("storage, one row", lambda: rb.storage[0])


@pytest.mark.parametrize("batch", OBJECTS)
@both
def test_any_object(lib: Any, note: Note, batch: str) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=4, collate_fn=lambda x: x)
    note("extend", lambda: rb.extend(OBJECTS[batch]()))
    note("sample", lambda: rb.sample(return_info=True))
    for index in (0, -1, slice(None), slice(1, None), slice(None, None, 2), torch.tensor([0, 2]), [2, 1]):
        note(f"rb[{index}]", lambda: rb[index])
    note("storage", lambda: list(rb.storage))
    note("add", lambda: rb.add("z"))
    note("length", lambda: len(rb))


RAGGED: dict[str, Callable[[int], TensorDict]] = {
    "lengths": lambda n: TensorDict({"x": torch.arange(n + 1), "y": torch.zeros(2)}, []),
    "batches": lambda n: TensorDict({"x": torch.arange(n + 1)}, [n + 1]),
    "nested": lambda n: TensorDict({"n": {"x": torch.arange(n + 1)}, "y": torch.zeros(2)}, []),
    "keys": lambda n: TensorDict({str(n): torch.zeros(2)}, []),
}


@pytest.mark.parametrize("kind", RAGGED)
@both
def test_tensordicts_of_different_shapes(lib: Any, note: Note, kind: str) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=4)
    rb.extend([RAGGED[kind](n) for n in range(3)])
    for name, read in {"sample": rb.sample, "slice": lambda: rb[0:3], "list": lambda: rb[[2, 0]]}.items():
        batch = read()
        note(f"{name}: kind", lambda: [type(batch).__name__, list(batch.batch_size)])
        note(f"{name}: rows", lambda: [row.to_dict() for row in batch.unbind(0)])


@both
def test_what_cannot_be_extended(lib: Any, note: Note) -> None:
    bad: list[Any] = ["abc", torch.tensor(3.0)]
    for data in bad:
        rb = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=2)
        note.refusal(f"extend {data!r}", lambda: rb.extend(data))
        note("nothing written", lambda: len(rb))


@both
def test_indices_out_of_range(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), collate_fn=lambda x: x)
    rb.extend(["a", "b", "c"])
    for index in (3, 7, 12, -4, torch.tensor([3])):
        note(f"rb[{index}]", lambda: rb[index])
    for name in (1.5, "a"):
        note.refusal(f"rb[{name!r}]", lambda: rb[name])
    empty = lib.ReplayBuffer(storage=lib.ListStorage(5))
    note.refusal("empty", lambda: empty[0])


@both
def test_assignment(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(10), collate_fn=lambda x: x)
    rb.extend([10, 11, 12, 13])
    for index, data in (
        (0, 20),
        (-1, 23),
        (slice(1, 3), [21, 22]),
        (torch.tensor([0, 2]), [30, 32]),
        ([1, 3], [31, 33]),
    ):

        def assign(index: Any = index, data: Any = data) -> object:
            rb[index] = data
            return rb.storage[:]

        note(f"rb[{index}] = {data}", assign)


@both
def test_wrap(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(3), collate_fn=lambda x: x)
    note("longer than the ring", lambda: rb.extend(range(8)))
    note("rows", lambda: rb.storage[:])
    note("two more", lambda: rb.extend([100, 101]))
    note("rows", lambda: rb[:])
    note("add", lambda: [rb.add(n) for n in range(200, 204)])
    note("rows", lambda: rb[:])


@both
def test_new_key_reaches_the_rows_written_only(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(5))
    rb.extend(rows(3))
    data = rb[:2]
    data["new"] = torch.ones(2)
    rb.write_all(data, end=2)
    note("with the key", lambda: rb[0])
    note("without", lambda: rb[2])
    note("rows that have it", lambda: rb[:2])


@both
def test_rows_may_differ(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.ListStorage(5), collate_fn=lambda x: x, batch_size=4)
    rb.extend([TensorDict({"a": torch.zeros(2)}, []), TensorDict({"b": torch.zeros(3)}, []), {"c": 1}, "d"])
    note("sample", lambda: rb.sample())
