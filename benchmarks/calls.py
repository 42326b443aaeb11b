"""How many Python calls, in how many files, a warm operation takes: a measure of indirection, not of time.

Run as ``python -m benchmarks.calls``; TorchRL stands beside Ostinato where it is installed. A call counts if its
function lies in the library's own folder; calls of C functions, of torch and of tensordict do not count.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UPS = 3
ROWS = 1024
BATCH = 64


class Count(NamedTuple):
    """Python calls inside a library, and the files that they lie in."""

    calls: int
    files: int

    def __str__(self) -> str:
        """Write both, as in the table."""
        return f"{self.calls} / {self.files}"


def count(work: Callable[[], Any], folder: Path) -> Count:
    """Count the calls of one run of `work` that lie in `folder`."""
    calls = 0
    files: set[str] = set()
    inside = f"{folder}/"

    def watch(frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(inside):
            calls += 1
            files.add(name)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Count(calls, len(files))


def rows(size: int) -> dict[str, torch.Tensor]:
    """Make `size` rows of five fields; an episode ends after every 32 of them."""
    return {
        "obs": torch.randn(size, 17),
        "action": torch.randn(size, 6),
        "reward": torch.randn(size),
        "next_obs": torch.randn(size, 17),
        "done": torch.arange(size) % 32 == 31,
    }


def operations(library: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """Return the operations of the table, each on a filled buffer of its own."""
    storage, batch, one = library.LazyTensorStorage, rows(BATCH), {k: v[0] for k, v in rows(1).items()}

    def filled(data: Any = None, **options: Any) -> Any:
        buffer = library.ReplayBuffer(storage=storage(ROWS), batch_size=BATCH, **options)
        buffer.extend(rows(ROWS) if data is None else data)
        return buffer

    plain = filled()
    found = {
        "sample": plain.sample,
        "extend": lambda: plain.extend(batch),
        "add": lambda: plain.add(one),
        "dumps": lambda: plain.dumps(folder),
        "loads": lambda: plain.loads(folder),
    }
    prioritized = filled(sampler=library.PrioritizedSampler(ROWS, 0.6, 0.4))
    index, priority = torch.arange(BATCH), torch.rand(BATCH)
    found["update_priority"] = lambda: prioritized.update_priority(index, priority)
    found["prioritized sample"] = prioritized.sample
    sampler = library.SliceSampler(slice_len=8, end_key="done", cache_values=True)
    found["slice sample"] = filled(
        TensorDict(rows(ROWS), [ROWS]), sampler=sampler
    ).sample  # TorchRL's slices need TensorDicts
    return found


def table() -> list[tuple[str, list[str]]]:
    """Count all operations for the libraries that are installed."""
    names = ["ostinato"] + (["torchrl"] if importlib.util.find_spec("torchrl") else [])
    columns: dict[str, dict[str, str]] = {}
    for name in names:
        package = importlib.import_module(name)
        library = importlib.import_module("torchrl.data") if name == "torchrl" else package
        home = Path(str(package.__file__)).parent
        columns[name] = {}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for operation, work in operations(library, f"{folder}/saved").items():
                try:
                    for _ in range(WARM_UPS):
                        work()
                    columns[name][operation] = str(count(work, home))
                except Exception as error:  # noqa: BLE001 (a peer may fail beside this torch; the table says so)
                    columns[name][operation] = f"fails: {type(error).__name__}"
    return [(operation, [columns[name][operation] for name in names]) for operation in columns["ostinato"]]


def main() -> None:
    """Print the table as markdown."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)  # TorchRL's compiled trees load beside this torch only so
    found = table()
    names = ["Ostinato", "TorchRL"][: len(found[0][1])]
    print("| warm call (Python calls / files) | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for operation, cells in found:
        print(f"| {operation} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
