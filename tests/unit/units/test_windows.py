"""Everything that a user can sample with units and slice samplers, against a slow log of all that was written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given

from ostinato import (
    FrameStack,
    Hindsight,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

from ...histories import Case, buffer_for, few, histories, replay
from ...windows import check_frames, check_hindsight, check_nstep, check_rows, check_sequence, check_slices, reward_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato import Sampler

    from ...episodes import Log


def _frames_and_steps(log: Log, batch: Any, info: dict[Any, Any]) -> None:
    check_nstep(log, batch, info, n=3, gamma=0.5, frames=True)
    check_frames(log, batch, info, k=2, n=3)


FLAT = {"flat": True}
UNITS = {
    "none": Case(lambda: None, check_rows),
    "nstep-1": Case(lambda: NStep(1, 0.9), partial(check_nstep, n=1, gamma=0.9)),
    "nstep-3": Case(lambda: NStep(3, 0.9), partial(check_nstep, n=3, gamma=0.9)),
    "nstep-flat": Case(lambda: NStep(4, 0.5), partial(check_nstep, n=4, gamma=0.5), form=FLAT),
    "frames": Case(lambda: FrameStack(3, ["obs"]), partial(check_frames, k=3)),
    "frames-1": Case(lambda: FrameStack(1, ["obs"]), partial(check_frames, k=1)),
    "frames-flat": Case(lambda: FrameStack(2, ["obs"]), partial(check_frames, k=2), form=FLAT),
    "frames-zeros": Case(lambda: FrameStack(4, ["obs"], padding="zeros"), partial(check_frames, k=4, padding="zeros")),
    "frames-merged": Case(lambda: FrameStack(3, ["obs"], merge=True), partial(check_frames, k=3, merge=True)),
    "steps-frames": Case(lambda: [FrameStack(2, ["obs"]), NStep(3, 0.5)], _frames_and_steps),
    "pad": Case(lambda: SequenceUnit(4), partial(check_sequence, length=4)),
    "pad-burn-in": Case(
        lambda: SequenceUnit(2, burn_in=2, bootstrap=1), partial(check_sequence, length=2, burn_in=2, bootstrap=1)
    ),
    "pad-dilated": Case(
        lambda: SequenceUnit(2, burn_in=1, dilation=2), partial(check_sequence, length=2, burn_in=1, dilation=2)
    ),
    "stop": Case(
        lambda: SequenceUnit(3, "stop", burn_in=1), partial(check_sequence, length=3, boundary="stop", burn_in=1)
    ),
    "stop-dilated": Case(
        lambda: SequenceUnit(2, "stop", bootstrap=1, dilation=2),
        partial(check_sequence, length=2, boundary="stop", bootstrap=1, dilation=2),
    ),
    **{
        f"hindsight-{strategy}{'-late' if late else ''}": Case(
            partial(Hindsight, reward_of, her_ratio=ratio, strategy=strategy),
            partial(check_hindsight, strategy=strategy, ratio=ratio, late=late),
            form={"next_goals": not late},
        )
        for strategy, ratio in (("future", 1.0), ("final", 0.5), ("episode", 1.0), ("random", 1.0))
        for late in (False, True)
    },
}
RESET = Case(
    lambda: SequenceUnit(3, "include_reset", burn_in=2),
    partial(check_sequence, length=3, boundary="include_reset", burn_in=2),
)


def _sliced(check: dict[str, Any], **options: Any) -> Case:
    return Case(lambda: SliceSampler(**options), partial(check_slices, **check), size=6)


SLICES = {
    "strict": _sliced({"length": 3}, slice_len=3),
    "one": _sliced({"length": 6}, num_slices=1),
    "number": _sliced({"length": 2}, num_slices=3),
    "short": _sliced({"length": 3, "strict": False}, slice_len=3, strict_length=False),
    "padded": _sliced({"length": 6, "strict": False, "pad": True}, num_slices=1, strict_length=False, pad_output=True),
    "padded-many": _sliced(
        {"length": 3, "strict": False, "pad": True}, slice_len=3, strict_length=False, pad_output=True
    ),
    "span": _sliced({"length": 3, "span": (True, True)}, slice_len=3, span=True),
    "span-1": _sliced({"length": 3, "span": (1, 1)}, slice_len=3, span=1),
    "span-pair": _sliced({"length": 3, "span": (False, 2)}, slice_len=3, span=(False, 2)),
    "span-left": _sliced({"length": 2, "span": (True, False)}, slice_len=2, span=(True, False)),
    "span-short": _sliced(
        {"length": 3, "span": (True, 1), "strict": False}, slice_len=3, span=(True, 1), strict_length=False
    ),
    "without": Case(lambda: SliceSamplerWithoutReplacement(slice_len=3), partial(check_slices, length=3)),
    "without-short": Case(
        lambda: SliceSamplerWithoutReplacement(slice_len=3, strict_length=False, shuffle=False),
        partial(check_slices, length=3, strict=False),
    ),
}


SAMPLERS: dict[str, Callable[[Log], Sampler]] = {
    "random": lambda _: RandomSampler(),
    "prioritized": lambda log: PrioritizedSampler(log.capacity, 0.7, 0.5),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", UNITS)
def test_every_record_is_what_the_log_says(name: str, sampler: str, tmp_path: Path) -> None:
    case = UNITS[name]

    @few()
    @given(histories())
    def run(history: dict[str, Any]) -> None:
        replay(
            history, case, lambda log: buffer_for(log, case, sampler=SAMPLERS[sampler](log), unit=case.make()), tmp_path
        )

    run()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_windows_over_resets_stay_in_their_lane(sampler: str, tmp_path: Path) -> None:
    @few()
    @given(histories().filter(lambda history: history["layout"] != "mixed" and not history["masked"]))
    def run(history: dict[str, Any]) -> None:
        replay(
            history,
            RESET,
            lambda log: buffer_for(log, RESET, sampler=SAMPLERS[sampler](log), unit=RESET.make()),
            tmp_path,
        )

    run()


@pytest.mark.parametrize("name", SLICES)
def test_every_slice_is_what_the_log_says(name: str, tmp_path: Path) -> None:
    case = SLICES[name]
    options = case.make()._slicing
    need = options.need(options.split(case.size)[1])

    @few()
    @given(histories())
    def run(history: dict[str, Any]) -> None:
        replay(history, case, lambda log: buffer_for(log, case, sampler=case.make()), tmp_path, need)

    run()
