"""Contract tests for storages."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.rows import map_leaves
from ostinato.errors import CheckpointError
from ostinato.protocols import Picks, Run
from ostinato.testing.views import raises

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.storages import Storage

__all__ = ["StorageContract"]


class StorageContract(ABC):
    """Requirements of a buffer on a storage: rows come back unchanged, rejected rows change nothing.

    All fields of a row are functions of an id, so that any mixing of rows or fields is detected.
    """

    checks_schema: bool = True
    """False for storages that accept rows of any schema."""

    @abstractmethod
    def make(self, capacity: int) -> Storage:
        """Return an empty storage with the given capacity."""

    def rows(self, ids: Tensor) -> Any:
        """Return rows for `extend`, one for each id of int64 `[n]`."""
        return {"id": ids.clone(), "obs": torch.stack((ids * 2.0, ids + 0.5), -1)}

    def row(self, number: int) -> Any:
        """Return one row for `add`."""
        return map_leaves(self.rows(torch.tensor([number], dtype=torch.int64, device="cpu")), lambda leaf: leaf[0])

    def wrong_rows(self, count: int) -> Any:
        """Return rows with another schema than `rows`."""
        return {
            "id": torch.zeros(count, dtype=torch.int64, device="cpu"),
            "obs": torch.zeros(count, 3, dtype=torch.float32, device="cpu"),
        }

    def ids(self, storage: Storage, presented: Any) -> list[int]:
        """Return the ids of presented rows, after checking all fields against them."""
        if storage.default_collate is not None:
            presented = storage.default_collate(presented)
        ids = presented["id"].cpu()
        expected = {"id": ids, "obs": torch.stack((ids * 2.0, ids + 0.5), -1)}
        for key, value in expected.items():
            assert torch.equal(presented[key].cpu(), value), f"field {key!r} does not match the rows {ids.tolist()}"
        return [int(i) for i in ids]

    # -- tests -----------------------------------------------------------------------------------------------

    def test_a_new_storage_is_empty(self) -> None:
        """It has no rows and the requested capacity."""
        storage = self.make(5)
        assert len(storage) == 0
        assert storage.capacity == 5
        assert storage.shape[0] == 0

    def test_admit_changes_nothing(self) -> None:
        """`admit` counts rows; only `write` stores them."""
        storage = self.make(5)
        _, count = storage.admit(self.rows(torch.arange(3, device="cpu")), 1)
        assert count == 3
        assert len(storage) == 0
        _, count = storage.admit(self.row(7), 0)
        assert count == 1

    def test_gather_returns_the_rows_that_were_written(self) -> None:
        """`gather` returns the rows that were written, in any order, with repetitions."""
        storage = self.filled(5, 4)
        assert self.stored(storage, [2, 0, 3, 3]) == [2, 0, 3, 3]
        assert len(storage) == 4

    def test_gather_returns_a_single_row(self) -> None:
        """`admit(row, 0)` stores one row; with `batch=()` it is presented like the input."""
        storage = self.make(5)
        payload, _ = storage.admit(self.row(9), 0)
        storage.write(Run(0, 1, 5), payload)
        assert self.stored(storage, [0]) == [9]
        one = storage.present(storage.gather(torch.tensor([0], device=storage.device)), ())
        assert int(one["id"]) == 9

    def test_runs_wrap_around(self) -> None:
        """A run that passes the last slot continues at slot 0."""
        storage = self.filled(5, 5)
        self.write(storage, Run(3, 4, 5), 100, 4)
        assert self.stored(storage) == [102, 103, 2, 100, 101]

    def test_skipped_rows_are_not_stored(self) -> None:
        """Of a batch longer than the capacity, only the last rows are copied."""
        storage = self.filled(5, 5)
        self.write(storage, Run(2, 5, 5, 7), 100, 12)
        assert self.stored(storage) == [110, 111, 107, 108, 109]

    def test_picks_choose_rows_and_slots(self) -> None:
        """Row `rows[i]` of the batch is stored in slot `slots[i]`; other rows are dropped."""
        storage = self.filled(5, 4)
        picks = Picks(
            torch.tensor([3, 0], device="cpu"),
            torch.tensor([0, 2], device="cpu"),
            torch.tensor([3, -1, 0], device="cpu"),
        )
        self.write(storage, picks, 100, 3)
        assert self.stored(storage) == [102, 1, 2, 100]

    def test_inputs_are_copied(self) -> None:
        """Changes of the input tensors after `write` do not affect the storage."""
        storage = self.make(5)
        source = self.rows(torch.arange(3, device="cpu"))
        payload, _ = storage.admit(source, 1)
        storage.write(Run(0, 3, 5), payload)
        map_leaves(source, lambda leaf: leaf.zero_())
        assert self.stored(storage) == [0, 1, 2]

    def test_outputs_are_copies(self) -> None:
        """Later writes do not change the result of an earlier `gather`."""
        storage = self.filled(5, 5)
        payload = storage.gather(torch.arange(5, device=storage.device))
        self.write(storage, Run(0, 5, 5), 100, 5)
        assert self.ids(storage, storage.present(payload, (5,))) == [0, 1, 2, 3, 4]

    def test_slots_out_of_range_raise(self) -> None:
        """`gather` raises IndexError for slots beyond the capacity."""
        storage = self.filled(5, 5)
        with raises(IndexError):
            storage.gather(torch.tensor([0, 5], device=storage.device))

    def test_rows_of_another_schema_raise(self) -> None:
        """Rows with another schema raise ValueError or TypeError in `admit`, and stored rows stay."""
        if not self.checks_schema:
            return
        storage = self.filled(5, 4)
        with raises(ValueError, TypeError):
            storage.admit(self.wrong_rows(2), 1)
        assert self.stored(storage) == [0, 1, 2, 3]

    def test_an_index_addresses_the_stored_rows(self) -> None:
        """An index addresses `[0, len)`, whatever the capacity; integers may be negative."""
        storage = self.filled(9, 4)
        mask = torch.tensor([True, False, False, True], device="cpu")
        for index, expected in (
            (slice(None), [0, 1, 2, 3]),
            (slice(1, 9), [1, 2, 3]),
            (slice(0, 0), []),
            (torch.tensor([3, -4, 0], device="cpu"), [3, 0, 0]),
            (mask, [0, 3]),
        ):
            got = storage.read(index)
            assert len(expected) == 0 or self.ids(storage, got) == expected, f"index {index!r}"
        assert int(storage.read(-1)["id"]) == 3

    def test_indices_out_of_range_raise(self) -> None:
        """Slots never written are out of range, although there is room for them."""
        storage = self.filled(9, 4)
        for index in (4, -5, 9, torch.tensor([0, 4], device="cpu"), torch.ones(9, dtype=torch.bool, device="cpu")):
            with raises(IndexError):
                storage.read(index)

    def test_edits_replace_the_chosen_rows(self) -> None:
        """`prepare_edit` checks and changes nothing; what it returns writes the rows."""
        storage = self.filled(5, 4)
        change = storage.prepare_edit(torch.tensor([2, 0], device=storage.device), self.given(storage, 100, 2), (2,))
        assert self.stored(storage) == [0, 1, 2, 3]
        change()
        assert self.stored(storage) == [101, 1, 100, 3]

    def test_edits_with_another_number_of_rows_raise(self) -> None:
        """Rows are not broadcast: one for each slot, or a ValueError and no change."""
        storage = self.filled(5, 4)
        with raises(ValueError):
            storage.prepare_edit(torch.tensor([2, 0], device=storage.device), self.given(storage, 100, 3), (2,))
        assert self.stored(storage) == [0, 1, 2, 3]

    def test_clear_removes_the_rows(self) -> None:
        """`clear` removes the rows and keeps the schema; rows can be stored again."""
        storage = self.filled(5, 5)
        storage.clear()
        assert len(storage) == 0
        self.write(storage, Run(0, 2, 5), 100, 2)
        assert self.stored(storage) == [100, 101]

    def test_state_restores_the_rows(self) -> None:
        """Another storage that loads the state has the same rows and continues at the same slot."""
        storage = self.filled(5, 5)
        self.write(storage, Run(0, 2, 5), 100, 2)
        other = self.make(5)
        other.load_state_dict(storage.state_dict())
        assert self.stored(other) == [100, 101, 2, 3, 4]
        assert other.cursor == storage.cursor
        self.write(other, Run(2, 1, 5), 200, 1)
        assert self.stored(storage) == [100, 101, 2, 3, 4]

    def test_the_state_of_an_empty_storage_removes_the_rows(self) -> None:
        """Loading the state of a storage without rows removes all rows."""
        storage = self.filled(5, 4)
        storage.load_state_dict(self.make(5).state_dict())
        assert len(storage) == 0

    def test_a_state_with_too_many_rows_raises(self) -> None:
        """A storage that is too small raises and keeps its own rows."""
        small = self.filled(3, 2)
        with raises(CheckpointError):
            small.load_state_dict(self.filled(5, 5).state_dict())
        assert self.stored(small) == [0, 1]

    def test_pickles_are_copies(self) -> None:
        """A pickled storage has the same rows in its own memory."""
        storage = self.filled(5, 4)
        other = pickle.loads(pickle.dumps(storage))  # noqa: S301 (pickled above)
        assert self.stored(other) == [0, 1, 2, 3]
        self.write(other, Run(0, 1, 5), 100, 1)
        assert self.stored(storage) == [0, 1, 2, 3]
        assert self.stored(other) == [100, 1, 2, 3]

    # -- helpers -----------------------------------------------------------------------------------------------

    def given(self, storage: Storage, first: int, count: int) -> Any:  # noqa: ARG002
        """Return rows `first, first + 1, ...` in the form in which users assign them to several slots."""
        return self.rows(torch.arange(first, first + count, device="cpu"))

    def write(self, storage: Storage, placement: Run | Picks, first: int, count: int) -> None:
        """Write rows `first, first + 1, ...` through `admit` and `write`."""
        payload, admitted = storage.admit(self.rows(torch.arange(first, first + count, device="cpu")), 1)
        assert admitted == count
        storage.write(placement, payload)

    def filled(self, capacity: int, count: int) -> Storage:
        """Return a storage with the rows 0 to `count - 1`."""
        storage = self.make(capacity)
        self.write(storage, Run(0, count, capacity), 0, count)
        return storage

    def stored(self, storage: Storage, slots: list[int] | None = None) -> list[int]:
        """Return the ids of the rows at `slots`, or of all rows."""
        chosen = torch.tensor(range(len(storage)) if slots is None else slots, dtype=torch.int64, device=storage.device)
        payload = storage.gather(chosen)
        return self.ids(storage, storage.present(payload, (chosen.shape[0],)))
