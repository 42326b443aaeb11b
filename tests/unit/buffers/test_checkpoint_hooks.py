"""Hooks: rows are converted on their way into a checkpoint and come back bit for bit, or the load is refused."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Flat2TED,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TED2Flat,
    TensorStorage,
)
from ostinato.durable import read_manifest, write_manifest
from ostinato.errors import CheckpointError, KindError

from ..storages.test_checkpointers import steps

if TYPE_CHECKING:
    from ostinato import Storage


def make(storage: Storage, *, hooks: bool = True) -> ReplayBuffer:
    rb = ReplayBuffer(storage=storage)
    if hooks:
        rb.register_save_hook(TED2Flat())
        rb.register_load_hook(Flat2TED())
    return rb


def test_into_other_storages_and_only_with_the_hooks(tmp_path):
    rb, plain = make(LazyTensorStorage(24)), make(LazyTensorStorage(24), hooks=False)
    rb.extend(steps(0, 30))
    rb.dumps(tmp_path / "saved")
    plain.extend(steps(0, 6))
    plain.dumps(tmp_path / "plain")
    with pytest.raises(CheckpointError):
        rb.loads(tmp_path / "plain")
    for other in (
        make(LazyTensorStorage(24, single_copy=True)),
        make(LazyTensorStorage(50)),
        make(TensorStorage(steps(0, 24))),
    ):
        other.loads(tmp_path / "saved")
        # a full ring has room in a larger one: its oldest row comes first
        seam = rb.storage.cursor if other.storage.capacity > 24 else 0
        for key in ("obs", ("next", "obs")):
            assert torch.equal(other.storage[:].get(key), rb.storage[:].get(key).roll(-seam, 0))


def half(rows: Any, path: None = None) -> dict[Any, Any]:
    return {"x": rows["x"].half(), "about": {"text": "half", "many": (1, 2)}, "deep": TensorDict({"y": rows["y"]}, [])}


def whole(data: Any, out: None = None) -> dict[Any, Any]:
    assert data["about"] == {"text": "half", "many": (1, 2)}
    assert data["deep"].batch_size == ()
    return {"x": data["x"].float(), "y": data["deep"]["y"]}


def test_hooks_run_in_order_and_what_comes_back_must_be_what_was_saved(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.register_save_hook(half)
    rb.register_save_hook(lambda rows, path: {"inside": rows})
    rb.extend({"x": torch.arange(7.0), "y": torch.arange(7)})
    rb.dumps(tmp_path / "saved")
    hooks: list[Any] = [
        (lambda data, out: {"x": data["x"]}, r"missing \['y'\]"),
        (lambda data, out: {**whole(data), "z": torch.zeros(5)}, r"unknown \['z'\]"),
        (lambda data, out: {**whole(data), "x": data["x"]}, r"got float16\[5\]"),
        (lambda data, out: {key: value[:4] for key, value in whole(data).items()}, r"got float32\[4\]"),
        (lambda data, out: "rows", "got str"),
        (lambda data, out: {**whole(data), "x": torch.zeros(3)}, r"got float32\[3\]"),
    ]
    for hook, message in (*hooks, (whole, "")):
        other = ReplayBuffer(storage=LazyTensorStorage(5))
        other.extend({"x": torch.full((5,), 9.0), "y": torch.arange(5)})
        other.storage.register_load_hook(lambda data, out: data["inside"])
        other.register_load_hook(hook)
        with pytest.raises(CheckpointError, match=message) if message else nullcontext():
            other.loads(tmp_path / "saved")
        assert other["x"].tolist() == ([9.0] * 5 if message else [5, 6, 2, 3, 4])


def test_hooks_are_checked_and_travel(tmp_path):
    rb = make(LazyMemmapStorage(24))
    with pytest.raises(KindError):
        rb.register_save_hook(TED2Flat)
    rb.extend(steps(0, 9))
    other = pickle.loads(pickle.dumps(rb))
    other.dumps(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"saving hooks \['TED2Flat'\]: register the loading hooks"):
        make(LazyMemmapStorage(24), hooks=False).loads(tmp_path / "saved")
    rb.register_save_hook(lambda rows, path: object())
    with pytest.raises(CheckpointError):
        rb.dumps(tmp_path / "no tensors")
    assert not (tmp_path / "no tensors").exists()


def test_a_tree_that_contradicts_itself_is_refused(tmp_path):
    rb = make(LazyTensorStorage(24))
    rb.extend(steps(0, 9))
    rb.dumps(tmp_path / "saved")
    text = json.dumps(read_manifest(tmp_path / "saved", format_name="ostinato-buffer").body)
    obs = '"name": "hooked 0: obs"'
    for old, new in (
        ('"kind": "tensor", ' + obs, '"kind": "module", ' + obs),
        (obs, '"name": "hooked 9"'),
        ('"name": "hooked 1: action.kind"', obs),
        ('"batch": []', '"batch": [3]'),
        ('"hooked": {', '"booked": {'),
        ('"keys": ["obs", "action", ', '"keys": ["obs", '),
    ):
        assert old in text
        write_manifest(tmp_path / "saved", json.loads(text.replace(old, new)), format_name="ostinato-buffer")
        with pytest.raises(CheckpointError):
            make(LazyTensorStorage(24)).loads(tmp_path / "saved")
