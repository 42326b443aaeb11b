"""The priority tree in torch: any device, no host sync, the results of the compiled one to the last bit.

What lives here: the levels as tensors. What does not: the choice between this tree and the compiled one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.core.records import check_slots
from ostinato.errors import CheckpointError, OptionError, PriorityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato._native import SumTree

__all__ = [
    "BAD_VALUE",
    "MOST_VALUE",
    "REDUCTIONS",
    "CompiledTree",
    "PriorityTree",
    "Ranks",
    "TorchTree",
    "check_number",
    "check_priorities",
    "check_size",
    "check_values",
    "last_of_equal",
    "on_device",
    "raise_to",
    "refuse_bad",
    "top_priority",
    "weigh",
]

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "mean": lambda x: x.mean(-1),
    "median": lambda x: x.median(-1).values,
}
"""How the priorities `[n, m]` of an item's steps become one; the median of an even number is the lower one."""

_SHOWN = 8
MOST_VALUE = 2.0**960
"""Largest value of a row: the sum of 2**36 of them is still finite."""
BAD_VALUE = "priorities must be finite and at least 0, got {}{}: nothing has been written"


def check_number(name: str, value: Any) -> float:
    """Return an exponent or offset: a finite number of at least 0.

    Raises:
        OptionError: otherwise.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, (str, bytes)) or not 0.0 <= number < float("inf"):
        msg = f"{name} must be a finite number of at least 0, got {value!r}"
        raise OptionError(msg)
    return number


def check_priorities(state: dict[str, Any], rows: int) -> None:
    """Refuse priorities of a checkpoint that are damaged, or of another number of rows.

    Raises:
        CheckpointError: if so.
    """
    numbers = [state[name] for name in ("alpha", "eps", "values_alpha", "largest")]
    whole = all(_is_content(state[x], rows) for x in ("priorities", "values"))
    if not (whole and all(isinstance(x, (int, float)) and 0.0 <= x < float("inf") for x in numbers)):
        msg = f"the sampler's state is damaged: it does not hold {rows} finite priorities of at least 0"
        raise CheckpointError(msg)
    alpha, eps, values_alpha, largest = map(float, numbers)
    top, value = (float(state[x].max()) if rows else 0.0 for x in ("priorities", "values"))
    try:
        fits = max((max(largest, top) + eps) ** max(alpha, values_alpha), value) <= MOST_VALUE
    except OverflowError:
        fits = False
    if not fits:
        msg = f"the sampler's state is damaged: (p + eps) ** alpha is above 2**960 with alpha={alpha:g}"
        raise CheckpointError(msg)


def _is_content(x: Any, rows: int) -> bool:
    right = isinstance(x, torch.Tensor) and x.dtype is torch.float64 and tuple(x.shape) == (rows,)
    return right and bool(((x >= 0) & (x < float("inf"))).all())


def refuse_bad(priorities: Tensor) -> None:
    """Raise for priorities of which some are negative or not finite.

    Raises:
        PriorityError: naming them and their positions.
    """
    bad = (~((priorities >= 0) & (priorities < float("inf")))).nonzero().flatten()
    values = [f"{value:g}" for value in priorities[bad[:_SHOWN]].tolist()]
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    msg = (
        f"priorities must be finite and at least 0, got {', '.join(values)} at the positions "
        f"{bad[:_SHOWN].tolist()}{more} of {len(priorities)}: pass absolute errors, such as td_error.abs(); nothing "
        "was changed"
    )
    raise PriorityError(msg)


def top_priority(priorities: Tensor, eps: float, alpha: float) -> float:
    """Return the largest of some priorities on the CPU, float64 `[n]`, `n >= 1`.

    Raises:
        PriorityError: if some are negative, not finite, or too large.
    """
    values = priorities.numpy()
    low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not (low >= 0.0 and high < float("inf")):
        refuse_bad(priorities)
    check_size(high, eps, alpha)
    return high


def check_size(priority: float, eps: float, alpha: float) -> None:
    """Refuse a priority whose value would be too large.

    Raises:
        PriorityError: if so.
    """
    try:
        small = (priority + eps) ** alpha <= MOST_VALUE
    except OverflowError:
        small = False
    if not small:
        msg = (
            f"priorities must keep (p + eps) ** alpha at most 2**960, got {priority:g} with alpha={alpha:g}: "
            "scale them down"
        )
        raise PriorityError(msg)


def last_of_equal(slots: Tensor, values: Tensor, keep: Tensor | None) -> Tensor:
    """Return `values` with each replaced by that of the last equal slot, so that the order of writing does not matter.

    No host sync. Where `keep` is False a value counts only if no equal slot has one that counts.
    """
    key = slots * 2 + (1 if keep is None else keep.to(slots.dtype))
    ordered, order = torch.sort(key, stable=True)
    last = torch.searchsorted(ordered, slots * 2 + 1, right=True) - 1
    return values[order[last]]


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-dim tensor on a device, without waiting for it: a float is filled in there."""
    if isinstance(number, float):
        return torch.full((), number, dtype=torch.float64, device=device)
    return number.to(device, torch.float64)


