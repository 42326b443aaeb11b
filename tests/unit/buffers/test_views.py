"""Views: several samplers over the rows of one buffer, which all hear of each write."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    KeyMissingError,
    OptionError,
    PriorityError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...registry import ring, seeded
from ...tags import priorities
from .refusals import raises, refuses

CAPACITY = 13


def ranked(capacity: int = CAPACITY, *, alpha: float = 1.0, **options: Any) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, alpha, 1.0, 0.0, **options)


def buffer(**options: Any) -> ReplayBuffer:
    options.setdefault("storage", LazyTensorStorage(CAPACITY))
    return ReplayBuffer(**{"batch_size": 4, "generator": seeded(), **options})


def numbered(start: int, rows: int) -> dict[str, torch.Tensor]:
    return {"id": torch.arange(start, start + rows), "obs": torch.arange(start, start + rows).float()[:, None]}


# -- a model of what each view knows ----------------------------------------------------------------------------------


# -- parts of a view --------------------------------------------------------------------------------------------------


def test_a_view_made_late_starts_with_the_rows_present_at_the_default_priority():
    """What new rows get then is the largest priority given to the sampler of the view, not to that of the buffer."""
    rb = buffer(sampler=ranked())
    rb.update_priority(rb.extend(numbered(0, 3)), 5.0)
    view = rb.view().view()  # a view of a view is one of the buffer
    assert isinstance(view.set_sampler(ranked()), RandomSampler)
    assert (priorities(view), priorities(rb)) == ([1.0] * 3, [5.0] * 3)
    view.update_priority(torch.tensor([1]), 3.0)
    for start in (3, 4, 5, 6):  # the later ones by direct calls
        rb.extend(numbered(start, 1))
    assert (priorities(view), priorities(rb)) == ([1.0, 3.0, 1.0] + [3.0] * 4, [5.0] * 7)


def test_priorities_within_rows_reach_every_prioritized_view():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, priority_key="p")
    view = rb.view(sampler=ranked())
    rb.extend(TensorDict({"p": torch.tensor([1.0, 2.0, 3.0])}, [3]))
    with pytest.raises(PriorityError):
        rb.extend(TensorDict({"p": torch.tensor([-1.0])}, [1]))
    rb[0] = TensorDict({"p": torch.tensor(9.0)}, [])
    assert priorities(view) == [9.0, 2.0, 3.0]
    assert "priority_weight" not in set(rb.sample().keys())
    batch = view.sample()
    batch["p"] = torch.full((4,), 0.5)
    view.update_tensordict_priority(batch)
    assert {priorities(view)[slot] for slot in batch["index"].tolist()} == {0.5}


def test_episodes_of_a_view_are_its_own():
    rb = buffer(storage=LazyTensorStorage(30))
    slices = rb.view(sampler=SliceSampler(slice_len=4))
    for start in range(0, 60, 10):
        ids = torch.arange(start, start + 10)
        rb.extend({"id": ids, "done": ids % 10 == 9})
        found = slices.sample()["id"]
        assert torch.equal(found, found[0] + torch.arange(4))
        assert found[0] % 10 <= 6
    rb.set_at_("done", torch.ones(30, dtype=torch.bool), slice(None))
    with pytest.raises(EmptyBufferError):
        slices.sample()
    assert rb.sample()["id"].shape == (4,)


def test_the_transforms_of_a_view_are_its_own_and_writes_take_those_of_the_buffer():
    rb = buffer()
    rb.append_transform(lambda data: {**data, "obs": data["obs"] * 10}, invert=True)
    view = rb.view(transform=lambda data: {**data, "obs": data["obs"] + 0.5})
    view.extend(numbered(1, 1))
    view.add({key: value[0] for key, value in numbered(1, 1).items()})
    assert view.storage["obs"].flatten().tolist() == [10.0, 10.0]
    view[1] = {key: value[0] for key, value in numbered(2, 1).items()}
    assert view["obs"].flatten().tolist() == [10.5, 20.5]
    assert set(view.sample(64)["obs"].flatten().tolist()) == {10.5, 20.5}


def test_deleted_rows_leave_every_view():
    rb, episodic = buffer(), buffer()
    views = [rb.view(sampler=ranked()), rb.view(prefetch=2, generator=seeded(1))]
    index = rb.extend(numbered(0, 9))
    _, info = views[0].sample(64, return_info=True)
    views[1].sample()
    assert views[0].delete(index[2:5]).tolist() == [True] * 3
    views[0].update_priority(info, torch.full((64,), 9.0))  # late: those of the deleted rows are dropped
    for handle in (*views, rb.view(sampler=ranked())):
        assert len(handle) == 6
        for _ in range(8):
            assert {0, 1, 5, 6, 7, 8}.issuperset(handle.sample()["id"].tolist())
    view = episodic.view(sampler=SliceSampler(slice_len=1, end_key="id"))
    episodic.extend({"id": torch.ones(3, dtype=torch.bool)})
    raises(
        (lambda: rb.view(sample_unit=NStep(2, gamma=0.9)), OptionError, "windows or episodes"),
        (lambda: episodic.delete([1]), OptionError, "windows or episodes"),
    )
    assert len(view) == 3


def test_rows_that_come_as_a_whole_are_those_of_all_views():
    """A storage that another one replaces, or that others write to: batches made ahead and priorities go."""
    rb, other = buffer(), LazyTensorStorage(CAPACITY)
    ahead, view = rb.view(prefetch=3, generator=seeded(1)), rb.view(sampler=ranked())
    rb.extend(numbered(0, 5))
    for rows in (3, 6):
        ahead.sample()
        view.update_priority(torch.arange(len(rb)), 0.0)
        other.set(range(rows), numbered(10 * rows, rows))
        if rows == 3:
            rb.set_storage(other)
        for handle in (ahead, view):
            assert int(handle.sample()["id"].min()) >= 10 * rows
        assert priorities(view) == [1.0] * rows
    ahead.sample()
    view.empty()
    ahead.extend(numbered(90, 2))
    assert int(ahead.sample()["id"].min()) >= 90
    assert (priorities(view), len(rb)) == ([1.0] * 2, 2)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_other_views_raises_and_changes_nothing():
    rb = buffer()
    views = [rb.view(sampler=ranked())]
    rb.extend(numbered(0, 5))
    state = rb.state_dict()
    for others in ([], [RandomSampler()], [ranked(), RandomSampler()]):
        other = buffer()
        kept = [other.view(sampler=sampler) for sampler in others]
        other.extend(numbered(50, 2))
        with pytest.raises(CheckpointError, match=r"views|sampler is a"):
            other.load_state_dict(state)
        assert [one["id"].tolist() for one in (other, *kept)] == [[50, 51]] * (1 + len(kept))
    buffer().load_state_dict(pickle.loads(pickle.dumps(rb)).state_dict())  # a copy has no views
    views.clear()
    buffer().load_state_dict(rb.state_dict())


# -- life of a view ---------------------------------------------------------------------------------------------------


def test_conditional_updates_and_limited_calls_through_a_view():
    rb = buffer(rate_limiter=RateLimiter(samples_per_insert=1.0, min_size_to_sample=2, error_buffer=6.0))
    view = rb.view(sampler=ranked())
    rb.extend(numbered(0, 6))
    for _ in range(20):  # draws of a view do not count
        _, info = view.sample(return_info=True)
    index = info["index"]
    view.submit_update_if_present(
        index=index, generation=info["index_generation"], patch={"obs": torch.full((4, 1), 7.0)}, priority=2.5
    ).result()
    assert set(rb["obs"][index].flatten().tolist()) == {7.0}
    assert priorities(view).count(2.5) == len(set(index.tolist()))
    assert rb.sample(timeout_s=5.0)["id"].shape == (4,)
    assert view.extend(numbered(6, 2), timeout_s=5.0).shape == (2,)


# -- what raises ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_native")
def test_what_a_view_cannot_do(tmp_path):
    generator, sampler = seeded(), ranked()
    rb = buffer(generator=generator)
    view = rb.view(sampler=sampler)
    best = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="rank"))
    rb.extend(numbered(0, 3))
    refuses(
        {
            OptionError: {
                "make a sampler for each": lambda: rb.view(sampler=sampler),
                "give each view one of its own": lambda: rb.view(generator=generator),
                "order": lambda: best.view(sampler=SliceSampler(slice_len=2)),
                "windows or episodes": lambda: buffer(remover="lifo").view(sampler=SliceSampler(slice_len=2)),
                "a view": lambda: ReplayBufferEnsemble(rb, view),
                "uses rows up": (
                    lambda: buffer(sampler=QueueSampler()).view(),
                    lambda: rb.view(sampler=ConsumingSampler(2)),
                    lambda: rb.set_sampler(ConsumingSampler(2)),
                    lambda: view.set_sampler(QueueSampler()),
                ),
                "views cannot be shared": rb.share,
                "processes share": ring(8, shared=True).view,
            },
            SlotError: {
                "2": lambda: rb.view(sampler=ranked(2)),
            },
            UsageError: {
                "a view cannot": (
                    lambda: view.dumps(tmp_path / "x"),
                    lambda: view.loads(tmp_path / "x"),
                    view.state_dict,
                    lambda: view.load_state_dict({}),
                    lambda: view.set_storage(LazyTensorStorage(3)),
                    lambda: view.set_writer(rb.writer),
                ),
            },
        }
    )
    with pytest.raises(KeyMissingError) as kept:  # the error keeps what it left behind
        rb.view(sampler=PrioritizedSliceSampler(20, 0.5, 0.5, slice_len=2, end_key="no"))
    assert str(kept.value)
    assert len(rb._engine.store.readers) == 2


def test_a_write_that_a_view_cannot_follow_changes_nothing():
    rb = buffer()
    view = rb.view(sampler=ranked(4))
    rb.extend(numbered(0, 3))
    with pytest.raises(SlotError):
        rb.extend(numbered(3, 2))
    assert len(rb) == 3
    rb.extend(numbered(3, 1))
    assert priorities(view) == [1.0] * 4
    rb = buffer()
    view = rb.view(sampler=SliceSampler(slice_len=2, end_key="done"), batch_size=2)
    with pytest.raises((SchemaError, KeyError)):
        rb.extend(numbered(0, 3))
    assert len(rb) == 0
    rb.extend({"done": torch.ones(3, dtype=torch.bool)})
    assert len(view) == 3
