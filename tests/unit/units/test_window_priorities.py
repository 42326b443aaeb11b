"""Priorities of windows reach the row that a window was drawn for."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SequenceUnit,
    TensorDictReplayBuffer,
)

from ...episodes import Log, batch_of


@pytest.mark.parametrize(("shape", "envs"), [("rows", 2), ("rows-1", 1), ("anchors", 2), ("one", 1)])
def test_the_priorities_of_a_window_go_to_its_anchor(shape, envs):
    log = Log(20 * envs, "lanes" if envs == 2 else "line", envs=envs, longest=3, seed=2)
    sampler = PrioritizedSampler(20 * envs, 1.0, 1.0)
    storage = LazyTensorStorage(20 * envs, ndim=envs)
    rb = ReplayBuffer(storage=storage, sampler=sampler, sample_unit=SequenceUnit(3), batch_size=4)
    log.extend(rb, 20)
    _, info = rb.sample(return_info=True)
    rows = torch.arange(12.0) + 2
    best = torch.where(info["validity_mask"], rows, 0).view(4, 3).amax(1)
    if shape == "one":
        best = torch.full((4,), 7.0)
    rb.update_priority(info, {"rows": rows, "rows-1": rows[:, None], "anchors": best, "one": best[:1]}[shape])
    want = torch.ones(20 * envs, dtype=torch.float64)
    anchors = log.slots_of(info["anchor_index"])[::3]
    for anchor, value in zip(anchors, best, strict=True):
        want[anchor] = value
    assert torch.equal(sampler.priorities, want)
    log.extend(rb, 20)
    rb.update_priority(info, torch.full((12,), 9.0))
    assert (sampler.priorities != 9.0).all(), "of windows that were overwritten"
    assert rb.stats().stale_updates == len(set(anchors))


def test_tensordicts_of_windows_bring_their_priorities_back():
    sampler = PrioritizedSampler(20, 1.0, 1.0)
    storage = LazyTensorStorage(20)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, sample_unit=SequenceUnit(3), batch_size=6)
    rb.extend(TensorDict(batch_of(Log(20, longest=1000).play(20)), [20]))
    batch = rb.sample()
    batch["td_error"] = torch.full((18,), 5.0)
    rb.update_tensordict_priority(batch)
    changed = (sampler.priorities == 5.0).nonzero().flatten().tolist()
    assert set(changed) == set(batch["anchor_index"].tolist())
    assert rb.stats().stale_updates == 0


@pytest.mark.parametrize(("shape", "span"), [((32,), (False, 2)), ((8, 4), False)], ids=str)
def test_prioritized_slices_are_padded_and_repeated_rows_give_no_priority(shape, span):
    sampler = PrioritizedSliceSampler(
        40, 1.0, 1.0, 0.0, slice_len=4, traj_key="id", strict_length=False, pad_output=True, span=span
    )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=32)
    index = rb.extend(TensorDict({"id": torch.arange(40) // 2}, [40]))
    sample, info = rb.sample(return_info=True)
    real = info["collector", "mask"].view(8, 4)
    assert real[:, 0].all()
    assert not real[:, 2:].any()
    rows = sample["index"].view(8, 4)
    assert torch.equal(rows[:, 1:], rows[:, :1] + real[:, 1:2].expand(-1, 3))
    sample["td_error"] = torch.where(real.reshape(-1), 5.0, 100.0)
    rb.update_tensordict_priority(sample.reshape(shape))
    rb.update_priority({**info}, sample["td_error"].view(32, 1))
    assert set(sampler.priorities[index].tolist()) == {1.0, 5.0}
    assert rb.stats().stale_updates == 0
    rb.extend(TensorDict({"id": torch.arange(40, 80) // 2}, [40]))
    rb.update_tensordict_priority(sample)
    assert rb.stats().stale_updates == int(real.sum())
