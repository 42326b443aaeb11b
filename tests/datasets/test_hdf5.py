"""D4RL and robomimic files are read row by row as written; ends of episodes are those that the files tell."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("h5py")

import h5py

from ostinato import open_dataset
from ostinato.datasets.cache import BlockCache
from ostinato.datasets.columns import BlockColumn
from ostinato.datasets.hdf5 import Hdf5File, Hdf5Source
from ostinato.errors import DamagedFileError, KindError, OptionError, UsageError

from .builders import Model, d4rl_hdf5, last_rows, robomimic_hdf5
from .samples import by_path, check_processes, check_rows, flat, not_opened


def kept(model: Model, *, following: bool) -> tuple[dict[Any, Any], list[int]]:
    """Leave out the last rows of episodes that were cut off, if the model does not know the observation after them."""
    last = last_rows(model.lengths)
    done = model.columns["next", "done"]
    stops = model.columns.get(("next", "terminated"), done)
    keep = np.ones(len(last), bool) if following else ~last | stops
    columns = {key: values[keep] for key, values in (model.columns | model.infos).items()}
    counts = [int(part.sum()) for part in np.split(keep, model.ends[:-1])]
    lengths = [count for count in counts if count]
    columns["next", "terminated"] = stops[keep]
    columns["next", "truncated"] = last_rows(lengths) & ~stops[keep]
    columns["next", "done"] = last_rows(lengths)
    if not following:  # the observation after the last row is its own
        for key in [key for key in columns if key[:2] == ("next", "observation")]:
            now = columns[key[1:] if len(key) > 2 else "observation"]
            columns[key] = np.where(last[keep].reshape(-1, *[1] * (now.ndim - 1)), now, columns[key])
    return columns, lengths


# -- D4RL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "following", "timeouts"),
    [
        ((6, 4, 8), True, True),
        ((6, 4, 8), False, False),
        ((3, 1, 1, 5), False, True),
        ((3, 1, 1, 5), True, False),
        ((1,), True, True),
    ],
)
def test_d4rl_rows_are_those_of_the_file(tmp_path, lengths, following, timeouts):
    terminated = [0] if len(lengths) < 3 else [0, 2]
    model = d4rl_hdf5(
        tmp_path / "a.hdf5", lengths=lengths, terminated=terminated, next_observations=following, timeouts=timeouts
    )
    found, counts = kept(model, following=following)
    columns = {("info", key[6:]) if key in model.infos else key: values for key, values in found.items()}
    dataset = open_dataset(model.path)
    check_rows(dataset, columns, counts)
    assert flat(dataset[:]).keys() == by_path(columns).keys()
    assert dataset.metadata == {"algorithm": "SAC", "iteration": 100, "policy/fc0/weight": [[1.0] * 3] * 2}
    said = " ".join(dataset.assumptions)
    assert ("no timeouts" in said) == (not timeouts)
    assert ("left out" in said) == (sum(model.lengths) > sum(counts))
    assert ("its own observation" in said) == (not following)
    check_processes(open_dataset(model.path, max_bytes=100), columns)


def test_d4rl_ends_that_no_flag_tells(tmp_path):
    model = d4rl_hdf5(tmp_path / "a.hdf5", lengths=(5, 3, 5, 5, 2), terminated=(1, 4), timeouts=False)
    dataset = open_dataset(model.path, max_episode_steps=5)
    assert dataset.episode_lengths.tolist() == [4, 3, 4, 4, 2]
    assert "after 5 steps, as max_episode_steps says" in dataset.assumptions[0]
    not_opened(model.path, OptionError, "positive integer", max_episode_steps=0)
    not_opened(
        model.path, OptionError, r"filter_key is for robomimic, got filter_key='train' .* D4RL", filter_key="train"
    )
    whole = d4rl_hdf5(tmp_path / "b.hdf5", terminated=(0, 1))
    not_opened(whole.path, OptionError, "has timeouts, which say where", max_episode_steps=5)
    with h5py.File(whole.path, "a") as file:
        file["timeouts"][...] = False
    dataset = open_dataset(whole.path)
    assert dataset.episode_lengths.tolist() == [6, 4, 7]
    assert "after the last flag (8 rows)" in dataset.assumptions[0]
    assert dataset["next", "truncated"].nonzero().flatten().tolist() == [16]
    not_opened({"a": torch.zeros(3)}, OptionError, "mapping of arrays", episode_ends=[3], max_episode_steps=3)


def test_other_arrays_are_kept_or_named(tmp_path):
    model = d4rl_hdf5(tmp_path / "a.hdf5", next_observations=True)
    with h5py.File(model.path, "a") as file:
        file["qpos"] = np.arange(18)[:, None]
        file["notes"] = [b"x"] * 18
        file["start"] = np.zeros(3)
        file["extra/deep"] = np.arange(18, dtype=">i4")
    dataset = open_dataset(model.path)
    check_rows(dataset, {"qpos": np.arange(18)[:, None], ("extra", "deep"): np.arange(18, dtype="i4")}, model.lengths)
    assert [line.split()[0] for line in dataset.assumptions] == ["notes", "start"]
    model = robomimic_hdf5(tmp_path / "b.hdf5")
    with h5py.File(model.path, "a") as file:
        for n, length in enumerate(model.lengths):
            file[f"data/demo_{n}/datagen_info/target"] = np.full((length, 2), n)
            file[f"data/demo_{n}/source"] = b"human"
        file["data/demo_1/late"] = np.zeros(model.lengths[1])
    dataset = open_dataset(model.path)
    target = np.repeat(np.arange(3), model.lengths)[:, None].repeat(2, 1)
    check_rows(dataset, {("datagen_info", "target"): target}, model.lengths)
    assert [line.split()[0] for line in dataset.assumptions[:2]] == ["late", "source"]


def test_hdf5_objects_are_opened(tmp_path):
    model = d4rl_hdf5(tmp_path / "a.hdf5", next_observations=True)
    with h5py.File(model.path) as file:
        dataset = open_dataset(file)
        inner = file["infos"]
    check_rows(dataset, model.columns, model.lengths)
    not_opened(inner, UsageError, "closed")
    with h5py.File(tmp_path / "b.hdf5", "w") as outer:
        with h5py.File(model.path) as file:
            for name in file:
                file.copy(name, outer.require_group("deep/er"))
        not_opened(outer, UsageError, "open with mode")
    with h5py.File(tmp_path / "b.hdf5") as outer:
        check_rows(open_dataset(outer["deep/er"]), model.columns, model.lengths)
        not_opened(outer, KindError, "not recognized")
    with h5py.File("memory", "w", driver="core", backing_store=False) as file, pytest.raises(UsageError, match="disk"):
        open_dataset(file)


@pytest.mark.parametrize(
    ("make", "inside", "table"),
    [
        (
            d4rl_hdf5,
            "",
            [
                ("rewards", None, "a.hdf5: the file has no rewards"),
                ("observations", None, "a.hdf5: the file has no observations"),
                ("actions", np.zeros((17, 2)), r"a.hdf5, actions has the shape \[17, 2\].*18 rows"),
                ("terminals", np.repeat([0, np.nan], [4, 14]), "a.hdf5, terminals, row 4: a flag must be 0 or 1"),
                ("terminals", np.zeros((18, 2), bool), "one flag per row"),
                ("infos/qpos", np.zeros((17, 2)), r"a.hdf5, infos/qpos has 17 rows, but observations has 18"),
                ("observations", np.float32(3), "observations is one value"),
                ("observations", np.zeros((0, 3)), "has no rows"),
                ("rewards", [b"x"] * 18, "rewards.*tensors cannot have"),
            ],
        ),
        (
            robomimic_hdf5,
            "data/demo_1/",
            [
                ("actions", None, "data/demo_1: it has no actions"),
                ("actions", np.zeros((0, 3)), "data/demo_1: it has no actions: it has no rows"),
                ("actions", np.zeros((5, 3)), "data/demo_1: it has 5 actions, but its attribute num_samples says 4"),
                ("rewards", np.zeros(3), "data/demo_1: rewards has 3 rows, but the demonstration has 4 actions"),
                ("obs/object", np.zeros((5, 2)), "data/demo_1: obs/object has 5 rows"),
                ("obs/object", None, "data/demo_1: obs/object is missing"),
                ("obs/object", np.zeros((4, 3)), r"obs/object: rows are float64\[3\], those of data/demo_0"),
                ("next_obs", None, "data/demo_1: next_obs/object|next_obs/robot0_eef_pos is missing"),
                ("dones", np.array([0, 0, np.nan, 1]), "data/demo_1/dones, row 2: a flag"),
            ],
        ),
    ],
)
def test_damaged_files_are_named(make, inside, table, tmp_path):
    """Each array that is missing (None) or has other values is an error with words that name it."""
    path = make(tmp_path / "a.hdf5").path
    content = path.read_bytes()
    for name, values, message in table:
        with h5py.File(path, "a") as file:
            del file[inside + name]
            if values is not None:
                file[inside + name] = values
        with pytest.raises((DamagedFileError, ValueError), match=message):
            open_dataset(path)[6]
        path.write_bytes(content)
    with h5py.File(path, "a") as file:  # objects are never loaded
        del file[f"{inside}actions"]
        actions = file.create_dataset(f"{inside}actions", 18 if not inside else 4, h5py.vlen_dtype(np.uint8))
        actions[0] = np.frombuffer(b"cos\nsystem\n(S'false'\ntR.", np.uint8)
    with pytest.raises(ValueError, match="object"):
        open_dataset(path)[6]


def test_files_that_were_cut_short_or_changed_are_named(tmp_path):
    model = d4rl_hdf5(tmp_path / "a.hdf5", lengths=(600,), next_observations=True)
    content = model.path.read_bytes()
    with h5py.File(model.path) as file:
        place = file["observations"].id.get_chunk_info(0).byte_offset
    model.path.write_bytes(content[:place] + bytes(range(200)) + content[place + 200 :])
    with pytest.raises(DamagedFileError, match=r"a.hdf5, observations cannot be read, rows \["):
        open_dataset(model.path)["observation"]
    for share in (0.2, 0.7, 0.99):
        model.path.write_bytes(content[: int(len(content) * share)])
        not_opened(model.path, DamagedFileError, r"a.hdf5 is not a whole HDF5 file: .*truncated")
    model.path.write_bytes(b"text")
    not_opened(model.path, KindError, "not recognized")


@pytest.mark.parametrize("how", ["plain", "user block", "chunks", "external"])
def test_rows_are_read_at_their_places_or_in_blocks(tmp_path, how):
    lengths = [40, 9, 25]
    values = np.random.default_rng(0).standard_normal((sum(lengths), 3, 2))
    path = tmp_path / "a.hdf5"
    options: dict[str, Any] = {"chunks": (7, 3, 2)} if how == "chunks" else {}
    with h5py.File(path, "w", userblock_size=512 if how == "user block" else 0) as file:
        for n, part in enumerate(np.split(values, np.cumsum(lengths)[:-1])):
            if how == "external":
                options["external"] = [(str(tmp_path / f"{n}.raw"), 0, h5py.h5f.UNLIMITED)]
            file.create_dataset(f"demo_{n}/x", data=part, **options)
    source = Hdf5Source(Hdf5File(path), [f"demo_{n}" for n in range(3)], "x", np.array(lengths))
    rows = torch.randint(0, sum(lengths), (200,))
    found = source.read_rows(rows)
    assert (found is not None) == (how in {"plain", "user block"})
    if found is not None:
        np.testing.assert_array_equal(found.numpy(), values[rows])
    column = BlockColumn(source, BlockCache(1000))
    np.testing.assert_array_equal(column.start(rows)().numpy(), values[rows])
    if how == "plain":
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(DamagedFileError, match=r"a.hdf5, demo_\d/x: the file ends before row"):
            column.start(torch.arange(sum(lengths)))()


# -- robomimic ---------------------------------------------------------------------------------------------------------

ELEVEN = (3, 1, 2, 4, 1, 2, 3, 5, 2, 1, 4, 6)


@pytest.mark.parametrize(("following", "cameras"), [(True, {}), (False, {"front": (12, 16)})])
def test_robomimic_rows_are_those_of_the_file(tmp_path, following, cameras):
    model = robomimic_hdf5(tmp_path / "a.hdf5", lengths=ELEVEN, next_observations=following, cameras=cameras)
    columns, counts = kept(model, following=following)
    dataset = open_dataset(model.path)
    check_rows(dataset, columns, counts)
    check_processes(open_dataset(model.path, max_bytes=3000), columns)
    assert counts == list(ELEVEN)
    assert dataset.metadata["env_args"]["env_name"] == "Lift"
    assert dataset.metadata["filter_keys"] == ["train", "valid"]
    assert dataset.metadata["demos"][:3] == ["demo_0", "demo_1", "demo_2"]
    assert dataset.assumptions[0].startswith("dones are read as terminations")


def test_robomimic_filter_keys_choose_demonstrations(tmp_path):
    model = robomimic_hdf5(tmp_path / "a.hdf5", lengths=ELEVEN)
    train = open_dataset(model.path, filter_key="train")
    rows = slice(ELEVEN[0], None)
    check_rows(train, {key: values[rows] for key, values in model.columns.items()}, list(ELEVEN[1:]))
    assert open_dataset(model.path, filter_key="valid").episode_lengths.tolist() == [3]
    assert train.fingerprint != open_dataset(model.path, episodes=slice(1, None)).fingerprint
    not_opened(model.path, OptionError, "no filter key 'test': it has train, valid", filter_key="test")
    not_opened(model.path, OptionError, "max_episode_steps is for D4RL", max_episode_steps=3)
    bare = robomimic_hdf5(tmp_path / "b.hdf5", masks=False)
    not_opened(bare.path, OptionError, "it has none", filter_key="train")
    train.close()
    with h5py.File(model.path, "a") as file:
        del file["data/demo_4"]
    not_opened(model.path, DamagedFileError, "mask/train: it names demo_4, which is missing", filter_key="train")


def test_robomimic_demonstrations_that_are_not_done_were_cut_off(tmp_path):
    model = robomimic_hdf5(tmp_path / "a.hdf5", lengths=(4, 3, 5), next_observations=False)
    with h5py.File(model.path, "a") as file:
        file["data/demo_1/dones"][-1] = 0
        file["data/demo_2/dones"][1] = 1
    dataset = open_dataset(model.path)
    assert dataset.episode_lengths.tolist() == [4, 2, 5]
    assert dataset["next", "truncated"].nonzero().flatten().tolist() == [5]
    assert dataset["next", "terminated"].nonzero().flatten().tolist() == [3, 7, 10]
    said = " ".join(dataset.assumptions)
    assert "before the last one of their demonstration are done, too (1 row)" in said
    assert "each episode that was cut off is left out (1 row)" in said
    dataset.close()
    with h5py.File(model.path, "a") as file:
        for n in range(3):
            del file[f"data/demo_{n}/dones"]
    dataset = open_dataset(model.path)
    assert dataset["next", "truncated"].nonzero().flatten().tolist() == [2, 4, 8]
    assert not dataset["next", "terminated"].any()
    assert "no dones" in dataset.assumptions[0]
