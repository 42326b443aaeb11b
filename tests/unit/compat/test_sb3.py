"""The buffer for Stable-Baselines3: each sampled row compared with a log and with the buffers of Stable-Baselines3."""

from __future__ import annotations

import importlib
import pickle
import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("stable_baselines3")

from gymnasium import Env, spaces
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common import buffers as host
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from ostinato import PrioritizedSampler
from ostinato.compat.sb3 import (
    NStepReplayBuffer,
    PrioritizedReplayBuffer,
    PriorityCallback,
    ReplayBuffer,
    td_errors,
)
from ostinato.errors import (
    CapacityError,
    EmptyBufferError,
    KeyMissingError,
    KindError,
    MissingExtraError,
    OptionError,
    PriorityError,
    SchemaError,
    UsageError,
)

GAMMA = 0.9
ACTIONS = spaces.Box(-np.inf, np.inf, (2,))
PLAIN = spaces.Box(-np.inf, np.inf, (3,))
IMAGE = spaces.Box(0, 255, (2, 4, 4), np.uint8)
SPACES: dict[str, spaces.Space[Any]] = {
    "plain": PLAIN,
    "double": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "discrete": spaces.Discrete(10_000),
    "image": IMAGE,
    "dict": spaces.Dict({"camera": IMAGE, "place": PLAIN, "room": spaces.Discrete(10_000)}),
}


