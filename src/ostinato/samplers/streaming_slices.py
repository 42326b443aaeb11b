"""`StreamingSliceSampler`: slices that were just written come first, each once."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.options import check_integer
from ostinato.core.records import Draw, Run
from ostinato.errors import UsageError
from ostinato.samplers.base import check_replacement
from ostinato.samplers.slices import SliceSampler
from ostinato.samplers.state import new_slots, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.episodes.keys import Key
    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.records import Placement, View
    from ostinato.samplers.base import StorageShape, WriterOrder


@final
class StreamingSliceSampler(SliceSampler):
    """Draws the slices that were just written, each once and in the order of writing, then slices of all episodes.

    As rows are written, each episode is divided into windows of `slice_len` rows, from its first row on and without
    overlap; rows at its end that do not fill a window are in none. A window is queued when its last row is written. A
    batch takes windows from the queue, the oldest first, and fills up with uniform draws of `SliceSampler`, which do
    not empty the queue. A window is dropped if one of its rows was replaced before it was drawn. Batches that are
    dropped (`prefetch`, a new sampler) take their windows with them. An instance of `SliceSampler`, as in TorchRL.

    Rows that a storage held before the buffer was made are in no window. Rows with `traj_key` may be interleaved: a
    window has rows of one episode. Cost: of a write O(rows) more, of a draw O(slices). Memory: 4 bytes for each slot.

    Args:
        slice_len: rows of a slice.
        end_key: see `SliceSampler`, also for the arguments that follow.
        replacement: must be True.

    Raises:
        KindError: if `slice_len` is no integer.
        OptionError: if it is below 1.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, StreamingSliceSampler
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=StreamingSliceSampler(slice_len=3), batch_size=6)
        >>> _ = rb.extend({"value": torch.arange(6), "done": torch.zeros(6, dtype=torch.bool)})
        >>> rb.sample()["value"].view(2, 3)
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """

    watches = True
    row_values = ("places",)

    def __init__(
        self,
        *,
        slice_len: int,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: bool | torch.device = False,
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        self._rows_each = check_integer("slice_len", slice_len, 1)
        super().__init__(
            slice_len=self._rows_each,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            cache_values=cache_values,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            span=span,
            use_gpu=use_gpu,
        )
        self._queue: deque[tuple[int, int]] = deque()  # first slot of each window, and the arrival of its row
        self._place_in_window = torch.empty(0, dtype=torch.int32, device="cpu")  # of each row; -1 in none

    @property
    def windows_left(self) -> int:
        """Windows that are queued, those included that were replaced since."""
        return len(self._queue)

    @property
    def nbytes(self) -> int:
        """Bytes of the positions of rows in their windows."""
        return self._place_in_window.nbytes

    def check_parts(self, storage: StorageShape, writer: WriterOrder) -> None:  # noqa: ARG002
        """Check that the storage has one dimension.

        Raises:
            UsageError: if it has two.
        """
        if storage.ndim != 1:
            msg = f"StreamingSliceSampler requires a one-dimensional storage, got ndim={storage.ndim}: use ndim=1"
            raise UsageError(msg)

    def watch(self, placement: Placement, view: View) -> None:
        """Queue the windows that rows just written complete."""
        if not isinstance(placement, Run):
            return  # episodes need rows in ring order, so that all placements are runs
        table = view.require_episodes()
        slots = placement.slots()
        self._reserve(int(slots.max()) + 1, view.capacity)
        self._place_in_window[slots] = -1
        slots = slots[table.ahead(slots) >= 0]  # without masked rows
        if not slots.shape[0]:
            return
        behind = table.behind(slots)
        places = self._places(slots, behind, table)
        self._place_in_window[slots] = places.to(torch.int32)
        ends = slots[(places == self._rows_each - 1) & (behind >= self._rows_each - 1)]
        if ends.shape[0]:
            firsts = table.shift(ends, 1 - self._rows_each)
            arrivals = view.ring.arrivals(firsts.to(view.device)).tolist()
            self._queue.extend(zip(firsts.tolist(), arrivals, strict=True))
        while len(self._queue) > max(1, view.capacity // self._rows_each):  # the oldest ones were replaced
            self._queue.popleft()

    def _places(self, slots: Tensor, behind: Tensor, table: EpisodeTable) -> Tensor:
        """Return the position of each new row in its window, int64 `[n]`; they go on from the row before."""
        episode, order = table.shift(slots, -behind).sort(stable=True)  # by episode, each in the order of writing
        ranked, back = slots[order], behind[order]
        first = torch.ones_like(ranked, dtype=torch.bool)
        first[1:] = episode[1:] != episode[:-1]
        starts = first.nonzero().flatten()
        before = self._place_in_window[table.shift(ranked[starts], -1)].to(torch.int64) + 1
        goes_on = back[starts] >= before.clamp(min=1)  # else it is the first row, or rows of its window were replaced
        base = torch.where(goes_on, before, 0)
        steps = torch.arange(ranked.shape[0], device="cpu") - starts.repeat_interleave(
            torch.diff(starts, append=torch.tensor([ranked.shape[0]], dtype=torch.int64, device="cpu"))
        )
        group = first.cumsum(0) - 1
        places = torch.empty_like(ranked)
        places[order] = (base[group] + steps) % self._rows_each
        return places

    def _reserve(self, rows: int, capacity: int) -> None:
        held = self._place_in_window.shape[0]
        if rows > held:
            with torch.inference_mode(mode=False):  # changed in place in any mode
                more = torch.full((min(capacity, max(rows, 2 * held)),), -1, dtype=torch.int32, device="cpu")
                more[:held] = self._place_in_window
            self._place_in_window = more

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw queued windows, then slices of `SliceSampler` for the rest of the batch.

        Raises:
            EmptyBufferError: if no window is queued, and no episode is long enough.
            UsageError: if the batch size is not a multiple of `slice_len`.
        """
        number, length = self._split(batch_size)
        fresh = self._take(view, number)
        missing = number - fresh.shape[0]
        if not missing:
            return self._whole(fresh, length)
        rest = super().draw(view, missing * length, generator)
        if missing == number:
            return rest
        slots = torch.cat((fresh, rest.slots))
        if rest.lengths is None:
            return rest._replace(slots=slots)
        lengths = torch.cat((torch.full_like(fresh, length), rest.lengths))
        return rest._replace(slots=slots, lengths=lengths)

    def _pads(self, view: View, length: int) -> bool:  # noqa: ARG002
        """Return `pad_output`: queued windows have a mask, and so do the slices of the same batch."""
        return self._options.pad_output

    def _whole(self, firsts: Tensor, length: int) -> Draw:
        """Return a draw of full windows; it has a mask where other batches have one."""
        if not self._options.pad_output:
            return Draw(firsts, length=length)
        return Draw(firsts, lengths=torch.full_like(firsts, length), pad=length)

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise."""
        number = self._split(batch_size)[0]
        entries = list(self._queue)
        if sum(self._valid(view, entries).tolist()) < number:
            super().check_draw(view, batch_size)

    def _take(self, view: View, number: int) -> Tensor:
        """Remove up to `number` windows whose rows are all present from the queue; return their first slots."""
        found: list[int] = []
        while self._queue and len(found) < number:
            entries = list(islice(self._queue, number - len(found)))
            found += [slot for (slot, _), ok in zip(entries, self._valid(view, entries).tolist(), strict=True) if ok]
            for _ in entries:
                self._queue.popleft()
        return torch.tensor(found, dtype=torch.int64, device=view.device)

    def _valid(self, view: View, entries: list[tuple[int, int]]) -> Tensor:
        """Return bool `[n]`: which windows have all of their rows, in one episode."""
        slots, arrivals = torch.tensor(entries, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
        there = slots < view.rows
        known = torch.where(there, slots, 0)
        same = view.ring.arrivals(known.to(view.device)).cpu() == arrivals
        return there & same & (view.require_episodes().ahead(known) >= self._rows_each - 1)

    def clear(self) -> None:
        """Forget all windows."""
        self._queue.clear()
        self._place_in_window = self._place_in_window[:0]

    def state_dict(self) -> dict[str, Any]:
        """Return the queue, and the position of each row in its window. Copy."""
        queue = torch.tensor(list(self._queue), dtype=torch.int64, device="cpu").reshape(-1, 2)
        return {
            **super().state_dict(),
            "slice_len": self._rows_each,
            "queue": queue,
            "places": self._place_in_window.clone(),
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check a state before it is loaded.

        Raises:
            CheckpointError: if it is damaged, or its options differ.
        """
        super().check_state(state, rows)
        queue, places = state["queue"], state["places"]
        good = (
            (queue.dtype, places.dtype) == (torch.int64, torch.int32)
            and queue.shape == (queue.shape[0], 2)
            and places.ndim == 1
            and bool(((queue[:, 0] >= 0) & (queue[:, 0] < rows)).all())
            and bool(((places >= -1) & (places < self._rows_each)).all())
        )
        require(good, f"its windows are not those of {rows} rows")

    def move_state(self, state: dict[str, Any], order: Tensor) -> dict[str, Any]:
        """Return the state after rows were moved; windows whose first rows have left are dropped."""
        queue, places = state["queue"].clone(), state["places"]
        queue[:, 0] = new_slots(order, queue[:, 0])
        held = torch.full((max(int(order.max()) + 1, places.shape[0]),), -1, dtype=torch.int32, device="cpu")
        held[: places.shape[0]] = places
        return {**state, "queue": queue[queue[:, 0] >= 0], "places": held[order.cpu()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            UsageError: if it is of another `slice_len`.
        """
        if int(state["slice_len"]) != self._rows_each:
            msg = (
                f"Cannot restore slice_len={state['slice_len']} into a slice_len={self._rows_each} "
                "StreamingSliceSampler: make it with the same slice_len"
            )
            raise UsageError(msg)
        super().load_state_dict(state)
        self._queue = deque((slot, arrival) for slot, arrival in state["queue"].tolist())
        with torch.inference_mode(mode=False):
            self._place_in_window = state["places"].clone()
