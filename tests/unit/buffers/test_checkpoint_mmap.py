"""`loads(mmap=True)`: nothing is read before it is sampled, nothing is written to the files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from ostinato.errors import CheckpointError, OptionError

from ...tags import buffer, fill, read_ids, rows, same_state, snapshot


def make(capacity: int = 60, **options: Any) -> ReplayBuffer:
    return buffer(LazyTensorStorage(capacity, **options), batch_size=5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("source", "count"), [({}, 1), ({"packed": False}, 40), ({"single_copy": False}, 60), ({}, 95)]
)
def test_a_mapped_load_is_a_load(source, count, tmp_path):
    rb = make(**source)
    fill(rb, range(count))
    rb.sample()
    rb.dumps(tmp_path / "save")
    one, two = make(), make()
    one.loads(tmp_path / "save", mmap=True)
    two.loads(tmp_path / "save")
    for step in range(5):
        same_state(snapshot(one), snapshot(two))
        assert read_ids(one.sample()) == read_ids(two.sample())
        for other in (one, two):
            fill(other, range(1000 * step, 1000 * step + 17))


def test_a_mapped_buffer_saves_over_the_files_it_stands_on(tmp_path):
    rb = make()
    fill(rb, range(60))
    rb.dumps(tmp_path / "save")
    before = {path.name: path.read_bytes() for path in (tmp_path / "save").iterdir()}
    other = make()
    other.loads(tmp_path / "save", mmap=True)
    fill(other, range(100, 170))
    other[torch.arange(5)] = rows(range(500, 505))
    assert {path.name: path.read_bytes() for path in (tmp_path / "save").iterdir()} == before
    for turn in range(3):
        fill(other, range(100 * turn, 100 * turn + 7))
        other.dumps(tmp_path / "save", incremental=turn != 1)
        third = make()
        third.loads(tmp_path / "save", mmap=True)
        same_state(snapshot(third), snapshot(other))


def test_what_cannot_be_mapped_is_refused_before_anything_changes(tmp_path):
    rb = make()
    fill(rb, range(9))
    rb.dumps(tmp_path / "save")
    for storage in (ListStorage(60), LazyMemmapStorage(60), LazyTensorStorage(60, single_copy=True)):
        with pytest.raises(OptionError, match="mmap=True needs a LazyTensorStorage"):
            buffer(storage).loads(tmp_path / "save", mmap=True)
    single = buffer(LazyTensorStorage(8, single_copy=True))
    place = torch.arange(6.0).view(6, 1)
    single.extend({"obs": place, "next_obs": place + 1, "done": torch.zeros(6).bool()})
    single.dumps(tmp_path / "single")
    target = buffer(LazyTensorStorage(8))
    with pytest.raises(CheckpointError, match=r"next_obs.*single_copy.*mmap=False"):
        target.loads(tmp_path / "single", mmap=True)
    assert len(target) == 0
