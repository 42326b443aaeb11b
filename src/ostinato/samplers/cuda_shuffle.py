"""Endless shuffled passes on another device: order and place live there, so that no draw waits for the host.

The law is that of `SamplerWithoutReplacement(endless=True)` on the CPU. Nothing here knows of buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from ostinato.errors import OptionError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DevicePasses"]

_TOP = 2**63 - 1
_MOST_ROWS = 2**31 - 1
"""Up to here the product of 63 random bits and a number of rows can be had from products of 64 bits."""


@final
class DevicePasses:
    """An order of slots on a device, and how far the pass over it has come.

    As long as the host knows the place, a draw copies the next stretch of an order that was shuffled when the pass
    began. A CUDA graph replays work that the host does not see: a draw that is captured reads its place, and the
    number of rows, on the device, where each replay finds them moved on. From then on all draws do.

    Args:
        capacity: most rows.
        device: where to work.

    Raises:
        OptionError: beyond 2**31 - 1 rows.
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
        with torch.inference_mode(mode=False):  # moved on in place in any mode
            self.order = torch.arange(capacity + 1, device=device)  # of slots without rows, identity; the last: scratch
            self._at = torch.zeros((), dtype=torch.int64, device=device)
            self._count = torch.zeros((), dtype=torch.int64, device=device)
        self.rows = 0
        self._place: int | None = 0
        self._shuffled = False  # whether the order is, from the place on

    @property
    def place(self) -> int:
        """How many rows of the pass were drawn; asks the device if the host does not know."""
        return int(self._at) if self._place is None else self._place

    def load(self, order: Tensor, place: int) -> None:
        """Go on with a permutation of `[0, n)`, int64 `[n]`, of which `place` were drawn."""
        self.rows = order.shape[0]
        self.order[: self.rows] = order.to(self.device)
        self._count.fill_(self.rows)
        self._at.fill_(place)
        self._place = place
        self._shuffled = False

    def record(self, rows: int) -> None:
        """Take note that there are `rows` rows now; those that are new join the pass."""
        if rows < self.rows:
            self.clear()  # moved here from a fuller buffer
        if rows == self.rows:
            return
        if _is_capturing(self.device):
            msg = "rows were written that no draw has met yet: sample once before the capture"
            raise UsageError(msg)
        self.rows = rows
        self._count.fill_(rows)
        self._shuffled = False

    def clear(self) -> None:
        """Forget order and place, in place: a captured graph goes on reading the same memory."""
        torch.arange(self.capacity + 1, out=self.order, device=self.device)
        self._at.zero_()
        self._count.zero_()
        self.rows = 0
        self._place = None if self._place is None else 0
        self._shuffled = False

    def leave_host(self) -> None:
        """Let every draw from now on find its place on the device."""
        self._place = None

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw `count` slots, int64 `[count]`. Fresh memory."""
        if self._place is not None and _is_capturing(self.device):
            self.leave_host()
        place = self._place
        return self._draw_unseen(count, generator) if place is None else self._draw_ahead(place, count, generator)

    def _draw_ahead(self, place: int, count: int, generator: torch.Generator | None) -> Tensor:
        parts = []
        while count:
            rest = self.order[place : self.rows]
            if not self._shuffled:
                rest.copy_(rest[torch.randperm(rest.shape[0], generator=generator, device=self.device)])
                self._shuffled = True
            parts.append(rest[:count].clone())
            count -= parts[-1].shape[0]
            place += parts[-1].shape[0]
            if place == self.rows:
                place, self._shuffled = 0, False
        self._place = place
        self._at.fill_(place)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw_unseen(self, count: int, generator: torch.Generator | None) -> Tensor:
        randoms = torch.randint(0, _TOP, (count,), generator=generator, device=self.device)
        rows = self._count.clamp(min=1)  # a graph that is replayed after `clear` must not divide by zero
        first = (torch.arange(count, device=self.device) + self._at).remainder_(rows)
        out = swap(self.order, first, first + scale(randoms, rows - first))
        self._at.copy_((self._at + count).remainder_(rows))
        return out


def scale(randoms: Tensor, spans: Tensor) -> Tensor:
    """Return `randoms * spans >> 63`, exact: int64 in [0, 2**63) times int64 in [1, 2**31)."""
    high, low = randoms >> 31, randoms & (2**31 - 1)
    return (high * spans + (low * spans >> 31)) >> 32


def swap(order: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Swap `order[first[s]]` with `order[second[s]]` for s = 0, 1, ..., and return what came to `first[s]` each time.

    The result is that of a loop; the work is a sort and about log2(n) rounds (pointer jumping; that such shuffles are
    parallel at heart: Shun, Gu, Blelloch, Fineman and Gibbons 2015). No step depends on values that the host would
    have to know. The last item of `order` is scratch.

    Args:
        order: int64 `[m + 1]`; changed.
        first: int64 `[n]` in [0, m).
        second: int64 `[n]` in [0, m).

    Returns:
        int64 `[n]`.
    """
    count, scratch = 2 * first.shape[0], order.shape[0] - 1
    same = first == second
    # event 2s is what swap s puts to its first position, 2s + 1 what it puts to its second
    places = torch.stack((first, torch.where(same, scratch, second)), 1).view(-1)
    events = torch.arange(count, device=order.device)
    sorted_places, by = torch.sort(places, stable=True)
    again = sorted_places[1:] == sorted_places[:-1]
    none = torch.full((1,), -1, dtype=torch.int64, device=order.device)
    earlier = torch.empty_like(by).scatter_(0, by, torch.cat((none, torch.where(again, by[:-1], -1))))
    # what an event puts down was at the other position before: the last event there, or the order as it was
    taken_at = torch.where(same[:, None].expand(-1, 2).reshape(-1), events & ~1, events ^ 1)
    source = earlier.index_select(0, taken_at)
    held = order.index_select(0, places.index_select(0, taken_at))
    jump = torch.where(source < 0, events, source)
    for _ in range(count.bit_length()):
        jump = jump.index_select(0, jump)
    values = held.index_select(0, jump)
    last = torch.cat((~again, none < 0))
    order.scatter_(0, torch.where(last, sorted_places, scratch), values.index_select(0, by))
    return values[::2].contiguous()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
