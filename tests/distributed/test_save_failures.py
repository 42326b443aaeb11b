"""Checkpoints that fail: counts, the bound, what other shards and handles learn; without Ray."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from ostinato import LazyTensorStorage, RateLimiter, ReplayBuffer
from ostinato.distributed.checkpoints import begin_saving, check_era, read_fleet, write_fleet
from ostinato.distributed.rate_limits import RateLimits
from ostinato.distributed.save_failures import FailureWarnings, Noticed, SaveFailure, SaveLog
from ostinato.errors import CheckpointError, DamagedFileError

from .coroutines import in_loop

ERROR = OSError("no room")


def test_writes_raise_after_the_bound_until_a_save_succeeds():
    log = SaveLog(3, "/checkpoints", 2, 5.0)
    log.check()
    log.failed(ERROR, 7)
    log.check()
    log.failed(ERROR, 7)
    with pytest.raises(CheckpointError, match=r"2 checkpoints of shard 3 .*no room.*every 5 s.*/checkpoints"):
        log.check()
    assert log.describe()["save_failures"] == 2
    assert log.describe()["save_error"] == "OSError: no room"
    log.saved(10, 12)
    log.check()
    described = {"saved_rows": 10, "saved_write_count": 12, "save_error": None, "save_failures": 0, "failures": ()}
    assert log.describe() == described
    without_bound = SaveLog(0, None, None, None)
    for _ in range(100):
        without_bound.failed(ERROR, 0)
    without_bound.check()


def test_a_handle_warns_once_of_each_row_of_failures():
    handle = FailureWarnings(4)
    first, second = SaveFailure(2, (1, 1), "why"), SaveFailure(2, (1, 2), "why again")
    with pytest.warns(RuntimeWarning, match=r"checkpoints of shard 2 of 4 fail \(why\)"):
        assert handle.take(Noticed("rows", (first,))) == "rows"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert handle.take(Noticed("rows", (first,))) == "rows"
        assert handle.take((1, 2)) == (1, 2)
    with pytest.warns(RuntimeWarning, match="why again"):
        handle.warn([second])


# -- the file beside the shards ---------------------------------------------------------------------------------------


@in_loop
async def test_the_file_names_the_fields_and_keeps_the_counts_of_the_limiter(tmp_path):
    assert read_fleet(tmp_path) is None
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.zeros(4, 3)})
    limits, fresh, other = (
        RateLimits(RateLimiter(samples_per_insert=ratio, min_size_to_sample=4, error_buffer=10), [])
        for ratio in (0.3, 0.3, 0.6)
    )
    await limits.begin()
    await limits.give_back(-40, -10)
    state = await limits.limits()
    write_fleet(tmp_path, 2, rb.storage.schema, state)
    saved = read_fleet(tmp_path)
    assert saved is not None
    assert (saved["fields"], saved["shards"]) == (["'obs': float32[3]"], 2)
    assert await fresh.begin(saved["limiter"]) is None
    assert await fresh.limits() == state
    differing = await other.begin(saved["limiter"])
    assert differing is not None
    assert "samples_per_insert=0.3 (now 0.6)" in differing
    assert await other.totals() == (0, 0)


def test_damaged_files_and_later_versions_raise(tmp_path):
    path = tmp_path / "fleet.json"
    for text in ("", "[]", "{}", '{"format": "other", "version": 1}', '{"format": "ostinato-fleet", "version": "1"}'):
        path.write_text(text)
        with pytest.raises(DamagedFileError, match=r"fleet\.json"):
            read_fleet(tmp_path)
    write_fleet(tmp_path, 1, None, {"written": 3, "drawn": 4})
    body = json.loads(path.read_text())
    damaged: list[Any] = [{"written": -1, "drawn": 0}, {"written": 1}, [], {"written": True, "drawn": 0}]
    for limiter in damaged:
        path.write_text(json.dumps({**body, "limiter": limiter}))
        with pytest.raises(DamagedFileError, match="counts"):
            read_fleet(tmp_path)
    path.write_text(json.dumps({**body, "version": 2}))
    with pytest.raises(CheckpointError, match="update"):
        read_fleet(tmp_path)


def test_an_actor_that_was_replaced_does_not_save(tmp_path):
    """Also if the clock of the machine of the later one is behind."""
    path = tmp_path / "checkpoints" / "shard-0000-of-0002"
    first = begin_saving(path)
    check_era(path, first)
    path.with_name(f"{path.name}.era").write_text(str(first + 1000))
    later = begin_saving(path)
    assert later == first + 1001
    check_era(path, later)
    with pytest.raises(CheckpointError, match=r"another actor of this shard.*shard-0000-of-0002"):
        check_era(path, first)
