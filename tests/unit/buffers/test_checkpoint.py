"""Saving and loading: everything comes back; files that were saved earlier; the size of a pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from ostinato.durable import FORMAT_VERSION, CheckpointReader, read_manifest
from ostinato.tools import inspect_checkpoint, verify

from ...tags import TENSORS, buffer, fill, read_ids, rows


def whole(storage: str) -> ReplayBuffer:
    return buffer(storage, 7, batch_size=3, generator=torch.Generator().manual_seed(0))


def test_tensor_storages_read_each_others_saves(tmp_path):
    for source in TENSORS:
        rb = whole(source)
        fill(rb, range(9))
        rb.dumps(tmp_path / source)
        for target in TENSORS:
            other = whole(target)
            other.loads(tmp_path / source)
            assert read_ids(other[:]) == read_ids(rb[:])


def test_generator_counters_and_ages_are_restored_and_the_global_generator_left_alone(tmp_path):
    rb, other = whole("packed"), buffer("packed", 7, batch_size=3)
    fill(rb, range(9))
    rb[torch.tensor([0])] = rows([50])
    rb.sample()
    rb.dumps(tmp_path / "save")
    before = torch.get_rng_state()
    other.loads(tmp_path / "save")
    assert other.stats() == rb.stats()
    assert [read_ids(other.sample()) for _ in range(4)] == [read_ids(rb.sample()) for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), before)


FIXTURES = Path(__file__).parents[2] / "fixtures" / "format-1.4"


EXPECTED = {
    "packed": [[6, 1, 1, 3], [5, 4, 0, 6], [4, 2, 3, 2]],
    "prioritized": [[3, 6, 5, 5], [6, 4, 3, 3], [6, 2, 1, 3]],
    "slices": [[5, 6, 2, 3], [4, 5, 2, 3], [6, 0, 2, 3]],
    "epochs": [[4, 6], [0, 1], [2]],
    "single-copy": [[6, 1, 1, 3], [5, 4, 0, 6], [4, 2, 3, 2]],
    "objects": [[6, 1, 1, 3], [5, 4, 0, 6], [4, 2, 3, 2]],
}
"""What the release that wrote them drew next."""


def make(name: str) -> ReplayBuffer:
    options: dict[str, Any] = {"batch_size": 4, "generator": torch.Generator()}
    if name == "objects":
        return ReplayBuffer(storage=ListStorage(7), collate_fn=list, **options)
    if name == "single-copy":
        return ReplayBuffer(storage=LazyTensorStorage(7, single_copy=True), **options)
    storage = LazyTensorStorage(7)
    if name == "prioritized":
        return PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, **options)
    if name == "slices":
        return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2, end_key="done"), **options)
    if name == "epochs":
        options |= {"batch_size": 2, "prefetch": 2}
        return ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), **options)
    return ReplayBuffer(storage=storage, **options)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_saved_files_are_read(name):
    path = FIXTURES / name
    assert read_manifest(path, format_name="ostinato-buffer").version == FORMAT_VERSION
    assert inspect_checkpoint(path).rows == 7
    assert not verify(path).damage
    for mmap in [False] if name in {"single-copy", "objects"} else [False, True]:
        rb = make(name)
        rb.loads(path, mmap=mmap)
        for expected in EXPECTED[name]:
            batch, info = rb.sample(return_info=True)
            assert info["index"].tolist() == expected
            ids = [row["id"] for row in batch] if name == "objects" else batch["action"].tolist()
            by_slot = [7, 8, 2, 50 if name == "packed" else 3, 4, 5, 6]
            assert ids == [by_slot[slot] for slot in expected]


def test_a_load_begins_again_where_another_save_replaces_its_files(tmp_path, monkeypatch):
    rb, other, read = whole("packed"), whole("packed"), CheckpointReader.read_into
    fill(rb, range(3))
    rb.dumps(tmp_path / "save")

    def save_in_between(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        fill(rb, range(3, 5))
        rb.dumps(tmp_path / "save")
        read(*args, **options)

    monkeypatch.setattr(CheckpointReader, "read_into", save_in_between)
    other.loads(tmp_path / "save")
    assert read_ids(other[:]) == [*range(5)]


def test_small_fields_that_share_memory_are_pickled_once():
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000))
    rb.extend({name: torch.arange(10) for name in "abcdefgh"})
    pickled = pickle.dumps(rb)
    assert len(pickled) < 1.1 * rb.stats().nbytes + 10_000
    other = pickle.loads(pickled)
    other["a"].fill_(-1)  # compiled reads and torch's views agree
    assert (other.sample(3)["a"] == -1).all()
    assert other.stats().nbytes == rb.stats().nbytes
