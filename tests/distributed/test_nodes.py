"""Shards on several nodes, whose network, processes and memory fail.

Each test is a story that runs in a process on the head (see `nodes.py`). Shards are on the other two nodes, with
checkpoints in a directory that all nodes see.
"""

from __future__ import annotations

import os
import time
import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ostinato import LazyTensorStorage, ShardedReplayBuffer

from .nodes import Nodes, running_nodes, unavailable
from .rows import Calls, Writer, make_rows, sample_until, stored, writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

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
    import ray

    return ray.util.get_node_ip_address(), os.getpid()


def shard_on(nodes: Nodes, rb: ShardedReplayBuffer, node: int) -> int:
    """Return the shard that is on a node."""
    return [address for address, _ in rb.apply(_where)].index(nodes.address(node))


def alive(nodes: Nodes, node: int) -> bool:
    """Return whether Ray says that a node is alive."""
    import ray

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


def long_partition(nodes: Nodes, directory: Path) -> None:
    ignore_warnings()
    calls = Calls(LIMIT_S)
    with closing(make(directory)) as rb:
        fill(rb)
        shard = shard_on(nodes, rb, 1)
        with writing(two_writers(rb, calls)) as writers:
            sample_until(rb, calls, lambda: all(writer.acknowledged for writer in writers))
            safe = {number for writer in writers for number in list(writer.acknowledged)} | set(range(2000))
            rb.checkpoint()
            nodes.cut(1)
            sample_until(rb, calls, lambda: not alive(nodes, 1))
            assert list(rb.missing) == [shard]
            nodes.heal()
            nodes.kill(1)  # Ray ends a node that it has declared dead; this is faster
            nodes.start(1, slots=2)
            sample_until(rb, calls, lambda: not rb.missing)
        held = stored(rb)
        assert safe <= held.keys(), "what was acknowledged before the checkpoint"
        assert len(rb.report()) == 2
        assert all(part.missing is None and part.rows > 0 for part in rb.report())


def test_after_a_long_partition_the_shard_returns_with_its_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(long_partition, tmp_path)


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
        assert calls(len, rb) == calls(rb.stats).size
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


# -- killed nodes -----------------------------------------------------------------------------------------------------


def killed_node(nodes: Nodes, directory: Path) -> None:
    ignore_warnings()
    calls = Calls(LIMIT_S)
    with closing(make(directory, placement="SPREAD")) as rb:
        fill(rb)
        shard = shard_on(nodes, rb, 1)
        with writing(two_writers(rb, calls)) as writers:
            sample_until(rb, calls, lambda: all(writer.acknowledged for writer in writers))
            safe = {number for writer in writers for number in list(writer.acknowledged)} | set(range(2000))
            rb.checkpoint()
            nodes.kill(1)
            sample_until(rb, calls, lambda: shard in rb.missing)
            sample_until(rb, calls, lambda: not rb.missing)
        assert {address for address, _ in rb.apply(_where)} == {nodes.address(2)}
        assert safe <= stored(rb).keys()


def test_shards_of_a_killed_node_move_to_another_one(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(killed_node, tmp_path)


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
