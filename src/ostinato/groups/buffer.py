"""`GroupBuffer`: groups of responses to one prompt, each trained exactly once."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypedDict, Unpack, final

from ostinato.core.options import check_choice, check_integer, check_number
from ostinato.durable.files import DirectoryLock, make_directories, new_token
from ostinato.durable.manifest import MANIFEST_NAME, canonical, read_manifest, write_manifest
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    OptionError,
    OstinatoError,
    UsageError,
    WaitTimeoutError,
)
from ostinato.groups.ledger import DROPPED, ENDED, STATES, GroupEntry, Ledger, Position
from ostinato.groups.log import Log, MemoryLog, Sync
from ostinato.groups.records import (
    Group,
    Held,
    Lease,
    Payload,
    Recent,
    Response,
    copied,
    join,
    pack,
    payload_of,
    prepare,
)
from ostinato.groups.recovery import FORMAT, Cut, clean, log_files, replay, write_base
from ostinato.groups.stats import GroupStats, Meter, histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WAIT_S = 60.0
"""How long calls wait unless they are told otherwise."""
_ENDING = {"ack", "drop", "position"}
"""Events after which groups may need fewer bytes."""
_ADMITTED_AT_ONCE = 256
"""Prompts of a record, which is read as a whole for each of them."""
_MOVED_AT_ONCE = 500
"""Records whose new places are noted while the lock is held once."""


class GroupOptions(TypedDict, total=False):
    """Options of a `GroupBuffer`; see there."""

    size: int
    ahead: int | None
    timeout_s: float | None
    minimum: int | None
    fail: bool
    order: Literal["ready", "admitted"]
    lease_s: float
    sync: Sync
    interval_s: float
    segment_bytes: int
    recent_bytes: int
    keep_positions: int
    repair: bool
    clock: Callable[[], float]


@final
class GroupBuffer:
    """Groups of responses to one prompt, which are leased to trainers and trained exactly once.

    A group is *waiting* for its first response, *running* until it has all, *ready*, *leased*, and *trained* or
    *dropped*. In a folder, each change is appended to a log before the call returns, and `GroupBuffer.open` makes the
    same state from it. Only an index is in memory; responses are read from the log when they are leased.

    All methods are thread-safe. A call with an id that was seen before changes nothing, so that it can be repeated
    after a crash. A wrong call raises and changes nothing.

    Args:
        path: Folder of the log, which is created or opened; None keeps everything in memory.
        size: Responses of a group, unless `admit` gives another number.
        ahead: Most groups that may be admitted and neither trained nor dropped; `admit` waits at this number. With `B`
            groups for each step, `B * (k + 1)` bounds the age of a group at `k` steps. None is no bound.
        timeout_s: Seconds from its admission after which a group is ready with `minimum` complete responses.
        minimum: Complete responses that are enough then; `size` by default.
        fail: Whether a group that has fewer then is dropped with reason `timeout`; it waits for them otherwise.
        order: Whether the group that was `ready` first or `admitted` first is leased first. In either order, a group
            that is not ready holds up none.
        lease_s: Seconds after which a lease expires, and its groups are ready again.
        sync: When a call returns: `always`, with the change on the disk, so that a power cut loses nothing;
            `interval`, with the change written, so that a power cut loses at most the last `interval_s` seconds;
            `never`, with the change written, so that a power cut loses what the system has not put on the disk. A
            killed process loses nothing with any of them.
        interval_s: See `sync`.
        segment_bytes: Size of the files of the log. Compaction works on whole files.
        recent_bytes: Most bytes of records whose values are kept in memory, too, until their group is leased; what is
            beyond is read from the files.
        keep_positions: So many of the last tokens of `position` can be returned to; groups trained before the oldest of
            them are removed from the disk.
        repair: Whether a log that is damaged elsewhere than at its end is cut there; it is an error otherwise.
        clock: Seconds since the epoch.

    Raises:
        OptionError: An option is out of its range.
        CheckpointError: The folder is in use, or holds something else.
        DamagedFileError: The log is damaged.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        size: int = 8,
        ahead: int | None = None,
        timeout_s: float | None = None,
        minimum: int | None = None,
        fail: bool = False,
        order: Literal["ready", "admitted"] = "ready",
        lease_s: float = 600.0,
        sync: Sync = "always",
        interval_s: float = 0.05,
        segment_bytes: int = 64 * 2**20,
        recent_bytes: int = 256 * 2**20,
        keep_positions: int = 3,
        repair: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._size = check_integer("size", size, 1)
        self._ahead = None if ahead is None else check_integer("ahead", ahead, 1)
        self._timeout_s = None if timeout_s is None else _seconds("timeout_s", timeout_s)
        self._minimum = None if minimum is None else check_integer("minimum", minimum, 1)
        _seconds("interval_s", interval_s)
        check_integer("segment_bytes", segment_bytes, 1)
        self._recent = Recent(check_integer("recent_bytes", recent_bytes, 0))
        if timeout_s is None and (minimum is not None or fail):
            msg = "minimum and fail say what becomes of a group after timeout_s: give timeout_s, too"
            raise OptionError(msg)
        self._fail = fail
        self._order = check_choice("order", order, ("ready", "admitted"))
        self._lease_s = _seconds("lease_s", lease_s)
        check_choice("sync", sync, ("always", "interval", "never"))
        self._keep = check_integer("keep_positions", keep_positions, 1)
        self._clock, self._meter = clock, Meter(clock)
        self._changed = threading.Condition()
        """The lock of the buffer; notified when a call that waits might go on."""
        self._folder = None if path is None else Path(path)
        self._name = ""
        self._lock: DirectoryLock | None = None
        self._compaction = threading.Lock()
        """Held during a compaction."""
        self._problem = ""
        self._cuts: list[Cut] = []
        self._ledger = Ledger(self._order)
        self._log: Log | MemoryLog = MemoryLog()
        if self._folder is not None:
            self._open(self._folder, sync, interval_s, segment_bytes, repair=repair)
        self._pending = dict(self._ledger.open)
        """Groups whose timeout is to come, in the order of their admission."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        at: Mapping[str, Any] | None = None,
        restore_dropped: bool = False,
        **options: Unpack[GroupOptions],
    ) -> Self:
        """Open a buffer that exists, and return its consumption to a token.

        Without a token, active leases go on until they expire, and trained groups stay trained. With one, all leases
        end; groups trained after the token are ready again and are leased first, in the order `ready` or `admitted`.

        Args:
            path: Its folder.
            at: What `position` returned, from the trainer's own checkpoint.
            restore_dropped: Whether groups dropped after the token return, too; they stay dropped otherwise.
            **options: As for `GroupBuffer`.

        Raises:
            CheckpointNotFoundError: There is no buffer at the path.
            CheckpointError: The token is of another buffer or of another course, or older than those that are kept.
        """
        if not (Path(path) / MANIFEST_NAME).exists():
            msg = f"no buffer of groups at {path}: create one with GroupBuffer({str(path)!r})"
            raise CheckpointNotFoundError(msg)
        buffer = cls(path, **options)
        try:
            if at is not None:
                buffer.return_to(at, restore_dropped=restore_dropped)
        except BaseException:
            buffer.close()
            raise
        return buffer

    def _open(self, folder: Path, sync: Sync, interval_s: float, segment_bytes: int, *, repair: bool) -> None:
        make_directories(folder)
        lock = DirectoryLock(folder)
        try:
            lock.acquire()
        except CheckpointError as error:
            msg = f"{folder} is open in another process or buffer: close that first"
            raise CheckpointError(msg) from error
        try:
            if not (folder / MANIFEST_NAME).exists():
                if log_files(folder):
                    msg = f"{folder} has files of a log of groups, but no {MANIFEST_NAME}: restore it from a copy"
                    raise DamagedFileError(msg)
                write_manifest(folder, {"log": new_token()}, format_name=FORMAT)
            self._name = str(read_manifest(folder, format_name=FORMAT).body.get("log"))
            replayed = replay(folder, self._name, self._order, repair=repair)
            clean(replayed)
            self._ledger, self._cuts = replayed.ledger, replayed.cuts
            self._log = Log(replayed.found, sync, interval_s, segment_bytes)
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    # -- changes ------------------------------------------------------------------------------------------------------

    def _record(self, event: dict[str, Any], payload: Payload | None = None) -> int:
        """Write an event and make its change; return its serial number. The lock is held."""
        serial, place = self._log.write(pack(event, payload))
        self._ledger.apply(serial, event, place)
        self._meter.record(event)
        self._changed.notify_all()
        if event["op"] == "drop":
            self._recent.take(event["group"])
        if event["op"] in _ENDING and isinstance(self._log, Log) and not self._problem and self._log.is_wasteful():
            self._compact_apart()
        return serial

    def _tick(self) -> float:
        """End leases and timeouts that are due; return the seconds until the next one. The lock is held."""
        now = self._clock()
        for name in [name for name, lease in self._ledger.leases.items() if lease.until <= now]:
            self._record({"op": "release", "lease": name, "how": "expired"})
        due = min((lease.until for lease in self._ledger.leases.values()), default=math.inf)
        while self._timeout_s is not None and self._pending:
            group = next(iter(self._pending.values()))
            if group.admitted + self._timeout_s > now:
                due = min(due, group.admitted + self._timeout_s)
                break
            del self._pending[group.id]
            self._end_waiting(group)
        return due - now

    def _end_waiting(self, group: GroupEntry) -> None:
        """Apply the rule for groups that have waited for `timeout_s`."""
        if group.id not in self._ledger.open:
            return
        minimum = group.size if self._minimum is None else min(self._minimum, group.size)
        if group.complete() >= minimum:
            self._record({"op": "ready", "group": group.id})
        elif self._fail:
            self._record({"op": "drop", "group": group.id, "reason": "timeout"})

    def _wait(self, deadline: float, due_s: float, problem: str) -> None:
        """Wait for a change until the next lease or timeout is due. The lock is held.

        Raises:
            WaitTimeoutError: The deadline has passed.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            msg = f"{problem}: {self._counts()}"
            raise WaitTimeoutError(msg)
        self._changed.wait(min(left, max(due_s, 0.001)))

    def admit(
        self,
        prompts: Sequence[Any],
        *,
        ids: Sequence[str] | None = None,
        size: int | None = None,
        cursor: Any = None,
        timeout_s: float = WAIT_S,
    ) -> list[str]:
        """Admit prompts, each as a group; all of them, or none if there is an error.

        Args:
            prompts: Text, tokens, or dicts with metadata and media: tensors, arrays and whatever JSON can hold.
            ids: Id of each group; `0`, `1` and so on in the order of admission by default. Groups that were admitted
                before, with the same prompt, are left as they are.
            size: Responses of each group.
            cursor: JSON value that says where the data stands behind these prompts; it is stored together with them,
                with the last 256 of more than 256.
            timeout_s: Seconds to wait for room; 0 raises at once.

        Returns:
            The id of each group.

        Raises:
            WaitTimeoutError: There is no room (see `ahead`).
            OptionError: An id was admitted with another prompt or size, or occurs twice.
            CheckpointError: A prompt has a part that cannot be saved.
        """
        sizes = self._size if size is None else check_integer("size", size, 1)
        prompts = list(prompts)
        digests = [Payload.of(prompt, f"prompts[{number}]").digest for number, prompt in enumerate(prompts)]
        _check_json("cursor", cursor)
        names = None if ids is None else [_name("ids", each) for each in ids]
        if names is not None and len(names) != len(prompts):
            msg = f"ids has {len(names)} ids for {len(prompts)} prompts"
            raise OptionError(msg)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                due_s = self._tick()
                given = names or [str(self._ledger.admitted + number) for number in range(len(prompts))]
                new = self._ledger.check_admit(zip(given, (sizes for _ in given), digests, strict=True))
                if self._has_room(len(new)):
                    break
                self._wait(deadline, due_s, f"no room for {len(new)} groups")
            by_name = dict(zip(given, prompts, strict=True))
            for start in range(0, len(new), _ADMITTED_AT_ONCE):
                chunk = new[start : start + _ADMITTED_AT_ONCE]
                reached = self._ledger.admitted + len(chunk)
                if cursor is not None:
                    reached = cursor if start + len(chunk) == len(new) else self._ledger.cursor
                self._record_admission(chunk, [by_name[name] for name, _, _ in chunk], reached)
            serial = self._log.written
        self._log.wait(serial)
        return list(given)

    def _record_admission(self, groups: list[tuple[str, int, str]], prompts: list[Any], cursor: Any) -> None:
        event = {
            "op": "admit",
            "groups": [[index, *group] for index, group in enumerate(groups)],
            "cursor": cursor,
            "time": self._clock(),
        }
        payload = Payload.of(prompts, "prompts")
        self._record(event, payload)
        self._pending.update((name, self._ledger.groups[name]) for name, _, _ in groups)
        self._recent.admit([name for name, _, _ in groups], prompts, payload.nbytes)

    def _has_room(self, count: int) -> bool:
        if self._ahead is None or not count:
            return True
        if count > self._ahead:
            msg = f"{count} prompts are more than the {self._ahead} groups that may be ahead: admit fewer at a time"
            raise OptionError(msg)
        return self._ledger.live + count <= self._ahead

    def append(
        self,
        group: str,
        response: Mapping[str, Any],
        *,
        id: str,  # noqa: A002
        part: int = 0,
        done: bool = True,
    ) -> bool:
        """Append a response, or a part of one.

        Args:
            group: Id of the group.
            response: `tokens` (integers `[N]`), and optionally `mask` and `logprobs` (`[N]`), `reward` (a number,
                `[N]`, or a dict of those by name), `version` (of the policy: an integer, or `[N]`), and any other
                fields: tensors of any shape, and what JSON can hold.
            id: Id of the response, unique in its group.
            part: Number of the part, from 0. Tensors of the parts are joined along their first dimension.
            done: Whether the response is complete with it.

        Returns:
            Whether it is new; False if it was appended before, which changes nothing.

        Raises:
            OptionError: There is no such group, or another part is next.
            UsageError: The group takes no more responses: it is ready, leased, trained or dropped.
            SchemaError: Sizes disagree.
            KindError: A field is not of its kind.
        """
        prepared = prepare(response)
        event = {
            "op": "append",
            "group": _name("group", group),
            "response": _name("id", id),
            "part": check_integer("part", part, 0),
            "done": bool(done),
            "tokens": prepared.tokens,
            "version": prepared.version,
            "columns": prepared.columns,
            "digest": prepared.payload.digest,
        }
        body = pack(event, prepared.payload)
        fields = copied(prepared.fields) if group in self._recent else None
        with self._changed:
            new = self._ledger.check_append(group, id, part, prepared, done=bool(done))
            serial = self._log.written
            if new:
                serial, place = self._log.write(body)
                self._ledger.apply(serial, event, place)
                self._meter.record(event)
                self._recent.append(group, id, fields, place.nbytes)
                entry = self._ledger.groups[group]
                entry.touched = self._clock()
                if entry.id in self._ledger.open and self._timeout_s is not None and entry.id not in self._pending:
                    self._end_waiting(entry)
                if entry.id not in self._ledger.open:
                    self._pending.pop(entry.id, None)
                    self._changed.notify_all()
        self._log.wait(serial)
        return new

    def drop(self, group: str, reason: str) -> bool:
        """Drop a group that is not trained; a leased one is taken out of its lease.

        Returns:
            Whether it is new; False if the group was dropped with this reason before.

        Raises:
            OptionError: There is no such group.
            UsageError: It is trained, or was dropped for another reason.
        """
        _name("reason", reason)
        with self._changed:
            new = self._ledger.check_drop(_name("group", group), reason)
            serial = self._record({"op": "drop", "group": group, "reason": reason}) if new else self._log.written
        self._log.wait(serial)
        return new

    # -- leases -------------------------------------------------------------------------------------------------------

    def lease(
        self,
        n: int = 1,
        *,
        max_tokens: int | None = None,
        least: int | None = None,
        consumer: str = "",
        id: str | None = None,  # noqa: A002
        timeout_s: float = WAIT_S,
    ) -> Lease:
        """Lease the next ready groups. They are no other consumer's until the lease is released or expires.

        Args:
            n: Most groups.
            max_tokens: Most tokens of their responses together; the first group that does not fit ends the lease.
            least: Fewest groups to wait for; `n` by default, 1 with `max_tokens`.
            consumer: Name of the consumer, for `leases`.
            id: Name of the lease; a lease of this name that is active is returned again. Random by default.
            timeout_s: Seconds to wait; 0 raises at once.

        Raises:
            WaitTimeoutError: Too few groups are ready.
            OptionError: The next group alone has more than `max_tokens` tokens.
            UsageError: The lease of this name has ended.
        """
        most = check_integer("n", n, 1)
        least = (1 if max_tokens is not None else most) if least is None else check_integer("least", least, 1)
        name = new_token() if id is None else _name("id", id)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            due_s = self._tick()
            if name in self._ledger.ended_leases:
                msg = f"lease {name!r} has ended ({self._ledger.ended_leases[name][0]}): give another id"
                raise UsageError(msg)
            while name not in self._ledger.leases:
                chosen = self._ledger.choose(most, min(least, most), max_tokens)
                if chosen:
                    until = self._clock() + self._lease_s
                    event = {"op": "lease", "lease": name, "groups": chosen, "consumer": consumer, "until": until}
                    self._record(event)
                    break
                self._wait(deadline, due_s, f"fewer than {least} groups are ready")
                due_s = self._tick()
            serial = self._log.written
            entry = self._ledger.leases[name]
            members = [self._ledger.groups[each] for each in entry.groups if each in self._ledger.groups]
            plans = [_plan(each, self._recent.take(each.id)) for each in members if each.lease == name]
        self._log.wait(serial)
        try:
            return Lease(name, _read(plans), entry.consumer, entry.until)
        except DamagedFileError:
            self.release(name)
            raise

    def ack(self, lease: str | Lease, *, step: int) -> bool:
        """Declare the groups of a lease trained, in a step of the trainer.

        Args:
            lease: The lease or its id.
            step: Number of the step, which is also the version of the policy behind it.

        Returns:
            Whether it is new; False if the lease was acknowledged with this step before.

        Raises:
            OptionError: There is no such lease.
            UsageError: It has expired or was released, or was acknowledged with another step.
        """
        name, step = _lease_name(lease), check_integer("step", step, 0)
        return self._end_lease(name, "ack", step, {"op": "ack", "lease": name, "step": step})

    def renew(self, lease: str | Lease) -> float:
        """Let a lease expire `lease_s` seconds from now: a consumer that trains for long calls this in between.

        Returns:
            When it expires, in seconds of the buffer's clock. A call that is repeated renews the lease again.

        Raises:
            OptionError: There is no such lease.
            UsageError: It has expired, was released, or was acknowledged.
        """
        name = _lease_name(lease)
        with self._changed:
            self._tick()
            self._ledger.check_lease(name, "")
            until = self._clock() + self._lease_s
            serial = self._record({"op": "renew", "lease": name, "until": until})
        self._log.wait(serial)
        return until

    def release(self, lease: str | Lease) -> bool:
        """Return the groups of a lease, which are ready again.

        Returns:
            Whether it is new; False if the lease was released before.

        Raises:
            OptionError: There is no such lease.
            UsageError: It has expired or was acknowledged.
        """
        name = _lease_name(lease)
        return self._end_lease(name, "released", 0, {"op": "release", "lease": name, "how": "released"})

    def _end_lease(self, name: str, how: str, step: int, event: dict[str, Any]) -> bool:
        with self._changed:
            self._tick()
            new = self._ledger.check_lease(name, how, step)
            serial = self._record(event) if new else self._log.written
        self._log.wait(serial)
        return new

    def leases(self, consumer: str | None = None) -> dict[str, tuple[str, ...]]:
        """Return the groups of each active lease, of one consumer or of all."""
        with self._changed:
            self._tick()
            found = self._ledger.leases.items()
            return {name: lease.groups for name, lease in found if consumer in (None, lease.consumer)}

    # -- positions ----------------------------------------------------------------------------------------------------

    def position(self, step: int) -> dict[str, Any]:
        """Return a token for the trainer's checkpoint: `open(path, at=token)` returns consumption to this point.

        Groups acknowledged before this call, in steps up to `step`, are trained there. Groups acknowledged before the
        first token cannot be returned: a trainer that may start again without a checkpoint asks for one at step 0.
        A call that is repeated returns the same token, unless a group was trained in such a step or dropped meanwhile.

        Raises:
            OptionError: `step` is negative.
        """
        event = {"op": "position", "step": check_integer("step", step, 0), "keep": self._keep}
        with self._changed:
            self._tick()
            made = self._ledger.made_position(step)
            serial = self._record(event) if made is None else made.serial
        self._log.wait(serial)
        return {"format": FORMAT, "log": self._name, "serial": serial, "step": step}

    def return_to(self, token: Mapping[str, Any], *, restore_dropped: bool = False) -> None:
        """Return consumption to a token, as `open` does: for a trainer that starts again while the buffer is open.

        All leases end. A call that is repeated ends those that were made meanwhile, too.

        Args:
            token: What `position` returned.
            restore_dropped: Whether groups dropped after the token return, too.

        Raises:
            CheckpointError: The token is of another buffer or of another course, or older than those that are kept.
        """
        keys = {"format", "log", "serial", "step"}
        if not hasattr(token, "keys") or {*token.keys()} != keys or token["format"] != FORMAT:
            msg = f"a token is what position() returned, got {str(token)[:200]}"
            raise CheckpointError(msg)
        if token["log"] != self._name:
            msg = f"the token is of the log {str(token['log'])[:40]!r}, {self._folder} has the log {self._name!r}"
            raise CheckpointError(msg)
        with self._changed:
            position = Position(token["serial"], token["step"])
            self._ledger.check_position(position)
            event = {"op": "rewind", "serial": position.serial, "step": position.step, "dropped": restore_dropped}
            serial = self._record(event)
            self._pending = dict(self._ledger.open)
        self._log.wait(serial)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> Any:
        """Where the data stands: what the last `admit` gave as `cursor`, or the number of groups admitted."""
        with self._changed:
            return 0 if self._ledger.cursor is None else self._ledger.cursor

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Where the log was cut when it was opened, and what is missing."""
        return tuple(self._cuts)

    def __len__(self) -> int:
        """Return the number of groups that are neither trained nor dropped."""
        return self._ledger.live

    def __repr__(self) -> str:
        """Return the folder and the groups in each state."""
        return f"GroupBuffer({str(self._folder) if self._folder else None!r}, {self._counts()})"

    def _counts(self) -> str:
        return ", ".join(f"{self._ledger.counts[state]} {state}" for state in STATES)

    def ids(self, state: str, *, idle_s: float | None = None) -> list[str]:
        """Return the ids of the groups in a state; of those trained or dropped, only the ones a token can return.

        Args:
            state: The state.
            idle_s: Only those to which nothing was appended for so many seconds, nor were they admitted, or the buffer
                opened, in this time: their worker may have died, and another one can go on.
        """
        check_choice("state", state, STATES)
        with self._changed:
            self._tick()
            found = [group for group in self._ledger.groups.values() if group.state == state]
            if idle_s is not None:
                until = self._clock() - _seconds("idle_s", idle_s)
                found = [each for each in found if max(each.touched, each.admitted, self._meter.began) <= until]
            return [group.id for group in found]

    def group(self, id: str) -> Group:  # noqa: A002
        """Read a group and all that was appended to it, also the parts of responses that are not complete.

        Raises:
            OptionError: There is no such group, or it has ended and its values are removed.
        """
        with self._changed:
            state, _, detail = self._ledger.known(_name("id", id))
            entry = self._ledger.groups.get(id)
            if entry is None:
                msg = f"group {id!r} is {state} ({detail}): its values are removed"
                raise OptionError(msg)
            plan = _plan(entry, whole=False)
        return _read([plan])[0]

    def state(self, id: str) -> tuple[str, Any]:  # noqa: A002
        """Return the state of a group, and the step that trained it or the reason why it was dropped.

        Raises:
            OptionError: There is no such group.
        """
        with self._changed:
            state, _, detail = self._ledger.known(_name("id", id))
            return state, detail if state in {"trained", DROPPED} else None

    def stats(self) -> GroupStats:
        """Return the numbers of the buffer."""
        with self._changed:
            self._tick()
            ledger, segments = self._ledger, self._log.segments if isinstance(self._log, Log) else []
            oldest, now = next(iter(ledger.open.values()), None), self._clock()
            live = (group for group in ledger.groups.values() if group.state not in ENDED)
            return GroupStats(
                counts={state: ledger.counts[state] for state in STATES},
                dropped={reason: count for reason, count in ledger.reasons.items() if count},
                staleness=dict(sorted(ledger.staleness.items())),
                ages=histogram(now - group.admitted for group in live),
                lease_times=dict(sorted(self._meter.lease_times.items())),
                leases=len(ledger.leases),
                step=ledger.step,
                admitted=ledger.admitted,
                tokens=ledger.tokens,
                tokens_per_s=self._meter.tokens_per_s(),
                oldest_s=0.0 if oldest is None else now - oldest.admitted,
                disk_bytes=sum(segment.nbytes for segment in segments),
                needed_bytes=sum(segment.needed_bytes for segment in segments),
                problem=self._problem,
            )

    # -- files --------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Return when all changes are on the disk, whatever `sync` is.

        Raises:
            CheckpointError: The disk could not be synced.
        """
        self._log.flush()

    def compact(self) -> None:
        """Remove from the disk what no group needs. Other calls go on meanwhile; it also happens by itself.

        Raises:
            StorageMemoryError: The disk is full; nothing has changed.
        """
        if self._folder is None or not isinstance(self._log, Log):
            return
        with self._compaction:
            with self._changed:
                upto = self._log.roll()
            segment, moves, replaced = write_base(self._folder, self._name, self._order, upto)
            for start in range(0, len(moves), _MOVED_AT_ONCE):
                with self._changed:
                    for event, place in moves[start : start + _MOVED_AT_ONCE]:
                        self._ledger.put(event, place)
            with self._changed:
                self._log.segments = [segment, *(each for each in self._log.segments if each.path not in replaced)]
                self._problem = ""
            for path in replaced:
                path.unlink()

    def _compact_apart(self) -> None:
        """Compact in a thread, unless one does already."""

        def work() -> None:
            try:
                self.compact()
            except (OstinatoError, OSError) as error:
                self._problem = str(error)

        if not self._compaction.locked():
            threading.Thread(target=work, name="ostinato-compaction", daemon=True).start()

    def close(self) -> None:
        """Put all changes on the disk and close the folder; does nothing for a closed one."""
        with self._compaction:
            try:
                self._log.close()
            finally:
                if self._lock is not None:
                    self._lock.release()

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class _Plan(NamedTuple):
    """What is read of a group outside the lock: names, `done` and places of responses, unless their values are held."""

    group: GroupEntry
    state: str
    place: Any
    responses: list[tuple[str, bool, list[Any]]]
    held: Held | None


