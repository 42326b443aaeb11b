"""Minari datasets are read as minari itself reads them, number by number; damage is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("minari")
pytest.importorskip("h5py")
pytest.importorskip("pyarrow")

import h5py
from gymnasium import spaces
from minari import MinariDataset
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

from ostinato import Hindsight, ReplayBuffer, open_dataset
from ostinato.errors import DamagedFileError, KindError, SchemaError, UsageError

from .builders import Model, minari_dataset
from .samples import check_processes, check_rows, check_samples, flat

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = ["hdf5", "arrow", "parquet"]


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


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("observation", ["box", "dict", "image"])
@pytest.mark.parametrize("action", ["box", "discrete"])
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


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_rows_are_those_that_minari_iterates_over(tmp_path: Path, kind: str) -> None:
    model = minari_dataset(tmp_path / "a-v0", data_format=kind, observation="dict", lengths=(3, 1, 5, 2))
    dataset = open_dataset(model.path)
    start = 0
    for episode in MinariDataset(model.path / "data").iterate_episodes():
        rows = dataset[start : start + len(episode)]
        for path, values in flat(episode.observations).items():
            np.testing.assert_array_equal(flat(rows["observation"])[path].numpy(), values[:-1], strict=True)
            np.testing.assert_array_equal(flat(rows["next"]["observation"])[path].numpy(), values[1:], strict=True)
        np.testing.assert_array_equal(rows["action"].numpy(), episode.actions, strict=True)
        np.testing.assert_array_equal(rows["next"]["reward"].numpy(), episode.rewards, strict=True)
        np.testing.assert_array_equal(rows["next"]["terminated"].numpy(), episode.terminations, strict=True)
        np.testing.assert_array_equal(rows["next"]["truncated"].numpy(), episode.truncations, strict=True)
        start += len(episode)
    assert start == len(dataset)


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_objects_and_their_filtered_episodes_are_used(tmp_path: Path, kind: str) -> None:
    model = minari_dataset(tmp_path / "a-v0", data_format=kind, lengths=(3, 1, 5, 2))
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
    space = spaces.Box(-9, 9, (2,), np.float32)
    infos: list[dict[str, Any]] = [
        {"speed": np.arange(4.0), "note": ["a"] * 4, "short": np.arange(2), "steps": np.arange(3)},
        {"speed": np.arange(3.0), "note": ["b"] * 3, "short": np.arange(2), "steps": np.arange(2), "late": np.ones(3)},
    ]
    parts = [
        {"steps": n, "observations": np.zeros((n + 1, 2), np.float32), "infos": info}
        for n, info in zip((3, 2), infos, strict=True)
    ]
    dataset = open_dataset(write(tmp_path / "a-v0", space, parts, "hdf5"))
    columns = {
        ("info", "speed"): np.array([0.0, 1, 2, 0, 1]),
        ("next", "info", "speed"): np.array([1.0, 2, 3, 1, 2]),
        ("info", "steps"): np.array([0, 1, 2, 0, 1]),
    }
    check_rows(dataset, columns, [3, 2])
    assert len([path for path in flat(dataset[:]) if "info" in path]) == 3
    assert [line.split()[0] for line in dataset.assumptions] == ["infos/late", "infos/note", "infos/short"]


@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_buffers_sample_what_they_sample_of_arrays(tmp_path: Path, kind: str) -> None:
    model = minari_dataset(tmp_path / "a-v0", data_format=kind, observation="image", lengths=(6, 4, 8, 5))
    check_samples(lambda: open_dataset(model.path), model, tmp_path, frames="observation")
    check_samples(lambda: open_dataset(model.path, max_bytes=1000), model, tmp_path, frames="observation")


@pytest.mark.parametrize(("kind", "max_bytes"), [("hdf5", 1 << 30), ("hdf5", 2000), ("arrow", 2000)])
def test_processes_read_files_of_their_own(tmp_path: Path, kind: str, max_bytes: int) -> None:
    model = minari_dataset(tmp_path / "a-v0", data_format=kind, observation="dict")
    check_processes(open_dataset(model.path, max_bytes=max_bytes), model.columns, spawn=max_bytes == 2000)


def test_goals_are_relabelled(tmp_path: Path) -> None:
    box = spaces.Box(-9, 99, (1,), np.float64)
    space = spaces.Dict({"achieved_goal": box, "desired_goal": box})
    place = np.arange(12.0)[:, None]
    parts: list[dict[str, Any]] = [
        {
            "steps": stop - start - 1,
            "observations": {"achieved_goal": place[start:stop], "desired_goal": np.full((stop - start, 1), -1.0)},
            "infos": {},
        }
        for start, stop in ((0, 5), (5, 12))
    ]
    dataset = open_dataset(write(tmp_path / "a-v0", space, parts, "hdf5"))

    def reward(batch: Any) -> torch.Tensor:
        reached: torch.Tensor = batch["next"]["observation"]["achieved_goal"] == batch["observation"]["desired_goal"]
        return reached[:, 0].double()

    unit = Hindsight(
        reward,
        her_ratio=1.0,
        goal_key=("observation", "desired_goal"),
        achieved_goal_key=("observation", "achieved_goal"),
    )
    batch = ReplayBuffer(storage=dataset, batch_size=200, sample_unit=unit).sample()
    now, goal = batch["observation"]["achieved_goal"], batch["observation"]["desired_goal"]
    assert ((now < 5) == (goal < 5)).all()
    assert (goal > now).all()
    assert torch.equal(batch["next"]["reward"] == 1, (goal == now + 1)[:, 0])


# -- damage ------------------------------------------------------------------------------------------------------------


def change(model: Model, action: Any) -> None:
    with h5py.File(model.path / "data" / "main_data.hdf5", "a") as file:
        action(file)


def replace(file: Any, name: str, values: Any) -> None:
    del file[name]
    file[name] = values


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.__delitem__("episode_1"), r"main_data.hdf5: episode_1 has no actions, observations, rewards"),
        (lambda f: f.__delitem__("episode_2/rewards"), "episode_2 has no rewards"),
        (lambda f: f.__delitem__("episode_0/observations"), "episode_0 has no observations"),
        (lambda f: replace(f, "episode_1/rewards", np.zeros(0)), "episode_1 has no steps"),
        (
            lambda f: replace(f, "episode_0/observations", np.zeros((6, 3))),
            r"observations has the shape \[6, 3\].*7 rows",
        ),
        (lambda f: replace(f, "episode_0/actions", [b"x"] * 6), "actions"),
    ],
)
def test_files_that_lack_something_are_not_opened(tmp_path: Path, damage: Any, message: str) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    change(model, damage)
    with pytest.raises((DamagedFileError, SchemaError), match=message):
        open_dataset(model.path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: replace(f, "episode_1/observations", np.zeros((4, 3))), r"episode_1/observations.*\[4, 3\].*5 rows"),
        (lambda f: replace(f, "episode_1/observations", np.zeros((5, 4))), r"episode_1/observations.*\[4\].*\[3\]"),
        (lambda f: replace(f, "episode_1/observations", np.zeros((5, 3), "f")), "episode_1/observations.*float32"),
        (lambda f: replace(f, "episode_1/terminations", np.zeros(3, bool)), "episode_1/terminations.*4 rows"),
        (lambda f: replace(f, "episode_1/infos/qpos", np.zeros((4, 2))), "episode_1/infos/qpos.*5 rows"),
    ],
)
def test_episodes_that_differ_from_the_first_are_named_when_they_are_read(
    tmp_path: Path, damage: Any, message: str
) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    change(model, damage)
    dataset = open_dataset(model.path)
    assert dataset[:6]["action"].shape == (6, 2)
    with pytest.raises(DamagedFileError, match=message):
        dataset[:]


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, share: float) -> None:
    model = minari_dataset(tmp_path / "a-v0")
    path = model.path / "data" / "main_data.hdf5"
    content = path.read_bytes()
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
