"""Whole groups of rows: their distribution, each strategy against all subsets, and what is read when."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    LazyStackStorage,
    LazyTensorStorage,
    PromptGroupSampler,
    ReplayBuffer,
)
from ostinato.errors import (
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
)

from ... import registry
from ...effort import examples
from ...stats.chi_square import p_value
from ..buffers.refusals import refuses


def make(prompts: Any = (), rewards: Any = None, *, batch_size: int = 4, **given: Any) -> Any:
    """Return a buffer with rows of these prompts."""
    sampler = PromptGroupSampler(**{"group_key": "prompt", "reward_key": "reward", **given})
    rb = registry.make(100, sampler=sampler, batch_size=batch_size)
    if len(prompts):
        rb.extend(rows(prompts, rewards))
    return rb


def rows(prompts: Any, rewards: Any = None, **more: Any) -> TensorDict:
    prompts = torch.as_tensor(prompts)
    count = prompts.shape[0]
    rewards = torch.arange(float(count)) if rewards is None else torch.as_tensor(rewards)
    return TensorDict({"prompt": prompts, "reward": rewards, "row": torch.arange(count), **more}, [count])


def test_groups_and_rows_are_uniform():
    prompts = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    rb = make(prompts, num_groups=2)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(1500):
        batch = rb.sample()
        groups, row = batch["prompt"].view(2, 2), batch["row"].view(2, 2)
        assert (groups[:, 0] == groups[:, 1]).all()
        assert groups[0, 0] != groups[1, 0]
        assert (row[:, 0] != row[:, 1]).all()
        counts[tuple(row[0].tolist())] += 1
    assert len(counts) == 3 * 6  # ordered pairs within the first group
    assert 1e-4 < p_value(list(counts.values())) < 1 - 1e-4


@examples(1)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 4)), min_size=1, max_size=14),
    st.integers(1, 4),
    st.sampled_from(["reward", "variance", "recency"]),
)
def test_strategies_choose_the_best_rows(data, each, strategy):
    prompts, rewards = [p for p, _ in data], [float(r) for _, r in data]
    rb = make(prompts, rewards, samples_per_group=each, batch_size=each, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rb.sample()["row"].tolist()
    group = [row for row, prompt in enumerate(prompts) if prompt == prompts[found[0]]]
    assert set(found) <= set(group)
    chosen = found[: min(each, len(group))]
    assert len(set(chosen)) == len(chosen)
    subsets = [list(subset) for subset in itertools.combinations(group, len(chosen))]

    def score(subset: list[int]) -> tuple[float, ...]:
        held = np.array([rewards[row] for row in subset])
        if strategy == "recency":
            return tuple(sorted(subset))
        return (held.sum(),) if strategy == "reward" else (round(held.var(), 9), held.sum())

    assert score(chosen) == max(map(score, subsets))


def test_too_few_rows_are_completed_with_replacement_and_a_warning():
    rb = make([0, 0, 1], num_groups=3, batch_size=9)
    with pytest.warns(
        UserWarning, match="smaller than the requested sample size; completing the draw with replacement"
    ):
        batch = rb.sample()
    groups = batch["prompt"].view(3, 3)
    assert set(groups[:2, 0].tolist()) == {0, 1}
    for group, row in zip(groups[:, 0].tolist(), batch["row"].view(3, 3), strict=True):
        assert set(row.tolist()) == ({0, 1} if group == 0 else {2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.sample()  # once


def test_groups_by_text_by_vectors_and_by_rows_of_different_lengths():
    pairs = torch.tensor([[0, 1], [0, 1], [1, 0], [1, 0]])
    sampler = PromptGroupSampler(num_groups=2, group_key=("in", "pair"))
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    rb.extend(TensorDict({("in", "pair"): pairs}, [4]))
    batch = rb.sample()["in", "pair"]
    assert torch.equal(batch[::2], batch[1::2])
    assert not torch.equal(batch[0], batch[2])

    def row(number: int) -> TensorDict:
        found = TensorDict({"tokens": torch.arange(number % 3 + 1)}, [])
        return found.set_non_tensor("query", "aabbb"[: 2 + number % 2])

    for key, kinds in (("query", 2), ("tokens", 3)):
        sampler = PromptGroupSampler(samples_per_group=3, group_key=key)
        rb = ReplayBuffer(storage=LazyStackStorage(12), sampler=sampler, batch_size=3)
        rb.extend([row(number) for number in range(12)])
        _, info = rb.sample(return_info=True)
        assert info["index"].unique().shape == (3,)
        assert (info["index"] % kinds).unique().shape == (1,), key


@pytest.mark.parametrize("cache", [True, False])
def test_edits_through_views_need_cache_groups_false(cache):
    rb = make([0, 0, 1, 1], num_groups=1, batch_size=2, cache_groups=cache)
    rb.sample()
    rb[:]["prompt"][:] = 5  # one group, of which the buffer is not told
    pairs = {tuple(sorted(rb.sample()["row"].tolist())) for _ in range(80)}
    assert pairs == ({(0, 1), (2, 3)} if cache else set(itertools.combinations(range(4), 2)))


def test_errors():
    refuses(
        {
            KindError: {
                "Exactly one of num_groups or samples_per_group must be provided": PromptGroupSampler,
                "Exactly one": lambda: make(num_groups=1, samples_per_group=1),
                "num_groups must be a positive integer": lambda: make(num_groups=True),
            },
            OptionError: {
                "samples_per_group must be a positive integer": lambda: make(samples_per_group=0),
                "strategy must be one of": lambda: make(num_groups=1, strategy="best"),
                "batch_size=4 is not divisible by num_groups=3": lambda: make([0], num_groups=3).sample(),
                "not divisible by samples_per_group=3": lambda: make([0], samples_per_group=3).sample(),
            },
            SchemaError: {
                "must be finite": lambda: make([0], [torch.nan], num_groups=1, strategy="reward").sample(),
            },
            KeyMissingError: {
                "Could not find key 'query'": lambda: make([0], num_groups=1, group_key="query").sample(),
            },
        }
    )
