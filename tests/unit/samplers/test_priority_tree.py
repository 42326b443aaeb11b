"""The priority tree: one law, compiled and in torch, against a plain list and the exact probabilities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato._backend import backend, use_backend
from ostinato.errors import SlotError
from ostinato.samplers.priorities import PriorityTree, make_tree

if TYPE_CHECKING:
    from torch import Tensor

CPU = torch.device("cpu")
CAPACITIES = [1, 7, 8, 9, 64, 65, 600]
Kind: TypeAlias = Literal["native", "torch", "wide"]
KINDS: list[Kind] = ["native", "torch", "wide"] if backend.native is not None else ["torch", "wide"]
kinds = pytest.mark.parametrize("kind", KINDS)
leaf = st.one_of(st.just(0.0), st.floats(0, 1e6), st.sampled_from([5e-324, 1e-300, 1.0, -0.0]))


def make(kind: Kind, capacity: int) -> PriorityTree:
    """A tree on the CPU of the kind asked for."""
    if kind == "wide":  # as on a GPU, whose sums have another order
        return PriorityTree(capacity, CPU, lazy=True)
    with use_backend(kind):
        tree = make_tree(capacity, CPU)
    assert (tree.native is not None) == (kind == "native")
    return tree


def doubles(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def integers(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@given(capacity=st.sampled_from(CAPACITIES), data=st.data())
def test_a_tree_holds_what_a_list_holds(capacity, data):
    trees, model = [make(kind, capacity) for kind in KINDS], [0.0] * capacity
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            slots = data.draw(st.lists(st.integers(0, capacity - 1), max_size=40))
            values = data.draw(st.lists(leaf, min_size=len(slots), max_size=len(slots)))
            for tree in trees:
                tree.set(integers(slots), doubles(values))
            for slot, value in zip(slots, values, strict=True):
                model[slot] = value
        else:
            start = data.draw(st.integers(0, capacity - 1))
            by_one = min(capacity, capacity - start + 1)  # over the end
            count = data.draw(st.integers(0, capacity) | st.just(by_one))
            value = data.draw(leaf)
            for tree in trees:
                tree.set_run(start, count, value)
            for i in range(count):
                model[(start + i) % capacity] = value
    uniforms = doubles([0.0, 5e-324, math.nextafter(1, 0), 1.0, *data.draw(st.lists(st.floats(0, 1), max_size=20))])
    if any(model):  # the numbers at every bound, and next to it
        bounds = doubles(model).cumsum(0) / sum(model)
        uniforms = torch.cat((uniforms, bounds, bounds.nextafter(bounds * 0), bounds.nextafter(bounds + 1))).clamp(0, 1)
    for kind, tree in zip(KINDS, trees, strict=True):
        assert tree.leaves(capacity).tolist() == model
        assert not tree.leaves(capacity).signbit().any()
        assert kind == "wide" or tree.total == trees[0].total
        assert tree.total == pytest.approx(math.fsum(model), rel=1e-12)
        assert tree.minimum == min((value for value in model if value > 0), default=math.inf)
        if any(model):
            slots_drawn, values_drawn = tree.draw(uniforms)
            assert kind == "wide" or torch.equal(slots_drawn, trees[0].draw(uniforms)[0])
            assert values_drawn.tolist() == [model[slot] for slot in slots_drawn.tolist()]
            assert bool((values_drawn > 0).all())


def test_large_updates_in_any_order_reach_the_root():
    """Many slots at once: the nodes above them are sorted first."""
    trees = [make(kind, 5000) for kind in KINDS]
    for part in torch.randperm(5000, generator=torch.Generator().manual_seed(0)).chunk(4):
        for tree in trees:
            tree.set(part, part.to(torch.float64) + 1)
    for tree in trees:
        assert (tree.total, tree.minimum) == (5000 * 5001 / 2, 1.0)
        assert tree.draw(doubles([0.25, 0.5, 0.75]))[0].tolist() == [2499, 3535, 4330]


@kinds
def test_a_load_replaces_everything_and_an_empty_tree_cannot_be_drawn_from(kind):
    tree = make(kind, 100)
    tree.set_run(0, 100, 9.0)
    tree.load(doubles([1.0, 2.0]))
    assert tree.leaves(3).tolist() == [1.0, 2.0, 0.0]
    assert (tree.total, tree.minimum, tree.known_empty) == (3.0, 1.0, False)
    tree.load(doubles([]))
    assert (tree.total, tree.minimum, tree.known_empty) == (0.0, math.inf, True)


@kinds
def test_bad_slots_and_values_change_nothing(kind):
    tree, two = make(kind, 10), doubles([1, 2])
    for bad in (-1, 10):
        with pytest.raises(SlotError, match=rf"^slot {bad} at position 1 is outside \[0, 10\)"):
            tree.set(integers([3, bad]), two)
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            tree.load(doubles([1, value]))
    assert tree.total == 0.0


def test_a_tree_without_mass_gives_slot_zero_on_devices():
    """There nothing can raise without a host sync: value 0 tells."""
    tree = make("wide", 1000)
    tree._on_cpu = False
    slots, values = tree.draw(doubles([0.0, 0.5, 1.0]))
    assert slots.tolist() == [0, 0, 0]
    assert values.tolist() == [0.0, 0.0, 0.0]
