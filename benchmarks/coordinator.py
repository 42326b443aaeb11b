"""Starts one worker process per library, lets them measure in turns, and gathers a report. Prints nothing."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from benchmarks.records import Library, Report, Result, Round, Section
from benchmarks.targets import OURS, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from benchmarks.workloads import Workload

ROOT: Final = Path(__file__).resolve().parents[1]
ONE_THREAD: Final = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMBA_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    ),
    "1",
)


@dataclass(frozen=True)
class Seat:
    """A place at the table: which adapter in `peers/` runs, under which interpreter and environment."""

    name: str
    title: str
    adapter: str
    is_peer: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    variable: str | None = None
    """Environment variable that names an interpreter of this library's own; see `OWN`."""


OWN: Final = {"OSTINATO_LEROBOT_PYTHON": ROOT / "build/lerobot/bin/python"}
"""Where the interpreters are that peers have for themselves, if the variable is not set."""

SEATS: Final = (
    Seat("ostinato", "Ostinato", "ostinato"),
    Seat("ostinato-torch", "Ostinato, torch only", "ostinato", environment={"OSTINATO_NATIVE": "0"}),
    Seat("limit-packed", "limit: C, packed rows", "limit_packed"),
    Seat("limit-fields", "limit: C, by field", "limit_fields"),
    Seat("limit-torch", "limit: torch, by field", "limit_torch"),
    Seat("limit-plain", "limit: plain sample", "limit_plain"),
    Seat("torchrl", "TorchRL", "torchrl", is_peer=True),
    Seat("cpprb", "cpprb", "cpprb", is_peer=True),
    Seat("sb3", "Stable-Baselines3", "sb3", is_peer=True),
    Seat("tianshou", "Tianshou", "tianshou", is_peer=True),
    Seat("rlox", "rlox", "rlox", is_peer=True),
    Seat("rlinf", "RLinf", "rlinf", is_peer=True),
    Seat("isaacgymenvs", "IsaacGymEnvs style", "isaacgymenvs"),
    Seat("lerobot", "LeRobot", "lerobot", is_peer=True, variable="OSTINATO_LEROBOT_PYTHON"),
)


def _python(seat: Seat, peers_python: str) -> str:
    """Return the interpreter of a library: its own, if it is there; the peers' one says what is missing."""
    if seat.variable is not None:
        own = os.environ.get(seat.variable) or str(OWN[seat.variable])
        return own if shutil.which(own) else peers_python
    return peers_python if seat.is_peer else sys.executable


class Worker:
    """One library's process. A dead or silent process is a missing result, never an exception."""

    def __init__(self, seat: Seat, python: str) -> None:
        """Start the process; its first answer comes with `ask({"op": "hello"})`."""
        self.seat = seat
        # A file, not a pipe: nobody would empty the pipe while the worker measures.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", f"benchmarks.peers.{seat.adapter}"],
            cwd=ROOT,
            env=os.environ | ONE_THREAD | seat.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def tell(self, order: dict[str, Any]) -> None:
        """Send an order without waiting for its answer."""
        if self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            return  # the process is gone: `hear` says why

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next answer; a process that is too slow is ended."""
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.start()
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        in_time = watch.is_alive()
        watch.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not in_time:
            return {"missing": f"no answer within {timeout_s:.0f} s"}
        return {"missing": f"its process ended with status {self._process.wait()}: {self._last_words()}"}

    def ask(self, order: dict[str, Any], timeout_s: float = 120) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        self.tell(order)
        return self.hear(timeout_s)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

    def close(self) -> None:
        """End the process, politely at first."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


