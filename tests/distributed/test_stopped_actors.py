"""Actors that are stopped, or work for long: every call of every handle ends by its deadline and names the actor."""

from __future__ import annotations

import inspect
import math
import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    RayReplayBuffer,
    RoundRobinWriter,
    ShardedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.errors import LostBufferError, NoAnswerError, NoPermitError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

CALL_S = 1.5
PATIENT_S = 6.0
"""Of calls that some shard answers: the machine may be busy."""
LATE_S = 45.0
SLOW_S = 2 * CALL_S


class Outcome(NamedTuple):
    result: Any
    took_s: float


def rows(n: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(n).float()}


def _pid(_: Any) -> int:
    return os.getpid()


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


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def outcome(call: Callable[[], Any]) -> Outcome:
    began = time.monotonic()
    try:
        result = call()
    except Exception as error:
        result = error
    return Outcome(result, time.monotonic() - began)


def all_at_once(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Outcome]:
    with warnings.catch_warnings(), ThreadPoolExecutor(32) as pool:
        warnings.simplefilter("ignore")
        tasks = {name: pool.submit(outcome, call) for name, call in calls.items()}
        return {name: task.result() for name, task in tasks.items()}


def quick(rb: RayReplayBuffer, **more: Any) -> RayReplayBuffer:
    """Return a handle whose calls have little time."""
    made = object.__new__(RayReplayBuffer)
    made.__setstate__({**rb.__getstate__(), "call_timeout_s": CALL_S, **more})
    return made


# -- RayReplayBuffer --------------------------------------------------------------------------------------------------

PATH = "/nonexistent/ostinato"
UPDATE: dict[str, Any] = {"index": torch.tensor([0]), "generation": torch.tensor([0]), "patch": {"x": torch.ones(1)}}
TIMED: dict[str, Callable[..., Any]] = {
    "add": lambda rb, **t: rb.add({"x": torch.tensor(1.0)}, **t),
    "append_transform": lambda rb, **t: rb.append_transform(len, **t),
    "apply": lambda rb, **t: rb.apply(_pid, **t),
    "can_insert": lambda rb, **t: rb.can_insert(**t),
    "can_sample": lambda rb, **t: rb.can_sample(**t),
    "check": lambda rb, **t: rb.check(**t),
    "delete": lambda rb, **t: rb.delete(torch.tensor([0]), **t),
    "dump": lambda rb, **t: rb.dump(PATH, **t),
    "dumps": lambda rb, **t: rb.dumps(PATH, **t),
    "empty": lambda rb, **t: rb.empty(**t),
    "export": lambda rb, **t: rb.export(PATH, **t),
    "extend": lambda rb, **t: rb.extend(rows(), **t),
    "insert_transform": lambda rb, **t: rb.insert_transform(0, len, **t),
    "load": lambda rb, **t: rb.load(PATH, **t),
    "load_dataset": lambda rb, **t: rb.load_dataset({"x": torch.zeros(2)}, **t),
    "load_state_dict": lambda rb, **t: rb.load_state_dict({}, **t),
    "loads": lambda rb, **t: rb.loads(PATH, **t),
    "mark_update": lambda rb, **t: rb.mark_update(0, **t),
    "query": lambda rb, **t: rb.query(**t),
    "read_all_in_order": lambda rb, **t: rb.read_all_in_order(**t),
    "read_episodes": lambda rb, **t: rb.read_episodes(**t),
    "register_load_hook": lambda rb, **t: rb.register_load_hook(len, **t),
    "register_save_hook": lambda rb, **t: rb.register_save_hook(len, **t),
    "sample": lambda rb, **t: rb.sample(**t),
    "save": lambda rb, **t: rb.save(PATH, **t),
    "set_": lambda rb, **t: rb.set_("x", torch.zeros(8), **t),
    "set_at_": lambda rb, **t: rb.set_at_("x", torch.zeros(1), 0, **t),
    "set_rng": lambda rb, **t: rb.set_rng(None, **t),
    "set_sampler": lambda rb, **t: rb.set_sampler(RandomSampler(), **t),
    "set_storage": lambda rb, **t: rb.set_storage(ListStorage(3), **t),
    "set_writer": lambda rb, **t: rb.set_writer(RoundRobinWriter(), **t),
    "state_dict": lambda rb, **t: rb.state_dict(**t),
    "stats": lambda rb, **t: rb.stats(**t),
    "submit_update_if_present": lambda rb, **t: rb.submit_update_if_present(**UPDATE, **t).result(),
    "synchronize": lambda rb, **t: rb.synchronize(**t),
    "update_": lambda rb, **t: rb.update_(rows(), **t),
    "update_if_present": lambda rb, **t: rb.update_if_present(**UPDATE, **t),
    "update_priority": lambda rb, **t: rb.update_priority(torch.tensor([0]), torch.ones(1), **t),
    "update_tensordict_priority": lambda rb, **t: rb.update_tensordict_priority({}, **t),
    "write_all": lambda rb, **t: rb.write_all(rows(), **t),
}
UNTIMED: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "__getitem__": lambda rb: rb[0],
    "__iter__": lambda rb: next(iter(rb)),
    "__len__": len,
    "__repr__": repr,
    "__setitem__": lambda rb: rb.__setitem__(0, {"x": torch.tensor(2.0)}),
    "client": lambda rb: rb.client(),
    "cursor": lambda rb: rb.cursor,
    "dim_extend": lambda rb: rb.dim_extend,
    "episodes": lambda rb: rb.episodes,
    "initialized": lambda rb: rb.initialized,
    "is_alive": lambda rb: rb.is_alive,
    "next": lambda rb: rb.next(),
    "priority_key": lambda rb: rb.priority_key,
    "rate_limiter": lambda rb: rb.rate_limiter,
    "start": lambda rb: rb.start(),
    "write_count": lambda rb: rb.write_count,
}


