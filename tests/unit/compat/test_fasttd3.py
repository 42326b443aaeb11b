"""The buffer of FastTD3, compared with a log of what was added."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.compat.fasttd3 import HolosomaReplayBuffer, SimpleReplayBuffer
from ostinato.errors import EmptyBufferError, KeyMissingError, OptionError, SchemaError

from .test_skrl import GAMMA, Log

tensordict = pytest.importorskip("tensordict")

ENVS, SIZE = 3, 5


def as_step(rows: list[dict[str, float]]) -> Any:
    """A step of the log; what a critic observes begins with the observation."""
    column = {name: torch.tensor([float(row[name]) for row in rows], device="cpu") for name in rows[0]}

    def state(name: str) -> dict[str, Any]:
        obs = column[name].unsqueeze(1) * torch.tensor([1.0, -1.0, 2.0], device="cpu")
        return {"observations": obs[:, :2], "critic_observations": obs}

    late, dones = column["truncated"], (column["terminated"] + column["truncated"]).long()
    ends = {"rewards": column["rewards"], "dones": dones, "truncations": late.long()}
    row = {**state("observations"), "actions": column["observations"].unsqueeze(1)}
    return tensordict.TensorDict({**row, "next": {**state("next_observations"), **ends}}, batch_size=[ENVS])


def fill(buffer: Any, log: Log) -> None:
    for rows in log.rows:
        buffer.extend(as_step(rows))


def transitions(log: Log, n: int) -> dict[float, tuple[float, ...]]:
    """Return, next observation, flags and steps of each row present, by its observation."""
    found: dict[float, tuple[float, ...]] = {}
    oldest = max(0, len(log.rows) - SIZE)
    for start in (row["observations"] for rows in log.rows[oldest:] for row in rows):
        rows = log.follow(start, n, oldest)
        last, total = rows[-1], sum(GAMMA**k * row["rewards"] for k, row in enumerate(rows))
        late, ended = last["truncated"], last["terminated"] or last["truncated"]
        found[start] = total, last["next_observations"], ended, late, len(rows)
    return found


def drawn(batch: Any) -> dict[float, tuple[float, ...]]:
    assert (batch["observations"].sum(1) == 0).all()
    assert torch.equal(batch["actions"], batch["observations"][:, :1])
    after = {**batch["next"], "observations": batch["next", "observations"][:, 0]}
    names = ("rewards", "observations", "dones", "truncations", "effective_n_steps")
    columns = zip(*(after[name].tolist() for name in names), strict=True)
    return dict(zip(batch["observations"][:, 0].tolist(), columns, strict=True))


@pytest.mark.parametrize("mode", ["plain", "asymmetric", "playground"])
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 4))
def test_transitions_end_with_their_episode_and_at_the_newest_row(mode, seed, steps, n):
    options: dict[str, Any] = {"asymmetric_obs": mode != "plain", "playground_mode": mode == "playground"}
    buffer, log = SimpleReplayBuffer(ENVS, SIZE, 2, 1, 3, n_steps=n, gamma=GAMMA, **options), Log(seed, steps, ENVS)
    fill(buffer, log)
    assert (len(buffer), buffer.ptr) == (min(steps, SIZE) * ENVS, steps)
    batch = buffer.sample(150)
    assert drawn(batch) == transitions(log, n)
    envs = {row["observations"]: env for rows in log.rows for env, row in enumerate(rows)}
    assert [envs[now] for now in batch["observations"][:, 0].tolist()] == [i for i in range(ENVS) for _ in range(150)]
    for part in (batch, batch["next"]) if mode != "plain" else ():
        assert torch.equal(part["critic_observations"][:, :2], part["observations"])
    assert ("critic_observations" in batch) == (mode != "plain")


def test_the_buffer_is_saved_whole(tmp_path):
    buffer, again = (HolosomaReplayBuffer(ENVS, SIZE, 2, 1, 3, n_steps=3, gamma=GAMMA) for _ in range(2))
    log = Log(3, 8, ENVS)
    fill(buffer, log)
    buffer.dumps(tmp_path / "rows")
    again.loads(tmp_path / "rows")
    assert drawn(again.sample(150)) == transitions(log, 3)


def test_wrong_calls_raise_and_change_nothing():
    buffer, row = SimpleReplayBuffer(ENVS, SIZE, 2, 1, 3), as_step(Log(0, 1, ENVS).rows[0])
    with pytest.raises(EmptyBufferError):
        buffer.sample(1)
    for change, error in (({"actions": row["observations"]}, SchemaError), ({"next": row}, KeyMissingError)):
        with pytest.raises(error):
            buffer.extend({**row, **change})
    assert len(buffer) == 0
    playground = {"asymmetric_obs": True, "playground_mode": True, "n_critic_obs": 2}
    for options in ({"n_steps": 0}, {"gamma": 2.0}, playground):
        with pytest.raises(OptionError):
            partial(SimpleReplayBuffer, ENVS, SIZE, 2, 1)(**{"n_critic_obs": 3, **options})  # type: ignore[arg-type]
