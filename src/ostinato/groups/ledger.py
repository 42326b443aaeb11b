"""The ledger of a buffer of groups: which groups there are, and what became of each. No files, locks or clocks.

Every change is an event, a JSON object with a serial number. The same events make the same ledger, so a log of them is
all that has to be kept. Methods that begin with `check` or `choose` raise where a call is wrong and change nothing;
`apply` makes the change of one event.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, final

from ostinato.errors import CheckpointError, OptionError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ostinato.groups.records import Prepared

WAITING, RUNNING, READY, LEASED, TRAINED, DROPPED = STATES = (
    "waiting",
    "running",
    "ready",
    "leased",
    "trained",
    "dropped",
)
OPEN = (WAITING, RUNNING)
"""States in which a group takes responses."""
ENDED = (TRAINED, DROPPED)
TRAINED_GROUPS = 4096
"""So many trained groups keep the ids of their responses, so that a repeated `append` changes nothing."""
ENDED_LEASES = 4096
"""So many ended leases are known, so that a repeated `ack` or `release` changes nothing."""


_INTERNED: dict[tuple[str, ...], tuple[str, ...]] = {}
"""One object for equal columns: most responses have the same."""


class Place(Protocol):
    """Where the values of a record are."""

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""

    def read(self) -> memoryview:
        """Return the body of the record, which can be written."""

    def need(self, nbytes: int) -> None:
        """Add to the bytes that are needed in the file of the place; negative when they are not needed any more."""


class Part(NamedTuple):
    """A part of a response: where its values are, how many tokens it has, and its oldest policy version."""

    place: Place | None
    digest: str
    tokens: int
    version: int | None


@final
@dataclass(slots=True)
class ResponseEntry:
    """A response in the ledger."""

    columns: tuple[str, ...]
    parts: list[Part] = field(default_factory=list)
    done: bool = False


@final
@dataclass(slots=True)
class GroupEntry:
    """A group in the ledger."""

    id: str
    number: int
    """Serial number of its admission, from 0."""
    size: int
    digest: str
    """Of the prompt."""
    index: int
    """Number of the prompt in its record."""
    share: int
    """Bytes of the record that are the prompt's."""
    admitted: float
    place: Place | None = None
    """Where the prompt is."""
    state: str = WAITING
    responses: dict[str, ResponseEntry] = field(default_factory=dict)
    ready: int = 0
    """Serial number of the event that made it ready; 0 before."""
    ended: int = 0
    """Serial number of the event that ended it."""
    step: int = 0
    """Training step of its `ack`."""
    reason: str = ""
    """Why it was dropped."""
    lease: str = ""
    touched: float = 0.0
    """When a part was appended, by the buffer's clock; 0 if the buffer was not opened since."""

    def complete(self) -> int:
        """Return the number of complete responses."""
        return sum(response.done for response in self.responses.values())

    def tokens(self) -> int:
        """Return the tokens of its complete responses."""
        return sum(part.tokens for each in self.responses.values() if each.done for part in each.parts)

    def version(self) -> int | None:
        """Return the oldest policy version of its complete responses."""
        parts = [part for each in self.responses.values() if each.done for part in each.parts]
        return min((part.version for part in parts if part.version is not None), default=None)


class LeaseEntry(NamedTuple):
    """An active lease."""

    groups: tuple[str, ...]
    consumer: str
    until: float


class Position(NamedTuple):
    """A point to which consumption can return: the serial number of its event, and the trainer's step."""

    serial: int
    step: int


def _is_before(group: GroupEntry, position: Position) -> bool:
    """Whether a group had ended at a position: groups trained in later steps had not."""
    return group.ended <= position.serial and (group.state == DROPPED or group.step <= position.step)