def raise_to(priorities: Tensor, eps: float, alpha: float) -> Tensor:
    """Return `(p + eps) ** alpha` in fresh memory; 0 where `p + eps` is 0, also for `alpha = 0`."""
    if alpha == 0:
        return ((priorities + eps) > 0).to(torch.float64)
    if not priorities.is_cpu:
        return (priorities + eps).pow_(alpha)
    values = priorities.numpy() + eps  # numpy starts an operation in a third of torch's time
    return torch.from_numpy(np.power(values, alpha, out=values))


def weigh(values: Tensor, least: float | Tensor, beta: float) -> Tensor:
    """Return `(v / least) ** -beta`, in place."""
    if not isinstance(least, float):
        return values.div_(least).pow_(-beta)
    array = values.numpy()
    np.power(np.divide(array, least, out=array), -beta, out=array)
    return values


def check_values(values: Tensor) -> None:
    """Refuse values that are negative or not finite.

    Raises:
        OptionError: naming the first one.
    """
    bad = ~((values >= 0) & (values < torch.inf))
    if bad.any():
        at = int(bad.int().argmax())
        msg = BAD_VALUE.format(float(values[at]), f" at position {at}")
        raise OptionError(msg)


@final
class PriorityTree:
    """Values of the slots [0, capacity), all zero at first; draws slot `i` with probability `value[i] / total`.

    A wide sum tree in float64, eight children to a node. Parents are recomputed from their children, never
    incremented: there is no drift, and equal leaves give equal totals to the last bit, whatever happened before.
    On the CPU with the compiled part each call is one native call for the whole batch, with the interpreter lock
    released for large ones; elsewhere it runs in torch on the device, without a host sync. Both give the same
    results to the last bit for the same numbers.

    Not locked: the buffer's lock orders writes and draws.

    Args:
        capacity: number of slots, at least 1.
        device: where slots and values are.
        compiled: the compiled tree to use, on the CPU; None makes one where it can.

    Example:
        >>> import torch
        >>> from ostinato.samplers.priority_tree import PriorityTree
        >>> tree = PriorityTree(10, torch.device("cpu"))
        >>> tree.set(torch.tensor([2, 7]), torch.tensor([1.0, 3.0], dtype=torch.float64))
        >>> tree.draw(torch.tensor([0.0, 0.2, 0.3, 1.0], dtype=torch.float64))[0].tolist()
        [2, 2, 7, 7]
    """

    def __init__(self, capacity: int, device: torch.device, compiled: CompiledTree | None = None) -> None:
        if capacity < 1:
            msg = f"capacity of a priority tree must be at least 1, got {capacity}"
            raise OptionError(msg)
        self.capacity = capacity
        self.device = torch.empty(
            0, device=device, dtype=torch.float32
        ).device  # "cuda" becomes "cuda:0", which tensors say
        self._on_cpu = self.device.type == "cpu"
        native = backend.native
        self._check_first = self._on_cpu and native is None  # the compiled part checks by itself
        if compiled is None and native is not None and self._on_cpu:
            compiled = CompiledTree(native.SumTree(capacity))
        self.compiled = compiled
        """The compiled tree, which can do more in one call; None where the tree is in torch."""
        self._tree: CompiledTree | TorchTree = self.compiled or TorchTree(capacity, self.device)

    def __repr__(self) -> str:
        """Size and place; no values, which may be on a device."""
        kind = "torch" if isinstance(self._tree, TorchTree) else "native"
        return f"PriorityTree(capacity={self.capacity}, device={self.device}, {kind})"

    def __getstate__(self) -> dict[str, Any]:
        """Capacity, device and leaves: parents follow from these."""
        return {"capacity": self.capacity, "device": self.device, "leaves": self.leaves()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["capacity"], state["device"])
        self.load(state["leaves"])

    @property
    def nbytes(self) -> int:
        """Bytes of all levels (about 10.3 for each slot)."""
        return self._tree.nbytes

    @property
    def total(self) -> float | Tensor:
        """Sum of all values; 0-dim tensor on devices other than the CPU. O(1)."""
        return self._on_host(self._tree.total)

    @property
    def minimum(self) -> float | Tensor:
        """Smallest value above zero, infinity if there is none; 0-dim tensor on devices other than the CPU. O(1)."""
        return self._on_host(self._tree.minimum)

    @property
    def maximum(self) -> float | Tensor:
        """Largest value, 0 if there is none; 0-dim tensor on devices other than the CPU.

        The compiled tree keeps it from the first time it is asked (which costs O(capacity)) on, so that updates pay for
        it only where it is used; like a write it needs the buffer's lock. Then O(1).
        """
        return self._on_host(self._tree.maximum)

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write values; of equal slots in one call the last one wins. O(n log capacity).

        Args:
            slots: int64 `[n]` on the tree's device, in `[0, capacity)`.
            values: float64 `[n]` beside them, finite and at least 0.

        Raises:
            SlotError: a slot outside the tree; nothing is written then. (On the CPU: elsewhere the caller checks.)
            OptionError: wrong dtypes, shapes or devices; on the CPU also a bad value. Nothing has been written then.
        """
        slots, values = self._given("slots", slots, torch.int64), self._given("values", values, torch.float64)
        if slots.shape != values.shape:
            msg = f"slots and values must be of one length, got {tuple(slots.shape)} and {tuple(values.shape)}"
            raise OptionError(msg)
        if self._check_first:
            check_slots(slots, self.capacity)
            check_values(values)
        self._tree.set(slots, values)

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to the slots `(start + i) % capacity`, `i < count`. O(count), parents once each.

        Args:
            start: in `[0, capacity)`.
            count: in `[0, capacity]`.
            value: finite and at least 0; a 0-dim tensor is read without a host sync on its own device.

        Raises:
            OptionError: a run that does not fit, or (on the CPU) a bad value. Nothing has been written then.
        """
        if not (0 <= start < self.capacity and 0 <= count <= self.capacity):
            msg = (
                f"a run must start in [0, {self.capacity - 1}] and have [0, {self.capacity}] slots (capacity), "
                f"got start={start} and count={count}"
            )
            raise OptionError(msg)
        if self._on_cpu:
            value = float(value)
            if not 0.0 <= value < torch.inf:
                msg = BAD_VALUE.format(value, "")
                raise OptionError(msg)
        self._tree.set_run(start, count, value)

    def get(self, slots: Tensor) -> Tensor:
        """Read values, float64 `[n]`, of slots int64 `[n]`; a copy.

        Raises:
            SlotError: a slot outside the tree. (On the CPU: elsewhere the caller checks.)
            OptionError: wrong dtype, shape or device.
        """
        slots = self._given("slots", slots, torch.int64)
        if self._check_first:
            check_slots(slots, self.capacity)
        return self._tree.get(slots)

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw slot `i` with probability `value[i] / total` for each number; never a slot whose value is zero.

        The slot is the one in which `uniform * total` falls when all values lie end to end in the order of slots, so
        sorted numbers give sorted slots (stratified draws).

        Args:
            uniforms: float64 `[B]` in `[0, 1]`, both ends included, on the tree's device.

        Returns:
            Slots int64 `[B]` and their values float64 `[B]`. On devices other than the CPU a tree without mass gives
            slot 0 with value 0: to ask would be a host sync.

        Raises:
            OptionError: on the CPU, if the total is zero or not finite; wrong dtype, shape or device.
        """
        uniforms = self._given("uniforms", uniforms, torch.float64)
        if self._on_cpu:
            total = float(self._tree.total)
            if not 0.0 < total < torch.inf:
                msg = (
                    f"the priorities must sum to a finite number above 0, got {total}: nothing can be drawn before "
                    "a row has a priority above 0 (with eps > 0 every row has)"
                )
                raise OptionError(msg)
        return self._tree.draw(uniforms)

    def clear(self) -> None:
        """Make all values zero. O(capacity)."""
        self._tree.clear()

    def leaves(self, rows: int | None = None) -> Tensor:
        """Return the values of the slots `[0, rows)`, of all by default: float64, a copy.

        Raises:
            OptionError: `rows` outside `[0, capacity]`.
        """
        rows = self.capacity if rows is None else rows
        self._check_rows(rows)
        return self._tree.leaves(rows)

    def load(self, leaves: Tensor) -> None:
        """Make the values of the first slots these (float64 `[rows]`), and all others zero.

        Raises:
            OptionError: more rows than slots, a wrong dtype, shape or device, or (on the CPU) a bad value. Nothing has
                changed then.
        """
        leaves = self._given("leaves", leaves, torch.float64)
        self._check_rows(leaves.shape[0])
        if self._on_cpu:
            check_values(leaves)
        self._tree.load(leaves)

    def _on_host(self, number: float | Tensor) -> float | Tensor:
        return float(number) if self._on_cpu else number

    def _given(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor, contiguous, if it is what the compiled part may be given."""
        if tensor.dtype is not dtype or tensor.dim() != 1 or tensor.device != self.device:
            msg = (
                f"{name} must be a {dtype} tensor [n] on {self.device}, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}: convert it first"
            )
            raise OptionError(msg)
        return tensor.contiguous()

    def _check_rows(self, rows: int) -> None:
        if not 0 <= rows <= self.capacity:
            msg = f"rows must be in [0, {self.capacity}] (capacity), got {rows}"
            raise OptionError(msg)


