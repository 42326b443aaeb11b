"""Slice samplers: episodes, flags, options, passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    SliceSampler,
)

from ...episodes import Log, batch_of
from .rings import ENDS, buffer


def test_every_option_of_a_slice_changes_something_or_raises() -> None:
    log = Log(40, longest=4, seed=9)
    rows = batch_of([*log.play(40)])
    rows["is_init"] = rows["t"] == 0

    def sample(**options: Any) -> tuple[Any, ...]:
        rb = buffer(40, sampler=SliceSampler(**{"slice_len": 3, "end_keys": ENDS, **options}))
        rb.extend(rows)
        batch, info = rb.sample(return_info=True)
        return batch["id"].tolist(), sorted(map(str, info)), [value.tolist() for value in info.values()]

    plain = sample()
    changes: list[dict[str, Any]] = [
        {"end_keys": None, "end_key": ("next", "terminated")},
        {"end_keys": None, "traj_key": "id", "strict_length": False},
        {"truncated_key": None},
        {"truncated_key": "truncated"},
        {"init_key": None},
        {"replacement": False},
    ]
    for change in changes:
        assert sample(**change) != plain, change
    for without_effect in ({"compile": True}, {"use_gpu": True}):
        assert sample(**without_effect) == plain, without_effect
    for refused in ({"end_key": "done"}, {"ends": torch.zeros(40)}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            SliceSampler(slice_len=3, end_keys=ENDS, **refused)
