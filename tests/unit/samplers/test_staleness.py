"""Draws by staleness: the distribution, the limit, what is read when, and copies that go on exactly."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from ostinato import (
    LazyMemmapStorage,
    ListStorage,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    KeyMissingError,
    KindError,
    OptionError,
    PriorityError,
    SchemaError,
)
from ostinato.samplers.uniform import draw_weighted

from ... import registry
from ...stats.chi_square import p_value
from ..buffers.refusals import refuses


def make(versions: Any, *, batch_size: int = 4, capacity: int = 100, **sampler: Any) -> Any:
    """Return a buffer with rows of these versions."""
    rb = registry.make(capacity, sampler=StalenessAwareSampler(**sampler), batch_size=batch_size)
    if len(versions):
        rb.extend(rows(versions))
    return rb


def rows(versions: Any) -> TensorDict:
    values = torch.as_tensor(versions)
    return TensorDict({"policy_version": values, "row": torch.arange(len(values))}, [len(values)])


def filled_list() -> ListStorage:
    storage = ListStorage(4)
    storage.set(range(2), [1, 2])
    return storage


def square(staleness: Tensor) -> Tensor:
    return (staleness + 1) ** -2


@pytest.mark.parametrize(("weight_fn", "power", "newest"), [(None, 1, 9), (square, 2, 4)])
def test_draws_follow_the_weights(weight_fn, power, newest):
    rb = make([0, 1, 2, 3, newest], batch_size=1, staleness_weight_fn=weight_fn)
    rb.sampler.consumer_version = 4
    counts = Counter(rb.sample(6000)["row"].tolist())
    weights = [(4 - version + 1) ** -power for version in (0, 1, 2, 3, 4)]
    assert 1e-4 < p_value([counts[row] for row in range(5)], weights) < 1 - 1e-4


@pytest.mark.parametrize("total", [3, 12])
def test_distinct_rows_are_drawn_one_after_the_other(total):
    # large batches take an order of all rows, small ones are drawn row by row: the same distribution
    weights = torch.tensor([1.0, 2.0, 4.0] * (total // 3), dtype=torch.float64)
    generator, counts = torch.Generator().manual_seed(1), Counter[tuple[int, int]]()
    for _ in range(3000):
        first, second = draw_weighted(weights.cumsum(0), weights, 2, generator, distinct=True).tolist()
        assert first != second
        counts[first % 3, second % 3] += 1
    expected: Counter[tuple[int, int]] = Counter()
    values = weights.tolist()
    for a, b in itertools.permutations(range(total), 2):
        expected[a % 3, b % 3] += values[a] * values[b] / (sum(values) - values[a])
    assert 1e-4 < p_value([counts[pair] for pair in expected], list(expected.values())) < 1 - 1e-4
    # where one weight takes nearly all single draws, the rest comes from an order
    weights = torch.tensor([1e12] + [1.0] * 99, dtype=torch.float64)
    drawn = draw_weighted(weights.cumsum(0), weights, 20, generator, distinct=True)
    assert len(set(drawn.tolist())) == 20
    assert int(drawn[0]) == 0


def test_rows_beyond_the_limit_are_not_drawn():
    rb = make(range(10), batch_size=200, max_staleness=3)
    rb.sampler.consumer_version = 9
    batch, info = rb.sample(return_info=True)
    assert set(batch["policy_version"].tolist()) == {6, 7, 8, 9}
    assert torch.equal(info["staleness"], (9 - batch["policy_version"]).float())
    assert torch.equal(batch["staleness"], info["staleness"])
    rb.sampler.max_staleness = 0
    assert set(rb.sample()["policy_version"].tolist()) == {9}
    rb.sampler.max_staleness = -1
    assert set(rb.sample()["policy_version"].tolist()) == set(range(10))
    assert rb.sample(10)["row"].unique().shape == (10,)  # as many rows as the batch has: each once
    rb.sampler.consumer_version, rb.sampler.max_staleness = 50, 2
    with pytest.raises(EmptyBufferError, match=r"All 10 entries in the buffer exceed max_staleness=2 .*from 0"):
        rb.sample()
    rb.extend(rows([49]))
    assert set(rb.sample()["policy_version"].tolist()) == {49}


def test_versions_follow_writes_and_edits():
    rb = make([], capacity=7, max_staleness=1, batch_size=30)
    held: dict[int, int] = {}
    sampler = rb.sampler
    for version in range(40):
        assert sampler.consumer_version == version
        index = rb.extend(rows([version] * (version % 3 + 1)))
        held.update(dict.fromkeys(index.tolist(), version))
        if version % 5 == 4:
            rb.set_at_("policy_version", torch.tensor([version]), [0])
            held[0] = version
        found = rb.sample()
        assert [held[slot] for slot in found["index"].tolist()] == found["policy_version"].tolist()
        assert set(found["index"].tolist()) <= {slot for slot, value in held.items() if value >= version - 1}
        sampler.increment_consumer_version()
    rb.empty()
    assert sampler.consumer_version == 0
    rb.extend(rows([0]))
    assert rb.sample(3)["index"].tolist() == [0, 0, 0]


def test_the_version_can_be_nested_and_large():
    big = 2**60
    sampler = StalenessAwareSampler(0, version_key=("collector", "version"))
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(4), sampler=sampler, batch_size=2)
    rb.extend(TensorDict({("collector", "version"): torch.tensor([[big], [big + 1]])}, [2]))
    sampler.consumer_version = big + 1
    assert rb.sample()["collector", "version"].flatten().tolist() == [big + 1] * 2  # float32 would take both


def test_errors():
    refuses(
        {
            KeyMissingError: {
                "Could not find key 'v' in the replay buffer": lambda: make([1], version_key="v").sample(),
            },
            SchemaError: {
                "one number for each row": lambda: make([[1, 2]]).sample(),
                "one weight for each of 1 rows": lambda: make([1], staleness_weight_fn=torch.sum).sample(),
            },
            OptionError: {
                "an integer of at least -1, got -2": lambda: make([1], max_staleness=-2),
                "consumer_version": lambda: setattr(StalenessAwareSampler(), "consumer_version", 2**70),
            },
            KindError: {
                "must be callable": lambda: make([1], staleness_weight_fn=3),
                "Plain ListStorage is not supported": lambda: StalenessAwareSampler().sample(filled_list(), 1),
            },
            PriorityError: {
                "at least 0": lambda: make([1], staleness_weight_fn=lambda s: -s - 1).sample(),
                "not all of them 0": lambda: make([1], staleness_weight_fn=lambda s: s * 0).sample(),
            },
            CheckpointError: {
                "damaged": lambda: StalenessAwareSampler().check_state(
                    {"consumer_version": "1", "max_staleness": 0}, 4
                ),
            },
        }
    )
