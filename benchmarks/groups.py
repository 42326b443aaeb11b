"""Groups of responses: durable appends, packed leases, an index of many groups.

    python -m benchmarks.groups [--folder DIR] [--quick] [--transfer-queue]

Beside `GroupBuffer` stand a list whose responses are saved with `torch.save` and `fsync`, a table of SQLite (WAL,
`synchronous=FULL`), and TransferQueue 0.1.11 (in memory, needs Ray). `fsync` and bandwidth of the disk under the folder
are measured first: what a durable append can reach depends on them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pickle
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ostinato.groups import GroupBuffer, TokenBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
SIZE = 8
"""Responses of a group."""


def response_of(nbytes: int) -> dict[str, Any]:
    """Return a response whose int64 tokens and float32 logprobs have this many bytes."""
    return {"tokens": torch.arange(nbytes // 12), "logprobs": torch.rand(nbytes // 12), "reward": 1.0, "version": 0}


class Store(Protocol):
    """What is measured."""

    name: str

    def append(self, group: int, number: int, response: dict[str, Any]) -> None:
        """Store a response, durably if the store can."""

    def take(self, groups: int) -> Any:
        """Remove the next groups and return their tokens and logprobs, packed."""


class Groups:
    """`GroupBuffer`."""

    name = "GroupBuffer"

    def __init__(self, folder: Path, groups: int, **options: Any) -> None:
        self.buffer = GroupBuffer(folder / "groups", size=SIZE, **options)
        self.names = self.buffer.admit([{"text": "prompt"}] * groups)
        self.budget = TokenBudget(max_tokens=16_384, ranks=8)

    def append(self, group: int, number: int, response: dict[str, Any]) -> None:
        """Append to the log."""
        self.buffer.append(self.names[group], response, id=f"{number}")

    def take(self, groups: int) -> Any:
        """Lease and pack for 8 ranks."""
        return self.budget.batches(self.buffer.lease(groups))


class Files:
    """A list in memory, each response also in a file of `torch.save`."""

    name = "list, torch.save"

    def __init__(self, folder: Path, _: int) -> None:
        self.folder, self.rows = folder, list[dict[str, Any]]()

    def append(self, group: int, number: int, response: dict[str, Any]) -> None:
        """Save a response and sync its file."""
        with (self.folder / f"{group}-{number}.pt").open("wb") as stream:
            torch.save(response, stream)
            stream.flush()
            os.fsync(stream.fileno())
        self.rows.append(response)

    def take(self, groups: int) -> Any:
        """Concatenate the first rows."""
        rows, self.rows = self.rows[: groups * SIZE], self.rows[groups * SIZE :]
        return [torch.cat([row[name] for row in rows]) for name in ("tokens", "logprobs")]


class Table:
    """A table of SQLite; each insert is a transaction."""

    name = "SQLite WAL"

    def __init__(self, folder: Path, _: int) -> None:
        self.lock = threading.Lock()
        self.base = sqlite3.connect(folder / "groups.db", isolation_level=None, check_same_thread=False)
        for line in (
            "pragma journal_mode=wal",
            "pragma synchronous=full",
            "create table rows (of integer, value blob)",
        ):
            self.base.execute(line)

    def append(self, group: int, number: int, response: dict[str, Any]) -> None:
        """Insert a response."""
        value = pickle.dumps({name: getattr(field, "numpy", lambda it=field: it)() for name, field in response.items()})
        with self.lock:
            self.base.execute("insert into rows values (?, ?)", (group * SIZE + number, value))

    def take(self, groups: int) -> Any:
        """Select and delete the first rows."""
        first = self.base.execute("select min(of) from rows").fetchone()[0]
        until = (first + groups * SIZE,)
        rows = [pickle.loads(row) for (row,) in self.base.execute("select value from rows where of < ?", until)]
        self.base.execute("delete from rows where of < ?", until)
        return [torch.cat([torch.from_numpy(row[name]) for row in rows]) for name in ("tokens", "logprobs")]


class Queue:
    """TransferQueue, which keeps rows in the memory of Ray actors."""

    name = "TransferQueue"

    def __init__(self, _: Path, __: int) -> None:
        queue, ray = import_module("transfer_queue"), import_module("ray")
        self.dict: Any = import_module("tensordict").TensorDict
        if not ray.is_initialized():
            ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)  # its actors wait for so many
            queue.init()
        self.client: Any = queue.get_client()

    def append(self, group: int, number: int, response: dict[str, Any]) -> None:
        """Put one row."""
        del group, number
        rows = {name: field[None] for name, field in response.items() if isinstance(field, torch.Tensor)}
        self.client.put(data=self.dict(rows, batch_size=1), partition_id="rows")

    def take(self, groups: int) -> Any:
        """Get rows that no task has had."""
        names = ["tokens", "logprobs"]
        rows = self.client.get_meta(data_fields=names, batch_size=groups * SIZE, partition_id="rows", task_name="train")
        found = self.client.get_data(rows)
        return [torch.cat(list(found[name])) for name in names]


@contextlib.contextmanager
def emptied(root: Path) -> Iterator[Path]:
    """A folder that is removed again."""
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def disk(root: Path) -> tuple[float, float]:
    """Return how often a file of the disk can be synced in a second, and how many bytes it writes."""
    with emptied(root) as folder, (folder / "file").open("wb", buffering=0) as stream:
        begun = time.perf_counter()
        for _ in range(100):
            stream.write(bytes(4096))
            os.fsync(stream.fileno())
        rate = 100 / (time.perf_counter() - begun)
        block, begun = os.urandom(8 * MIB), time.perf_counter()
        for _ in range(32):
            stream.write(block)
        os.fsync(stream.fileno())
        return rate, 32 * len(block) / (time.perf_counter() - begun)


def appended(store: Store, response: dict[str, Any], groups: int, threads: int) -> tuple[float, float, float]:
    """Append to groups in threads; return appends in a second, and the p50 and p99 of one in seconds."""
    spent: list[float] = []

    def work(first: int) -> None:
        for group in range(first, groups, threads):
            for number in range(SIZE):
                begun = time.perf_counter()
                store.append(group, number, response)
                spent.append(time.perf_counter() - begun)

    workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begun
    cuts = statistics.quantiles(spent, n=100)
    return len(spent) / seconds, cuts[49], cuts[98]


def median(call: Callable[[], object], times: int) -> float:
    """Return the median time of a call in milliseconds."""
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(spent)


def measure_appends(root: Path, makers: list[Any], threads: int, *, quick: bool) -> None:
    """Print a line for each size of response and store."""
    print("\nbytes | store | threads | appends/s | MB/s | p50 (ms) | p99 (ms)\n---:|---|---:|---:|---:|---:|---:")
    for nbytes, groups in ((4096, 512), (400_000, 64)):
        for maker in makers:
            for count in (1, threads):
                with emptied(root) as folder:
                    few = 8 if quick or (maker is not Groups) else 1
                    store = maker(folder, groups)
                    rate, half, most = appended(store, response_of(nbytes), max(count, groups // few), count)
                    line = f"{nbytes} | {store.name} | {count} | {rate:,.0f} | {rate * nbytes / 1e6:,.0f}"
                    print(f"{line} | {1e3 * half:.2f} | {1e3 * most:.2f}", flush=True)


def measure_leases(root: Path, makers: list[Any]) -> None:
    """Print how long it takes to get 64 groups of 8 responses of 1,000 tokens, packed."""
    print("\n64 groups of 8 responses of 1,000 tokens, packed | median (ms)\n---|---:")
    cases: list[tuple[str, Any]] = [(maker.name, maker) for maker in makers if maker is not Groups]
    cases += [
        (
            f"GroupBuffer, {name}",
            lambda folder, groups, most=most: Groups(folder, groups, sync="never", recent_bytes=most),
        )
        for name, most in (("in memory", 256 * MIB), ("from the files", 0))
    ]
    for name, maker in cases:
        with emptied(root) as folder:
            store, response = maker(folder, 64 * 5), response_of(12_000)
            for group in range(64 * 5):
                for number in range(SIZE):
                    store.append(group, number, response)
            print(f"{name} | {median(partial(store.take, 64), 5):.2f}", flush=True)


def measure_index(root: Path, groups: int) -> None:
    """Print times of a buffer with many groups, of one response each, and of opening it after a kill."""
    with emptied(root) as folder:
        options: dict[str, Any] = {"size": 1, "sync": "never"}
        gc.collect()
        before = _resident()
        buffer = GroupBuffer(folder / "groups", recent_bytes=0, **options)
        for name in buffer.admit([{"text": "prompt"}] * groups):
            buffer.append(name, response_of(120), id="0")
        print(f"\n{groups:,} groups | \n---|---:")
        print(f"memory of a group (bytes) | {(_resident() - before) / groups:,.0f}")
        for name, call in (
            ("stats (ms)", buffer.stats),
            ("lease of 64 (ms)", lambda: buffer.lease(64)),
            ("position (ms)", lambda: buffer.position(0)),
        ):
            print(f"{name} | {median(call, 7):.2f}")
        buffer.flush()
        shutil.copytree(folder / "groups", folder / "copy", ignore=shutil.ignore_patterns("*lock*"))
        opened = median(lambda: GroupBuffer.open(folder / "copy", **options).close(), 3)
        print(f"open after a kill (s) | {opened / 1e3:.2f}")
        buffer.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.groups", description="Measures groups of responses.")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="a folder on the disk to be measured")
    parser.add_argument("--threads", type=int, default=64, help="threads that append at the same time")
    parser.add_argument("--quick", action="store_true", help="fewer appends, fewer groups")
    parser.add_argument("--transfer-queue", action="store_true", help="TransferQueue, too; starts Ray")
    given = parser.parse_args(arguments)
    rate, bandwidth = disk(given.folder)
    sys.stdout.write(f"{given.folder}: {rate:,.0f} fsync/s, {bandwidth / 1e6:,.0f} MB/s\n")
    makers = [Groups, Files, Table, *([Queue] if given.transfer_queue else [])]
    measure_leases(given.folder, makers)
    measure_index(given.folder, 5_000 if given.quick else 50_000)
    measure_appends(given.folder, makers, given.threads, quick=given.quick)


if __name__ == "__main__":
    main()
