"""Tensors that are more than numbers: gradients, subclasses, fake and meta tensors, and the transforms of torch."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
    Trajectory,
    TrajectoryReplayBuffer,
)
from ostinato.errors import KindError, UsageError

from .refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable


class Named(Tensor):
    """A subclass as they are made to carry a name."""


class Watching(Tensor):
    """A subclass that sees every function of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Wrapping(Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls: type[Self], inner: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        inner = tree_map(lambda x: x.held if isinstance(x, Wrapping) else x, (args, kwargs or {}))
        found = func(*inner[0], **inner[1])
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, found)


class Keeping(torch.autograd.Function):
    """A step of a graph that keeps an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: nn.Module) -> Tensor:
        ctx.kept = kept
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        del ctx
        return *grads, None


def base() -> Tensor:
    return torch.arange(12.0).view(4, 3)


MADE: dict[str, Callable[[], Tensor]] = {
    "result": lambda: nn.Parameter(base()) * 1,
    "subclass": lambda: base().as_subclass(Named),
    "subclass with a graph": lambda: (nn.Parameter(base()) * 1).as_subclass(Named),
    "function subclass": lambda: base().as_subclass(Watching),
}


def lazy(**options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(16), batch_size=4, **options)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_rows_are_stored_as_plain_numbers(make: Callable[[], Tensor]) -> None:
    rb = lazy()
    for _ in range(2):
        rb.extend({"x": make()})
        rb.add({"x": make()[0]})
    rb[0] = {"x": make()[1]}
    rb[1:3] = {"x": make()[:2]}
    rb[torch.tensor([3, 4])] = {"x": make()[2:]}
    rb.write_all({**rb[:], "late": make().repeat(3, 1)[:10]})
    for found in (rb.storage.columns[("x",)], rb[:]["x"], rb[torch.tensor([0])]["x"], rb.sample()["x"], rb[:]["late"]):  # type: ignore[attr-defined]
        assert type(found) is Tensor
        assert not found.requires_grad
        assert found.grad_fn is None
    assert rb[:]["x"][:5].tolist() == base()[[1, 0, 1, 2, 3]].tolist()


def test_rows_never_take_the_class_of_an_index() -> None:
    for ndim in (1, 2):
        rb = ReplayBuffer(storage=LazyTensorStorage(16, ndim=ndim), batch_size=4)
        rb.extend({"x": base() if ndim == 1 else base()[:, None]})
        for index in (torch.tensor([0, 1]), torch.tensor(1), torch.arange(len(rb)) < 2):
            assert type(rb[index.as_subclass(Named)]["x"]) is Tensor


def test_rows_of_lists_and_tensordicts_have_no_graph() -> None:
    make = MADE["subclass with a graph"]
    listed = ReplayBuffer(storage=ListStorage(8), batch_size=2)
    listed.extend([{"x": make()}, {"x": make()}])
    listed.add({"x": make()})
    assert not any(listed[i]["x"].requires_grad for i in range(3))
    rows = ReplayBuffer(storage=ListStorage(8), batch_size=2)
    rows.extend(TensorDict({"x": make()}, [4]))
    assert not rows[0]["x"].requires_grad
    td = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    td.extend(TensorDict({"x": make()}, [4]))
    assert type(td.sample()["x"]) is Tensor
    fixed = ReplayBuffer(storage=TensorStorage({"x": make()}), batch_size=2)
    assert not fixed.sample()["x"].requires_grad
    assert not fixed[0:2]["x"].requires_grad


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_no_graph_stays_alive(storage: Any) -> None:
    rb = ReplayBuffer(storage=storage(8), batch_size=2)
    ranked = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(8), batch_size=2)
    ranked.extend({"x": base()})
    kept = nn.Module()
    result: Tensor = Keeping.apply(nn.Parameter(base()), kept)  # type: ignore[no-untyped-call]
    node = weakref.ref(kept)
    del kept
    gc.collect()
    assert node() is not None
    rb.extend([{"x": result}] if storage is ListStorage else {"x": result})
    ranked.update_priority(torch.arange(4), result.sum(1))
    del result
    gc.collect()
    assert node() is None


@pytest.mark.usefixtures("needs_native")  # torch asks the subclass itself
@pytest.mark.parametrize("first", [True, False])
def test_tensors_without_memory_are_refused_before_anything_changes(*, first: bool) -> None:
    rb = lazy()
    if not first:
        rb.extend({"x": base()})
    for _ in range(2):
        with pytest.raises(KindError, match="field 'x' holds a Wrapping without memory of its own"):
            rb.extend({"x": Wrapping(base())})
        with FakeTensorMode(), pytest.raises(KindError, match="holds a FakeTensor without memory of its own"):
            rb.extend({"x": torch.ones(4, 3)})
    with pytest.raises(KindError, match="Wrapping"):
        TensorStorage({"x": Wrapping(base())})
    assert len(rb) == (0 if first else 4)
    rb.extend({"x": base()})
    rb.check()


def test_meta_tensors_are_refused_before_anything_changes() -> None:
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(16), batch_size=4)
    rb.extend({"x": base()})
    whole, real = torch.zeros(2, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int64)
    words = "an index must have values"
    raises(
        (lambda: rb.extend({"x": torch.ones(4, 3, device="meta")}), KindError, "meta tensor"),
        (lambda: rb[whole], KindError, f"{words}, got a tensor on the device meta"),
        (lambda: rb[(whole,)], KindError, words),
        (lambda: rb.update_priority(whole, 1.0), KindError, words),
        (lambda: rb.update_priority(real, torch.ones(2, device="meta")), KindError, "priorities must have values"),
        (lambda: rb.update_priority(real, torch.ones(2), whole), KindError, "generation must have values"),
    )
    assert len(rb) == 4
    rb.check()


# -- transforms --------------------------------------------------------------------------------------------------------

TRANSFORMS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "vmap": (r"torch.func \(vmap\)", lambda f: torch.func.vmap(f, randomness="different")(base())),
    "grad": (r"torch.func \(grad\)", lambda f: torch.func.grad(lambda x: f(x).sum())(base())),
    "jvp": (r"torch.func \(jvp\)", lambda f: torch.func.jvp(f, (base(),), (base(),))),
    "jacrev": (r"torch.func \(grad\)", lambda f: torch.func.jacrev(f)(base())),
    "functionalize": (r"torch.func \(functionalize\)", lambda f: torch.func.functionalize(f)(base())),
    "trace": ("torch.jit.trace", lambda f: torch.jit.trace(f, (base(),), check_trace=False)),  # type: ignore[no-untyped-call]
}


def uses(rb: Any, ensemble: Any, rollouts: Any) -> dict[str, Callable[[Tensor], Any]]:
    """What may be tried inside a transform."""
    return {
        "writing rows": lambda x: rb.extend({"x": x}),
        "sampling": lambda _: rb.sample(),
        "reading rows": lambda _: rb[0],
        "updating priorities": lambda x: rb.update_priority(0, x.sum()),
        "writing": lambda x: rb.__setitem__(0, {"x": x}),
        "sampling ": lambda _: ensemble.sample(),
        "adding trajectories": lambda x: rollouts.add_trajectories([Trajectory(rewards=x)]),
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("named", "transform"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_refused_and_leave_nothing_behind(named: str, transform: Callable[[Any], Any]) -> None:
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(16), batch_size=4)
    rb.extend({"x": base()})
    ensemble, rollouts = ReplayBufferEnsemble(rb, lazy(), p=[1.0, 0.0], batch_size=4), TrajectoryReplayBuffer()
    for what, use in uses(rb, ensemble, rollouts).items():

        def inside(x: Tensor, use: Callable[[Tensor], Any] = use) -> Tensor:
            use(x)
            return x * 2

        with pytest.raises(UsageError, match=rf"{what.strip()}.* inside {named} is not possible"):
            transform(inside)
    assert len(rb) == 4
    assert torch.equal(rb[:]["x"], base())
    assert rb.sample()["x"].shape == (4, 3)
    rb.check()
