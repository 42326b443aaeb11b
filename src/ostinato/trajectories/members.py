"""The trajectories of a buffer in order, the window that samples come from, and where a number falls in it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ostinato.durable.trees import show
from ostinato.errors import KeyMissingError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostinato.trajectories.index import Entry
    from ostinato.trajectories.layout import Layout, Signature

__all__ = ["Members", "Picked", "common_fields"]


class Picked(NamedTuple):
    """Transitions that were drawn.

    Attributes:
        entries: The trajectories that they lie in, each once.
        which: For each transition the position in `entries`, int64 `[N]`, not descending along `order`.
        transitions: Its number within the trajectory, int64 `[N]`.
    """

    entries: list[Entry]
    which: np.ndarray
    transitions: np.ndarray


@final
class Members:
    """Trajectories in the order in which they came. Appending costs the same whatever their number."""

    def __init__(self, window: int) -> None:
        """Sample from the most recent `window` trajectories, 0 for all."""
        self._window = window
        self._entries: list[Entry] = []
        self._ends = np.zeros(1024, dtype=np.int64)  # [0] is 0, [k] the transitions of the first k trajectories
        self._layouts: Counter[Layout] = Counter()

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """All trajectories, a copy of the list."""
        return list(self._entries)

    @property
    def total_samples(self) -> int:
        """Transitions of all trajectories."""
        return int(self._ends[len(self._entries)])

    @property
    def layouts(self) -> list[Layout]:
        """The different layouts in the window."""
        return list(self._layouts)

    @property
    def window_samples(self) -> int:
        """Transitions in the window."""
        return self.total_samples - int(self._ends[self._first()])

    def append(self, entries: Iterable[Entry]) -> None:
        """Take in more trajectories."""
        for entry in entries:
            count = len(self._entries) + 1
            if count == len(self._ends):
                self._ends = np.concatenate((self._ends, np.zeros_like(self._ends)))
            self._ends[count] = self._ends[count - 1] + entry.form.num_samples
            self._entries.append(entry)
            self._layouts[entry.form.layout] += 1
            if 0 < self._window < count:
                gone = self._entries[count - 1 - self._window].form.layout
                self._layouts[gone] -= 1
                if not self._layouts[gone]:
                    del self._layouts[gone]

    def pick(self, numbers: np.ndarray) -> Picked:
        """Return where transitions of the window lie, given by their numbers in `[0, window_samples)`."""
        first, count = self._first(), len(self._entries)
        ends = self._ends[first : count + 1]
        numbers = numbers + ends[0]
        places = np.searchsorted(ends, numbers, side="right") - 1
        touched, which = np.unique(places, return_inverse=True)
        entries = [self._entries[first + place] for place in touched.tolist()]
        return Picked(entries, which.reshape(-1), numbers - ends[places])

    def find(self, number: int) -> Entry | None:
        """Return the trajectory of an id."""
        return next((entry for entry in self._entries if entry.id == number), None)

    def _first(self) -> int:
        return max(len(self._entries) - self._window, 0) if self._window else 0


def common_fields(layouts: list[Layout], *, drop: bool) -> Signature:
    """Return the fields of a batch: by path, dtype and shape of a row.

    Args:
        layouts: Layouts of the trajectories in the window.
        drop: Leave out fields that not all have, instead of raising.

    Raises:
        KeyMissingError: naming the fields that some trajectories lack.
        SchemaError: naming a field that differs in dtype or shape.
    """
    first = layouts[0].signature
    if len(layouts) == 1:
        return dict(first)
    known = {path for layout in layouts for path in layout.signature}
    common = {path: sig for path, sig in first.items() if all(path in layout.signature for layout in layouts)}
    if len(common) < len(known) and not drop:
        missing = ", ".join(sorted(show(path) for path in known - set(common)))
        msg = (
            f"some trajectories of the window lack {missing}: sample with missing='drop' for batches of the keys that "
            "all have, or keep such trajectories in separate buffers"
        )
        raise KeyMissingError(msg)
    for path, signature in common.items():
        other = next((layout.signature[path] for layout in layouts if layout.signature[path] != signature), None)
        if other is not None:
            msg = (
                f"{show(path)} is {signature[0]}{list(signature[1])} in some trajectories of the window and "
                f"{other[0]}{list(other[1])} in others: rows of one batch must be alike"
            )
            raise SchemaError(msg)
    if not common:
        msg = "the trajectories of the window have no key in common"
        raise KeyMissingError(msg)
    return common
