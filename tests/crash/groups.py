"""A process whose forks work with a buffer of groups and die at a system call; says as JSON what was found afterwards.

`python -m tests.crash.groups FOLDER KILLS SEED`

A fork reports each call that has returned, and each file that is on the disk. The parent may then take away bytes that
are not, as a power cut does, opens the buffer and compares it with the reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato import GroupBuffer, GroupClient, GroupServer
from ostinato.errors import OptionError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS: dict[str, Any] = {"size": 2, "segment_bytes": 12_000, "keep_positions": 10, "sync": "always"}
CALLS = ("write", "fsync", "ftruncate", "replace", "unlink", "open", "rename")


def values(group: str, response: str, part: int) -> dict[str, Any]:
    """Return what is appended as a part, and nowhere else."""
    rng = random.Random(f"{group} {response} {part}")
    tokens = [rng.randrange(1000) for _ in range(rng.randrange(40))]
    return {"tokens": tokens, "reward": rng.random(), "routing": torch.full((len(tokens), 3), rng.randrange(99))}


def append(buffer: Any, group: str, rng: random.Random) -> list[Any] | None:
    """Append the next part of a response; return what was appended."""
    found = {response.id: response for response in buffer.group(group).responses}
    for name in ("a", "b"):
        response = found.get(name)
        if response is None or not response.done:
            part, done = (0, rng.random() < 0.5) if response is None else (1, True)
            buffer.append(group, values(group, name, part), id=name, part=part, done=done)
            return ["append", group, name, part]
    return None


def work(buffer: Any, rng: random.Random, say: Callable[[Any], Any]) -> None:
    """Use a buffer until this process dies, or, as a client, until another one is quicker."""
    while True:
        unfinished = buffer.ids("waiting") + buffer.ids("running")
        chance, step = rng.random(), buffer.stats().step + 1
        if len(unfinished) < 3 or chance < 0.1:
            start = buffer.cursor
            numbers = (start, start + 1)
            say(["admit", buffer.admit([f"prompt {k}" for k in numbers], ids=[f"{k}" for k in numbers])])
        elif chance < 0.75:
            say(append(buffer, rng.choice(unfinished), rng) or ["nothing"])
        elif chance < 0.8:
            group = rng.choice(unfinished)
            buffer.drop(group, "chance")
            say(["drop", group])
        elif chance < 0.92 and buffer.ids("ready"):
            lease = buffer.lease(1, timeout_s=0)
            say(["lease", lease.groups[0].id])
            if rng.random() < 0.8:
                buffer.ack(lease, step=step)
                say(["ack", lease.groups[0].id, step])
            else:
                buffer.release(lease)
        elif isinstance(buffer, GroupClient):
            buffer.stats()  # tokens of the lives before shall stay, and what others train meanwhile is not known
        elif chance < 0.97:
            say(["token", buffer.position(step - 1)])
        else:
            buffer.compact()


def work_as_client(socket: str, rng: random.Random, say: Callable[[Any], Any]) -> None:
    client = GroupClient(socket)
    while True:
        with contextlib.suppress(OptionError, UsageError, WaitTimeoutError):
            work(client, rng, say)


def die_at(number: int, rng: random.Random, say: Callable[[Any], Any]) -> None:
    """Let this process die at its n-th call of the system that changes files; a write may be done by half."""
    left = [number]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            left[0] -= name != "open" or bool(arguments[1] & os.O_CREAT)  # opening for reading changes nothing
            if left[0] <= 0:
                if name == "write":
                    data = bytes(arguments[1])
                    call(arguments[0], data[: rng.randrange(len(data) + 1)])
                os.kill(os.getpid(), signal.SIGKILL)
            size = os.fstat(arguments[0]).st_size if name == "fsync" else 0
            result = call(*arguments, **options)
            if name == "fsync":
                say(["synced", Path(f"/proc/self/fd/{arguments[0]}").readlink().name, size])
            return result

        return run

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def forked(say: Callable[[Any], Any], run: Callable[..., None], *arguments: Any) -> int:
    """Return the id of a process that runs a function and ends."""
    child = os.fork()
    if child == 0:
        try:
            run(*arguments)
        except BaseException as error:
            say(["failed", repr(error)])
        finally:
            os._exit(1)
    return child


def cut_power(folder: Path, synced: dict[str, int], rng: random.Random) -> int:
    """Take away bytes that no `fsync` has put on the disk, the end of a file and blocks; return in how many files."""
    changed = 0
    for path in folder.glob("segment-*.log"):
        data = bytearray(path.read_bytes())
        kept = min(synced.get(path.name, len(data)), len(data))
        changed += kept < len(data)
        del data[rng.randrange(kept, len(data) + 1) :]
        for start in range(kept, len(data), 64):
            if rng.random() < 0.2:
                data[start : start + 64] = bytes(len(data[start : start + 64]))
        path.write_bytes(data)
    return changed


class Trials:
    """What was acknowledged, and what is wrong."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.appended: set[tuple[str, str, int]] = set()
        self.trained: dict[str, int] = {}
        self.dropped: set[str] = set()
        self.tokens: list[tuple[dict[str, Any], dict[str, int]]] = []
        self.wrong: list[str] = []
        self.cuts = self.returns = self.served = 0

    def life(self, kill: int) -> None:
        """Work in forks until the kill, take in what they reported, and compare."""
        pipe, end = os.pipe()
        write = os.write

        def say(what: Any) -> None:
            write(end, json.dumps(what).encode() + b"\n")

        if self.rng.random() < 0.3:
            self.serve(kill, say)
        else:
            os.waitpid(forked(say, self.own, kill, say), 0)
        os.close(end)
        with os.fdopen(pipe) as stream:
            reports = [json.loads(line) for line in stream]
        synced = {name: size for what, name, *size in (each for each in reports if each[0] == "synced")}
        for report in reports:
            getattr(self, f"hear_{report[0]}", lambda *_: None)(*report[1:])
        if self.rng.random() < 0.5:
            self.cuts += cut_power(self.folder, {name: size[0] for name, size in synced.items()}, self.rng)
        self.compare()

    def own(self, kill: int, say: Callable[[Any], Any], socket: str = "") -> None:
        """Open the buffer and use it, or serve it, until the kill."""
        signal.alarm(60)
        die_at(kill, self.rng, say)
        with GroupBuffer(self.folder, **OPTIONS) as buffer:
            if not socket:
                work(buffer, self.rng, say)
            with GroupServer(buffer, socket):
                threading.Event().wait()

    def serve(self, kill: int, say: Callable[[Any], Any]) -> None:
        """Two clients use a server that is killed twice; one of them is killed at any time."""
        socket = f"{self.folder}.s"
        workers = [forked(say, work_as_client, socket, random.Random(f"{kill} {k}"), say) for k in range(2)]
        for number in range(2):
            owner = forked(say, self.own, kill, say, socket)
            if number:
                time.sleep(self.rng.random() * 0.1)
                os.kill(workers[0], signal.SIGKILL)
            os.waitpid(owner, 0)
        os.kill(workers[1], signal.SIGKILL)
        for worker in workers:
            os.waitpid(worker, 0)
        self.served += 1

    def hear_failed(self, error: str) -> None:
        self.wrong.append(error)

    def hear_append(self, *what: Any) -> None:
        self.appended.add(what)

    def hear_lease(self, group: str) -> None:
        if group in self.trained or group in self.dropped:
            self.wrong.append(f"{group} is leased again")

    def hear_ack(self, group: str, step: int) -> None:
        self.trained[group] = step

    def hear_drop(self, group: str) -> None:
        self.dropped.add(group)

    def hear_token(self, token: dict[str, Any]) -> None:
        self.tokens = [*self.tokens, (token, dict(self.trained))][-2:]

    def compare(self) -> None:
        """Open the buffer, sometimes at a token, and look for what was acknowledged."""
        at, trained = None, self.trained
        if self.tokens and self.rng.random() < 0.2:
            at, trained = self.rng.choice(self.tokens)
            self.tokens = [each for each in self.tokens if each[0]["serial"] <= at["serial"]]
            self.returns += 1
        GroupBuffer(self.folder, **OPTIONS).close()
        with GroupBuffer.open(self.folder, at=at, **OPTIONS) as buffer:
            for group, step in trained.items():
                self.expect(buffer.state(group) == ("trained", step), f"{group} was trained in step {step}")
            for group in self.trained.keys() - trained.keys():
                self.expect(buffer.state(group)[0] == "ready", f"{group} is to be trained again")
            for group in self.dropped:
                self.expect(buffer.state(group) == ("dropped", "chance"), f"{group} was dropped")
            self.trained = dict(trained)
            for number in range(buffer.cursor):
                self.check_values(buffer, str(number))

    def check_values(self, buffer: GroupBuffer, name: str) -> None:
        state, detail = buffer.state(name)
        if state == "trained":
            self.trained.setdefault(name, detail)  # the kill fell between the change and its report
        if state == "dropped":
            self.dropped.add(name)
        if state in {"trained", "dropped"}:
            return
        group = buffer.group(name)
        self.expect(group.prompt == f"prompt {name}", f"{name} has the prompt {group.prompt}")
        found = {response.id: response.fields for response in group.responses}
        for _, response, part in (each for each in self.appended if each[0] == name):
            self.expect(response in found, f"{name} lost {response}")
            parts = [values(name, response, number) for number in range(part + 1)]
            tokens = [token for each in parts for token in each["tokens"]]
            self.expect(found.get(response, {"tokens": torch.empty(0)})["tokens"].tolist()[: len(tokens)] == tokens,
                        f"{name} {response} has other tokens")  # fmt: skip

    def expect(self, good: bool, what: str) -> None:
        if not good:
            self.wrong.append(what)

    def finish(self) -> int:
        """Train what is left; return the number of groups, each of which has ended once."""
        with GroupBuffer.open(self.folder, **OPTIONS) as buffer:
            for left in buffer.leases():
                buffer.release(left)
            for name in buffer.ids("waiting") + buffer.ids("running"):
                while append(buffer, name, self.rng):
                    pass
            while buffer.ids("ready"):
                lease = buffer.lease(1)
                self.hear_lease(lease.groups[0].id)
                buffer.ack(lease, step=10**6)
            counts = buffer.stats().counts
            self.expect(counts["trained"] + counts["dropped"] == buffer.cursor, f"{counts} of {buffer.cursor}")
            return int(buffer.cursor)


def main(folder: str, kills: int, seed: int) -> dict[str, Any]:
    """Kill as often as told, and return what was found; each life reads all before it, so that buffers have 50."""
    torch.set_num_threads(1)
    rng, found, wrong = random.Random(seed), Counter[str](), list[str]()
    for first in range(0, kills, 50):
        trials = Trials(Path(folder) / str(first), rng)
        for _ in range(min(50, kills - first)):
            trials.life(rng.randrange(1, 150))
            rng.seed(rng.random())
        counts = {name: getattr(trials, name) for name in ("cuts", "returns", "served")}
        found.update(groups=trials.finish(), **counts)
        wrong += trials.wrong
    return {**found, "wrong": wrong[:20]}


if __name__ == "__main__":
    _, folder, kills, seed = sys.argv
    sys.stdout.write(json.dumps(main(folder, int(kills), int(seed))))
