"""`export`: what is written, read back with the libraries of the formats, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    Trajectory,
    TrajectoryReplayBuffer,
    export,
    open_dataset,
)
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, OstinatoError, SchemaError

from .videos import keyframes_of, pictures

ROOT = Path(__file__).parents[2]
OFFICIAL = ROOT / "build" / "lerobot" / "bin" / "python"
LENGTHS = (7, 4, 9)


def episodes(
    lengths: tuple[int, ...] = LENGTHS, size: tuple[int, int] = (32, 48), seed: int = 0
) -> list[dict[str, Any]]:
    """Episodes with a field of every kind."""
    random = np.random.default_rng(seed)
    frames = torch.from_numpy(pictures(sum(lengths), *size, seed=seed)).permute(0, 3, 1, 2)
    found = []
    for number, (length, images) in enumerate(zip(lengths, torch.split(frames, list(lengths)), strict=True)):
        done = torch.zeros(length, dtype=torch.bool)
        done[-1] = True
        found.append(
            {
                "observation": {
                    "state": torch.from_numpy(random.standard_normal((length, 3)).astype("float32")),
                    "image": images.contiguous(),
                    "grid": torch.from_numpy(random.integers(-5, 5, (length, 2, 3))),
                },
                "action": torch.from_numpy(random.standard_normal((length, 2))),
                "next": {"reward": torch.from_numpy(random.standard_normal(length).astype("float32")), "done": done},
                "task": [f"task {number % 2}"] * length,
            }
        )
    return found


def table_of(folder: Path) -> dict[str, Any]:
    """All rows of the Parquet files of a LeRobot dataset, in order."""
    tables = [pq.read_table(file) for file in sorted(folder.glob("data/*/*.parquet"))]
    return {name: [value for table in tables for value in table[name].to_pylist()] for name in tables[0].column_names}


def frames_of(folder: Path, name: str) -> np.ndarray[Any, Any]:
    """Each row's frame `[rows, 3, H, W]`, found by file and time as the episodes say."""
    info = json.loads((folder / "meta/info.json").read_text())
    out = []
    for row in pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist():
        place = {key: row[f"videos/{name}/{key}"] for key in ("chunk_index", "file_index")}
        with av.open(str(folder / info["video_path"].format(video_key=name, **place))) as container:
            decoded = {
                round(float(frame.time) * info["fps"]): frame.to_ndarray(format="rgb24")
                for frame in container.decode(video=0)
            }
        begin = round(row[f"videos/{name}/from_timestamp"] * info["fps"])
        out += [decoded[begin + step].transpose(2, 0, 1) for step in range(row["length"])]
    return np.stack(out)


def joined(parts: list[dict[str, Any]], *path: str) -> torch.Tensor:
    values = []
    for part in parts:
        value: Any = part
        for key in path:
            value = value[key]
        values.append(value)
    return torch.cat(values)


# -- LeRobot -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"data_file_mb": 0.0005, "video_file_mb": 0.001}])
def test_tables_of_lerobot_are_bit_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    parts = episodes()
    report = export(parts, tmp_path / "out", fps=10, **options)
    assert (report.episodes, report.rows) == (3, 20)
    rows = table_of(tmp_path / "out")
    assert torch.equal(torch.tensor(rows["observation.state"]), joined(parts, "observation", "state"))
    assert torch.equal(torch.tensor(rows["observation.grid"]), joined(parts, "observation", "grid"))
    assert torch.equal(torch.tensor(rows["action"], dtype=torch.float64), joined(parts, "action"))
    assert torch.equal(torch.tensor(rows["next.reward"]), joined(parts, "next", "reward"))
    assert rows["next.done"] == joined(parts, "next", "done").tolist()
    steps = [step for length in LENGTHS for step in range(length)]
    assert rows["frame_index"] == steps
    assert rows["index"] == list(range(20))
    assert rows["episode_index"] == np.repeat([0, 1, 2], LENGTHS).tolist()
    assert rows["task_index"] == np.repeat([0, 1, 0], LENGTHS).tolist()
    assert torch.equal(torch.tensor(rows["timestamp"]), (torch.tensor(steps) / 10).float())
    assert (len(list((tmp_path / "out").rglob("data/*/*.parquet"))) > 1) == bool(options)


