"""Contract tests for samplers."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from ostinato.protocols import Run
from ostinato.storages import TensorStorage
from ostinato.testing.views import make_view

if TYPE_CHECKING:
    from ostinato.protocols import View
    from ostinato.samplers import Sampler

__all__ = ["SamplerContract"]


class SamplerContract(ABC):
    """Requirements of a buffer on a sampler: slots with rows, one source of randomness, a state that resumes."""

    @abstractmethod
    def make(self) -> Sampler:
        """Return a new sampler."""

    def rows(self, sampler: Sampler, rows: int, capacity: int) -> View:  # noqa: ARG002
        """Return a view of `rows` rows. Override it for samplers that must record rows first."""
        return make_view(rows, capacity)

    # -- tests -----------------------------------------------------------------------------------------------

    def test_slots_are_in_range(self) -> None:
        """Slots are contiguous int64 `[B]` in `[0, rows)`, for partly filled, full and wrapped buffers."""
        for rows, capacity in ((1, 9), (8, 9), (9, 9), (10, 9), (31, 9), (1, 1)):
            sampler = self.make()
            view = self.rows(sampler, rows, capacity)
            for _ in range(20):
                slots = sampler.draw(view, min(3, view.rows), None).slots
                assert slots.dtype is torch.int64
                assert slots.ndim == 1
                assert slots.is_contiguous()
                assert slots.device == view.device
                assert 0 <= int(slots.min()) <= int(slots.max()) < view.rows

    def test_batches_have_the_requested_size(self) -> None:
        """Only samplers with epochs return fewer rows, and always at least one."""
        sampler = self.make()
        view = self.rows(sampler, 7, 9)
        for size in (1, 3, 7, 2):
            drawn = sampler.draw(view, size, None).slots.shape[0]
            assert drawn == size or (sampler.epochal and 0 < drawn < size)

    def test_a_bare_storage_can_be_sampled(self) -> None:
        """`sample` draws from a storage without a buffer. Not tested for samplers that need fields of the rows."""
        sampler = self.make()
        if sampler.episodes is not None or sampler.reads:
            return
        storage = TensorStorage({"x": torch.arange(7, device="cpu")})
        assert sampler.can_sample(storage, 3)
        index, info = sampler.sample(storage, 3)
        assert isinstance(index, torch.Tensor)
        assert torch.equal(storage[index]["x"], index)
        assert isinstance(info, dict)

    def test_weights_match_the_slots(self) -> None:
        """Weights, if any, are finite, non-negative, and one per slot."""
        sampler = self.make()
        draw = sampler.draw(self.rows(sampler, 7, 9), 5, None)
        if draw.weights is not None:
            assert draw.weights.shape == draw.slots.shape
            assert bool(draw.weights.isfinite().all())
            assert bool((draw.weights >= 0).all())

    def test_every_row_is_reachable(self) -> None:
        """Each row is eventually drawn, including the first and the last."""
        sampler = self.make()
        view = self.rows(sampler, 6, 6)
        generator = torch.Generator().manual_seed(0)
        seen = {int(s) for _ in range(200) for s in sampler.draw(view, 3, generator).slots}
        assert seen == set(range(6))

    def test_new_rows_are_reachable(self) -> None:
        """Rows written after the first draw are drawn as well."""
        sampler = self.make()
        sampler.draw(self.rows(sampler, 3, 9), 2, None)
        view = self.rows(sampler, 9, 9)
        sampler.record(Run(3, 6, 9))
        generator = torch.Generator().manual_seed(0)
        seen = {int(s) for _ in range(200) for s in sampler.draw(view, 3, generator).slots}
        assert seen == set(range(9))

    def test_one_seed_one_sequence(self) -> None:
        """Equal generators give equal draws; torch's global generator is neither used nor changed."""
        sequences = []
        with torch.random.fork_rng(devices=[]):
            for noise in (1, 2):
                torch.manual_seed(noise)
                before = torch.get_rng_state()
                sequences.append(self.sequence(self.make(), torch.Generator().manual_seed(5)))
                assert torch.equal(before, torch.get_rng_state())
        assert sequences[0] == sequences[1]

    def test_the_global_generator_is_the_default(self) -> None:
        """Without a generator, torch's global generator is used."""
        sequences = []
        with torch.random.fork_rng(devices=[]):
            for seed in (3, 3):
                torch.manual_seed(seed)
                sequences.append(self.sequence(self.make(), None))
        assert sequences[0] == sequences[1]

    def test_state_resumes_the_sequence(self) -> None:
        """A new sampler that loads the state continues with the same draws."""
        first, generator = self.make(), torch.Generator().manual_seed(5)
        view = self.rows(first, 7, 9)
        first.draw(view, 3, generator)
        saved, chance = copy.deepcopy(first.state_dict()), generator.get_state()
        expected = self.sequence(first, generator)
        second = self.make()
        self.rows(second, 7, 9)
        second.load_state_dict(saved)
        generator.set_state(chance)
        assert self.sequence(second, generator) == expected

    def test_state_is_loaded_by_copy(self) -> None:
        """Two samplers with the same state are independent."""
        first, second, alone = self.make(), self.make(), self.make()
        for sampler in (first, second, alone):
            self.rows(sampler, 7, 9)
        first.draw(self.rows(first, 7, 9), 3, torch.Generator().manual_seed(5))
        state = first.state_dict()
        alone.load_state_dict(copy.deepcopy(state))
        second.load_state_dict(state)
        self.sequence(first, torch.Generator().manual_seed(6))
        assert self.sequence(second, torch.Generator().manual_seed(7)) == self.sequence(
            alone, torch.Generator().manual_seed(7)
        )

    def test_pickles_resume_the_sequence(self) -> None:
        """A pickled sampler is a copy that continues with the same draws."""
        first = self.make()
        view = self.rows(first, 7, 9)
        first.draw(view, 2, torch.Generator().manual_seed(5))
        second = pickle.loads(pickle.dumps(first))  # noqa: S301 (pickled above)
        assert self.sequence(first, torch.Generator().manual_seed(6)) == self.sequence(
            second, torch.Generator().manual_seed(6)
        )

    def test_clear_removes_old_rows(self) -> None:
        """After `clear`, draws are within a buffer that has fewer rows."""
        sampler = self.make()
        sampler.draw(self.rows(sampler, 9, 9), 4, None)
        sampler.clear()
        view = self.rows(sampler, 2, 9)
        for _ in range(20):
            assert int(sampler.draw(view, 2, None).slots.max()) < 2

    def test_an_epoch_has_each_row_once(self) -> None:
        """From `restart` to `ran_out`, every row is drawn exactly once (at most once with `drop_last`)."""
        sampler = self.make()
        if not sampler.epochal:
            assert not sampler.ran_out
            return
        view = self.rows(sampler, 7, 9)
        for _ in range(3):
            sampler.restart()
            drawn: list[int] = []
            while not (drawn and sampler.ran_out):
                drawn += sampler.draw(view, 3, None).slots.tolist()
                assert len(drawn) <= 7
            assert len(set(drawn)) == len(drawn)
            assert len(drawn) == (6 if sampler.drop_last else 7)

    # -- helpers -----------------------------------------------------------------------------------------------

    def sequence(self, sampler: Sampler, generator: torch.Generator | None) -> list[list[int]]:
        """Return twelve draws from a view of seven rows."""
        view = self.rows(sampler, 7, 9)
        return [sampler.draw(view, 3, generator).slots.tolist() for _ in range(12)]
