"""Paths at which nothing is saved, and checkpoints without one of their files: what every public opener raises."""

from __future__ import annotations

import errno
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, TrajectoryReplayBuffer
from ostinato.compat import objectrl, torchrl
from ostinato.errors import CheckpointError, CheckpointNotFoundError, DamagedFileError, MissingFileError
from ostinato.tools import compact, convert, inspect_checkpoint, inspect_store, kind_of, merge, split, verify
from ostinato.viz import SavedBuffer, TrajectoryFolder
from tests.unit.trajectories.rollouts import files, rollout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def buffer(**options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(8, **options), batch_size=2)


OPENERS: dict[str, Any] = {
    "loads": lambda path: buffer().loads(path),
    "loads mapped": lambda path: buffer().loads(path, mmap=True),
    "ensemble": lambda path: ReplayBufferEnsemble(buffer(), buffer()).loads(path),
    "trajectories": lambda path: TrajectoryReplayBuffer().load_checkpoint(path),
    "trajectories of a rank": lambda path: TrajectoryReplayBuffer().load_checkpoint(path, True, 1, 2),
    "torchrl": torchrl.load_checkpoint,
    "torchrl convert": lambda path: torchrl.convert_checkpoint(path, path.with_name("new")),
    "inspect_checkpoint": inspect_checkpoint,
    "inspect_store": inspect_store,
    "kind_of": kind_of,
    "verify": verify,
    "compact": compact,
    "convert": lambda path: convert(path, path.with_name("new"), "safetensors"),
    "merge": lambda path: merge(path, path.with_name("new")),
    "split": lambda path: split(path, path.with_name("new"), 1),
    "view of a buffer": SavedBuffer,
    "view of trajectories": TrajectoryFolder,
    "objectrl": lambda path: objectrl.ReplayBuffer(torch.device("cpu"), torch.device("cpu"), 8).load(path),
}


@pytest.mark.parametrize("name", OPENERS)
def test_a_path_at_which_nothing_is_saved_is_a_file_not_found(name, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "missing" / "deeper", tmp_path / "empty"):
        with pytest.raises(FileNotFoundError, match=path.name) as caught:
            OPENERS[name](path)
        assert isinstance(caught.value, CheckpointNotFoundError)
        assert not isinstance(caught.value, DamagedFileError)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"], "nothing was made"


@pytest.mark.parametrize("name", sorted(set(OPENERS) - {"torchrl", "torchrl convert", "merge", "objectrl"}))
def test_a_file_in_the_place_of_a_directory_is_no_missing_file(name, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError) as caught:
        OPENERS[name](tmp_path / "file")
    assert not isinstance(caught.value, FileNotFoundError)


def of_a_buffer(path: Path) -> Callable[[], object]:
    rb = buffer()
    rb.extend({"x": torch.arange(5)})
    rb.dumps(path)
    max(path.glob("*.bin"), key=lambda file: file.stat().st_size).unlink()
    return lambda: buffer().loads(path)


def of_trajectories(path: Path, *, loaded: bool = False) -> Callable[[], object]:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as trajectories:
        trajectories.add_trajectories([rollout(1), rollout(2)])
    before = TrajectoryReplayBuffer()
    before.load_checkpoint(path)
    for name in files(path):
        (path / name).unlink()
    return lambda: before.sample(4) if loaded else TrajectoryReplayBuffer().load_checkpoint(path)


LOSSES: list[Any] = [
    of_a_buffer,
    of_trajectories,
    partial(of_trajectories, loaded=True),
]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_file_that_a_checkpoint_lacks_is_damage_and_a_file_not_found(lose, tmp_path):
    again = lose(tmp_path / "saved")
    with pytest.raises(FileNotFoundError) as caught:
        again()
    assert isinstance(caught.value, MissingFileError)
    assert isinstance(caught.value, DamagedFileError)
    assert not isinstance(caught.value, CheckpointNotFoundError), "a new run must not begin where one is damaged"


@pytest.mark.parametrize("kind", [CheckpointNotFoundError, MissingFileError])
def test_these_errors_are_errors_of_files(kind):
    error = pickle.loads(pickle.dumps(kind("no checkpoint at x")))
    assert (type(error), str(error), error.errno) == (kind, "no checkpoint at x", errno.ENOENT)
    assert isinstance(error, (ValueError, OSError))
