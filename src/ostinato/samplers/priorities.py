"""The ledger of a prioritized sampler: the priority of each row, its value in the tree, the largest one given.

What lives here: storing, the default priority, state. What does not: draws and weights, and which updates are stale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato._backend import backend
from ostinato.core.records import Run
from ostinato.errors import PriorityError, UsageError
from ostinato.samplers.priority_tree import (
    MOST_VALUE,
    CompiledTree,
    PriorityTree,
    Ranks,
    check_size,
    last_of_equal,
    on_device,
    raise_to,
    top_priority,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.records import View
    from ostinato.core.shared_ring import SharedRing

__all__ = ["Ledger"]


@final
class Ledger:
    """Priorities `p` of the rows `[0, rows)` and their values `(p + eps) ** alpha` in a tree.

    Priorities are kept as they were given, so that `alpha` may change without loss. Rows that nothing was said of get
    the default priority when the ledger next sees the buffer.
    """

    def __init__(self, alpha: float, eps: float, *, within: bool) -> None:
        self.alpha = alpha
        self.eps = eps
        self.within = within
        self.ring: SharedRing | None = None  # where it is shared with other processes
        self.rows = 0
        self._tree: PriorityTree | None = None
        self._raw = torch.empty(0, dtype=torch.float64, device="cpu")
        self._loaded: tuple[Tensor, Tensor] | None = None  # priorities and values that wait for a buffer
        self._hidden: Tensor | None = None  # bool for each slot, from the first one hidden on
        self._tree_alpha = alpha
        self._largest: float | Tensor = 0.0
        self._dirty = False  # whether the largest one within the buffer has to be looked up again
        self._bad: Tensor | None = None

    def share(self, ring: SharedRing) -> None:
        """Keep priorities, values and counts where other processes see them, from now on, under the ring's lock."""
        self.ring, self._raw = ring, ring.priorities
        self._tree = PriorityTree(ring.capacity, ring.device, CompiledTree(ring.tree))

    @property
    def rows(self) -> int:
        """Rows known; slots from here on hold nothing."""
        return self._rows if self.ring is None else self.ring.rows

    @rows.setter
    def rows(self, rows: int) -> None:
        self._rows = rows

    @property
    def _largest(self) -> float | Tensor:
        return self._own_largest if self.ring is None else self.ring.largest

    @_largest.setter
    def _largest(self, value: float | Tensor) -> None:
        if self.ring is None:
            self._own_largest = value
        else:
            self.ring.largest = float(value)

    def __getstate__(self) -> dict[str, Any]:
        """What is shared stays where it is: a buffer that arrives in another process shares it again."""
        if self.ring is None:
            return self.__dict__
        return Ledger(self.alpha, self.eps, within=self.within).__dict__

    # -- writing ------------------------------------------------------------------------------------------------------

    def check(self, priorities: Tensor) -> None:
        """Refuse priorities on the CPU that are negative, not finite, or too large; elsewhere see `settle`.

        Raises:
            PriorityError: naming their positions.
        """
        if priorities.is_cpu and priorities.numel():
            top_priority(priorities, self.eps, self.alpha)

    def receive(self, run: Run, view: View) -> None:
        """Give rows just written in ring order the default priority, as it stood before the write."""
        default, known, end = self._default(view), self.rows, run.start + run.rows
        tree = self.tree(view)
        if known <= run.start and known < end <= view.rows:
            return  # all of them are new, and got it as such
        gone = 0.0
        for part in (self._raw[run.start : end], self._raw[: max(0, end - run.capacity)]):
            gone = max(gone, self._largest_of(part))
            part.fill_(default)
        tree.set_run(run.start, run.rows, self._value(default))
        self._cover(tree, run)
        self._took(0.0, gone, default)

    def assign(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Give rows priorities; None is the default one. Of equal slots the last one wins.

        Raises:
            PriorityError: on the CPU, for bad priorities; nothing is changed.
            SlotError: on the CPU, if a slot is beyond the buffer; nothing is changed.
        """
        given = priorities is not None
        if priorities is None:
            priorities = torch.empty_like(slots, dtype=torch.float64).fill_(self._default(view))
        tree = self.tree(view)
        if slots.numel() == 0:
            return
        if not slots.is_cpu:
            self._assign_on_device(tree, slots, priorities, keep)
            return
        high = top_priority(priorities, self.eps, self.alpha)
        before = self._largest_of(self._raw, slots)
        tree.set(slots, self._seen(slots, raise_to(priorities, self.eps, self.alpha)))  # checks the slots first
        # numpy writes in order: of equal slots the last one wins; -0.0 becomes 0.0
        self._raw.numpy()[slots.numpy()] = priorities.numpy() + 0.0
        self._took(high if given else 0.0, before, self._largest_of(self._raw, slots))

    def learn(self, slots: Tensor, priorities: Tensor, stamps: Tensor | None, view: View) -> int | None:
        """Do all of an update in one compiled call: stamps, checks, values, tree.

        Args:
            slots: int64 `[n]`, contiguous; without stamps, -1 is left out.
            priorities: float32 or float64 `[n]`, contiguous.
            stamps: int64 `[n]`, contiguous: rows that have another one now are left alone.
            view: the buffer.

        Returns:
            How many rows were left alone for their stamp; None if there is no such call for this device, or something
            is wrong with the arguments: nothing was changed then, `assign` says what it is.
        """
        tree = self.tree(view)
        compiled = tree.compiled
        if compiled is None or not slots.is_cpu:
            return None
        ranks = Ranks(self._raw, self._hidden, self.rows, self.eps, self.alpha, self.within)
        try:
            stale, given, before, after = compiled.learn(slots, priorities, stamps, view.ring.native_state(), ranks)
        except (IndexError, ValueError):
            return None
        self._took(given, before, after)
        return stale

    def _assign_on_device(self, tree: PriorityTree, slots: Tensor, given: Tensor, keep: Tensor | None) -> None:
        """Do the same without waiting for the device: what is bad has no effect, and `settle` says so."""
        good = (given >= 0) & ((given + self.eps).pow(self.alpha) <= MOST_VALUE)
        good &= (slots >= 0) & (slots < self.rows)
        keep = torch.ones_like(good) if keep is None else keep
        bad = (keep & ~good).any()
        self._bad = bad if self._bad is None else self._bad | bad
        slots, keep = slots.clamp(0, max(self.rows - 1, 0)), keep & good
        values = last_of_equal(slots, torch.where(keep, given, self._raw[slots]), keep)
        self._raw[slots] = values + 0.0
        tree.set(slots, self._seen(slots, raise_to(values, self.eps, self.alpha)))
        if not self.within:
            high = torch.where(keep, given, 0.0).amax()
            self._largest = torch.maximum(on_device(self._largest, high.device), high)

    def settle(self) -> None:
        """Raise if priorities on a device were bad.

        Raises:
            PriorityError: once.
        """
        bad, self._bad = self._bad, None
        if bad is not None and bool(bad):
            msg = (
                f"some priorities or slots given on {self._raw.device} were out of range (negative, not finite, or "
                "beyond the rows) and had no effect: check them where they are made"
            )
            raise PriorityError(msg)

    def _value(self, priority: float | Tensor) -> float | Tensor:
        """Return the value of one priority above 0: a float of a float."""
        if isinstance(priority, float):
            value: float = (priority + self.eps) ** self.alpha
            return value
        return raise_to(priority, self.eps, self.alpha)

    # -- the largest priority: ever given, or among the rows present (`within`) ----------------------------------------

    @property
    def default(self) -> float:
        """Priority that the next new row gets: the largest one, or 1 if there is none above 0."""
        largest = float(self._found_largest())
        return largest if largest > 0 else 1.0

    def _default(self, view: View) -> float | Tensor:
        """Return the default priority without waiting for a device."""
        if view.device.type == "cpu":
            return self.default
        value = on_device(self._found_largest(), view.device)
        return torch.where(value > 0, value, 1.0)

    def _found_largest(self) -> float | Tensor:
        if self.within and (self._dirty or not self._raw.is_cpu):
            present = self.content()[0]
            largest = present.amax() if present.numel() else 0.0
            self._largest = float(largest) if present.is_cpu else largest
            self._dirty = False
        return self._largest

    def _largest_of(self, priorities: Tensor, slots: Tensor | None = None) -> float:
        """Return the largest of some priorities kept on the CPU, if it is of interest; else 0."""
        if not (self.within and priorities.numel() and priorities.is_cpu):
            return 0.0
        return float((priorities if slots is None else priorities[slots]).max())

    def _took(self, given: float, before: float, after: float | Tensor) -> None:
        """Take note of a change: the largest priority given, and the largest of the rows before and after it."""
        if not self.within:
            if given > 0:  # compared only then: the largest one may be on a device
                self._largest = max(self._largest, given)
        elif isinstance(after, float):  # devices look it up when asked
            if after >= self._largest:
                self._largest, self._dirty = after, False  # above all that there are: nothing to look up
            elif before >= self._largest:
                self._dirty = True  # it was the largest one, or as large

    # -- rows that are not to be drawn ---------------------------------------------------------------------------------

    def hide(self, slots: Tensor, view: View) -> None:
        """Keep rows from being drawn, now and when they get priorities: their values stay 0 until `show`.

        Their priorities are kept, and count for the default one as before. Memory from the first call on: one byte for
        each slot. Cost: O(n log rows).

        Args:
            slots: int64 `[n]` on the view's device, in `[0, capacity)`.
            view: the buffer.

        Raises:
            SlotError: on the CPU, if a slot is beyond the buffer; nothing is changed.
        """
        tree = self.tree(view)
        if self._hidden is None:
            with torch.inference_mode(mode=False):
                self._hidden = torch.zeros(tree.capacity, dtype=torch.bool, device=tree.device)
        tree.set(slots, torch.zeros_like(slots, dtype=torch.float64))  # checks the slots first
        self._hidden[slots] = True

    @property
    def hides(self) -> bool:
        """Whether some rows may be hidden; False says that none is."""
        return self._hidden is not None

    def show(self, slots: Tensor, view: View) -> None:
        """Let rows be drawn again, by the priority that they have; see `hide`. Others are left as they are.

        Raises:
            SlotError: on the CPU, if a slot is beyond the buffer; nothing is changed.
        """
        tree = self.tree(view)
        known = tree.get(slots)  # checks the slots
        if self._hidden is None:
            return
        values = raise_to(self._raw[slots], self.eps, self.alpha)
        change = self._hidden[slots] & (slots < self.rows)
        self._hidden[slots] = False
        tree.set(slots, torch.where(change, values, known))

    def _seen(self, slots: Tensor, values: Tensor) -> Tensor:
        """Return the values that slots have in the tree: 0 where they are hidden."""
        return values if self._hidden is None else values.masked_fill_(self._hidden[slots], 0.0)

    def _cover(self, tree: PriorityTree, run: Run) -> None:
        """Take the values of hidden slots away that a run has given them."""
        if self._hidden is not None:
            slots = run.slots(tree.device)
            tree.set(slots, self._seen(slots, tree.get(slots)))

    @property
    def nbytes(self) -> int:
        """Bytes held for priorities, masks and tree."""
        parts = [self._raw, *(self._loaded or ()), *(() if self._hidden is None else (self._hidden,))]
        return sum(int(part.nbytes) for part in parts) + (0 if self._tree is None else self._tree.nbytes)

    # -- the tree, fitted to the buffer --------------------------------------------------------------------------------

    def tree(self, view: View) -> PriorityTree:
        """Return the tree, fitted to the buffer, to `alpha`, and to rows that nothing was said of."""
        tree = self._tree
        if tree is None or tree.capacity != view.capacity or tree.device != view.device:
            tree = self._build(view)
        if self._tree_alpha != self.alpha:
            self._derive(tree)
        if self.rows != view.rows:
            self._catch_up(tree, view)
        return tree

    def _build(self, view: View) -> PriorityTree:
        raw, values = (part[: view.capacity].to(view.device) for part in self.content())
        with torch.inference_mode(mode=False):  # updates come in any mode
            self._raw = torch.empty(view.capacity, dtype=torch.float64, device=view.device)
        native = backend.native
        if native is not None and self._raw.is_cpu:
            native.advise_huge_pages(self._raw.data_ptr(), self._raw.nbytes)  # random rows then miss the TLB less often
        self._raw.zero_()[: raw.shape[0]] = raw
        if self._hidden is not None:
            hidden = self._hidden[: view.capacity].to(view.device)
            with torch.inference_mode(mode=False):
                self._hidden = torch.zeros(view.capacity, dtype=torch.bool, device=view.device)
            self._hidden[: hidden.shape[0]] = hidden
        self._tree = tree = PriorityTree(view.capacity, view.device)
        self.rows, self._loaded = raw.shape[0], None
        if self.rows:
            tree.load(values)
        return tree

    def _derive(self, tree: PriorityTree) -> None:
        """Compute all values anew from the priorities, for another `alpha`."""
        raw = self._raw[: self.rows]
        if raw.is_cpu and self.rows:
            check_size(float(raw.max()), self.eps, self.alpha)
        values = raise_to(raw, self.eps, self.alpha).clamp_(max=MOST_VALUE)
        tree.load(values if self._hidden is None else values.masked_fill_(self._hidden[: self.rows], 0.0))
        self._tree_alpha = self.alpha

    def _catch_up(self, tree: PriorityTree, view: View) -> None:
        """Give the default priority to rows that nothing was said of."""
        if view.rows < self.rows:  # moved here from a fuller buffer
            self.clear()
        default = self._default(view)
        self._raw[self.rows : view.rows] = default
        fresh = Run(self.rows, view.rows - self.rows, view.capacity)
        tree.set_run(fresh.start, fresh.rows, self._value(default))
        self._cover(tree, fresh)
        self.rows = view.rows
        self._took(0.0, 0.0, default)

    def clear(self) -> None:
        """Forget all priorities, the largest included."""
        if self._tree is not None:
            self._tree.clear()
        self.rows, self._loaded, self._bad, self._hidden = 0, None, None, None
        self._largest, self._dirty = 0.0, False
        self._tree_alpha = self.alpha

    # -- state ---------------------------------------------------------------------------------------------------------

    def content(self) -> tuple[Tensor, Tensor]:
        """Return priorities (a view) and values (a copy) of the rows, float64 `[rows]` each."""
        if self._loaded is not None:
            return self._loaded
        if self._tree is None:
            return torch.empty(0, dtype=torch.float64, device="cpu"), torch.empty(0, dtype=torch.float64, device="cpu")
        return self._raw[: self.rows], self._tree.leaves(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Return exponents, priorities and values: powers may differ in the last bit between batch sizes."""
        self.settle()
        priorities, values = self.content()
        if self._hidden is not None and self.rows:  # which rows may be drawn is the buffer's to say: as if all
            own = raise_to(priorities, self.eps, self._tree_alpha)
            values = torch.where(self._hidden[: self.rows].to(values.device), own, values)
        return {
            "alpha": self.alpha,
            "eps": self.eps,
            "values_alpha": self._tree_alpha,
            "largest": float(self._found_largest()),
            "priorities": priorities,
            "values": values,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a checked state over, by copy.

        Raises:
            UsageError: if it is shared.
        """
        if self.ring is not None:
            msg = "the priorities of a shared buffer cannot be replaced through its sampler: load into the buffer"
            raise UsageError(msg)
        Ledger.__init__(self, float(state["alpha"]), float(state["eps"]), within=self.within)
        self._tree_alpha, self._largest = float(state["values_alpha"]), float(state["largest"])
        self._loaded = (state["priorities"].clone(), state["values"].clone())
        self.rows = self._loaded[0].shape[0]
