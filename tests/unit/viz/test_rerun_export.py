"""Rerun recordings, read back with Rerun's reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato.errors import DamagedFileError, OptionError
from ostinato.viz import TrajectoryFolder
from tests.unit.viz.rollouts import CAMERAS, file_of, store

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


def test_every_step_of_every_environment_is_there(tmp_path: Path) -> None:
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


def test_one_camera_and_errors_that_leave_what_was_there(tmp_path: Path) -> None:
    from ostinato.viz.rerun_export import export

    path = store(tmp_path / "a")
    source = TrajectoryFolder(path)
    target = export(source, 1, tmp_path / "out.rrd", camera="wrist_images")
    found = read(target)
    assert "/current/wrist_images" in found
    assert "/current/main_images" not in found
    for size, shown in ((64, True), (65, False)):
        states = {"states": torch.zeros(2, 1, size)}
        wide = TrajectoryFolder(store(tmp_path / str(size), [(2, 1)], curr_obs=states, next_obs=None))
        assert ("/current/states" in read(export(wide, 0, target))) == shown, size
    before = target.read_bytes()
    for name in ("out.png", "gone/out.rrd"):
        with pytest.raises(OptionError, match=r"must end in \.rrd"):
            export(source, 0, tmp_path / name)
    source.open(2)
    for number in (0, 2):  # the header of the second is in the cache, its pictures are not
        file_of(path, number).unlink()
        with pytest.raises(DamagedFileError, match="missing"):
            export(source, number, target)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.rrd"]