@pytest.fixture(scope="module")
def one(cluster: Any) -> Iterator[RayReplayBuffer]:
    rb = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 100),
        sampler=partial(PrioritizedSampler, 100, 0.7, 0.5),
        replay_buffer_cls=TensorDictReplayBuffer,
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    rb.extend(TensorDict(rows(), [8]))
    yield rb
    rb.close()


@pytest.fixture(scope="module")
def of_one(one: RayReplayBuffer) -> dict[str, Outcome]:
    """What all calls do while the actor is stopped."""
    handles = [quick(one) for _ in range(3 * len(TIMED) + len(UNTIMED))]
    calls: dict[str, Callable[[], Any]] = {
        **{name: partial(call, handles.pop()) for name, call in {**UNTIMED, **TIMED}.items()},
        **{f"{name} in time": partial(call, handles.pop(), timeout_s=0.3) for name, call in TIMED.items()},
        **{f"{name} at once": partial(call, handles.pop(), timeout_s=0) for name, call in TIMED.items()},
        "prefetch": quick(one, prefetch=3).sample,
    }
    with stopped(one.apply(_pid)):
        return all_at_once(calls)


def test_every_method_with_a_deadline_is_tested() -> None:
    timed = {
        name
        for name, method in inspect.getmembers(RayReplayBuffer, inspect.isfunction)
        if "timeout_s" in inspect.signature(method).parameters and not name.startswith("_")
    }
    assert timed == set(TIMED)
    timed = {
        name
        for name, method in inspect.getmembers(ShardedReplayBuffer, inspect.isfunction)
        if "timeout_s" in inspect.signature(method).parameters and not name.startswith("_")
    }
    assert timed <= set(SHARD_TIMED)


@pytest.mark.parametrize("name", TIMED)
def test_invalid_timeouts_raise_before_anything_is_sent(one: RayReplayBuffer, name: str) -> None:
    for bad in (True, np.bool_(0), -1, -0.5, math.nan, "1"):
        with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
            TIMED[name](one, timeout_s=bad)
    assert one.write_count == one.write_count


