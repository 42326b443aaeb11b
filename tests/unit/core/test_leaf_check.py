"""The compiled quick check of a batch: addresses for plain leaves of the expected form, None for all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ostinato._backend import backend

native = backend.native
pytestmark = pytest.mark.skipif(native is None, reason="the native extension is switched off or not installed")


def check(values: list[Any], form: list[Tensor] | None = None) -> list[int] | None:
    """Check against the form that other tensors have (by default the values' own)."""
    form = values if form is None else form
    assert native is not None
    shapes = [torch.Size(x.shape) for x in form]
    found: list[int] | None = native.check_leaves(values, [x.dtype for x in form], shapes, Tensor)
    return found


class Wrapped(Tensor):
    """A subclass, whose memory may mean something else."""


def odd_leaves() -> list[tuple[str, Any]]:
    """Everything that looks like float32 [2, 3] and is not plain memory of that form."""
    plain = torch.zeros(2, 3)
    freed = torch.zeros(2, 3)
    freed.untyped_storage().resize_(0)
    return [
        ("subclass", plain.as_subclass(Wrapped)),
        ("parameter", torch.nn.Parameter(plain.clone(), requires_grad=False)),
        ("gradient", torch.zeros(2, 3, requires_grad=True)),
        ("strided", torch.zeros(3, 2).t()),
        ("expanded", torch.zeros(1, 3).expand(2, 3)),
        ("negative view", torch._neg_view(plain)),
        ("meta", torch.zeros(2, 3, device="meta")),
        ("sparse", plain.to_sparse()),
        ("zero tensor", torch._efficientzerotensor((2, 3))),
        ("freed memory", freed),
        ("nested", torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])),
        ("array", np.zeros((2, 3), np.float32)),
        ("none", None),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_odd_leaves_give_none() -> None:
    plain = torch.zeros(2, 3)
    for other in (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3, 1)):
        assert check([plain, other], [plain, plain]) is None
    for name, leaf in odd_leaves():
        for values in ([plain, leaf], [leaf, plain]):
            assert check(values, [plain, plain]) is None, name
            assert check([plain]) == [plain.data_ptr()], f"no error is left behind by: {name}"
    found = torch.vmap(lambda x: x if check([x]) is None else x + 1)(plain)
    assert torch.equal(found, plain)
    assert check([torch.zeros(0, 3)]) is None, "left to the full check"
    assert check([]) == []


def test_wrong_arguments_raise_and_other_shapes_and_types_do_no_harm() -> None:
    assert native is not None
    x = torch.zeros(2)
    for values, dtypes, shapes in (([x], [], [x.shape]), ([x], [x.dtype], []), ([], [x.dtype], [x.shape])):
        with pytest.raises(ValueError, match=r"^values, dtypes and shapes must have the same length$"):
            native.check_leaves(values, dtypes, shapes, Tensor)
    for wrong, error in ((int, AttributeError), (x, TypeError)):
        with pytest.raises(error):
            native.check_leaves([], [], [], wrong)
    base = torch.arange(24.0).view(4, 6)
    assert native.check_leaves([base[1:3]], [torch.float32], [(2, 6)], Tensor) == [base.data_ptr() + 24]
    assert native.check_leaves([base], [torch.float32], [[4, 6]], Tensor) is None
    wrapped = x.as_subclass(Wrapped)
    assert native.check_leaves([wrapped], [torch.float32], [x.shape], Wrapped) == [wrapped.data_ptr()]
    assert check([x, torch.zeros(3)]) is not None


class Rude(TorchFunctionMode):
    """Runs Python code within the check: raises, or empties the list that is being read."""

    def __init__(self, values: list[Tensor], error: type[BaseException] | None) -> None:
        super().__init__()
        self.values = values
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Be rude before the answer."""
        self.values.clear()
        if self.error is not None:
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", [None, ValueError, MemoryError])
def test_code_run_by_torch_in_between_does_no_harm(error: type[BaseException] | None) -> None:
    assert native is not None
    values = [torch.zeros(2), torch.zeros(2)]
    dtypes, shapes = [torch.float32] * 2, [torch.Size([2])] * 2
    with Rude(values, error):
        assert native.check_leaves(values, dtypes, shapes, Tensor) is None
    with pytest.raises(KeyboardInterrupt), Rude([*values], KeyboardInterrupt):
        native.check_leaves([torch.zeros(2)], dtypes[:1], shapes[:1], Tensor)
