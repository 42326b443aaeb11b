"""`for_collector` without TorchRL: rows of other processes reach a private buffer once, and errors their caller."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ListStorage, ReplayBuffer, SamplerWithoutReplacement
from ostinato.compat.torchrl import for_collector
from ostinato.errors import KindError, LostBufferError, OptionError, SchemaError, UsageError

from ...sharing import AVAILABLE, end, start

if TYPE_CHECKING:
    from ostinato.compat.torchrl import CollectorBuffer


def private() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SamplerWithoutReplacement(), batch_size=4)


def write(handle: CollectorBuffer, first: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    slots = [handle.extend({"id": torch.arange(first + 5 * i, first + 5 * i + 5)}) for i in range(20)]
    handle.add({"id": torch.tensor(first + 100)})
    try:
        handle.extend({"other": torch.zeros(1)})
    except SchemaError as error:
        pipe.send((torch.cat(slots).tolist(), handle.write_count >= 101, str(error)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_rows_of_processes_arrive_once_and_errors_go_back(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    rb = private()
    with for_collector(rb) as handle:
        pipes = [multiprocessing.get_context(method).Pipe() for _ in range(2)]
        children = [start(write, handle, 1000 * i, other, method=method) for i, (_, other) in enumerate(pipes)]
        told = [mine.recv() for mine, _ in pipes]
        for child in children:
            end(child)
        assert len(handle) == handle.write_count == len(rb) == 202
    ids = rb[:]["id"]
    assert sorted(ids.tolist()) == [1000 * i + j for i in range(2) for j in range(101)]
    for i, (slots, counted, message) in enumerate(told):
        assert ids[slots].tolist() == list(range(1000 * i, 1000 * i + 100))  # the slots that `extend` returned
        assert counted
        assert "rows must have the keys" in message


def die_after(handle: CollectorBuffer) -> None:
    handle.extend({"id": torch.arange(5)})
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_worker_that_is_killed_blocks_nobody() -> None:
    rb = private()
    before = threading.active_count()
    with for_collector(rb) as handle:
        for _ in range(3):
            end(start(die_after, handle), -signal.SIGKILL)
        handle.extend({"id": torch.arange(5)})
    assert len(rb) == 20
    for thread in threading.enumerate():
        if thread.name == "ostinato-collector":
            thread.join(30)
    assert threading.active_count() <= before


def write_twice(handle: CollectorBuffer, pipe: Any) -> None:
    handle.extend({"id": torch.arange(5)})
    pipe.send(True)
    pipe.recv()
    try:
        handle.extend({"id": torch.arange(5)})
    except LostBufferError as error:
        pipe.send(str(error))


def test_calls_after_close_raise_in_the_worker() -> None:
    rb = private()
    handle = for_collector(rb)
    mine, other = multiprocessing.get_context("fork").Pipe()
    child = start(write_twice, handle, other)
    mine.recv()
    handle.close()
    handle.close()
    mine.send("closed")
    assert "the handle is closed" in mine.recv()
    end(child)
    handle.empty()  # here, the buffer is at hand
    assert len(rb) == 0


def test_what_the_handle_does_not_do() -> None:
    handle = for_collector(private())
    assert handle.shared
    assert handle.share() is handle
    with pytest.raises(UsageError, match="processes that are being started"):
        copy.deepcopy(handle)
    handle.close()
    with pytest.raises(KindError, match="needs a buffer with the methods"):
        for_collector(ListStorage(3))  # type: ignore[arg-type]
    if AVAILABLE:
        with pytest.raises(OptionError, match="pass it as replay_buffer"):
            for_collector(ReplayBuffer(storage=LazyTensorStorage(3), shared=True))
