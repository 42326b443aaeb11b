"""What every sampler can do: draw slots from a view, hear of writes, give and take its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ostinato.core.draw import Draw, Placement, View

__all__ = ["Sampler"]


class Sampler(ABC):
    """Base of all samplers; a sampler of your own subclasses it and implements `draw`.

    The buffer calls every method under its lock, so a sampler needs none.
    """

    drop_last: bool = False
    """Whether an epoch leaves out its last, smaller batch; the buffer then needs its batch size early."""

    @abstractmethod
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw up to `batch_size` slots.

        Args:
            view: the buffer now; `view.rows` is at least 1.
            batch_size: at least 1.
            generator: the only source of chance; None stands for torch's global one.

        Returns:
            Slots int64 `[B]` on `view.device`, in `[0, view.rows)`; `B` is `batch_size`, fewer where an epoch ends.
        """

    @property
    def epochal(self) -> bool:
        """Whether the sampler goes through the rows in epochs; iteration over the buffer then ends with the epoch."""
        return False

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch; always False for endless samplers."""
        return False

    def restart(self) -> None:  # noqa: B027
        """Begin a new epoch with the next draw."""

    def hear(self, placement: Placement) -> None:  # noqa: B027
        """Take note of rows just written."""

    def clear(self) -> None:  # noqa: B027
        """Take note that the buffer was emptied."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors are not copied."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned."""
