"""Single copies and codecs against a storage that keeps every transition as it is: whatever is read is equal.

The same buffer twice, over both storages: after each operation all reads are compared.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato import (
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    ZlibCodec,
)
from ostinato.core.records import Column, Plan, Request
from ostinato.storages import memory

from ...effort import examples
from ...registry import seeded
from ...tags import same_state

if TYPE_CHECKING:
    from collections.abc import Callable

OBSERVATIONS = ("obs", "image", "goal")
"""Fields with a next field each: a small one, a wide one, a scalar."""

PARTS: list[Any] = [
    lambda: {"sampler": PrioritizedSampler(1000, 0.7, 0.5)},
    lambda: {"sampler": SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False)},
    lambda: {"sample_unit": NStep(3, 0.9)},
    lambda: {"sample_unit": FrameStack(3, ["image"])},
]

OPERATIONS = st.lists(
    st.sampled_from(
        ("extend", "extend", "extend", "add", "long", "edit", "column", "all", "empty", "save", "pickle", "larger")
    ),
    min_size=1,
    max_size=12,
)


def observations(numbers: Tensor) -> dict[str, Tensor]:
    """Return the fields of observations, which tell their numbers; every fifth one holds NaN."""
    obs = numbers[..., None] + torch.arange(3.0)
    obs[..., 1][numbers % 5 == 0] = torch.nan
    image = (torch.arange(300).view(5, 60) + numbers[..., None, None] * 7) % 253
    return {"obs": obs, "image": image.to(torch.uint8), "goal": numbers.double() / 4}


class Environments:
    """Environments side by side: episodes of random lengths, final observations, now and then a row out of line."""

    def __init__(self, num_envs: int, rng: random.Random) -> None:
        self.rng = rng
        self.count = 0
        self.now = [self.fresh() for _ in range(num_envs)]

    def fresh(self) -> int:
        # few numbers at times, so that observations agree by chance
        self.count += 1
        return self.rng.choice([self.count, self.count, self.rng.randrange(4)])

    def steps(self, count: int) -> dict[str, Any]:
        """Return the next rows of all environments, fields `[count, num_envs, ...]`."""
        now, after, ends = [], [], []
        for _ in range(count):
            now.append(list(self.now))
            after.append([self.fresh() for _ in self.now])
            ends.append([self.rng.random() < 0.2 for _ in self.now])
            for env, (following, ended) in enumerate(zip(after[-1], ends[-1], strict=True)):
                self.now[env] = self.fresh() if ended or self.rng.random() < 0.05 else following
        number = self.count + torch.arange(count * len(self.now)).view(count, -1)
        following_rows = {"done": torch.tensor(ends), "reward": number / 2}
        return {
            **observations(torch.tensor(now)),
            "action": torch.stack((number, -number), -1).to(torch.int16),
            "next": {**observations(torch.tensor(after)), **following_rows},
        }

    def line(self, count: int) -> dict[str, Any]:
        """Return the next rows of the first environment, fields `[count, ...]`."""
        rows: dict[str, Any] = over(self.steps(count), lambda field: field[:, 0])
        return rows


def over(rows: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return rows with each field changed."""
    return {key: over(value, change) for key, value in rows.items()} if isinstance(rows, dict) else change(rows)


