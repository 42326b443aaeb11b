"""Tensors that are more than numbers: gradients, subclasses, fake and meta tensors, and the transforms of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Trajectory,
    TrajectoryReplayBuffer,
)
from ostinato.errors import KindError, UsageError


class Named(Tensor):
    """A subclass as they are made to carry a name."""


class Watching(Tensor):
    """A subclass that sees every function of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def base() -> Tensor:
    return torch.arange(12.0).view(4, 3)


MADE: dict[str, Any] = {
    "result": lambda: nn.Parameter(base()) * 1,
    "subclass with a graph": lambda: (nn.Parameter(base()) * 1).as_subclass(Named),
    "function subclass": lambda: base().as_subclass(Watching),
}


def lazy(**options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(16), batch_size=4, **options)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_rows_are_stored_as_plain_numbers(make):
    rb = lazy()
    for _ in range(2):
        rb.extend({"x": make()})
        rb.add({"x": make()[0]})
    rb[0] = {"x": make()[1]}
    rb[1:3] = {"x": make()[:2]}
    rb[torch.tensor([3, 4])] = {"x": make()[2:]}
    rb.write_all({**rb[:], "late": make().repeat(3, 1)[:10]})
    named = torch.tensor([0]).as_subclass(Named)
    for found in (rb.storage.columns[("x",)], rb[:]["x"], rb[named]["x"], rb.sample()["x"], rb[:]["late"]):  # type: ignore[attr-defined]
        assert type(found) is Tensor
        assert not found.requires_grad
        assert found.grad_fn is None
    assert rb[:]["x"][:5].tolist() == base()[[1, 0, 1, 2, 3]].tolist()


@pytest.mark.usefixtures("needs_native")  # torch asks the subclass itself
@pytest.mark.parametrize("first", [True, False])
def test_tensors_without_memory_are_refused_before_anything_changes(*, first):
    rb = lazy()
    if not first:
        rb.extend({"x": base()})
    for _ in range(2):
        with FakeTensorMode(), pytest.raises(KindError, match="'x' holds a FakeTensor without memory of its own"):
            rb.extend({"x": torch.ones(4, 3)})
    assert len(rb) == (0 if first else 4)
    rb.extend({"x": base()})
    with pytest.raises(KindError):
        rb[torch.zeros(2, dtype=torch.int64, device="meta")]
    rb.check()


# -- transforms --------------------------------------------------------------------------------------------------------

TRANSFORMS: dict[str, Any] = {
    "vmap": (r"torch.func \(vmap\)", lambda f: torch.func.vmap(f, randomness="different")(base())),
    "grad": (r"torch.func \(grad\)", lambda f: torch.func.grad(lambda x: f(x).sum())(base())),
    "trace": ("torch.jit.trace", lambda f: torch.jit.trace(f, (base(),), check_trace=False)),  # type: ignore[no-untyped-call]
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("named", "transform"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_refused_and_leave_nothing_behind(named, transform):
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(16), batch_size=4)
    rb.extend({"x": base()})
    ensemble, rollouts = ReplayBufferEnsemble(rb, lazy(), p=[1.0, 0.0], batch_size=4), TrajectoryReplayBuffer()
    uses: list[Any] = [
        ("writing rows", lambda x: rb.extend({"x": x})),
        ("sampling", lambda _: rb.sample()),
        ("reading rows", lambda _: rb[0]),
        ("updating priorities", lambda x: rb.update_priority(0, x.sum())),
        ("writing", lambda x: rb.__setitem__(0, {"x": x})),
        ("sampling", lambda _: ensemble.sample()),
        ("adding trajectories", lambda x: rollouts.add_trajectories([Trajectory(rewards=x)])),
    ]
    for what, use in uses:
        with pytest.raises(UsageError, match=rf"{what}.* inside {named} is not possible"):
            transform(lambda x, use=use: (use(x), x * 2)[1])
    assert torch.equal(rb[:]["x"], base())
    assert rb.sample()["x"].shape == (4, 3)
    rb.check()
