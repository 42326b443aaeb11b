"""Tools: they look at files and return reports; printing is the command line's work."""

from ostinato.tools.inspect import CheckpointReport, FieldReport, PriorityReport, inspect_checkpoint

__all__ = ["CheckpointReport", "FieldReport", "PriorityReport", "inspect_checkpoint"]
