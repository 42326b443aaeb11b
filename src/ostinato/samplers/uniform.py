"""Uniform sampling, with and without replacement; draws of distinct rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch.compiler import is_dynamo_compiling

from ostinato._backend import backend
from ostinato.core.eligible import scale
from ostinato.core.records import Draw, Run
from ostinato.errors import OptionError, TooFewRowsError, UsageError
from ostinato.samplers.base import Sampler, check_replacement, new_slots, require, require_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.eligible import EligibleRows
    from ostinato.core.records import Placement, View

_TOP = 2**63 - 1
_CPU = torch.device("cpu")
_LARGE_BYTES = 4 << 20
"""From this size on the order is in huge pages, since a shuffle accesses it at random."""
_ROOMY = 1 << 23
"""Up to this capacity the order is allocated for all slots: to grow it, a draw would copy it."""

_ROUNDS = 8
"""Rounds of single draws, before the rest of a batch is drawn from an order of all rows."""
_LARGE = 4
"""A batch of at least one row in so many is drawn from an order of all rows at once."""
_MOST_ROWS = 2**31 - 1
"""Up to this number of rows, its product with 63 random bits can be computed from 64-bit products."""


class RandomSampler(Sampler):
    """Uniform draws with replacement: each draw takes every row present with probability `1 / rows`.

    Draws are those of `torch.randint(0, rows, (batch_size,))`. Cost: O(batch_size), independent of the number of rows.
    If only some rows may be drawn (complete windows, masked rows), each of these has the same probability.

    Args:
        replacement: False makes a `SamplerWithoutReplacement` instead, as in TorchRL.

    Examples:
        >>> from ostinato import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=2)
    """

    def __new__(cls, *args: Any, replacement: bool = True, **kwargs: Any) -> Self:  # noqa: ARG004
        """Make a `SamplerWithoutReplacement` for `replacement=False`; subclasses have no such variant."""
        if cls is not RandomSampler and not issubclass(cls, SamplerWithoutReplacement):
            check_replacement(cls, replacement=replacement)
        made = RandomSampler if replacement and cls is RandomSampler else SamplerWithoutReplacement
        return object.__new__(made if cls is RandomSampler else cls)  # type: ignore[return-value]

    def __init__(self, *, replacement: bool = True) -> None:
        del replacement  # read by __new__

    def __repr__(self) -> str:
        """Show the class."""
        return "RandomSampler()"

    def mass(self, view: View) -> tuple[float, float, float] | None:
        """Return the number of rows that may be drawn; each has the value 1."""
        return float(view.rows if view.starts is None else view.starts.rows), 1.0, 0.0

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw `batch_size` independent uniform slots, among those that may be drawn."""
        if view.starts is not None:
            return Draw(view.starts.pick(batch_size, generator, view.device))
        return Draw(torch.randint(0, view.rows, (batch_size,), generator=generator, device=view.device))


