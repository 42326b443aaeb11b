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
from gymnasium import spaces
from minari import MinariDataset
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

from ostinato import open_dataset
from ostinato.errors import DamagedFileError, KindError, SchemaError, UsageError

from .builders import minari_dataset
from .samples import check_processes, check_rows, flat

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, space: Any, episodes: list[dict[str, Any]], kind: str, *, jpeg: bool = False) -> Path:
    """Write episodes with Minari's own storage."""
    (folder / "data").mkdir(parents=True)
    action = spaces.Box(-1, 1, (1,), np.float32)
    storage = MinariStorage.new(folder / "data", space, action, data_format=kind, jpeg_encoding=jpeg)
    storage.update_metadata({"dataset_id": folder.name, "minari_version": "0.5.3"})
    buffers = []
    for number, episode in enumerate(episodes):
        steps = episode.pop("steps")
        buffers.append(
            EpisodeBuffer(
                id=number,
                actions=np.full((steps, 1), number, np.float32),
                rewards=np.arange(steps, dtype=np.float64),
                terminations=np.arange(steps) == steps - 1,
                truncations=np.zeros(steps, bool),
                **episode,
            )
        )
    storage.update_episodes(buffers)
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
def test_every_number_is_that_of_the_episodes(tmp_path: Path, kind: str, observation: str, action: str) -> None:
    model = minari_dataset(tmp_path / "a-v0", data_format=kind, observation=observation, action=action)
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
    assert flat(dataset[:]).keys() == {(k,) if isinstance(k, str) else k for k in {**model.columns, **now, **after}}
    assert dataset.assumptions == ()
    check_processes(open_dataset(model.path, max_bytes=2000), model.columns)


def test_objects_and_their_filtered_episodes_are_used(tmp_path: Path) -> None:
    model = minari_dataset(tmp_path / "a-v0", data_format="arrow", lengths=(3, 1, 5, 2))
    whole = MinariDataset(model.path / "data")
    check_rows(open_dataset(whole), model.columns, model.lengths)
    some = whole.filter_episodes(lambda episode: len(episode) in {1, 2})
    rows = np.array([3, 9, 10])
    check_rows(open_dataset(some), {key: values[rows] for key, values in model.columns.items()}, [1, 2])
    assert open_dataset(whole).fingerprint == open_dataset(model.path).fingerprint
    prints = [open_dataset(MinariDataset(model.path / "data", np.array(part))).fingerprint for part in ([0, 1], [1, 0])]
    assert len({*prints, open_dataset(model.path).fingerprint}) == 3
    with pytest.raises(SchemaError, match="no episodes"):
        open_dataset(whole.filter_episodes(lambda episode: False))


