"""Tools: they look at files, move and convert them, and return reports; printing is the command line's work."""

from ostinato.tools.compact import CompactReport, compact
from ostinato.tools.convert import ConvertReport, convert
from ostinato.tools.inspect import (
    ChainReport,
    CheckpointReport,
    FieldReport,
    KeyReport,
    LinkReport,
    PriorityReport,
    StoreReport,
    inspect_checkpoint,
    inspect_store,
    is_store,
    kind_of,
)
from ostinato.tools.moves import MoveReport, merge, split
from ostinato.tools.verify import Damage, VerifyReport, verify

__all__ = [
    "ChainReport",
    "CheckpointReport",
    "CompactReport",
    "ConvertReport",
    "Damage",
    "FieldReport",
    "KeyReport",
    "LinkReport",
    "MoveReport",
    "PriorityReport",
    "StoreReport",
    "VerifyReport",
    "compact",
    "convert",
    "inspect_checkpoint",
    "inspect_store",
    "is_store",
    "kind_of",
    "merge",
    "split",
    "verify",
]
