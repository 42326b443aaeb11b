"""Windows and slices of every unit and sampler, against a slow log of all that was written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    DeltaTimestamps,
    FrameStack,
    Hindsight,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.errors import CapacityError, CheckpointError, UsageError

from ...effort import examples
from ...episodes import Log
from ...histories import Case, buffer_for, histories, replay
from ...registry import ring
from ...windows import (
    check_deltas,
    check_frames,
    check_hindsight,
    check_nstep,
    check_rows,
    check_sequence,
    check_slices,
    reward_of,
)
from .rings import ENDS, buffer, steps, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato import Sampler


def _frames_and_steps(log: Log, batch: Any, info: dict[Any, Any]) -> None:
    check_nstep(log, batch, info, n=3, gamma=0.5, frames=True)
    check_frames(log, batch, info, k=2, n=3)


FLAT = {"flat": True}


DELTAS: dict[tuple[str, ...], list[int]] = {("obs",): [0, -1, -40, 2, -1], ("t",): [3], ("next", "obs"): [-2, 1]}
UNITS = {
    "none": Case(lambda: None, check_rows),
    "nstep-3": Case(lambda: NStep(3, 0.9), partial(check_nstep, n=3, gamma=0.9)),
    "frames-flat": Case(lambda: FrameStack(2, ["obs"]), partial(check_frames, k=2), form=FLAT),
    "frames-next": Case(lambda: FrameStack(3, ["obs", ("next", "obs")]), partial(check_frames, k=3)),
    "frames-zeros": Case(lambda: FrameStack(4, ["obs"], padding="zeros"), partial(check_frames, k=4, padding="zeros")),
    "frames-merged": Case(lambda: FrameStack(3, ["obs"], merge=True), partial(check_frames, k=3, merge=True)),
    "steps-frames": Case(lambda: [FrameStack(2, ["obs"]), NStep(3, 0.5)], _frames_and_steps),
    "deltas": Case(lambda: DeltaTimestamps(steps=DELTAS), partial(check_deltas, offsets=DELTAS)),
    "pad": Case(
        lambda: SequenceUnit(2, burn_in=2, bootstrap=1), partial(check_sequence, length=2, burn_in=2, bootstrap=1)
    ),
    "pad-dilated": Case(
        lambda: SequenceUnit(2, burn_in=1, dilation=2), partial(check_sequence, length=2, burn_in=1, dilation=2)
    ),
    "stop": Case(
        lambda: SequenceUnit(2, "stop", burn_in=1, dilation=2),
        partial(check_sequence, length=2, boundary="stop", burn_in=1, dilation=2),
    ),
    "reset": Case(
        lambda: SequenceUnit(3, "include_reset", burn_in=2),
        partial(check_sequence, length=3, boundary="include_reset", burn_in=2),
    ),
    **{
        f"hindsight-{strategy}{'-late' if late else ''}": Case(
            partial(Hindsight, reward_of, her_ratio=ratio, strategy=strategy),
            partial(check_hindsight, strategy=strategy, ratio=ratio, late=late),
            form={"next_goals": not late},
        )
        for strategy, ratio, late in (
            ("future", 1.0, False),
            ("future", 1.0, True),
            ("final", 0.5, True),
            ("episode", 1.0, False),
            ("random", 1.0, True),
        )
    },
}


def _sliced(check: dict[str, Any], **options: Any) -> Case:
    return Case(lambda: SliceSampler(**options), partial(check_slices, **check), size=6)


SLICES = {
    "strict": _sliced({"length": 3}, slice_len=3),
    "number": _sliced({"length": 2}, num_slices=3),
    "short": _sliced({"length": 3, "strict": False}, slice_len=3, strict_length=False),
    "padded": _sliced({"length": 6, "strict": False, "pad": True}, num_slices=1, strict_length=False, pad_output=True),
    "padded-many": _sliced(
        {"length": 3, "strict": False, "pad": True}, slice_len=3, strict_length=False, pad_output=True
    ),
    "span": _sliced({"length": 3, "span": (True, True)}, slice_len=3, span=True),
    "span-pair": _sliced({"length": 3, "span": (False, 2)}, slice_len=3, span=(False, 2)),
    "span-short": _sliced(
        {"length": 3, "span": (True, 1), "strict": False}, slice_len=3, span=(True, 1), strict_length=False
    ),
    "without": Case(lambda: SliceSamplerWithoutReplacement(slice_len=3), partial(check_slices, length=3)),
    "without-short": Case(
        lambda: SliceSamplerWithoutReplacement(slice_len=3, strict_length=False, shuffle=False, pad_output=True),
        partial(check_slices, length=3, strict=False, pad=True),
    ),
}


SAMPLERS: list[Any] = [
    lambda log: RandomSampler(),
    lambda log: PrioritizedSampler(log.capacity, 0.7, 0.5),
]


def _is_of_lanes(history: dict[str, Any]) -> bool:
    """Whether rows of one environment follow each other: what windows over resets need."""
    return history["log"]["layout"] != "mixed" and not history["log"]["masked"]


@pytest.mark.parametrize("name", UNITS)
def test_every_record_is_what_the_log_says(name, tmp_path):
    case = UNITS[name]

    @examples(0.5)
    @given(histories().filter(_is_of_lanes) if name == "reset" else histories(), st.sampled_from(SAMPLERS))
    def run(history: dict[str, Any], sampler: Callable[[Log], Sampler]) -> None:
        replay(history, case, lambda log: buffer_for(log, case, sampler=sampler(log), unit=case.make()), tmp_path)

    run()


@pytest.mark.parametrize("name", SLICES)
def test_every_slice_is_what_the_log_says(name, tmp_path):
    case = SLICES[name]
    sampler = case.make()
    need = sampler._split(case.size)[1] if sampler.strict_length else 1

    @examples(0.25)
    @given(histories())
    def run(history: dict[str, Any]) -> None:
        replay(history, case, lambda log: buffer_for(log, case, sampler=case.make()), tmp_path, need)

    run()


LARGE: list[Any] = [
    ({"sample_unit": NStep(9, 0.9)}, 9),
    ({"sample_unit": SequenceUnit(3, burn_in=2, bootstrap=1, dilation=2)}, 11),
    ({"sample_unit": [NStep(5, 0.9), FrameStack(5, ["obs"])]}, 9),
    ({"sampler": SliceSampler(slice_len=9, end_keys=ENDS)}, 9),
]


@pytest.mark.parametrize(("options", "window"), LARGE, ids=str)
def test_a_ring_without_room_for_a_window_of_each_environment_is_refused(options, window):
    with pytest.raises(CapacityError, match=rf"8 steps of each of 1 .* takes {window}: use max_size >= {window}"):
        buffer(8, **options)
    rb = buffer(8 * 4, ndim=2, **options)  # how many environments there are shows with the first rows
    with pytest.raises(CapacityError, match=rf"of each of 4 .* takes {window}: use max_size >= {4 * window}"):
        Log(8 * 4, "lanes", envs=4).extend(rb, 2)
    assert len(rb) == 0
    written(Log(64, "lanes", envs=2), rb, 2)  # the refused rows left no trace: another number of them is fine


def test_rows_without_ends_are_refused_before_anything_is_loaded(tmp_path):
    saved = ring(100, sampler=PrioritizedSampler(100, 0.5, 0.5), batch_size=4)
    saved.extend({"obs": torch.zeros(40)})
    saved.dumps(tmp_path / "a")
    sampler = PrioritizedSampler(100, 0.5, 0.5)
    buffer = ring(100, sampler=sampler, sample_unit=NStep(2, 0.9), batch_size=4)
    with pytest.raises(CheckpointError):
        buffer.loads(tmp_path / "a")
    assert len(buffer) == 0
    assert buffer.write_count == 0


def test_edits_through_views_are_followed_when_the_buffer_is_told():
    buffer = ring(100, sample_unit=NStep(4, 1.0), batch_size=256)
    buffer.extend(steps())
    buffer.sample()
    buffer[:]["done"][24] = True
    buffer.read_episodes()
    batch = buffer.sample()
    first, last = batch["obs"], batch["next_obs"] - 1
    assert not bool(((first <= 24) & (last > 24)).any())
    with pytest.raises(UsageError):
        ReplayBuffer().read_episodes()
