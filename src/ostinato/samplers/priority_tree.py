"""Sum trees, which draw slots in proportion to their values: one in torch for any device, and the native one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch.nn.functional import pad

from ostinato._backend import backend
from ostinato.core.records import check_slots
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato._native import SumTree
    from ostinato.core.ring import Ring
    from ostinato.core.shared_ring import SharedRing

MAX_VALUE = 2.0**960
"""Largest value of a row: the sum of 2**36 of them is still finite."""
WEIGHT_DTYPES = frozenset({torch.float32, torch.float64})
"""Dtypes of weights that the native extension writes."""
_FAN = 8
_DEVICE_FAN = 256  # each level costs about twenty operations, whose start is what takes time on a GPU
_CPU = torch.device("cpu")


def make_tree(capacity: int, device: torch.device) -> PriorityTree:
    """Return a tree of zeros: the native implementation on the CPU, where it is available, else the one in torch.

    Args:
        capacity: number of slots, at least 1.
        device: device of slots and values.
    """
    if device != _CPU:
        return PriorityTree(capacity, device, fan=_DEVICE_FAN, lazy=True)
    native = backend.native
    return PriorityTree(capacity, device) if native is None else NativeTree(native.SumTree(capacity))


class PriorityTree:
    """Values of the slots `[0, capacity)`, zero at first; draws slot `i` with probability `value[i] / total`.

    A sum tree in float64 with `fan` children per node. A parent is computed from its children in a fixed order, never
    incremented, so sums do not drift, and equal leaves give equal totals to the last bit. `lazy` parents are computed
    before they are read, all of them in a few operations: on a GPU it is the start of an operation that takes time.
    This class works on any device without a host sync: shapes depend on sizes known to the host alone. On the CPU
    `NativeTree` gives the same results to the last bit.

    Not thread-safe: the buffer's lock orders writes and draws. Dtypes, shapes and devices are those of the arguments
    named below; the caller sees to that, and on other devices than the CPU to slots and values as well.

    Examples:
        >>> import torch
        >>> from ostinato.samplers.priority_tree import make_tree
        >>> tree = make_tree(10, torch.device("cpu"))
        >>> tree.set(torch.tensor([2, 7]), torch.tensor([1.0, 3.0], dtype=torch.float64))
        >>> tree.draw(torch.tensor([0.0, 0.2, 0.3, 1.0], dtype=torch.float64))[0].tolist()
        [2, 2, 7, 7]
    """

    native: SumTree | None = None
    """The native tree; None in the implementation in torch."""

    def __init__(self, capacity: int, device: torch.device, *, fan: int = _FAN, lazy: bool = False) -> None:
        self.capacity = capacity
        self._fan = fan
        self._lazy = lazy
        self._stale = False
        self._sums: list[Tensor] = []
        nodes = capacity
        with torch.inference_mode(mode=False):  # updates come in any mode
            while not self._sums or nodes > 1:
                nodes = -(-nodes // self._fan) if self._sums else nodes
                self._sums.append(torch.zeros(-(-nodes // self._fan) * self._fan, dtype=torch.float64, device=device))
            # zero stands for "no leaf above zero"; both trees share the leaves
            self._leasts = [self._sums[0]] + [torch.zeros_like(level) for level in self._sums[1:]]
            self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._trees = ((self._sums, _sum), (self._leasts, _least))
        self.device = self._sums[0].device  # as tensors name it: "cuda" becomes "cuda:0"
        self._on_cpu = self.device.type == "cpu"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle capacity, device and leaves: parents follow from these."""
        return _restored, (self.capacity, self.device, self.leaves(self.capacity))

    @property
    def nbytes(self) -> int:
        """Bytes of all levels (about 10.3 for each slot)."""
        return sum(level.nbytes for level in (*self._sums, *self._leasts[1:]))

    @property
    def total(self) -> float | Tensor:
        """Sum of all values; 0-dim tensor on devices other than the CPU. O(1)."""
        self._recompute()
        total = self._sums[-1][0]
        return float(total) if self._on_cpu else total

    @property
    def known_empty(self) -> bool:
        """Whether all values are zero; False on devices other than the CPU, where to ask would be a host sync."""
        return self._on_cpu and float(self.total) <= 0

    @property
    def minimum(self) -> float | Tensor:
        """Smallest value above zero, infinity if there is none; 0-dim tensor on devices other than the CPU. O(1)."""
        self._recompute()
        least = self._leasts[-1][0]
        least = torch.where(least > 0, least, torch.inf)
        return float(least) if self._on_cpu else least

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write values; of equal slots in one call the last one wins. O(n log capacity).

        Args:
            slots: int64 `[n]` on the tree's device, in `[0, capacity)`, contiguous.
            values: float64 `[n]` on the tree's device, finite and at least 0, contiguous.

        Raises:
            SlotError: on the CPU, for a slot outside the tree; nothing is written.
        """
        if self._on_cpu:
            check_slots(slots, self.capacity)
        slots, order = slots.sort(stable=True)
        last = torch.searchsorted(slots, slots, right=True) - 1  # equal slots all write the value of the last one
        self._sums[0].index_copy_(0, slots, values.index_select(0, order).index_select(0, last) + 0.0)
        self._stale = self._lazy
        for level in range(1, 1 if self._lazy else len(self._sums)):
            slots = slots // self._fan
            if slots.shape[0] >= self._sums[level].shape[0]:
                self._update_range(level, 0, self._sums[level].shape[0])
            else:
                self._update_nodes(level, slots)

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to the slots `(start + i) % capacity`, `i < count`. O(count), parents once each.

        Args:
            start: in `[0, capacity)`.
            count: in `[0, capacity]`.
            value: finite and at least 0; a 0-dim tensor is read without a host sync on its own device.
        """
        end = min(start + count, self.capacity)
        for first, stop in ((start, end), (0, count - (end - start))):
            if first < stop:
                self._sums[0][first:stop].fill_(value).add_(0.0)
                self._update_above(first, stop)

    def get(self, slots: Tensor) -> Tensor:
        """Read values, float64 `[n]`, of slots int64 `[n]`, contiguous; a copy.

        Raises:
            SlotError: on the CPU, for a slot outside the tree.
        """
        if self._on_cpu:
            check_slots(slots, self.capacity)
        return self._sums[0].index_select(0, slots)

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw slot `i` with probability `value[i] / total` for each number; never a slot whose value is zero.

        The slot is the one in which `uniform * total` falls when all values are laid end to end in the order of slots,
        so sorted numbers give sorted slots (stratified draws).

        Args:
            uniforms: float64 `[B]` in `[0, 1]`, both ends included, on the tree's device, contiguous.

        Returns:
            Slots int64 `[B]` and their values float64 `[B]`. A tree whose values are all zero gives slot 0 with value
            0; `NativeTree` raises `ValueError`.
        """
        self._recompute()
        total = self._sums[-1][0]
        at = torch.where(total > 0, (uniforms * total).clamp_(min=0.0), -1.0)  # all values zero: slot 0, never outside
        nodes = torch.zeros_like(uniforms, dtype=torch.int64)
        for level in self._sums[-2::-1] or self._sums:  # the last one holds the total alone
            children = level.view(-1, self._fan).index_select(0, nodes)
            ends = children.cumsum(dim=1)
            present = ends * (children > 0)  # a child of value zero is never chosen, whatever rounding did to its end
            at = torch.minimum(at, torch.nextafter(present.amax(dim=1), self._zero))
            chosen = (present > at.unsqueeze(1)).byte().argmax(dim=1, keepdim=True)
            at = at - pad(ends, (1, 0)).gather(1, chosen).squeeze(1)
            nodes = nodes * self._fan + chosen.squeeze(1)
        return nodes, self._sums[0].index_select(0, nodes)

    def sample(
        self, uniforms: Tensor, beta: float, dtype: torch.dtype, ring: Ring | SharedRing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw slots with their importance weights and generations; see `draw`.

        Args:
            uniforms: float64 `[B]` in `[0, 1]` on the tree's device, contiguous.
            beta: exponent of the weights `(value / minimum) ** -beta`.
            dtype: floating dtype of the weights.
            ring: generations of the slots.

        Returns:
            Slots int64 `[B]`, weights `[B]`, generations int64 `[B]`.
        """
        slots, values = self.draw(uniforms)
        least = self.minimum
        if isinstance(least, float):
            array = values.numpy()  # numpy starts an operation in a third of torch's time
            np.power(np.divide(array, least, out=array), -beta, out=array)
        else:
            values.div_(least).pow_(-beta)
        return slots, values.to(dtype), ring.generations_of_rows(slots)

    def leaves(self, rows: int) -> Tensor:
        """Return the values of the slots `[0, rows)`: float64, a copy."""
        return self._sums[0][:rows].clone()

    def load(self, leaves: Tensor) -> None:
        """Set the values of the first slots to `leaves` (float64 `[rows]`), and all others to zero. O(capacity).

        Raises:
            OptionError: on the CPU, for a value that is negative or not finite; nothing is changed.
        """
        if self._on_cpu and not bool(((leaves >= 0) & (leaves < torch.inf)).all()):
            msg = "the values of a priority tree must be finite and at least 0: nothing has been written"
            raise OptionError(msg)
        self._sums[0].zero_()
        torch.add(leaves, 0.0, out=self._sums[0][: leaves.shape[0]])
        self._update_above(0, self.capacity)

    def _recompute(self) -> None:
        """Compute all parents, if they are lazy and leaves have changed."""
        if self._stale:
            self._stale = False
            for level in range(1, len(self._sums)):
                self._update_range(level, 0, self._sums[level].shape[0])

    def _update_above(self, begin: int, end: int) -> None:
        """Recompute all nodes above the leaves `[begin, end)`, now or before they are read."""
        self._stale = self._lazy
        for level in range(1, 1 if self._lazy else len(self._sums)):
            begin, end = begin // self._fan, -(-end // self._fan)
            self._update_range(level, begin, end)

    def _update_range(self, level: int, begin: int, end: int) -> None:
        below = slice(begin * self._fan, min(end * self._fan, self._sums[level - 1].shape[0]))
        for tree, combine in self._trees:
            made = combine(tree[level - 1][below].view(-1, self._fan))
            tree[level][begin : begin + made.shape[0]] = made

    def _update_nodes(self, level: int, nodes: Tensor) -> None:
        """Recompute the nodes listed; for a node listed twice the same number is written twice."""
        for tree, combine in self._trees:
            tree[level].index_copy_(0, nodes, combine(tree[level - 1].view(-1, self._fan).index_select(0, nodes)))


