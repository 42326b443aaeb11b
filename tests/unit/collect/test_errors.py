"""Steps that cannot be stored as transitions raise before anything changes; the message says what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    TensorDictReplayBuffer,
    VectorEnvRecorder,
)
from ostinato.errors import CapacityError, KindError, OptionError, SchemaError, UsageError

NO = np.zeros(2, bool)
YES = np.array([False, True])
ONE_EACH: dict[str, Any] = {"traj_key": "env", "end_key": ["terminated", "truncated"]}


def buffer(capacity: int = 100, ndim: int = 1, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim), **options)


def begun(rb: ReplayBuffer, mode: str = "SAME_STEP") -> VectorEnvRecorder:
    """Two environments with observations of three numbers."""
    steps = VectorEnvRecorder(rb, 2, mode)
    steps.reset(np.zeros((2, 3)))
    return steps


def step(steps: VectorEnvRecorder, ends: np.ndarray = NO, info: Any = None, **changed: Any) -> torch.Tensor:
    given = {"action": np.zeros(2, int), "obs": np.ones((2, 3)), "reward": np.ones(2), "terminated": NO, **changed}
    return steps.add_step(**given, truncated=ends, info=info)


BUFFERS: list[Any] = [
    ({"ndim": 2}, {"autoreset_mode": "NEXT_STEP"}, r"episodes=Episodes\(mask_key='mask'\), or use ndim=1"),
    (
        {"sample_unit": NStep(3, 0.9)},
        {},
        r"rows of 2 environments .* episodes=Episodes\(traj_key='env', end_key=\['terminated', 'truncated'\]\)",
    ),
    (
        {"ndim": 2, "sample_unit": SequenceUnit(3, done_key="terminated")},
        {},
        r"must use both end flags of episodes, it uses 'terminated': .* episodes=Episodes\(\)",
    ),
    (
        {"ndim": 2, "episodes": Episodes()},
        {"keys": {"truncated": "timeout"}},
        r"it uses 'terminated': .*Episodes\(end_key=\['terminated', 'timeout'\]\)",
    ),
    ({}, {"autoreset_mode": "SOMETIMES"}, "autoreset_mode must be one of .*got 'SOMETIMES'"),
    ({}, {"layout": "wide"}, "layout"),
    ({}, {"keys": {"observation": "o"}}, r"keys must name parts of a step, .*got \['observation'\]"),
    ({}, {"keys": {"obs": "reward"}}, "parts of a step must have different names"),
    ({"ndim": 2, "episodes": Episodes(ends=torch.ones(4))}, {}, "describes stored rows only"),
]


@pytest.mark.parametrize(("made", "options", "message"), BUFFERS)
def test_a_buffer_that_would_mix_episodes_raises_at_once(made, options, message):
    with pytest.raises(OptionError, match=message):
        VectorEnvRecorder(buffer(**made), **{"num_envs": 2, "autoreset_mode": "SAME_STEP", **options})


def test_a_capacity_below_the_windows_raises_with_the_numbers():
    unit, episodes = SequenceUnit(8, burn_in=2), Episodes(**ONE_EACH)
    for ndim, fits, options, span in (
        (1, 40, {"sample_unit": unit, "episodes": episodes}, 10),
        (2, 37, {"sample_unit": unit, "episodes": episodes}, 10),
        (1, 4, {"sampler": SliceSampler(slice_len=1), "episodes": episodes}, 1),
    ):
        VectorEnvRecorder(buffer(fits, ndim, **options), 4, "SAME_STEP")
        message = rf"max_size={fits - 1} holds {span - 1} steps of each of 4 .* has {span}: use max_size >= {4 * span}"
        with pytest.raises(CapacityError, match=message):
            VectorEnvRecorder(buffer(fits - 1, ndim, **options), 4, "SAME_STEP")


def test_another_sampler_and_another_number_of_environments_raise():
    rb = buffer(ndim=2)
    step(begun(rb))
    with pytest.raises(OptionError, match=r"the storage has 2 environment\(s\), got num_envs=3"):
        VectorEnvRecorder(rb, 3, "SAME_STEP")
    rb = buffer()
    steps = begun(rb)
    step(steps)
    rb.set_sampler(SliceSampler(slice_len=2))
    with pytest.raises(OptionError, match="rows of 2 environments are interleaved"):
        step(steps)
    assert len(rb) == 2


def test_other_buffers_and_environments_without_a_mode_raise():
    with pytest.raises(KindError):
        VectorEnvRecorder([], 2, "SAME_STEP")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="ListStorage does not take: use LazyTensorStorage"):
        VectorEnvRecorder(ReplayBuffer(), 2, "SAME_STEP")

    class Old:
        num_envs = 2
        metadata = None

    with pytest.raises(OptionError, match=r"Old has no metadata.* VectorEnvRecorder\(rb, num_envs, autoreset_mode\)"):
        VectorEnvRecorder.for_env(buffer(), Old())


CALLS: list[Any] = [
    ({"obs": np.ones((3, 3))}, SchemaError, r"obs must be of 2 environment\(s\), .*got shape \[3, 3\]"),
    ({"obs": np.ones((2, 4))}, SchemaError, r"obs must have shape \[2, 3\], as before, got \[2, 4\]"),
    ({"obs": np.ones((2, 3)) + 0j}, SchemaError, "field 'obs' must be float64, got complex128"),
    ({"reward": np.array([0, 1e300])}, SchemaError, r"'reward' must be float32, got float64 .*1e\+300 at \[1\]"),
    ({"obs": {"a": np.ones((2, 3))}}, SchemaError, "the entries of earlier observations"),
    ({"reward": np.ones((2, 2))}, SchemaError, r"reward must hold one value per environment, shape \[2\]"),
    ({"obs": np.array(["a", "b"])}, KindError, "field 'obs' holds a numpy array of dtype"),
    ({"extra": {"obs": np.ones(2)}}, SchemaError, "two parts of a step have the name 'obs'"),
    ({"ends": YES}, UsageError, r"environment\(s\) \[1\] ended, and info\['final_obs'\] has no"),
    ({"ends": YES, "info": {"final_obs": np.ones((2, 3)), "_final_obs": ~YES}}, UsageError, r"\[1\] ended"),
    (
        {"ends": YES, "info": {"final_obs": np.ones((2, 4))}},
        SchemaError,
        r"info\['final_obs'\] of environment 1 must have shape \[3\], got \[4\]",
    ),
]


@pytest.mark.parametrize(("changed", "kind", "message"), CALLS)
def test_a_bad_step_changes_nothing(changed, kind, message):
    rb = buffer(ndim=1 + len(changed) % 2)
    steps = begun(rb)
    for first in (True, False):
        with pytest.raises(kind, match=message):
            step(steps, **changed)
        assert len(rb) == (0 if first else 2)
        step(steps)
    assert rb.storage.read("obs").reshape(-1, 3)[:, 0].tolist() == [0, 0, 1, 1]


def test_steps_need_a_reset_of_all_first():
    steps = VectorEnvRecorder(buffer(), 2, "DISABLED")
    with pytest.raises(UsageError):
        step(steps)
    with pytest.raises(UsageError):
        steps.reset(np.zeros((2, 3)), YES)
    with pytest.raises(SchemaError, match=r"obs must be of 2 environment\(s\)"):
        steps.reset(np.zeros((3, 3)))
    steps.reset(np.zeros((2, 3)))
    step(steps, ends=YES)
    with pytest.raises(UsageError):
        step(steps)
    steps.reset(np.full((2, 3), 7.0), ~YES)  # the wrong one: its episode is broken off
    with pytest.raises(UsageError):
        step(steps)
    steps.reset(np.full((2, 3), 8.0), YES)
    step(steps)


def test_results_of_another_mode_raise():
    rb = buffer()
    steps = begun(rb, "NEXT_STEP")
    with pytest.raises(UsageError, match="is autoreset_mode 'SAME_STEP'"):
        step(steps, ends=YES, info={"final_obs": np.ones((2, 3))})
    step(steps, ends=YES)
    with pytest.raises(UsageError):
        step(steps, ends=YES)
    assert len(rb) == 2


def test_final_observations_in_each_format():
    """A dict of arrays, an array of dicts, tensors, and the older name."""
    last = [{"a": np.full(3, 5.0)}, {"a": np.full(3, 6.0)}]
    forms = [
        {"final_obs": {"a": np.array([[0.0] * 3, [6.0] * 3])}},
        {"final_obs": np.array(last, dtype=object), "_final_obs": YES},
        {"final_observation": {"a": torch.full((2, 3), 6.0)}},
    ]
    for info in forms:
        rb = buffer()
        steps = VectorEnvRecorder(rb, 2, "SAME_STEP")
        steps.reset({"a": np.zeros((2, 3))})
        step(steps, ends=YES, info=info, obs={"a": np.ones((2, 3))})
        step(steps, obs={"a": np.full((2, 3), 2.0)}, action=[0, 0])
        assert rb[:]["next_a"][:, 0].tolist() == [1, 6, 2, 2]
        assert rb[:]["a"][:, 0].tolist() == [0, 0, 1, 1], "the next episode begins with what the step returned"


def test_names_of_fields():
    steps = VectorEnvRecorder(buffer(), 2, "SAME_STEP", keys={"obs": "o"})
    steps.reset({"a": np.zeros(2)})
    with pytest.raises(OptionError, match="the entries of a dict observation are fields with their own names"):
        step(steps, obs={"a": np.zeros(2)})
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    step(begun(rb))
    row = rb.sample(4)
    following = {("next", name) for name in ("observation", "reward", "done", "terminated", "truncated")}
    assert set(row.keys(True, True)) == {"observation", "action", "index", *following}
    assert row["next", "reward"].shape == row["next", "done"].shape == (4, 1)
