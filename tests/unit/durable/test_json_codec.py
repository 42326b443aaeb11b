"""Python state as JSON: everything comes back exactly and as the same type; nothing else gets in or out."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples
from tests.tags import random_bits
from torch import Tensor

from ostinato.durable import decode, encode
from ostinato.durable.arrays import DTYPES
from ostinato.errors import CheckpointError, DamagedFileError
from ostinato.testing.views import bits


class Pair(NamedTuple):
    """A tuple with a class of its own."""

    a: int
    b: int


Colour = enum.IntEnum("Colour", "RED")


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and every bit."""
    return bits(a) == bits(b) and repr(a) == repr(b)


def through_json(value: object, **options: Any) -> Any:
    text = json.dumps(encode(value, **{k: v for k, v in options.items() if k != "load"}), allow_nan=False)
    return decode(json.loads(text), load=options.get("load"))


NUMPY_DTYPES = ["?", "i1", "u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<c16", "<U3", "S5"]
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(random_bits, shapes, st.sampled_from([*DTYPES.values()]), st.integers(0, 9))
numpy_arrays = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).reshape(shape).astype(dtype), st.sampled_from(NUMPY_DTYPES), shapes
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs"]), max_size=2)
    | st.binary(max_size=20)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.qint8, torch.device("cpu"), torch.device("cuda", 3)])
    | st.builds(torch.Size, shapes)
    | st.builds(np.float64, st.floats())
    | st.sampled_from([np.int8(-3), np.bool_(True), np.float16(0.5), np.str_("ab"), np.bytes_(b"ab"), np.complex64(1j)])
)
keys = st.text() | st.integers() | st.none() | st.tuples(st.text(max_size=3), st.integers()) | st.just("$int")
values = st.recursive(
    scalars | tensors | numpy_arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(values, st.integers(0, 16))
@examples(0.5)
def test_round_trip(value, inline_bytes):
    assert same(through_json(value), value)
    stored: dict[str, Tensor] = {}

    def store(tensor: Tensor, _: str) -> str:
        stored[str(len(stored))] = tensor.clone()
        return str(len(stored) - 1)

    assert same(through_json(value, store=store, inline_bytes=inline_bytes, load=stored.__getitem__), value)


def test_only_larger_ones_are_stored_apart():
    stored: list[Tensor] = []

    def store(tensor: Tensor, _: str) -> str:
        stored.append(tensor)
        return "x"

    small, large = torch.zeros(65536, dtype=torch.uint8), torch.zeros(65537, dtype=torch.uint8)
    encode([small, large, small.numpy(), large.numpy(), bytes(65536), bytes(65537)], store=store)
    assert [len(t) for t in stored] == [65537] * 3


def test_the_json_is_the_documented_one():
    """That of plain numbers, bytes, tuples and dicts is checked on the page itself."""
    value = {
        "inf": -math.inf,
        "surrogate": "\ud800",
        "dollar": {"$x": 1},
        "ordered": OrderedDict(a=1),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "tensor": torch.tensor([1, 2], dtype=torch.int16),
        "numpy": np.array(["ab"]),
        "scalar": np.float32(1.5),
    }
    assert encode(value) == {
        "inf": {"$float": "-inf"},
        "surrogate": {"$str": "7aCA"},
        "dollar": {"$dict": [["$x", 1]]},
        "ordered": {"$ordereddict": [["a", 1]]},
        "size": {"$size": [2, 3]},
        "dtype": {"$dtype": "bfloat16"},
        "device": {"$device": "cuda:1"},
        "tensor": {"$tensor": {"dtype": "int16", "shape": [2], "data": "AQACAA=="}},
        "numpy": {"$numpy": {"dtype": "<U2", "shape": [1], "data": "YQAAAGIAAAA="}},
        "scalar": {"$npscalar": {"dtype": "<f4", "shape": [], "data": "AADAPw=="}},
    }


REFUSED = [
    (object(), "object"),
    (lambda: 0, "function"),
    ({1}, "set"),
    (int, "type"),
    (Pair(1, 2), "Pair"),
    (Colour.RED, "Colour"),
    (np.array([None]), "numpy object array"),
    (np.zeros(2, "i4,f4"), r"numpy \[.*\] array"),
    (np.array(["2020"], "M8[D]"), "datetime64"),
    (np.ma.masked_array([1]), "MaskedArray"),
]


def test_anything_else_is_refused_and_named():
    for value, kind in REFUSED:
        with pytest.raises(CheckpointError, match=rf"^sampler\['a'\]\[1\] is a .*{kind}"):
            encode({"a": [0, value]}, where="sampler")
    with pytest.raises(CheckpointError, match=r"^state\['a'\]: cannot save"):
        encode({"a": torch.eye(2).to_sparse()})


def test_depth_limit_both_ways():
    value: Any = 1
    for _ in range(64):
        value = [value]
    assert through_json(value) == value
    with pytest.raises(CheckpointError, match="more than 64 deep"):
        encode([value])
    with pytest.raises(DamagedFileError, match="more than 64 deep"):
        decode([value])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError):
        encode(loop)


DAMAGED: list[Any] = [
    0.5,
    {"$nothing": 1},
    {"$int": "0x1", "$float": "0x1"},
    {"$int": "0xg"},
    {"$int": "1" * 10_000},
    {"$float": "1.5"},
    {"$float": "0x1.8p+9999"},
    {"$str": 5},
    {"$str": "/w=="},
    {"$bytes": {"data": "!"}},
    {"$dict": [[1]]},
    {"$dict": [[1, 2], [True, 3]]},
    {"$dict": [[[1], 2]]},
    {"$ordereddict": 1},
    {"$size": [2**63]},
    {"$dtype": "__name__"},
    {"$tensor": {"dtype": "uint8", "shape": [2], "data": "QQ=="}},
    {"$tensor": {"dtype": "uint8", "shape": [2**60], "data": "QQ=="}},
    {"$tensor": {"dtype": "uint8", "shape": [1], "data": "QQ==", "array": "x"}},
    {"$tensor": {"dtype": "bool", "shape": [1], "data": "Ag=="}},
    {"$tensor": {"dtype": "uint8", "shape": [1], "array": "x"}},
    {"$numpy": {"dtype": "|O", "shape": [1], "data": "QQ=="}},
    {"$numpy": {"dtype": "<f4", "shape": [0, 2**62], "data": ""}},
    {"$numpy": {"dtype": "<f4", "shape": [1] * 33, "data": "AADAPw=="}},
    {"$numpy": {"dtype": "|b1", "shape": [1], "data": "Ag=="}},
    {"$numpy": {"dtype": "<U1", "shape": [1], "data": "/////w=="}},
]


def test_damaged_nodes():
    for node in DAMAGED:
        with pytest.raises(DamagedFileError, match=r"^state\['a'\].* is damaged:"):
            decode({"a": node})


def test_an_array_stored_apart_must_fit():
    for apart in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(DamagedFileError):
            decode({"$tensor": {"dtype": "float32", "shape": [2], "array": "x"}}, load={"x": apart}.__getitem__)
    node: dict[str, Any] = {"$numpy": {"dtype": "<f4", "shape": [2], "array": "x"}}
    for load, said in ((lambda _: torch.zeros(2), "another dtype or shape"), (None, "not in the checkpoint")):
        with pytest.raises(DamagedFileError, match=said):
            decode(node, load=load)
