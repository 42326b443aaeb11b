"""Writers choose the slots of new rows, from counts and scores."""

from ostinato.writers.ensemble import WriterEnsemble
from ostinato.writers.ranked import TensorDictMaxValueWriter
from ostinato.writers.reservoir import ReservoirWriter
from ostinato.writers.ring import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter, Writer

__all__ = [
    "ImmutableDatasetWriter",
    "ReservoirWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
    "WriterEnsemble",
]