@final
class NativeTree(PriorityTree):
    """The tree of the native extension, on the CPU: one native call per batch, without the GIL for large ones.

    Args:
        tree: the native tree, which may be in memory shared with other processes.
    """

    native: SumTree
    device = _CPU

    def __init__(self, tree: SumTree) -> None:
        self.capacity, self.native = tree.capacity, tree
        # outputs of `sample` are made with empty_like of these, which is faster than torch.empty
        self._like_slots = torch.empty(0, dtype=torch.int64, device="cpu")
        self._like_weights = torch.empty(0, dtype=torch.float32, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return self.native.nbytes

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self.native.total

    @property
    def known_empty(self) -> bool:
        """Whether all values are zero."""
        return self.native.total <= 0

    @property
    def minimum(self) -> float:
        """Smallest value above zero, infinity if there is none."""
        return self.native.minimum

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write values; see `PriorityTree.set`."""
        try:
            self.native.set(slots.data_ptr(), values.data_ptr(), slots.shape[0])
        except IndexError:
            check_slots(slots, self.capacity)
            raise

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to a run of slots; see `PriorityTree.set_run`."""
        self.native.set_run(start, count, float(value))

    def get(self, slots: Tensor) -> Tensor:
        """Read values; see `PriorityTree.get`."""
        out = torch.empty(slots.shape[0], dtype=torch.float64, device="cpu")
        try:
            self.native.get(slots.data_ptr(), slots.shape[0], out.data_ptr())
        except IndexError:
            check_slots(slots, self.capacity)
            raise
        return out

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw slots; see `PriorityTree.draw`."""
        values = torch.empty_like(uniforms)
        slots = torch.empty_like(uniforms, dtype=torch.int64)
        self.native.draw(uniforms.data_ptr(), uniforms.shape[0], slots.data_ptr(), values.data_ptr())
        return slots, values

    def sample(
        self, uniforms: Tensor, beta: float, dtype: torch.dtype, ring: Ring | SharedRing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw slots with their importance weights and generations in one native call; see `PriorityTree.sample`.

        Raises:
            ValueError: if the total is zero or not finite.
        """
        if dtype not in WEIGHT_DTYPES:
            return super().sample(uniforms, beta, dtype, ring)
        n = uniforms.shape[0]
        if self._like_slots.shape[0] != n or self._like_weights.dtype is not dtype:
            self._like_slots = torch.empty(n, dtype=torch.int64, device="cpu")
            self._like_weights = torch.empty(n, dtype=dtype, device="cpu")
        slots, generations = torch.empty_like(self._like_slots), torch.empty_like(self._like_slots)
        weights = torch.empty_like(self._like_weights)
        self.native.sample(
            uniforms.data_ptr(),
            n,
            beta,
            ring.native_state(),
            slots.data_ptr(),
            weights.data_ptr(),
            dtype is torch.float32,
            generations.data_ptr(),
        )
        return slots, weights, generations

    def leaves(self, rows: int) -> Tensor:
        """Return the values of the first slots, a copy."""
        out = torch.empty(rows, dtype=torch.float64, device="cpu")
        self.native.leaves(out.data_ptr(), rows)
        return out

    def load(self, leaves: Tensor) -> None:
        """Set all values; see `PriorityTree.load`."""
        self.native.load(leaves.contiguous().data_ptr(), leaves.shape[0])


def _restored(capacity: int, device: torch.device, leaves: Tensor) -> PriorityTree:
    """Return a tree from its pickled state, in the implementation that this process has."""
    tree = make_tree(capacity, device)
    tree.load(leaves)
    return tree


def _sum(children: Tensor) -> Tensor:
    return children.cumsum(dim=1)[:, -1]  # `sum` adds in an order of its own


def _least(children: Tensor) -> Tensor:
    least = torch.where(children > 0, children, torch.inf).amin(dim=1)
    return torch.where(least < torch.inf, least, 0.0)
