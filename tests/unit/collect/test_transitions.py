"""Rows are the true transitions, for each autoreset mode, layout and number of dimensions."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    TensorDictReplayBuffer,
    VectorEnvRecorder,
)
from tests.unit.collect.envs import MODES, Transition, actions_for, log, make, run

ENVS, COUNT = 3, 40
CASES = list(product(MODES, ["flat", "ted"], [1, 2]))
ENDS = {"flat": ["terminated", "truncated"], "ted": [("next", "terminated"), ("next", "truncated")]}


NAMES = ("obs", "action", "reward", "next_obs", "terminated", "truncated")


def buffer(mode: str, layout: str, ndim: int, capacity: int = 1_000, **options: Any) -> ReplayBuffer:
    """A buffer that can keep the episodes apart."""
    ends: Any = ENDS[layout]
    episodes = Episodes(traj_key="env", end_key=ends) if ndim == 1 else Episodes(ends)
    if mode == "NEXT_STEP" and ndim == 2:
        episodes = Episodes(ends, mask_key="mask")
    kind = TensorDictReplayBuffer if layout == "ted" else ReplayBuffer
    return kind(
        storage=LazyTensorStorage(capacity, ndim=ndim),
        episodes=episodes,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def columns(rows: Any, layout: str) -> dict[str, torch.Tensor]:
    """The fields of rows, `[n, ...]`, under their flat names."""
    if layout == "flat":
        return dict(rows.items())
    following = rows["next"]
    flat = {"obs": rows["observation"], "action": rows["action"], "next_obs": following["observation"]}
    flat |= {name: following[name].squeeze(-1) for name in ("reward", "terminated", "truncated")}
    return flat | ({"mask": rows["mask"]} if "mask" in rows else {})


def _transition(flat: dict[str, torch.Tensor], i: int) -> Transition:
    found: list[Any] = [flat[name][i].tolist() for name in NAMES]
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in found]
    return Transition(*values)


def stored(rb: ReplayBuffer, layout: str) -> list[list[Transition]]:
    """The transitions of each environment, in order, read off the storage; rows that are masked left out."""
    flat = columns(rb.storage.read(slice(None)), layout)
    if rb.storage.ndim > 1:
        flat = {name: value.flatten(0, 1) for name, value in flat.items()}
    order = (torch.arange(len(rb)) + (rb.storage.cursor if len(rb) == rb.storage.capacity else 0)) % len(rb)
    out: list[list[Transition]] = [[] for _ in range(ENVS)]
    for i in order.tolist():
        if "mask" not in flat or flat["mask"][i]:
            out[int(flat["obs"][i, 0])].append(_transition(flat, i))
    return out


@pytest.mark.parametrize(("mode", "layout", "ndim"), CASES)
def test_rows_are_what_really_happened(mode, layout, ndim):
    """Also in a ring that wraps, where environments reuse their memory, and where observations are stored once."""
    actions = actions_for(COUNT, ENVS)
    truth = log(ENVS, mode, actions)
    ends = [row for rows in truth for row in rows if row.terminated or row.truncated]
    assert {(row.terminated, row.truncated) for row in ends} == {(True, False), (False, True)}
    for capacity, copy, single_copy in ((1_000, True, False), (12, False, False), (30, True, True)):
        rb = buffer(mode, layout, ndim, capacity)
        rb.set_storage(LazyTensorStorage(capacity, ndim=ndim, single_copy=single_copy and layout == "flat"))
        run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode, copy=copy), actions)
        for rows, expected in zip(stored(rb, layout), truth, strict=True):
            assert rows == (expected if capacity == 1_000 else expected[len(expected) - len(rows) :])
            assert len(rows) >= 2
        if capacity == 1_000 and not (mode == "NEXT_STEP" and ndim == 2):  # there reset steps write masked rows
            assert len(rb) == sum(map(len, truth))


@pytest.mark.parametrize(("mode", "ndim"), list(product(MODES, [1, 2])))
def test_dict_observations_more_fields_and_indices(mode, ndim):
    rb, env = buffer(mode, "ted", ndim), make(ENVS, mode, nested=True)
    steps = VectorEnvRecorder.for_env(rb, env, keys={"action": "a"}, reward_dtype=torch.float64)
    assert repr(steps) == f"VectorEnvRecorder(num_envs=3, autoreset_mode='{mode}', layout='ted')"
    assert repr(VectorEnvRecorder(rb, ENVS, MODES[mode].value, layout="ted")) == repr(steps)
    actions = actions_for(COUNT, ENVS)
    for action, ended, index in run(
        steps, env, actions, lambda action: {"hidden": torch.from_numpy(action).view(ENVS, 1) + 0.5}
    ):
        if ndim == 2:
            assert index.shape == (ENVS, 2)
            assert rb.storage.read((index[:, 0], index[:, 1]))["a"].tolist() == action.tolist()
        else:
            idle = ended if mode == "NEXT_STEP" else np.zeros(ENVS, bool)
            assert torch.equal(index < 0, torch.from_numpy(idle)), "no row for an environment that resets"
            assert rb.storage.read(index[index >= 0])["a"].tolist() == action[~idle].tolist()
    keys: list[Any] = ["where", ("next", "where"), ("next", "goal", "far")]
    obs, after, far = (rb.storage.read(key).reshape(-1, 3) for key in keys)
    assert torch.equal(far, -after), "the last observation of every entry is the true one"
    assert torch.equal(rb.storage.read("hidden"), rb.storage.read("a")[..., None] + 0.5)
    assert rb.storage.read(("next", "reward")).dtype is torch.float64
    kept = torch.ones(len(rb), dtype=torch.bool)
    if mode == "NEXT_STEP" and ndim == 2:
        kept = rb.storage.read("mask").reshape(-1)
    got = {tuple(now): tuple(then) for now, then in zip(obs[kept].tolist(), after[kept].tolist(), strict=True)}
    assert got == {row.obs: row.next_obs for rows in log(ENVS, mode, actions) for row in rows}


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_reset_breaks_off_does_not_go_on(mode, ndim):
    rb = buffer(mode, "flat", ndim, sample_unit=NStep(9, 1.0))
    env, steps = make(ENVS, mode), VectorEnvRecorder(rb, ENVS, mode)
    for _ in range(2):
        run(steps, env, actions_for(2, ENVS))
    batch = rb.sample(500)
    assert torch.equal(batch["obs"][:, :2], batch["next_obs"][:, :2])
    assert batch["steps_to_next_obs"].max() == 2


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_buffer_that_was_loaded_does_not_go_on_with_its_old_episodes(ndim):
    old, action = buffer("SAME_STEP", "flat", ndim, 15), np.zeros(ENVS, np.int64)
    env = make(ENVS, "SAME_STEP")
    steps = VectorEnvRecorder(old, ENVS, "SAME_STEP")
    run(steps, env, np.zeros((8, ENVS), np.int64))
    rb = buffer("SAME_STEP", "flat", ndim, 15, sample_unit=NStep(5, 1.0))
    rb.load_state_dict(old.state_dict())
    last = rb.storage.read("obs").reshape(-1, 3)[[(rb.storage.cursor - 3 + i) % 15 for i in range(3)]]
    steps = VectorEnvRecorder(rb, ENVS, "SAME_STEP")
    fresh = make(ENVS, "SAME_STEP")
    steps.reset(fresh.reset()[0] + np.float32(100))
    for _ in range(2):
        obs, reward, terminated, truncated, _ = fresh.step(action)
        obs = obs + np.float32(100)
        steps.add_step(action, obs, reward, terminated, truncated, {"final_obs": obs})
    batch = rb.sample(500)
    assert torch.equal(batch["obs"][:, 0] >= 100, batch["next_obs"][:, 0] >= 100)
    newest = (batch["obs"][:, None] == last).all(-1).any(-1)
    assert newest.any()
    assert (batch["truncated"] | batch["terminated"])[newest].all()
