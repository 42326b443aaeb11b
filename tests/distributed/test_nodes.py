"""Shards on several nodes, whose network, processes and memory fail.

Each test is a story that runs in a process on the head (see `nodes.py`). Shards are on the other two nodes, with
checkpoints in a directory that all nodes see.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, ShardedReplayBuffer
from ostinato.errors import LostBufferError, StorageMemoryError

from .nodes import Nodes, running_nodes, unavailable
from .rows import Calls, Writer, make_rows, sample_until, stored, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("machines"),  # one worker: clusters need both cores
]

LIMIT_S = 30.0
"""Longest time that a call may take in any of these tests, on a busy machine."""


@pytest.fixture(scope="module")
def cluster_of_nodes() -> Iterator[Nodes]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with running_nodes(3, slots=2) as made:
        yield made


@pytest.fixture
def nodes(cluster_of_nodes: Nodes) -> Iterator[Nodes]:
    """The cluster, complete again after each test."""
    yield cluster_of_nodes
    cluster_of_nodes.heal()
    for node in (1, 2):
        cluster_of_nodes.kill(node)
        cluster_of_nodes.start(node, slots=2)


def make(directory: Path, **more: Any) -> ShardedReplayBuffer:
    """Two shards, on nodes 1 and 2."""
    given = {"placement": "STRICT_SPREAD", "batch_size": 32, "shard_timeout_s": 2.0, **more}
    return ShardedReplayBuffer(
        2,
        storage=partial(LazyTensorStorage, 50_000),
        checkpoint_dir=directory,
        remote_config={"resources": {"slot": 1}, "num_cpus": 0},
        **given,
    )


def _where(_: Any) -> tuple[str, int]:
    return ray.util.get_node_ip_address(), os.getpid()


def shard_on(nodes: Nodes, rb: ShardedReplayBuffer, node: int) -> int:
    """Return the shard that is on a node."""
    return [address for address, _ in rb.apply(_where)].index(nodes.address(node))


def alive(nodes: Nodes, node: int) -> bool:
    """Return whether Ray says that a node is alive."""
    return any(one["Alive"] and one["NodeManagerAddress"] == nodes.address(node) for one in ray.nodes())


def fill(rb: ShardedReplayBuffer) -> set[int]:
    """Write rows 0 to 2000 to both shards, and save them; return their numbers."""
    for shard in range(2):
        rb.pinned(shard).extend(make_rows(1000 * shard, 1000))
    rb.checkpoint()
    return set(range(2000))


def two_writers(rb: ShardedReplayBuffer, calls: Calls) -> list[Writer]:
    return [Writer(rb.pinned(shard), 100_000 * (shard + 1), calls) for shard in range(2)]


def ignore_warnings() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)


# -- the network ------------------------------------------------------------------------------------------------------


def short_partition(nodes: Nodes, directory: Path) -> None:
    ignore_warnings()
    calls = Calls(LIMIT_S)
    with closing(make(directory)) as rb:
        safe, shard, before = fill(rb), shard_on(nodes, rb, 1), rb.apply(_where)
        with writing(two_writers(rb, calls)) as writers:
            sample_until(rb, calls, lambda: all(writer.acknowledged for writer in writers))
            nodes.cut(1)
            sample_until(rb, calls, lambda: shard in rb.missing)
            time.sleep(1.0)
            nodes.heal()
            sample_until(rb, calls, lambda: not rb.missing)
        assert rb.apply(_where) == before, "the processes are the same"
        held = stored(rb)
        acknowledged = {number for writer in writers for number in writer.acknowledged}
        assert safe | acknowledged <= held.keys()
        repeated = {number for number, times in held.items() if times > 1}
        assert max(held.values()) <= 2
        assert len(repeated) <= 4 * 16, "only rows of writes that were not confirmed"


def test_a_short_partition_loses_nothing(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(short_partition, tmp_path)


def lost_node(nodes: Nodes, directory: Path, cut: bool) -> None:
    """Cut a node off until Ray declares it dead, and start it again; or kill it, so that its shard moves."""
    ignore_warnings()
    calls = Calls(LIMIT_S)
    with closing(make(directory, placement="STRICT_SPREAD" if cut else "SPREAD")) as rb:
        fill(rb)
        shard = shard_on(nodes, rb, 1)
        with writing(two_writers(rb, calls)) as writers:
            sample_until(rb, calls, lambda: all(writer.acknowledged for writer in writers))
            safe = {number for writer in writers for number in list(writer.acknowledged)} | set(range(2000))
            rb.checkpoint()
            if cut:
                nodes.cut(1)
                sample_until(rb, calls, lambda: not alive(nodes, 1))
                assert list(rb.missing) == [shard]
                nodes.heal()
            nodes.kill(1)  # Ray ends a node that it has declared dead; this is faster
            if cut:
                nodes.start(1, slots=2)
            else:
                sample_until(rb, calls, lambda: shard in rb.missing)
            sample_until(rb, calls, lambda: not rb.missing)
        assert safe <= stored(rb).keys(), "what was acknowledged before the checkpoint"
        assert all(part.missing is None and part.rows > 0 for part in rb.report())
        assert cut or {address for address, _ in rb.apply(_where)} == {nodes.address(2)}


def test_after_a_long_partition_the_shard_returns_with_its_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(lost_node, tmp_path, True)


def test_shards_of_a_killed_node_move_to_another_one(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(lost_node, tmp_path, False)


def bad_network(nodes: Nodes, directory: Path, loss: float, delay_s: float) -> None:
    ignore_warnings()
    calls = Calls(LIMIT_S)
    with closing(make(directory, prefetch=2, shard_timeout_s=20.0)) as rb:
        safe, before = fill(rb), rb.apply(_where)
        nodes.link_all(loss=loss, delay_s=delay_s)
        end = time.monotonic() + 10
        with writing(two_writers(rb, calls)) as writers:
            batches = sample_until(rb, calls, lambda: time.monotonic() > end)
        calls(rb.checkpoint)
        assert calls(len, rb) == calls(rb.stats).rows
        assert batches >= 5
        nodes.heal()
        assert rb.apply(_where) == before
        assert not rb.missing
        held = stored(rb)
        assert held.keys() == safe | {number for writer in writers for number in writer.acknowledged}
        assert max(held.values()) == 1


@pytest.mark.parametrize(("loss", "delay_s"), [(0.0, 0.1), (0.05, 0.0)], ids=["delay", "loss"])
def test_a_slow_or_lossy_network_delays_calls_only(nodes: Nodes, tmp_path: Path, loss: float, delay_s: float) -> None:
    nodes.run(bad_network, tmp_path, loss, delay_s)


# -- a new cluster ----------------------------------------------------------------------------------------------------


def first_life(nodes: Nodes, directory: Path) -> None:
    rb = make(directory)
    fill(rb)
    rb.extend(make_rows(5000, 100))  # not saved


def second_life(nodes: Nodes, directory: Path) -> None:
    with closing(make(directory, resume=True)) as rb:
        assert stored(rb) == dict.fromkeys(range(2000), 1)
        rb.extend(make_rows(5000, 100))
        assert len(rb.sample()["number"]) == 32


def test_a_new_cluster_resumes_from_the_checkpoints(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(first_life, tmp_path)
    for node in range(3):
        nodes.kill(node)
    for node in range(3):
        nodes.start(node, slots=2)
    nodes.run(second_life, tmp_path)


# -- memory -----------------------------------------------------------------------------------------------------------

FULL_STORE = {
    "RAY_automatic_object_spilling_enabled": "0",
    "RAY_local_fs_capacity_threshold": "0.01",  # no object goes to the disk instead
}


def big(numbers: range) -> Any:
    rows = make_rows(numbers.start, len(numbers))
    rows["image"] = rows["number"][:, None].expand(-1, 20_000).contiguous().to(torch.uint8)
    return rows


class Filler:
    """Fills the object store of its node."""

    def fill(self) -> int:
        self._held = []
        for _ in range(3):  # objects of others are freed late
            with contextlib.suppress(ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError):
                while True:
                    self._held.append(ray.put(np.zeros(500_000, np.uint8)))
            time.sleep(1.0)
        return len(self._held)

    def free(self) -> None:
        self._held = []


def on_node(nodes: Nodes, node: int) -> Any:
    """Return the scheduling strategy of an actor that belongs on a node."""
    found = (one for one in ray.nodes() if one["Alive"] and one["NodeManagerAddress"] == nodes.address(node))
    strategies = ray.util.scheduling_strategies
    return strategies.NodeAffinitySchedulingStrategy(next(found)["NodeID"], soft=False)


def full_store(nodes: Nodes, directory: Path) -> None:
    ignore_warnings()
    nodes.kill(1)
    nodes.start(1, FULL_STORE, slots=2)
    calls = Calls(LIMIT_S)
    with closing(make(directory)) as rb:
        shard, before = shard_on(nodes, rb, 1), rb.apply(_where)
        for i in range(2):
            index = rb.pinned(i).extend(big(range(1000 * i, 1000 * i + 500)))
        rb.checkpoint()
        filler = ray.remote(Filler).options(num_cpus=0, scheduling_strategy=on_node(nodes, 1)).remote()
        assert ray.get(filler.fill.remote()) > 50
        index, rows = (shard << 40) + torch.arange(100), big(range(3000, 3100))

        def attempt(call: Callable[[], Any]) -> bool:
            try:
                calls(call)
            except ray.exceptions.RayError as error:
                if "object store is full" not in str(error):
                    raise
                return False
            return True

        attempt(lambda: rb.sample(256))  # Ray may find room by freeing other objects
        attempt(lambda: rb[index])
        written = attempt(lambda: rb.pinned(shard).extend(rows))
        rb.pinned(shard).extend(big(range(4000, 4001)))  # small rows are sent with the call
        assert calls(len, rb) == 1001 + 100 * written
        ray.get(filler.free.remote())
        calls(rb.sample, 256)
        if not written:
            calls(rb.pinned(shard).extend, rows)
        assert stored(rb) == dict.fromkeys([*range(500), *range(1000, 1500), 4000, *range(3000, 3100)], 1)
        assert rb.apply(_where) == before


def test_a_full_object_store_loses_nothing(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(full_store, tmp_path)


def _limit_memory(_: Any, extra_bytes: int) -> None:
    """Let this process allocate no more than `extra_bytes`."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, resource.RLIM_INFINITY))


