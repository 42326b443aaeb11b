"""`for_collector` without TorchRL: rows of other processes reach a private buffer once, and errors their caller."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ostinato import LazyTensorStorage, ListStorage, ReplayBuffer, SamplerWithoutReplacement
from ostinato.compat.torchrl import CollectorBuffer, for_collector
from ostinato.errors import KindError, LostBufferError, OptionError, SchemaError, UsageError

from ...sharing import AVAILABLE, LIMIT_S, end, start


def private() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SamplerWithoutReplacement(), batch_size=4)


def write(handle: CollectorBuffer, first: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    slots = [handle.extend({"id": torch.arange(first + 5 * i, first + 5 * i + 5)}) for i in range(20)]
    handle.add({"id": torch.tensor(first + 100)})
    told: list[Any] = [torch.cat(slots).tolist(), handle.write_count >= 101]
    for name, given in (("extend", [{"other": torch.zeros(1)}]), ("sample", [])):
        try:
            handle._call(name, *given)
        except (SchemaError, UsageError) as error:
            told.append(str(error))
    pipe.send(told)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_rows_of_processes_arrive_once_and_errors_go_back(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    rb = private()
    with for_collector(rb) as handle:
        with pytest.raises(AuthenticationError):  # a stranger does not keep workers from being answered
            Client(handle._address, authkey=b"another key")
        pipes = [multiprocessing.get_context(method).Pipe() for _ in range(2)]
        children = [start(write, handle, 1000 * i, other, method=method) for i, (_, other) in enumerate(pipes)]
        told = [mine.recv() for mine, _ in pipes]
        for child in children:
            end(child)
        assert len(handle) == handle.write_count == len(rb) == 202
    ids = rb[:]["id"]
    assert sorted(ids.tolist()) == [1000 * i + j for i in range(2) for j in range(101)]
    for i, (slots, counted, unknown, forbidden) in enumerate(told):
        assert ids[slots].tolist() == list(range(1000 * i, 1000 * i + 100))  # the slots that `extend` returned
        assert counted
        assert "rows must have the keys" in unknown
        assert "workers cannot call 'sample'" in forbidden


def die_after(handle: CollectorBuffer) -> None:
    handle.extend({"id": torch.arange(5)})
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_worker_that_is_killed_blocks_nobody():
    rb = private()
    before = threading.active_count()
    with for_collector(rb) as handle:
        for _ in range(3):
            end(start(die_after, handle), -signal.SIGKILL)
        handle.extend({"id": torch.arange(5)})
    assert len(rb) == 20
    for thread in threading.enumerate():
        if thread.name == "ostinato-collector":
            thread.join(LIMIT_S)
    assert threading.active_count() <= before


def write_twice(handle: CollectorBuffer, pipe: Any) -> None:
    handle.extend({"id": torch.arange(5)})
    handle.empty()
    handle.extend(LazyStackedTensorDict(*(TensorDict({"id": torch.tensor(i)}) for i in range(3))))
    pipe.send(len(handle))
    pipe.recv()
    try:
        handle.extend({"id": torch.arange(5)})
    except LostBufferError as error:
        pipe.send(str(error))


def test_calls_after_close_raise_in_the_worker():
    rb = private()
    handle = for_collector(rb)
    mine, other = multiprocessing.get_context("fork").Pipe()
    child = start(write_twice, handle, other)
    assert mine.recv() == 3
    threads = [thread for thread in threading.enumerate() if thread.name == "ostinato-collector"]
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)  # a program ends though workers are still there
    handle.close()
    handle.close()
    mine.send("closed")
    assert "the handle is closed" in mine.recv()
    end(child)
    handle.empty()  # here, the buffer is at hand
    assert len(rb) == 0


def test_what_the_handle_does_not_do():
    with for_collector(private()) as handle:
        assert handle.shared
        assert handle.share() is handle
        with pytest.raises(UsageError):
            copy.deepcopy(handle)
    with pytest.raises(KindError):
        for_collector(ListStorage(3))  # type: ignore[arg-type]
    if AVAILABLE:
        with pytest.raises(OptionError):
            for_collector(ReplayBuffer(storage=LazyTensorStorage(3), shared=True))
