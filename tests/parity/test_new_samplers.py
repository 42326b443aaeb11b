"""Consuming, staleness-aware, prompt-group and streaming samplers beside those of TorchRL."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import library

BOTH = (library("torchrl"), library("ostinato"))


def filled(lib: Any, sampler: Any, data: TensorDict, capacity: int = 50, **options: Any) -> Any:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(capacity), sampler=sampler, **options)
    rb.extend(data.clone())
    return rb


def versions(values: Any) -> TensorDict:
    found = torch.as_tensor(values)
    return TensorDict({"policy_version": found, "row": torch.arange(len(found))}, [len(found)])


def test_slots_of_rows_that_have_left_are_written_in_the_same_order() -> None:
    found = []
    for lib in BOTH:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5), consume_after_n_samples=1, batch_size=1)
        log: list[Any] = []
        for first in range(5):  # one row is left at each draw, so both draw the same
            log += [rb.extend(torch.tensor([first])).tolist(), rb.sample().tolist(), len(rb)]
        for count in (1, 3, 5, 4):
            log.append(rb.extend(torch.arange(count)).tolist())
            log.append(sum(len(rb.sample()) for _ in range(count if count < 5 else 0)))
            log += [len(rb), rb.write_count]
        found.append(log)
    assert found[0][:15] == found[1][:15]
    assert [len(x) if isinstance(x, list) else x for x in found[0]] == [
        len(x) if isinstance(x, list) else x for x in found[1]
    ]


@pytest.mark.parametrize("seed", range(4))
def test_streams_have_the_same_windows(seed: int) -> None:
    dice = random.Random(seed)
    length = dice.randint(1, 4)
    capacity = dice.randint(length, 14)
    theirs, ours = (
        lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(capacity),
            sampler=lib.StreamingSliceSampler(slice_len=length, end_key=("next", "done")),
            batch_size=length,
        )
        for lib in BOTH
    )
    count = drawn = 0
    for _ in range(30):
        if count == 0 or dice.random() < 0.6:
            new = dice.randint(1, capacity + 3)
            done = torch.tensor([[dice.random() < 0.15] for _ in range(new)])
            data = TensorDict({"t": torch.arange(count, count + new), ("next", "done"): done}, [new])
            for rb in (theirs, ours):
                rb.extend(data.clone())
            count += new
            continue
        queue = theirs.sampler._queued_slices
        if any(torch.equal(theirs.sampler._slot_versions[slots], known) for slots, known in queue):
            assert theirs.sample()["t"].tolist() == ours.sample()["t"].tolist()
            drawn += 1
    assert drawn


def test_prompt_groups_choose_the_same_rows() -> None:
    rewards = torch.rand(24, generator=torch.Generator().manual_seed(1))
    data = TensorDict({"query": torch.arange(24) // 6, ("next", "reward"): rewards}, [24])
    for strategy in ("recency", "reward", "variance"):
        found = []
        for lib in BOTH:
            rb = filled(lib, lib.PromptGroupSampler(samples_per_group=3, strategy=strategy), data, batch_size=12)
            batch = rb.sample()
            groups = batch["query"].view(4, 3)
            assert (groups == groups[:, :1]).all()
            found.append(sorted(batch["index"].tolist()))
        assert found[0] == found[1], strategy


def test_staleness_is_gated_and_reported_alike() -> None:
    for lib in BOTH:
        sampler = lib.StalenessAwareSampler(max_staleness=2)
        rb = filled(lib, sampler, versions(range(8)), batch_size=3)
        sampler.consumer_version = 7
        batch, info = rb.sample(return_info=True)
        assert sorted(batch["row"].tolist()) == [5, 6, 7]
        assert info["staleness"].dtype is torch.float32
        assert torch.equal(batch["staleness"], 7.0 - batch["row"])
        assert dict(sampler.state_dict()) == {"consumer_version": 7, "max_staleness": 2}
        rb.empty()
        assert sampler.consumer_version == 0


def test_difference_newer_rows_are_fresh() -> None:
    for lib, works in zip(BOTH, (False, True), strict=True):
        sampler = lib.StalenessAwareSampler()
        rb = filled(lib, sampler, versions([1, 1, 0]), batch_size=2)  # the consumer is at 0
        if works:
            assert rb.sample().shape == (2,)
        else:
            with pytest.raises(RuntimeError):  # 1 / 0
                rb.sample()


def test_difference_windows_of_interleaved_episodes() -> None:
    data = TensorDict({"t": torch.arange(6), "episode": torch.arange(6) % 2}, [6])
    found = []
    for lib in BOTH:
        rb = filled(lib, lib.StreamingSliceSampler(slice_len=3, traj_key="episode"), data, batch_size=6)
        try:
            found.append(rb.sample()["t"].tolist())
        except RuntimeError:
            found.append(None)
    assert found == [None, [0, 2, 4, 1, 3, 5]]


def test_difference_a_batch_that_could_not_be_made_is_drawn_again() -> None:
    def fail(batch: Any) -> Any:
        raise ValueError

    for lib, left in zip(BOTH, (2, 4), strict=True):
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(4), consume_after_n_samples=1, batch_size=2)
        rb.extend(torch.arange(4))
        rb.append_transform(fail)
        with pytest.raises(ValueError):
            rb.sample()
        assert len(rb) == left


def test_difference_large_versions_are_exact() -> None:
    for lib, drawn in zip(BOTH, ({0, 1}, {1}), strict=True):
        sampler = lib.StalenessAwareSampler(max_staleness=0)
        rb = filled(lib, sampler, versions([2**25, 2**25 + 1]), batch_size=40)
        sampler.consumer_version = 2**25 + 1
        assert set(rb.sample()["row"].tolist()) == drawn


def test_difference_groups_of_environments() -> None:
    data = TensorDict({"query": torch.arange(8).view(2, 4) // 4}, [2, 4])
    for lib, works in zip(BOTH, (False, True), strict=True):
        sampler = lib.PromptGroupSampler(num_groups=2)
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(8, ndim=2), sampler=sampler, batch_size=4)
        rb.extend(data.clone())
        if works:
            groups = rb.sample()["query"].view(2, 2)
            assert (groups == groups[:, :1]).all()
        else:
            with pytest.raises(NotImplementedError, match="single-dimensional"):
                rb.sample()
