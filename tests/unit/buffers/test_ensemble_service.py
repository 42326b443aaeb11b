"""An ensemble has the names of a single buffer: updates in a thread, queries, hooks, start and end; and its parts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Flat2TED,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    StorageEnsemble,
    TED2Flat,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterEnsemble,
    traj,
)
from ostinato.errors import (
    CheckpointError,
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
    SlotError,
    UsageError,
)

from .refusals import raises

ROWS = 8
OF_MEMBERS = ["__setitem__", "as_remote", "set_", "set_at_", "set_storage", "share", "update_", "write_all"]


def _rows(base: int) -> TensorDict:
    numbers = torch.arange(ROWS, dtype=torch.float32)
    flags = {"reward": torch.ones(ROWS, 1), "done": (numbers % 4 == 3).unsqueeze(-1)}
    return TensorDict(
        {
            "obs": numbers + base,
            "episode": numbers.long() // 4,
            "next": {"obs": torch.where(numbers % 4 == 3, -numbers - base, numbers + 1 + base), **flags},
        },
        [ROWS],
    )


def _member(base: int, **options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), writer=RoundRobinWriter(track_generations=True), **options
    )
    rb.extend(_rows(base))
    return rb


def _pair(**options: Any) -> ReplayBufferEnsemble:
    ranked = _member(100, sampler=PrioritizedSampler(10, 1.0, 1.0))
    return ReplayBufferEnsemble(_member(0), ranked, **{"sample_from_all": True, "batch_size": 4, **options})


def _names(members: list[int], slots: list[int]) -> dict[str, torch.Tensor]:
    return {"buffer_ids": torch.tensor(members), "index": torch.tensor(slots)}


# -- start and end -----------------------------------------------------------------------------------------------------


def test_it_is_in_this_process():
    rb = _pair()
    assert (rb.start() is rb, rb.client() is rb, rb.service_backend) == (True, True, "direct")
    assert (rb.is_alive, rb.dim_extend, rb.shared) == (True, 0, False)
    rb.synchronize()
    raises(*((getattr(rb, name), UsageError, r"ensemble\[i\]|RayReplayBuffer") for name in OF_MEMBERS))
    with pytest.raises(OptionError):
        ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(4)).share())


def test_shutdown_ends_sampling_and_not_the_members():
    rb = _pair(prefetch=2)
    sample = rb.sample()
    pending = rb.submit_update_if_present(index=sample, patch={"obs": torch.zeros(2, 2)})
    rb.shutdown()
    assert pending.result().updated_count == 4
    rb.shutdown(timeout=1.0)
    assert not rb.is_alive
    for action in (rb.sample, rb.start, lambda: rb.submit_update_if_present(index=sample)):
        with pytest.raises(UsageError):
            action()
    assert len(rb[0].sample(3)) == 3
    assert pickle.loads(pickle.dumps(rb[0])).is_alive


# -- updates -----------------------------------------------------------------------------------------------------------


def test_mark_update_gives_the_default_priority_back():
    rb = _pair()
    sampler = rb[1].sampler
    rb.update_priority(_names([1, 1], [0, 5]), torch.tensor([0.5, 4.0]))
    raises(
        (lambda: rb.mark_update(_names([1, 1], [0, 8])), SlotError, ""),
        (lambda: rb.mark_update(_names([1, 2], [0, 0])), SlotError, ""),
        (lambda: rb.mark_update(torch.tensor([0])), KindError, "index and buffer_ids"),
    )
    assert sampler.priorities[[0, 5]].tolist() == [0.5, 4.0]
    rb.mark_update(_names([0, 1], [5, 0]))
    assert sampler.priorities[[0, 1, 5]].tolist() == [4.0, 1.0, 4.0]


def test_inverse_transforms_run_when_rows_are_written():
    rb = _pair(routing_key="episode")
    rb.append_transform(lambda rows: rows.set("obs", rows["obs"] * 2), invert=True)
    rb.insert_transform(0, lambda rows: rows.set("obs", rows["obs"] + 1), invert=True)
    rb.extend(_rows(10)[:1])
    assert rb[0, 8]["obs"] == 21  # inverses run from the last to the first
    assert rb.sample()["obs"].max() <= 107


# -- queries and hooks -------------------------------------------------------------------------------------------------


def test_query_goes_through_the_members():
    rb = _pair()
    found = rb.query(traj["obs"].sum() > 10)
    assert [one.get("obs")[0].item() for one in found] == [4, 100, 104]
    assert len(rb.query(trajectory_key="episode")) == 4
    with pytest.raises(KeyMissingError):
        rb.query(trajectory_key="none")


def test_hooks_convert_the_rows_of_each_member_and_are_registered_for_all_or_none(tmp_path):
    rb, again = _pair(), _pair()
    seen: list[int] = []

    def count(rows: Any, **_: Any) -> Any:
        seen.append(len(rows))
        return rows

    rb.register_save_hook(count)
    rb.register_save_hook(TED2Flat())
    rb.dumps(tmp_path / "saved")
    assert seen == [ROWS, ROWS]
    again.empty()
    with pytest.raises(CheckpointError):
        again.loads(tmp_path / "saved")
    again.register_load_hook(Flat2TED())
    again.loads(tmp_path / "saved")
    for mine, theirs in zip(again.members, rb.members, strict=True):
        assert (mine[:] == theirs[:]).all()
    mixed = ReplayBufferEnsemble(_member(0), TensorDictReplayBuffer(storage=ListStorage(4)))
    raises(
        *(
            (lambda add=add: add(count), KindError, "no fields")
            for add in (mixed.register_save_hook, mixed.register_load_hook)
        ),
        (lambda: rb.register_save_hook(3), KindError, ""),  # type: ignore[arg-type]
        (lambda: rb.register_load_hook(3), KindError, ""),  # type: ignore[arg-type]
    )
    assert mixed[0].storage.save_hooks == mixed[0].storage.load_hooks == ()


# -- parts -------------------------------------------------------------------------------------------------------------


def test_storages_tell_whether_they_support_conditional_updates():
    kinds = (LazyTensorStorage, LazyMemmapStorage, TensorStorage, ListStorage, LazyStackStorage)
    assert [kind.supports_conditional_update for kind in kinds] == [True, True, True, False, False]
    for other in (LazyTensorStorage, ListStorage):
        both = StorageEnsemble(LazyTensorStorage(4), other(4))
        assert both.supports_conditional_update == (other is LazyTensorStorage)


def test_storages_of_two_dimensions_become_flat():
    storage = LazyTensorStorage(6, ndim=2)
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(TensorDict({"obs": torch.arange(6).reshape(2, 3)}, [2, 3]))
    both = StorageEnsemble(storage, LazyTensorStorage(2), transforms=[None, len])
    both.attach(rb)
    flat = both.flatten()
    assert (both.ndim, flat[0].ndim, flat.transforms) == (1, 1, [None, len])
    assert sorted(flat[0][:]["obs"].tolist()) == list(range(6))


def test_writers_name_generations_of_routed_rows(tmp_path):
    rb = _pair(routing_key="episode")
    names = rb.extend(_rows(0))
    assert torch.equal(rb.writer.generations_of(names), names["index_generation"])
    square = {name: names[name].reshape(2, 4) for name in ("buffer_ids", "index")}
    assert rb.writer.generations_of(square).shape == (2, 4)
    assert rb.writer.tracks_generations
    plain = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter(track_generations=True))
    assert not plain.tracks_generations
    assert plain.generations_of(names).tolist() == [-1] * ROWS
    plain.dumps(tmp_path / "writers")
    plain.loads(tmp_path / "writers")
    ids = torch.tensor([0, 1])
    wrong: list[Any] = [
        (ids, KindError),
        ({"index": ids}, KindError),
        ({"buffer_ids": ids.float(), "index": ids}, KindError),
        ({"buffer_ids": ids, "index": ids[:1]}, SchemaError),
        ({"buffer_ids": ids + 1, "index": ids}, SlotError),
    ]
    raises(
        *((lambda index=index: rb.writer.generations_of(index), error, r"member|routed") for index, error in wrong),
        (lambda: plain.load_state_dict({"0": {}}), CheckpointError, "the ensemble has 2"),
    )
