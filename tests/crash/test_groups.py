"""Buffers of groups: processes killed at every change of a file, power cuts, and damaged segments."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ostinato import GroupBuffer
from ostinato.errors import CheckpointError
from ostinato.groups.log import Log
from ostinato.groups.recovery import replay
from tests.crash.groups import OPTIONS, cut_power, values
from tests.crash.mutations import _changed

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A folder where waiting for the disk takes no time, if there is one in memory."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as found:
        yield Path(found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("lives", "seed"), [(30, 1), pytest.param(650, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_what_was_acknowledged_survives_kills_and_power_cuts(lives, seed, quick_path):
    """A life ends with one SIGKILL, or with four where a server has clients: more than 1,000 in 650 lives."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash.groups", quick_path / "g", lives, seed]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not found["wrong"], found["wrong"]
    assert found["groups"] > lives
    assert all(found[what] for what in ("cuts", "returns", "served"))
    assert lives < 100 or lives + 3 * found["served"] > 1000


def fill(path: Path) -> tuple[dict[int, str], str]:
    """Make a buffer of several segments; return its states by serial number, and the name of its log."""
    states: dict[int, str] = {}
    options: dict[str, Any] = {**OPTIONS, "segment_bytes": 4000, "sync": "never", "clock": lambda: 1000.0}
    with GroupBuffer(path, **options) as buffer:
        buffer.position(0)
        for number in range(12):
            buffer.admit([f"prompt {number}"])
            for response in ("a", "b"):
                buffer.append(str(number), values(str(number), response, 0), id=response)
            if number % 4 == 3:
                buffer.ack(buffer.lease(2, id=str(number)), step=number)
            if number == 5:
                buffer.compact()
            states |= {buffer._ledger.serial: json.dumps(buffer._ledger.to_json())}
        name = buffer._name
    return states, name


@pytest.mark.parametrize(
    ("count", "seed"), [(300, 1), pytest.param(100_000, 2, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_damaged_segments_are_refused_or_cut(count, seed, quick_path):
    path, rng = quick_path / f"damaged{count}", random.Random(seed)
    states, name = fill(path)
    files = {file.name: file.read_bytes() for file in path.glob("*.log")}
    assert len(files) > 2
    outcomes, wrong = {"refused": 0, "cut": 0}, list[str]()
    for _ in range(count):
        victim = rng.choice(sorted(files))
        kind = rng.choice(["flip", "cut", "insert", "drop", "repeat", "zeros", "splice"])
        data = _changed(kind, files[victim], files[rng.choice(sorted(files))], rng)
        if data == files[victim]:
            continue
        (path / victim).write_bytes(data)
        try:
            found = replay(path, name, "ready", repair=rng.random() < 0.5)
        except CheckpointError as error:
            # of a file that ends earlier, with a whole record, the next one does not follow
            names = [victim, *sorted(files)[sorted(files).index(victim) + 1 :][:1], "missing"]
            named = any(each in str(error) for each in names)
            wrong += [] if named else [str(error)]
            outcomes["refused"] += 1
        else:
            cuts = [Path(cut.file).name for cut in found.cuts]
            assert cuts == [victim] or (victim == max(files) and not cuts), (kind, cuts)  # it may end with a record
            expected = states.get(found.ledger.serial)
            assert expected is None or json.dumps(found.ledger.to_json()) == expected
            outcomes["cut"] += 1
        (path / victim).write_bytes(files[victim])
    assert not wrong
    assert min(outcomes.values()) > count // 10, outcomes


@pytest.mark.parametrize("sync", ["always", "interval", "never"])
def test_a_power_cut_loses_no_more_than_sync_allows(sync, quick_path, monkeypatch):
    """The disk has what was synced; blocks written since are there or not, in any order."""
    rng, safe, states = random.Random(sync), dict[str, int](), dict[int, str]()

    def record(fd: int) -> None:
        safe[Path(f"/proc/self/fd/{fd}").readlink().name] = os.fstat(fd).st_size

    monkeypatch.setattr("ostinato.groups.log.sync_fd", record)
    options: Any = {"sync": sync, "interval_s": 0.005, "segment_bytes": 3000, "clock": lambda: 1000.0}
    with GroupBuffer(quick_path / "g", **options) as buffer:
        log = buffer._log
        assert isinstance(log, Log)
        needed = 0
        for number in range(30):
            append = partial(buffer.append, str(number), {"tokens": [1] * 99}, id="a")
            for call in (bool, partial(buffer.position, number), partial(buffer.admit, ["p"]), append):
                call()
                states[log.written] = json.dumps(buffer._ledger.to_json())
            deadline = time.monotonic() + 20 * (sync == "interval") * (number % 2)
            while log._synced < log.written and time.monotonic() < deadline:
                time.sleep(0.001)
            if sync == "never" and number % 2:
                buffer.flush()
            if sync == "always" or number % 2:
                needed = log.written
            synced = dict(safe)
            shutil.rmtree(quick_path / "cut", ignore_errors=True)
            shutil.copytree(quick_path / "g", quick_path / "cut")
            cut_power(quick_path / "cut", synced, rng)
            found = replay(quick_path / "cut", buffer._name, "ready").ledger
            assert found.serial >= needed
            assert json.dumps(found.to_json()) == states[found.serial]
