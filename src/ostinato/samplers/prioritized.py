"""Prioritized sampling (Schaul et al. 2016, proportional variant): rows drawn in proportion to their priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.records import Draw, Run
from ostinato.errors import CheckpointError, OptionError, PriorityError, UsageError
from ostinato.samplers.base import PrioritySampler, check_replacement, require, require_options
from ostinato.samplers.priorities import (
    MAX_VALUE,
    WEIGHT_DTYPES,
    PriorityColumn,
    PriorityTree,
    check_capacity,
    check_exponent,
    check_number,
    check_reduction,
    fits,
    is_column,
    largest_valid,
    most_slots,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.eligible import EligibleRows
    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.records import Placement, View
    from ostinato.core.ring import Ring
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers.standalone import BareStorage

_OPTIONS = ("reduction", "max_priority_within_buffer", "stratified")
_NO_GENERATIONS = (0, 0, 0, 0, 0, 0)
"""What the native update gets as the state of the ring where no generations are compared."""


class PrioritizedSampler(PrioritySampler):
    """Draws rows in proportion to their priority, with replacement (Schaul et al. 2016, section 3.3).

    Row `i` with priority `p_i` has the value `v_i = (p_i + eps) ** alpha` and is drawn with probability
    `P(i) = v_i / sum_j v_j` (eq. 1); a row with `p_i = 0` and `eps = 0` is never drawn. The importance weight of a draw
    is `(N * P(i)) ** -beta` divided by the largest one of the buffer (section 3.4), which is `(v_i / v_min) ** -beta`
    with `v_min` the smallest value above zero.

    New rows get the default priority, unless their data contains one. It is the largest priority given to any row since
    the buffer was made or emptied (with `max_priority_within_buffer` the largest among the rows present just
    before the write), exactly, and 1.0 while none above 0 has been given. Priorities must be finite and at least 0. Of
    equal slots in one call the last one wins.

    Priorities are stored as they were given, so that `alpha` may change without loss. A row that may not be drawn
    keeps its priority, and has the value 0. `alpha` and `beta` may be set at any time, as a schedule does: a new
    `beta` applies to the next draw, a new `alpha` costs one pass over the rows present. Memory: 8 bytes per slot,
    and those of the tree. Cost of a draw or update of `B` rows among `N`: O(B log N).

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

    row_values = ("priorities", "values")

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
        self._device = None if device is None else torch.device(device)
        self.max_capacity = check_capacity(max_capacity)
        self._alpha = check_exponent("alpha", alpha)
        self._eps = check_number("eps", eps)
        self.reduction = check_reduction(reduction)
        self._beta = check_exponent("beta", beta)
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        if not getattr(dtype, "is_floating_point", False):
            msg = f"dtype must be a floating dtype (of the weights), got {dtype!r}"
            raise OptionError(msg)
        self.dtype = dtype
        self.stratified = bool(stratified)
        self.column = self._empty_column()
        """Priorities and values of the rows."""

    def __repr__(self) -> str:
        """Show options and rows."""
        return (
            f"PrioritizedSampler(max_capacity={self.max_capacity}, alpha={self.alpha:g}, beta={self._beta:g}, "
            f"eps={self.eps:g}, reduction={self.reduction!r}, stratified={self.stratified}, rows={self.rows})"
        )

    def _empty_column(self) -> PriorityColumn:
        """Return a column without rows, and without anything shared."""
        within = self.max_priority_within_buffer
        return PriorityColumn(self.max_capacity, self._alpha, self._eps, within=within)

    def share(self, ring: Ring | SharedRing) -> None:
        """Keep priorities, values and counts in the memory of a ring that processes share, under its lock.

        Those that the sampler has of a private buffer move there.
        """
        if ring.priorities is not None and self.column.ring is not ring:
            self.column = self.column.shared(ring, self._alpha)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is shared: a buffer that arrives in another process shares it again."""
        return vars(self) if self.column.ring is None else {**vars(self), "column": self._empty_column()}

    # -- options and counts -------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """Exponent of priorities; a change recomputes all values before the next draw or update."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        if self.column.ring is not None:
            msg = (
                f"alpha of a shared buffer is that of all its processes, and stays {self._alpha:g}, got {value!r}: "
                "make the buffer with the alpha that it is to have"
            )
            raise OptionError(msg)
        self._alpha = check_exponent("alpha", value)

    @property
    def beta(self) -> float:
        """Exponent of weights; each process of a shared buffer has its own."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = check_exponent("beta", value)

    @property
    def eps(self) -> float:
        """Number added to every priority."""
        return self._eps

    @property
    def max_size(self) -> int:
        """Most rows that can be written: `max_capacity`, by TorchRL's name."""
        return self.max_capacity

    @property
    def device(self) -> torch.device:
        """Device of the priorities: that of the storage, once the sampler has seen it."""
        if self.column.slots:
            return self.column.tree.device
        return torch.device("cpu") if self._device is None else self._device

    def check_device(self, device: torch.device) -> None:
        """Raise if the sampler was made for another device.

        Raises:
            OptionError: naming both devices.
        """
        wanted = self._device
        if wanted is not None and (wanted.type != device.type or wanted.index not in {None, device.index}):
            msg = (
                f"the priorities of a buffer are on the device of its storage, {device}, and the sampler was made with "
                f"device={str(wanted)!r}: leave device out, or make the storage there"
            )
            raise OptionError(msg)

    @property
    def rows(self) -> int:
        """Rows with a priority: the slots `[0, rows)`."""
        return self.column.rows

    @property
    def priorities(self) -> Tensor:
        """Priorities of the rows present, as they were given: float64 `[rows]`, a copy."""
        return self.column.contents()[0].clone()

    @property
    def nbytes(self) -> int:
        """Bytes of priorities, masks and tree."""
        return self.column.nbytes

    def priorities_at(self, slots: Tensor, view: View) -> Tensor:
        """Return the priorities of rows, as they were given, float64 `[n]`. Copy."""
        self._tree_for(view)
        return self.column.raw[slots]

    @property
    def default_priority(self) -> float:
        """Priority of the next new row: the largest one, or 1 if there is none above 0."""
        return float(self.column.find_largest()) or 1.0

    # -- writing ------------------------------------------------------------------------------------------------------

    def check(self, priorities: Tensor) -> None:
        """Check priorities on the CPU; those on other devices are checked by `raise_deferred`.

        Raises:
            PriorityError: if some are negative, not finite, or so large that their values would not be finite; names
                their positions.
        """
        if priorities.is_cpu and priorities.numel():
            largest_valid(priorities, self._eps, self._alpha)

    def begin(self, view: View) -> None:
        """Give the rows present the default priority, except those of a loaded state."""
        self._tree_for(view)
        if view.rows and (self.column.hidden is not None or self._starts(view) is not None):
            self._limit(torch.arange(view.rows, device=view.device), view)

    def record_rows(self, placement: Placement, priorities: Tensor | None, view: View) -> None:
        """Set the first priorities of rows just written. Cost: O(rows written)."""
        column = self.column
        if priorities is None:
            default, known = column.default(view.device), column.rows
            self._tree_for(view)  # gives rows of new slots the default priority
            if not (isinstance(placement, Run) and known <= placement.start <= view.rows - placement.rows):
                column.fill(placement, default)  # the one before the write
        else:
            self.set_priorities(placement.slots_written(view.device), placement.of_rows_written(priorities), view)
        starts = None if view.episodes is None else self._starts(view)
        if starts is None and (priorities is None or column.hidden is None):
            return
        slots = placement.slots_written(view.device)  # which may have replaced rows that could not be drawn
        if starts is not None and view.episodes is not None:
            slots = torch.cat((slots, self._completed(slots, starts, view.episodes)))
        self._limit(slots, view)

    def set_priorities(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Set priorities; None gives the default priority. Of equal slots the last one wins. Cost: O(n log rows).

        Raises:
            PriorityError: on the CPU, for invalid priorities; nothing is changed. On other devices they have no effect,
                and `raise_deferred` raises.
            SlotError: on the CPU, if a slot is beyond the buffer; nothing is changed.
        """
        given = priorities is not None
        if priorities is None:
            priorities = torch.empty_like(slots, dtype=torch.float64).fill_(self.column.default(view.device))
        self._tree_for(view)
        if slots.numel() == 0:
            return
        if not slots.is_cpu:
            self.column.set_on_device(slots, priorities, keep, view.rows)
            return
        high = largest_valid(priorities, self._eps, self._alpha)
        self.column.set(slots, priorities, high if given else 0.0)

    def update(self, slots: Tensor, priorities: Tensor, generations: Tensor | None, view: View) -> int | Tensor:
        """Set the priorities of rows, except those replaced since they were drawn; see `PrioritySampler.update`.

        With the native tree one call compares generations, checks priorities, and writes priorities and values.
        Cost: O(n log rows).
        """
        tree, column = self._tree_for(view).native, self.column
        if tree is None or not slots.is_cpu:
            return super().update(slots, priorities, generations, view)
        try:
            stale, given, before, after = tree.update(
                slots.data_ptr(),
                priorities.data_ptr(),
                priorities.dtype is torch.float32,
                slots.shape[0],
                0 if generations is None else generations.data_ptr(),
                _NO_GENERATIONS if generations is None else view.ring.native_state(),
                column.raw.data_ptr(),
                0 if column.hidden is None else column.hidden.data_ptr(),
                view.rows,
                self._eps,
                self._alpha,
                column.within,
            )
        except (IndexError, ValueError):
            return super().update(slots, priorities, generations, view)  # raises, and names what is invalid
        column.track_largest(given, before, after)
        if column.ring is not None:
            column.ring.count_stale(stale)
            return 0
        return stale

    def native_state(self, rows: int, capacity: int) -> tuple[Any, ...] | None:
        """Return what native draws and updates need; None if the tree is not up to date, as after a change of `alpha`.

        Args:
            rows: rows of the buffer.
            capacity: its slots.

        Returns:
            Tree, exponent of weights, whether weights are float32, address of the priorities, address of the flags of
            hidden rows or 0, `eps`, `alpha`, and whether the largest priority of changed rows is needed.
        """
        column, tree = self.column, self.column.tree
        if tree.native is None or tree.capacity != capacity or column.ring is not None:
            return None
        if column.count != rows or column.alpha != self._alpha or not tree.native.total > 0:
            return None
        if self.dtype not in WEIGHT_DTYPES:
            return None
        single = self.dtype is torch.float32
        hidden = 0 if column.hidden is None else column.hidden.data_ptr()
        raw = column.raw.data_ptr()
        return tree.native, self._beta, single, raw, hidden, self._eps, self._alpha, column.within

    def raise_deferred(self) -> None:
        """Raise if an update on a device other than the CPU was invalid.

        Raises:
            PriorityError: once.
        """
        column = self.column
        invalid, column.invalid = column.invalid, None
        if invalid is not None and bool(invalid):
            msg = (
                f"some priorities or slots given on {column.raw.device} were out of range (negative, not finite, or "
                "beyond the rows) and had no effect: check them where they are made"
            )
            raise PriorityError(msg)

    def clear(self) -> None:
        """Discard all priorities, the largest included. What processes share is cleared with their ring."""
        if self.column.ring is None:
            self.column = self._empty_column()

    # -- without a buffer ----------------------------------------------------------------------------------------------

    def begin_standalone(self, view: View, storage: BareStorage) -> None:
        """Give rows of a bare storage without a priority the default priority, and drop those of rows it does not have.

        Raises:
            SlotError: if the storage has more than `max_capacity` rows.
            UsageError: if the priorities are shared with other processes.
        """
        if view.rows < self._extent()[0]:
            self.column.cut(view.rows)
        super().begin_standalone(view, storage)

    def _extent(self) -> tuple[int, int]:
        """Return the rows with a priority, and the slots of the buffer.

        Raises:
            UsageError: if the priorities are shared with other processes.
        """
        if self.column.ring is not None:
            msg = "the priorities of a shared buffer are those of the buffer: use its methods, not those of its sampler"
            raise UsageError(msg)
        return self.column.count, self.column.slots

    # -- rows that may not be drawn ------------------------------------------------------------------------------------

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Hide rows that are deleted, with the priority 0, until their slots are written."""
        self.set_priorities(slots, torch.zeros_like(slots, dtype=torch.float64), view)
        self.column.limit(slots, torch.ones_like(slots, dtype=torch.bool))

    def _starts(self, view: View) -> EligibleRows | None:
        """Return the rows that may be drawn; None stands for all of them."""
        return view.starts

    def _completed(self, slots: Tensor, starts: EligibleRows, episodes: EpisodeTable) -> Tensor:
        """Return the older rows whose windows are complete since `slots` were written."""
        return episodes.shift(slots, 1 - starts.need)

    def _allowed(self, slots: Tensor, view: View) -> Tensor | None:
        """Return which rows the view allows to be drawn, bool `[n]`; None stands for all of them."""
        starts = self._starts(view)
        return None if starts is None else starts.allowed(slots)

    def _limit(self, slots: Tensor, view: View) -> None:
        """Show rows that the view allows to be drawn, with the values of their priorities, and hide the others."""
        allowed = self._allowed(slots, view)
        self._tree_for(view)
        hide = torch.zeros_like(slots, dtype=torch.bool) if allowed is None else ~allowed
        if view.rows < view.capacity:
            present = slots < view.rows
            slots, hide = slots[present], hide[present]
        self.column.limit(slots, hide)

    # -- drawing ------------------------------------------------------------------------------------------------------

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

    # -- the tree -----------------------------------------------------------------------------------------------------

    def _tree_for(self, view: View) -> PriorityTree:
        """Return the tree, up to date with the buffer's capacity, device and rows, and with `alpha`."""
        column = self.column
        tree = column.tree
        if column.slots != view.capacity or tree.device != view.device:
            self.check_device(view.device)
            tree = column.allocate(*column.contents(), view.capacity, view.device)
        if column.alpha != self._alpha:
            column.set_alpha(self._alpha)
        if column.count != view.rows and column.ring is None:
            self.check_rows(view.rows, tree.capacity)
            if view.rows < column.count:  # the sampler was moved here from a fuller buffer
                self.column = self._empty_column()
                return self._tree_for(view)
            run = Run(column.count, view.rows - column.count, view.capacity)
            column.fill(run, column.default(view.device))
            column.count = view.rows
        return tree

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return options, priorities (a view) and values: powers may differ in the last bit between batch sizes."""
        self.raise_deferred()
        column = self.column
        priorities, values = column.contents(shown=True)
        if column.ring is not None:
            priorities, values = (part[column.ring.saved_slots()] for part in (priorities, values))
        return {
            "alpha": self._alpha,
            "eps": self._eps,
            "values_alpha": column.alpha,
            "largest": float(column.find_largest()),
            "priorities": priorities,
            "values": values,
            "beta": self._beta,
            **{name: getattr(self, name) for name in _OPTIONS},
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        require_options(self, state, _OPTIONS)
        if self.column.ring is not None and (state["alpha"], state["eps"]) != (self._alpha, self._eps):
            msg = (
                f"the checkpoint has alpha={state['alpha']} and eps={state['eps']}, this shared buffer has "
                f"alpha={self._alpha} and eps={self._eps}, which all its processes keep: make it with those of the "
                "checkpoint"
            )
            raise CheckpointError(msg)
        try:
            check_exponent("beta", state["beta"])
        except OptionError as error:
            msg = f"the sampler's state is damaged: {error}"
            raise CheckpointError(msg) from None
        if rows > most_slots(self.max_capacity):
            msg = (
                f"the state holds {rows} priorities, the sampler keeps those of max_capacity={self.max_capacity} rows: "
                "make it with the max_size of the storage"
            )
            raise CheckpointError(msg)
        numbers = [state[name] for name in ("alpha", "eps", "values_alpha", "largest")]
        complete = all(is_column(state[name], rows) for name in ("priorities", "values"))
        complete = complete and all(isinstance(x, (int, float)) and 0.0 <= x < float("inf") for x in numbers)
        require(complete, f"it does not hold {rows} finite priorities of at least 0")
        alpha, eps, values_alpha, largest = map(float, numbers)
        top, value = (float(state[name].max()) if rows else 0.0 for name in ("priorities", "values"))
        good = fits(max(largest, top), eps, max(alpha, values_alpha)) and value <= MAX_VALUE
        require(good, f"(p + eps) ** alpha is above 2**960 with alpha={alpha:g}")

    def move_state(self, state: dict[str, Any], order: Tensor) -> dict[str, Any] | None:
        """Return the state after rows were moved: priorities and values move with them."""
        kept = super().move_state(state, order)
        if kept is not None and self.max_priority_within_buffer:
            kept["largest"] = float(kept["priorities"].max())
        return kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy; alpha, beta and eps become those of the state.

        Raises:
            CheckpointError: if the state is damaged, or of other options.
            UsageError: if the priorities are shared with other processes.
        """
        rows = state["priorities"].shape[0]
        self.check_state(state, rows)
        if self.column.ring is not None:
            msg = "the priorities of a shared buffer cannot be replaced through its sampler: load into the buffer"
            raise UsageError(msg)
        self._alpha, self._beta, self._eps = (float(state[name]) for name in ("alpha", "beta", "eps"))
        self.column = column = self._empty_column()
        column.alpha, column.largest = float(state["values_alpha"]), float(state["largest"])
        if rows:
            column.allocate(state["priorities"], state["values"], rows, state["priorities"].device)


def _no_rows(rows: int) -> str:
    return (
        f"none of the {rows} rows has a priority above 0 and eps is 0: give some row a priority, or make the sampler "
        "with eps > 0"
    )