@final
class Ledger:
    """The state that events have made."""

    def __init__(self, order: str) -> None:
        """Start without groups.

        Args:
            order: `ready` or `admitted`: the order in which ready groups are leased.
        """
        self._order = order
        self.serial = 0
        """Serial number of the last event."""
        self.groups: dict[str, GroupEntry] = {}
        """Groups that are not trained or dropped for good, by id."""
        self.finished: dict[str, tuple[str, str, Any]] = {}
        """State, digest of the prompt, and step or reason of all others."""
        self.answered: dict[str, dict[str, int]] = {}
        """Parts of each response of the last of these that were trained."""
        self.open: dict[str, GroupEntry] = {}
        """Groups that take responses, in the order of their admission."""
        self.queue: list[tuple[int, str]] = []
        """Ready groups in order: key and id."""
        self.leases: dict[str, LeaseEntry] = {}
        self.ended_leases: dict[str, tuple[str, int]] = {}
        """How the last leases ended, and the step."""
        self.positions: list[Position] = []
        """Positions that tokens may name, oldest first."""
        self.returnable: dict[str, GroupEntry] = {}
        """Trained and dropped groups that a token can bring back, in the order in which they ended."""
        self.cursor: Any = None
        self.admitted = 0
        self.step = 0
        """The trainer's last step."""
        self.tokens = 0
        """Tokens that were appended."""
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        """Groups trained, by the steps between their oldest policy version and their training."""

    # -- checks of calls ----------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Groups that are neither trained nor dropped."""
        return sum(self.counts[state] for state in STATES if state not in ENDED)

    def known(self, group: str) -> tuple[str, str, Any]:
        """Return state, digest of the prompt, and step or reason of a group.

        Raises:
            OptionError: There is no such group.
        """
        entry = self.groups.get(group)
        if entry is not None:
            return entry.state, entry.digest, entry.reason if entry.state == DROPPED else entry.step
        if group not in self.finished:
            msg = f"no group {group!r} was admitted"
            raise OptionError(msg)
        return self.finished[group]

    def check_admit(self, groups: Iterable[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
        """Return those of the groups (id, size, digest of the prompt) that were not admitted before.

        Raises:
            OptionError: An id was admitted with another prompt or size, or occurs twice.
        """
        new, seen = [], set()
        for name, size, digest in groups:
            if name in seen:
                msg = f"the id {name!r} occurs twice in ids"
                raise OptionError(msg)
            seen.add(name)
            if name not in self.groups and name not in self.finished:
                new.append((name, size, digest))
            elif self.known(name)[1] != digest or (name in self.groups and self.groups[name].size != size):
                msg = f"group {name!r} was admitted with another prompt or size: give each group an id of its own"
                raise OptionError(msg)
        return new

    def check_append(self, group: str, response: str, part: int, prepared: Prepared, *, done: bool) -> bool:
        """Return whether a part is new; False for one that was appended before.

        Raises:
            OptionError: There is no such group, or the part has a number or values that cannot be.
            UsageError: The group takes no more responses.
            SchemaError: Its columns differ from those of the parts before it.
        """
        state, _, detail = self.known(group)
        entry = self.groups.get(group)
        known = None if entry is None else entry.responses.get(response)
        if known is not None and part < len(known.parts):
            ends = known.done and part == len(known.parts) - 1
            if known.parts[part].digest != prepared.payload.digest or done != ends:
                msg = f"part {part} of response {response!r} of group {group!r} has other values or another `done`"
                raise OptionError(msg)
            return False
        if part < self.answered.get(group, {}).get(response, 0):
            return False
        if state not in OPEN or entry is None:
            why = f" ({detail})" if state == DROPPED else ""
            msg = f"group {group!r} is {state}{why}: it takes no more responses"
            raise UsageError(msg)
        if known is not None and known.done:
            msg = f"response {response!r} of group {group!r} is complete: it takes no part {part}"
            raise UsageError(msg)
        parts = 0 if known is None else len(known.parts)
        if part != parts:
            msg = f"part {part} of response {response!r} of group {group!r}: part {parts} is next"
            raise OptionError(msg)
        if known is not None and known.columns != prepared.columns:
            msg = (
                f"part {part} of response {response!r} has the tensors {', '.join(prepared.columns)}, the parts "
                f"before it have {', '.join(known.columns)}"
            )
            raise SchemaError(msg)
        if known is None and len(entry.responses) >= entry.size:
            msg = f"group {group!r} has {entry.size} responses, which is its size: no response {response!r}"
            raise UsageError(msg)
        return True

    def choose(self, most: int, least: int, max_tokens: int | None) -> list[str]:
        """Return the next ready groups, in order; none if there are fewer than `least`.

        Raises:
            OptionError: The first has more than `max_tokens` tokens.
        """
        chosen: list[str] = []
        total = 0
        for _, name in self.queue[:most]:
            total += 0 if max_tokens is None else self.groups[name].tokens()
            if max_tokens is not None and total > max_tokens:
                if not chosen:
                    msg = f"max_tokens is {max_tokens}, but group {name!r}, which is next, has {total} tokens"
                    raise OptionError(msg)
                return chosen
            chosen.append(name)
        return chosen if len(chosen) >= least else []

    def check_lease(self, lease: str, wanted: str, step: int = 0) -> bool:
        """Return whether a lease is active; False if it has ended in the way that is `wanted`.

        Raises:
            OptionError: There is no such lease.
            UsageError: It has ended in another way.
        """
        if lease in self.leases:
            return True
        if lease not in self.ended_leases:
            msg = f"no lease {lease!r} is known"
            raise OptionError(msg)
        ended, at = self.ended_leases[lease]
        if (ended, at) != (wanted, step):
            msg = f"lease {lease!r} has ended: {ended}{f' in step {at}' if ended == 'ack' else ''}"
            raise UsageError(msg)
        return False

    def check_drop(self, group: str, reason: str) -> bool:
        """Return whether a group can be dropped; False if it was, with this reason.

        Raises:
            OptionError: There is no such group.
            UsageError: It is trained, or was dropped for another reason.
        """
        state, _, detail = self.known(group)
        if state not in ENDED:
            return True
        if (state, detail) != (DROPPED, reason):
            msg = f"group {group!r} is {state} ({detail}): it cannot be dropped with reason {reason!r}"
            raise UsageError(msg)
        return False

    def made_position(self, step: int) -> Position | None:
        """Return a position of a step that one made now would equal, since no other group has ended at it; or None."""
        now = Position(self.serial, step)
        for made in self.positions:
            ended = (_is_before(group, now) and not _is_before(group, made) for group in self.returnable.values())
            if made.step == step and not any(ended):
                return made
        return None

    def check_position(self, position: Position) -> None:
        """Raise unless consumption can return to a position.

        Raises:
            CheckpointError: It is older than those that are kept, or of a course that was given up.
        """
        if position not in self.positions:
            known = ", ".join(f"step {each.step}" for each in self.positions) or "none"
            msg = (
                f"the token of step {position.step} is not one of those that are kept ({known}): it is older than "
                "keep_positions allows, or the buffer was opened at an earlier token since"
            )
            raise CheckpointError(msg)

    # -- events -------------------------------------------------------------------------------------------------------

    def apply(self, serial: int, event: dict[str, Any], place: Place) -> None:
        """Make the change of an event.

        Raises:
            KeyError: It names a group or lease that is not there.
            ValueError: It is not possible in this state.
        """
        self._EVENTS[event["op"]](self, serial, event, place)
        self.serial = serial

    def _move(self, group: GroupEntry, state: str) -> None:
        """Change the state of a group, and the collections that depend on it."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        if group.state == READY:
            del self.queue[bisect_left(self.queue, self._key(group))]
        if state in OPEN:
            self.open[group.id] = group
        else:
            self.open.pop(group.id, None)
        group.state = state
        if state == READY:
            insort(self.queue, self._key(group))

    def _key(self, group: GroupEntry) -> tuple[int, str]:
        return (group.ready if self._order == "ready" else group.number), group.id

    def _admit(self, _: int, event: dict[str, Any], place: Place) -> None:
        share = place.nbytes // max(1, len(event["groups"]))
        for index, name, size, digest in event["groups"]:
            if name in self.groups or name in self.finished:
                msg = f"group {name} is admitted twice"
                raise ValueError(msg)
            group = GroupEntry(name, self.admitted, size, digest, index, share, event["time"], place)
            place.need(share)
            self.groups[name] = self.open[name] = group
            self.counts[WAITING] += 1
            self.admitted += 1
        self.cursor = event["cursor"]

    def _append(self, serial: int, event: dict[str, Any], place: Place) -> None:
        group = self.open[event["group"]]
        response = group.responses.get(event["response"])
        if response is None:
            columns = tuple(event["columns"])
            response = group.responses[event["response"]] = ResponseEntry(_INTERNED.setdefault(columns, columns))
        response.parts.append(Part(place, event["digest"], event["tokens"], event["version"]))
        response.done = event["done"]
        place.need(place.nbytes)
        self.tokens += event["tokens"]
        if len(group.responses) >= group.size and group.complete() >= group.size:
            group.ready = serial
            self._move(group, READY)
        elif group.state == WAITING:
            self._move(group, RUNNING)

    def _ready(self, serial: int, event: dict[str, Any], _: Place) -> None:
        group = self.open[event["group"]]
        group.ready = serial
        self._move(group, READY)

    def _drop(self, serial: int, event: dict[str, Any], _: Place) -> None:
        group = self.groups[event["group"]]
        group.reason = event["reason"]
        self.reasons[group.reason] += 1
        self._end(serial, group, DROPPED)

    def _end(self, serial: int, group: GroupEntry, state: str) -> None:
        if group.state in ENDED:
            msg = f"group {group.id} has ended before"
            raise ValueError(msg)
        group.ended, group.lease = serial, ""
        self._move(group, state)
        self.returnable[group.id] = group
        if not self.positions:
            self._forget(group)

    def _forget(self, group: GroupEntry) -> None:
        """Keep of a group only how it ended."""
        del self.returnable[group.id], self.groups[group.id]
        detail = group.reason if group.state == DROPPED else group.step
        self.finished[group.id] = group.state, group.digest, detail
        if group.state != DROPPED:
            self.answered[group.id] = {name: len(each.parts) for name, each in group.responses.items()}
            if len(self.answered) > TRAINED_GROUPS:
                del self.answered[next(iter(self.answered))]
        if group.place is not None:
            group.place.need(-group.share)
        for part in (part for response in group.responses.values() for part in response.parts):
            if part.place is not None:
                part.place.need(-part.place.nbytes)

    def _lease(self, _: int, event: dict[str, Any], __: Place) -> None:
        name, members = event["lease"], tuple(event["groups"])
        for group in (self.groups[each] for each in members):
            if group.state != READY:
                msg = f"group {group.id} is leased, but not ready"
                raise ValueError(msg)
            group.lease = name
            self._move(group, LEASED)
        self.leases[name] = LeaseEntry(members, event["consumer"], event["until"])

    def _ended_lease(self, name: str, how: str, step: int) -> list[GroupEntry]:
        """Remove a lease; return its groups that were not dropped meanwhile."""
        lease = self.leases.pop(name)
        self.ended_leases[name] = how, step
        if len(self.ended_leases) > ENDED_LEASES:
            del self.ended_leases[next(iter(self.ended_leases))]
        return [group for each in lease.groups if (group := self.groups.get(each)) and group.lease == name]

    def _ack(self, serial: int, event: dict[str, Any], _: Place) -> None:
        step = event["step"]
        for group in self._ended_lease(event["lease"], "ack", step):
            group.step = step
            version = group.version()
            if version is not None:
                self.staleness[step - version] += 1
            self._end(serial, group, TRAINED)
        self.step = max(self.step, step)

    def _renew(self, _: int, event: dict[str, Any], __: Place) -> None:
        lease = self.leases[event["lease"]]
        self.leases[event["lease"]] = lease._replace(until=event["until"])

    def _release(self, _: int, event: dict[str, Any], __: Place) -> None:
        self._end_lease(event["lease"], event["how"])

    def _end_lease(self, lease: str, how: str) -> None:
        for group in self._ended_lease(lease, how, 0):
            group.lease = ""
            self._move(group, READY)

    def _position(self, serial: int, event: dict[str, Any], _: Place) -> None:
        self.positions = [*self.positions, Position(serial, event["step"])][-event["keep"] :]
        ended = takewhile(lambda group: group.ended <= self.positions[0].serial, self.returnable.values())
        for group in list(ended):
            if _is_before(group, self.positions[0]):
                self._forget(group)

    def _rewind(self, _: int, event: dict[str, Any], __: Place) -> None:
        position = Position(event["serial"], event["step"])
        self.positions = [each for each in self.positions if each.serial <= position.serial]
        for name in list(self.leases):
            self._end_lease(name, "returned to a token")
        for group in list(self.returnable.values()):
            if _is_before(group, position) or (group.state == DROPPED and not event["dropped"]):
                continue
            del self.returnable[group.id]
            self.reasons[group.reason] -= group.state == DROPPED
            group.ended, group.step, group.reason = 0, 0, ""
            self._move(group, READY if group.ready else RUNNING if group.responses else WAITING)
        self.open = dict(sorted(self.open.items(), key=lambda item: item[1].number))
        self.step = position.step

    _EVENTS: ClassVar[dict[str, Callable[[Ledger, int, dict[str, Any], Place], None]]] = {
        "admit": _admit,
        "append": _append,
        "ready": _ready,
        "drop": _drop,
        "lease": _lease,
        "ack": _ack,
        "release": _release,
        "renew": _renew,
        "position": _position,
        "rewind": _rewind,
    }

    # -- the state of a compacted log ---------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the ledger without the places of its values."""
        return {
            "op": "state",
            **{name: getattr(self, name) for name in _NUMBERS},
            "groups": [_to_json(group) for group in self.groups.values()],
            "returnable": list(self.returnable),
            "finished": [[name, *how] for name, how in self.finished.items()],
            "answered": list(self.answered.items()),
            "leases": [[name, *lease] for name, lease in self.leases.items()],
            "ended_leases": [[name, *how] for name, how in self.ended_leases.items()],
            "positions": [list(position) for position in self.positions],
            "reasons": dict(self.reasons),
            "staleness": list(self.staleness.items()),
        }

    @classmethod
    def from_json(cls, node: dict[str, Any], order: str) -> Self:
        """Return the ledger that `to_json` described; `put` adds the places.

        Raises:
            KeyError: Something is missing.
            TypeError: Something is of another type.
            ValueError: Something is of another form.
        """
        ledger = cls(order)
        for name in _NUMBERS:
            setattr(ledger, name, node[name])
        for group in map(_from_json, node["groups"]):
            ledger.groups[group.id] = group
            ledger.counts[group.state] += 1
            if group.state in OPEN:
                ledger.open[group.id] = group
            elif group.state == READY:
                insort(ledger.queue, ledger._key(group))
        ledger.returnable = {name: ledger.groups[name] for name in node["returnable"]}
        ledger.finished = {name: (state, digest, detail) for name, state, digest, detail in node["finished"]}
        ledger.counts.update(state for state, _, _ in ledger.finished.values())
        ledger.answered = {name: dict(parts) for name, parts in node["answered"]}
        ledger.leases = {
            name: LeaseEntry(tuple(groups), consumer, until) for name, groups, consumer, until in node["leases"]
        }
        ledger.ended_leases = {name: (how, step) for name, how, step in node["ended_leases"]}
        ledger.positions = [Position(serial, step) for serial, step in node["positions"]]
        ledger.reasons.update(node["reasons"])
        ledger.staleness.update(dict(node["staleness"]))
        return ledger

    def put(self, event: dict[str, Any], place: Place) -> None:
        """Set where the values of an `admit` or `append` are now; does nothing for groups that have ended for good.

        Raises:
            KeyError: The event has no such values.
            IndexError: The part is not there.
        """
        if event["op"] == "append":
            group = self.groups.get(event["group"])
            if group is not None:
                parts = group.responses[event["response"]].parts
                parts[event["part"]] = parts[event["part"]]._replace(place=place)
                place.need(place.nbytes)
            return
        for _, name, _, _ in event["groups"]:
            group = self.groups.get(name)
            if group is not None:
                group.place = place
                place.need(group.share)

    def is_whole(self) -> bool:
        """Whether it is known where the values of all groups are."""
        groups = self.groups.values()
        parts = (part for group in groups for each in group.responses.values() for part in each.parts)
        return all(group.place is not None for group in groups) and all(part.place is not None for part in parts)

    def places(self) -> dict[Place, None]:
        """Return where the values of all groups are, each place once."""
        found = dict.fromkeys(group.place for group in self.groups.values())
        for group in self.groups.values():
            for response in group.responses.values():
                found.update(dict.fromkeys(part.place for part in response.parts))
        return {place: None for place in found if place is not None}


_NUMBERS = ("serial", "cursor", "admitted", "step", "tokens")
_FIELDS = ("id", "number", "size", "digest", "index", "share", "admitted")
_COURSE = ("state", "ready", "ended", "step", "reason", "lease")


def _to_json(group: GroupEntry) -> list[Any]:
    responses = [
        [name, each.columns, each.done, [[part.digest, part.tokens, part.version] for part in each.parts]]
        for name, each in group.responses.items()
    ]
    return [*(getattr(group, name) for name in _FIELDS + _COURSE), responses]


def _from_json(node: list[Any]) -> GroupEntry:
    *values, responses = node
    fields = dict(zip(_FIELDS + _COURSE, values, strict=True))
    if fields["state"] not in STATES:
        msg = f"group {fields['id']} has the unknown state {fields['state']}"
        raise ValueError(msg)
    group = GroupEntry(**fields)
    for name, columns, done, parts in responses:
        key = tuple(columns)
        entry = group.responses[name] = ResponseEntry(_INTERNED.setdefault(key, key), done=done)
        entry.parts = [Part(None, digest, tokens, version) for digest, tokens, version in parts]
    return group
