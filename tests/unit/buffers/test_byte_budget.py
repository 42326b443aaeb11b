"""max_bytes: rows stay within the budget, the oldest leave, and everything else of the buffer follows."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    LazyTensorStorage,
    PrioritizedSampler,
    QueueSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from ostinato.errors import CapacityError, OptionError, StorageMemoryError

from ...registry import seeded
from .refusals import raises

BUDGET = 11_000
LENGTH = 7
DENSE = 9
"""Bytes of a row without its frame: id (int64) and done (bool)."""


def rows(start: int, count: int) -> dict[str, torch.Tensor]:
    """Return rows whose frames take a different number of bytes; frame and id belong together."""
    ids = torch.arange(start, start + count)
    frames = torch.zeros(count, 400, dtype=torch.uint8)
    for frame, number in zip(frames, ids.tolist(), strict=True):
        generator = seeded(number)
        width = 40 + 30 * (number % 10 + number // 60 % 3)
        frame[:width] = torch.randint(0, 256, (width,), dtype=torch.uint8, generator=generator)
    return {"obs": frames, "id": ids, "done": ids % LENGTH == LENGTH - 1}


SIZES = [DENSE + len(zlib.compress(rows(i, 1)["obs"].numpy().tobytes(), 1)) for i in range(320)]
"""Bytes of each stored row."""


def buffer(capacity: int = 1000, evict: str = "rows", **options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(capacity, codec="zlib", max_bytes=BUDGET, evict=evict)  # type: ignore[arg-type]
    if evict == "episodes":
        options.setdefault("episodes", Episodes(end_key="done"))
    return ReplayBuffer(storage=storage, batch_size=8, generator=seeded(1), **options)


class Model:
    """The ids present, the oldest first, as the documentation says."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: list[int] = []

    def extend(self, start: int, count: int) -> None:
        new = list(range(start, start + count))
        coming = sum(SIZES[i] for i in new)
        replaced = max(0, len(self.ids) + count - self.capacity)
        if coming + sum(SIZES[i] for i in self.ids[replaced:]) > BUDGET:
            while self.ids and coming + sum(SIZES[i] for i in self.ids) > BUDGET - BUDGET // 16:
                self.ids.pop(0)
        self.ids = (self.ids + new)[-self.capacity :]


@pytest.mark.parametrize("capacity", [50, 1000])
def test_the_oldest_rows_leave(capacity):
    rb, model, start = buffer(capacity), Model(capacity), 0
    wrapped = left = False
    for step in range(60):
        count = 1 + step % 7
        rb.extend(rows(start, count))
        model.extend(start, count)
        start += count
        left = left or len(rb) < min(start, capacity)
        ids = rb["id"].tolist()
        wrapped = wrapped or ids != sorted(ids)
        assert sorted(ids) == model.ids
        assert len(rb) == len(ids)
        assert sum(SIZES[i] for i in ids) <= BUDGET
    assert left
    assert wrapped == (capacity == 50)
    assert all(torch.equal(frame, rows(i, 1)["obs"][0]) for frame, i in zip(rb["obs"], rb["id"].tolist(), strict=True))
    assert rb.write_count == start


