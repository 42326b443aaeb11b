"""A process that forks savers, kills them at random moments, and says as JSON what was found afterwards.

`python -m tests.crash.killer FOLDER KILLS SEED INCREMENTAL`
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from ostinato import ListStorage, ReplayBufferEnsemble
from tests.crash.fuzz import state_of
from tests.registry import make, registered, seeded

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, OBJECTS = 20_000, 300
"""So many that a save is mostly writing, and not only names and manifests."""


def _ensemble() -> Any:
    members = [BUFFERS[name]() for name in ("prioritized", "single copy")]
    return ReplayBufferEnsemble(*members, p=[1, 2], batch_size=64, generator=seeded(1))


BUFFERS: dict[str, Callable[[], Any]] = {
    "prioritized": lambda: make(ROWS, sampler="PrioritizedSampler", batch_size=64),
    "single copy": lambda: make(
        ROWS, storage="LazyTensorStorage, single_copy", sampler="SamplerWithoutReplacement", batch_size=64
    ),
    "list": lambda: make(OBJECTS, storage="ListStorage", batch_size=64),
    "ensemble": _ensemble,
}


def _write(rb: Any, serial: int) -> None:
    """Write and learn something that no other serial would."""
    for member in getattr(rb, "members", [rb]):
        count = 40 if isinstance(member.storage, ListStorage) else 4000
        t = torch.arange(count) + serial * count
        obs = (t[:, None] + torch.arange(16)).float()
        following = TensorDict({"obs": obs + 1, "done": t % 50 == 49}, [count])
        member.extend(TensorDict({"t": t, "obs": obs, "next": following}, [count]))
    registered("ensemble" if hasattr(rb, "members") else "prefetch").use(rb)


class Trials:
    """Saves of one kind of buffer into one directory, each killed."""

    def __init__(self, name: str, folder: Path, incremental: bool) -> None:
        self.name, self.path, self.make = name, folder / name.replace(" ", "-"), BUFFERS[name]
        self.incremental = incremental
        rb = self.make()
        for serial in range(8):
            _write(rb, serial)
        rb.dumps(self.path, incremental=self.incremental)
        self.current, self.serial = rb, 8
        self.took = [self._timed() for _ in range(3)]
        self.turns = self.inside = self.old = self.new = 0
        self.wrong: list[str] = []

    def _timed(self) -> float:
        started = time.perf_counter()
        self.current.dumps(self.path, incremental=self.incremental)
        return time.perf_counter() - started

    def run(self, rng: random.Random) -> None:
        """Write on, save in a fork, kill it, and compare what is there with the state before and after."""
        before = state_of(self.current)
        _write(self.current, self.serial)
        self.serial += 1
        after = state_of(self.current)
        # some kills shall fall right behind the commit; the next ones come earlier when too many were too late
        late = self.turns - self.inside > 0.1 * self.turns
        delay = rng.random() * (0.8 if late else 1.1) * statistics.median(self.took[-5:])
        inside = self._killed(delay)
        self.inside += inside
        self.turns += 1
        found = self.make()
        found.loads(self.path)
        now = state_of(found)
        self.old += now == before
        self.new += now == after
        if now not in {before, after}:
            self.wrong.append(f"{self.name}, killed after {delay:.4f} s: neither the old state nor the new one")
        self.current = found  # whatever was saved goes on, into the directory that the kill has left
        if rng.random() < 0.3:
            self.took.append(self._timed())
            self._clean()

    def _clean(self) -> None:
        """After a whole save nothing that a killed one left may remain: the manifest names all, but for the lock."""
        text = (self.path / "manifest.json").read_text()
        more = [entry.name for entry in self.path.glob("*.bin") if entry.name not in text]
        more += [entry.name for entry in self.path.glob("*.tmp")]
        if more:
            self.wrong.append(f"{self.name}: left behind are {sorted(more)}")

    def _killed(self, delay_s: float) -> bool:
        """Save in a fork and kill it so long after it has begun; return whether the kill fell inside the save."""
        ready, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(say, b"b")
                self.current.dumps(self.path, incremental=self.incremental)
                os.write(say, b"e")
                signal.pause()
            finally:
                os._exit(1)
        os.close(say)
        said = os.read(ready, 1)
        began = time.perf_counter()
        select.select([ready], [], [], delay_s)  # a save that is faster than expected ends the wait
        elapsed = time.perf_counter() - began
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said += os.read(ready, 1)
        os.close(ready)
        if said == b"be":
            self.took.append(elapsed)
        if said not in {b"b", b"be"}:
            self.wrong.append(f"{self.name}: the saver failed")
        return said == b"b"


def main(folder: str, count: int, seed: int, incremental: bool) -> dict[str, Any]:
    """Kill savers of all kinds until so many died inside of a save; those that were too quick come on top."""
    torch.set_num_threads(1)  # threads of torch do not outlive a fork
    rng = random.Random(seed)
    trials = [Trials(name, Path(folder), incremental) for name in BUFFERS]
    for _ in range(3 * count):
        trial = min(trials, key=lambda each: each.inside)
        if trial.inside == count // len(trials):
            break
        trial.run(rng)
    sums = {key: sum(getattr(each, key) for each in trials) for key in ("turns", "inside", "old", "new")}
    return {**sums, "wrong": [text for each in trials for text in each.wrong]}


if __name__ == "__main__":
    _, folder, count, seed, incremental = sys.argv
    sys.stdout.write(json.dumps(main(folder, int(count), int(seed), incremental == "True")))
