"""Round-robin writing: the newest rows replace the oldest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ostinato.core.draw import Run
from ostinato.writers.base import Writer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RoundRobinWriter", "TensorDictRoundRobinWriter"]


class RoundRobinWriter(Writer):
    """A ring: rows go to successive slots and wrap around, so the oldest row is replaced first.

    Of a batch longer than the capacity only the last `capacity` rows are copied.

    Args:
        compilable: no effect: the cursor is a Python integer in any case.
    """

    in_order = True

    def __init__(self, *, compilable: bool = False) -> None:  # noqa: ARG002
        self._cursor = 0

    def __repr__(self) -> str:
        """Class and cursor."""
        return f"{type(self).__name__}(cursor={self._cursor})"

    @property
    def cursor(self) -> int:
        """Slot that the next row will take."""
        return self._cursor

    def place(self, rows: int, capacity: int, scores: Tensor | None) -> Run:  # noqa: ARG002
        """Give the next slots of the ring. Cost: O(1)."""
        skip = max(0, rows - capacity)
        start = (self._cursor + skip) % capacity
        self._cursor = (self._cursor + rows) % capacity
        return Run(start, rows - skip, capacity, skip)

    def resume(self, rows: int, cursor: int) -> None:  # noqa: ARG002
        """Go on at `cursor`."""
        self._cursor = cursor

    def clear(self) -> None:
        """Start at slot 0 again."""
        self._cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor."""
        return {"cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the cursor."""
        self._cursor = int(state["cursor"])


@final
class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A ring for TensorDict rows alone; other data is refused. Nothing is added to the rows stored."""

    collections_only = True
