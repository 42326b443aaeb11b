"""Saves killed at each file operation in turn: the directory holds the old state or the new one, and takes the next."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

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
def test_a_killed_save_leaves_the_old_state_or_the_new(name: str, incremental: bool, tmp_path: Path) -> None:
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


def test_a_killed_first_save_leaves_nothing_that_loads(tmp_path: Path) -> None:
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
