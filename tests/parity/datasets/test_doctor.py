"""The doctor is silent about datasets that LeRobot's own writer and converter made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")

from ostinato.tools import examine

from ...datasets.builders import EVERY_KIND, lerobot_v21, pictures

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Official

TOP, SIDE = "observation.images.top", "observation.images.side"


def alarms(root: Path) -> list[str]:
    return [str(finding) for finding in examine(root, full=True).findings if finding.severity != "note"]


@pytest.mark.parametrize("codec", ["libsvtav1", "h264"])
def test_datasets_of_the_official_writer(official: Official, tmp_path: Path, codec: str) -> None:
    generator = np.random.default_rng(3)
    columns = {
        "observation.state": np.cumsum(generator.normal(0, 0.1, (150, 4)), 0).astype("float32"),
        "observation.grid": generator.standard_normal((150, 2, 3)).astype("float32"),
        "action": generator.standard_normal((150, 2)).astype("float32"),
        "observation.contact": generator.random((150, 3)) < 0.5,
        TOP: pictures(150, 64, 64),
    }
    official.create(tmp_path / "data", columns, (60, 40, 50), codec=codec, tasks=["stack", "sort", "stack"])
    assert alarms(tmp_path / "data") == []


def test_datasets_of_the_official_converter(official: Official, tmp_path: Path) -> None:
    cameras, images = {TOP: (32, 32)}, {SIDE: (12, 16)}
    old = lerobot_v21(
        tmp_path / "old", lengths=(25, 13, 36, 14), cameras=cameras, images=images, features=EVERY_KIND, keyframes=2
    )
    official.convert(old.path, tmp_path / "new")
    assert alarms(old.path) == []
    assert alarms(tmp_path / "new") == []
