"""Priorities in buffers: they reach the row they are for, or none, through writes, edits, files and prefetch."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SequenceUnit,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from ostinato.distributed.shard_updates import ShardInfo, parse_priorities
from ostinato.errors import (
    KeyMissingError,
    KindError,
    PriorityError,
    PriorityShapeError,
    SchemaError,
    SlotError,
)

from ...registry import seeded
from ...tags import priorities
from .refusals import raises, refuses

OPTIONS: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}


def plain(rows: int = 5, capacity: int = 8, **options: Any) -> PrioritizedReplayBuffer:
    """A prioritized buffer of plain rows 0, 1, 2."""
    given = {"storage": LazyTensorStorage(capacity), "batch_size": 4, **OPTIONS, **options}
    rb = PrioritizedReplayBuffer(generator=seeded(), **given)
    if rows:
        rb.extend(torch.arange(rows))
    return rb


def table(ids: list[int] | range, **fields: Any) -> TensorDict:
    """TensorDict rows."""
    number = torch.tensor(list(ids))
    return TensorDict({"obs": number, **{k: torch.as_tensor(v) for k, v in fields.items()}}, [len(number)])


def keyed(data: Any = None, capacity: int = 8, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    """A prioritized TensorDict buffer."""
    given = {"storage": LazyTensorStorage(capacity), "batch_size": 4, **OPTIONS, **options}
    rb = TensorDictPrioritizedReplayBuffer(generator=seeded(), **given)
    if data is not None:
        rb.extend(data)
    return rb


# -- stale updates ----------------------------------------------------------------------------------------------------


CHANGES: dict[str, Any] = {
    "wrap": lambda rb: rb.extend({"a": torch.arange(8)}),
    "edit": lambda rb: rb.__setitem__(slice(None), {"a": torch.arange(4)}),
    "field": lambda rb: rb.set_("a", torch.arange(4)),
    "empty": lambda rb: (rb.empty(), rb.extend({"a": torch.arange(4)})),
    "storage": lambda rb: rb.set_storage(TensorStorage({"a": torch.arange(4)})),
    "load": lambda rb: rb.load_state_dict(rb.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_updates_for_rows_that_are_gone_are_dropped_and_counted(change):
    rb = plain(0, 4)
    rb.extend({"a": torch.arange(4)})
    _, info = rb.sample(8, return_info=True)
    CHANGES[change](rb)
    rb.update_priority(info, torch.full((8,), 7.0))
    assert (priorities(rb), rb.stats().stale_updates) == ([1.0] * 4, 8)
    _, info = rb.sample(8, return_info=True)
    rb.update_priority(info, torch.full((8,), 7.0))
    assert 7.0 in priorities(rb)
    assert rb.stats().stale_updates == 8


# -- forms of index and priority --------------------------------------------------------------------------------------


FORMS: list[Any] = [
    ([1, 3], [2.0, 5.0]),
    (range(1, 4, 2), np.array([2, 5])),
    (np.array([1, 3], dtype=np.uint8), torch.tensor([2, 5])),
    (torch.tensor([1, 9, 3, 9])[::2], torch.tensor([2.0, 0.0, 5.0])[::2]),
    (torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, 5.0], dtype=torch.bfloat16, requires_grad=True)),
    (torch.tensor([[1], [3]]), torch.tensor([[2.0], [5.0]])),
]
NUMBERS: list[Any] = [
    (2, 3),
    (np.int64(2), 3.0),
    (torch.tensor(2), np.float32(3)),
    (torch.tensor([2]), torch.tensor(3.0)),
]


def test_every_form_of_index_and_priority_is_taken():
    for forms, expected in ((FORMS, [1.0, 2.0, 1.0, 5.0]), (NUMBERS, [1.0, 1.0, 3.0, 1.0])):
        for index, priority in forms:
            rb = plain(4)
            rb.update_priority(index, priority)
            assert priorities(rb) == expected, (index, priority)
    rb.update_priority(torch.arange(3), 0.5)
    rb.update_priority([], [])
    rb.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert priorities(rb) == [0.5, 0.5, 0.5, 1.0]
    rb.update_priority(torch.tensor([0]), torch.tensor([-0.0]))
    assert str(priorities(rb)[0]) == "0.0"


def test_of_equal_indices_the_last_one_wins():
    rb = plain(4)
    rb.update_priority([2, 0, 2, 2, 0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert priorities(rb) == [5.0, 1.0, 4.0, 1.0]
    rb.update_priority(torch.arange(4).repeat(5_000), torch.arange(20_000))
    assert priorities(rb) == rb.sampler.state_dict()["values"].tolist() == [19996.0, 19997.0, 19998.0, 19999.0]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_priorities_are_named_by_position_and_change_nothing(bad):
    rb = plain(8, 8)
    rb.extend(torch.arange(2))  # slots 0 and 1 hold other rows now
    index, generations = torch.arange(8), torch.arange(1, 9)
    given = torch.tensor([bad, 2.0, 2.0, 2.0, 2.0, bad, 2.0, bad])
    raises(
        (lambda: rb.update_priority(index, given, generations), PriorityError, r"at the positions \[5, 7\] of 8: pass"),
        (lambda: rb.update_priority(0, bad), ValueError, "finite and at least 0"),
    )
    assert (priorities(rb), rb.sampler.default_priority) == ([1.0] * 8, 1.0)
    assert rb.stats().stale_updates == 0, "a call that is refused counts nothing"
    rb.update_priority(index[:2], given[:2], generations[:2])
    assert rb.stats().stale_updates == 2, "what stale rows were to get does not matter"


def test_rows_that_the_writer_did_not_keep_are_left_out():
    writer = TensorDictMaxValueWriter(rank_key="rank")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), sampler=PrioritizedSampler(2, **OPTIONS), writer=writer)
    index = rb.extend(table(range(4), rank=[1.0, 3.0, 2.0, 0.0]))
    assert -1 in index.tolist()
    rb.update_priority(index, torch.tensor([7.0, 8.0, 9.0, 7.0]))
    assert sorted(priorities(rb)) == [8.0, 9.0]


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("index", [-1, torch.tensor([1, -1])], ids=str)
def test_where_every_row_is_kept_no_update_takes_a_negative_index(index):
    """It is neither left out nor the last row, in whichever way it is given."""
    rb, n = plain(5), torch.as_tensor(index).numel()
    rb.sample(2)  # direct calls
    refuses(
        {
            SlotError: {
                "index -1 is out of range: .* do not count from the end": (
                    lambda: rb.update_priority(index, torch.full((n,), 3.0).squeeze()),
                    lambda: rb.update_priority(index, 3.0, torch.ones(n, dtype=torch.int64)),
                    lambda: rb.delete(index),
                    lambda: rb.update_if_present(index=index, generation=[1] * n, priority=3.0),
                    lambda: plain(5, shared=True).update_priority(index, 3.0),
                )
            }
        }
    )
    assert (priorities(rb), rb.stats().stale_updates) == ([1.0] * 5, 0)


def test_a_priority_for_each_pair_of_rows_is_refused():
    """The error of `[B]` less `[B, 1]`."""
    rb, index = keyed(table(range(5))), torch.arange(2)
    error = torch.tensor([[0.0, 0.5], [0.75, 0.25]])
    batch = rb.sample(2)
    batch["td_error"] = error
    refuses(
        {
            PriorityShapeError: {
                r"got \[2, 2\]: .* use \.squeeze\(-1\)": (
                    lambda: rb.update_priority(index, error),
                    lambda: rb.update_priority({"index": index}, error.numpy()),
                    lambda: rb.update_tensordict_priority(batch),
                    lambda: rb.update_if_present(index=index, generation=index + 1, priority=error),
                    lambda: keyed(table(range(2), td_error=error)),
                )
            }
        }
    )
    assert priorities(rb) == [1.0] * 5
    rb.update_priority(index, error[:, :1])
    assert priorities(rb) == [0.0, 0.75, 1.0, 1.0, 1.0]


def test_trajectories_get_one_priority_each():
    data = TensorDict({"agent": {"error": torch.arange(12.0).view(4, 3)}}, [4, 3])
    rb = keyed(data, reduction="mean", priority_key=("agent", "error"))
    assert priorities(rb) == [1.0, 4.0, 7.0, 10.0]
    batch = rb.sample()
    assert batch["index"].shape == batch["priority_weight"].shape == batch["index_generation"].shape == (4, 3)
    batch["agent", "error"] = batch["index"].float() + torch.tensor([0.0, 1.0, 5.0])
    rb.update_tensordict_priority(batch)
    for slot in batch["index"][:, 0].tolist():
        assert priorities(rb)[slot] == slot + 2.0


REFUSED: list[Any] = [
    ([0, 1], ["a", 1], None, KindError, "priorit"),
    ([0, 1], torch.tensor([1j, 2]), None, KindError, "priorit"),
    ([0, 1], torch.tensor([True, False]), None, KindError, "priorit"),
    ([0, 1], torch.ones(2, device="meta"), None, KindError, "priorit"),
    # a RuntimeError, as in TorchRL
    ([0, 1], torch.ones(3), None, RuntimeError, r"same length as index, or have its shape \[2\] .* got shape \[3\]"),
    ([0, 1], torch.ones(2, 0), None, PriorityError, "shape"),
    ([0, 1], 1.0, [1, 2, 3], SchemaError, "generation must hold one integer for each of the 2 rows"),
    ([0, 1], 1.0, torch.ones(2, dtype=torch.int64, device="meta"), KindError, "generation must have values"),
    ([0.5], 1.0, None, KindError, "index"),
    ([True, False], 1.0, None, KindError, "index"),
    ([0, 1], [1.0, float("nan")], None, PriorityError, r"at the positions \[1\]"),
]


@pytest.mark.usefixtures("needs_native")
def test_all_kinds_of_buffers_raise_the_same():
    """The arguments are parsed in one place: buffers, shared buffers and shards raise the same error and message."""
    shards = ShardInfo(None, True, "td_error", "max", capacity=8, counting=False, waits=False)
    calls: list[Any] = [plain(4).update_priority, plain(4, shared=True).update_priority]
    for index, priority, generation, error, words in REFUSED:
        raised = set()
        for call in (*calls, partial(parse_priorities, shards)):
            with pytest.raises(error, match=words) as caught:
                call(index, priority, generation)
            raised.add((type(caught.value), str(caught.value)))
        assert len(raised) == 1, raised


# -- first priorities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_first_priorities_come_from_the_data_where_it_has_them(storage):
    rb = keyed(table(range(3), td_error=[1.0, 2.0, 3.0]), storage=storage(8))
    rb.add(table([9], td_error=[5.0])[0])
    rb.extend(table([9], td_error=[7.0]), update_priority=False)
    assert priorities(rb) == [1.0, 2.0, 3.0, 5.0, 5.0], "the default one, as it was asked for"
    rb[1] = table([9], td_error=[8.0])[0]  # an edited row is a new one
    assert priorities(rb) == [1.0, 8.0, 3.0, 5.0, 5.0]
    long = keyed(table(range(10), td_error=torch.arange(10.0)), storage=storage(4))
    assert [float(row["obs"]) for row in long.storage] == priorities(long)


def test_the_batch_must_have_its_keys():
    rb = keyed(table(range(4)))
    batch = rb.sample()
    with pytest.raises(KeyMissingError, match="no key 'td_error'"):
        rb.update_tensordict_priority(batch)
    batch["td_error"] = torch.ones(4)
    with pytest.raises(KeyMissingError, match="'index'"):
        rb.update_tensordict_priority(batch.exclude("index"))
    rb.priority_key = "other"
    batch["other"] = torch.full((4,), 3.0)
    rb.update_tensordict_priority(batch.reshape(2, 2))  # folded by the user
    assert priorities(rb).count(3.0) == len(set(batch["index"].tolist()))
    rb.extend(rb.sample())
    assert set(rb[:].keys()) == {"obs"}, "own keys are not stored"
    rb.set_sampler(RandomSampler())
    uniform = rb.sample()
    calls: list[Any] = [lambda: rb.update_priority([0], [1.0]), lambda: rb.update_tensordict_priority(uniform)]
    for call in calls:
        with pytest.warns(UserWarning, match="RandomSampler has no priorities"):
            call()


# -- edits, exchanged parts, two dimensions ---------------------------------------------------------------------------


def test_two_dimensions_take_pairs_and_tensors_of_pairs():
    rb = plain(0, 10, storage=LazyTensorStorage(10, ndim=2))
    index = rb.extend(torch.arange(12).view(3, 4))  # 3 lanes, 4 steps: room for 12
    expected = torch.arange(12.0).view(3, 4).T.clone()
    rb.update_priority(index, torch.arange(12.0).view(3, 4))  # in the form of the data
    rb.update_priority(torch.tensor([[3, 2], [0, 1]]), [0.5, 0.25])
    rb.update_priority((torch.tensor([1, 1]), torch.tensor([0, 2])), [0.75, 0.125])
    expected[[3, 0, 1, 1], [2, 1, 0, 2]] = torch.tensor([0.5, 0.25, 0.75, 0.125])
    assert priorities(rb) == expected.flatten().tolist()
    _, info = rb.sample(64, return_info=True)
    rb.update_priority(info, torch.full((64,), 9.0))
    assert set(torch.tensor(priorities(rb)).view(4, 3)[info["index"]].tolist()) == {9.0}
    raises(
        (lambda: rb.update_priority([0, 1, 2], 1.0), KindError, r"a pair \(step, environment\)"),
        (lambda: rb.update_priority((0, 3), 1.0), SlotError, r"environments must be in \[0, 3\)"),
    )


# -- saving -----------------------------------------------------------------------------------------------------------


def test_as_many_steps_as_items_are_no_pairs_of_rows():
    rows, windows = (
        ReplayBuffer(storage=LazyTensorStorage(9), sampler=PrioritizedSampler(9, **OPTIONS), sample_unit=unit)
        for unit in (None, SequenceUnit(3, done_key="done"))
    )
    rows.extend({"reward": torch.zeros(3, 3)})
    windows.extend({"obs": torch.arange(9.0), "done": torch.zeros(9, dtype=torch.bool)})
    for one in (rows, windows):
        one.update_priority(torch.arange(3), torch.arange(9.0).reshape(3, 3))
        assert priorities(one)[:3] == [2.0, 5.0, 8.0]
    _, info = windows.sample(2, return_info=True)
    windows.update_priority(info, torch.tensor([30.0, 70.0]))  # one for each of two windows
    assert max(priorities(windows)) == 70.0


def test_slots_without_a_row_have_no_generation_and_take_no_priority():
    rb = plain(5, writer=RoundRobinWriter(track_generations=True))
    assert rb.writer.generations_of(torch.tensor([-3, -1, 0, 4, 5, 7, 8, 100])).tolist() == [-1, -1, 1, 5, *[-1] * 4]
    for slot, generation in itertools.product((5, 8, 100, -1, -3), (0, 1, 5, 9)):
        with contextlib.suppress(SlotError):  # or it is counted as stale
            rb.update_priority([slot], [3.0], [generation])
    with pytest.raises(SlotError, match="index 5 is out of range for 5 rows"):
        rb.update_priority([5], 3.0)
    assert (priorities(rb), rb.sampler.default_priority) == ([1.0] * 5, 1.0)