def _plan(group: GroupEntry, held: Held | None = None, *, whole: bool = True) -> _Plan:
    """Take the places of the values of a group; `whole` leaves out responses that are not complete."""
    chosen = [
        (name, each.done, [] if held else [part.place for part in each.parts])
        for name, each in group.responses.items()
        if each.done or not whole
    ]
    return _Plan(group, group.state, group.place, chosen, held)


def read_group(group: GroupEntry) -> Group:
    """Read a group and all that was appended to it; raises what `_read` raises."""
    return _read([_plan(group, whole=False)])[0]


def _read(plans: Sequence[_Plan]) -> tuple[Group, ...]:
    """Read the values of groups.

    Raises:
        DamagedFileError: A file is damaged; names the group.
    """
    prompts: dict[Any, Any] = {}
    groups = []
    for plan in plans:
        try:
            groups.append(_of_memory(plan, plan.held) if plan.held else _of_log(plan, prompts))
        except DamagedFileError as error:
            msg = f"group {plan.group.id!r} cannot be read, drop it or restore the file: {error}"
            raise DamagedFileError(msg) from error
    return tuple(groups)


def _of_memory(plan: _Plan, held: Held) -> Group:
    group = plan.group
    responses = tuple(Response(name, join(held.responses[name]), done) for name, done, _ in plan.responses)
    return Group(group.id, held.prompt, group.size, plan.state, responses)


def _of_log(plan: _Plan, prompts: dict[Any, Any]) -> Group:
    """Read a group; `prompts` are the records of prompts that were read before."""
    group = plan.group
    if plan.place not in prompts:
        prompts[plan.place] = payload_of(plan.place.read(), f"prompt of group {group.id}")
    prompt = prompts[plan.place][group.index]
    responses = []
    for name, done, places in plan.responses:
        where = f"response {name} of group {group.id}"
        responses.append(Response(name, join([payload_of(place.read(), where) for place in places]), done))
    return Group(group.id, prompt, group.size, plan.state, tuple(responses))


def _seconds(name: str, value: Any) -> float:
    return check_number(name, value, "a finite number of seconds above 0", lambda seconds: 0 < seconds < math.inf)


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        msg = f"{what} must be text, got {value!r} of type {type(value).__name__}"
        raise OptionError(msg)
    return value


def _check_json(name: str, value: Any) -> None:
    try:
        canonical(value)
    except (TypeError, ValueError) as error:
        msg = f"{name} must be a JSON value: {error}"
        raise OptionError(msg) from error


def _lease_name(lease: str | Lease) -> str:
    return lease.id if isinstance(lease, Lease) else _name("lease", lease)
