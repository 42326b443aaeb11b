"""The counts of ring, storage and buffer: objects that native calls and Python read and change."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from ostinato._backend import backend

NEVER = 2**63 - 1
"""A serial number that no row reaches."""


@dataclass(slots=True)
class _Counts:
    """Numbers that are pickled without the object of the native extension that may hold them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the numbers."""
        return restore_counts, (type(self).__name__, astuple(self))


@dataclass(slots=True)
class RingCounts(_Counts):
    """The numbers of a ring; see `ostinato.core.ring`."""

    capacity: int = 0
    """Slots."""
    rows: int = 0
    """Rows present: slots `[0, rows)`."""
    cursor: int = 0
    """Slot after the newest row."""
    written: int = 0
    """Serial number of the last row written."""
    base: int = 0
    """Largest serial number that no row present has."""
    in_order: bool = True
    """Whether generations follow from the cursor."""
    reserved_from: int = NEVER
    """First serial number whose row would replace one that was drawn ahead; see `ostinato.buffers.drawn_ahead`."""
    turn: int = 0
    """Where new rows are in an order of slots that they take in turn; see `Observer.turns`."""


@dataclass(slots=True)
class StoredRows(_Counts):
    """The numbers of a storage of tensors."""

    rows: int = 0
    """Rows present."""
    cursor: int = 0
    """Slot after the newest row."""
    writes: int = 0
    """Number of writes."""
    plain: bool = False
    """Whether a write only changes rows of the table."""


@dataclass(slots=True)
class BufferCounts(_Counts):
    """What a buffer counts."""

    written: int = 0
    """Rows ever written."""
    since_empty: int = 0
    """Rows written since the buffer was made or emptied."""
    drawn: int = 0
    """Rows delivered."""
    redone: int = 0
    """Batches copied again because a writer replaced some of their rows."""
    writes_seen: int = 0
    """Writes of the storage that the buffer follows."""


def make_counts(kind: type[Any]) -> Any:
    """Return counts of zero, as an object of the native extension if it is in use."""
    native = backend.native
    return kind() if native is None else getattr(native, kind.__name__)()


def restore_counts(name: str, numbers: tuple[int, ...]) -> Any:
    """Return pickled counts: in the extension, where this process has it, or in Python."""
    kind = {kind.__name__: kind for kind in (RingCounts, StoredRows, BufferCounts)}[name]
    found = make_counts(kind)
    for field, number in zip(kind.__dataclass_fields__, numbers, strict=True):
        setattr(found, field, number)
    return found