_Stamps: TypeAlias = tuple[int, int, int, int, int, int]
"""What `Ring.numbers` returns."""


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
        return self._tree.update(
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


_FAN = 8
_SHIFT = 3


@final
class TorchTree:
    """Levels of float64 tensors, eight children to a node; a parent is recomputed from its children, left to right.

    Shapes depend on sizes given by the host alone, so nothing waits for the device.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._sums: list[Tensor] = []
        nodes = capacity
        with torch.inference_mode(mode=False):  # updates come in any mode
            while not self._sums or nodes > 1:
                nodes = -(-nodes // _FAN) if self._sums else nodes
                self._sums.append(torch.zeros(-(-nodes // _FAN) * _FAN, dtype=torch.float64, device=device))
            # Zero stands for "no leaf above zero". Of the leaves these are the sums' own lines.
            self._leasts = [self._sums[0]] + [torch.zeros_like(level) for level in self._sums[1:]]
            self._mosts = [self._sums[0]] + [torch.zeros_like(level) for level in self._sums[1:]]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return sum(level.nbytes for level in (*self._sums, *self._leasts[1:], *self._mosts[1:]))

    @property
    def total(self) -> Tensor:
        """Sum of all leaves, 0-dim."""
        return self._sums[-1][0]

    @property
    def minimum(self) -> Tensor:
        """Smallest leaf above zero, 0-dim; infinity if there is none."""
        least = self._leasts[-1][0]
        return torch.where(least > 0, least, torch.inf)

    @property
    def maximum(self) -> Tensor:
        """Largest leaf, 0-dim."""
        return self._mosts[-1][0]

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write leaves; of equal slots the last one wins."""
        slots, order = slots.sort(stable=True)
        last = torch.searchsorted(slots, slots, right=True) - 1  # equal slots all write the value of the last one
        self._sums[0].index_copy_(0, slots, values.index_select(0, order).index_select(0, last) + 0.0)
        for level in range(1, len(self._sums)):
            slots = slots >> _SHIFT
            if slots.shape[0] >= self._sums[level].shape[0]:
                self._update_range(level, 0, self._sums[level].shape[0])
            else:
                self._update_nodes(level, slots)

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to `count` leaves from `start` on, round the end."""
        end = min(start + count, self.capacity)
        for first, stop in ((start, end), (0, count - (end - start))):
            if first < stop:
                self._sums[0][first:stop].fill_(value).add_(0.0)
                self._update_above(first, stop)

    def get(self, slots: Tensor) -> Tensor:
        """Read leaves."""
        return self._sums[0].index_select(0, slots)

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Walk from the root to a leaf for each uniform number."""
        at = _below((uniforms * self.total).clamp_(min=0.0), self.total)
        at = torch.where(self.total > 0, at, -1.0)  # a tree without mass: -1 leads to slot 0, never outside
        nodes = torch.zeros_like(uniforms, dtype=torch.int64)
        for level in reversed(self._sums):
            children = level.view(-1, _FAN).index_select(0, nodes)
            before = [torch.zeros_like(at)]
            for child in range(_FAN - 1):
                before.append(before[-1] + children[:, child])
            prefixes = torch.stack(before, dim=1)
            chosen = (prefixes[:, 1:] <= at.unsqueeze(1)).sum(dim=1, keepdim=True)
            at = _below(at - prefixes.gather(1, chosen).squeeze(1), children.gather(1, chosen).squeeze(1))
            nodes = nodes * _FAN + chosen.squeeze(1)
        return nodes, self.get(nodes)

    def clear(self) -> None:
        """Make all leaves zero."""
        for level in (*self._sums, *self._leasts, *self._mosts):
            level.zero_()

    def leaves(self, rows: int) -> Tensor:
        """Copy the first `rows` leaves."""
        return self._sums[0][:rows].clone()

    def load(self, leaves: Tensor) -> None:
        """Make the first leaves these, and all others zero."""
        self.clear()
        if leaves.shape[0]:
            torch.add(leaves, 0.0, out=self._sums[0][: leaves.shape[0]])
            self._update_above(0, leaves.shape[0])

    def _update_above(self, begin: int, end: int) -> None:
        """Recompute everything above the leaves [begin, end)."""
        for level in range(1, len(self._sums)):
            begin, end = begin // _FAN, -(-end // _FAN)
            self._update_range(level, begin, end)

    def _update_range(self, level: int, begin: int, end: int) -> None:
        below = slice(begin * _FAN, min(end * _FAN, self._sums[level - 1].shape[0]))
        for tree, combine in ((self._sums, _sum), (self._leasts, _least), (self._mosts, _most)):
            made = combine(tree[level - 1][below].view(-1, _FAN))
            tree[level][begin : begin + made.shape[0]] = made

    def _update_nodes(self, level: int, nodes: Tensor) -> None:
        """Recompute listed nodes; of those listed twice both write the same."""
        for tree, combine in ((self._sums, _sum), (self._leasts, _least), (self._mosts, _most)):
            tree[level].index_copy_(0, nodes, combine(tree[level - 1].view(-1, _FAN).index_select(0, nodes)))


def _sum(children: Tensor) -> Tensor:
    total = children[:, 0]
    for child in range(1, _FAN):
        total = total + children[:, child]
    return total


def _least(children: Tensor) -> Tensor:
    least = torch.where(children > 0, children, torch.inf).amin(dim=1)
    return torch.where(least < torch.inf, least, 0.0)


def _most(children: Tensor) -> Tensor:
    return children.amax(dim=1)


def _below(at: Tensor, end: Tensor) -> Tensor:
    """`at`, or the largest number below `end` where rounding took it there."""
    return torch.where(at < end, at, torch.nextafter(end, torch.zeros_like(end)))
