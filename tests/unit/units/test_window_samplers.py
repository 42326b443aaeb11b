"""Every sampler where only some rows may be drawn: whole windows, rows of no episode, slices by priority."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given

from ostinato import (
    Episodes,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
)
from ostinato.errors import EmptyBufferError, OptionError

from ...effort import examples
from ...episodes import Log
from ...histories import Case, buffer_for, histories, replay
from ...windows import check_rows, check_sequence, check_slices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato import Sampler

pytestmark = pytest.mark.usefixtures("backend")


ENDS = [("next", "terminated"), ("next", "truncated")]


SAMPLERS: dict[str, Callable[[Log], Sampler]] = {
    "random": lambda log: RandomSampler(),
    "prioritized": lambda log: PrioritizedSampler(log.capacity, 0.7, 0.5),
    "stratified": lambda log: PrioritizedSampler(log.capacity, 0.7, 0.5, stratified=True),
    "without": lambda log: SamplerWithoutReplacement(),
    "in-order": lambda log: SamplerWithoutReplacement(shuffle=False),
}


STRICT = Case(
    lambda: SequenceUnit(2, "strict", burn_in=1, bootstrap=1),
    partial(check_sequence, length=2, boundary="strict", burn_in=1, bootstrap=1),
)


DILATED = Case(
    lambda: SequenceUnit(2, "strict", dilation=2), partial(check_sequence, length=2, boundary="strict", dilation=2)
)


PLAIN = Case(lambda: None, check_rows)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("case", [STRICT, DILATED, PLAIN], ids=["strict", "dilated", "masked"])
def test_only_rows_that_may_be_drawn_are_drawn(case: Case, sampler: str, tmp_path: Path) -> None:
    need = 1 if case is PLAIN else 3

    @examples(0.25)
    @given(histories())
    def run(history: dict[str, Any]) -> None:
        def make(log: Log) -> ReplayBuffer:
            return buffer_for(log, case, sampler=SAMPLERS[sampler](log), unit=case.make())

        replay(history, case, make, tmp_path, need)

    run()


SLICES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "strict": ({"slice_len": 3}, {"length": 3}, 3),
    "number": ({"num_slices": 3}, {"length": 2}, 2),
    "short": ({"slice_len": 3, "strict_length": False}, {"length": 3, "strict": False}, 1),
    "short-span": (
        {"slice_len": 3, "strict_length": False, "span": (False, 1)},
        {"length": 3, "strict": False, "span": (False, 1)},
        1,
    ),
    "span": ({"slice_len": 3, "span": (False, 1)}, {"length": 3, "span": (False, 1)}, 2),
    "span-all": ({"slice_len": 3, "span": (False, True)}, {"length": 3, "span": (False, True)}, 1),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_by_priority_are_what_the_log_says(name: str, tmp_path: Path) -> None:
    options, expected, need = SLICES[name]
    strict = expected.get("strict", True)

    def check(log: Log, batch: Any, info: dict[Any, Any]) -> None:
        # a start by priority may lie in an episode shorter than a slice where the right side may reach out of it
        check_slices(log, batch, info, **{**expected, "strict": strict and name in {"strict", "number"}})
        weights = info["priority_weight"]
        assert weights.shape == info["index_generation"].shape == batch["id"].shape
        assert (weights > 0).all()

    case = Case(lambda: None, check)

    @examples(0.25)
    @given(histories())
    def run(history: dict[str, Any]) -> None:
        def make(log: Log) -> ReplayBuffer:
            return buffer_for(log, case, sampler=PrioritizedSliceSampler(log.capacity, 0.7, 0.5, **options))

        replay(history, case, make, tmp_path, need, learn=False)

    run()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_pass_has_every_strict_window_once(shuffle: bool, prefetch: int) -> None:
    log = Log(50, longest=8, masked=0.1, seed=6)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50),
        sampler=SamplerWithoutReplacement(shuffle=shuffle),
        sample_unit=SequenceUnit(3, "strict"),
        episodes=Episodes(ENDS, mask_key="mask"),
        batch_size=4,
        prefetch=prefetch,
    )
    log.extend(rb, 83)
    present = log.present()
    want = sorted(present[slot].id for line, _ in log.episodes() for slot in line[: max(0, len(line) - 2)])
    for _ in range(3):
        got = [number for batch in rb for number in batch["id"].view(-1, 3)[:, 0].tolist()]
        assert sorted(got) == want


@pytest.mark.parametrize("options", [{"drop_last": True}, {"endless": True}])
def test_passes_of_other_kinds_are_refused_where_only_some_rows_may_be_drawn(options: dict[str, bool]) -> None:
    sampler = SamplerWithoutReplacement(**options)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler, sample_unit=SequenceUnit(3, "strict"), batch_size=2
    )
    Log(50, longest=8).extend(rb, 50)
    with pytest.raises(OptionError, match="not available if only some rows may be drawn"):
        rb.sample()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_a_whole_window_there_is_an_error_and_later_there_is_one(sampler: str) -> None:
    log = Log(30, longest=3, seed=1)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(30),
        sampler=SAMPLERS[sampler](log),
        sample_unit=SequenceUnit(6, "strict"),
        batch_size=2,
    )
    log.extend(rb, 25)
    with pytest.raises(EmptyBufferError, match="6 rows"):
        rb.sample()
    log.longest = 30
    log.extend(rb, 28)
    check_sequence(log, *rb.sample(return_info=True), length=6, boundary="strict")


def test_rows_come_into_reach_when_their_window_is_complete() -> None:
    """A row may start a strict window as soon as the last row of the window is there, and with its own priority."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12),
        sampler=PrioritizedSampler(12, 1.0, 1.0, eps=0.0),
        sample_unit=SequenceUnit(3, "strict"),
        batch_size=256,
        generator=torch.Generator().manual_seed(0),
    )
    log = Log(12, longest=1000)
    for rows in range(1, 30):
        log.add(rb)
        rb.update_priority(torch.tensor([(rows - 1) % 12]), 1.0 + rows)
        if rows < 3:
            with pytest.raises(EmptyBufferError):
                rb.sample()
            continue
        _, info = rb.sample(return_info=True)
        line = list(log.present())
        assert set(info["anchor_index"].tolist()) <= set(line[: len(line) - 2])
    assert set(info["anchor_index"].tolist()) == set(line[: len(line) - 2])


