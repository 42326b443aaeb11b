"""Prioritized sampling (Schaul et al. 2016, proportional variant): rows drawn in proportion to their priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.core.records import Draw, Run
from ostinato.errors import CheckpointError, OptionError, PriorityError, UsageError
from ostinato.samplers.base import PrioritySampler, check_replacement, require, require_options
from ostinato.samplers.priorities import (
    MAX_VALUE,
    WEIGHT_DTYPES,
    NativeTree,
    PriorityTree,
    check_capacity,
    check_exponent,
    check_number,
    check_reduction,
    fits,
    is_column,
    last_of_equal,
    make_tree,
    on_device,
    raise_invalid,
    values_of,
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
_SMALL = 2**16
"""Trees up to this size have a leaf for every slot of the storage, whatever `max_capacity` is."""
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
        self._reset()

    def __repr__(self) -> str:
        """Show options and rows."""
        return (
            f"PrioritizedSampler(max_capacity={self.max_capacity}, alpha={self.alpha:g}, beta={self._beta:g}, "
            f"eps={self.eps:g}, reduction={self.reduction!r}, stratified={self.stratified}, rows={self.rows})"
        )

    def _reset(self) -> None:
        """Initialize the state: no rows, no priorities, no tree, nothing shared."""
        self._ring: SharedRing | None = None
        self._rows = self._slots = 0  # rows with a priority, and slots of the buffer that the tree was made for
        self._raw = torch.empty(0, dtype=torch.float64, device="cpu")
        self._tree: PriorityTree | None = None
        self._tree_alpha = self._alpha
        self._mask: Tensor | None = None  # bool for each slot, True where hidden; None until a row is hidden
        self._largest: float | Tensor = 0.0
        self._largest_outdated = False
        self._invalid: Tensor | None = None  # bool on a device: whether an update there was invalid

    def share(self, ring: Ring | SharedRing) -> None:
        """Keep priorities, values and counts in the memory of a ring that processes share, under its lock.

        Those that the sampler has of a private buffer move there.
        """
        if ring.priorities is None or self._ring is ring:
            return
        (priorities, values), largest = self._contents(), float(self._find_largest())
        if self._tree_alpha != self._alpha:
            values = values_of(priorities, self._eps, self._alpha)
        self._reset()
        self._ring, self._raw = ring, ring.priorities  # type: ignore[assignment]
        self._tree = NativeTree(ring.tree)  # type: ignore[union-attr]
        self._slots = self._tree.capacity
        if priorities.shape[0]:
            self._raw[: priorities.shape[0]] = priorities
            self._tree.set(torch.arange(priorities.shape[0], device="cpu"), values)
            ring.max_priority = largest  # type: ignore[union-attr]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is shared: a buffer that arrives in another process shares it again."""
        if self._ring is None:
            return self.__dict__
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._reset()
        return other.__dict__

    # -- options and counts -------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """Exponent of priorities; a change recomputes all values before the next draw or update."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        if self._ring is not None:
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
        if self._tree is not None:
            return self._tree.device
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
        return self._rows if self._ring is None else self._ring.rows

    @property
    def priorities(self) -> Tensor:
        """Priorities of the rows present, as they were given: float64 `[rows]`, a copy."""
        return self._contents()[0].clone()

    @property
    def nbytes(self) -> int:
        """Bytes of priorities, masks and tree."""
        return sum(part.nbytes for part in (self._raw, self._mask, self._tree) if part is not None)

    def priorities_at(self, slots: Tensor, view: View) -> Tensor:
        """Return the priorities of rows, as they were given, float64 `[n]`. Copy."""
        self._tree_for(view)
        return self._raw[slots]

    # -- the default priority: the largest one ever given, or of the rows present -------------------------------------

    @property
    def default_priority(self) -> float:
        """Priority of the next new row: the largest one, or 1 if there is none above 0."""
        return float(self._find_largest()) or 1.0

    def _default(self, view: View) -> float | Tensor:
        """Return the default priority, without a host sync: a 0-dim tensor on devices other than the CPU."""
        if view.device.type == "cpu":
            return self.default_priority
        value = on_device(self._find_largest(), view.device)
        return torch.where(value > 0, value, 1.0)

    def _find_largest(self) -> float | Tensor:
        if self._ring is not None:
            return self._ring.max_priority
        if self.max_priority_within_buffer and (self._largest_outdated or not self._raw.is_cpu):
            present = self._contents()[0]
            largest = present.amax() if present.numel() else 0.0
            self._largest = float(largest) if present.is_cpu else largest
            self._largest_outdated = False
        return self._largest

    def _largest_of(self, priorities: Tensor) -> float:
        """Return the largest of some priorities where the default priority depends on the rows present; else 0."""
        if not (self.max_priority_within_buffer and priorities.numel() and priorities.is_cpu):
            return 0.0
        return float(priorities.max())

    def track_largest(self, given: float, before: float, after: float | Tensor) -> None:
        """Track the largest priority.

        Args:
            given: largest priority given, 0 for none.
            before: largest priority that the rows changed had before; only used with `max_priority_within_buffer`.
            after: largest priority that these rows have now; as `before`.
        """
        if not self.max_priority_within_buffer:
            if given <= 0:  # nothing to compare: `_largest` may be on a device
                return
            if self._ring is None:
                self._largest = max(self._largest, given)
            else:
                self._ring.max_priority = max(self._ring.max_priority, given)
        elif isinstance(after, float):  # on devices it is computed when it is needed
            if after >= self._largest:
                self._largest, self._largest_outdated = after, False
            elif before >= self._largest:
                self._largest_outdated = True  # a row with the largest priority was changed

    # -- writing ------------------------------------------------------------------------------------------------------

    def check(self, priorities: Tensor) -> None:
        """Check priorities on the CPU; those on other devices are checked by `raise_deferred`.

        Raises:
            PriorityError: if some are negative, not finite, or so large that their values would not be finite; names
                their positions.
        """
        if priorities.is_cpu and priorities.numel():
            self._largest_valid(priorities)

    def _largest_valid(self, priorities: Tensor) -> float:
        """Return the largest of some priorities on the CPU, float64 `[n]`, `n >= 1`.

        Raises:
            PriorityError: see `check`.
        """
        values = priorities.numpy()
        low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        if not (low >= 0.0 and high < float("inf")):
            raise_invalid(priorities)
        self._check_size(high)
        return high

    def _check_size(self, priority: float) -> None:
        if not fits(priority, self._eps, self._alpha):
            msg = (
                f"priorities must keep (p + eps) ** alpha at most 2**960, got {priority:g} with "
                f"alpha={self._alpha:g}: scale them down"
            )
            raise PriorityError(msg)

    def begin(self, view: View) -> None:
        """Give the rows present the default priority, except those of a loaded state."""
        self._tree_for(view)
        if view.rows and (self._mask is not None or self._starts(view) is not None):
            self._limit(torch.arange(view.rows, device=view.device), view)

    def record_rows(self, placement: Placement, priorities: Tensor | None, view: View) -> None:
        """Set the first priorities of rows just written. Cost: O(rows written)."""
        if isinstance(placement, Run) and priorities is None:
            default, known, end = self._default(view), self.rows, placement.start + placement.rows
            tree = self._tree_for(view)  # which gives rows of new slots the default priority
            if not (known <= placement.start and known < end <= view.rows):
                self._fill(tree, placement, default)  # the one before the write
        else:
            given = None if priorities is None else placement.of_rows_written(priorities)
            self.set_priorities(placement.slots_written(view.device), given, view)
        starts = None if view.episodes is None else self._starts(view)
        if starts is None and self._mask is None:
            return
        slots = placement.slots_written(view.device)  # which may have replaced rows that could not be drawn
        self._limit(slots, view)
        if starts is not None and view.episodes is not None:
            self._limit(self._completed(slots, starts, view.episodes), view)

    def set_priorities(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Set priorities; None gives the default priority. Of equal slots the last one wins. Cost: O(n log rows).

        Raises:
            PriorityError: on the CPU, for invalid priorities; nothing is changed. On other devices they have no effect,
                and `raise_deferred` raises.
            SlotError: on the CPU, if a slot is beyond the buffer; nothing is changed.
        """
        given = priorities is not None
        if priorities is None:
            priorities = torch.empty_like(slots, dtype=torch.float64).fill_(self._default(view))
        tree = self._tree_for(view)
        if slots.numel() == 0:
            return
        if not slots.is_cpu:
            self._set_on_device(tree, slots, priorities, keep, view.rows)
            return
        high = self._largest_valid(priorities)
        before = self._largest_of(self._raw[slots]) if self.max_priority_within_buffer else 0.0
        tree.set(slots, self._masked(slots, values_of(priorities, self._eps, self._alpha)))  # checks the slots first
        # numpy writes in order: of equal slots the last one wins; -0.0 becomes 0.0
        self._raw.numpy()[slots.numpy()] = priorities.numpy() + 0.0
        after = self._largest_of(self._raw[slots]) if self.max_priority_within_buffer else 0.0
        self.track_largest(high if given else 0.0, before, after)

    def _set_on_device(self, tree: PriorityTree, slots: Tensor, given: Tensor, keep: Tensor | None, rows: int) -> None:
        """Set priorities without a host sync: invalid ones have no effect, and `raise_deferred` raises."""
        valid = (given >= 0) & ((given + self._eps).pow(self._alpha) <= MAX_VALUE)
        valid &= (slots >= 0) & (slots < rows)
        keep = torch.ones_like(valid) if keep is None else keep
        invalid = (keep & ~valid).any()
        self._invalid = invalid if self._invalid is None else self._invalid | invalid
        slots, keep = slots.clamp(0, max(rows - 1, 0)), keep & valid
        priorities = last_of_equal(slots, torch.where(keep, given, self._raw[slots]), keep)
        self._raw[slots] = priorities + 0.0
        tree.set(slots, self._masked(slots, values_of(priorities, self._eps, self._alpha)))
        if not self.max_priority_within_buffer:
            high = torch.where(keep, given, 0.0).amax()
            self._largest = torch.maximum(on_device(self._largest, high.device), high)

    def update(self, slots: Tensor, priorities: Tensor, generations: Tensor | None, view: View) -> int | Tensor:
        """Set the priorities of rows, except those replaced since they were drawn; see `PrioritySampler.update`.

        With the native tree one call compares generations, checks priorities, and writes priorities and values.
        Cost: O(n log rows).
        """
        tree = self._tree_for(view).native
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
                self._raw.data_ptr(),
                0 if self._mask is None else self._mask.data_ptr(),
                view.rows,
                self._eps,
                self._alpha,
                self.max_priority_within_buffer,
            )
        except (IndexError, ValueError):
            return super().update(slots, priorities, generations, view)  # raises, and names what is invalid
        self.track_largest(given, before, after)
        if self._ring is not None:
            self._ring.count_stale(stale)
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
        tree = self._tree
        if tree is None or tree.native is None or tree.capacity != capacity or self._ring is not None:
            return None
        if self._rows != rows or self._tree_alpha != self._alpha or not tree.native.total > 0:
            return None
        if self.dtype not in WEIGHT_DTYPES:
            return None
        single = self.dtype is torch.float32
        mask = 0 if self._mask is None else self._mask.data_ptr()
        within = self.max_priority_within_buffer
        return tree.native, self._beta, single, self._raw.data_ptr(), mask, self._eps, self._alpha, within

    def raise_deferred(self) -> None:
        """Raise if an update on a device other than the CPU was invalid.

        Raises:
            PriorityError: once.
        """
        invalid, self._invalid = self._invalid, None
        if invalid is not None and bool(invalid):
            msg = (
                f"some priorities or slots given on {self._raw.device} were out of range (negative, not finite, or "
                "beyond the rows) and had no effect: check them where they are made"
            )
            raise PriorityError(msg)

    def clear(self) -> None:
        """Discard all priorities, the largest included. What processes share is cleared with their ring."""
        if self._ring is None:
            self._reset()

    # -- without a buffer ----------------------------------------------------------------------------------------------

    def begin_standalone(self, view: View, storage: BareStorage) -> None:
        """Give rows of a bare storage without a priority the default priority, and drop those of rows it does not have.

        Raises:
            SlotError: if the storage has more than `max_capacity` rows.
            UsageError: if the priorities are shared with other processes.
        """
        self._require_own()
        if view.rows < self._rows:
            priorities, values = self._contents()
            self._allocate(priorities[: view.rows], values[: view.rows], view.rows, priorities.device)
            self._largest_outdated = True
        super().begin_standalone(view, storage)

    def _require_own(self) -> None:
        if self._ring is not None:
            msg = "the priorities of a shared buffer are those of the buffer: use its methods, not those of its sampler"
            raise UsageError(msg)

    def _set_by_index(self, index: Any, priority: Any, storage: BareStorage | None, *, least: int = 0) -> Tensor:
        self._require_own()
        return super()._set_by_index(index, priority, storage, least=least)

    # -- rows that may not be drawn ------------------------------------------------------------------------------------

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Hide rows that are deleted, with the priority 0, until their slots are written."""
        self.set_priorities(slots, torch.zeros_like(slots, dtype=torch.float64), view)
        self._hide(slots, view)

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
        if allowed is not None:
            self._hide(slots[~allowed], view)
            slots = slots[allowed]
        if self._mask is not None:
            slots = slots[self._mask[slots] & (slots < view.rows)]
            self._mask[slots] = False
            self._tree_for(view).set(slots, values_of(self._raw[slots], self._eps, self._alpha))

    def _hide(self, slots: Tensor, view: View) -> None:
        """Set the values of rows to 0, and mark the rows as hidden."""
        tree = self._tree_for(view)
        if self._mask is None:
            with torch.inference_mode(mode=False):
                self._mask = torch.zeros(tree.capacity, dtype=torch.bool, device=tree.device)
        tree.set(slots, torch.zeros_like(slots, dtype=torch.float64))  # checks the slots first
        self._mask[slots] = True

    def _masked(self, slots: Tensor, values: Tensor) -> Tensor:
        """Return values with 0 for hidden slots, in place."""
        return values if self._mask is None else values.masked_fill_(self._mask[slots], 0.0)

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
        tree = self._tree
        if tree is None or self._slots != view.capacity or tree.device != view.device:
            self.check_device(view.device)
            tree = self._allocate(*self._contents(), view.capacity, view.device)
        if self._tree_alpha != self._alpha:
            self._recompute(tree)
        if self._rows != view.rows and self._ring is None:
            self.check_rows(view.rows, tree.capacity)
            if view.rows < self._rows:  # the sampler was moved here from a fuller buffer
                self._reset()
                return self._tree_for(view)
            self._fill(tree, Run(self._rows, view.rows - self._rows, view.capacity), self._default(view))
            self._rows = view.rows
        return tree

    def _allocate(self, priorities: Tensor, values: Tensor, slots: int, device: torch.device) -> PriorityTree:
        """Allocate priorities, mask and tree for a buffer of so many slots, with copies of those of the first rows."""
        capacity = slots if slots <= max(2 * self.max_capacity, _SMALL) else self.max_capacity
        with torch.inference_mode(mode=False):  # updates come in any mode
            raw = torch.empty(capacity, dtype=torch.float64, device=device)
            if self._mask is not None:
                mask = self._mask[:capacity].to(device)
                self._mask = torch.nn.functional.pad(mask, (0, capacity - mask.shape[0]))
        native = backend.native
        if native is not None and raw.is_cpu:
            native.advise_huge_pages(raw.data_ptr(), raw.nbytes)  # random rows then miss the TLB less often
        self._rows = min(priorities.shape[0], capacity)
        raw.zero_()[: self._rows] = priorities[:capacity]
        self._raw, self._tree, self._slots = raw, make_tree(capacity, raw.device), slots
        self._tree.load(values[:capacity].to(device))
        return self._tree

    def _recompute(self, tree: PriorityTree) -> None:
        """Compute all values from the priorities, for another `alpha`."""
        rows = self.rows
        raw = self._raw[:rows]
        if raw.is_cpu and rows:
            self._check_size(float(raw.max()))
        values = values_of(raw, self._eps, self._alpha).clamp_(max=MAX_VALUE)
        tree.load(values if self._mask is None else values.masked_fill_(self._mask[:rows], 0.0))
        self._tree_alpha = self._alpha

    def _fill(self, tree: PriorityTree, run: Run, priority: float | Tensor) -> None:
        """Give a run of rows one priority above 0; `record_rows` hides those that may not be drawn."""
        # numpy keeps the GIL for runs as short as most are: another thread would wake up only to wait for the lock
        raw = self._raw.numpy() if self._raw.is_cpu else self._raw
        end, replaced = run.start + run.rows, 0.0
        for first, stop in ((run.start, min(end, run.capacity)), (0, end - run.capacity)):
            if first < stop:
                if self.max_priority_within_buffer:
                    replaced = max(replaced, self._largest_of(self._raw[first:stop]))
                raw[first:stop] = priority
        tree.set_run(run.start, run.rows, (priority + self._eps) ** self._alpha)
        self.track_largest(0.0, replaced, priority)

    # -- state --------------------------------------------------------------------------------------------------------

    def _contents(self) -> tuple[Tensor, Tensor]:
        """Return priorities (a view) and values (a copy) of the rows, float64 `[rows]` each."""
        raw = self._raw[: self.rows]
        return raw, raw if self._tree is None else self._tree.leaves(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Return options, priorities (a view) and values: powers may differ in the last bit between batch sizes."""
        self.raise_deferred()
        priorities, values = self._contents()
        if self._ring is not None:
            priorities, values = (part[self._ring.saved_slots()] for part in (priorities, values))
        if self._mask is not None and self.rows:  # the buffer hides rows again after a load: save all as shown
            shown = values_of(priorities, self._eps, self._tree_alpha)
            values = torch.where(self._mask[: self.rows].to(values.device), shown, values)
        return {
            "alpha": self._alpha,
            "eps": self._eps,
            "values_alpha": self._tree_alpha,
            "largest": float(self._find_largest()),
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
        if self._ring is not None and (state["alpha"], state["eps"]) != (self._alpha, self._eps):
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
        if rows > max(2 * self.max_capacity, _SMALL):
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
        if self._ring is not None:
            msg = "the priorities of a shared buffer cannot be replaced through its sampler: load into the buffer"
            raise UsageError(msg)
        self._alpha, self._beta, self._eps = (float(state[name]) for name in ("alpha", "beta", "eps"))
        self._reset()
        self._tree_alpha, self._largest = float(state["values_alpha"]), float(state["largest"])
        if rows:
            self._allocate(state["priorities"], state["values"], rows, state["priorities"].device)


def _no_rows(rows: int) -> str:
    return (
        f"none of the {rows} rows has a priority above 0 and eps is 0: give some row a priority, or make the sampler "
        "with eps > 0"
    )
