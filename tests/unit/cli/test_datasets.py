"""The commands `inspect`, `sample`, `view` and `plot` on datasets that other libraries have written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, open_dataset
from tests.command import run_here as ostinato
from tests.datasets import builders
from tests.unit.viz.rollouts import store

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

    from tests.datasets.builders import Model

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"
LENGTHS = (12, 5, 9)


def _lerobot(folder: Path) -> Model:
    pytest.importorskip("av")
    cameras = {"observation.images.top": (32, 48), "observation.images.wrist": (32, 32)}
    return builders.lerobot_v3(folder / "pusht", lengths=LENGTHS, cameras=cameras, features=builders.EVERY_KIND)


def _d4rl(folder: Path) -> Model:
    pytest.importorskip("h5py")
    return builders.d4rl_hdf5(folder / "halfcheetah.hdf5", lengths=LENGTHS, next_observations=True)


KINDS: dict[str, Callable[[Path], Model]] = {
    "lerobot": _lerobot,
    "d4rl": _d4rl,
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    """A dataset of flat fields with cameras and texts, and one of nested fields."""
    return KINDS[request.param](tmp_path)


def report(*arguments: object) -> dict[str, Any]:
    done = ostinato(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def columns(model: Model) -> dict[str, np.ndarray]:
    return {key if isinstance(key, str) else ".".join(key): value for key, value in model.columns.items()}


def test_inspect_reports_what_the_dataset_holds(model: Model) -> None:
    found = report("inspect", model.path)
    assert (found["rows"], found["episodes"]) == (sum(LENGTHS), len(LENGTHS))
    assert (found["shortest"], found["median"], found["longest"]) == (5, 9.0, 12)
    assert found["fps"] == model.fps
    fields = {field["name"]: field for field in found["fields"]}
    for name, values in columns(model).items():
        if name not in fields or values.dtype.kind not in "fiub":
            continue
        field = fields[name]
        assert (field["shape"], field["rows"]) == (list(values.shape[1:]), sum(LENGTHS))
        if name in found["cameras"]:
            assert field["mean"] is None
        else:
            assert field["minimum"] == pytest.approx(float(values.min()))
            assert field["maximum"] == pytest.approx(float(values.max()))
            assert field["mean"] == pytest.approx(float(values.astype(np.float64).mean()), abs=1e-6)
    assert {"action"} <= set(fields)
    assert found["nbytes"] == sum(field["nbytes"] for field in found["fields"] if field["dtype"] != "text")
    files = [model.path] if model.path.is_file() else [file for file in model.path.rglob("*") if file.is_file()]
    assert found["file_bytes"] == sum(file.stat().st_size for file in files)
    quick = report("inspect", "--quick", model.path)
    assert all(field["mean"] is None for field in quick["fields"])
    assert (quick["texts"], quick["rows"]) == ([], sum(LENGTHS))
    done = ostinato("inspect", model.path, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "26 rows, 3 episodes" in done.stdout
    assert "episodes of 5 to 12 rows, median 9" in done.stdout
    assert all(name in done.stdout for name in fields)


def test_sample_draws_rows_of_the_dataset(model: Model) -> None:
    found = report("sample", model.path, "--num-samples", 7)
    assert (found["num_samples"], found["rows"], found["episodes"]) == (7, sum(LENGTHS), len(LENGTHS))
    actions = columns(model)["action"]
    names = [field["name"] for field in found["fields"]]
    place = names.index("action")
    field = found["fields"][place]
    assert (field["shape"], field["rows"]) == (list(actions.shape[1:]), 7)
    assert actions.min() <= field["minimum"] <= field["mean"] <= field["maximum"] <= actions.max()
    starts = np.cumsum((0, *LENGTHS))
    for row in found["shown"]:
        values = actions[starts[row["episode"]] + row["step"]].reshape(-1)[:3]
        shown = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", row["values"][place])]
        assert shown == pytest.approx(values.tolist(), rel=1e-3)
    assert report("sample", model.path)["num_samples"] == 64
    done = ostinato("sample", model.path, "--num-samples", 4, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "one batch of 4 rows" in done.stdout
    assert all(done.stdout.count(name) >= 2 for name in names), "statistics and rows"
    assert re.search(r"episode \d, step \d", done.stdout)


def words_of(done: CompletedProcess[str]) -> str:
    """The message of an error, without its frame and its line breaks."""
    return " ".join(done.stderr.replace("│", "").split())


def test_view_and_plot_write_pictures(tmp_path: Path) -> None:
    pytest.importorskip("av")
    model = _lerobot(tmp_path)
    output = tmp_path / "page.png"
    done = ostinato("plot", model.path, "--output", output, "--episode", 1)
    assert (done.returncode, done.stdout) == (0, f"written: {output}\n"), done.stderr
    assert output.read_bytes()[:8] == PNG
    assert ostinato("plot", model.path, "--output", output).returncode == 1, "it exists"
    assert ostinato("plot", model.path, "--output", output, "--overwrite", "--episode", 9).returncode == 2
    output = tmp_path / "one.png"
    options = ("--save-image", "--no-display", "--output", output)
    assert ostinato("view", model.path, *options, "--episode", 2, "--step", 8).returncode == 0
    assert output.read_bytes()[:8] == PNG
    first = output.read_bytes()
    assert ostinato("view", model.path, *options, "--episode", 1, "--overwrite").returncode == 0
    assert output.read_bytes() != first
    for wrong, words in (
        (("--step", 12), "must be below 12 and 1"),
        (("--episode", 3), "there is no episode 3: ids are 0 to 2, 3 in all"),
        (("--camera", "left"), "has no observation 'left'"),
        (("--allow-pickle",), "--allow-pickle applies to directories of trajectories"),
    ):
        done = ostinato("view", model.path, *options, "--overwrite", *wrong)
        assert (done.returncode, words in words_of(done)) == (2, True), words


def test_commands_and_options_for_other_data_are_refused(tmp_path: Path) -> None:
    path, other = _d4rl(tmp_path).path, "directories of trajectories"
    for command, status, words in (
        (("verify", path), 1, "ostinato doctor"),
        (("convert", path, tmp_path / "new"), 1, "give --format lerobot, minari, hdf5"),
        (("sample", path, "--enable-cache"), 2, other),
        (("sample", path, "--sample-window-size", 0), 2, other),
        (("sample", path, "--allow-pickle"), 2, other),
        (("inspect", path, "--allow-pickle"), 2, other),
        (("plot", path, "--allow-pickle", "--output", tmp_path / "page.png"), 2, other),
    ):
        done = ostinato(*command)
        assert (done.returncode, done.stdout, words in words_of(done)) == (status, "", True), command
    assert not (tmp_path / "new").exists()


def test_convert_writes_episodes_as_a_lerobot_dataset(tmp_path: Path) -> None:
    pytest.importorskip("av")
    model = _lerobot(tmp_path)
    found = report(
        "convert", model.path, tmp_path / "new", "--format", "lerobot", "--episodes", "2,0", "--images", "png"
    )
    assert (found["format"], found["rows"], found["episodes"]) == ("lerobot", 21, 2)
    old, new = open_dataset(model.path), open_dataset(tmp_path / "new")
    rows = torch.tensor([*range(17, 26), *range(12)])
    for key in ("action", "observation.state", "observation.images.wrist", "next.success"):
        assert torch.equal(new.read(key), old.read(rows)[key]), key
    assert new.read("task") == old.read(rows)["task"]


def saved(path: Path, **fields: torch.Tensor) -> Path:
    """Save a buffer of 20 rows, in two episodes."""
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    row = torch.arange(20)
    after = {"obs": row.float() + 1, "reward": row.float(), "terminated": row % 10 == 9}
    rb.extend({"action": row.float(), "next": after, **fields})
    rb.dumps(path)
    return path


def test_convert_takes_checkpoints_and_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("av")
    source = saved(tmp_path / "buffer", observation=torch.arange(20.0))
    arguments = ("convert", source, tmp_path / "new", "--format", "lerobot")
    done = ostinato(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert "give --fps" in done.stderr
    assert not (tmp_path / "new").exists()
    done = ostinato(*arguments, "--fps", 5, "--task", "count")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("20 rows, 2 episodes as lerobot in ")
    new = open_dataset(tmp_path / "new")
    assert new.fps == 5
    assert new.read("action").tolist() == list(range(20))
    assert set(new.read("task")) == {"count"}
    assert ostinato(*arguments, "--fps", 5).returncode == 1, "it exists"
    for wrong, words in (
        (("--episodes", "a"), "must be numbers from 0 on"),
        (("--episodes", "2:"), "must be some of the episodes 0 to 1"),
        (("--episodes", "0,2"), "must be some of the episodes 0 to 1"),
        (("--ndim", 1), "do not apply to --format lerobot"),
    ):
        done = ostinato("convert", source, tmp_path / "other", "--format", "lerobot", "--fps", 5, *wrong)
        assert (done.returncode, done.stdout, words in words_of(done)) == (2, "", True), words
    done = ostinato("convert", source, tmp_path / "other", "--fps", 5)
    assert (done.returncode, "--fps applies to --format lerobot, minari, hdf5" in words_of(done)) == (2, True)
    file = max(source.glob("*.bin"))
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    done = ostinato("convert", source, tmp_path / "other", "--format", "lerobot", "--fps", 5)
    assert (done.returncode, file.name in done.stderr) == (1, True), "checksums are compared first"
    assert not (tmp_path / "other").exists()


def test_convert_writes_minari_and_robomimic(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("minari")
    pair = torch.arange(40.0).reshape(20, 2)
    source = saved(tmp_path / "buffer", obs=pair[:, 0].clone(), pair=pair)
    for to, name in (("minari", "new-v0"), ("hdf5", "new.hdf5")):
        fields = "pair=observation,action,next.reward,next.terminated"
        done = ostinato("convert", source, tmp_path / name, "--format", to, "--episodes", 1, "--fields", fields)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"10 rows, 1 episode as {to} in {tmp_path / name}")
        new = open_dataset(tmp_path / name)
        observation = "observation" if to == "minari" else ("observation", "state")  # robomimic nests it
        assert torch.equal(new.read(observation), pair[10:])
        assert new.read(("next", "terminated")).tolist() == [False] * 9 + [True]
        done = ostinato("convert", source, tmp_path / "other", "--format", to, "--codec", "av1")
        assert (done.returncode, done.stdout, "codec" in done.stderr) == (1, "", True)
    assert not (tmp_path / "other").exists()


def test_convert_renames_fields_and_replaces_what_it_is_told_to(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    row = torch.arange(20)
    source = saved(tmp_path / "buffer", obs=row.float(), extra=row)
    arguments = ("convert", source, tmp_path / "new.hdf5", "--format", "hdf5", "--layout", "d4rl")
    done = ostinato(*arguments)
    assert (done.returncode, "name it with --fields" in done.stderr) == (1, True)
    assert ostinato(*arguments, "--fields", "obs=observation").returncode == 0
    new = open_dataset(tmp_path / "new.hdf5")
    assert torch.equal(new.read("observation"), row.float())
    assert torch.equal(new.read(("next", "observation")), row.float() + 1), "renamed as the field above it"
    assert torch.equal(new.read("extra"), row), "kept, since no field was chosen without a new name"
    before = (tmp_path / "new.hdf5").read_bytes()
    chosen = (*arguments, "--fields", "obs=observation,action,next.reward,next.terminated")
    done = ostinato(*chosen)
    assert (done.returncode, (tmp_path / "new.hdf5").read_bytes()) == (1, before)
    assert "give --overwrite" in done.stderr
    assert ostinato(*chosen, "--overwrite").returncode == 0
    assert {("extra",), ("next", "obs")}.isdisjoint(open_dataset(tmp_path / "new.hdf5").schema.paths)
    for fields, words in (
        ("obs=observation,foo", "the fields are action, next.obs, next.reward, next.terminated, obs, extra"),
        ("obs=", "must be names of fields, or OLD=NEW"),
        ("obs=action", "gives the name action to obs and to action"),
    ):
        done = ostinato(*arguments, "--overwrite", "--fields", fields)
        assert (done.returncode, words in words_of(done)) == (2, True), fields


def test_convert_never_replaces_its_source_or_files_of_others(tmp_path: Path) -> None:
    store(tmp_path / "all" / "a", [(3, 2)], images=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for output, status, words in (
        (tmp_path / "all" / "a", 2, "is the source"),
        (tmp_path / "all", 2, "holds the source"),
        (tmp_path / "mine", 1, "is a directory of other files"),
    ):
        done = ostinato("convert", tmp_path / "all" / "a", output, "--format", "pt", "--overwrite")
        assert (done.returncode, words in words_of(done)) == (status, True)
    assert report("inspect", tmp_path / "all" / "a")["total_samples"] == 6
    first = tmp_path / "first"
    for form in ("pt", "safetensors"):
        source = first if form == "safetensors" else tmp_path / "all" / "a"
        target = tmp_path / "second" if form == "safetensors" else first
        assert ostinato("convert", source, target, "--format", form).returncode == 0
    assert ostinato("convert", first, tmp_path / "second", "--overwrite").returncode == 0
    assert ostinato("convert", first, tmp_path / "second").returncode == 1


def test_inspect_and_doctor_agree_on_rows_that_cannot_be_sampled(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    path = builders.d4rl_hdf5(tmp_path / "d4rl.hdf5", lengths=(500, 500), next_observations=False).path
    inspected, examined = report("inspect", path), report("doctor", path)
    for key in ("rows", "stored_rows", "episodes", "left_out_because"):
        assert inspected[key] == examined[key], key
    assert inspected["rows"] == len(open_dataset(path)) == 999
    assert inspected["stored_rows"] == 1_000
    words = "999 rows, 2 episodes (1,000 stored; 1 stored row cannot be sampled: the file has no next_observations"
    for command in ("inspect", "doctor"):
        assert words in ostinato(command, path).stdout, command


def test_inspect_and_doctor_agree_on_deleted_rows(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.arange(6.0)})
    rb.delete(torch.tensor([1]))
    rb.dumps(tmp_path / "saved")
    path = tmp_path / "saved"
    inspected, examined = report("inspect", path), report("doctor", path)
    for key, value in (("rows", 5), ("stored_rows", 6), ("left_out_because", "they were deleted or used up")):
        assert inspected[key] == examined[key] == value, key
    for command in ("inspect", "doctor"):
        assert "1 stored row cannot be sampled" in ostinato(command, path).stdout, command


def test_lines_and_names_are_broken_between_words(tmp_path: Path) -> None:
    pytest.importorskip("minari")
    path = builders.minari_dataset(tmp_path / "door-v0", lengths=LENGTHS, observation="dict").path
    done = ostinato("inspect", path, COLUMNS="80")
    lines = [line for line in done.stdout.splitlines() if not line.startswith(str(path))]
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("next.observation.arm.  ") for line in lines)
    assert "  position" in (line.rstrip() for line in lines)
    wide, narrow = (ostinato("doctor", path, COLUMNS=columns).stdout for columns in ("500", "40"))
    assert wide.split() == narrow.split(), "no word is cut"
    assert len(narrow.splitlines()) >= len(wide.splitlines())


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("av")
    model = _lerobot(tmp_path)
    video = min(model.path.rglob("*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 3])
    assert ostinato("inspect", model.path).returncode == 0, "it reads no pictures"
    page = tmp_path / "page.png"
    for command in (("sample", model.path), ("plot", model.path, "--output", page)):
        done = ostinato(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert video.name in done.stderr
        assert done.stderr.count("\n") == 1
    assert not page.exists()
    options = ("--save-image", "--no-display", "--output", page)
    done = ostinato("view", model.path, *options)
    assert (done.returncode, page.exists()) == (1, True), "the picture shows the problem"
    assert video.name in done.stderr
    table = min((model.path / "data").rglob("*.parquet"))
    table.write_bytes(table.read_bytes()[:100])
    done = ostinato("inspect", model.path)
    assert (done.returncode, done.stdout) == (1, "")
    assert table.name in done.stderr


def test_checkpoints_and_the_trajectories_of_all_ranks_are_datasets_too(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    row = torch.arange(30)
    rb.extend({"observation": row, "action": row % 3, "next": {"reward": row.float(), "done": row % 6 == 5}})
    rb.dumps(tmp_path / "buffer")
    found = report("sample", tmp_path / "buffer", "--num-samples", 5)
    assert (found["rows"], found["num_samples"]) == (20, 5)
    for rank in range(2):
        store(tmp_path / "ranks" / f"rank_{rank}", [(3, 2), (4, 1)], images=False)
    found = report("inspect", tmp_path / "ranks")
    assert (found["rows"], found["episodes"]) == (20, 6)
    page = tmp_path / "page.png"
    assert ostinato("plot", tmp_path / "ranks", "--output", page, "--episode", 5).returncode == 0
    done = ostinato("plot", tmp_path / "ranks" / "rank_0", "--output", page, "--overwrite", "--episode", 0)
    assert (done.returncode, "--episode applies to datasets" in words_of(done)) == (2, True)


def test_a_torchrl_checkpoint_is_inspected_without_conversion() -> None:
    found = report("inspect", Path(__file__).parents[2] / "data" / "torchrl_0_14" / "tree")
    assert (found["format"], found["rows"]) == ("torchrl checkpoint", 4)
    assert any("episode" in text for text in found["assumptions"])


def test_files_of_an_unknown_format_are_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    for command in (("inspect",), ("sample",), ("view",), ("plot", "--output", tmp_path / "page.png")):
        done = ostinato(*command, tmp_path / "notes.txt")
        assert (done.returncode, done.stdout) == (1, "")
        assert "notes.txt is a file" in done.stderr
        assert "Minari" in done.stderr
        assert done.stderr.count("\n") == 1
