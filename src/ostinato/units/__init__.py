"""Units turn drawn rows into records: index arithmetic before the gather, tensor arithmetic after it."""

from ostinato.units.base import SampleUnit, chain_units
from ostinato.units.delta_timestamps import DeltaTimestamps
from ostinato.units.frames import FrameStack
from ostinato.units.hindsight import Hindsight, HindsightStrategy
from ostinato.units.nstep import NStep
from ostinato.units.sequence import Sequence, Transition
from ostinato.units.sequence import Sequence as SequenceUnit  # `Sequence` at the root would hide `typing.Sequence`

__all__ = [
    "DeltaTimestamps",
    "FrameStack",
    "Hindsight",
    "HindsightStrategy",
    "NStep",
    "SampleUnit",
    "Sequence",
    "SequenceUnit",
    "Transition",
    "chain_units",
]
