"""The buffer of FastTD3 beside that of Holosoma 0.0.3, which is the same with observations of the critic."""

from __future__ import annotations

import pytest
import torch

from ostinato.compat.fasttd3 import HolosomaReplayBuffer

from ..unit.compat.test_fasttd3 import ENVS, drawn, fill, transitions
from ..unit.compat.test_skrl import GAMMA, Log
from .originals import original

PACKAGES = ("holosoma", "holosoma.agents", "holosoma.agents.fast_sac")
theirs = original(
    "holosoma.agents.fast_sac.fast_sac_utils", PACKAGES, **{"config_types.algo": {"FastSACConfig": object}}
)


@pytest.mark.parametrize("steps", [3, 12])
def test_single_steps_are_the_same_for_the_same_seed(steps):
    batches = []
    for kind in (HolosomaReplayBuffer, theirs.SimpleReplayBuffer):
        buffer = kind(ENVS, 5, 2, 1, 3, gamma=GAMMA)
        fill(buffer, Log(1, steps, ENVS))
        torch.manual_seed(2)
        batches.append(buffer.sample(20))
    ours, other = (dict(batch.flatten_keys(".").items()) for batch in batches)
    assert ours.keys() == other.keys()
    for key, value in other.items():
        assert torch.equal(ours[key], value)
        assert ours[key].dtype is value.dtype


def test_the_original_adds_rewards_of_the_oldest_rows_to_those_of_the_newest():
    """Elsewhere in a full ring, both are right."""
    buffer = theirs.SimpleReplayBuffer(ENVS, 5, 2, 1, 3, n_steps=3, gamma=GAMMA)
    log = Log(4, 12, ENVS)
    fill(buffer, log)
    right = transitions(log, 3)
    newest = {now for now, (*_, dones, _, steps) in right.items() if steps < 3 and not dones}
    batch = drawn(buffer.sample(150))
    wrong = {now for now, found in batch.items() if (found[0], found[4]) != (right[now][0], right[now][4])}
    assert wrong == newest
