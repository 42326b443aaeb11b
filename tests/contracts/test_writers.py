"""The writer contract, run over every writer of ours, and over writers with known bugs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import (
    ImmutableDatasetWriter,
    ReservoirWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
from ostinato.protocols import Run
from ostinato.testing import WriterContract
from tests.contracts.suites import suites

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.protocols import Ring


WRITERS: dict[str, Callable[[], Writer]] = {
    "RoundRobinWriter": RoundRobinWriter,
    "TensorDictRoundRobinWriter": TensorDictRoundRobinWriter,
    "ReservoirWriter": lambda: ReservoirWriter(generator=torch.Generator().manual_seed(0)),
}


def ranks(suite: object, rows: int) -> torch.Tensor:
    return (torch.arange(rows, device="cpu") * 7 % 5).to(torch.float32)[:, None]


def equal_ranks(suite: object, rows: int) -> torch.Tensor:
    return torch.zeros(rows, 2, dtype=torch.float32, device="cpu")


globals().update(suites(WriterContract, WRITERS, __name__))
globals().update(suites(WriterContract, {"read-only": ImmutableDatasetWriter}, __name__, read_only=True))
globals().update(suites(WriterContract, {"ranked": TensorDictMaxValueWriter}, __name__, scores=ranks))
_OF_TWO = {"equal ranks": lambda: TensorDictMaxValueWriter("r", "max")}
globals().update(suites(WriterContract, _OF_TWO, __name__, scores=equal_ranks))


class _NoWrap(RoundRobinWriter):
    """A ring that forgets to wrap: it skips nothing of a batch longer than itself."""

    def place(self, rows: int, ring: Ring, scores: torch.Tensor | None) -> Run:
        return Run(ring.cursor, rows, ring.capacity)


class _Gap(RoundRobinWriter):
    """A ring that begins at slot 1."""

    def place(self, rows: int, ring: Ring, scores: torch.Tensor | None) -> Run:
        run = super().place(rows, ring, scores)
        return run._replace(start=(run.start + 1) % ring.capacity)


@pytest.mark.parametrize(
    ("writer", "law"),
    [(_NoWrap, "test_batches_of_any_size_are_placed"), (_Gap, "test_rows_fill_the_slots_without_gaps")],
)
def test_the_contract_finds_the_bug(writer, law):
    (suite,) = suites(WriterContract, {"broken": writer}, __name__).values()
    with pytest.raises(AssertionError):
        getattr(suite(), law)()
