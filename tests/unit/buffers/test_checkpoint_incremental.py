"""Incremental saves: what is loaded is what was saved, and what is written is what has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
)
from ostinato.durable import CheckpointReader
from ostinato.durable.checkpoint import MOST_PATCHES

from ...tags import buffer, fill, rows, same_state, snapshot

if TYPE_CHECKING:
    from pathlib import Path


MANY = 20_000


def files(path: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in path.iterdir()}


def chain(path: Path) -> int:
    arrays = CheckpointReader(path, format_name="ostinato-buffer").arrays
    return max(len(record.patches) for record in arrays.values())


def test_changes_cost_what_they_weigh(tmp_path):
    rb, path = buffer(LazyTensorStorage(MANY)), tmp_path / "save"

    def saved() -> int:
        before = files(path)
        rb.dumps(path, incremental=True)
        other = buffer(LazyTensorStorage(MANY))
        other.loads(path)
        same_state(snapshot(other), snapshot(rb))
        new = {name: size for name, size in files(path).items() if name not in before}
        return sum(size for name, size in new.items() if name != "manifest.json" and "state" not in name)

    fill(rb, range(2 * MANY - 50))
    rb.dumps(path)
    assert saved() == 0, "nothing has changed"
    fill(rb, range(MANY, MANY + 100))
    widths = [array.row_bytes for array in rb.storage.dense.row_arrays()]  # type: ignore[union-attr]
    # a large run lies on pages of its own, which may cost one page before and one after it; the ring wraps: two runs
    assert 100 * sum(widths) <= saved() < 100 * sum(widths) + 4 * 4096 * len(widths)
    assert chain(path) == 1
    slots = torch.arange(0, MANY, 97)
    rb[slots] = rows(slots + MANY)
    assert saved() <= len(slots) * sum(width + 16 for width in widths), "each row and its place in a table"


def test_a_long_chain_is_folded_and_never_outweighs_its_base(tmp_path):
    rb = buffer(LazyTensorStorage(500))
    fill(rb, range(500))
    path = tmp_path / "save"
    rb.dumps(path)
    longest, whole = 0, sum(files(path).values())
    for turn in range(MOST_PATCHES + 8):
        fill(rb, range(500 + 10 * turn, 510 + 10 * turn))
        rb.dumps(path, incremental=True)
        longest = max(longest, chain(path))
        assert chain(path) <= MOST_PATCHES
        assert sum(files(path).values()) < 2.5 * whole
    assert longest > 3, "no chain grew at all"
    other = buffer(LazyTensorStorage(500))
    other.loads(path)
    same_state(snapshot(other), snapshot(rb))


@pytest.mark.parametrize("foreign", ["none", "another buffer", "a load", "another storage", "another save"])
def test_a_save_continues_the_one_before_or_is_written_whole(foreign, tmp_path):
    rb, path = buffer(LazyTensorStorage(100)), tmp_path / "save"
    fill(rb, range(80))
    rb.dumps(path)
    if foreign == "none":
        rb = buffer(LazyTensorStorage(100))
        rb.loads(path)
        fill(rb, range(80, 83))
    elif foreign == "another buffer":
        rb = buffer(LazyTensorStorage(100))
        fill(rb, range(1000, 1080))
    elif foreign == "a load":
        rb.load_state_dict(rb.state_dict())
    elif foreign == "another storage":
        rb.set_storage(LazyTensorStorage(100))
        fill(rb, range(50))
    else:
        second = buffer(LazyTensorStorage(100))
        fill(second, range(2000, 2080))
        second.dumps(path)
        fill(rb, [80])
    rb.dumps(path, incremental=True)
    assert chain(path) == (foreign == "none")
    other = buffer(LazyTensorStorage(100))
    other.loads(path)
    same_state(snapshot(other), snapshot(rb))


def test_after_a_view_was_handed_out_everything_is_written(tmp_path):
    views: list[Any] = [
        lambda rb: rb[2:5]["id"],
        lambda rb: rb.storage["id"],
        lambda rb: rb.storage.columns[("id",)],
    ]
    for view in views:
        rb, other = buffer(LazyTensorStorage(100)), buffer(LazyTensorStorage(100))
        fill(rb, range(80))
        rb.dumps(tmp_path / "save")
        seen = view(rb)
        rb.dumps(tmp_path / "save", incremental=True)
        seen.fill_(-5)
        rb.dumps(tmp_path / "save", incremental=True)
        other.loads(tmp_path / "save")
        assert torch.equal(other[:]["id"], rb[:]["id"])
        assert (other[:]["id"] == -5).any()


def test_priorities_are_written_by_the_block(tmp_path):
    def make() -> PrioritizedReplayBuffer:
        return PrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(MANY), generator=torch.Generator(), batch_size=4
        )

    rb = make()
    fill(rb, range(MANY))
    rb.dumps(tmp_path / "save")
    before = files(tmp_path / "save")
    rb.update_priority(torch.tensor([3, 5]), torch.tensor([9.0, 8.0]))
    rb.dumps(tmp_path / "save", incremental=True)
    added = [size for name, size in files(tmp_path / "save").items() if name not in before]
    assert 0 < sum(added) < 3 * 70_000, "of priorities and values one block of 64 KiB each"
    other = make()
    other.loads(tmp_path / "save")
    same_state(snapshot(other), snapshot(rb))
    assert other.sample()["id"].tolist() == rb.sample()["id"].tolist()
