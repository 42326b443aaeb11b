"""Endless shuffled passes on CUDA and other devices: order and position are on the device, so no draw is a host sync.

The distribution is that of `SamplerWithoutReplacement(endless=True)` on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from ostinato.core.eligible import scale
from ostinato.errors import OptionError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_TOP = 2**63 - 1
_MOST_ROWS = 2**31 - 1
"""Up to this number of rows, its product with 63 random bits can be computed from 64-bit products."""


@final
class DevicePasses:
    """An order of slots on a device, and the position of the pass in it.

    While the host knows the position, a draw copies the next part of an order that was shuffled when the pass began.
    The host does not know what replays of a CUDA graph have drawn. So a captured draw reads position and number of rows
    on the device, and updates them there. From then on all draws do.

    Args:
        capacity: maximum number of rows.
        device: device of the order.

    Raises:
        OptionError: if the capacity is above 2**31 - 1.
        UsageError: while a CUDA graph is captured.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        if capacity > _MOST_ROWS:
            msg = f"endless passes on {device} work for up to {_MOST_ROWS} rows, got a capacity of {capacity}"
            raise OptionError(msg)
        if _is_capturing(device):
            msg = "the first draw cannot be captured in a CUDA graph: sample once before the capture"
            raise UsageError(msg)
        self.capacity = capacity
        self.device = device
        with torch.inference_mode(mode=False):  # changed in place in any mode
            self.order = torch.arange(capacity, device=device)  # slots without rows are in order
            self._at = torch.zeros((), dtype=torch.int64, device=device)
            self._count = torch.zeros((), dtype=torch.int64, device=device)
        self.rows = 0
        self._position: int | None = 0
        self._shuffled = False  # whether the order is shuffled from the position on

    @property
    def position(self) -> int:
        """Rows of the pass that were drawn; a host sync if only the device has the number."""
        return int(self._at) if self._position is None else self._position

    def load(self, order: Tensor, position: int) -> None:
        """Continue with a permutation of `[0, n)`, int64 `[n]`, of which `position` rows were drawn."""
        self.rows = order.shape[0]
        self.order[: self.rows] = order.to(self.device)
        self._count.fill_(self.rows)
        self._at.fill_(position)
        self._position = position
        self._shuffled = False

    def record(self, rows: int) -> None:
        """Record that there are `rows` rows now; new rows are added to the pass."""
        if rows < self.rows:
            self.clear()  # the sampler was moved here from a fuller buffer
        if rows == self.rows:
            return
        if _is_capturing(self.device):
            msg = "rows were written since the last draw: sample once before the capture"
            raise UsageError(msg)
        self.rows = rows
        self._count.fill_(rows)
        self._shuffled = False

    def clear(self) -> None:
        """Reset order and position in place: a captured graph reads the same memory."""
        torch.arange(self.capacity, out=self.order, device=self.device)
        self._at.zero_()
        self._count.zero_()
        self.rows = 0
        self._position = None if self._position is None else 0
        self._shuffled = False

    def leave_host(self) -> None:
        """Read the position on the device for all draws from now on."""
        self._position = None

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw `count` slots, int64 `[count]`; a copy."""
        if self._position is not None and _is_capturing(self.device):
            self.leave_host()
        if self._position is None:
            return self._draw_on_device(count, generator)
        return self._draw_from_host(self._position, count, generator)

    def _draw_from_host(self, position: int, count: int, generator: torch.Generator | None) -> Tensor:
        parts = []
        while count:
            rest = self.order[position : self.rows]
            if not self._shuffled:
                rest.copy_(rest[torch.randperm(rest.shape[0], generator=generator, device=self.device)])
                self._shuffled = True
            parts.append(rest[:count].clone())
            count -= parts[-1].shape[0]
            position += parts[-1].shape[0]
            if position == self.rows:
                position, self._shuffled = 0, False
        self._position = position
        self._at.fill_(position)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw_on_device(self, count: int, generator: torch.Generator | None) -> Tensor:
        randoms = torch.randint(0, _TOP, (count,), generator=generator, device=self.device)
        rows = self._count.clamp(min=1)  # a graph replayed after `clear` must not divide by zero
        first = (torch.arange(count, device=self.device) + self._at).remainder_(rows)
        out = swap(self.order, first, first + scale(randoms, rows - first))
        self._at.copy_((self._at + count).remainder_(rows))
        return out


def swap(order: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Swap `order[first[s]]` with `order[second[s]]` for s = 0, 1, ...; return the item at `first[s]` after each swap.

    The result is that of a loop; the work is a sort and about log2(n) rounds of pointer jumping (on the parallelism of
    such shuffles see Shun, Gu, Blelloch, Fineman and Gibbons 2015). No step is a host sync.

    Args:
        order: int64 `[m]`; changed.
        first: int64 `[n]` in [0, m).
        second: int64 `[n]` in [0, m).

    Returns:
        int64 `[n]`.
    """
    count = 2 * first.shape[0]
    same = (first == second)[:, None].expand(-1, 2).reshape(-1)
    # event 2s is the write of swap s to its first position, 2s + 1 the write to its second
    places = torch.stack((first, second), 1).view(-1)
    events = torch.arange(count, device=order.device)
    sorted_places, by = torch.sort(places, stable=True)
    again = sorted_places[1:] == sorted_places[:-1]
    none = torch.full((1,), -1, dtype=torch.int64, device=order.device)
    earlier = torch.empty_like(by).scatter_(0, by, torch.cat((none, torch.where(again, by[:-1], -1))))
    # the item written was at the other position before: written by the last event there, or original
    taken_at = torch.where(same, events & ~1, events ^ 1)
    source = earlier.index_select(0, taken_at)
    held = order.index_select(0, places.index_select(0, taken_at))
    jump = torch.where(source < 0, events, source)
    for _ in range(count.bit_length()):
        jump = jump.index_select(0, jump)
    values = held.index_select(0, jump)
    last = torch.searchsorted(sorted_places, sorted_places, right=True) - 1  # all events at a place write its last item
    order.scatter_(0, sorted_places, values.index_select(0, by.index_select(0, last)))
    return values[::2].contiguous()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
