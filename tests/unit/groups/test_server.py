"""Groups in several processes: workers and trainers reach one buffer through its server, and may die."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import GroupBuffer, GroupClient, GroupServer
from ostinato.distributed.remote import Method
from ostinato.errors import NoAnswerError, OptionError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sockets of POSIX and fork")
GROUPS = 24


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="og") as folder:  # pytest's own paths may be too long for a socket
        yield Path(folder) / "s"


def test_a_client_has_the_methods_and_errors_of_the_buffer(socket):
    buffer = GroupBuffer(size=1, clock=lambda: 1000.0)
    with GroupServer(buffer, socket):
        client = GroupClient(socket)
        assert client.admit([("a", torch.ones(2))], ids=["x"], cursor=[1, 2]) == ["x"]
        assert client.cursor == [1, 2]
        with pytest.raises(SchemaError, match="'tokens'"):
            client.append("x", {}, id="r")
        with pytest.raises(OptionError):
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
