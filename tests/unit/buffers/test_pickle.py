"""Pickling copies a buffer whole, with memory of its own."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from ostinato._backend import backend

from ...tags import STORAGES, TENSORS, buffer, fill, read_ids

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("backend")


def copied(rb: ReplayBuffer, way: str) -> ReplayBuffer:
    made = copy.deepcopy(rb) if way == "deepcopy" else pickle.loads(pickle.dumps(rb))
    assert isinstance(made, type(rb))
    return made


@pytest.mark.parametrize("count", [0, 3, 7, 9])
@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_holds_the_same_rows_in_memory_of_its_own(way: str, storage: str, count: int) -> None:
    rb = buffer(
        storage, 7, batch_size=3, sampler=SamplerWithoutReplacement(), generator=torch.Generator().manual_seed(0)
    )
    if count:
        fill(rb, range(count))
        rb.sample()
    other = copied(rb, way)
    assert len(other) == min(count, 7)
    if count:
        assert read_ids(other[:]) == read_ids(rb[:])
        assert [read_ids(other.sample()) for _ in range(4)] == [read_ids(rb.sample()) for _ in range(4)]
    before = read_ids(rb[:]) if count else []
    fill(other, range(100, 107))
    assert not count or read_ids(rb[:]) == before
    assert sorted(read_ids(other[:])) == list(range(100, 107))


def test_small_fields_that_share_memory_are_pickled_once() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000))
    rb.extend({name: torch.arange(10) for name in "abcdefgh"})
    pickled = pickle.dumps(rb)
    assert len(pickled) < 1.1 * rb.stats().nbytes + 10_000
    other = pickle.loads(pickled)
    addresses = {column.untyped_storage().data_ptr() for column in other.storage.columns.values()}
    assert len(addresses) == (8 if backend.native is None else 1)  # rows are packed for the compiled gather only
    assert other.stats().nbytes == rb.stats().nbytes


def test_mapped_copies_live_in_files_of_their_own(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(7, scratch_dir=tmp_path / "scratch"))
    rb.extend(torch.arange(5))
    other = copied(rb, "pickle")
    assert isinstance(other.storage, LazyMemmapStorage)
    assert other.storage.scratch_dir != rb.storage.scratch_dir  # type: ignore[attr-defined]
    other.extend(torch.tensor([9, 9, 9, 9]))
    assert rb[:].tolist() == [0, 1, 2, 3, 4]


def test_tensordict_buffers_keep_their_class_and_key() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(7), batch_size=3, priority_key="p", prefetch=2)
    fill(rb, range(5), "tensordict")
    rb.sample()
    other = copied(rb, "pickle")
    assert isinstance(other, TensorDictReplayBuffer)
    assert other.priority_key == "p"
    assert other.sample()["index"].shape == (3,)


def test_what_cannot_be_pickled_says_so() -> None:
    rb = buffer("packed", 5, transform=lambda batch: batch)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(rb)


def _double(rb: ReplayBuffer, queue: Any) -> None:
    rb.extend(rb[:])
    queue.put(read_ids(rb[:]))


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_another_process_gets_a_copy(storage: str) -> None:
    """Sharing never happens by accident: what a child writes is not seen here."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("starting a fresh interpreter is tested once, below")
    context = multiprocessing.get_context("fork")
    rb = buffer(storage, 8)
    fill(rb, range(3), "tensor")
    copied_rb = copied(rb, "pickle")
    queue = context.SimpleQueue()
    child = context.Process(target=_double, args=(copied_rb, queue))
    child.start()
    assert queue.get() == [0, 1, 2, 0, 1, 2]
    child.join(30)
    assert child.exitcode == 0
    assert read_ids(rb[:]) == [0, 1, 2]


def test_a_fresh_interpreter_reads_a_pickle(tmp_path: Path) -> None:
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(7), batch_size=3, prefetch=2, generator=torch.Generator().manual_seed(0)
    )
    rb.extend({"a": torch.arange(9), "b": torch.zeros(9, 300)})
    rb.sample()
    (tmp_path / "rb.pickle").write_bytes(pickle.dumps(rb))
    code = (
        "import pickle\n"
        f"rb = pickle.loads(open({str(tmp_path / 'rb.pickle')!r}, 'rb').read())\n"
        "print([rb.sample()['a'].tolist() for _ in range(4)])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == repr([rb.sample()["a"].tolist() for _ in range(4)])


@pytest.mark.parametrize("storage", list(TENSORS))
def test_views_of_a_copy_reach_the_copy(storage: str) -> None:
    """Small fields that share a packed row still do after pickling: native reads and torch's views agree."""
    rb = buffer(storage, 7)
    fill(rb, range(5))
    other = copied(rb, "pickle")
    other["obs"].fill_(-1.0)
    assert bool((other.sample(4)["obs"] == -1.0).all())
    assert other[torch.arange(5)]["id"].tolist() == list(range(5))
    assert read_ids(rb[:]) == list(range(5))
