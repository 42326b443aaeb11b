"""Names and lifetimes of buffers in a cluster: other programs attach, and nothing is left of what has ended."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RateLimiter,
    RayReplayBuffer,
    ReplayBuffer,
    ShardedReplayBuffer,
)
from ostinato.distributed.serialization import from_arguments, to_arguments
from ostinato.errors import LostBufferError, OptionError, UsageError
from tests.command import run_here

from .calls import SHARD_TIMED, TIMED, UNTIMED
from .handles import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

ROWS = 24
STORAGE = partial(LazyTensorStorage, 1000)
NO_CPU = {"num_cpus": 0}


def actors(cluster: Any) -> set[str]:
    """Names of all actors that live or are being restarted: each actor of a buffer has one."""
    return {one["name"] for one in cluster.util.list_named_actors(all_namespaces=True)}


def reserved(cluster: Any) -> list[str]:
    """States of the placement groups that are not removed."""
    found = [one["state"] for one in cluster.util.placement_group_table().values()]
    return [state for state in found if state != "REMOVED"]


ASKS = ["__bool__", "__getitem__", "__len__", "write_count"]
ASKS += ["add", "apply", "dumps", "empty", "extend", "loads", "query", "report", "stats"]


def calls_of(rb: Any) -> dict[str, Callable[[], Any]]:
    """Return calls that ask the actors."""
    calls = {**(TIMED if isinstance(rb, RayReplayBuffer) else SHARD_TIMED), **UNTIMED}
    return {"sample": partial(rb.sample, 4), **{name: partial(calls[name], rb) for name in ASKS if name in calls}}


def check_left(cluster: Any, names: set[str], places: list[Any]) -> None:
    """Wait until no other actors and placement groups are left than these: Ray ends them by and by."""
    until(lambda: actors(cluster) <= names and len(reserved(cluster)) <= len(places))


def is_lost(rb: Any) -> bool:
    try:
        len(rb)
    except LostBufferError:
        return True
    return False


def check_lost(calls: dict[str, Callable[[], Any]], reason: str) -> None:
    for name, call in calls.items():
        try:
            found = call()
        except LostBufferError as error:
            assert reason in str(error), name  # noqa: PT017 (the loop says which call it was)
        else:
            pytest.fail(f"{name} returned {found!r}")


# -- another program --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def maker(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A program that has made buffers."""
    address = cluster.get_runtime_context().gcs_address
    script = Path(__file__).with_name("fleet_maker.py")
    command = [sys.executable, str(script), address, str(tmp_path_factory.mktemp("fleets"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any(line.strip() == "made" for line in process.stdout)  # Ray may print warnings before it
            yield process
        finally:
            process.kill()


def test_buffers_of_another_program(processes, maker):
    cluster = processes
    kept, tied = ShardedReplayBuffer.attach("kept fleet"), ShardedReplayBuffer.attach("tied fleet")
    kept_actor, tied_actor = RayReplayBuffer.attach("kept actor"), RayReplayBuffer.attach("tied actor")
    _check_names(cluster)
    assert [len(one) for one in (kept, tied, kept_actor, tied_actor)] == [ROWS] * 4
    maker.kill()
    maker.wait()
    until(lambda: not any("tied" in name for name in actors(cluster)))
    until(lambda: is_lost(tied_actor) and is_lost(tied))  # their processes answer a little longer than they have names
    check_lost(calls_of(tied_actor), "has ended")
    check_lost(calls_of(tied), "the process that made it has ended")
    assert not tied.is_alive
    assert not tied_actor.is_alive
    _check_kept_fleet(cluster, kept)
    _check_kept_actor(cluster, kept_actor)


def _check_names(cluster: Any) -> None:
    before = actors(cluster), reserved(cluster)
    make = partial(ShardedReplayBuffer, 1, storage=STORAGE, remote_config=NO_CPU)
    with pytest.raises(OptionError, match=r"name='kept fleet' is taken .* ShardedReplayBuffer.attach\('kept fleet'\)"):
        make(name="kept fleet", placement="PACK")
    with pytest.raises(OptionError, match=r"name='tied actor' is taken .* RayReplayBuffer.attach\('tied actor'\)"):
        make(name="tied actor")
    assert (actors(cluster), reserved(cluster)) == before
    with pytest.raises(LostBufferError, match=r"no ShardedReplayBuffer named 'fleet' .* has \['kept fleet', 'tied fle"):
        ShardedReplayBuffer.attach("fleet")
    with pytest.raises(LostBufferError):
        RayReplayBuffer.attach("kept actor", "other")
    with pytest.raises(LostBufferError, match=r"'kept actor' .* is no complete ShardedReplayBuffer: RayReplayBuffer"):
        ShardedReplayBuffer.attach("kept actor")


def _check_kept_fleet(cluster: Any, rb: ShardedReplayBuffer) -> None:
    fleet = rb._fleet
    assert cluster.get(fleet.actor.totals.remote()) == (ROWS, 0)  # the limiter has its counts
    assert set(rb.sample()["x"].tolist()) <= set(range(ROWS))
    rb.pinned(1).extend({"x": torch.arange(ROWS, 2 * ROWS)})
    assert cluster.get(fleet.actor.totals.remote()) == (2 * ROWS, 8)
    assert rb.checkpoint() == [ROWS, ROWS]
    rb.pinned(1).extend({"x": torch.arange(8)})
    cluster.kill(fleet.shards[1], no_restart=False)
    cluster.kill(fleet.actor, no_restart=False)
    with pytest.warns(RuntimeWarning):  # Ray restarts both without the program that started them
        until(lambda: [one.rows for one in rb.report()] == [ROWS, ROWS])
    assert rb.sample(timeout_s=60.0)["x"].shape == (8,)
    _check_command(rb)
    _check_end(cluster, rb)


def _check_command(rb: ShardedReplayBuffer) -> None:
    assert rb.limiter_counts is not None
    done = run_here("top", "kept fleet", "--once", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["rows"]) == (0, 2 * ROWS)
    assert (report["limiter_written"], report["limiter_drawn"]) == rb.limiter_counts
    assert [(one["shard"], one["rows"]) for one in report["shards"]] == [(0, ROWS), (1, ROWS)]
    name, rows, *_ = run_here("top", "kept fleet", "--once").stdout.splitlines()
    assert (name, rows.split()) == ("kept fleet", ["rows", str(2 * ROWS)])
    assert "there is no ShardedReplayBuffer named 'no fleet'" in run_here("top", "no fleet", "--once").stderr


def _check_end(cluster: Any, rb: ShardedReplayBuffer) -> None:
    other, client = ShardedReplayBuffer.attach("kept fleet"), pickle.loads(pickle.dumps(rb.client()))
    with client:
        assert client.start() is client
    client.shutdown()
    assert (client.is_alive, len(client)) == (True, 2 * ROWS)  # a client ends nothing, not even itself
    assert "CREATED" in reserved(cluster)
    rb.close()
    rb.close()
    assert not any("kept fleet" in name for name in actors(cluster))
    until(lambda: "CREATED" not in reserved(cluster))
    for handle, reason in ((rb, "closed"), (other, "closed"), (client, "closed")):
        check_lost(calls_of(handle), reason)
        assert not handle.is_alive
    with pytest.raises(UsageError):
        client.start()
    with pytest.raises(LostBufferError, match="no ShardedReplayBuffer named 'kept fleet'"):
        ShardedReplayBuffer.attach("kept fleet")


def _check_kept_actor(cluster: Any, rb: RayReplayBuffer) -> None:
    other, client = RayReplayBuffer.attach("kept actor"), pickle.loads(pickle.dumps(rb.client()))
    assert set(rb.sample()["x"].tolist()) <= set(range(ROWS))
    client.shutdown()
    assert (client.is_alive, len(client)) == (True, ROWS)
    other.shutdown(timeout=5.0)
    assert not any("kept actor" in name for name in actors(cluster))
    for handle in (rb, other, client):
        check_lost(calls_of(handle), "closed")
        assert not handle.is_alive


# -- constructors that raise ------------------------------------------------------------------------------------------


def no_buffer(storage: Any = None) -> ReplayBuffer:
    msg = "no buffer in this actor"
    raise ValueError(msg)


def test_a_constructor_that_raises_leaves_nothing(processes, monkeypatch):
    cluster = processes
    before = actors(cluster), reserved(cluster)
    make = partial(ShardedReplayBuffer, 2, storage=STORAGE, remote_config={"num_cpus": 0.1})
    with pytest.raises(ValueError, match="no buffer in this actor"):
        make(replay_buffer_cls=no_buffer, placement="PACK", name="never", lifetime="detached")
    with pytest.raises(OptionError, match="min_size_to_sample=5000 rows are never there"):
        make(rate_limiter=RateLimiter(min_size_to_sample=5000))
    with pytest.raises(ValueError, match="no buffer in this actor"):
        RayReplayBuffer(replay_buffer_cls=no_buffer, remote_config=NO_CPU)
    check_left(cluster, *before)
    monkeypatch.setattr("ostinato.distributed.fleet._PLACEMENT_TIMEOUT_S", 1.0)
    monkeypatch.setattr("ostinato.distributed.ray_client.START_TIMEOUT_S", 2.0)
    monkeypatch.setattr("ostinato.distributed.fleet.START_TIMEOUT_S", 2.0)
    with pytest.raises(UsageError, match="shard 0 of 2 did not answer within 2 s; free in the cluster"):
        make(remote_config={"num_cpus": 1000})
    with pytest.raises(OptionError, match=r"no room for 2 shards of {'CPU': 1000}"):
        make(placement="SPREAD", remote_config={"num_cpus": 1000})
    with pytest.raises(UsageError, match="did not answer within 2 s"):
        RayReplayBuffer(storage=STORAGE, remote_config={"num_cpus": 1000})
    check_left(cluster, *before)


def test_checkpoints_of_other_parts_leave_no_actors(processes, tmp_path):
    cluster = processes
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "remote_config": NO_CPU}
    with closing(ShardedReplayBuffer(1, storage=STORAGE, **options)) as rb:
        rb.extend({"x": torch.arange(4)})
        rb.checkpoint()
    _check_left_actors(cluster)
    before, prioritized = (actors(cluster), reserved(cluster)), partial(PrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    with pytest.raises(ValueError, match="PrioritizedSampler"):
        ShardedReplayBuffer(1, replay_buffer_cls=prioritized, storage=STORAGE, resume=True, **options)
    check_left(cluster, *before)


def _check_left_actors(cluster: Any) -> None:
    """What is left of a buffer whose shards were killed, or whose creator was killed while it was made."""
    make = partial(ShardedReplayBuffer, 1, storage=STORAGE, name="half", remote_config=NO_CPU)
    rb = make()
    cluster.kill(rb.actors[0])
    rb._fleet.names.wait_until_free(["shard-0000"])
    check_lost(calls_of(rb), "closed, by close() of one of its handles or by ray.kill()")
    with pytest.raises(LostBufferError, match=r"'half' is gone, .* ostinato:half:fleet is left of it: end it with"):
        ShardedReplayBuffer.attach("half")
    with pytest.raises(OptionError, match=r"'half' is taken .* 1 actor\(s\) are left .* ostinato:half:fleet; end each"):
        make()
    rb.close()
    with closing(make()) as rb:  # the name is free
        cluster.kill(rb._fleet.actor)
        rb._fleet.names.wait_until_free(["fleet"])
        with pytest.raises(LostBufferError, match=r"no complete ShardedReplayBuffer: 1 actor\(s\) are left .*-0000"):
            ShardedReplayBuffer.attach("half")


# -- options ----------------------------------------------------------------------------------------------------------


def test_large_options_of_detached_actors_raise():
    small, large = torch.zeros(1000), torch.zeros(3_000_000)
    assert torch.equal(from_arguments(tuple(to_arguments(small, kept=True))), small)
    pieces = to_arguments(torch.arange(100_000), kept=True)
    assert max(map(len, pieces)) < 100_000 < sum(map(len, pieces))
    assert from_arguments(tuple(pieces)).tolist() == list(range(100_000))
    assert not isinstance(to_arguments(large, kept=False)[0], bytes)
    with pytest.raises(OptionError, match=r"may take 8,000,000 bytes, so that Ray can restart .* take 12,0"):
        to_arguments(large, kept=True)
