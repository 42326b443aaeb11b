"""Single copies against a log that keeps every transition whole: whatever is read equals the log, at every moment."""

from __future__ import annotations

import pickle
import random
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from ostinato.core.records import Request

from ...effort import examples
from .single import Lanes, Log, Row, equal, poison_memory, stack

pytestmark = pytest.mark.usefixtures("backend")

OPERATIONS = (
    *("extend", "extend", "extend", "add", "add", "long"),
    *("edit", "column", "all", "clear", "save", "pickle", "larger"),
)


class Trial:
    """A buffer with single copies, and its log."""

    def __init__(self, seed: int, *, mapped: bool) -> None:
        self.rng = random.Random(seed)
        self.ndim = self.rng.choice([1, 2])
        self.lanes = self.rng.choice([1, 2, 3]) if self.ndim == 2 else 1
        self.mapped = mapped
        self.packed = self.rng.random() < 0.7
        self.capacity = self.lanes * self.rng.choice([1, 2, 3, 7, 12])
        self.rb = self.fresh(self.capacity)
        self.log = Log(self.capacity)
        self.env = Lanes(self.lanes, self.rng)

    def fresh(self, capacity: int, *, single: bool = True) -> ReplayBuffer:
        make = LazyMemmapStorage if self.mapped else LazyTensorStorage
        named = {("next", key): key for key in ("obs", "image", "goal")}
        option: Any = self.rng.choice([True, named]) if single else False
        storage = make(capacity, ndim=self.ndim, packed=self.packed, single_copy=option)
        return ReplayBuffer(storage=storage, batch_size=5, dim_extend=0)

    def batch(self, rows: list[Row]) -> dict[str, Any]:
        shape = (len(rows) // self.lanes, self.lanes) if self.ndim == 2 else (len(rows),)
        return stack(rows, shape)

    def steps(self, count: int) -> list[Row]:
        return [row for _ in range(count) for row in self.env.step()]

    # -- operations -------------------------------------------------------------------------------------------

    def extend(self) -> None:
        self.write(self.rng.randint(1, 6))

    def long(self) -> None:
        self.write(self.rng.randint(1, 3 * self.capacity // self.lanes))

    def write(self, steps: int) -> None:
        rows = self.steps(steps)
        self.rb.extend(self.batch(rows))
        self.log.write(rows)

    def add(self) -> None:
        rows = self.steps(1)
        batch = self.batch(rows)
        self.rb.add(_first(batch))
        self.log.write(rows)

    def edit(self) -> None:
        if not len(self.log):
            return
        slots = [self.rng.randrange(len(self.log)) for _ in range(self.rng.randint(1, 5))]
        rows = self.steps(len(slots))[: len(slots)]
        if self.rng.random() < 0.3:  # what is there already
            rows = self.log.rows(slots)
        self.rb[self.index(slots)] = stack(rows, (len(slots),))
        for slot, row in zip(slots, rows, strict=True):
            self.log.slots[slot] = row

    def column(self) -> None:
        if not len(self.log):
            return
        slots = self.rng.sample(range(len(self.log)), self.rng.randint(1, len(self.log)))
        key = self.rng.choice(["obs", "next.obs", "image", "next.image", "goal", "next.goal", "action", "next.reward"])
        rows = self.steps(len(slots))[: len(slots)]
        value = torch.stack([row[key] for row in rows])
        path = tuple(key.split("."))
        self.rb.set_at_(path if len(path) > 1 else path[0], value, self.index(slots))
        for slot, row in zip(slots, rows, strict=True):
            self.log.slots[slot] = {**self.log.rows([slot])[0], key: row[key]}

    def all(self) -> None:
        if not len(self.log):
            return
        rows = self.steps(len(self.log) // self.lanes)
        self.rb[:] = self.batch(rows)
        self.log.slots[: len(rows)] = rows

    def clear(self) -> None:
        self.rb.empty()
        self.log = Log(self.capacity)

    def save(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self.rb.dumps(directory)
            self.rb = self.fresh(self.capacity)
            if self.rng.random() < 0.3:  # over rows of another time
                self.rb.extend(self.batch(self.steps(2)))
            if self.rng.random() < 0.3:  # through a storage that keeps both copies
                plain = self.fresh(self.capacity, single=False)
                plain.loads(directory)
                self.check(plain)
                plain.dumps(directory)
            self.rb.loads(directory)

    def larger(self) -> None:
        """Load into a larger ring: the rows of a full one come by age, and it goes on after them."""
        if not len(self.log):
            return
        state = self.rb.state_dict()
        self.capacity += self.lanes * self.rng.choice([0, 1, 4])
        self.rb = self.fresh(self.capacity)
        self.rb.load_state_dict(state)
        if self.capacity == self.log.capacity:
            return
        log = Log(self.capacity)
        full = len(self.log) == self.log.capacity
        first = self.log.cursor if full else 0
        log.write(self.log.rows([(first + i) % self.log.capacity for i in range(len(self.log))]))
        self.log = log

    def pickle(self) -> None:
        self.rb = pickle.loads(pickle.dumps(self.rb))

    # -- reads ------------------------------------------------------------------------------------------------

    def index(self, slots: list[int]) -> Any:
        at = torch.tensor(slots)
        return at if self.ndim == 1 else (at // self.lanes, at % self.lanes)

    def check(self, rb: ReplayBuffer) -> None:
        """Compare all rows, some rows, single fields and a sample with the log."""
        assert len(rb) == len(self.log)
        if not len(self.log):
            return
        everything = list(range(len(self.log)))
        self.same(rb[:], everything)
        some = [self.rng.choice(everything) for _ in range(4)]
        self.same(rb[self.index(some)], some)
        self.same(_flat(rb[0], self.ndim), everything[: self.lanes])
        payload = rb.storage.gather(torch.tensor(some))
        self.same(rb.storage.present(payload, (4,)), some)
        batch, info = rb.sample(return_info=True)
        self.same(batch, _slots(info["index"], self.lanes))
        field = rb.storage["next", "obs"]
        assert equal(field.reshape(-1, 3), torch.stack([row["next.obs"] for row in self.log.rows(everything)]))
        self.check_fetch(rb, some)

    def check_fetch(self, rb: ReplayBuffer, slots: list[int]) -> None:
        paths = [leaf.path for leaf in rb.storage.schema.leaves]  # type: ignore[union-attr]
        names = [".".join(map(str, path)) for path in paths]
        at, pick = torch.tensor(slots), torch.tensor([self.rng.random() < 0.5 for _ in slots])
        pairs = [("next.obs", None), ("obs", "next.obs"), ("next.image", "image"), ("action", None)]
        pairs += [("goal", "next.goal"), ("next.goal", None), ("obs", None)]
        requests = [
            Request(names.index(one), at, None if two is None else names.index(two), None if two is None else pick)
            for one, two in pairs
        ]
        for (one, two), value in zip(pairs, rb.storage.fetch(requests), strict=True):
            rows = self.log.rows(slots)
            keys = [two if two is not None and second else one for second in pick.tolist()]
            assert equal(value, torch.stack([row[key] for row, key in zip(rows, keys, strict=True)])), (one, two)

    def same(self, batch: Any, slots: list[int]) -> None:
        expected = stack(self.log.rows(slots), (len(slots),))
        for key, value in [*expected.items(), *expected["next"].items()]:
            if isinstance(value, dict):
                continue
            found = batch["next"][key] if value is expected["next"].get(key) else batch[key]
            assert equal(found.reshape(value.shape), value), f"{key} of the slots {slots}"


def _first(batch: Any) -> Any:
    return {key: _first(value) for key, value in batch.items()} if isinstance(batch, dict) else batch[0]


def _flat(batch: Any, ndim: int) -> Any:
    if isinstance(batch, dict):
        return {key: _flat(value, ndim) for key, value in batch.items()}
    return batch if ndim == 2 else batch[None]


def _slots(index: Any, lanes: int) -> list[int]:
    if isinstance(index, Tensor):
        return [int(i) for i in index]
    return [int(step) * lanes + int(lane) for step, lane in zip(*index, strict=True)]


@pytest.mark.parametrize("mapped", [False, True])
@given(seed=st.integers(0, 2**32), operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=12))
@examples(0.25)
def test_every_read_equals_the_log(mapped: bool, seed: int, operations: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poison_memory(patch)
        trial = Trial(seed, mapped=mapped)
        trial.extend()
        for operation in operations:
            getattr(trial, operation)()
            trial.check(trial.rb)
