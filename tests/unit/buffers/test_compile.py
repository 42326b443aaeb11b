"""`sample` and `extend` around and inside a compiled step: the same results; the native calls break the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo as dynamo
from tensordict import TensorDict

from ostinato import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, TensorDictReplayBuffer

from ...tags import STORAGES, buffer, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

pytestmark = pytest.mark.usefixtures("backend")


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


def run(step: Callable[[ReplayBuffer, Tensor], Tensor], wrap: Callable[[Any], Any], **options: Any) -> list[Any]:
    rb = make(**options)
    call = wrap(lambda x: step(rb, x))
    out = [call(torch.arange(3.0) + i).tolist() for i in range(4)]
    return [*out, rb[:]["a"].tolist(), rb[:]["b"].tolist(), rb.stats().rows_drawn]


def around(rb: ReplayBuffer, x: Tensor) -> Tensor:
    rb.extend({"a": x, "b": x.to(torch.int64)})
    return torch.compile(lambda a: a * 2 + 1, backend="eager")(rb.sample()["a"])  # type: ignore[no-any-return]


def inside(rb: ReplayBuffer, x: Tensor) -> Tensor:
    y = x * 2 + 1
    rb.extend({"a": y, "b": y.to(torch.int64)})
    rb.add({"a": y[0], "b": y[1].to(torch.int64)})
    batch, info = rb.sample(return_info=True)
    return batch["a"] * 3 + batch["b"] + info["index"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", [around, inside])
@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"transform": lambda batch: {**batch, "a": batch["a"] + 1}}])
def test_a_compiled_step_does_what_the_plain_one_does(step: Any, options: dict[str, Any]) -> None:
    plain = run(step, lambda f: f, **options)
    compiled = run(step, lambda f: torch.compile(f, backend="eager"), **options)
    if "prefetch" in options:  # whether a queued batch was made before or after a write is a matter of time
        plain, compiled = plain[4:], compiled[4:]
    assert plain == compiled


def test_sampling_without_replacement_inside_a_compiled_step() -> None:
    results = []
    for compiled in (False, True):
        rb = make(sampler=SamplerWithoutReplacement())
        step = lambda rb=rb: rb.sample()["b"] + 0  # noqa: E731
        call = torch.compile(step, backend="eager") if compiled else step
        results.append([call().tolist() for _ in range(10)])
    assert results[0] == results[1]
    assert sorted(i for batch in results[1][:5] for i in batch) == list(range(20))


def test_tensordicts_inside_a_compiled_step() -> None:
    results = []
    for compiled in (False, True):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40), batch_size=4, generator=torch.Generator().manual_seed(0)
        )
        rb.extend(TensorDict({"a": torch.arange(20.0)}, [20]))

        def step(x: Tensor, rb: TensorDictReplayBuffer = rb) -> Tensor:
            rb.extend(TensorDict({"a": x * 2}, [3]))
            batch = rb.sample()
            return batch["a"] + batch["index"]  # type: ignore[no-any-return]

        call = torch.compile(step, backend="eager") if compiled else step
        results.append([call(torch.arange(3.0)).tolist() for _ in range(4)])
    assert results[0] == results[1]


@pytest.mark.parametrize("storage", list(STORAGES))
def test_every_storage_serves_a_compiled_step(storage: str) -> None:
    rb = buffer(storage, 10, batch_size=4)
    fill(rb, range(10))
    compiled = torch.compile(lambda: rb.sample()["id"] * 1, backend="eager")
    for _ in range(3):
        assert set(compiled().tolist()) <= set(range(10))
    fill(rb, range(10, 20))
    assert set(compiled().tolist()) <= set(range(10, 20)), "the compiled step keeps old rows"


def test_a_growing_buffer_does_not_recompile_at_every_step() -> None:
    """The number of rows must not be burnt into the graph."""
    rb = make()
    compiled = torch.compile(lambda x: inside(rb, x), backend="eager")
    compiled(torch.arange(3.0))
    compiled(torch.arange(3.0))
    before = dynamo.utils.counters["stats"]["unique_graphs"]
    for i in range(6):
        compiled(torch.arange(3.0) + i)
    assert dynamo.utils.counters["stats"]["unique_graphs"] - before <= 1


def test_graph_breaks_are_few_and_where_the_docs_say() -> None:
    """`extend` and `sample` each break the graph; the tensor work between them is compiled."""
    rb = make()
    explained = dynamo.explain(lambda x: inside(rb, x))(torch.arange(3.0))
    assert 1 <= explained.graph_break_count <= 9
    assert explained.graph_count >= 2


def test_what_is_sampled_can_be_learnt_from() -> None:
    rb = make()
    model = torch.nn.Linear(1, 1)

    def step() -> Tensor:
        batch = rb.sample()
        loss = model(batch["a"][:, None]).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    torch.compile(step, backend="eager")()
    assert model.weight.grad is not None


def test_a_full_graph_is_refused_since_each_call_breaks_it() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend({"obs": torch.ones(8, 2)})

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + rb.sample()["obs"].sum()  # type: ignore[no-any-return]

    with pytest.raises(dynamo.exc.Unsupported):
        torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1))
