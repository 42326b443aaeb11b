"""Ensembles with an exact ratio: rows of each batch, batches made ahead, sources, priorities, schedules, refusals."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    LinearScheduler,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)
from ostinato.errors import EmptyBufferError, KindError, OptionError, SchemaError, UsageError

from ...registry import ring, seeded
from .refusals import raises
from .test_ensemble import plain, tds


def pair(ratio: Any = 0.5, online: int = 10, **options: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(plain(0), plain(100, online), ratio=ratio, **{"generator": seeded(), **options})


def offline(batch: Any) -> int:
    return int((batch["id"] < 100).sum())


def test_batches_made_ahead_and_dropped_are_not_counted():
    made, rb = (pair({0: 1.0, 10: 0.0}, batch_size=11, prefetch=3) for _ in range(2))
    made.sample()
    assert made.sampler.ratio_step == 4
    rb.load_state_dict(made.state_dict())
    made.close()
    rb.set_rng(seeded(5))
    assert rb.sampler.ratio_step == 1
    reference = pair({0: 1.0, 10: 0.0}, batch_size=11)
    counts = [offline(reference.sample()) for _ in range(8)]
    assert [offline(rb.sample()) for _ in range(7)] == counts[1:]
    rb.close()


def test_the_offline_part_fills_up_until_there_are_online_rows():
    rb = pair(0.25, 0, batch_size=8)
    with pytest.warns(UserWarning, match=r"members \[1\]"):
        assert offline(rb.sample()) == 8
    rb[1].extend({"id": torch.tensor([100])})
    assert offline(rb.sample()) == 2, "one row is repeated to make the share"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offline(pair(0.25, 3, batch_size=8, when_empty="fill", min_rows=[1, 6]).sample()) == 8
    strict = pair(0.25, 5, batch_size=8, when_empty="raise", min_rows=6)
    assert not strict.can_sample()
    with pytest.raises(EmptyBufferError, match="min_rows"):
        strict.sample()
    strict[1].extend({"id": torch.tensor([105])})
    assert strict.can_sample()
    assert offline(strict.sample()) == 2


def test_a_failed_draw_is_not_counted():
    rb = pair({0: 1.0, 10: 0.0}, batch_size=10)
    rb[0].set_sampler(PrioritizedSampler(10, 1.0, 1.0, eps=0.0))
    rb.sample()
    rb[0].update_priority(torch.arange(10), torch.zeros(10))
    before = rb.state_dict()
    with pytest.raises(ValueError, match="priority"):
        rb.sample()
    after = rb.state_dict()
    assert before["mixing"] == after["mixing"]
    assert torch.equal(before["generator"], after["generator"])


@pytest.mark.parametrize("make", [plain, tds])
def test_the_source_of_each_row_is_a_field(make):
    def check(batch: Any) -> Any:
        assert batch["info"]["source"].tolist() == [0, 0, 0, 1, 1, 1]
        return batch

    options: dict[str, Any] = {"source_key": ("info", "source")}
    rb = ReplayBufferEnsemble(make(0), make(100), ratio=0.5, transform=check, batch_size=6, **options)
    assert check(rb.sample())["info"]["source"].dtype is torch.int64
    rows = [TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2)]
    for one in rows:
        one.extend(TensorDict({"id": torch.zeros(4, 2)}, [4, 2]))
    wide = ReplayBufferEnsemble(*rows, sample_from_all=True, **options).sample(4)
    assert wide["info", "source"].tolist() == [[[0, 0]] * 2, [[1, 1]] * 2]
    parts = ReplayBufferEnsemble(make(0), make(100), sample_from_all=True, **options)
    assert pickle.loads(pickle.dumps(parts)).sample(4)["info"]["source"].tolist() == [[0, 0], [1, 1]]


def test_sources_that_cannot_be_named_are_refused():
    numbers = [ring(4) for _ in range(2)]
    for rb in numbers:
        rb.extend(torch.arange(4))
    raises(
        (lambda: pair(source_key="id").sample(4), SchemaError, "'id' already"),
        (lambda: pair(source_key=3), OptionError, "a key is"),
        (
            lambda: ReplayBufferEnsemble(*numbers, ratio=0.5, source_key="s").sample(4),
            KindError,
            "needs batches with fields",
        ),
    )


def steps(base: int, **options: Any) -> ReplayBuffer:
    rb = ring(40, **options)
    t = torch.arange(40)
    rb.extend({"id": base + t, "t": t % 20, "done": t % 20 == 19})
    return rb


def test_slices_stay_whole_and_need_a_length():
    def members(**options: Any) -> list[ReplayBuffer]:
        return [steps(100 * i, sampler=SliceSampler(end_key="done", **options)) for i in range(2)]

    rb = ReplayBufferEnsemble(*members(slice_len=4), ratio=0.3, batch_size=20)
    counts = []
    for _ in range(10):
        batch = rb.sample()
        assert (batch["t"].view(-1, 4).diff(dim=1) == 1).all()
        counts.append(offline(batch))
    assert set(counts) == {4, 8}
    assert sum(counts) == 60
    assert not rb.can_sample(18)
    numbered = members(num_slices=2)
    assert ReplayBufferEnsemble(*numbered, sample_from_all=True).sample(8)["id"].shape == (2, 4)
    raises(
        (lambda: rb.sample(18), OptionError, "divisible by slice_len=4, got 18"),
        (lambda: ReplayBufferEnsemble(*numbered, ratio=0.5).sample(8), OptionError, "give slice_len"),
        (lambda: ReplayBufferEnsemble(*numbered, ratio=0.5, batch_size=8), OptionError, "member 0"),
    )


def test_members_of_other_fields_kinds_and_shapes_are_named():
    more = {"id": torch.arange(5), "next": {"reward": torch.zeros(5), "info": torch.zeros(5)}}
    less = {"id": torch.arange(5), "next": {"reward": torch.zeros(5)}, "mask": torch.zeros(5)}

    def mixed(*data: Any) -> ReplayBufferEnsemble:
        members = [ring(10) for _ in data]
        for rb, rows in zip(members, data, strict=True):
            rb.extend(rows)
        return ReplayBufferEnsemble(*members, ratio=0.5)

    flat = {"id": torch.arange(5), "reward": torch.zeros(5)}
    nested = {"id": torch.arange(5), "next": {"reward": torch.zeros(5)}}
    rename = r"member 0 has also 'reward'; .* transform=RenameFields\(\{'reward': \('next', 'reward'\)\}\) in member 0"
    fields = r"member 0 has also \('next', 'info'\); member 1 has also 'mask'.*[Ss]elect the fields"
    for data, words in (
        ((flat, nested), rename),
        ((more, less), fields),
        ((TensorDict(more, [5]), TensorDict(less, [5])), fields),
        ((more, TensorDict(more, [5])), r"member 0 gives rows as dict, member 1 .* as TensorDict.*tensordict=True"),
        (({"id": torch.zeros(5)}, {"id": torch.zeros(5, 3)}), r"rows of 'id' are \[\] in member 0, \[3\] in member 1"),
    ):
        with pytest.raises(KindError, match=words):
            mixed(*data).sample(4)


def test_three_members_a_subset_and_its_schedule():
    rb = ReplayBufferEnsemble(
        plain(0), plain(100), plain(200), ratio={0: [2, 1, 1], 4: [0, 1, 3]}, batch_size=8, source_key="from"
    )
    assert torch.bincount(rb.sample()["from"], minlength=3).tolist() == [4, 2, 2]
    for _ in range(3):
        rb.sample()
    assert torch.bincount(rb.sample()["from"], minlength=3).tolist() == [0, 2, 6]
    last = rb[1:]
    assert last.sampler.ratio == [0.25, 0.75]
    assert torch.bincount(last.sample()["from"], minlength=2).tolist() == [2, 6]
    assert "ratio=schedule at step 5" in repr(rb)
    assert "ratio=[0.333333, 0.666667]" in repr(pair([1, 2]))


def test_schedulers_and_calls_of_step_change_the_share():
    rb = pair(0.5)
    scheduler = LinearScheduler(rb, "share", final_value=0.0, num_steps=5)
    counts = []
    for _ in range(6):
        counts.append(offline(rb.sample(20)))
        scheduler.step()
    assert counts == [10, 8, 6, 4, 2, 0]
    other = pair({0: 0.5, 5: 0}, ratio_steps="calls")
    for expected in counts:
        assert offline(other.sample(20)) == offline(other.sample(20)) == expected
        other.step()
    with pytest.raises(UsageError, match="ratio_steps"):
        rb.step()
