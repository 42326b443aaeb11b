"""Shutdown, statistics as a mapping, generators, and the further names of TorchRL's buffers."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import KeyMissingError, KindError, UsageError

from ...registry import ring, seeded
from .refusals import raises, refuses


def _buffer(rows: int = 10, **options: Any) -> ReplayBuffer:
    rb = ring(10, **options)
    if rows:
        rb.extend(torch.arange(rows))
    return rb


def test_shutdown_ends_sampling_and_keeps_rows():
    rb = _buffer(batch_size=2, prefetch=2)
    assert rb.start() is rb.client() is rb
    assert (rb.is_alive, rb.service_backend) == (True, "direct")
    rb.sample()
    rb.synchronize()
    assert rb.stats().prefetch_ready == 2
    rb.shutdown()
    rb.shutdown()
    assert not rb.is_alive
    refuses(
        {
            UsageError: {
                "A shut down replay buffer cannot be sampled": (
                    rb.sample,
                    lambda: next(iter(rb)),
                    rb.next,
                ),
                "cannot be restarted": rb.start,
                "RayReplayBuffer": ReplayBuffer.as_remote,
            },
        }
    )
    assert rb[:].tolist() == list(range(10))
    broken = _buffer(batch_size=2, prefetch=2, transform=lambda batch: 1 // 0)
    for call in (broken.sample, broken.synchronize):
        with pytest.raises(ZeroDivisionError):
            call()


def test_stats_read_as_a_mapping():
    rb = ring(10, batch_size=4, prefetch=3)
    assert json.loads(json.dumps(rb.stats(), allow_nan=False))["size"] == 0
    rb.extend(torch.arange(15))
    rb.sample()
    stats = rb.stats()
    theirs = {"size": 10, "write_count": 15, "prefetch_queue_size": 3, "initialized": True, "capacity": 10}
    assert theirs.items() <= stats.items()
    assert (stats["utilization"], stats["rows"], stats.rows, stats["rows_drawn"]) == (1.0, 10, 10, 4)
    assert json.loads(json.dumps(stats)) == stats
    again = pickle.loads(pickle.dumps(stats))
    assert again == stats
    assert again.row_age_mean == stats["row_age_mean"]
    delayed = ring(10, delayed_init=True)
    stats = delayed.stats()  # which does not make its parts
    assert (stats["initialized"], stats["capacity"], stats["size"], delayed.initialized) == (False, 10, 0, False)
    assert "capacity" not in ReplayBuffer(storage=lambda: LazyTensorStorage(10), delayed_init=True).stats()


@pytest.mark.parametrize("sampler", [lambda: PrioritizedSampler(10, 1.0, 1.0), SamplerWithoutReplacement])
def test_set_rng_determines_what_follows(sampler):
    batches = []
    for prefetch in (None, 2):
        rb = _buffer(sampler=sampler(), batch_size=4, prefetch=prefetch)
        if prefetch:
            rb.sample()  # others are queued, which are dropped
            rb.sampler.restart()
        rb.set_rng(seeded(3))
        batches.append(torch.cat([rb.sample() for _ in range(2)]).tolist())
    assert batches[0] == batches[1]
    with pytest.raises(KindError):
        rb.set_rng(3)  # type: ignore[arg-type]


def test_next_is_one_pass_and_begins_again():
    rb = _buffer(sampler=SamplerWithoutReplacement(), batch_size=4)
    for _ in range(2):
        seen = []
        while (batch := rb.next()) is not None:
            seen += batch.tolist()
        assert sorted(seen) == list(range(10))
    raises(
        (_buffer().next, UsageError, r"Cannot iterate over the replay buffer\. Batch_size was not specified"),
        (_buffer().can_sample, UsageError, "batch_size not specified"),
    )


def test_what_empty_leaves():
    rb = _buffer()
    rb.empty(empty_write_count=False)
    rb.extend(torch.arange(3))
    assert (rb.write_count, len(rb)) == (13, 3)
    rb.empty()
    assert rb.write_count == 0
    with pytest.raises(UsageError, match="dim_extend cannot be reset"):
        _buffer().dim_extend = 1


def test_mark_update_gives_the_default_priority():
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), batch_size=200)
    index = rb.extend(torch.arange(4))
    rb.update_priority(index, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    rb.mark_update(index[:1])
    assert set(rb.sample().tolist()) == {0, 3}
    assert rb.prioritized_sampler is rb.sampler
    _buffer().mark_update(0)


def test_insert_index_is_that_of_the_next_add():
    writer = TensorDictMaxValueWriter(rank_key="key")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer)
    for key in torch.rand(20, generator=seeded()):
        row = TensorDict({"key": key}, [])
        expected = writer.get_insert_index(row)
        assert rb.add(row) == expected
    insert, lanes = writer.get_insert_index, TensorDict({"key": torch.ones(2, 2)}, [2, 2])
    raises(
        (lambda: insert(torch.ones(1)), UsageError, "expects data to be a tensor collection"),
        (lambda: insert(lanes), UsageError, "no more than 1 dimension"),
        (lambda: insert(TensorDict({"x": torch.ones(())}, [])), KeyMissingError, "rank"),
    )


def test_include_info_is_going_away():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    for given in (True, False):
        with pytest.warns(UserWarning, match="include_info is going to be deprecated"):
            assert "index" in rb.sample(include_info=given)
