"""The episode table: which rows of a ring form an episode, recorded when rows are written."""

from __future__ import annotations

from functools import lru_cache
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.core.eligible import EligibleRows
from ostinato.core.episodes.numpy import CUT, OPEN, NumpyEpisodes
from ostinato.core.records import check_slots
from ostinato.errors import CapacityError, CheckpointError, EmptyBufferError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from ostinato._native import Episodes as NativeEpisodes
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.records import Run

_MAX_CAPACITY = 2**30
"""Records of episodes have 32-bit numbers, and while rows are replaced there may be two for each slot."""


class Spans(NamedTuple):
    """The episodes present, int64 `[count]` each (`closed` is bool); the episode with the oldest row comes first.

    `first` is the slot of the oldest row present, `rows` the number of rows present, `closed` whether the last row ends
    the episode, and `serial` the number of the episode. Serial numbers count from 1 and never repeat.
    """

    first: Tensor
    rows: Tensor
    closed: Tensor
    serial: Tensor


class StepWindows(NamedTuple):
    """What `n` transitions over at most `width` steps read; see `EpisodeTable.steps`."""

    rows: Tensor
    """Slots, int64 `[n, width]`: the rows from the first one on; beyond the episode, its last row."""
    weights: Tensor
    """`[n, width]`: the powers of the rows of the episode, 0 beyond it."""
    steps: Tensor
    """int64 `[n]`: the number of rows of the episode, at least 1."""
    discounts: Tensor
    """float32 `[n]`: the power of that number."""
    last: Tensor
    """Slots, int64 `[n]`: the last row."""


