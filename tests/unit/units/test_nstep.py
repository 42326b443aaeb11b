"""n-step returns: against a loop over the log, time limits, environments, dtypes, threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ostinato import (
    Episodes,
    NStep,
    SequenceUnit,
)
from ostinato.errors import KeyMissingError, SchemaError

from .rings import buffer


def test_float64_rewards_are_added_up_in_float64():
    rb = buffer(20, 1, sample_unit=NStep(10, 0.99))
    rb.extend({**named(), "reward": torch.full((20,), 1 / 3, dtype=torch.float64)})
    batch = rb.sample()
    expected = sum(0.99**k / 3 for k in range(int(batch["steps_to_next_obs"])))
    assert math.isclose(float(batch["reward"]), expected, rel_tol=1e-14)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("prefetch", [None, 1])
def test_rewards_of_the_next_episode_do_not_count(prefetch):
    """Neither in direct calls nor in batches that are made by a thread."""
    rb = buffer(20, 64, sample_unit=NStep(3, 0.9), prefetch=prefetch)
    t = torch.arange(20)
    rb.extend({**named(), "done": t % 10 == 9, "reward": torch.where(t < 10, 1.0, torch.inf)})
    batch = rb.sample()
    assert torch.equal(batch["reward"].isfinite(), batch["obs"] < 10)


# -- the fields after the step -----------------------------------------------------------------------------------------


def named(count: int = 20, **names: str) -> dict[str, Any]:
    """Rows of one episode whose next observation, in `next_obs`, may have another name."""
    t = torch.arange(count)
    rows = {"obs": t.float(), "next_obs": t + 1.0, "reward": torch.ones(count), "done": t == count - 1}
    return {names.get(name, name): value for name, value in rows.items()}


def test_a_dict_of_next_observations_is_that_of_the_last_step():
    t = torch.arange(20.0)
    rb = buffer(50, sample_unit=NStep(3, 0.9))
    rb.extend({**named(), "obs": {"x": t, "y": t}, "next_obs": {"x": t + 1, "y": t + 1}})
    batch = rb.sample()
    for name in ("x", "y"):
        assert torch.equal(batch["next_obs"][name], batch["obs"][name] + batch["steps_to_next_obs"])
    with pytest.raises(SchemaError, match=r"next_keys=\['over', \('obs_next', 'x'\)\]"):
        buffer(50, sample_unit=NStep(3, 0.9), episodes=Episodes(end_key="over")).extend(
            {"obs": {"x": t}, "obs_next": {"x": t + 1}, "reward": torch.ones(20), "over": t == 19}
        )


@pytest.mark.parametrize("name", ["obs_next", "obs2", "nextobs"])
def test_a_next_observation_of_another_name_raises_before_anything_is_stored(name):
    rb, rows = buffer(50, sample_unit=NStep(3, 0.9)), named(next_obs=name)
    words = f"'{name}' looks like one: name all fields after the step, next_keys=\\['done', '{name}'\\]"
    for write in (lambda: rb.extend(rows), lambda: rb.add({key: value[0] for key, value in rows.items()})):
        with pytest.raises(SchemaError, match=words):
            write()
    with pytest.raises(KeyMissingError, match="'reward'"):
        rb.extend(named(reward="rew"))
    assert len(rb) == 0
    assert not rb.storage.laid_out
    after = {"reward": torch.ones(20), "done": torch.zeros(20, dtype=torch.bool)}
    nested = {"obs": torch.zeros(20, 2), name: torch.zeros(20, 2), "next": after}
    for other in ({**named(), "goal": torch.zeros(20), "goal_next": torch.zeros(20)}, nested):
        with pytest.raises(SchemaError):
            rb.extend(other)
    unit = NStep(3, 0.9, next_keys=["done", name])
    rb = buffer(50, sample_unit=unit)
    rb.extend(rows)
    batch = rb.sample()
    assert torch.equal(batch[name], batch["obs"] + batch["steps_to_next_obs"])
    assert repr(unit) == f"NStep(n=3, gamma=0.9, moves=['done', '{name}'])"


def test_rows_without_a_next_observation_say_so():
    rows = named()
    del rows["next_obs"]
    for unit in (NStep(3, 0.9), [NStep(3, 0.9), SequenceUnit(2, done_key="done")]):
        with pytest.raises(
            SchemaError,
            match=r"rows have 'obs': name it beside the flags, next_keys=\['done'\], or give these alone",
        ):
            buffer(50, sample_unit=unit).extend(rows)
    alone = {"reward": rows["reward"], "done": rows["done"]}
    for unit, given, moves in ((NStep(3, 0.9, next_keys=()), rows, []), (NStep(3, 0.9), alone, ["done"])):
        rb = buffer(50, sample_unit=unit)
        rb.extend(given)
        assert set(rb.sample()) == {*given, "gamma", "steps_to_next_obs"}
        assert repr(unit) == f"NStep(n=3, gamma=0.9, moves={moves})"


@pytest.mark.parametrize("by_unit", [True, False])
def test_the_flag_that_ends_episodes_is_that_of_the_last_step(by_unit):
    t, name = torch.arange(40), "over"
    unit = NStep(3, 0.9, done_key=name) if by_unit else NStep(3, 0.9)
    rb = buffer(50, sample_unit=unit, episodes=None if by_unit else Episodes(end_key=name))
    rb.extend({"obs": t.float(), "next_obs": t + 1.0, "reward": torch.ones(40), name: t % 10 == 9})
    batch = rb.sample(300)
    assert torch.equal(batch[name], batch["next_obs"] % 10 == 0)
    assert f"'{name}'" in repr(rb.sample_unit)
