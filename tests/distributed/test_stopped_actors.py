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
    TensorDictReplayBuffer,
)
from ostinato.errors import LostBufferError, NoAnswerError, OptionError

from .calls import BY_NAME, SHARD_TIMED, SHARD_UNTIMED, TIMED, UNTIMED, UPDATE, rows
from .handles import all_at_once, outcome, stopped, until

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def make_one() -> RayReplayBuffer:
    made = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 100),
        sampler=partial(PrioritizedSampler, 100, 0.7, 0.5),
        replay_buffer_cls=TensorDictReplayBuffer,
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    made.extend(rows())
    return made


@pytest.fixture(scope="module")
def one(cluster: Any) -> Iterator[RayReplayBuffer]:
    with closing(make_one()) as made:
        yield made


def quick(rb: RayReplayBuffer, **more: Any) -> RayReplayBuffer:
    """Return a handle whose calls have little time."""
    return rb._handle(call_timeout_s=CALL_S, **more)


def test_times_of_calls_are_checked_before_anything_is_sent(one, fleet):
    for rb, calls in ((one, TIMED), (fleet, SHARD_TIMED)):
        for call in calls.values():
            bads: list[Any] = [np.bool_(0), -0.5, math.nan, "1", 1j]
            for bad in bads:
                with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
                    call(rb, timeout_s=bad)
    times: list[Any] = [30, np.float32(30), np.int64(30), math.inf]
    for timeout_s in times:
        assert len(one.sample(timeout_s=timeout_s)) == 4
        assert one.can_sample(timeout_s=timeout_s)


def test_work_that_takes_long_goes_on(one, tmp_path):
    one.apply(_slow_saves)
    calls: dict[str, Any] = {
        "apply": partial(quick(one).apply, _sleep),
        "too long": partial(quick(one).apply, _sleep, timeout_s=0.8 * SLOW_S),
        "dumps": partial(quick(one).dumps, tmp_path / "saved"),
    }
    found = all_at_once(calls)
    assert found["apply"].result == "done"
    assert "did not answer apply within" in str(found["too long"].result)
    assert found["dumps"].result is None
    assert found["dumps"].took_s > SLOW_S > CALL_S
    one.apply(_fast_saves)
    one.dumps(tmp_path / "saved", timeout_s=math.inf)


def test_a_call_of_a_stopped_actor_ends(cluster):
    """Its calls change the buffer when the actor goes on, and it is shut down."""
    with closing(make_one()) as one:
        calls: dict[str, Any] = {
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


# -- ShardedReplayBuffer ----------------------------------------------------------------------------------------------

NEED_ALL = {"dump", "dumps", "load", "loads", "save", "__getitem__"}
EMPTIES = {"empty", "reset"}
"""Left out: other calls would find no rows."""
UPDATES = {"delete", "submit_update_if_present", "update_if_present", "update_priority", "update_tensordict_priority"}
"""Of rows in missing shards: they are dropped, with a warning."""
FREE = {"can_insert", "synchronize"}
"""Calls that ask no shard: there is no limiter, and no pending update."""


@pytest.mark.parametrize("silent", [1, 3])
def test_calls_leave_stopped_shards_out_or_raise(cluster, shards, silent):
    for shard in range(3):
        shards.pinned(shard).extend(rows())
    shards.dumps(BY_NAME["path"])
    impatient = shards._handle(call_timeout_s=CALL_S if silent == 3 else PATIENT_S)
    writer, quick_ = impatient.pinned(1), impatient._handle()
    methods = {name: call for name, call in {**SHARD_TIMED, **SHARD_UNTIMED}.items() if name not in EMPTIES}
    calls: dict[str, Any] = {
        name: partial(call, (writer if name in {"add", "extend"} else impatient)._handle())
        for name, call in methods.items()
    }
    calls["sample in time"] = partial(quick_.sample, timeout_s=0.4)
    calls["stats at once"] = partial(quick_.stats, timeout_s=0)
    with stopped(cluster, *(shards.actors if silent == 3 else [shards.actors[1]])):
        found = all_at_once(calls)
    for name, (result, took_s) in found.items():
        assert took_s < LATE_S, name
        if name == "is_alive":
            assert result is (silent == 1)
        elif name in NEED_ALL or (silent == 3 and name not in UPDATES | FREE) or " " in name:
            assert isinstance(result, LostBufferError), (name, result)
            assert "shard" in str(result), (name, result)
        elif name != "query":
            assert not isinstance(result, Exception), (name, result)
    assert "nothing was sent" in str(found["stats at once"].result)
    assert isinstance(found["sample in time"].result, NoAnswerError)
    assert (silent == 3) == isinstance(found["__len__"].result, Exception)
    until(lambda: len(shards.apply(len)) == 3)
