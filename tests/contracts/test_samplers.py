"""The sampler contract, run over every sampler of ours, and over samplers with known bugs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    ConsumingSampler,
    HeapSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    StackSampler,
    StalenessAwareSampler,
)
from ostinato.protocols import Draw
from ostinato.testing import SamplerContract

if TYPE_CHECKING:
    from ostinato.protocols import View

pytestmark = pytest.mark.usefixtures("backend")


class TestRandom(SamplerContract):
    def make(self) -> Sampler:
        return RandomSampler()


class TestWithoutReplacement(SamplerContract):
    def make(self) -> Sampler:
        return SamplerWithoutReplacement()


class TestInOrder(SamplerContract):
    def make(self) -> Sampler:
        return SamplerWithoutReplacement(shuffle=False)


class TestDropLast(SamplerContract):
    def make(self) -> Sampler:
        return SamplerWithoutReplacement(drop_last=True)

    def test_batches_have_the_requested_size(self) -> None:
        sampler = self.make()
        view = self.rows(sampler, 7, 9)
        assert all(sampler.draw(view, 3, None).slots.shape == (3,) for _ in range(9))


class TestPrioritized(SamplerContract):
    def make(self) -> Sampler:
        return PrioritizedSampler(40, alpha=0.6, beta=0.4)


class TestStratified(SamplerContract):
    def make(self) -> Sampler:
        return PrioritizedSampler(40, alpha=0.6, beta=0.4, stratified=True)


class TestReplacementOff(SamplerContract):
    def make(self) -> Sampler:
        return RandomSampler(replacement=False)


class TestLeavingRows(SamplerContract):
    def make(self) -> Sampler:
        return ConsumingSampler(1000)

    def test_an_epoch_has_each_row_once(self) -> None:
        sampler = ConsumingSampler(2)  # its epoch ends when all rows have left
        view = self.rows(sampler, 7, 9)
        drawn: list[int] = []
        while not sampler.ran_out:
            drawn += sampler.draw(view, 3, None).slots.tolist()
        assert sorted(drawn) == sorted([*range(7), *range(7)])


class TestPoppedStack(TestLeavingRows):
    def make(self) -> Sampler:
        return StackSampler(1000)

    def test_every_row_is_reachable(self) -> None:
        self.reach(StackSampler(100))

    def test_new_rows_are_reachable(self) -> None:
        sampler = self.make()
        sampler.draw(self.rows(sampler, 3, 9), 2, None)
        self.reach(sampler, 9)

    def reach(self, sampler: Sampler, rows: int = 6) -> None:
        view = self.rows(sampler, rows, rows)
        seen: set[int] = set()
        while not sampler.ran_out:
            seen |= set(sampler.draw(view, 3, None).slots.tolist())
        assert seen == set(range(rows))

    def test_an_epoch_has_each_row_once(self) -> None:
        sampler = StackSampler(2)  # its epoch ends when all rows have left
        view = self.rows(sampler, 7, 9)
        drawn: list[int] = []
        while not sampler.ran_out:
            drawn += sampler.draw(view, 3, None).slots.tolist()
        assert drawn == [6, 5, 4, 6, 5, 4, 3, 2, 1, 3, 2, 1, 0, 0]


class TestPoppedHeap(TestPoppedStack):
    def make(self) -> Sampler:
        return HeapSampler(40, "min", 1000)

    def test_every_row_is_reachable(self) -> None:
        self.reach(HeapSampler(40, "max", 100))

    def test_an_epoch_has_each_row_once(self) -> None:
        sampler = HeapSampler(40, max_times_sampled=1)
        view = self.rows(sampler, 7, 9)
        drawn: list[int] = []
        while not sampler.ran_out:
            drawn += sampler.draw(view, 3, None).slots.tolist()
        assert drawn == list(range(7))  # of equal priorities the oldest first


class TestStack(SamplerContract):
    def make(self) -> Sampler:
        return StackSampler()

    def test_every_row_is_reachable(self) -> None:
        sampler = self.make()
        assert sampler.draw(self.rows(sampler, 6, 6), 6, None).slots.tolist() == [5, 4, 3, 2, 1, 0]

    def test_new_rows_are_reachable(self) -> None:
        sampler = self.make()
        sampler.draw(self.rows(sampler, 3, 9), 2, None)
        assert sampler.draw(self.rows(sampler, 9, 9), 9, None).slots.tolist() == [8, 7, 6, 5, 4, 3, 2, 1, 0]


class TestHeap(SamplerContract):
    def make(self) -> Sampler:
        return HeapSampler(40)

    def test_every_row_is_reachable(self) -> None:
        sampler = self.make()
        assert sampler.draw(self.rows(sampler, 6, 6), 6, None).slots.tolist() == [0, 1, 2, 3, 4, 5]

    def test_new_rows_are_reachable(self) -> None:
        sampler = self.make()
        sampler.draw(self.rows(sampler, 3, 9), 2, None)
        assert sampler.draw(self.rows(sampler, 9, 9), 9, None).slots.tolist() == list(range(9))


class _Stored:
    """A field with the generation of each row."""

    def __init__(self, ring: Any) -> None:
        self._ring = ring

    def field_at(self, slots: torch.Tensor, path: Any) -> torch.Tensor:
        found: torch.Tensor = self._ring.generations(slots)
        return found


class TestStaleness(SamplerContract):
    def make(self) -> Sampler:
        return StalenessAwareSampler()

    def rows(self, sampler: Sampler, rows: int, capacity: int) -> View:
        view = super().rows(sampler, rows, capacity)
        return view._replace(stored=_Stored(view.ring))


class TestPromptGroups(TestStaleness):
    def make(self) -> Sampler:
        return PromptGroupSampler(samples_per_group=1)


class _NeverLast(RandomSampler):
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, max(1, view.rows - 1), (batch_size,), generator=generator))


class _Strided(RandomSampler):
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size, 2), generator=generator)[:, 0])


class _Global(RandomSampler):
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size,)))


class _Unable(RandomSampler):
    def can_sample(self, *_: Any, **__: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("sampler", "law"),
    [
        (_Unable, "test_a_bare_storage_can_be_sampled"),
        (_NeverLast, "test_every_row_is_reachable"),
        (_Strided, "test_slots_are_in_range"),
        (_Global, "test_one_seed_one_sequence"),
    ],
)
def test_the_contract_finds_the_bug(sampler: type[Sampler], law: str) -> None:
    class Suite(SamplerContract):
        def make(self) -> Sampler:
            return sampler()

    with pytest.raises(AssertionError):
        getattr(Suite(), law)()