def test_every_path_of_a_dataset_opens_it(tmp_path: Path) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    for path in (model.path, model.path / "data", model.path / "data" / "main_data.hdf5", str(model.path)):
        check_rows(open_dataset(path), model.columns, model.lengths)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metadata.json").write_text("[1")
    with pytest.raises(KindError, match="not recognized"):
        open_dataset(tmp_path / "other")


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_tuples_and_text(tmp_path: Path, kind: str) -> None:
    box = spaces.Box(-9, 9, (2,), np.float32)
    space = spaces.Dict({"pair": spaces.Tuple((box, spaces.Discrete(5))), "mission": spaces.Text(20)})
    missions = [["go left"] * 3 + ["go right"], ["wait", "wait", "é"]]
    values = np.random.default_rng(0).random((7, 2), np.float32)
    parts: list[dict[str, Any]] = [
        {
            "steps": stop - start - 1,
            "observations": {"pair": (values[start:stop], np.arange(start, stop) % 5), "mission": texts},
            "infos": {},
        }
        for start, stop, texts in ((0, 4, missions[0]), (4, 7, missions[1]))
    ]
    dataset = open_dataset(write(tmp_path / "a-v0", space, parts, kind))
    now, after = [0, 1, 2, 4, 5], [1, 2, 3, 5, 6]
    columns = {
        ("observation", "pair", "0"): values[now],
        ("next", "observation", "pair", "0"): values[after],
        ("observation", "pair", "1"): np.array(now) % 5,
        ("next", "observation", "pair", "1"): np.array(after) % 5,
    }
    check_rows(dataset, columns, [3, 2])
    texts = [*missions[0], *missions[1]]
    assert dataset["observation", "mission"] == [texts[i] for i in now]
    assert dataset["next", "observation", "mission"] == [texts[i] for i in after]


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_jpeg_pictures_are_decoded_as_minari_decodes_them(tmp_path: Path, kind: str) -> None:
    space = spaces.Box(0, 255, (40, 36, 3), np.uint8)
    parts: list[dict[str, Any]] = [
        {
            "steps": steps,
            "observations": np.random.default_rng(steps).integers(0, 255, (steps + 1, 40, 36, 3), np.uint8),
            "infos": {},
        }
        for steps in (11, 3)
    ]
    path = write(tmp_path / "a-v0", space, parts, kind, jpeg=True)
    expected = [episode.observations for episode in MinariDataset(path / "data")]
    columns = {
        "observation": np.concatenate([x[:-1] for x in expected]),
        ("next", "observation"): np.concatenate([x[1:] for x in expected]),
    }
    check_rows(open_dataset(path), columns, [11, 3])


def test_infos_that_are_no_columns_are_named(tmp_path: Path) -> None:
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


def test_files_that_lack_something_are_not_opened_or_read(tmp_path: Path) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    path = model.path / "data" / "main_data.hdf5"
    content = path.read_bytes()

    def damage(name: str, values: Any) -> None:
        path.write_bytes(content)
        with h5py.File(path, "a") as file:
            del file[name]
            if values is not None:
                file[name] = values

    for name, values, message in (
        ("episode_1", None, r"main_data.hdf5: episode_1 has no actions, observations, rewards"),
        ("episode_2/rewards", None, "episode_2 has no rewards"),
        ("episode_0/observations", None, "episode_0 has no observations"),
        ("episode_1/rewards", np.zeros(0), "episode_1 has no steps"),
        ("episode_0/observations", np.zeros((6, 3)), r"observations has the shape \[6, 3\].*7 rows"),
        ("episode_0/actions", [b"x"] * 6, "actions"),
    ):
        damage(name, values)
        with pytest.raises((DamagedFileError, SchemaError), match=message):
            open_dataset(model.path)
    for name, values, message in (
        ("observations", np.zeros((4, 3)), r"episode_1/observations.*\[4, 3\].*5 rows"),
        ("observations", np.zeros((5, 4)), r"episode_1/observations.*\[4\].*\[3\]"),
        ("observations", np.zeros((5, 3), "f"), "episode_1/observations.*float32"),
        ("terminations", np.zeros(3, bool), "episode_1/terminations.*4 rows"),
        ("infos/qpos", np.zeros((4, 2)), "episode_1/infos/qpos.*5 rows"),
    ):
        damage(f"episode_1/{name}", values)
        dataset = open_dataset(model.path)
        assert dataset[:6]["action"].shape == (6, 2)
        with pytest.raises(DamagedFileError, match=message):
            dataset[:]
        dataset.close()


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    path = model.path / "data" / "main_data.hdf5"
    content = path.read_bytes()
    for share in (0.3, 0.999):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(DamagedFileError, match=r"main_data.hdf5 is not a whole HDF5 file: .*truncated"):
            open_dataset(model.path)
    path.unlink()
    with pytest.raises(DamagedFileError, match=r"main_data.hdf5 is missing"):
        open_dataset(model.path)


def test_a_file_that_is_being_written_is_named(tmp_path: Path) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    code = "import h5py, sys; file = h5py.File(sys.argv[1], 'a'); print('open', flush=True); input()"
    path = model.path / "data" / "main_data.hdf5"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(UsageError, match="open for writing elsewhere"):
            open_dataset(model.path)
        writer.stdin.close()
    check_rows(open_dataset(model.path), model.columns, model.lengths)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_damaged_episodes_of_arrow_are_named(tmp_path: Path, kind: str) -> None:
    model = minari_dataset(tmp_path / "a-v0", data_format=kind)
    file = next((model.path / "data" / "1").glob(f"*.{kind}"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    dataset = open_dataset(model.path)
    assert dataset[:6]["action"].shape == (6, 2)
    with pytest.raises(DamagedFileError, match=f"data/1: its {kind} file cannot be read"):
        dataset[6]
    shutil.copy(next((model.path / "data" / "0").glob(f"*.{kind}")), file)
    with pytest.raises(DamagedFileError, match=r"data/1: .* has 7 rows, but metadata.json says 4 steps, which need 5"):
        dataset[6]
    file.unlink()
    with pytest.raises(DamagedFileError, match=f"data/1 has no {kind} file"):
        dataset[6]
    (model.path / "data" / "1" / "metadata.json").write_text("{}")
    with pytest.raises(DamagedFileError, match=r"1/metadata.json does not tell the steps"):
        open_dataset(model.path)


def test_metadata_is_checked(tmp_path: Path) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    path = model.path / "data" / "metadata.json"
    metadata = json.loads(path.read_text())

    def opened(**changes: Any) -> Any:
        kept = {key: value for key, value in {**metadata, **changes}.items() if value is not None}
        path.write_text(json.dumps(kept))
        return open_dataset(model.path)

    with pytest.raises(DamagedFileError, match=r"no observation_space.*runs code of others"):
        opened(observation_space=None)
    with pytest.raises(DamagedFileError, match="action_space cannot be read"):
        opened(action_space='{"type": "Box"}')
    with pytest.raises(DamagedFileError, match="data_format is 'csv'"):
        opened(data_format="csv")
    with pytest.raises(DamagedFileError, match="episode_3 has no"):
        opened(total_episodes=4)
    with pytest.raises(DamagedFileError, match="total_episodes"):
        opened(total_episodes="4")
    assert opened(total_steps=17).assumptions == ("metadata.json says 17 steps; the episodes have 18, all used.",)
    assert opened(total_episodes=2).assumptions[0] == "metadata.json has 2 episodes; 1 more are left out."
