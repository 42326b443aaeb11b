"""Contract tests for units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers import ReplayBuffer
from ostinato.storages import LazyTensorStorage

if TYPE_CHECKING:
    from ostinato.protocols import Plan, View
    from ostinato.units import SampleUnit

__all__ = ["UnitContract"]

_CAPACITY = 16


class UnitContract(ABC):
    """Requirements of a buffer on a unit: plans of stored rows, which are determined by the arguments."""

    @abstractmethod
    def make(self) -> SampleUnit:
        """Return a new unit."""

    def rows(self, start: int, count: int) -> dict[str, Any]:
        """Return the rows `start` to `start + count - 1` in episodes of five steps. Override it for other fields."""
        step = torch.arange(start, start + count, device="cpu")
        place = step.float()[:, None]
        goal = {"goal": place.clone(), "achieved_goal": place.clone(), "next_achieved_goal": place + 1}
        reward = torch.ones(count, dtype=torch.float32, device="cpu")
        return {"obs": place, "next_obs": place + 1, **goal, "reward": reward, "done": step % 5 == 4}

    def buffer(self, written: int) -> ReplayBuffer:
        """Return a buffer to which `written` rows were written."""
        made = ReplayBuffer(storage=LazyTensorStorage(_CAPACITY), sample_unit=self.make(), batch_size=8)
        for start in range(0, written, 3):
            made.extend(self.rows(start, min(3, written - start)))
        return made

    # -- tests -----------------------------------------------------------------------------------------------

    def test_the_same_arguments_give_the_same_plan(self) -> None:
        """`expand` uses no randomness of its own: equal `dice` give equal plans."""
        for written in (10, 16, 17, 40):
            one, other = (self._plan(self.buffer(written), seed=written) for _ in range(2))
            assert torch.equal(one.slots_read(), other.slots_read())
            assert one.notes.keys() == other.notes.keys()

    def test_slots_read_are_in_range(self) -> None:
        """All slots are int64 in `[0, rows)`, for partly filled, full and wrapped buffers."""
        for written in (10, 15, 16, 17, 40):
            slots = self._plan(self.buffer(written), seed=written).slots_read()
            assert slots.dtype is torch.int64
            assert 0 <= int(slots.min()) <= int(slots.max()) < min(written, _CAPACITY)

    def test_notes_and_fields_have_one_entry_per_record(self) -> None:
        """Notes and fields have one entry for each record."""
        plan = self._plan(self.buffer(40), seed=0)
        for value in (*plan.notes.values(), *plan.fields.values()):
            assert value.shape[0] == plan.records.shape[0]

    def test_batches_are_copies(self) -> None:
        """The result of `finish` shares no memory with the storage."""
        made = self.buffer(40)
        before = {key: value.clone() for key, value in made[:].items()}
        for value in made.sample().values():
            value.zero_()
        assert all(torch.equal(value, before[key]) for key, value in made[:].items())

    def test_need_is_within_span(self) -> None:
        """`need` is at most `span`, and both are positive."""
        unit = self.make()
        assert 1 <= unit.need <= unit.span

    def _plan(self, buffer: ReplayBuffer, seed: int) -> Plan:
        from ostinato.protocols import Plan

        unit, view = buffer.sample_unit, _view(buffer)
        schema, generator = buffer.storage.schema, torch.Generator().manual_seed(seed)
        if unit is None or schema is None:
            msg = "make() must return a unit"
            raise TypeError(msg)
        slots = torch.randint(0, view.rows, (8,), generator=generator, device="cpu")
        if view.starts is not None:
            slots = view.starts.draw(torch.randint(0, 2**63 - 1, (8,), generator=generator, device="cpu"))
        return unit.expand(Plan(schema, slots, slots), view, unit.roll(8, view, generator))


def _view(buffer: ReplayBuffer) -> View:
    return buffer._engine.view()  # noqa: SLF001 (what a unit sees in a buffer is the buffer's to make)