def test_timeouts_of_a_running_actor(one: RayReplayBuffer) -> None:
    times: list[Any] = [30, 30.0, np.float32(30), np.int64(30), math.inf]
    for timeout_s in times:
        assert len(one.sample(timeout_s=timeout_s)) == 4
        assert one.can_sample(timeout_s=timeout_s)
    before = one.write_count
    one.extend(TensorDict(rows(), [8]), timeout_s=30)
    assert one.write_count == before + 8


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


@pytest.mark.parametrize("name", [*UNTIMED, *TIMED, "prefetch"])
def test_a_call_of_a_stopped_actor_ends(of_one: dict[str, Outcome], name: str) -> None:
    result, took_s = of_one[name]
    assert took_s < LATE_S
    assert took_s > 0.9 * CALL_S
    if name == "is_alive":
        assert result is False
    else:
        assert isinstance(result, NoAnswerError), result
        assert "the actor of the replay buffer (process " in str(result)
        assert "the call may still take effect" in str(result)


@pytest.mark.parametrize("name", TIMED)
def test_a_call_of_a_stopped_actor_ends_by_its_timeout(of_one: dict[str, Outcome], name: str) -> None:
    result, took_s = of_one[f"{name} in time"]
    assert isinstance(result, NoAnswerError), result
    assert f"did not answer {name.replace('submit_', '')}" in str(result) or name in {
        "append_transform", "insert_transform", "dump", "load", "save", "read_all_in_order",
    }, result  # fmt: skip
    assert 0.29 < took_s < LATE_S
    result, took_s = of_one[f"{name} at once"]
    assert isinstance(result, NoAnswerError), result
    assert "nothing was sent" in str(result) or name.startswith("submit_") or "did not answer" in str(result)


def test_invalid_times_of_calls_raise_before_actors_are_started() -> None:
    makes: list[Any] = [RayReplayBuffer, partial(ShardedReplayBuffer, 2)]
    for make in makes:
        for bad in (0, -1.0, math.nan, True, "60"):
            with pytest.raises(OptionError, match="call_timeout_s must be a number of seconds above 0"):
                make(call_timeout_s=bad)


# -- ShardedReplayBuffer ----------------------------------------------------------------------------------------------

SECOND = 1 << 40  # the first row of shard 1
SHARD_TIMED: dict[str, Callable[..., Any]] = {
    "add": lambda rb, **t: rb.add({"x": torch.tensor(1.0)}, **t),
    "apply": lambda rb, **t: rb.apply(_pid, **t),
    "can_insert": lambda rb, **t: rb.can_insert(1, **t),
    "can_sample": lambda rb, **t: rb.can_sample(1, **t),
    "checkpoint": lambda rb, **t: rb.checkpoint(**t),
    "delete": lambda rb, **t: rb.delete(torch.tensor([0]), **t),
    "dump": lambda rb, **t: rb.dump(PATH, **t),
    "dumps": lambda rb, **t: rb.dumps(PATH, **t),
    "empty": lambda rb, **t: rb.empty(**t),
    "extend": lambda rb, **t: rb.extend(rows(), **t),
    "load": lambda rb, **t: rb.load(PATH, **t),
    "loads": lambda rb, **t: rb.loads(PATH, **t),
    "query": lambda rb, **t: rb.query(**t),
    "report": lambda rb, **t: rb.report(**t),
    "reset": lambda rb, **t: rb.reset(**t),
    "sample": lambda rb, **t: rb.sample(**t),
    "save": lambda rb, **t: rb.save(PATH, **t),
    "stats": lambda rb, **t: rb.stats(**t),
    "submit_update_if_present": lambda rb, **t: rb.submit_update_if_present(**UPDATE, **t).result(),
    "synchronize": lambda rb, **t: rb.synchronize(**t),
    "update_if_present": lambda rb, **t: rb.update_if_present(**UPDATE, **t),
    "update_priority": lambda rb, **t: rb.update_priority(torch.tensor([0, SECOND]), torch.ones(2), **t),
    "update_tensordict_priority": lambda rb, **t: rb.update_tensordict_priority(
        {"index": torch.tensor([0, SECOND]), "td_error": torch.ones(2)}, **t
    ),
}
SHARD_UNTIMED: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "__getitem__": lambda rb: rb[SECOND],
    "__iter__": lambda rb: next(iter(rb)),
    "__len__": len,
    "is_alive": lambda rb: rb.is_alive,
    "next": lambda rb: rb.next(),
    "prefetch": lambda rb: rb._handle(prefetch=2).sample(),
    "write_count": lambda rb: rb.write_count,
}
LOCAL: dict[str, Callable[[Any], Any]] = {
    "__repr__": repr,
    "missing": lambda rb: rb.missing,
    "rate_limiter": lambda rb: rb.rate_limiter,
}
NEED_ALL = {"dump", "dumps", "load", "loads", "save", "__getitem__"}
WRITES = {"add", "extend"}
FREE = {"can_insert", "can_insert in time", "synchronize", "synchronize in time"}
"""Calls that ask no shard: there is no limiter, and no pending update."""


