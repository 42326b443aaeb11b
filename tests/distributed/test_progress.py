"""Progress of remote buffers: shards are counted in the process that calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, RayReplayBuffer, ShardedReplayBuffer

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.slow


def storage() -> LazyTensorStorage:
    return LazyTensorStorage(100)


def rows() -> dict[str, torch.Tensor]:
    return {"value": torch.arange(20.0)}


def check(calls: list[tuple[int, int]], total: int) -> None:
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(set(calls))


@pytest.mark.usefixtures("cluster")
def test_a_sharded_buffer(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def told(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        calls.append((done, total))

    with ShardedReplayBuffer(2, storage=storage, batch_size=4, checkpoint_dir=tmp_path / "own") as rb:
        rb.extend(rows())
        calls_of: dict[str, Any] = {
            "checkpoint": lambda: rb.checkpoint(progress=told),
            "dumps": lambda: rb.dumps(tmp_path / "a", progress=told),
            "loads": lambda: rb.loads(tmp_path / "a", progress=told),
        }
        for name, call in calls_of.items():
            calls.clear()
            call()
            check(calls, 4 if name == "loads" else 2)


@pytest.mark.usefixtures("cluster")
def test_a_ray_buffer(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with RayReplayBuffer(storage=storage, batch_size=4) as rb:
        rb.extend(rows())
        rb.dumps(tmp_path / "a", progress=lambda done, total: calls.append((done, total)))
        check(calls, 1)
        calls.clear()
        rb.loads(tmp_path / "a", progress=lambda done, total: calls.append((done, total)))
        check(calls, 1)

        def fail(*_: int) -> None:
            raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            rb.dumps(tmp_path / "b", progress=fail)
        assert not (tmp_path / "b").exists()
