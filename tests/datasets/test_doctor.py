"""The doctor: silent about clean datasets, and every planted fault is found at its place."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ostinato import export
from ostinato.datasets.checks import CHECKS
from ostinato.errors import CheckpointNotFoundError, KindError
from ostinato.tools import examine

from ..command import answer, run_here
from . import builders
from .clean import ARM, CLEAN, TOP, arm, fill
from .faults import FAULTS

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.mark.parametrize("name", CLEAN)
def test_clean_datasets_raise_no_alarm(name, tmp_path):
    path = CLEAN[name](tmp_path / "data")
    report = examine(path, full=True)
    assert report.ok
    assert [str(f) for f in report.findings if f.severity != "note"] == []
    assert report.episodes
    assert report.stored_rows == sum(report.profile.lengths)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, tmp_path):
    fault = FAULTS[name]
    report = examine(fault.write(tmp_path / "data"))
    found = [f for f in report.findings if f.check == fault.check and f.severity == fault.severity]
    places = [{key: getattr(f, key) for key in fault.place} for f in found]
    assert fault.place in places, str(report)
    alarms = {f.check for f in report.findings if f.severity != "note"}
    assert alarms <= {fault.check, *fault.consequences}, str(report)


def test_every_check_has_a_planted_fault_and_a_row_in_the_documentation():
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), flags=re.MULTILINE))
    assert documented == set(CHECKS)
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS)


def test_a_report_is_printed_and_written_as_json(tmp_path):
    report = examine(FAULTS["an_action_jumps"].write(tmp_path / "data"))
    assert report.ok
    assert report.counts["warning"] == 1
    finding = next(f for f in report.findings if f.severity == "warning")
    assert finding.place == "episode 2, frame 20, field action"
    assert f"warning: value-jump [{finding.place}]" in str(report)
    assert finding.advice in str(report)
    plain = json.loads(report.to_json())
    assert plain["ok"]
    assert plain["counts"] == report.counts
    assert [f["check"] for f in plain["findings"]] == [f.check for f in report.findings]
    values = arm([10] * 50)
    values["action"][::10] = np.nan
    report = examine({**values, "episode_ends": np.arange(10, 501, 10)})
    assert len([f for f in report.findings if f.check == "value-nan"]) == 20
    assert report.omitted == {"value-nan": 30}
    assert "30 more of value-nan" in str(report)


def test_what_datasets_hold_decides_what_is_said(tmp_path):
    export({"action": np.random.default_rng(0).normal(size=(20, 2)), "episode_ends": [20]}, tmp_path / "data", fps=10)
    notes = {(finding.check, finding.severity) for finding in examine(tmp_path / "data").findings}
    assert ("task-text", "note") in notes, "one task without text"
    path = builders.lerobot_v3(tmp_path / "camera", lengths=[30, 20, 20], cameras={TOP: (32, 32)}).path
    assert examine(path).decoded.startswith("36 of 70 pictures decoded")
    assert examine(path, full=True).decoded == "70 of 70 pictures decoded"
    features = {"observation.grid": ("float32", (2, 3)), **builders.STATE}
    model = builders.lerobot_v3(tmp_path / "grid", features=features)
    matrix = model.columns["observation.grid"].reshape(-1, 3)
    stats = model.path / "meta/stats.json"
    for shift, verdict in ((0.0, "no findings"), (0.5, "0 errors, 1 warning, 0 notes")):
        values = {kind: getattr(matrix, kind)(0) + shift * (kind == "mean") for kind in ("min", "max", "mean", "std")}
        joined = {kind: value.tolist() for kind, value in values.items()}  # LeRobot joins the rows of a matrix
        stats.write_text(json.dumps({**json.loads(stats.read_text()), "observation.grid": joined}))
        assert examine(model.path).verdict == verdict
    path = builders.minari_dataset(tmp_path / "minari").path
    with h5py.File(path / "data/main_data.hdf5", "r+") as file:
        file["episode_1/rewards"].resize((3_000_000_000,))
    found = [f for f in examine(path).findings if f.check == "file-unreadable"]
    assert [(f.episode, "24,000,000,000 bytes" in f.message) for f in found] == [(1, True)], "it is not read"


def test_what_is_no_dataset_raises(tmp_path):
    with pytest.raises(KindError):
        examine([])  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError):
        examine(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("no data")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(KindError):
            examine(path)


def test_a_dataset_is_found_by_each_path_that_opens_it(tmp_path):
    arm_path, grid = builders.lerobot_v3(tmp_path / "arm").path, builders.minari_dataset(tmp_path / "grid").path
    for path in (arm_path / "meta", arm_path / "meta/info.json", grid / "data", grid / "data/main_data.hdf5"):
        report = examine(path)
        assert (report.ok, report.episodes, report.path) == (True, 3, str(path))
        assert run_here("inspect", path).returncode == 0


def test_the_command_prints_findings_and_sets_the_exit_status(tmp_path):
    clean = CLEAN["v3-two-cameras"](tmp_path / "clean")
    broken = FAULTS["a_table_is_cut"].write(tmp_path / "broken")
    odd = FAULTS["an_action_jumps"].write(tmp_path / "odd")
    for status, words, *arguments in (
        (0, "no findings", clean),
        (1, "error: file-unreadable in data/chunk-000/file-000.parquet, episode 0", broken),
        (0, next(f.advice for f in examine(odd).findings if f.severity == "warning"), odd),
        (1, "", odd, "--strict"),
        (2, "", tmp_path),
        (2, "", tmp_path / "none"),
    ):
        done = run_here("doctor", *arguments, COLUMNS="500")
        assert (done.returncode, words in done.stdout, done.stderr == "") == (status, True, status < 2), arguments
    assert "does not exist" in done.stderr
    assert answer("doctor", odd)["counts"]["warning"] == 1


def test_the_command_draws_a_page(tmp_path, monkeypatch):
    drawn = pytest.importorskip("matplotlib.figure").Figure
    path = CLEAN["v3-two-cameras"](tmp_path / "small")
    target = tmp_path / "page.png"
    assert run_here("doctor", path, "--output", target).returncode == 0
    assert target.read_bytes()[:4] == b"\x89PNG"
    done = run_here("doctor", path, "--output", target)
    assert done.returncode == 1
    assert "--overwrite" in done.stderr
    assert run_here("doctor", path, "--output", tmp_path / "page.pdf").returncode == 2
    camera, lengths = "w" * 40, [30, 20]
    path = builders.lerobot_v3(
        tmp_path / "wide", lengths=lengths, images={f"observation.images.{camera}": (16, 16)}, features=ARM
    ).path
    values = arm(lengths)
    values["action"][:, 3] *= 1e4
    values["observation.state"] *= np.array([200] + [10] * 7, np.float32)
    fill(path, values)
    figures: list[Any] = []
    monkeypatch.setattr(drawn, "savefig", lambda figure, *_, **__: figures.append(figure))
    assert run_here("doctor", path, "--output", tmp_path, "--overwrite").returncode == 0
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes}
    assert panels["Range of action"].get_yscale() == "symlog", "one dimension is far larger than the others"
    assert panels["Range of observation.state"].get_yscale() == "linear", "one is larger, but not far"
    assert f"Brightness of {camera[:29]}\N{HORIZONTAL ELLIPSIS}" in panels, "long names are shortened"


@pytest.mark.parametrize("name", ["v3-two-cameras", "minari", "minari-arrow", "d4rl", "zarr-2"])
def test_files_with_random_damage_never_raise(name, tmp_path):
    clean = CLEAN[name](tmp_path / "clean")
    generator = random.Random(name)
    for trial in range(5):
        path = tmp_path / f"damaged{trial}{clean.suffix}"
        shutil.copytree(clean, path) if clean.is_dir() else shutil.copy(clean, path)
        file = generator.choice([p for p in sorted((path, *path.rglob("*"))) if p.is_file()])
        data = bytearray(file.read_bytes())
        if generator.random() < 0.4:
            data = data[: generator.randrange(len(data) + 1)]
        for _ in range(generator.choice([1, 8]) if data else 0):
            data[generator.randrange(len(data))] = generator.randrange(256)
        file.write_bytes(bytes(data))
        try:
            report = examine(path, full=trial % 2 == 0)
        except KindError:
            continue  # not recognizable as a dataset
        assert str(report)
        assert json.loads(report.to_json())["path"] == str(path)
