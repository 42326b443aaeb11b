"""The exact laws that units and slice samplers state, by chi-square with fixed seeds; every valid start is drawn."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

from ..episodes import Log
from ..windows import check_slices
from .chi_square import p_value

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDS = [("next", "terminated"), ("next", "truncated")]
LIMIT = 1e-4
"""With seeds fixed a correct distribution stays above for good."""
DRAWS = 12_000


def filled(log: Log, rows: int, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(log.capacity, ndim=2 if log.layout == "lanes" else 1),
        generator=torch.Generator().manual_seed(3),
        **options,
    )
    log.extend(rb, rows)
    return rb


def follows(counts: Counter[Any], distribution: Mapping[Any, float]) -> None:
    """Nothing impossible was drawn, everything possible was, and as often as the distribution says."""
    assert set(counts) == set(distribution)
    keys = sorted(distribution)
    if len(keys) > 1:
        assert p_value([counts[key] for key in keys], [distribution[key] for key in keys]) > LIMIT


def slots(log: Log, info: dict[Any, Any]) -> list[int]:
    return log.slots_of(info["index"])


def anchors(log: Log, info: dict[Any, Any], rows: int) -> list[int]:
    return log.slots_of(info["anchor_index"])[::rows]


def log_of(layout: str = "line", **options: Any) -> Log:
    envs = 1 if layout == "line" else 2
    return Log(30 * (envs if layout == "lanes" else 1), layout, envs=envs, **{"longest": 7, "seed": 5, **options})


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["line", "lanes", "mixed"])
def test_slices_an_episode_uniformly_then_a_start_uniformly(layout):
    log = log_of(layout)
    sampler = SliceSampler(slice_len=3, end_keys=ENDS, traj_key="env" if layout == "mixed" else None)
    rb = filled(log, 47, sampler=sampler)
    counts = Counter(slots(log, rb.sample(3 * DRAWS, return_info=True)[1])[::3])
    long = [line for line, _ in log.episodes() if len(line) >= 3]
    follows(counts, {slot: 1 / (len(line) - 2) for line in long for slot in line[: len(line) - 2]})


@pytest.mark.parametrize(
    ("span", "strict"), [(True, True), (1, False), ((True, False), False), ((2, 1), True), ((False, 2), True)], ids=str
)
def test_spans_begin_uniformly_within_their_reach(span, strict):
    log, length = log_of(), 3
    rb = filled(log, 47, sampler=SliceSampler(slice_len=length, end_keys=ENDS, span=span, strict_length=strict))
    sides = span if isinstance(span, tuple) else (span, span)
    batch, info = rb.sample(length * DRAWS, return_info=True)
    pieces = check_slices(log, batch, info, length=length, strict=strict, span=sides)
    distribution: Counter[tuple[int, ...]] = Counter()
    for line, _ in log.episodes():
        full = min(length, len(line))
        if strict and full < length:
            continue
        left, right = (full - 1 if side is True else min(int(side), full - 1) for side in sides)
        starts = range(-left, len(line) - full + right + 1)
        for at in starts:
            distribution[tuple(line[max(at, 0) : at + full])] += 1 / len(starts)  # type: ignore[assignment]
    follows(Counter(map(tuple, pieces)), distribution)


def test_passes_begin_uniformly_within_each_episode():
    log = log_of()
    rb = filled(log, 47, sampler=SliceSamplerWithoutReplacement(slice_len=3, end_keys=ENDS), batch_size=3)
    counts: Counter[int] = Counter()
    long = [line for line, _ in log.episodes() if len(line) >= 3]
    owner = {slot: number for number, line in enumerate(long) for slot in line}
    for _ in range(300):
        starts = [slots(log, info)[0] for info in (rb.sample(return_info=True)[1] for _ in long)]
        counts.update(starts)
        assert sorted(owner[slot] for slot in starts) == list(range(len(long)))
    for line in long:
        follows(Counter({s: counts[s] for s in line if s in counts}), dict.fromkeys(line[: len(line) - 2], 1.0))


# -- only some rows may be drawn ------------------------------------------------------------------------------------


def allowed(log: Log, need: int) -> list[int]:
    return [slot for line, _ in log.episodes() for slot in line[: max(0, len(line) - need + 1)]]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("layout", "masked"), [("line", 0.0), ("lanes", 0.2), ("mixed", 0.2)])
def test_strict_windows_start_uniformly_where_they_fit(layout, masked):
    log = log_of(layout, masked=masked)
    episodes = Episodes(ENDS, "env" if layout == "mixed" else None, "mask")
    rb = filled(log, 47, sample_unit=SequenceUnit(2, "strict", bootstrap=1), episodes=episodes)
    counts = Counter(anchors(log, rb.sample(DRAWS, return_info=True)[1], 3))
    follows(counts, dict.fromkeys(allowed(log, 3), 1.0))


def test_strict_windows_start_in_proportion_to_priorities():
    log = log_of(masked=0.2)
    episodes = Episodes(ENDS, mask_key="mask")
    sampler = PrioritizedSampler(30, 1.0, 0.0, eps=0.0)
    rb = filled(log, 47, sample_unit=SequenceUnit(3, "strict"), episodes=episodes, sampler=sampler)
    rb.update_priority(torch.arange(30), torch.arange(1.0, 31.0))
    log.extend(rb, 4)
    rb.update_priority(torch.arange(30), torch.arange(1.0, 31.0))
    counts = Counter(anchors(log, rb.sample(DRAWS, return_info=True)[1], 3))
    follows(counts, {slot: slot + 1.0 for slot in allowed(log, 3)})


@pytest.mark.parametrize(("strict", "right"), [(True, 0), (True, 1), (False, 0), (False, 1), (False, True)])
def test_prioritized_slices_start_in_proportion_to_priorities(strict, right):
    """Rows that have room for a slice, less `span`; without `strict` the first row of every episode as well."""
    log = log_of()
    sampler = PrioritizedSliceSampler(
        30, 1.0, 0.0, eps=0.0, slice_len=3, end_keys=ENDS, strict_length=strict, span=(False, right)
    )
    rb = filled(log, 47, sampler=sampler)
    rb.update_priority(torch.arange(30), torch.arange(1.0, 31.0))
    batch, info = rb.sample(3 * DRAWS, return_info=True)
    pieces = check_slices(log, batch, info, length=3, strict=strict and not right, span=(False, right or False))
    counts = Counter(piece[0] for piece in pieces)
    starts = {*allowed(log, 1 if right is True else 3 - right), *(() if strict else (x[0] for x, _ in log.episodes()))}
    follows(counts, {slot: slot + 1.0 for slot in starts})
