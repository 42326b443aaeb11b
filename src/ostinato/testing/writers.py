"""Contract tests for writers."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from ostinato.errors import UsageError
from ostinato.protocols import Picks, Ring, Run
from ostinato.testing.views import raises

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.protocols import Placement
    from ostinato.writers import Writer

__all__ = ["WriterContract"]


class WriterContract(ABC):
    """Requirements of a buffer on a writer: slots within the capacity, no gaps, and a state that resumes."""

    read_only: bool = False
    """True for read-only writers, whose `place` always raises UsageError."""

    @abstractmethod
    def make(self) -> Writer:
        """Return a new writer."""

    def scores(self, rows: int) -> Tensor | None:  # noqa: ARG002
        """Return the scores to pass to `place` for `rows` rows; required by writers that rank rows."""
        return None

    def place(self, writer: Writer, rows: int, ring: Ring) -> Placement:
        """Place rows and check the placement: one slot per row, within the capacity."""
        capacity = ring.capacity
        placement = writer.place(rows, ring, self.scores(rows))
        assert placement.total == rows
        if isinstance(placement, Run):
            assert placement.capacity == capacity
            assert 0 <= placement.start < capacity
            assert 1 <= placement.rows <= capacity
        else:
            _check_picks(placement, capacity)
        positions = placement.positions()
        assert positions.dtype is torch.int64
        assert positions.shape == (rows,)
        assert -1 <= int(positions.min()) <= int(positions.max()) < capacity
        ring.record(placement)
        return placement

    # -- the contract ---------------------------------------------------------------------------------------------

    def test_a_read_only_writer_raises(self) -> None:
        """A read-only writer raises UsageError and does not change."""
        if not self.read_only:
            return
        writer = self.make()
        before = copy.deepcopy(writer.state_dict())
        with raises(UsageError):
            writer.place(1, Ring(5), self.scores(1))
        assert writer.state_dict() == before

    def test_rows_fill_the_slots_without_gaps(self) -> None:
        """Until the buffer is full, the written slots are `[0, rows)`."""
        if self.read_only:
            return
        for sizes in ((1, 1, 1, 1, 1), (2, 3), (5,), (4, 4), (1, 9)):
            writer, ring, written, total = self.make(), Ring(5), set(), 0
            for rows in sizes:
                written |= _slots(self.place(writer, rows, ring))
                total += rows
                assert written == set(range(min(total, 5))), f"after batches of {sizes}"

    def test_batches_of_any_size_are_placed(self) -> None:
        """Batches of one row less than the capacity, of the capacity, one row more, and several times the capacity."""
        if self.read_only:
            return
        for capacity in (1, 2, 5):
            for rows in {1, max(1, capacity - 1), capacity, capacity + 1, 2 * capacity, 3 * capacity + 1}:
                writer, ring = self.make(), Ring(capacity)
                for _ in range(3):
                    self.place(writer, rows, ring)

    def test_clear_starts_at_slot_0(self) -> None:
        """After `clear` the first row is placed in slot 0."""
        if self.read_only:
            return
        writer, ring = self.make(), Ring(5)
        self.place(writer, 7, ring)
        writer.clear()
        ring.clear()
        assert _slots(self.place(writer, 2, ring)) == {0, 1}

    def test_resume_uses_free_slots_first(self) -> None:
        """After `resume(3, 3)` with free slots, the next row gets a free slot, or `resume` raises UsageError."""
        if self.read_only:
            return
        writer, ring = self.make(), Ring(5)
        ring.take_over(3, 3)
        try:
            writer.begin(3)
        except UsageError:
            return
        assert _slots(self.place(writer, 1, ring)) == {3}

    def test_state_resumes(self) -> None:
        """A new writer that loads the state places rows like the original; the state does not change."""
        if self.read_only:
            return
        first, ring, other = self.make(), Ring(5), Ring(5)
        self.place(first, 3, ring)
        saved = first.state_dict()
        second = self.make()
        other.load_state_dict(ring.state_dict(), ring.rows)
        expected = [self.place(first, rows, ring).positions().tolist() for rows in (1, 4, 9)]
        second.load_state_dict(saved)
        assert [self.place(second, rows, other).positions().tolist() for rows in (1, 4, 9)] == expected

    def test_pickles_resume(self) -> None:
        """A pickled writer is a copy that places rows like the original."""
        if self.read_only:
            return
        first, ring = self.make(), Ring(5)
        self.place(first, 3, ring)
        second, other = pickle.loads(pickle.dumps((first, ring)))  # noqa: S301 (pickled above)
        assert self.place(first, 4, ring).positions().tolist() == self.place(second, 4, other).positions().tolist()


def _slots(placement: Placement) -> set[int]:
    return set(placement.slots_written().tolist())


def _check_picks(picks: Picks, capacity: int) -> None:
    for indices in (picks.slots, picks.rows, picks.kept):
        assert indices.dtype is torch.int64
        assert indices.is_contiguous()
        assert indices.ndim == 1
    assert picks.slots.shape == picks.rows.shape
    if picks.slots.shape[0]:
        assert 0 <= int(picks.slots.min()) <= int(picks.slots.max()) < capacity
        assert 0 <= int(picks.rows.min()) <= int(picks.rows.max()) < picks.total
    assert torch.equal(picks.kept[picks.rows], picks.slots), "kept must be the slot of each row that was picked"
    assert int((picks.kept >= 0).sum()) == picks.slots.shape[0]
