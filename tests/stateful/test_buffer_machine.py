"""The buffer against a plain Python model: any order of writes, reads, edits, saves and loads.

Never-written slots are poisoned as soon as they exist, so a read that shows one is caught by its fields.
"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ostinato import RandomSampler, ReplayBuffer, SamplerWithoutReplacement
from ostinato.errors import EmptyBufferError, KeyMissingError, SchemaError, SlotError, UsageError

from ..tags import STORAGES, at, buffer, poison, read_ids, rows

pytestmark = pytest.mark.usefixtures("backend")

COUNTS = st.integers(1, 17)
FORMS = ["int", "slice", "tensor", "int32", "uint8", "strided", "numpy", "mask", "list"]
"""Forms of an index."""


class BufferMachine(RuleBasedStateMachine):
    """One buffer, one model: `model[slot]` is the id of the row there, `late` the slots with the late field."""

    storage: str

    @initialize(
        capacity=st.integers(1, 8),
        epochs=st.booleans(),
        kind=st.sampled_from(["dict", "tensordict", "tensor", "tuple"]),
    )
    def begin(self, capacity: int, epochs: bool, kind: str) -> None:
        self.kind = kind if self.storage != "list" or kind != "tuple" else "dict"
        self.capacity, self.epochs = capacity, epochs
        self.directory = tempfile.TemporaryDirectory()
        self.saves = 0
        self.rb = self.fresh()
        self.forget()
        self.written = self.next_id = 0

    def fresh(self, capacity: int = 0) -> ReplayBuffer:
        sampler = SamplerWithoutReplacement() if self.epochs else RandomSampler()
        generator = torch.Generator().manual_seed(7)
        return buffer(self.storage, capacity or self.capacity, sampler=sampler, generator=generator)

    def forget(self) -> None:
        self.model: list[int] = []
        self.cursor = 0
        self.late: dict[int, int] = {}

    def new_ids(self, count: int) -> list[int]:
        first, self.next_id = self.next_id, self.next_id + count
        return list(range(first, first + count))

    def given(self, ids: list[int]) -> Any:
        return rows(ids, f"{self.kind}s" if self.storage == "list" else self.kind)

    def put(self, ids: list[int]) -> list[int]:
        slots = []
        for number in ids:
            if self.cursor == len(self.model):
                self.model.append(number)
            self.model[self.cursor] = number
            self.late.pop(self.cursor, None)
            slots.append(self.cursor)
            self.cursor = (self.cursor + 1) % self.capacity
        self.written += len(ids)
        return slots

    # -- writing ----------------------------------------------------------------------------------------------

    @rule(count=COUNTS, form=st.sampled_from(["plain", "strided", "numpy", "list"]))
    def extend(self, count: int, form: str) -> None:
        ids = self.new_ids(count)
        data = self.given(ids)
        if form == "strided" and self.storage != "list":
            every_other = [i for number in ids for i in (number, -1)]
            data = at(rows(every_other, self.kind), slice(None, None, 2))
        elif form == "numpy" and self.kind == "tensor" and self.storage != "list":
            data = data.numpy()
        elif form == "list":
            data = rows(ids, f"{self.kind}s")
        if self.model and self.storage != "list":  # what is refused changes nothing
            with pytest.raises((SchemaError, TypeError)):
                self.rb.extend({"something": torch.zeros(2), "else": torch.zeros(2)})
        slots = self.rb.extend(data)
        assert slots.tolist() == self.put(ids)
        poison(self.rb.storage)

    @rule()
    def add(self) -> None:
        ids = self.new_ids(1)
        assert self.rb.add(rows(torch.tensor(ids[0]), self.kind)) == self.put(ids)[0]
        poison(self.rb.storage)

    @rule()
    def empty(self) -> None:
        self.rb.empty()
        self.forget()
        poison(self.rb.storage)

    # -- reading ----------------------------------------------------------------------------------------------

    @rule(size=st.integers(1, 9))
    def sample(self, size: int) -> None:
        if not self.model:
            with pytest.raises(EmptyBufferError):
                self.rb.sample(size)
            return
        try:
            batch, info = self.rb.sample(size, return_info=True)
        except KeyMissingError:
            assert self.late
            assert len(self.late) < len(self.model)
            return
        slots = info["index"].tolist()
        assert len(slots) == size or self.epochs
        self.check(batch, slots)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        index, slots = self.pick(data)
        if not isinstance(index, int) and self.storage == "list" and not slots:
            return  # nothing to collate
        try:
            batch = self.rb[index]
        except KeyMissingError:
            assert 0 < len(self.late.keys() & set(slots)) < len(set(slots))
            return
        self.check(batch, slots)

    @rule(beyond=st.integers(0, 9), negative=st.booleans())
    def read_out_of_range(self, beyond: int, negative: bool) -> None:
        index = -len(self.model) - 1 - beyond if negative else len(self.model) + beyond
        for wrong in (index, torch.tensor([0, index]), torch.ones(len(self.model) + 1 + beyond, dtype=torch.bool)):
            with pytest.raises((SlotError, UsageError)):
                self.rb[wrong]

    def pick(self, data: st.DataObject) -> tuple[Any, list[int]]:
        count = len(self.model)
        form = data.draw(st.sampled_from(FORMS))
        if form == "int":
            at_ = data.draw(st.integers(-count, count - 1))
            return at_, [at_ % count]
        if form == "slice":
            bounds = st.one_of(st.none(), st.integers(-count - 2, count + 2))
            piece = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 2, 3])))
            return piece, list(range(count))[piece]
        if form == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
            kind: Any = data.draw(st.sampled_from([torch.tensor, np.array, list]))
            return kind(mask), [i for i, chosen in enumerate(mask) if chosen]
        chosen = data.draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=6))
        slots = [i % count for i in chosen]
        forms = {
            "tensor": torch.tensor(chosen),
            "int32": torch.tensor(chosen, dtype=torch.int32),
            "uint8": torch.tensor(slots, dtype=torch.uint8),
            "strided": torch.tensor(chosen).repeat_interleave(2)[::2],
            "numpy": np.array(chosen, dtype=np.int16),
            "list": chosen,
        }
        return forms[form], slots

    def check(self, batch: Any, slots: list[int]) -> None:
        """Compare a batch with the rows of the model at these slots, late field included."""
        if self.kind in {"dict", "tensordict"}:
            late = batch.pop("late", None) if isinstance(batch, dict) else batch.get("late", None)
            if late is not None and self.kind == "tensordict":
                batch = batch.exclude("late")
            expected = [self.late[slot] for slot in slots if slot in self.late]
            assert len(expected) in {0, len(slots)}
            assert (late is not None) == bool(expected) or not slots
            assert late is None or late.reshape(-1).tolist() == expected
        assert read_ids(batch) == [self.model[slot] for slot in slots]

    # -- editing ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        index, slots = self.pick(data)
        with pytest.raises(ValueError):
            self.rb[[0] if isinstance(index, int) else index] = self.given([-5] * (max(1, len(slots)) + 1))
        ids = self.new_ids(len(slots))
        if isinstance(index, int):
            self.rb[index] = rows(torch.tensor(ids[0]), self.kind)
        else:
            self.rb[index] = self.given(ids)
        for slot, number in zip(slots, ids, strict=True):
            self.model[slot] = number
            self.late.pop(slot, None)

    @precondition(lambda self: self.model and self.storage != "list" and self.kind in {"dict", "tensordict"})
    @rule(part=st.one_of(st.none(), st.integers(1, 8)))
    def write_all_with_a_new_key(self, part: int | None) -> None:
        end = None if part is None else min(part, len(self.model))
        slots = list(range(len(self.model) if end is None else end))
        ids = self.new_ids(len(slots))
        data = self.given(ids)
        data["late"] = torch.tensor([i * 11 for i in ids])
        self.rb.write_all(data, end)
        for slot, number in zip(slots, ids, strict=True):
            self.model[slot], self.late[slot] = number, number * 11
        poison_late(self.rb, self.late)

    # -- saving -----------------------------------------------------------------------------------------------

    @rule(way=st.sampled_from(["dumps", "state_dict", "pickle"]))
    def move(self, way: str) -> None:
        """Go on with a copy: it must hold the same rows and draw the same batches as the original would."""
        old = self.rb
        if way == "pickle":
            new = pickle.loads(pickle.dumps(old))
        else:
            new = self.fresh()
            if way == "dumps":
                self.saves += 1
                path = Path(self.directory.name) / str(self.saves % 2)
                old.dumps(path)
                new.loads(path)
            else:
                new.load_state_dict(old.state_dict())
        poison(new.storage)
        if self.model and not self.late:
            for size in (2, 3):
                (one, first), (other, second) = (rb.sample(size, return_info=True) for rb in (old, new))
                assert first["index"].tolist() == second["index"].tolist()
                assert read_ids(one) == read_ids(other)
        old.empty()  # memory of its own: emptying and overwriting the original changes nothing here
        old.extend(self.given([-9] * self.capacity))
        self.rb = new

    @precondition(lambda self: self.model)
    @rule(more=st.integers(1, 4))
    def load_into_another_capacity(self, more: int) -> None:
        state = self.rb.state_dict()
        bigger = self.fresh(self.capacity + more)
        bigger.load_state_dict(state)
        assert len(bigger) == len(self.model)
        if not self.late:  # a full ring comes by age
            first = self.cursor if len(self.model) == self.capacity else 0
            assert read_ids(bigger[:]) == self.model[first:] + self.model[:first]
        if len(self.model) > 1:
            with pytest.raises(ValueError):
                self.fresh(len(self.model) - 1).load_state_dict(state)

    # -- always -----------------------------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        assert len(self.rb) == len(self.model) <= self.capacity
        assert self.rb.cursor % self.capacity == self.cursor
        stats = self.rb.stats()
        assert (stats.rows, stats.capacity) == (len(self.model), self.capacity)

    @invariant()
    def rows_agree(self) -> None:
        if not hasattr(self, "model") or not self.model:
            return
        if not self.late:
            self.check(self.rb[:], list(range(len(self.model))))
        else:
            for slot in range(len(self.model)):
                self.check(self.rb[slot], [slot])

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()


def poison_late(rb: ReplayBuffer, late: dict[int, int]) -> None:
    """Put garbage where a row lacks the late field."""
    column = rb.storage.columns[("late",)]  # type: ignore[attr-defined]
    for slot in range(column.shape[0]):
        if slot not in late:
            column[slot] = -7777


@pytest.mark.timeout(1800)  # the slow profile takes minutes
@pytest.mark.parametrize("storage", list(STORAGES))
def test_buffer_follows_the_model(storage):
    machine = type(f"Machine_{storage}", (BufferMachine,), {"storage": storage})
    run_state_machine_as_test(machine, settings=settings.get_profile(settings.get_current_profile_name()))