def test_an_edit_of_an_end_flag_opens_and_closes_starts() -> None:
    for sampler in (RandomSampler(), PrioritizedSampler(12, 1.0, 1.0)):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(12), sampler=sampler, sample_unit=SequenceUnit(4, "strict"), batch_size=64
        )
        log = Log(12, longest=1000)
        log.extend(rb, 12)
        assert set(rb.sample(return_info=True)[1]["anchor_index"].tolist()) == set(range(9))
        rb.set_at_(("next", "terminated"), torch.tensor([True]), torch.tensor([5]))
        assert set(rb.sample(return_info=True)[1]["anchor_index"].tolist()) == {0, 1, 2, 6, 7, 8}
        rb.set_at_(("next", "terminated"), torch.tensor([False]), torch.tensor([5]))
        assert set(rb.sample(return_info=True)[1]["anchor_index"].tolist()) == set(range(9))


def test_an_emptied_buffer_of_prioritized_slices_saves_and_loads() -> None:
    def make() -> ReplayBuffer:
        sampler = PrioritizedSliceSampler(20, 1.0, 1.0, slice_len=3)
        return ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=6)

    log, rb, other = Log(20, longest=1000), make(), make()
    log.extend(rb, 5)
    log.empty(rb)
    other.load_state_dict(rb.state_dict())
    log.extend(other, 12)
    check_slices(log, *other.sample(return_info=True), length=3)