@final
class EpisodeTable:
    """Episode and position of every slot of a ring, recorded when rows are written.

    Rows of one *stream* form one episode until a row ends it. A stream is an environment (`slot % num_envs`) or, where
    rows come with trajectory ids, all rows of one id. Streams may be interleaved in any way. A row that is overwritten
    leaves its episode. A ring overwrites the oldest rows first, so this is always the first row present of the episode;
    the rows that are left still form an episode. An episode without rows is removed.

    Reading never scans. An episode computes its slots while they lie evenly in the ring, and keeps a list of them (4
    bytes a row) otherwise. With the compiled extension each call is one native call. Memory: 4 bytes a slot, and about
    100 bytes for each episode present.

    The table is in host memory. Tensors may be contiguous or not, and on any device; results are on the device of the
    argument, and computing them waits for that device. There is no lock: the lock of the buffer orders writes and
    reads. Several threads may read at once.

    Args:
        capacity: Slots of the ring, in `[1, 2**30]`.
        num_envs: Environments whose rows are interleaved; `capacity` must be a multiple of it.

    Raises:
        CapacityError: For other capacities.

    Examples:
        >>> import torch
        >>> from ostinato.core.records import Run
        >>> from ostinato.core.episodes.table import EpisodeTable
        >>> table = EpisodeTable(capacity=8)
        >>> table.record(Run(0, 5, 8), torch.tensor([False, False, True, False, False]))
        >>> table.ahead(torch.arange(5)).tolist()
        [2, 1, 0, 1, 0]
        >>> slots, valid = table.window(torch.tensor([1, 4]), before=1, after=1)
        >>> slots.tolist(), valid.tolist()
        ([[0, 1, 2], [3, 4, 4]], [[True, True, True], [True, True, False]])
    """

    def __init__(self, capacity: int, num_envs: int = 1) -> None:
        if not 1 <= capacity <= _MAX_CAPACITY:
            msg = f"capacity of an episode table must be in [1, 2**30], got {capacity}"
            raise CapacityError(msg)
        if num_envs < 1 or capacity % num_envs:
            msg = f"num_envs must be at least 1 and divide the capacity {capacity}, got {num_envs}"
            raise CapacityError(msg)
        self.capacity = capacity
        self.num_envs = num_envs
        self._starts: dict[int, Starts] = {}
        self._moved: Tensor | None = None  # see `moved_firsts`; None until `track_firsts` is called
        self.read_from: Episodes | None = None
        """The fields, by name, that the episodes were read from; None if the caller recorded them."""
        native = backend.native
        kind = NumpyEpisodes if native is None else native.Episodes
        self._rows: NativeEpisodes | NumpyEpisodes = kind(capacity, num_envs)

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy of the state, which a table with or without the extension can load."""
        needs, tracks = list(self._starts), self._moved is not None
        return {"state": self.state_dict(), "needs": needs, "tracks": tracks, "read_from": self.read_from}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; the `Starts` are new ones."""
        saved = state["state"]
        EpisodeTable.__init__(self, saved["capacity"], saved["lanes"])
        self.load_state_dict(saved)
        for need in state["needs"]:
            self.starts(need)
        if state["tracks"]:
            self.track_firsts()
        self.read_from = state["read_from"]

    def __repr__(self) -> str:
        """Sizes and counts."""
        return (
            f"EpisodeTable(capacity={self.capacity}, num_envs={self.num_envs}, episodes={self.count}, "
            f"rows={self.rows}, masked={self.masked})"
        )

    @property
    def native(self) -> NativeEpisodes | None:
        """The native table, for native calls; None without the extension, and if more is computed with each write."""
        return None if isinstance(self._rows, NumpyEpisodes) or self._moved is not None else self._rows

    @property
    def rows(self) -> int:
        """Rows present that belong to an episode. O(1)."""
        return self._rows.rows

    @property
    def masked(self) -> int:
        """Rows present that belong to no episode. O(1)."""
        return self._rows.present - self._rows.rows

    @property
    def count(self) -> int:
        """Episodes with rows present. O(1)."""
        return self._rows.count

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._rows.nbytes

    # -- writing ------------------------------------------------------------------------------------------------------

    def record(
        self,
        run: Run,
        ends: Tensor | None,
        trajectories: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Record rows that were written in ring order; O(rows), and O(log episodes) for each episode touched.

        Args:
            run: Where the rows are. It continues where the last one stopped; the first one may begin anywhere.
            ends: bool `[run.total]`, rows that were not stored included: True on the last row of an episode. None: no
                row ends an episode.
            trajectories: int64 `[run.total]`: rows of one id are one stream. After an end the same id begins a new
                episode. None: the stream of a row is its environment. The streams of environments and of ids are
                different streams.
            mask: bool `[run.total]`: False where a row belongs to no episode. It is never drawn nor part of another
                row's window, and interrupts its stream: the rows after it form a new episode. None: all rows belong to
                an episode.

        Raises:
            OptionError: Wrong shapes, dtypes or devices, or a run that does not continue the last one; nothing has
                been recorded then.
        """
        start, rows, capacity, skip = run
        if rows < 1 or capacity != self.capacity or self._moved is not None or type(self._rows) is NumpyEpisodes:
            self._check_run(run)
        total = skip + rows
        flags = None if ends is None else _checked("ends", ends, torch.bool, total)
        ids = None if trajectories is None else _checked("trajectories", trajectories, torch.int64, total)
        inside = None if mask is None else _checked("mask", mask, torch.bool, total)
        if not rows:
            return
        if self._moved is not None:  # rows that become the first ones, as the run overwrites the rows before them
            after = self.shift(run.slots(), 1)
            self._moved = after[(after - start) % capacity >= rows]
        at = [0 if x is None else x.data_ptr() for x in (flags, ids, inside)]
        try:
            self._rows.record_write(start, rows, skip, *at)
        except (IndexError, ValueError):  # of the native table, before it has changed anything
            self._check_run(run)
            raise

    def _check_run(self, run: Run) -> None:
        start, rows, capacity, skip = run
        good = capacity == self.capacity and 0 <= start < capacity and 0 <= rows <= capacity and skip >= 0
        good = good and (not skip or rows == capacity)
        if not good or (self._rows.present and (start - skip - self._rows.cursor) % capacity):
            msg = (
                f"a run in a ring of {self.capacity} must start in it, have at most that many rows, and skip rows "
                f"only if it fills the ring; rows are recorded in ring order: slot {self._rows.cursor} is next, got "
                f"{run}: call clear() before writing from another slot"
            )
            raise OptionError(msg)

    def clear(self) -> None:
        """Remove all rows. Serial numbers continue, and `Starts` stay in use."""
        self._rows.clear()
        if self._moved is not None:
            self._moved = self._moved[:0]

    # -- reading ------------------------------------------------------------------------------------------------------

    def ahead(self, slots: Tensor) -> Tensor:
        """Count the rows after each row in its episode: 0 for the last one, -1 for rows of no episode.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.

        Returns:
            int64 `[n]`.

        Raises:
            SlotError: A slot outside the ring. (All reads raise it.)
            OptionError: A wrong dtype, shape or device. (All reads raise it.)
        """
        return _read(self._rows.ahead, slots, self.capacity, (), (slots.shape, torch.int64))[0]

    def behind(self, slots: Tensor) -> Tensor:
        """Count the rows present before each row in its episode; -1 for rows of no episode. int64 `[n]`."""
        return _read(self._rows.behind, slots, self.capacity, (), (slots.shape, torch.int64))[0]

    def shift(self, slots: Tensor, steps: Tensor | int) -> Tensor:
        """Find the rows that lie some steps later in the same episode.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.
            steps: int64 `[n]`, or one number for all; below zero for earlier rows. Beyond the rows present, the result
                is the first or last row of the episode; for a row of no episode it is the row itself.

        Returns:
            Slots, int64 `[n]`.
        """
        at = _checked("slots", slots, torch.int64)
        if not isinstance(steps, torch.Tensor):
            steps = torch.full_like(at, max(-self.capacity, min(steps, self.capacity)))
        by, out = _checked("steps", steps, torch.int64, at.numel()), torch.empty_like(at)
        try:
            self._rows.shift(at.data_ptr(), by.data_ptr(), at.numel(), out.data_ptr())
        except IndexError:
            check_slots(at, self.capacity)
            raise
        return out if slots.is_cpu else out.to(slots.device)

    def window(self, slots: Tensor, before: int, after: int, dilation: int = 1) -> tuple[Tensor, Tensor]:
        """Find the rows around each row in its episode, T = `before + 1 + after` with itself.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.
            before: Earlier rows of each window, in `[0, 2**31)`.
            after: Later rows of each window, in `[0, 2**31)`.
            dilation: Steps from one row of a window to the next, in `[1, 2**31)`.

        Returns:
            Slots int64 `[n, T]`: entry k is `(k - before) * dilation` steps later, or the first or last row present of
            the episode where that is beyond it. And bool `[n, T]`: True where it was not beyond. A row of no episode
            has only itself.
        """
        shape = (slots.shape[0], before + 1 + after)
        forms = (shape, torch.int64), (shape, torch.bool)
        rows, valid = _read(self._rows.window, slots, self.capacity, (before, after, dilation), *forms)
        return rows, valid

    def slices(self, slots: Tensor, length: int) -> Tensor:
        """Find the rows of slices: `length` rows from each row on; beyond its episode, the last row of that.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.
            length: Rows of each slice, at least 1.

        Returns:
            Slots, int64 `[n * length]`.
        """
        at = _checked("slots", slots, torch.int64)
        out = torch.empty_like(_template((at.shape[0] * length,), torch.int64))
        try:
            self._rows.slices(at.data_ptr(), at.shape[0], length, out.data_ptr())
        except IndexError:
            check_slots(at, self.capacity)
            raise
        return out if slots.is_cpu else out.to(slots.device)

    def place_slices(self, slots: Tensor, length: int, span: tuple[int, int], randoms: Tensor) -> tuple[Tensor, Tensor]:
        """Place one slice in the episode of each row: its first row is uniform among those that it may begin with.

        Args:
            slots: int64 `[n]` in `[0, capacity)`: rows of episodes.
            length: Rows of a slice, at least 1. An episode with fewer is one slice.
            span: Rows by which a slice may begin before the first row of its episode, and end after the last one, both
                below `length`. It is then shorter.
            randoms: int64 `[n]`, uniform in `[0, 2**63)`.

        Returns:
            Slots of the first rows, and the rows of each slice, int64 `[n]` each.
        """
        at = slots.to("cpu", torch.int64).contiguous()
        behind, ahead, first = torch.empty_like(at), torch.empty_like(at), torch.empty_like(at)
        n, address = at.shape[0], at.data_ptr()
        try:
            self._rows.behind(address, n, behind.data_ptr())
            self._rows.ahead(address, n, ahead.data_ptr())
        except IndexError:
            check_slots(at, self.capacity)
            raise
        have = ahead + behind + 1
        full = have.clamp(max=length)
        left, right = (full - 1).clamp(max=span[0]), (full - 1).clamp(max=span[1])
        counts = have - full + right + left + 1
        drawn = ((randoms.cpu() >> 10).to(torch.float64) * 2.0**-53 * counts).to(torch.int64).clamp_(max=counts - 1)
        start = drawn - left
        offsets = start.clamp(min=0)
        lengths = torch.minimum(start + full, have) - offsets
        steps = offsets - behind
        self._rows.shift(address, steps.data_ptr(), n, first.data_ptr())
        return (first, lengths) if slots.is_cpu else (first.to(slots.device), lengths.to(slots.device))

    def steps(self, slots: Tensor, powers: Tensor) -> StepWindows:
        """Find what n-step transitions read: the rows from each row on, of its episode.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.
            powers: float32 or float64 `[width + 1]`, contiguous, on the CPU: the factors of the rows of a window by
                their position, and the discount of a window by the number of its rows.

        Returns:
            New tensors, on the device of `slots`.
        """
        n, width = slots.shape[0], powers.shape[0] - 1
        whole, single = (n, width), (n,)
        forms = (
            (whole, torch.int64),
            (whole, powers.dtype),
            (single, torch.int64),
            (single, torch.float32),
            (single, torch.int64),
        )
        numbers = (width, powers.data_ptr(), powers.dtype is torch.float32)
        return StepWindows(*_read(self._rows.steps, slots, self.capacity, numbers, *forms))

    def stack(self, slots: Tensor, k: int, *, then: bool = False) -> tuple[Tensor, Tensor]:
        """Find the rows of stacks of frames: the `k` rows of its episode up to each row.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.
            k: Rows of each stack, at least 1, or 2 with `then`.
            then: The `k - 1` rows up to each row, and it once more: for the frame that follows it.

        Returns:
            Slots int64 `[n * k]`: before the episode, its first row present. And bool `[n, k]`: which are not before
            the episode.
        """
        n = slots.shape[0]
        forms = ((n * k,), torch.int64), ((n, k), torch.bool)
        rows, valid = _read(self._rows.stack, slots, self.capacity, (k, then), *forms)
        return rows, valid

    def episodes(self) -> Spans:
        """List the episodes present; that with the oldest row comes first. Copies; O(count log count)."""
        first = torch.empty(self._rows.count, dtype=torch.int64, device="cpu")
        lengths, serial, closed = (torch.empty_like(first, dtype=x) for x in (torch.int64, torch.int64, torch.bool))
        spans = Spans(first, lengths, closed, serial)
        self._rows.spans(*map(_address, spans))
        return spans

    def starts(self, need: int) -> Starts:
        """Return the rows with at least `need - 1` rows after them in their episode.

        The first call for a `need` costs O(episodes), and later writes keep one more count up to date; other calls are
        O(1). `need` is at least 1.
        """
        found = self._starts.get(need)
        if found is None:
            found = self._starts[need] = Starts(self._rows, self.capacity, need)
        return found

    def track_firsts(self) -> None:
        """Compute the result of `moved_firsts` from now on; each write then costs O(rows written) more."""
        if self._moved is None:
            self._moved = torch.empty(0, dtype=torch.int64, device="cpu")

    def moved_firsts(self, device: torch.device) -> Tensor:
        """Return the rows that the last write made the first ones of their episodes, by overwriting the rows before.

        Args:
            device: the device of the result.

        Returns:
            Slots, int64 `[n]`, one for each such episode; none before `track_firsts` was called.
        """
        moved = self._moved
        return torch.empty(0, dtype=torch.int64, device=device) if moved is None else moved.to(device)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, a copy: integers and tensors, 4 bytes a row and 26 an episode."""
        rows = self._rows
        sizes = {"episode": rows.present, "free": rows.free_count}
        tensors = {
            name: torch.empty(sizes.get(name, rows.records), dtype=dtype, device="cpu")
            for name, dtype in _ARRAYS.items()
        }
        rows.save(*(x.data_ptr() for x in tensors.values()))
        numbers = {"capacity": self.capacity, "lanes": self.num_envs, "cursor": rows.cursor, "serial": rows.serial}
        return {**numbers, **tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy; every later call returns what it would have returned there.

        `Starts` stay in use. Cost: O(capacity).

        Raises:
            CheckpointError: A damaged state, or one of another capacity or number of environments; nothing has changed
                then.
        """
        tensors = _check_state(state, self.capacity, self.num_envs)
        sizes = (tensors[name].numel() for name in ("episode", "serials", "free"))
        self._rows.load(state["cursor"], state["serial"], *sizes, *(tensors[name].data_ptr() for name in _ARRAYS))
        if self._moved is not None:
            self._moved = self._moved[:0]


@final
class Starts(EligibleRows):
    """Rows that have at least `need - 1` rows after them in their episode; made by `EpisodeTable.starts`.

    The table keeps them up to date. A draw costs O(log episodes) a row, however many rows there are. The rows drawn
    depend on the history of the table and on the random numbers alone, with and without the extension.
    """

    def __init__(self, rows: NativeEpisodes | NumpyEpisodes, capacity: int, need: int) -> None:
        self._rows = rows  # not the table, which holds this object: a cycle would outlive a dropped buffer
        self._capacity = capacity
        self._handle = self._rows.add_need(need)
        self.need = need

    def __repr__(self) -> str:
        """Need and counts."""
        return f"Starts(need={self.need}, rows={self.rows}, episodes={self.episodes})"

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Number of such rows."""
        return self._rows.start_rows(self._handle)

    @property
    def episodes(self) -> int:
        """Episodes of at least `need` rows."""
        return self._rows.start_episodes(self._handle)

    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of these ranks."""
        each, rest = divmod(2**63, max(2, self.rows))  # each rank has these random numbers, one of them more for some
        return self.draw(ranks * each - (-ranks * rest).div(self.rows, rounding_mode="floor"))

    def draw(self, randoms: Tensor, *, by_episode: bool = False) -> Tensor:
        """Draw rows, each with the same probability; or episodes of at least `need` rows, and a row of each.

        Args:
            randoms: int64 `[n]`, uniform in `[0, 2**63)` (higher bits are ignored): of R rows, the one of rank
                `randoms * R >> 63` is drawn. `[2 n]` with `by_episode`: the first half draws episodes, the second rows.
            by_episode: Whether each episode has the same probability, and each row of it that can start.

        Returns:
            Slots, int64 `[n]`.

        Raises:
            EmptyBufferError: There is no such row.
            OptionError: A wrong dtype, shape or device.
        """
        numbers = _checked("randoms", randoms, torch.int64)
        rows = numbers.shape[0] // 2 if by_episode else numbers.shape[0]
        draw = self._rows.draw_episodes if by_episode else self._rows.draw
        out = torch.empty_like(_template((rows,), torch.int64))
        try:
            draw(self._handle, numbers.data_ptr(), rows, out.data_ptr())
        except IndexError as error:
            raise EmptyBufferError(self.why_none(0)) from error
        return out if randoms.is_cpu else out.to(randoms.device)

    def pick(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw `count` rows by random numbers of 63 bits, as slices are drawn."""
        return self.draw(torch.randint(0, 2**63 - 1, (count,), generator=generator, device=device))

    def why_none(self, rows: int) -> str:  # noqa: ARG002
        """Return that no window is complete."""
        return f"no row has {self.need} rows of its episode from itself on: add longer episodes or shorten the window"

    def allowed(self, slots: Tensor) -> Tensor:
        """Tell which of these slots (int64 `[n]`) are such rows: bool `[n]`.

        Raises:
            SlotError: A slot outside the ring.
            OptionError: A wrong dtype, shape or device.
        """
        return _read(self._rows.ahead, slots, self._capacity, (), (slots.shape, torch.int64))[0] >= self.need - 1


_address = torch.Tensor.data_ptr


@lru_cache(maxsize=32)
def _template(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory is never touched: `empty_like` of one takes half the time of `torch.empty`."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _read(
    read: Callable[..., None], slots: Tensor, capacity: int, numbers: tuple[int, ...], *forms: tuple[Any, torch.dtype]
) -> list[Tensor]:
    """Return what `read` writes for some slots, on the device of the slots.

    Args:
        read: gets the address and the number of slots, `numbers`, and the addresses of the results.
        slots: int64 `[n]`.
        capacity: the slots are below it.
        numbers: further arguments.
        forms: shapes and dtypes of the results.
    """
    at = _checked("slots", slots, torch.int64)
    outs = list(map(torch.empty_like, starmap(_template, forms)))
    try:
        read(at.data_ptr(), at.shape[0], *numbers, *map(_address, outs))
    except IndexError:
        check_slots(at, capacity)
        raise
    return outs if slots.is_cpu else [out.to(slots.device) for out in outs]


def _checked(name: str, tensor: Tensor, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """Return the tensor, contiguous and on the CPU.

    Raises:
        OptionError: if it has another dtype, shape or number of rows, or no values to read.
    """
    right = tensor.dtype is dtype and tensor.dim() == 1 and not tensor.is_meta
    if not right or (rows is not None and tensor.numel() != rows):
        msg = (
            f"{name} must be a {dtype} tensor [{'n' if rows is None else rows}], got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}: convert it first"
        )
        raise OptionError(msg)
    here = (tensor if tensor.is_cpu else tensor.cpu()).contiguous()
    if type(here) is not torch.Tensor and here.numel() and not here.data_ptr():
        kind = type(tensor).__name__
        msg = f"{name} has no values on the CPU to read, got a {kind} on {tensor.device}: give a tensor with data"
        raise OptionError(msg)
    return here


# -- saved states -----------------------------------------------------------------------------------------------------

_NUMBERS = ("capacity", "lanes", "cursor", "serial")
_ARRAYS = {
    "episode": torch.int32,
    "serials": torch.int64,
    "keys": torch.int64,
    "kinds": torch.uint8,
    "status": torch.uint8,
    "free": torch.int64,
}


def _check_state(state: Any, capacity: int, num_envs: int) -> dict[str, Tensor]:
    """Return the tensors of a state, contiguous.

    Raises:
        CheckpointError: if it is damaged, or the state of a table of another size.
    """
    _require(isinstance(state, dict) and set(state) == {*_NUMBERS, *_ARRAYS}, "its keys are wrong")
    _require(all(type(state[name]) is int for name in _NUMBERS), "a count is not an integer")
    if (state["capacity"], state["lanes"]) != (capacity, num_envs):
        msg = (
            f"the checkpoint's episode table has capacity {state['capacity']} and {state['lanes']} environments, this "
            f"one {capacity} and {num_envs}: load it into a buffer of the same size"
        )
        raise CheckpointError(msg)
    tensors = {}
    for name, dtype in _ARRAYS.items():
        x = state[name]
        right = isinstance(x, torch.Tensor) and x.dtype is dtype and x.dim() == 1 and x.is_cpu
        _require(right, f"{name} is not {dtype} [n] on the CPU")
        tensors[name] = x.contiguous()
    arrays = {name: x.numpy() for name, x in tensors.items()}
    _check_records(arrays, state)
    return tensors


def _check_records(arrays: dict[str, npt.NDArray[Any]], state: dict[str, Any]) -> None:
    """Check the records, and the streams: each has one open episode at most, and only open episodes have one."""
    episode, serials, keys, kinds, status, free = (arrays[name] for name in _ARRAYS)
    records, capacity = serials.shape[0], state["capacity"]
    _require(0 <= state["cursor"] < capacity and episode.shape[0] <= capacity, "it has more rows than slots")
    _require(records <= 2 * capacity, "it has more records than rows could ever need")
    _require(all(x.shape[0] == records for x in (keys, kinds, status)), "its lengths differ")
    inside = bool(((episode >= -1) & (episode < records)).all())
    _require(inside, "a row is in an episode that does not exist")
    rows = np.bincount(episode[episode >= 0], minlength=records)
    _require(np.array_equal(np.sort(free), np.flatnonzero(rows == 0)), "its free records hold rows")
    _require(not (serials | status)[rows == 0].any(), "a free record has a serial number or a status")
    live = serials[rows > 0]
    _require(bool(((live >= 1) & (live <= state["serial"])).all()), "a serial number is out of range")
    _require(np.unique(live).shape == live.shape and state["serial"] >= 0, "a serial number repeats")
    _require(bool((status <= CUT).all() and (kinds <= 1).all()), "the status or stream of an episode is unknown")
    is_open = (status == OPEN) & (rows > 0)
    _require(not (keys | kinds)[~is_open].any(), "an episode that is closed has a stream")
    streams = np.stack([kinds[is_open].astype(np.int64), keys[is_open]])
    _require(np.unique(streams, axis=1).shape == streams.shape, "two episodes continue in one stream")
    first = state["cursor"] - episode.shape[0]
    envs = (first + np.arange(episode.shape[0])) % capacity % state["lanes"]
    in_env = np.append(is_open & (kinds == 0), [False])[episode]  # the last entry is that of record -1
    _require(np.array_equal(envs[in_env], keys[episode[in_env]]), "an episode has rows of two environments")


def _require(holds: bool, what: str) -> None:  # noqa: FBT001
    if not holds:
        msg = f"the state of the episode table is damaged: {what}; load another checkpoint"
        raise CheckpointError(msg)
