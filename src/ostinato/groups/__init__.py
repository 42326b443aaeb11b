"""Groups of responses to one prompt, for training language models: leased, trained exactly once, never lost."""

from ostinato.groups.buffer import GroupBuffer, GroupStats
from ostinato.groups.records import Group, Lease, Response

__all__ = ["Group", "GroupBuffer", "GroupStats", "Lease", "Response"]
