"""The trajectories of a buffer in order, and drawing transitions from the most recent ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import torch

from ostinato.durable.tensorfile import show
from ostinato.errors import KeyMissingError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostinato.durable.tensorfile import TreePath
    from ostinato.trajectories.index import Entry
    from ostinato.trajectories.layout import RowSchema, Signature

__all__ = ["DrawnTransitions", "TrajectoryList"]


class DrawnTransitions(NamedTuple):
    """Transitions that were drawn for a batch.

    Attributes:
        entries: Their trajectories, each once.
        which: Position in `entries` of each transition's trajectory, int64 `[N]`.
        transitions: Number of each transition within its trajectory, int64 `[N]`.
    """

    entries: list[Entry]
    which: np.ndarray
    transitions: np.ndarray


@final
class TrajectoryList:
    """Trajectories in the order they were added. Appending is O(1), amortized.

    Args:
        window: Draw from the most recent `window` trajectories; 0 for all.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._entries: list[Entry] = []
        self._ends = np.zeros(1024, dtype=np.int64)  # [k] is the number of transitions of the first k trajectories
        self._schemas: Counter[RowSchema] = Counter()

    def __len__(self) -> int:
        """Number of trajectories."""
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """All trajectories, a copy of the list."""
        return list(self._entries)

    @property
    def total_samples(self) -> int:
        """Number of transitions of all trajectories."""
        return int(self._ends[len(self._entries)])

    @property
    def window_samples(self) -> int:
        """Number of transitions in the window."""
        return self.total_samples - int(self._ends[self._first()])

    def append(self, entries: Iterable[Entry]) -> None:
        """Append trajectories."""
        for entry in entries:
            count = len(self._entries) + 1
            if count == len(self._ends):
                self._ends = np.concatenate((self._ends, np.zeros_like(self._ends)))
            self._ends[count] = self._ends[count - 1] + entry.layout.num_samples
            self._entries.append(entry)
            self._schemas[entry.layout.schema] += 1
            if 0 < self._window < count:
                left = self._entries[count - 1 - self._window].layout.schema
                self._schemas[left] -= 1
                if not self._schemas[left]:
                    del self._schemas[left]

    def find(self, number: int) -> Entry | None:
        """Return the trajectory with an id; None if there is none."""
        return next((entry for entry in self._entries if entry.id == number), None)

    def draw(self, generator: torch.Generator, count: int, *, replace: bool) -> DrawnTransitions:
        """Draw transitions of the window uniformly.

        Args:
            generator: Source of randomness.
            count: How many; at most `window_samples` with `replace=False`.
            replace: Draw each independently; False draws each transition at most once, in random order.
        """
        numbers = _draw_numbers(generator, count, self.window_samples, replace=replace)
        return self.locate(numbers + self._ends[self._first()])

    def locate(self, numbers: np.ndarray) -> DrawnTransitions:
        """Return the trajectories of transitions that are numbered in the order of the trajectories, int64 `[N]`."""
        ends = self._ends[: len(self._entries) + 1]
        positions = np.searchsorted(ends, numbers, side="right") - 1
        touched, which = np.unique(positions, return_inverse=True)
        entries = [self._entries[position] for position in touched.tolist()]
        return DrawnTransitions(entries, which.reshape(-1), numbers - ends[positions])

    def all_fields(self) -> set[TreePath]:
        """Return the paths of the fields that at least one trajectory of the window has."""
        return {path for schema in self._schemas for path in schema.signature}

    def common_fields(self, *, drop: bool) -> Signature:
        """Return the fields of a batch: dtype and shape of a row by path.

        Args:
            drop: Leave out fields that some trajectories of the window lack, instead of raising.

        Raises:
            KeyMissingError: Some trajectories lack fields, or no field is common; the message names them.
            SchemaError: A field differs in dtype or shape of a row; the message names it.
        """
        signatures = [schema.signature for schema in self._schemas]
        first = signatures[0]
        if len(signatures) == 1:
            return dict(first)
        known = self.all_fields()
        common = {path: kind for path, kind in first.items() if all(path in signature for signature in signatures)}
        if len(common) < len(known) and not drop:
            missing = ", ".join(sorted(show(path) for path in known - set(common)))
            msg = (
                f"some trajectories of the window lack {missing}: sample with missing='drop' for batches of the keys "
                "that all have, or keep such trajectories in separate buffers"
            )
            raise KeyMissingError(msg)
        for path, kind in common.items():
            other = next((signature[path] for signature in signatures if signature[path] != kind), None)
            if other is not None:
                msg = (
                    f"{show(path)} is {kind[0]}{list(kind[1])} in some trajectories and "
                    f"{other[0]}{list(other[1])} in others: rows of one batch must have one dtype and shape"
                )
                raise SchemaError(msg)
        if not common:
            msg = "the trajectories of the window have no key in common"
            raise KeyMissingError(msg)
        return common

    def _first(self) -> int:
        return max(len(self._entries) - self._window, 0) if self._window else 0


def _draw_numbers(generator: torch.Generator, count: int, below: int, *, replace: bool) -> np.ndarray:
    """Draw `count` of the numbers `[0, below)`, int64 `[count]`.

    With `replace` each draw is uniform and independent; otherwise every ordered choice of different numbers is equally
    likely (`count <= below`).
    """
    if replace:
        return torch.randint(0, below, (count,), generator=generator, device="cpu").numpy()
    if 2 * count > below:
        return torch.randperm(below, generator=generator, device="cpu")[:count].numpy()
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:  # at least half of the numbers are still free, so one or two rounds suffice
        more = torch.randint(0, below, (2 * (count - len(found)) + 16,), generator=generator, device="cpu").numpy()
        found = np.concatenate((found, more))
        _, first = np.unique(found, return_index=True)
        found = found[np.sort(first)]
    return found[:count]
