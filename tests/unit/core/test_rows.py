"""Schemas: read off data, checked, built again, saved as JSON."""

from __future__ import annotations

import json
import operator
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.kinds import stack
from ostinato.core.rows import Schema, describe, map_leaves
from ostinato.errors import CheckpointError, KindError

from ...tags import same_kind

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (users have those too)

leaves = st.builds(
    lambda shape, dtype: torch.zeros((4, *shape), dtype=dtype),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
)
keys = st.one_of(st.text(max_size=4), st.integers(-9, 9), st.none())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


@given(data=trees)
def test_any_tree_is_flattened_built_again_saved_and_stacked(data):
    schema = describe(data, 1)
    flat = schema.flatten(data, None, 1)
    assert flat.batch == (4,)
    same_kind(schema.build(flat.leaves, (4,), CPU), data)
    one = map_leaves(data, lambda leaf: leaf[0])
    assert describe(one, 0) == schema
    same_kind(schema.build(schema.flatten(one, None, 0).leaves, (), CPU), one)
    for again in (Schema.from_json(json.loads(json.dumps(schema.to_json()))), pickle.loads(pickle.dumps(schema))):
        assert again == schema
        assert hash(again) == hash(schema)
    rows = [map_leaves(data, operator.itemgetter(i)) for i in range(4)]
    if not isinstance(data, list):
        same_kind(stack(rows), data)


def tree_of(kind: str, name: str | None = None, keys: list[Any] | None = None) -> dict[str, Any]:
    return {"leaves": [], "tree": {"kind": kind, "keys": keys or [], "class": name, "extra": [], "children": []}}


def leaf_of(dtype: str, shape: list[Any], path: list[str]) -> dict[str, Any]:
    return {"leaves": [{"path": path, "dtype": dtype, "shape": shape}], "tree": None}


HOSTILE: list[Any] = [
    5,
    {"tree": None},
    tree_of("tensorclass", "os:system"),  # a class that is not imported
    tree_of("namedtuple", "builtins:eval"),
    leaf_of("nn", [], []),
    leaf_of("float32", [-1], []),
    leaf_of("float32", [1.5], []),
    leaf_of("float32", [], ["a"]),
    tree_of("set"),
    tree_of("dict", keys=["a"]),  # without children
    {"leaves": [], "tree": {**tree_of("dict", keys=[["a"]])["tree"], "children": [None]}},
]


def test_hostile_schemas_are_refused_and_nothing_is_imported():
    for case in HOSTILE:
        with pytest.raises(CheckpointError):
            Schema.from_json(case)
    tree: Any = None
    for _ in range(5000):
        tree = {"kind": "list", "keys": [0], "class": None, "extra": [], "children": [tree]}
    with pytest.raises((CheckpointError, RecursionError)):
        Schema.from_json({"leaves": [], "tree": tree})
    with pytest.raises(CheckpointError):
        describe({(1, 2): torch.zeros(2)}, 1).to_json()


def test_rows_are_nested_up_to_100_deep():
    deep: Any = 1
    for _ in range(101):
        deep = [deep]
    assert str(map_leaves(deep, lambda leaf: leaf + 1)) == str(deep).replace("1", "2")
    with pytest.raises(KindError, match="nested more than 100 deep"):
        map_leaves([deep], lambda leaf: leaf)
