"""The buffer for LeRobot beside that of LeRobot 0.6.1: the same batches; and where a row of the original is wrong.

LeRobot needs another Python and torch than ours: the files of its buffer and mixer are loaded by themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.compat.lerobot import ReplayBuffer

from ..unit.compat.test_lerobot import CAMERA, KINDS, PLACE, check, fill
from .originals import original

PACKAGES = ("lerobot", "lerobot.rl", "lerobot.utils", "lerobot.rl.data_sources")
NAMES = {"OBS_IMAGE": "observation.image", "ACTION": "action", "REWARD": "next.reward", "DONE": "next.done"}
AROUND: dict[str, Any] = {
    "datasets": {"LeRobotDataset": object},
    "utils.constants": NAMES,
    "lerobot_types": {"BatchType": dict},
}
theirs = original("lerobot.rl.buffer", PACKAGES, **AROUND)
mixer = original("lerobot.rl.data_sources.data_mixer", PACKAGES, **AROUND)


def both(kinds: list[str], **options: Any) -> tuple[Any, Any, Any]:
    """Buffers of both with the same transitions, and their log."""
    shift = theirs.random_shift
    other = theirs.ReplayBuffer(6, "cpu", image_augmentation_function=shift, **options)
    ours = ReplayBuffer(6, "cpu", **options)
    return ours, other, (fill(ours, kinds), fill(other, kinds))[0]


def same(ours: Any, other: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == other.keys() and all(same(ours[key], other[key]) for key in ours)
    return ours.dtype is other.dtype and torch.equal(ours, other)


@pytest.mark.parametrize("count", [2, 5, 11])
def test_the_same_calls_give_the_same_batches(count):
    ours, other, _ = both([*KINDS, *KINDS][:count])
    for size in (1, 4, 64):
        batches = []
        for buffer in (ours, other):
            torch.manual_seed(size)
            batches.append(buffer.sample(size))
        assert same(*batches)


def test_mixers_of_the_original_take_both_buffers():
    online, offline = ReplayBuffer(6, "cpu"), ReplayBuffer(6, "cpu")
    log = fill(online, [*KINDS])
    fill(offline, [*KINDS])
    mixed = mixer.OnlineOfflineMixer(online, offline, online_ratio=0.5)
    batches = mixed.get_iterator(batch_size=8)
    for batch in (mixed.sample(8), next(batches), next(batches)):
        assert len(batch["reward"]) == 8
        check(batch, log, 6)


@pytest.mark.parametrize("kinds", [["on", "late", "on", "on"], ["on", "left out", "on", "on"], ["on"] * 8])
def test_the_original_returns_states_of_other_rows_with_optimize_memory(kinds):
    """After a time limit, where a transition was left out, and at the end of a full ring."""
    ours, other, log = both(kinds, optimize_memory=True, use_drq=False)
    check(ours.sample(64), log, 6)
    batches = [other.sample(6) for _ in range(20)]
    pairs = torch.cat([torch.stack([x[name][PLACE][:, 0] for name in ("state", "next_state")], 1) for x in batches])
    assert any(log[now][0] != after for now, after in pairs.int().tolist())


@pytest.mark.parametrize(("optimize_memory", "share"), [(False, 0.13), (True, 0.26)])
def test_rows_and_checkpoints_take_a_fraction_of_the_bytes(optimize_memory, share, tmp_path):
    """Two cameras, episodes of 20 steps: an eighth, and a quarter of what `optimize_memory` takes, which loses some."""
    images = torch.randint(0, 256, (61, 1, 3, 64, 64), dtype=torch.uint8)
    states = [{CAMERA: image, f"{CAMERA}2": image, PLACE: torch.ones(1, 8)} for image in images]
    buffers: list[Any] = [
        kind(60, "cpu", optimize_memory=optimize_memory) for kind in (ReplayBuffer, theirs.ReplayBuffer)
    ]
    for buffer in buffers:
        for step in range(60):
            buffer.add(states[step], torch.zeros(1, 4), 0.0, states[step + 1], False, truncated=step % 20 == 19)
    ours, other = buffers
    tables = [*other.states.values(), *other.next_states.values(), other.actions, other.rewards, other.dones]
    held = sum({table.data_ptr(): table.nbytes for table in tables}.values())
    ours.dumps(tmp_path / "rows")
    saved = sum(file.stat().st_size for file in (tmp_path / "rows").rglob("*") if file.is_file())
    assert max(ours._rows.storage.nbytes, saved) < share * held
