"""A writer that refuses to write: for datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ostinato.errors import UsageError
from ostinato.writers.base import Writer

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.draw import Placement

__all__ = ["ImmutableDatasetWriter"]


@final
class ImmutableDatasetWriter(Writer):
    """Refuses `add`, `extend` and `empty`; editing rows in place (`rb[i] = row`, `write_all`) stays possible.

    Args:
        compilable: no effect: there is nothing to compile.
    """

    mutable = False
    in_order = True

    def __init__(self, *, compilable: bool = False) -> None:
        """Take the options of TorchRL's class."""

    def __repr__(self) -> str:
        """Class alone: there is no state."""
        return "ImmutableDatasetWriter()"

    def place(self, rows: int, capacity: int, scores: Tensor | None) -> Placement:  # noqa: ARG002
        """Refuse.

        Raises:
            UsageError: always.
        """
        msg = (
            f"this buffer is an immutable dataset (ImmutableDatasetWriter), {rows} row(s) were to be written: "
            "use RoundRobinWriter to write"
        )
        raise UsageError(msg)
