"""Rows of a list storage whose shapes differ: lazy stacks of TensorDicts, and errors that help for other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from ostinato import (
    LazyStackStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)
from ostinato.errors import CheckpointError, EpisodesError, KindError
from ostinato.storages.list import collate_rows

if TYPE_CHECKING:
    from collections.abc import Callable


@tensorclass
class Words:
    """Numbers of any length."""

    x: torch.Tensor


def row(n: int) -> TensorDict:
    return TensorDict({"x": torch.arange(n + 1), "y": torch.full((2,), float(n))})


def filled(kind: type[ReplayBuffer] = ReplayBuffer, **options: Any) -> ReplayBuffer:
    rb = kind(storage=ListStorage(10), **{"batch_size": 6, **options})
    rb.extend([row(n) for n in range(3)])
    return rb


def check(batch: Any, index: Any = None) -> list[int]:
    """Return which rows a batch holds, having compared both fields."""
    found = []
    for one in batch.unbind(0):
        n = int(one["y"][0])
        assert one["x"].tolist() == list(range(n + 1))
        found.append(n)
    assert index is None or found == torch.as_tensor(index).tolist()
    return found


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_samples_and_reads_are_lazy_stacks(kind: type[ReplayBuffer]) -> None:
    rb = filled(kind)
    lazy = 0
    for _ in range(5):
        batch, info = rb.sample(return_info=True)
        lazy += isinstance(batch, LazyStackedTensorDict)
        check(batch, info["index"])
        if kind is TensorDictReplayBuffer:
            assert torch.equal(batch["index"], info["index"])
    assert lazy >= 4
    indices: list[Any] = [slice(0, 3), [2, 0], torch.tensor([1, 1]), torch.tensor([True, False, True])]
    for index in indices:
        assert check(rb[index]) == torch.arange(3)[index].tolist()
    ensemble = ReplayBufferEnsemble(rb, filled(kind), p=[0.5, 0.5], batch_size=4)
    batch, info = ensemble.sample(return_info=True)
    ids = info["index"]["index"] if isinstance(info["index"], dict) else info["index", "index"]
    assert [check(part) for part in batch.unbind(0)] == ids.tolist()


def test_a_batch_shares_no_memory_with_the_rows_stored() -> None:
    for make in (row, lambda n: TensorDict({"n": {"x": torch.arange(n + 1)}, "y": torch.zeros(2)})):
        rb = ReplayBuffer(storage=ListStorage(10), batch_size=6)
        rb.extend([make(n) for n in range(3)])
        for batch in (rb.sample(), rb[0:3], rb[[0, 1, 1]]):
            for one in batch.unbind(0):
                one.apply_(lambda leaf: leaf.fill_(-1))
        for n in range(3):
            assert (rb[n] == make(n)).all()
            assert (rb.storage[n] == make(n)).all()


def test_rows_with_a_batch_of_their_own() -> None:
    rb = TensorDictReplayBuffer(storage=ListStorage(10), batch_size=6)
    rb.extend([TensorDict({"x": torch.full((n + 1, 2), n)}, [n + 1]) for n in range(3)])
    for one in rb.sample().unbind(0):
        n = int(one["x"][0, 0])
        assert one.batch_size == (n + 1,)
        assert one["index"].tolist() == [n] * (n + 1)


def test_tensorclasses_and_different_fields() -> None:
    rows: Any = [Words(x=torch.arange(n + 1), batch_size=[]) for n in range(3)]  # type: ignore[call-arg]
    batch = collate_rows(rows)
    assert type(batch).__name__ == "Words"
    assert [one.x.tolist() for one in batch.unbind(0)] == [[0], [0, 1], [0, 1, 2]]
    assert type(collate_rows([row(2), row(2)])) is TensorDict, "equal shapes stay a dense stack"
    mixed = collate_rows([TensorDict({"a": torch.zeros(2)}), TensorDict({"b": torch.ones(3)})])
    assert [sorted(one.keys()) for one in mixed.unbind(0)] == [["a"], ["b"]]


OTHERS: list[tuple[Callable[[int], Any], str]] = [
    (lambda n: {"x": torch.arange(n + 1)}, "equal size"),
    (lambda n: np.arange(n + 1), "equal size"),
    (lambda n: "a" * n, "the data itself holds str"),
    (lambda n: {"t": None}, "field 't' holds NoneType"),
    (lambda n: {n: 1}, "the same keys"),
    (lambda _: None, "holds NoneType"),
    (lambda _: torch.zeros(2).to_sparse(), "sparse"),
]


def test_other_rows_need_a_collate_fn_and_the_error_says_so() -> None:
    for make, reason in OTHERS:
        rb, listed = (ReplayBuffer(storage=ListStorage(10), batch_size=8, collate_fn=fn) for fn in (None, list))
        for each in (rb, listed):
            each.extend([make(n) for n in range(3)])
        for read in (rb.sample, lambda rb=rb: rb[0:3], lambda rb=rb: rb[[0, 1]], lambda rb=rb: next(iter(rb))):
            torch.manual_seed(0)
            with pytest.raises(KindError, match=reason) as caught:
                read()
            told = f"{caught.value} {caught.value.__cause__}"
            assert "ListStorage" not in told
            assert "collate_fn=list" in told
        assert len(listed.sample()) == 8
    twins = [ReplayBuffer(storage=ListStorage(10), batch_size=4, collate_fn=list) for _ in range(2)]
    for twin in twins:
        twin.extend(["a", "b"])
    members = ReplayBufferEnsemble(*twins, p=[0.5, 0.5], batch_size=4)
    with pytest.raises(KindError, match="give the ensemble a collate_fn") as caught:
        members.sample()
    assert "ListStorage" not in f"{caught.value} {caught.value.__cause__}"


def test_slices_say_which_storage_has_episodes() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=4, sampler=SliceSampler(num_slices=2))
    with pytest.raises(EpisodesError, match="use LazyTensorStorage"):
        rb.extend([row(1)])


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("length", [2, 5])
def test_rows_of_a_checkpoint_stack_with_new_ones(storage: Any, length: int) -> None:
    """Loaded rows are on the CPU, new ones name no device."""
    first, second = ReplayBuffer(storage=storage(10)), ReplayBuffer(storage=storage(10))
    first.extend(TensorDict({"x": torch.zeros(3, 2), "in": {"y": torch.zeros(3)}}, [3]))
    second.load_state_dict(first.state_dict())
    second.add(TensorDict({"x": torch.ones(length), "in": {"y": torch.tensor(1.0)}}, []))
    batch = second.sample(64)
    assert {len(row["x"]) for row in batch.unbind(0)} == {2, length}
    assert set(batch["in", "y"].tolist()) == {0, 1}


def test_rows_with_objects_are_saved_without_pickles_where_that_can_be(tmp_path: Path) -> None:
    for name, make, trusted in (("text", str, False), ("paths", Path, True)):
        rows = [TensorDict({"x": torch.arange(n + 1), "t": NonTensorData(make("abc"[:n]))}) for n in range(3)]
        rb, again = (ReplayBuffer(storage=ListStorage(10, allow_pickle=trusted), batch_size=4) for _ in range(2))
        rb.extend(rows)
        if trusted:
            strict = ReplayBuffer(storage=ListStorage(10), batch_size=4)
            strict.extend(rows)
            with pytest.raises(CheckpointError, match=r"allow_pickle=True") as caught:
                strict.dumps(tmp_path / "plain")
            assert "Storage, or pad" not in str(caught.value)
        rb.dumps(tmp_path / name)
        again.loads(tmp_path / name)
        assert [(len(again[n]["x"]), again[n]["t"]) for n in range(3)] == [(n + 1, make("abc"[:n])) for n in range(3)]
