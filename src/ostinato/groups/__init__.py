"""Groups of responses to one prompt, for training language models: leased, trained exactly once, never lost."""

from ostinato.groups.batches import TokenBudget
from ostinato.groups.buffer import GroupBuffer, GroupStats
from ostinato.groups.records import Group, Lease, Response
from ostinato.groups.server import GroupClient, GroupServer

__all__ = ["Group", "GroupBuffer", "GroupClient", "GroupServer", "GroupStats", "Lease", "Response", "TokenBudget"]
