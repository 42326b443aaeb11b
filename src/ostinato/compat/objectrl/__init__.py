"""The experience memory of ObjectRL; how it differs from the original: `docs/compat/objectrl.md`."""

from ostinato.compat.objectrl.memory import ReplayBuffer
from ostinato.compat.objectrl.saved import LoadReport

__all__ = ["LoadReport", "ReplayBuffer"]
