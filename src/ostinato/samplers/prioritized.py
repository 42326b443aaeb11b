"""Prioritized sampling (Schaul et al. 2016, proportional variant): rows drawn in proportion to their priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.records import Draw
from ostinato.errors import CheckpointError, OptionError, PriorityError
from ostinato.samplers.base import check_replacement
from ostinato.samplers.priorities import RowPriorities, check_exponent
from ostinato.samplers.state import require_options

if TYPE_CHECKING:
    from ostinato.core.records import View

_OPTIONS = ("reduction", "max_priority_within_buffer", "stratified")


class PrioritizedSampler(RowPriorities):
    """Draws rows in proportion to their priority, with replacement (Schaul et al. 2016, section 3.3).

    Row `i` with priority `p_i` has the value `v_i = (p_i + eps) ** alpha` and is drawn with probability
    `P(i) = v_i / sum_j v_j` (eq. 1); a row with `p_i = 0` and `eps = 0` is never drawn. The importance weight of a draw
    is `(N * P(i)) ** -beta` divided by the largest one of the buffer (section 3.4), which is `(v_i / v_min) ** -beta`
    with `v_min` the smallest value above zero.

    New rows get the default priority, unless their data contains one. It is the largest priority given to any row since
    the buffer was made or emptied (with `max_priority_within_buffer` the largest among the rows present just
    before the write), exactly, and 1.0 while none above 0 has been given. Priorities must be finite and at least 0. Of
    equal slots in one call the last one wins.

    `alpha` and `beta` may be set at any time, as a schedule does: a new `beta` applies to the next draw, a new `alpha`
    costs one pass over the rows present. Memory: 8 bytes per slot, and those of the tree. Cost of a draw
    or update of `B` rows among `N`: O(B log N).

    Args:
        max_capacity: most rows that can be written: a row in a slot from this one on raises `SlotError`. It may exceed
            the `max_size` of the storage.
        alpha: how much priorities matter, in [0, 2]: 0 is uniform, 1 in proportion, more exaggerates.
        beta: how much the weights correct for it, in [0, 2]: 0 not at all (all weights are 1), 1 fully, more
            overcorrects. Both may be set to numbers that rounding took up to 1e-6 below 0, which become 0.
        eps: added to every priority, at least 0.
        dtype: floating dtype of the weights.
        reduction: how the priorities of an item's steps become one: "max", "min", "mean" or "median" (the lower one of
            an even number).
        max_priority_within_buffer: take the default priority from the rows present, not from all priorities ever given.
        device: where priorities are kept: the device of the storage, another one raises; None follows the storage.
        replacement: must be True: there is no variant without replacement.
        stratified: draw one row from each of `batch_size` equal parts of the sum (Schaul et al. 2016, appendix B.2.1):
            less variance, the same expected counts; the batch is then ordered by slot.

    Raises:
        CapacityError: if `max_capacity` is not a positive integer.
        OptionError: for another option out of its range.
        KindError: for `replacement=False`.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(10, alpha=0.6, beta=0.4, eps=0.0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> index = rb.extend(torch.arange(5))
        >>> rb.update_priority(index, [0.0, 0.0, 0.0, 0.0, 2.0])
        >>> rb.sample()
        tensor([4, 4, 4, 4])
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,  # noqa: FBT001, FBT002
        device: torch.device | str | int | None = None,
        *,
        stratified: bool = False,
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        within = bool(max_priority_within_buffer)
        super().__init__(max_capacity, alpha, eps, reduction, within=within, device=device)
        self.beta = beta
        if not getattr(dtype, "is_floating_point", False):
            msg = f"dtype must be a floating dtype (of the weights), got {dtype!r}"
            raise OptionError(msg)
        self.dtype = dtype
        self.stratified = bool(stratified)

    @property
    def beta(self) -> float:
        """Exponent of weights; each process of a shared buffer has its own."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = check_exponent("beta", value)

    def __repr__(self) -> str:
        """Show options and rows."""
        return (
            f"PrioritizedSampler(max_capacity={self.max_capacity}, alpha={self.alpha:g}, beta={self._beta:g}, "
            f"eps={self.eps:g}, reduction={self.reduction!r}, stratified={self.stratified}, rows={self.rows})"
        )

    def _weight_options(self) -> tuple[float, bool | None]:
        known = self.dtype in {torch.float32, torch.float64}
        return self._beta, self.dtype is torch.float32 if known else None

    def mass(self, view: View) -> tuple[float, float, float] | None:
        """Return the sum of all values, the smallest above zero, and beta; None for stratified draws."""
        if self.stratified:
            return None
        tree = self._tree_for(view)
        return float(tree.total), float(tree.minimum), self._beta

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: ARG002
        """Raise what `draw` would raise.

        Raises:
            PriorityError: on the CPU, if no row has a priority above 0.
        """
        if self._tree_for(view).known_empty:
            raise PriorityError(_no_rows(view.rows))

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw `batch_size` rows, with their weights and generations.

        Raises:
            PriorityError: if no row has a priority above 0; the generator is not used.
        """
        tree = self._tree_for(view)
        if tree.known_empty:
            raise PriorityError(_no_rows(view.rows))
        uniforms = torch.rand(batch_size, dtype=torch.float64, generator=generator, device=view.device)
        if self.stratified:
            parts = torch.arange(batch_size, dtype=torch.float64, device=view.device)
            uniforms.add_(parts).div_(batch_size)
        slots, weights, generations = tree.sample(uniforms, self._beta, self.dtype, view.ring)
        return Draw(slots, weights, None, generations)

    def state_dict(self) -> dict[str, Any]:
        """Return options, and priorities and values of the rows present (the priorities are a view)."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {**super().state_dict(), "beta": self._beta, **options}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        require_options(self, state, _OPTIONS)
        try:
            check_exponent("beta", state["beta"])
        except OptionError as error:
            msg = f"the sampler's state is damaged: {error}"
            raise CheckpointError(msg) from None
        super().check_state(state, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy; alpha, beta and eps become those of the state.

        Raises:
            CheckpointError: if the state is damaged, or of other options.
            UsageError: if the priorities are shared with other processes.
        """
        self.check_state(state, state["priorities"].shape[0])
        super().load_state_dict(state)
        self._beta = float(state["beta"])


def _no_rows(rows: int) -> str:
    return (
        f"none of the {rows} rows has a priority above 0 and eps is 0: give some row a priority, or make the sampler "
        "with eps > 0"
    )
