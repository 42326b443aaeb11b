"""Shards on a cluster of several raylets of one machine (`ray.cluster_utils.Cluster`); `test_nodes.py` does more."""

from __future__ import annotations

import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ostinato import LazyTensorStorage, ShardedReplayBuffer
from ostinato.distributed.routing import split_index

from .nodes import run_story
from .rows import Calls, make_rows, sample_until, stored

if TYPE_CHECKING:
    from pathlib import Path

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")


def _node(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


def killed_raylet(directory: Path) -> None:
    warnings.simplefilter("ignore", RuntimeWarning)
    size = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = pytest.importorskip("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={**size, "include_dashboard": False}
    )
    other = cluster.add_node(**size)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=40)
    calls = Calls(30.0)
    with closing(
        ShardedReplayBuffer(
            2,
            storage=partial(LazyTensorStorage, 5000),
            placement="STRICT_SPREAD",
            checkpoint_dir=directory,
            shard_timeout_s=5.0,
            batch_size=32,
        )
    ) as rb:
        places = rb.apply(_node)
        assert len(set(places)) == 2
        doomed = places.index(other.node_id)
        for shard in range(2):
            rb.pinned(shard).extend(make_rows(1000 * shard, 500))
        rb.checkpoint()
        cluster.remove_node(other, allow_graceful=False)
        sample_until(rb, calls, lambda: doomed in rb.missing)
        index = calls(rb.pinned(doomed).extend, make_rows(3000, 100))
        assert set(split_index(index)[0].tolist()) == {1 - doomed}, "to the other shard"
        cluster.add_node(**size)
        sample_until(rb, calls, lambda: not rb.missing)
        assert stored(rb) == dict.fromkeys([*range(500), *range(1000, 1500), *range(3000, 3100)], 1)
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.ray
def test_the_shard_of_a_killed_raylet_returns_on_a_new_one(tmp_path: Path) -> None:
    run_story(killed_raylet, tmp_path, limit_s=200.0)
