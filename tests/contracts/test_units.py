"""Every unit keeps the contract."""

from __future__ import annotations

import pytest
import torch

from ostinato import DeltaTimestamps, FrameStack, Hindsight, NStep, SequenceUnit, Transition
from ostinato.testing import UnitContract
from tests.contracts.suites import suites

pytestmark = pytest.mark.usefixtures("backend")

UNITS = {
    "Transition": Transition,
    "NStep": lambda: NStep(3, 0.9),
    "SequenceUnit": lambda: SequenceUnit(3, burn_in=2, bootstrap=1),
    "SequenceUnit, strict": lambda: SequenceUnit(3, "strict"),
    "FrameStack": lambda: FrameStack(3, ["obs"]),
    "DeltaTimestamps": lambda: DeltaTimestamps({"obs": [-0.2, 0.0, 0.1], "reward": [0.5]}, fps=10),
    "Hindsight": lambda: Hindsight(lambda batch: torch.zeros_like(batch["reward"]), goal_key="goal"),
}
globals().update(suites(UnitContract, UNITS, __name__))


def test_the_contract_needs_a_unit():
    (suite,) = suites(UnitContract, {"none": lambda: None}, __name__).values()
    with pytest.raises(TypeError, match="must return a unit"):
        suite().test_slots_read_are_in_range()
