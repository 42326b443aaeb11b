"""A writer that keeps a uniform sample of all rows ever written (reservoir sampling)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.records import Picks
from ostinato.errors import CheckpointError, KindError, OptionError
from ostinato.writers.ring import Writer

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.ring import Ring


@final
class ReservoirWriter(Writer):
    """Keeps a uniform sample of all rows ever written: after `t` rows each is present with probability `capacity / t`.

    Algorithm R (Vitter 1985): the first rows fill the buffer. For each later row, number `t`, a slot is drawn uniformly
    from `[0, t)`; the row is written there if the slot is in the buffer, and is not kept otherwise. `extend` returns -1
    for rows that were not kept, or were replaced by a later row of the same batch. Rows that a storage held before, and
    rows of a checkpoint that is loaded into a larger buffer, count as all rows written so far. Cost: O(rows), with one
    random number for each row.

    Args:
        generator: source of random numbers, on the CPU; None is torch's global one. The writer saves its state: use
            another generator than that of the buffer.

    Raises:
        KindError: if it is not a generator.
        OptionError: if it is on another device.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, ReservoirWriter
        >>> writer = ReservoirWriter(generator=torch.Generator().manual_seed(0))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), writer=writer)
        >>> index = rb.extend({"step": torch.arange(100_000)})
        >>> bool(rb["step"].double().mean() > 30_000)  # old rows are present as well as new ones
        True
    """

    single_rows = True

    def __init__(self, *, generator: torch.Generator | None = None) -> None:
        self._generator = _checked(generator)
        self._offered = self._before = 0

    def __repr__(self) -> str:
        """Show the number of rows offered so far."""
        return f"ReservoirWriter(offered={self._offered})"

    @property
    def offered(self) -> int:
        """Rows offered so far, kept or not."""
        return self._offered

    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Picks:  # noqa: ARG002
        """Choose slots for the rows that are kept; of equal slots the last row wins."""
        # until the ring is full every row is kept; a checkpoint may have been loaded into a larger ring
        first, capacity = (self._offered if ring.rows == ring.capacity else ring.rows), ring.capacity
        self._before, self._offered = self._offered, first + rows
        slots = np.arange(first, first + rows)
        late = min(max(capacity - first, 0), rows)  # the buffer is full from this row on
        if late < rows:
            draws = torch.rand(rows - late, dtype=torch.float64, generator=self._generator, device="cpu").numpy()
            slots[late:] = draws * (slots[late:] + 1)  # the integer part is uniform over [0, t)
        kept = np.flatnonzero(slots < capacity)
        # in reverse order, the first of equal slots is the last row
        taken, behind = np.unique(slots[kept[::-1]], return_index=True)
        winners = kept[::-1][behind]
        order = winners.argsort()  # generations are numbers in the order of writing
        taken, winners = taken[order], winners[order]
        positions = np.full(rows, -1)
        positions[winners] = taken
        return Picks(torch.from_numpy(taken), torch.from_numpy(winners), torch.from_numpy(positions))

    def take_back(self) -> None:
        """Count as before the last `place`."""
        self._offered = self._before

    def begin(self, rows: int) -> None:
        """Count the rows present as all rows offered so far."""
        self._offered = rows

    def clear(self) -> None:
        """Count from 0 again."""
        self._offered = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the state of the generator where there is one."""
        state = None if self._generator is None else self._generator.get_state()
        return {"offered": self._offered, "generator": state}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if a state is damaged.

        Raises:
            CheckpointError: naming what is wrong.
        """
        offered, saved = int(state["offered"]), state["generator"]
        if offered < 0:
            msg = f"the writer's state is damaged: offered={offered}"
            raise CheckpointError(msg)
        if saved is not None:
            try:
                torch.Generator().set_state(saved)
            except (RuntimeError, TypeError) as error:
                msg = f"the writer's state is damaged: its generator cannot be restored ({error})"
                raise CheckpointError(msg) from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a writer without a generator gets one if the state has one.

        Raises:
            CheckpointError: if the state is damaged.
        """
        self.check_state(state)
        if state["generator"] is not None:
            self._generator = torch.Generator() if self._generator is None else self._generator
            self._generator.set_state(state["generator"])
        self._offered = int(state["offered"])


def _checked(generator: Any) -> torch.Generator | None:
    if generator is not None and not isinstance(generator, torch.Generator):
        msg = f"generator must be a torch.Generator or None, got {type(generator).__name__}"
        raise KindError(msg)
    if generator is not None and generator.device.type != "cpu":
        msg = f"the generator of a ReservoirWriter must be on the CPU, got one on {generator.device}"
        raise OptionError(msg)
    return generator