def test_interleaved_trajectories_leave_whole():
    storage = LazyTensorStorage(500, codec="zlib", max_bytes=BUDGET, evict="episodes")
    rb = ReplayBuffer(storage=storage, batch_size=4, episodes=Episodes(end_key="done", traj_key="traj"))
    for start in range(0, 210, 6):
        data = rows(start, 6)
        step = data["id"] // 3  # three trajectories in turns, each of 5 rows
        rb.extend({**data, "done": step % 5 == 4, "traj": data["id"] % 3 + 3 * (step // 5)})
        found = rb[:]
        assert found["id"].tolist() == sorted(found["id"].tolist())
        for traj in found["traj"].unique().tolist():
            mine = found["id"][found["traj"] == traj].tolist()
            assert all(b - a == 3 for a, b in pairwise(mine))
            assert mine[0] // 3 % 5 == 0
        assert sum(SIZES[i] + 8 for i in found["id"].tolist()) <= BUDGET


def test_priorities_follow_their_rows_and_stale_ones_reach_none():
    rb = buffer(sampler=PrioritizedSampler(1000, 1.0, 1.0, eps=0.0))
    rb.extend(rows(0, 40))
    for start in range(40, 240, 5):
        rb.update_priority(torch.arange(len(rb)), rb["id"] + 1.0)
        info = rb.sample(return_info=True)[1]
        moved = len(rb) + 5
        rb.extend(rows(start, 5))
        if len(rb) < moved:
            rb.update_priority(info["index"], torch.zeros(8), info["index_generation"])
        kept = rb["id"][rb["id"] < start]
        assert rb.sampler.state_dict()["priorities"].tolist()[: len(kept)] == (kept + 1.0).tolist()
    assert rb.stats().stale_updates > 0


def test_a_pass_without_replacement_goes_on():
    rb = buffer(sampler=SamplerWithoutReplacement())
    rb.extend(rows(0, 40))
    drawn = rb.sample()["id"].tolist()
    rb.extend(rows(40, 20))
    ids = rb["id"].tolist()
    assert len(ids) < 60
    left = [i for i in ids if i not in drawn]
    batches: list[int] = []
    while len(batches) < len(left):
        batches += rb.sample()["id"].tolist()
    assert sorted(batches) == sorted(left)
    assert sorted(i for batch in rb for i in batch["id"].tolist()) == sorted(ids)


@pytest.mark.parametrize(("evict", "cls"), [("rows", SliceSampler), ("episodes", SliceSamplerWithoutReplacement)])
def test_slices_never_mix_episodes(evict, cls):
    rb = buffer(evict=evict, sampler=cls(slice_len=3, end_key="done", strict_length=True))
    for start in range(0, 320, 8):
        rb.extend(rows(start, 8))
        ids = rb.sample(9)["id"].view(-1, 3)
        assert (ids.diff(dim=1) == 1).all()
        assert (ids[:, 0] // LENGTH == ids[:, 2] // LENGTH).all()
        assert set(ids.flatten().tolist()) <= set(rb["id"].tolist())


def test_a_batch_beyond_the_budget_changes_nothing():
    rb = buffer()
    rb.extend(rows(0, 10))
    with pytest.raises(StorageMemoryError, match=r"300 row\(s\) take \d+ bytes compressed, max_bytes=11000"):
        rb.extend(rows(10, 300))
    assert rb["id"].tolist() == list(range(10))
    with pytest.raises(StorageMemoryError):
        buffer().extend(rows(0, 300))


def test_options_and_parts_that_cannot_follow_raise():
    wrong: list[Any] = [
        ({"codec": None}, OptionError, "max_bytes needs codec"),
        ({"single_copy": True}, OptionError, "or single_copy out"),
        ({"max_bytes": 0}, CapacityError, "positive integer or None, got 0"),
        ({"evict": "all"}, OptionError, "must be one of 'rows', 'episodes'"),
        ({"max_bytes": None, "evict": "episodes"}, OptionError, "give max_bytes"),
        ({"evict": "episodes", "ndim": 2}, OptionError, "needs ndim=1"),
    ]
    base: dict[str, Any] = {"max_size": 10, "codec": "zlib", "max_bytes": 100}
    raises(
        *((lambda given=given: LazyTensorStorage(**{**base, **given}), error, words) for given, error, words in wrong)
    )
    parts: list[Any] = [
        ({"writer": TensorDictMaxValueWriter(rank_key="id")}, "keeps no order: use RoundRobinWriter"),
        ({"sampler": QueueSampler()}, "QueueSampler counts the draws"),
        ({"evict": "episodes", "episodes": None}, "does not know where they end"),
    ]
    for options, message in parts:
        rb = buffer(**options)
        with pytest.raises(OptionError, match=message):
            rb.extend(TensorDict(rows(0, 5), [5]))
        assert len(rb) == 0


def test_an_episode_longer_than_the_budget_loses_its_oldest_rows():
    rb = buffer(evict="episodes")
    for start in range(0, 180, 6):
        rb.extend({**rows(start, 6), "done": torch.zeros(6, dtype=torch.bool)})
    ids = rb["id"].tolist()
    assert ids == list(range(ids[0], 180))
    assert BUDGET / 2 < sum(SIZES[i] for i in ids) <= BUDGET


def test_python_objects_and_late_fields_follow():
    rb = buffer()
    for start in range(0, 140, 10):
        more = {"late": torch.arange(start, start + 10) * 2} if start > 30 else {}
        rb.extend({**rows(start, 10), "text": [f"row {i}" for i in range(start, start + 10)], **more})
        if start == 30:
            found = rb[:]
            found["late"] = found["id"] * 2
            rb.write_all(found)
        if start >= 30:
            assert torch.equal(rb["late"], rb["id"] * 2)
        assert rb["text"] == [f"row {i}" for i in rb["id"].tolist()]
    assert len(rb) < 140
