"""Views: several samplers over the rows of one buffer, which all hear of each write."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from pathlib import Path  # noqa: TC003 (Hypothesis reads annotations)
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    Episodes,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato._backend import backend as used_backend
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    KindError,
    OptionError,
    PriorityError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...effort import examples
from ...stats.chi_square import p_value

pytestmark = pytest.mark.usefixtures("backend")
CAPACITY = 13


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ranked(capacity: int = CAPACITY, *, alpha: float = 1.0, **options: Any) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, alpha, 1.0, 0.0, **options)


def buffer(**options: Any) -> ReplayBuffer:
    options.setdefault("storage", LazyTensorStorage(CAPACITY))
    return ReplayBuffer(**{"batch_size": 4, "generator": seeded(), **options})


def numbered(start: int, rows: int) -> dict[str, torch.Tensor]:
    return {"id": torch.arange(start, start + rows), "obs": torch.arange(start, start + rows).float()[:, None]}


# -- a model of what each view knows ----------------------------------------------------------------------------------


class Model:
    """Ids in the slots of a ring, and the priorities that each prioritized sampler keeps."""

    def __init__(self, samplers: int) -> None:
        self.ids: list[int] = []
        self.cursor = self.next_id = 0
        self.priorities: list[list[float]] = [[] for _ in range(samplers)]
        self.largest = [0.0] * samplers

    def extend(self, rows: int) -> dict[str, torch.Tensor]:
        data = numbered(self.next_id, rows)
        for identity in range(self.next_id, self.next_id + rows):
            self._put(self.ids, identity)
            for priorities, largest in zip(self.priorities, self.largest, strict=True):
                self._put(priorities, largest or 1.0)
            self.cursor = (self.cursor + 1) % CAPACITY
        self.next_id += rows
        return data

    def _put(self, column: list[Any], value: float) -> None:
        if self.cursor < len(column):
            column[self.cursor] = value
        else:
            column.append(value)

    def update(self, sampler: int, slots: list[int], values: list[float], ids: list[int] | None) -> None:
        kept = [ids is None or self.ids[slot] == identity for slot, identity in zip(slots, ids or slots, strict=True)]
        for slot, value, present in zip(slots, values, kept, strict=True):
            if present:
                self.priorities[sampler][slot] = value
        given = [value for value, present in zip(values, kept, strict=True) if present]
        self.largest[sampler] = max([self.largest[sampler], *given])

    def empty(self) -> None:
        self.ids, self.cursor = [], 0
        self.priorities = [[] for _ in self.priorities]
        self.largest = [0.0] * len(self.largest)


class Check:
    """A buffer, its views and the model of both; operations by name."""

    def __init__(self, path: Path, *, main_ranked: bool) -> None:
        self.path = path
        self.rb = buffer(sampler=ranked() if main_ranked else RandomSampler())
        self.uniform = self.rb.view(generator=seeded(1))
        self.first = self.rb.view(sampler=ranked(), generator=seeded(2), batch_size=3)
        self.second = self.rb.view(sampler=ranked(alpha=0.5), generator=seeded(3), prefetch=2)
        self.ranked = [self.first, self.second, *([self.rb] if main_ranked else [])]
        self.model = Model(len(self.ranked))
        self.late: list[tuple[int, dict[str, Any], list[int]]] = []
        self.handles = [self.rb, self.uniform, self.first, self.second]

    def extend(self, dice: int) -> None:
        self.handles[dice % 4].extend(self.model.extend(1 + dice % 17))

    def add(self, dice: int) -> None:
        self.handles[dice % 4].add({key: value[0] for key, value in self.model.extend(1).items()})

    def draw(self, dice: int) -> None:
        number = dice % len(self.ranked)
        batch, info = self.ranked[number].sample(return_info=True)
        if number != 1:  # what is prefetched may have been replaced
            assert batch["id"].tolist() == [self.model.ids[slot] for slot in info["index"].tolist()]
            assert all(self.model.priorities[number][slot] > 0 for slot in info["index"].tolist())
        self.late.append((number, info, batch["id"].tolist()))

    def learn(self, dice: int) -> None:
        if self.late:
            number, info, ids = self.late.pop(dice % len(self.late))
            slots = info["index"].tolist()
            if len(set(slots)) == len(slots) and max(slots) < len(self.model.ids):
                values = [1.0 + (dice * (i + 1)) % 5 for i in range(len(slots))]
                self.ranked[number].update_priority(info["index"], torch.tensor(values), info["index_generation"])
                self.model.update(number, slots, values, ids)

    def bare(self, dice: int) -> None:
        slot, number = dice % len(self.model.ids), dice % len(self.ranked)
        self.ranked[number].update_priority(torch.tensor([slot]), float(dice % 3))
        self.model.update(number, [slot], [float(dice % 3)], None)

    def empty(self, dice: int) -> None:
        if dice % 3 == 0:
            self.handles[dice % 4].empty()
            self.model.empty()
            self.late.clear()
            self.extend(dice)

    def reload(self, dice: int) -> None:
        path = self.path / "saved"
        self.rb.dumps(path, incremental=dice % 2 == 1)
        expected = self.batches()
        self.rb.loads(path)
        assert self.batches() == expected
        self.rb.loads(path)
        self.late.clear()

    def batches(self) -> list[Any]:
        """Draw; slots, because rows of a queued batch may have been read before they were replaced."""
        drawn = [handle for handle in self.handles if handle is self.uniform or self.drawable(handle)]
        return [handle.sample(return_info=True)[1]["index"].tolist() for _ in range(3) for handle in drawn]

    def drawable(self, handle: ReplayBuffer) -> bool:
        return handle not in self.ranked or any(self.model.priorities[self.ranked.index(handle)])

    def compare(self) -> None:
        model = self.model
        for handle in self.handles:
            assert len(handle) == len(model.ids)
            assert handle["id"].tolist() == model.ids
        for handle, priorities in zip(self.ranked, model.priorities, strict=True):
            assert handle.sampler.priorities.tolist() == priorities  # type: ignore[attr-defined]
        seen = self.uniform.sample(64)["id"].tolist()
        assert set(seen) <= set(model.ids)


OPERATIONS = ["extend", "extend", "add", "draw", "draw", "learn", "bare", "empty", "reload"]


@examples(0.5)
@given(
    steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 999)), max_size=25),
    main_ranked=st.booleans(),
)
def test_views_keep_what_a_model_keeps(
    steps: list[tuple[str, int]], main_ranked: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check = Check(tmp_path_factory.mktemp("views"), main_ranked=main_ranked)
    check.extend(5)
    for name, dice in steps:
        if name != "draw" or check.drawable(check.ranked[dice % len(check.ranked)]):
            getattr(check, name)(dice)
        check.compare()


# -- distributions ----------------------------------------------------------------------------------------------------


def test_both_distributions_hold_while_rows_are_written_and_replaced() -> None:
    rb = buffer(storage=LazyTensorStorage(40))
    view = rb.view(sampler=ranked(40), generator=seeded(5), batch_size=8)
    uniform, by_priority = torch.zeros(200), torch.zeros(200)
    expected_uniform, expected_ranked = torch.zeros(200), torch.zeros(200)
    start = 0
    for step in range(60):
        rows = 1 + step % 7
        index = (rb if step % 2 else view).extend(numbered(start, rows))
        weights = 1.0 + (torch.arange(start, start + rows) % 5)
        view.update_priority(index, weights)
        start += rows
        present = rb["id"]
        for _ in range(30):
            uniform += torch.bincount(rb.sample(8)["id"], minlength=200)[:200] if start <= 200 else 0
            by_priority += torch.bincount(view.sample(8)["id"], minlength=200)[:200] if start <= 200 else 0
        if start <= 200:
            expected_uniform[present] += 240 / len(present)
            values = 1.0 + (present % 5)
            expected_ranked[present] += 240 * values / values.sum()
    for counts, expected in ((uniform, expected_uniform), (by_priority, expected_ranked)):
        seen = expected > 5
        assert counts.sum() > 1000
        assert 1e-4 < p_value(counts[seen].int().tolist(), expected[seen].tolist()) < 1 - 1e-4


def test_draws_of_one_view_leave_those_of_others_as_they_are() -> None:
    alone, beside = buffer(), buffer()
    views = [beside.view(sampler=ranked(), generator=seeded(9)), beside.view(prefetch=3, generator=seeded(8))]
    for step in range(20):
        rows = numbered(5 * step, 5)
        alone.extend(rows)
        beside.extend(rows)
        for view in views:
            view.sample()
        assert alone.sample()["id"].tolist() == beside.sample()["id"].tolist()


# -- parts of a view --------------------------------------------------------------------------------------------------


def test_a_view_made_late_starts_with_the_rows_present_at_the_default_priority() -> None:
    rb = buffer(sampler=ranked())
    index = rb.extend(numbered(0, 9))
    rb.update_priority(index, 5.0)
    view = rb.view(sampler=ranked())
    assert view.sampler.priorities.tolist() == [1.0] * 9  # type: ignore[attr-defined]
    assert rb.sampler.priorities.tolist() == [5.0] * 9  # type: ignore[attr-defined]


def test_the_default_priority_is_the_largest_given_to_that_sampler() -> None:
    rb = buffer(sampler=ranked())
    view = rb.view(sampler=ranked())
    rb.update_priority(rb.extend(numbered(0, 2)), 7.0)
    view.update_priority(torch.tensor([1]), 3.0)
    rb.extend(numbered(2, 1))
    assert rb.sampler.priorities.tolist() == [7.0, 7.0, 7.0]  # type: ignore[attr-defined]
    assert view.sampler.priorities.tolist() == [1.0, 3.0, 3.0]  # type: ignore[attr-defined]


def test_priorities_within_rows_reach_every_prioritized_view() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, priority_key="p")
    view = rb.view(sampler=ranked())
    rb.extend(TensorDict({"p": torch.tensor([1.0, 2.0, 3.0])}, [3]))
    assert view.sampler.priorities.tolist() == [1.0, 2.0, 3.0]  # type: ignore[attr-defined]
    with pytest.raises(PriorityError):
        rb.extend(TensorDict({"p": torch.tensor([-1.0])}, [1]))
    assert len(rb) == 3
    rb[0] = TensorDict({"p": torch.tensor(9.0)}, [])
    assert view.sampler.priorities.tolist() == [9.0, 2.0, 3.0]  # type: ignore[attr-defined]
    batch = view.sample()
    assert {"index", "priority_weight", "index_generation"} <= set(batch.keys())
    assert "priority_weight" not in set(rb.sample().keys())
    batch["p"] = torch.full((4,), 0.5)
    view.update_tensordict_priority(batch)
    assert all(view.sampler.priorities[batch["index"]] == 0.5)  # type: ignore[attr-defined]


def test_a_late_priority_never_reaches_a_row_that_replaced_the_sampled_one() -> None:
    rb = buffer()
    view = rb.view(sampler=ranked())
    rb.extend(numbered(0, CAPACITY))
    _, info = view.sample(return_info=True)
    view.extend(numbered(100, CAPACITY))
    view.update_priority(info, torch.full((4,), 9.0))
    assert view.sampler.priorities.tolist() == [1.0] * CAPACITY  # type: ignore[attr-defined]
    assert (view.stats().stale_updates, rb.stats().stale_updates) == (4, 0)


def test_windows_and_episodes_of_a_view_are_its_own() -> None:
    rb = buffer(storage=LazyTensorStorage(30))
    steps = rb.view(sample_unit=NStep(3, gamma=1.0), batch_size=16)
    slices = rb.view(sampler=SliceSampler(slice_len=4), batch_size=8)
    for start in range(0, 100, 10):
        done = torch.arange(10) % 10 == 9
        rows = {"id": torch.arange(start, start + 10), "reward": torch.ones(10), "done": done}
        rb.extend({**rows, "next_obs": torch.arange(start + 1, start + 11).float()})
        found = slices.sample()["id"].view(2, 4)
        assert torch.equal(found, found[:, :1] + torch.arange(4))
        assert bool((found[:, 0] // 10 == found[:, 3] // 10).all())
        batch = steps.sample()
        left = 10 - batch["id"] % 10
        assert torch.equal(batch["reward"], left.clamp(max=3).float())
    rb.set_at_("done", torch.ones(30, dtype=torch.bool), slice(None))
    with pytest.raises(EmptyBufferError):
        slices.sample()
    assert rb.sample()["id"].shape == (4,)


def test_a_view_takes_the_episodes_of_the_buffer() -> None:
    rb = buffer(episodes=Episodes(end_key="over"), sampler=RandomSampler())
    view = rb.view(sampler=SliceSampler(slice_len=2), batch_size=4)
    rb.extend({"id": torch.arange(6), "over": torch.tensor([False, True] * 3)})
    assert view.sample()["id"].view(2, 2)[:, 0].remainder(2).tolist() == [0, 0]


def test_the_transforms_of_a_view_are_its_own_and_writes_take_those_of_the_buffer() -> None:
    rb = buffer()
    rb.append_transform(lambda data: {**data, "obs": data["obs"] * 10}, invert=True)
    view = rb.view(transform=lambda data: {**data, "obs": data["obs"] + 0.5})
    view.extend(numbered(1, 1))
    view.add({key: value[0] for key, value in numbered(1, 1).items()})
    assert view.storage["obs"].flatten().tolist() == [10.0, 10.0]
    assert set(view.sample()["obs"].flatten().tolist()) == {10.5}
    view[1] = {key: value[0] for key, value in numbered(2, 1).items()}
    assert view["obs"].flatten().tolist() == [10.5, 20.5]


def test_passes_without_replacement_go_on_in_each_view() -> None:
    rb = buffer(sampler=SamplerWithoutReplacement())
    view = rb.view(sampler=SamplerWithoutReplacement(), batch_size=3)
    rb.extend(numbered(0, 12))
    assert sorted(torch.cat([batch["id"] for batch in view]).tolist()) == list(range(12))
    assert sorted(torch.cat([batch["id"] for batch in rb]).tolist()) == list(range(12))
    view.sample()
    assert sorted(torch.cat([rb.sample()["id"] for _ in range(3)]).tolist()) == list(range(12))


def test_other_storages_and_writers() -> None:
    rb = ReplayBuffer(storage=ListStorage(5), batch_size=2, collate_fn=list)
    view = rb.view(sampler=PrioritizedSampler(5, 1.0, 1.0))
    rb.extend(["a", "b", "c"])
    assert set(view.sample(9)) <= {"a", "b", "c"}
    best = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=2
    )
    view = best.view(sampler=ranked(3))
    best.extend(TensorDict({"rank": torch.tensor([1.0, 5.0, 2.0])}, [3]))
    view.update_priority(torch.arange(3), 4.0)
    best.extend(TensorDict({"rank": torch.tensor([9.0])}, [1]))
    assert sorted(view.sample(64)["rank"].unique().tolist()) == [2.0, 5.0, 9.0]
    two = buffer(storage=LazyTensorStorage(12, ndim=2))
    view = two.view(sampler=ranked(12))
    index = two.extend({"id": torch.arange(6).view(3, 2)})
    view.update_priority(index, torch.tensor([0.0, 0, 0, 0, 0, 1.0]))
    assert set(view.sample()["id"].tolist()) == {5}


def test_rows_that_leave_for_a_budget_of_bytes_leave_every_view() -> None:
    rb = buffer(storage=LazyTensorStorage(200, codec={"wide": "zlib"}, max_bytes=3000))
    view = rb.view(sampler=ranked(200))
    for start in range(0, 200, 4):
        ids = torch.arange(start, start + 4)
        rb.extend({"id": ids, "wide": torch.rand(4, 100)})
        present = rb["id"]
        assert int(present.max()) == start + 3
        view.update_priority(torch.arange(len(present)), present + 1.0)
        batch, info = view.sample(return_info=True)
        assert batch["id"].tolist() == present[info["index"]].tolist()
        rb.extend({"id": ids[:0], "wide": torch.rand(0, 100)})
        assert view.sampler.priorities.tolist() == (rb["id"] + 1.0).tolist()  # type: ignore[attr-defined]
    assert len(rb) < 40


def test_deleted_rows_leave_every_view(tmp_path: Path) -> None:
    rb = buffer()
    views = [rb.view(sampler=ranked(), batch_size=64), rb.view(prefetch=2, batch_size=64, generator=seeded(1))]
    index = rb.extend(numbered(0, 9))
    rb.sample()
    _, info = views[0].sample(return_info=True)
    views[1].sample()
    assert views[0].delete(index[2:5]).tolist() == [True] * 3
    views[0].update_priority(info, torch.full((64,), 9.0))  # late: those of the deleted rows are dropped
    late = rb.view(sampler=ranked(), batch_size=64)
    kept = {0, 1, 5, 6, 7, 8}
    for handle in (*views, late):
        assert len(handle) == 6
        assert set(handle.sample()["id"].tolist()) <= kept
    rb.dumps(tmp_path / "saved")
    again = buffer()
    others = [again.view(sampler=ranked(), batch_size=64), again.view(prefetch=2, batch_size=64, generator=seeded(1))]
    others.append(again.view(sampler=ranked(), batch_size=64))
    again.loads(tmp_path / "saved")
    for handle in others:
        assert set(handle.sample()["id"].tolist()) <= kept
    assert sorted(again.extend(numbered(50, 3)).tolist()) == [2, 3, 4]
    assert set(others[2].sample(500)["id"].tolist()) == kept | {50, 51, 52}
    with pytest.raises(OptionError, match="windows or episodes"):
        rb.view(sample_unit=NStep(2, gamma=0.9))
    with pytest.raises(OptionError, match="windows or episodes"):
        views[1].set_sampler(SliceSampler(slice_len=2))
    with pytest.raises(OptionError, match="windows or episodes"):
        buffer(remover="lifo").view(sampler=SliceSampler(slice_len=2))
    rb = buffer()
    view = rb.view(sampler=SliceSampler(slice_len=1, end_key="id"))
    rb.extend({"id": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(OptionError, match="windows or episodes"):
        rb.delete([1])
    assert len(view) == 3


def test_prefetched_batches_are_dropped_where_rows_are_replaced_as_a_whole() -> None:
    rb = buffer()
    view = rb.view(prefetch=3, generator=seeded(1))
    rb.extend(numbered(0, 5))
    view.sample()
    rb.empty()
    rb.extend(numbered(50, 5))
    assert int(view.sample()["id"].min()) >= 50
    other = LazyTensorStorage(CAPACITY)
    other.set(range(3), numbered(200, 3))
    rb.set_storage(other)
    assert int(view.sample()["id"].min()) >= 200
    assert len(view) == 3


def test_a_storage_that_is_written_by_others_is_followed_by_all_views() -> None:
    rb = buffer()
    view = rb.view(sampler=ranked())
    rb.extend(numbered(0, 3))
    view.update_priority(torch.arange(3), 0.0)
    rb.storage.set(range(4), numbered(70, 4))
    assert int(view.sample()["id"].min()) >= 70
    assert view.sampler.priorities.tolist() == [1.0] * 4  # type: ignore[attr-defined]


def test_two_buffers_over_one_storage_object_stay_correct() -> None:
    """TorchRL allows it and keeps priorities of rows that were replaced; here the other buffer starts anew."""
    storage = LazyTensorStorage(CAPACITY)
    one, two = buffer(storage=storage), ReplayBuffer(storage=storage, sampler=ranked(), batch_size=8)
    for start in range(0, 60, 4):
        (one if start % 8 else two).extend(numbered(start, 4))
        present = set(storage["id"].tolist())
        assert set(two.sample()["id"].tolist()) <= present
        assert set(one.sample()["id"].tolist()) <= present
        assert start + 3 in present
        batch, info = two.sample(return_info=True)
        one.extend(numbered(start + 1000, 4))
        two.update_priority(info, torch.full((8,), 50.0))
        one.sample()
        start_of = {int(slot): int(row) for slot, row in zip(info["index"], batch["id"], strict=True)}
        for slot, row in start_of.items():
            if int(storage["id"][slot]) != row:
                assert two.sampler.priorities[slot] != 50.0  # type: ignore[attr-defined]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def resumable(**options: Any) -> list[ReplayBuffer]:
    rb = buffer(storage=LazyTensorStorage(30), prefetch=2, **options)
    return [
        rb,
        rb.view(sampler=ranked(30), generator=seeded(1), prefetch=3),
        rb.view(sampler=SamplerWithoutReplacement(), generator=seeded(2), batch_size=7),
        rb.view(sampler=SliceSampler(slice_len=3), generator=seeded(3), batch_size=6, prefetch=1),
        rb.view(sample_unit=NStep(2, gamma=0.9), generator=seeded(4)),
    ]


def fill(handles: list[ReplayBuffer], rounds: int) -> None:
    for step in range(rounds):
        done = (torch.arange(7) + step) % 5 == 0
        rows = {"id": torch.arange(step * 7, step * 7 + 7), "reward": torch.rand(7), "done": done}
        handles[step % 5].extend({**rows, "next_obs": torch.rand(7, 2)})
        _, info = handles[1].sample(return_info=True)
        handles[1].update_priority(info, torch.arange(4) + 1.0)
        for handle in handles:
            handle.sample()


@pytest.mark.parametrize("way", ["files", "incremental", "dict"])
def test_all_views_resume_bit_for_bit(way: str, tmp_path: Path) -> None:
    saved = resumable()
    fill(saved, 9)
    fresh = resumable()
    if way == "dict":
        state = saved[0].state_dict()
    else:
        saved[0].dumps(tmp_path / "saved")
        if way == "incremental":
            fill(saved, 2)
            saved[0].dumps(tmp_path / "saved", incremental=True)
    for _ in range(2):  # into an empty buffer, and into one in use
        for rb in (fresh[0], saved[0]):
            rb.load_state_dict(state) if way == "dict" else rb.loads(tmp_path / "saved")
        assert [handle.stats().rows_drawn for handle in fresh] == [handle.stats().rows_drawn for handle in saved]
        assert torch.equal(fresh[1].sampler.priorities, saved[1].sampler.priorities)  # type: ignore[attr-defined]
        for _ in range(6):
            for mine, theirs in zip(fresh, saved, strict=True):
                assert torch.equal(mine.sample()["id"], theirs.sample()["id"])


def test_views_are_loaded_into_a_larger_buffer(tmp_path: Path) -> None:
    rb = buffer()
    view = rb.view(sampler=ranked())
    rb.extend(numbered(0, CAPACITY + 4))
    view.update_priority(torch.arange(CAPACITY), rb["id"] + 1.0)
    rb.dumps(tmp_path / "saved")
    larger = buffer(storage=LazyTensorStorage(20))
    other = larger.view(sampler=ranked(20))
    larger.loads(tmp_path / "saved")
    assert larger["id"].tolist() == list(range(4, CAPACITY + 4))
    assert other.sampler.priorities.tolist() == (larger["id"] + 1.0).tolist()  # type: ignore[attr-defined]


def test_a_checkpoint_of_other_views_raises_and_changes_nothing(tmp_path: Path) -> None:
    rb = buffer()
    view = rb.view(sampler=ranked())
    rb.extend(numbered(0, 5))
    rb.dumps(tmp_path / "saved")
    for others in ([], [RandomSampler()], [ranked(), RandomSampler()]):
        other = buffer()
        kept = [other.view(sampler=sampler) for sampler in others]
        other.extend(numbered(50, 2))
        with pytest.raises(CheckpointError, match=r"views|sampler is a"):
            other.loads(tmp_path / "saved")
        assert other["id"].tolist() == [50, 51]
        assert all(len(view) == 2 for view in kept)
    del view
    rb.dumps(tmp_path / "alone")
    buffer().loads(tmp_path / "alone")


def test_a_load_that_fails_late_brings_views_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles, other = resumable(), resumable()
    fill(handles, 6)
    handles[0].dumps(tmp_path / "mine")
    fill(other, 4)
    other[0].dumps(tmp_path / "theirs")

    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ostinato.buffers.checkpoint.load._end_load", fail)
        with pytest.raises(MemoryError):
            handles[0].loads(tmp_path / "theirs")
    again = resumable()
    again[0].loads(tmp_path / "mine")
    for mine, theirs in zip(handles, again, strict=True):
        for _ in range(5):
            slots = [handle.sample(return_info=True)[1]["index"] for handle in (mine, theirs)]
            assert torch.equal(*slots)


def test_copies_and_pickles(tmp_path: Path) -> None:
    rb = buffer()
    view = rb.view(sampler=ranked(), prefetch=2, generator=seeded(1))
    rb.extend(numbered(0, 6))
    view.sample()
    both = pickle.loads(pickle.dumps((view, rb)))
    assert torch.equal(both[0].sample()["id"], view.sample()["id"])
    both[1].extend(numbered(50, CAPACITY))
    assert both[0].sampler.rows == CAPACITY
    assert both[0]["id"].tolist() == both[1]["id"].tolist()
    assert len(rb) == 6
    alone = pickle.loads(pickle.dumps(rb))
    alone.dumps(tmp_path / "alone")
    buffer().loads(tmp_path / "alone")  # a copy has no views


# -- life of a view ---------------------------------------------------------------------------------------------------


def test_a_dropped_view_is_freed_at_once_and_costs_nothing() -> None:
    gc.disable()
    try:
        rb = buffer()
        view = rb.view(sampler=ranked())
        rb.extend(numbered(0, 3))
        view.sample()
        watched: list[Any] = [weakref.ref(view), weakref.ref(view._engine), weakref.ref(view.sampler)]
        del view
        assert [ref() for ref in watched] == [None] * 3
        rb.extend(numbered(3, 3))
        rb.extend(numbered(6, 3))
        if used_backend.exchange and used_backend.native is not None:
            assert rb._engine.direct is not None
        kept = rb.view()
        watched = [weakref.ref(rb), weakref.ref(rb._engine)]
        del rb
        kept.extend(numbered(9, 1))
        assert len(kept) == 10
        del kept
        assert [ref() for ref in watched] == [None] * 2
    finally:
        gc.enable()


def test_direct_calls_apply_with_views() -> None:
    if not used_backend.exchange or used_backend.native is None:
        pytest.skip("the native extension or torch's exchange API is missing")
    rb = buffer()
    rb.extend(numbered(0, 3))
    rb.extend(numbered(0, 3))
    view = rb.view(sampler=ranked())
    other = rb.view()
    for handle in (rb, view, other):
        rb.extend(numbered(6, 3))
        handle.sample()
        handle.sample()
        assert handle._engine.direct is not None
    assert rb._engine.direct.extend(numbered(9, 2)) is not None  # type: ignore[union-attr]
    assert view._engine.direct.sample(4) is not None  # type: ignore[union-attr]
    assert other._engine.direct.sample(4) is not None  # type: ignore[union-attr]
    assert view.sampler.rows == len(rb)  # type: ignore[attr-defined]
    assert view._engine.direct.extend(numbered(9, 2)) is None  # type: ignore[union-attr]
    counts = [handle.stats().rows_drawn for handle in (rb, view, other)]
    other.sample(4)
    assert [handle.stats().rows_drawn for handle in (rb, view, other)] == [*counts[:2], counts[2] + 4]
    steps = rb.view(sampler=SliceSampler(slice_len=1, end_key="id"), batch_size=1)
    rb.extend(numbered(0, 1))
    assert rb._engine.direct is None or rb._engine.direct.extend(numbered(9, 2)) is None
    del steps


def test_a_view_of_a_view_is_a_view_of_the_buffer() -> None:
    rb = buffer()
    view = rb.view().view(sampler=ranked())
    rb.extend(numbered(0, 3))
    assert view.sampler.rows == 3  # type: ignore[attr-defined]
    assert view.can_sample()
    assert not view.can_sample(4) or len(view.sample(4)["id"]) == 4


def test_the_sampler_of_a_view_is_exchanged_alone() -> None:
    rb = buffer()
    view = rb.view()
    rb.extend(numbered(0, 5))
    rb.extend(numbered(5, 5))
    old = view.set_sampler(ranked())
    assert isinstance(old, RandomSampler)
    assert isinstance(rb.sampler, RandomSampler)
    rb.extend(numbered(10, 3))
    rb.extend(numbered(13, 3))
    assert view.sampler.priorities.tolist() == [1.0] * CAPACITY  # type: ignore[attr-defined]


def test_draws_of_views_do_not_count_for_the_rate_limiter() -> None:
    rb = buffer(rate_limiter=RateLimiter(samples_per_insert=1.0, min_size_to_sample=2, error_buffer=4.0))
    view = rb.view(batch_size=64)
    rb.extend(numbered(0, 4))
    for _ in range(20):
        view.sample()
    assert rb.sample(timeout_s=5.0)["id"].shape == (4,)
    assert view.extend(numbered(4, 2), timeout_s=5.0).shape == (2,)


def test_conditional_updates_through_a_view() -> None:
    rb = buffer()
    view = rb.view(sampler=ranked())
    rb.extend(numbered(0, 6))
    _, info = view.sample(return_info=True)
    result = view.update_if_present(
        index=info["index"],
        generation=info["index_generation"],
        patch={"obs": torch.full((4, 1), 7.0)},
        priority=torch.full((4,), 2.5),
    )
    assert result.updated_count == 4
    assert set(rb["obs"][info["index"]].flatten().tolist()) == {7.0}
    assert set(view.sampler.priorities[info["index"]].tolist()) == {2.5}  # type: ignore[attr-defined]
    view.submit_update_if_present(
        index=info["index"], generation=info["index_generation"], patch={"obs": torch.zeros(4, 1)}
    ).result()
    assert set(rb["obs"][info["index"]].flatten().tolist()) == {0.0}
    view.close()


# -- what raises ------------------------------------------------------------------------------------------------------


def test_samplers_that_use_rows_up_have_no_views() -> None:
    for sampler in (ConsumingSampler(2), QueueSampler()):
        with pytest.raises(OptionError, match="uses rows up"):
            buffer(sampler=sampler).view()
        with pytest.raises(OptionError, match="uses rows up"):
            buffer().view(sampler=type(sampler)())
    rb = buffer()
    view = rb.view()
    with pytest.raises(OptionError, match="uses rows up"):
        rb.set_sampler(ConsumingSampler(2))
    with pytest.raises(OptionError, match="uses rows up"):
        view.set_sampler(QueueSampler())
    del view
    rb.set_sampler(ConsumingSampler(2))


def test_parts_that_do_not_go_together() -> None:
    generator, sampler = seeded(), ranked()
    rb = buffer(generator=generator)
    view = rb.view(sampler=sampler)
    with pytest.raises(OptionError, match="make a sampler for each"):
        rb.view(sampler=sampler)
    with pytest.raises(OptionError, match="give each view one of its own"):
        rb.view(generator=generator)
    with pytest.raises(OptionError, match="batch_size"):
        ReplayBuffer().view(prefetch=2)
    with pytest.raises(KindError):
        rb.view(sampler="uniform")  # type: ignore[arg-type]
    best = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="rank"))
    with pytest.raises(OptionError, match="order"):
        best.view(sampler=SliceSampler(slice_len=2))
    with pytest.raises(OptionError):
        rb.view(batch_size=0)
    rb.extend(numbered(0, 3))
    with pytest.raises(SlotError):
        rb.view(sampler=ranked(2))
    with pytest.raises(OptionError, match="a view"):
        ReplayBufferEnsemble(rb, view)
    assert len(rb._engine.views.live()) == 1  # type: ignore[attr-defined]


def test_a_write_that_a_view_cannot_follow_changes_nothing() -> None:
    rb = buffer()
    view = rb.view(sampler=ranked(4))
    rb.extend(numbered(0, 3))
    with pytest.raises(SlotError):
        rb.extend(numbered(3, 2))
    assert len(rb) == 3
    rb.extend(numbered(3, 1))
    assert view.sampler.priorities.tolist() == [1.0] * 4  # type: ignore[attr-defined]
    rb = buffer()
    view = rb.view(sampler=SliceSampler(slice_len=2, end_key="done"), batch_size=2)
    with pytest.raises((SchemaError, KeyError)):
        rb.extend(numbered(0, 3))
    assert len(rb) == 0
    rb.extend({"done": torch.ones(3, dtype=torch.bool)})
    assert len(view) == 3


def test_what_concerns_the_whole_buffer_raises_on_a_view(tmp_path: Path) -> None:
    rb = buffer()
    rb.extend(numbered(0, 3))
    view = rb.view()
    calls: list[Any] = [
        lambda: view.dumps(tmp_path / "x"),
        lambda: view.loads(tmp_path / "x"),
        view.state_dict,
        lambda: view.load_state_dict({}),
        lambda: view.set_storage(LazyTensorStorage(3)),
        lambda: view.set_writer(rb.writer),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="a view cannot"):
            call()
    for handle in (rb, view):
        with pytest.raises(OptionError, match="views cannot be shared"):
            handle.share()
    assert not (tmp_path / "x").exists()


def test_a_storage_in_files_is_not_shared_behind_the_back_of_a_view(tmp_path: Path) -> None:
    mapped = buffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "rows"))
    other = mapped.view()
    mapped.extend(numbered(0, 2))
    with pytest.raises(OptionError, match="views cannot be shared"):
        mapped.share()
    del other


def test_shared_buffers_have_one_sampler() -> None:
    if used_backend.native is None:
        pytest.skip("sharing needs the native extension")
    rb = ReplayBuffer(storage=LazyTensorStorage(8), shared=True)
    with pytest.raises(OptionError, match="processes share"):
        rb.view()


def test_a_view_makes_the_parts_of_a_delayed_buffer() -> None:
    rb = ReplayBuffer(storage=lambda: LazyTensorStorage(CAPACITY), batch_size=4, delayed_init=True)
    view = rb.view(sampler=ranked())
    assert rb.initialized
    assert view.initialized
    rb.extend(numbered(0, 3))
    assert view.storage is rb.storage
    assert view.dim_extend == rb.dim_extend
    assert view.sample()["id"].shape == (4,)


def test_a_subclass_keeps_its_attributes_in_views() -> None:
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(CAPACITY), batch_size=3)
    view = rb.view()
    rb.extend(numbered(0, 3))
    assert type(view) is PrioritizedReplayBuffer
    assert isinstance(view.prioritized_sampler, RandomSampler)
    with pytest.warns(UserWarning, match="no effect"):
        view.update_priority(torch.tensor([0]), 2.0)


def test_draws_by_policy_version() -> None:
    rb = buffer(version_key="version")
    view = rb.view(sampler=ranked())
    aware = rb.view(sampler=StalenessAwareSampler(version_key="version"))
    for version in range(4):
        rb.extend({**numbered(version * 3, 3), "version": torch.full((3,), version)})
    assert set(rb.sample(64, max_age=1)["version"].tolist()) == {2, 3}
    assert aware.sample()["version"].shape == (4,)
    assert view.sample()["version"].shape == (4,)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_that_write_sample_and_learn_through_all_handles() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(500), batch_size=32)
    handles = [rb, rb.view(sampler=ranked(500)), rb.view(prefetch=2), rb.view(sampler=ranked(500), prefetch=1)]
    rb.extend({"id": torch.zeros(10, dtype=torch.int64), "twice": torch.zeros(10, dtype=torch.int64)})
    errors: list[BaseException] = []
    stop = threading.Event()

    def guard(work: Any) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            errors.append(error)
            stop.set()

    def write(handle: ReplayBuffer) -> None:
        ids = torch.randint(10**9, (17,))
        handle.extend({"id": ids, "twice": 2 * ids})

    def read(handle: ReplayBuffer) -> None:
        batch, info = handle.sample(return_info=True)
        assert torch.equal(batch["twice"], 2 * batch["id"])
        if "index_generation" in info:
            handle.update_priority(info, torch.rand(32) + 0.1)

    def churn() -> None:
        view = rb.view(sampler=ranked(500))
        view.sample()
        rb.stats()

    work = [lambda: write(rb), lambda: write(handles[1]), churn]
    work += [lambda handle=handle: read(handle) for handle in handles]  # type: ignore[misc]
    threads = [threading.Thread(target=guard, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    stop.wait(2.0)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(handles[1].sampler.priorities) == len(rb) == handles[3].sampler.rows  # type: ignore[attr-defined]
