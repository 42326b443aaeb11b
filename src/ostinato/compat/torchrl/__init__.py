"""Checkpoints that TorchRL 0.14 wrote, read without TorchRL; what is carried over: `docs/compat/torchrl.md`."""

from ostinato.compat.torchrl.checkpoint import ImportReport, convert_checkpoint, is_checkpoint, load_checkpoint

__all__ = ["ImportReport", "convert_checkpoint", "is_checkpoint", "load_checkpoint"]
