"""A group of writers, for a `ReplayBufferEnsemble` that combines them with storages and samplers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core import kinds
from ostinato.core.index import Group, check_members
from ostinato.errors import KindError, SchemaError
from ostinato.writers.ring import Writer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WriterEnsemble"]


@final
class WriterEnsemble(Group[Writer]):
    """The writers of a `ReplayBufferEnsemble`. Rows are written through the members.

    Args:
        *writers: at least one.

    Raises:
        KindError: if an argument is not a writer.
        OptionError: if there is none.

    Examples:
        >>> from ostinato import RoundRobinWriter, WriterEnsemble
        >>> WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())[0]
        RoundRobinWriter()
    """

    def __init__(self, *writers: Writer) -> None:
        super().__init__(writers, Writer)

    @property
    def tracks_generations(self) -> bool:
        """Whether samples of all members carry the generations of their rows."""
        return all(writer.tracks_generations for writer in self.members)

    def generations_of(self, index: Any) -> Tensor:
        """Return the generations of the rows that are at an index now; see `RoundRobinWriter.generations_of`.

        Args:
            index: a TensorDict or dict of `buffer_ids`, int64 `[*B]`, and the `index` in these members `[*B]`, as
                `extend` of the ensemble returns it.

        Returns:
            int64 `[*B]`; -1 where there is no row, or the writer does not track generations.

        Raises:
            KindError: if the index is not of this kind, or numbers of members are not integers.
            SchemaError: if there is not one member for each row.
            SlotError: if a number is no member.
        """
        if not kinds.is_mapping(index) or any(index.get(key, None) is None for key in ("buffer_ids", "index")):
            msg = "generations of an ensemble require routed index metadata: a TensorDict of buffer_ids and index, got "
            raise KindError(msg + type(index).__name__)
        owners, slots = index["buffer_ids"], index["index"]
        owners = check_members(owners, len(self))
        if slots.shape[: owners.ndim] != owners.shape:
            msg = f"there must be one member id for each row: {list(owners.shape)} ids, {list(slots.shape)} rows"
            raise SchemaError(msg)
        found = torch.full(owners.shape, -1, dtype=torch.int64, device=owners.device)
        for i, writer in enumerate(self.members):
            at = owners == i
            if bool(at.any()):
                found[at] = writer.generations_of(slots[at.to(slots.device)]).to(found.device)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: if there is another number of writers, or a state is damaged; nothing is changed.
        """
        states = self.states(state)
        for writer, mine in zip(self.members, states, strict=True):
            writer.check_state(mine)
        for writer, mine in zip(self.members, states, strict=True):
            writer.load_state_dict(mine)
