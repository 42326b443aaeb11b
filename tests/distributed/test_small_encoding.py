"""The encoding of small data."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from ostinato.distributed.serialization import decode_small, encode_small

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 (as users write it)
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.builds(lambda shape, dtype: (torch.rand(shape) * 9).to(dtype), shapes, st.sampled_from(DTYPES))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
leaves = tensors | plain
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4)
        | st.lists(inner, min_size=1, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | tensors.map(lambda tensor: TensorDict({"a": tensor[None], "b": {"c": tensor[None] + 0}}, [1]))
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, TensorDict):
        return a.batch_size == b.batch_size and a.device == b.device and same(dict(a.items()), dict(b.items()))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(data=trees)
def test_trees_are_unchanged(data: Any) -> None:
    encoded = encode_small(data)
    assert encoded is not None
    assert same(decode_small(encoded), data)


def test_decoded_tensors_are_writable() -> None:
    encoded = encode_small({"flags": torch.zeros(3, dtype=torch.bool), "x": torch.zeros(5, dtype=torch.float64)})
    assert encoded is not None
    one, other = decode_small(encoded), decode_small(encoded)
    one["x"] += 1
    one["flags"][:] = True
    assert float(other["x"].sum()) == 0.0
    assert not bool(other["flags"].any())
    assert one["x"].data_ptr() % 8 == 0


def test_views_are_encoded_as_their_values() -> None:
    base = torch.arange(60.0).reshape(6, 10)
    for view in (base.T, base[::2], base[:, 3:4], base[0].expand(4, 10)):
        encoded = encode_small(view)
        assert encoded is not None
        assert torch.equal(decode_small(encoded), view)


SHARED = torch.ones(3)


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(100_000, dtype=torch.uint8),
        [torch.zeros(10_000, dtype=torch.float64), torch.zeros(10_000)],
        [SHARED, SHARED],
        "long" * 10_000,
        list(range(2000)),
        Pair(1, 2),
        b"bytes",
        object,
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.nn.Parameter(torch.ones(3)),
        TensorDict({"x": torch.ones(3), "name": "abc"}, [3]),
        TensorDict({"x": torch.ones(3)}, [3], names=["time"]),
        LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}, []), TensorDict({"x": torch.ones(3)}, [])),
        {("a", "b"): torch.ones(3)},
    ],
)
def test_other_data_is_not_encoded(data: Any) -> None:
    assert encode_small(data) is None
    assert encode_small({"inside": [data]}) is None


def test_recursive_data_is_not_encoded() -> None:
    data: list[Any] = []
    data.append(data)
    assert encode_small(data) is None


def test_text_beside_tensors_is_encoded() -> None:
    rows = {"x": torch.arange(2), "t": ["a", None]}
    encoded = encode_small(rows)
    assert encoded is not None
    assert same(decode_small(encoded), rows)
    assert encode_small(TensorDict({"x": torch.arange(2), "t": ["a", "b"]}, [2])) is None  # left to `Serialized`
