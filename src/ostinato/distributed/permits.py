"""Permits that a rate limiter lends to handles, so that several of their calls need one call to its actor.

The logic alone, without Ray, threads or clocks: `Permits` belongs to the limiter, a `Purse` to each handle.

A lent permit is reserved. Until its handle reports that it was used, it is a row for calls of its own side, so that the
band is never exceeded, and none for the other side, which may only count on rows that were written or drawn. So every
call that proceeds on a lent permit would proceed without it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, final

if TYPE_CHECKING:
    from ostinato.buffers.rate_limit import Flow, Stock

__all__ = ["LEASE_S", "NO_PERMITS", "Kind", "Loan", "PermitReport", "Permits", "Purse"]

Kind: TypeAlias = Literal["write", "draw"]

LEASE_S = 1.0
"""How long the limiter keeps permits reserved for a handle that does not report."""
_USE_S = 0.025
"""How long a handle uses permits after it got them."""
_OLDEST_S = 0.5
"""Longest time between a request for permits and its answer; permits that took longer go back unused."""
_SPAN_S = 0.01
"""A handle asks for the permits that it uses in this time."""
_MOST_CALLS = 64
"""Calls that it asks for at most."""
_SMOOTH = 0.2


class PermitReport(NamedTuple):
    """What a handle did with permits: rows."""

    era: int
    """Counts of the limiter that they belong to."""
    written: int = 0
    drawn: int = 0
    unwritten: int = 0
    """Permits for writes that were not used, and go back."""
    undrawn: int = 0


NO_PERMITS = PermitReport(0)


class Loan(NamedTuple):
    """What a call asks for beside its own rows."""

    owner: str
    """The handle."""
    rows: int
    """Rows of permits."""
    report: PermitReport
    """What became of earlier ones."""


# -- the limiter's side -----------------------------------------------------------------------------------------------


class _Lease:
    """Permits that one handle has."""

    def __init__(self) -> None:
        self.rows: dict[Kind, int] = {"write": 0, "draw": 0}
        self.until = 0.0


@final
class Permits:
    """The permits of all handles, and the verdicts with them. Cost of each: O(1), of `expire` O(handles).

    Args:
        flow: The counts of what was written and drawn.
        era: Number of the first counts; other limiters of the same handles have another one.
    """

    def __init__(self, flow: Flow, era: int = 0) -> None:
        self._flow = flow
        self._leases: dict[str, _Lease] = {}
        self._held: dict[Kind, int] = {"write": 0, "draw": 0}
        self.era = era
        """Number of the counts; changes when they begin anew."""

    @property
    def lent(self) -> bool:
        """Whether a handle has permits, of which it may have used some."""
        return any(self._held.values())

    def may(self, kind: Kind, rows: int, stock: Stock) -> bool:
        """Return whether a call may proceed whatever becomes of the permits that are lent."""
        held = self._held[kind]
        if kind == "draw":
            return self._flow.may_draw(rows + held, stock)
        return self._flow.may_write(rows + held, stock._replace(rows=stock.rows + held))

    def most_draws(self, rows: int, stock: Stock) -> int:
        """Return the rows of the largest batch of at most `rows` rows that may be drawn now; 0 if none may."""
        held = self._held["draw"]
        return max(0, self._flow.most_draws(rows + held, stock) - held)

    def lend(self, owner: str, kind: Kind, rows: int, wanted: int, stock: Stock, now: float) -> int:
        """Lend permits to a handle whose call has just proceeded, for calls of the same size.

        At most half of what the band allows: other handles need permits, too.

        Args:
            owner: The handle.
            kind: "write" or "draw".
            rows: Rows of the call.
            wanted: Rows of permits that it asks for.
            stock: What there is.
            now: Seconds, by any clock.

        Returns:
            Rows of permits lent, a multiple of `rows`.
        """
        room = self._flow.write_room() if kind == "write" else self._flow.draw_room(stock)
        free = room - self._held[kind]
        lent = wanted if free == math.inf else min(wanted, int(free) // 2)
        lent -= lent % rows
        if lent <= 0:
            return 0
        lease = self._leases.setdefault(owner, _Lease())
        lease.rows[kind] += lent
        lease.until = now + LEASE_S
        self._held[kind] += lent
        return lent

    def settle(self, owner: str, report: PermitReport) -> bool:
        """Count what a handle has used, and take back what it has not; return whether anything changed.

        Rows that were used after their lease had ended are counted as well: they were written, or drawn.
        """
        if report.era != self.era or not any(report[1:]):
            return False
        self._flow.wrote(report.written)
        self._flow.drew(report.drawn)
        lease = self._leases.get(owner)
        if lease is not None:
            self._take(lease, "write", report.written + report.unwritten)
            self._take(lease, "draw", report.drawn + report.undrawn)
            if not any(lease.rows.values()):
                del self._leases[owner]
        return True

    def expire(self, now: float) -> bool:
        """Take back the permits of handles that have not reported in time; return whether there were any."""
        ended = [owner for owner, lease in self._leases.items() if lease.until <= now]
        for owner in ended:
            lease = self._leases.pop(owner)
            for kind in ("write", "draw"):
                self._take(lease, kind, lease.rows[kind])
        return bool(ended)

    def begin(self) -> None:
        """Forget all permits, because the counts begin anew."""
        self._leases.clear()
        self._held = {"write": 0, "draw": 0}
        self.era += 1

    def _take(self, lease: _Lease, kind: Kind, rows: int) -> None:
        taken = min(rows, lease.rows[kind])
        lease.rows[kind] -= taken
        self._held[kind] -= taken


# -- a handle's side --------------------------------------------------------------------------------------------------


class _Kind:
    """The permits of one kind, and how often calls of this kind are made."""

    def __init__(self) -> None:
        self.rows = 0
        self.used = 0
        self.asked = 0  # rows of permits in requests that were not answered yet
        self.until = -math.inf
        self.ended = -math.inf  # when the last call got its permit
        self.pause_s = math.inf  # between a permit and the next call, smoothed


@final
class Purse:
    """The permits of one handle. Not thread-safe; times are seconds of one clock.

    It asks for as many as its calls use within 10 ms, measured without the time that they wait for permits, and uses
    them for 25 ms. So handles that make a call now and then never hold any.
    """

    def __init__(self) -> None:
        self._era = 0
        self._kinds: dict[Kind, _Kind] = {"write": _Kind(), "draw": _Kind()}

    def take(self, kind: Kind, rows: int, now: float) -> bool:
        """Use permits for a call; False if there are too few."""
        mine = self._kinds[kind]
        mine.pause_s = _smoothed(mine.pause_s, now - mine.ended)
        if rows > mine.rows or now >= mine.until:
            return False
        mine.rows -= rows
        mine.used += rows
        mine.ended = now
        return True

    def asks(self, kind: Kind) -> bool:
        """Return whether permits were asked for, and have not arrived yet."""
        return self._kinds[kind].asked > 0

    def ask(self, kind: Kind, rows: int) -> int:
        """Return the rows of permits to ask for with a call of `rows` rows; its answer must be passed to `receive`."""
        mine = self._kinds[kind]
        if mine.asked or not mine.pause_s < _SPAN_S:
            return 0
        calls = _MOST_CALLS if mine.pause_s * _MOST_CALLS <= _SPAN_S else int(_SPAN_S / mine.pause_s)
        mine.asked = max(0, calls * rows - mine.rows)
        return mine.asked

    def receive(self, kind: Kind, asked: int, lent: int, era: int, sent: float, now: float) -> None:
        """Take the answer of a call that asked for `asked` rows of permits at `sent`; none were lent if it failed."""
        mine = self._kinds[kind]
        mine.asked -= asked
        mine.ended = now
        if not lent:
            return
        if era != self._era:  # permits of earlier counts are void
            self._era = era
            for one in self._kinds.values():
                one.rows = one.used = 0
        mine.rows += lent
        mine.until = now + _USE_S if now - sent < _OLDEST_S else now

    @property
    def due(self) -> float | None:
        """When to report: as soon as permits end; None if there is nothing to report."""
        ends = [one.until for one in self._kinds.values() if one.rows or one.used]
        return min(ends, default=None)

    def report(self, now: float) -> PermitReport:
        """Return what was used, and what goes back because its time is up. Both are reported once."""
        writes, draws = (self._settle(one, now) for one in self._kinds.values())
        return PermitReport(self._era, writes[0], draws[0], writes[1], draws[1])

    @staticmethod
    def _settle(one: _Kind, now: float) -> tuple[int, int]:
        used, one.used = one.used, 0
        unused = one.rows if now >= one.until else 0
        one.rows -= unused
        return used, unused


def _smoothed(mean: float, value: float) -> float:
    """Return a running mean; the first value replaces an infinite one."""
    value = min(value, 2 * _SPAN_S)  # one long pause soon counts no more
    return value if math.isinf(mean) else mean + _SMOOTH * (value - mean)
