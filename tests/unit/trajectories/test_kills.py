"""`kill -9` at every write, fsync, rename, link and unlink: saved trajectories are complete."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import pytest
from tests.unit.trajectories.kills import run_and_kill
from tests.unit.trajectories.rollouts import add, check_batch, files, rollout

from ostinato import TrajectoryReplayBuffer
from ostinato.errors import CheckpointError
from ostinato.tools import merge, split, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # some hundred forks, minutes on a busy machine
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


def kills(
    root: Path, work: Callable[[Path, Callable[[bytes], None]], None], prepare: Callable[[Path], None]
) -> Iterator[tuple[Path, bool, bytes]]:
    """Run work in new folders from the same state, killed one operation later each time, until it finishes."""
    for at in count():
        path = root / str(at)
        prepare(path)
        killed, said = run_and_kill(partial(work, path), at)
        yield path, killed, said
        if not killed:
            assert at > 5, "the operations were not counted"
            return


def opened(path: Path) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(path)
    return buffer


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_killed_saver_loses_nothing_that_was_reported(tmp_path, form):
    """Two sessions over one directory: the second one recovers from a crash of the first."""

    def prepare(path: Path) -> None:
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form) as buffer:
            buffer.add_trajectories([rollout(0, steps=3)])

    def work(path: Path, report: Callable[[bytes], None]) -> None:
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form) as buffer:
            buffer.load_checkpoint(path)
            for number in (1, 2):
                assert add(buffer, rollout(number, steps=3)) == [number]
                report(b"%d" % number)
        report(b"c")

    for path, _, said in kills(tmp_path, work, prepare):
        buffer = opened(path)
        ids = buffer.trajectory_ids
        assert ids == sorted(ids)
        assert {0, *(int(c) for c in said.decode() if c.isdigit())} <= set(ids) <= {0, 1, 2}
        serials = check_batch(buffer.sample(64))
        assert {serial // 1000 for serial in serials} <= set(ids)
        assert not verify(path).damage
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form) as again:
            (new,) = add(again, rollout(9, steps=3))
            assert new > max(ids)  # never overwrites a file
        assert set(opened(path).trajectory_ids) == {*ids, new}
        assert not [entry.name for entry in path.iterdir() if entry.name.endswith((".tmp", ".lock"))]


def test_a_killed_checkpoint_is_complete_or_absent(tmp_path):
    def work(path: Path, report: Callable[[bytes], None]) -> None:
        buffer = TrajectoryReplayBuffer(cache_size=1, trajectory_format="safetensors")
        buffer.add_trajectories([rollout(number, steps=2) for number in range(3)])
        buffer.flush()  # two are spilled, one is in memory
        buffer.save_checkpoint(path)
        report(b"s")
        os._exit(0)  # without removing the spilled files, which would be counted, too

    for path, killed, said in kills(tmp_path, work, lambda _: None):
        if path.exists():
            assert opened(path).trajectory_ids == [0, 1, 2]
            check_batch(opened(path).sample(32))
        else:
            assert killed
            assert not said
            with pytest.raises(CheckpointError):
                opened(path)


def ranks(root: Path) -> None:
    for rank in range(2):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=root / "source" / f"rank_{rank}") as buffer:
            buffer.add_trajectories([rollout(10 * rank + number, steps=2) for number in range(2)])


@pytest.mark.parametrize("verb", ["merge", "split"])
def test_killed_moves_leave_each_trajectory_in_one_place_and_can_be_continued(tmp_path, verb):
    def move(where: Path, _report: object = None) -> None:
        if verb == "merge":
            merge(where / "source", where / "target", move=True)
        else:
            split(where / "source" / "rank_0", where / "target", 1, move=True)

    for root, killed, _ in kills(tmp_path, move, ranks):
        everything = [name for directory, _, _ in os.walk(root) for name in files(type(root)(directory))]
        assert len(everything) == 4
        if killed and not ((root / "target").exists() and not (root / "target" / "ostinato_plan.json").exists()):
            move(root)
        buffer = opened(root / "target")
        owners = {0: {0, 10, 1, 11}, 1: {0}}[verb == "split"]
        assert {serial // 1000 for serial in check_batch(buffer.sample(64))} == owners
        if verb == "split":
            assert opened(root / "source" / "rank_0").trajectory_ids == [1]
        else:
            assert buffer.trajectory_ids == [0, 1, 2, 3]
            assert not list((root / "source").iterdir())
        assert not verify(root / "target").damage
