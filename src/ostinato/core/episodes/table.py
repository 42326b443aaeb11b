"""Episodes: which rows belong together, noted when rows are written and never searched for afterwards.

What lives here: the public table and the checks before it. What does not: the bookkeeping itself, which is in the
compiled part or in `core/episodes/numpy.py`, and what a window becomes (units).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato._backend import backend
from ostinato.core.episodes.checks import check_episode_state
from ostinato.core.episodes.native import NativeEpisodes
from ostinato.core.episodes.numpy import PlainEpisodes
from ostinato.errors import CapacityError, EmptyBufferError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.records import Run

__all__ = ["EpisodeTable", "Spans", "Starts"]

_MOST_CAPACITY = 2**30
"""Records of episodes have numbers of 32 bits, and while rows are replaced there may be two for each slot."""

_MOST_STEPS = 2**31 - 1


class Spans(NamedTuple):
    """The episodes present, int64 `[count]` each (`closed` is bool), that with the oldest row first.

    `first` is the slot of the oldest row present, `rows` how many there are, `closed` whether the last one ends the
    episode, and `serial` the number of the episode: they count from 1 and never repeat.
    """

    first: Tensor
    rows: Tensor
    closed: Tensor
    serial: Tensor


@final
class EpisodeTable:
    """Episode and position of every slot of a ring, noted when rows are written.

    Rows of one *stream* follow each other as one episode until a row ends it. A stream is a lane (`slot % lanes`) or,
    where rows come with trajectory ids, all rows of one id; streams may be interleaved in any way. A row that is
    written over leaves its episode; as a ring overwrites the oldest rows first, that is always the first row present.
    What is left of an episode is an episode still; one without rows is forgotten.

    Reading never scans: an episode knows its rows by arithmetic while they lie evenly in the ring, and by a list of
    slots (4 bytes a row) otherwise. With the compiled part each call is one native call. Memory: 4 bytes a slot, and
    about 100 bytes for each episode present.

    The table is in host memory. Tensors may be contiguous or not, and on any device; answers come back to where the
    question came from, which waits for that device. Not locked: the buffer's lock orders notes and reads; reads alone
    may run in several threads at once.

    Args:
        capacity: Slots of the ring, in `[1, 2**30]`.
        lanes: Streams side by side: `capacity` must be a multiple of it.

    Raises:
        CapacityError: For other capacities.

    Example:
        >>> import torch
        >>> from ostinato.core.records import Run
        >>> from ostinato.core.episodes.table import EpisodeTable
        >>> table = EpisodeTable(capacity=8)
        >>> table.note(Run(0, 5, 8), torch.tensor([False, False, True, False, False]))
        >>> table.ahead(torch.arange(5)).tolist()
        [2, 1, 0, 1, 0]
        >>> slots, valid = table.window(torch.tensor([1, 4]), before=1, after=1)
        >>> slots.tolist(), valid.tolist()
        ([[0, 1, 2], [3, 4, 4]], [[True, True, True], [True, True, False]])
    """

    def __init__(self, capacity: int, lanes: int = 1) -> None:
        if not 1 <= capacity <= _MOST_CAPACITY:
            msg = f"capacity of an episode table must be in [1, 2**30], got {capacity}"
            raise CapacityError(msg)
        if lanes < 1 or capacity % lanes:
            msg = f"lanes must be at least 1 and divide the capacity {capacity}, got {lanes}"
            raise CapacityError(msg)
        self.capacity = capacity
        self.lanes = lanes
        self._starts: dict[int, Starts] = {}
        self._moved: Tensor | None = None  # see `moved_firsts`; None until it is asked for
        self._rows: NativeEpisodes | PlainEpisodes
        native = backend.native
        if native is not None:
            self._rows = NativeEpisodes(native.Episodes(capacity, lanes))
        else:
            self._rows = PlainEpisodes(capacity, lanes)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the state, which both kinds of bookkeeping can take over; `Starts` of a copy are its own."""
        return {"state": self.state_dict(), "needs": list(self._starts), "tracks": self._moved is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state over."""
        saved = state["state"]
        EpisodeTable.__init__(self, saved["capacity"], saved["lanes"])
        self.load_state_dict(saved)
        for need in state["needs"]:
            self.starts(need)
        if state["tracks"]:
            self.track_firsts()

    def __repr__(self) -> str:
        """Sizes and counts."""
        return (
            f"EpisodeTable(capacity={self.capacity}, lanes={self.lanes}, episodes={self.count}, rows={self.rows}, "
            f"masked={self.masked})"
        )

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

    def note(
        self,
        run: Run,
        ends: Tensor | None,
        trajectories: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Note rows that were written in ring order; O(rows), and O(log episodes) for each episode touched.

        Args:
            run: Where the rows went. It goes on where the last one stopped; the first one may begin anywhere.
            ends: bool `[run.total]`, rows that were not stored included: True on the last row of an episode. None: no
                row is one.
            trajectories: int64 `[run.total]`: rows of one id are one stream. After an end the same id begins a new
                episode. None: the stream of a row is its lane. Lanes and ids are streams apart.
            mask: bool `[run.total]`: False where a row belongs to no episode. It is never drawn nor part of another
                row's window, and cuts its stream: what follows there is a new episode. None: all belong to one.

        Raises:
            OptionError: Wrong shapes, dtypes or devices, or a run that does not go on; nothing has been noted then.
        """
        self._check_run(run)
        total = run.total
        flags = None if ends is None else _given("ends", ends, torch.bool, total)
        ids = None if trajectories is None else _given("trajectories", trajectories, torch.int64, total)
        belongs = None if mask is None else _given("mask", mask, torch.bool, total)
        if not run.rows:
            return
        if self._moved is not None:
            self._moved = self._next_firsts(run)
        self._rows.note(run.start, run.rows, run.skip, flags, ids, belongs)

    def _next_firsts(self, run: Run) -> Tensor:
        """Find the rows that will be the first ones of their episodes once a run has overwritten those before them."""
        after = self._rows.shift(slots := run.slots(), torch.ones_like(slots))
        return after[(after - run.start) % self.capacity >= run.rows]

    def _check_run(self, run: Run) -> None:
        start, rows, capacity, skip = run
        good = capacity == self.capacity and 0 <= start < capacity and 0 <= rows <= capacity and skip >= 0
        if not good or (skip and rows != capacity):
            msg = (
                f"a run in a ring of {self.capacity} must start in it, have at most that many rows, and skip rows "
                f"only if it fills the ring, got {run}"
            )
            raise OptionError(msg)
        if self._rows.present and (start - skip - self._rows.cursor) % capacity:
            msg = (
                f"rows must be noted in ring order: slot {self._rows.cursor} is next, got {run}: call clear() before "
                "the ring is begun anew"
            )
            raise OptionError(msg)

    def clear(self) -> None:
        """Forget all rows. Serial numbers go on, and `Starts` stay in use."""
        self._rows.clear()
        if self._moved is not None:
            self._moved = self._moved[:0]

    # -- reading ------------------------------------------------------------------------------------------------------

    def ahead(self, slots: Tensor) -> Tensor:
        """Count the rows that follow each row in its episode: 0 for the last one, -1 for rows of no episode.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.

        Returns:
            int64 `[n]`.

        Raises:
            SlotError: A slot outside the ring. (All reads do.)
            OptionError: A wrong dtype, shape or device. (All reads do.)
        """
        return _back(self._rows.ahead(_given("slots", slots, torch.int64)), slots)

    def behind(self, slots: Tensor) -> Tensor:
        """Count the rows present before each row in its episode; -1 for rows of no episode. int64 `[n]`."""
        return _back(self._rows.behind(_given("slots", slots, torch.int64)), slots)

    def shift(self, slots: Tensor, steps: Tensor | int) -> Tensor:
        """Find the rows that lie some steps on in the same episode.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.
            steps: int64 `[n]`, or one number for all; below zero for earlier rows. Beyond the rows present the first
                or last one of the episode is given, and for a row of no episode the row itself.

        Returns:
            Slots, int64 `[n]`.
        """
        at = _given("slots", slots, torch.int64)
        if not isinstance(steps, torch.Tensor):
            steps = torch.full_like(at, max(-self.capacity, min(steps, self.capacity)))
        return _back(self._rows.shift(at, _given("steps", steps, torch.int64, at.numel())), slots)

    def window(self, slots: Tensor, before: int, after: int, dilation: int = 1) -> tuple[Tensor, Tensor]:
        """Find the rows around each row in its episode, T = `before + 1 + after` with itself.

        Args:
            slots: int64 `[n]` in `[0, capacity)`.
            before: Earlier rows of each window, in `[0, 2**31)`.
            after: Later rows of each window, in `[0, 2**31)`.
            dilation: Steps from one row of a window to the next, in `[1, 2**31)`.

        Returns:
            Slots int64 `[n, T]`: entry k is `(k - before) * dilation` steps on, or the first or last row present of
            the episode where that is beyond it. And bool `[n, T]`: True where it was not beyond. A row of no episode
            has only itself.

        Raises:
            OptionError: Numbers out of range.
        """
        if not (0 <= before <= _MOST_STEPS and 0 <= after <= _MOST_STEPS and 1 <= dilation <= _MOST_STEPS):
            msg = (
                "before and after must be in [0, 2**31) and dilation in [1, 2**31), got "
                f"before={before}, after={after}, dilation={dilation}"
            )
            raise OptionError(msg)
        rows, valid = self._rows.window(_given("slots", slots, torch.int64), before, after, dilation)
        return (rows, valid) if slots.is_cpu else (_back(rows, slots), _back(valid, slots))

    def ended(self, slots: Tensor) -> Tensor:
        """Tell which rows end their episode: written with an end flag, not merely the newest so far. bool `[n]`."""
        return _back(self._rows.ended(_given("slots", slots, torch.int64)), slots)

    def episodes(self) -> Spans:
        """List the episodes present, that with the oldest row first. Copies; O(count log count)."""
        return Spans(*self._rows.spans())

    def starts(self, need: int) -> Starts:
        """Return the handle for rows with at least `need - 1` rows after them in their episode.

        The first call for a `need` costs O(episodes) and makes later notes keep one count more; others are O(1).

        Raises:
            OptionError: `need` below 1.
        """
        found = self._starts.get(need)
        if found is None:
            if need < 1:
                msg = f"need must be at least 1 (the row itself), got {need}"
                raise OptionError(msg)
            found = self._starts[need] = Starts(self, self._rows, need)
        return found

    def track_firsts(self) -> None:
        """Keep, from now on, what `moved_firsts` returns; each note then costs O(rows written) more."""
        if self._moved is None:
            self._moved = torch.empty(0, dtype=torch.int64, device="cpu")

    def moved_firsts(self, like: Tensor) -> Tensor:
        """Return the rows that the last note made the first ones of their episodes, by overwriting those before them.

        Args:
            like: a tensor on the device that the slots are wanted on.

        Returns:
            Slots, int64 `[n]`, one for each such episode; none before `track_firsts` was called.
        """
        return _back(torch.empty(0, dtype=torch.int64, device="cpu") if self._moved is None else self._moved, like)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, a copy: integers and tensors, 4 bytes a row and 26 an episode."""
        return {
            "capacity": self.capacity,
            "lanes": self.lanes,
            "cursor": self._rows.cursor,
            "serial": self._rows.serial,
            **self._rows.save(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, by copy; every later call gives what it would have given there.

        `Starts` stay in use. Cost: O(capacity).

        Raises:
            CheckpointError: A damaged state, or one of another capacity or number of lanes; nothing has changed then.
        """
        tensors = check_episode_state(state, self.capacity, self.lanes)
        self._rows.load(state["cursor"], state["serial"], tensors)
        if self._moved is not None:
            self._moved = self._moved[:0]


@final
class Starts:
    """Rows that have at least `need - 1` rows after them in their episode; made by `EpisodeTable.starts`.

    Kept up to date by the table: a draw costs O(log episodes) a row, however many rows there are. What is drawn follows
    from the table's history and the random numbers alone, compiled or not.
    """

    def __init__(self, table: EpisodeTable, rows: NativeEpisodes | PlainEpisodes, need: int) -> None:
        self._table = table
        self._rows = rows
        self._handle = rows.register(need)
        self.need = need

    def __repr__(self) -> str:
        """Need and counts."""
        return f"Starts(need={self.need}, rows={self.rows}, episodes={self.episodes})"

    @property
    def rows(self) -> int:
        """How many such rows there are."""
        return self._rows.start_rows(self._handle)

    @property
    def episodes(self) -> int:
        """Episodes of at least `need` rows."""
        return self._rows.start_episodes(self._handle)

    def draw(self, randoms: Tensor) -> Tensor:
        """Draw rows, each with the same probability.

        Args:
            randoms: int64 `[n]`, uniform in `[0, 2**63)` (higher bits do not count): of R rows, the one of rank
                `randoms * R >> 63` is drawn.

        Returns:
            Slots, int64 `[n]`.

        Raises:
            EmptyBufferError: There is no such row.
            OptionError: A wrong dtype, shape or device.
        """
        try:
            return _back(self._rows.draw(self._handle, _given("randoms", randoms, torch.int64)), randoms)
        except IndexError as error:
            raise EmptyBufferError(self._why_empty()) from error

    def draw_episodes(self, randoms: Tensor) -> Tensor:
        """Draw episodes of at least `need` rows, each with the same probability, then a row that can start in each.

        Args:
            randoms: int64 `[2 n]`, uniform in `[0, 2**63)`: the first half draws episodes, the second rows.

        Returns:
            Slots, int64 `[n]`.

        Raises:
            EmptyBufferError: There is no such row.
            OptionError: A wrong dtype, shape or device, or an odd number of randoms.
        """
        given = _given("randoms", randoms, torch.int64)
        if given.numel() % 2:
            msg = f"randoms must hold two numbers for each row to draw, got {given.numel()} in all"
            raise OptionError(msg)
        try:
            return _back(self._rows.draw_episodes(self._handle, given), randoms)
        except IndexError as error:
            raise EmptyBufferError(self._why_empty()) from error

    def allowed(self, slots: Tensor) -> Tensor:
        """Tell which of these slots (int64 `[n]`) are such rows: bool `[n]`.

        Raises:
            SlotError: A slot outside the ring.
            OptionError: A wrong dtype, shape or device.
        """
        return self._table.ahead(slots) >= self.need - 1

    def _why_empty(self) -> str:
        spans = self._table.episodes()
        longest = int(spans.rows.max()) if spans.rows.numel() else 0
        return (
            f"no episode has the {self.need} rows that are asked for: of {self._table.count} episodes present the "
            f"longest has {longest}: add rows first, or ask for fewer"
        )


def _given(name: str, tensor: Tensor, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """The tensor, contiguous and on the CPU, if it is one of these."""
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


def _back(found: Tensor, like: Tensor) -> Tensor:
    """What was found, on the device that was asked from."""
    return found if like.is_cpu else found.to(like.device)
