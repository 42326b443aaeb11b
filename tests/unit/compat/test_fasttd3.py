"""The buffer of FastTD3, compared with a log of what was added."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.compat.fasttd3 import HolosomaReplayBuffer, SimpleReplayBuffer
from ostinato.errors import EmptyBufferError, KeyMissingError, OptionError, SchemaError

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tensordict")

GAMMA, ENVS = 0.5, 3


def step(now: list[int], after: list[int], kinds: list[int]) -> dict[str, Any]:
    """One step of all environments, whose observations are serial numbers; 0 is a termination, 1 a time limit."""

    def state(serials: list[int]) -> dict[str, Any]:
        obs = torch.tensor(serials, device="cpu").float().view(-1, 1) * torch.tensor([1.0, -1.0, 2.0], device="cpu")
        return {"observations": obs[:, :2], "critic_observations": obs}

    flags = torch.tensor(kinds, device="cpu")
    rewards = torch.tensor(now, device="cpu").float() % 7
    ends = {"rewards": rewards, "dones": (flags < 2).long(), "truncations": (flags == 1).long()}
    return {**state(now), "actions": state(now)["observations"][:, :1], "next": {**state(after), **ends}}


def fill(buffer: Any, seed: int, steps: int, log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    random = torch.Generator("cpu").manual_seed(seed)
    serial, now = ENVS, list(range(ENVS))
    for _ in range(steps):
        kinds = torch.randint(0, 6, (ENVS,), generator=random, device="cpu").tolist()
        after = list(range(serial, serial + ENVS))
        log.append(step(now, after, kinds))
        buffer.extend(buffer_row(log[-1]))
        now = [x + ENVS if kind < 2 else x for x, kind in zip(after, kinds, strict=True)]
        serial += 2 * ENVS
    return log


def buffer_row(row: dict[str, Any]) -> Any:
    from tensordict import TensorDict

    return TensorDict(row, batch_size=[ENVS], device="cpu")


def transitions(log: list[dict[str, Any]], size: int, n: int) -> dict[float, tuple[float, ...]]:
    """Return, next observation, flags and steps of each row present, by its observation; computed in a loop."""
    found, last = {}, len(log) - 1
    for env in range(ENVS):
        for first in range(max(0, len(log) - size), len(log)):
            total, at = 0.0, first
            while True:
                after = log[at]["next"]
                total += GAMMA ** (at - first) * float(after["rewards"][env])
                if at in {last, first + n - 1} or after["dones"][env]:
                    break
                at += 1
            ends = [float(after[name][env]) for name in ("dones", "truncations")]
            found[float(log[first]["observations"][env, 0])] = (
                total, float(after["observations"][env, 0]), *ends, at - first + 1.0,
            )  # fmt: skip
    return found


def drawn(batch: Any) -> dict[float, tuple[float, ...]]:
    after = batch["next"]
    names = ("rewards", "dones", "truncations", "effective_n_steps")
    rewards, dones, truncations, steps = (after[name].tolist() for name in names)
    columns = (rewards, after["observations"][:, 0].tolist(), dones, truncations, steps)
    assert (batch["observations"].sum(1) == 0).all()
    assert torch.equal(batch["actions"], batch["observations"][:, :1])
    return dict(zip(batch["observations"][:, 0].tolist(), zip(*columns, strict=True), strict=True))


@pytest.mark.parametrize("mode", ["plain", "asymmetric", "playground"])
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 4))
def test_transitions_end_with_their_episode_and_at_the_newest_row(mode: str, seed: int, steps: int, n: int) -> None:
    options = {"asymmetric_obs": mode != "plain", "playground_mode": mode == "playground"}
    buffer = SimpleReplayBuffer(ENVS, 5, 2, 1, 3, n_steps=n, gamma=GAMMA, **options)
    log = fill(buffer, seed, steps, [])
    assert (len(buffer), buffer.ptr) == (min(steps, 5) * ENVS, steps)
    batch = buffer.sample(150)
    assert drawn(batch) == transitions(log, 5, n)
    assert (batch["observations"][:, 0].view(ENVS, 150) % ENVS).tolist() == [[env] * 150 for env in range(ENVS)]
    assert batch["next", "dones"].dtype is torch.int64
    for part in (batch, batch["next"]) if mode != "plain" else ():
        assert torch.equal(part["critic_observations"][:, ::2], part["observations"][:, :1] * torch.tensor([1.0, 2.0]))
    assert ("critic_observations" in batch) == (mode != "plain")


def test_the_buffer_is_saved_whole_and_holds_observations_once(tmp_path: Path) -> None:
    buffer, again = (HolosomaReplayBuffer(ENVS, 5, 2, 1, 3, n_steps=3, gamma=GAMMA) for _ in range(2))
    log = fill(buffer, 3, 8, [])
    buffer.dumps(tmp_path / "rows")
    again.loads(tmp_path / "rows")
    assert drawn(again.sample(150)) == transitions(log, 5, 3)
    assert not list(buffer.parameters())
    assert not list(buffer.buffers())


def test_wrong_calls_raise_and_change_nothing() -> None:
    buffer = SimpleReplayBuffer(ENVS, 5, 2, 1, 3)
    with pytest.raises(EmptyBufferError):
        buffer.sample(1)
    row = step([0] * ENVS, [1] * ENVS, [2] * ENVS)
    for wrong, error in (
        ({**row, "actions": row["observations"]}, SchemaError), ({**row, "next": row}, KeyMissingError),
    ):  # fmt: skip
        with pytest.raises(error):
            buffer.extend(wrong)
    assert len(buffer) == 0
    for options in (
        {"n_steps": 0},
        {"gamma": 2.0},
        {"asymmetric_obs": True, "playground_mode": True, "n_critic_obs": 2},
    ):
        with pytest.raises(OptionError):
            partial(SimpleReplayBuffer, ENVS, 5, 2, 1)(**{"n_critic_obs": 3, **options})  # type: ignore[arg-type]
