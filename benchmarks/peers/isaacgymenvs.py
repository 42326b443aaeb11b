"""A ring buffer in the style of IsaacGymEnvs' AMP buffer, written in plain torch from its documentation.

Not their code: the same data structures and tensor operations, for a workload that this buffer was made for.
"""

from __future__ import annotations

from importlib.metadata import version as installed
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from benchmarks import data
from benchmarks.peers._torch import as_kind
from benchmarks.workloads import WORKLOADS as WORKLOADS_OF_ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup

LACKS = {load.family: "an AMP ring buffer only" for load in WORKLOADS_OF_ALL if load.family != "amp"}


class AmpRing:
    """A ring of tensors, sampled along a shuffled permutation of its slots."""

    def __init__(self, size: int) -> None:
        """Make an empty ring of `size` rows."""
        self._size, self._head, self._total, self._at = size, 0, 0, 0
        self._fields: dict[str, torch.Tensor] = {}
        self._order = torch.randperm(size)

    def store(self, rows: dict[str, torch.Tensor]) -> None:
        """Write rows at the head, in two parts where they wrap."""
        if not self._fields:
            self._fields = {key: torch.zeros(self._size, *value.shape[1:]) for key, value in rows.items()}
        count = next(iter(rows.values())).shape[0]
        front = min(count, self._size - self._head)
        for key, value in rows.items():
            self._fields[key][self._head : self._head + front] = value[:front]
            self._fields[key][: count - front] = value[front:]
        self._head = (self._head + count) % self._size
        self._total += count

    def sample(self, count: int) -> dict[str, torch.Tensor]:
        """Read rows along the permutation and shuffles it anew at its end."""
        places = torch.arange(self._at, self._at + count) % self._size
        order = self._order[places]
        if self._total < self._size:
            order %= self._head
        self._at += count
        if self._at >= self._size:
            self._order, self._at = torch.randperm(self._size), 0
        return {key: value[order] for key, value in self._fields.items()}


def version() -> str:
    """Return the version of torch that it runs on."""
    return f"torch {installed('torch')}"


def amp(setup: Setup) -> Call:
    """Write AMP observations and samples without replacement."""
    ring = AmpRing(setup.rows)
    for rows in data.chunks(data.amp, setup.rows, 10_000):
        ring.store(as_kind(rows, "dict"))
    batches = cycle([as_kind(rows, "dict") for rows in data.pool(data.amp, setup.batch)])

    def call() -> None:
        ring.store(next(batches))
        ring.sample(setup.batch)

    return call


WORKLOADS: dict[str, Callable[[Setup], Call]] = {"amp.dict": amp}
