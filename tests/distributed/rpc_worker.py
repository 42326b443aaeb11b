"""One of the two processes of `test_rpc.py`: rank 0 owns the buffer, rank 1 uses it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed import rpc

from ostinato import LazyTensorStorage, PrioritizedSampler, QueueSampler, RemoteTensorDictReplayBuffer


class Node(RemoteTensorDictReplayBuffer):
    """A buffer as users subclass it: the parts are made where it lives."""

    def __init__(self, capacity: int) -> None:
        super().__init__(
            storage=LazyTensorStorage(capacity), sampler=PrioritizedSampler(capacity, 0.7, 0.5), batch_size=8
        )


def check(truth: bool) -> None:
    """Exit if a condition is false, also under `python -O`."""
    if not truth:
        msg = "not so"
        raise RuntimeError(msg)


def rows(first: int, count: int) -> TensorDict:
    """Rows that hold their own numbers."""
    return TensorDict({"obs": torch.arange(first, first + count), "td_error": torch.ones(count)}, [count])


def drive(folder: Path) -> None:
    """Write, sample, learn and edit, in both ways of calling: all methods are wrapped alike."""
    rref = rpc.remote("owner", Node, args=(32,))

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return rpc.rpc_sync("owner", getattr(RemoteTensorDictReplayBuffer, name), args=(rref, *args), kwargs=kwargs)

    check(rref.rpc_sync().extend(rows(0, 20)).tolist() == list(range(20)))
    check(call("extend", rows(20, 20)).shape == (20,))
    check(rref.rpc_sync().__len__() == call("__len__") == 32)
    batch = rref.rpc_sync().sample()
    check(batch.batch_size == torch.Size([8]))
    check(bool(((batch["obs"] % 32) == batch["index"]).all()))
    check(int(batch["obs"].min()) >= 8)
    batch["td_error"] = torch.zeros(8)
    rref.rpc_sync().update_tensordict_priority(batch)
    futures = [rref.rpc_async().sample(batch_size=4) for _ in range(20)]
    futures += [rref.rpc_async().extend(rows(40 + 4 * i, 4)) for i in range(8)]
    check(all(future.wait() is not None for future in futures))
    check(sorted(call("__getitem__", slice(None))["obs"].tolist()) == list(range(40, 72)))
    try:
        rref.rpc_sync().extend(torch.zeros(3))
    except ValueError as error:
        check("NoTensorDictError" in str(error) and "takes TensorDicts" in str(error))
    else:
        check(False)
    call("__setitem__", 0, rows(0, 1)[0])
    check(int(call("__getitem__", 0)["obs"]) == 0)
    check(call("set_at_", "obs", torch.tensor([-5]), batch["index"][:1]).rpc_sync().can_sample())  # a reference
    rref.rpc_sync().dumps(str(folder / "saved"))
    rref.rpc_sync().empty()
    call("load", str(folder / "saved"))
    check(int(rref.rpc_sync().read_all_in_order()["obs"].min()) == -5)
    wait()


def wait() -> None:
    """Wait on the owner for rows that are written."""
    options = {"storage": LazyTensorStorage(16), "sampler": QueueSampler(), "batch_size": 4}
    rref = rpc.remote("owner", RemoteTensorDictReplayBuffer, kwargs=options)
    future = rref.rpc_async().sample(timeout_s=30.0)
    rref.rpc_sync().extend(rows(0, 6))
    check(future.wait()["obs"].tolist() == [0, 1, 2, 3])


def main() -> None:
    """Connect to the other process, work, and disconnect."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=60, init_method=os.environ["RENDEZVOUS"]
    )
    os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    begin: Any = rpc.init_rpc  # untyped in torch
    begin(("owner", "driver")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        drive(folder)
        sys.stdout.write("driver is content\n")
    rpc.shutdown(graceful=True, timeout=60)


if __name__ == "__main__":
    main()
