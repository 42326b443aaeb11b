"""`export`: what is written, read back with the libraries of the formats, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
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

from .samples import flat
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
    return torch.cat([flat(part)[path] for part in parts])


# -- LeRobot -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The episodes as a LeRobot dataset of several files; not to be changed."""
    target = tmp_path_factory.mktemp("exported") / "out"
    options: dict[str, Any] = {"codec": "lossless", "data_file_mb": 0.0005, "video_file_mb": 0.001}
    report = export(episodes(), target, fps=10, robot_type="arm", **options)
    assert (report.episodes, report.rows) == (3, 20)
    return target


def test_tables_and_lossless_videos_of_lerobot_are_bit_exact(exported: Path) -> None:
    parts = episodes()
    rows = table_of(exported)
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
    assert len(list(exported.rglob("data/*/*.parquet"))) > 1
    assert np.array_equal(frames_of(exported, "observation.image"), joined(parts, "observation", "image").numpy())


def test_episodes_tasks_and_statistics_of_lerobot(exported: Path) -> None:
    info = json.loads((exported / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 10, "arm")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 20, 2)
    assert info["features"]["observation.image"]["shape"] == [32, 48, 3]
    rows = pq.read_table(exported / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["length"] for row in rows] == list(LENGTHS)
    assert [row["dataset_to_index"] for row in rows] == [7, 11, 20]
    assert [row["tasks"] for row in rows] == [["task 0"], ["task 1"], ["task 0"]]
    tasks = pq.read_table(exported / "meta/tasks.parquet").to_pylist()
    assert tasks == [{"task_index": n, "__index_level_0__": f"task {n}"} for n in range(2)]
    stats = json.loads((exported / "meta/stats.json").read_text())
    action = joined(episodes(), "action").numpy()
    image = joined(episodes(), "observation", "image").numpy() / 255
    for name in ("min", "max", "mean", "std"):
        assert np.allclose(stats["action"][name], getattr(action, name)(0)), name
        assert np.allclose(np.reshape(stats["observation.image"][name], 3), getattr(image, name)((0, 2, 3))), name
    assert stats["action"]["count"] == [20]
    assert np.allclose(rows[1]["stats/action/q50"], np.quantile(action[7:11], 0.5, 0))


@pytest.mark.parametrize(("codec", "size"), [("h264", (31, 45)), ("av1", (64, 64))])
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
    assert len(list((tmp_path / "out").rglob("data/*/*.parquet"))) == 1
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


def refused(target: Path, parts: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    """An export raises, and writes nothing."""
    with pytest.raises(error, match=text):
        export(parts, target, **options)
    assert not list(target.parent.iterdir()), text


def changed(parts: list[dict[str, Any]], change: dict[str, Any]) -> list[dict[str, Any]]:
    """Return episodes with other fields: None leaves one out, and a dtype stands for zeros."""
    for part in parts:
        for name, value in change.items():
            if value is None:
                del part[name]
            else:
                part[name] = torch.zeros(len(part["action"]), dtype=value) if isinstance(value, torch.dtype) else value
    return parts


def test_what_lerobot_cannot_hold(tmp_path: Path) -> None:
    table: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({}, {"fps": None}, OptionError, "give fps="),
        ({}, {"fps": 0}, OptionError, "fps must be"),
        ({}, {"codec": "mpeg"}, OptionError, "codec must be one of"),
        ({}, {"images": "jpg"}, OptionError, "images must be one of"),
        ({}, {"keyframe_interval": 0}, OptionError, "keyframe_interval"),
        ({}, {"data_file_mb": -1}, OptionError, "data_file_mb"),
        ({}, {"task": ["a"]}, OptionError, "list of 3 texts"),
        ({}, {"task_key": "goal"}, KeyMissingError, "rows have no text 'goal'"),
        ({}, {"layout": "d4rl"}, OptionError, "layout is no option"),
        ({}, {"format": "csv"}, OptionError, "format must be one of"),
        ({}, {"images": "png", "codec": "av1"}, OptionError, "codec is for images='video'"),
        ({"action": None}, {}, SchemaError, "needs the field 'action'"),
        ({"a/b": torch.float32}, {}, SchemaError, "no '/'"),
        ({"action.x": torch.complex64}, {}, SchemaError, "complex64"),
        ({"next.done": torch.bool}, {}, SchemaError, "would both be the feature 'next.done'"),
        ({"timestamp": torch.float32}, {}, SchemaError, "row 19 has the timestamp 0.0"),
    ]
    for change, options, error, text in table:
        refused(tmp_path / "out", changed(episodes(), change), {"fps": 10, **options}, error, text)
    small = [{"observation": torch.zeros(3, 3, 2, 2, dtype=torch.uint8), "action": torch.zeros(3)}]
    refused(tmp_path / "out", small, {"fps": 10, "codec": "av1"}, KindError, "frames of 2x2")
    empty = ReplayBuffer(storage=LazyTensorStorage(10))
    different = [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}]
    for source in ([], [3], [{"action": torch.zeros(0, 1)}], different, 4, empty):
        refused(tmp_path / "out", source, {"fps": 10}, OstinatoError, "")


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