@pytest.fixture(scope="module")
def several(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedReplayBuffer]:
    rb = ShardedReplayBuffer(
        2,
        storage=partial(LazyTensorStorage, 1000),
        sampler=partial(PrioritizedSampler, 1000, 0.7, 0.5),
        batch_size=4,
        checkpoint_dir=tmp_path_factory.mktemp("shards"),
        remote_config={"num_cpus": 0},
    )
    for shard in range(2):
        rb.pinned(shard).extend(rows())
    yield rb
    rb.close()


def handle(rb: ShardedReplayBuffer, name: str, call_timeout_s: float = CALL_S) -> ShardedReplayBuffer:
    impatient = rb._handle(call_timeout_s=call_timeout_s)
    return impatient.pinned(1) if name in WRITES else impatient


def known(calls: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Leave out methods that do not exist."""
    return {
        name: call
        for name, call in calls.items()
        if name == "prefetch" or (hasattr(ShardedReplayBuffer, name) and name not in {"empty", "reset"})
    }


@pytest.fixture(scope="module")
def of_two(several: ShardedReplayBuffer) -> dict[str, Outcome]:
    """What all calls do while one of two shards is stopped."""
    timed = {name: call for name, call in known(SHARD_TIMED).items() if name not in {"load", "loads", "dump", "save"}}
    calls = {name: partial(call, handle(several, name, PATIENT_S)) for name, call in timed.items()}
    calls |= {name: partial(call, handle(several, name, PATIENT_S)) for name, call in known(SHARD_UNTIMED).items()}
    short = {f"{name} in time": partial(call, handle(several, name), timeout_s=0.4) for name, call in timed.items()}
    with stopped(several.apply(_pid)[1]):
        return all_at_once({**calls, **short})


def test_a_slow_checkpoint_goes_on(several: ShardedReplayBuffer) -> None:
    several.apply(_slow_saves)
    calls: dict[str, Callable[[], Any]] = {
        "apply": partial(handle(several, "apply").apply, _sleep),
        "too long": partial(handle(several, "apply").apply, _sleep, timeout_s=0.8 * SLOW_S),
        "checkpoint": handle(several, "checkpoint").checkpoint,
    }
    found = all_at_once(calls)
    assert found["apply"].result == ["done", "done"]
    assert "it is busy, and answers other calls" in str(found["too long"].result)
    assert min(found["checkpoint"].result) > 0
    assert found["checkpoint"].took_s > SLOW_S > CALL_S
    several.apply(_fast_saves)


@pytest.mark.parametrize("name", known(SHARD_TIMED))
def test_invalid_timeouts_of_shards_raise_before_anything_is_sent(several: ShardedReplayBuffer, name: str) -> None:
    for bad in (True, np.bool_(0), -1, math.nan, "1"):
        with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
            SHARD_TIMED[name](several, timeout_s=bad)


def test_calls_leave_a_stopped_shard_out_or_raise(of_two: dict[str, Outcome]) -> None:
    for name, (result, took_s) in of_two.items():
        assert took_s < LATE_S, name
        needs_it = name in {"__getitem__", "dumps"}
        if needs_it:
            assert isinstance(result, LostBufferError), (name, result)
        elif " " not in name and name != "query":
            assert not isinstance(result, Exception), (name, result)
    assert of_two["__len__"].result > 0  # of the other shard, from which rows are deleted meanwhile
    assert isinstance(of_two["__getitem__"].result, NoAnswerError)
    assert "shard 1 of 2 (process " in str(of_two["__getitem__"].result)
    for name in ("sample in time", "extend in time", "add in time"):
        assert isinstance(of_two[name].result, NoAnswerError), (name, of_two[name].result)
        assert "shard 1 of 2 (process " in str(of_two[name].result)
    for name in ("stats in time", "report in time"):
        assert not isinstance(of_two[name].result, Exception), (name, of_two[name].result)


def test_calls_raise_while_all_shards_are_stopped(several: ShardedReplayBuffer) -> None:
    calls: dict[str, Callable[..., Any]] = {**known(SHARD_UNTIMED), **known(SHARD_TIMED)}
    made = {name: partial(call, handle(several, name)) for name, call in calls.items()}
    made |= {f"{n} in time": partial(c, handle(several, n), timeout_s=0.4) for n, c in known(SHARD_TIMED).items()}
    made |= {f"{n} at once": partial(c, handle(several, n), timeout_s=0) for n, c in known(SHARD_TIMED).items()}
    with stopped(*several.apply(_pid)):
        found = all_at_once({**made, **{name: partial(call, handle(several, name)) for name, call in LOCAL.items()}})
    for name, (result, took_s) in found.items():
        assert took_s < LATE_S, name
        if name == "is_alive":
            assert result is False
        elif name.startswith(("update_", "submit_", "delete")) and "at once" not in name:
            continue  # updates of rows in missing shards are dropped, with a warning
        elif name in LOCAL or name in FREE:
            assert not isinstance(result, Exception), (name, result)
        else:
            assert isinstance(result, LostBufferError), (name, result)
            assert "shard" in str(result), (name, result)
    assert "nothing was sent" in str(found["stats at once"].result)
    until = time.monotonic() + LATE_S
    while len(several) < 16:
        assert time.monotonic() < until


def test_calls_raise_while_the_limiter_is_stopped(cluster: Any) -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=1000, min_size_to_sample=1)
    rb = ShardedReplayBuffer(
        2,
        storage=partial(LazyTensorStorage, 1000),
        batch_size=4,
        rate_limiter=limiter,
        remote_config={"num_cpus": 0},
    )
    rb.extend(rows())
    fleet = rb._connection.fleet.actor

    def impatient() -> ShardedReplayBuffer:
        return rb._handle(call_timeout_s=PATIENT_S)

    names = {
        name: call for name, call in {**known(SHARD_TIMED), **known(SHARD_UNTIMED)}.items() if name not in NEED_ALL
    }
    waiting = {"sample", "extend", "add", "next", "__iter__", "prefetch"}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(call, impatient())
        for name, call in names.items()
        if name not in {"checkpoint", "query", "delete", "update_if_present", "submit_update_if_present"}
    }
    calls |= {f"{name} in time": partial(SHARD_TIMED[name], impatient(), timeout_s=0.4) for name in WRITES}
    calls["empty"] = impatient().empty
    pid = cluster.get(fleet.__ray_call__.remote(_pid))
    with stopped(pid):
        found = all_at_once(calls)
    for name, (result, took_s) in found.items():
        assert took_s < LATE_S, name
        if name.split()[0] in waiting | {"empty"}:
            assert isinstance(result, NoPermitError), (name, result)
            assert f"(process {pid} on node " in str(result), name
        elif name not in {"can_sample", "can_insert"}:
            assert not isinstance(result, Exception), (name, result)
    with stopped(pid, *rb.apply(_pid)):
        assert outcome(rb.close).took_s < LATE_S


def test_closing_ends_while_the_actor_is_stopped(one: RayReplayBuffer) -> None:
    """The last test of this actor."""
    with stopped(one.apply(_pid)):
        future = one.submit_update_if_present(**UPDATE)
        assert outcome(partial(one.shutdown, timeout=0.1)).took_s < LATE_S
        assert isinstance(future.exception(), LostBufferError)
