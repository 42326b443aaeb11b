"""Groups in several processes: workers and trainers reach one buffer through its server, and may die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import GroupBuffer, GroupClient, GroupServer
from ostinato.distributed.remote import Method
from ostinato.errors import NoAnswerError, OptionError, SchemaError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sockets of POSIX and fork")
GROUPS = 24


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="og") as folder:  # pytest's own paths may be too long for a socket
        yield Path(folder) / "s"


def produce(socket: Path, worker: int) -> None:
    client = GroupClient(socket)
    for number in range(worker, GROUPS, 2):
        client.admit([{"number": number}], ids=[str(number)])
        for response in ("a", "b"):
            client.append(str(number), {"tokens": torch.full((5,), number)}, id=response)


def train(socket: Path, rank: int, folder: Path) -> None:
    client = GroupClient(socket)
    while True:
        try:
            lease = client.lease(2, least=1, consumer=str(rank), timeout_s=3)
        except WaitTimeoutError:
            return
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for group in lease.groups:
            tokens = [response.fields["tokens"].tolist() for response in group.responses]
            assert tokens == [[group.prompt["number"]] * 5] * 2
            (folder / f"{group.id}.{rank}").touch()
        client.ack(lease, step=1)


def test_processes_train_each_group_once(socket: Path, tmp_path: Path) -> None:
    """One trainer dies with a lease, the log is compacted meanwhile, and the server is started again."""
    context = multiprocessing.get_context("fork")
    done = tmp_path / "done"
    done.mkdir()
    processes = [context.Process(target=produce, args=(socket, worker)) for worker in range(2)]
    processes += [context.Process(target=train, args=(socket, rank, done)) for rank in range(3)]
    for process in processes:
        process.start()  # they wait for the server
    options: Any = {"size": 2, "ahead": 10, "lease_s": 1.0, "sync": "interval", "segment_bytes": 3000}
    with GroupBuffer(tmp_path / "g", **options) as buffer, GroupServer(buffer, socket):
        while buffer.stats().counts["trained"] < GROUPS // 3:
            time.sleep(0.02)
            buffer.compact()
    with GroupBuffer.open(tmp_path / "g", **options) as buffer, GroupServer(buffer, socket):
        for process in processes:
            process.join(60)
        assert buffer.stats().counts["trained"] == GROUPS
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL, 0, 0]
    names = [path.name.partition(".")[0] for path in done.iterdir()]
    assert sorted(names) == sorted(map(str, range(GROUPS)))


def test_a_client_has_the_methods_and_errors_of_the_buffer(socket: Path) -> None:
    buffer = GroupBuffer(size=1, clock=lambda: 1000.0)
    with GroupServer(buffer, socket):
        client = GroupClient(socket)
        assert client.admit([("a", torch.ones(2))], ids=["x"], cursor=[1, 2]) == ["x"]
        assert client.cursor == [1, 2]
        with pytest.raises(SchemaError, match="'tokens'"):
            client.append("x", {}, id="r")
        with pytest.raises(OptionError, match="needs ids"):
            client.admit(["a"])
        with pytest.raises(OptionError):
            client._call(Method("close"), None)
        assert client.append("x", {"tokens": [1]}, id="r", done=False)
        assert not client.append("x", {"tokens": [1]}, id="r", done=False)
        client.append("x", {"tokens": [2], "version": 1}, id="r", part=1)
        assert client.group("x").responses[0].fields["tokens"].tolist() == [1, 2]
        lease = client.lease(consumer="c")
        assert lease.groups[0].prompt[0] == "a"
        assert (client.leases("c"), client.ids("leased")) == ({lease.id: ("x",)}, ["x"])
        assert client.renew(lease) == lease.until
        assert client.release(lease)
        client.ack(client.lease(id="again"), step=3)
        assert client.state("x") == ("trained", 3)
        assert not client.append("x", {"tokens": [2], "version": 1}, id="r", part=1)  # repeated late
        with pytest.raises(UsageError):
            client.append("x", {"tokens": [2]}, id="r", part=2)
        token = client.position(3)
        client.return_to(token)
        assert client.stats() == buffer.stats()
        assert client.admit(["b"], ids=["y"]) == ["y"]
        assert client.drop("y", "dull")
        assert not len(client)
        client.close()
    with pytest.raises(NoAnswerError):
        GroupClient(socket, call_timeout_s=0.1).cursor  # noqa: B018
