"""Limit: bare torch, one tensor per field: `index_select(out=)` and `copy_`; reads of files; importing torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks import data
from benchmarks.adapter import KINDS
from benchmarks.peers import _checkpoints, _trajectories
from benchmarks.peers._start import program
from benchmarks.peers._torch import as_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

_IN_C = (
    "slices",
    "slices-writing",
    "slices-rows",
    "n-step",
    "frame-stack",
    "single-copy",
    "shared",
    "mmap",
    "add",
    "prioritized",
    "prioritized-rows",
    "prioritized-threads",
    "priority-update",
    "threads",
    "latency",
)
LACKS = dict.fromkeys(_IN_C, "see the limits in C") | {
    "dataset": "no limit",
    "start.import": "it adds nothing to torch",
    "checkpoint.patch": "no plain way to compare with",
    "checkpoint.map": "no plain way to compare with",
}


def version() -> str:
    """Return the version of torch."""
    return str(torch.__version__)


class _Table:
    """One tensor per field, a batch to write and a batch to read into."""

    def __init__(self, setup: Setup, make: Callable[[int, int], Rows]) -> None:
        self._rows, self._batch, self._at = setup.rows, setup.batch, 0
        source = as_kind(make(setup.batch, 1), "dict")
        self._index = torch.empty(setup.batch, dtype=torch.int64)
        self._order = torch.randperm(setup.rows)
        self._fields = [
            (torch.ones((setup.rows, *value.shape[1:]), dtype=value.dtype), value, torch.empty_like(value))
            for value in source.values()
        ]

    def sample(self) -> None:
        torch.randint(0, self._rows, (self._batch,), out=self._index)
        for table, _, target in self._fields:
            torch.index_select(table, 0, self._index, out=target)

    def write(self) -> None:
        self._at = 0 if self._at + self._batch > self._rows else self._at
        for table, source, _ in self._fields:
            table[self._at : self._at + self._batch].copy_(source)
        self._at += self._batch

    def write_and_sample_in_order(self) -> None:
        self.write()
        order = self._order[self._at - self._batch : self._at]
        for table, _, target in self._fields:
            torch.index_select(table, 0, order, out=target)


_FAMILIES: dict[str, Callable[[Setup], Call]] = {
    "uniform": lambda setup: _Table(setup, data.transitions).sample,
    "images": lambda setup: _Table(setup, data.frames).sample,
    "extend": lambda setup: _Table(setup, data.transitions).write,
    "amp": lambda setup: _Table(setup, data.amp).write_and_sample_in_order,
}
WORKLOADS: dict[str, Callable[[Setup], Call]] = (
    {f"{family}.{kind}": prepare for family, prepare in _FAMILIES.items() for kind in KINDS}
    | {
        "uniform-out.dict": _FAMILIES["uniform"],
        "images-out.dict": _FAMILIES["images"],
        "extend.numpy": _FAMILIES["extend"],
    }
    | _trajectories.LIMITS
    | _checkpoints.LIMITS
    | {
        "start.first-batch": lambda _setup: program("import torch"),
    }
)
