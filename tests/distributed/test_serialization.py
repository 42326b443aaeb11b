"""Serialization for Ray: data is unchanged, and large tensors are not copied on arrival."""

from __future__ import annotations

import math
import pickle
import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

from ostinato.distributed.serialization import Serialized

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 (as users write it)


def sent(data: Any) -> tuple[Any, list[bytearray]]:
    """Send through a pickle whose buffers have their own memory, as in Ray's object store."""
    beside: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(Serialized(data), 5, buffer_callback=beside.append)
    memory = [bytearray(buffer.raw()) for buffer in beside]
    return pickle.loads(pickled, buffers=[memoryview(one).toreadonly() for one in memory]), memory


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.int64, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (7, 3), (900, 33)])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    back, _ = sent(tensor)
    assert back.dtype is dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2],
        lambda x: x[:, 1:2],
        lambda x: x.expand(3, *x.shape),
        lambda x: torch.complex(x, x).conj(),
        lambda x: x.requires_grad_(),
    ],
)
def test_views_are_sent_as_their_values(view: Any) -> None:
    tensor = view(torch.rand(200, 300))
    back, _ = sent(tensor)
    assert torch.equal(back, tensor)


def test_large_tensors_are_writable_views() -> None:
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


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (900, 33)])
@pytest.mark.parametrize("dtype", ["f4", "u1", "?", "M8[s]", "U3", [("a", "i4"), ("b", "f8")]])
def test_arrays_are_writable(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.arange(math.prod(shape)).reshape(shape).astype("i8").astype(dtype), order="F")
    back, _ = sent({"array": array, "object": np.array([None, "x"])})
    found = back["array"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)
    found[...] = array
    assert back["object"].tolist() == [None, "x"]


def test_kinds_and_nesting_are_unchanged() -> None:
    inner = TensorDict({"y": torch.rand(4, 2)}, [4])
    data = {
        "td": TensorDict({"x": torch.rand(4), "next": inner}, [4]),
        "empty": TensorDict({}, [4]),
        "text": TensorDict({"x": torch.rand(4), "name": "abc"}, [4]),
        "named": TensorDict({"x": torch.rand(4)}, [4], names=["time"]),
        "lazy": LazyStackedTensorDict(TensorDict({"x": torch.rand(2)}, []), TensorDict({"x": torch.rand(3)}, [])),
        "pair": Pair(torch.rand(3), [1, "two", None]),
        "function": lambda x: x + 1,
    }
    back, _ = sent(data)
    assert torch.equal(back["td"]["next", "y"], inner["y"])
    assert back["td"]["next"].batch_size == (4,)
    assert type(back["td"]) is TensorDict
    assert back["td"].device is None
    assert back["empty"].batch_size == (4,)
    assert back["text"]["name"] == "abc"
    assert back["named"].names == ["time"]
    assert isinstance(back["lazy"], LazyStackedTensorDict)
    assert torch.equal(back["pair"].a, data["pair"].a)
    assert type(back["pair"]).__name__ == "Pair"
    assert back["pair"].b == [1, "two", None]
    assert back["function"](1) == 2


def test_one_tensor_in_two_places_is_sent_once() -> None:
    tensor = torch.rand(1 << 16)
    back, memory = sent([tensor, tensor])
    assert back[0] is back[1]
    assert len(memory) == 1


def test_text_beside_tensors_is_unchanged() -> None:
    rows = TensorDict({"x": torch.arange(2), "t": ["a", "b"], "n": {"m": NonTensorData({"k": 1}, batch_size=[2])}}, [2])
    for given in (rows, {"rows": rows, "t": ["c", "d"]}):
        found, _ = sent(given)
        inner = found if given is rows else found["rows"]
        assert inner["t"] == ["a", "b"]
        assert inner["n", "m"] == {"k": 1}
        assert torch.equal(inner["x"], rows["x"])
