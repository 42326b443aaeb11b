"""DeltaTimestamps: offsets in seconds and in rows; rows and masks against the log are in `test_windows.py`."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    DeltaTimestamps,
    FrameStack,
    Hindsight,
    NStep,
    SequenceUnit,
    SliceSampler,
)
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError

from ...effort import examples
from ...windows import reward_of
from .rings import buffer, steps

if TYPE_CHECKING:
    from collections.abc import Sequence

STATE, ACTION = "observation.state", "action"


def rows(lengths: Sequence[int]) -> dict[str, Any]:
    """Rows of episodes in LeRobot's vocabulary: flat keys with dots."""
    count = sum(lengths)
    done = torch.zeros(count, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    t = torch.arange(count)
    return {STATE: torch.stack([t, -t], 1).float(), ACTION: t * 10, "done": done, "next": {"reward": t.double()}}


@examples(1)
@given(st.sampled_from([10, 15, 29.97, 30, 50, 60, 1000 / 3]), st.lists(st.integers(-300, 300), min_size=1))
def test_seconds_are_rounded_to_rows(fps, offsets):
    seconds = [step / fps for step in offsets]
    unit = DeltaTimestamps({STATE: seconds, ACTION: [round(x, 4) for x in seconds]}, fps=fps)
    assert unit.offsets == {(STATE,): tuple(offsets), (ACTION,): tuple(offsets)}


def test_the_tolerance_is_that_of_lerobot_and_any_sequence_of_numbers_will_do():
    assert DeltaTimestamps({"a": [0.30009, 0.29991]}, fps=10).offsets == {("a",): (3, 3)}
    assert DeltaTimestamps({"a": [0.32]}, fps=10, tolerance_s=0.03).offsets == {("a",): (3,)}
    with pytest.raises(OptionError, match=r"closest one is 0.3 s. Change it, or raise tolerance_s=0.0001"):
        DeltaTimestamps({"a": [0.3002]}, fps=10)
    with pytest.raises(OptionError):
        DeltaTimestamps({"a": [0.1 + 1e-9]}, fps=10, tolerance_s=0)
    seconds: dict[str, Any] = {"a": np.array([0.5], np.float32), "b": [Fraction(1, 2)], "c": torch.tensor([0.5, 1])}
    assert DeltaTimestamps(seconds, fps=2).offsets == {("a",): (1,), ("b",): (1,), ("c",): (1, 2)}
    unit = DeltaTimestamps(steps={"a": range(-1, 2), ("next", "a"): torch.arange(2), "b": np.arange(2), "c": (1,)})
    assert repr(unit) == "DeltaTimestamps(steps={'a': [-1, 0, 1], ('next', 'a'): [0, 1], 'b': [0, 1], 'c': [1]})"


SECONDS: list[Any] = [[], ["0"], [True], [0.0, float("nan")], [float("-inf")], [10**400], torch.zeros(1, 2), [0.0005]]
STEPS: list[Any] = [range(0), 3, "12", [0.5], [True]]
OPTIONS: list[Any] = [
    ({}, "give either delta_timestamps.*got neither"),
    ({"delta_timestamps": {"a": [0]}, "fps": 3, "steps": {"a": [0]}}, "got both"),
    ({"delta_timestamps": {"a": [0]}}, r"first argument, .* in seconds, .* fps=.* in rows, give steps="),
    *(({"delta_timestamps": {"a": [0.0]}, "fps": fps}, "fps") for fps in (0, float("inf"), True)),
    ({"delta_timestamps": {"a": [0.0]}, "fps": 3, "tolerance_s": -1}, "tolerance_s"),
    ({"steps": {"a": [0]}, "fps": 3}, "leave out fps"),
    ({"steps": {"a": [0]}, "tolerance_s": 0.1}, "tolerance_s"),
    ({"delta_timestamps": {}, "fps": 3}, "delta_timestamps"),
    ({"delta_timestamps": [0.0], "fps": 3}, "delta_timestamps"),
    ({"steps": {"a": [0], ("a",): [1]}}, "steps names 'a' twice"),
    ({"steps": {3: [0]}}, "a key is a string"),
    *(({"delta_timestamps": {"a": bad}, "fps": 1000}, "'a'") for bad in SECONDS),
    *(({"steps": {"a": bad}}, "'a'") for bad in STEPS),
]


def test_bad_offsets_are_refused_when_given():
    for options, words in OPTIONS:
        with pytest.raises(OptionError, match=words):
            DeltaTimestamps(**options)


UNFIT: list[Any] = [
    (DeltaTimestamps(steps={"zip": [0]}), KeyMissingError, "field 'zip' .to be read at offsets. is not present"),
    (DeltaTimestamps(steps={"next": [0]}), KeyMissingError, "field 'next'"),
    (DeltaTimestamps(steps={"task": [0]}), KindError, "'task' .* holds Python objects, such as text"),
    (DeltaTimestamps(steps={"obs": [0]}), SchemaError, "rows have a field 'obs_is_pad', which the unit adds"),
    ([NStep(2, 0.9, next_keys=()), DeltaTimestamps(steps={("next", "reward"): [0]})], OptionError, "'reward'"),
    ([FrameStack(2, ["frame"]), DeltaTimestamps(steps={"frame": [0]})], OptionError, "another unit computes 'frame'"),
    ([Hindsight(reward_of), DeltaTimestamps(steps={"desired_goal": [0]})], OptionError, "'desired_goal'"),
]


def test_rows_that_do_not_fit_are_refused_in_words():
    names = ("achieved_goal", "desired_goal", "obs", "obs_is_pad", "frame")
    data = {**rows([12]), **{name: torch.zeros(12) for name in names}, "task": ["lift"] * 12}
    for unit, error, words in UNFIT:
        rb = buffer(12, 4, sample_unit=unit)
        with pytest.raises(error, match=words):
            _ = rb.extend(data), rb.sample()


def test_fields_that_are_not_listed_are_those_of_the_row_drawn_and_far_offsets_are_padding():
    rb = buffer(7, 30, sample_unit=DeltaTimestamps(steps={ACTION: [-(10**30), 2**63, 1]}))
    rb.extend({**rows([3, 4]), "task": [f"task {i}" for i in range(7)]})
    batch, info = rb.sample(return_info=True)
    now = info["index"]
    assert batch["task"] == [f"task {i}" for i in now.tolist()]
    assert torch.equal(batch[STATE][:, 0].long(), now)
    first, last = torch.where(now < 3, 0, 3), torch.where(now < 3, 2, 6)
    assert torch.equal(batch[ACTION], torch.stack([first, last, (now + 1).minimum(last)], 1) * 10)
    mask = torch.stack([first >= 0, last >= 0, now == last], 1)
    assert torch.equal(batch["action_is_pad"], mask)


@pytest.mark.parametrize("parts", [{"sampler": SliceSampler(slice_len=2)}, {"window": SequenceUnit(2)}], ids=str)
def test_windows_and_slices_read_beyond_themselves_but_not_beyond_the_episode(parts):
    deltas = DeltaTimestamps(steps={"t": [-1, 0, 2]})
    unit = [deltas, parts["window"]] if "window" in parts else deltas
    rb = buffer(20, 32, sampler=parts.get("sampler"), sample_unit=unit)
    rb.extend({"t": torch.arange(20), "done": torch.arange(20) % 5 == 4})
    batch = rb.sample()
    t = rb.sample(out=batch)["t"]
    assert t is batch["t"]
    first = t[:, 1] // 5 * 5
    assert torch.equal(t[1::2, 1], (t[::2, 1] + 1).minimum(first[::2] + 4))
    assert torch.equal(t[:, 0], torch.maximum(t[:, 1] - 1, first))
    assert torch.equal(t[:, 2], torch.minimum(t[:, 1] + 2, first + 4))


def test_after_n_steps_offsets_count_from_the_row_that_they_end_at():
    unit = [NStep(2, 1.0), DeltaTimestamps(steps={("next", "obs"): [-1, 0, 1], "obs": [-1, 0]})]
    rb = buffer(6, 40, sample_unit=unit)
    t = torch.arange(6)
    rb.extend({"obs": t, "next": {"obs": t + 1, "reward": t.float(), "done": t == 5}})
    batch = rb.sample()
    now = batch["obs"][:, 1]
    last = (now + 1).clamp(max=5)
    assert torch.equal(batch["obs"][:, 0], (now - 1).clamp(min=0))
    expected = torch.stack([(last + step).clamp(0, 5) + 1 for step in (-1, 0, 1)], 1)
    assert torch.equal(batch["next"]["obs"], expected)


def test_the_key_of_ends_is_that_of_the_offsets():
    rb = buffer(40, 64, sample_unit=DeltaTimestamps(steps={"t": [6]}, done_key="lap"))
    rb.extend(steps())
    last = rb.sample()["t"][:, 0]
    assert ((last % 7 == 6) | (last == 39)).all()
