"""Snapshots: offers of all shards that several batches are drawn from, so that a batch need not ask every shard."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.core.options import check_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ostinato.buffers.portion import Offer
    from ostinato.distributed.shard_client import ShardClient


MANY_SHARDS = 16
"""From so many shards on, a batch by default does not ask all of them."""
_MANY_AGE_S = 1.0
_MAX_BATCHES = 32
"""Batches that one snapshot serves; also batches of one round with prefetch."""
_FEW_BATCHES = 8
"""Batches of one round with prefetch and few shards, or one actor: more hardly reduce the cost of each."""
_MAX_ROWS = 1 << 15
"""Rows that a shard draws at once for the batches of a snapshot, unless one batch has more."""


def read_age(age_s: Any, shards: int) -> float:
    """Return the option `snapshot_age_s` in seconds; None becomes 0 for fewer than `MANY_SHARDS` shards, else 1.

    Raises:
        OptionError: It is no number of seconds.
    """
    if age_s is None:
        return 0.0 if shards < MANY_SHARDS else _MANY_AGE_S
    words = "a number of seconds of at least 0, or None"
    return check_number("snapshot_age_s", age_s, words, lambda seconds: seconds >= 0)


def batches_per_round(depth: int, shards: int = 1) -> int:
    """Return how many batches to draw at once if `depth` may be ahead: half of them, at most 8, or 32 of many shards.

    The next ones are drawn meanwhile. A round calls each shard about once, so many shards need large rounds.
    """
    return max(1, min(depth // 2, _FEW_BATCHES if shards < MANY_SHARDS else _MAX_BATCHES))


def draws_per_offer(size: int, age_s: float) -> int:
    """Return how many draws an offer of a snapshot has, for batches of `size` rows: those of up to 32 batches."""
    return size * max(1, min(_MAX_BATCHES, _MAX_ROWS // size)) if age_s else size


# -- changes made by this process -------------------------------------------------------------------------------------

_READS = frozenset({"offer", "take", "take_and_offer", "describe", "drawable", "next_home", "save"})
"""Methods of `ShardActor` that leave the distribution as it is."""
_BUFFER_READS = frozenset({"__len__", "__getitem__", "write_count", "stats", "is_alive", "can_sample", "can_insert"})
"""Members of buffers that do."""


@final
class ChangeCounts:
    """Counts the changes that this process has made to each shard. All handles of one process share it. Thread-safe.

    Args:
        shards: Number of shards.
    """

    def __init__(self, shards: int) -> None:
        self._counts = [0] * shards
        self._lock = threading.Lock()

    @classmethod
    def of(cls, actors: Sequence[Any]) -> ChangeCounts:
        """Return the counts of these shards: those of earlier handles, if there are any."""
        with _lock:
            found = _known.get(actors[0])
            if found is None or len(found) != len(actors):
                found = _known[actors[0]] = cls(len(actors))
            return found

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._counts)

    def __getitem__(self, shard: int) -> int:
        """Return the count of a shard."""
        return self._counts[shard]

    def add(self, shards: Iterable[int]) -> None:
        """Record that shards have changed; call it when the call that changes them has ended, with or without error."""
        with self._lock:
            for shard in shards:
                self._counts[shard] += 1

    def record(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """Record a call of a method of several shards, unless it is known to change nothing that is drawn."""
        if method not in _READS:
            self.add(i for i, given in arguments.items() if method != "call" or given[0] not in _BUFFER_READS)


_known: weakref.WeakValueDictionary[Any, ChangeCounts] = weakref.WeakValueDictionary()
_lock = threading.Lock()


# -- snapshots --------------------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """The offer of a shard, and the number of changes known when it was requested."""

    offer: Offer
    changes: int


class Reservation(NamedTuple):
    """The draws that a batch may use: as many of each offer as it has rows."""

    offers: dict[int, Offer]
    renew: bool
    """Whether to request the next offers together with the rows of this batch."""
    rows: int
    """Draws that each of the next offers must have."""
    changes: dict[int, int]
    began: float
    number: int


@final
class Snapshot:
    """Offers of all shards, which several batches are drawn from. Thread-safe.

    An offer holds the mass of a shard and independent draws from it, both of one moment. Each batch chooses its shards
    by the masses, and takes the next draws of each chosen shard. So every batch has the distribution of the whole at
    the moments of the offers, and contacts only the shards that were chosen.

    An offer has enough draws for all batches of the snapshot even if all of these choose the same shard. When offers
    are renewed depends on time, on the number of batches and on what this process has written, never on the choices:
    if offers of shards that are chosen often were renewed earlier, shards with a large mass would be chosen too rarely.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._left = 0  # draws that each offer has left, if all batches have chosen its shard
        self._began = 0.0
        self._number = 0
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Discard all offers."""
        with self._lock:
            self._left = 0

    def reserve(self, shards: ShardClient, size: int, age_s: float) -> Reservation:
        """Reserve draws for a batch, after requesting the offers that are missing.

        Args:
            shards: The shards.
            size: Rows of the batch.
            age_s: Longest age of an offer, in seconds. 0 is for a single reader that requests the next offers with the
                rows of each batch: each offer serves one batch, whenever that is drawn and whatever was written.
        """
        with self._lock:
            now, present = time.monotonic(), shards.present()
            changes = {i: shards.changes[i] for i in present}
            rows = draws_per_offer(size, age_s)
            busy = bool(age_s) and self._mostly_changed(changes)
            if busy or size > self._left or (age_s and now - self._began > age_s):
                self._begin(size if busy else rows, now)
            asked = [i for i in present if not self._valid(i, changes[i] if age_s else None)]
            if asked:
                found = shards.request_offers({i: (self._left, None, None, self._last_number(i)) for i in asked})
                self._held |= {i: _Held(offer, changes[i]) for i, offer in found.items()}
            self._left -= size
            offers = {i: self._held[i].offer for i in present if self._valid(i, None, empty=True)}
            old = self._left < size or now - self._began > age_s / 2
            return Reservation(offers, not age_s or (old and not busy), rows, changes, now, self._number)

    def _mostly_changed(self, changes: dict[int, int]) -> bool:
        """Return whether this process has changed most shards since their offers, as a learner with priorities does.

        Then offers are for one batch each: further draws would not be used.
        """
        known = {i: held.changes for i, held in self._held.items() if held.changes >= 0 and i in changes}
        return bool(known) and 2 * sum(changes[i] != known[i] for i in known) > len(changes)

    def _begin(self, rows: int, now: float) -> None:
        """Begin a snapshot; the offers of the last one stay known, to be dropped in the shards."""
        self._held = {i: held._replace(changes=-1) for i, held in self._held.items()}
        self._left, self._began = rows, now
        self._number += 1

    def _valid(self, shard: int, changes: int | None, *, empty: bool = False) -> bool:
        """Return whether the snapshot has an offer of a shard that includes these changes.

        Without `changes` it may be of any time; then an offer without rows counts only if `empty`.
        """
        held = self._held.get(shard)
        if held is None or held.changes < 0:
            return False
        return held.changes == changes if changes is not None else empty or held.offer.number >= 0

    def _last_number(self, shard: int) -> int | None:
        held = self._held.get(shard)
        return None if held is None else held.offer.number

    def renew(self, reserved: Reservation, offers: Mapping[int, Offer]) -> None:
        """Begin the next snapshot with offers that were requested with the rows of a batch."""
        with self._lock:
            if self._number != reserved.number:
                return  # another thread was faster
            self._held = {i: _Held(offer, reserved.changes[i]) for i, offer in offers.items()}
            self._left, self._began = reserved.rows, reserved.began
            self._number += 1

    def drop(self, offers: Mapping[int, Offer], shards: Iterable[int]) -> None:
        """Discard offers whose rows could not be had."""
        with self._lock:
            for i in shards:
                held = self._held.get(i)
                if held is not None and i in offers and held.offer.number == offers[i].number:
                    del self._held[i]
