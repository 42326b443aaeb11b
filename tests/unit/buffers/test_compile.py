"""`sample` and `extend` around and inside a compiled step: the same results; the native calls break the graph."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo as dynamo

from ostinato import LazyTensorStorage, ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    dynamo.reset()
    yield
    dynamo.reset()


def make(**options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(40), batch_size=4, generator=torch.Generator().manual_seed(0), **options
    )
    rb.extend({"a": torch.arange(20.0), "b": torch.arange(20)})
    return rb


def inside(rb: ReplayBuffer, x: Tensor) -> Tensor:
    y = x * 2 + 1
    rb.extend({"a": y, "b": y.to(torch.int64)})
    rb.add({"a": y[0], "b": y[1].to(torch.int64)})
    batch, info = rb.sample(return_info=True)
    return batch["a"] * 3 + batch["b"] + info["index"]  # type: ignore[no-any-return]


def test_a_compiled_step_does_what_the_plain_one_does():
    found = []
    for compiled in (False, True):
        rb = make(prefetch=2, transform=lambda batch: {**batch, "a": batch["a"] + 1})
        step = functools.partial(inside, rb)
        call = torch.compile(step, backend="eager") if compiled else step
        batches = [call(torch.arange(3.0) + i).tolist() for i in range(4)]
        found.append([batches, rb[:]["a"].tolist(), rb[:]["b"].tolist(), rb.stats().rows_drawn])
    assert found[0] == found[1]


def test_a_growing_buffer_does_not_recompile_and_calls_break_the_graph():
    """The number of rows must not be burnt into the graph."""
    rb = make()
    compiled = torch.compile(lambda x: inside(rb, x), backend="eager")
    compiled(torch.arange(3.0))
    compiled(torch.arange(3.0))
    before = dynamo.utils.counters["stats"]["unique_graphs"]
    assert 2 <= before <= 10, "the tensor work between the calls is compiled"
    for i in range(6):
        compiled(torch.arange(3.0) + i)
    assert dynamo.utils.counters["stats"]["unique_graphs"] - before <= 1
    with pytest.raises(dynamo.exc.Unsupported):
        torch.compile(lambda x: x + rb.sample()["a"].sum(), backend="eager", fullgraph=True)(torch.zeros(1))