class Table:
    """All workers of a run, as a context manager that ends them."""

    def __init__(self, names: Iterable[str] | None, peers_python: str) -> None:
        """Start the workers (all seats when `names` is None) and asks each for its version.

        Raises:
            ValueError: A name is no seat, or the peers' interpreter is not there.
        """
        chosen = list(names) if names is not None else [seat.name for seat in SEATS]
        unknown = sorted(set(chosen) - {seat.name for seat in SEATS})
        if unknown:
            msg = f"libraries must be among {', '.join(seat.name for seat in SEATS)}; got {', '.join(unknown)}"
            raise ValueError(msg)
        if shutil.which(peers_python) is None:
            msg = f"the peers' interpreter must be a program, got {peers_python}: see benchmarks/README.md"
            raise ValueError(msg)
        seats = [seat for seat in SEATS if seat.name in chosen]
        self._workers = [Worker(seat, _python(seat, peers_python)) for seat in seats]
        self.libraries: list[Library] = []
        self.present: list[Worker] = []

    def __enter__(self) -> Self:
        """Hear every worker's first words; they start at the same time, as imports take seconds."""
        for worker in self._workers:
            worker.tell({"op": "hello"})
        for worker in self._workers:
            words = worker.hear(120)
            missing = words.get("missing")
            library = Library(worker.seat.name, worker.seat.title, words.get("version", ""), missing)
            self.libraries.append(library)
            if missing is None:
                self.present.append(worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process that this table started."""
        for worker in self._workers:
            worker.close()

    def measure(self, load: Workload, rounds: int) -> dict[str, Result]:
        """Measure one workload: all set up, then `rounds` rounds, another library first in each."""
        results = {library.name: Result(missing=library.missing) for library in self.libraries}
        order = {"op": "setup", "name": load.name, "kind": load.kind, "rows": load.rows, "batch": load.batch}
        ready = []
        for worker in self.present:
            missing = worker.ask(order).get("missing")
            results[worker.seat.name] = Result(missing=missing)
            if missing is None:
                ready.append(worker)
        turns = self._rounds(load, ready, rounds)
        for worker in self.present:
            worker.ask({"op": "teardown"})
        return results | turns

    def _rounds(self, load: Workload, ready: Sequence[Worker], rounds: int) -> dict[str, Result]:
        seen: dict[str, list[Round]] = {worker.seat.name: [] for worker in ready}
        failed: dict[str, Result] = {}
        order = {
            "op": "round",
            "seconds": load.seconds,
            "min_calls": load.min_calls,
            "warmup_s": load.warmup_s,
        }
        for number in range(rounds):
            for place in range(len(ready)):
                worker = ready[(number + place) % len(ready)]
                name = worker.seat.name
                if name in failed:
                    continue
                answer = worker.ask(order)
                if "round" in answer:
                    seen[name].append(Round(**answer["round"]))
                else:
                    failed[name] = Result(missing=answer["missing"])
        return {name: Result(rounds=tuple(turns)) for name, turns in seen.items()} | failed


def run(
    loads: Sequence[Workload],
    table: Table,
    rounds: int,
    settings: dict[str, str | int | bool],
    note: Callable[[str], None] = lambda _text: None,
) -> Report:
    """Measure every workload at the table and judges the targets; `note` hears what is being measured."""
    results: dict[str, dict[str, Result]] = {}
    for load in loads:
        note(load.title)
        results[load.name] = table.measure(load, rounds)
    sections = tuple(_section(load, results) for load in loads)
    return Report(machine(), settings | {"rounds": rounds, "threads": 1}, tuple(table.libraries), sections)


def _section(load: Workload, results: Mapping[str, dict[str, Result]]) -> Section:
    """Judge a workload when all are measured: some targets compare it with another one."""
    here = results[load.name]
    seen = Seen(load.name, results)
    verdicts = tuple(target.judge(seen) for target in load.targets) if OURS in here else ()
    return Section(load.name, load.title, load.limit, here, verdicts)


def machine() -> dict[str, str]:
    """Return what kind of machine this is, without any name or path of it."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "system": platform.system(),
        "python": platform.python_version(),
        "huge_pages": pages.read_text().partition("[")[2].partition("]")[0] if pages.exists() else "unknown",
    }
