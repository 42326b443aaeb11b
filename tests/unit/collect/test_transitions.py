"""Rows are the true transitions, for each autoreset mode, layout and number of dimensions."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    VectorEnvRecorder,
)
from ostinato.errors import CastWarning, SchemaError
from tests.unit.collect.envs import MODES, Transition, actions_for, log, make, run

ENVS, COUNT, GAMMA = 3, 40, 0.5
CASES = list(product(MODES, ["flat", "ted"], [1, 2]))
ENDS = {"flat": ["terminated", "truncated"], "ted": [("next", "terminated"), ("next", "truncated")]}


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
    flat |= {name: following[name].squeeze(-1) for name in ("reward", "terminated", "truncated", "done")}
    return flat | {name: rows[name] for name in ("env", "mask", "index", "gamma", "steps_to_next_obs") if name in rows}


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


def _transition(flat: dict[str, torch.Tensor], i: int) -> Transition:
    names = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
    obs, action, reward, after, terminated, truncated = (flat[name][i] for name in names)
    ends = bool(terminated), bool(truncated)
    return Transition(tuple(obs.tolist()), int(action), float(reward), tuple(after.tolist()), *ends)


@pytest.mark.parametrize(("mode", "layout", "ndim"), CASES)
def test_rows_are_what_really_happened(mode: str, layout: str, ndim: int) -> None:
    rb, actions = buffer(mode, layout, ndim), actions_for(COUNT, ENVS)
    run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode), actions)
    truth = log(ENVS, mode, actions)
    assert stored(rb, layout) == truth
    assert sum(map(len, truth)) == (len(rb) if "mask" not in rb.storage.read(slice(None)) else rb_rows(rb))
    ends = [row for rows in truth for row in rows if row.terminated or row.truncated]
    assert {(row.terminated, row.truncated) for row in ends} == {(True, False), (False, True)}


def rb_rows(rb: ReplayBuffer) -> int:
    """Rows that are not masked."""
    return int(rb.storage.read("mask").sum())


@pytest.mark.parametrize(("mode", "layout", "ndim"), CASES)
@pytest.mark.parametrize("capacity", [12, 30])
def test_a_ring_that_wraps_keeps_the_newest(mode: str, layout: str, ndim: int, capacity: int) -> None:
    rb, actions = buffer(mode, layout, ndim, capacity), actions_for(COUNT, ENVS)
    run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode), actions)
    truth = log(ENVS, mode, actions)
    assert len(rb) == capacity
    for rows, expected in zip(stored(rb, layout), truth, strict=True):
        assert rows == expected[len(expected) - len(rows) :]
        assert len(rows) >= 2


@pytest.mark.parametrize(("mode", "layout", "ndim"), CASES)
@pytest.mark.parametrize("capacity", [24, 1_000])
def test_n_step_windows_stay_in_one_episode(mode: str, layout: str, ndim: int, capacity: int) -> None:
    rb = buffer(mode, layout, ndim, capacity, sample_unit=NStep(3, GAMMA))
    actions = actions_for(COUNT, ENVS)
    run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode), actions)
    truth = {row.obs: row for rows in stored(rb, layout) for row in rows}
    batch = columns(rb.sample(2_000), layout)
    seen = set()
    for i in range(2_000):
        got, k = _transition(batch, i), int(batch["steps_to_next_obs"][i])
        env, episode, step = got.obs
        path = [truth[env, episode, step + j] for j in range(k)]
        seen.add(got.obs)
        assert got.reward == pytest.approx(sum(GAMMA**j * row.reward for j, row in enumerate(path)))
        assert got.action == path[0].action
        assert got[3:] == path[-1][3:]
        assert k == 3 or path[-1].terminated or path[-1].truncated or (env, episode, step + k) not in truth
    assert seen == set(truth), "every transition can be drawn, and no other row"


SAMPLERS: dict[str, tuple[Any, bool]] = {
    "slices": (lambda: SliceSampler(slice_len=2, truncated_key=None), True),
    "each once": (lambda: SliceSamplerWithoutReplacement(slice_len=2, truncated_key=None), True),
    "whole": (lambda: SliceSampler(slice_len=5, truncated_key=None, strict_length=False), True),
    "uniform": (RandomSampler, False),
    "rows once": (SamplerWithoutReplacement, False),
    "prioritized": (lambda: PrioritizedSampler(1_000, 0.7, 0.5), False),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("mode", "ndim"), list(product(MODES, [1, 2])))
def test_no_sampler_draws_a_row_that_is_no_transition(name: str, mode: str, ndim: int) -> None:
    make_sampler, sliced = SAMPLERS[name]
    sampler: Sampler = make_sampler()
    rb = buffer(mode, "flat", ndim, sampler=sampler)
    actions = actions_for(COUNT, ENVS)
    run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode), actions)
    truth = {row.obs for rows in stored(rb, "flat") for row in rows}
    seen = set()
    for _ in range(60):
        batch = rb.sample(100)
        places = [tuple(place) for place in batch["obs"].tolist()]
        assert set(places) <= truth
        seen |= set(places)
        if sliced and name != "whole":
            for first, second in zip(places[::2], places[1::2], strict=True):
                assert second == (*first[:2], first[2] + 1)
    long = {place for place in truth if (*place[:2], 1.0) in truth}
    assert seen == (truth if name != "slices" and name != "each once" else long)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_entries_of_a_dict_observation_are_fields(mode: str, ndim: int) -> None:
    for layout, after in (
        ("flat", ("next_where", ("goal", "next_far"))),
        ("ted", (("next", "where"), ("next", "goal", "far"))),
    ):
        rb, actions = buffer(mode, layout, ndim), actions_for(COUNT, ENVS)
        run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode, nested=True), actions)
        flat = {name: rb.storage.read(key).reshape(-1, 3) for name, key in zip(("where", "far"), after, strict=True)}
        flat["obs"] = rb.storage.read("where").reshape(-1, 3)
        kept = torch.ones(len(rb), dtype=torch.bool)
        if mode == "NEXT_STEP" and ndim == 2:
            kept = rb.storage.read("mask").reshape(-1)
        truth = {row.obs: row.next_obs for rows in log(ENVS, mode, actions) for row in rows}
        assert torch.equal(flat["far"], -flat["where"]), "the last observation of every entry is the true one"
        got = zip(flat["obs"][kept].tolist(), flat["where"][kept].tolist(), strict=True)
        assert {tuple(obs): tuple(next_obs) for obs, next_obs in got} == truth


@pytest.mark.parametrize("mode", MODES)
def test_environments_that_reuse_their_memory_do_no_harm(mode: str) -> None:
    rb, actions = buffer(mode, "flat", 2), actions_for(COUNT, ENVS)
    run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode, copy=False), actions)
    assert stored(rb, "flat") == log(ENVS, mode, actions)


@pytest.mark.parametrize("ndim", [1, 2])
def test_the_index_leads_to_each_environments_row(ndim: int) -> None:
    rb = buffer("NEXT_STEP", "flat", ndim)
    env, steps = make(ENVS, "NEXT_STEP"), VectorEnvRecorder(rb, ENVS, "NEXT_STEP")
    steps.reset(env.reset()[0])
    idle = np.zeros(ENVS, bool)
    for action in actions_for(COUNT, ENVS):
        obs, reward, terminated, truncated, info = env.step(action)
        index = steps.add_step(action, obs, reward, terminated, truncated, info)
        if ndim == 1:
            assert torch.equal(index < 0, torch.from_numpy(idle)), "no row for an environment that resets"
            assert rb.storage.read(index[index >= 0])["action"].tolist() == action[~idle].tolist()
        else:
            assert index.shape == (ENVS, 2)
            assert rb.storage.read((index[:, 0], index[:, 1]))["action"].tolist() == action.tolist()
        idle = terminated | truncated


def test_the_mode_is_read_off_the_environment() -> None:
    for mode in MODES:
        steps = VectorEnvRecorder.for_env(buffer(mode, "flat", 2), make(ENVS, mode))
        assert repr(steps) == f"VectorEnvRecorder(num_envs=3, autoreset_mode='{mode}', layout='flat')"
        assert repr(VectorEnvRecorder(buffer(mode, "flat", 2), ENVS, MODES[mode].value)) == repr(steps)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_reset_breaks_off_does_not_go_on(mode: str, ndim: int) -> None:
    rb = buffer(mode, "flat", ndim, sample_unit=NStep(9, 1.0))
    env, steps = make(ENVS, mode), VectorEnvRecorder(rb, ENVS, mode)
    for _ in range(2):
        steps.reset(env.reset()[0])
        for action in actions_for(2, ENVS):
            obs, reward, terminated, truncated, info = env.step(action)
            steps.add_step(action, obs, reward, terminated, truncated, info)
            over = terminated | truncated
            if mode == "DISABLED" and over.any():
                steps.reset(env.reset(options={"reset_mask": over.copy()})[0], over)
    batch = rb.sample(500)
    assert torch.equal(batch["obs"][:, :2], batch["next_obs"][:, :2])
    assert batch["steps_to_next_obs"].max() == 2


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_buffer_that_was_loaded_does_not_go_on_with_its_old_episodes(ndim: int) -> None:
    old, action = buffer("SAME_STEP", "flat", ndim, 15), np.zeros(ENVS, np.int64)
    env = make(ENVS, "SAME_STEP")
    steps = VectorEnvRecorder(old, ENVS, "SAME_STEP")
    steps.reset(env.reset()[0])
    for _ in range(8):
        steps.add_step(action, *env.step(action))
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


def test_more_fields_and_other_names() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    env = make(ENVS, "SAME_STEP")
    steps = VectorEnvRecorder.for_env(
        rb, env, keys={"obs": ("state", "now"), "action": "a"}, reward_dtype=torch.float64
    )
    steps.reset(env.reset()[0])
    action = np.arange(ENVS)
    steps.add_step(action, *env.step(action), extra={"hidden": torch.arange(6.0).view(3, 2)})
    rows = rb[:]
    assert set(rows) == {"state", "a", "reward", "next_obs", "terminated", "truncated", "hidden"}
    assert rows["hidden"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rows["reward"].dtype is torch.float64
    assert rows["state"]["now"].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


def test_prioritized_rows_are_addressed_by_the_index() -> None:
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(100), batch_size=50)
    env = make(ENVS, "NEXT_STEP")
    steps = VectorEnvRecorder.for_env(rb, env)
    steps.reset(env.reset()[0])
    for action in actions_for(6, ENVS):
        index = steps.add_step(action, *env.step(action))
        kept = index >= 0  # an environment that was reset has no row
        rb.update_priority(index[kept], torch.arange(3.0)[kept])
    assert set(rb.sample()["obs"][:, 0].tolist()) == {1.0, 2.0}, "environment 0 has the priority 0"


@pytest.mark.filterwarnings("ignore:single_copy saves little")
@pytest.mark.parametrize(("mode", "ndim"), list(product(MODES, [1, 2])))
@pytest.mark.parametrize("capacity", [18, 1_000])
def test_storages_that_keep_observations_once_hold_the_same_rows(mode: str, ndim: int, capacity: int) -> None:
    actions = actions_for(COUNT, ENVS)
    rb = buffer(mode, "flat", ndim, capacity)
    rb.set_storage(LazyTensorStorage(capacity, ndim=ndim, single_copy=True))
    run(VectorEnvRecorder(rb, ENVS, mode), make(ENVS, mode), actions)
    plain = buffer(mode, "flat", ndim, capacity)
    run(VectorEnvRecorder(plain, ENVS, mode), make(ENVS, mode), actions)
    assert stored(rb, "flat") == stored(plain, "flat")
    assert all(stored(rb, "flat"))


def test_environments_in_processes_give_the_same_rows() -> None:
    gym = pytest.importorskip("gymnasium")
    kept = []
    for kind in (gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv):
        rb = ReplayBuffer(storage=LazyTensorStorage(200))
        env = kind([lambda: gym.make("CartPole-v1")] * 2)
        steps = VectorEnvRecorder.for_env(rb, env)
        steps.reset(env.reset(seed=3)[0])
        for action in np.random.default_rng(0).integers(2, size=(60, 2)):
            steps.add_step(action, *env.step(action))
        env.close()
        kept.append(rb[:])
    assert len(kept[0]["obs"]) < 120, "some steps were resets"
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_results_of_other_dtypes_are_cast_to_those_before(mode: str) -> None:
    rb = buffer(mode, "flat", 1)
    steps = VectorEnvRecorder(rb, 2, mode)
    steps.reset(np.zeros((2, 3), np.float32))
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    steps.add_step(np.zeros(2, np.int32), np.full((2, 3), 0.1), [1, 2], no, no)
    info = {"final_obs": np.full((2, 3), 0.3)} if mode == "SAME_STEP" else {}
    steps.add_step([1, 0], np.full((2, 3), 0.2), np.array([1, 0], np.int8), yes, no, info)
    rows = rb[:]
    assert rows["obs"].dtype is rows["next_obs"].dtype is rows["reward"].dtype is torch.float32
    assert rows["action"].dtype is torch.int32
    after = [0.1, 0.1, 0.3, 0.3] if mode == "SAME_STEP" else [0.1, 0.1, 0.2, 0.2]
    assert rows["next_obs"][:, 0].tolist() == torch.tensor(after).tolist()
    assert rows["reward"].tolist() == [1, 2, 1, 0]


def test_values_that_do_not_fit_leave_steps_and_buffer_as_they_were() -> None:
    rb = buffer("SAME_STEP", "flat", 1)
    steps = VectorEnvRecorder(rb, 2, "SAME_STEP")
    steps.reset(np.zeros((2, 3), np.uint8))
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    bad = [
        (np.full((2, 3), 256), no, {}, r"field 'obs' must be uint8, got int64 with the value 256"),
        (np.zeros((2, 3)), yes, {"final_obs": np.full((2, 3), 0.5)}, r"field 'final_obs' must be uint8.*0.5"),
    ]
    for obs, ends, info, message in bad:
        with pytest.raises(SchemaError, match=message):
            steps.add_step(np.zeros(2), obs, np.zeros(2), ends, no, info)
    assert len(rb) == 0
    steps.add_step(np.zeros(2), np.full((2, 3), 7.0), np.zeros(2), no, no)
    assert rb[:]["next_obs"].tolist() == [[7, 7, 7]] * 2


def test_rewards_that_are_rounded_to_half_precision_warn_once() -> None:
    steps = VectorEnvRecorder(buffer("DISABLED", "flat", 1), 2, "DISABLED", reward_dtype=torch.float16)
    steps.reset(np.zeros((2, 3)))
    no = np.zeros(2, bool)
    with pytest.warns(CastWarning, match="'reward' is stored as float16"):
        steps.add_step(np.zeros(2), np.zeros((2, 3)), np.full(2, 0.1), no, no)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps.add_step(np.zeros(2), np.zeros((2, 3)), np.full(2, 0.1), no, no)
