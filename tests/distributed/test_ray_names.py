"""A handle has the names of a local buffer: conditional updates, other names of saving, state of the service."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, RayReplayBuffer, RoundRobinWriter

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
    assert (rb.start() is rb, rb.client() is rb, rb.service_backend) == (True, True, "ray")
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
    rb.shutdown()
    assert not rb.is_alive
