"""The priority tree in torch: any device, no host sync, the results of the compiled one to the last bit.

What lives here: the levels as tensors. What does not: the choice between this tree and the compiled one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TorchTree"]

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
