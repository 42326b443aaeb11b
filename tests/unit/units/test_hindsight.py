"""Hindsight relabelling: goals are reached later in the same episode."""

from __future__ import annotations

import pytest
import torch

from ostinato import (
    Hindsight,
)

from ...episodes import Log
from ...windows import check_hindsight, reward_of
from .rings import buffer, written

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("written_rows", [29, 30, 31, 45, 63])
def test_future_goals_come_later_in_the_same_episode_at_the_seam_too(written_rows: int) -> None:
    log = Log(30, longest=12, seed=written_rows)
    rb = written(log, buffer(30, 40, sample_unit=Hindsight(reward_of, her_ratio=1.0)), written_rows)
    batch, info = rb.sample(return_info=True)
    check_hindsight(log, batch, info, strategy="future", ratio=1.0, late=False)
    got = batch["desired_goal"].to(torch.int64)
    assert (got // 1024 == batch["episode"]).all()
    assert (got % 1024 > batch["t"]).all()
