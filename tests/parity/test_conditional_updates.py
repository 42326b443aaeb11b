"""Conditional updates beside TorchRL's: the same rows are changed, left out and rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import library

CASES = [
    {},
    {"version": 3},
    {"version": torch.tensor([1, 2, 3, 4, 5, 6, 7])},
    {"version": torch.tensor([5, 5, 5, 2, 9, 9, 9]), "require_newer": True},
]


def _run(name: str, case: dict[str, Any]) -> list[Any]:
    lib = library(name)
    rb = lib.TensorDictReplayBuffer(
        storage=lib.LazyTensorStorage(6), writer=lib.TensorDictRoundRobinWriter(track_generations=True), batch_size=3
    )
    index = rb.extend(TensorDict({"x": torch.zeros(6), "v": torch.full((6, 1), 3)}, [6]))
    generation = rb.writer.generations_of(index)
    rb.extend(TensorDict({"x": torch.full((2,), -1.0), "v": torch.full((2, 1), 3)}, [2]))
    chosen = torch.tensor([0, 2, 3, 3, 5, 3, 1])
    more = {**case, "version_key": "v"} if case else {}
    result = rb.update_if_present(
        index=index[chosen], generation=generation[chosen], patch={"x": torch.arange(1.0, 8.0)}, **more
    )
    rejected = result.version_rejected
    counts = (result.updated_count, result.stale_count, result.version_rejected_count)
    fresh = (rb.writer.generations_of(index) != generation).tolist()
    again = rb.update_if_present(index=index, generation=generation, patch={"x": torch.ones(6)})
    return [
        result.updated.tolist(),
        None if rejected is None else rejected.tolist(),
        counts,
        fresh,
        rb[:]["v"].tolist(),
        again.updated.tolist(),
        rb.writer.generations_of(torch.tensor([-1])).tolist(),
    ]


@pytest.mark.parametrize("case", CASES)
def test_same_rows_are_changed(case: dict[str, Any]) -> None:
    assert _run("ostinato", case) == _run("torchrl", case)


def test_difference_generations_are_serial_numbers() -> None:
    found = {}
    for name in ("torchrl", "ostinato"):
        lib = library(name)
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(2), writer=lib.RoundRobinWriter(track_generations=True))
        rb.extend(torch.arange(3))
        found[name] = rb.writer.generations_of(torch.arange(2)).tolist()
    assert found == {"torchrl": [1, 0], "ostinato": [3, 2]}
