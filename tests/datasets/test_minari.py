"""Minari datasets are read as minari itself reads them, number by number; damage is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("minari")
pytest.importorskip("h5py")
pytest.importorskip("pyarrow")

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
from gymnasium import spaces
from minari import MinariDataset

from ostinato import open_dataset
from ostinato.errors import DamagedFileError, KindError, SchemaError, UsageError

from .builders import minari_dataset, write_minari
from .samples import by_path, check_processes, check_rows, flat, not_opened

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, space: Any, observations: list[Any], lengths: list[int], kind: str, **options: Any) -> Path:
    """Write episodes of these observations."""
    episodes = [
        {
            "observations": seen,
            "actions": np.full((steps, 1), number, np.float32),
            "rewards": np.arange(steps, dtype=np.float64),
            "terminations": np.arange(steps) == steps - 1,
            "truncations": np.zeros(steps, bool),
            "infos": {},
        }
        for number, (seen, steps) in enumerate(zip(observations, lengths, strict=True))
    ]
    write_minari(folder, space, spaces.Box(-1, 1, (1,), np.float32), episodes, kind, **options)
    return folder


@pytest.mark.parametrize(
    ("kind", "observation", "action"),
    [
        ("hdf5", "dict", "discrete"),
        ("hdf5", "image", "box"),
        ("arrow", "dict", "box"),
        ("arrow", "image", "discrete"),
        ("parquet", "dict", "box"),
    ],
)
def test_every_number_is_that_of_the_episodes(tmp_path, kind, observation, action):
    lengths = [6, 1, 8, *[2] * 9]  # twelve: episode 10 sorts before episode 2 as a text
    options = {"data_format": kind, "observation": observation, "action": action}
    model = minari_dataset(tmp_path / "a-v0", lengths=lengths, **options)
    dataset = open_dataset(model.path)
    check_rows(dataset, model.columns, model.lengths)
    assert dataset.format == f"minari {kind}"
    assert dataset.metadata["dataset_id"] == "a-v0"
    cuts = np.cumsum([length + 1 for length in model.lengths])[:-1]
    infos = {name: np.split(values, cuts) for name, values in model.infos.items()}
    now: dict[Any, Any] = {}
    after: dict[Any, Any] = {}
    for name, parts in infos.items():
        now["info", name] = np.concatenate([part[:-1] for part in parts])
        after["next", "info", name] = np.concatenate([part[1:] for part in parts])
    check_rows(dataset, now | after, model.lengths)
    assert flat(dataset[:]).keys() == by_path({**model.columns, **now, **after}).keys()
    assert dataset.assumptions == ()
    check_processes(open_dataset(model.path, max_bytes=2000), model.columns)


def test_objects_and_their_filtered_episodes_are_used(tmp_path):
    model = minari_dataset(tmp_path / "a-v0", data_format="arrow", lengths=(3, 1, 5, 2))
    whole = MinariDataset(model.path / "data")
    check_rows(open_dataset(whole), model.columns, model.lengths)
    some = whole.filter_episodes(lambda episode: len(episode) in {1, 2})
    rows = np.array([3, 9, 10])
    check_rows(open_dataset(some), {key: values[rows] for key, values in model.columns.items()}, [1, 2])
    assert open_dataset(whole).fingerprint == open_dataset(model.path).fingerprint
    prints = [open_dataset(MinariDataset(model.path / "data", np.array(part))).fingerprint for part in ([0, 1], [1, 0])]
    assert len({*prints, open_dataset(model.path).fingerprint}) == 3
    not_opened(whole.filter_episodes(lambda episode: False), SchemaError, "no episodes")


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_tuples_texts_and_jpeg_pictures(tmp_path, kind):
    box = spaces.Box(-9, 9, (2,), np.float32)
    space = spaces.Dict({"pair": spaces.Tuple((box, spaces.Discrete(5))), "mission": spaces.Text(20)})
    texts = [*["go left"] * 3, "go right", "wait", "wait", "é"]
    values = np.random.default_rng(0).random((7, 2), np.float32)
    parts = [
        {"pair": (values[part], np.arange(7)[part] % 5), "mission": texts[part]} for part in (slice(4), slice(4, 7))
    ]
    dataset = open_dataset(write(tmp_path / "a-v0", space, parts, [3, 2], kind, jpeg_encoding=False))
    columns: dict[Any, Any] = {}
    for side, rows in (((), [0, 1, 2, 4, 5]), (("next",), [1, 2, 3, 5, 6])):
        columns[*side, "observation", "pair", "0"] = values[rows]
        columns[*side, "observation", "pair", "1"] = np.array(rows) % 5
        assert dataset[*side, "observation", "mission"] == [texts[i] for i in rows]
    check_rows(dataset, columns, [3, 2])
    pictures = list(np.split(np.random.default_rng(0).integers(0, 255, (16, 40, 36, 3), np.uint8), [12]))
    path = write(
        tmp_path / "b-v0", spaces.Box(0, 255, (40, 36, 3), np.uint8), pictures, [11, 3], kind, jpeg_encoding=True
    )
    expected = [episode.observations for episode in MinariDataset(path / "data")]
    now, after = (np.concatenate([x[part] for x in expected]) for part in (slice(-1), slice(1, None)))
    check_rows(open_dataset(path), {"observation": now, ("next", "observation"): after}, [11, 3])


def test_infos_that_are_no_columns_are_named(tmp_path):
    model = minari_dataset(tmp_path / "a-v0", lengths=(3, 2))
    with h5py.File(model.path / "data" / "main_data.hdf5", "a") as file:
        for n, length in enumerate(model.lengths):
            infos = file[f"episode_{n}/infos"]
            infos["note"], infos["short"], infos["steps"] = [b"a"] * (length + 1), np.arange(1), np.arange(length)
        infos["late"] = np.ones(3)
    dataset = open_dataset(model.path)
    check_rows(dataset, {("info", "steps"): np.array([0, 1, 2, 0, 1])}, [3, 2])
    names = {"info.steps", *(f"{side}info.{name}" for side in ("", "next.") for name in ("success", "qpos"))}
    assert {".".join(path) for path in flat(dataset[:]) if "info" in path} == names
    assert [line.split()[0] for line in dataset.assumptions] == ["infos/late", "infos/note", "infos/short"]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("episode_1", None, r"main_data.hdf5/episode_1: the episode has no actions"),
        ("episode_0/observations", None, "episode_0: the episode has no observations"),
        ("episode_1/rewards", np.zeros(0), "episode_1 has no steps"),
        ("episode_0/observations", np.zeros((6, 3)), r"observations has the shape \[6, 3\].*7 rows"),
        ("episode_0/actions", [b"x"] * 6, "actions"),
        ("episode_1/observations", np.zeros((4, 3)), r"episode_1/observations.*\[4, 3\].*5 rows"),
        ("episode_1/observations", np.zeros((5, 4)), r"episode_1/observations.*\[4\].*\[3\]"),
        ("episode_1/observations", np.zeros((5, 3), "f"), "episode_1/observations.*float32"),
        ("episode_1/infos/qpos", np.zeros((4, 2)), "episode_1/infos/qpos.*5 rows"),
    ],
)
def test_files_that_lack_something_are_not_opened_or_read(tmp_path, name, values, message):
    path = minari_dataset(tmp_path / "a-v0").path
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        del file[name]
        if values is not None:
            file[name] = values
    with pytest.raises((DamagedFileError, SchemaError), match=message):
        open_dataset(path)[:]


def test_damaged_files_and_metadata_are_named(tmp_path):
    model = minari_dataset(tmp_path / "a-v0")
    for path in (model.path / "data", model.path / "data" / "main_data.hdf5"):
        check_rows(open_dataset(path), model.columns, model.lengths)
    path = model.path / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    table: list[Any] = [
        ("observation_space", None, r"no observation_space.*runs code of others"),
        ("action_space", '{"type": "Box"}', "action_space cannot be read"),
        ("data_format", "csv", "data_format is 'csv'"),
        ("total_episodes", 4, "episode_3: the episode has no"),
        ("total_episodes", "4", "total_episodes"),
        ("total_steps", 17, "metadata.json says 17 steps; the episodes have 18, all used."),
        ("total_episodes", 2, "metadata.json has 2 episodes; 1 more are left out."),
    ]
    for name, value, message in table:
        path.write_text(json.dumps({key: v for key, v in {**metadata, name: value}.items() if v is not None}))
        if message.startswith("metadata"):
            assert open_dataset(model.path).assumptions[0] == message
        else:
            not_opened(model.path, DamagedFileError, message)
    path.write_text("[1")
    not_opened(model.path, KindError, "not recognized")
    path.write_text(json.dumps(metadata))
    file = model.path / "data" / "main_data.hdf5"
    file.unlink()
    not_opened(model.path, DamagedFileError, r"main_data.hdf5 is missing")


def test_a_file_that_is_being_written_is_named(tmp_path):
    model = minari_dataset(tmp_path / "a-v0")
    code = "import h5py, sys; file = h5py.File(sys.argv[1], 'a'); print('open', flush=True); input()"
    path = model.path / "data" / "main_data.hdf5"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        not_opened(model.path, UsageError, "open for writing elsewhere")
        writer.stdin.close()
    check_rows(open_dataset(model.path), model.columns, model.lengths)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_damaged_episodes_of_arrow_are_named(tmp_path, kind):
    model = minari_dataset(tmp_path / "a-v0", data_format=kind)
    folder = model.path / "data" / "1"
    file = next(folder.glob(f"*.{kind}"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    dataset = open_dataset(model.path)
    assert dataset[:6]["action"].shape == (6, 2)
    with pytest.raises(DamagedFileError, match=f"data/1: its {kind} file cannot be read"):
        dataset[6]
    shutil.copy(next((model.path / "data" / "0").glob(f"*.{kind}")), file)
    with pytest.raises(DamagedFileError, match=r"data/1: .* has 7 rows, but metadata.json says 4 steps, which need 5"):
        dataset[6]
    if kind == "parquet":
        file.write_bytes(content)
        table = pq.read_table(file)
        at, wide = table.column_names.index("actions"), pa.array([[0.0] * 3] * len(table), pa.list_(pa.float32(), 3))
        pq.write_table(table.set_column(at, "actions", wide), file)
        with pytest.raises(DamagedFileError, match=r"data/1, actions.*a list of 3 values, where the shape \[2\]"):
            dataset[6]
    file.unlink()
    with pytest.raises(DamagedFileError, match=f"data/1 has no {kind} file"):
        dataset[6]
    (folder / "metadata.json").write_text("{}")
    not_opened(model.path, DamagedFileError, r"1/metadata.json: total_steps must be")
