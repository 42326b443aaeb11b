"""Parts of a user's own, written against the base classes alone: they pass the contracts and serve in a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, Sampler, Storage
from ostinato.errors import CheckpointError, KindError, SchemaError, SlotError
from ostinato.protocols import Draw, Picks, Run
from ostinato.testing import BufferContract, SamplerContract, StorageContract

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.protocols import Placement, Ring, View

pytestmark = pytest.mark.usefixtures("backend")


class PlainStorage(Storage):
    """Rows in a dict by slot, each a dict of tensors."""

    form = "plain"
    capacity = 0
    cursor = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def admit(self, data: Any, lead: int) -> tuple[Any, int]:
        fields = {key: value if lead else value[None] for key, value in data.items()}
        rows = [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
        for row in [*self._rows.values()][:1]:
            if {key: value.shape for key, value in row.items()} != {key: v.shape[1:] for key, v in fields.items()}:
                msg = "other fields"
                raise SchemaError(msg)
        return rows, len(rows)

    def write(self, placement: Placement, payload: Any) -> None:
        run = isinstance(placement, Run)
        slots = (placement.slots() if run else placement.slots).tolist()  # type: ignore[operator, union-attr]
        numbers = range(placement.skip, placement.total) if run else placement.rows.tolist()  # type: ignore[union-attr]
        for slot, number in zip(slots, numbers, strict=True):
            self._rows[slot] = {key: value.clone() for key, value in payload[number].items()}
        if run:
            self.cursor = (slots[-1] + 1) % self.capacity

    def gather(self, slots: Tensor, *, pin: bool = False) -> Any:
        if any(slot >= self.capacity for slot in slots.tolist()):
            msg = "out of range"
            raise IndexError(msg)
        return [self._rows[slot] for slot in slots.tolist()]

    def present(self, payload: Any, batch: tuple[int, ...]) -> Any:
        found = {key: torch.stack([row[key] for row in payload]) for key in (payload or [{}])[0]}
        return found if batch else {key: value[0] for key, value in found.items()}

    def read(self, index: Any, *, swap: bool = False) -> Any:
        slots = torch.arange(len(self), device="cpu")[index]
        return self.present(self.gather(slots.reshape(-1)), tuple(slots.shape))

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        rows, count = self.admit(data, len(batch))
        if count != len(slots):
            msg = f"{len(slots)} slots, {count} rows"
            raise SchemaError(msg)
        return lambda: self.write(Picks(slots, torch.arange(count, device="cpu"), slots), rows)

    def clear(self) -> None:
        self._rows, self.cursor = {}, 0

    def state_dict(self) -> dict[str, Any]:
        rows = [dict(self._rows[slot]) for slot in range(len(self))]
        return {"form": self.form, "capacity": self.capacity, "cursor": self.cursor, "rows": len(rows), "content": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"] > self.capacity:
            msg = f"{state['rows']} rows do not fit into {self.capacity}"
            raise CheckpointError(msg)
        self._rows = dict(enumerate(state["content"]))
        self.cursor = state["cursor"] if state["capacity"] == self.capacity else len(self) % self.capacity


class TestPlainStorage(StorageContract):
    def make(self, capacity: int) -> Storage:
        return PlainStorage(capacity)


class NewestHalf(Sampler):
    """Draws twice as often among the newest half of the slots."""

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        ages = (view.cursor - 1 - torch.arange(view.rows)) % view.capacity
        weights = torch.where(ages * 2 < view.rows, 2.0, 1.0)
        slots = torch.multinomial(weights, batch_size, replacement=True, generator=generator)
        return Draw(slots, info={"weight": weights[slots]})


class TestNewestHalf(SamplerContract):
    def make(self) -> Sampler:
        return NewestHalf()


class TestOwnParts(BufferContract):
    def make(self, capacity: int) -> ReplayBuffer:
        seed = torch.Generator().manual_seed(0)
        return ReplayBuffer(storage=PlainStorage(capacity), sampler=NewestHalf(), batch_size=8, generator=seed)

    def rows(self, count: int, start: int) -> Any:
        return TestPlainStorage().rows(torch.arange(start, start + count, device="cpu"))

    test_a_larger_ring_continues = None  # type: ignore[assignment]  # such a storage loads rings of its own capacity

    def wrong_rows(self) -> Any:
        return TestPlainStorage().wrong_rows(2)

    def check(self, batch: Any) -> None:
        TestPlainStorage().ids(PlainStorage(1), batch)


class Chosen(Sampler):
    """Draws the slots that a test gives it."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(self.slots)


def drawn(slots: Tensor) -> list[int]:
    rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=Chosen(slots), batch_size=2)
    rb.extend({"x": torch.arange(6)})
    return rb.sample()["x"].tolist()  # type: ignore[no-any-return]


def test_slots_of_own_samplers_may_have_any_form():
    assert drawn(torch.tensor([3, 1], dtype=torch.int32)) == [3, 1]
    assert drawn(torch.tensor([3, 0, 1, 0])[::2]) == [3, 1]
    with pytest.raises(KindError):
        drawn(torch.tensor([3, 1], device="meta"))
    with pytest.raises(IndexError):
        drawn(torch.tensor([3, 9]))


class Placing(RoundRobinWriter):
    """Places rows as a test says."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Any:
        return self.placement


def picks(slots: list[int], rows: Tensor) -> Picks:
    return Picks(torch.tensor(slots, device="cpu"), rows, torch.tensor(slots, device="cpu"))


@pytest.mark.parametrize(
    ("placement", "error", "words"),
    [
        (Run(0, 3, 6), SlotError, "must place the 2 rows given, got a run that skips 0 and writes 3"),
        (Run(0, 2, 6, 1), SlotError, "must place the 2 rows given"),
        (Run(0, 3, 6, -1), SlotError, "must place the 2 rows given"),
        (picks([0, 1], torch.tensor([0, 2], device="cpu")), SlotError, r"in \[0, 2\), for each"),
        (picks([0, 1], torch.tensor([0, -1], device="cpu")), SlotError, r"in \[0, 2\), for each"),
        (picks([0, 1], torch.tensor([0], device="cpu")), SlotError, "for each of its 2 slots"),
        (picks([3, 4], torch.tensor([0, 1], device="cpu")), SlotError, "without leaving gaps"),
        (picks([0, 1], torch.tensor([0, 1], device="meta")), KindError, "slots must have values"),
    ],
)
def test_placements_of_own_writers_are_checked_before_rows_are_read(placement, error, words):
    rb = ReplayBuffer(storage=LazyTensorStorage(6), writer=Placing(placement))
    with pytest.raises(error, match=words):
        rb.extend({"x": torch.arange(2)})
    assert len(rb) == 0


def test_picks_of_own_writers_may_have_any_form():
    slots, rows = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 9, 1, 9])[::2]
    rb = ReplayBuffer(storage=LazyTensorStorage(6), writer=Placing(Picks(slots, rows, torch.tensor([1, 0]))))
    rb.extend({"x": torch.tensor([5, 6])})
    assert rb[:]["x"].tolist() == [6, 5]
