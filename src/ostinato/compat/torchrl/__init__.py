"""Import of TorchRL 0.14 checkpoints, without TorchRL; `Trajectory`, the result of queries under TorchRL's name.

`for_collector` makes any buffer the `replay_buffer` of TorchRL's multi-process collectors. `docs/compat/torchrl.md`
lists what is imported, and what collectors call.
"""

from typing import TYPE_CHECKING

from ostinato.compat.torchrl.checkpoint import ImportReport, convert_checkpoint, is_checkpoint, load_checkpoint
from ostinato.compat.torchrl.collectors import CollectorBuffer, for_collector

if TYPE_CHECKING:
    from ostinato.buffers.trajectory_view import Trajectory

__all__ = [
    "CollectorBuffer",
    "ImportReport",
    "Trajectory",
    "convert_checkpoint",
    "for_collector",
    "is_checkpoint",
    "load_checkpoint",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import `Trajectory` when it is used: a tensorclass cannot be made without tensordict."""
        if name != "Trajectory":
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        from ostinato.buffers.trajectory_view import Trajectory

        globals()[name] = Trajectory
        return Trajectory
