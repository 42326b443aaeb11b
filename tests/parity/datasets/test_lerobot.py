"""LeRobot's own writer, reader and converter beside ours: the same frames, numbers, windows, masks, tasks.

All are compared bit by bit. LeRobot returns pictures as float32 between 0 and 1 where we return uint8, float64 as
float32, and leaves out the dimension of a window of one frame: the comparison does the same to ours.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("av")
pytest.importorskip("pyarrow")

from ostinato.tools import examine

from ...datasets.builders import EVERY_KIND, Model, lerobot_v3, lerobot_v21, pictures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


TOP, WRIST, SIDE = "observation.images.top", "observation.images.wrist", "observation.images.side"
TWO = {TOP: (32, 32), WRIST: (48, 64)}
# What distinguishes the files: one case for each way in which a reader may take a wrong frame or a wrong row.
CASES: dict[str, dict[str, Any]] = {
    "every-kind-of-feature": {"features": EVERY_KIND, "images": {SIDE: (20, 21)}},
    "h264-b-frames": {"cameras": TWO, "keyframes": 10, "b_frames": 2, "episodes_per_video": 3},
    "hevc": {"cameras": {TOP: (64, 80)}, "codec": "libx265", "keyframes": 10, "b_frames": 2},
    "av1": {"cameras": TWO, "codec": "libsvtav1", "keyframes": 2, "lengths": (7, 1, 9)},
    "one-keyframe": {"cameras": {TOP: (32, 32)}, "keyframes": 250, "episodes_per_video": 3, "fps": 30},
    "odd-sides": {"cameras": {TOP: (33, 47)}, "keyframes": 1},
    "many-files": {
        "cameras": TWO,
        "lengths": (3, 4, 2, 5, 6),
        "episodes_per_file": 2,
        "episodes_per_video": {TOP: 3, WRIST: 1},
        "files_per_chunk": 2,
        "skipped_frames": {TOP: 3},
        "fixed_lists": False,
    },
}


def same(official: Mapping[str, np.ndarray[Any, Any]], ours: Mapping[Any, Any]) -> None:
    """Compare what LeRobot returned with arrays, tensors or texts of ours."""
    for name, values in official.items():
        found = ours[name]
        if values.dtype.kind == "U":
            assert list(found) == values.tolist(), name
            continue
        tensor = torch.as_tensor(found)
        if tensor.dtype == torch.uint8:
            tensor = tensor.to(torch.float32) / 255
        expected = torch.from_numpy(values)
        tensor = tensor.to(expected.dtype).reshape(expected.shape)
        assert torch.equal(tensor, expected), f"{name}: {(tensor != expected).sum()} of {expected.numel()} differ"


def ours(root: Path, delta_timestamps: Mapping[str, Sequence[float]] | None = None) -> Mapping[Any, Any]:
    """Every item of a dataset in order, as a buffer returns them."""
    from ostinato import DeltaTimestamps, ReplayBuffer, SamplerWithoutReplacement, open_dataset

    dataset = open_dataset(root)
    unit = None if delta_timestamps is None else DeltaTimestamps(delta_timestamps, fps=dataset.fps)
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = ReplayBuffer(storage=dataset, sampler=sampler, sample_unit=unit, batch_size=len(dataset))
    batch: Mapping[Any, Any] = buffer.sample()
    return batch


def alarms(root: Path) -> list[str]:
    """What the doctor finds wrong with a dataset: nothing, where LeRobot's own writer or converter made it."""
    return [str(finding) for finding in examine(root, full=True).findings if finding.severity != "note"]


def windows(model: Model) -> dict[str, list[float]]:
    """Offsets that reach beyond both ends of every episode; those of cameras differ, and do not begin with the row."""
    step = 1 / model.fps if model.fps else 1.0
    offsets = {"action": [n * step for n in range(5)], "observation.state": [-2 * step, 0.0]}
    if TOP in model.columns:
        offsets[TOP] = [-3 * step, -step, 0.0]
    if WRIST in model.columns:
        offsets[WRIST] = [2 * step, 0.0, -step]
    return offsets


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Every dataset of `CASES`, written once."""
    folder = tmp_path_factory.mktemp("datasets")
    return {name: lerobot_v3(folder / name, **options) for name, options in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_rows_and_windows(case, written, official):
    model = written[case]
    found = official.read(model.path)
    same(found, {**model.columns, "task": model.tasks})
    same(found, ours(model.path))
    offsets = windows(model)
    found = official.read(model.path, delta_timestamps=offsets)
    assert found["action_is_pad"].any()
    same(found, ours(model.path, offsets))


def test_chosen_episodes(written, official):
    from ostinato import open_dataset

    model = written["many-files"]
    found = official.read(model.path, episodes=[1, 3])
    assert len(found["index"]) == 4 + 5
    same(found, open_dataset(model.path, episodes=[1, 3])[:])


def test_version_21(tmp_path, official):
    """LeRobot reads version 2.1 by converting it: its files as converted, and ours as they are."""
    from ostinato import open_dataset

    old = lerobot_v21(
        tmp_path / "old",
        lengths=(5, 3, 6, 4),
        cameras=TWO,
        images={SIDE: (12, 16)},
        features=EVERY_KIND,
        keyframes=2,
        episodes_per_chunk=3,
    )
    official.convert(old.path, tmp_path / "new")
    assert alarms(old.path) == alarms(tmp_path / "new") == []
    found = official.read(tmp_path / "new")
    same(found, {**old.columns, "task": old.tasks})
    same(found, open_dataset(old.path)[:])
    offsets = windows(old)
    windowed = official.read(tmp_path / "new", delta_timestamps=offsets)
    same(windowed, ours(old.path, offsets))
    same(windowed, ours(tmp_path / "new", offsets))


@pytest.mark.parametrize("codec", ["libsvtav1", "h264"])
def test_official_writer(codec, tmp_path, official):
    lengths = (6, 9, 4)
    generator = np.random.default_rng(3)
    columns = {
        "observation.state": generator.standard_normal((19, 4)).astype("float32"),
        "action": generator.standard_normal((19, 2)).astype("float32"),
        "observation.contact": generator.random((19, 3)) < 0.5,
        TOP: pictures(19, 64, 64),
        WRIST: pictures(19, 48, 96, seed=1),
    }
    root = tmp_path / "official"
    official.create(root, columns, lengths, codec=codec, tasks=["stack", "sort", "stack"])
    assert alarms(root) == []
    found = official.read(root)
    for name in ("observation.state", "action", "observation.contact"):
        np.testing.assert_array_equal(found[name], columns[name])
    assert found["task"].tolist() == ["stack"] * 6 + ["sort"] * 9 + ["stack"] * 4
    same(found, ours(root))
    model = dataclasses.replace(Model(root, list(lengths), dict(columns.items()), fps=10))
    same(official.read(root, delta_timestamps=windows(model)), ours(root, windows(model)))