class Pair:
    """Both buffers; each method named in `OPERATIONS` is one operation on them.

    Args:
        seed: of the rows and choices.
        make: returns a buffer of a capacity; `plain` says over which storage.
        num_envs: 0 for storages of one dimension.
    """

    def __init__(self, seed: int, make: Callable[[int, bool], ReplayBuffer], num_envs: int = 0) -> None:
        self.rng = random.Random(seed)
        self.make, self.num_envs = make, num_envs
        self.capacity = max(num_envs, 1) * self.rng.choice([3, 7, 12])
        self.environments = Environments(max(num_envs, 1), self.rng)
        self.both = self.fresh()

    def run(self, operations: list[str]) -> None:
        for operation in ("extend", *operations):
            getattr(self, operation)()
            self.check()

    def fresh(self) -> list[ReplayBuffer]:
        return [self.make(self.capacity, plain) for plain in (True, False)]

    def steps(self, count: int) -> Any:
        return self.environments.steps(count) if self.num_envs else self.environments.line(count)

    def apply(self, operation: Callable[[ReplayBuffer], object]) -> None:
        for rb in self.both:
            operation(rb)

    def index(self, slots: list[int]) -> Any:
        at = torch.tensor(slots)
        return (at // self.num_envs, at % self.num_envs) if self.num_envs else at

    # -- operations ---------------------------------------------------------------------------------------------------

    def extend(self, most: int = 6) -> None:
        rows = self.steps(self.rng.randint(1, most))
        self.apply(lambda rb: rb.extend(rows))

    def long(self) -> None:
        self.extend(3 * self.capacity)

    def add(self) -> None:
        row = over(self.steps(1), lambda field: field[0])
        self.apply(lambda rb: rb.add(row))

    def empty(self) -> None:
        self.apply(lambda rb: rb.empty())
        self.extend()

    def edit(self) -> None:
        slots = [self.rng.randrange(len(self.both[0])) for _ in range(self.rng.randint(1, 5))]
        rows = over(self.environments.steps(5), lambda field: field.flatten(0, 1)[: len(slots)])
        if self.rng.random() < 0.3:
            rows = self.both[0][self.index(slots)]  # what is there already
        self.apply(lambda rb: rb.__setitem__(self.index(slots), rows))

    def column(self) -> None:
        slots = self.rng.sample(range(len(self.both[0])), self.rng.randint(1, len(self.both[0])))
        rows = over(self.environments.steps(len(slots)), lambda field: field.flatten(0, 1)[: len(slots)])
        key = self.rng.choice([*OBSERVATIONS, "action"])
        after = self.rng.choice([*OBSERVATIONS, "reward"])
        self.apply(lambda rb: rb.set_at_(key, rows[key], self.index(slots)))
        self.apply(lambda rb: rb.set_at_(("next", after), rows["next"][after], self.index(slots)))

    def all(self) -> None:
        rows = self.steps(len(self.both[0]) // max(self.num_envs, 1))
        self.apply(lambda rb: rb.__setitem__(slice(None), rows))

    def save(self) -> None:
        """Load what was saved, over rows of another time, and at times what the other one saved."""
        saved, self.both = self.both, self.fresh()
        if self.rng.random() < 0.3:
            self.extend(2)
        if self.rng.random() < 0.3:
            saved.reverse()
        for rb, old in zip(self.both, saved, strict=True):
            with tempfile.TemporaryDirectory() as directory:
                old.dumps(directory)
                rb.loads(directory)

    def larger(self) -> None:
        """Load into a larger ring: the rows of a full one come by age, and it goes on after them."""
        saved = self.both
        self.capacity += max(self.num_envs, 1) * self.rng.choice([0, 1, 4])
        self.both = self.fresh()
        for rb, old in zip(self.both, saved, strict=True):
            rb.load_state_dict(old.state_dict())

    def pickle(self) -> None:
        self.both = [pickle.loads(pickle.dumps(rb)) for rb in self.both]

    # -- reads --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare all rows, some rows, single fields and a batch."""
        plain, other = self.both
        assert len(plain) == len(other) > 0
        some = [self.rng.randrange(len(plain)) for _ in range(4)]
        slots, pick = torch.tensor(some), torch.tensor([self.rng.random() < 0.5 for _ in some])
        assert plain.storage.schema is not None
        names = [".".join(map(str, leaf.path)) for leaf in plain.storage.schema.leaves]
        plan = Plan(plain.storage.schema, slots, slots)
        for key in OBSERVATIONS:
            leaves = [names.index(key), names.index(f"next.{key}")]
            self.rng.shuffle(leaves)
            plan = plan.with_columns({leaves[0]: Column(Request(leaves[0], slots), other=leaves[1], pick=pick)})
        reads: list[Any] = [
            lambda rb: rb[:],
            lambda rb: rb[0],
            lambda rb: rb[self.index(some)],
            lambda rb: rb.storage.present(rb.storage.gather(slots), (4,)),
            lambda rb: rb.storage["next", "obs"],
            lambda rb: dict(enumerate(rb.storage.read_plan(plan).leaves)),
            lambda rb: rb.sample(),
        ]
        for read in reads:
            same_state(read(plain), read(other))


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all memory of storages begin as bytes of 255: NaN in every float."""
    for kind in (memory.HeapMemory, memory.MappedMemory):

        def block(self: Any, name: str, nbytes: int, original: Any = kind.block) -> Tensor:
            poisoned: Tensor = original(self, name, nbytes).fill_(255)
            return poisoned

        monkeypatch.setattr(kind, "block", block)


STORAGES: dict[str, Any] = {
    "packed": (LazyTensorStorage, {}),
    "mapped": (LazyMemmapStorage, {}),
    "coded": (LazyTensorStorage, {"codec": {"obs": "zlib"}}),
    "only coded": (
        LazyTensorStorage,
        {"codec": {"image": "zlib", ("next", "image"): "auto", "action": ZlibCodec(9)}, "single_copy": False},
    ),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("storage", STORAGES)
@given(
    seed=st.integers(0, 2**32),
    operations=OPERATIONS,
    num_envs=st.integers(0, 3),
    packed=st.booleans(),
    named=st.booleans(),
    parts=st.sampled_from(PARTS),
)
@examples(0.25)
def test_every_read_is_that_of_a_storage_with_both_copies(storage, seed, operations, num_envs, packed, named, parts):
    kind, more = STORAGES[storage]
    pairs: Any = {("next", key): key for key in OBSERVATIONS} if named else True

    def make(capacity: int, plain: bool) -> ReplayBuffer:
        options = {} if plain else {"single_copy": pairs, **more}
        made = kind(capacity, ndim=2 if num_envs else 1, packed=packed, **options)
        return ReplayBuffer(storage=made, batch_size=6, dim_extend=0, generator=seeded(seed), **parts())

    with pytest.MonkeyPatch.context() as patch:
        poison_memory(patch)
        Pair(seed, make, num_envs).run(operations)
