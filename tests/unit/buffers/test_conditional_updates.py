"""`update_if_present`: rows that are still there are changed as a whole, the others are left out and counted."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import KeyMissingError, OptionError, PriorityError, SchemaError, UsageError

from ..background import in_background
from .refusals import refuses


def _buffer(capacity: int = 4, **options: Any) -> ReplayBuffer:
    options.setdefault("storage", LazyTensorStorage(capacity))
    return ReplayBuffer(writer=RoundRobinWriter(track_generations=True), **options)


def _rows(count: int, x: float) -> dict[str, Any]:
    return {"x": torch.full((count,), x), "n": {"w": torch.zeros(count, 2)}, "v": torch.zeros(count, 1).long()}


def _filled(rows: int = 4, **options: Any) -> tuple[ReplayBuffer, torch.Tensor, torch.Tensor]:
    rb = _buffer(rows, **options)
    index = rb.extend(_rows(rows, 0.0))
    return rb, index, rb.writer.generations_of(index)


def test_replaced_rows_are_left_out_and_counted():
    rb, index, generation = _filled()
    rb.extend(_rows(2, 5.0))
    for value in (1.0, 2.0):  # the rows stay the rows that they are, so a second update reaches them as well
        patch = TensorDict({"x": torch.full((4,), value), "n": {"w": torch.full((4, 2), value)}}, [4])
        result = rb.update_if_present(index=index, generation=generation, patch=patch)
        assert result.updated.tolist() == [False, False, True, True]
        assert (result.updated_count, result.stale_count, result.version_rejected) == (2, 2, None)
        assert rb["x"].tolist() == [5.0, 5.0, value, value]
        assert rb["n", "w"][:, 1].tolist() == [0.0, 0.0, value, value]
    twice = torch.tensor([2, 3, 2, 3, 2])
    rb.update_if_present(index=index[twice], generation=generation[twice], patch={"x": torch.arange(5.0)})
    assert rb["x"].tolist() == [5.0, 5.0, 4.0, 3.0], "of equal indices the last one is written"
    rb.update_if_present(index=index, generation=generation, patch={("n", "w"): torch.full((4, 2), 7.0)})
    assert rb["n", "w"][:, 1].tolist() == [0.0, 0.0, 7.0, 7.0]
    no_rows: dict[str, Any] = {"index": torch.tensor([4, 99, 0, 1]), "generation": torch.tensor([1, 1, -1, 0])}
    assert rb.update_if_present(**no_rows, patch={"x": torch.ones(4)}).stale_count == 4
    rb.empty()
    result = rb.update_if_present(index=index, generation=generation, patch={"x": torch.ones(4)})
    assert (result.updated_count, result.stale_count) == (0, 4)


def test_versions_follow_a_plain_model():
    rb, index, generation = _filled(8)
    rng = np.random.default_rng(0)
    stored, values = [0] * 8, [0.0] * 8
    for step in range(60):
        at, versions = rng.integers(0, 8, 12), rng.integers(0, 20, 12)
        newer = bool(step % 2)
        best: dict[int, int] = {}
        for i, slot in enumerate(at):
            if slot not in best or versions[i] >= versions[best[slot]]:
                best[slot] = i
        wins = {i for slot, i in best.items() if versions[i] >= stored[slot] + newer}
        given = torch.from_numpy(rng.random(12)).float()
        result = rb.update_if_present(
            index=index[at],
            generation=generation[at],
            patch={"x": given},
            version_key="v",
            version=torch.from_numpy(versions),
            require_newer=newer,
        )
        for i in wins:
            stored[at[i]], values[at[i]] = int(versions[i]), float(given[i])
        assert set(result.updated.nonzero().flatten().tolist()) == wins
        assert result.version_rejected is not None
        assert (result.version_rejected_count, result.stale_count) == (12 - len(wins), 0)
        assert rb["v"].flatten().tolist() == stored
        assert rb["x"].tolist() == values


def test_invalid_arguments_change_nothing():
    rb, index, generation = _filled()
    listed, plain = _buffer(storage=ListStorage(4)), ReplayBuffer(storage=LazyTensorStorage(4))
    listed.extend(torch.zeros(4))
    plain.extend({"x": torch.zeros(4)})
    assert plain.writer.generations_of(index).tolist() == [-1] * 4
    patch = {"x": torch.ones(4)}

    def call(rb: ReplayBuffer = rb, **arguments: Any) -> object:
        return rb.update_if_present(**{"index": index, "generation": generation, "patch": patch, **arguments})

    refuses(
        {
            OptionError: {
                "provided together": lambda: call(version=1),
                "per-record scalar": lambda: call(version=1, version_key=("n", "w")),
                "Dotted-string": lambda: call(version=1, version_key="n.w"),
                "one entry per record": lambda: call(version=np.arange(2), version_key="v"),
                "may not appear": lambda: call(version=1, version_key="v", patch={"v": torch.ones(4, 1).long()}),
                "has no priorities": lambda: call(priority=1.0),
                "same number of records": lambda: call(generation=torch.ones(3).long()),
            },
            KeyMissingError: {
                "does not exist": lambda: call(version=1, version_key="no"),
                "does not exist in the storage": lambda: call(patch={"y": torch.ones(4)}),
            },
            SchemaError: {
                "dtype mismatch": lambda: call(patch={"x": torch.ones(4).double()}),
                "shape mismatch": (
                    lambda: call(patch={"x": torch.ones(4, 2)}),
                    lambda: call(patch={"x": torch.ones(3)}),
                ),
            },
            UsageError: {
                "require an initialized storage": lambda: call(rb=_buffer()),
                "not supported": lambda: call(rb=listed),
                r"writer must track slot generations.*track_generations=True": lambda: call(rb=plain),
            },
        }
    )
    assert rb["x"].sum() == plain["x"].sum() == 0


def test_priorities_come_with_the_same_condition():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 1.0, 1.0), batch_size=64)
    rb.extend(TensorDict({"x": torch.zeros(4)}, [4]))
    batch = rb.sample()
    rb.extend(TensorDict({"x": torch.ones(1)}, [1]))
    index, generation = batch["index"], batch["index_generation"]
    result = rb.update_if_present(
        index=index, generation=generation, patch={"x": torch.full((64,), 2.0)}, priority=torch.zeros(64)
    )
    assert result.stale_count == int((index == 0).sum())
    assert rb["x"].tolist() == [1.0, 2.0, 2.0, 2.0]
    assert set(rb.sample()["index"].tolist()) == {0}  # the others have the priority 0
    with pytest.raises(PriorityError):
        rb.update_if_present(index=index, generation=generation, patch={"x": torch.zeros(64)}, priority=-torch.ones(64))
    assert rb["x"].sum() == 7
    rb.update_if_present(index=[1], generation=generation[index == 1][:1], priority=3.0)
    rb.update_priority(torch.tensor([0]), 0.0)
    assert set(rb.sample()["index"].tolist()) == {1}


def test_writers_and_updaters_together_never_patch_another_row():
    rb = _buffer(32, batch_size=8)
    rb.extend({"id": torch.arange(32), "seen": torch.full((32,), -1)})
    updated: list[int] = []

    def update() -> None:
        batch, info = rb.sample(return_info=True)
        names = {"index": info["index"], "generation": info["index_generation"]}
        updated.append(rb.update_if_present(**names, patch={"seen": batch["id"]}).updated_count)

    with in_background(update, update):
        for i in range(400):
            rb.extend({"id": torch.arange(5) + 32 + 5 * i, "seen": torch.full((5,), -1)})
    seen, ids = rb["seen"], rb["id"]
    assert ((seen == -1) | (seen == ids)).all()
    assert sum(updated) > 0


@pytest.mark.parametrize("prefetch", [None, 3])
def test_submitted_updates_are_ordered_with_samples(prefetch):
    rb, index, generation = _filled(batch_size=8, prefetch=prefetch)

    def submit(value: float) -> Any:
        return rb.submit_update_if_present(index=index, generation=generation, patch={"x": torch.full((4,), value)})

    if prefetch:
        rb.sample()
    futures = [submit(value) for value in (1.0, 2.0, 3.0)]
    for _ in range(prefetch or 0):  # were queued before
        assert (rb.sample()["x"] == 0).all()
    assert (rb.sample()["x"] == 3).all()
    assert [future.result().updated_count for future in futures] == [4, 4, 4]
    submit(9.0)
    assert (pickle.loads(pickle.dumps(rb))["x"] == 9).all()
    rb.shutdown()


def test_errors_of_submitted_updates_are_raised_once():
    rb, index, generation = _filled()
    for settle in (rb.synchronize, rb.state_dict, lambda: rb.sample(2)):
        future = rb.submit_update_if_present(index=index, generation=generation, patch={"y": torch.ones(4)})
        with pytest.raises(KeyMissingError):
            settle()
        with pytest.raises(KeyMissingError):
            future.result()
        settle()
    rb.shutdown()
    with pytest.raises(UsageError):
        rb.submit_update_if_present(index=index, generation=generation, patch={"x": torch.ones(4)})


def test_shared_buffers_take_priorities_alone():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 1.0, 1.0), batch_size=64, shared=True)
    rb.extend({"x": torch.arange(4)})
    _, info = rb.sample(return_info=True)
    rb.extend({"x": torch.tensor([9])})
    given = {"index": info["index"], "generation": info["index_generation"]}
    with pytest.raises(UsageError):
        rb.update_if_present(**given, patch={"x": torch.zeros(64).long()})
    result = rb.update_if_present(**given, priority=0.0)
    assert result.stale_count == int((info["index"] == 0).sum())
    assert set(rb.sample().get("x").tolist()) == {9}
