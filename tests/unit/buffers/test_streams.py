"""Ends of streams: which flags change, what draws see of it, and what is refused before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    SliceSampler,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from ostinato.errors import KindError, OptionError, UsageError

from .refusals import raises

if TYPE_CHECKING:
    from ostinato import Sampler

END = ("next", "done")


def make(rows: int, sampler: Sampler | None = None, capacity: int = 6, **fields: Any) -> TensorDictReplayBuffer:
    sampler = StreamingSliceSampler(slice_len=2, end_key=END) if sampler is None else sampler
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=2)
    for first in range(0, rows, 3):
        rb.extend(steps(first, min(3, rows - first), **fields))
    return rb


def steps(first: int, count: int, **fields: Any) -> TensorDict:
    off = torch.zeros(count, 1, dtype=torch.bool)
    flags = {name: value.expand(count, 1) for name, value in fields.items()}
    following = {"done": off, "terminated": off.clone(), "truncated": off.clone(), **flags}
    return TensorDict({"t": torch.arange(first, first + count), "next": following}, [count])


def newest(rb: TensorDictReplayBuffer) -> list[bool]:
    """Whether the newest row is done, terminated, and truncated."""
    row = rb[(rb.cursor - 1) % len(rb)]["next"]
    return [bool(row[name]) for name in ("done", "terminated", "truncated")]


@pytest.mark.parametrize("rows", [3, 5, 6, 9])
def test_the_newest_row_ends_its_episode(rows):
    first, empty, second = make(rows), make(0), make(4, SliceSampler(slice_len=2))
    before = first[:]["next", "done"].clone()
    written = first._engine.ring.generations(torch.arange(len(first))).tolist()
    ReplayBufferEnsemble(first, empty, second).end_streams()
    assert (first[:]["next", "done"] != before).flatten().nonzero().tolist() == [[(first.cursor - 1) % 6]]
    assert newest(first) == newest(second) == [True, False, True]
    assert first.write_count == rows
    assert first._engine.ring.generations(torch.arange(len(first))).tolist() == written
    windows = [first.sample()["t"].tolist() for _ in range(min(rows, 6) // 2)]
    first.extend(steps(rows, 2))
    assert first.sample()["t"].tolist() == [rows, rows + 1]  # a window of the new stream alone
    assert all(b - a == 1 for a, b in windows)


def test_flags_that_are_set_stay():
    yes = torch.ones(1, 1, dtype=torch.bool)
    ended, cut, kept = make(3, terminated=yes, done=yes), make(3, truncated=yes), make(3)
    ReplayBufferEnsemble(ended, cut).end_streams()
    ReplayBufferEnsemble(kept).end_streams(truncated_key=None)
    found = [newest(rb) for rb in (ended, cut, kept)]
    assert found == [[True, True, False], [True, False, True], [True, False, False]]


def test_one_id_for_all_rows_is_one_stream():
    sampler = SliceSampler(slice_len=2, traj_key="env", end_key=END)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=2)
    rb.extend(steps(0, 3).set("env", torch.full((3,), 7)))
    ReplayBufferEnsemble(rb).end_streams()
    assert newest(rb)[0]
    rb.extend(steps(3, 1).set("env", torch.tensor([8])))
    with pytest.raises(UsageError):
        ReplayBufferEnsemble(rb).end_streams()


def test_what_does_not_fit_raises_before_anything_changes():
    good, number, other = make(3), make(0, SliceSampler(slice_len=2, end_key="stop")), make(3, RandomSampler())
    number.extend(TensorDict({"stop": torch.zeros(3)}, [3]))

    def ended(*members: TensorDictReplayBuffer, **options: Any) -> Any:
        return lambda: ReplayBufferEnsemble(*members).end_streams(**options)

    raises(
        (ended(good, other), UsageError, r"end_streams requires .* member 1 has .*RandomSampler"),
        (ended(good, end_key="stop"), UsageError, "episodes end at end_key='stop'"),
        (ended(good, truncated_key=END), OptionError, "must be distinct"),
        (ended(number, end_key="stop"), KindError, "requires a boolean end_key field"),
    )
    assert not newest(good)[0]
