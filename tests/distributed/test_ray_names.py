"""A handle has the names of a local buffer: conditional updates, other names of saving, state of the service."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RayReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    TensorDictReplayBuffer,
    traj,
)
from ostinato.distributed import ray_buffer, sharded
from ostinato.errors import EmptyBufferError, KeyMissingError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")


def test_names_of_a_local_buffer_reach_the_actor(cluster: Any, tmp_path: Path) -> None:
    rb = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 8),
        writer=partial(RoundRobinWriter, track_generations=True),
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    assert (rb.start() is rb, rb.client() is rb, rb.service_backend) == (True, False, "ray")
    assert (rb.initialized, rb.is_alive, rb.can_sample()) == (True, True, False)
    rb.extend({"x": torch.zeros(8)})
    assert rb.can_sample()
    assert rb.stats()["size"] == rb.stats().rows == 8
    _, info = rb.sample(return_info=True)
    rb.extend({"x": torch.full((2,), 5.0)})
    result = rb.update_if_present(index=info["index"], generation=info["index_generation"], patch={"x": torch.ones(4)})
    assert result.stale_count == int((info["index"] < 2).sum())
    assert rb["x"][:2].tolist() == [5.0, 5.0]
    assert rb["x"].sum() == 10 + len(set(info["index"].tolist()) - {0, 1})
    rb.mark_update(0)
    rb.save(tmp_path / "saved")
    rb.empty(empty_write_count=False)
    assert (len(rb), rb.write_count) == (0, 10)
    rb.load(tmp_path / "saved")
    assert len(rb) == 8
    assert rb.shared
    rb.dim_extend = 0
    with pytest.raises(UsageError, match="dim_extend cannot be reset"):
        rb.dim_extend = 1
    rb.shutdown()
    assert not rb.is_alive
    with pytest.raises(UsageError, match="A closed RayReplayBuffer cannot be restarted"):
        rb.start()
    with pytest.raises(UsageError, match="RayReplayBuffer is closed"):
        rb.client()


def _rows(first: int, count: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + count)
    return {"x": numbers.float(), "episode": numbers // 4, "done": numbers % 4 == 3}


def _make(**options: Any) -> RayReplayBuffer:
    return RayReplayBuffer(
        storage=partial(LazyTensorStorage, 16),
        writer=partial(RoundRobinWriter, track_generations=True),
        remote_config={"num_cpus": 0},
        **options,
    )


def test_names_of_torchrls_service(cluster: Any) -> None:
    with _make(batch_size=4, transport="auto", delayed_init=True, service_backend="ray") as rb:
        assert (rb.transport_kind, rb.share() is rb, rb.initialized) == ("ray", True, True)
        with pytest.raises(UsageError, match="handles use the rows of one actor"):
            rb.share(False)
        readers = rb.clients(2)
        assert len({id(one) for one in (rb, *readers)}) == 3
        readers[0].extend(_rows(0, 8))
        assert (len(readers[1]), len(readers[1].next()["x"])) == (8, 4)
        for number, error in ((True, TypeError), ("2", TypeError), (0, ValueError)):
            with pytest.raises(error, match="num_clients must be"):
                rb.clients(number)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="makes its actor itself"):
        RayReplayBuffer.as_remote()


def test_next_ends_with_the_epoch_and_begins_another(cluster: Any) -> None:
    with _make(batch_size=4, sampler=SamplerWithoutReplacement) as rb:
        rb.extend(_rows(0, 8))
        for _ in range(2):
            passed = [rb.next(), rb.next(), rb.next()]
            assert passed[2] is None
            assert sorted(torch.cat([batch["x"] for batch in passed[:2]]).tolist()) == list(range(8))
        rb.next()
        rb.empty()
        with pytest.raises(EmptyBufferError):
            [rb.next() for _ in range(3)]
        rb.extend(_rows(8, 4))
        assert sorted(rb.next()["x"].tolist()) == [8, 9, 10, 11]


def test_set_rng_decides_what_follows(cluster: Any) -> None:
    with _make(batch_size=4, prefetch=2) as rb:
        rb.extend(_rows(0, 16))
        drawn = []
        for _ in range(2):
            rb.sample()
            rb.set_rng(torch.Generator().manual_seed(3))
            drawn.append([rb.sample()["x"].tolist() for _ in range(3)])
        assert drawn[0] == drawn[1]
        with pytest.raises(TypeError, match="generator"):
            rb.set_rng(3)  # type: ignore[arg-type]


def test_query_runs_in_the_actor(cluster: Any) -> None:
    with _make(batch_size=4) as rb:
        rb.extend(TensorDict(_rows(0, 12), [12]))
        found = rb.query(traj["x"].sum() > 10)
        assert [one.get("x").tolist() for one in found] == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert len(rb.query(lambda one: bool(one.get("x")[0] == 4), trajectory_key="episode")) == 1


def test_submitted_updates_arrive_in_order(cluster: Any) -> None:
    rb = _make(batch_size=16)
    rb.extend(_rows(0, 16))
    _, info = rb.sample(return_info=True)
    names = {"index": info["index"], "generation": info["index_generation"]}
    futures = [rb.submit_update_if_present(**names, patch={"x": torch.full((16,), float(i))}) for i in range(5)]
    rb.synchronize()
    assert all(future.result().stale_count == 0 for future in futures)
    assert set(rb["x"][info["index"]].tolist()) == {4.0}
    failed = rb.submit_update_if_present(**names, patch={"y": torch.zeros(16)})
    with pytest.raises(KeyMissingError, match="'y'"):
        rb.synchronize()
    assert isinstance(failed.exception(), KeyMissingError)
    rb.synchronize()  # an error is raised once
    rb.submit_update_if_present(**names, patch={"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="x"):
        rb.shutdown()
    assert not rb.is_alive


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batchsize": 4}, TypeError, "unexpected option 'batchsize'.*did you mean 'batch_size'"),
    ({"priority_key": "p"}, TypeError, "unexpected option 'priority_key'"),
    ({"transport": "distributed"}, ValueError, "'distributed'.*not available"),
    ({"transport": "direct"}, ValueError, "transport must be 'auto', 'ray', or 'distributed'"),
    ({"transport_options": {"port": 1}}, ValueError, "transport_options are not used by the Ray replay transport"),
    ({"service_backend": "direct"}, ValueError, "service_backend must be 'ray'"),
    ({"service_backend_options": {"remote_config": {}}}, ValueError, "pass ray_init_config and remote_config"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=[next(iter(one[0])) for one in REFUSED])
def test_wrong_options_raise_before_ray_is_started(
    options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(config: Any) -> None:
        raise AssertionError(config)

    for home in (ray_buffer, sharded):
        monkeypatch.setattr(home, "init_ray", started)
    with pytest.raises(error, match=message):
        RayReplayBuffer(storage=partial(LazyTensorStorage, 8), **options)
    with pytest.raises(error, match=message):
        ShardedReplayBuffer(2, storage=partial(LazyTensorStorage, 8), **options)


def test_options_of_the_class_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(TensorDictReplayBuffer):
        def __init__(self, mine: int, **options: Any) -> None:
            options.pop("other", None)
            super().__init__(**options)

    def started(config: Any) -> None:
        raise LookupError(config)

    monkeypatch.setattr(ray_buffer, "init_ray", started)
    given: list[tuple[Any, dict[str, Any]]] = [
        (TensorDictReplayBuffer, {"priority_key": "p"}),
        (partial(TensorDictReplayBuffer, priority_key="p"), {"rate_limiter": None}),
        (PrioritizedReplayBuffer, {"alpha": 0.7, "beta": 0.5, "eps": 1e-6}),
        (Mine, {"mine": 3, "other": 4, "batch_size": 4}),
    ]
    for made, options in given:
        with pytest.raises(LookupError):  # the names are right, and Ray would be started
            RayReplayBuffer(replay_buffer_cls=made, **options)
    for made in (TensorDictReplayBuffer, partial(TensorDictReplayBuffer, priority_key="p")):
        with pytest.raises(TypeError, match="'alpha', which TensorDictReplayBuffer does not have"):
            RayReplayBuffer(replay_buffer_cls=made, alpha=0.5)


def test_a_sharded_buffer_has_the_same_names(cluster: Any, tmp_path: Path) -> None:
    rb = ShardedReplayBuffer(
        2, storage=partial(LazyTensorStorage, 8), batch_size=4, route="round_robin", remote_config={"num_cpus": 0}
    )
    assert (rb.start() is rb, rb.client() is rb, rb.is_alive) == (True, False, True)
    assert (rb.service_backend, rb.transport_kind) == ("ray", "ray")
    reader = rb.clients(1)[0]
    rb.extend(TensorDict(_rows(0, 4), [4]))
    rb.extend(TensorDict(_rows(4, 4), [4]))
    assert set(reader.next()["x"].tolist()) <= set(range(8))
    found = rb.query(traj["x"].sum() > 6)
    assert [one.get("x").tolist() for one in found] == [[4, 5, 6, 7]]
    rb.save(tmp_path / "saved")
    rb.empty()
    rb.load(tmp_path / "saved")
    assert len(reader) == 8
    rb.shutdown()
    assert not rb.is_alive
