"""Import of TorchRL 0.14 checkpoints, without TorchRL; `Trajectory`, the result of queries under TorchRL's name.

`for_collector` makes any buffer the `replay_buffer` of TorchRL's multi-process collectors. `docs/compat/torchrl.md`
lists what is imported, and what collectors call.
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
