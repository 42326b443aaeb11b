"""The commands `inspect`, `sample`, `view` and `plot` on datasets that other libraries have written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, open_dataset
from tests.command import answer, facts, fails
from tests.command import run_here as ostinato
from tests.datasets import builders
from tests.unit.viz.rollouts import store

if TYPE_CHECKING:
    from tests.datasets.builders import Model

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"
LENGTHS = (12, 5, 9)


def _lerobot(folder: Path) -> Model:
    pytest.importorskip("av")
    cameras = {"observation.images.top": (32, 48), "observation.images.wrist": (32, 32)}
    features = {**builders.EVERY_KIND, "observation.bytes": ("uint8", (3, 3, 16))}
    return builders.lerobot_v3(folder / "pusht", lengths=LENGTHS, cameras=cameras, features=features)


def _d4rl(folder: Path) -> Model:
    pytest.importorskip("h5py")
    return builders.d4rl_hdf5(folder / "halfcheetah.hdf5", lengths=LENGTHS, next_observations=True)


@pytest.mark.parametrize("make", [_lerobot, _d4rl])
def test_inspect_and_sample_report_what_the_dataset_holds(make, tmp_path):
    model = make(tmp_path)
    columns = {key if isinstance(key, str) else ".".join(key): value for key, value in model.columns.items()}
    found = answer("inspect", model.path)
    assert (found["rows"], found["episodes"]) == (sum(LENGTHS), len(LENGTHS))
    assert (found["shortest"], found["median"], found["longest"]) == (5, 9.0, 12)
    assert found["fps"] == model.fps
    assert sorted(found["cameras"]) == sorted(name for name in columns if "images" in name)
    fields = {field["name"]: field for field in found["fields"]}
    for name in fields.keys() & columns.keys():
        field, values = fields[name], columns[name]
        assert (field["shape"], field["rows"]) == (list(values.shape[1:]), sum(LENGTHS))
        if name in found["cameras"]:
            assert field["mean"] is None
        else:
            assert field["minimum"] == pytest.approx(float(values.min()))
            assert field["maximum"] == pytest.approx(float(values.max()))
            assert field["mean"] == pytest.approx(float(values.astype(np.float64).mean()), abs=1e-6)
    assert "action" in fields
    assert found["nbytes"] == sum(field["nbytes"] for field in found["fields"] if field["dtype"] != "text")
    files = [file for file in (model.path, *model.path.rglob("*")) if file.is_file()]
    assert found["file_bytes"] == sum(file.stat().st_size for file in files)
    quick = answer("inspect", "--quick", model.path)
    assert all(field["mean"] is None for field in quick["fields"])
    assert (quick["texts"], quick["rows"]) == ([], sum(LENGTHS))
    assert all(name in ostinato("inspect", model.path, COLUMNS="200").stdout for name in fields)
    found = answer("sample", model.path, "--num-samples", 7)
    assert (found["num_samples"], found["rows"], found["episodes"]) == (7, sum(LENGTHS), len(LENGTHS))
    actions, names = columns["action"], [field["name"] for field in found["fields"]]
    place = names.index("action")
    field = found["fields"][place]
    assert (field["shape"], field["rows"]) == (list(actions.shape[1:]), 7)
    assert actions.min() <= field["minimum"] <= field["mean"] <= field["maximum"] <= actions.max()
    for row in found["shown"]:
        values = actions[model.starts[row["episode"]] + row["step"]]
        shown = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", row["values"][place])]
        assert shown == pytest.approx(values.tolist(), rel=1e-3)
    assert answer("sample", model.path)["num_samples"] == 64
    done = ostinato("sample", model.path, "--num-samples", 4, COLUMNS="200")
    assert facts(done)["rows of the batch"] == "4"
    assert all(done.stdout.count(name) >= 2 for name in names), "statistics and rows"


def test_commands_and_options_for_other_data_are_refused(tmp_path):
    path, other = _d4rl(tmp_path).path, "directories of trajectories"
    fails(1, "ostinato doctor", "verify", path)
    fails(1, "give --format lerobot, minari, hdf5", "convert", path, tmp_path / "new")
    for command, *options in (
        ("sample", "--enable-cache"),
        ("sample", "--sample-window-size", 0),
        ("sample", "--allow-pickle"),
        ("inspect", "--allow-pickle"),
        ("plot", "--allow-pickle", "--output", tmp_path / "page.png"),
    ):
        fails(2, other, command, path, *options)
    assert not (tmp_path / "new").exists()
    (tmp_path / "notes.txt").write_text("nothing")
    for command in ("inspect", "sample", "view", "plot"):
        fails(1, "notes.txt is a file", command, tmp_path / "notes.txt")


def saved(path: Path, **fields: torch.Tensor) -> Path:
    """Save a buffer of 20 rows, in two episodes."""
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    row = torch.arange(20)
    after = {"obs": row.float() + 1, "reward": row.float(), "terminated": row % 10 == 9}
    rb.extend({"action": row.float(), "next": after, **fields})
    rb.dumps(path)
    return path


def test_convert_takes_checkpoints_and_says_what_is_missing(tmp_path):
    pytest.importorskip("av")
    source, new, other = (
        saved(tmp_path / "buffer", observation=torch.arange(20.0)),
        tmp_path / "new",
        tmp_path / "other",
    )
    fails(1, "give --fps", "convert", source, new, "--format", "lerobot")
    assert not new.exists()
    done = ostinato("convert", source, new, "--format", "lerobot", "--fps", 5, "--task", "count")
    assert (done.returncode, done.stderr) == (0, "")
    assert [facts(done)[name] for name in ("format", "rows", "episodes")] == ["lerobot", "20", "2"]
    written = open_dataset(new)
    assert written.fps == 5
    assert written.read("action").tolist() == list(range(20))
    assert set(written.read("task")) == {"count"}
    fails(1, "overwrite", "convert", source, new, "--format", "lerobot", "--fps", 5)
    for wrong, words in (
        (("--episodes", "a"), "must be numbers from 0 on"),
        (("--episodes", "2:"), "must be some of the episodes 0 to 1"),
        (("--episodes", "0,2"), "must be some of the episodes 0 to 1"),
        (("--ndim", 1), "cannot be used with --format lerobot"),
    ):
        fails(2, words, "convert", source, other, "--format", "lerobot", "--fps", 5, *wrong)
    file = max(source.glob("*.bin"))
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    fails(1, file.name, "convert", source, other, "--format", "lerobot", "--fps", 5)
    assert not other.exists()


def test_convert_chooses_renames_and_replaces(tmp_path):
    pytest.importorskip("h5py")
    pytest.importorskip("minari")
    pair = torch.arange(40.0).reshape(20, 2)
    source = saved(tmp_path / "buffer", obs=pair[:, 0].clone(), pair=pair)
    fields = "pair=observation,action,next.reward,next.terminated"
    for to, name in (("minari", "new-v0"), ("hdf5", "robomimic.hdf5")):
        how = ("--format", to) if to == "minari" else ()  # the suffix says hdf5
        done = ostinato("convert", source, tmp_path / name, *how, "--episodes", 1, "--fields", fields)
        assert (done.returncode, facts(done)["rows"]) == (0, "10"), done.stderr
        new = open_dataset(tmp_path / name)
        observation = "observation" if to == "minari" else ("observation", "state")  # robomimic nests it
        assert torch.equal(new.read(observation), pair[10:])
        assert new.read(("next", "terminated")).tolist() == [False] * 9 + [True]
        fails(1, "codec", "convert", source, tmp_path / "other", "--format", to, "--codec", "av1")
    target = tmp_path / "new.hdf5"
    arguments = ("convert", source, target, "--format", "hdf5", "--layout", "d4rl")
    fails(1, "name it with --fields", *arguments)
    assert ostinato(*arguments, "--fields", "obs=observation").returncode == 0
    new = open_dataset(target)
    assert torch.equal(new.read("observation"), pair[:, 0])
    assert torch.equal(new.read(("next", "observation")), torch.arange(20.0) + 1), "renamed as the field above it"
    assert torch.equal(new.read("pair"), pair), "kept, since no field was chosen without a new name"
    before = target.read_bytes()
    chosen = (*arguments, "--fields", "obs=observation,action,next.reward,next.terminated")
    fails(1, "give --overwrite", *chosen)
    assert target.read_bytes() == before
    assert ostinato(*chosen, "--overwrite").returncode == 0
    assert {("pair",), ("next", "obs")}.isdisjoint(open_dataset(target).schema.paths)
    for fields, words in (
        ("obs=observation,foo", "the fields are action, next.obs, next.reward, next.terminated, obs, pair"),
        ("obs=", "must be names of fields, or OLD=NEW"),
        ("obs=action", "gives the name action to obs and to action"),
    ):
        fails(2, words, *arguments, "--overwrite", "--fields", fields)
    folder = store(tmp_path / "all" / "a", [(3, 2)], images=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for output, status, words in (
        (folder, 2, "is the source"),
        (folder.parent, 2, "holds the source"),
        (tmp_path / "mine", 1, "is a directory of other files"),
    ):
        fails(status, words, "convert", folder, output, "--format", "pt", "--overwrite")
    assert answer("inspect", folder)["total_samples"] == 6
    for options in ((), ("--overwrite",)):
        assert ostinato("convert", folder, tmp_path / "pt", "--format", "pt", *options).returncode == 0
    fails(1, "overwrite", "convert", folder, tmp_path / "pt", "--format", "pt")


def test_inspect_and_doctor_agree_on_rows_that_cannot_be_sampled(tmp_path):
    pytest.importorskip("h5py")
    builders.d4rl_hdf5(tmp_path / "d4rl", lengths=(500, 500), next_observations=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.arange(6.0)})
    rb.delete(torch.tensor([1]))
    rb.dumps(tmp_path / "saved")
    for name, rows, stored, words in (
        ("d4rl", 999, 1000, "the file has no next_observations"),
        ("saved", 5, 6, "they were deleted or used up"),
    ):
        inspected, examined = answer("inspect", tmp_path / name), answer("doctor", tmp_path / name)
        for key in ("rows", "stored_rows", "episodes", "left_out_because"):
            assert inspected[key] == examined[key], key
        assert (inspected["rows"], inspected["stored_rows"]) == (rows, stored)
        for command in ("inspect", "doctor"):
            assert words in ostinato(command, tmp_path / name).stdout, command
        assert f"({stored:,} stored; 1 stored row cannot be sampled: " in ostinato("doctor", tmp_path / name).stdout


def test_checkpoints_and_the_trajectories_of_all_ranks_are_datasets_too(tmp_path):
    found = answer("sample", saved(tmp_path / "buffer", observation=torch.arange(20)), "--num-samples", 5)
    assert (found["rows"], found["num_samples"]) == (20, 5)
    found = answer("inspect", Path(__file__).parents[2] / "data" / "torchrl_0_14" / "tree")
    assert (found["format"], found["rows"]) == ("torchrl checkpoint", 4)
    assert any("episode" in text for text in found["assumptions"])
    for rank in range(2):
        store(tmp_path / "ranks" / f"rank_{rank}", [(3, 2), (4, 1)], images=False)
    found = answer("inspect", tmp_path / "ranks")
    assert (found["rows"], found["episodes"]) == (20, 6)
    page = tmp_path / "page.png"
    assert ostinato("plot", tmp_path / "ranks", "--output", page, "--episode", 5).returncode == 0
    assert page.read_bytes()[:8] == PNG
    fails(2, "there is no episode 9", "plot", tmp_path / "ranks", "--output", page, "--overwrite", "--episode", 9)
    one = tmp_path / "ranks" / "rank_0"
    fails(2, "--episode applies to datasets", "plot", one, "--output", page, "--overwrite", "--episode", 0)
