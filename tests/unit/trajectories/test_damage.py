"""Damaged and hostile directories raise errors that name the file, or are skipped."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.trajectories.rollouts import (
    FORMATS,
    add,
    as_rlinf,
    check_batch,
    files,
    ids_on_disk,
    loaded,
    rollout,
    saving,
    small,
)

from ostinato import TrajectoryReplayBuffer
from ostinato.durable.manifest import write_lines
from ostinato.errors import (
    DamagedFileError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_names_in_the_index_cannot_lead_out_of_the_directory(tmp_path):
    as_rlinf(tmp_path / "a", "pt")
    path = tmp_path / "a" / "trajectory_1_opaque-1.pt"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFileError, match=r"no.* regular file"):
        loaded(tmp_path / "a")
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    path = tmp_path / "a" / "trajectory_index.json"
    index = json.loads(path.read_text())
    for weights in ("../../escape", "a/b", "..", "", 5, "a\0b"):
        index["trajectory_index"]["1"]["model_weights_id"] = weights
        path.write_text(json.dumps(index))
        with pytest.raises(DamagedFileError):
            loaded(tmp_path / "a")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"garbage" * 100),
}


@pytest.mark.parametrize(("form", "ours"), [*((form, True) for form in FORMATS), ("pt", False), ("pkl", False)])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_named_or_skipped(tmp_path, form, kind, ours):
    if ours:
        with saving(tmp_path / "a", 3, form=form):
            pass
    else:
        as_rlinf(tmp_path / "a", form)
    name = files(tmp_path / "a")[1]
    DAMAGE[kind](tmp_path / "a" / name)
    buffer = TrajectoryReplayBuffer(allow_pickle=True)
    buffer.add_trajectories([rollout(5)])
    with pytest.raises(DamagedFileError, match="trajectory 1: ") as caught:
        buffer.load_checkpoint(tmp_path / "a")
    assert name in str(caught.value)
    assert check_batch(buffer.sample(5)), "the buffer is as it was"
    with pytest.warns(RuntimeWarning, match=r"1 damaged trajectories were left out \(ids \[1\]\)"):
        buffer.load_checkpoint(tmp_path / "a", on_damage="skip")
    assert buffer.trajectory_ids == [0, 2]
    assert {serial // 1000 for serial in check_batch(buffer.sample(90))} == {0, 2}


def test_damaged_lists_are_named(tmp_path):
    with saving(tmp_path / "a", 3, form="safetensors"):
        pass
    for name in ("metadata.json", "trajectory_index.json", "ostinato_store.jsonl"):
        path = tmp_path / "a" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        with pytest.raises(DamagedFileError, match=name):
            loaded(tmp_path / "a")
        if name == "ostinato_store.jsonl":
            with pytest.warns(RuntimeWarning, match="file of field positions is damaged"):
                check_batch(loaded(tmp_path / "a", on_damage="skip").sample(50))
        path.unlink()
        if name == "ostinato_store.jsonl":
            check_batch(loaded(tmp_path / "a").sample(50))
        else:
            with pytest.raises(DamagedFileError, match=f"{name} is missing"):
                loaded(tmp_path / "a")
        path.write_bytes(whole)


def test_the_error_of_a_file_that_is_truncated_while_it_is_sampled_names_it(tmp_path):
    with saving(tmp_path / "a", 2, form="safetensors"):
        pass
    buffer = loaded(tmp_path / "a")
    os.truncate(tmp_path / "a" / files(tmp_path / "a")[0], 900)
    with pytest.raises(DamagedFileError, match=r"trajectory_0_.* it was truncated"):
        buffer.sample(100)


def test_loading_a_whole_trajectory_finds_flipped_bytes(tmp_path):
    for form in ("pt", "safetensors"):
        with saving(tmp_path / form, form=form) as buffer:
            add(buffer, small(actions=torch.full((4, 2, 100), 7, dtype=torch.uint8)))
        path = next((tmp_path / form).glob("trajectory_0_*"))
        path.write_bytes(path.read_bytes().replace(b"\7" * 50, b"\7" * 49 + b"\6", 1))
        with pytest.raises(DamagedFileError, match="its checksum differs"):
            loaded(tmp_path / form).load_trajectory(0)


def test_absurd_numbers_of_steps_raise_without_allocating_memory(tmp_path):
    root, absurd = tmp_path / "a", {"shape": [2**41, 1, 0]}
    with saving(root, form="safetensors") as buffer:
        add(buffer, small(model_weights_id="w"))
    index = json.loads((root / "trajectory_index.json").read_text())
    index["trajectory_index"]["0"] |= absurd | {"num_samples": 2**41}
    (root / "trajectory_index.json").write_text(json.dumps(index))
    (root / "ostinato_store.jsonl").unlink()
    head = json.dumps({"rewards": {"dtype": "F32", "data_offsets": [0, 0], **absurd}}).encode()
    (root / "trajectory_0_w.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(DamagedFileError, match="at most 1099511627776 transitions"):
        ids_on_disk(root)


def test_counters_and_seeds_of_metadata_are_bounded(tmp_path):
    with saving(tmp_path / "a") as buffer:
        add(buffer, small())
    path = tmp_path / "a" / "metadata.json"
    whole = path.read_text()
    for key, value in (("trajectory_counter", 10**30), ("seed", 2**63), ("seed", -(2**63) - 1)):
        path.write_text(json.dumps(json.loads(whole) | {key: value}))
        with pytest.raises(DamagedFileError, match=r"metadata\.json is damaged"):
            ids_on_disk(tmp_path / "a")


def test_invalid_lines_with_valid_checksums_are_damage(tmp_path):
    with saving(tmp_path / "a") as buffer:
        add(buffer, small())
    head = {"format": "ostinato-trajectories", "version": [1, 0], "trajectory_format": "pt", "counter": 1, "seed": 1}
    lines: list[Any] = [{"drop": 5}, {"form": [1], "fields": []}, {"id": 0, "facts": 5}, {"drop": [[1]]}]
    for line in lines:
        write_lines(tmp_path / "a" / "ostinato_journal.jsonl", [head | {"generator": None}, line])
        with pytest.raises(DamagedFileError, match=r"ostinato_journal\.jsonl is damaged"):
            ids_on_disk(tmp_path / "a")
