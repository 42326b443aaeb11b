"""Saves killed at each file operation in turn: the directory holds the old state or the new one, and takes the next."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato.compat import lerobot
from ostinato.errors import CheckpointError
from tests.crash.fuzz import state_of
from tests.registry import registered
from tests.unit.trajectories.kills import run_and_kill
from tests.unit.trajectories.rollouts import needs_fork

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_fork


def saving(rb: Any, path: Path, incremental: bool, _report: object) -> None:
    rb.dumps(path, incremental=incremental)


@pytest.mark.parametrize(
    ("name", "incremental"),
    [
        ("prefetch, PrioritizedSampler", True),
        ("storage ListStorage", False),
        *(
            pytest.param(name, incremental, marks=pytest.mark.slow)
            for name in ("transform", "storage LazyTensorStorage, single_copy", "max_bytes", "ensemble, ratio")
            for incremental in (False, True)
        ),
    ],
)
def test_a_killed_save_leaves_the_old_state_or_the_new(name, incremental, tmp_path):
    contract, path = registered(name), tmp_path / "a"
    rb = contract.fill()
    rb.dumps(path, incremental=incremental)
    for number in count():
        before = state_of(rb)
        contract.extend(rb, 6, 100 + 6 * number)
        contract.use(rb)
        after = state_of(rb)
        killed, _ = run_and_kill(partial(saving, rb, path, incremental), number)
        rb = contract.make(contract.capacity)
        rb.loads(path)
        assert state_of(rb) in (before, after)
        if not killed:
            break
    assert number > 5, "the operations were not counted"
    assert state_of(rb) == after
    manifest = (path / "manifest.json").read_text()
    left = [file.name for file in path.iterdir() if file.suffix in {".bin", ".tmp"} and file.name not in manifest]
    assert not left, "what the killed ones left is gone"


def test_a_killed_first_save_leaves_nothing_that_loads(tmp_path):
    contract = registered("PrioritizedSampler")
    rb, found = contract.fill(), contract.make(contract.capacity)
    for number in count():
        path = tmp_path / str(number)
        killed, _ = run_and_kill(partial(saving, rb, path, False), number)
        if killed and not (path / "manifest.json").exists():
            with pytest.raises(CheckpointError):
                found.loads(path)
            rb.dumps(path)
        found.loads(path)
        assert state_of(found) == state_of(rb)
        if not killed:
            break


CAMERA, NUMBER, ROWS = "observation.images.top", "observation.state", 300


def pictures(serial: int) -> dict[str, torch.Tensor]:
    return {CAMERA: torch.full((1, 3, 64, 64), serial % 251, dtype=torch.uint8), NUMBER: torch.tensor([[serial + 0.5]])}


def newest(path: Path) -> tuple[Any, int]:
    """A buffer with what was saved, every row of which is what was added; and the number of rows added until then."""
    buffer = lerobot.ReplayBuffer(ROWS, "cpu", use_drq=False)
    if not (path / "manifest.json").exists():
        return buffer, 0
    buffer.loads(path)
    batch = buffer.sample(ROWS)
    serials = batch["reward"].int()
    added = int(max(buffer._rows["reward"])) + 1
    assert sorted(buffer._rows["reward"].int().tolist()) == list(range(added - len(buffer), added))
    for name, later in (("state", 0), ("next_state", 1)):
        assert torch.equal(batch[name][NUMBER][:, 0], serials + later + 0.5)
        assert (batch[name][CAMERA] == ((serials + later) % 251)[:, None, None, None]).all()
    return buffer, added


def learn(path: Path, incremental: bool, say: Any) -> None:
    """Resume, and save after every few rows."""
    buffer, serial = newest(path)
    while True:
        for _ in range(20):
            buffer.add(
                pictures(serial), torch.zeros(1, 2), serial, pictures(serial + 1), False, truncated=serial % 7 == 6
            )
            serial += 1
        say(f"saving {serial}\n".encode())
        buffer.dumps(path, incremental=incremental)
        say(f"saved {serial}\n".encode())


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, True])
def test_a_learner_killed_at_any_moment_of_a_save_resumes_from_the_last_one(incremental, tmp_path):
    """40 processes, each killed by SIGKILL at a random moment of a random save."""
    rng, path, save_s, saved = random.Random(incremental), tmp_path / "rows", 0.02, 0
    for _ in range(40):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                learn(path, incremental, partial(os.write, writer))
            finally:
                os._exit(1)
        os.close(writer)
        begun, saves, start = saved, rng.randrange(1, 5), time.perf_counter()
        with os.fdopen(reader) as said:
            for line in said:
                verb, number = line.split()
                begun, saved = (int(number), saved) if verb == "saving" else (begun, int(number))
                saves -= verb == "saving"
                if not saves:
                    time.sleep(rng.uniform(0, 1.5 * save_s))
                    os.kill(child, signal.SIGKILL)
                    saves = -1
                elif verb == "saved":
                    save_s = 0.5 * save_s + 0.5 * (time.perf_counter() - start)
                start = time.perf_counter()
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        found = newest(path)[1]
        assert found in {saved, begun}, f"{saved} rows were saved, {found} are there"
        saved = found
    assert saved > 40
