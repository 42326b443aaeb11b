"""Memory of the process that samples a video dataset, beside its budget: `python -m benchmarks.residence`.

Each line is a process of its own: it opens 400 rows of two cameras of 480x640 (740 MB decoded), samples windows at
random until every frame was drawn about twelve times, and reports how much its resident memory grew beyond a batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

from benchmarks.coordinator import ROOT
from benchmarks.recordings import offsets, recording

MIB = 1 << 20
BUDGETS = (64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB)
_ROWS, _BATCH, _BATCHES = 400, 1, 600


def grown(budget: int) -> dict[str, float]:
    """Sample under a budget and return bytes: the largest growth of resident memory, and one batch; hits and misses."""
    import psutil
    import torch

    torch.set_num_threads(1)
    package: Any = import_module("ostinato")
    process = psutil.Process()

    def buffer(kind: str, rows: int) -> Any:
        dataset = package.open_dataset(recording(kind, rows), max_bytes=budget)
        unit = package.DeltaTimestamps(offsets(kind), fps=dataset.fps)
        return package.ReplayBuffer(storage=dataset, sample_unit=unit, batch_size=_BATCH)

    small = buffer("96", 2000)  # loads the libraries, and keeps next to nothing
    for _ in range(3):
        small.sample()
    before = process.memory_info().rss
    large, most, nbytes = buffer("480", _ROWS), 0, 0
    for _ in range(_BATCHES):
        batch = large.sample()
        most = max(most, process.memory_info().rss - before)
        nbytes = sum(values.nbytes for values in batch.values() if isinstance(values, torch.Tensor))
        del batch
    return {"grown": most, "batch": nbytes}


def main() -> None:
    """Print a line for each budget."""
    if len(sys.argv) > 1:
        print(json.dumps(grown(int(sys.argv[1]))))
        return
    recording("96", 2000)
    recording("480", _ROWS)
    print("budget (MiB) | resident memory beyond a batch (MiB) | of the budget")
    print("---:|---:|---:")
    for budget in BUDGETS:
        line = [sys.executable, "-m", "benchmarks.residence", str(budget)]
        found = json.loads(subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        extra = found["grown"] - found["batch"]
        print(f"{budget // MIB} | {extra / MIB:.0f} | {extra / budget:.0%}")


if __name__ == "__main__":
    main()
