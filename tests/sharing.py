"""What tests of shared buffers have in common: rows that tell whether they are whole, and children that die on time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import torch

from ostinato import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer
from ostinato._backend import backend
from ostinato.core.records import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.core.shared_ring import SharedRing

__all__ = [
    "AVAILABLE",
    "LIMIT_S",
    "check_ring",
    "check_rows",
    "die",
    "end",
    "ids_of",
    "make",
    "pipe",
    "reserve",
    "ring_of",
    "rows",
    "start",
]

AVAILABLE = hasattr(backend.native, "SharedRing")
LIMIT_S = 60
"""No process is waited for any longer."""


def rows(ids: Sequence[int] | Tensor, width: int = 8) -> dict[str, Tensor]:
    """Rows of which each field follows from the id."""
    number = torch.as_tensor(ids, dtype=torch.int64)
    wide = number.to(torch.float64)[:, None] * torch.arange(1, width + 1, dtype=torch.float64)
    return {"id": number, "wide": wide, "check": wide.sum(1) + number}


def check_rows(batch: dict[str, Tensor]) -> None:
    """Fail unless every row is whole."""
    wanted = rows(batch["id"], batch["wide"].shape[1])
    assert torch.equal(batch["wide"], wanted["wide"])
    assert torch.equal(batch["check"], wanted["check"])


def make(
    capacity: int, *, ranked: bool = False, mapped: bool = False, fill: int = 0, width: int = 8, **options: Any
) -> ReplayBuffer:
    """A shared buffer, its form known."""
    sampler = PrioritizedSampler(capacity, 0.7, 0.5, 1e-3) if ranked else RandomSampler()
    options = {"batch_size": 32, **options}
    storage = LazyMemmapStorage(capacity) if mapped else LazyTensorStorage(capacity)
    rb = ReplayBuffer(storage=storage, sampler=sampler, shared=True, **options)
    rb.extend(rows(range(max(fill, 1)), width))
    if not fill:
        rb.empty()
    return rb


def ring_of(rb: ReplayBuffer) -> SharedRing:
    """The ring behind a shared buffer."""
    return rb.storage.ring  # type: ignore[attr-defined, no-any-return]


def reserve(rb: ReplayBuffer, size: int) -> Run:
    """Reserve slots for rows that are to be committed or abandoned."""
    ring = ring_of(rb)
    return ring.record(Run(0, size, ring.capacity))


def ids_of(rb: ReplayBuffer) -> list[int]:
    """Ids of the rows that are whole, by slot."""
    found: list[int] = rb.storage[ring_of(rb).present()]["id"].tolist()
    return found


def check_ring(rb: ReplayBuffer) -> None:
    """Fail unless counts, stamps and tree agree."""
    ring = ring_of(rb)
    with ring.lock:
        _, holes, filled, committed = ring.state()
        stamps = ring.generations(torch.arange(ring.capacity))
        assert int((stamps > 0).sum()) == committed == len(rb)
        assert holes == filled - committed
        whole = stamps[stamps > 0]
        assert len(set(whole.tolist())) == whole.numel()
        if ring.tree is None:
            return
        leaves = torch.empty(ring.capacity, dtype=torch.float64)
        ring.tree.leaves(leaves.data_ptr(), ring.capacity)
        assert bool((leaves[stamps <= 0] == 0).all())
        assert bool((leaves[stamps > 0] > 0).all())
        other = backend.native.SumTree(ring.capacity)  # type: ignore[union-attr]
        other.load(leaves.data_ptr(), ring.capacity)
        assert (ring.tree.total, ring.tree.minimum) == (other.total, other.minimum)


def pipe() -> tuple[Any, Any]:
    """Two ends of a pipe between this process and a forked one."""
    return multiprocessing.get_context("fork").Pipe()


def start(work: Callable[..., Any], *given: Any, method: str = "fork") -> Any:
    """Start a process."""
    child = multiprocessing.get_context(method).Process(target=work, args=given, daemon=True)  # type: ignore[attr-defined]
    child.start()
    return child


def end(child: Any, code: int = 0) -> None:
    """Wait for a process, which must end so."""
    child.join(LIMIT_S)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == code


def die() -> None:
    """End this process, now."""
    os.kill(os.getpid(), signal.SIGKILL)
