"""Ensembles, and offline data with one's own experience: names of rows, options, routed writes."""

from __future__ import annotations

import importlib
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import both, raw, rows


def _members(lib: Any, *bases: int) -> list[Any]:
    found = []
    for base in bases:
        found.append(lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10)))
        found[-1].extend(rows(8, base))
    return found


def _pair(lib: Any, **options: Any) -> Any:
    return lib.ReplayBufferEnsemble(*_members(lib, 0, 100), **options)


@both
def test_batches(lib, note):
    for options in ({}, {"generator": torch.Generator().manual_seed(3)}):
        rb = _pair(lib, sample_from_all=True, batch_size=6, **options)
        for size in (None, 2, 20):
            batch, info = raw(rb).sample(size, return_info=True)
            members, index = batch["index", "buffer_ids"], batch["index", "index"]
            note((sorted(map(str, batch.keys(True, True))), batch["obs"], members, info["index", "buffer_ids"]))
            assert (index + 100 * members == batch["obs"]).all()
        note([batch["obs"] for batch in islice(raw(rb), 2)])


def _empty(lib: Any, **options: Any) -> Any:
    members = [lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(4)) for _ in range(2)]
    return lib.ReplayBufferEnsemble(*members, **options)


def _routed(count: int) -> TensorDict:
    tasks = torch.arange(count) % 2
    return TensorDict({"obs": torch.arange(count), "info": {"task": tasks.unsqueeze(-1)}}, [count])


def _named(rows: TensorDict) -> list[Any]:
    return [rows.batch_size, rows["buffer_ids"], rows["index"]]


@both
def test_routed_writes(lib, note):
    rb = _empty(lib, routing_key=("info", "task"))
    for count in (3, 6, 12):
        note(_named(raw(rb).extend(_routed(count))))
        note([len(rb[0]), len(rb[1])])
    note([raw(rb)[i]["obs"] for i in (0, 1)])
    note(_named(raw(rb).add(_routed(2)[1])))
    rb.add(_routed(2))
    for wrong in (_routed(2).float(), _routed(2) + 1, _routed(2).to_dict()):
        rb.extend(wrong)
    for dim in (0, 1):
        wide = _empty(lib, routing_dim=dim)
        note(_named(raw(wide).extend(_routed(6).view([2, 3] if dim == 0 else [3, 2]))))
        note(raw(wide)[1]["obs"])
        wide.extend(_routed(9).view(3, 3))
        wide.add(_routed(1)[0])
    _empty(lib, routing_key="task", routing_dim=0)
    _empty(lib, routing_dim="task")


# -- offline to online ------------------------------------------------------------------------------------------------


def _numbers(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"obs": torch.arange(first, first + count)}, [count])


def _dataset(lib: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20))
    rb.extend(_numbers(20))
    return rb


def _mixed(lib: Any, **options: Any) -> Any:
    return lib.OfflineToOnlineReplayBuffer(_dataset(lib), **{"online_capacity": 10, **options})


@pytest.mark.parametrize("fraction", [0.25, 0.8])
@both
def test_offline_to_online(lib, note, fraction):
    rb = _mixed(lib, offline_fraction=fraction, batch_size=10)
    rb.sample()
    rb.extend(_numbers(4, 100))
    for size in (None, 4, 7):
        rb.sample(size)
    for step in (3, 7, 10, 12):
        rb.anneal(step, 10)
        note(rb.offline_fraction)
        rb.sample()
    note((len(rb), len(rb.offline_buffer), len(rb.online_buffer)))


@both
def test_options_and_names_of_datasets(lib, note):
    storage = lib.LazyTensorStorage(3)
    note(len(_mixed(lib, online_capacity=None, online_storage=storage).online_buffer))
    wrong: list[dict[str, Any]] = [{"offline_fraction": fraction} for fraction in (0.0, 1.0, -0.5)]
    for options in (*wrong, {"online_storage": storage}, {"online_capacity": None}, {"split": True}):
        _mixed(lib, **options)
    _mixed(lib).sample()
    lib.OfflineToOnlineReplayBuffer("minari:x", online_capacity=3)
    rb = _mixed(lib, transform=lambda batch: batch.set("twice", batch["obs"] * 2), batch_size=4)
    note(sorted(rb.sample().keys()))

    def make(name: str, **options: Any) -> Any:
        note((name, options))
        return raw(_dataset(lib))

    utils = importlib.import_module("torchrl.data.datasets.utils")
    utils.register_dataset("ostinato-test", make, replace=True)
    lib.OfflineToOnlineReplayBuffer("ostinato-test:a", online_capacity=5, batch_size=4, split=1).sample()
    target = raw(lib.ReplayBuffer(storage=lib.LazyTensorStorage(30)))
    note(len(raw(lib.prefill_replay_buffer)(target, "ostinato-test:b", chunk_size=7)))
