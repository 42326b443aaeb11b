"""A handle has the names of a local buffer: conditional updates, deletion, other names of saving, the service."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RayReplayBuffer,
    ShardedReplayBuffer,
    TensorDictReplayBuffer,
    traj,
)
from ostinato.distributed import ray_buffer, sharded
from ostinato.errors import KeyMissingError, KindError, OptionError, UsageError

from ..unit.buffers.refusals import raises

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")


def _rows(first: int, count: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + count)
    return {"x": numbers.float(), "episode": numbers // 4, "done": numbers % 4 == 3}


def test_names_of_torchrls_service(cluster):
    rb = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 16),
        batch_size=4,
        version_key="episode",
        transport="auto",
        delayed_init=True,
        service_backend="ray",
        remote_config={"num_cpus": 0},
    )
    assert (rb.start() is rb, rb.client() is rb, rb.service_backend) == (True, False, "ray")
    assert (rb.initialized, rb.is_alive, rb.shared) == (True, True, True)
    assert (rb.transport_kind, rb.share() is rb) == ("ray", True)
    with pytest.raises(UsageError):
        rb.share(False)
    rb.dim_extend = 0
    with pytest.raises(UsageError, match="dim_extend cannot be reset"):
        rb.dim_extend = 1
    readers = rb.clients(2)
    assert len({id(one) for one in (rb, *readers, rb.client())}) == 4
    readers[0].extend(_rows(0, 8))
    assert (len(readers[1]), len(readers[1].next()["x"])) == (8, 4)
    assert set(rb.sample(16, max_age=0, timeout_s=1.0)["episode"].tolist()) == {1}
    rb.set_at_("episode", torch.tensor([9]), [2])
    assert set(rb.sample(max_age=3)["x"].tolist()) == {2}, "edits through the handle are noticed"
    raises(
        (lambda: rb.sample(max_age=-1), OptionError, "max_age must be an integer"),
        (lambda: rb.clients(0), OptionError, "num_clients must be"),
        (RayReplayBuffer.as_remote, UsageError, "makes its actor itself"),
    )
    rb.submit_update_if_present(index=[0], generation=[0], patch={"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="x"):
        rb.shutdown()
    assert not rb.is_alive
    raises(
        (rb.start, UsageError, "A closed RayReplayBuffer cannot be restarted"),
        (rb.client, UsageError, "RayReplayBuffer is closed"),
    )


def test_queries_and_submitted_updates(remote):
    rb = remote()
    rb.extend(TensorDict(_rows(0, 12), [12]))
    found = rb.query(traj["x"].sum() > 10)
    assert [one.get("x").tolist() for one in found] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(rb.query(lambda one: bool(one.get("x")[0] == 4), trajectory_key="episode")) == 1
    _, info = rb.sample(return_info=True)
    names = {"index": info["index"], "generation": info["index_generation"]}
    futures = [rb.submit_update_if_present(**names, patch={"x": torch.full((8,), float(i))}) for i in range(5)]
    rb.synchronize()
    assert all(future.result().stale_count == 0 for future in futures)
    assert set(rb["x"][info["index"]].tolist()) == {4.0}
    rb.submit_update_if_present(**names, patch={"y": torch.zeros(8)})
    with pytest.raises(KeyMissingError, match="'y'"):
        rb.synchronize()
    rb.synchronize()  # an error is raised once


REFUSED: list[dict[str, Any]] = [
    {"batchsize": 4},
    {"priority_key": "p"},
    *({"transport": bad} for bad in ("distributed", "direct")),
    {"transport_options": {"port": 1}},
    {"service_backend": "direct"},
    {"service_backend_options": {"remote_config": {}}},
    *({"call_timeout_s": bad} for bad in (0, math.nan, True, "60")),
    {"lifetime": "detached"},
    {"namespace": "mine"},
    {"name": "a", "lifetime": "forever"},
    *({"name": bad} for bad in ("a:b", "", 3)),
    {"name": "a", "namespace": "x:y"},
    {"name": "a", "remote_config": {"name": "b"}},
]
"""What no handle takes: the error names the last option."""
NOWHERE = {"checkpoint_dir": "nowhere", "checkpoint_every_s": 1.0}
OF_SHARDS: list[dict[str, Any]] = [
    {"num_shards": 0},
    {"route": "nearest"},
    {"resume": True},
    {"placement": "NEAR"},
    *({"shard_timeout_s": bad} for bad in (-1.0, math.nan)),
    {"snapshot_age_s": -1.0},
    *({**NOWHERE, "checkpoint_every_s": bad} for bad in (0.0, math.inf)),
    {**NOWHERE, "max_save_failures": 0},
    {"max_save_failures": 3},
    {"rate_limiter": 3},
]


def started(config: Any) -> None:
    raise LookupError(config)


def test_wrong_options_raise_before_ray_is_started(monkeypatch):
    for home in (ray_buffer, sharded):
        monkeypatch.setattr(home, "init_ray", started)
    for options in REFUSED:
        for make in (RayReplayBuffer, partial(ShardedReplayBuffer, 2)):
            with pytest.raises((TypeError, ValueError), match=list(options)[-1]):
                make(storage=partial(LazyTensorStorage, 8), **options)
    for make in (RayReplayBuffer, partial(ShardedReplayBuffer, 2)):
        with pytest.raises(OptionError, match="lifetime"):
            make(storage=partial(LazyTensorStorage, 8), remote_config={"lifetime": "detached"})
    for given in OF_SHARDS:
        with pytest.raises((OptionError, KindError), match=list(given)[-1]):
            ShardedReplayBuffer(**{"num_shards": 2, "storage": partial(LazyTensorStorage, 8), **given})


def test_options_of_the_class_are_known(monkeypatch):
    class Mine(TensorDictReplayBuffer):
        def __init__(self, mine: int, **options: Any) -> None:
            options.pop("other", None)
            super().__init__(**options)

    monkeypatch.setattr(ray_buffer, "init_ray", started)
    given: list[Any] = [
        (TensorDictReplayBuffer, {"priority_key": "p"}),
        (partial(TensorDictReplayBuffer, priority_key="p"), {"rate_limiter": None}),
        (PrioritizedReplayBuffer, {"alpha": 0.7, "beta": 0.5, "eps": 1e-6}),
        (Mine, {"mine": 3, "other": 4, "batch_size": 4}),
    ]
    for made, options in given:
        with pytest.raises(LookupError):  # the names are right, and Ray would be started
            RayReplayBuffer(replay_buffer_cls=made, **options)
    with pytest.raises(TypeError, match="'alpha', which TensorDictReplayBuffer does not have"):
        RayReplayBuffer(replay_buffer_cls=given[1][0], alpha=0.5)


def test_a_sharded_buffer_has_the_same_names(remade, tmp_path):
    rb = remade(sticky=False)
    assert (rb.start() is rb, rb.client() is rb, rb.is_alive) == (True, False, True)
    assert (rb.service_backend, rb.transport_kind) == ("ray", "ray")
    (reader,) = rb.clients(1)
    for first in (0, 4):
        rb.extend(TensorDict(_rows(first, 4), [4]))
    assert set(reader.next()["x"].tolist()) <= set(range(8))
    assert [one.get("x").tolist() for one in rb.query(traj["x"].sum() > 6)] == [[4, 5, 6, 7]]
    rb.save(tmp_path / "saved")
    rb.empty()
    rb.load(tmp_path / "saved")
    assert len(reader) == 8