class SamplerWithoutReplacement(RandomSampler):
    """Uniform draws without replacement: within one pass (epoch) every row present is drawn exactly once.

    The permutation is computed as it is used (Fisher and Yates 1938, Durstenfeld 1964): each draw costs O(batch_size),
    and no call shuffles all rows. Rows written to new slots during a pass are drawn in this pass. A row that replaces
    one drawn already is drawn in the next pass, and so is a row that may be drawn only after its turn (windows that
    must be complete, when their last rows are written). The last batch of a pass has the rows that are left, unless
    `drop_last`. An instance of `RandomSampler`, as `RandomSampler(replacement=False)` is.

    With `endless` every batch has the requested size: a batch continues with the next pass, newly shuffled, where a
    pass ends, and a batch larger than the buffer takes several passes. On CUDA, draws then never wait for the host, and
    can be captured in a CUDA graph after the first draw; each replay continues where the last draw ended.

    Args:
        drop_last: omit the last batch of a pass if it is smaller; its rows are drawn in the next pass.
        shuffle: False draws the slots in order.
        endless: continue batches with the next pass; iteration over the buffer then has no end.

    Raises:
        OptionError: for `endless` with `drop_last`, since there is no last batch.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> [len(batch) for batch in rb]
        [4, 4, 2]
    """

    def __init__(
        self,
        drop_last: bool = False,  # noqa: FBT001, FBT002
        shuffle: bool = True,  # noqa: FBT001, FBT002
        *,
        endless: bool = False,
        replacement: bool = False,
    ) -> None:
        if replacement:
            msg = "SamplerWithoutReplacement draws without replacement, got replacement=True: use RandomSampler"
            raise OptionError(msg)
        if endless and drop_last:
            msg = "endless=True has no last batch of a pass, got drop_last=True: choose one of them"
            raise OptionError(msg)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.endless = endless
        self._passes: DevicePasses | None = None
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")
        self._rows = 0
        self._at = 0
        self.ran_out = False
        self._due = 0  # lower bound of the rows left in the pass that may be drawn; 0 if not counted

    def __repr__(self) -> str:
        """Show options and position in the pass."""
        endless = ", endless=True" if self.endless else ""
        passes = self._passes
        drawn = f"{self._at} of {self._rows}" if passes is None else f"{passes.position} of {passes.rows}"
        return f"SamplerWithoutReplacement(drop_last={self.drop_last}, shuffle={self.shuffle}{endless}, drawn={drawn})"

    @property
    def epochal(self) -> bool:
        """Whether iteration ends with the pass."""
        return not self.endless

    @property
    def nbytes(self) -> int:
        """Bytes of the order of the pass: 8 for each row."""
        return self._order.nbytes + (0 if self._passes is None else self._passes.order.nbytes)

    def mass(self, view: View) -> None:  # noqa: ARG002
        """Return None: draws of a pass depend on each other."""
        return

    def recheck(self) -> None:
        """Count again the rows left in the pass that may be drawn."""
        self._due = 0

    def restart(self) -> None:
        """Begin a new pass with the next draw, from the order of slots: it does not depend on earlier passes."""
        self._rows = 0
        self._at = 0
        self.ran_out = False
        self._due = 0
        if self._passes is not None:
            self._passes.clear()

    def clear(self) -> None:
        """Discard order and position."""
        self.restart()

    def record(self, placement: Placement) -> None:
        """Record rows just written, also on the device, so that replays of a CUDA graph draw them.

        Each may have replaced a row left in the pass by a row that may not be drawn.
        """
        self._due -= placement.total
        if self._passes is not None and isinstance(placement, Run):
            self._passes.record(max(self._passes.rows, placement.end))

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Leave out rows that are deleted, in this pass and the next ones.

        Raises:
            OptionError: with `drop_last` or `endless`.
        """
        if self.drop_last or self.endless:
            msg = f"{self!r} cannot draw from a buffer whose rows are deleted: leave drop_last and endless out"
            raise OptionError(msg)
        super().drop_rows(slots, view)

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            OptionError: see `draw`.
            TooFewRowsError: see `draw`.
        """
        if view.starts is not None and (self.drop_last or self.endless):
            msg = (
                "drop_last and endless are not available if only some rows may be drawn (strict windows, masked rows): "
                "leave them out"
            )
            raise OptionError(msg)
        if self.drop_last and view.rows < batch_size:
            msg = (
                f"The batch size ({batch_size}) is greater than the storage capacity ({view.rows}), which with "
                "drop_last=True means the rows present: add rows first or lower batch_size"
            )
            raise TooFewRowsError(msg)

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw the next slots of the pass; begin a new pass if the last one has ended.

        Raises:
            OptionError: with `drop_last` or `endless`, if only some rows may be drawn.
            TooFewRowsError: with `drop_last`, if there are fewer rows than one batch.
        """
        SamplerWithoutReplacement.check_draw(self, view, batch_size)  # not that of a subclass that draws slices
        if view.starts is not None:
            return Draw(self._draw_among(view, view.starts, batch_size, generator))
        self._due = 0
        return Draw(self._draw_pass(view, batch_size, generator))

    def _draw_among(
        self, view: View, starts: EligibleRows, batch_size: int, generator: torch.Generator | None
    ) -> Tensor:
        """Draw the next slots of the pass that may be drawn, and skip the others."""
        parts: list[Tensor] = []
        missing = batch_size
        while missing:
            slots = self._draw_pass(view, missing, generator)
            slots = slots[starts.allowed(slots)]
            parts.append(slots)
            missing -= slots.shape[0]
            if self.ran_out and missing < batch_size:
                break
        self._due -= batch_size - missing
        self.ran_out = self.ran_out or self._count_due(starts) == 0
        return torch.cat(parts)

    def _count_due(self, starts: EligibleRows) -> int:
        """Return a lower bound of the rows left in the pass that may be drawn; 0 only if there is none."""
        if self._due <= 0:
            left = slice(self._at, self._rows)
            rest = self._order[left] if self.shuffle else torch.arange(left.start, left.stop, device="cpu")
            self._due = int(starts.allowed(rest).sum())
        return self._due

    def spent(self, view: View) -> bool:
        """Return whether a pass has begun and no row is left in it, since the rows left were replaced."""
        begun = self._at > 0 and self._rows == view.rows and not self.ran_out
        return begun and view.starts is not None and self._count_due(view.starts) == 0

    def _draw_pass(self, view: View, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """Draw the next slots of the pass, fewer where it ends."""
        if self.endless:
            return self._draw_endless(view, batch_size, generator)
        over = self.ran_out  # rows written after the end of a pass belong to the next one
        self._add_rows(view, generator)
        left = self._rows - self._at
        if over or left == 0 or (self.drop_last and left < batch_size):
            self._at, left, self._due = 0, self._rows, 0
            if self.shuffle and view.device != _CPU:
                self._shuffle_rest(generator)
        count = min(batch_size, left)
        if self.shuffle:
            slots = self._draw_next(count, generator)
        else:
            slots = torch.arange(self._at, self._at + count, device=view.device)
        self._at += count
        left -= count
        self.ran_out = left == 0 or (self.drop_last and left < batch_size)
        return slots

    def _draw_endless(self, view: View, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw `count` slots, from several passes if needed."""
        if self.shuffle and view.device != _CPU:
            passes = self._passes_on(view)
            passes.record(view.rows)
            return passes.draw(count, generator)
        self._add_rows(view, generator)
        if self.shuffle:
            slots = self._draw_next(count, generator)
        else:
            slots = torch.arange(self._at, self._at + count, device=view.device).remainder_(view.rows)
        # the end of a pass is the start of the next: rows written now belong to it
        self._at = (self._at + count) % view.rows
        return slots

    def _passes_on(self, view: View) -> DevicePasses:
        passes = self._passes
        if passes is None or (passes.capacity, passes.device) != (view.capacity, view.device):
            passes = DevicePasses(view.capacity, view.device)
            if self._rows and self._rows <= view.rows:  # loaded from a checkpoint
                passes.load(self._order[: self._rows], self._at)
            self._passes = passes
        return passes

    def _add_rows(self, view: View, generator: torch.Generator | None) -> None:
        """Add rows written since the last draw to the pass."""
        if view.rows == self._rows:
            return
        if view.rows < self._rows:
            self.clear()  # the sampler was moved here from a fuller buffer
        first = self._rows
        if self.shuffle:
            self._extend_order(first, view)
        self._rows = view.rows  # last: if there is no memory for the order, the next draw tries again
        if self.shuffle and view.device != _CPU:
            self._shuffle_rest(generator)

    def _extend_order(self, first: int, view: View) -> None:
        """Append the slots from `first` on to the order, and grow it if needed."""
        if self._order.shape[0] < view.rows or self._order.device != view.device:
            room = view.capacity if view.capacity <= _ROOMY else min(view.capacity, max(2 * view.rows, _ROOMY))
            with torch.inference_mode(mode=False):  # shuffled in place in any mode
                order = torch.empty(room, dtype=torch.int64, device=view.device)
            native = backend.native
            if native is not None and order.is_cpu and order.nbytes >= _LARGE_BYTES:
                native.advise_huge_pages(order.data_ptr(), order.nbytes)
            order[:first] = self._order[:first]
            self._order = order
        self._order[first : view.rows] = torch.arange(first, view.rows, device=view.device)

    def _shuffle_rest(self, generator: torch.Generator | None) -> None:
        """Shuffle the rest of the order at once: on other devices a permutation is cheaper than single swaps."""
        rest = self._order[self._at : self._rows]
        rest.copy_(rest[torch.randperm(rest.shape[0], generator=generator, device=rest.device)])

    def _draw_next(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw `count` slots by steps of a shuffle; on other devices than the CPU the order is shuffled already."""
        if self._order.device != _CPU:
            return self._order[self._at : self._at + count].clone()
        randoms = torch.randint(0, _TOP, (count,), generator=generator, device=_CPU)
        native = backend.native
        if native is None or is_dynamo_compiling():
            firsts = (torch.arange(count, device=_CPU) + self._at).remainder_(self._rows)
            return swap(self._order, firsts, firsts + scale(randoms, self._rows - firsts))
        out = torch.empty_like(randoms)
        native.shuffle_draw(self._order.data_ptr(), self._at, self._rows, count, randoms.data_ptr(), out.data_ptr())
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return order and position in the pass."""
        order, rows, at = self._order, self._rows, self._at
        if self._passes is not None:
            order, rows, at = self._passes.order, self._passes.rows, self._passes.position
        return {
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "endless": self.endless,
            "rows": rows,
            "at": at,
            "ran_out": self.ran_out,
            "order": order[:rows] if self.shuffle else None,
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: ARG002
        """Check that a state is complete, and of the same options.

        Raises:
            CheckpointError: naming what differs.
        """
        require_options(self, state, ("drop_last", "shuffle", "endless"))
        known, at, order = int(state["rows"]), int(state["at"]), state["order"]
        good = 0 <= at <= known and _is_order(order, known if self.shuffle else None)
        require(good, f"{at} drawn of {known} rows, and no permutation of these")

    def move_state(self, state: dict[str, Any], order: Tensor) -> dict[str, Any] | None:
        """Return the state after rows were moved: the pass goes on with those that stay.

        A pass in the order of slots starts again. Rows that are not yet in the pass come last, as they would with the
        next draw.
        """
        known, at, drawn = int(state["rows"]), int(state["at"]), state["order"]
        moved = None if drawn is None or not at else new_slots(order, drawn)
        if moved is None or (self.endless and bool((moved < 0).any())):
            return {**state, "rows": 0, "at": 0, "order": None if drawn is None else drawn[:0]}
        rest = order.to(moved.device)
        rest = (rest >= known).nonzero().flatten()
        stay = moved >= 0
        moved = torch.cat((moved[stay], rest))
        return {**state, "rows": moved.shape[0], "at": int(stay[:at].sum()), "order": moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: if the state is damaged, or of other options.
        """
        self.check_state(state, int(state["rows"]))
        rows, at, order = int(state["rows"]), int(state["at"]), state["order"]
        if order is not None:
            with torch.inference_mode(mode=False):
                self._order = order.clone()
        self._passes = None
        self._rows, self._at, self.ran_out, self._due = rows, at, bool(state["ran_out"]), 0


def _is_order(order: Any, rows: int | None) -> bool:
    """Return whether a loaded order is a permutation of `rows` rows, or None if `rows` is None."""
    if rows is None or order is None:
        return rows is None and order is None
    if not (isinstance(order, torch.Tensor) and order.dtype is torch.int64 and tuple(order.shape) == (rows,)):
        return False
    return torch.equal(order.sort().values, torch.arange(rows, device=order.device))


# -- endless passes on devices --------------------------------------------------------------------------------------


@final
class DevicePasses:
    """Endless shuffled passes on CUDA and other devices, with the distribution of those on the CPU.

    An order of slots and the position of the pass in it are on the device, so no draw is a host sync.

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


# -- distinct rows ----------------------------------------------------------------------------------------------------


def draw_distinct(total: int, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw `count` different numbers of `[0, total)`; every order of every set of them is equally likely.

    Cost: O(count log count); O(total) if `count` is a quarter of them or more.

    Returns:
        int64 `[count]` on `device`.
    """

    def single(number: int) -> Tensor:
        return torch.randint(0, total, (number,), generator=generator, device=device)

    def ordered() -> Tensor:
        return torch.randperm(total, generator=generator, device=device)

    return _draw(single, ordered, count, large=_LARGE * count >= total)


def draw_weighted(
    sums: Tensor, weights: Tensor, count: int, generator: torch.Generator | None, *, distinct: bool
) -> Tensor:
    """Draw `count` numbers of `[0, n)` in proportion to their weights.

    Distinct numbers are drawn one after the other, each in proportion to the weights of those not drawn yet.

    Args:
        sums: cumulative sums of the weights, float64 `[n]`.
        weights: all above 0, float64 `[n]`.
        count: how many; at most `n` if they are distinct.
        generator: source of random numbers.
        distinct: whether no number occurs twice.

    Returns:
        int64 `[count]`.
    """
    top = weights.shape[0] - 1

    def single(number: int) -> Tensor:
        points = torch.rand(number, dtype=torch.float64, generator=generator, device=sums.device) * sums[-1]
        return torch.searchsorted(sums, points, right=True).clamp_(max=top)

    def ordered() -> Tensor:  # the order in which exponential clocks of these rates ring
        times = torch.empty_like(weights).exponential_(generator=generator)
        return (times / weights).argsort(stable=True)

    if not distinct:
        return single(count)
    return _draw(single, ordered, count, large=_LARGE * count >= weights.shape[0])


def _draw(single: Callable[[int], Tensor], ordered: Callable[[], Tensor], count: int, *, large: bool) -> Tensor:
    """Draw distinct numbers: single draws without those that were drawn before, then an order without them.

    Both have the same distribution: that of draws one after the other, each among the numbers that are left.
    """
    if large:
        return ordered()[:count]
    found = single(count)
    for turn in range(_ROUNDS):
        found = found[_first_of_each(found)]
        if found.shape[0] == count:
            return found
        if turn < _ROUNDS - 1:
            found = torch.cat((found, single(count - found.shape[0])))
    order = ordered()
    return torch.cat((found, order[~torch.isin(order, found)]))[:count]


def _first_of_each(values: Tensor) -> Tensor:
    """Return the positions at which a value occurs for the first time, ascending."""
    ranked, order = values.sort(stable=True)
    first = torch.ones_like(ranked, dtype=torch.bool)
    first[1:] = ranked[1:] != ranked[:-1]
    return order[first].sort().values
