"""Groups of responses to one prompt, for training language models: leased, trained exactly once, never lost."""

from ostinato.groups.batches import TokenBudget
from ostinato.groups.buffer import GroupBuffer
from ostinato.groups.records import Group, Lease, Response
from ostinato.groups.stats import GroupLogger, GroupStats

__all__ = ["Group", "GroupBuffer", "GroupLogger", "GroupStats", "Lease", "Response", "TokenBudget"]