# -- files -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("every_step")
def test_progress_counts_rows_and_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target, seen = tmp_path / "out", []

    def fail(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 11:
            msg = "stop"
            raise ValueError(msg)

    for names in ([], ["out"]):
        with pytest.raises(ValueError, match="stop"):
            export(episodes(), target, fps=10, overwrite=bool(names), progress=fail)
        assert [file.name for file in tmp_path.iterdir()] == names
        if not names:
            export(episodes((3,)), target, fps=10, progress=fail)
    assert len(table_of(target)["index"]) == 3
    stopped = [(0, 20), (7, 20), (11, 20)]
    assert seen == [*stopped, (0, 3), (3, 3), *stopped]


def test_a_killed_export_leaves_what_was_there(tmp_path: Path) -> None:
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
    export(episodes((3,)), target, fps=10, images="png")
    with subprocess.Popen([sys.executable, "-c", script, target], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 200:
            pass
        process.kill()
    assert len(table_of(target)["index"]) == 3
    assert len(list(tmp_path.iterdir())) == 2  # the files beside it
    export(episodes(), target, fps=10, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_lerobot_is_read_back_bit_by_bit(tmp_path: Path, exported: Path) -> None:
    dataset = open_dataset(exported)
    assert dataset.episode_lengths.tolist() == list(LENGTHS)
    for name in ("image", "state", "grid"):
        assert torch.equal(dataset[f"observation.{name}"], joined(episodes(), "observation", name)), name
    assert torch.equal(dataset["action"], joined(episodes(), "action"))
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


def check_round_trip(path: Path, parts: list[dict[str, Any]]) -> None:
    dataset = open_dataset(path)
    given = [flat(part) for part in parts]
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


def test_minari_holds_each_observation_once_and_says_what_it_assumes(tmp_path: Path) -> None:
    parts = transitions(nested=False)
    parts[1]["next"]["observation"] = parts[1]["next"]["observation"].copy()
    parts[1]["next"]["observation"][1] += 1
    refused(tmp_path / "out", parts, {"format": "minari"}, SchemaError, "episode 1, step 1")
    for part in parts:
        part["next"] = {key: part["next"][key] for key in ("observation", "reward", "done")}
    parts[1] = {**parts[2], "next": {**parts[2]["next"], "done": np.zeros(7, bool)}}
    with pytest.warns(UserWarning, match="gets done as terminated"):
        export(parts, tmp_path / "done", format="minari")
    terminated = open_dataset(tmp_path / "done")["next", "terminated"]
    assert terminated.nonzero().flatten().tolist() == [4, 18]
    for part in parts:
        del part["next"]["observation"]
    with pytest.warns(UserWarning, match="the observation after the last step"):
        export(parts, tmp_path / "out", format="minari")


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


def test_what_other_formats_cannot_hold(tmp_path: Path) -> None:
    inner = transitions((7,), nested=False)[0]["next"]
    inner["truncated"][2] = True
    table: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({"next": inner}, {"format": "hdf5"}, SchemaError, "row 2 ends its episode"),
        ({"action": None}, {"format": "minari"}, SchemaError, "Minari needs the field 'action'"),
        ({"observation": None}, {"format": "hdf5"}, SchemaError, "robomimic needs the field 'observation'"),
        ({"next": None}, {"format": "minari"}, SchemaError, "needs the field 'next', 'reward'"),
        ({"next": None}, {"format": "hdf5", "layout": "d4rl"}, SchemaError, "needs the field 'next', 'reward'"),
        ({"extra": torch.float64}, {"format": "minari"}, SchemaError, "no 'extra'"),
        ({"task": ["a"] * 7}, {"format": "minari"}, SchemaError, "written without text"),
        ({"x": torch.bfloat16}, {"format": "hdf5"}, SchemaError, "bfloat16"),
        ({}, {"format": "minari", "dataset_id": "no version"}, OptionError, "dataset_id must be"),
        ({}, {"format": "hdf5", "layout": "other"}, OptionError, "layout must be one of"),
        ({}, {"format": "hdf5", "compression": "zip"}, OptionError, "compression must be one of"),
        ({}, {"format": "hdf5", "env_args": {"x": object()}}, OptionError, "env_args must be"),
        ({}, {"format": "hdf5", "layout": "d4rl", "env_args": {}}, OptionError, "env_args is for layout='robomimic'"),
        ({}, {"format": "hdf5", "fps": 10}, OptionError, "fps is no option of format='hdf5'"),
    ]
    for change, options, error, text in table:
        refused(tmp_path / "out", changed(transitions((7,), nested=False), change), options, error, text)


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


def test_lerobot_datasets_are_written_as_others(tmp_path: Path, exported: Path) -> None:
    parts = episodes()
    with pytest.warns(UserWarning, match=r"is unknown|gets done as terminated"):
        export(open_dataset(exported), tmp_path / "out", format="hdf5")
    dataset = open_dataset(tmp_path / "out")
    assert dataset.episode_lengths.tolist() == list(LENGTHS)
    for key in (("observation", "state"), ("observation", "image"), ("action",), ("next", "reward")):
        assert torch.equal(dataset[key], joined(parts, *key)), key


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="needs Linux")
def test_an_export_leaves_the_scheduling_of_threads_as_it_was(tmp_path: Path) -> None:
    """SVT-AV1 makes the thread that opens it a real-time one, where it may: all others would wait for it."""
    before = os.sched_getscheduler(0)
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    episode = {"observation.images.top": frames, "action": np.zeros((4, 2), np.float32)}
    export([episode], tmp_path / "x", format="lerobot", fps=10, codec="av1")
    assert os.sched_getscheduler(0) == before
