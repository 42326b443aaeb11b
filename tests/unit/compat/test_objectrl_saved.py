"""Saved buffers: what ObjectRL can read, what is restored, and errors."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.errors import CheckpointError, DamagedFileError

from .test_objectrl import filled, ids, rows


def original_save(path: Path, **numbers: int) -> None:
    """What ObjectRL writes."""
    torch.save(numbers, f"{path}.metadata")


@pytest.mark.parametrize("count", [0, 7, 13])
def test_experience_comes_back(tmp_path, count):
    saved = filled(count)
    for buffer in (filled(4), saved):
        buffer.save(str(tmp_path / "deep" / "buffer"))
    assert len(list((tmp_path / "deep").iterdir())) == 2  # saving again leaves one save
    metadata = torch.load(tmp_path / "deep" / "buffer.metadata", weights_only=True)
    numbers = {"buffer_size": 10, "data_size": min(count, 10), "pointer": count % 10}  # what ObjectRL reads
    assert numbers.items() <= metadata.items()
    other = filled(3, 5)
    report = other.load(tmp_path / "deep" / "buffer")
    assert report.restored == ("buffer_size", "data_size", "pointer", "experience")
    assert (report.rows, report.metadata) == (min(count, 10), (10, min(count, 10), count % 10))
    assert "rows of experience found" in str(report)
    assert (other.buffer_size, other.data_size, other.pointer) == (10, min(count, 10), count % 10)
    for buffer in (saved, other):
        buffer.add_batch(rows(50, 4))
    assert ids(saved.sample_all()) == ids(other.sample_all())


def test_metadata_without_experience(tmp_path):
    path = tmp_path / "buffer"
    original_save(path, buffer_size=20, data_size=9, pointer=9)
    empty = filled(0)
    with pytest.warns(UserWarning, match="comes without experience: only metadata is restored"):
        report = empty.load(str(path))
    assert (report.restored, report.metadata.data_size, report.rows) == (("buffer_size",), 9, 0)
    assert (empty.buffer_size, len(empty)) == (20, 0)
    assert "no experience found" in str(report)

    buffer = filled(10)  # a memory that holds the rows
    buffer.pointer = 4
    filled(7).save(path)  # with experience, which the next save does not belong to
    buffer.save(path, metadata_only=True)
    buffer.pointer = 0
    with pytest.warns(UserWarning, match="only metadata"):
        assert buffer.load(path).restored == ("buffer_size", "data_size", "pointer")
    assert buffer.pointer == 4
    other = filled(3)
    with pytest.warns(UserWarning, match="only metadata"), pytest.raises(CheckpointError):
        other.load(path)
    assert ids(other.sample_all()) == [0, 1, 2]


def test_saves_that_contradict_themselves_or_are_damaged_change_nothing(tmp_path):
    path, other = tmp_path / "buffer", filled(2)
    filled(7).save(path)
    for numbers in ({"data_size": 8}, {"pointer": 2}, {"buffer_size": 20}):
        original_save(path, **{"buffer_size": 10, "data_size": 7, "pointer": 7, **numbers})
        with pytest.raises(CheckpointError):
            other.load(path)
    original_save(path, buffer_size=10, data_size=7, pointer=7)
    assert filled(0).load(path).rows == 7  # ObjectRL wrote over it, and they agree
    data = next((tmp_path / "buffer.experience-0").glob("*.bin"))
    data.write_bytes(b"\xff" * data.stat().st_size)
    with pytest.raises(DamagedFileError):
        other.load(path)
    with pytest.raises(CheckpointError, match=r"there is no .*nothing\.metadata: give the path"):
        other.load(tmp_path / "nothing")
    (tmp_path / "odd.metadata").mkdir()
    with pytest.raises(CheckpointError):
        other.load(tmp_path / "odd")
    assert ids(other.sample_all()) == [0, 1]
    filled(7).save(path)
    held = torch.load(f"{path}.metadata", weights_only=True)["experience"]
    (tmp_path / held).rename(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match=rf"{held} is missing"):
        assert filled(0).load(path).restored == ("buffer_size",)


class _Attack:
    """Makes a directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", DamagedFileError),
        (pickle.dumps(_Attack()), DamagedFileError),
        ({}, DamagedFileError),
        ({"buffer_size": 10, "data_size": 7}, DamagedFileError),
        ({"buffer_size": 10, "data_size": 7.0, "pointer": 7}, DamagedFileError),
        ({"buffer_size": 10, "data_size": 11, "pointer": 1}, CheckpointError),
        ({"buffer_size": 10, "data_size": 3, "pointer": 5}, CheckpointError),
        ({"buffer_size": 10, "data_size": 10, "pointer": 10}, CheckpointError),
        ({"buffer_size": 10, "data_size": 7, "pointer": 7, "experience": "../other"}, DamagedFileError),
        ({"buffer_size": 10, "data_size": 7, "pointer": 7, "experience": _Attack()}, DamagedFileError),
    ],
    ids=range(10),
)
def test_invalid_metadata_raises_and_is_never_executed(tmp_path, monkeypatch, content, error):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        Path("buffer.metadata").write_bytes(content)
    else:
        torch.save(content, "buffer.metadata")
    buffer = filled(2)
    with pytest.raises(error, match=r"buffer\.metadata"):
        buffer.load("buffer")
    assert ids(buffer.sample_all()) == [0, 1]
    assert not Path("attacked").exists()


SAVER = """
import sys, torch
from tensordict import TensorDict
from ostinato.compat.objectrl import ReplayBuffer

buffer = ReplayBuffer("cpu", "cpu", 1000)
print("ready", flush=True)
for round in range(1, 10_000):
    buffer.add_batch(TensorDict({"id": torch.full((round % 7 + 1,), round)}, [round % 7 + 1]))
    buffer.save(sys.argv[1])
    print(round, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.slow
def test_a_killed_save_leaves_a_whole_one(tmp_path):
    """What was reported saved, or the save after it, comes back; metadata and experience never disagree."""
    for attempt in range(6):
        path = tmp_path / str(attempt) / "buffer"
        with subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.readline()
            time.sleep(0.05 + 0.037 * attempt)
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read().split()
        done = int(said[-1]) if said else 1
        buffer = filled(0)
        report = buffer.load(str(path))
        assert report.rows == len(buffer), json.dumps(report)
        assert int(buffer.sample_all()["id"].max()) in {done, done + 1}
