"""Which operations wait for the device: the table of docs/choosing.md, in both directions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from tensordict import TensorDict

import ostinato
from ostinato import LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer, TensorDictReplayBuffer
from ostinato.compat.isaacgymenvs import ReplayBuffer as AmpBuffer
from tests.device.place import DEVICE, HostWaitError, no_wait, waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Calls: TypeAlias = Iterator[Callable[[], object]]

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"
FIVE = torch.arange(5, device=DEVICE)


def rows(count: int = 30, first: int = 0, device: torch.device = DEVICE) -> dict[str, torch.Tensor]:
    number = torch.arange(first, first + count, device=device)
    frames = number[:, None].float() * torch.ones(4, device=device)
    return {
        "obs": frames,
        "next_obs": frames + 1,
        "reward": torch.ones(count, device=device),
        "done": number % 7 == 6,
        "version": number // 10,
    }


def storage(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(100, device=DEVICE, **options)


def buffer(**parts: Any) -> ReplayBuffer:
    """A buffer that has been written to and sampled from: what is made once is made."""
    parts.setdefault("storage", storage())
    rb = ReplayBuffer(batch_size=8, **parts)
    rb.extend(rows())
    rb.sample()
    return rb


def prioritized(**parts: Any) -> PrioritizedReplayBuffer:
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=parts.pop("storage", storage()), batch_size=8, **parts)
    rb.extend(rows())
    rb.sample()
    return rb


def writing(rb: ReplayBuffer) -> Calls:
    """Writes that fill the ring, wrap around and exceed it, of rows that are made before."""
    for count in (30, 60, 130):
        data = rows(count)
        yield partial(rb.extend, data)
    row = {key: value[0] for key, value in rows(1).items()}
    yield lambda: rb.add(row)


def sampling(*buffers: Any) -> Calls:
    for rb in buffers:
        for _ in range(8):
            yield rb.sample
        yield partial(rb.sample, return_info=True)


def stays_written() -> Calls:
    for rb in (buffer(), buffer(sampler=ostinato.SamplerWithoutReplacement()), prioritized()):
        yield from writing(rb)
    lanes = TensorDictReplayBuffer(storage=storage(ndim=2), batch_size=8, dim_extend=0)
    grid = TensorDict({"obs": torch.zeros(6, 5, device=DEVICE)}, [6, 5], device=DEVICE)
    yield lambda: lanes.extend(grid)
    yield lambda: lanes.sample()
    yield lambda: lanes.add(grid[0])


def stays_in_passes() -> Calls:
    for options in (
        {},
        {"drop_last": True},
        {"shuffle": False},
        {"endless": True},
        {"endless": True, "shuffle": False},
    ):
        rb = buffer(sampler=ostinato.SamplerWithoutReplacement(**options))
        yield from sampling(rb)
        yield from writing(rb)
        yield from sampling(rb)


def stays_prioritized() -> Calls:
    for stratified, within in ((False, False), (True, False), (False, True)):
        sampler = ostinato.PrioritizedSampler(100, 0.7, 0.5, stratified=stratified, max_priority_within_buffer=within)
        rb = buffer(sampler=sampler)
        yield from sampling(rb)
        yield from writing(rb)
        yield from sampling(rb)


def learns() -> Calls:
    rb = prioritized()
    ones = torch.ones(8, device=DEVICE)

    def sample_and_learn() -> None:
        _, info = rb.sample(return_info=True)
        rb.update_priority(info, ones)

    yield lambda: rb.update_priority(FIVE, FIVE.double())
    yield lambda: rb.update_priority(FIVE, FIVE.float())
    yield lambda: rb.update_priority(FIVE, 2.0)
    yield lambda: rb.update_priority(FIVE, 2)
    yield sample_and_learn
    yield from writing(rb)  # new rows get the largest priority so far
    schedule = rb.sampler
    yield lambda: setattr(schedule, "beta", 0.7)
    yield lambda: setattr(schedule, "alpha", 0.9)
    yield sample_and_learn


def transformed() -> Calls:
    chain = (
        ostinato.SelectFields("obs", "reward"),
        ostinato.ExcludeFields("next_obs"),
        ostinato.RenameFields({"reward": "gain"}),
        ostinato.RewardScale(2.0),
        ostinato.CastFields(torch.float64, "obs"),
        ostinato.ToDevice(DEVICE),
    )
    yield from sampling(*(buffer(transform=transform) for transform in chain))
    yield from sampling(buffer(collate_fn=dict))


def ensemble(**options: Any) -> ostinato.ReplayBufferEnsemble:
    made = ostinato.ReplayBufferEnsemble(buffer(), buffer(), batch_size=8, num_buffer_sampled=2, **options)
    made.sample()
    return made


def of_versions() -> Calls:
    rb = buffer(version_key="version")
    yield lambda: rb.sample(max_age=1)
    yield lambda: rb.sample(max_age=0)


def ring() -> Calls:
    rb = AmpBuffer(50, DEVICE)
    data = {key: rows()[key] for key in ("obs", "reward")}
    for _ in range(3):
        yield lambda: rb.store(data)
        yield lambda: rb.sample(20)
        yield lambda: rb.sample(120)
    yield rb.reset
    yield lambda: rb.store(data)
    yield lambda: rb.sample(20)


def plain() -> Calls:
    for rb in (
        buffer(),
        prioritized(),
        buffer(storage=storage(single_copy=True)),
        buffer(sample_unit=ostinato.NStep(2, 0.9)),
    ):
        yield partial(len, rb)
        yield partial(repr, rb)
        yield rb.empty


def read() -> Calls:
    for rb in (buffer(), buffer(storage=storage(single_copy=True))):
        yield partial(rb.__getitem__, 3)
        yield partial(rb.__getitem__, slice(2, 5))
        yield partial(rb.__getitem__, "obs")


def limited() -> Calls:
    rb = buffer(rate_limiter=ostinato.RateLimiter(samples_per_insert=1, error_buffer=1000, min_size_to_sample=8))
    yield from writing(rb)
    yield from sampling(rb)


STAYS: dict[str, Any] = {
    "`extend`, `add` of rows that are on the device": stays_written,
    "`sample` with `RandomSampler`": lambda: sampling(buffer()),
    "`sample` with `SamplerWithoutReplacement`": stays_in_passes,
    "`sample` with `PrioritizedSampler`": stays_prioritized,
    "`update_priority` with tensors that are on the device, or one number": learns,
    "`sample` with transforms that leave rows on the device": transformed,
    "`sample` with `prefetch=`": lambda: sampling(buffer(prefetch=2), prioritized(prefetch=2)),
    "`sample` of an ensemble": lambda: sampling(ensemble(), ensemble(prefetch=2)),
    "`sample` with `single_copy`": lambda: sampling(buffer(storage=storage(single_copy=True))),
    "`sample(max_age=)`, while versions never decrease": of_versions,
    "`sample`, `extend` with `rate_limiter=`": limited,
    "`store`, `sample`, `reset` of `compat.isaacgymenvs`": ring,
    "`len`, `repr`, `empty`": plain,
    '`rb[3]`, `rb[2:5]`, `rb["obs"]`': read,
}


def table() -> dict[str, str]:
    """Return the rows of the page's table."""
    section = PAGE.read_text().partition("## On a GPU\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {operation: answer for operation, answer in lines[1:] if operation != "---"}


WAITS: dict[str, Any] = {
    "writes of rows that are elsewhere": lambda rb: rb.extend(rows(device=torch.device("cpu"))),
    "`rb[tensor]`, `rb[list]`, `rb[mask]`": lambda rb: rb[[1, 2]],
    "`rb[...] = rows`, `write_all`": lambda rb: rb.write_all({**rb[:], "more": torch.zeros_like(rb[:]["reward"])}),
    '`sample` with `ToDevice("cpu")`': lambda rb: (rb.append_transform(ostinato.ToDevice("cpu")), rb.sample()),
    "`stats`, `check`, `dumps`, `loads`, priorities in `state_dict` and `default_priority`": ReplayBuffer.stats,
}
"""Some of those that wait."""


def test_the_page_lists_what_waits_and_what_does_not():
    found = table()
    assert {operation for operation, answer in found.items() if answer == "no"} == set(STAYS)
    assert {found[operation] for operation in WAITS} == {"yes"}


@pytest.mark.parametrize("operation", WAITS)
def test_the_host_waits(operation):
    rb = prioritized()
    with waits() as seen:
        WAITS[operation](rb)
    assert seen


@pytest.mark.parametrize("operation", STAYS)
def test_nothing_waits(operation):
    for call in STAYS[operation]():
        with no_wait():
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x[x > 1],
        lambda x: x.cpu(),
        lambda x: torch.arange(3).to(DEVICE),
        lambda x: torch.tensor([1, 2], device=DEVICE),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.unique(x),
        lambda x: x.repeat_interleave(x),
    ],
)
def test_a_wait_is_seen(call):
    with no_wait(), pytest.raises(HostWaitError):
        call(FIVE)
