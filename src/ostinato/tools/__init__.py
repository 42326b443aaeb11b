"""Tools: they look at files, move and convert them, and return reports; printing is the command line's work."""

from ostinato.tools.convert import ConvertReport, convert
from ostinato.tools.inspect import CheckpointReport, FieldReport, PriorityReport, inspect_checkpoint
from ostinato.tools.moves import MoveReport, merge, split
from ostinato.tools.stores import Damage, KeyReport, StoreReport, VerifyReport, inspect_store, is_store, verify

__all__ = [
    "CheckpointReport",
    "ConvertReport",
    "Damage",
    "FieldReport",
    "KeyReport",
    "MoveReport",
    "PriorityReport",
    "StoreReport",
    "VerifyReport",
    "convert",
    "inspect_checkpoint",
    "inspect_store",
    "is_store",
    "merge",
    "split",
    "verify",
]
