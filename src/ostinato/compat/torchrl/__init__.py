"""Import of TorchRL 0.14 checkpoints, without TorchRL. `docs/compat/torchrl.md` lists what is imported."""

from ostinato.compat.torchrl.checkpoint import ImportReport, convert_checkpoint, is_checkpoint, load_checkpoint

__all__ = ["ImportReport", "convert_checkpoint", "is_checkpoint", "load_checkpoint"]