def test_episodes_and_tasks_of_lerobot(tmp_path: Path) -> None:
    export(episodes(), tmp_path / "out", fps=10, robot_type="arm")
    info = json.loads((tmp_path / "out/meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 10, "arm")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 20, 2)
    assert info["features"]["observation.image"]["shape"] == [32, 48, 3]
    rows = pq.read_table(tmp_path / "out/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["length"] for row in rows] == list(LENGTHS)
    assert [row["dataset_to_index"] for row in rows] == [7, 11, 20]
    assert [row["tasks"] for row in rows] == [["task 0"], ["task 1"], ["task 0"]]
    tasks = pq.read_table(tmp_path / "out/meta/tasks.parquet").to_pylist()
    assert tasks == [{"task_index": n, "__index_level_0__": f"task {n}"} for n in range(2)]


def test_statistics_of_lerobot(tmp_path: Path) -> None:
    parts = episodes()
    export(parts, tmp_path / "out", fps=10)
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    action = joined(parts, "action").numpy()
    for name, expected in (
        ("min", action.min(0)),
        ("max", action.max(0)),
        ("mean", action.mean(0)),
        ("std", action.std(0)),
    ):
        assert np.allclose(stats["action"][name], expected), name
    assert stats["action"]["count"] == [20]
    image = joined(parts, "observation", "image").numpy() / 255
    for name, expected in (
        ("min", image.min((0, 2, 3))),
        ("max", image.max((0, 2, 3))),
        ("mean", image.mean((0, 2, 3))),
    ):
        assert np.allclose(np.reshape(stats["observation.image"][name], 3), expected), name
    assert np.allclose(np.reshape(stats["observation.image"]["std"], 3), image.std((0, 2, 3)))
    row = pq.read_table(tmp_path / "out/meta/episodes/chunk-000/file-000.parquet").to_pylist()[1]
    assert np.allclose(row["stats/action/q50"], np.quantile(action[7:11], 0.5, 0))


@pytest.mark.parametrize("video_file_mb", [200, 0.001])
def test_lossless_videos_are_bit_exact(tmp_path: Path, video_file_mb: float) -> None:
    parts = episodes()
    export(parts, tmp_path / "out", fps=10, codec="lossless", video_file_mb=video_file_mb)
    assert np.array_equal(
        frames_of(tmp_path / "out", "observation.image"), joined(parts, "observation", "image").numpy()
    )


@pytest.mark.parametrize(("codec", "size"), [("h264", (32, 48)), ("h264", (31, 45)), ("av1", (64, 64))])
def test_other_videos_have_the_right_frame_at_each_row(tmp_path: Path, codec: str, size: tuple[int, int]) -> None:
    parts = episodes(size=size)
    export(parts, tmp_path / "out", fps=10, codec=codec, keyframe_interval=3)
    found = frames_of(tmp_path / "out", "observation.image").astype(int)
    given = joined(parts, "observation", "image").numpy().astype(int)
    distances = np.abs(found[:, None] - given[None]).mean((2, 3, 4))
    assert distances.argmin(1).tolist() == list(range(20))
    assert distances.diagonal().max() < 12
    file = next((tmp_path / "out").rglob("*.mp4"))
    assert set(keyframes_of(file)) >= {0, 7, 11}
    assert np.diff([*keyframes_of(file), 20]).max() <= 3


@pytest.mark.parametrize("channels_last", [False, True])
def test_png_images_are_bit_exact(tmp_path: Path, channels_last: bool) -> None:
    parts = episodes()
    for part in parts if channels_last else ():
        part["observation"]["image"] = part["observation"]["image"].permute(0, 2, 3, 1).contiguous()
    export(parts, tmp_path / "out", fps=10, images="png")
    rows = table_of(tmp_path / "out")["observation.image"]
    found = np.stack([np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in rows])
    given = joined(parts, "observation", "image").numpy()
    assert np.array_equal(found, given if channels_last else given.transpose(0, 2, 3, 1))


def test_tasks_are_chosen(tmp_path: Path) -> None:
    parts = episodes()
    export(parts, tmp_path / "one", fps=10, task="reach", images="png")
    assert set(table_of(tmp_path / "one")["task_index"]) == {0}
    export(parts, tmp_path / "each", fps=10, task=["a", "b", "c"], images="png")
    assert table_of(tmp_path / "each")["task_index"] == np.repeat([0, 1, 2], LENGTHS).tolist()
    for part in parts:
        part["goal"] = [str(n % 2) for n in range(len(part["action"]))]
    export(parts, tmp_path / "rows", fps=10, task_key="goal", images="png")
    assert table_of(tmp_path / "rows")["task_index"] == [n % 2 for length in LENGTHS for n in range(length)]


def test_names_and_choices_of_fields(tmp_path: Path) -> None:
    parts = [{"observation": torch.zeros(3, 2), "act": torch.ones(3, 1), "other": torch.zeros(3)}]
    export(parts, tmp_path / "out", fps=5, fields={"observation": "observation", "action": "act"})
    assert set(table_of(tmp_path / "out")) == {
        *("observation.state", "action"),
        *("timestamp", "frame_index", "episode_index", "index", "task_index"),
    }
    export(episodes(), tmp_path / "some", fps=5, episodes=[2, 0], images="png")
    assert table_of(tmp_path / "some")["frame_index"] == [*range(9), *range(7)]


@pytest.mark.parametrize(
    ("change", "options", "error", "text"),
    [
        ({}, {}, OptionError, "give fps="),
        ({}, {"fps": 0}, OptionError, "fps must be"),
        ({}, {"fps": 10, "codec": "mpeg"}, OptionError, "codec must be one of"),
        ({}, {"fps": 10, "images": "jpg"}, OptionError, "images must be one of"),
        ({}, {"fps": 10, "keyframe_interval": 0}, OptionError, "keyframe_interval"),
        ({}, {"fps": 10, "data_file_mb": -1}, OptionError, "data_file_mb"),
        ({}, {"fps": 10, "task": ["a"]}, OptionError, "list of 3 texts"),
        ({}, {"fps": 10, "task_key": "goal"}, KeyMissingError, "rows have no text 'goal'"),
        ({}, {"fps": 10, "layout": "d4rl"}, OptionError, "layout is no option"),
        ({}, {"fps": 10, "format": "csv"}, OptionError, "format must be one of"),
        ({}, {"fps": 10, "images": "png", "codec": "av1"}, OptionError, "codec is for images='video'"),
        ({"action": None}, {"fps": 10}, SchemaError, "needs the field 'action'"),
        ({"a/b": torch.float32}, {"fps": 10}, SchemaError, "no '/'"),
        ({"action.x": torch.complex64}, {"fps": 10}, SchemaError, "complex64"),
        ({"next.done": torch.bool}, {"fps": 10}, SchemaError, "would both be the feature 'next.done'"),
        ({"timestamp": torch.float32}, {"fps": 10}, SchemaError, "row 19 has the timestamp 0.0"),
    ],
)
def test_what_lerobot_cannot_hold(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    parts = episodes()
    for part in parts:
        for name, dtype in change.items():
            if dtype is None:
                del part[name]
            else:
                part[name] = torch.zeros(len(part["task"]), dtype=dtype)
    with pytest.raises(error, match=text):
        export(parts, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_frames_that_an_encoder_does_not_take_are_refused_before_a_write(tmp_path: Path) -> None:
    parts = [{"observation": torch.zeros(3, 3, 2, 2, dtype=torch.uint8), "action": torch.zeros(3)}]
    with pytest.raises(KindError, match="frames of 2x2"):
        export(parts, tmp_path / "out", fps=10, codec="av1")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not OFFICIAL.exists(), reason="needs the official lerobot in build/lerobot")
@pytest.mark.parametrize("options", [{"codec": "lossless"}, {"images": "png"}])
def test_the_official_reader_finds_what_was_written(tmp_path: Path, options: dict[str, Any]) -> None:
    if (
        "codec" in options
        and subprocess.run([OFFICIAL, "-c", "import torchcodec"], capture_output=True, check=False).returncode
    ):
        pytest.skip("torchcodec finds no libraries of ffmpeg, with which it reads videos")
    parts = episodes()
    export(parts, tmp_path / "out", fps=10, data_file_mb=0.0005, **options)
    torch.save(parts, tmp_path / "parts.pt")
    script = """
import sys, torch
lib = torch.library.Library("torchvision", "DEF")
[lib.define(f"{n}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor") for n in ("nms", "qnms")]
from lerobot.datasets.lerobot_dataset import LeRobotDataset
parts = torch.load(sys.argv[2])
dataset = LeRobotDataset("a/b", root=sys.argv[1])
rows = [(e, t) for e, part in enumerate(parts) for t in range(len(part["task"]))]
assert len(dataset) == len(rows) and dataset.num_episodes == len(parts)
for row, (e, t) in zip(dataset, rows):
    part = parts[e]
    assert torch.equal(row["observation.state"], part["observation"]["state"][t])
    assert torch.equal(row["observation.grid"], part["observation"]["grid"][t])
    assert torch.equal(row["action"].double(), part["action"][t].to(row["action"].dtype).double())
    assert row["next.reward"] == part["next"]["reward"][t] and row["next.done"] == part["next"]["done"][t]
    assert row["task"] == part["task"][t] and row["episode_index"] == e and row["frame_index"] == t
    image = (row["observation.image"] * 255).round().to(torch.uint8)
    assert torch.equal(image, part["observation"]["image"][t])
"""
    subprocess.run([OFFICIAL, "-c", script, tmp_path / "out", tmp_path / "parts.pt"], check=True, capture_output=True)


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_ring_is_written_in_the_order_of_time(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    for first in range(0, 14, 7):
        step = torch.arange(first, first + 7)
        done = (step == 5) | (step == 8)
        rb.extend(TensorDict({"action": step.float()[:, None], "done": done}, [7]))
    report = rb.export(tmp_path / "out", fps=10)
    assert report.episodes == 3
    rows = table_of(tmp_path / "out")
    assert rows["action"] == [float(row) for row in range(4, 14)]
    assert rows["frame_index"] == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4]


def test_trajectories_and_datasets_are_sources(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(seed=0, auto_save=False) as rb:
        values = torch.arange(12.0).reshape(6, 2, 1)
        rb.add_trajectories([Trajectory(actions=values, rewards=values, curr_obs={"state": values})])
        export(rb, tmp_path / "trajectories", fps=10)
    assert table_of(tmp_path / "trajectories")["next.reward"] == [*range(0, 12, 2), *range(1, 12, 2)]
    data: dict[str, Any] = {"action": torch.arange(6.0), "episode_ends": [2, 6]}
    export(open_dataset(data), tmp_path / "dataset", fps=10)
    export(data, tmp_path / "mapping", fps=10)
    assert table_of(tmp_path / "dataset") == table_of(tmp_path / "mapping")
    assert table_of(tmp_path / "mapping")["episode_index"] == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "source", [[], [3], [{"action": torch.zeros(0, 1)}], [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], 4]
)
def test_wrong_sources(tmp_path: Path, source: Any) -> None:
    with pytest.raises(OstinatoError):
        export(source, tmp_path / "out", fps=10)
    assert not list(tmp_path.iterdir())


def test_an_empty_buffer_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(OstinatoError, match="empty"):
        export(ReplayBuffer(storage=LazyTensorStorage(10)), tmp_path / "out", fps=10)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_step")
def test_progress_counts_rows(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    export(episodes(), tmp_path / "out", fps=10, images="png", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 20), (7, 20), (11, 20), (20, 20)]


def test_an_existing_target_is_replaced_on_demand(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        export(episodes(), target, fps=10)
    assert [file.name for file in target.iterdir()] == ["mine"]
    export(episodes(), target, fps=10, overwrite=True)
    assert sorted(file.name for file in target.iterdir()) == ["data", "meta", "videos"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exists", [False, True])
def test_an_error_leaves_what_was_there(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "out"
    if exists:
        export(episodes((3,)), target, fps=10)

    def fail(done: int, total: int) -> None:
        if done >= 11:
            msg = "stop"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="stop"):
        export(episodes(), target, fps=10, overwrite=exists, progress=fail)
    assert [file.name for file in tmp_path.iterdir()] == (["out"] if exists else [])
    if exists:
        assert len(table_of(target)["index"]) == 3


@pytest.mark.parametrize("exists", [False, True])
def test_a_killed_export_leaves_what_was_there(tmp_path: Path, exists: bool) -> None:
    script = """
import sys, time, torch
from ostinato import export
parts = [{"observation": torch.zeros(40, 3, 32, 32, dtype=torch.uint8), "action": torch.zeros(40, 1)}] * 1000
def progress(done, total):
    print(done, flush=True)
    time.sleep(0.01)
export(parts, sys.argv[1], fps=10, progress=progress, overwrite=True)
"""
    target = tmp_path / "out"
    if exists:
        export(episodes((3,)), target, fps=10, images="png")
    with subprocess.Popen([sys.executable, "-c", script, target], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 200:
            time.sleep(0.001)
        process.kill()
    assert target.exists() == exists
    if exists:
        assert len(table_of(target)["index"]) == 3
    assert len(list(tmp_path.iterdir())) == 1 + exists  # the files beside it
    export(episodes(), target, fps=10, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_lerobot_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    parts = episodes()
    export(parts, tmp_path / "out", fps=10, codec="lossless", data_file_mb=0.0005, video_file_mb=0.001)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.episode_lengths.tolist() == list(LENGTHS)
    assert torch.equal(dataset["observation.image"], joined(parts, "observation", "image"))
    assert torch.equal(dataset["observation.state"], joined(parts, "observation", "state"))
    assert torch.equal(dataset["observation.grid"], joined(parts, "observation", "grid"))
    assert torch.equal(dataset["action"], joined(parts, "action"))
    again = export(dataset, tmp_path / "again", codec="lossless", episodes=[2, 1])
    assert again.rows == 13
    found, given = open_dataset(tmp_path / "again"), dataset.select(episodes=[2, 1])
    for key in ("observation.image", "observation.state", "action", "next.reward", "timestamp", "frame_index"):
        assert torch.equal(found[key], given[key]), key
    assert list(found["task"]) == list(given["task"])


# -- Minari and HDF5 ---------------------------------------------------------------------------------------------------


def transitions(lengths: tuple[int, ...] = (5, 3, 7), *, nested: bool = True) -> list[dict[str, Any]]:
    """Episodes with the fields of reinforcement learning; the second one is cut off."""
    random = np.random.default_rng(0)
    found = []
    for number, length in enumerate(lengths):
        state = random.standard_normal((length + 1, 3)).astype("float32")
        image = random.integers(0, 255, (length + 1, 32, 32, 3)).astype("uint8")  # Minari compresses these by default
        stop, cut = np.zeros(length, bool), np.zeros(length, bool)
        stop[-1], cut[-1] = number != 1, number == 1
        found.append(
            {
                "observation": {"state": state[:-1], "image": image[:-1]} if nested else state[:-1],
                "action": random.integers(0, 4, length),
                "next": {
                    "observation": {"state": state[1:], "image": image[1:]} if nested else state[1:],
                    "reward": random.standard_normal(length),
                    "terminated": stop,
                    "truncated": cut,
                    "done": stop | cut,
                },
                "info": {"q": random.standard_normal((length, 2))},
            }
        )
    return found


def leaves_of(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    out: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        out |= leaves_of(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return out


def check_round_trip(path: Path, parts: list[dict[str, Any]]) -> None:
    dataset = open_dataset(path)
    given = [leaves_of(part) for part in parts]
    assert dataset.episode_lengths.tolist() == [len(part["action"]) for part in parts]
    assert set(dataset.schema.paths) == set(given[0])
    for key in given[0]:
        expected = np.concatenate([part[key] for part in given])
        found = dataset[key].numpy()
        assert found.dtype == expected.dtype, key
        assert np.array_equal(found, expected), key


def test_minari_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    import minari

    parts = transitions()
    report = export(parts, tmp_path / "out", format="minari", dataset_id="maze/expert-v2")
    assert (report.format, report.episodes, report.rows) == ("minari", 3, 15)
    check_round_trip(tmp_path / "out", parts)
    official = minari.MinariDataset(tmp_path / "out" / "data")
    assert official.spec.dataset_id == "maze/expert-v2"
    assert official.action_space.n == 4
    for episode, part in zip(official.iterate_episodes(), parts, strict=True):
        assert np.array_equal(episode.observations["state"][1:], part["next"]["observation"]["state"])
        assert np.array_equal(episode.observations["image"][:-1], part["observation"]["image"])
        assert np.array_equal(episode.terminations, part["next"]["terminated"])
        assert np.array_equal(episode.truncations, part["next"]["truncated"])


def test_minari_of_a_buffer_with_an_unfinished_episode(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    for part in transitions(nested=False):
        rb.extend(part)
    cut = {**transitions((4,), nested=False)[0]}
    cut["next"] = {**cut["next"], "terminated": np.zeros(4, bool), "done": np.zeros(4, bool)}
    rb.extend(cut)
    rb.export(tmp_path / "out", "minari")
    dataset = open_dataset(tmp_path / "out")
    assert dataset.episode_lengths.tolist() == [5, 3, 7, 4]
    assert dataset["next", "truncated"].tolist() == [row in (7, 18) for row in range(19)]


def test_minari_holds_each_observation_once(tmp_path: Path) -> None:
    parts = transitions(nested=False)
    parts[1]["next"]["observation"] = parts[1]["next"]["observation"].copy()
    parts[1]["next"]["observation"][1] += 1
    with pytest.raises(SchemaError, match="episode 1, step 1"):
        export(parts, tmp_path / "out", format="minari")
    assert not list(tmp_path.iterdir())


def test_an_unknown_last_observation_is_said(tmp_path: Path) -> None:
    parts = transitions(nested=False)
    for part in parts:
        del part["next"]["observation"]
    with pytest.warns(UserWarning, match="the observation after the last step"):
        export(parts, tmp_path / "out", format="minari")


def test_done_alone_is_said_to_be_terminated(tmp_path: Path) -> None:
    parts = transitions((3, 4), nested=False)
    for part in parts:
        part["next"] = {key: part["next"][key] for key in ("observation", "reward", "done")}
    parts[1]["next"]["done"] = np.zeros(4, bool)
    with pytest.warns(UserWarning, match="gets done as terminated"):
        export(parts, tmp_path / "out", format="minari")
    dataset = open_dataset(tmp_path / "out")
    assert dataset["next", "terminated"].tolist() == [False, False, True, *[False] * 4]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_d4rl_is_read_back_bit_by_bit(tmp_path: Path, compression: str) -> None:
    parts = transitions(nested=False)
    path = tmp_path / "data.hdf5"
    report = export(parts, path, format="hdf5", layout="d4rl", compression=compression)
    assert report.nbytes == path.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["data.hdf5"]
    check_round_trip(path, parts)


def test_robomimic_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    import h5py

    parts = transitions()
    export(parts, tmp_path / "data.hdf5", format="hdf5", env_args={"env_name": "Lift", "type": 1})
    check_round_trip(tmp_path / "data.hdf5", parts)
    with h5py.File(tmp_path / "data.hdf5") as file:
        assert file["data"].attrs["total"] == 15
        assert json.loads(file["data"].attrs["env_args"])["env_name"] == "Lift"
        assert [file[f"data/demo_{n}"].attrs["num_samples"] for n in range(3)] == [5, 3, 7]


@pytest.mark.parametrize(
    ("change", "options", "error", "text"),
    [
        ({"action": None}, {"format": "minari"}, SchemaError, "Minari needs the field 'action'"),
        ({"observation": None}, {"format": "hdf5"}, SchemaError, "robomimic needs the field 'observation'"),
        ({"next": None}, {"format": "minari"}, SchemaError, "needs the field 'next', 'reward'"),
        ({"next": None}, {"format": "hdf5", "layout": "d4rl"}, SchemaError, "needs the field 'next', 'reward'"),
        ({"extra": np.zeros(7)}, {"format": "minari"}, SchemaError, "no 'extra'"),
        ({"task": ["a"] * 7}, {"format": "minari"}, SchemaError, "written without text"),
        ({"x": torch.zeros(7, dtype=torch.bfloat16)}, {"format": "hdf5"}, SchemaError, "bfloat16"),
        ({}, {"format": "minari", "dataset_id": "no version"}, OptionError, "dataset_id must be"),
        ({}, {"format": "hdf5", "layout": "other"}, OptionError, "layout must be one of"),
        ({}, {"format": "hdf5", "compression": "zip"}, OptionError, "compression must be one of"),
        ({}, {"format": "hdf5", "env_args": {"x": object()}}, OptionError, "env_args must be"),
        ({}, {"format": "hdf5", "layout": "d4rl", "env_args": {}}, OptionError, "env_args is for layout='robomimic'"),
        ({}, {"format": "hdf5", "fps": 10}, OptionError, "fps is no option of format='hdf5'"),
    ],
)
def test_what_other_formats_cannot_hold(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    parts = transitions((7,), nested=False)
    for name, value in change.items():
        if value is None:
            del parts[0][name]
        else:
            parts[0][name] = value
    with pytest.raises(error, match=text):
        export(parts, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_flags_within_an_episode_are_refused(tmp_path: Path) -> None:
    parts = transitions((7,), nested=False)
    parts[0]["next"]["truncated"][2] = True
    with pytest.raises(SchemaError, match="row 2 ends its episode"):
        export(parts, tmp_path / "out", format="hdf5")


def test_an_existing_file_is_replaced_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "data.hdf5"
    path.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        export(transitions(), path, format="hdf5")
    assert path.read_bytes() == b"mine"
    export(transitions(), path, format="hdf5", overwrite=True)
    check_round_trip(path, transitions())
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        export(transitions(), tmp_path / "folder", format="hdf5", overwrite=True)


@pytest.mark.parametrize("options", [{"format": "hdf5"}, {"format": "minari", "fields": "numbers"}])
def test_lerobot_datasets_are_written_as_others(tmp_path: Path, options: dict[str, Any]) -> None:
    parts = episodes()
    export(parts, tmp_path / "robot", fps=10, images="png")
    source = open_dataset(tmp_path / "robot")
    if options.get("fields") == "numbers":
        options = {"format": "minari", "fields": [path for path in source.schema.paths if path != ("task",)]}
    with pytest.warns(UserWarning, match=r"is unknown|gets done as terminated"):
        export(source, tmp_path / "out", **options)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.episode_lengths.tolist() == list(LENGTHS)
    assert torch.equal(dataset["observation", "state"], joined(parts, "observation", "state"))
    assert torch.equal(dataset["observation", "image"], joined(parts, "observation", "image"))
    assert torch.equal(dataset["action"], joined(parts, "action"))
    assert torch.equal(dataset["next", "reward"], joined(parts, "next", "reward"))


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="needs Linux")
def test_an_export_leaves_the_scheduling_of_threads_as_it_was(tmp_path: Path) -> None:
    """SVT-AV1 makes the thread that opens it a real-time one, where it may: all others would wait for it."""
    before = os.sched_getscheduler(0)
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    episode = {"observation.images.top": frames, "action": np.zeros((4, 2), np.float32)}
    export([episode], tmp_path / "x", format="lerobot", fps=10, codec="av1")
    assert os.sched_getscheduler(0) == before
