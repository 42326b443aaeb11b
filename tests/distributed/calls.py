"""Calls of every public method of handles, which are made while actors are stopped or gone."""

from __future__ import annotations

import inspect
import tempfile
from concurrent.futures import Future
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from ostinato import ListStorage, Observer, RandomSampler, RayReplayBuffer, RoundRobinWriter, ShardedReplayBuffer

from .handles import process_of

if TYPE_CHECKING:
    from collections.abc import Callable


def rows(n: int = 8) -> TensorDict:
    """Return rows `[n]` of one field."""
    return TensorDict({"x": torch.arange(n).float()}, [n])


FOLDER = tempfile.TemporaryDirectory(prefix="ostinato-")
BY_NAME: dict[str, Any] = {
    "data": rows(),
    "function": process_of,
    "generator": None,
    "hook": len,
    "index": torch.tensor([0]),
    "key": "x",
    "observer": Observer(),
    "path": f"{FOLDER.name}/saved",
    "sampler": RandomSampler(),
    "source": {"x": torch.zeros(2)},
    "state": {},
    "storage": ListStorage(3),
    "transform": len,
    "value": torch.zeros(1),
    "writer": RoundRobinWriter(),
}
"""Arguments for the parameters of all methods."""
PATCH: dict[str, Any] = {"generation": torch.tensor([0]), "patch": {"x": torch.ones(1)}}
BY_METHOD: dict[str, dict[str, Any]] = {
    "add": {"data": rows()[0]},
    "insert_transform": {"index": 0},
    **dict.fromkeys(("submit_update_if_present", "update_if_present"), PATCH),
    "update_priority": {"priority": torch.ones(1)},
    "update_tensordict_priority": {"data": TensorDict({"index": torch.tensor([0]), "td_error": torch.ones(1)}, [1])},
}


def timed(cls: type) -> dict[str, Callable[..., Any]]:
    """Return calls of all public methods that have a deadline."""
    found: dict[str, Any] = {}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        parameters = inspect.signature(method).parameters.values()
        if name.startswith("_") or "timeout_s" not in {one.name for one in parameters}:
            continue
        needed = [one.name for one in parameters if one.default is one.empty and "VAR" not in one.kind.name]
        given = {one: BY_NAME[one] for one in needed if one != "self"} | BY_METHOD.get(name, {})
        found[name] = partial(_call, name, given)
    return found


def _call(name: str, given: dict[str, Any], rb: Any, **timeout: Any) -> Any:
    result = getattr(rb, name)(**given, **timeout)
    return result.result() if isinstance(result, Future) else result


TIMED, SHARD_TIMED = timed(RayReplayBuffer), timed(ShardedReplayBuffer)
UPDATE: dict[str, Any] = {"index": torch.tensor([0]), **PATCH}
BOTH_UNTIMED: dict[str, Any] = {
    "__bool__": bool,
    "__getitem__": itemgetter(0),
    "__iter__": lambda rb: next(iter(rb)),
    "__len__": len,
    "is_alive": attrgetter("is_alive"),
    "next": methodcaller("next"),
    "write_count": attrgetter("write_count"),
}
UNTIMED: dict[str, Any] = {
    **BOTH_UNTIMED,
    **{name: attrgetter(name) for name in ("cursor", "dim_extend", "episodes", "initialized", "priority_key")},
    **{name: methodcaller(name) for name in ("__repr__", "client", "start")},
    "__setitem__": methodcaller("__setitem__", 0, rows()[0]),
    "rate_limiter": attrgetter("rate_limiter"),
}
SHARD_UNTIMED: dict[str, Any] = {
    **BOTH_UNTIMED,
    "__getitem__": itemgetter(1 << 40),  # the first row of shard 1
    "prefetch": lambda rb: rb._handle(prefetch=2).sample(),
}
