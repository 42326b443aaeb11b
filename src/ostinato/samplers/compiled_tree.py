"""The priority tree of the compiled part, for the CPU, and what it can do in one call for a whole batch.

What lives here: tensors in, addresses out. What does not: the choice between this tree and the one in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import torch

from ostinato.core.draw import check_slots
from ostinato.samplers.values import check_values

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato._native import SumTree

__all__ = ["CompiledTree", "Ranks"]

_Stamps: TypeAlias = tuple[int, int, int, int, int, int]
"""What `Stamps.numbers` returns."""


class Ranks(NamedTuple):
    """What the rows of a tree have beside their leaf, and how a priority becomes one."""

    priorities: Tensor
    """float64 `[capacity]`, contiguous, on the CPU; written to."""
    hidden: Tensor | None
    """bool `[capacity]`: whose leaves stay zero; None is none."""
    rows: int
    """Slots from here on hold nothing."""
    eps: float
    alpha: float
    within: bool
    """Whether the largest priorities before and after are asked for."""


@final
class CompiledTree:
    """The compiled tree with tensors in place of addresses."""

    def __init__(self, tree: SumTree) -> None:
        self._tree = tree
        self._forms = (
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, dtype=torch.float32, device="cpu"),
        )  # of the last sample: to make tensors by

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return self._tree.nbytes

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return self._tree.total

    @property
    def minimum(self) -> float:
        """Smallest leaf above zero, infinity if there is none."""
        return self._tree.minimum

    @property
    def maximum(self) -> float:
        """Largest leaf; kept up from the first question on."""
        return self._tree.maximum

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write leaves; of equal slots the last one wins."""
        try:
            self._tree.set(slots.data_ptr(), values.data_ptr(), slots.shape[0])
        except (IndexError, ValueError):
            check_slots(slots, self._tree.capacity)
            check_values(values)
            raise

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to `count` leaves from `start` on, round the end."""
        self._tree.set_run(start, count, float(value))

    def get(self, slots: Tensor) -> Tensor:
        """Read leaves."""
        out = torch.empty(slots.shape[0], dtype=torch.float64, device="cpu")
        try:
            self._tree.get(slots.data_ptr(), slots.shape[0], out.data_ptr())
        except IndexError:
            check_slots(slots, self._tree.capacity)
            raise
        return out

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a leaf for each uniform number."""
        values = torch.empty_like(uniforms)
        slots = torch.empty_like(uniforms, dtype=torch.int64)
        self._tree.draw(uniforms.data_ptr(), uniforms.shape[0], slots.data_ptr(), values.data_ptr())
        return slots, values

    def sample(
        self, uniforms: Tensor, beta: float, dtype: torch.dtype, stamps: _Stamps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw slots, their weights `(value / smallest value) ** -beta` (float32 or 64) and their stamps."""
        n = uniforms.shape[0]
        form, weighed = self._forms
        if form.shape[0] != n or weighed.dtype is not dtype:
            form, weighed = self._forms = (
                torch.empty(n, dtype=torch.int64, device="cpu"),
                torch.empty(n, dtype=dtype, device="cpu"),
            )
        slots, weights, drawn = torch.empty_like(form), torch.empty_like(weighed), torch.empty_like(form)
        single = dtype is torch.float32
        at = slots.data_ptr(), weights.data_ptr(), single, drawn.data_ptr()
        self._tree.sample(uniforms.data_ptr(), n, beta, stamps, *at)
        return slots, weights, drawn

    def learn(
        self, slots: Tensor, priorities: Tensor, given: Tensor | None, stamps: _Stamps, ranks: Ranks
    ) -> tuple[int, float, float, float]:
        """Give rows priorities, float32 or 64 `[n]`, in order; those with another stamp than `given` are left alone.

        Without stamps, slots of -1 are left out. All tensors are contiguous and on the CPU.

        Returns:
            How many were left alone, the largest priority given, and, with `within`, the largest that these rows had
            before, and have now.

        Raises:
            IndexError: without stamps, for a slot beyond the rows; nothing is changed.
            ValueError: for priorities that are negative, not finite or too large; nothing is changed.
        """
        kept, hidden, rows, eps, alpha, within = ranks
        return self._tree.learn(
            slots.data_ptr(),
            priorities.data_ptr(),
            priorities.dtype is torch.float32,
            slots.shape[0],
            0 if given is None else given.data_ptr(),
            stamps,
            kept.data_ptr(),
            0 if hidden is None else hidden.data_ptr(),
            rows,
            eps,
            alpha,
            within,
        )

    def clear(self) -> None:
        """Make all leaves zero."""
        self._tree.clear()

    def leaves(self, rows: int) -> Tensor:
        """Copy the first `rows` leaves."""
        out = torch.empty(rows, dtype=torch.float64, device="cpu")
        self._tree.leaves(out.data_ptr(), rows)
        return out

    def load(self, leaves: Tensor) -> None:
        """Make the first leaves these, and all others zero."""
        self._tree.load(leaves.data_ptr(), leaves.shape[0])
