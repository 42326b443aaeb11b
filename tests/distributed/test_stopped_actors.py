"""Actors that are stopped, or work for long: every call of every handle ends by its deadline and names the actor."""

from __future__ import annotations

import math
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    RayReplayBuffer,
    ShardedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.errors import LostBufferError, NoAnswerError, OptionError

from .calls import LOCAL, SHARD_TIMED, SHARD_UNTIMED, TIMED, UNTIMED, UPDATE, rows
from .handles import all_at_once, handle_of, outcome, process_of, stopped, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

CALL_S = 1.5
PATIENT_S = 6.0
"""Of calls that some shard answers: the machine may be busy."""
LATE_S = 45.0
SLOW_S = 2 * CALL_S


def _sleep(_: Any, seconds: float = SLOW_S) -> str:
    time.sleep(seconds)
    return "done"


def _slow_saves(buffer: Any) -> None:
    def hook(data: Any, **_: Any) -> Any:
        time.sleep(SLOW_S)
        return data

    buffer.register_save_hook(hook)


def _fast_saves(buffer: Any) -> None:
    buffer.storage.save_hooks = ()


# -- RayReplayBuffer --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(cluster: Any) -> Iterator[RayReplayBuffer]:
    """An actor that calls change when it goes on."""
    made = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 100),
        sampler=partial(PrioritizedSampler, 100, 0.7, 0.5),
        replay_buffer_cls=TensorDictReplayBuffer,
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    with closing(made):
        made.extend(rows())
        yield made


def quick(rb: RayReplayBuffer, **more: Any) -> RayReplayBuffer:
    """Return a handle whose calls have little time."""
    return handle_of(rb, call_timeout_s=CALL_S, **more)


def test_times_of_calls_are_checked_before_anything_is_sent(one: RayReplayBuffer, fleet: ShardedReplayBuffer) -> None:
    for rb, calls in ((one, TIMED), (fleet, SHARD_TIMED)):
        for call in calls.values():
            bads: list[Any] = [np.bool_(0), -0.5]
            for bad in bads:
                with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
                    call(rb, timeout_s=bad)
    times: list[Any] = [30, np.float32(30), np.int64(30), math.inf]
    for timeout_s in times:
        assert len(one.sample(timeout_s=timeout_s)) == 4
        assert one.can_sample(timeout_s=timeout_s)


def test_work_that_takes_long_goes_on(one: RayReplayBuffer, tmp_path: Path) -> None:
    one.apply(_slow_saves)
    calls: dict[str, Callable[[], Any]] = {
        "apply": partial(quick(one).apply, _sleep),
        "too long": partial(quick(one).apply, _sleep, timeout_s=0.8 * SLOW_S),
        "dumps": partial(quick(one).dumps, tmp_path / "saved"),
    }
    found = all_at_once(calls)
    assert found["apply"].result == "done"
    assert "did not answer apply within" in str(found["too long"].result)
    assert "it is busy, and answers other calls" in str(found["too long"].result)
    assert found["dumps"].result is None
    assert found["dumps"].took_s > SLOW_S > CALL_S
    one.apply(_fast_saves)
    one.dumps(tmp_path / "saved", timeout_s=math.inf)


def test_a_call_of_a_stopped_actor_ends(cluster: Any, one: RayReplayBuffer) -> None:
    """The last test of this actor."""
    calls: dict[str, Callable[[], Any]] = {
        **{name: partial(call, quick(one)) for name, call in {**UNTIMED, **TIMED}.items()},
        **{f"{name} in time": partial(call, quick(one), timeout_s=0.3) for name, call in TIMED.items()},
        **{f"{name} at once": partial(call, quick(one), timeout_s=0) for name, call in TIMED.items()},
        "prefetch": quick(one, prefetch=3).sample,
    }
    with stopped(cluster, one.actor):
        found = all_at_once(calls)
        future = one.submit_update_if_present(**UPDATE)
        assert outcome(partial(one.shutdown, timeout=0.1)).took_s < LATE_S
        assert isinstance(future.exception(), LostBufferError)
    for name, (result, took_s) in found.items():
        assert took_s < LATE_S, name
        if name == "is_alive":
            assert result is False
            continue
        assert isinstance(result, NoAnswerError), (name, result)
        if "at once" in name:
            assert "nothing was sent" in str(result) or "did not answer" in str(result), (name, result)
            continue
        assert took_s > (0.29 if "in time" in name else 0.9 * CALL_S), name
        assert "the actor of the replay buffer (process " in str(result), name
        assert "the call may still take effect" in str(result), name
    for name in ("sample", "extend", "stats", "delete", "set_sampler"):
        assert f"did not answer {name}" in str(found[f"{name} in time"].result)
        assert "nothing was sent" in str(found[f"{name} at once"].result)


