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

if TYPE_CHECKING:
    from ostinato.protocols import Ring


class TestRoundRobin(WriterContract):
    def make(self) -> Writer:
        return RoundRobinWriter()


class TestTensorDictRoundRobin(WriterContract):
    def make(self) -> Writer:
        return TensorDictRoundRobinWriter()


class TestImmutable(WriterContract):
    read_only = True

    def make(self) -> Writer:
        return ImmutableDatasetWriter()


class TestMaxValue(WriterContract):
    def make(self) -> Writer:
        return TensorDictMaxValueWriter()

    def scores(self, rows: int) -> torch.Tensor:
        return (torch.arange(rows) * 7 % 5).to(torch.float32)[:, None]


class TestMaxValueOfEqualRanks(WriterContract):
    def make(self) -> Writer:
        return TensorDictMaxValueWriter("r", "max")

    def scores(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, 2)


class TestReservoir(WriterContract):
    def make(self) -> Writer:
        return ReservoirWriter(generator=torch.Generator().manual_seed(0))


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
def test_the_contract_finds_the_bug(writer: type[Writer], law: str) -> None:
    class Suite(WriterContract):
        def make(self) -> Writer:
            return writer()

    with pytest.raises(AssertionError):
        getattr(Suite(), law)()
