"""The compiled quick check of a batch: addresses for plain leaves of the expected form, None for all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
