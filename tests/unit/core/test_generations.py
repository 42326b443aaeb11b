"""`Ring`: serial numbers of rows that were not stored; `tests/stateful` holds generations against a model."""

from __future__ import annotations

import pytest
import torch

from ostinato.core.records import Picks, Run
from ostinato.core.ring import Ring


@pytest.mark.parametrize("edited", [False, True])
def test_rows_that_could_not_be_stored_are_taken_back(edited):
    ring = Ring(4)
    ring.record(Run(0, 2, 4))
    if edited:
        ring.record_edit(torch.tensor([0]))
    serial = ring.written
    run = Run(2, 1, 4)
    ring.record(run)
    ring.take_back(run, 2, 2)
    assert (ring.rows, ring.cursor) == (2, 2)
    assert ring.written == serial + 1
    assert ring.generations(torch.arange(2)).gt(0).all()
    ring.record(Run(2, 2, 4))
    found = ring.generations(torch.arange(4)).tolist()
    assert found[2:] == [serial + 2, serial + 3]


def test_rows_that_the_writer_dropped_count_as_written():
    ring = Ring(4)
    ring.record(Picks(torch.tensor([1]), torch.tensor([0]), torch.tensor([1, -1, -1])))
    assert (ring.written, ring.rows) == (3, 2)
    assert ring.generations(torch.arange(4)).tolist() == [0, 1, 0, 0]
