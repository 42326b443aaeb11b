"""A group of writers, for a `ReplayBufferEnsemble` that combines them with storages and samplers."""

from __future__ import annotations

from typing import Self, final

from ostinato.core.group import Group
from ostinato.writers.ring import Writer

__all__ = ["WriterEnsemble"]


@final
class WriterEnsemble(Group[Writer]):
    """The writers of a `ReplayBufferEnsemble`. Rows are written through the members.

    Args:
        *writers: at least one.

    Raises:
        KindError: if an argument is not a writer.
        OptionError: if there is none.

    Example:
        >>> from ostinato import RoundRobinWriter, WriterEnsemble
        >>> WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())[0]
        RoundRobinWriter()
    """

    def __init__(self, *writers: Writer) -> None:
        super().__init__(writers, Writer)

    def __repr__(self) -> str:
        """Show the writers."""
        return f"WriterEnsemble({', '.join(map(repr, self.members))})"

    def subset(self, chosen: list[int]) -> Self:
        """Return an ensemble of some of the writers."""
        return type(self)(*(self.members[i] for i in chosen))
