"""Import of TorchRL 0.14 checkpoints, without TorchRL; `for_collector` for its multi-process collectors; `Trajectory`,
the result of queries under TorchRL's name.

`docs/compat/torchrl.md` lists what is imported, and what collectors call.
"""

from ostinato.buffers.trajectory_view import Trajectory
from ostinato.compat.torchrl.checkpoint import ImportReport, convert_checkpoint, is_checkpoint, load_checkpoint
from ostinato.compat.torchrl.collectors import CollectorBuffer, for_collector

__all__ = [
    "CollectorBuffer",
    "ImportReport",
    "Trajectory",
    "convert_checkpoint",
    "for_collector",
    "is_checkpoint",
    "load_checkpoint",
]