# -- ShardedReplayBuffer ----------------------------------------------------------------------------------------------

NEED_ALL = {"dump", "dumps", "load", "loads", "save", "__getitem__"}
WRITES = {"add", "extend"}
EMPTIES = {"empty", "reset"}
"""Left out: other calls would find no rows."""
UPDATES = {"delete", "submit_update_if_present", "update_if_present", "update_priority", "update_tensordict_priority"}
FREE = {"can_insert", "synchronize"}
"""Calls that ask no shard: there is no limiter, and no pending update."""


@pytest.fixture
def several(shards: ShardedReplayBuffer) -> ShardedReplayBuffer:
    for shard in range(3):
        shards.pinned(shard).extend(rows())
    return shards


def handle(rb: ShardedReplayBuffer, name: str, call_timeout_s: float = CALL_S) -> ShardedReplayBuffer:
    impatient = rb._handle(call_timeout_s=call_timeout_s)
    return impatient.pinned(1) if name in WRITES else impatient


def shard_calls(rb: ShardedReplayBuffer, seconds: float, without: set[str]) -> dict[str, Callable[[], Any]]:
    calls = {name: call for name, call in {**SHARD_TIMED, **SHARD_UNTIMED}.items() if name not in without | EMPTIES}
    short = {name: call for name, call in SHARD_TIMED.items() if name in calls}
    return {
        **{name: partial(call, handle(rb, name, seconds)) for name, call in calls.items()},
        **{f"{name} in time": partial(call, handle(rb, name), timeout_s=0.4) for name, call in short.items()},
    }


def test_a_slow_checkpoint_goes_on(several: ShardedReplayBuffer) -> None:
    several.apply(_slow_saves)
    calls: dict[str, Callable[[], Any]] = {
        "apply": partial(handle(several, "apply").apply, _sleep),
        "too long": partial(handle(several, "apply").apply, _sleep, timeout_s=0.8 * SLOW_S),
        "checkpoint": handle(several, "checkpoint").checkpoint,
    }
    found = all_at_once(calls)
    several.apply(_fast_saves)
    assert found["apply"].result == ["done"] * 3
    assert "it is busy, and answers other calls" in str(found["too long"].result)
    assert min(found["checkpoint"].result) > 0
    assert found["checkpoint"].took_s > SLOW_S > CALL_S


def test_calls_leave_a_stopped_shard_out_or_raise(cluster: Any, several: ShardedReplayBuffer) -> None:
    calls = shard_calls(several, PATIENT_S, NEED_ALL - {"dumps", "__getitem__"})
    with stopped(cluster, several.actors[1]):
        found = all_at_once(calls)
    for name, (result, took_s) in found.items():
        assert took_s < LATE_S, name
        if name in NEED_ALL:
            assert isinstance(result, LostBufferError), (name, result)
        elif " " not in name and name != "query":
            assert not isinstance(result, Exception), (name, result)
    assert found["__len__"].result > 0  # of the other shards, from which rows are deleted meanwhile
    assert isinstance(found["__getitem__"].result, NoAnswerError)
    for name in ("__getitem__", "sample in time", "extend in time", "add in time"):
        assert isinstance(found[name].result, NoAnswerError), (name, found[name].result)
        assert "shard 1 of 3 (process " in str(found[name].result)
    for name in ("stats in time", "report in time"):
        assert not isinstance(found[name].result, Exception), (name, found[name].result)


def test_calls_raise_while_all_shards_are_stopped(cluster: Any, several: ShardedReplayBuffer) -> None:
    calls = shard_calls(several, CALL_S, set())
    calls |= {name: partial(call, handle(several, name)) for name, call in LOCAL.items()}
    calls["stats at once"] = partial(SHARD_TIMED["stats"], handle(several, "stats"), timeout_s=0)
    with stopped(cluster, *several.actors):
        found = all_at_once(calls)
    for name, (result, took_s) in found.items():
        assert took_s < LATE_S, name
        method = name.split()[0]
        if name == "is_alive":
            assert result is False
        elif method in UPDATES:
            continue  # updates of rows in missing shards are dropped, with a warning
        elif method in FREE or name in LOCAL:
            assert not isinstance(result, Exception), (name, result)
        else:
            assert isinstance(result, LostBufferError), (name, result)
            assert "shard" in str(result), (name, result)
    assert "nothing was sent" in str(found["stats at once"].result)
    until(lambda: len(several) > 16)
