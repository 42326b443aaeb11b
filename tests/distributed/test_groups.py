"""A buffer of groups in an actor: workers die, consumers die, the actor is restarted; each group is trained once."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from typing import Any

import pytest

from ostinato import RayGroupBuffer
from ostinato.errors import LostBufferError, OptionError, UsageError, WaitTimeoutError

from .conftest import NO_CPU

GROUPS = 30


def produce(buffer: RayGroupBuffer, worker: int) -> None:
    """Admit groups and append their responses; those of the first one are left, as by a worker that has died."""
    for number in range(worker, GROUPS, 2):
        buffer.admit([number], ids=[str(number)], timeout_s=60)
        for response in ("a", "b") if number else ():
            buffer.append(str(number), {"tokens": [number] * 4, "version": 0}, id=response)


def train(buffer: RayGroupBuffer, rank: int, trained: list[str]) -> None:
    while True:
        try:
            lease = buffer.lease(2, least=1, consumer=str(rank), timeout_s=3)
        except WaitTimeoutError:
            return
        if rank == 0:  # dies with its lease
            return
        with contextlib.suppress(UsageError):  # it may expire while the actor is restarted
            assert buffer.renew(lease) >= lease.until
            buffer.ack(lease, step=1)
            trained.extend(group.id for group in lease.groups)


def finish(buffer: RayGroupBuffer) -> None:
    """Write the responses of groups that no worker writes."""
    while buffer.stats().counts["trained"] < GROUPS:
        for name in buffer.ids("waiting", idle_s=2.0):
            for response in ("a", "b"):
                buffer.append(name, {"tokens": [1], "version": 0}, id=response)
        time.sleep(0.1)


def test_each_group_is_trained_once(cluster, tmp_path, request):
    options: Any = {"size": 2, "ahead": 12, "lease_s": 1.5, "sync": "interval", "remote_config": NO_CPU}
    buffer = RayGroupBuffer(tmp_path / "g", name="groups", **options)
    with pytest.raises(OptionError, match="is taken"):
        RayGroupBuffer(name="groups", remote_config=NO_CPU)
    trained: list[str] = []
    handles = [pickle.loads(pickle.dumps(buffer)) for _ in range(5)]
    threads = [threading.Thread(target=produce, args=(handles[worker], worker)) for worker in range(2)]
    threads += [threading.Thread(target=train, args=(handles[2 + rank], rank, trained)) for rank in range(3)]
    for thread in threads:
        thread.start()
    if request.node.callspec.params["cluster"] == "ray":
        while len(trained) < GROUPS // 3:
            time.sleep(0.05)
        cluster.kill(buffer._client.actor, no_restart=False)
    finish(RayGroupBuffer.attach("groups"))
    for thread in threads:
        thread.join(60)
    assert sorted(trained) == sorted(map(str, range(GROUPS)))
    with pytest.raises(OptionError, match="no group"):
        buffer.group("none")
    buffer.close()
    with pytest.raises(LostBufferError):
        buffer.stats()
