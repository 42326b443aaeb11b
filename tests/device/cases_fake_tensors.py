"""Buffers of fake tensors (`FakeTensorMode`), which have a device and a shape but no values: what needs values raises.

Nothing reads the memory that such tensors do not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)

import ostinato
from ostinato import LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer
from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.records import Run
from ostinato.errors import OptionError
from tests.device.backend import DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, OptionError, RuntimeError)


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def rows(count: int = 30) -> dict[str, torch.Tensor]:
    number = torch.arange(count, device=DEVICE)
    frames = number[:, None].float() * torch.ones(4, device=DEVICE)
    return {"obs": frames, "next_obs": frames, "reward": frames[:, 0], "done": number % 7 == 6, "version": number}


def storage(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(100, device="fakegpu", **options)


@pytest.mark.parametrize(
    "sampler",
    [
        ostinato.RandomSampler,
        ostinato.SamplerWithoutReplacement,
        lambda: ostinato.SamplerWithoutReplacement(endless=True),
        lambda: ostinato.PrioritizedSampler(100, 0.7, 0.5),
        lambda: ostinato.PrioritizedSampler(100, 0.7, 0.5, stratified=True, max_priority_within_buffer=True),
    ],
)
def test_writes_draws_and_updates_need_no_values(sampler: Callable[[], Any]) -> None:
    rb = ReplayBuffer(storage=storage(), sampler=sampler(), batch_size=8)
    for _ in range(5):
        rb.extend(rows())
        batch, info = rb.sample(return_info=True)
        assert batch["obs"].device == DEVICE
        if rb.sampler.prioritized:
            rb.update_priority(info, torch.ones(8, device=DEVICE))


@pytest.mark.parametrize(
    "parts",
    [
        {"sample_unit": ostinato.NStep(3, 0.9)},
        {"sample_unit": ostinato.Sequence(3, done_key="done")},
        {"sample_unit": ostinato.Sequence(3, "strict", done_key="done")},
        {"sample_unit": ostinato.FrameStack(3, ["obs"])},
        {
            "sample_unit": ostinato.Hindsight(
                lambda batch: batch["reward"], goal_key="obs", achieved_goal_key="next_obs"
            )
        },
        {"sampler": ostinato.SliceSampler(slice_len=3, end_key="done")},
        {"sampler": ostinato.SliceSamplerWithoutReplacement(slice_len=3, end_key="done")},
        {"sampler": ostinato.PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=3, end_key="done")},
        {"sampler": ostinato.QueueSampler()},
        {"sampler": ostinato.LimitedSampler(2)},
        {"writer": ostinato.ReservoirWriter()},
        {"version_key": "version"},
        {"single_copy": True},
    ],
    ids=lambda parts: repr(*parts.values())[:40],
)
def test_what_needs_values_raises(parts: dict[str, Any]) -> None:
    options = {"single_copy": True} if parts == {"single_copy": True} else {}
    rb = ReplayBuffer(storage=storage(**options), batch_size=6, **({} if options else parts))

    def write_and_draw() -> None:
        for _ in range(2):
            rb.extend(rows())
            rb.sample()

    with pytest.raises(NEEDS_VALUES):
        write_and_draw()


def test_reads_at_an_index_and_stats_need_values() -> None:
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage(), batch_size=8)
    rb.extend(rows())
    for call in (lambda: rb[torch.arange(3, device=DEVICE)], rb.stats, lambda: rb.dumps("nowhere")):
        with pytest.raises(NEEDS_VALUES):
            call()


def test_rows_of_two_devices_do_not_mix() -> None:
    rb = ReplayBuffer(storage=storage(), batch_size=8)
    rb.extend(rows())
    with pytest.raises(FakeTensorDeviceMismatchError):
        rb.sample()["obs"] + torch.zeros(8, 4)


def test_an_episode_table_takes_no_tensor_without_values() -> None:
    table = EpisodeTable(8)
    ends, slots = torch.zeros(4, dtype=torch.bool), torch.arange(4)
    with pytest.raises(OptionError, match="ends has no values on the CPU to read, got a FakeTensor"):
        table.record(Run(0, 4, 8), ends)
    assert table.rows == 0
    table.record(Run(0, 4, 8), None)
    for call in (
        lambda: table.ahead(slots),
        lambda: table.behind(slots),
        lambda: table.shift(slots, 1),
        lambda: table.window(slots, 0, 2),
        lambda: table.ended(slots),
        lambda: table.starts(2).draw(slots),
        lambda: table.starts(2).draw_episodes(slots),
        lambda: table.starts(2).allowed(slots),
    ):
        with pytest.raises(OptionError, match="has no values on the CPU to read, got a FakeTensor"):
            call()
