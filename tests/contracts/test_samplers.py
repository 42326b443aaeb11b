"""The sampler contract, run over every sampler that needs no episodes, and over samplers with known bugs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import ConsumingSampler, PromptGroupSampler, RandomSampler, Sampler, StalenessAwareSampler
from ostinato.protocols import Draw
from ostinato.testing import SamplerContract
from tests.contracts.suites import suites
from tests.registry import SAMPLERS

if TYPE_CHECKING:
    from ostinato.protocols import View

pytestmark = pytest.mark.usefixtures("backend")

PLAIN = {
    name: partial(part.make, 40)
    for name, part in SAMPLERS.items()
    if not any(word in name for word in ("Slice", "Queue", "Limited", "times_sampled", "Staleness", "Prompt"))
}
RANKED = {name: PLAIN.pop(name) for name in ("StackSampler", "HeapSampler")}
"""They always draw the same rows: `stateful/test_edit_machine.py` has a model of these."""
LEFT_OUT = {"test_every_row_is_reachable": None, "test_new_rows_are_reachable": None}
DROP_LAST = {name: PLAIN.pop(name) for name in ("SamplerWithoutReplacement, drop_last",)}
del PLAIN["ConsumingSampler"]

globals().update(suites(SamplerContract, PLAIN, __name__))
globals().update(suites(SamplerContract, RANKED, __name__, **LEFT_OUT))


class TestDropLast(SamplerContract):
    def make(self) -> Sampler:
        made: Sampler = DROP_LAST["SamplerWithoutReplacement, drop_last"]()
        return made

    def test_batches_have_the_requested_size(self):
        sampler = self.make()
        view = self.rows(sampler, 7, 9)
        assert all(sampler.draw(view, 3, None).slots.shape == (3,) for _ in range(9))


class TestLeavingRows(SamplerContract):
    def make(self) -> Sampler:
        return ConsumingSampler(1000)

    def test_an_epoch_has_each_row_once(self):
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


class Reading(SamplerContract):
    __test__ = False

    def rows(self, sampler: Sampler, rows: int, capacity: int) -> View:
        view = super().rows(sampler, rows, capacity)
        return view._replace(stored=_Stored(view.ring))


_READING: dict[str, Any] = {
    "staleness": StalenessAwareSampler,
    "prompt groups": partial(PromptGroupSampler, samples_per_group=1),
}
globals().update(suites(Reading, _READING, __name__))


class _NeverLast(RandomSampler):
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, max(1, view.rows - 1), (batch_size,), generator=generator, device="cpu"))


class _OnlyFirst(RandomSampler):
    rows = 0

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        self.rows = self.rows or view.rows
        return Draw(torch.randint(0, self.rows, (batch_size,), generator=generator, device="cpu"))


class _Strided(RandomSampler):
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size, 2), generator=generator, device="cpu")[:, 0])


class _Global(RandomSampler):
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size,), device="cpu"))


class _NotAlone(RandomSampler):
    def can_sample(self, storage: Any, batch_size: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("sampler", "law"),
    [
        (_NotAlone, "test_a_bare_storage_can_be_sampled"),
        (_NeverLast, "test_every_row_is_reachable"),
        (_OnlyFirst, "test_new_rows_are_reachable"),
        (_Strided, "test_slots_are_in_range"),
        (_Global, "test_one_seed_one_sequence"),
    ],
)
def test_the_contract_finds_the_bug(sampler, law):
    (suite,) = suites(SamplerContract, {"broken": sampler}, __name__).values()
    with pytest.raises(AssertionError):
        getattr(suite(), law)()
