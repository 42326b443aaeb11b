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
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
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


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_samples_are_lazy_stacks(kind: type[ReplayBuffer], prefetch: int | None) -> None:
    rb = filled(kind, prefetch=prefetch)
    lazy = 0
    for _ in range(5):
        batch, info = rb.sample(return_info=True)
        lazy += isinstance(batch, LazyStackedTensorDict)
        check(batch, info["index"])
        if kind is TensorDictReplayBuffer:
            assert torch.equal(batch["index"], info["index"])
    assert lazy >= 4


@pytest.mark.parametrize(
    "index", [slice(0, 3), [2, 0], torch.tensor([1, 1]), torch.tensor([True, False, True])], ids=str
)
def test_reads_are_lazy_stacks(index: Any) -> None:
    wanted = torch.arange(3)[index].tolist()
    assert check(filled()[index]) == wanted


def test_iteration_and_priorities() -> None:
    rb = filled(TensorDictReplayBuffer, batch_size=2, sampler=SamplerWithoutReplacement())
    assert sorted(n for batch in rb for n in check(batch)) == [0, 1, 2]
    ranked: Any = filled(TensorDictReplayBuffer, sampler=PrioritizedSampler(10, 1.0, 1.0, eps=0.0))
    batch = ranked.sample()
    batch.set("td_error", torch.tensor([float(n == 2) for n in check(batch)]))
    ranked.update_tensordict_priority(batch)
    ranked.update_priority(torch.tensor([0, 1]), 0.0)
    assert check(ranked.sample()) == [2] * 6


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
    mixed = collate_rows([TensorDict({"a": torch.zeros(2)}), TensorDict({"b": torch.ones(3)})])
    assert [sorted(one.keys()) for one in mixed.unbind(0)] == [["a"], ["b"]]


def test_equal_shapes_stay_a_dense_stack() -> None:
    assert type(collate_rows([row(2), row(2)])) is TensorDict


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_ensembles(kind: type[ReplayBuffer]) -> None:
    ensemble = ReplayBufferEnsemble(filled(kind, batch_size=4), filled(kind, batch_size=4), p=[0.5, 0.5], batch_size=4)
    for _ in range(5):
        batch, info = ensemble.sample(return_info=True)
        ids = info["index"]["index"] if isinstance(info["index"], dict) else info["index", "index"]
        assert [check(part) for part in batch.unbind(0)] == ids.tolist()


OTHERS: dict[str, tuple[Callable[[int], Any], str]] = {
    "dicts": (lambda n: {"x": torch.arange(n + 1)}, "equal size"),
    "tensors": (lambda n: torch.arange(n + 1), "equal size"),
    "arrays": (lambda n: np.arange(n + 1), "equal size"),
    "text": (lambda n: "a" * n, "the data itself holds str"),
    "None in dicts": (lambda n: {"t": None}, "field 't' holds NoneType"),
    "other keys": (lambda n: {n: 1}, "the same keys"),
    "nothing": (lambda n: None, "holds NoneType"),
    "sparse": (lambda n: torch.zeros(2).to_sparse(), "sparse"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_rows_need_a_collate_fn_and_the_error_says_so(kind: str) -> None:
    make, reason = OTHERS[kind]
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=8)
    rb.extend([make(n) for n in range(3)])
    reads: list[Callable[[], Any]] = [rb.sample, lambda: rb[0:3], lambda: rb[[0, 1]], lambda: next(iter(rb))]
    for read in reads:
        torch.manual_seed(0)
        with pytest.raises(KindError, match=reason) as caught:
            read()
        told = f"{caught.value} {caught.value.__cause__}"
        assert "ListStorage" not in told
        assert "collate_fn=list" in told
    listed = ReplayBuffer(storage=ListStorage(10), batch_size=8, collate_fn=list)
    listed.extend([make(n) for n in range(3)])
    assert len(listed.sample()) == 8


def test_members_without_a_common_batch_are_not_told_to_use_a_list_storage() -> None:
    members = []
    for _ in range(2):
        members.append(ReplayBuffer(storage=ListStorage(10), batch_size=4, collate_fn=list))
        members[-1].extend(["a", "b"])
    ensemble = ReplayBufferEnsemble(*members, p=[0.5, 0.5], batch_size=4)
    with pytest.raises(KindError, match="give the ensemble a collate_fn") as caught:
        ensemble.sample()
    assert "ListStorage" not in f"{caught.value} {caught.value.__cause__}"


def test_slices_say_which_storage_has_episodes() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=4, sampler=SliceSampler(num_slices=2))
    with pytest.raises(EpisodesError, match="use LazyTensorStorage"):
        rb.extend([row(1)])


def test_text_of_dicts_is_sampled_as_a_list() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=8)
    rb.extend([{"t": str(n), "x": torch.tensor(n)} for n in range(3)])
    batch = rb.sample()
    assert batch["t"] == [str(n) for n in batch["x"].tolist()]


def test_ragged_tensordicts_with_text_are_saved_without_pickles(tmp_path: Path) -> None:
    rb, again = (ReplayBuffer(storage=ListStorage(10), batch_size=4) for _ in range(2))
    rb.extend([TensorDict({"x": torch.arange(n + 1), "t": NonTensorData("abc"[:n])}) for n in range(3)])
    rb.dumps(tmp_path / "plain")
    again.loads(tmp_path / "plain")
    assert [(one["x"].tolist(), one["t"]) for one in (again[n] for n in range(3))] == [
        ([0], ""),
        ([0, 1], "a"),
        ([0, 1, 2], "ab"),
    ]


def test_tensordicts_with_other_objects_are_saved_only_as_pickles(tmp_path: Path) -> None:
    rows = [TensorDict({"x": torch.arange(n + 1), "t": NonTensorData(Path("abc"[:n]))}) for n in range(3)]
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=4)
    rb.extend(rows)
    with pytest.raises(CheckpointError, match=r"allow_pickle=True") as caught:
        rb.dumps(tmp_path / "plain")
    assert "Storage, or pad" not in str(caught.value)
    trusted, again = (ReplayBuffer(storage=ListStorage(10, allow_pickle=True), batch_size=4) for _ in range(2))
    trusted.extend(rows)
    trusted.dumps(tmp_path / "pickled")
    again.loads(tmp_path / "pickled")
    assert [(one["x"].tolist(), one["t"]) for one in (again[n] for n in range(3))] == [
        ([0], Path()),
        ([0, 1], Path("a")),
        ([0, 1, 2], Path("ab")),
    ]


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
