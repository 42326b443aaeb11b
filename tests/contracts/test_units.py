"""Every unit keeps the contract."""

from __future__ import annotations

import pytest
import torch

from ostinato import DeltaTimestamps, FrameStack, Hindsight, NStep, SampleUnit, SequenceUnit, Transition
from ostinato.testing import UnitContract

pytestmark = pytest.mark.usefixtures("backend")


class TestTransition(UnitContract):
    def make(self) -> SampleUnit:
        return Transition()


class TestNStep(UnitContract):
    def make(self) -> SampleUnit:
        return NStep(3, 0.9)


class TestSequence(UnitContract):
    def make(self) -> SampleUnit:
        return SequenceUnit(3, burn_in=2, bootstrap=1)


class TestStrictSequence(UnitContract):
    def make(self) -> SampleUnit:
        return SequenceUnit(3, "strict")


class TestFrameStack(UnitContract):
    def make(self) -> SampleUnit:
        return FrameStack(3, ["obs"])


class TestDeltaTimestamps(UnitContract):
    def make(self) -> SampleUnit:
        return DeltaTimestamps({"obs": [-0.2, 0.0, 0.1], "reward": [0.5]}, fps=10)


class TestHindsight(UnitContract):
    def make(self) -> SampleUnit:
        return Hindsight(lambda batch: torch.zeros(len(batch["reward"])), goal_key="goal")


def test_the_contract_names_a_maker_that_returns_no_unit() -> None:
    class Suite(UnitContract):
        def make(self) -> SampleUnit:
            return None  # type: ignore[return-value]

    with pytest.raises(TypeError, match="make"):
        Suite().test_slots_read_are_in_range()
