"""Serialization for Ray: data is unchanged, large tensors are not copied on arrival, and small data is encoded."""

from __future__ import annotations

import math
import pickle
import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

from ostinato.distributed.serialization import Serialized, decode_small, encode_small

from ..tags import same_kind

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 (as users write it)
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def sent(data: Any) -> tuple[Any, list[bytearray]]:
    """Send through a pickle whose buffers have their own memory, as in Ray's object store."""
    beside: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(Serialized(data), 5, buffer_callback=beside.append)
    memory = [bytearray(buffer.raw()) for buffer in beside]
    return pickle.loads(pickled, buffers=[memoryview(one).toreadonly() for one in memory]), memory


def test_tensors_keep_dtype_shape_and_bits():
    base = torch.rand(200, 300)
    tensors = [(torch.rand(900, 33) * 100).to(dtype) for dtype in DTYPES]
    tensors += [torch.rand(shape) for shape in ((), (0,), (0, 3), (5,), (7, 3))]
    views = [base.T, base[::2], base[:, 1:2], base.expand(3, 200, 300), torch.complex(base, base).conj()]
    views.append(torch.rand(200, 300).requires_grad_())
    for tensor in [*tensors, *views]:
        same_kind(sent(tensor)[0], tensor.detach().resolve_conj())


def test_large_tensors_are_writable_views():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back, memory = sent({"large": torch.zeros(1 << 18, dtype=torch.uint8), "small": torch.zeros(8192)})
        back["large"][3] = 7
        back["small"][0] = 7
    large = next(one for one in memory if len(one) == 1 << 18)
    assert large[3] == 7, "the tensor is the memory that it came in"
    assert all(not any(one) for one in memory if one is not large), "small ones are copies"
    del memory, large
    assert back["large"][3] == 7


@pytest.mark.parametrize("dtype", ["f4", "?", "M8[s]", "U3", [("a", "i4"), ("b", "f8")]])
def test_arrays_are_writable(dtype):
    for shape in ((), (0, 3), (900, 33)):
        array = np.asarray(np.arange(math.prod(shape)).reshape(shape).astype("i8").astype(dtype), order="F")
        back, _ = sent({"array": array, "object": np.array([None, "x"])})
        found = back["array"]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert np.array_equal(found, array)
        found[...] = array
        assert back["object"].tolist() == [None, "x"]


def test_kinds_and_nesting_are_unchanged():
    inner = TensorDict({"y": torch.rand(4, 2)}, [4])
    data = {
        "td": TensorDict({"x": torch.rand(4), "next": inner}, [4]),
        "empty": TensorDict({}, [4]),
        "text": TensorDict({"x": torch.arange(2), "t": ["a", "b"], "n": NonTensorData({"k": 1}, batch_size=[2])}, [2]),
        "named": TensorDict({"x": torch.rand(4)}, [4], names=["time"]),
        "pair": Pair(torch.rand(3), [1, "two", None]),
        "function": lambda x: x + 1,
    }
    back, _ = sent(data)
    same_kind(back["td"], data["td"])
    assert back["empty"].batch_size == (4,)
    assert (back["text"]["t"], back["text"]["n"], back["text"]["x"].tolist()) == (["a", "b"], {"k": 1}, [0, 1])
    assert back["named"].names == ["time"]
    same_kind(tuple(back["pair"]), tuple(data["pair"]))
    assert type(back["pair"]).__name__ == "Pair"
    assert back["function"](1) == 2


# -- small data -------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.builds(lambda shape, dtype: (torch.rand(shape) * 9).to(dtype), shapes, st.sampled_from(DTYPES))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(
    tensors | plain,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4)
        | st.lists(inner, min_size=1, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | tensors.map(lambda tensor: TensorDict({"a": tensor[None], "b": {"c": tensor[None] + 0}}, [1]))
    ),
    max_leaves=8,
)


@given(data=trees)
def test_trees_are_unchanged(data):
    encoded = encode_small(data)
    assert encoded is not None
    same_kind(decode_small(encoded), data)


def test_decoded_tensors_are_writable_values():
    flags, x = torch.zeros(3, dtype=torch.bool), torch.zeros(5, dtype=torch.float64)
    encoded = encode_small({"flags": flags, "x": x, "t": ["a", None]})
    assert encoded is not None
    one, other = decode_small(encoded), decode_small(encoded)
    one["x"] += 1
    one["flags"][:] = True
    same_kind(other, {"flags": flags, "x": x, "t": ["a", None]})
    assert one["x"].data_ptr() % 8 == 0


SHARED = torch.ones(3)
RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(100_000, dtype=torch.uint8),
        [SHARED, SHARED],
        RECURSIVE,
        "long" * 10_000,
        list(range(2000)),
        Pair(1, 2),
        b"bytes",
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, device="meta"),
        torch.nn.Parameter(torch.ones(3)),
        TensorDict({"x": torch.ones(3), "name": "abc"}, [3]),
        TensorDict({"x": torch.ones(3)}, [3], names=["time"]),
        LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}, []), TensorDict({"x": torch.ones(3)}, [])),
        {("a", "b"): torch.ones(3)},
    ],
)
def test_other_data_is_not_encoded(data):
    assert encode_small(data) is None
    assert encode_small({"inside": [data]}) is None
