"""Checkpoints as datasets: the rows of saved buffers in the order of time, beside the buffers themselves."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    DatasetStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    StackSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    ZlibCodec,
    open_dataset,
)
from ostinato.errors import CheckpointError, DamagedFileError, KindError, SchemaError

from .samples import not_opened


def steps(first: int, count: int, ends: set[int]) -> dict[str, Any]:
    rows = torch.arange(first, first + count)
    done = torch.tensor([int(row) in ends for row in rows])
    return {
        "observation": torch.stack([rows.float(), -rows.float()], -1),
        "row": rows,
        "next": {"observation": torch.stack([rows.float(), -rows.float()], -1) + 1, "reward": rows * 1.0, "done": done},
    }


def check_order(dataset: DatasetStorage, rows: int, ends: set[int]) -> None:
    """The last ten rows of a buffer are there in the order of time, and its newest episode is cut."""
    present = list(range(max(0, rows - 10), rows))
    assert dataset["row"].tolist() == present
    cuts = [row for row in present if row in ends or row == present[-1]]
    assert dataset.episode_lengths.tolist() == np.diff([present[0] - 1, *cuts]).tolist()


@pytest.mark.parametrize(
    ("storage", "rows", "tracked"),
    [
        (lambda: LazyTensorStorage(10), 6, True),
        (lambda: LazyTensorStorage(10), 23, False),
        (lambda: LazyMemmapStorage(10), 14, True),
        (lambda: LazyTensorStorage(10, single_copy=True, codec={"observation": "zlib"}), 10, False),
        (lambda: LazyTensorStorage(10, single_copy=True), 23, True),
        (lambda: LazyTensorStorage(10, codec={"observation": ZlibCodec()}), 14, False),
    ],
)
def test_rows_come_in_the_order_of_time(tmp_path, storage, rows, tracked):
    random = np.random.default_rng(rows)
    ends = set(np.flatnonzero(random.random(rows) < 0.3).tolist())
    sampler = SliceSampler(slice_len=2, strict_length=False) if tracked else None
    rb = ReplayBuffer(storage=storage(), batch_size=4, sampler=sampler)
    for first in range(0, rows, 3):
        rb.extend(steps(first, min(3, rows - first), ends))
    rb.dumps(tmp_path / "saved")
    dataset = open_dataset(tmp_path / "saved")
    assert dataset.format == "checkpoint"
    check_order(dataset, rows, ends)
    expected = steps(max(0, rows - 10), min(rows, 10), ends)
    for key in ("observation", "row", ("next", "observation"), ("next", "done")):
        wanted = expected[key] if isinstance(key, str) else expected[key[0]][key[1]]
        assert torch.equal(dataset[key], wanted), key
    rb.storage.dumps(tmp_path / "storage")
    check_order(open_dataset(tmp_path / "storage"), rows, ends)


def test_environments_follow_each_other(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=4, dim_extend=0)
    for first in (0, 3):
        rows = torch.arange(first * 3, first * 3 + 9).reshape(3, 3)
        done = torch.zeros(3, 3, dtype=torch.bool)
        rb.extend(TensorDict({"row": rows, "done": done}, [3, 3]))
    rb.dumps(tmp_path / "saved")
    dataset = open_dataset(tmp_path / "saved")
    pieces = [piece.tolist() for piece in dataset["row"].split(dataset.episode_lengths.tolist())]
    assert sorted(pieces) == [[6 + env, 9 + env, 12 + env, 15 + env] for env in range(3)]


def test_it_is_pickled_as_a_path_and_damage_is_named(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(4001), batch_size=4)
    rb.extend(steps(0, 3995, {1999}))
    rb.dumps(tmp_path / "saved")
    rb.extend(steps(3995, 5, {3999}))
    rb.dumps(tmp_path / "saved", incremental=True)
    dataset = open_dataset(tmp_path / "saved")
    assert dataset["row"].tolist() == list(range(4000))
    sent = pickle.dumps(dataset)
    assert torch.equal(pickle.loads(sent)["observation"], dataset["observation"])
    rb.extend(steps(4000, 1, set()))
    rb.dumps(tmp_path / "saved")
    with pytest.raises(CheckpointError):
        pickle.loads(sent)
    largest = max((tmp_path / "saved").rglob("*.bin"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-8])
    not_opened(tmp_path / "saved", DamagedFileError, largest.name)


@pytest.mark.parametrize("kind", ["deleted", "written again", "used up", "popped", "ranked", "edited"])
def test_rows_that_left_the_buffer_are_left_out(tmp_path, kind):
    options: dict[str, Any] = {"used up": {"sampler": ConsumingSampler(1)}, "popped": {"sampler": StackSampler(1)}}
    options["ranked"] = {"writer": TensorDictMaxValueWriter(rank_key="row")}
    make = TensorDictReplayBuffer if kind == "ranked" else ReplayBuffer
    rb = make(storage=LazyTensorStorage(5 if kind == "ranked" else 20), batch_size=4, **options.get(kind, {}))
    rows = {"row": torch.arange(12), "done": torch.zeros(12, dtype=torch.bool)}
    rb.extend(TensorDict(rows, [12]) if kind == "ranked" else rows)
    expected = set(range(12))
    if kind in {"used up", "popped"}:
        expected -= set(rb.sample()["row"].tolist())
    elif kind == "edited":
        rb[3] = rb[3]
    elif kind == "ranked":
        expected = set(range(7, 12))
    else:
        rb.delete(torch.tensor([3, 4]))
        expected -= {3, 4}
    if kind == "written again":
        rb.extend({"row": torch.arange(12, 14), "done": torch.zeros(2, dtype=torch.bool)})
        expected |= {12, 13}
    rb.dumps(tmp_path / "saved")
    dataset = open_dataset(tmp_path / "saved")
    assert set(dataset["row"].tolist()) == expected
    assert len(dataset) == len(rb) == len(expected)
    assert dataset.contents.rows_left_out == (0 if kind == "ranked" else 12 - len(expected))
    assert dataset.episode_lengths.tolist() == ([12] if kind == "edited" else [1] * len(expected))
    if kind in {"ranked", "used up"}:
        assert "have left the buffer" in dataset.assumptions[0]


def test_buffers_without_flags_or_rows(tmp_path):
    listed = ReplayBuffer(storage=ListStorage(10))
    listed.extend([1, 2, 3])
    listed.dumps(tmp_path / "listed")
    not_opened(tmp_path / "listed", KindError, "Python objects")
    empty = ReplayBuffer(storage=LazyTensorStorage(10))
    empty.extend({"x": torch.arange(5)})
    empty.dumps(tmp_path / "flagless")
    dataset = open_dataset(tmp_path / "flagless")
    assert dataset.episode_lengths.tolist() == [1] * 5
    assert "nothing tells where episodes end" in dataset.assumptions[0]
    empty.delete(torch.arange(5))
    empty.dumps(tmp_path / "deleted")
    not_opened(tmp_path / "deleted", SchemaError, "holds no rows: all of them were deleted or used up")
    empty.empty()
    empty.dumps(tmp_path / "empty")
    not_opened(tmp_path / "empty", SchemaError, "no rows")
    both = ReplayBufferEnsemble(*(ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)))
    both.members[0].extend({"x": torch.arange(5)})
    both.dumps(tmp_path / "both")
    not_opened(tmp_path / "both", KindError, "ensemble")


# -- TorchRL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [6, 14])
def test_torchrl_checkpoints(tmp_path, rows):
    torchrl = pytest.importorskip("torchrl.data")
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10), batch_size=4)
    ends = {3, 7, 12}
    rb.extend(TensorDict(steps(0, min(rows, 10), ends), [min(rows, 10)]))
    if rows > 10:
        rb.extend(TensorDict(steps(10, rows - 10, ends), [rows - 10]))
    rb.dumps(tmp_path / "saved")
    dataset = open_dataset(tmp_path / "saved")
    assert dataset.format == "torchrl checkpoint"
    check_order(dataset, rows, ends)
    assert torch.equal(pickle.loads(pickle.dumps(dataset))["observation"], dataset["observation"])
