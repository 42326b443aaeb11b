"""Buffers that are passed to processes: what TorchRL's do, and what differs."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ..sharing import AVAILABLE, end, start
from ._script import Library

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")


@pytest.fixture(autouse=True)
def spawning() -> Iterator[None]:
    """Locks of TorchRL's buffers are of the default start method."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def rows(first: int, count: int = 10) -> TensorDict:
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "next": {"reward": ids.float()}}, [count])


def work(rb: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    rb.extend(rows(10))
    pipe.send(len(rb))
    pipe.recv()
    pipe.send((len(rb), rb["id"].tolist()))


def played(rb: Any) -> list[Any]:
    """Let a process write, then this one; return what both see."""
    mine, other = multiprocessing.get_context("spawn").Pipe()
    child = start(work, rb, other, method="spawn")
    seen: list[Any] = [mine.recv(), len(rb)]
    rb.extend(rows(20))
    mine.send("written")
    seen += [*mine.recv(), len(rb), rb["id"].tolist()]
    end(child)
    return seen


def filled(name: str, storage: str, capacity: int) -> Any:
    lib: Any = Library(name)
    rb = lib.TensorDictReplayBuffer(storage=getattr(lib, storage)(capacity))
    rb.extend(rows(0))
    return rb


@pytest.mark.parametrize("name", ["torchrl", "ostinato"])
def test_a_buffer_in_files_is_shared_with_a_process_that_is_started(name: str) -> None:
    ids = [*range(21, 30), *range(9, 21)]
    assert played(filled(name, "LazyMemmapStorage", 21)) == [20, 20, 21, ids, 21, ids]


def test_rows_in_private_memory_are_copied_where_torchrl_moves_them() -> None:
    assert played(filled("ostinato", "LazyTensorStorage", 30))[:2] == [20, 10]


def test_the_schema_of_a_shared_buffer_may_come_later_where_torchrl_needs_shared_init() -> None:
    theirs: Any = Library("torchrl")
    rb = theirs.ReplayBuffer(storage=theirs.LazyMemmapStorage(21), shared=True)
    with pytest.raises(RuntimeError, match="it has not been initialized yet"):
        start(work, rb, None, method="spawn")
    ours: Any = Library("ostinato")
    assert played(ours.ReplayBuffer(storage=ours.LazyMemmapStorage(21), shared=True))[:2] == [10, 10]
