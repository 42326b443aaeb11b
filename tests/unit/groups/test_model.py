"""A buffer of groups against a plain Python model: any order of calls, repeated and wrong ones, restarts, returns."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ostinato import GroupBuffer
from ostinato.errors import CheckpointError, OptionError, UsageError, WaitTimeoutError

TIMEOUT_S, LEASE_S, KEEP, SIZE = 50, 20, 2, 3
ENDED = {"trained", "dropped"}


class Machine(RuleBasedStateMachine):
    """`groups[id]` says all that must be true of a group; `clock` is the time of both."""

    durable: bool

    @initialize(
        order=st.sampled_from(["ready", "admitted"]), fail=st.booleans(), recent=st.sampled_from([0, 900, 2**20])
    )
    def begin(self, order: str, fail: bool, recent: int) -> None:
        self.place = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.clock, self.turn = 1000.0, 0
        self.order, self.fail = order, fail
        self.options: dict[str, Any] = {
            "size": SIZE, "ahead": 6, "timeout_s": TIMEOUT_S, "minimum": 1, "fail": fail, "order": order,
            "lease_s": LEASE_S, "sync": "never", "segment_bytes": 3000, "recent_bytes": recent, "keep_positions": KEEP,
            "clock": lambda: self.clock,
        }  # fmt: skip
        self.groups: dict[str, dict[str, Any]] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self.positions: list[tuple[dict[str, Any], int, int]] = []
        self.abandoned: list[dict[str, Any]] = []
        self.buffer = GroupBuffer(Path(self.place.name) / "groups" if self.durable else None, **self.options)
        self.admit(3, named=True)

    def teardown(self) -> None:
        self.buffer.close()
        self.place.cleanup()

    def in_state(self, *states: str) -> list[str]:
        return [name for name, group in self.groups.items() if group["state"] in states]

    def some(self, data: st.DataObject, *states: str) -> str:
        return data.draw(st.sampled_from(self.in_state(*states) or ["nothing"]))

    def next(self) -> int:
        self.turn += 1
        return self.turn

    def complete(self, name: str) -> int:
        return sum(response["done"] for response in self.groups[name]["responses"].values())

    def make_ready(self, name: str) -> None:
        self.groups[name] |= {"state": "ready", "ready": self.next()}

    def waited_long(self, name: str) -> None:
        """The rule of the buffer for a group whose time is up."""
        if self.complete(name) >= 1:
            self.make_ready(name)
        elif self.fail:
            self.over(name, "dropped", "timeout")

    def look_again(self) -> None:
        """Whoever has waited long is looked at when a buffer is opened."""
        for name in self.in_state("waiting", "running"):
            if self.groups[name]["since"] + TIMEOUT_S <= self.clock:
                self.waited_long(name)
        self.buffer.stats()

    def over(self, name: str, state: str, detail: Any) -> None:
        """A group has ended: for good, if there is no position to return to."""
        ended = {"state": state, "detail": detail, "ended": self.next(), "lease": "", "gone": not self.positions}
        self.groups[name] |= ended

    def live(self) -> int:
        return sum(group["state"] not in ENDED for group in self.groups.values())

    @rule(count=st.integers(1, 3), named=st.booleans())
    def admit(self, count: int, named: bool) -> None:
        start = len(self.groups)
        names = [f"g{start + k}" if named else str(start + k) for k in range(count)]
        prompts = [{"text": f"prompt {start + k}"} for k in range(count)]
        arguments: dict[str, Any] = {"ids": names if named else None, "cursor": [start + count], "timeout_s": 0}
        if self.live() + count > 6:
            with pytest.raises(WaitTimeoutError):
                self.buffer.admit(prompts, **arguments)
            return
        assert self.buffer.admit(prompts, **arguments) == names
        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True), start):
            self.groups[name] = {
                "state": "waiting", "prompt": prompt, "number": number, "responses": {}, "since": self.clock, "ready": 0
            }  # fmt: skip
        if named:  # once more: nothing changes
            assert self.buffer.admit(prompts, **arguments) == names

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), tokens=st.integers(0, 4), done=st.booleans(), version=st.integers(0, 5))
    def append(self, data: st.DataObject, tokens: int, done: bool, version: int) -> None:
        name = data.draw(st.sampled_from(list(self.groups)))
        group, response = self.groups[name], data.draw(st.sampled_from(["a", "b", "c", "d"]))
        known = group["responses"].get(response, {"parts": [], "done": False})
        part = len(known["parts"])
        values = {"tokens": list(range(tokens)), "reward": float(version), "version": version}
        full = response not in group["responses"] and len(group["responses"]) == SIZE
        if group["state"] not in {"waiting", "running"} or known["done"] or full:
            with pytest.raises(UsageError):
                self.buffer.append(name, values, id=response, part=part, done=done)
            return
        with pytest.raises(OptionError):
            self.buffer.append(name, values, id=response, part=part + 1, done=done)
        assert self.buffer.append(name, values, id=response, part=part, done=done)
        self.appended(name, response, values, done)
        assert not self.buffer.append(name, values, id=response, part=part, done=done)
        with pytest.raises(OptionError):
            self.buffer.append(name, {**values, "reward": -1.0}, id=response, part=part, done=done)

    def appended(self, name: str, response: str, values: dict[str, Any], done: bool) -> None:
        group = self.groups[name]
        known = group["responses"].setdefault(response, {"parts": [], "done": False})
        known["parts"].append(values)
        known["done"] = done
        group["state"] = "running"
        overdue = group["since"] + TIMEOUT_S <= self.clock
        if self.complete(name) == SIZE or (overdue and done):
            self.make_ready(name)
        elif overdue:
            self.waited_long(name)

    @precondition(lambda self: self.in_state("waiting", "running"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Append all that a group lacks."""
        name = self.some(data, "waiting", "running")
        group = self.groups[name]
        for response in [*group["responses"], *(each for each in "abcd" if each not in group["responses"])][:SIZE]:
            known = group["responses"].get(response, {"parts": [], "done": False})
            if group["state"] in {"waiting", "running"} and not known["done"]:
                values = {"tokens": [1], "reward": 1.0, "version": 1}
                self.buffer.append(name, values, id=response, part=len(known["parts"]))
                self.appended(name, response, values, done=True)

    @precondition(lambda self: self.in_state("ready"))
    @rule(step=st.integers(0, 8))
    def train(self, step: int) -> None:
        self.lease(1, "x", limited=False)
        self.end_lease_of([*self.leases][-1], step, ack=True)

    @rule(n=st.integers(1, 3), consumer=st.sampled_from(["x", "y"]), limited=st.booleans())
    def lease(self, n: int, consumer: str, limited: bool) -> None:
        ready = self.in_state("ready")
        ready.sort(key=lambda name: self.groups[name]["ready" if self.order == "ready" else "number"])
        chosen = ready[:n]
        least = n
        if limited:
            least, total = 1, 0
            for count, name in enumerate(chosen):
                total += self.tokens(name)
                if total > 12 and count:
                    chosen = chosen[:count]
                    break
                if total > 12:
                    with pytest.raises(OptionError):
                        self.buffer.lease(n, max_tokens=12, timeout_s=0)
                    return
        name = f"lease{self.next()}"
        arguments: dict[str, Any] = {"max_tokens": 12 if limited else None, "id": name, "timeout_s": 0}
        if len(chosen) < least:
            with pytest.raises(WaitTimeoutError):
                self.buffer.lease(n, consumer=consumer, **arguments)
            return
        for _ in range(2):  # the second call returns the same lease
            lease = self.buffer.lease(n, consumer=consumer, **arguments)
            assert [group.id for group in lease.groups] == chosen
            assert (lease.id, lease.until) == (name, self.clock + LEASE_S)
            for group in lease.groups:
                self.compare(group, only_done=True)
        for each in chosen:
            self.groups[each] |= {"state": "leased", "lease": name}
        self.leases[name] = {"how": "active", "until": self.clock + LEASE_S, "groups": chosen}

    def tokens(self, name: str) -> int:
        responses = self.groups[name]["responses"].values()
        return sum(len(part["tokens"]) for each in responses if each["done"] for part in each["parts"])

    def end(self, name: str, how: str) -> list[str]:
        lease = self.leases[name]
        lease["how"] = how
        members = [each for each in lease["groups"] if self.groups[each].get("lease") == name]
        for each in members:
            self.groups[each] |= {"state": "ready", "lease": ""}
        return members

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), step=st.integers(0, 8), ack=st.booleans())
    def end_lease(self, data: st.DataObject, step: int, ack: bool) -> None:
        self.end_lease_of(data.draw(st.sampled_from(list(self.leases))), step, ack)

    def end_lease_of(self, name: str, step: int, ack: bool) -> None:
        how = f"ack {step}" if ack else "released"

        def call() -> bool:
            return bool(self.buffer.ack(name, step=step) if ack else self.buffer.release(name))

        if self.leases[name]["how"] == "active":
            assert call()
            for each in self.end(name, how):
                if ack:
                    self.over(each, "trained", step)
        if self.leases[name]["how"] == how:
            assert not call()
        else:
            with pytest.raises(UsageError):
                call()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.leases)))
        if self.leases[name]["how"] != "active":
            with pytest.raises(UsageError):
                self.buffer.renew(name)
            return
        self.leases[name]["until"] = self.clock + LEASE_S
        assert self.buffer.renew(name) == self.leases[name]["until"]

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), reason=st.sampled_from(["bad", "same"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        name = data.draw(st.sampled_from(list(self.groups)))
        group = self.groups[name]
        if group["state"] in ENDED and (group["state"], group["detail"]) != ("dropped", reason):
            with pytest.raises(UsageError):
                self.buffer.drop(name, reason)
            return
        assert self.buffer.drop(name, reason) == (group["state"] != "dropped")
        if group["state"] != "dropped":
            self.over(name, "dropped", reason)

    @rule(seconds=st.sampled_from([1.0, 15.0, 30.0]))
    def wait(self, seconds: float) -> None:
        before, self.clock = self.clock, self.clock + seconds
        for name, lease in self.leases.items():
            if lease["how"] == "active" and lease["until"] <= self.clock:
                self.end(name, "expired")
        for name in self.in_state("waiting", "running"):
            if before < self.groups[name]["since"] + TIMEOUT_S <= self.clock:
                self.waited_long(name)
        self.buffer.stats()

    @rule(step=st.integers(0, 8))
    def position(self, step: int) -> None:
        token = self.buffer.position(step)
        assert self.buffer.position(step) == token
        ended = [group for group in self.groups.values() if group["state"] in ENDED]
        now: tuple[Any, int, int] = ({}, self.turn, step)
        for made in self.positions:
            same = all(self.is_before(group, made) == self.is_before(group, now) for group in ended)
            if made[2] == step and same:
                assert token == made[0]
                return
        if len(self.positions) == KEEP:
            self.abandoned.append(self.positions.pop(0)[0])
        self.positions.append((token, self.next(), step))
        for group in self.groups.values():
            if group["state"] in ENDED and self.is_before(group, self.positions[0]):
                group["gone"] = True

    def is_before(self, group: dict[str, Any], position: tuple[Any, int, int]) -> bool:
        return bool(group["ended"] <= position[1] and (group["state"] == "dropped" or group["detail"] <= position[2]))

    @precondition(lambda self: self.durable)
    @rule(compact=st.booleans())
    def restart(self, compact: bool) -> None:
        if compact:
            self.buffer.compact()
        self.buffer.close()
        self.buffer = GroupBuffer.open(Path(self.place.name) / "groups", **self.options)
        self.look_again()
        assert not self.buffer.cuts

    @precondition(lambda self: self.durable and (self.positions or self.abandoned))
    @rule(data=st.data(), dropped=st.booleans())
    def return_to_token(self, data: st.DataObject, dropped: bool) -> None:
        self.buffer.close()
        path = Path(self.place.name) / "groups"
        if self.abandoned:
            with pytest.raises(CheckpointError):
                GroupBuffer.open(path, at=data.draw(st.sampled_from(self.abandoned)), **self.options)
        if not self.positions:
            self.buffer = GroupBuffer.open(path, **self.options)
        else:
            index = data.draw(st.integers(0, len(self.positions) - 1))
            position = self.positions[index]
            self.buffer = GroupBuffer.open(path, at=position[0], restore_dropped=dropped, **self.options)
            self.abandoned += [token for token, _, _ in self.positions[index + 1 :]]
            self.positions = self.positions[: index + 1]
            for name, lease in self.leases.items():
                if lease["how"] == "active":
                    self.end(name, "returned")
            for group in self.groups.values():
                again = group["state"] in ENDED and not group.get("gone") and not self.is_before(group, position)
                if again and (group["state"] == "trained" or dropped):
                    state = "ready" if group["ready"] else "running" if group["responses"] else "waiting"
                    group |= {"state": state, "ended": 0, "detail": None}
        self.look_again()

    def compare(self, group: Any, *, only_done: bool) -> None:
        expected = self.groups[group.id]
        responses = {
            name: response for name, response in expected["responses"].items() if response["done"] or not only_done
        }
        assert group.prompt == expected["prompt"]
        assert [each.id for each in group.responses] == list(responses)
        for each in group.responses:
            parts = responses[each.id]["parts"]
            assert each.done == responses[each.id]["done"]
            assert each.fields["tokens"].tolist() == [token for part in parts for token in part["tokens"]]
            assert each.fields["reward"] == parts[-1]["reward"]

    @invariant()
    def is_as_the_model_says(self) -> None:
        if not hasattr(self, "groups"):
            return
        states = [group["state"] for group in self.groups.values()]
        stats = self.buffer.stats()
        assert stats.counts == {state: states.count(state) for state in stats.counts}
        assert stats.leases == sum(lease["how"] == "active" for lease in self.leases.values())
        assert len(self.buffer) == self.live()
        assert not stats.problem
        for name, group in self.groups.items():
            assert self.buffer.state(name) == (group["state"], group["detail"] if group["state"] in ENDED else None)
            if group["state"] not in ENDED:
                self.compare(self.buffer.group(name), only_done=False)
        if self.groups:
            assert self.buffer.cursor == [len(self.groups)]


class InMemory(Machine):
    durable = False


class InFolder(Machine):
    durable = True


@pytest.mark.parametrize("machine", [InMemory, InFolder])
def test_any_order_of_calls_is_as_in_the_model(machine):
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))
