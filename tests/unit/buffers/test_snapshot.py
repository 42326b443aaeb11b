"""A save while writers go on holds the rows of one moment."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from ostinato.buffers.checkpoint import save
from ostinato.durable import CheckpointReader, checkpoint

from ...tags import buffer, fill, read_ids, rows, same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato import Storage
    from ostinato.durable.checkpoint import Piece

CAPACITY = 1000
MAKERS: dict[str, Callable[[], Storage]] = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "columns": lambda: LazyTensorStorage(CAPACITY, packed=False),
    "mapped": lambda: LazyMemmapStorage(CAPACITY),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows into many pieces, so that writers come in between."""
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 4096)
    monkeypatch.setattr(save, "PIECE_BYTES", 4096)


def at_each_piece(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Let something happen after each piece that a save writes, at the same moments in every run."""
    plain = save.Snapshot._take
    count = 0

    def take(self: save.Snapshot, array: object, file: object, piece: Piece, room: object, lock: object) -> None:
        nonlocal count
        plain(self, array, file, piece, room, lock)  # type: ignore[arg-type]
        count += 1
        act(count)

    monkeypatch.setattr(save.Snapshot, "_take", take)


def _act(rb: ReplayBuffer, verb: str, maker: str, count: int) -> None:
    slots = torch.arange(count % 7, CAPACITY, 71)
    if verb == "extend":
        fill(rb, range(10_000, 10_000 + 50))
    elif verb == "edit":
        rb[slots] = rows(slots + 5000)
    elif verb == "field":
        rb.set_at_("id", slots + 90_000, slots)
    elif verb == "empty" and count == 3:
        rb.empty()
        fill(rb, range(20_000, 20_100))
    elif verb == "fill" and count == 2:
        fill(rb, range(30_000, 30_000 + 3 * CAPACITY))
    elif verb == "exchange" and count == 2:
        rb.set_storage(MAKERS[maker]())
        fill(rb, range(40_000, 40_000 + CAPACITY))


@pytest.mark.parametrize(
    ("maker", "verb"),
    [
        ("memory", "extend"),
        ("mapped", "extend"),
        ("memory", "edit"),
        ("columns", "field"),
        ("mapped", "empty"),
        ("memory", "fill"),
        ("columns", "exchange"),
        ("mapped", "exchange"),
    ],
)
def test_no_way_to_change_rows_reaches_the_save(maker, verb, tmp_path, monkeypatch):
    rb, other = buffer(MAKERS[maker]()), buffer(MAKERS[maker]())
    fill(rb, range(CAPACITY))
    at_each_piece(monkeypatch, lambda count: _act(rb, verb, maker, count))
    for _ in range(2 if verb == "extend" else 1):  # a chain holds what was there while rows were replaced
        expected = snapshot(rb)
        rb.dumps(tmp_path / "save", incremental=verb == "extend")
        other.loads(tmp_path / "save")
        CheckpointReader(tmp_path / "save", format_name="ostinato-buffer").verify()
        same_state(snapshot(other), expected)


def test_a_load_waits_for_a_save_of_the_same_buffer(tmp_path, monkeypatch):
    rb, other = (buffer(LazyTensorStorage(CAPACITY)) for _ in range(2))
    fill(rb, range(10))
    rb.dumps(tmp_path / "first")
    fill(rb, range(10, CAPACITY))
    expected = snapshot(rb)
    loader = threading.Thread(target=rb.loads, args=(tmp_path / "first",))
    at_each_piece(monkeypatch, lambda count: loader.start() if count == 2 else None)
    rb.dumps(tmp_path / "second")
    loader.join(10)
    assert len(rb) == 10
    other.loads(tmp_path / "second")
    same_state(snapshot(other), expected)


def test_a_write_goes_on_where_the_save_cannot(tmp_path, monkeypatch):
    """A disk that is full while a writer puts rows down is the save's trouble, not the writer's."""
    rb, other = (buffer(LazyTensorStorage(CAPACITY)) for _ in range(2))
    fill(rb, range(CAPACITY))
    rb.dumps(tmp_path / "save")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        at_each_piece(patch, lambda _: fill(rb, range(5000, 5000 + CAPACITY)))
        with pytest.raises(MemoryError, match=r"bytes needed"):
            rb.dumps(tmp_path / "save")
    assert read_ids(rb[:])[0] >= 5000
    other.loads(tmp_path / "save")
    assert read_ids(other[:]) == list(range(CAPACITY))