def too_little_memory(nodes: Nodes, directory: Path) -> None:
    ignore_warnings()
    calls = Calls(LIMIT_S)
    with closing(make(directory)) as rb:
        rb.pinned(0).extend(big(range(10)))
        rb.empty()
        rb.apply(lambda buffer: buffer.set_storage(LazyTensorStorage(50_000)))
        before = rb.apply(_where)
        rb.apply(_limit_memory, 300_000_000)
        for _ in range(2):
            with pytest.raises(StorageMemoryError):
                calls(rb.pinned(0).extend, big(range(10)))  # the storage has 1 GB
        rb.apply(_limit_memory, 1 << 40)
        assert rb.apply(_where) == before
        rb.pinned(0).extend(make_rows(0, 1000))
        assert stored(rb) == dict.fromkeys(range(1000), 1)


def test_a_storage_beyond_the_memory_raises_in_the_writer(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(too_little_memory, tmp_path)


def out_of_memory_killer(nodes: Nodes, directory: Path) -> None:
    ignore_warnings()
    calls = Calls(LIMIT_S)
    with closing(make(directory)) as rb:
        safe, shard = fill(rb), shard_on(nodes, rb, 1)
        nodes.kill(1)
        nodes.start(1, OUT_OF_MEMORY, slots=2)
        sample_until(rb, calls, lambda: shard in rb.missing)
        end = time.monotonic() + 10
        sample_until(rb, calls, lambda: time.monotonic() > end)
        nodes.kill(1)
        nodes.start(1, slots=2)
        sample_until(rb, calls, lambda: not rb.missing)
        assert stored(rb).keys() == safe


OUT_OF_MEMORY = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
"""Ray kills actors of a node whose memory is used up; this one takes itself for such a node."""


def test_a_shard_killed_for_memory_returns_with_its_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(out_of_memory_killer, tmp_path)


# -- both sides of a partition ----------------------------------------------------------------------------------------


class Client:
    """A learner and writer on a node that is cut off."""

    def __init__(self, rb: ShardedReplayBuffer) -> None:
        self._rb = rb

    def work(self, seconds: float) -> tuple[float, int, set[str]]:
        """Write and sample for some time; return the longest call, the calls that succeeded, and the errors."""
        ignore_warnings()
        calls, errors, done = Calls(math.inf), set(), 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for call in (self._rb.sample, partial(self._rb.extend, make_rows(10_000, 4)), self._rb.report):
                try:
                    calls(call)
                    done += 1
                except LostBufferError as error:
                    errors.add(f"{type(error).__name__}: {error}")
            time.sleep(0.1)
        return calls.longest_s, done, errors


def cut_client(nodes: Nodes, directory: Path) -> None:
    ignore_warnings()
    with closing(make(directory)) as rb:
        fill(rb)
        client = ray.remote(Client).options(num_cpus=0, scheduling_strategy=on_node(nodes, 1)).remote(rb)
        ray.get(client.work.remote(0.5))
        running = client.work.remote(12.0)
        time.sleep(2)
        nodes.cut(1)
        time.sleep(4)
        nodes.heal()
        longest_s, done, _ = ray.get(running)
        assert longest_s < LIMIT_S
        assert done > 20
        sample_until(rb, Calls(LIMIT_S), lambda: not rb.missing)
        ray.get(client.work.remote(2.0))
        assert ray.get(client.work.remote(2.0))[2] == set(), "no errors any more"


def test_calls_end_on_both_sides_of_a_partition(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(cut_client, tmp_path)
