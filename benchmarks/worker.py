"""One process per library: reads orders from stdin, one JSON object a line, and answers on the first stdout.

Orders: `hello`, `setup` (workload), `round` (seconds, calls), `teardown`; end of input ends the process. Runs
under the peers' interpreter, so nothing but numpy and the library itself may be imported here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from benchmarks.adapter import Loaded, Seconds, Setup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.adapter import Adapter, Call


def measure(call: Call, seconds: float, min_calls: int, warmup_s: float) -> dict[str, float | int]:
    """Time single calls for `seconds`, `min_calls` of them at least, after a warm-up; return seconds a call.

    The slowest call is also given in processor time of this thread, where an interruption is no stall.
    """
    clock, processor = time.perf_counter_ns, time.thread_time_ns
    ready = clock() + int(warmup_s * 1e9)
    while clock() < ready:
        call()
    times: list[int] = []
    worst_cpu = 0
    end = clock() + int(seconds * 1e9)
    while len(times) < min_calls or clock() < end:
        before_cpu = processor()
        before = clock()
        value = call()
        times.append(int(value * 1e9) if type(value) is Seconds else clock() - before)
        del value
        worst_cpu = max(worst_cpu, processor() - before_cpu)
    return {
        "median_s": statistics.median(times) / 1e9,
        "mean_s": statistics.fmean(times) / 1e9,
        "p99_s": sorted(times)[math.ceil(0.99 * len(times)) - 1] / 1e9,
        "worst_s": max(times) / 1e9,
        "worst_cpu_s": worst_cpu / 1e9,
        "calls": len(times),
    }


@contextlib.contextmanager
def loaded(work: Call) -> Iterator[None]:
    """Do `work` again and again in another thread, without pause; what it raises comes at the end."""
    ended = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            while not ended.is_set():
                work()
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that measures
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


class Worker:
    """Holds one library's adapter and the workload that is set up."""

    def __init__(self, module: str) -> None:
        """Remember the adapter's module; `hello` imports it."""
        self._module = module
        self._call: Call | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry one order out; what goes wrong comes back as the reason under `missing`."""
        verbs = {"hello": self._hello, "setup": self._setup, "round": self._round, "teardown": self._teardown}
        try:
            return verbs[order["op"]](order)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is the reason to report
            lines = str(error).strip().splitlines() or ["no message"]
            return {"missing": f"{type(error).__name__}: {lines[0][:200]}"}

    def _adapter(self) -> Adapter:
        return cast("Adapter", importlib.import_module(self._module))

    def _hello(self, _order: dict[str, Any]) -> dict[str, Any]:
        return {"version": self._adapter().version()}

    def _setup(self, order: dict[str, Any]) -> dict[str, Any]:
        adapter, name = self._adapter(), order["name"]
        prepare = adapter.WORKLOADS.get(name)
        if prepare is None:
            family = name.partition(".")[0]
            return {"missing": adapter.LACKS.get(name) or adapter.LACKS.get(family) or "no adapter for it"}
        self._directory = tempfile.TemporaryDirectory(prefix="ostinato-bench-", ignore_cleanup_errors=True)
        self._call = prepare(Setup(order["kind"], order["rows"], order["batch"], Path(self._directory.name)))
        gc.collect()
        return {}

    def _round(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._call is None:
            return {"missing": "nothing is set up"}
        call = self._call
        with loaded(call.work) if isinstance(call, Loaded) else contextlib.nullcontext():
            return {"round": measure(call, order["seconds"], order["min_calls"], order["warmup_s"])}

    def _teardown(self, _order: dict[str, Any]) -> dict[str, Any]:
        self._call = None
        gc.collect()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        return {}


def private_stdout() -> TextIO:
    """Return the pipe to the coordinator and send what libraries print to stderr, away from the protocol."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return pipe


def main() -> None:
    """Answer orders until the input ends."""
    pipe = private_stdout()
    if sys.argv[1].endswith(".torchrl"):
        # its compiled trees were built beside an older torch: they load where symbols are looked up late and anywhere
        sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        pipe.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        pipe.flush()
    worker.answer({"op": "teardown"})


if __name__ == "__main__":
    main()
