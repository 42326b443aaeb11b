"""Priorities in buffers: they reach the row they are for, or none, through writes, edits, files and prefetch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from ostinato._backend import backend
from ostinato.distributed.writing import ShardInfo, parse_shard_update
from ostinato.errors import (
    CheckpointError,
    KeyMissingError,
    KindError,
    OstinatoError,
    PriorityError,
    PriorityShapeError,
    SchemaError,
    SlotError,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("backend")

OPTIONS: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}


MANY = [
    pytest.mark.slow,
    pytest.mark.skipif(backend.native is None, reason="takes minutes with torch alone"),
]


def plain(rows: int = 5, capacity: int = 8, **options: Any) -> PrioritizedReplayBuffer:
    """A prioritized buffer of plain rows 0, 1, 2."""
    given = {"storage": LazyTensorStorage(capacity), "batch_size": 4, **OPTIONS, **options}
    rb = PrioritizedReplayBuffer(generator=torch.Generator().manual_seed(0), **given)
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
    rb = TensorDictPrioritizedReplayBuffer(generator=torch.Generator().manual_seed(0), **given)
    if data is not None:
        rb.extend(data)
    return rb


def priorities(rb: ReplayBuffer) -> list[float]:
    """The priorities of the rows present."""
    kept: torch.Tensor = rb.sampler.state_dict()["priorities"]
    return [float(x) for x in kept]


# -- stale updates ----------------------------------------------------------------------------------------------------


def test_a_priority_never_lands_on_a_row_that_replaced_the_one_sampled() -> None:
    rb = plain(8, 8)
    _, info = rb.sample(64, return_info=True)
    assert set(info["index"].tolist()) == set(range(8))
    rb.extend(torch.arange(3))  # slots 0 to 2 hold other rows now
    rb.update_priority(info, torch.full((64,), 0.25))
    assert priorities(rb) == [1.0] * 3 + [0.25] * 5
    assert rb.stats().stale_updates == int((info["index"] < 3).sum())
    rb.update_priority(info["index"], torch.full((64,), 0.5), info["index_generation"])
    assert priorities(rb) == [1.0] * 3 + [0.5] * 5


def test_a_sampled_tensordict_brings_its_stamps_along() -> None:
    rb = keyed(table(range(8), td_error=torch.ones(8)))
    batch = rb.sample(64)
    assert batch["index_generation"].dtype is torch.int64
    rb.extend(table(range(100, 102), td_error=[3.0, 4.0]))
    batch["td_error"] = torch.full((64,), 0.5)
    rb.update_tensordict_priority(batch)
    assert priorities(rb) == [3.0, 4.0] + [0.5] * 6
    assert rb.stats().stale_updates == int((batch["index"] < 2).sum())


@pytest.mark.parametrize("change", ["wrap", "edit", "field", "empty", "storage", "load", "state"])
def test_updates_for_rows_that_are_gone_are_dropped_and_counted(change: str, tmp_path: Path) -> None:
    rb = plain(0, 4)
    rb.extend({"a": torch.arange(4)})
    rb.dumps(tmp_path / "saved")
    other = plain(0, 4)
    other.extend({"a": torch.arange(10, 14)})
    _, info = rb.sample(8, return_info=True)
    if change == "wrap":
        rb.extend({"a": torch.arange(8)})
    elif change == "edit":
        rb[:] = {"a": torch.arange(4)}
    elif change == "field":
        rb.set_("a", torch.arange(4))
    elif change == "empty":
        rb.empty()
        rb.extend({"a": torch.arange(4)})
    elif change == "storage":
        rb.set_storage(TensorStorage({"a": torch.arange(4)}))
    elif change == "load":
        rb.loads(tmp_path / "saved")
    else:
        rb.load_state_dict(other.state_dict())
    rb.update_priority(info, torch.full((8,), 7.0))
    assert priorities(rb) == [1.0] * 4
    assert rb.stats().stale_updates == 8
    _, info = rb.sample(8, return_info=True)
    rb.update_priority(info, torch.full((8,), 7.0))
    assert 7.0 in priorities(rb)
    assert rb.stats().stale_updates == 8


def test_a_bare_update_cannot_be_checked_and_lands_on_the_slot() -> None:
    rb = plain(4, 4)
    _, info = rb.sample(return_info=True)
    rb.extend(torch.arange(4))
    rb.update_priority(info["index"], 3.0)
    assert 3.0 in priorities(rb)
    assert rb.stats().stale_updates == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_prefetched_batches_keep_their_stamps(prefetch: int) -> None:
    """Batches wait in the queue while their rows are replaced: their priorities reach no new row."""
    rb = keyed(table(range(16), td_error=torch.ones(16)), 16, prefetch=prefetch, batch_size=8)
    rb.sample()  # fills the queue
    rb.extend(table(range(100, 116), td_error=torch.full((16,), 2.0)))
    for _ in range(prefetch):
        batch, info = rb.sample(return_info=True)
        replaced = batch["obs"] < 100
        assert torch.equal(info["stale"], replaced), "a row gathered after the write is the new row"
        batch["td_error"] = torch.where(replaced, 50.0, 2.0)
        rb.update_tensordict_priority(batch)
    assert priorities(rb) == [2.0] * 16
    batch = rb.sample()
    assert bool((batch["obs"] >= 100).all())
    batch["td_error"] = torch.full((8,), 5.0)
    rb.update_tensordict_priority(batch)
    assert 5.0 in priorities(rb)


def test_rows_without_a_generation_of_their_own_are_refused() -> None:
    rb = plain(4, 4)
    with pytest.raises(SchemaError, match="generation must hold one integer for each of the 2 rows"):
        rb.update_priority([0, 1], [1.0, 2.0], [1])
    rb.update_priority([0, 1], [5.0, 6.0], [0, 0])
    assert priorities(rb) == [1.0] * 4, "0 is the stamp of a slot that was never written"
    assert rb.stats().stale_updates == 2


# -- forms of index and priority --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        [1, 3],
        (1, 3),
        range(1, 4, 2),
        np.array([1, 3]),
        np.array([1, 3], dtype=np.uint8),
        torch.tensor([1, 3], dtype=torch.int32),
        torch.tensor([1, 3], dtype=torch.int16),
        torch.tensor([1, 3], dtype=torch.uint8),
        torch.tensor([1, 9, 3, 9])[::2],
        torch.tensor([[1], [3]]),
        torch.tensor([1, 3], requires_grad=False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "priority",
    [
        [2.0, 5.0],
        np.array([2, 5]),
        torch.tensor([2, 5]),
        torch.tensor([2.0, 0.0, 5.0])[::2],
        torch.tensor([2.0, 5.0], dtype=torch.bfloat16),
        torch.tensor([2.0, 5.0], requires_grad=True),
        torch.tensor([[2.0], [5.0]]),
    ],
    ids=str,
)
def test_every_form_of_index_and_priority_is_taken(index: Any, priority: Any) -> None:
    rb = plain(5)
    rb.update_priority(index, priority)
    assert priorities(rb) == [1.0, 2.0, 1.0, 5.0, 1.0]


@pytest.mark.parametrize("index", [2, np.int64(2), torch.tensor(2), torch.tensor([2]), [2]], ids=str)
@pytest.mark.parametrize("priority", [3, 3.0, np.float32(3), torch.tensor(3.0), torch.tensor([3.0]), [3]], ids=str)
def test_one_row_by_any_kind_of_number(index: Any, priority: Any) -> None:
    rb = plain(4)
    rb.update_priority(index, priority)
    assert priorities(rb) == [1.0, 1.0, 3.0, 1.0]


def test_one_priority_for_many_rows() -> None:
    rb = plain(4)
    rb.update_priority(torch.arange(3), 0.5)
    assert priorities(rb) == [0.5, 0.5, 0.5, 1.0]


def test_of_equal_indices_the_last_one_wins() -> None:
    rb = plain(4)
    rb.update_priority([2, 0, 2, 2, 0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert priorities(rb) == [5.0, 1.0, 4.0, 1.0]
    many = torch.arange(4).repeat(5_000)
    rb.update_priority(many, torch.arange(20_000))
    assert priorities(rb) == [19996.0, 19997.0, 19998.0, 19999.0]
    assert rb.sampler.state_dict()["values"].tolist() == priorities(rb)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_priorities_raise_with_their_positions_and_change_nothing(bad: float) -> None:
    rb = plain(5)
    with pytest.raises(PriorityError, match=r"at the positions \[1, 3\] of 4: pass absolute errors"):
        rb.update_priority([0, 1, 2, 3], [9.0, bad, 9.0, bad])
    with pytest.raises(ValueError, match="finite and at least 0"):
        rb.update_priority(0, bad)
    assert priorities(rb) == [1.0] * 5
    assert rb.sampler.default_priority == 1.0


def test_positions_of_bad_priorities_are_those_given_though_others_are_stale() -> None:
    rb = plain(8, 8)
    rb.extend(torch.arange(2))  # slots 0 and 1 hold other rows now
    index, stamps = torch.arange(8), torch.arange(1, 9)
    given = torch.tensor([float("nan"), 2.0, 2.0, 2.0, 2.0, -1.0, 2.0, float("inf")])
    with pytest.raises(PriorityError, match=r"at the positions \[5, 7\] of 8"):
        rb.update_priority(index, given, stamps)
    assert priorities(rb) == [1.0] * 8
    assert rb.stats().stale_updates == 0, "a call that is refused counts nothing"
    rb.update_priority(index[:2], given[:2], stamps[:2])
    assert rb.stats().stale_updates == 2, "what stale rows were to get does not matter"


def test_negative_zero_is_zero() -> None:
    rb = plain(2)
    for zero in (torch.tensor([-0.0]), torch.tensor([-0.0], dtype=torch.float64)):
        rb.update_priority(torch.tensor([0]), zero)
        assert str(priorities(rb)[0]) == "0.0"


def test_bad_first_priorities_refuse_the_rows_and_write_nothing() -> None:
    rb = keyed()
    with pytest.raises(PriorityError, match=r"got -2 at the positions \[1\] of 2"):
        rb.extend(table([0, 1], td_error=[1.0, -2.0]))
    assert len(rb) == 0
    rb.extend(TensorDict({"other": torch.zeros(2)}, [2]))  # the refused rows fixed no form either
    assert rb.stats().rows_written == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("edited", [False, True])
def test_every_way_of_an_update_leaves_the_same(dtype: torch.dtype, *, stamped: bool, edited: bool) -> None:
    """Plain tensors go through one compiled call, others through several: nobody may see which."""
    ways = []
    for plainly in (True, False):
        rb = plain(0, 40, alpha=0.7, eps=1e-3)
        rb.extend(torch.arange(60))
        if edited:
            rb[5:9] = torch.arange(4)  # stamps are an array from here on
        generator = torch.Generator().manual_seed(4)
        for _ in range(10):
            _, info = rb.sample(16, return_info=True)
            index, stamps = info["index"], info["index_generation"]
            rb.extend(torch.arange(2))
            given = (torch.rand(16, generator=generator) * 9).to(dtype)
            if not plainly:
                index, stamps, given = index.view(1, 16), stamps.view(1, 16), given.view(1, 16)
            rb.update_priority(index, given, stamps if stamped else None)
        state = rb.sampler.state_dict()
        ways.append((state["priorities"], state["values"], rb.stats().stale_updates, state["largest"]))
    (one, values, stale, largest), (other, other_values, other_stale, other_largest) = ways
    assert torch.equal(one, other)
    assert torch.allclose(values, other_values, rtol=1e-14, atol=0)
    assert (stale, largest) == (other_stale, other_largest)
    assert (stale > 0) == stamped


def test_memory_of_priorities_is_counted() -> None:
    uniform, rb = ReplayBuffer(storage=LazyTensorStorage(10_000)), plain(0, 10_000)
    for buffer in (uniform, rb):
        buffer.extend(torch.arange(10_000))
    more = rb.stats().nbytes - uniform.stats().nbytes
    assert uniform.sampler.nbytes == 0
    assert more == rb.sampler.nbytes
    assert 18 * 10_000 <= more <= 30 * 10_000, "a priority and the tree's share for each row"


def test_memory_of_a_pass_is_counted() -> None:
    passes = ReplayBuffer(storage=LazyTensorStorage(10_000), sampler=SamplerWithoutReplacement(), batch_size=100)
    passes.extend(torch.arange(10_000))
    before = passes.stats().nbytes
    passes.sample()
    assert 8 * 10_000 <= passes.stats().nbytes - before <= 16 * 10_000, "an order of all slots"


def test_check_has_nothing_to_tell_where_mistakes_raise_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform, rb = ReplayBuffer(storage=LazyTensorStorage(4)), plain(4)
    uniform.check()
    with pytest.raises(PriorityError):
        rb.update_priority(0, -1.0)
    rb.check()
    monkeypatch.setattr(rb.sampler, "_invalid", torch.tensor(True))  # as on a device
    with pytest.raises(PriorityError, match="had no effect"):
        rb.check()
    rb.check()


@pytest.mark.parametrize(("index", "words"), [([5], "index 5 is out of range for 5 rows"), ([-2, 1], "index -2")])
def test_indices_beyond_the_rows_present_raise(index: list[int], words: str) -> None:
    rb = plain(5)
    with pytest.raises(SlotError, match=words):
        rb.update_priority(index, 3.0)
    assert priorities(rb) == [1.0] * 5


@pytest.mark.parametrize("slot", [5, 7, 8, 100, -1, -3])
@pytest.mark.parametrize("stamp", [1, 5, 6, 8, 9])
def test_checked_updates_of_slots_without_a_row_change_nothing(slot: int, stamp: int) -> None:
    rb = plain(5)
    try:
        rb.update_priority([slot], [3.0], [stamp])
        assert rb.stats().stale_updates == 1
    except SlotError:
        pass
    assert priorities(rb) == [1.0] * 5
    assert rb.sampler.default_priority == 1.0


def test_rows_that_the_writer_did_not_keep_are_left_out() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2),
        sampler=PrioritizedSampler(2, **OPTIONS),
        writer=TensorDictMaxValueWriter(rank_key="rank"),
    )
    index = rb.extend(table(range(4), rank=[1.0, 3.0, 2.0, 0.0]))
    assert index.tolist() == [-1, 1, 0, -1] or -1 in index.tolist()
    rb.update_priority(index, torch.tensor([7.0, 8.0, 9.0, 7.0]))
    assert sorted(priorities(rb)) == [8.0, 9.0]


@pytest.mark.parametrize("index", [-1, [-1, 1], torch.tensor([1, -1])], ids=str)
def test_where_every_row_is_kept_no_update_takes_a_negative_index(index: Any) -> None:
    """It is neither left out nor the last row, in whichever way it is given."""
    rb, n = plain(5), torch.as_tensor(index).numel()
    rb.sample(2)  # direct calls
    calls: list[Any] = [
        lambda: rb.update_priority(index, torch.full((n,), 3.0).squeeze()),
        lambda: rb.update_priority(index, 3.0, torch.ones(n, dtype=torch.int64)),
        lambda: rb.view(sampler=PrioritizedSampler(8, **OPTIONS)).update_priority(index, 3.0),
        lambda: rb.mark_update(index),
        lambda: rb.delete(index),
        lambda: rb.update_if_present(index=index, generation=[1] * n, priority=3.0),
    ]
    if backend.native is not None:
        calls.append(lambda: plain(5, shared=True).update_priority(index, 3.0))
    for call in calls:
        with pytest.raises(SlotError, match=r"index -1 is out of range: .* do not count from the end, as in rb\[-1\]"):
            call()
    assert (priorities(rb), rb.stats().stale_updates) == ([1.0] * 5, 0)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_priority_for_each_pair_of_rows_is_refused(rows: int) -> None:
    """The error of `[B]` less `[B, 1]`."""
    wrong, words = torch.rand(rows) - torch.rand(rows, 1), rf"got \[{rows}, {rows}\]: .* use \.squeeze\(-1\)"
    rb, index = plain(5), torch.arange(rows)
    rb.sample(2)
    error = wrong.abs()
    calls: list[Any] = [
        lambda: rb.update_priority(index, error),
        lambda: rb.update_priority({"index": index}, error.numpy()),
        lambda: rb.update_if_present(index=index, generation=index + 1, priority=error),
        lambda: rb.view(sampler=PrioritizedSampler(8, **OPTIONS)).update_priority(index, error),
    ]
    sampled = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=PrioritizedSampler(5, **OPTIONS))
    sampled.extend(table(range(5)))
    batch = sampled.sample(rows)
    batch["td_error"] = error
    calls.append(lambda: sampled.update_tensordict_priority(batch))
    calls.append(lambda: sampled.update_priority(batch, error))
    fresh = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=PrioritizedSampler(5, **OPTIONS))
    calls.append(lambda: fresh.extend(table(range(rows), td_error=error)))
    for call in calls:
        with pytest.raises(PriorityShapeError, match=words):
            call()
    assert (priorities(rb), len(fresh)) == ([1.0] * 5, 0)
    rb.update_priority(index, error[:, :1])
    assert priorities(rb)[:rows] == pytest.approx(error[:, 0].tolist())


def test_steps_of_trajectories_and_windows_may_be_as_many_as_their_items() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=PrioritizedSampler(5, **OPTIONS))
    rb.extend({"obs": torch.zeros(3, 3, 2), "reward": torch.zeros(3, 3)})
    rb.update_priority(torch.arange(3), torch.arange(9.0).reshape(3, 3))
    assert priorities(rb) == [2.0, 5.0, 8.0]
    unit = SequenceUnit(3, done_key="done")
    windows = ReplayBuffer(storage=LazyTensorStorage(9), sampler=PrioritizedSampler(9, **OPTIONS), sample_unit=unit)
    windows.extend({"obs": torch.zeros(9), "done": torch.zeros(9, dtype=torch.bool)})
    windows.update_priority(torch.arange(3), torch.arange(9.0).reshape(3, 3))
    assert priorities(windows)[:3] == [2.0, 5.0, 8.0]


@pytest.mark.parametrize("index", [[True, False], torch.tensor([0.0]), "obs", [None]], ids=str)
def test_what_is_no_index_is_refused(index: Any) -> None:
    with pytest.raises(KindError):
        plain(4).update_priority(index, 1.0)


@pytest.mark.parametrize("priority", ["much", ["a", 1], torch.tensor([1j, 2]), torch.tensor([True, False])], ids=str)
def test_what_is_no_priority_is_refused(priority: Any) -> None:
    with pytest.raises(KindError):
        plain(4).update_priority([0, 1], priority)


def test_priorities_of_another_length_are_refused() -> None:
    with pytest.raises(
        SchemaError, match=r"same length as index, or have its shape \[2\] .* got shape \[3\]"
    ) as caught:
        plain(4).update_priority([0, 1], [1.0, 2.0, 3.0])
    assert isinstance(caught.value, RuntimeError)  # as in TorchRL


@pytest.mark.parametrize(
    ("index", "priority", "generation"),
    [
        (torch.arange(2), "much", None),
        (torch.arange(2), torch.tensor([1j, 2]), None),
        (torch.arange(2), torch.tensor([True, False]), None),
        (torch.arange(2), torch.ones(3), None),
        (torch.arange(2), torch.ones(2, device="meta"), None),
        (torch.arange(2), torch.ones(2, 0), None),
        (torch.arange(2), 1.0, [1, 2, 3]),
        ([0.5], 1.0, None),
        ("first", 1.0, None),
    ],
    ids=str,
)
def test_all_kinds_of_buffers_raise_the_same(index: Any, priority: Any, generation: Any) -> None:
    """The arguments are parsed in one place: buffers, shared buffers and shards raise the same error and message."""
    shards = ShardInfo(None, True, "td_error", "max", capacity=8, counting=False, waits=False)
    calls: list[Any] = [plain(4).update_priority, lambda *given: parse_shard_update(shards, *given)]
    if backend.native is not None:
        calls.append(plain(4, shared=True).update_priority)
    raised = set()
    for call in calls:
        with pytest.raises(OstinatoError) as caught:
            call(index, priority, generation)
        raised.add((type(caught.value), str(caught.value)))
    assert len(raised) == 1, raised


def test_no_rows_are_no_error() -> None:
    rb = plain(4)
    rb.update_priority([], [])
    rb.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert priorities(rb) == [1.0] * 4


@pytest.mark.parametrize("sampler", [RandomSampler()])
def test_samplers_without_priorities_warn_and_do_nothing(sampler: RandomSampler) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=2)
    rb.extend(table(range(4), td_error=torch.ones(4)))
    batch = rb.sample()
    assert "priority_weight" not in batch.keys()  # noqa: SIM118
    with pytest.warns(UserWarning, match="RandomSampler has no priorities"):
        rb.update_priority([0], [1.0])
    with pytest.warns(UserWarning, match="RandomSampler has no priorities"):
        rb.update_tensordict_priority(batch)


# -- first priorities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
def test_first_priorities_come_from_the_data_where_it_has_them(storage: Any) -> None:
    rb = keyed(table(range(3), td_error=[1.0, 2.0, 3.0]), storage=storage(8))
    assert priorities(rb) == [1.0, 2.0, 3.0]
    rb.add(table([9], td_error=[5.0])[0])
    assert priorities(rb) == [1.0, 2.0, 3.0, 5.0]
    rb.extend(table([9], td_error=[7.0]), update_priority=False)
    assert priorities(rb) == [1.0, 2.0, 3.0, 5.0, 5.0], "the default one, as it was asked for"
    assert rb.sampler.default_priority == 5.0


def test_without_the_key_rows_get_the_default() -> None:
    rb = keyed(table(range(2)))
    rb.update_priority([0, 1], [0.5, 0.25])
    rb.extend(table(range(2)))
    assert priorities(rb) == [0.5, 0.25, 0.5, 0.5]


def test_nested_keys_and_lists_of_rows() -> None:
    row = TensorDict({"obs": torch.tensor(1), "agent": {"error": torch.tensor(2.0)}}, [])
    for storage in (ListStorage(8), LazyTensorStorage(8)):
        rb = keyed([row, row], storage=storage, priority_key=("agent", "error"))
        assert priorities(rb) == [2.0, 2.0]
        batch = rb.sample()
        batch["agent", "error"] = torch.full((4,), 9.0)
        rb.update_tensordict_priority(batch)
        assert 9.0 in priorities(rb)


def test_rows_longer_than_the_ring_keep_their_own_priorities() -> None:
    rb = keyed(table(range(10), td_error=torch.arange(10.0)), 4)
    assert dict(zip(rb[:]["obs"].tolist(), priorities(rb), strict=True)) == {i: float(i) for i in range(6, 10)}


def test_trajectories_get_one_priority_each() -> None:
    rb = keyed(TensorDict({"td_error": torch.arange(12.0).view(4, 3)}, [4, 3]), reduction="mean")
    assert priorities(rb) == [1.0, 4.0, 7.0, 10.0]
    batch = rb.sample()
    assert batch["index"].shape == batch["priority_weight"].shape == batch["index_generation"].shape == (4, 3)
    batch["td_error"] = batch["index"].float() + torch.tensor([0.0, 1.0, 5.0])
    rb.update_tensordict_priority(batch)
    for slot in batch["index"][:, 0].tolist():
        assert priorities(rb)[slot] == slot + 2.0


def test_a_batch_folded_by_the_user_updates_each_row() -> None:
    rb = keyed(table(range(6), td_error=torch.ones(6)))
    batch = rb.sample(8).reshape(2, 4)
    batch["td_error"] = batch["index"].float() + 10
    rb.update_tensordict_priority(batch)
    for slot in set(batch["index"].reshape(-1).tolist()):
        assert priorities(rb)[slot] == slot + 10.0


def test_the_batch_must_have_its_keys() -> None:
    rb = keyed(table(range(4)))
    batch = rb.sample()
    with pytest.raises(KeyMissingError, match="no key 'td_error'"):
        rb.update_tensordict_priority(batch)
    batch["td_error"] = torch.ones(4)
    with pytest.raises(KeyMissingError, match="'index'"):
        rb.update_tensordict_priority(batch.exclude("index"))
    rb.priority_key = "other"
    batch["other"] = torch.full((4,), 3.0)
    rb.update_tensordict_priority(batch)
    assert 3.0 in priorities(rb)


def test_own_keys_are_not_stored() -> None:
    rb = keyed(table(range(4), td_error=torch.ones(4)))
    rb.extend(rb.sample())
    assert set(rb[:].keys()) == {"obs", "td_error"}


# -- edits, exchanged parts, two dimensions ---------------------------------------------------------------------------


def test_edited_rows_are_new_rows() -> None:
    rb = keyed(table(range(4), td_error=[1.0, 2.0, 3.0, 4.0]))
    rb[1] = table([9], td_error=[8.0])[0]
    assert priorities(rb) == [1.0, 8.0, 3.0, 4.0]
    other = plain(4)
    other.update_priority([0, 1, 2, 3], [0.5, 0.1, 0.2, 0.3])
    other[1:3] = torch.tensor([7, 7])
    assert priorities(other) == [0.5, 0.5, 0.5, 0.3]


def test_edited_fields_keep_the_priority() -> None:
    rb = keyed(table(range(4), td_error=[1.0, 2.0, 3.0, 4.0]))
    rb.set_("obs", torch.zeros(4, dtype=torch.int64))
    assert priorities(rb) == [1.0, 2.0, 3.0, 4.0]


def test_a_sampler_set_later_takes_the_rows_in() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=64)
    rb.extend(torch.arange(5))
    sampler = PrioritizedSampler(8, **OPTIONS)
    rb.set_sampler(sampler)
    assert priorities(rb) == [1.0] * 5
    assert set(rb.sample().tolist()) == set(range(5))
    rb.update_priority([0, 1, 2, 3, 4], [0.0, 0.0, 3.0, 0.0, 0.0])
    assert set(rb.sample().tolist()) == {2}
    again = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    again.extend(torch.arange(2))
    del rb
    again.set_sampler(sampler)
    assert priorities(again) == [1.0, 1.0], "priorities of another buffer do not come along"


def test_a_dataset_begins_with_equal_priorities() -> None:
    rb = ReplayBuffer(storage=TensorStorage(torch.arange(5)), sampler=PrioritizedSampler(5, **OPTIONS), batch_size=64)
    assert set(rb.sample().tolist()) == set(range(5))
    rb.update_priority(torch.arange(5), [1.0, 0.0, 0.0, 0.0, 0.0])
    assert set(rb.sample().tolist()) == {0}


def test_two_dimensions_take_pairs_and_tensors_of_pairs() -> None:
    rb = plain(0, 10, storage=LazyTensorStorage(10, ndim=2))
    index = rb.extend(torch.arange(12).view(3, 4))  # 3 lanes, 4 steps: room for 12
    assert (len(rb), len(priorities(rb))) == (12, 12)
    rb.update_priority(index, torch.arange(12.0).view(3, 4))  # in the form of the data
    assert torch.equal(torch.tensor(priorities(rb)).view(4, 3).T, torch.arange(12.0).view(3, 4))
    rb.update_priority(torch.tensor([[3, 2], [0, 1]]), [0.5, 0.25])
    rb.update_priority((torch.tensor([1, 1]), torch.tensor([0, 2])), [0.75, 0.125])
    grid = torch.tensor(priorities(rb)).view(4, 3)
    assert [float(grid[at]) for at in ((3, 2), (0, 1), (1, 0), (1, 2))] == [0.5, 0.25, 0.75, 0.125]
    batch, info = rb.sample(64, return_info=True)
    assert isinstance(info["index"], tuple)
    assert torch.equal(rb[info["index"][1], info["index"][0]], batch)
    rb.update_priority(info, torch.ones(64))
    assert rb.stats().stale_updates == 0
    with pytest.raises(KindError, match=r"a pair \(step, environment\)"):
        rb.update_priority([0, 1, 2], 1.0)
    with pytest.raises(SlotError, match=r"environments must be in \[0, 3\)"):
        rb.update_priority((0, 3), 1.0)


def test_two_dimensions_of_tensordicts() -> None:
    data = TensorDict({"obs": torch.arange(8).view(2, 4), "td_error": torch.arange(8.0).view(2, 4)}, [2, 4])
    rb = keyed(data, storage=LazyTensorStorage(8, ndim=2))
    assert torch.equal(torch.tensor(priorities(rb)).view(4, 2).T, torch.arange(8.0).view(2, 4))
    batch = rb.sample(32)
    assert batch["index"].shape == (32, 2)
    batch["td_error"] = batch["obs"].float() + 100
    rb.update_tensordict_priority(batch)
    for (step, lane), value in zip(batch["index"].tolist(), batch["td_error"].tolist(), strict=True):
        assert priorities(rb)[step * 2 + lane] == value


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("way", ["dumps", "state"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_after_a_load_every_draw_weight_and_stamp_is_the_same(
    way: str, prefetch: int, storage: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"prefetch": prefetch, "alpha": 0.7, "beta": 0.5, "eps": 1e-6}
    rb = keyed(table(range(50), td_error=torch.rand(50)), storage=storage(40), **options)
    for step in range(30):
        if step == 20:
            rb.extend(table(range(7), td_error=torch.rand(7)))
        batch = rb.sample()
        batch["td_error"] = torch.rand(4)
        rb.update_tensordict_priority(batch)
    rb.sampler.beta = 0.9  # type: ignore[attr-defined]
    again = keyed(storage=storage(40), **{**options, "alpha": 0.1, "beta": 0.0})
    if way == "dumps":
        rb.dumps(tmp_path / "saved")
        again.loads(tmp_path / "saved")
    else:
        again.load_state_dict(rb.state_dict())
    assert (again.sampler.alpha, again.sampler.beta) == (0.7, 0.9)  # type: ignore[attr-defined]
    for _ in range(40):
        one, other = rb.sample(), again.sample()
        for key in one.keys():  # noqa: SIM118
            assert torch.equal(one[key], other[key]), key
        for buffer, batch in ((rb, one), (again, other)):
            batch["td_error"] = batch["obs"].float() + 0.5
            buffer.update_tensordict_priority(batch)
    assert rb.sampler.default_priority == again.sampler.default_priority


def test_a_larger_buffer_takes_the_priorities_over(tmp_path: Path) -> None:
    rb = keyed(table(range(4), td_error=[1.0, 2.0, 3.0, 4.0]), 4)
    rb.dumps(tmp_path / "saved")
    again = keyed(capacity=9)
    again.loads(tmp_path / "saved")
    again.extend(table(range(2), td_error=[7.0, 8.0]))
    assert priorities(again) == [1.0, 2.0, 3.0, 4.0, 7.0, 8.0]


def test_a_state_for_another_number_of_rows_is_refused() -> None:
    rb = keyed(table(range(4), td_error=[1.0, 2.0, 3.0, 4.0]))
    state = rb.state_dict()
    part = state["sampler"]["state"]
    state["sampler"]["state"] = {**part, "priorities": part["priorities"][:3], "values": part["values"][:3]}
    with pytest.raises(CheckpointError, match="4 finite priorities"):
        rb.load_state_dict(state)


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    size = 1000
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(size), sampler=PrioritizedSampler(size, 1.1, 1.0))
    for _ in range(15):
        obs = {"obs": torch.randn(100, 3, 4), "next": {"obs": torch.randn(100, 3, 4)}}
        rb.extend(TensorDict({**obs, "td_error": torch.rand(100)}, [100]))
        rb.update_tensordict_priority(rb.sample(32))
    rb.dumps(tmp_path)
    again = TensorDictReplayBuffer(storage=LazyMemmapStorage(size), sampler=PrioritizedSampler(size, 1.1, 1.0))
    again.loads(tmp_path)
    assert len(rb) == len(again)


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [200_000, pytest.param(10_000_000, marks=MANY)])
def test_large_updates_cost_no_more_per_row_than_small_ones(rows: int) -> None:
    rb = plain(0, rows, alpha=0.6)
    rb.extend(torch.zeros(rows))
    cost = {}
    for count in (1_000, 100_000):
        times = []
        for _ in range(9):
            index, priority = torch.randint(0, rows, (count,)), torch.rand(count)
            start = time.thread_time()  # of the processor: long calls are interrupted on a busy machine, short ones not
            rb.update_priority(index, priority)
            times.append(time.thread_time() - start)
        cost[count] = min(times) / count
    assert cost[100_000] <= 1.5 * cost[1_000], cost
