"""Prioritized sampling (Schaul et al. 2016, proportional variant): rows drawn in proportion to their priority."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.records import Draw, Run
from ostinato.errors import CapacityError, CheckpointError, KindError, OptionError, PriorityError
from ostinato.samplers.base import PrioritySampler
from ostinato.samplers.priorities import Ledger
from ostinato.samplers.priority_tree import REDUCTIONS, check_number, check_priorities, weigh

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable, Starts
    from ostinato.core.records import Placement, View
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers.priority_tree import PriorityTree

__all__ = ["PrioritizedSampler"]

_MOST_CAPACITY = 2**36
_WEIGHTS = frozenset({torch.float32, torch.float64})
"""Dtypes of weights that the compiled part writes."""
_OPTIONS = ("reduction", "max_priority_within_buffer", "stratified")


class PrioritizedSampler(PrioritySampler):
    """Draws rows in proportion to their priority, with replacement (Schaul et al. 2016, section 3.3).

    Row `i` with priority `p_i` has the value `v_i = (p_i + eps) ** alpha` and is drawn with probability
    `P(i) = v_i / sum_j v_j` (eq. 1); a row with `p_i = 0` and `eps = 0` is never drawn. The importance weight of a draw
    is `(N * P(i)) ** -beta` divided by the largest one of the buffer (section 3.4), which is `(v_i / v_min) ** -beta`
    with `v_min` the smallest value above zero.

    New rows get the default priority, unless their data brings one. It is the largest priority given to any row since
    the buffer was made or emptied (with `max_priority_within_buffer` the largest among the rows present just
    before the write), exactly, and 1.0 while none above 0 has been given. Priorities must be finite and at least 0. Of
    equal slots in one call the last one wins.

    `alpha` and `beta` may be set at any time, as a schedule does: a new `beta` takes part in the next draw, a new
    `alpha` costs one pass over the rows there. Memory: 8 bytes per slot, and those of the tree. Cost of a draw
    or update of `B` rows among `N`: O(B log N).

    Args:
        max_capacity: most rows that the storage may have room for.
        alpha: how much priorities matter, at least 0: 0 is uniform, 1 in proportion.
        beta: how much the weights correct for it, at least 0: 0 not at all (all weights are 1), 1 fully.
        eps: added to every priority, at least 0.
        dtype: floating dtype of the weights.
        reduction: how the priorities of an item's steps become one: "max", "min", "mean" or "median" (the lower one of
            an even number).
        max_priority_within_buffer: take the default priority from the rows present, not from all that there ever were.
        stratified: draw one row from each of `batch_size` equal parts of the sum (Schaul et al. 2016, appendix B.2.1):
            less variance, the same expected counts; the batch then is ordered by slot.

    Raises:
        CapacityError: if `max_capacity` is no positive integer.
        OptionError: for another option out of its range.

    Example:
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
        *,
        stratified: bool = False,
    ) -> None:
        self.max_capacity = _capacity(max_capacity)
        self.beta = beta
        within = bool(max_priority_within_buffer)
        self._ledger = Ledger(check_number("alpha", alpha), check_number("eps", eps), within=within)
        if not getattr(dtype, "is_floating_point", False):
            msg = f"dtype must be a floating dtype (of the weights), got {dtype!r}"
            raise OptionError(msg)
        if reduction not in REDUCTIONS:
            msg = f"reduction must be one of {sorted(REDUCTIONS)}, got {reduction!r}"
            raise OptionError(msg)
        self.dtype = dtype
        self.reduction = reduction
        self.max_priority_within_buffer = within
        self.stratified = bool(stratified)
        self._held: Tensor | None = None  # the slots that `hide` was called for

    @property
    def alpha(self) -> float:
        """Exponent of priorities; a change re-derives all values before the next draw or update."""
        return self._ledger.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        if self._ledger.ring is not None:
            msg = (
                f"alpha of a shared buffer is that of all its processes, and stays {self.alpha:g}, got {value!r}: "
                "make the buffer with the alpha that it is to have"
            )
            raise OptionError(msg)
        self._ledger.alpha = check_number("alpha", value)

    def share(self, ring: SharedRing) -> None:
        """Keep priorities where other processes see them, from now on; the buffer holds the lock of the ring."""
        self._ledger.share(ring)

    @property
    def beta(self) -> float:
        """Exponent of weights; of a shared buffer each process has its own."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = check_number("beta", value)

    @property
    def eps(self) -> float:
        """Number added to every priority."""
        return self._ledger.eps

    @property
    def priorities(self) -> Tensor:
        """Priorities of the rows present, as they were given: float64 `[rows]`, a copy."""
        return self._ledger.content()[0].clone()

    @property
    def default_priority(self) -> float:
        """Priority that the next new row gets."""
        return self._ledger.default

    @property
    def nbytes(self) -> int:
        """Bytes held for priorities and the tree."""
        return self._ledger.nbytes

    def __repr__(self) -> str:
        """Options and rows."""
        return (
            f"PrioritizedSampler(max_capacity={self.max_capacity}, alpha={self.alpha:g}, beta={self._beta:g}, "
            f"eps={self.eps:g}, reduction={self.reduction!r}, stratified={self.stratified}, rows={self._ledger.rows})"
        )

    def mass(self, view: View) -> tuple[float, float, float] | None:
        """Return the sum of all values, the smallest above zero, and beta; None for stratified draws."""
        if self.stratified:
            return None
        tree = self._ledger.tree(view)
        return float(tree.total), float(tree.minimum), self._beta

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: ARG002
        """Raise what `draw` would raise.

        Raises:
            PriorityError: on the CPU, if no row has a priority above 0.
        """
        self._check_mass(self._ledger.tree(view), view)

    def _check_mass(self, tree: PriorityTree, view: View) -> None:
        total = tree.total
        if isinstance(total, float) and total <= 0:  # elsewhere to ask would be a host sync
            raise PriorityError(_no_mass(view.rows))

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw `batch_size` rows with their weights and stamps.

        Raises:
            PriorityError: if no row has a priority above 0.
        """
        tree = self._ledger.tree(view)
        self._check_mass(tree, view)  # before the generator is asked
        uniforms = torch.rand(batch_size, dtype=torch.float64, generator=generator, device=view.device)
        if self.stratified:
            places = torch.arange(batch_size, dtype=torch.float64, device=view.device)
            uniforms.add_(places).div_(batch_size)
        compiled = tree.compiled if self.dtype in _WEIGHTS else None
        try:
            if compiled is not None:
                slots, weights, stamps = compiled.sample(uniforms, self._beta, self.dtype, view.ring.native_state())
                return Draw(slots, weights, None, stamps)
            slots, values = tree.draw(uniforms)
        except (OptionError, ValueError) as error:  # no mass: the only thing that can be wrong with these numbers
            raise PriorityError(_no_mass(view.rows)) from error
        weights = weigh(values, tree.minimum, self._beta).to(self.dtype)
        return Draw(slots, weights, None, view.ring.generations_of_rows(slots))

    def reduce(self, items: Tensor) -> Tensor:
        """Make one priority of the values of each item, float64 `[n]` of `[n, *shape]`."""
        flat = items.reshape(items.shape[0], -1).to(torch.float64)
        if flat.shape[1] == 0:
            msg = f"priorities of {items.shape[0]} items have the shape {list(items.shape)}: no number per item"
            raise PriorityError(msg)
        return flat[:, 0] if flat.shape[1] == 1 else REDUCTIONS[self.reduction](flat)

    def check(self, priorities: Tensor) -> None:
        """Refuse priorities that are negative or not finite, or so large that their values would not be finite.

        Raises:
            PriorityError: naming their positions.
        """
        self._ledger.check(priorities)

    def begin(self, view: View) -> None:
        """Give the rows present the default priority, but those that a state brought priorities for."""
        self._ledger.tree(view)
        if view.rows and (self._ledger.hides or self._starts(view) is not None):
            self._limit(torch.arange(view.rows, device=view.device), view)

    def receive(self, placement: Placement, priorities: Tensor | None, view: View) -> None:
        """Give rows just written their first priority. Cost: O(rows written)."""
        if isinstance(placement, Run) and priorities is None:
            self._ledger.receive(placement, view)
        elif isinstance(placement, Run):
            kept = None if priorities is None else priorities[placement.skip :]
            self._ledger.assign(placement.slots(view.device), kept, view)
        else:
            kept = None if priorities is None else priorities[placement.rows.to(priorities.device)]
            self._ledger.assign(placement.slots.to(view.device), kept, view)
        if view.episodes is not None and isinstance(placement, Run):
            starts, slots = self._starts(view), placement.slots(view.device)
            if starts is not None:
                self._limit(slots, view)
                self._limit(self._reached(slots, starts, view.episodes), view)
            elif self._ledger.hides:  # the last rows that could not be drawn were replaced by these
                self._limit(slots, view)

    def _starts(self, view: View) -> Starts | None:
        """Return the rows that may be drawn; None stands for all of them."""
        return view.starts

    def _reached(self, slots: Tensor, starts: Starts, episodes: EpisodeTable) -> Tensor:
        """Return older rows that may be drawn since these were written: those whose windows they complete."""
        return episodes.shift(slots, 1 - starts.need)

    def _allowed(self, slots: Tensor, view: View) -> Tensor | None:
        """Return which rows the view lets be drawn, bool `[n]`; None stands for all of them."""
        starts = self._starts(view)
        return None if starts is None else starts.allowed(slots)

    def _limit(self, slots: Tensor, view: View) -> None:
        """Let rows be drawn, or not, as the view says now; rows that `hide` was called for stay hidden."""
        allowed = self._allowed(slots, view)
        if self._held is not None:
            free = ~torch.isin(slots, self._held)
            allowed = free if allowed is None else allowed & free
        if allowed is None:
            self._ledger.show(slots, view)
            return
        self._ledger.hide(slots[~allowed], view)
        self._ledger.show(slots[allowed], view)

    def assign(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Give rows priorities; None is the default priority. Cost: O(n log rows).

        Raises:
            PriorityError: for priorities that are negative or not finite; on other devices than the CPU they have no
                effect, and `settle` raises it.
            SlotError: if a slot is beyond the buffer; nothing is changed.
        """
        self._ledger.assign(slots, priorities, view, keep)

    def learn(self, slots: Tensor, priorities: Tensor, stamps: Tensor | None, view: View) -> int | Tensor:
        """Give rows the priorities learned for them, but those replaced since. Cost: O(n log rows).

        Raises:
            PriorityError: for priorities that are negative or not finite; see `assign`.
            SlotError: without stamps, if a slot is beyond the rows; nothing is changed.
        """
        stale = self._ledger.learn(slots, priorities, stamps, view)
        return super().learn(slots, priorities, stamps, view) if stale is None else stale

    def hide(self, slots: Tensor, view: View) -> None:
        """Keep rows from being drawn until `show`, whatever priorities they get meanwhile; these are kept.

        Args:
            slots: int64 `[n]` on the view's device, in `[0, capacity)`; they may hold no row yet.
            view: the buffer.

        Raises:
            SlotError: on the CPU, if a slot is beyond the buffer; nothing is changed.
        """
        self._ledger.hide(slots, view)
        more = slots if self._held is None else slots[~torch.isin(slots, self._held)]
        self._held = more.clone() if self._held is None else torch.cat((self._held, more))

    def show(self, slots: Tensor, view: View) -> None:
        """Let rows be drawn again, by the priority that they have; see `hide`.

        Rows that the buffer does not let be drawn (masked ones, windows that are not complete) stay hidden.

        Raises:
            SlotError: on the CPU, if a slot is beyond the buffer; nothing is changed.
        """
        self._ledger.tree(view).get(slots)  # checks the slots
        if self._held is not None:
            self._held = self._held[~torch.isin(self._held, slots)]
            self._limit(slots, view)

    def settle(self) -> None:
        """Raise if priorities on a device were bad; they had no effect.

        Raises:
            PriorityError: once.
        """
        self._ledger.settle()

    def clear(self) -> None:
        """Forget all priorities, the largest included."""
        self._ledger.clear()
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """Return options, and priorities and values of the rows present (the priorities are a view)."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {**self._ledger.state_dict(), "beta": self._beta, **options}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Refuse a state of other options, damaged, or of another number of rows.

        Raises:
            CheckpointError: naming what differs.
        """
        for name in _OPTIONS:
            if state[name] != getattr(self, name):
                msg = (
                    f"the state is that of a PrioritizedSampler with {name}={state[name]!r}, this one has "
                    f"{name}={getattr(self, name)!r}: make it with the same options"
                )
                raise CheckpointError(msg)
        try:
            check_number("beta", state["beta"])
        except OptionError as error:
            msg = f"the sampler's state is damaged: {error}"
            raise CheckpointError(msg) from None
        check_priorities(state, rows)

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:  # noqa: ARG002
        """Return a state for rows that have moved: priorities and values move with them."""
        moved = {name: torch.cat((state[name][seam:], state[name][:seam])) for name in ("priorities", "values")}
        return {**state, **moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; alpha, beta and eps become those of the state.

        Raises:
            CheckpointError: if the state is damaged, or that of other options.
        """
        self.check_state(state, state["priorities"].shape[0])
        self._beta = float(state["beta"])
        self._ledger.load_state_dict(state)
        self._held = None


def _no_mass(rows: int) -> str:
    return (
        f"none of the {rows} rows has a priority above 0 and eps is 0: give some row a priority, or make the sampler "
        "with eps > 0"
    )


def _capacity(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        msg = f"max_capacity must be an integer (rows), got {value!r} of type {type(value).__name__}"
        raise KindError(msg) from None
    if isinstance(value, bool) or not 1 <= number <= _MOST_CAPACITY:
        msg = (
            f"max_capacity must be in [1, 2**36] (rows), got {number}: priorities take memory for every slot, so give "
            "the storage a max_size"
        )
        raise CapacityError(msg)
    return number
