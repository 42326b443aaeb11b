"""Every sampler where only some rows may be drawn: whole windows, rows of no episode, slices by priority."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
)
from ostinato.errors import OptionError

from ...effort import examples
from ...episodes import Log
from ...histories import Case, buffer_for, histories, replay
from ...windows import check_rows, check_sequence, check_slices

ALPHA, EPS = 0.6, 1e-3
SAMPLERS: dict[str, Any] = {
    "random": lambda log: RandomSampler(),
    "prioritized": lambda log: PrioritizedSampler(log.capacity, ALPHA, 0.5, EPS),
    "stratified": lambda log: PrioritizedSampler(log.capacity, ALPHA, 0.5, EPS, stratified=True),
    "largest-within": lambda log: PrioritizedSampler(log.capacity, ALPHA, 0.5, EPS, max_priority_within_buffer=True),
    "without": lambda log: SamplerWithoutReplacement(),
    "in-order": lambda log: SamplerWithoutReplacement(shuffle=False),
}
UNITS: dict[str, Any] = {
    "strict": (
        Case(
            lambda: SequenceUnit(2, "strict", burn_in=1, bootstrap=1),
            partial(check_sequence, length=2, boundary="strict", burn_in=1, bootstrap=1),
        ),
        3,
    ),
    "dilated": (
        Case(
            lambda: SequenceUnit(2, "strict", dilation=2),
            partial(check_sequence, length=2, boundary="strict", dilation=2),
        ),
        3,
    ),
    "masked": (Case(lambda: None, check_rows), 1),
}
"""Units that only some rows may be drawn for, and the rows that an episode must have from them on."""


def check_values(rb: ReplayBuffer, log: Log, need: int, least: int = 0) -> None:
    """Rows that may be drawn have the value of their priority in the tree, and others none.

    They are those with `need` rows of their episode from them on, and the first `least` of every episode.
    """
    allowed = [slot for line, _ in log.episodes() for slot in line[: max(least, len(line) - need + 1)]]
    sampler: Any = rb.sampler
    expected = torch.zeros(len(rb), dtype=torch.float64)
    expected[allowed] = (sampler.priorities[allowed] + EPS) ** ALPHA
    found = sampler._tree_for(rb._engine.view()).leaves(len(rb))
    assert torch.allclose(found, expected, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", UNITS)
def test_only_rows_that_may_be_drawn_are_drawn(name, sampler, tmp_path):
    (unit, need), buffers = UNITS[name], list[ReplayBuffer]()

    def make(log: Log) -> ReplayBuffer:
        buffers.append(buffer_for(log, unit, sampler=SAMPLERS[sampler](log), unit=unit.make()))
        return buffers[-1]

    def check(log: Log, batch: Any, info: dict[Any, Any]) -> None:
        unit.check(log, batch, info)
        if buffers[-1].sampler.prioritized:
            check_values(buffers[-1], log, need)

    @examples(0.15)
    @given(histories())
    def run(history: dict[str, Any]) -> None:
        replay(history, unit._replace(check=check), make, tmp_path, need)

    run()


SLICES: dict[str, Any] = {
    "strict": ({"slice_len": 3}, 3),
    "number": ({"num_slices": 3}, 2),
    "short": ({"slice_len": 3, "strict_length": False}, 3),
    "number-short": ({"num_slices": 2, "strict_length": False}, 3),
    "short-span": ({"slice_len": 3, "strict_length": False, "span": (False, 1)}, 2),
    "span": ({"slice_len": 3, "span": (False, 1)}, 2),
    "span-all": ({"slice_len": 3, "span": (False, True)}, 1),
}
"""Options of slices, and the rows that an episode must have from the start of one on."""


@pytest.mark.parametrize("name", SLICES)
def test_slices_by_priority_are_what_the_log_says(name, tmp_path):
    (options, need), buffers = SLICES[name], list[ReplayBuffer]()
    length = options.get("slice_len") or 6 // options["num_slices"]
    strict, span = options.get("strict_length", True), options.get("span", (False, False))

    def make(log: Log) -> ReplayBuffer:
        buffers.append(buffer_for(log, case, sampler=PrioritizedSliceSampler(log.capacity, ALPHA, 0.5, EPS, **options)))
        return buffers[-1]

    def check(log: Log, batch: Any, info: dict[Any, Any]) -> None:
        # a start by priority may lie in an episode shorter than a slice where the right side may reach out of it
        check_slices(log, batch, info, length=length, strict=strict and not span[1], span=span)
        check_values(buffers[-1], log, need, least=0 if strict else 1)
        weights = info["priority_weight"]
        assert weights.shape == info["index_generation"].shape == batch["id"].shape
        assert (weights > 0).all()

    case = Case(lambda: None, check)

    @examples(0.2)
    @given(histories())
    def run(history: dict[str, Any]) -> None:
        replay(history, case, make, tmp_path, need if strict else 1, learn=False)

    run()


@pytest.mark.parametrize("options", [{"drop_last": True}, {"endless": True}])
def test_passes_of_other_kinds_are_refused_where_only_some_rows_may_be_drawn(options):
    sampler = SamplerWithoutReplacement(**options)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler, sample_unit=SequenceUnit(3, "strict"), batch_size=2
    )
    Log(50, longest=8).extend(rb, 50)
    with pytest.raises(OptionError):
        rb.sample()
