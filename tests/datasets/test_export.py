"""`export`: what is written, read back with the libraries of the formats, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from ostinato import (
    LazyTensorStorage,
    ReplayBuffer,
    Trajectory,
    TrajectoryReplayBuffer,
    export,
    open_dataset,
)
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, OstinatoError, SchemaError
from ostinato.tools import examine

from ..processes import CONTEXT
from .samples import check_rows, flat
from .videos import keyframes_of, pictures

ROOT = Path(__file__).parents[2]
OFFICIAL = ROOT / "build" / "lerobot" / "bin" / "python"
LENGTHS = (7, 4, 9)


NUMBERS = (("observation", "state"), ("observation", "grid"), ("action",), ("next", "reward"), ("next", "done"))


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


def test_files_and_statistics_of_lerobot(exported, tmp_path):
    """The doctor compares lengths, places, times, tasks and statistics with the rows and pictures."""
    assert [str(found) for found in examine(exported, full=True).findings if found.severity != "note"] == []
    info = json.loads((exported / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 10, "arm")
    files = list(exported.rglob("data/*/*.parquet"))
    assert len(files) > 1
    shapes = json.loads(pq.read_schema(files[0]).metadata[b"huggingface"])["info"]["features"]
    assert (shapes["timestamp"]["_type"], shapes["action"]["length"]) == ("Value", 2)
    tasks = pq.read_table(exported / "meta/tasks.parquet").to_pylist()
    assert tasks == [{"task_index": n, "__index_level_0__": f"task {n}"} for n in range(2)]
    rows = pq.read_table(exported / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    action = joined(episodes(), "action").numpy()
    assert np.allclose(rows[1]["stats/action/q50"], np.quantile(action[7:11], 0.5, 0))
    halves = np.repeat(np.array([0, 255], np.uint8), 3 * 32 * 32).reshape(2, 3, 32, 32)
    export([{"observation": halves, "action": np.zeros(2)}], tmp_path / "out", fps=10, images="png")
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    quantiles = [np.unique(stats["observation.image"][name]).tolist() for name in ("q01", "q50", "q99")]
    assert quantiles == [[0.0], [0.5], [1.0]]


@pytest.mark.parametrize(("codec", "size"), [("h264", (31, 45)), ("av1", (64, 64))])
def test_other_videos_have_the_right_frame_at_each_row(tmp_path, codec, size):
    """SVT-AV1 makes the thread that opens it a real-time one, where it may: that is undone."""
    before = os.sched_getscheduler(0)
    parts = episodes(size=size)
    export(parts, tmp_path / "out", fps=10, codec=codec, keyframe_interval=3)
    assert os.sched_getscheduler(0) == before
    found = open_dataset(tmp_path / "out")["observation.image"].numpy().astype(int)
    given = joined(parts, "observation", "image").numpy().astype(int)
    distances = np.abs(found[:, None] - given[None]).mean((2, 3, 4))
    assert distances.argmin(1).tolist() == list(range(20))
    assert distances.diagonal().max() < 12
    file = next((tmp_path / "out").rglob("*.mp4"))
    assert set(keyframes_of(file)) >= {0, 7, 11}
    assert np.diff([*keyframes_of(file), 20]).max() <= 3


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({"task": "reach"}, [0] * 20),
        ({"task": ["a", "b", "c"]}, np.repeat([0, 1, 2], LENGTHS).tolist()),
        ({"task_key": "goal"}, [n % 2 for length in LENGTHS for n in range(length)]),
    ],
)
def test_tasks_are_chosen_and_png_images_are_bit_exact(tmp_path, options, tasks):
    parts = episodes()
    channels_last = "task" in options
    for part in parts:
        part["goal"] = [str(n % 2) for n in range(len(part["action"]))]
        if channels_last:
            part["observation"]["image"] = part["observation"]["image"].permute(0, 2, 3, 1).contiguous()
    export(parts, tmp_path / "out", fps=10, images="png", **options)
    assert len(list((tmp_path / "out").rglob("data/*/*.parquet"))) == 1
    rows = table_of(tmp_path / "out")
    assert rows["task_index"] == tasks
    found = np.stack([np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in rows["observation.image"]])
    given = joined(parts, "observation", "image").numpy()
    assert np.array_equal(found, given if channels_last else given.transpose(0, 2, 3, 1))


def test_trajectories_and_mappings_are_written(tmp_path):
    with TrajectoryReplayBuffer(seed=0, auto_save=False) as rb:
        values = torch.arange(12.0).reshape(6, 2, 1)
        rb.add_trajectories([Trajectory(actions=values, rewards=values, curr_obs={"state": values})])
        export(rb, tmp_path / "trajectories", fps=10)
    assert table_of(tmp_path / "trajectories")["next.reward"] == [*range(0, 12, 2), *range(1, 12, 2)]
    export({"action": torch.arange(6.0), "episode_ends": [2, 6]}, tmp_path / "mapping", fps=10)
    assert table_of(tmp_path / "mapping")["episode_index"] == [0, 0, 1, 1, 1, 1]


def refused(target: Path, parts: Any, error: type[Exception], text: str, **options: Any) -> None:
    """An export raises, and writes nothing."""
    with pytest.raises(error, match=text):
        export(parts, target, **options)
    assert not list(target.parent.iterdir()), text


OPTIONS: list[Any] = [
    ("csv", {}),
    *(("lerobot", {"fps": fps}) for fps in (None, 0)),
    ("lerobot", {"fps": 10, "codec": "mpeg"}),
    ("lerobot", {"fps": 10, "images": "png", "codec": "av1"}),
    ("lerobot", {"fps": 10, "keyframe_interval": 0}),
    ("lerobot", {"fps": 10, "data_file_mb": -1}),
    ("lerobot", {"fps": 10, "task": ["a"]}),
    ("lerobot", {"fps": 10, "task": "a", "task_key": "task"}),
    ("lerobot", {"fps": 10, "layout": "d4rl"}),
    ("minari", {"dataset_id": "no version"}),
    ("hdf5", {"layout": "other"}),
    ("hdf5", {"compression": "zip"}),
    ("hdf5", {"env_args": {"x": object()}}),
    ("hdf5", {"layout": "d4rl", "env_args": {}}),
]


def test_wrong_options_are_named(tmp_path):
    for format_name, options in OPTIONS:
        name = list(options)[-1] if options else "format"
        refused(tmp_path / "out", transitions(), OptionError, name, format=format_name, **options)
    refused(tmp_path / "out", episodes(), KeyMissingError, "goal", fps=10, task_key="goal")
    small = [{"observation": torch.zeros(3, 3, 2, 2, dtype=torch.uint8), "action": torch.zeros(3)}]
    refused(tmp_path / "out", small, KindError, "frames of 2x2", fps=10, codec="av1")


@pytest.mark.parametrize(
    ("format_name", "change", "text"),
    [
        ("lerobot", {"action": None}, "'action'"),
        ("lerobot", {"a/b": torch.float32}, "no '/'"),
        ("lerobot", {"action.x": torch.complex64}, "complex64"),
        ("lerobot", {"next.done": torch.bool}, "would both be the feature 'next.done'"),
        ("lerobot", {"timestamp": torch.float32}, "row 14 has the timestamp 0.0"),
        ("minari", {"action": None}, "'action'"),
        ("minari", {"next": None}, "'next', 'reward'"),
        ("minari", {"extra": torch.float64}, "'extra'"),
        ("minari", {"task": ["a"] * 7}, "written without text"),
        ("robomimic", {"observation": None}, "'observation'"),
        ("robomimic", {"x": torch.bfloat16}, "bfloat16"),
        ("robomimic", {"next": {"truncated": np.arange(7) == 2, "reward": np.zeros(7)}}, "row 2 ends its episode"),
        ("d4rl", {"next": None}, "'next', 'reward'"),
        *(("d4rl", {name: torch.float32}, "have no '/'") for name in ("a/b", "..")),
    ],
)
def test_rows_that_a_format_cannot_hold(tmp_path, format_name, change, text):
    parts = transitions((7,) if format_name != "lerobot" else (5, 3, 7), nested=False)
    for part in parts:
        for name, value in change.items():
            part[name] = torch.zeros(len(part["action"]), dtype=value) if isinstance(value, torch.dtype) else value
            if value is None:
                del part[name]
    options: dict[str, Any] = {"format": "hdf5", "layout": format_name}
    if format_name in {"lerobot", "minari"}:
        options = {"format": format_name} | ({"fps": 10} if format_name == "lerobot" else {})
    refused(tmp_path / "out", parts, SchemaError, text, **options)


def test_sources_without_rows_are_refused(tmp_path):
    empty = ReplayBuffer(storage=LazyTensorStorage(10))
    different = [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}]
    for source in ([], [3], [{"action": torch.zeros(0, 1)}], different, 4, empty):
        with pytest.raises(OstinatoError):
            export(source, tmp_path / "out", fps=10)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not OFFICIAL.exists(), reason="needs the official lerobot in build/lerobot")
def test_the_official_reader_finds_what_was_written(tmp_path):
    parts = episodes()
    export(parts, tmp_path / "out", fps=10, data_file_mb=0.0005, images="png")
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


# -- files -------------------------------------------------------------------------------------------------------------


def export_forever(target: Path, told: Any) -> None:
    """Export 40,000 rows with a camera in another process, which tells how many are written."""
    frames = torch.zeros(40, 3, 32, 32, dtype=torch.uint8)
    parts = [{"observation": frames, "action": torch.zeros(40, 1, dtype=torch.float32)}] * 1000
    export(parts, target, fps=10, progress=lambda done, _: told.send(done), overwrite=True)


def test_an_export_that_fails_or_is_killed_leaves_what_was_there(tmp_path):
    target = tmp_path / "out"
    parts = [*episodes(), {**episodes((3,))[0], "action": torch.zeros(3, 7)}]
    for names in ([], ["out"]):
        with pytest.raises(SchemaError, match="action"):
            export(parts, target, fps=10, overwrite=True)
        assert [file.name for file in tmp_path.iterdir()] == names
        export(episodes((3,)), target, fps=10, images="png", overwrite=True)
    heard, told = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=export_forever, args=(target, told))
    process.start()
    while heard.recv() < 80:
        pass
    process.kill()
    process.join()
    assert len(table_of(target)["index"]) == 3
    assert len(list(tmp_path.iterdir())) == 2  # the files beside it
    export(episodes((4,)), target, fps=10, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_lerobot_is_read_back_and_written_again_bit_by_bit(tmp_path, exported):
    dataset = open_dataset(exported)
    assert dataset.episode_lengths.tolist() == list(LENGTHS)
    assert dataset["task"] == [text for part in episodes() for text in part["task"]]
    again = export(dataset, tmp_path / "again", codec="lossless", episodes=[2, 1])
    assert again.rows == 13
    with pytest.raises(CheckpointError, match="overwrite=True"):
        export(dataset, tmp_path / "again")
    found, given = open_dataset(tmp_path / "again"), dataset.select(episodes=[2, 1])
    for path in (("observation", "image"), *NUMBERS):
        key = ".".join(path)
        assert torch.equal(dataset[key], joined(episodes(), *path)), key
        assert torch.equal(found[key], given[key]), key
    for key in ("timestamp", "frame_index"):
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
    columns = {key: np.concatenate([flat(part)[key] for part in parts]) for key in flat(parts[0])}
    assert set(dataset.schema.paths) == set(columns)
    check_rows(dataset, columns, [len(part["action"]) for part in parts])


def test_minari_is_read_back_bit_by_bit(tmp_path):
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


def test_minari_holds_each_observation_once_and_says_what_it_assumes(tmp_path):
    parts = transitions(nested=False)
    parts[1]["next"]["observation"] = parts[1]["next"]["observation"].copy()
    parts[1]["next"]["observation"][1, 2] += 1
    refused(tmp_path / "out", parts, SchemaError, "episode 1, step 1", format="minari")
    for part in parts:
        part["next"] = {key: part["next"][key] for key in ("observation", "reward", "done")}
    parts[1] = {**parts[2], "next": {**parts[2]["next"], "done": np.zeros(7, bool)}}
    with pytest.warns(UserWarning, match="gets done as terminated"):
        export(parts, tmp_path / "done", format="minari")
    written = open_dataset(tmp_path / "done")
    assert written["next", "terminated"].nonzero().flatten().tolist() == [4, 18]
    assert written["next", "truncated"].nonzero().flatten().tolist() == [11]
    for part in parts:
        del part["next"]["observation"]
    with pytest.warns(UserWarning, match="the observation after the last step"):
        export(parts, tmp_path / "out", format="minari")


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_hdf5_is_read_back_bit_by_bit(tmp_path, compression):
    import h5py

    parts = transitions(nested=False)
    path = tmp_path / "data.hdf5"
    report = export(parts, path, format="hdf5", layout="d4rl", compression=compression)
    assert report.nbytes == path.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["data.hdf5"]
    check_round_trip(path, parts)
    parts, path = transitions(), tmp_path / "robomimic.hdf5"
    export(parts, path, format="hdf5", env_args={"env_name": "Lift", "type": 1}, compression=compression)
    check_round_trip(path, parts)
    with pytest.raises(CheckpointError):
        export(parts, tmp_path, format="hdf5", overwrite=True)
    with h5py.File(path) as file:
        assert file["data"].attrs["total"] == 15
        assert json.loads(file["data"].attrs["env_args"])["env_name"] == "Lift"
        assert [file[f"data/demo_{n}"].attrs["num_samples"] for n in range(3)] == [5, 3, 7]
