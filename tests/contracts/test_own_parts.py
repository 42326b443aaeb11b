"""Parts of a user's own, written against the base classes alone: they pass the contracts and serve in a buffer."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, Sampler, Storage
from ostinato.errors import CheckpointError, KindError, SchemaError, SlotError
from ostinato.protocols import Draw, Picks, Run
from ostinato.testing import SamplerContract, StorageContract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from ostinato.protocols import Placement, Ring, View

pytestmark = pytest.mark.usefixtures("backend")


class NumpyStorage(Storage):
    """Rows of one dict of arrays."""

    form = "numpy"

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._rows = self._next = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def cursor(self) -> int:
        return self._next

    def __len__(self) -> int:
        return self._rows

    def admit(self, data: Any, lead: int) -> tuple[Any, int]:
        rows = {key: np.asarray(value) for key, value in data.items()}
        rows = rows if lead else {key: value[None] for key, value in rows.items()}
        for key, array in self._arrays.items():
            if key not in rows or rows[key].shape[1:] != array.shape[1:] or rows[key].dtype != array.dtype:
                msg = f"field {key!r} differs"
                raise SchemaError(msg)
        counts = {len(value) for value in rows.values()}
        if len(counts) != 1:
            msg = "fields must have one length"
            raise SchemaError(msg)
        return rows, counts.pop()

    def write(self, placement: Placement, payload: Any) -> None:
        if isinstance(placement, Run):
            slots, rows = placement.slots().numpy(), np.arange(placement.skip, placement.total)
            self._next = (placement.start + placement.rows) % self._capacity
        else:
            slots, rows = placement.slots.numpy(), placement.rows.numpy()
        for key, value in payload.items():
            column = self._arrays.setdefault(key, np.zeros((self._capacity, *value.shape[1:]), value.dtype))
            column[slots] = value[rows]
        self._rows = max(self._rows, int(slots.max()) + 1) if len(slots) else self._rows

    def gather(self, slots: Tensor, *, pin: bool = False) -> Any:
        if len(slots) and int(slots.max()) >= self._capacity:
            msg = "out of range"
            raise IndexError(msg)
        return {key: array[slots.numpy()] for key, array in self._arrays.items()}

    def present(self, payload: Any, batch: tuple[int, ...]) -> Any:
        return {key: torch.from_numpy(np.asarray(x).reshape((*batch, *x.shape[1:]))) for key, x in payload.items()}

    def read(self, index: Any, *, swap: bool = False) -> Any:
        index = index.numpy() if isinstance(index, torch.Tensor) else index
        return {key: torch.as_tensor(array[: self._rows][index]) for key, array in self._arrays.items()}

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        rows, count = self.admit(data, len(batch))
        if count != len(slots):
            msg = f"{len(slots)} slots, {count} rows"
            raise SchemaError(msg)
        return lambda: self.write(Picks(slots, torch.arange(count), slots), rows)

    def clear(self) -> None:
        self._rows = self._next = 0

    def state_dict(self) -> dict[str, Any]:
        columns = {key: torch.from_numpy(array[: self._rows]) for key, array in self._arrays.items()}
        return {
            "form": self.form,
            "capacity": self._capacity,
            "next": self._next,
            "rows": self._rows,
            "columns": columns,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"] > self._capacity:
            msg = f"{state['rows']} rows do not fit into {self._capacity}"
            raise CheckpointError(msg)
        self.clear()
        for key, column in state["columns"].items():
            rows = (column if isinstance(column, torch.Tensor) else column.read()).numpy()
            full = np.zeros((self._capacity, *rows.shape[1:]), rows.dtype)
            full[: len(rows)] = rows
            self._arrays[key] = full
        self._rows = state["rows"]
        self._next = state["next"] if state["capacity"] == self._capacity else self._rows % self._capacity


class TestNumpyStorage(StorageContract):
    def make(self, capacity: int) -> Storage:
        return NumpyStorage(capacity)


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


def make() -> ReplayBuffer:
    return ReplayBuffer(
        storage=NumpyStorage(6),
        sampler=NewestHalf(),
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
    )


def test_own_parts_work_together_and_are_saved(tmp_path: Path) -> None:
    suite = TestNumpyStorage()
    rb = make()
    for first in range(0, 60, 4):
        rb.extend(suite.rows(torch.arange(first, first + 4)))
    batch, info = rb.sample(return_info=True)
    assert suite.ids(rb.storage, batch) == suite.ids(rb.storage, rb[info["index"]])
    assert info["weight"].shape == (8,)
    rb.dumps(tmp_path / "save")
    other = make()
    other.loads(tmp_path / "save")
    assert suite.ids(rb.storage, other[:]) == suite.ids(rb.storage, rb[:])
    for step in range(5):
        assert suite.ids(rb.storage, other.sample()) == suite.ids(rb.storage, rb.sample())
        rows = suite.rows(torch.arange(100 + step, 105 + step))
        assert other.extend(rows).tolist() == rb.extend(rows).tolist()


def test_the_suites_do_not_import_pytest() -> None:
    code = "import sys, ostinato.testing; print('pytest' in sys.modules, 'hypothesis' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert out.stdout.strip() == "False False", out.stderr


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


def test_slots_of_own_samplers_may_have_any_form() -> None:
    assert drawn(torch.tensor([3, 1], dtype=torch.int32)) == [3, 1]
    assert drawn(torch.tensor([3, 0, 1, 0])[::2]) == [3, 1]
    with pytest.raises(KindError, match="slots must have values, got a tensor on the device meta"):
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
        (picks([0, 1], torch.tensor([0, 1], device="meta")), KindError, "slots must have values"),
    ],
)
def test_placements_of_own_writers_are_checked_before_rows_are_read(
    placement: Placement, error: type[Exception], words: str
) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(6), writer=Placing(placement))
    with pytest.raises(error, match=words):
        rb.extend({"x": torch.arange(2)})
    assert len(rb) == 0


def test_picks_of_own_writers_may_have_any_form() -> None:
    slots, rows = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 9, 1, 9])[::2]
    rb = ReplayBuffer(storage=LazyTensorStorage(6), writer=Placing(Picks(slots, rows, torch.tensor([1, 0]))))
    rb.extend({"x": torch.tensor([5, 6])})
    assert rb[:]["x"].tolist() == [6, 5]
