"""Import of TorchRL 0.14 checkpoints, without TorchRL; `Trajectory`, the result of queries under TorchRL's name.

`docs/compat/torchrl.md` lists what is imported.
"""

from ostinato.buffers.trajectory_view import Trajectory
from ostinato.compat.torchrl.checkpoint import ImportReport, convert_checkpoint, is_checkpoint, load_checkpoint

__all__ = ["ImportReport", "Trajectory", "convert_checkpoint", "is_checkpoint", "load_checkpoint"]
