"""Rerun recordings, read back with Rerun's reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ostinato.viz import TrajectoryFolder
from tests.unit.viz.rollouts import CAMERAS, store

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("rerun", reason="the extra rerun is not installed")


def read(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Columns of a recording by entity."""
    chunk = pytest.importorskip("rerun.chunk", reason="this release of Rerun has no reader")
    found: dict[str, dict[str, list[Any]]] = {}
    for part in chunk.RrdReader(str(path)).store().stream():
        batch = part.to_record_batch()
        for name in batch.schema.names:
            if name == "step" or ":" in name:
                columns = found.setdefault(part.entity_path, {})
                columns.setdefault(name, []).extend(batch.column(name).to_pylist())
    return found


def test_every_step_of_every_environment_is_there(tmp_path):
    from ostinato.viz.rerun_export import export

    path = export(TrajectoryFolder(store(tmp_path / "a")), 2, tmp_path / "out.rrd")
    found = read(path)
    for env in range(2):
        rewards = found[f"/batch_{env}/reward"]
        by_step = dict(zip(rewards["step"], rewards["Scalars:scalars"], strict=True))
        assert [by_step[step][0] for step in range(4)] == pytest.approx([2.0, 2.01, 2.02, 2.03])
        assert found[f"/batch_{env}/done"]["Scalars:scalars"] == [[0], [0], [0], [1]]
        assert found[f"/batch_{env}/next/states"]["Scalars:scalars"][1] == [1.5, 2.5, 2.5]
        for following, side in enumerate(("current", "next")):
            for camera, name in enumerate(CAMERAS[:2]):
                images = found[f"/batch_{env}/{side}/{name}"]
                stamps = {
                    step: tuple(pixels[0][:3])
                    for step, pixels in zip(images["step"], images["Image:buffer"], strict=True)
                }
                assert stamps == {step: (2, step, env * 50 + camera * 10 + 5 * following) for step in range(4)}