def show(space: spaces.Space[Any], ids: Any) -> Any:
    """Observations `[n, *shape]` that say which they are."""
    ids = np.asarray(ids)
    if isinstance(space, spaces.Dict):
        return {key: show(part, ids) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return ids.copy()
    if space.dtype == np.uint8:
        tiles = np.stack((ids // 100, ids % 100), 1)[:, :, None, None]
        return np.broadcast_to(tiles, (len(ids), *space.shape)).astype(np.uint8)  # type: ignore[misc]
    scale = np.arange(1, 1 + int(np.prod(space.shape))).reshape(space.shape)  # type: ignore[arg-type]
    return (ids.reshape(-1, *[1] * scale.ndim) * scale).astype(np.float64)  # environments give doubles as well


def read(space: spaces.Space[Any], seen: Any) -> list[int]:
    """Which observations these are; all of their numbers must agree, and their dtypes be those of the space."""
    if isinstance(space, spaces.Dict):
        every = [read(part, seen[key]) for key, part in space.spaces.items()]
        assert all(found == every[0] for found in every)
        return every[0]
    array = seen.numpy()
    assert array.dtype == space.dtype
    if space.dtype == np.uint8:
        ids = array[:, 0, 0, 0].astype(int) * 100 + array[:, 1, 0, 0]
    else:
        ids = array.reshape(len(array), -1)[:, 0].astype(int)
    wanted = show(space, ids)
    assert (array == wanted.reshape(array.shape)).all()
    return ids.tolist()  # type: ignore[no-any-return]


class Row(NamedTuple):
    """One step of one environment; `cut` if it was reset after it, though the episode was not over."""

    now: int
    after: int
    action: float
    reward: float
    done: bool
    late: bool
    cut: bool


class Rollout:
    """Random steps of several environments, the slow log of them, and the truth about each row."""

    def __init__(self, seed: int, n_envs: int, steps: int, *, cuts: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.n_envs, self._next = n_envs, 0
        now = [self._fresh() for _ in range(n_envs)]
        self.steps: list[list[Row]] = []
        for _ in range(steps):
            rows = []
            for i in range(n_envs):
                done = bool(rng.random() < 0.2)
                late = bool(rng.random() < (0.5 if done else 0.05))  # some wrappers cut without saying done
                cut = cuts and not done and bool(rng.random() < 0.1)
                action, reward = rng.normal(size=2).astype(np.float32).tolist()
                row = Row(now[i], self._fresh(), action, reward, done, late, cut)
                now[i] = self._fresh() if done or cut else row.after
                rows.append(row)
            self.steps.append(rows)
        self.place = {row.now: (t, i) for t, rows in enumerate(self.steps) for i, row in enumerate(rows)}

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1

    def fill(self, buffer: Any, space: spaces.Space[Any], steps: range | None = None) -> None:
        for t in steps or range(len(self.steps)):
            rows = self.steps[t]
            buffer.add(
                show(space, [row.now for row in rows]),
                show(space, [row.after for row in rows]),
                np.array([[row.action, -row.action] for row in rows]),
                np.array([row.reward for row in rows]),
                np.array([row.done for row in rows]),
                [{"TimeLimit.truncated": row.late} for row in rows],
            )

    def truth(self, now: int, n: int, newest: int, *, handle: bool = True) -> tuple[int, float, float, float]:
        """Observation after the transition, done, return and discount, from the log."""
        t, i = self.place[now]
        total, k = 0.0, 0
        while True:
            row = self.steps[t + k][i]
            total += GAMMA**k * row.reward
            k += 1
            if k == n or row.done or row.cut or (handle and row.late) or t + k - 1 == newest:
                return row.after, float(row.done and not (handle and row.late)), total, GAMMA**k


def transitions(samples: Any, space: spaces.Space[Any]) -> dict[int, tuple[Any, ...]]:
    """What was sampled, by the observation it starts from; a row drawn twice is the same both times."""
    shape = (len(samples.actions), 1)
    assert samples.dones.shape == samples.rewards.shape == shape
    assert samples.dones.dtype == samples.rewards.dtype == samples.actions.dtype == torch.float32
    assert (samples.actions[:, 0] == -samples.actions[:, 1]).all()
    discounts = torch.full(shape, torch.nan) if samples.discounts is None else samples.discounts
    assert discounts.shape == shape
    assert discounts.dtype == torch.float32
    found: dict[int, tuple[Any, ...]] = {}
    columns = [x[:, 0].tolist() for x in (samples.actions, samples.dones, samples.rewards, discounts)]
    nows, afters = read(space, samples.observations), read(space, samples.next_observations)
    for now, after, *rest in zip(nows, afters, *columns, strict=True):
        assert found.setdefault(now, (after, *rest)) == pytest.approx((after, *rest), nan_ok=True)
    return found


def make(name: str, size: int, n_envs: int, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(size, SPACES[name], ACTIONS, "cpu", n_envs, **options)


# -- what is sampled is true -----------------------------------------------------------------------------------


@given(
    name=st.sampled_from(list(SPACES)),
    n_envs=st.integers(1, 3),
    fits=st.integers(4, 12),
    steps=st.integers(1, 30),
    n=st.one_of(st.none(), st.integers(1, 4)),
    handle=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_is_the_one_in_the_log(name, n_envs, fits, steps, n, handle, seed):
    torch.manual_seed(seed)
    space, rollout = SPACES[name], Rollout(seed, n_envs, steps, cuts=True)
    options = {} if n is None else {"n_steps": n, "gamma": GAMMA}
    buffer = make(name, fits * n_envs, n_envs, handle_timeout_termination=handle, **options)
    rollout.fill(buffer, space)
    kept = range(max(0, steps - fits), steps)
    assert (buffer.size(), buffer.full, buffer.pos) == (len(kept), steps >= fits, steps % fits)
    found = transitions(buffer.sample(600), space)
    assert set(found) == {row.now for t in kept for row in rollout.steps[t]}
    for now, (after, action, done, reward, discount) in found.items():
        t, i = rollout.place[now]
        assert action == pytest.approx(rollout.steps[t][i].action)
        wanted = rollout.truth(now, n or 1, steps - 1, handle=handle)
        assert (after, done) == wanted[:2]
        assert reward == pytest.approx(wanted[2], rel=1e-4, abs=1e-5)
        assert np.isnan(discount) if n is None else discount == pytest.approx(wanted[3])


def by_action(samples: Any) -> dict[float, list[float]]:
    """Every number of a transition by its action, which no other transition has."""
    parts: list[Any] = [*samples] if samples.discounts is not None else [*samples][:-1]
    leaves = [leaf for part in parts for leaf in (part.values() if isinstance(part, dict) else [part])]
    table = torch.cat([leaf.double().reshape(len(samples.actions), -1) for leaf in leaves], 1)
    return dict(zip(samples.actions[:, 0].tolist(), table.tolist(), strict=True))


@pytest.mark.parametrize("name", ["plain", "dict"])
def test_it_holds_normalized_what_the_hosts_own_buffer_holds(name):
    """Rewards are clipped each by itself before they are added up; `clip_reward` is so low that it matters."""
    set_random_seed(0)
    space, rollout, nested = SPACES[name], Rollout(2, 3, 37), name == "dict"
    vec = DummyVecEnv([lambda: Count(0, space)] * 3)
    env = VecNormalize(vec, clip_obs=1e6, clip_reward=0.5, norm_obs_keys=["place"] if nested else None)
    env.reset()
    for _ in range(12):
        env.step(np.zeros(3, np.int64))
    kind: Any = host.DictReplayBuffer if nested else host.NStepReplayBuffer
    options: dict[str, Any] = {} if nested else {"n_steps": 3, "gamma": GAMMA}
    found, kinds = [], []
    for buffer in (kind(31, space, ACTIONS, "cpu", 3, **options), make(name, 31, 3, **options)):
        rollout.fill(buffer, space)
        assert (buffer.pos, buffer.full, buffer.size(), buffer.buffer_size) == (7, True, 10, 10)
        samples: Any = buffer.sample(700, env)
        found.append(by_action(samples))
        kinds.append((type(samples), samples.rewards.dtype, samples.dones.dtype))
    assert kinds[0] == kinds[1]
    assert len(found[0]) == 30
    assert found[1].keys() == found[0].keys()
    for action, row in found[1].items():
        assert row == pytest.approx(found[0][action], rel=1e-4, abs=1e-5)


class Count(Env[Any, Any]):
    """Shows the steps of all episodes so far, and no number twice; an episode is cut after 5 steps."""

    observation_space = PLAIN
    action_space = spaces.Discrete(2)

    def __init__(self, first: int = 0, space: spaces.Space[Any] = PLAIN) -> None:
        self.observation_space = space  # type: ignore[assignment]
        self.number = first
        self.taken = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.number += 1
        self.taken = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.number += 1
        self.taken += 1
        over = self.taken == 5
        return self._show(), float(self.number), False, over, {}

    def _show(self) -> Any:
        seen = show(self.observation_space, [self.number])
        if isinstance(seen, dict):
            return {key: x[0] for key, x in seen.items()}
        return seen[0].astype(np.float32)


# -- the host's manners ----------------------------------------------------------------------------------------


def test_saved_and_loaded_through_an_algorithm(tmp_path):
    """Also where the host would refuse `optimize_memory_usage`, and marks the last row as terminal for its own sake."""
    options = {"n_steps": 2, "gamma": 0.99}

    def model(seed: int) -> DQN:
        return DQN(
            "MlpPolicy",
            Count(),
            replay_buffer_class=ReplayBuffer,
            replay_buffer_kwargs=options,
            optimize_memory_usage=True,
            buffer_size=40,
            learning_starts=10,
            seed=seed,
        )

    first, second = model(0), model(1)
    first.learn(52)
    first.save_replay_buffer(tmp_path / "rows")
    second.load_replay_buffer(tmp_path / "rows")
    ours, again = first.replay_buffer, second.replay_buffer
    assert isinstance(again, ReplayBuffer)
    assert isinstance(ours, ReplayBuffer)
    assert (again.size(), again.pos, again.full, again.n_steps, again.gamma) == (40, 12, True, 2, 0.99)
    torch.manual_seed(5)
    one = ours.sample(50)
    torch.manual_seed(5)
    other = again.sample(50)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    with pytest.warns(UserWarning, match="last trajectory"):
        second.learn(20)
    assert again.pos == 32
    assert not again.sample(300).dones.any()
    assert not again.dones.any()


@pytest.mark.parametrize(
    ("steps", "n", "wanted"),
    [
        # ends that observations do not show
        ([(0, 0, False), (0, 0, True), (0, 0, False), (0, 0, False)], 3, {1 + GAMMA * 10, 10, 100 + GAMMA * 1e3, 1e3}),
        # a reset in an episode: what was written over must not pass for what was seen
        ([(0, 1, False), (1, 2, False), (7, 7, False)], 2, {1 + GAMMA * 10, 10, 100}),
    ],
    ids=["ends", "resets"],
)
def test_returns_where_arrays_are_written_over_after_add(steps, n, wanted):
    """Environments may fill the same arrays again and again."""
    buffer = make("plain", 10, 1, n_steps=n, gamma=GAMMA)
    now, after = np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32)
    for t, (first, second, done) in enumerate(steps):
        now[:], after[:] = first, second
        buffer.add(now, after, np.zeros((1, 2)), np.array([10.0**t]), np.array([done]), [{}])
    assert sorted({round(x, 2) for x in buffer.sample(200).rewards[:, 0].tolist()}) == pytest.approx(sorted(wanted))


def test_priorities_decide_what_is_drawn():
    rollout = Rollout(8, 2, 6)
    buffer = make("plain", 20, 2, n_steps=2, gamma=GAMMA, sampler=partial(PrioritizedSampler, 20, 1.0, 1.0))
    rollout.fill(buffer, PLAIN)
    with pytest.raises(UsageError):
        buffer.sample(4)
    samples, info = buffer.sample_with_info(200)
    wanted = (samples.observations[:, 0] % 2 == 0).float()
    assert 0 < wanted.sum() < 200
    buffer.update_priority(info, wanted[:, None])
    samples, info = buffer.sample_with_info(300)
    assert info["priority_weight"].shape == (300,)
    even = (samples.observations[:, 0] % 2 == 0).float().mean()
    assert even > 0.99
    with pytest.raises(PriorityError):
        buffer.update_priority(info, torch.full((300,), -1.0))
    later = Rollout(9, 2, 10)
    later.fill(buffer, PLAIN)
    buffer.update_priority(info, torch.full((300,), 1e6))  # all of these rows were replaced since
    assert buffer._rows.stats().stale_updates >= 200


# -- errors, resets, pickles -------------------------------------------------------------------------------------------


def test_errors_change_nothing():
    wrong: list[tuple[str, Any]] = [
        ("n_steps", 3),
        ("n_steps", 0),
        ("gamma", 1.5),
        ("buffer_size", 10.0),
        ("n_envs", 0),
        ("goal_selection_strategy", "future"),
        ("sampler", "prioritized"),
    ]
    for name, value in wrong:
        with pytest.raises((OptionError, KindError, TypeError), match=name):
            ReplayBuffer(**{"buffer_size": 10, "observation_space": PLAIN, "action_space": ACTIONS, name: value})
    with pytest.raises(CapacityError):
        Rollout(0, 2, 1).fill(make("plain", 4, 2, n_steps=3, gamma=GAMMA), PLAIN)
    buffer = make("plain", 10, 2, n_steps=2, gamma=GAMMA)
    rollout = Rollout(0, 2, 3)
    rollout.fill(buffer, PLAIN)
    obs, ones = np.zeros((2, 3), np.float32), np.ones(2)
    good: dict[str, Any] = {
        "obs": obs, "next_obs": obs, "action": obs[:, :2], "reward": ones, "done": ones, "infos": [{}, {}]
    }  # fmt: skip
    bad = {"obs": obs.T, "next_obs": obs[:1], "action": obs, "reward": ones[:1], "done": ones[:, None], "infos": []}
    for name, value in bad.items():
        with pytest.raises(SchemaError, match=rf"^{name} must have the shape \[2.*environments first"):
            buffer.add(**{**good, name: value})
    seen, nested = show(SPACES["dict"], [0]), make("dict", 10, 1)
    less = {key: x for key, x in seen.items() if key != "room"}
    with pytest.raises(KeyMissingError, match=r"next_obs must have the keys .*'room'.* add \['room'\]"):
        nested.add(seen, less, obs[:1, :2], ones[:1], ones[:1], [{}])
    with pytest.raises(UsageError):
        buffer._get_samples(np.array([0]))
    with pytest.raises(OptionError, match="batch_size"):
        buffer.sample(0)
    assert buffer.size() == 3
    for now, row in transitions(buffer.sample(100), PLAIN).items():
        assert row[0] == rollout.truth(now, 2, 2)[0]


def test_reset_extend_info_and_pickles():
    buffer = make("plain", 30, 3, n_steps=3, gamma=GAMMA)
    Rollout(0, 3, 14).fill(buffer, PLAIN)
    buffer.reset()
    assert (buffer.size(), buffer.pos, buffer.full) == (0, 0, False)
    with pytest.raises(EmptyBufferError):
        buffer.sample(4)
    rollout = Rollout(6, 3, 9, cuts=True)
    rollout.fill(buffer, PLAIN, range(5))
    buffer = pickle.loads(pickle.dumps(buffer))  # goes on in the middle of an episode
    rollout.fill(buffer, PLAIN, range(5, 9))
    samples, info = buffer.sample_with_info(400)
    for now, row in transitions(samples, PLAIN).items():
        assert row[3] == pytest.approx(rollout.truth(now, 3, 8)[2], rel=1e-4, abs=1e-5)
    steps, envs = info["index"]
    drawn = [rollout.place[now] for now in read(PLAIN, samples.observations)]
    assert drawn == list(zip(steps.tolist(), envs.tolist(), strict=True))
    wanted = [[row.done and not row.late for row in rows] for rows in rollout.steps]
    assert buffer.dones[:9].tolist() == np.array(wanted, np.float32).tolist()
    obs, ones = show(PLAIN, range(100, 106)).reshape(2, 3, 3), np.ones((2, 3))
    buffer.extend(obs, obs + 1, np.stack((ones, -ones), -1), ones, ones, [[{}] * 3] * 2)
    assert (buffer.size(), buffer.pos) == (10, 1)


def test_an_import_without_stable_baselines3_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.buffers", None)
    monkeypatch.delitem(sys.modules, "ostinato.compat.sb3")
    with pytest.raises(MissingExtraError, match=r"pip install 'ostinato\[sb3\]'"):
        importlib.import_module("ostinato.compat.sb3")


@pytest.mark.parametrize(("algorithm", "env"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")])
def test_priorities_become_td_errors(algorithm, env):
    options: dict[str, Any] = {
        "policy_kwargs": {"net_arch": [8]}, "buffer_size": 100, "learning_starts": 20, "train_freq": 4, "seed": 0,
    }  # fmt: skip
    steps = {"replay_buffer_kwargs": {"n_steps": 2, "gamma": GAMMA}}
    model = algorithm("MlpPolicy", env, replay_buffer_class=PrioritizedReplayBuffer, **steps, **options)
    model.learn(60, callback=PriorityCallback())
    samples, info = model.replay_buffer.sample_with_info(200)
    assert len(info["priority_weight"].unique()) > 10
    assert samples.discounts.min() == pytest.approx(GAMMA**2)
    far = samples._replace(rewards=samples.rewards + 1e6)
    assert td_errors(model, far) == pytest.approx(1e6, rel=1e-3)
    plain = algorithm("MlpPolicy", env, replay_buffer_class=NStepReplayBuffer, **options)
    with pytest.raises(UsageError, match="PrioritizedReplayBuffer"):
        plain.learn(1, callback=PriorityCallback())
    assert plain.replay_buffer.n_steps == 3
    with pytest.raises(UsageError):
        td_errors(PPO("MlpPolicy", env, n_steps=2, batch_size=2), samples)
