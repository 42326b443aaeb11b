"""The base class of writers, and writers in ring order: the newest rows replace the oldest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final
from weakref import WeakMethod

import torch

from ostinato.core.records import Run
from ostinato.durable import load_part, save_part
from ostinato.errors import UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable

    from torch import Tensor

    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring


class Writer(ABC):
    """Base of all writers; a writer of your own subclasses it and implements `place`.

    The buffer calls every method under its lock, so a writer needs none.
    """

    rank_path: tuple[Hashable, ...] | None = None
    """Path of the field whose values `place` gets as `scores`; None if it needs none."""
    mutable: bool = True
    """Whether rows may be written, and the buffer emptied."""
    in_order: bool = False
    """Whether rows stay in the order of writing, and the oldest is replaced first; episodes need that."""
    single_rows: bool = False
    """Whether rows are placed one by one, not in runs; storages with `ndim=2` need runs."""
    collections_only: bool = False
    """Whether rows must be TensorDicts or tensorclasses."""
    tracks_generations: bool = False
    """Whether samples carry the generations of their rows whatever the sampler."""

    @property
    def keeps_rows(self) -> bool:
        """Whether it keeps a state of the rows of its buffer, and so serves one buffer at a time.

        A writer does if it has a `clear`, or is asked for generations.
        """
        return self.tracks_generations or type(self).clear is not Writer.clear

    @abstractmethod
    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Placement:
        """Choose slots for `rows` new rows, which have been checked. The ring records the placement afterwards.

        Args:
            rows: at least 1; with `ndim=2` cells, a multiple of `num_envs`.
            ring: `capacity` slots, of which `[0, rows)` hold rows, and the `cursor`: the slot after the newest row. It
                is read only.
            scores: `[rows, *shape]`, the field at `rank_path`.
        """

    def rerank(self, slots: Tensor, scores: Tensor | None) -> None:  # noqa: B027
        """Update the ranks of rows that were edited in place; called only if there is a `rank_path`.

        Args:
            slots: int64 `[n]`; of equal slots the scores are equal too.
            scores: `[n, *shape]`, the field at `rank_path` as it is now; None if rows have none any more.
        """

    def begin(self, rows: int) -> None:  # noqa: B027
        """Start with the `rows` rows that a storage holds already.

        Raises:
            UsageError: if the writer must have placed all rows itself.
        """

    def take_back(self) -> None:  # noqa: B027
        """Undo the last `place`: its rows could not be stored."""

    def clear(self) -> None:  # noqa: B027
        """Forget all rows: the buffer was emptied."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Raise what `load_state_dict` would raise: buffers call this before they load, and before they save.

        Raises:
            CheckpointError: if the state is damaged.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned."""

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the state to a directory; that of a writer in a buffer is part of `ReplayBuffer.dumps`.

        Args:
            path: the directory, which may hold an older state. It is replaced atomically.

        Raises:
            CheckpointError: if the path holds other things.
        """
        save_part(path, self, "writer")

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore what `dumps` saved; checksums are verified.

        Raises:
            CheckpointError: if there is no state, it is damaged, or of another writer; nothing has changed then.
        """
        load_part(path, self, "writer", self.check_state)

    _asked: WeakMethod[Callable[[Any], Tensor]] | None = None

    def follow(self, generations: Callable[[Any], Tensor]) -> None:
        """Let `generations_of` ask this method of a buffer, of which only a weak reference is kept."""
        if self.tracks_generations:
            self._asked = WeakMethod(generations)

    def generations_of(self, index: Any) -> Tensor:
        """Return the generations of the rows that are at an index now, as samples have them.

        Two generations of one slot differ if another row has been written to it in between. They are serial numbers
        of rows, not counts of the writes of a slot.

        Args:
            index: slots, as `extend` returns them.

        Returns:
            int64 of the shape of the index; -1 where there is no row, and everywhere if the writer does not track
            generations or has no buffer.
        """
        asked = None if self._asked is None else self._asked()
        if asked is not None:
            return asked(index)
        given = index[0] if isinstance(index, tuple) else index
        if not isinstance(given, torch.Tensor):
            given = torch.as_tensor(given, dtype=torch.int64, device="cpu")
        return torch.full(given.shape, -1, dtype=torch.int64, device=given.device)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the buffer that is asked: a copy is part of another one, which is asked then."""
        return {name: value for name, value in self.__dict__.items() if name != "_asked"}


class RoundRobinWriter(Writer):
    """A ring: rows go to successive slots and wrap around, so the oldest row is replaced first.

    Of a batch longer than the capacity only the last `capacity` rows are copied. The writer has no state: the cursor
    is the buffer's (`rb.cursor`).

    Args:
        compilable: no effect: the cursor is a Python integer in any case.
        track_generations: return the generations of the rows with each sample, under the key `index_generation`, as
            prioritized buffers always do; the buffer counts them in any case.
    """

    in_order = True

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        self.tracks_generations = bool(track_generations)

    def __repr__(self) -> str:
        """Show the class and what differs from the default."""
        return f"{type(self).__name__}({'track_generations=True' if self.tracks_generations else ''})"

    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Run:  # noqa: ARG002
        """Return the next slots of the ring. Cost: O(1)."""
        capacity = ring.capacity
        skip = rows - capacity if rows > capacity else 0
        return Run((ring.cursor + skip) % capacity, rows - skip, capacity, skip)


@final
class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A ring for TensorDict rows; other data raises `KindError`. No fields are added to the rows stored."""

    collections_only = True


@final
class ImmutableDatasetWriter(Writer):
    """Raises for `add`, `extend` and `empty`; rows can be edited in place (`rb[i] = row`, `write_all`).

    Args:
        compilable: no effect: there is nothing to compile.
    """

    mutable = False
    in_order = True

    def __init__(self, *, compilable: bool = False) -> None:
        """Take the options of TorchRL's class."""

    def __repr__(self) -> str:
        """Show the class."""
        return "ImmutableDatasetWriter()"

    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Placement:  # noqa: ARG002
        """Raise: nothing may be written.

        Raises:
            UsageError: always.
        """
        msg = (
            f"This dataset doesn't allow writing (ImmutableDatasetWriter), {rows} row(s) were to be written: "
            "use RoundRobinWriter to write"
        )
        raise UsageError(msg)
