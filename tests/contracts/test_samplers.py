"""The sampler contract, run over every sampler of ours, and over samplers with known bugs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    ConsumingSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
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


@pytest.mark.parametrize(
    ("sampler", "law"),
    [
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
